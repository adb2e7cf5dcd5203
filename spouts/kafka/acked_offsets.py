"""Which offsets of a partition are done, and up to where all of them are. Pure.

Invariant: the committable offset is never beyond an offset that was emitted and is not acked. So a
reader that starts there misses nothing.
"""

from __future__ import annotations

from collections import deque


class AckedOffsets:
    """The offsets of one partition. ``position``: the next offset to emit. The cost of a call does
    not grow with the number of open offsets.

    >>> offsets = AckedOffsets(10)
    >>> for offset in (10, 11, 14): offsets.emitted(offset)     # 12 and 13 are not there, or were skipped
    >>> offsets.acked(11); offsets.committable
    10
    >>> offsets.acked(10); offsets.committable
    14
    >>> offsets.acked(14); offsets.committable, offsets.span
    (15, 0)
    """  # noqa: W505 - doctest lines are not wrapped

    def __init__(self, position: int) -> None:
        self.position = position
        self._open: set[int] = set()  # emitted and not acked
        self._order: deque[int] = deque()  # open offsets in order; acked ones may lie behind the first

    def emitted(self, offset: int) -> None:
        """An offset was emitted for the first time. Offsets must come in order."""
        self._open.add(offset)
        self._order.append(offset)
        self.position = offset + 1

    def passed(self, offset: int) -> None:
        """An offset was left out: nobody will ack it."""
        self.position = max(self.position, offset + 1)

    def acked(self, offset: int) -> None:
        self._open.discard(offset)
        while self._order and self._order[0] not in self._open:
            self._order.popleft()

    @property
    def committable(self) -> int:
        """Everything before this offset is done."""
        return self._order[0] if self._order else self.position

    @property
    def span(self) -> int:
        """The number of offsets between ``committable`` and ``position``."""
        return self.position - self.committable

    @property
    def open(self) -> int:
        """The number of offsets that were emitted and are not acked."""
        return len(self._open)
