"""The hash behind fields groupings. The same values go to the same task in every batch, attempt,
process and release.

The algorithm is named ``fields-hash/1`` and recorded in the state of a topology. Golden values in
the tests fix it.

A column's hash is xxh3_64 over canonical bytes of the value; the hashes of several columns are
mixed in order. Values that compare equal in Python hash alike whatever their Arrow type: ``1``,
``1.0`` and ``Decimal("1.00")``, ``0.0`` and ``-0.0``, an instant in two time zones. All NaN are one
value. Null is a value of its own. A dictionary-encoded column hashes as its values.
"""

from __future__ import annotations

import datetime
import decimal
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from framework.topology.canonical_form import python_objects

ALGORITHM = "fields-hash/1"
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
#: Part of fields-hash/1. Not the thread's own context, because a bolt may change that.
_CONTEXT = decimal.Context(prec=28, rounding=decimal.ROUND_HALF_EVEN)


def hash_rows(columns: Sequence[pa.Array]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """One unsigned 64-bit hash per row."""
    if not columns:
        raise ValueError("a fields grouping needs at least one field")
    hashes = _hash_column(columns[0])
    with np.errstate(over="ignore"):
        for column in columns[1:]:
            hashes = (hashes * _MULTIPLIER) ^ _hash_column(column)
            hashes ^= hashes >> np.uint64(29)
    return hashes


def hash_values(values: Sequence[Any]) -> int:
    """The hash that ``hash_rows`` returns for a row of these values.

    >>> hash_values(["the", 3]) == int(hash_rows([pa.array(["the"]), pa.array([3])])[0])
    True
    """
    first, *others = (hash_value(value) for value in values)
    mask = (1 << 64) - 1
    for each in others:
        first = (first * int(_MULTIPLIER) & mask) ^ each
        first ^= first >> 29
    return first


def _hash_column(column: pa.Array) -> np.ndarray[Any, np.dtype[np.uint64]]:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_nested(column.type):
        return np.fromiter((hash_value(value) for value in python_objects(column)), dtype=np.uint64, count=len(column))
    encoded = pc.dictionary_encode(column, null_encoding="encode")
    distinct = np.fromiter(
        (hash_value(value) for value in _python_values(encoded.dictionary)),
        dtype=np.uint64,
        count=len(encoded.dictionary),
    )
    hashes: np.ndarray[Any, np.dtype[np.uint64]] = distinct[encoded.indices.to_numpy(zero_copy_only=False)]
    return hashes


def _python_values(values: pa.Array) -> list[Any]:
    if pa.types.is_timestamp(values.type):
        nanoseconds = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}[values.type.unit]
        zoned = values.type.tz is not None
        counts = values.cast(pa.int64()).to_pylist()
        return [None if count is None else _Instant(count * nanoseconds, zoned) for count in counts]
    if pa.types.is_duration(values.type):
        nanoseconds = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}[values.type.unit]
        counts = values.cast(pa.int64()).to_pylist()
        return [None if count is None else _Span(count * nanoseconds) for count in counts]
    if values.type == pa.time64("ns"):  # Python's own times are limited to microseconds
        values = values.cast(pa.time64("us"), safe=False)
    return python_objects(values)


class _Span:
    """A duration at full precision."""

    __slots__ = ("nanoseconds",)

    def __init__(self, nanoseconds: int) -> None:
        self.nanoseconds = nanoseconds


class _Instant:
    """A timestamp at full precision. Python's own are limited to microseconds."""

    __slots__ = ("nanoseconds", "zoned")

    def __init__(self, nanoseconds: int, zoned: bool) -> None:
        self.nanoseconds = nanoseconds
        self.zoned = zoned


def hash_value(value: Any) -> int:
    """The hash of one Python value, equal to its hash in a column by ``hash_rows``."""
    return xxhash.xxh3_64_intdigest(_canonical(value))


def _canonical(value: Any) -> bytes:
    if type(value) is str:
        return b"s" + value.encode("utf-8", "surrogatepass")
    if value is None:
        return b"0"
    if isinstance(value, bool):
        return b"b1" if value else b"b0"
    if isinstance(value, int):
        return b"i%d" % value
    if isinstance(value, float):
        return _canonical_float(value)
    if isinstance(value, bytes):
        return b"y" + value
    if isinstance(value, _Instant):
        return b"%s%d" % (b"z" if value.zoned else b"t", value.nanoseconds)
    if isinstance(value, _Span):
        return b"u%d" % value.nanoseconds
    if isinstance(value, decimal.Decimal):
        if not value.is_finite():
            return _canonical_float(math.nan if value.is_nan() else float(value))
        if value == value.to_integral_value():
            return b"i%d" % int(value)
        as_float = float(value)
        return (
            _canonical_float(as_float)
            if decimal.Decimal(as_float) == value
            else b"d%s" % str(value.normalize(_CONTEXT)).encode()
        )
    if isinstance(value, datetime.datetime):
        zoned = value.tzinfo is not None
        since = (value if zoned else value.replace(tzinfo=datetime.UTC)) - _EPOCH
        return _canonical(_Instant(_nanoseconds(since), zoned))
    if isinstance(value, datetime.date):
        return b"D%d" % value.toordinal()
    if isinstance(value, datetime.timedelta):
        return b"u%d" % _nanoseconds(value)
    if isinstance(value, datetime.time):
        return b"T" + value.isoformat("microseconds").encode()
    if isinstance(value, Mapping):
        return b"m" + b"".join(_framed(_canonical(key)) + _framed(_canonical(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return b"l" + b"".join(_framed(_canonical(item)) for item in value)
    raise TypeError(f"a fields grouping cannot hash a value of type {type(value).__name__}")


def _canonical_float(value: float) -> bytes:
    if math.isnan(value):
        return b"fnan"
    if value.is_integer():
        return b"i%d" % int(value)
    return b"f" + struct.pack(">d", value)


def _framed(encoded: bytes) -> bytes:
    return struct.pack(">I", len(encoded)) + encoded


def _nanoseconds(delta: datetime.timedelta) -> int:
    return ((delta.days * 86_400 + delta.seconds) * 10**6 + delta.microseconds) * 1000
