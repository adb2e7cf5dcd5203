"""A task: one segment of one level over one partition's records. The same code runs in Spark and in
this process.

``run_level`` is the boundary: it handles every error of user code, and yields records for the next
level and one report. A task reads its input to the end, whatever happens.
"""

from __future__ import annotations

import copy
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any

import cloudpickle
import pyarrow as pa

from framework.arrow_spill import Payload, Spill, SpilledBatch, decode_batch, encode_batch
from framework.errors import (
    BadRecordError,
    InvariantViolation,
    RetryableError,
    TopologyError,
    reason_of,
    text_of,
)
from framework.execution.collector import TaskCollector
from framework.execution.failures import FailureKind, TaskFailure, users_errors
from framework.execution.messages import (
    AttemptHeader,
    CommitterState,
    Control,
    FrameOutput,
    FrameRows,
    Piece,
    Record,
    Seed,
    TaskReport,
)
from framework.execution.payload_encryption import decrypt, encrypt
from framework.execution.plan import Edge, ExecutionPlan, Layout, Phase, Segment, TaskComponent
from framework.execution.ports import DeadAttempts, TaskWatcher
from framework.observe.logs import get_logger
from framework.topology.bolts import ArrowBolt, BaseBasicBolt, BaseBatchBolt, Bolt, Combiner, Committer
from framework.topology.context import TopologyContext
from framework.topology.fields import Fields
from framework.topology.refused_row_bisection import RefusedTogether, accepted
from framework.topology.spouts import PartitionedSpout, ReadCounts, TransactionalSpout, on_stream
from framework.topology.tuples import rows_of, tuple_class

Addressed = tuple[int, Record]
_log = get_logger()


def _dropped(stream: str, batch: pa.RecordBatch, task: int | None) -> None:
    """Takes what a committer emits that only tries its writes."""


class PlannedTopology:
    """An execution plan with its configuration. Makes copies of components for tasks. One per
    worker process and run. ``watcher``: observes its tasks."""

    def __init__(self, plan: ExecutionPlan, conf: Mapping[str, Any], watcher: TaskWatcher | None = None) -> None:
        self.plan = plan
        self.conf = conf
        self.watcher = watcher
        self._pickled: dict[str, bytes] = {}
        self._shared = threading.local()
        self._layouts: dict[int, PlannedTopology] = {id(plan): self}
        self._parallelisms = {each.id: each.parallelism for each in plan.components.values()}

    def for_batch(self, layout: Layout, *, collapsed: bool = False) -> PlannedTopology:
        """This topology in the layout for a batch, as ``ExecutionPlan.for_batch`` says. All layouts
        share the pickled components and the shared spouts."""
        plan = self.plan.for_batch(layout, collapsed=collapsed)
        found = self._layouts.get(id(plan))
        if found is None:
            found = self._layouts[id(plan)] = PlannedTopology(plan, self.conf, self.watcher)
            found._pickled, found._shared = self._pickled, self._shared
            found._parallelisms = {**self._parallelisms, **found._parallelisms}
        return found

    def instance(self, component: TaskComponent) -> Any:
        """A new copy of a component; for a shared spout, this thread's only copy."""
        shared: dict[str, PartitionedSpout] = self._shared.__dict__
        if component.id in shared:
            return shared[component.id]
        if component.factory is not None:
            made = component.factory()
            if isinstance(made, Bolt):
                made.bind(component.id, component.inputs, component.parallelism)
            return made
        pickled = self._pickled.get(component.id)
        if pickled is None:
            pickled = self._pickled[component.id] = cloudpickle.dumps(component.template)
        made = cloudpickle.loads(pickled)
        if isinstance(made, PartitionedSpout) and made.is_shared:
            shared[component.id] = made
        return made

    def context(self, component: TaskComponent, task: int) -> TopologyContext:
        return TopologyContext(
            self.plan.topology_id, component.id, task, component.parallelism, self.conf, parallelisms=self._parallelisms
        )


class _Stopwatch:
    """Measures the time a task spends in each component, in seconds. The cost of passing a
    component's rows to a fused one counts for the fused one."""

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = defaultdict(float)
        self._component_id: str | None = None
        self._since = 0.0

    def turn_to(self, component_id: str | None) -> str | None:
        """Charge the time from now on to this component (None: to none). Returns the previous
        one."""
        now, before = time.perf_counter(), self._component_id
        if before is not None:
            self.spent_s[before] += now - self._since
        self._component_id, self._since = component_id, now
        return before


class _UserCodeFailed(Exception):
    """Carries a failure out of nested calls in a task."""

    def __init__(self, failure: TaskFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class _Outbox:
    """Collects a task's output, as pieces per edge and target task, and counts the rows. In the
    commit phase, many rows wait in a file, because millions of rows may fall due in one transaction
    (ADR 124)."""

    def __init__(self, level: _LevelTask) -> None:
        self._level = level
        self.records: list[Addressed] = []
        self.rows: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))  # next partition -> edge -> rows
        self._sequence = 0
        self._spill = Spill(f"{level.report.name}: more rows are emitted") if level.phase is Phase.COMMIT else None

    def send(self, edge: Edge, source_task: int, batch: pa.RecordBatch, task: int | None) -> None:
        level = self._level
        for target_task, rows in edge.cut(batch, source_task + self._sequence, task):
            piece = Piece(
                edge.index,
                target_task=target_task,
                source_task=source_task,
                sequence=self._sequence,
                rows=rows.num_rows,
                payload=level.packed(rows),
            )
            self._sequence += 1
            self.put(piece)
            level.report.sent[edge.index] = level.report.sent.get(edge.index, 0) + rows.num_rows

    def put(self, piece: Piece) -> None:
        """Address a piece to its target task if that is in the next level, otherwise to the task of
        the next level that forwards it."""
        partition, arrives = self._level.next_partition(piece)
        if self._spill is not None:
            piece = _kept(self._spill, piece, self._level.partition)
        self.records.append((partition, piece))
        if arrives:
            self.rows[partition][piece.edge] += piece.rows


class _Runner:
    """One component of the segment."""

    def __init__(
        self, task: _LevelTask, component: TaskComponent, index: int, restored: tuple[Bolt, TaskCollector] | None
    ) -> None:
        self.task = task
        self.component = component
        self.index = index
        self.attempt = task.header.attempt(component.id, index)
        self._combiners: dict[tuple[int, int | None], Combiner | None] = {}  # edge, and task of a direct stream
        self._edges: dict[str, list[Edge]] = defaultdict(list)
        for edge in task.topology.plan.edges_from(component.id):
            self._edges[edge.stream].append(edge)
        self.context = task.topology.context(component, index)
        self._due_inputs = component.due_inputs if task.phase is Phase.COMMIT else frozenset()
        self._fresh = restored is None
        if restored is not None:
            self.bolt, self.collector = restored
        else:
            with self.guarded():
                self.bolt = task.topology.instance(component)
            self.collector = TaskCollector(component.id, component.streams, component.direct_streams)
            self.collector.subscribers = frozenset(self._edges)
        self.collector.sink = self._deliver
        self.collector.check_alive = task.check_alive

    def prepare(self, kept: bytes | None = None) -> None:
        """Prepare the component. ``kept``: a committer's state from the processing phase."""
        if self._fresh and isinstance(self.bolt, Bolt):
            with self.guarded():
                self.bolt.prepare(self.task.topology.conf, self.context, self.collector, self.attempt)
                if kept is not None and isinstance(self.bolt, Committer):
                    self.bolt.take_for_commit(kept)
                if self._due_inputs and self.component.leaves_out_rows and isinstance(self.bolt, Committer):
                    self.bolt.leave_out_refused(self._leave_out)

    def guarded(self, component_id: str | None = None) -> _Guard:
        """Run user code under a guard. ``component_id``: of the bolt whose combiner runs here;
        None: this component."""
        return _Guard(component_id or self.component.id, self.index, self.task.watch)

    def read(self, seed: Seed) -> None:
        """For a spout: read or emit this task's part of the plan."""
        spout = self.bolt
        with self.guarded():
            if isinstance(spout, PartitionedSpout):
                self._read(spout, seed)
            elif isinstance(spout, TransactionalSpout):
                self._emit(spout, seed)
            else:
                raise InvariantViolation(f"{self.component.id} got a seed and is not a spout")

    def _read(self, spout: PartitionedSpout, seed: Seed) -> None:
        reader = spout.reader(self.task.topology.conf, self.context)
        reader.check_alive = self.task.check_alive  # type: ignore[method-assign]
        try:
            for rows in reader.read_all(self.attempt, seed.ranges):
                stream, batch = on_stream(rows)
                self.collector.emit_arrow(batch, stream)
        finally:
            reader.close()
        counts = reader.counts
        self.task.report.read.add(counts if counts.records else ReadCounts(self.collector.emitted))

    def _emit(self, spout: TransactionalSpout, seed: Seed) -> None:
        emitter = spout.emitter(self.task.topology.conf, self.context)
        try:
            emitter.cleanup_before(seed.committed_txid + 1)
            # tasks of one process share the metadata, so each gets its own copy
            for meta in seed.ranges.values():
                emitter.emit_batch(self.attempt, copy.deepcopy(meta["metadata"]), self.collector)
            self.collector.flush()
        finally:
            emitter.close()
        self.task.report.read.add(ReadCounts(self.collector.emitted))

    def execute(self, edge: Edge, fields: Fields, batch: pa.RecordBatch) -> None:
        self.task.check_alive()
        bolt, report = self.bolt, self.task.report
        report.received[edge.index] = report.received.get(edge.index, 0) + batch.num_rows
        with self.guarded():
            is_due = (edge.source, edge.stream) in self._due_inputs
            if self._due_inputs and isinstance(bolt, Committer):
                bolt._on_refused_due = self._leave_out if is_due else None
            if isinstance(bolt, ArrowBolt) and is_due and bolt.takes_batches_whole:
                self._execute_in_parts(bolt, batch)
            elif isinstance(bolt, ArrowBolt):
                self._emit_all(bolt.execute_arrow(batch))
            elif isinstance(bolt, BaseBasicBolt):
                made, attempt = tuple_class(fields, edge.source, edge.stream), self.attempt
                execute, collector = bolt.execute, self.collector
                for values in rows_of(batch):
                    execute(made(attempt, values), collector)
            elif isinstance(bolt, BaseBatchBolt):
                made, attempt, take = tuple_class(fields, edge.source, edge.stream), self.attempt, bolt.execute
                for values in rows_of(batch):
                    take(made(attempt, values))
            else:
                raise TopologyError(
                    f"bolt {self.component.id!r} is a {type(bolt).__name__}: subclass BaseBasicBolt, BaseBatchBolt, "
                    "BaseTransactionalBolt or ArrowBolt"
                )

    def _execute_in_parts(self, bolt: ArrowBolt, batch: pa.RecordBatch) -> None:
        """Give a bolt the rows of a batch that it does not refuse."""
        for emitted in accepted(batch, partial(self._emitted, bolt), self._leave_out):
            for stream, rows, task in emitted:
                self._deliver(stream, decode_batch(rows), task)

    def _emitted(self, bolt: ArrowBolt, batch: pa.RecordBatch) -> list[tuple[str, Payload, int | None]]:
        """Return the rows that a bolt emits for a batch, after it has taken the whole batch."""
        emitted: list[tuple[str, Payload, int | None]] = []
        spill = Spill(f"{self.component.id}: it emits more rows for a batch")
        self.collector.sink = lambda stream, rows, task: emitted.append((stream, spill.keep(rows), task))
        try:
            self._emit_all(bolt.execute_arrow(batch))
        finally:
            self.collector.sink = self._deliver
        return emitted

    def _leave_out(self, error: BadRecordError) -> None:
        self.task.leave_out(self.component.id, error)

    def finish_batch(self) -> None:
        self.task.check_alive()
        with self.guarded():
            if isinstance(self.bolt, ArrowBolt):
                self._emit_all(self.bolt.finish_batch())
            elif isinstance(self.bolt, BaseBatchBolt):
                self.bolt.finish_batch()
        if isinstance(self.bolt, Committer) and self.bolt.late_records:
            self.task.report.late[self.component.id] = self.bolt.late_records
        if isinstance(self.bolt, Bolt):
            for name, counts in self.bolt._lookup_counts().items():
                self.task.report.lookups[f"{self.component.id}/{name}"] = counts

    def flush(self) -> None:
        """Send all buffered and combined rows. The component emits nothing more in this phase."""
        with self.guarded():
            self.collector.flush()
            for (index, task), combiner in self._combiners.items():
                edge = self.task.topology.plan.edges[index]
                with self.guarded(edge.target):
                    parts = iter(combiner.finish_parts() if combiner is not None else ())
                    combined = next(parts, None)
                while combined is not None:
                    if combined.num_rows:
                        self._send(edge, combined, task)
                    with self.guarded(edge.target):
                        combined = next(parts, None)
        self._combiners.clear()

    def _try_writes(self, committer: Committer) -> None:
        alone = not self.task.header.tries_in_order or self.component.id != self.task.topology.plan.only_writer
        self.collector.sink, self.collector.subscribers = _dropped, frozenset()
        try:
            with self.guarded():
                self._take_watermarks(committer)
                committer.try_writes(alone=alone)
        except _UserCodeFailed as error:
            is_of_try = error.failure.error != RefusedTogether.__name__
            raise _UserCodeFailed(replace(error.failure, is_of_try=is_of_try)) from error

    def _take_watermarks(self, committer: Any) -> None:
        watermarks = self.task.header.watermarks
        for source in self.component.inputs if committer.tries_at_watermarks else ():
            if (row := watermarks.get(source.component_id)) is not None:
                committer.execute_arrow(pa.RecordBatch.from_pylist([dict(row)], source.fields.schema()))

    def freeze(self) -> CommitterState:
        """Pickle a committer between its last ``execute`` and its ``finish_batch`` (C13). If the
        committer keeps only a part (``keep_for_commit``), the commit phase makes a new copy: the
        same component, in the same attempt, with the same rows taken in. Its emitted rows have left
        the collector."""
        kept, header = None, self.task.header
        if isinstance(self.bolt, Committer):
            with self.guarded():
                kept = self.bolt.keep_for_commit()
            if header.is_probe and self.component.id in header.tries_writes:
                self._try_writes(self.bolt)
                kept = b""  # nothing of a probe is committed
        if kept is not None:
            return CommitterState(self.component.id, self.index, kept, whole=False)
        self.collector.sink = None
        with self.guarded():
            try:
                pickled = cloudpickle.dumps((self.bolt, self.collector))
            except MemoryError:
                raise
            except users_errors() as error:
                raise TopologyError(
                    f"committer {self.component.id!r} cannot be pickled after execute() ({error}): keep connections, locks "
                    "and generators out of its attributes; open them in finish_batch()"
                ) from error
            return CommitterState(self.component.id, self.index, encrypt(pickled))

    def _emit_all(self, batches: Iterable[pa.RecordBatch] | None) -> None:
        for batch in batches or ():
            self.collector.emit_arrow(batch)

    def _deliver(self, stream: str, batch: pa.RecordBatch, task: int | None) -> None:
        watcher = self.task.topology.watcher
        for edge in self._edges[stream]:
            if watcher is not None:
                watcher.emitted(edge, batch)
            key = (edge.index, task)
            if key not in self._combiners:
                self._combiners[key] = self.task.combiner_for(edge)
            combiner = self._combiners[key]
            if combiner is None:
                self._send(edge, batch, task)
            else:
                with self.guarded(edge.target):
                    combiner.add(batch)

    def _send(self, edge: Edge, batch: pa.RecordBatch, task: int | None) -> None:
        if task is not None:
            edge.check_task(task)
        if edge.fused and edge.phase is self.task.phase:
            report = self.task.report
            report.sent[edge.index] = report.sent.get(edge.index, 0) + batch.num_rows
            self.task.runners[edge.target].execute(edge, self.component.streams[edge.stream], batch)
        # rows that a committer emitted in the processing phase stay with its state, for the same
        # task
        elif edge.fused:
            self.task.outbox.send(edge, self.index, batch, self.index)
        else:
            self.task.outbox.send(edge, self.index, batch, task)


class _Guard:
    """Converts an exception of user code into a failure that names component and task. Measures the
    time."""

    __slots__ = ("_before", "_component_id", "_index", "_watch")

    def __init__(self, component_id: str, index: int, watch: _Stopwatch) -> None:
        self._component_id = component_id
        self._index = index
        self._watch = watch

    def __enter__(self) -> None:
        self._before = self._watch.turn_to(self._component_id)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._watch.turn_to(self._before)
        if error is not None and isinstance(error, users_errors()) and not isinstance(error, _UserCodeFailed):
            about = _tuple_in(trace)
            failure = TaskFailure.of(error, self._component_id, self._index, about)
            raise _UserCodeFailed(replace(failure, nothing_after=True)) from error


#: The most characters of a tuple in a failure.
_TUPLE_CHARACTERS = 80


def _tuple_in(trace: Any) -> str:
    """The tuple that a bolt was executing when an error occurred; empty if there is none. It is
    taken from the traceback's frames, which costs nothing as long as there is no error."""
    for frame, _ in traceback.walk_tb(trace):
        if frame.f_code is _Runner.execute.__code__ and "values" in frame.f_locals:
            fields, values = frame.f_locals["fields"], frame.f_locals["values"]
            shown = ", ".join(f"{name}={value!r}" for name, value in zip(fields, values, strict=False))
            return shown if len(shown) <= _TUPLE_CHARACTERS else f"{shown[:_TUPLE_CHARACTERS]}…"
    return ""


@dataclass(eq=False)
class _LevelTask:
    """The state of one task while it runs."""

    topology: PlannedTopology
    header: AttemptHeader
    _: KW_ONLY
    phase: Phase
    level: int
    partition: int
    width: int
    encode: bool
    cancelled: Callable[[], bool] | None

    def __post_init__(self) -> None:
        name = f"level {self.level} task {self.partition} of {self.width}"
        self.report = TaskReport(self.header, self.phase, name=name, began=time.time())
        self.outbox = _Outbox(self)
        self.watch = _Stopwatch()
        self.runners: dict[str, _Runner] = {}
        plan = self.topology.plan
        self._fields_of = {edge.index: plan.components[edge.source].streams[edge.stream] for edge in plan.edges}

    def check_alive(self) -> None:
        """Stop the task when its attempt was cancelled."""
        if self.cancelled is not None and self.cancelled():
            raise _UserCodeFailed(DeadAttempts.failure(self.header, self.phase))

    def next_partition(self, piece: Piece) -> tuple[int, bool]:
        """The partition of the next level for a piece, and whether it is used there."""
        return self.topology.plan.next_partition(self.phase, self.level, self.partition, piece.edge, piece.target_task)

    def onward(self) -> int:
        """The partition of the next level that forwards records for later levels."""
        return self.topology.plan.onward(self.phase, self.level, self.partition)

    def combiner_for(self, edge: Edge) -> Combiner | None:
        target = self.topology.plan.components[edge.target]
        bolt = target.template if target.factory is None else self.topology.instance(target)
        combiner = bolt.combiner() if isinstance(bolt, Bolt) else None
        if combiner is not None and self.phase is Phase.COMMIT and (edge.source, edge.stream) in target.due_inputs:
            combiner.leave_out_refused(partial(self.leave_out, target.id))
        return combiner

    def leave_out(self, component_id: str, error: BadRecordError) -> None:
        """Count a row that is left out because a component refuses it. The log has the reason of
        the first one."""
        left_out = self.report.left_out
        left_out[component_id] = left_out.get(component_id, 0) + 1
        if left_out[component_id] == 1:
            reason = reason_of(text_of(error))
            _log.warning("commit.row_left_out", component=component_id, txid=self.header.txid, reason=reason)

    def packed(self, payload: Payload) -> Payload:
        """Rows in the form in which they leave this task: encoded if they leave the process."""
        return encode_batch(payload) if self.encode and isinstance(payload, pa.RecordBatch) else payload

    def leaving(self) -> Iterator[Addressed]:
        """The records that leave this task."""
        for partition, record in self.outbox.records:
            if self.encode and isinstance(record, (Piece, FrameRows)) and isinstance(record.payload, SpilledBatch):
                yield partition, record._replace(payload=record.payload.read())
            else:
                yield partition, record

    def run(self, arrived: _Arrived) -> None:
        """Pass on what is for later levels, and run the components of this one."""
        for record in arrived.passing:
            if isinstance(record, Piece):
                self.outbox.put(record._replace(payload=self.packed(record.payload)))
            else:
                self.outbox.records.append((self._onward_of(record), record))
        if arrived.begins_commit or arrived.states:
            self._run_committers(arrived)
        else:
            self._run_slot(arrived)

    def _onward_of(self, record: Record) -> int:
        if isinstance(record, CommitterState) and self.phase is Phase.COMMIT:
            plan = self.topology.plan
            return plan.next_partition_of_state(record.component_id, record.task, self.level, self.partition)
        return self.onward()

    def _run_committers(self, arrived: _Arrived) -> None:
        """Run the committers whose states this task got."""
        if arrived.states:
            committers = dict.fromkeys(each.component_id for each in arrived.states)
            self.report.name = f"{'+'.join(committers)} {self.partition} of {self.width}"
        for state in arrived.states:
            segment = self.topology.plan.segment_of[(self.phase, state.component_id)]
            self.run_segment(segment, state.task, None, arrived.emitted_by(state), state)
            self.report.committers += 1

    def _run_slot(self, arrived: _Arrived) -> None:
        """Run the fused components that the plan has for this partition."""
        plan = self.topology.plan
        segment, index = plan.levels(self.phase)[self.level].slot(self.partition)
        self.report.name = f"{'+'.join(segment.components)} {index} of {segment.parallelism}"
        first = segment.components[0]
        frame = plan.frame_outputs.get((self.phase, first))
        if self.phase is Phase.COMMIT and first in plan.commit_roots:
            raise _UserCodeFailed(_without_state(first, index))
        if frame is None:
            self.run_segment(segment, index, arrived.seed, arrived.pieces, None)
        elif frame == segment:
            self.emit_frame(first, index, arrived.outputs)
        else:
            self.gather_frame(first, arrived.pieces)

    def gather_frame(self, component_id: str, pieces: list[Piece]) -> None:
        """Count this task's rows for a DataFrame bolt and pass them on. Spark SQL takes them
        between this level and the next."""
        for piece in sorted(pieces, key=arrival):
            self.report.received[piece.edge] = self.report.received.get(piece.edge, 0) + piece.rows
            rows = FrameRows(component_id, piece.edge, self.packed(piece.payload))
            self.outbox.records.append((self.onward(), rows))

    def emit_frame(self, component_id: str, task: int, outputs: list[FrameOutput]) -> None:
        """Emit the rows that Spark SQL made from a DataFrame bolt's input."""
        runner = self.runners[component_id] = _Runner(self, self.topology.plan.components[component_id], task, None)
        for output in sorted(outputs, key=lambda each: each.order):
            with runner.guarded():
                runner.collector.emit_arrow(decode_batch(output.payload))
        runner.flush()

    def run_segment(
        self, segment: Segment, task: int, seed: Seed | None, pieces: list[Piece], restored: CommitterState | None
    ) -> None:
        """Run the fused components of one task from first tuple to last."""
        plan = self.topology.plan
        self.let_go_of_runners()
        kept: dict[str, bytes] = {}
        for component_id in segment.components:
            unpickled = None
            if restored is not None and component_id == restored.component_id:
                if restored.whole:
                    with _Guard(component_id, task, self.watch):
                        unpickled = cloudpickle.loads(decrypt(restored.kept))
                else:
                    kept[component_id] = restored.kept
            self.runners[component_id] = _Runner(self, plan.components[component_id], task, unpickled)
        for component_id, runner in self.runners.items():
            runner.prepare(kept.get(component_id))
        if seed is not None:
            self.runners[segment.components[0]].read(seed)
        for piece in sorted(pieces, key=arrival):
            edge = plan.edges[piece.edge]
            runner = self.runners[edge.target]
            with runner.guarded():
                batch = decode_batch(piece.payload)
            runner.execute(edge, self._fields_of[piece.edge], batch)
        for component_id, runner in self.runners.items():
            held = self.phase is Phase.PROCESSING and component_id in plan.commit_roots
            if not held:
                runner.finish_batch()
            runner.flush()
            if held:
                self.outbox.records.append((self.onward(), runner.freeze()))
                self.report.committers += 1

    def let_go_of_runners(self) -> None:
        """Break the reference cycles of runners, so that their rows are freed immediately, and not
        by the garbage collector many batches later."""
        for runner in self.runners.values():
            runner.collector.sink = None
        self.runners = {}

    def let_go(self) -> None:
        """As ``let_go_of_runners``, for the whole task, which has ended."""
        self.let_go_of_runners()
        self.outbox.records = []

    def controls(self, failure: TaskFailure | None) -> Iterator[Addressed]:
        """Make one control for every task of the next level."""
        levels = self.topology.plan.levels(self.phase)
        if self.level + 1 == len(levels):
            return
        for partition in range(levels[self.level + 1].partitions):
            rows = dict(self.outbox.rows.get(partition, {}))
            yield partition, Control(self.header, self.partition, self.width, rows, failure)


class _Arrived:
    """The records of one task, by kind."""

    def __init__(self, plan: ExecutionPlan, phase: Phase, level: int, partition: int) -> None:
        self._plan, self._phase, self._level, self._partition = plan, phase, level, partition
        self._spill = Spill(f"{phase.value} level {level} partition {partition}: more rows arrive")
        self._failure: TaskFailure | None = None
        self.begins_commit = phase is Phase.COMMIT and level == 0
        self.header: AttemptHeader | None = None
        self.controls: list[Control] = []
        self.seed: Seed | None = None
        self.pieces: list[Piece] = []
        self.states: list[CommitterState] = []
        self.outputs: list[FrameOutput] = []
        #: Pieces and committer states that this task passes on.
        self.passing: list[Record] = []

    def take(self, record: Record) -> None:
        match record:
            case Control():
                self.controls.append(record)
                self.header = record.header
            case Seed():
                self.seed = record
                self.header = record.header
            case FrameOutput():
                self.outputs.append(record)
            case FrameRows():
                raise InvariantViolation(f"rows for {record.component_id!r} went past Spark SQL")
            case CommitterState():
                (self.states if self._commits_here(record) else self.passing).append(record)
            case Piece():
                (self.pieces if self._is_for_this_level(record) else self.passing).append(
                    self._in_memory_or_file(record)
                )

    def failure(self) -> TaskFailure | None:
        """Why the task cannot run its components on what has arrived."""
        failure = self._failure or _upstream_failure(self.controls)
        if failure is None and self.seed is None and not self.begins_commit:
            failure = _miscounted(self.controls, self.pieces, level=self._level, partition=self._partition)
        return failure

    def emitted_by(self, state: CommitterState) -> list[Piece]:
        """The rows that a committer emitted in ``execute``."""
        edges = self._plan.edges
        return [
            piece
            for piece in self.pieces
            if piece.target_task == state.task and edges[piece.edge].source == state.component_id
        ]

    def _commits_here(self, state: CommitterState) -> bool:
        return self._phase is Phase.COMMIT and self._plan.commits_at(state.component_id) == self._level

    def _is_for_this_level(self, piece: Piece) -> bool:
        edge = self._plan.edges[piece.edge]
        return edge.phase is self._phase and self._plan.segment_of[(self._phase, edge.target)].level == self._level

    def _in_memory_or_file(self, piece: Piece) -> Piece:
        """The piece; in the commit phase with its rows in a file if they are many. If the disk does
        not take them, the task fails."""
        if self._phase is Phase.COMMIT and self._failure is None and isinstance(piece.payload, bytes):
            try:
                return _kept(self._spill, piece, self._partition)
            except _UserCodeFailed as full:
                self._failure = full.failure
        return piece


def run_level(
    topology: PlannedTopology,
    phase: Phase,
    records: Iterable[Record],
    report: Callable[[TaskReport], None],
    *,
    level: int,
    partition: int,
    width: int,
    encode: bool,
    header: AttemptHeader | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Iterator[Addressed]:
    """Run one task and yield (partition of the next level, record).

    * ``width``: the number of tasks that run this level.
    * ``records``: those of this partition.
    * ``header``: for the first level of the commit phase, whose records contain none.
    * ``encode``: pieces leave the process.
    * ``cancelled``: called before each record batch, if a task can find out that it was cancelled.

    The records after the last level of the processing phase (committer states, and pieces for the
    commit phase) are the result of the phase, and stay in their partition. They include the rows
    that a committer emitted in ``execute`` to bolts fused to it, for use in the commit phase (C31).
    """
    arrived = _Arrived(topology.plan, phase, level, partition)
    for record in records:  # always to the end: a task that leaves input unread costs its worker
        arrived.take(record)
    header = arrived.header or header
    if header is None:
        raise InvariantViolation(f"{phase.value} level {level} partition {partition} heard of no attempt")
    task = _LevelTask(
        topology,
        header,
        phase=phase,
        level=level,
        partition=partition,
        width=width,
        encode=encode,
        cancelled=cancelled,
    )
    failure = arrived.failure()
    try:
        if failure is None:
            task.run(arrived)
    except _UserCodeFailed as stopped:
        failure = stopped.failure
        if topology.watcher is not None and stopped.__cause__ is not None:
            topology.watcher.failed(failure, stopped.__cause__)
    task.report.failure, task.report.ended = failure, time.time()
    task.report.spent_s = dict(task.watch.spent_s)
    report(task.report)
    if failure is None:
        yield from task.leaving()
    else:
        task.outbox.rows.clear()
    yield from task.controls(failure)
    task.let_go()


def _kept(spill: Spill, piece: Piece, partition: int) -> Piece:
    """The piece with its rows in memory or in a file. Raises ``_UserCodeFailed`` if the disk does
    not take them."""
    try:
        return piece._replace(payload=spill.keep(piece.payload))
    except RetryableError as error:
        raise _UserCodeFailed(TaskFailure.of(error, "exchange", partition)) from error


def arrival(piece: Piece) -> tuple[int, int, int]:
    """Sort key of pieces: rows are ordered by their senders, whatever the order in which the
    shuffle delivered them (C11)."""
    return piece.edge, piece.source_task, piece.sequence


def _without_state(component_id: str, task: int) -> TaskFailure:
    return TaskFailure(FailureKind.ERROR, "exchange", task, f"task {task} of {component_id!r} got no state to commit")


def _upstream_failure(controls: list[Control]) -> TaskFailure | None:
    return next((each.failure for each in controls if each.failure is not None), None)


def _miscounted(controls: list[Control], pieces: list[Piece], *, level: int, partition: int) -> TaskFailure | None:
    """Return a failure unless every task of the previous level has reported and all rows that these
    tasks sent have arrived."""
    senders = sorted(each.upstream for each in controls)
    expected: dict[int, int] = defaultdict(int)
    for control in controls:
        for edge, rows in control.rows.items():
            expected[edge] += rows
    found: dict[int, int] = defaultdict(int)
    for piece in pieces:
        found[piece.edge] += piece.rows
    upstreams = controls[0].upstreams if controls else 0
    if upstreams and senders == list(range(upstreams)) and dict(expected) == dict(found):
        return None
    heard = f"heard from tasks {senders} of {upstreams}" if upstreams else "heard from no task above"
    error = (
        f"level {level} partition {partition}: {heard}, expected rows per edge {dict(expected)}, found {dict(found)}"
    )
    return TaskFailure(FailureKind.ERROR, "exchange", partition, error)
