"""Conversions between Avro's logical types.

Two logical types that differ resolve if each value of the one is exactly one of the other: times,
timestamps and local timestamps of another unit, and decimals of another precision. A single value
that the reader's type cannot hold is a bad value. No other pair has a conversion: a moment is not a
time of day, and a decimal of another scale is another number (Avro 1.12, schema resolution).

A type without a logical type is a plain number to both sides.
"""

from __future__ import annotations

import decimal
from collections.abc import Callable
from typing import Any

from spouts.codecs.avro_schema import AvroType, Logical

Convert = Callable[[Any], Any]
#: Units of a second.
_UNITS = {"millis": 10**3, "micros": 10**6, "nanos": 10**9}
_SECONDS_PER_DAY = 86_400
_LONG_LEAST, _LONG_MOST = -(2**63), 2**63 - 1
#: Exact for the 76 digits that Arrow holds.
_DECIMALS = decimal.Context(prec=100)


class NoConversionError(Exception):
    """A writer's type that does not resolve to the reader's."""


def conversion(writer: AvroType, reader: AvroType) -> Convert | None:
    """What to do with a value of ``writer``, as read, so that it is one of ``reader``; None:
    nothing. Raises ``NoConversionError``."""
    was, becomes = writer.logical, reader.logical
    if becomes is None and (was is None or was.name != "decimal" or writer.kind == reader.kind):
        return None
    if becomes is None or becomes.name == "decimal":
        if becomes is None or writer.kind != reader.kind or (was is not None and was.scale != becomes.scale):
            raise NoConversionError(f"written as {writer}, which is not read as {becomes or reader.kind}")
        return _decimal(becomes)
    scaled = None
    if was is not None and was != becomes:
        if _family(was) != _family(becomes) or _family(was) == "date":
            raise NoConversionError(f"written as {was}, which is not read as {becomes}")
        scaled = _scaled(_per_second(was), _per_second(becomes), str(was), str(becomes))
    return _time_of_day(scaled, becomes) if _family(becomes) == "time" else scaled


def value_of(reader: AvroType, plain: Any) -> Any:
    """The value of a type, given as a plain number or as bytes."""
    convert = conversion(AvroType(reader.kind), reader)
    return plain if convert is None else convert(plain)


def _family(logical: Logical) -> str:
    return logical.name.rpartition("-")[0] or logical.name


def _per_second(logical: Logical) -> int:
    return _UNITS[logical.name.rpartition("-")[2]]


def _scaled(was: int, becomes: int, name: str, wanted: str) -> Convert:
    def finer(value: int) -> int:
        found = value * (becomes // was)
        if not _LONG_LEAST <= found <= _LONG_MOST:
            raise ValueError(f"{value} of {name} is too large for {wanted}")
        return found

    def coarser(value: int) -> int:
        found, rest = divmod(value, was // becomes)
        if rest:
            raise ValueError(f"{value} of {name} is not exactly a value of {wanted}")
        return found

    return finer if becomes > was else coarser


def _time_of_day(scaled: Convert | None, logical: Logical) -> Convert:
    end = _SECONDS_PER_DAY * _per_second(logical)

    def checked(value: int) -> int:
        found: int = value if scaled is None else scaled(value)
        if not 0 <= found < end:
            raise ValueError(f"{found} of {logical} is not a time of day")
        return found

    return checked


def _decimal(logical: Logical) -> Convert:
    limit = 10**logical.precision
    size_max = limit.bit_length() // 8 + 1

    def number(value: bytes) -> decimal.Decimal:
        if not value:
            raise ValueError("a decimal of no bytes")
        # Leading bytes of the sign alone are allowed, and fixed types have them.
        unscaled = (
            int.from_bytes(value, "big", signed=True) if len(value) <= size_max else _long_number(value, size_max)
        )
        if not -limit < unscaled < limit:
            raise ValueError(f"a decimal of more digits than {logical}")
        return decimal.Decimal(unscaled).scaleb(-logical.scale, _DECIMALS)

    return number


def _long_number(value: bytes, size: int) -> int:
    sign, number = value[:-size], value[-size:]
    filling = b"\xff" if number[0] & 0x80 else b"\x00"
    if sign.strip(filling):
        raise ValueError(f"a decimal of {len(value):,} bytes")
    return int.from_bytes(number, "big", signed=True)
