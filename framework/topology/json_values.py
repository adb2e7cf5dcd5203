"""The plain forms of values: text and numbers that JSON and any store can represent exactly.

Timestamps, dates and times are ISO 8601 text; timestamps with a zone are in UTC. Durations are
integers in their unit. Decimals are text, and have no exponent. In JSON, timestamps follow RFC
3339, bytes are base64, and NaN and the infinities are the texts ``NaN``, ``Infinity`` and
``-Infinity``.
"""

from __future__ import annotations

import base64
import datetime
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pyarrow as pa

Conversion = Callable[[Any], Any]


def plain(value: Any, declared: pa.DataType) -> Any:
    """The plain form of a value."""
    types = pa.types
    if types.is_duration(declared):
        return pa.scalar(value, declared).value
    if types.is_timestamp(declared):
        moment = value.astimezone(datetime.UTC).replace(tzinfo=None) if declared.tz is not None else value
        return moment.isoformat(" ", "microseconds")
    if types.is_time(declared):
        return value.isoformat("microseconds")
    if types.is_date(declared):
        return value.isoformat()
    return format(value, "f") if types.is_decimal(declared) else value


@lru_cache(maxsize=1_000)
def json_encoder(declared: pa.DataType, *, non_finite: bool = True) -> Conversion:
    """The conversion of values that are not null for any JSON writer. It raises ``ValueError`` for
    a value that does not fit the type, and, unless ``non_finite``, for NaN and the infinities.

    >>> json_encoder(pa.list_(pa.struct([("raw", pa.binary())])))([{"raw": b"a"}, None])
    [{'raw': 'YQ=='}, None]
    """
    types = pa.types
    if types.is_struct(declared):
        parts = {each.name: json_encoder(each.type, non_finite=non_finite) for each in declared}
        return lambda value: {
            name: None if value.get(name) is None else encode(value[name]) for name, encode in parts.items()
        }
    if types.is_list(declared) or types.is_large_list(declared):
        item = json_encoder(declared.value_type, non_finite=non_finite)
        return lambda value: [None if each is None else item(each) for each in value]
    if types.is_boolean(declared):
        return bool
    if types.is_integer(declared):
        least, most = integer_bounds(declared)

        def within(value: Any) -> Any:
            if not least <= value <= most:
                raise ValueError(f"{value} is beyond {declared}")
            return value

        return within
    if types.is_floating(declared):
        return _float_or_name if non_finite else _finite
    if types.is_string(declared) or types.is_large_string(declared):
        return _text
    if types.is_binary(declared) or types.is_large_binary(declared) or types.is_fixed_size_binary(declared):
        return lambda value: base64.b64encode(value).decode()
    if types.is_timestamp(declared):
        zone = "Z" if declared.tz is not None else ""
        return lambda value: plain(value, declared).replace(" ", "T") + zone
    return lambda value: plain(value, declared)


def integer_bounds(declared: pa.DataType) -> tuple[int, int]:
    """The least and the greatest integer of a type."""
    bits = declared.bit_width
    return (0, 2**bits - 1) if pa.types.is_unsigned_integer(declared) else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value


def _float_or_name(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
    return value
