"""Looks for values inside of structs, lists and maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Truths = np.ndarray[Any, np.dtype[np.bool_]]
#: For each value of a column that is not nested; None: for none.
Search = Callable[[pa.Array], Truths | None]


def values_with(search: Search, column: pa.Array) -> Truths | None:
    """For each value of a column: whether ``search`` finds it, or a value inside of it. None if it
    finds none."""
    types = pa.types
    if types.is_struct(column.type):
        return _any(search, column.flatten())
    if types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type):
        found = values_with(search, column.flatten())
        return None if found is None else _at(len(column), pc.list_parent_indices(column).to_numpy()[found])
    if types.is_map(column.type):
        offsets = column.offsets.to_numpy()
        found = _any(search, [each.slice(offsets[0], offsets[-1] - offsets[0]) for each in (column.keys, column.items)])
        if found is None:
            return None
        return _at(len(column), np.searchsorted(offsets, np.flatnonzero(found) + offsets[0], side="right") - 1)
    return search(column)


def _any(search: Search, columns: list[pa.Array]) -> Truths | None:
    found = [each for each in (values_with(search, column) for column in columns) if each is not None]
    return np.logical_or.reduce(found) if found else None


def _at(count: int, places: Any) -> Truths:
    truths = np.zeros(count, np.bool_)
    truths[places] = True
    return truths
