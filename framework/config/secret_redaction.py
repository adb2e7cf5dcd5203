"""Settings that may hold a secret, and the form in which settings are shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import SecretStr

#: A setting with such a name may hold a secret, however the name is written: ``PGPASSWORD``,
#: ``keyPassword``, ``STRIPE_API_KEY``.
_SECRET = re.compile(
    r"passw|passphrase|(^|[._])pass$|secret|jaas|token|credential|oauthbearer\.(config|extensions)|kinit\.cmd|user\.info|key\.pem|"
    r"(private|account|access|api|encryption|signing|shared)[._-]?key",
    re.IGNORECASE,
)
#: Replaces a value that may be a secret.
HIDDEN = "(hidden)"
#: In a value: a URL with a password or with a query, or a password among other settings. In
#: a key of Spark: the keys that Spark itself hides, and keys of object stores.
_CREDENTIALS = re.compile(r":[^@\s]*@|://[^\s?]*\?|passw|secret|token", re.IGNORECASE)
_SPARK_SECRET = re.compile(r"sas\b|env\.|key$", re.IGNORECASE)
_SPARK_HIDDEN = re.compile(r"auth|javaoptions", re.IGNORECASE)
#: For Spark itself: its event logs and pages hide a setting whose key or value matches. A regular
#: expression of Java. Spark's own default knows neither keys of object stores nor URLs.
SPARK_REDACTION = f"(?i){_SECRET.pattern}|{_SPARK_SECRET.pattern}|{_CREDENTIALS.pattern}"
#: The table whose keys are those of the provider of a state.
PROVIDER_CONFIG = "topology.state.provider.config"


def is_secret(key: str) -> bool:
    """Whether a setting of this name may hold a secret, so that it is never shown.

    >>> is_secret("kafka.sasl.password"), is_secret("kafka.sasl.username")
    (True, False)
    """
    return _SECRET.search(key) is not None


def is_spark_secret(key: str) -> bool:
    """Whether a setting of Spark may hold a secret. The variables of a process often do.

    >>> is_spark_secret("spark.executorEnv.DB_PASS"), is_spark_secret("spark.executor.memory")
    (True, False)
    """
    return is_secret(key) or _SPARK_SECRET.search(key) is not None


def hides(key: str) -> bool:
    """Whether one of Ratchet's own keys, including those for ZooKeeper and addresses, may hold a
    secret."""
    return "zookeeper.auth" in key or "history.table" in key or key.endswith(".url") or is_secret(key)


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
    if opaque or hides(key) or _CREDENTIALS.search(text):
        return HIDDEN
    return HIDDEN if key.startswith("spark.") and (is_spark_secret(key) or _SPARK_HIDDEN.search(key)) else text


def shown_mistake(key: str, value: Any) -> str:
    """The end of a message about a refused setting, with its value; empty if the value may contain
    a secret."""
    text = repr(value)
    hidden = hides(key) or key.startswith(PROVIDER_CONFIG) or isinstance(value, Mapping) or _CREDENTIALS.search(text)
    return "" if hidden else f", not {text}"


def revealed(value: Any) -> Any:
    """A setting in plain text, as a client needs it."""
    return value.get_secret_value() if isinstance(value, SecretStr) else value
