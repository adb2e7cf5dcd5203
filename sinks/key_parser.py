"""Keys as people write them."""

from __future__ import annotations

import datetime
import json
from contextlib import suppress
from typing import Any

import pyarrow as pa

from framework.errors import ConfigError
from framework.topology import Fields


def key_values(text: str, fields: Fields, location: str) -> tuple[Any, ...]:
    """The values of a key, of the fields' types: the text of it, or a JSON array where a key has
    several columns. Raises ``ConfigError``, which says what is wrong."""
    values: Any = [text]
    if len(fields) > 1:
        with suppress(ValueError):
            values = json.loads(text, parse_float=str, parse_int=str)
    if not isinstance(values, list) or len(values) != len(fields):
        names = ", ".join(fields)
        raise ConfigError(f"{text!r} is no key of {location}: write a JSON array of its columns ({names})")
    if None in values:
        raise ConfigError(f"{text!r} is no key of {location}: none of its columns can be null")
    return tuple(
        _value(name, fields.type_of(name), value, location) for name, value in zip(fields, values, strict=True)
    )


def _value(name: str, kind: pa.DataType | None, value: Any, location: str) -> Any:
    written = value if isinstance(value, str) else json.dumps(value)
    try:
        return _parsed(written, kind) if kind is not None else value
    except (pa.ArrowException, ValueError) as error:
        raise ConfigError(f"{written!r} cannot be read as {kind}, which column {name!r} of {location} holds") from error


def _parsed(written: str, kind: pa.DataType) -> Any:
    """A duration is a number of its unit, and a moment without an offset is in UTC."""
    if pa.types.is_time(kind):
        return datetime.time.fromisoformat(written)
    if pa.types.is_duration(kind):
        return pa.scalar(int(written), kind).as_py()
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        with suppress(pa.ArrowInvalid):
            return pa.array([written]).cast(pa.timestamp(kind.unit)).cast(kind)[0].as_py()
    return pa.array([written]).cast(kind)[0].as_py()
