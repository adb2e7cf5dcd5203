"""Caches the last answer of a read that may block.

Invariants:

1. No viewer waits for a read: reads have a thread of their own.
2. At most one read is under way, and none begins without a viewer.
3. A read that fails or hangs leaves the previous answer in place, with its age.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from framework.observe.logs import get_logger

T = TypeVar("T")
#: The most characters of an error that are shown.
ERROR_MAX = 500

_log = get_logger()


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """The result of the reads so far.

    * ``value``: the last one read, None before the first.
    * ``number``: number of successful reads.
    * ``age_s``: seconds since the last one.
    * ``error``: why there is no newer value, else None."""

    value: T | None
    number: int
    age_s: float
    error: str | None


class Kept(Generic[T]):
    """Reads at most every ``every_s`` seconds, on demand. ``what`` names it in the log, which gets
    one line when reads begin to fail."""

    def __init__(self, what: str, read: Callable[[], T], every_s: float) -> None:
        self._what = what
        self._read = read
        self._every_s = every_s
        self._lock = threading.Lock()
        self._reading = False
        self._value: T | None = None
        self._number = 0
        self._read_at_s = self._tried_at_s = -float("inf")
        self._error: str | None = None

    def look(self) -> Answer[T]:
        """The last answer. Starts a new read if one is due."""
        now_s = time.monotonic()
        with self._lock:
            begin = not self._reading and now_s - self._tried_at_s >= self._every_s
            if begin:
                self._reading, self._tried_at_s = True, now_s
            answer = Answer(self._value, self._number, now_s - self._read_at_s, self._error)
        if begin:
            threading.Thread(target=self._read_once, name=f"ratchet-page-{self._what}", daemon=True).start()
        return answer

    @property
    def reading(self) -> bool:
        """Whether a read is under way."""
        with self._lock:
            return self._reading

    def _read_once(self) -> None:
        try:
            value = self._read()
        except Exception as error:  # noqa: BLE001 - the page shows any error and continues
            text = f"{type(error).__name__}: {error}"[:ERROR_MAX]
            with self._lock:
                known, self._error, self._reading = self._error, text, False
            if known is None:  # log again only after a success: the text may differ each time
                _log.warning("page.unread", what=self._what, reason=text)
            return
        with self._lock:
            self._value, self._error, self._reading = value, None, False
            self._number += 1
            self._read_at_s = time.monotonic()
