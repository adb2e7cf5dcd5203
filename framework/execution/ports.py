"""The port through which a topology's batches are executed, and its data."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from framework.execution.failures import FailureKind, TaskFailure
from framework.execution.messages import AttemptHeader, Seed, TaskReport
from framework.execution.plan import Edge, ExecutionPlan, Layout, Phase
from framework.topology.bolts import LookupCounts
from framework.topology.spouts import ReadCounts, TransactionalSpout

#: The only partition in the plans of a general ``TransactionalSpout``. Its entry is ``{"txid": ..,
#: "metadata": the user's own}``.
GENERAL_PARTITION = "batch"


@dataclass(frozen=True, slots=True)
class ProcessingJob:
    """The processing phase of one attempt.

    * ``ranges``: the readers' input, per partition of the source.
    * ``record_count``: an upper bound of the records, None when unknown.
    * ``committed_txid``: the last committed txid, for emitters that clean up.
    * ``partition_records``: the number of records of each range, None when unknown.
    """

    header: AttemptHeader
    ranges: Mapping[str, Mapping[str, Any]]
    record_count: int | None = None
    committed_txid: int = 0
    partition_records: Mapping[str, int | None] = field(default_factory=dict)


class TaskTime(NamedTuple):
    """The working time of a task, in seconds since the Unix epoch, by the clock of its host.
    ``name``: its components and its number. ``failed``: why it failed, or empty."""

    name: str
    began: float
    ended: float
    failed: str

    @staticmethod
    def of(report: TaskReport) -> TaskTime:
        failed = str(report.failure) if report.failure is not None else ""
        return TaskTime(report.name, report.began, report.ended, failed)


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """The result of a phase. Without a failure, all row counts agree.

    * ``rows``: edge label -> (sent, received).
    * ``tasks``: the tasks that have reported, in order of their ends.
    * ``spent_s``: component -> seconds that its tasks were busy with it, summed.
    * ``late``: component -> records that came after the watermark.
    * ``left_out``: component -> rows due by time that it refused.
    * ``lookups``: ``component/function`` -> its lookups, summed over the tasks."""

    failure: TaskFailure | None = None
    rows: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    read: ReadCounts = field(default_factory=ReadCounts)
    tasks: Sequence[TaskTime] = ()
    _: KW_ONLY
    spent_s: Mapping[str, float] = field(default_factory=dict)
    late: Mapping[str, int] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)
    lookups: Mapping[str, LookupCounts] = field(default_factory=dict)


class TaskWatcher(Protocol):
    """Observes tasks of this process while they run, as ``replay`` does."""

    def emitted(self, edge: Edge, rows: pa.RecordBatch) -> None:
        """A component has emitted rows on an edge; a combiner may still merge them."""

    def failed(self, failure: TaskFailure, error: BaseException) -> None:
        """User code has raised an error, which ends its task."""


class DeadAttempts:
    """The attempts that an executor was told to cancel. They must neither start nor leave a result.
    Bounded: only attempts that may still be running matter, and these are few."""

    KEPT_MAX = 10_000

    def __init__(self) -> None:
        self._dead: dict[AttemptHeader, None] = {}
        self._lock = threading.Lock()

    def add(self, header: AttemptHeader) -> None:
        with self._lock:
            self._dead[header] = None
            if len(self._dead) > self.KEPT_MAX:
                del self._dead[next(iter(self._dead))]

    def __contains__(self, header: object) -> bool:
        with self._lock:
            return header in self._dead

    @staticmethod
    def failure(header: AttemptHeader, phase: Phase) -> TaskFailure:
        return TaskFailure(FailureKind.RETRYABLE, "executor", 0, f"{phase.value} of {header} cancelled")


class BatchExecutor(Protocol):
    """Runs phases. ``process`` and ``commit`` block. Several threads may call ``process``
    concurrently; ``commit`` runs in one thread at a time.

    An implementation never raises for errors in tasks: it returns a ``PhaseResult`` with a failure.
    """

    def start(self) -> None:
        """Open sessions, start workers and warm them up."""

    def process(self, job: ProcessingJob) -> PhaseResult:
        """Run the processing phase once and keep its result until ``release``."""

    def commits_in_one_step(self, header: AttemptHeader) -> bool:
        """Whether the commit of this attempt is one task, in this process, that can raise the
        header of its only state, write, and set ``done``, all in one step of the store. Called
        after ``process``."""

    def commit(self, header: AttemptHeader) -> PhaseResult:
        """Run the commit phase over the kept result, once. With ``header.opens_from``, the commit
        is a single step of the store; this is set only after ``commits_in_one_step`` returned True.
        """

    def cancel(self, header: AttemptHeader) -> None:
        """End an attempt's tasks as soon as possible and discard its result. Returns without
        waiting."""

    def release(self, header: AttemptHeader) -> None:
        """Discard the kept result of an attempt."""

    def close(self) -> None:
        """Cancel everything and release what ``start`` opened."""


def seeds(plan: ExecutionPlan, job: ProcessingJob) -> list[Seed]:
    """Make one seed per spout task: partition ``i`` of the source, in sorted order, goes to task
    ``i mod parallelism``; one task that stands for several reads their partitions in the order of
    these tasks. A partition that is known to contribute nothing is left out. The metadata
    of a general spout goes to every task (Storm's all grouping of its batch stream)."""
    spout = plan.components[plan.spout_id]
    if isinstance(spout.template, TransactionalSpout):
        return [Seed(job.header, job.ranges, job.committed_txid)] * spout.parallelism
    shares = _dealt(job.ranges, spout.parallelism * spout.merged_tasks)
    if spout.merged_tasks > 1:
        shares = [[partition for its in shares for partition in its]]
    return [
        Seed(
            job.header,
            {partition: job.ranges[partition] for partition in its if job.partition_records.get(partition) != 0},
            job.committed_txid,
        )
        for its in shares
    ]


def layout_of(plan: ExecutionPlan, job: ProcessingJob) -> Layout:
    """The layout for a batch. Depends only on the header and the batch's plan, so that a replay has
    the same layout."""
    if job.header.is_probe and job.header.tries_writes:
        return Layout.TRIAL
    return Layout.EVEN if _is_even(plan, job.partition_records) else Layout.UNEVEN


def _is_even(plan: ExecutionPlan, partition_records: Mapping[str, int | None]) -> bool:
    """Whether each spout task reads at least half of an even share of a batch. Depends only on the
    batch's plan, so that a replay has the same layout. False when the number of records is unknown,
    and for a general spout, whose emitters divide the batch themselves."""
    spout = plan.components[plan.spout_id]
    known = {partition: count for partition, count in partition_records.items() if count is not None}
    if not known or len(known) < len(partition_records) or isinstance(spout.template, TransactionalSpout):
        return False
    shares = [sum(known[partition] for partition in its) for its in _dealt(known, spout.parallelism)]
    return 2 * min(shares) * len(shares) >= sum(shares)


def _dealt(partitions: Iterable[str], tasks: int) -> list[list[str]]:
    ordered = sorted(partitions)
    return [ordered[task::tasks] for task in range(tasks)]


def held_rows(plan: ExecutionPlan, reports: Iterable[TaskReport]) -> dict[int, int]:
    """Edge -> number of rows sent in the processing phase that the commit phase will receive."""
    held: dict[int, int] = defaultdict(int)
    for report in reports:
        for edge, rows in report.sent.items():
            if plan.edges[edge].phase is Phase.COMMIT:
                held[edge] += rows
    return dict(held)


def summarise(
    plan: ExecutionPlan,
    phase: Phase,
    reports: Iterable[TaskReport],
    expected_tasks: int,
    held: Mapping[int, int] | None = None,
) -> PhaseResult:
    """Combine the reports of a phase. The result is a failure when a report or rows are missing.
    ``held``: for the commit phase, the result of ``held_rows`` for the processing phase."""
    collected = list(reports)
    sent: dict[int, int] = defaultdict(int, held or {})
    received: dict[int, int] = defaultdict(int)
    for report in collected:
        for edge, rows in report.sent.items():
            sent[edge] += rows
        for edge, rows in report.received.items():
            received[edge] += rows
    by_label = {
        plan.edges[edge].label: (sent.get(edge, 0), received.get(edge, 0)) for edge in sorted({*sent, *received})
    }
    failure = _worst([report.failure for report in collected if report.failure is not None])
    if failure is None:
        failure = _incomplete(plan, phase, collected, sent=sent, received=received, expected_tasks=expected_tasks)
    read = ReadCounts()
    spent_s: dict[str, float] = defaultdict(float)
    late: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    lookups: dict[str, LookupCounts] = {}
    for report in collected:
        read.add(report.read)
        for component_id, seconds in report.spent_s.items():
            spent_s[component_id] += seconds
        late.update(report.late)
        left_out.update(report.left_out)
        for name, counts in report.lookups.items():
            lookups[name] = lookups.get(name, LookupCounts()).plus(counts)
    times = [TaskTime.of(each) for each in collected]
    return PhaseResult(
        failure,
        by_label,
        read,
        times,
        spent_s=dict(spent_s),
        late=dict(late),
        left_out=dict(left_out),
        lookups=lookups,
    )


def _worst(failures: Sequence[TaskFailure]) -> TaskFailure | None:
    """The failure with the gravest consequence. All tasks downstream of a failed one report the
    same failure."""
    gravity = [
        FailureKind.FATAL,
        FailureKind.MISCONFIGURED,
        FailureKind.DATA_LOSS,
        FailureKind.STALE,
        FailureKind.BAD_RECORD,
        FailureKind.ERROR,
        FailureKind.RETRYABLE,
        FailureKind.FAILED,
    ]
    return min(failures, key=lambda each: gravity.index(each.kind), default=None)


def _incomplete(
    plan: ExecutionPlan,
    phase: Phase,
    reports: Sequence[TaskReport],
    *,
    sent: Mapping[int, int],
    received: Mapping[int, int],
    expected_tasks: int,
) -> TaskFailure | None:
    committers = sum(report.committers for report in reports)
    problem = ""
    if len(reports) != expected_tasks:
        problem = f"{len(reports)} of {expected_tasks} tasks reported"
    elif committers != plan.commit_tasks:
        problem = f"{committers} of {plan.commit_tasks} committer tasks reported"
    for edge in plan.edges:
        delivered_later = edge.phase is Phase.COMMIT and phase is Phase.PROCESSING
        if not delivered_later and sent.get(edge.index, 0) != received.get(edge.index, 0):
            problem = f"edge {edge.label}: {sent.get(edge.index, 0)} rows sent, {received.get(edge.index, 0)} received"
    return TaskFailure(FailureKind.ERROR, "exchange", 0, problem) if problem else None
