"""The pending tuples of one spout task, stored in runs.

The roots of a task rise by one from tuple to tuple. So tuples emitted in one call form a run of
roots, and decisions about them arrive as ranges. A range costs the same however long it is.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from framework.acking.ack_reports import Roots
from framework.topology.tuples import rows_of


class Emitted(NamedTuple):
    """A pending tuple.

    * ``since``: when it was emitted, by ``time.monotonic``.
    * ``values``: kept if the task may have to emit the tuple again without its spout.
    * ``losses``: how often the tuple was emitted again because of a lost round.
    * ``origin``: of its root.
    * ``size``: about how many bytes its values take."""

    message_id: Any
    since: float
    values: Sequence[Any]
    stream: str
    task: int | None
    losses: int = 0
    origin: int = 0
    size: int = 0


class _Entries(Protocol):
    """The tuples of a run."""

    def __len__(self) -> int: ...

    def __getitem__(self, at: int, /) -> Emitted: ...


@dataclass(frozen=True, slots=True)
class EmittedRows:
    """Rows that were emitted in one call. ``message_ids``: one per row; None when the rows have
    none. ``batch``: kept if the task may have to emit the rows again. ``size``: their bytes."""

    message_ids: Sequence[Any] | None
    since: float
    batch: pa.RecordBatch | None
    stream: str
    rows: int
    _: KW_ONLY
    origin: int = 0
    size: int = 0

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, at: int) -> Emitted:
        message_id = None if self.message_ids is None else self.message_ids[at]
        values = () if self.batch is None else next(rows_of(self.batch.slice(at, 1)))
        each = self.size // self.rows
        return Emitted(message_id, self.since, values, self.stream, None, origin=self.origin, size=each)


class Run:
    """The tuples of consecutive roots from ``first`` on, of ``size`` bytes. ``open``: whether each
    is pending. ``touched``: per tuple, the rotation in which its timeout last restarted."""

    def __init__(self, first: int, entries: _Entries, size: int, rotation: int) -> None:
        self.first = first
        self.entries = entries
        self.size = size
        self.rotation = rotation
        self.left = 0
        self.open = np.empty(0, np.bool_)
        self.touched = np.empty(0, np.int64)

    @property
    def next(self) -> int:
        return self.first + len(self.entries)

    @property
    def left_size(self) -> int:
        """About how many bytes the pending tuples take."""
        return self.size * self.left // len(self.entries) if len(self.open) else self.size

    def seal(self) -> None:
        """Close the run: no tuple is added to it any more."""
        if not len(self.open):
            self.left = len(self.entries)
            self.open = np.ones(self.left, np.bool_)
            self.touched = np.full(self.left, self.rotation, np.int64)


class Told(NamedTuple):
    """Consecutive tuples of a run that share a decision. ``first``: the root of the first."""

    first: int
    entries: _Entries
    at: int
    size: int

    @property
    def roots(self) -> range:
        return range(self.first, self.first + self.size)

    def each(self) -> Iterator[Emitted]:
        return (self.entries[at] for at in range(self.at, self.at + self.size))

    def message_ids(self) -> Sequence[Any]:
        """The message ids of those tuples that have one."""
        entries = self.entries
        if isinstance(entries, EmittedRows):
            ids = entries.message_ids
            return () if ids is None else ids[self.at : self.at + self.size]
        return [each.message_id for each in self.each() if each.message_id is not None]

    def waited_s(self, now: float) -> float:
        """How long the tuples were pending, in seconds, summed."""
        if isinstance(self.entries, EmittedRows):
            return (now - self.entries.since) * self.size
        return sum(now - each.since for each in self.each())


class Pending:
    """The pending tuples of a spout task. ``rotations``: how many rotations a tuple survives
    without a decision; it expires at the next. Works like a ``RotatingMap`` with this many buckets.
    """

    def __init__(self, rotations: int) -> None:
        self._rotations = rotations
        self._rotation = 0
        self._runs: list[Run] = []  # sorted by root
        self._last: Run | None = None  # the run that may still grow
        self._count = 0
        #: About how many bytes the pending tuples take.
        self.size = 0

    def __len__(self) -> int:
        return self._count

    def put(self, root: int, emitted: Emitted) -> None:
        """Add a tuple. The roots of an origin must rise."""
        last = self._last
        if last is not None and not len(last.open) and root == last.next and isinstance(last.entries, list):
            last.entries.append(emitted)
            last.size += emitted.size
        else:
            self._add(Run(root, [emitted], emitted.size, self._rotation))
        self._count += 1
        self.size += emitted.size

    def put_rows(self, first: int, rows: EmittedRows) -> None:
        """Add tuples with consecutive roots. The roots of an origin must rise."""
        self._add(Run(first, rows, rows.size, self._rotation))
        self._count += len(rows)
        self.size += rows.size

    def settle(self, roots: Roots) -> Iterator[Told]:
        """Remove these trees. Yields the tuples that were open."""
        for run, start, stop in self._within(roots):
            for at, count in _stretches(run.open[start:stop]):
                yield self._closed(run, start + at, count)
        self._drop_empty()

    def touch(self, roots: Roots) -> None:
        """Restart the timeouts of these trees."""
        for run, start, stop in self._within(roots):
            run.touched[start:stop] = self._rotation

    def touch_all(self) -> None:
        for run in self._sealed():
            run.touched[:] = self._rotation

    def age(self) -> None:
        """First half of a rotation: age every tree by one rotation."""
        self._seal()
        self._rotation += 1

    def expire(self) -> Iterator[Told]:
        """Second half of a rotation: remove trees that are too old. Yields them."""
        for run in self._sealed():
            old = run.open & (run.touched <= self._rotation - self._rotations)
            for at, count in _stretches(old):
                yield self._closed(run, at, count)
        self._drop_empty()

    def all(self) -> Iterator[Told]:
        for run in self._sealed():
            for at, count in _stretches(run.open):
                yield Told(run.first + at, run.entries, at, count)

    def roots(self) -> Iterator[int]:
        for told in self.all():
            yield from told.roots

    def _closed(self, run: Run, at: int, count: int) -> Told:
        """Remove a range of pending tuples from a run."""
        run.open[at : at + count] = False
        self.size -= run.left_size
        run.left -= count
        self.size += run.left_size
        self._count -= count
        return Told(run.first + at, run.entries, at, count)

    def _add(self, run: Run) -> None:
        self._seal()
        insort(self._runs, run, key=attrgetter("first"))
        self._last = run

    def _seal(self) -> None:
        """Seal the last run, the only one that may still grow."""
        if self._last is not None:
            self._last.seal()

    def _sealed(self) -> list[Run]:
        self._seal()
        return list(self._runs)

    def _within(self, roots: Roots) -> Iterator[tuple[Run, int, int]]:
        """The parts of runs that lie in the ranges of roots."""
        self._seal()
        runs = self._runs
        firsts = [each.first for each in runs]
        for first, last in zip(roots.first, roots.last, strict=True):
            for run in runs[max(bisect_right(firsts, first) - 1, 0) : bisect_right(firsts, last)]:
                start, stop = max(first - run.first, 0), min(last + 1, run.next) - run.first
                if start < stop:
                    yield run, start, stop

    def _drop_empty(self) -> None:
        if any(not each.left for each in self._runs):
            self._runs = [each for each in self._runs if each.left or not len(each.open)]


def _stretches(which: np.ndarray[Any, np.dtype[np.bool_]]) -> list[tuple[int, int]]:
    """The start and the length of each stretch of true values."""
    if which.all():
        return [(0, len(which))] if len(which) else []
    at = np.flatnonzero(which)
    if not len(at):
        return []
    breaks = np.flatnonzero(np.diff(at) != 1)
    starts = at[np.concatenate(([0], breaks + 1))]
    ends = at[np.concatenate((breaks, [len(at) - 1]))] + 1
    return list(zip(starts.tolist(), (ends - starts).tolist(), strict=True))
