"""Settings that may hold a secret, and the form in which settings are shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import SecretStr

#: A setting whose name contains one of these may hold a secret.
_SECRET_FRAGMENTS = (
    "password",
    "secret",
    "key.pem",
    "jaas",
    "token",
    "credential",
    "oauthbearer.config",
    "private.key",
    "account.key",
)
#: Replaces a value that may be a secret.
HIDDEN = "(hidden)"
#: In a value: a URL with a password, or a password among other settings. In a key of Spark: the
#: keys that Spark itself hides, and keys of object stores.
_CREDENTIALS = re.compile(r"://[^@\s]*@|passw|secret|token", re.IGNORECASE)
_SPARK_SECRET = re.compile(r"access.?key|account.?key|sas\b|auth|javaoptions", re.IGNORECASE)


def is_secret(key: str) -> bool:
    """Whether a setting of this name may hold a secret, so that it is never shown.

    >>> is_secret("kafka.sasl.password"), is_secret("kafka.sasl.username")
    (True, False)
    """
    return any(fragment in key for fragment in _SECRET_FRAGMENTS)


def hides(key: str) -> bool:
    """Whether one of Ratchet's own keys, including those for ZooKeeper, holds a secret."""
    return "zookeeper.auth" in key or "history.table" in key or is_secret(key)


def shown_value(key: str, value: Any) -> str:
    """The shown form of a setting's value: hidden if it may be a secret."""
    if value is None or value in ((), {}):
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)) and not is_secret(key):
        return f"{value:g}" if isinstance(value, float) else str(value)
    text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    opaque = key.startswith("app.") or isinstance(value, (SecretStr, Mapping))
    if opaque or hides(key) or _CREDENTIALS.search(text) or _SPARK_SECRET.search(key):
        return HIDDEN
    return text


def revealed(value: Any) -> Any:
    """A setting in plain text, as a client needs it."""
    return value.get_secret_value() if isinstance(value, SecretStr) else value
