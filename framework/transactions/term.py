"""A term: the time that one leadership lasts. Recovers, feeds the coordinator, carries its commands out.

Each term recovers everything from the store and the states, as after a crash; nothing but the executor outlives it.
Threads: the loop itself, the planner's, one for each phase under way. They speak to the loop through one queue, which
ends with the term, so that an answer of an earlier term reaches nobody. A phase that hangs holds up its own thread only:
the attempt is cancelled, its fence closed, and the thread is left to end when it can.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Union

import structlog

from framework.errors import (
    ConfigError,
    CorruptStateError,
    DataLossError,
    InvariantViolation,
    LeadershipLostError,
    RatchetError,
    RetryableError,
    StaleWriterError,
)
from framework.execution.ports import BatchExecutor, PhaseResult, ProcessingJob
from framework.execution.records import AttemptHeader, FailureKind, TaskFailure
from framework.observe.journal import AttemptRecord, Journal
from framework.topology.bolts import Bolt
from framework.topology.builder import Topology
from framework.topology.context import TopologyContext
from framework.topology.fencing import Standing
from framework.topology.spouts import PartitionPlanner, PartitionProgress, Spout
from framework.transactions.commit import CommitPhase
from framework.transactions.coordinator import (
    AskPlan,
    Cancel,
    Command,
    Commit,
    Committed,
    Coordinator,
    Event,
    Persist,
    Plan,
    Planned,
    Process,
    Processed,
    Release,
    RollBack,
    RolledBack,
    Started,
    Stop,
    StopRequested,
    Tick,
    plan_digest,
)
from framework.transactions.documents import TopologyDocuments
from framework.transactions.planning import PlanningThread
from framework.transactions.sources import CoordinatorPlanner, ImmutableSource, kind_of, planner_of
from framework.transactions.store import CoordinationStore, Leadership

_log = structlog.get_logger()

TICK_S = 0.1
#: How long the end of a term waits for phases that were cancelled. What hangs longer is fenced, and left alone.
ABANDON_AFTER_S = 10.0


@dataclass(frozen=True, slots=True)
class DriverSettings:
    """What a driver needs of the configuration. ``empty_batch_every_s``: None, or how often an idle source makes an empty
    batch. ``accept_changed_topology``: the user's word that a topology may go on from the state of another shape.
    ``standby``: leave the lead to another driver first."""

    max_pending: int = 1
    message_timeout_ms: int = 30_000
    max_attempts: int = 5
    idle_poll_max_s: float = 0.1
    empty_batch_every_s: float | None = None
    accept_changed_topology: bool = False
    standby: bool = False
    conf: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class DriverStatus:
    """A snapshot of the driver. ``phase``: starting, standby, running, stopped, failed. ``repeating``: what failed and is
    tried again, until a transaction is committed."""

    phase: str = "starting"
    epoch: int = 0
    committed_txid: int = 0
    in_flight: dict[int, str] = field(default_factory=dict)
    in_flight_rows: int | None = None
    lag: int | None = None
    last_error: str | None = None
    waiting_for: str | None = None
    repeating: str | None = None


@dataclass(frozen=True, slots=True)
class _PlannerFailed:
    failure: TaskFailure


@dataclass(frozen=True, slots=True)
class _Deposed:
    error: Exception


@dataclass(frozen=True, slots=True)
class _PhaseEnded:
    """A phase with what it counted; ``event`` goes to the coordinator."""

    event: Processed | Committed | RolledBack
    result: PhaseResult


_Message = Union[Event, _PhaseEnded, _PlannerFailed, _Deposed]


class Term:
    """One leadership. ``run`` returns the failure that ended the topology, or None when it was stopped; it raises
    ``StaleWriterError`` or ``LeadershipLostError`` when the leadership is another's now."""

    def __init__(
        self,
        topology: Topology,
        executor: BatchExecutor,
        store: CoordinationStore,
        leadership: Leadership,
        settings: DriverSettings,
        journal: Journal,
        update: Callable[..., None],
    ) -> None:
        self._topology = topology
        self._executor = executor
        self._store = store
        self._leadership = leadership
        self._settings = settings
        self._journal = journal
        self._update = update
        self._messages: queue.Queue[_Message] = queue.Queue()
        self._stop_requested = threading.Event()
        self._failure: TaskFailure | None = None
        self._planning: PlanningThread | None = None
        self._coordinator: Coordinator | None = None
        self._planner: PartitionPlanner | None = None
        self._documents: TopologyDocuments | None = None
        self._commit: CommitPhase | None = None
        self._incarnation = ""
        self._headers: dict[tuple[int, int], AttemptHeader] = {}
        self._threads: list[threading.Thread] = []
        self._plans: tuple[Plan, list[Plan]] = ({}, [])  # committed, in flight: as last published

    # --- from other threads --------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        self._stop_requested.set()
        self._messages.put(StopRequested())

    def call_planner(self, function: Callable[[PartitionPlanner], Any]) -> Future[Any] | None:
        return self._planning.call(function) if self._planning is not None else None

    def covers(self, goal: Plan) -> bool:
        if self._coordinator is None or self._planner is None:
            return False
        return self._planner.covers(self._coordinator.committed_plan or {}, goal)

    def progress(self) -> Mapping[str, PartitionProgress]:
        committed, in_flight = self._plans
        return self._planner.progress(committed, in_flight) if self._planner is not None else {}

    # --- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> TaskFailure | None:
        coordinator = self._recover()
        self._update(phase="running", epoch=self._leadership.epoch, committed_txid=coordinator.currtx - 1, in_flight={})
        _log.info(
            "driver.leads", topology=self._topology.id, epoch=self._leadership.epoch, next_txid=coordinator.currtx
        )
        self._carry_out(coordinator.handle(Started(), _now_ms()))
        last_tick = time.monotonic()
        while not coordinator.stopped:
            message: _Message
            try:
                message = self._messages.get(timeout=TICK_S)
            except queue.Empty:
                message = Tick()
            if self._leadership.lost:
                raise LeadershipLostError(f"the leadership of epoch {self._leadership.epoch} has ended")
            if isinstance(message, _Deposed):
                raise message.error
            if isinstance(message, _PlannerFailed):
                self._topology_failed(message.failure)
                message = StopRequested()
            if isinstance(message, _PhaseEnded):
                message = self._noted(message)
            self._carry_out(coordinator.handle(message, _now_ms()))
            if time.monotonic() - last_tick > TICK_S:
                last_tick = time.monotonic()
                self._carry_out(coordinator.handle(Tick(), _now_ms()))
            self._publish(coordinator)
        return self._failure

    def close(self) -> None:
        for header in list(self._headers.values()):
            self._executor.cancel(header)
        if self._planning is not None:
            self._planning.close()
        deadline = time.monotonic() + ABANDON_AFTER_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        hanging = [thread.name for thread in self._threads if thread.is_alive()]
        if hanging:
            _log.warning("phase.abandoned", topology=self._topology.id, threads=hanging)
        if self._commit is not None:
            self._commit.close()
        self._leadership.resign()

    # --- start ---------------------------------------------------------------------------------------------------

    def _recover(self) -> Coordinator:
        topology, settings = self._topology, self._settings
        spout = topology.spout.instance
        if not isinstance(spout, Spout):
            raise InvariantViolation(f"{topology.spout.id} is not a spout")
        context = TopologyContext(topology.id, topology.spout.id, 0, 1, settings.conf, topology.parallelisms())
        planner = self._planner = planner_of(spout, settings.conf, context)
        accept = settings.accept_changed_topology
        immutable = ImmutableSource(planner, topology.skips_replays())
        try:
            documents = self._documents = TopologyDocuments(self._store, self._leadership, topology)
            joining = documents.claim(
                self._source_identity(planner, immutable),
                accept_changed=accept,
                accept_lost_data=planner.skips_lost_data,
            )
            self._incarnation = documents.incarnation()
            recovered, digests = documents.recover()
            self._commit = CommitPhase(
                topology.id, topology.states, self._executor, self._leadership.epoch, incarnation=self._incarnation
            )
            opened = self._commit.open(recovered.currtx, digests, joining=joining) or recovered.opened
            self._check_written(recovered.currtx, digests[recovered.currtx] if opened else None)
        except (ConfigError, CorruptStateError, DataLossError):
            planner.close()
            self._leadership.confirm()  # a leader that was deposed while it read has seen half of two states
            raise
        except BaseException:
            planner.close()
            raise
        if isinstance(planner, CoordinatorPlanner):
            planner.planned = max(recovered.plans, default=0)
        self._coordinator = Coordinator(
            kind_of(spout),
            replace(recovered, opened=opened),
            max_pending=settings.max_pending,
            timeout_ms=settings.message_timeout_ms,
            max_attempts=settings.max_attempts,
            skips_lost_data=planner.skips_lost_data,
            may_replan=planner.skips_lost_data and not topology.irreversible(),
            records_open=bool(topology.headerless()),
        )
        self._planning = PlanningThread(
            planner,
            check=immutable.check,
            on_plan=lambda asked, plan: self._messages.put(Planned(asked.generation, asked.txid, plan)),
            on_failure=lambda failure: self._messages.put(_PlannerFailed(failure)),
            idle_poll_max_s=settings.idle_poll_max_s,
            empty_batch_every_s=settings.empty_batch_every_s,
        )
        self._planning.start()
        return self._coordinator

    def _check_written(self, currtx: int, opened: str | None) -> None:
        """Let committers that write elsewhere compare what they remember there (C25)."""
        standing = Standing(self._incarnation, self._leadership.epoch, currtx, opened)
        for bolt, context in committers_elsewhere(self._topology, self._settings.conf):
            bolt.check_written(self._settings.conf, context, standing)

    def _source_identity(self, planner: PartitionPlanner, immutable: ImmutableSource) -> Mapping[str, Any]:
        """What the source is, when it is fit for this topology. Ask until it answers: a broker that is away is waited for, as
        in mid-run."""
        warned = False
        while True:
            try:
                identity = planner.source_identity()
                immutable.check(planner.partitions())
                return identity
            except RetryableError as error:
                if not warned:
                    _log.warning("source.waiting", topology=self._topology.id, reason=str(error))
                    self._update(waiting_for=str(error))
                    warned = True
                if self._stop_requested.wait(0.5) or self._leadership.lost:
                    raise

    # --- commands ------------------------------------------------------------------------------------------------

    def _carry_out(self, commands: list[Command]) -> None:
        if self._planning is None:
            raise InvariantViolation("commands before recovery")
        for command in commands:
            if isinstance(command, Persist):
                self._persist(command)
            elif isinstance(command, AskPlan):
                self._planning.ask(command)
            elif isinstance(command, Process):
                header = self._begin(command.txid, command.attempt_id, command.plan)
                self._spawn("process", self._run_processing, header, command.plan)
            elif isinstance(command, RollBack):
                header = self._begin(command.txid, command.attempt_id, command.plan)
                self._journal.rolling_back(command.txid, command.attempt_id)
                self._spawn("rollback", self._run_roll_back, header)
            elif isinstance(command, Commit):
                self._journal.committing(command.txid, command.attempt_id)
                header = self._headers[(command.txid, command.attempt_id)]
                self._spawn("commit", self._run_commit, header, command.replay)
            elif isinstance(command, Cancel):
                self._cancel(command)
            elif isinstance(command, Release):
                self._end(command.txid, command.attempt_id, self._executor.release)
            elif isinstance(command, Stop) and command.failure is not None:
                self._topology_failed(command.failure)

    def _persist(self, command: Persist) -> None:
        if self._documents is None:
            raise InvariantViolation("commands before recovery")
        if command.currtx is None:
            self._documents.save(command)
            return
        closed = command.currtx - 1
        self._documents.save(command, self._journal.record(closed))
        self._log_committed(closed, self._journal.committed(closed))
        self._update(committed_txid=closed, repeating=None)
        plan = self._coordinator.committed_plan if self._coordinator is not None else None
        if plan is not None and self._planning is not None:
            self._planning.committed(plan)

    def _begin(self, txid: int, attempt_id: int, plan: Plan) -> AttemptHeader:
        digest = plan_digest(plan)
        epoch = self._leadership.epoch
        header = AttemptHeader(self._topology.id, txid, attempt_id, epoch, digest, self._incarnation)
        self._headers[(txid, attempt_id)] = header
        self._journal.emitted(txid, attempt_id, epoch, plan, digest)
        return header

    def _cancel(self, command: Cancel) -> None:
        header = self._headers.get((command.txid, command.attempt_id))
        self._end(command.txid, command.attempt_id, self._executor.cancel)
        if header is not None and command.committing:
            self._spawn("fence", self._close_fence, header)
        if self._journal.cancelled(command.txid, command.attempt_id, command.reason):
            _log.info(
                "batch.cancelled",
                topology=self._topology.id,
                txid=command.txid,
                attempt=command.attempt_id,
                reason=command.reason,
            )

    def _end(self, txid: int, attempt_id: int, how: Callable[[AttemptHeader], None]) -> None:
        header = self._headers.pop((txid, attempt_id), None)
        if header is not None:
            how(header)

    def _spawn(self, name: str, target: Callable[..., None], header: AttemptHeader, *arguments: Any) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(
            target=target, args=(header, *arguments), name=f"ratchet-{name}-{header}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    # --- in threads of their own ---------------------------------------------------------------------------------

    def _run_processing(self, header: AttemptHeader, plan: Plan) -> None:
        try:
            planner = self._planner
            if planner is None:
                raise InvariantViolation("processing before recovery")
            ranges = {partition: planner.for_reading(partition, meta) for partition, meta in plan.items()}
            committed = self._coordinator.currtx - 1 if self._coordinator is not None else 0
            records = {partition: planner.record_count({partition: meta}) for partition, meta in plan.items()}
            job = ProcessingJob(header, ranges, planner.record_count(plan), committed, records)
            result = self._executor.process(job)
            if result.failure is None:
                planner.confirm(plan)
        except Exception as error:  # noqa: BLE001 - the driver's boundary: the coordinator decides what follows
            result = PhaseResult(TaskFailure.of(error, "executor", 0))
        self._answer(Processed(header.txid, header.attempt_id, result.failure), result)

    def _run_commit(self, header: AttemptHeader, replay: bool) -> None:
        self._run_on_states(header, Committed, lambda commit: commit.run(header, replay=replay))

    def _run_roll_back(self, header: AttemptHeader) -> None:
        self._run_on_states(header, RolledBack, lambda commit: commit.roll_back(header))

    def _run_on_states(
        self,
        header: AttemptHeader,
        answer: type[Committed] | type[RolledBack],
        run: Callable[[CommitPhase], PhaseResult],
    ) -> None:
        if self._commit is None:
            raise InvariantViolation("commit before recovery")
        try:
            result = run(self._commit)
        except StaleWriterError as error:
            self._messages.put(_Deposed(error))
            return
        failure = result.failure
        if failure is not None and ends_term(failure, self._leadership.epoch):
            self._messages.put(_Deposed(StaleWriterError(failure.message, failure.epoch)))
            return
        self._answer(answer(header.txid, header.attempt_id, failure), result)

    def _close_fence(self, header: AttemptHeader) -> None:
        if self._commit is None:
            raise InvariantViolation("commit before recovery")
        try:
            self._commit.close_fence(header)
        except StaleWriterError as error:
            _log.info("fence.stale", topology=self._topology.id, attempt=str(header), reason=str(error))
        except Exception as error:  # noqa: BLE001 - the next attempt's commit raises the same headers, or fails itself
            _log.warning("fence.open", topology=self._topology.id, attempt=str(header), reason=str(error))

    def _answer(self, event: Processed | Committed | RolledBack, result: PhaseResult) -> None:
        self._messages.put(_PhaseEnded(event, result))

    # --- what others see -----------------------------------------------------------------------------------------

    def _noted(self, ended: _PhaseEnded) -> Processed | Committed | RolledBack:
        """Write down how a phase of a live attempt ended; a dead one's was written down when it was cancelled. Returns
        the event for the coordinator."""
        event, result = ended.event, ended.result
        txid, attempt_id = event.txid, event.attempt_id
        if (txid, attempt_id) not in self._headers:
            return event
        if isinstance(event, Processed) and event.failure is None:
            event = self._learned_from(event, result)
        rows = {label: received for label, (_, received) in result.rows.items()}
        if event.failure is not None:
            if event.failure.kind is FailureKind.DATA_LOSS and self._planner is not None:
                self._planner.lost(self._coordinator.plan_of(txid) or {} if self._coordinator is not None else {})
            self._journal.failed(txid, attempt_id, str(event.failure))
            self._update(last_error=str(event.failure), repeating=str(event.failure))
            self._log_failure("batch.failed", event.failure, txid=txid, attempt=attempt_id)
        elif isinstance(event, Processed):
            read = result.read
            self._journal.processed(
                txid,
                attempt_id,
                rows,
                source_rows=read.records,
                source_bytes=read.bytes,
                bad_records=read.bad_records,
            )
        elif isinstance(event, Committed):
            self._journal.commit_phase_done(txid, attempt_id, rows)
        else:
            self._journal.rolled_back(txid, attempt_id)
            _log.warning("batch.rolled_back", topology=self._topology.id, txid=txid, attempt=attempt_id)
            self._end(txid, attempt_id, self._executor.release)
        return event

    def _learned_from(self, event: Processed, result: PhaseResult) -> Processed:
        """Let the planner look at what was read; it may object, and then the attempt has failed."""
        plan = self._coordinator.plan_of(event.txid) if self._coordinator is not None else None
        if plan is None or self._planner is None:
            return event
        try:
            self._planner.processed(plan, result.read, self._journal.elapsed_s(event.txid, event.attempt_id))
        except RatchetError as error:
            return replace(event, failure=TaskFailure.of(error, self._topology.spout.id, 0))
        return event

    def _topology_failed(self, failure: TaskFailure) -> None:
        self._failure = failure
        self._log_failure("topology.failed", failure)

    def _log_committed(self, txid: int, attempt: AttemptRecord | None) -> None:
        """The one line of an attempt that succeeded."""
        if attempt is None:
            return
        _log.debug(
            "batch.committed",
            topology=self._topology.id,
            txid=txid,
            attempt=attempt.attempt_id,
            epoch=attempt.epoch,
            rows=attempt.source_rows,
            bad_records=attempt.bad_records,
            processing_ms=attempt.processing_ms,
            waiting_ms=attempt.waiting_ms,
            commit_ms=attempt.commit_ms,
        )

    def _log_failure(self, event: str, failure: TaskFailure, **fields: Any) -> None:
        _log.warning(
            event,
            topology=self._topology.id,
            **fields,
            kind=failure.kind.value,
            component=failure.component_id,
            task=failure.task,
            reason=failure.message,
            **({"trace": failure.trace} if failure.trace else {}),
        )

    def _publish(self, coordinator: Coordinator) -> None:
        planner = self._planner
        committed, in_flight = self._plans = (coordinator.committed_plan or {}, coordinator.plans_in_flight())
        lag = planner.lag(committed) if planner is not None else None
        counts = [planner.record_count(plan) for plan in in_flight] if planner is not None else []
        self._update(
            in_flight={txid: f"{attempt} {phase.value}" for txid, (attempt, phase) in coordinator.in_flight().items()},
            in_flight_rows=sum(count or 0 for count in counts) if None not in counts else None,
            lag=lag,
            waiting_for=self._planning.waiting_for if self._planning is not None else None,
        )


def committers_elsewhere(topology: Topology, conf: Mapping[str, Any]) -> Iterator[tuple[Bolt, TopologyContext]]:
    """The committers without a state, each with the number of its tasks."""
    for each in topology.headerless():
        if isinstance(each.instance, Bolt):
            yield (
                each.instance,
                TopologyContext(topology.id, each.id, 0, each.parallelism, conf, topology.parallelisms()),
            )


def ends_term(failure: TaskFailure, epoch: int) -> bool:
    """C14: only an epoch above one's own ends a term; a fence of the term's own has refused a dead attempt, quietly."""
    return failure.kind is FailureKind.STALE and (failure.epoch or 0) > epoch


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
