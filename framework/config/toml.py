"""TOML files and values as dotted keys."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from framework.errors import ConfigError
from framework.local_paths import local_path


def read_file(path: str | Path) -> dict[str, Any]:
    """The dotted keys of a TOML file. Raises ``ConfigError``."""
    try:
        return flatten(tomllib.loads(local_path(path, "configuration file").read_text(encoding="utf-8-sig")))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None


def read_override(text: str) -> tuple[str, Any]:
    """The key and the value of ``KEY=VALUE``. Raises ``ConfigError``."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {text!r}: write KEY=VALUE")
    return key.strip(), _toml_value(value.strip())


def flatten(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested TOML tables as dotted keys.

    >>> flatten({"topology": {"max.spout.pending": 4}})
    {'topology.max.spout.pending': 4}
    """
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        found = flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
        for each in found.keys() & flat.keys():
            raise ConfigError(f"{each} is given twice, as a dotted key and in a table: leave one of them out")
        flat.update(found)
    return flat


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
