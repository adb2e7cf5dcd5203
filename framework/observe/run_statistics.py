"""The counters of transactions in a run: distributions, and totals by kind.

A transaction costs a few additions here, whatever the number of its records. Source of the form:
https://prometheus.io/docs/practices/histograms/.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from framework.observe.journal import AttemptRecord

#: Upper bounds in seconds, for the phases of a transaction. A message timeout is 30 s by default.
PHASE_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
#: Upper bounds in seconds, for the age of records at their commit. A backlog may be days old.
LATENCY_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3_600.0, 86_400.0)
BATCH_RECORDS_BOUNDS = (1.0, 10.0, 100.0, 1_000.0, 10_000.0, 100_000.0, 1_000_000.0, 10_000_000.0)
BATCH_BYTES_BOUNDS = tuple(float(1 << bits) for bits in range(10, 34, 3))  # 1 KiB to 2 GiB


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution of values. ``counts[i]``: number of values above the previous bound and up to
    ``bounds[i]``; the last count is for values above all bounds. ``sum``: of all values."""

    bounds: Sequence[float]
    counts: Sequence[int]
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)


class Histogram:
    """Counts values by their size. For one thread at a time.

    >>> seconds = Histogram((0.1, 1.0))
    >>> for value in (0.05, 0.1, 0.5, 7.0):
    ...     seconds.observe(value)
    >>> seconds.seen().counts
    (2, 1, 1)
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Add one value. A negative value (a clock was set) counts as 0, because a sum must never
        fall.
        """
        value = max(value, 0.0)
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def seen(self) -> Distribution:
        """The distribution so far."""
        return Distribution(self._bounds, tuple(self._counts), self._sum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrying:
    """The failure behind the present retries. ``since``: time of the first one, in seconds since
    the Unix epoch."""

    component: str
    kind: str
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionFigures:
    """A snapshot. Counts are of this process, and never fall.

    * ``outcomes``: of attempts that have ended: outcome -> number.
    * ``failures``: kind -> number of failed attempts.
    * ``last_commit_at``: when this process last closed a transaction, in seconds since the Unix
      epoch; None before.
    * ``leaderships``: how often this process has become the leader.
    * Distributions, over committed transactions: seconds of each phase, records and bytes of their
      batches, and the age of the oldest and of the newest record of each batch, in seconds, when it
      was closed.
    * ``component_s``: component -> seconds that its tasks were busy with it, in committed
      transactions.
    * ``late_records``: component -> records that were late there, in committed transactions.
    * ``left_out_rows``: component -> rows due by time that it refused, in committed transactions.
    * ``lookups``: ``component/function`` -> kind -> its sum over committed transactions, as in
      ``LookupCounts``.
    """

    processing_s: Distribution
    waiting_s: Distribution
    commit_s: Distribution
    batch_records: Distribution
    batch_bytes: Distribution
    oldest_s: Distribution
    newest_s: Distribution
    outcomes: Mapping[str, int]
    failures: Mapping[str, int]
    last_commit_at: float | None
    retrying: Retrying | None
    leaderships: int
    component_s: Mapping[str, float]
    late_records: Mapping[str, int]
    left_out_rows: Mapping[str, int]
    lookups: Mapping[str, Mapping[str, float]]


class FiguresBuilder:
    """Builds the figures from the events of transactions. For one thread at a time: the journal's
    lock.
    """

    def __init__(self) -> None:
        self._phases = {name: Histogram(PHASE_BOUNDS_S) for name in ("processing", "waiting", "commit")}
        self._records, self._bytes = Histogram(BATCH_RECORDS_BOUNDS), Histogram(BATCH_BYTES_BOUNDS)
        self._oldest, self._newest = Histogram(LATENCY_BOUNDS_S), Histogram(LATENCY_BOUNDS_S)
        self._outcomes: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._component_s: dict[str, float] = defaultdict(float)
        self._late_records: Counter[str] = Counter()
        self._left_out_rows: Counter[str] = Counter()
        self._lookups: dict[str, dict[str, float]] = {}
        self._last_commit_at: float | None = None
        self._retrying: Retrying | None = None
        self.leaderships = 0

    def committed(self, attempt: AttemptRecord) -> None:
        now = time.time()
        for name, took_ms in (
            ("processing", attempt.processing_ms),
            ("waiting", attempt.waiting_ms),
            ("commit", attempt.commit_ms),
        ):
            if took_ms is not None:
                self._phases[name].observe(took_ms / 1000)
        self._records.observe(attempt.source_rows)
        self._bytes.observe(attempt.source_bytes)
        for histogram, stamp_ms in ((self._oldest, attempt.oldest_ms), (self._newest, attempt.newest_ms)):
            if stamp_ms is not None and stamp_ms > 0:  # 0: the producer has no clock
                histogram.observe(now - stamp_ms / 1000)
        for component_id, busy_ms in attempt.component_ms.items():
            self._component_s[component_id] += max(busy_ms, 0.0) / 1000
        self._late_records.update(attempt.late_records)
        self._left_out_rows.update(attempt.left_out_rows)
        for name, counts in attempt.lookups.items():
            before = self._lookups.get(name, {})
            self._lookups[name] = {kind: before.get(kind, 0) + much for kind, much in counts.items()}
        self._outcomes["committed"] += 1
        self._last_commit_at, self._retrying = now, None

    def ended(self, outcome: str) -> None:
        """An attempt has ended without a commit: failed, cancelled, rolled back."""
        self._outcomes[outcome] += 1

    def failed(self, kind: str, component: str) -> None:
        self._failures[kind] += 1
        known = self._retrying
        if known is None or (known.component, known.kind) != (component, kind):
            self._retrying = Retrying(component=component, kind=kind, since=time.time())

    def forget_retrying(self) -> None:
        """The leadership has ended: retries are now the next leader's."""
        self._retrying = None

    def seen(self) -> TransactionFigures:
        return TransactionFigures(
            processing_s=self._phases["processing"].seen(),
            waiting_s=self._phases["waiting"].seen(),
            commit_s=self._phases["commit"].seen(),
            batch_records=self._records.seen(),
            batch_bytes=self._bytes.seen(),
            oldest_s=self._oldest.seen(),
            newest_s=self._newest.seen(),
            outcomes=dict(self._outcomes),
            failures=dict(self._failures),
            last_commit_at=self._last_commit_at,
            retrying=self._retrying,
            leaderships=self.leaderships,
            component_s=dict(self._component_s),
            late_records=dict(self._late_records),
            left_out_rows=dict(self._left_out_rows),
            lookups=dict(self._lookups),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreFigures:
    """A snapshot of a core topology's counters. Counts are of this process, and never fall.

    * ``errors``: (component, kind of the error) -> number.
    * ``recoveries``: over all leaderships.
    * ``checkpoint_s``: seconds of the committed checkpoints.
    * ``last_checkpoint_at``: when this process last committed a checkpoint, in seconds since the
      Unix epoch; None before.
    """

    leaderships: int
    errors: Mapping[tuple[str, str], int]
    recoveries: int
    checkpoint_s: Distribution
    last_checkpoint_at: float | None


class CoreFiguresBuilder:
    """Builds the figures from the events of a core topology. For one thread at a time."""

    def __init__(self) -> None:
        self._errors: Counter[tuple[str, str]] = Counter()
        self._checkpoints = Histogram(PHASE_BOUNDS_S)
        self._preparing: tuple[int, float] | None = None
        self._last_checkpoint_at: float | None = None
        self._former_recoveries = 0
        self._recoveries = 0
        self.leaderships = 0

    def leads(self) -> None:
        """A leadership has begun. Its recoveries are counted from 0."""
        self.leaderships += 1
        self._former_recoveries, self._recoveries = self._former_recoveries + self._recoveries, 0

    def failed(self, component: str, kind: str) -> None:
        self._errors[(component, kind)] += 1

    def preparing(self, txid: int, at_s: float) -> None:
        """The marker of this checkpoint was sent. ``at_s``: monotonic."""
        if self._preparing is None or self._preparing[0] != txid:
            self._preparing = (txid, at_s)

    def checkpoint(self, txid: int, at_s: float, recoveries: int) -> None:
        """This checkpoint has been committed. ``recoveries``: of this leadership."""
        self._recoveries = recoveries
        if self._preparing is not None and self._preparing[0] == txid:
            self._checkpoints.observe(at_s - self._preparing[1])
            self._preparing, self._last_checkpoint_at = None, time.time()

    def seen(self) -> CoreFigures:
        return CoreFigures(
            leaderships=self.leaderships,
            errors=dict(self._errors),
            recoveries=self._former_recoveries + self._recoveries,
            checkpoint_s=self._checkpoints.seen(),
            last_checkpoint_at=self._last_checkpoint_at,
        )
