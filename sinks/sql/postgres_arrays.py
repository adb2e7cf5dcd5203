"""Texts of PostgreSQL arrays, which carry the rows of a statement, one array per column."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

#: Types whose texts need no quotes in an array.
_BARE = frozenset({int, bool, float, type(None)})
#: The characters that are escaped in an array.
_SPECIAL = re.compile(r'["\\]')


def array_of(values: Iterable[Any]) -> str:
    """The text of an array."""
    values = list(values)
    kinds = set(map(type, values))
    if kinds == {str} and not _SPECIAL.search("".join(values)):
        return '{"' + '","'.join(values) + '"}'
    text = str if _BARE.issuperset(kinds) else _element
    return f"{{{','.join(['NULL' if value is None else text(value) for value in values])}}}"


def _element(value: Any) -> str:
    """A value as an element of the text of an array."""
    if isinstance(value, bytes):
        text = f"\\x{value.hex()}"
    else:
        text = value.isoformat() if hasattr(value, "isoformat") else str(value)
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _texted(kind: pa.DataType) -> pa.DataType:
    """The type whose text form PostgreSQL reads as the same values. A zone's offset in hours and
    minutes would lose the seconds that it has in early years."""
    if pa.types.is_duration(kind):
        return pa.int64()
    if pa.types.is_floating(kind):
        return pa.float64()
    return pa.timestamp(kind.unit, "UTC") if pa.types.is_timestamp(kind) and kind.tz is not None else kind


def array_text(column: pa.ChunkedArray) -> str:
    """The text of an array, made by Arrow."""
    types, kind = pa.types, column.type
    if types.is_binary(kind) or types.is_large_binary(kind):
        texts = [None if value is None else _element(value) for value in column.to_pylist()]
        column = pa.chunked_array([texts], pa.string())
    elif types.is_string(kind) or types.is_large_string(kind):
        escaped = pc.replace_substring(pc.replace_substring(column, "\\", "\\\\"), '"', '\\"')
        column = pc.binary_join_element_wise('"', escaped, '"', "")
    else:
        column = column.cast(_texted(kind)).cast(pa.string())
    elements = pa.concat_arrays(pc.fill_null(column, "NULL").chunks)
    whole = pa.LargeListArray.from_arrays(pa.array([0, len(elements)], pa.int64()), elements)
    return f"{{{pc.binary_join(whole, ',')[0].as_py()}}}"
