"""Finds rows that PostgreSQL refuses, before the commit is opened."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from framework.topology.canonical_form import python_values

#: A key of this many bytes fits into any index: an index row has up to 2,704 bytes, after
#: PostgreSQL has compressed long values.
_KEY_BYTES = 2_600


def first_nul(rows: pa.Table) -> tuple[int, str] | None:
    """The row and the column of the first text with a NUL. None if there is none."""
    for name, column in zip(rows.column_names, rows.itercolumns(), strict=True):
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            row = pc.index(pc.match_substring(column, "\0"), True).as_py()
            if row >= 0:
                return row, name
    return None


def long_keys(rows: pa.Table, key: Sequence[str]) -> list[tuple[object, ...]]:
    """The keys that may be too long for an index. Only the database can decide, because it
    compresses them."""
    sizes = [pc.fill_null(pc.binary_length(rows.column(each)), 0) for each in key if _is_text(rows.column(each).type)]
    if not sizes:
        return []
    found = rows.filter(pc.greater(functools.reduce(pc.add, (each.cast(pa.int64()) for each in sizes)), _KEY_BYTES))
    return list(zip(*(python_values(found.column(each)) for each in key), strict=True))


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)
    )
