"""A bounded journal of the steps of each transaction, for the status, tests and tools."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from framework.document_type_checks import check_fields
from framework.observe.rate import RecentRate
from framework.observe.run_statistics import FiguresBuilder, TransactionFigures

#: The most events kept. A transaction without failures makes four.
EVENTS_MAX = 6_000
#: The most closed transactions kept (C19).
RECORDS_MAX = 1_000
#: The most attempts of one transaction kept, the last ones. ``TransactionRecord.attempts_total``
#: counts all.
ATTEMPTS_KEPT = 20
#: The most failed attempts whose time is kept, and their traces.
FAILURES_KEPT = 1_000
TRACES_KEPT = 50


@dataclass(frozen=True, slots=True)
class TransactionEvent:
    """One step of one attempt. ``kind``: emitted, processed, committing, rolling back, rolled back,
    committed, failed, cancelled.

    ``at_s`` is monotonic, in seconds. Only differences are meaningful.
    """

    kind: str
    txid: int
    attempt_id: int
    at_s: float
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """One attempt.

    * ``started_at``: seconds since the Unix epoch.
    * ``waiting_ms``: from the end of processing to the start of the commit. A phase that did not
      end has None.
    * ``source_rows``: the records read; ``bad_records`` of them could not be decoded.
    * ``oldest_ms``, ``newest_ms``: the times of the oldest and the newest record, as in
      ``ReadCounts``.
    * ``rows``: edge label -> rows received over that edge.
    * ``component_ms``: component -> milliseconds that its tasks were busy with it, summed; for a
      task that reads, this includes waiting.
    * ``late_records``: component -> records that were late there.
    * ``left_out_rows``: component -> rows due by time that it refused.
    * ``lookups``: ``component/function`` -> the counts and seconds of its lookups.
    * ``outcome``: running, committed, failed, cancelled, rolled back, or undone.
    * ``reason``: why it failed, was cancelled, rolled back or undone.
    * ``made_by``: the versions and hashes of the code, as in ``lineage_of``.
    """

    attempt_id: int
    epoch: int
    started_at: float
    processing_ms: float | None = None
    waiting_ms: float | None = None
    commit_ms: float | None = None
    source_rows: int = 0
    source_bytes: int = 0
    bad_records: int = 0
    oldest_ms: int | None = None
    newest_ms: int | None = None
    rows: Mapping[str, int] = field(default_factory=dict)
    component_ms: Mapping[str, float] = field(default_factory=dict)
    late_records: Mapping[str, int] = field(default_factory=dict)
    left_out_rows: Mapping[str, int] = field(default_factory=dict)
    lookups: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    outcome: str = "running"
    reason: str = ""
    made_by: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """The record as a JSON-able document, for ``of_any_version``."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def of_any_version(cls, document: Mapping[str, Any]) -> AttemptRecord:
        """Read a document of any version of Ratchet; unknown fields are ignored. Raises
        ``TypeError`` or ``AttributeError`` for any other document."""
        known = {name: value for name, value in document.items() if name in cls.__slots__}
        check_fields(cls, known)
        return cls(**known)


@dataclass(frozen=True, slots=True)
class TransactionRecord:
    """One transaction. ``plan``: that of its last attempt. ``attempts``: the last ``ATTEMPTS_KEPT``
    attempts, oldest first."""

    txid: int
    plan: Mapping[str, Any]
    plan_digest: str
    attempts: tuple[AttemptRecord, ...] = ()
    attempts_total: int = 0

    @property
    def closed_at(self) -> float | None:
        """When its last attempt was committed, in seconds since the epoch, by the clock of its
        driver; None if it was not."""
        last = self.attempts[-1] if self.attempts else None
        if last is None or last.commit_ms is None or last.outcome == "undone":
            return None
        return last.started_at + sum(each or 0 for each in (last.processing_ms, last.waiting_ms, last.commit_ms)) / 1000

    def after(self, attempts: tuple[AttemptRecord, ...]) -> TransactionRecord:
        """Return the record with these attempts before its own."""
        return replace(
            self,
            attempts=(*attempts, *self.attempts)[-ATTEMPTS_KEPT:],
            attempts_total=self.attempts_total + len(attempts),
        )

    def undone(self, reason: str) -> TransactionRecord:
        """Return the record of a committed transaction that was taken back."""
        last = [replace(each, outcome="undone", reason=reason) for each in self.attempts[-1:]]
        return replace(self, attempts=(*self.attempts[:-1], *last))

    def document(self) -> dict[str, Any]:
        """The record as a JSON-able document, for ``from_document``. The plan is not copied: it may
        have thousands of partitions."""
        attempts = [each.document() for each in self.attempts]
        return {**{name: getattr(self, name) for name in self.__slots__}, "attempts": attempts}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> TransactionRecord:
        """Read a document made by ``document``. Raises ``KeyError`` or ``TypeError`` for any other
        document."""
        attempts = tuple(map(AttemptRecord.of_any_version, document["attempts"]))
        known = {**document, "attempts": attempts}
        check_fields(cls, known)
        return cls(**known)


class Journal:
    """A ring of events, a ring of records, and a few running totals. Safe to use from several
    threads. ``made_by``: of all attempts."""

    def __init__(self, made_by: Mapping[str, str] = MappingProxyType({})) -> None:
        self._made_by = dict(made_by)
        self._events: deque[TransactionEvent] = deque(maxlen=EVENTS_MAX)
        self._closed: deque[TransactionRecord] = deque(maxlen=RECORDS_MAX)
        self._open: dict[int, TransactionRecord] = {}
        # when each live attempt entered its current phase
        self._phase_since_s: dict[tuple[int, int], float] = {}
        self._lock = threading.Lock()
        self.committed_rows = 0
        self._committed_rate = RecentRate()
        self.committed_bad_records = 0
        self.committed_late_records = 0
        self.committed_left_out_rows = 0
        self.read_rows = 0
        self.attempts_failed = 0
        self._figures = FiguresBuilder()
        self._failed_at_s: deque[float] = deque(maxlen=FAILURES_KEPT)
        self._traces: deque[tuple[int, int, str]] = deque(maxlen=TRACES_KEPT)

    # --- steps, in the order in which an attempt goes through them --------------------------------

    def emitted(self, txid: int, attempt_id: int, epoch: int, plan: Mapping[str, Any], digest: str) -> None:
        with self._lock:
            self._note("emitted", txid, attempt_id)
            known = self._open.get(txid) or TransactionRecord(txid, plan, digest)
            attempt = AttemptRecord(attempt_id=attempt_id, epoch=epoch, started_at=time.time(), made_by=self._made_by)
            attempts = (*known.attempts, attempt)[-ATTEMPTS_KEPT:]
            self._open[txid] = TransactionRecord(txid, plan, digest, attempts, known.attempts_total + 1)
            self._phase_since_s[(txid, attempt_id)] = time.monotonic()

    def processed(
        self,
        txid: int,
        attempt_id: int,
        rows: Mapping[str, int],
        spent_s: Mapping[str, float] | None = None,
        lookups: Mapping[str, Mapping[str, float]] | None = None,
        **counts: int | None,
    ) -> None:
        """``spent_s``: of each component. ``lookups``: as in ``AttemptRecord``. ``counts``:
        ``source_rows``, ``source_bytes``, ``bad_records``, ``oldest_ms``, ``newest_ms``."""
        with self._lock:
            self._note("processed", txid, attempt_id)
            self.read_rows += counts.get("source_rows") or 0
            took_ms, busy_ms = self._lap(txid, attempt_id), _in_ms(spent_s or {})
            self._change(
                txid,
                attempt_id,
                processing_ms=took_ms,
                rows=rows,
                component_ms=busy_ms,
                lookups=dict(lookups or {}),
                **counts,
            )

    def committing(self, txid: int, attempt_id: int) -> None:
        with self._lock:
            self._note("committing", txid, attempt_id)
            self._change(txid, attempt_id, waiting_ms=self._lap(txid, attempt_id))

    def commit_phase_done(
        self,
        txid: int,
        attempt_id: int,
        rows: Mapping[str, int],
        spent_s: Mapping[str, float] | None = None,
        *,
        late_records: Mapping[str, int] | None = None,
        left_out_rows: Mapping[str, int] | None = None,
        lookups: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """The states have been written. The transaction is not closed yet."""
        with self._lock:
            known = self._attempt(txid, attempt_id)
            if known is not None:
                busy_ms = dict(known.component_ms)
                for component_id, more_ms in _in_ms(spent_s or {}).items():
                    busy_ms[component_id] = round(busy_ms.get(component_id, 0.0) + more_ms, 3)
                self._change(
                    txid,
                    attempt_id,
                    commit_ms=self._lap(txid, attempt_id),
                    rows={**known.rows, **rows},
                    component_ms=busy_ms,
                    late_records=dict(late_records or {}),
                    left_out_rows=dict(left_out_rows or {}),
                    lookups={**known.lookups, **(lookups or {})},
                    outcome="committed",
                )

    def committed(self, txid: int) -> AttemptRecord | None:
        """The last attempt has durably closed the transaction. Returns its record."""
        with self._lock:
            closed = self._open.pop(txid, None)
            attempt = closed.attempts[-1] if closed is not None else None
            self._note("committed", txid, attempt.attempt_id if attempt is not None else 0)
            if closed is not None and attempt is not None:
                self.committed_rows += attempt.source_rows
                self._committed_rate.add(attempt.source_rows)
                self.committed_bad_records += attempt.bad_records
                self.committed_late_records += sum(attempt.late_records.values())
                self.committed_left_out_rows += sum(attempt.left_out_rows.values())
                self._figures.committed(attempt)
                self._closed.append(closed)
            for key in [each for each in self._phase_since_s if each[0] <= txid]:
                del self._phase_since_s[key]
            return attempt

    def failed(
        self, txid: int, attempt_id: int, reason: str, *, kind: str = "error", component: str = "", trace: str = ""
    ) -> None:
        """``kind``: of the failure. ``component``: the one that failed. ``trace``: of an error in
        user code."""
        with self._lock:
            self._note("failed", txid, attempt_id, reason)
            self.attempts_failed += 1
            self._figures.failed(kind, component)
            self._failed_at_s.append(time.monotonic())
            if trace:
                self._traces.append((txid, attempt_id, trace))
            self._end(txid, attempt_id, "failed", reason)

    def cancelled(self, txid: int, attempt_id: int, reason: str) -> bool:
        """Return False when the attempt is unknown, or had already failed, been cancelled or been
        rolled back."""
        with self._lock:
            self._note("cancelled", txid, attempt_id, reason)
            return self._end(txid, attempt_id, "cancelled", reason)

    def rolling_back(self, txid: int, attempt_id: int) -> None:
        with self._lock:
            self._note("rolling back", txid, attempt_id)

    def rolled_back(self, txid: int, attempt_id: int) -> None:
        with self._lock:
            self._note("rolled back", txid, attempt_id)
            self._end(txid, attempt_id, "rolled back", "what was planned is gone from the source")

    def elapsed_s(self, txid: int, attempt_id: int) -> float:
        """Seconds that a live attempt has spent in its current phase; 0 for any other."""
        with self._lock:
            since_s = self._phase_since_s.get((txid, attempt_id))
            return time.monotonic() - since_s if since_s is not None else 0.0

    def leads(self) -> None:
        """A leadership has begun."""
        with self._lock:
            self._figures.leaderships += 1

    # --- queries ----------------------------------------------------------------------------------

    def events(self) -> list[TransactionEvent]:
        """All kept events, oldest first."""
        with self._lock:
            return list(self._events)

    def records(self) -> list[TransactionRecord]:
        """Closed transactions, oldest first, then those in flight."""
        with self._lock:
            return [*self._closed, *(self._open[txid] for txid in sorted(self._open))]

    def record(self, txid: int) -> TransactionRecord | None:
        """The record of a transaction that is not closed yet, or None."""
        with self._lock:
            return self._open.get(txid)

    def figures(self) -> TransactionFigures:
        """The counters so far."""
        with self._lock:
            return self._figures.seen()

    def rows_per_second(self) -> float:
        """Source rows committed per second, over the last minute."""
        with self._lock:
            return self._committed_rate.per_second()

    def failures_within(self, seconds: float) -> int:
        """The number of recent failed attempts, at most ``FAILURES_KEPT``."""
        since_s = time.monotonic() - seconds
        with self._lock:
            return sum(each >= since_s for each in self._failed_at_s)

    def traces(self, txid: int) -> dict[int, str]:
        """The traces of a transaction's attempts, as far as they are kept."""
        with self._lock:
            return {attempt_id: trace for each, attempt_id, trace in self._traces if each == txid}

    def forget_open(self) -> None:
        """A leadership has ended. Forget the transactions in flight, which are now the next
        leader's.
        """
        with self._lock:
            self._figures.forget_retrying()
            self._open.clear()
            self._phase_since_s.clear()

    # --- inside, with the lock held ---------------------------------------------------------------

    def _note(self, kind: str, txid: int, attempt_id: int, detail: str = "") -> None:
        self._events.append(TransactionEvent(kind, txid, attempt_id, time.monotonic(), detail))

    def _lap(self, txid: int, attempt_id: int) -> float | None:
        """Milliseconds since the current phase began, or None for an unknown attempt. Starts the
        next phase."""
        since_s = self._phase_since_s.get((txid, attempt_id))
        if since_s is None:
            return None
        now = self._phase_since_s[(txid, attempt_id)] = time.monotonic()
        return round((now - since_s) * 1000, 3)

    def _attempt(self, txid: int, attempt_id: int) -> AttemptRecord | None:
        known = self._open.get(txid)
        found = [each for each in known.attempts if each.attempt_id == attempt_id] if known is not None else []
        return found[0] if found else None

    def _change(self, txid: int, attempt_id: int, **changes: Any) -> None:
        known = self._open.get(txid)
        if known is not None:
            attempts = (replace(each, **changes) if each.attempt_id == attempt_id else each for each in known.attempts)
            self._open[txid] = replace(known, attempts=tuple(attempts))

    def _end(self, txid: int, attempt_id: int, outcome: str, reason: str) -> bool:
        known = self._attempt(txid, attempt_id)
        if known is None or known.outcome not in ("running", "committed"):
            return False
        self._change(txid, attempt_id, outcome=outcome, reason=reason)
        self._figures.ended(outcome)
        self._phase_since_s.pop((txid, attempt_id), None)
        return True


def _in_ms(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(each * 1000, 3) for name, each in seconds.items()}
