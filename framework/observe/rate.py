"""A rate over the last minute."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 60.0


class RecentRate:
    """Counts per second over the last ``WINDOW_S`` seconds, or since the start if that is less. The
    rate falls to 0 when nothing is counted. For one thread at a time.

    >>> now = 100.0
    >>> rate = RecentRate(lambda: now)
    >>> now = 110.0
    >>> rate.add(50)
    >>> rate.per_second()
    5.0
    >>> now = 700.0
    >>> rate.per_second()
    0.0
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._counts: deque[tuple[int, int]] = deque()  # whole second -> count, at most one a second

    def add(self, count: int) -> None:
        """Add a count at the present time."""
        second = int(self._clock())
        if self._counts and self._counts[-1][0] == second:
            count += self._counts.pop()[1]
        self._counts.append((second, count))
        self._forget()

    def per_second(self) -> float:
        """The rate now."""
        self._forget()
        elapsed = min(max(self._clock() - self._began, 1.0), WINDOW_S)
        return sum(count for _, count in self._counts) / elapsed

    def _forget(self) -> None:
        while self._counts and self._counts[0][0] <= self._clock() - WINDOW_S:
            self._counts.popleft()
