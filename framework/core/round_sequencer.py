"""The order in which a task does its part of concurrent rounds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from framework.errors import RetryableError

#: How long a round waits for the previous one, which may be late or lost, in seconds.
OVERTAKE_S = 10.0


class OvertakenError(RetryableError):
    """A round reached a task after a later round."""


class RoundOrder:
    """Orders the rounds of one task. Safe to use from several threads.

    Invariant: the task does its part of the rounds one by one, in the order of their numbers. A
    round that does not come in time is overtaken, and is refused if it comes later."""

    def __init__(self, overtake_s: float) -> None:
        self._overtake_s = overtake_s
        self._changed = threading.Condition()
        self._last = 0
        self._running = False

    @contextmanager
    def of(self, number: int, follows: int) -> Iterator[None]:
        """Wait for the turn of a round: it begins once the round that it ``follows`` (0 for none)
        has had its turn, or is overtaken. Raises ``OvertakenError`` when this round is overtaken
        itself."""
        with self._changed:
            self._changed.wait_for(lambda: self._last >= min(follows, number), self._overtake_s)
            self._changed.wait_for(lambda: not self._running)
            if number <= self._last:
                raise OvertakenError(f"round {number} comes too late: round {self._last} has been here")
            self._last = number
            self._running = True
        try:
            yield
        finally:
            with self._changed:
                self._running = False
                self._changed.notify_all()
