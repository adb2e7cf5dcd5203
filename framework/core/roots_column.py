"""The column that says which trees each row of a batch is part of.

Nearly always a row is part of one tree. A batch of such rows has a column of plain numbers; only a
batch with a row that is part of several trees, or of none, has a column of lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import pyarrow as pa

from framework.acking.ledger import NO_IDS, Ids


class RowRoots:
    """The roots of rows, gathered row by row (``append``) or for many rows that are part of one
    tree each (``extend``)."""

    def __init__(self) -> None:
        self._flat: list[Ids] = []
        self._lengths: list[np.ndarray[tuple[int], np.dtype[np.int32]] | None] = []  # None: one root per row
        self._tail: list[Sequence[int]] = []
        self.append = self._tail.append

    def extend(self, roots: Ids) -> None:
        self._seal()
        self._flat.append(roots)
        self._lengths.append(None)

    def column(self) -> pa.Array:
        self._seal()
        flat = np.concatenate(self._flat) if self._flat else NO_IDS
        if all(each is None for each in self._lengths):
            return pa.array(flat)
        lengths = [
            np.ones(len(roots), np.int32) if each is None else each
            for roots, each in zip(self._flat, self._lengths, strict=True)
        ]
        offsets = np.concatenate((np.zeros(1, np.int32), np.cumsum(np.concatenate(lengths), dtype=np.int32)))
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))

    def _seal(self) -> None:
        tail = self._tail
        if tail:
            lengths = np.fromiter(map(len, tail), np.int32, len(tail))
            self._flat.append(np.fromiter(chain.from_iterable(tail), np.uint64, int(lengths.sum())))
            self._lengths.append(None if lengths.min() == lengths.max() == 1 else lengths)
            tail.clear()


def no_roots(rows: int) -> pa.Array:
    """The column of rows that are part of no tree."""
    return pa.ListArray.from_arrays(pa.array(np.zeros(rows + 1, np.int32)), pa.array(NO_IDS))


def are_single(column: pa.Array) -> bool:
    """Whether the column says of every row that it is part of one tree."""
    return bool(pa.types.is_uint64(column.type))


def flat_roots(column: pa.Array) -> Ids:
    """The roots of all rows, row by row."""
    numbers = column if are_single(column) else column.flatten()
    found: Ids = numbers.to_numpy(zero_copy_only=False)
    return found


def untracked(column: pa.Array) -> int:
    """How many rows are part of no tree."""
    return 0 if are_single(column) else int((column.value_lengths().to_numpy(zero_copy_only=False) == 0).sum())


def roots_of(column: pa.Array) -> Iterable[Sequence[int]]:
    """The roots of each row."""
    if are_single(column):
        return zip(column.to_pylist())
    flat = column.flatten().to_pylist()
    lengths = column.value_lengths().to_pylist()
    ends = np.cumsum(lengths).tolist()
    return (flat[end - length : end] for end, length in zip(ends, lengths, strict=True))


def edges_of(column: pa.Array, ids: Ids) -> tuple[Ids, Ids]:
    """A root and an edge for every tree that each row is part of. ``ids``: of each row."""
    if are_single(column):
        return flat_roots(column), ids
    return flat_roots(column), np.repeat(ids, column.value_lengths().to_numpy(zero_copy_only=False))
