"""The column that says which trees each row of a batch is part of.

Nearly always a row is part of one tree, or of none. A batch of such rows has a column of plain
numbers: the root, or ``NO_TREE``. Only a batch with a row that is part of several trees has a
column of lists; there a row that is part of no tree has the list ``[NO_TREE]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import pyarrow as pa

from framework.acking.ack_reports import NO_IDS, NO_TREE, Ids


class RowRoots:
    """The roots of rows, collected row by row (``append``), or for many rows each of which is part
    of at most one tree (``extend``)."""

    def __init__(self) -> None:
        self._flat: list[Ids] = []
        # None: one root per row
        self._lengths: list[np.ndarray[tuple[int], np.dtype[np.int32]] | None] = []
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
        tail: Sequence[Sequence[int]] = self._tail
        if tail:
            lengths = np.fromiter(map(len, tail), np.int32, len(tail))
            if not lengths.all():
                tail, lengths = [roots or (NO_TREE,) for roots in tail], np.maximum(lengths, 1)
            self._flat.append(np.fromiter(chain.from_iterable(tail), np.uint64, int(lengths.sum())))
            self._lengths.append(None if lengths.max() == 1 else lengths)
            self._tail.clear()


def no_roots(rows: int) -> pa.Array:
    """The column for rows that are part of no tree."""
    return pa.array(np.full(rows, NO_TREE, np.uint64))


def at_most_one(column: pa.Array) -> bool:
    """Whether the column has at most one tree for every row."""
    return bool(pa.types.is_uint64(column.type))


def flat_roots(column: pa.Array) -> Ids:
    """The roots of all rows, row by row; ``NO_TREE`` for a row that is part of none."""
    roots = column if at_most_one(column) else column.flatten()
    found: Ids = roots.to_numpy(zero_copy_only=False)
    return found


def trees_among(roots: Ids) -> Ids:
    """The roots without ``NO_TREE``."""
    found: Ids = roots[roots != NO_TREE]
    return found


def untracked(column: pa.Array) -> int:
    """The number of rows that are part of no tree."""
    return int(np.count_nonzero(flat_roots(column) == NO_TREE))


def roots_of(column: pa.Array) -> Iterable[Sequence[int]]:
    """The roots of each row."""
    if at_most_one(column):
        return map(as_roots, column.to_pylist())
    flat = column.flatten().to_pylist()
    lengths = column.value_lengths().to_pylist()
    ends = np.cumsum(lengths).tolist()
    return (flat[end - length : end] if flat[end - 1] else () for end, length in zip(ends, lengths, strict=True))


def as_roots(root: int) -> Sequence[int]:
    """The roots of a row: this root alone, or none for ``NO_TREE``."""
    return (root,) if root else ()


def edges_of(column: pa.Array, ids: Ids) -> tuple[Ids, Ids]:
    """The roots and edges of all rows: one pair for every tree that a row is part of. ``ids``: the
    edge of each row."""
    if not at_most_one(column):
        ids = np.repeat(ids, column.value_lengths().to_numpy(zero_copy_only=False))
    return tracked_edges(flat_roots(column), ids)


def shared_edges_of(column: pa.Array, ids: Ids) -> tuple[Ids, Ids]:
    """As ``edges_of``, for rows that are part of several trees only."""
    if at_most_one(column):
        return NO_IDS, NO_IDS
    lengths = column.value_lengths().to_numpy(zero_copy_only=False)
    several = np.repeat(lengths > 1, lengths)
    return flat_roots(column)[several], np.repeat(ids, lengths)[several]


def tracked_edges(roots: Ids, ids: Ids) -> tuple[Ids, Ids]:
    """The roots without ``NO_TREE``, and the edge ids that belong to them."""
    tracked = roots != NO_TREE
    return (roots, ids) if tracked.all() else (roots[tracked], ids[tracked])
