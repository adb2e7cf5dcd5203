"""The rows that fall due in one transaction, in order, in bounded memory (ADR 113).

Invariants:

1. At most ``SORTED_ROWS`` rows, or about ``SORTED_BYTES``, are in memory for sorting. More go into
   a temporary file, as sorted runs that are merged. Of each run, ``CHUNK_ROWS`` are in memory.
2. A page has at most ``PAGE_ROWS`` rows and about ``PAGE_BYTES``, or one row.
3. The order does not depend on the store, on the sizes of pages, or on where runs end.
"""

from __future__ import annotations

import heapq
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeVar

from framework.arrow_spill import SpillFile
from framework.bounded_pages import pages_of, pages_within
from framework.value_size import size_of
from sinks.backend import Key, Row

#: The most rows, and about the most bytes, of a page, which is sent and written by one step of the
#: store.
PAGE_ROWS = 10_000
PAGE_BYTES = 16 << 20
#: The most rows, and about the most bytes, that are sorted in memory.
SORTED_ROWS = 50_000
SORTED_BYTES = 64 << 20
#: Runs of one level that are merged into a run of the next level.
RUNS_MAX = 64
#: The most rows, and about the most bytes, of a run that are read back together, and the bytes of
#: their length before them.
CHUNK_ROWS = 128
_CHUNK_BYTES = 256 << 10
_LENGTH_BYTES = 8
T = TypeVar("T")

#: Computes the order of a row from the number by which the row is due, and its key.
Order = Callable[[int, Key], tuple[Any, ...]]


class Due(NamedTuple):
    """A row that is due. ``order``: sorts the rows; equal for equal keys only. ``size``: as of
    ``due_size``."""

    order: tuple[Any, ...]
    key: Key
    row: Row
    size: int


def by_time(at: int, key: Key) -> tuple[Any, ...]:
    """The default order: by the number by which a row is due, then by the text of its key."""
    return at, repr(key)


def due_size(key: Key, row: Row) -> int:
    """About the bytes of a row with its key."""
    return size_of(key) + size_of(row.value) + size_of(row.prev)


class DueRows:
    """Takes rows in any order, and returns them in order, without repetitions, once. The file has
    no name, and ends with this object. ``restored``: returns a key and a row from the file in their
    canonical form."""

    def __init__(self, location: str, restored: Callable[[Key, Row], tuple[Key, Row]]) -> None:
        self._restored = restored
        self._rows: list[Due] = []
        self._bytes = 0
        self._file = SpillFile(f"{location}: more rows fall due")
        #: The beginnings and ends of the runs in the file, by level: how often a run was merged.
        self._runs: list[list[tuple[int, int]]] = []

    def add(self, due: Due) -> None:
        self._rows.append(due)
        self._bytes += due.size
        if len(self._rows) >= SORTED_ROWS or self._bytes >= SORTED_BYTES:
            self._spill()

    def pages(self) -> Iterator[list[Due]]:
        self._rows.sort(key=itemgetter(0))
        runs = map(self._run, (run for level in self._runs for run in level))
        merged = heapq.merge(*runs, self._rows, key=itemgetter(0)) if self._runs else self._rows
        for page, _ in pages_within(_once(merged), PAGE_ROWS, PAGE_BYTES, attrgetter("size")):
            yield page

    def _spill(self) -> None:
        """Write the rows in memory into the file, as a run. Merge the runs of a level when they are
        many, so that few are left to be merged at the end."""
        rows, self._rows, self._bytes = self._rows, [], 0
        rows.sort(key=itemgetter(0))
        run = self._written(rows)
        for level in self._runs:
            level.append(run)
            if len(level) < RUNS_MAX:
                return
            run = self._written(heapq.merge(*map(self._run, level), key=itemgetter(0)))
            level.clear()
        self._runs.append([run])

    def _written(self, rows: Iterable[Due]) -> tuple[int, int]:
        """Append a run of sorted rows to the file. Returns its place."""
        start = self._file.end
        for chunk, _ in pages_within(rows, CHUNK_ROWS, _CHUNK_BYTES, attrgetter("size")):
            packed = pickle.dumps([tuple(each) for each in chunk], pickle.HIGHEST_PROTOCOL)
            self._file.append(len(packed).to_bytes(_LENGTH_BYTES) + packed)
        return start, self._file.end

    def _run(self, place: tuple[int, int]) -> Iterator[Due]:
        at, end = place
        while at < end:
            length = int.from_bytes(self._file.read(at, _LENGTH_BYTES))
            packed = self._file.read(at + _LENGTH_BYTES, length)
            at += _LENGTH_BYTES + length
            for order, key, row, size in pickle.loads(packed):
                yield Due(order, *self._restored(key, row), size)


def _once(rows: Iterable[Due]) -> Iterator[Due]:
    """The rows without repetitions of a key, which are adjacent."""
    before: Key | None = None
    for each in rows:
        if each.key != before:
            yield each
        before = each.key


def merged(
    pages: Iterable[Sequence[T]],
    own: Iterable[T],
    order: Callable[[T], Any],
    join: Callable[[T, T], T] | None = None,
) -> Iterator[list[T]]:
    """Sorted pages, merged with the items ``own`` of the transaction itself. ``join``: makes one
    item of an item of a page and an own item of the same place."""
    waiting = deque(sorted(((order(each), each) for each in own), key=itemgetter(0)))
    for page in pages:
        if not page:
            continue
        last, here = order(page[-1]), []
        while waiting and waiting[0][0] <= last:
            here.append(waiting.popleft())
        yield _together([*((order(each), each) for each in page), *here], join) if here else list(page)
    for rest in pages_of(waiting, PAGE_ROWS):
        yield [each for _, each in rest]


def _together(placed: list[tuple[Any, T]], join: Callable[[T, T], T] | None) -> list[T]:
    """The items in the order of their places."""
    placed.sort(key=itemgetter(0))
    if join is None:
        return [each for _, each in placed]
    items: list[T] = []
    before: Any = None
    for place, each in placed:
        if items and place == before:
            items[-1] = join(items[-1], each)
        else:
            items.append(each)
        before = place
    return items
