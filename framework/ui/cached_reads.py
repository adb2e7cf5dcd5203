"""The last answer of something that may block.

Invariants:

1. Nobody who looks waits for the reading: it has a thread of its own.
2. At most one reading is under way, and none begins when nobody looks.
3. A reading that fails or hangs leaves the answer before it in place, with its age.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from framework.observe.logs import get_logger

T = TypeVar("T")
#: Of an error so many characters are shown.
ERROR_MAX = 500

_log = get_logger()


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """``value``: the last one that was read, None before the first. ``number``: how many were read.
    ``age_s``: seconds since. ``error``: why there is no newer one, else None."""

    value: T | None
    number: int
    age_s: float
    error: str | None


class Kept(Generic[T]):
    """Reads at most every ``every_s`` seconds, when somebody looks. ``what`` names it in the log,
    which gets one line when it begins to fail."""

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
        """What is known now. Begins to read again when it is time."""
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
        """Whether a newer answer is on its way."""
        with self._lock:
            return self._reading

    def _read_once(self) -> None:
        try:
            value = self._read()
        except Exception as error:  # noqa: BLE001 - whatever it is, the page shows it and goes on
            text = f"{type(error).__name__}: {error}"[:ERROR_MAX]
            with self._lock:
                known, self._error, self._reading = self._error, text, False
            if known is None:  # not again before it has succeeded: the text may differ each time
                _log.warning("page.unread", what=self._what, reason=text)
            return
        with self._lock:
            self._value, self._error, self._reading = value, None, False
            self._number += 1
            self._read_at_s = time.monotonic()
