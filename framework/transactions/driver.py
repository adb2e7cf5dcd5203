"""The driver: one loop that feeds the coordinator and carries its commands out.

A *term* is the time that one leadership lasts. Each term recovers everything from the store and the states, as after a
crash; nothing but the executor outlives it. Threads: the loop itself, the planner's, a few that wait for processing
phases, one that runs commits. They speak to the loop through one queue, which ends with the term, so that an answer of
an earlier term reaches nobody.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Union

import structlog

from framework.errors import InvariantViolation, LeadershipLostError, RatchetError, RetryableError, StaleWriterError
from framework.execution.ports import BatchExecutor, ProcessingJob
from framework.execution.records import AttemptHeader, FailureKind, TaskFailure
from framework.observe.journal import Journal
from framework.topology.builder import Topology
from framework.topology.context import TopologyContext
from framework.topology.spouts import OpaquePartitionedTransactionalSpout, PartitionedSpout, PartitionPlanner
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
    SpoutKind,
    Started,
    Stop,
    StopRequested,
    Tick,
    plan_digest,
)
from framework.transactions.documents import TopologyDocuments
from framework.transactions.planning import PlanningThread
from framework.transactions.store import CoordinationStore, Leadership

_log = structlog.get_logger()

TICK_S = 0.1


@dataclass(frozen=True, slots=True)
class DriverSettings:
    """What the driver needs of the configuration."""

    max_pending: int = 1
    message_timeout_ms: int = 30_000
    max_attempts: int = 5
    idle_poll_max_s: float = 0.1
    conf: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _PlannerFailed:
    failure: TaskFailure


@dataclass(frozen=True, slots=True)
class _Deposed:
    error: Exception


_Message = Union[Event, _PlannerFailed, _Deposed]


@dataclass(slots=True)
class DriverStatus:
    """A snapshot of the driver. ``phase``: starting, standby, running, stopped, failed."""

    phase: str = "starting"
    epoch: int = 0
    committed_txid: int = 0
    in_flight: dict[int, str] = field(default_factory=dict)
    in_flight_rows: int | None = None
    lag: int | None = None
    last_error: str | None = None
    waiting_for: str | None = None


class Driver:
    """Runs one topology until it is stopped or fails. ``run`` blocks; the rest may be called from other threads."""

    def __init__(
        self, topology: Topology, executor: BatchExecutor, store: CoordinationStore, settings: DriverSettings
    ) -> None:
        self._topology = topology
        self._executor = executor
        self._store = store
        self._settings = settings
        self._stop_requested = threading.Event()
        self._changed = threading.Condition()
        self._status = DriverStatus()
        self._term: _Term | None = None
        self.journal = Journal()
        self.failure: TaskFailure | None = None
        self.error: Exception | None = None

    # --- for other threads -----------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Finish the commit under way, then end ``run``."""
        self._stop_requested.set()
        term = self._term
        if term is not None:
            term.messages.put(StopRequested())

    def status(self) -> DriverStatus:
        with self._changed:
            snapshot = DriverStatus(**{name: getattr(self._status, name) for name in DriverStatus.__slots__})
        snapshot.in_flight = dict(snapshot.in_flight)
        return snapshot

    def wait_until(self, condition: Callable[[DriverStatus], bool], timeout_s: float | None) -> bool:
        """Wait for a status; True when it came. Ends early, with False, when the run is over."""
        with self._changed:
            self._changed.wait_for(
                lambda: condition(self._status) or self._status.phase in ("stopped", "failed"), timeout_s
            )
            return condition(self._status)

    def call_planner(self, function: Callable[[PartitionPlanner], Any]) -> Future[Any] | None:
        """Run a function of the planner in its own thread; None when no term is under way."""
        term = self._term
        return term.planning.call(function) if term is not None and term.planning is not None else None

    def covers(self, goal: Plan) -> bool:
        """Whether everything in ``goal`` (an answer of the planner's ``end``) is committed."""
        term = self._term
        if term is None or term.coordinator is None or term._planner is None:
            return False
        return term._planner.covers(term.coordinator.committed_plan or {}, goal)

    # --- the loop --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Lead, run, and when leadership is lost stand for election again. Returns when stopped; sets ``failure`` or
        ``error`` when the topology failed."""
        try:
            while not self._stop_requested.is_set() and self.failure is None:
                try:
                    self._lead_once()
                except (StaleWriterError, LeadershipLostError, RetryableError) as error:
                    _log.warning("driver.stepped_down", topology=self._topology.id, reason=str(error))
                    self._update(phase="standby", last_error=str(error), in_flight={})
                    self._stop_requested.wait(0.2)
        except Exception as error:  # noqa: BLE001 - kept for whoever waits on the run
            self.error = error
            if not isinstance(error, RatchetError):
                _log.error("driver.crashed", topology=self._topology.id, exc_info=True)
        finally:
            if self.error is not None or self.failure is not None:
                self._update(phase="failed", last_error=str(self.error or self.failure), in_flight={})
            else:
                self._update(phase="stopped", in_flight={})

    def _lead_once(self) -> None:
        identity = f"{socket.gethostname()}:{os.getpid()}"
        leadership: Leadership | None = None
        announced = False
        while leadership is None:
            if self._stop_requested.is_set():
                return
            leadership = self._store.lead(self._topology.id, identity, timeout_s=0.5)
            if leadership is None and not announced:
                announced = True
                self._update(phase="standby")
                _log.info(
                    "driver.standby", topology=self._topology.id, reason="another driver leads, or its session lasts"
                )
        term = _Term(self, leadership)
        self._term = term
        try:
            term.run()
        finally:
            self._term = None
            term.close()

    def _update(self, **changes: Any) -> None:
        with self._changed:
            for name, value in changes.items():
                setattr(self._status, name, value)
            self._changed.notify_all()


class _Term:
    """One leadership: recover, loop, clean up."""

    def __init__(self, driver: Driver, leadership: Leadership) -> None:
        self._driver = driver
        self._leadership = leadership
        self._topology = driver._topology
        self._executor = driver._executor
        self._settings = driver._settings
        self.messages: queue.Queue[_Message] = queue.Queue()
        self.planning: PlanningThread | None = None
        self.coordinator: Coordinator | None = None
        self._planner: PartitionPlanner | None = None
        self._documents: TopologyDocuments | None = None
        self._commit: CommitPhase | None = None
        self._rows: dict[tuple[int, int], int] = {}
        self._headers: dict[tuple[int, int], AttemptHeader] = {}
        self._processing_pool = ThreadPoolExecutor(
            driver._settings.max_pending + 2, thread_name_prefix="ratchet-process"
        )
        self._commit_pool = ThreadPoolExecutor(1, thread_name_prefix="ratchet-commit")

    def run(self) -> None:
        coordinator = self._recover()
        self._driver._update(
            phase="running", epoch=self._leadership.epoch, committed_txid=coordinator.currtx - 1, in_flight={}
        )
        _log.info(
            "driver.leads", topology=self._topology.id, epoch=self._leadership.epoch, next_txid=coordinator.currtx
        )
        self._carry_out(coordinator.handle(Started(), _now_ms()))
        if self._driver._stop_requested.is_set():
            self.messages.put(StopRequested())
        last_tick = time.monotonic()
        while not coordinator.stopped:
            message: _Message
            try:
                message = self.messages.get(timeout=TICK_S)
            except queue.Empty:
                message = Tick()
            if self._leadership.lost:
                raise LeadershipLostError(f"the leadership of epoch {self._leadership.epoch} has ended")
            if isinstance(message, _Deposed):
                raise message.error
            if isinstance(message, _PlannerFailed):
                self._driver.failure = message.failure
                self._log_failure(message.failure)
                self._carry_out(coordinator.handle(StopRequested(), _now_ms()))
                continue
            self._note(message)
            self._carry_out(coordinator.handle(message, _now_ms()))
            if time.monotonic() - last_tick > TICK_S:
                last_tick = time.monotonic()
                self._carry_out(coordinator.handle(Tick(), _now_ms()))
            self._publish(coordinator)

    def close(self) -> None:
        for header in list(self._headers.values()):
            self._executor.cancel(header)
        if self.planning is not None:
            self.planning.close()
        self._processing_pool.shutdown(wait=True, cancel_futures=True)
        self._commit_pool.shutdown(wait=True, cancel_futures=True)
        if self._commit is not None:
            self._commit.close()
        self._leadership.resign()

    # --- start -----------------------------------------------------------------------------------------------

    def _recover(self) -> Coordinator:
        topology, settings = self._topology, self._settings
        spout = topology.spout.instance
        if not isinstance(spout, PartitionedSpout):
            raise InvariantViolation(f"{topology.spout.id} is not a partitioned spout")
        context = TopologyContext(topology.id, topology.spout.id, 0, 1, settings.conf)
        planner = self._planner = spout.planner(settings.conf, context)
        self._documents = TopologyDocuments(self._driver._store, self._leadership, topology)
        try:
            recovered, digests = self._documents.recover()
            self._documents.claim(self._source_identity(planner))
            self._commit = CommitPhase(topology.id, topology.states, self._executor, self._leadership.epoch)
            opened = self._commit.open(recovered.currtx, digests)
        except BaseException:
            planner.close()
            raise
        opaque = isinstance(spout, OpaquePartitionedTransactionalSpout)
        self.coordinator = Coordinator(
            SpoutKind.OPAQUE if opaque else SpoutKind.TRANSACTIONAL,
            type(recovered)(recovered.currtx, recovered.attempts, recovered.plans, opened),
            max_pending=settings.max_pending,
            timeout_ms=settings.message_timeout_ms,
            max_attempts=settings.max_attempts,
        )
        self.planning = PlanningThread(
            planner,
            on_plan=lambda asked, plan: self.messages.put(Planned(asked.generation, asked.txid, plan)),
            on_failure=lambda failure: self.messages.put(_PlannerFailed(failure)),
            idle_poll_max_s=settings.idle_poll_max_s,
        )
        self.planning.start()
        return self.coordinator

    def _source_identity(self, planner: PartitionPlanner) -> Mapping[str, Any]:
        """Ask until the source answers: a broker that is away is waited for, as in mid-run."""
        warned = False
        while True:
            try:
                return planner.source_identity()
            except RetryableError as error:
                if not warned:
                    _log.warning("source.waiting", topology=self._topology.id, reason=str(error))
                    self._driver._update(waiting_for=str(error))
                    warned = True
                if self._driver._stop_requested.wait(0.5) or self._leadership.lost:
                    raise

    # --- commands --------------------------------------------------------------------------------------------

    def _carry_out(self, commands: list[Command]) -> None:
        if self._documents is None or self.planning is None:
            raise InvariantViolation("commands before recovery")
        for command in commands:
            if isinstance(command, Persist):
                self._documents.save(command)
                if command.currtx is not None:
                    self._driver._update(committed_txid=command.currtx - 1)
            elif isinstance(command, AskPlan):
                self.planning.ask(command)
            elif isinstance(command, Process):
                self._start_processing(command)
            elif isinstance(command, Commit):
                self._driver.journal.note("committing", command.txid, command.attempt_id)
                header = self._headers[(command.txid, command.attempt_id)]
                self._commit_pool.submit(self._run_commit, header, command.replay)
            elif isinstance(command, Cancel):
                self._end(command.txid, command.attempt_id, self._executor.cancel)
                self._driver.journal.note("cancelled", command.txid, command.attempt_id, command.reason)
            elif isinstance(command, Release):
                rows = self._rows.pop((command.txid, command.attempt_id), 0)
                self._driver.journal.note("committed", command.txid, command.attempt_id, rows=rows)
                self._end(command.txid, command.attempt_id, self._executor.release)
                _log.debug(
                    "batch.committed",
                    topology=self._topology.id,
                    txid=command.txid,
                    attempt=command.attempt_id,
                    rows=rows,
                )
            elif isinstance(command, Stop) and command.failure is not None:
                self._driver.failure = command.failure
                self._log_failure(command.failure)

    def _start_processing(self, command: Process) -> None:
        header = AttemptHeader(
            self._topology.id, command.txid, command.attempt_id, self._leadership.epoch, plan_digest(command.plan)
        )
        self._headers[(command.txid, command.attempt_id)] = header
        self._driver.journal.note("emitted", command.txid, command.attempt_id)
        self._processing_pool.submit(self._run_processing, header, command.plan)

    def _end(self, txid: int, attempt_id: int, how: Callable[[AttemptHeader], None]) -> None:
        header = self._headers.pop((txid, attempt_id), None)
        if header is not None:
            how(header)

    # --- in pool threads -------------------------------------------------------------------------------------

    def _run_processing(self, header: AttemptHeader, plan: Plan) -> None:
        failure: TaskFailure | None
        try:
            planner = self._planner
            if planner is None:
                raise InvariantViolation("processing before recovery")
            ranges = {partition: planner.for_reading(partition, meta) for partition, meta in plan.items()}
            result = self._executor.process(ProcessingJob(header, ranges, planner.record_count(plan)))
            failure = result.failure
            self._rows[(header.txid, header.attempt_id)] = result.source_rows
        except Exception as error:  # noqa: BLE001 - the driver's boundary: the coordinator decides what follows
            failure = TaskFailure.of(error, "executor", 0)
        self.messages.put(Processed(header.txid, header.attempt_id, failure))

    def _run_commit(self, header: AttemptHeader, replay: bool) -> None:
        if self._commit is None:
            raise InvariantViolation("commit before recovery")
        try:
            failure = self._commit.run(header, replay=replay).failure
        except StaleWriterError as error:
            self.messages.put(_Deposed(error))
            return
        if failure is not None and failure.kind is FailureKind.STALE:
            epoch = failure.epoch or 0
            if epoch > self._leadership.epoch:
                self.messages.put(_Deposed(StaleWriterError(failure.message, epoch)))
                return
        self.messages.put(Committed(header.txid, header.attempt_id, failure))

    # --- what others see -------------------------------------------------------------------------------------

    def _note(self, message: _Message) -> None:
        if isinstance(message, (Processed, Committed)):
            if message.failure is not None:
                self._driver.journal.note("failed", message.txid, message.attempt_id, str(message.failure))
                self._driver._update(last_error=str(message.failure))
                if (message.txid, message.attempt_id) in self._headers:
                    self._log_failure(message.failure, f"{message.txid}:{message.attempt_id}")
            elif isinstance(message, Processed):
                rows = self._rows.get((message.txid, message.attempt_id), 0)
                self._driver.journal.note("processed", message.txid, message.attempt_id, rows=rows)

    def _log_failure(self, failure: TaskFailure, attempt: str = "") -> None:
        event = "attempt.failed" if attempt else "topology.failed"
        _log.warning(
            event,
            topology=self._topology.id,
            attempt=attempt,
            kind=failure.kind.value,
            component=failure.component_id,
            task=failure.task,
            reason=failure.message,
            **({"trace": failure.trace} if failure.trace else {}),
        )

    def _publish(self, coordinator: Coordinator) -> None:
        planner = self._planner
        lag = planner.lag(coordinator.committed_plan or {}) if planner is not None else None
        counts = [planner.record_count(plan) for plan in coordinator.plans_in_flight()] if planner is not None else []
        self._driver._update(
            in_flight={txid: f"{attempt} {phase.value}" for txid, (attempt, phase) in coordinator.in_flight().items()},
            in_flight_rows=sum(count or 0 for count in counts) if None not in counts else None,
            lag=lag,
            waiting_for=self.planning.waiting_for if self.planning is not None else None,
        )


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
