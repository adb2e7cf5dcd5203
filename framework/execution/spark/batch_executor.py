"""Runs batches on Spark: each phase of an attempt is one job over a single chain of RDDs.

A record of an RDD is ``(partition of the next level, Record)``, a handful per task. ``partitionBy``
moves records between levels. The result of a processing phase is materialised once, by ``persist``
and ``localCheckpoint`` together: ``persist`` ends PySpark's pipelining, ``localCheckpoint`` turns a
lost block into an error instead of a recomputation.

A small batch runs collapsed: all levels in one Spark task, without a shuffle. Its result travels
through the driver. Its commit is a Spark task too, unless every component of the commit phase
allows it to run on the driver. If possible, such a task stays for the next small batch
(``resident_task.py``); otherwise each is a job of its own.

Reports return through an accumulator, because the action that materialises a result runs only in
the JVM. No task is repeated inside an attempt: when Spark repeats one, the repetition fails (C10).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import cloudpickle
from pyspark import RDD, SparkContext, TaskContext
from pyspark.accumulators import Accumulator, AccumulatorParam

from framework.errors import InvariantViolation, RetryableError
from framework.execution.failures import FailureKind, FrameFailed, TaskFailure
from framework.execution.gc_tuning import collect_rarely
from framework.execution.messages import (
    AttemptHeader,
    CommitterState,
    FrameOutput,
    FrameRows,
    Piece,
    Record,
    Seed,
    TaskReport,
)
from framework.execution.payload_encryption import decrypt, encrypt
from framework.execution.plan import ExecutionPlan, Layout, Phase
from framework.execution.ports import DeadAttempts, PhaseResult, ProcessingJob, held_rows, layout_of, seeds, summarise
from framework.execution.single_task_phase import expected_reports, run_commit, run_processing
from framework.execution.spark.dataframes import SqlFrames
from framework.execution.spark.resident_task import ResidentTask
from framework.execution.spark.spark_context import COMMIT_POOL, PROCESSING_POOL, Spark
from framework.execution.spark.worker_errors import python_part, worker_failure
from framework.execution.tasks import PlannedTopology, run_level
from framework.observe.logs import get_logger
from framework.topology.spouts import PartitionedSpout

__all__ = ["SparkExecutor"]

_log = get_logger()
#: A collapsed batch with a larger result is run again, spread: then the result stays on the
#: executors.
COLLAPSED_RESULT_BYTES_MAX = 4 << 20
#: This many jobs run before the first batch: Spark's first dozens of jobs take twice as long as
#: later ones.
WARM_UP_JOBS = 12
#: How often a start is retried when a worker or an executor is lost while it warms up.
WARM_UP_TRIES = 3
#: Part of Spark's error when code in a worker has raised. Such an error would recur in each batch.
_PYTHON_ERROR = "PythonException"

Reports = list[TaskReport]
#: Spark adds reports in a thread of its own, while phases remove theirs.
_reports_lock = threading.Lock()


class _ReportsParam(AccumulatorParam):  # type: ignore[misc]
    """Concatenates reports. On the driver, Spark's own thread adds them."""

    def zero(self, value: Reports) -> Reports:
        return []

    def addInPlace(self, value1: Reports, value2: Reports) -> Reports:
        with _reports_lock:
            value1.extend(value2)
        return value1


# --- in Python workers ----------------------------------------------------------------------------

_topologies: dict[str, PlannedTopology] = {}


@dataclass(frozen=True)
class _Payload:
    """The plan and the configuration, pickled and encrypted once per run, decrypted and unpickled
    once per worker process. ``layout``: of the batch."""

    key: str
    encrypted: bytes
    layout: Layout = Layout.EVEN

    def topology(self) -> PlannedTopology:
        found = _topologies.get(self.key)
        if found is None:
            # a worker serves one run at a time: earlier plans are no longer needed
            _topologies.clear()
            found = _topologies[self.key] = PlannedTopology(*cloudpickle.loads(decrypt(self.encrypted)))
            # PySpark runs a full garbage collection after every task. With all imports of a worker
            # it takes 50 ms and more. Later collections leave the present objects out.
            collect_rarely()
        return found.for_batch(self.layout)


def refuse_repetition() -> None:
    context = TaskContext.get()
    if context is not None and context.attemptNumber() > 0:
        raise InvariantViolation("Spark repeated a task inside an attempt (C10); the attempt fails and is replayed")


@dataclass(frozen=True, kw_only=True)
class _LevelFunction:
    """One level over one partition of an RDD."""

    payload: _Payload
    phase: Phase
    level: int
    width: int
    reports: Accumulator[Reports]
    header: AttemptHeader

    def __call__(self, partition: int, records: Iterable[tuple[int, Record]]) -> Iterator[tuple[int, Record]]:
        refuse_repetition()
        mine: Reports = []
        yield from run_level(
            self.payload.topology(),
            self.phase,
            (record for _, record in records),
            mine.append,
            level=self.level,
            partition=partition,
            width=self.width,
            encode=True,
            header=self.header,
        )
        self.reports.add(mine)


class _CollapsedPhase(NamedTuple):
    """A phase that one task runs. ``header``: of a commit phase, None for processing. ``layout``:
    of the batch."""

    header: AttemptHeader | None
    records: Sequence[Record]
    layout: Layout


@dataclass(frozen=True)
class _RunCollapsed:
    """Runs a whole phase in one task. Returns its reports and its result records; None in place of
    the reports when the result is too large."""

    payload: _Payload

    def __call__(self, asked: _CollapsedPhase) -> tuple[Reports | None, Sequence[Record]]:
        reports: Reports = []
        topology = self.payload.topology().for_batch(asked.layout, collapsed=True)
        if asked.header is not None:
            run_commit(topology, asked.header, asked.records, reports.append)
            return reports, []
        result = run_processing(topology, [each for each in asked.records if isinstance(each, Seed)], reports.append)
        small = sum(_size(record) for record in result) <= COLLAPSED_RESULT_BYTES_MAX
        return (reports, result) if small else (None, [])


@dataclass(frozen=True)
class _CollapsedFunction:
    """As ``_RunCollapsed``, as a job of its own."""

    run: _RunCollapsed

    def __call__(self, asked: Iterable[_CollapsedPhase]) -> Iterator[tuple[Reports | None, Sequence[Record]]]:
        refuse_repetition()
        yield from map(self.run, asked)


@dataclass(frozen=True)
class _BeginToStay:
    """Prepares a task that stays."""

    payload: _Payload

    def __call__(self) -> None:
        refuse_repetition()
        self.payload.topology()


class _WarmUp:
    """Load the code for batches into a worker, and connect its readers."""

    def __init__(self, payload: _Payload) -> None:
        self.payload = payload

    def __call__(self, items: Iterable[Any]) -> Iterator[int]:
        topology = self.payload.topology()
        for component in topology.plan.components.values():
            made = topology.instance(component)
            for task in range(component.parallelism if isinstance(made, PartitionedSpout) else 0):
                reader = made.reader(topology.conf, topology.context(component, task))
                with contextlib.suppress(RetryableError):  # the first batch will wait for the source, and report it
                    reader.warm_up()
                reader.close()
        collect_rarely()  # includes what the readers have imported
        yield sum(1 for _ in items)


def _size(record: Record) -> int:
    """The bytes that a record carries out of its process."""
    if isinstance(record, Piece) and isinstance(record.payload, bytes):
        return len(record.payload)
    return len(record.kept) if isinstance(record, CommitterState) else 0


class _Passing:
    """Keeps all records except rows for Spark SQL."""

    def __call__(self, addressed: tuple[int, Record]) -> bool:
        return not isinstance(addressed[1], FrameRows)


class _PayloadsOf:
    """Selects a DataFrame bolt's rows of one input."""

    def __init__(self, component_id: str, edge: int) -> None:
        self.component_id = component_id
        self.edge = edge

    def __call__(self, addressed: tuple[int, Record]) -> list[bytes]:
        record = addressed[1]
        mine = isinstance(record, FrameRows) and (record.component_id, record.edge) == (self.component_id, self.edge)
        return [record.payload] if mine else []  # type: ignore[union-attr, list-item]


class _AsOutput:
    """Addresses rows from Spark SQL to the tasks that emit them."""

    def __init__(self, component_id: str, offset: int, tasks: int) -> None:
        self.component_id = component_id
        self.offset = offset
        self.tasks = tasks

    def __call__(self, made: tuple[int, int, bytes]) -> tuple[int, Record]:
        partition, sequence, payload = made
        return self.offset + partition % self.tasks, FrameOutput(self.component_id, (partition, sequence), payload)


def _materialise(rdd: RDD[tuple[int, Record]]) -> None:
    """Compute an RDD once, keep it, and turn a lost block into an error instead of a
    recomputation."""
    rdd.persist()
    rdd.localCheckpoint()
    rdd.is_checkpointed = True  # PySpark does not set this, and would recompute a released result
    try:
        rdd._jrdd.count()  # an action inside the JVM, which does not read the result into Python
    except BaseException:
        rdd.unpersist(blocking=False)  # a failed or cancelled job leaves no blocks behind
        raise


def _pass_on(items: Iterable[Any]) -> Iterator[Any]:
    yield from items


def by_partition(key: int) -> int:
    return key


# --- on the driver --------------------------------------------------------------------------------


@dataclass
class _Result:
    """The result of a processing phase, on the executors (``spread``) or on the driver
    (``records``). ``held``: edge -> number of its rows that wait for the commit phase."""

    spread: RDD[tuple[int, Record]] | None
    records: Sequence[Record]
    partitions: int
    held: Mapping[int, int] = field(default_factory=dict)


class SparkExecutor:
    """The ``BatchExecutor`` on Spark. One per run. It starts a Spark context unless one with the
    required settings is active. ``resident``: whether a task may stay for small batches."""

    def __init__(
        self,
        plan: ExecutionPlan,
        conf: Mapping[str, Any],
        spark_settings: Mapping[str, str],
        *,
        collapse_records_max: int = 20_000,
        resident: bool = True,
    ) -> None:
        self._plan = plan
        self._spark = Spark(f"ratchet {plan.topology_id}", spark_settings)
        self._collapse_records_max = collapse_records_max
        pickled = cloudpickle.dumps((plan, dict(conf)))
        self._payload = _Payload(f"{plan.topology_id}:{id(self)}:{hash(pickled)}", encrypt(pickled))
        self._topology = PlannedTopology(plan, conf)
        self._reports: Accumulator[Reports] | None = None
        self._results: dict[AttemptHeader, _Result] = {}
        self._frames: SqlFrames | None = None
        self._dead = DeadAttempts()
        self._lock = threading.Lock()
        self._working = threading.Event()  # set when a batch arrives, and at the end of the run
        self._run_collapsed = _RunCollapsed(self._payload)
        self._resident: ResidentTask | None = None
        if resident and collapse_records_max > 0 and not plan.frame_outputs:
            self._resident = ResidentTask(
                self._spark,
                plan.topology_id,
                prepare=_BeginToStay(self._payload),
                work=self._run_collapsed,
                dead=self._dead,
            )

    def start(self) -> None:
        context = self._spark.start()
        self._reports = context.accumulator([], _ReportsParam())
        if self._plan.frame_outputs:
            self._frames = SqlFrames(self._spark, self._topology)
        self._warm_up()
        threading.Thread(target=self._stay_warm, name="ratchet-warm-up", daemon=True).start()

    def process(self, job: ProcessingJob) -> PhaseResult:
        self._working.set()
        small = job.record_count is not None and job.record_count <= self._collapse_records_max
        small = small and not self._plan.frame_outputs  # Spark SQL needs jobs of its own
        return self._guarded(job.header, Phase.PROCESSING, lambda: self._process(job, small))

    def commits_in_one_step(self, header: AttemptHeader) -> bool:
        with self._lock:
            result = self._results.get(header)
        return (
            result is not None
            and result.spread is None
            and self._plan.for_batch(Layout.EVEN, collapsed=True).commits_in_one_step
        )

    def commit(self, header: AttemptHeader) -> PhaseResult:
        return self._guarded(header, Phase.COMMIT, lambda: self._commit(header))

    def cancel(self, header: AttemptHeader) -> None:
        self._dead.add(header)
        if self._resident is not None:
            self._resident.cancel(header)
        context = self._spark.active
        if context is not None:
            for phase in Phase:
                context.cancelJobGroup(_group(header, phase))
        self.release(header)

    def release(self, header: AttemptHeader) -> None:
        with self._lock:
            result = self._results.pop(header, None)
        if result is not None and result.spread is not None:
            result.spread.unpersist(blocking=False)

    def close(self) -> None:
        self._working.set()
        for header in list(self._results):
            self.release(header)
        if self._resident is not None:
            self._resident.close()
        self._spark.stop()

    # --- phases -----------------------------------------------------------------------------------

    def _process(self, job: ProcessingJob, small: bool) -> PhaseResult:
        layout = layout_of(self._plan, job)
        if small:
            topology = self._topology.for_batch(layout, collapsed=True)
            asked = _CollapsedPhase(None, seeds(topology.plan, job), layout)
            reports, records = self._collapsed(job.header, Phase.PROCESSING, asked)
            if reports is not None:
                return self._keep(job.header, _Result(None, records, 1), reports, topology)
        start: list[Seed] = seeds(self._plan, job)
        with self._jobs_of(job.header, Phase.PROCESSING) as context:
            rdd: RDD[tuple[int, Record]] = context.parallelize(list(enumerate(start)), len(start))
            with self._levels(rdd, Phase.PROCESSING, job.header, len(start), layout) as spread:
                _materialise(spread)
        reports = self._take_reports(job.header, Phase.PROCESSING)
        result = _Result(spread, (), spread.getNumPartitions())
        return self._keep(job.header, result, reports, self._topology.for_batch(layout))

    def _collapsed(
        self, header: AttemptHeader, phase: Phase, asked: _CollapsedPhase
    ) -> tuple[Reports | None, Sequence[Record]]:
        """Run a phase in one task: in the resident task if possible, or in a job."""
        answer = self._resident.run(header, asked) if self._resident is not None else None
        if answer is None:
            context = self._grouped(header, phase)
            answer = context.parallelize([asked], 1).mapPartitions(_CollapsedFunction(self._run_collapsed)).collect()[0]
        found: tuple[Reports | None, Sequence[Record]] = answer
        return found

    def _grouped(self, header: AttemptHeader, phase: Phase) -> SparkContext:
        """Returns the context, with this thread's jobs assigned to the phase's group and pool."""
        context = self._spark.context
        context.setJobGroup(_group(header, phase), f"{self._plan.topology_id} {header} {phase.value}", True)
        context.setLocalProperty("spark.scheduler.pool", COMMIT_POOL if phase is Phase.COMMIT else PROCESSING_POOL)
        return context

    @contextlib.contextmanager
    def _jobs_of(self, header: AttemptHeader, phase: Phase) -> Iterator[SparkContext]:
        """As ``_grouped``, for jobs that want all slots: no resident task stays meanwhile."""
        with self._resident.given_back() if self._resident is not None else contextlib.nullcontext():
            yield self._grouped(header, phase)

    @contextlib.contextmanager
    def _levels(
        self,
        rdd: RDD[tuple[int, Record]],
        phase: Phase,
        header: AttemptHeader,
        width: int,
        layout: Layout = Layout.EVEN,
    ) -> Iterator[RDD[tuple[int, Record]]]:
        """Yield the RDD of all levels of a phase over ``rdd``, which has ``width`` partitions.
        Intermediate results are freed afterwards."""
        kept: list[RDD[tuple[int, Record]]] = []
        plan, payload = self._plan.for_batch(layout), replace(self._payload, layout=layout)
        try:
            for number, level in enumerate(plan.levels(phase)):
                if number:
                    rdd = rdd.partitionBy(level.partitions, by_partition)
                    width = level.partitions
                rdd = rdd.mapPartitionsWithIndex(
                    _LevelFunction(
                        payload=payload,
                        phase=phase,
                        level=number,
                        width=width,
                        reports=self._accumulator(),
                        header=header,
                    )
                )
                frames = plan.frames_gathered_at(phase, number)
                if frames:
                    _materialise(rdd)
                    kept.append(rdd)
                    rdd = self._through_frames(rdd, plan, phase, header, frames)
            yield rdd
        finally:
            for each in kept:
                each.unpersist(blocking=False)

    def _through_frames(
        self,
        gathered: RDD[tuple[int, Record]],
        plan: ExecutionPlan,
        phase: Phase,
        header: AttemptHeader,
        components: Sequence[str],
    ) -> RDD[tuple[int, Record]]:
        """Replace the input rows of DataFrame bolts by the rows that Spark SQL makes from them."""
        if self._frames is None:
            raise InvariantViolation("the executor is not started")
        if any(each.failure is not None for each in self._reports_of(header, phase)):
            # the controls carry the failure to the tasks that would emit
            return gathered.filter(_Passing())
        parts = [gathered.filter(_Passing())]
        for component_id in components:
            names = {edge.input_name: edge.index for edge in plan.edges if edge.target == component_id}
            inputs = {name: gathered.flatMap(_PayloadsOf(component_id, edge)) for name, edge in names.items()}
            segment = plan.frame_outputs[(phase, component_id)]
            offset = plan.levels(phase)[segment.level].partition_of(segment, 0)
            made = self._frames.of_payloads(component_id, header, inputs)
            parts.append(made.map(_AsOutput(component_id, offset, segment.parallelism)))
        return self._spark.context.union(parts)

    def _commit(self, header: AttemptHeader) -> PhaseResult:
        with self._lock:
            result = self._results.get(header)
        if result is None:
            return PhaseResult(TaskFailure(FailureKind.RETRYABLE, "executor", 0, f"the result of {header} is gone"))
        reports: list[TaskReport] = []
        topology = self._topology.for_batch(Layout.EVEN, collapsed=result.spread is None)
        if result.spread is None and self._plan.commits_on_driver:
            run_commit(topology, header, result.records, reports.append, cancelled=lambda: header in self._dead)
        elif result.spread is None:
            reports = (
                self._collapsed(header, Phase.COMMIT, _CollapsedPhase(header, result.records, Layout.EVEN))[0] or []
            )
        else:
            with (
                self._jobs_of(header, Phase.COMMIT),
                self._levels(result.spread, Phase.COMMIT, header, result.partitions) as rdd,
            ):
                rdd._jrdd.count()
            reports = self._take_reports(header, Phase.COMMIT)
        expected = expected_reports(topology, Phase.COMMIT, spread=result.partitions)
        return summarise(topology.plan, Phase.COMMIT, reports, expected, result.held)

    def _keep(
        self, header: AttemptHeader, result: _Result, reports: Sequence[TaskReport], topology: PlannedTopology
    ) -> PhaseResult:
        expected = expected_reports(topology, Phase.PROCESSING)
        summary = summarise(topology.plan, Phase.PROCESSING, reports, expected)
        result = replace(result, held=held_rows(topology.plan, reports))
        with self._lock:
            wanted = summary.failure is None and header not in self._dead
            if wanted:
                self._results[header] = result
        if not wanted and result.spread is not None:
            result.spread.unpersist(blocking=False)
        return summary

    # --- inside -----------------------------------------------------------------------------------

    def _accumulator(self) -> Accumulator[Reports]:
        if self._reports is None:
            raise InvariantViolation("the executor is not started")
        return self._reports

    def _reports_of(self, header: AttemptHeader, phase: Phase) -> list[TaskReport]:
        """The reports of one phase of one attempt that have arrived so far."""
        gathered = self._accumulator().value
        with _reports_lock:
            return [each for each in gathered if each.header == header and each.phase is phase]

    def _take_reports(self, header: AttemptHeader, phase: Phase) -> list[TaskReport]:
        """Remove and return the reports of one phase of one attempt. Also discard those of
        cancelled attempts."""
        gathered = self._accumulator().value
        with _reports_lock:
            mine = [each for each in gathered if each.header == header and each.phase is phase]
            gathered[:] = [
                each
                for each in gathered
                if (each.header, each.phase) != (header, phase) and each.header not in self._dead
            ]
        return mine

    def _guarded(self, header: AttemptHeader, phase: Phase, run: Any) -> PhaseResult:
        """Run a phase. Convert any error of Spark into a failure of the attempt."""
        try:
            if header in self._dead:
                return PhaseResult(DeadAttempts.failure(header, phase))
            result: PhaseResult = run()
        except Exception as error:  # noqa: BLE001 - Spark wraps every error; the coordinator decides how to go on
            if header in self._dead:
                return PhaseResult(DeadAttempts.failure(header, phase))
            if isinstance(error, FrameFailed):
                return PhaseResult(error.failure)
            if isinstance(error, RetryableError):
                return PhaseResult(TaskFailure.of(error, "spark", 0))
            return PhaseResult(worker_failure(error, "spark"))
        return result

    def _warm_up(self) -> None:
        """Start the workers, load the code for batches into them, and connect their readers."""
        context = self._spark.context
        width = max(level.partitions for level in self._plan.processing)
        for left in reversed(range(WARM_UP_TRIES)):
            try:
                context.parallelize(range(width), width).mapPartitions(_WarmUp(self._payload)).collect()
                return
            except Exception as error:
                if left == 0 or _PYTHON_ERROR in str(error):
                    raise
                lines = python_part(error) or [type(error).__name__]
                _log.warning("spark.warm_up_failed", reason=lines[-1].strip()[:200])  # a worker or an executor was lost

    def _stay_warm(self) -> None:
        """Run small jobs with a shuffle until the first batch arrives, so that it finds compiled
        code. A batch does not wait for these jobs, because it warms up the code just as well.
        Afterwards a task may stay."""
        context = self._spark.active
        with contextlib.suppress(Exception):  # the context may be stopped meanwhile
            for _ in range(WARM_UP_JOBS):
                if context is None or self._working.is_set():
                    break
                context.parallelize([(0, 0)], 1).partitionBy(2, by_partition).mapPartitions(_pass_on).count()
            if self._resident is not None:
                self._resident.start()


def _group(header: AttemptHeader, phase: Phase) -> str:
    return f"{header.topology_id} {header} epoch {header.epoch} {phase.value}"
