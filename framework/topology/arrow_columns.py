"""Columns of the values that components emit: each value is stored exactly, or is an error.

Arrow alone truncates values that do not fit: 1.5 becomes the integer 1, a moment becomes its date,
and a large number becomes infinity in a 32-bit float. It also accepts values of several kinds in
one untyped column, so that a value would depend on the others in its batch.

For a decimal or a longer float, a float column stores the nearest number.
"""

from __future__ import annotations

import datetime
import decimal
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from framework.topology.exact_decimals import checked_decimals, entries, is_list, is_text, with_decimals

Check = Callable[[Any], bool]
_NONE = type(None)
#: The texts that Arrow and polars read as an infinite number.
_INFINITE = r"^\s*[+-]?inf(inity)?\s*$"
_MICROSECONDS = {"s": 10**6, "ms": 1_000}
#: Types of values that Arrow stores exactly, or refuses.
_EXACT: dict[str, frozenset[type]] = {
    "integer": frozenset({int, _NONE}),
    "date": frozenset({datetime.date, _NONE}),
    "us": frozenset({datetime.datetime, datetime.timedelta, _NONE}),
}


def column_of(values: Sequence[Any], declared: pa.DataType | None) -> pa.Array | pa.ChunkedArray:
    """The values as a column of a declared type, or of their common type. It is chunked if they are
    too wide for the offsets of one array. Raises an Arrow error, ``TypeError``, ``ValueError`` or
    ``OverflowError`` if a value does not fit.

    >>> column_of([1, 2.0], pa.int64()).to_pylist()
    [1, 2]
    >>> column_of([1, 2.5], pa.int64())
    Traceback (most recent call last):
    ...
    ValueError: 2.5 is not exactly a value of int64
    """
    if declared is not None:
        values = checked_decimals(values, declared)
    made = pa.array(values, type=declared)
    if declared is None:
        _check_kinds(values)
    if _may_cut(made.type):
        _check(values, made, made.type)
    return made


def cast_column(column: pa.Array, declared: pa.DataType) -> pa.Array:
    """The column in a declared type. Raises an Arrow error or ``ValueError`` if a value does not
    fit."""
    made = with_decimals(column, declared).cast(declared)
    check_cast(column, made, exact=True)
    return made


def check_cast(before: pa.Array, after: pa.Array, *, exact: bool) -> None:
    """Raise ``ValueError`` if a cast has made a number infinite, or, if it was to be ``exact``, has
    cut off a value, at any depth."""
    types, was, becomes = pa.types, before.type, after.type
    if was == becomes:
        return
    if types.is_dictionary(was) or types.is_dictionary(becomes):
        check_cast(*(each.dictionary_decode() if _is_encoded(each) else each for each in (before, after)), exact=exact)
    elif is_list(was) and is_list(becomes):
        check_cast(before.flatten(), after.flatten(), exact=exact)
    elif types.is_map(was) and types.is_map(becomes):
        check_cast(entries(before), entries(after), exact=exact)
    elif types.is_struct(was) and types.is_struct(becomes):
        parts = dict(zip(was.names, before.flatten(), strict=True))
        for name, part in zip(becomes.names, after.flatten(), strict=True):
            if name in parts:
                check_cast(parts[name], part, exact=exact)
    elif types.is_floating(becomes):
        if _infinities(after) > _infinities(before):
            raise ValueError(f"a number is beyond {becomes}")
    elif exact and _casts_cut(was, becomes) and not after.cast(was).equals(before):
        raise ValueError("a value would be cut off; round it first")


def _is_encoded(column: pa.Array) -> bool:
    return bool(pa.types.is_dictionary(column.type))


def _casts_cut(was: pa.DataType, becomes: pa.DataType) -> bool:
    """Whether a safe cast of Arrow's truncates values. It is reversible for whole values."""
    types = pa.types
    if types.is_timestamp(was):
        if types.is_time(becomes):
            raise ValueError("a moment would lose its date; take its time of day first")
        return bool(types.is_date(becomes))
    if types.is_floating(was) and types.is_decimal(becomes):
        return True
    return bool(types.is_boolean(becomes) and (types.is_integer(was) or types.is_floating(was)))


def _infinities(column: pa.Array) -> int:
    """The number of infinite numbers, or of texts of such."""
    if is_text(column.type):
        infinite = pc.match_substring_regex(column.cast(pa.large_binary()), _INFINITE, ignore_case=True)
    elif pa.types.is_floating(column.type):
        infinite = pc.is_inf(column.cast(pa.float32()) if pa.types.is_float16(column.type) else column)
    else:
        return 0
    found: int = pc.sum(infinite, min_count=0).as_py()
    return found


@lru_cache(maxsize=1024)
def _may_cut(declared: pa.DataType) -> bool:
    """Whether Arrow can truncate Python values of a type, or values inside them."""
    types = pa.types
    if types.is_dictionary(declared):
        return _may_cut(declared.value_type)
    if types.is_nested(declared):
        return any(_may_cut(declared.field(number).type) for number in range(declared.num_fields))
    return bool(
        types.is_integer(declared)
        or types.is_temporal(declared)
        or types.is_float32(declared)
        or types.is_float16(declared)
    )


def _check(values: Sequence[Any], made: pa.Array | pa.ChunkedArray | None, declared: pa.DataType) -> None:
    """Raise ``ValueError`` for a value that the type does not hold exactly. ``made``: the column of
    the values, if there is one."""
    types = pa.types
    if types.is_dictionary(declared):
        _check(values, None, declared.value_type)
        return
    if types.is_nested(declared):
        _check_nested(values, declared)
        return
    if types.is_float32(declared) or types.is_float16(declared):
        column = made if made is not None else pa.array(values, declared)
        if any(map(_infinities, column.chunks if isinstance(column, pa.ChunkedArray) else [column])):
            found = zip(values, column.to_pylist(), strict=True)
            infinite = [one for one, other in found if other is not None and math.isinf(other)]
            _refuse_first(infinite, math.isinf, declared)
        return
    known, check = _rule(declared)
    if known is None or not known.issuperset(map(type, values)):
        _refuse_first(values, check, declared)


def _check_nested(values: Sequence[Any], declared: pa.DataType) -> None:
    present = [each for each in values if each is not None]
    if pa.types.is_struct(declared):
        mappings = [_mapping(each, declared) for each in present]
        for field in declared:
            if _may_cut(field.type):
                _check([each.get(field.name) for each in mappings], None, field.type)
    elif pa.types.is_map(declared):
        pairs = [pair for each in present for pair in (each.items() if isinstance(each, Mapping) else each)]
        for place, kind in enumerate((declared.key_type, declared.item_type)):
            if _may_cut(kind):
                _check([pair[place] for pair in pairs], None, kind)
    elif declared.num_fields == 1:
        _check([item for each in present for item in each], None, declared.field(0).type)


def _mapping(value: Any, declared: pa.StructType) -> Mapping[str, Any]:
    """A struct's value as a mapping; it may be given as pairs, or as values in order."""
    if isinstance(value, Mapping):
        return value
    is_pairs = bool(value) and all(isinstance(each, tuple) for each in value)
    return dict(value if is_pairs else zip((each.name for each in declared), value, strict=False))


def _refuse_first(values: Sequence[Any], check: Check, declared: pa.DataType) -> None:
    for value in values:
        if value is not None and not check(value):
            raise ValueError(f"{value!r} is not exactly a value of {declared}")


@lru_cache(maxsize=1024)
def _rule(declared: pa.DataType) -> tuple[frozenset[type] | None, Check]:
    """The types whose values are all exact, and the check of any other value."""
    types = pa.types
    if types.is_integer(declared):
        return _EXACT["integer"], lambda value: bool(int(value) == value)
    if types.is_date(declared):
        return _EXACT["date"], lambda value: not isinstance(value, datetime.datetime)
    if types.is_interval(declared):
        return None, lambda _: True
    whole = _MICROSECONDS.get(declared.unit, 1)
    finest = declared.unit == "ns"

    def is_whole(value: Any) -> bool:
        if isinstance(value, (float, decimal.Decimal)):
            return False
        if isinstance(value, datetime.time) and value.tzinfo is not None:
            return False
        micros: int = getattr(value, "microsecond", 0) or getattr(value, "microseconds", 0)
        # pandas has them
        nanos: int = getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0)
        return not micros % whole and (finest or not nanos)

    return (_EXACT["us"] if whole == 1 and not types.is_time(declared) else None), is_whole


def _check_kinds(values: Sequence[Any]) -> None:
    """Raise ``ValueError`` for values of several kinds. All numbers are one kind, except bool."""
    types = set(map(type, values)) - {_NONE}
    if any(issubclass(each, datetime.datetime) for each in types):
        kinds = {_kind_of_moment(each) for each in values if each is not None}
    elif len(types) < 2:
        return
    else:
        kinds = {_kind(each) for each in types}
    if len(kinds) > 1:
        raise ValueError(f"values of several kinds ({', '.join(sorted(kinds))}); declare a type, or emit one kind")


def _kind_of_moment(value: Any) -> str:
    if not isinstance(value, datetime.datetime):
        return _kind(type(value))
    return "datetime without a zone" if value.tzinfo is None else "datetime with a zone"


def _kind(type_: type) -> str:
    if type_.__name__ in ("bool", "bool_"):  # includes numpy's
        return "bool"
    if issubclass(type_, (numbers.Number, decimal.Decimal)):
        return "number"
    for kind, types in _KINDS.items():
        if issubclass(type_, types):
            return kind
    return type_.__name__


_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "bytes": (bytes, bytearray, memoryview),
    "list": (list, tuple, set, frozenset),
    "dict": (dict,),
}
