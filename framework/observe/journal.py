"""What happened to each transaction, bounded: for status, tests and later tools."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

#: Events kept. A transaction without failures makes six, so this holds some thousand transactions.
EVENTS_MAX = 6_000


@dataclass(frozen=True, slots=True)
class TransactionEvent:
    """One step of one attempt. ``kind``: emitted, processed, committing, committed, failed, cancelled.

    ``at_s`` is monotonic, in seconds; only differences mean something.
    """

    kind: str
    txid: int
    attempt_id: int
    at_s: float
    detail: str = ""


class Journal:
    """A ring of events and a few running totals. Safe to use from several threads."""

    def __init__(self) -> None:
        self._events: deque[TransactionEvent] = deque(maxlen=EVENTS_MAX)
        self._lock = threading.Lock()
        self.committed = 0
        self.committed_rows = 0
        self.read_rows = 0
        self.attempts_failed = 0

    def note(self, kind: str, txid: int, attempt_id: int, detail: str = "", rows: int = 0) -> None:
        with self._lock:
            self._events.append(TransactionEvent(kind, txid, attempt_id, time.monotonic(), detail))
            if kind == "committed":
                self.committed += 1
                self.committed_rows += rows
            elif kind == "processed":
                self.read_rows += rows
            elif kind == "failed":
                self.attempts_failed += 1

    def events(self) -> list[TransactionEvent]:
        """Oldest first."""
        with self._lock:
            return list(self._events)
