"""The moments, dates and times of day that Python can represent: Arrow's columns have a larger
range and finer units."""

from __future__ import annotations

from functools import lru_cache

import pyarrow as pa
import pyarrow.compute as pc

from framework.topology.nested_value_search import Truths, values_with

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_DAY_S = 86_400
#: The first and the last second of the years 1 to 9999, since 1970.
_FIRST_S, _LAST_S = -62_135_596_800, 253_402_300_799


def outside_python(column: pa.Array) -> Truths | None:
    """For each value of a column, nested ones too: whether Python's ``datetime``, ``date`` or
    ``time`` cannot represent it. None if they can represent all."""
    return values_with(_outside, column)


def _outside(column: pa.Array) -> Truths | None:
    bounds = _bounds(column.type)
    if bounds is None:
        return None
    counted = column.view(pa.int32() if column.type.bit_width == 32 else pa.int64())
    first, last = bounds
    extremes = pc.min_max(counted)
    least, most = extremes["min"].as_py(), extremes["max"].as_py()
    zoned = pa.types.is_timestamp(column.type) and column.type.tz not in (None, "UTC")
    margin = 2 * _DAY_S * _PER_SECOND[column.type.unit] if zoned else 0
    if least is None or (least >= first + margin and most <= last - margin):
        return None
    values = counted.fill_null(0).to_numpy()
    outside: Truths = (values < first) | (values > last)
    if zoned:
        inside = pc.if_else(pa.array(outside), pa.scalar(None, column.type), column)
        local = pc.local_timestamp(inside).view(pa.int64()).fill_null(0).to_numpy()
        outside |= (local < first) | (local > last)
    return outside if outside.any() else None


@lru_cache(maxsize=1024)
def holds_times(declared: pa.DataType) -> bool:
    """Whether values of a type, or values inside them, are moments, dates or times of day."""
    if pa.types.is_nested(declared):
        return any(holds_times(declared.field(number).type) for number in range(declared.num_fields))
    return _bounds(declared) is not None


@lru_cache(maxsize=1024)
def in_microseconds(declared: pa.DataType) -> pa.DataType:
    """A type with microseconds in place of nanoseconds, at any depth, because Python's times are
    limited to microseconds. A safe cast refuses finer values."""
    types = pa.types
    if types.is_struct(declared):
        return pa.struct([each.with_type(in_microseconds(each.type)) for each in declared])
    if types.is_map(declared):
        return pa.map_(in_microseconds(declared.key_type), in_microseconds(declared.item_type))
    if types.is_list(declared) or types.is_large_list(declared):
        item = declared.value_field.with_type(in_microseconds(declared.value_type))
        return pa.list_(item) if types.is_list(declared) else pa.large_list(item)
    if types.is_timestamp(declared) and declared.unit == "ns":
        return pa.timestamp("us", declared.tz)
    if types.is_duration(declared) and declared.unit == "ns":
        return pa.duration("us")
    return pa.time64("us") if declared == pa.time64("ns") else declared


def _bounds(declared: pa.DataType) -> tuple[int, int] | None:
    """The first and the last value of a type that Python represents, in Arrow's numbers; None for a
    type without limits."""
    if pa.types.is_date32(declared):
        return _FIRST_S // _DAY_S, _LAST_S // _DAY_S
    if pa.types.is_date64(declared):
        return _FIRST_S * 1000, _LAST_S * 1000
    if pa.types.is_timestamp(declared) or pa.types.is_time(declared):
        size = _PER_SECOND[declared.unit]
        if pa.types.is_time(declared):
            return 0, _DAY_S * size - 1
        first, last = _FIRST_S * size, (_LAST_S + 1) * size - 1
        return max(first, -(2**63)), min(last, 2**63 - 1)
    return None
