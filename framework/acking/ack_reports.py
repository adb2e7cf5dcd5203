"""Ids of tuple trees, and the reports of tasks about trees, folded to one number per tree.

A *root* is the id of a tree: 12 bits for its *origin*, then 52 bits that rise with every tree of
the task that emitted it. The origin identifies that task; a spout task has several origins if bolts
need to know from which source partition a tree stems. So the roots of one round are dense, and a
few ranges describe many of them. Rounds are numbered from 1, so no root is 0. An *edge* is a tuple
on its way to one task. Its id is 64 random bits, so the XOR of a tree's edges is 0 only when each
has been reported twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

SEQUENCE_BITS = 52
ORIGINS_MAX = 1 << 12
#: A task that starts in round ``n`` begins at sequence ``n`` times this. So it can emit this many
#: trees per round, on average, and no root is reused.
SEQUENCES_PER_ROUND = 1 << 20

Ids = np.ndarray[Any, np.dtype[np.uint64]]
NO_IDS: Ids = np.empty(0, np.uint64)
#: The root of a row that is part of no tree.
NO_TREE = 0


def root_of(origin: int, sequence: int) -> int:
    """The root of tree number ``sequence`` of an origin."""
    return origin << SEQUENCE_BITS | sequence


def origin_of(root: int) -> int:
    return root >> SEQUENCE_BITS


class EdgeIds:
    """Random 64-bit ids, never 0. Not thread-safe."""

    def __init__(self, seed: int | None = None) -> None:
        self._seed = seed
        # costly to make, and not needed by a task that emits nothing
        self._random: np.random.Generator | None = None

    def take(self, count: int) -> Ids:
        if self._random is None:
            self._random = np.random.default_rng(self._seed)
        return self._random.integers(1, 1 << 64, size=count, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Roots:
    """A set of roots as ranges: ``first[i]`` to ``last[i]``, both included."""

    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()

    @classmethod
    def of(cls, roots: Iterable[int] | Ids) -> Roots:
        """
        >>> Roots.of([7, 3, 4, 5, 4])
        Roots(first=(3, 7), last=(5, 7))
        """
        found = roots if isinstance(roots, np.ndarray) else np.fromiter(roots, np.uint64)
        if not len(found):
            return cls()
        ordered = np.unique(found)
        breaks = np.flatnonzero(np.diff(ordered) != 1)
        first = ordered[np.concatenate(([0], breaks + 1))]
        last = ordered[np.concatenate((breaks, [len(ordered) - 1]))]
        return cls(tuple(first.tolist()), tuple(last.tolist()))

    def ids(self) -> Iterator[int]:
        for first, last in zip(self.first, self.last, strict=True):
            yield from range(first, last + 1)

    def by_origin(self) -> Iterator[tuple[int, Roots]]:
        """The same roots, grouped by origin."""
        found: dict[int, list[tuple[int, int]]] = {}
        for first, last in zip(self.first, self.last, strict=True):
            found.setdefault(origin_of(first), []).append((first, last))
        for origin, ranges in found.items():
            yield origin, Roots(tuple(first for first, _ in ranges), tuple(last for _, last in ranges))

    def __add__(self, other: Roots) -> Roots:
        return Roots(self.first + other.first, self.last + other.last)

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in zip(self.first, self.last, strict=True))


class LedgerPart(NamedTuple):
    """A task's report to one acker.

    * ``values``: per root of ``roots``, the XOR of its edges that were emitted and of those that
      were acked by the task.
    * ``born``: roots that a spout emitted here; the value of each is in ``values`` unless it is 0.
    * ``shared_roots``, ``shared_values``: the same numbers for only those edges that are part of
      several trees.
    * ``task``, ``round``: the sender and its round, so that no report is applied twice: with XOR,
      the second application would undo the first."""

    acker: int
    task: tuple[int, int]
    round: int
    roots: Ids
    values: Ids
    born: Ids
    failed: Ids
    reset: Ids
    shared_roots: Ids = NO_IDS
    shared_values: Ids = NO_IDS


class Ledger:
    """The reports of one task in one round, folded to one number per root before they leave."""

    def __init__(self) -> None:
        self._roots: list[Ids] = []
        self._values: list[Ids] = []
        self._acked_roots: list[int] = []
        self._acked_edges: list[int] = []
        self._shared_roots: list[Ids] = []
        self._shared_values: list[Ids] = []
        self._born: list[int] = []
        self._born_many: list[Ids] = []
        self._failed: set[int] = set()
        self._reset: set[int] = set()

    def born(self, root: int) -> None:
        self._born.append(root)

    def born_many(self, roots: Ids) -> None:
        self._born_many.append(roots)

    def emitted(self, roots: Ids, edges: Ids) -> None:
        """Edges that were emitted; ``edges[i]`` belongs to the tree ``roots[i]``."""
        self._roots.append(roots)
        self._values.append(edges)

    def shared(self, roots: Ids, edges: Ids) -> None:
        """Those of the ``emitted`` edges that are part of several trees."""
        if len(roots):
            self._shared_roots.append(roots)
            self._shared_values.append(edges)

    def acked(self, roots: Sequence[int], edge: int) -> None:
        """A tuple was acked. ``edge``: the id of the edge on which it arrived, XORed with the
        numbers that its ack is bound to."""
        for root in roots:
            self._acked_roots.append(root)
            self._acked_edges.append(edge)
        if len(roots) > 1:
            self.shared(_ids(roots), np.full(len(roots), edge, np.uint64))

    def acked_many(self, roots: Ids, edges: Ids) -> None:
        """Tuples were acked, each of them part of one tree. ``edges``: as for ``acked``."""
        self._roots.append(roots)
        self._values.append(edges)

    def bound(self, roots: Sequence[int], number: int) -> None:
        """Report a number that is reported again with a tuple's ack, now or in a later round."""
        self.acked(roots, number)

    def failed(self, roots: Iterable[int]) -> None:
        self._failed.update(roots)

    def reset(self, roots: Iterable[int]) -> None:
        self._reset.update(roots)

    def parts(self, ackers: int, task: tuple[int, int], round_number: int) -> list[LedgerPart]:
        """Make a part for each acker that is concerned. A root belongs to the acker whose number is
        the root modulo ``ackers``. ``task``: level and partition of the ledger's task."""
        if not (self._roots or self._acked_roots or self._born or self._born_many or self._failed or self._reset):
            return []
        roots, values = self._folded()
        born = np.concatenate([*self._born_many, _ids(self._born)])
        failed, reset = _ids(self._failed), _ids(self._reset)
        shared_roots, shared_values = _folded(self._shared_roots, self._shared_values)
        parts = []
        divisor = np.uint64(ackers)
        for acker in range(ackers):
            mine = _all if ackers == 1 else partial(_of_acker, divisor=divisor, acker=acker)
            its, shared = mine(roots), mine(shared_roots)
            part = LedgerPart(
                acker,
                task,
                round_number,
                roots=roots[its],
                values=values[its],
                born=born[mine(born)],
                failed=failed[mine(failed)],
                reset=reset[mine(reset)],
                shared_roots=shared_roots[shared],
                shared_values=shared_values[shared],
            )
            if any(len(each) for each in part[3:]):
                parts.append(part)
        return parts

    def _folded(self) -> tuple[Ids, Ids]:
        return _folded([*self._roots, _ids(self._acked_roots)], [*self._values, _ids(self._acked_edges)])


def _folded(roots: Sequence[Ids], values: Sequence[Ids]) -> tuple[Ids, Ids]:
    if not roots:
        return NO_IDS, NO_IDS
    found, folded = fold(np.concatenate(roots), np.concatenate(values))
    told = folded != 0  # edges both emitted and acked here need no report
    return found[told], folded[told]


def _all(roots: Ids) -> Any:
    return slice(None)


def _of_acker(roots: Ids, *, divisor: np.uint64, acker: int) -> Any:
    return roots % divisor == acker


#: Roots are folded in place, without sorting, if their range has at most this many numbers per
#: root.
_SPARSE_MAX = 4
#: The most origins whose roots are folded origin by origin.
_ORIGINS_APART_MAX = 16


def fold(roots: Ids, values: Ids) -> tuple[Ids, Ids]:
    """Each root once, in ascending order, with the XOR of its values."""
    if not len(roots):
        return NO_IDS, NO_IDS
    first, last = roots.min(), roots.max()
    if int(last - first) < _SPARSE_MAX * len(roots):  # usual: the roots of a round are dense
        return _fold_dense(roots, values, first=first, span=int(last - first) + 1)
    if origin_of(int(first)) < origin_of(int(last)) < origin_of(int(first)) + _ORIGINS_APART_MAX:
        origins = roots >> np.uint64(SEQUENCE_BITS)
        parts = []
        for origin in range(origin_of(int(first)), origin_of(int(last)) + 1):
            its = origins == origin
            parts.append(fold(roots[its], values[its]))
        return np.concatenate([each for each, _ in parts]), np.concatenate([each for _, each in parts])
    order = np.argsort(roots, kind="stable")
    roots, values = roots[order], values[order]
    starts = np.concatenate(([0], np.flatnonzero(np.diff(roots)) + 1))
    return roots[starts], np.bitwise_xor.reduceat(values, starts)


def _fold_dense(roots: Ids, values: Ids, *, first: np.uint64, span: int) -> tuple[Ids, Ids]:
    places = (roots - first).view(np.int64)
    folded = np.zeros(span, np.uint64)
    np.bitwise_xor.at(folded, places, values)
    there = np.zeros(span, np.bool_)
    there[places] = True
    found: Ids = np.flatnonzero(there).view(np.uint64) + first
    return found, folded[there]


def _ids(values: Iterable[int]) -> Ids:
    return np.fromiter(values, np.uint64)
