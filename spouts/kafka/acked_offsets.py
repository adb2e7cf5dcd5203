"""Tracks which offsets of a partition are done, and up to where all of them are. Pure.

Invariant: the committable offset is never beyond an offset that was emitted and is not acked. So a
reader that starts there misses nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

W = TypeVar("W")
Offsets = np.ndarray[Any, np.dtype[np.int64]]


class Slice(Generic[W]):
    """Offsets that were emitted in one call, in order, and which of them are done. ``what``: the
    caller's data for them, until all are done, because an earlier slice may stay open for long."""

    __slots__ = ("_first", "done", "left", "offsets", "what")

    def __init__(self, offsets: Offsets, what: W) -> None:
        self.offsets = offsets
        self.what = what
        self.done = np.zeros(len(offsets), np.bool_)
        self.left = len(offsets)
        self._first = 0  # all before it are done

    def settle(self, start: int, stop: int) -> None:
        """Mark the offsets at these indices as done."""
        newly_done = stop - start - int(self.done[start:stop].sum())
        self.left -= newly_done
        self.done[start:stop] = True
        if newly_done and not self.left:
            del self.what

    @property
    def first_open(self) -> int:
        """The first offset that is not done. Call it only if there is one."""
        self._first += int(np.argmin(self.done[self._first :]))
        return int(self.offsets[self._first])


class Found(NamedTuple, Generic[W]):
    """The place of an open offset."""

    slice: Slice[W]
    at: int


class AckedOffsets(Generic[W]):
    """The offsets of one partition. ``position``: the next offset to emit. The cost of a call does
    not grow with the number of open offsets.

    >>> offsets = AckedOffsets(10)
    >>> for offset in (10, 11, 14): _ = offsets.emitted([offset], None)     # 12 and 13 are not there, or were skipped
    >>> offsets.acked(11); offsets.committable
    10
    >>> offsets.acked(10); offsets.committable
    14
    >>> offsets.acked(14); offsets.committable, offsets.span
    (15, 0)
    """  # noqa: W505 - doctest lines are not wrapped

    def __init__(self, position: int) -> None:
        self.position = position
        self._slices: list[Slice[W]] = []  # in order; the first one has an open offset

    def emitted(self, offsets: Sequence[int] | Offsets, what: W) -> Slice[W]:
        """Offsets were emitted for the first time. They must come in order."""
        made = Slice(np.asarray(offsets, np.int64), what)
        self._slices.append(made)
        self.position = int(made.offsets[-1]) + 1
        return made

    def passed(self, offset: int) -> None:
        """An offset was left out: it will not be acked."""
        self.position = max(self.position, offset + 1)

    def acked(self, offset: int) -> None:
        found = self.find(offset)
        if found is not None:
            self.settle(found.slice, found.at, found.at + 1)

    def settle(self, those: Slice[W], start: int, stop: int) -> None:
        """Mark the offsets at these indices of a slice as done."""
        those.settle(start, stop)
        ended = 0
        while ended < len(self._slices) and not self._slices[ended].left:
            ended += 1
        del self._slices[:ended]

    def find(self, offset: int) -> Found[W] | None:
        """An offset that was emitted; None if it is done, or was never emitted."""
        number = bisect_right(self._slices, offset, key=lambda each: int(each.offsets[0])) - 1
        if number < 0:
            return None
        those = self._slices[number]
        at = int(np.searchsorted(those.offsets, offset))
        is_open = at < len(those.offsets) and int(those.offsets[at]) == offset and not those.done[at]
        return Found(those, at) if is_open else None

    @property
    def committable(self) -> int:
        """Everything before this offset is done."""
        return self._slices[0].first_open if self._slices else self.position

    @property
    def span(self) -> int:
        """The number of offsets between ``committable`` and ``position``."""
        return self.position - self.committable

    @property
    def open(self) -> int:
        """The number of offsets that were emitted and are not acked."""
        return sum(each.left for each in self._slices)
