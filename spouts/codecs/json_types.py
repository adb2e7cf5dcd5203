"""How values of each Arrow type are written in JSON, and read from it.

=====================  =============================================================================
numbers, text, bool    as JSON has them; with ``non_finite`` of a float also ``"NaN"``,
                       ``"Infinity"``, ``"-Infinity"``
decimal                a number or text, such as ``12.50`` or ``"12.50"``
timestamp, date, time  text of ISO 8601 or RFC 3339 (``spouts.codecs.iso8601``)
duration               an integer, in the unit of the type
binary                 text of base64, in the standard alphabet or that for URLs, padded or not
struct, list           objects and arrays of these
=====================  =============================================================================

Two steps: Arrow's reader, or the compiled one, reads the types that JSON has (``in_json``). Then
``Conversion`` converts these columns to the declared types, and finds the rows with a value of
another type.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spouts.codecs.iso8601 import dates, moments, times_of_day
from spouts.codecs.json_reasons import shortened

Truths = np.ndarray[Any, np.dtype[np.bool_]]


def in_json(declared: pa.DataType) -> pa.DataType:
    """The type as which Arrow's reader reads values of a declared type."""
    types = pa.types
    if types.is_timestamp(declared) or types.is_date(declared) or types.is_time(declared):
        return pa.string()
    if types.is_duration(declared):
        return pa.int64()
    if types.is_large_binary(declared):
        return pa.large_string()
    if types.is_binary(declared) or types.is_fixed_size_binary(declared):
        return pa.string()
    if types.is_float16(declared):
        return pa.float32()
    if types.is_struct(declared):
        return pa.struct([_field_in_json(each) for each in declared])
    if types.is_list(declared):
        return pa.list_(_field_in_json(declared.value_field))
    return declared


def _field_in_json(field: pa.Field) -> pa.Field:
    return pa.field(field.name, in_json(field.type), nullable=field.nullable)


class Conversion:
    """Makes a column of a declared type of a column as Arrow's reader read it."""

    def __init__(self, name: str, declared: pa.DataType) -> None:
        self._name = name
        self._declared = declared
        self.is_needed = in_json(declared) != declared

    def __call__(self, column: pa.Array) -> tuple[pa.Array, Truths | None]:
        """The column, and for each row whether a value there is none of the type; None if there is
        no such row."""
        return _converted(column, self._declared) if self.is_needed else (column, None)

    def reason(self, value: Any) -> str:
        """Why a row has a value that is none of the type. ``value``: as Arrow's reader read it."""
        return f"{self._name}: {shortened(repr(value))} is no {_wanted(self._declared)}"


def _converted(column: pa.Array, declared: pa.DataType) -> tuple[pa.Array, Truths | None]:
    types = pa.types
    if in_json(declared) == declared:
        return column, None
    if types.is_struct(declared):
        made = [_converted(part, each.type) for part, each in zip(column.flatten(), declared, strict=True)]
        bad = [each for _, each in made if each is not None]
        whole = pa.StructArray.from_arrays([part for part, _ in made], fields=list(declared), mask=column.is_null())
        return whole, np.logical_or.reduce(bad) if bad else None
    if types.is_list(declared):
        return _converted_lists(column, declared)
    found = _LEAVES[_kind(declared)](column, declared)
    if found.null_count == column.null_count:
        return found, None
    bad_values: Truths = pc.and_not(found.is_null(), column.is_null()).to_numpy(zero_copy_only=False)
    return found, bad_values


def _converted_lists(column: pa.ListArray, declared: pa.ListType) -> tuple[pa.Array, Truths | None]:
    items, bad_items = _converted(column.flatten(), declared.value_type)
    ends = pc.cumulative_sum(pc.fill_null(pc.list_value_length(column), 0)).cast(pa.int32())
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends])
    mask = column.is_null() if column.null_count else None
    whole = pa.ListArray.from_arrays(offsets, items, type=declared, mask=mask)
    if bad_items is None:
        return whole, None
    bad = np.zeros(len(column), np.bool_)
    bad[pc.list_parent_indices(column).to_numpy()[bad_items]] = True
    return whole, bad


def _durations(column: pa.Array, declared: pa.DataType) -> pa.Array:
    return column.view(declared)


def _halves(column: pa.Array, declared: pa.DataType) -> pa.Array:
    """Floats of 16 bits; null for a number beyond them."""
    found = column.cast(declared)
    fits = pc.equal(pc.is_inf(found.cast(pa.float32())), pc.is_inf(column))
    return pc.if_else(fits, found, pa.scalar(None, declared))


def _bytes(column: pa.Array, declared: pa.DataType) -> pa.Array:
    found = [None if text is None else _from_base64(text) for text in column.to_pylist()]
    if pa.types.is_fixed_size_binary(declared):
        width = declared.byte_width
        found = [value if value is not None and len(value) == width else None for value in found]
    return pa.array(found, declared)


def _from_base64(text: str) -> bytes | None:
    """The bytes; None if the text is not base64."""
    try:
        padded = text.translate(_STANDARD).rstrip("=").encode("ascii")
        if len(text) - len(padded) > 2:
            return None
        return binascii.a2b_base64(padded + b"=" * (-len(padded) % 4), strict_mode=True)
    except ValueError:
        return None


_STANDARD = str.maketrans("-_", "+/")

_LEAVES: dict[str, Callable[[pa.Array, Any], pa.Array]] = {
    "timestamp": moments,
    "date": dates,
    "time of day": times_of_day,
    "duration": _durations,
    "halffloat": _halves,
    "binary": _bytes,
}
_WANTED = {
    "timestamp": "date and time of ISO 8601 between the years 1 and 9999",
    "date": "date of ISO 8601 between the years 1 and 9999",
    "time of day": "time of day of ISO 8601 between 00:00 and 23:59:59.999999999",
    "halffloat": "number that a float of 16 bits holds",
    "binary": "text of base64",
}


def _kind(declared: pa.DataType) -> str:
    types = pa.types
    if types.is_timestamp(declared):
        return "timestamp"
    if types.is_date(declared):
        return "date"
    if types.is_time(declared):
        return "time of day"
    return "duration" if types.is_duration(declared) else "halffloat" if types.is_float16(declared) else "binary"


def _wanted(declared: pa.DataType) -> str:
    if pa.types.is_nested(declared):
        return str(declared)
    if pa.types.is_timestamp(declared) and declared.unit == "ns":
        return "date and time of ISO 8601 between the years 1678 and 2261"
    wanted = _WANTED[_kind(declared)]
    return f"{wanted}, of {declared.byte_width} bytes" if pa.types.is_fixed_size_binary(declared) else wanted
