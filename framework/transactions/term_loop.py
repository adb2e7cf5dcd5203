"""A term: one leadership, from beginning to end. It feeds events to the coordinator and executes
its commands.

Each term begins with the state that ``recovery.py`` found in the store and the sinks; only the
executor outlives it. Threads: the driver's own, the planner's, and one for each phase under way.
They send messages to the driver's thread through one queue. The queue ends with the term, so
answers from an earlier term are dropped. A phase that hangs blocks only its own thread. Its attempt
is cancelled; if it may be writing, its fence is closed; the thread is abandoned until it ends by
itself.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, Union

from framework.coordination.step_generators import Steps
from framework.coordination.store import Leadership
from framework.errors import ConfigError, LeadershipLostError, RatchetError, StaleWriterError
from framework.execution.failures import FailureKind, TaskFailure, users_errors
from framework.execution.messages import AttemptHeader
from framework.execution.ports import PhaseResult
from framework.topology.bolts import Bolt, Committer
from framework.topology.builder import Topology
from framework.topology.fencing import Header
from framework.topology.spouts import PartitionPlanner, PartitionProgress
from framework.transactions.commit import RAISING
from framework.transactions.commit_pace import CommitPace
from framework.transactions.coordinator import (
    READ,
    AskPlan,
    Cancel,
    Command,
    Commit,
    Committed,
    Coordinator,
    Event,
    Persist,
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
)
from framework.transactions.documents import read_pace
from framework.transactions.driver_context import DriverContext
from framework.transactions.driver_reporter import TermReport
from framework.transactions.narrowing import Narrowing, Searched
from framework.transactions.planner_thread import PlanningThread
from framework.transactions.plans import Plan, plan_digest
from framework.transactions.recovery import Recovery
from framework.transactions.spout_planners import processing_job, spout_kind_of

T = TypeVar("T")

TICK_S = 0.1
#: How long the end of a term waits for cancelled phases. A phase that hangs longer stays fenced,
#: and its thread is abandoned.
ABANDON_AFTER_MS = 10_000
#: How long probes of one batch may look for refused records.
SEARCH_MAX_MS = 5_000


@dataclass(frozen=True, slots=True)
class _PlannerFailed:
    failure: TaskFailure


@dataclass(frozen=True, slots=True)
class _Deposed:
    error: Exception


@dataclass(frozen=True, slots=True)
class _PhaseEnded:
    """The end of a phase, with its counters. ``event`` goes to the coordinator."""

    event: Processed | Committed | RolledBack
    result: PhaseResult


_Message = Union[Event, _PhaseEnded, _PlannerFailed, _Deposed]


class Term:
    """One leadership, after its recovery. ``running`` returns the failure that ended the topology,
    or None when it was stopped or has finished. It raises ``StaleWriterError`` or
    ``LeadershipLostError`` when another driver has become the leader."""

    def __init__(self, context: DriverContext, leadership: Leadership, recovery: Recovery) -> None:
        topology, config, planner = context.topology, context.config, recovery.planner
        self._topology = topology
        self._executor = context.executor
        self._journal = context.journal
        self._traces = context.traces
        self._threads = context.threads
        self._leadership = leadership
        self._planner = planner
        self._documents = recovery.documents
        self._repeatable_inputs = topology.repeatable_inputs()
        self._accepts_schemas = config.changed_schemas == "accept"
        self._commit = recovery.commit
        self._incarnation = recovery.incarnation
        self._messages: queue.Queue[_Message] = self._threads.queue()
        self._failure: TaskFailure | None = None
        self.finished = False  # whether the source is bounded, and all its records are committed
        self._looked_at: Plan | None = None  # the last committed plan for which this was checked
        self._headers: dict[tuple[int, int], AttemptHeader] = {}
        self._phases: list[threading.Thread] = []
        self._plans: tuple[Plan, list[Plan]] = ({}, [])  # committed, in flight: as published last
        # the plans in flight, and their numbers of records
        self._counted: list[tuple[Plan, int | None]] = []
        self._report = TermReport(context)
        self._narrowing = Narrowing(planner, topology.spout.id, self._report.refused, _policies(topology))
        tries_writes, tries_in_order = _trying_writes(topology)
        # attempts whose batch is being searched
        self._probes: dict[tuple[int, int], AttemptHeader] = {}
        self._search_max_ms = min(SEARCH_MAX_MS, int(config.message_timeout_secs * 500))
        self._coordinator = Coordinator(
            spout_kind_of(topology.spout.instance),
            recovery.recovered,
            max_pending=config.max_spout_pending,
            timeout_ms=int(config.message_timeout_secs * 1000),
            max_attempts=config.max_attempts,
            skips_lost_data=planner.skips_lost_data,
            records_open=bool(topology.headerless()),
            narrowing=self._narrowing,
            can_undo=not topology.irreversible(),
            commits_first=topology.commits_first() | {RAISING},
            refuses_whole=topology.refuses_whole(),
            pins_errors=config.bad_record_errors,
            tries_writes=tries_writes,
            tries_in_order=tries_in_order,
        )
        self._pace = partial(_pace, context)
        self._planning = PlanningThread(
            planner,
            self._threads,
            check=recovery.source.check,
            on_plan=lambda asked, plan: self._messages.put(Planned(asked.generation, asked.txid, plan)),
            on_failure=lambda failure: self._messages.put(_PlannerFailed(failure)),
            idle_poll_max_s=config.idle_poll_max_ms / 1000,
            empty_batch_every_s=config.empty_batch_every_ms / 1000 if config.emit_empty_batches else None,
            pace=self._pace,
            pace_before=CommitPace.of(config),
            planned_ms_ago=recovery.planned_ms_ago,
            is_awaited=lambda previous: not all(planner.covers(previous, goal) for goal in context.awaited.goals),
        )

    # --- from other threads -----------------------------------------------------------------------

    def request_stop(self) -> None:
        self._messages.put(StopRequested())

    def call_planner(self, function: Callable[[PartitionPlanner], Any]) -> Future[Any]:
        return self._planning.call(function)

    def look_at_pace(self) -> None:
        self._planning.look()

    def covers(self, goal: Plan) -> bool:
        # Published plans are durable; the coordinator itself is a step ahead of the store.
        return self._planner.covers(self._plans[0], goal)

    def progress(self) -> Mapping[str, PartitionProgress]:
        return self._planner.progress(*self._plans)

    def headers(self) -> list[tuple[str, Header]]:
        """The headers of the sinks, by location."""
        return self._commit.headers()

    # --- the loop ---------------------------------------------------------------------------------

    def running(self) -> Steps[TaskFailure | None]:
        coordinator, epoch = self._coordinator, self._leadership.epoch
        self._planning.start()
        self._report.leads(epoch, coordinator.currtx)
        if any(each.leaves_files for each in self._topology.states):
            yield self._check_interval
        yield from self._handling(Started())
        last_tick_ms = self._threads.now_ms()
        while not coordinator.stopped:
            message: _Message
            try:
                soon_ms = coordinator.next_tick_ms
                message = yield partial(self._messages.get, timeout=TICK_S if soon_ms is None else soon_ms / 1000)
            except queue.Empty:
                message = Tick()
            if self._leadership.lost:
                raise LeadershipLostError(f"the leadership of epoch {epoch} has ended")
            if isinstance(message, _PlannerFailed):
                yield partial(self._topology_failed, message.failure)
                message = StopRequested()
            yield from self._handling(self._event_in(message))
            if self._threads.now_ms() - last_tick_ms > TICK_S * 1000:
                last_tick_ms = self._threads.now_ms()
                yield from self._handling(Tick())
            self._publish()
            if self._has_finished():
                yield from self._handling(StopRequested())
        return self._failure

    def _has_finished(self) -> bool:
        """Whether it turns out now that the source has no records after the committed ones."""
        committed = self._plans[0]
        if committed is self._looked_at or self.finished:
            return False
        self._looked_at = committed
        self.finished = self._planner.finished(committed)
        if self.finished:
            self._report.finished(self._coordinator.currtx - 1)
        return self.finished

    def _check_interval(self) -> None:
        """Warn when a table of files grows by small files."""
        try:
            pace = self._pace()
        except (RatchetError, OSError):
            return  # the planner's thread reports it
        if pace.interval_s is None:
            for each in self._topology.states:
                if each.leaves_files:
                    self._report.small_files(each.location)

    def _event_in(self, message: Event | _PhaseEnded | _Deposed) -> Event:
        """Convert a message into an event for the coordinator. Raises the error of a
        ``_Deposed``."""
        if isinstance(message, _Deposed):
            raise message.error
        if isinstance(message, _PhaseEnded):
            return self._noted(message)
        return message

    def _handling(self, event: Event) -> Steps[None]:
        for command in self._coordinator.handle(event, self._threads.now_ms()):
            yield partial(self._carry_out, command)

    def close(self) -> None:
        for txid, attempt_id in list(self._headers):
            self._end(txid, attempt_id, self._executor.cancel)
        self._planning.close()
        deadline_ms = self._threads.now_ms() + ABANDON_AFTER_MS
        for phase in self._phases:
            phase.join(max(deadline_ms - self._threads.now_ms(), 0) / 1000)
        hanging = [phase.name for phase in self._phases if phase.is_alive()]
        if hanging:
            self._report.phases_abandoned(hanging)
        self._commit.close()

    # --- commands ---------------------------------------------------------------------------------

    def _carry_out(self, command: Command) -> None:
        match command:
            case Persist():
                self._persist(command)
            case AskPlan():
                self._planning.ask(command)
            case Process(txid, attempt_id, plan):
                header = self._begin(
                    txid, attempt_id, plan, tries_writes=command.tries_writes, tries_in_order=command.tries_in_order
                )
                steps = self._processing(header, plan, command.pins_errors)
                processing = self._traced(steps, header, "processing")
                self._spawn("process", header, processing)
            case RollBack(txid, attempt_id, plan):
                header = self._begin(txid, attempt_id, plan)
                self._journal.rolling_back(txid, attempt_id)
                rolling_back = self._traced(self._commit.rolling_back(header), header, "rollback")
                self._spawn("rollback", header, self._on_states(header, RolledBack, rolling_back))
            case Commit(txid=txid, attempt_id=attempt_id, replay=replay):
                self._journal.committing(txid, attempt_id)
                header = self._headers[(txid, attempt_id)]
                committing = self._traced(self._commit.committing(header, replay=replay), header, "commit")
                self._spawn("commit", header, self._on_states(header, Committed, committing))
            case Cancel():
                self._cancel(command)
            case Release(txid, attempt_id):
                self._end(txid, attempt_id, self._executor.release)
            case Stop(TaskFailure() as failure):
                self._topology_failed(failure)

    def _persist(self, command: Persist) -> None:
        began = time.time()
        if command.currtx is None:
            self._documents.save(command)
            self._trace_save(command, began)
            return
        closed = command.currtx - 1
        self._documents.save(command, self._journal.record(closed))
        self._trace_save(command, began)
        self._report.closed(closed)
        plan = self._coordinator.closed_plan
        if plan is not None:
            self._planning.closed(plan)

    def _trace_save(self, command: Persist, began: float) -> None:
        if self._traces is not None:
            opened = [command.opens.txid] if command.opens is not None else []
            closed = [command.currtx - 1] if command.currtx is not None else []
            self._traces.saved(began, planned=command.plans, known=[*opened, *closed])

    def _traced(self, steps: Steps[T], header: AttemptHeader, phase: str) -> Steps[T]:
        """The same steps; with tracing, each is a span."""
        if self._traces is None:
            return steps
        states = [each.location for each in self._topology.states]
        return self._traces.timed(steps, (header.txid, header.attempt_id), phase, states)

    def _begin(
        self,
        txid: int,
        attempt_id: int,
        plan: Plan,
        *,
        tries_writes: frozenset[str] = frozenset(),
        tries_in_order: bool = False,
    ) -> AttemptHeader:
        digest = plan_digest(plan)
        epoch = self._leadership.epoch
        header = AttemptHeader(
            self._topology.id,
            txid=txid,
            attempt_id=attempt_id,
            epoch=epoch,
            plan_digest=digest,
            incarnation=self._incarnation,
            tries_writes=tries_writes,
            tries_in_order=tries_in_order,
        )
        self._headers[(txid, attempt_id)] = header
        self._journal.emitted(txid, attempt_id, epoch, plan, digest)
        if self._traces is not None:
            self._traces.began(txid, attempt_id, time.time())
        return header

    def _cancel(self, command: Cancel) -> None:
        header = self._headers.get((command.txid, command.attempt_id))
        self._end(command.txid, command.attempt_id, self._executor.cancel)
        if header is not None and command.committing:
            self._spawn("fence", header, self._closing_fence(header))
        self._report.cancelled(command)

    def _end(self, txid: int, attempt_id: int, how: Callable[[AttemptHeader], None]) -> None:
        header = self._headers.pop((txid, attempt_id), None)
        if header is not None:
            how(header)
        probe = self._probes.pop((txid, attempt_id), None)
        if probe is not None:
            self._executor.cancel(probe)

    def _spawn(self, name: str, header: AttemptHeader, steps: Steps[None]) -> None:
        self._phases = [phase for phase in self._phases if phase.is_alive()]
        self._phases.append(self._threads.spawn(f"{name}-{header}", steps))

    # --- phases, each in a thread of its own ------------------------------------------------------

    def _processing(self, header: AttemptHeader, plan: Plan, pins_errors: bool) -> Steps[None]:
        committed_txid = self._coordinator.currtx - 1
        searched: Searched | None = None
        try:
            job = yield partial(processing_job, header, self._planner, plan, committed_txid)
            result: PhaseResult = yield partial(self._executor.process, job)
            if header.tries_writes:
                header = yield partial(self._at_watermarks, header)
            if result.failure is None and header.tries_writes:
                tried = yield partial(self._probe, header, None, plan)
                # if a try fails in another way, the commit decides how to go on
                if tried is not None and self._narrowing.may_search(plan, tried, pins_errors=pins_errors):
                    result = replace(result, failure=tried)
            if result.failure is None:
                yield partial(self._planner.confirm, plan)
            elif self._narrowing.may_search(plan, result.failure, pins_errors=pins_errors):
                until_ms = self._threads.now_ms() + self._search_max_ms
                probe = partial(self._probe, header, until_ms)
                search = partial(self._narrowing.searched, pins_errors=pins_errors, in_order=header.tries_in_order)
                searched = yield partial(search, plan, probe)
        except users_errors() as error:  # the driver's boundary: the coordinator decides how to go on
            result = PhaseResult(TaskFailure.of(error, "executor", 0))
        rows = {
            committer: sum(result.rows.get(label, (0, 0))[0] for label in labels)
            for committer, labels in self._repeatable_inputs.items()
        }
        if rows:
            rows[READ] = result.read.records
        self._answer(Processed(header.txid, header.attempt_id, result.failure, rows, searched), result)

    def _probe(self, header: AttemptHeader, until_ms: int | None, part: Plan) -> TaskFailure | None:
        """Process a part of an attempt's batch, and keep nothing. Returns its failure, or None."""
        attempt = header.txid, header.attempt_id
        probe = self._probes[attempt] = replace(header, plan_digest=plan_digest(part), is_probe=True)
        if attempt not in self._headers or (until_ms is not None and self._threads.now_ms() >= until_ms):
            return TaskFailure(FailureKind.RETRYABLE, "executor", 0, f"the search in {header} has ended")
        try:
            return self._executor.process(processing_job(probe, self._planner, part)).failure
        finally:
            self._executor.release(probe)
            self._probes.pop(attempt, None)

    def _at_watermarks(self, header: AttemptHeader) -> AttemptHeader:
        """The header with the watermarks before the transaction. All earlier transactions are
        committed. Without them, committers that need watermarks do not try."""
        bolts: dict[str, Any] = {each.id: each.instance for each in self._topology.components}
        try:
            rows = {name: bolt.watermark_before() for name, bolt in bolts.items() if isinstance(bolt, Committer)}
        except users_errors():  # the commit reads the same states, and tells
            return header
        return replace(header, watermarks={name: row for name, row in rows.items() if row is not None})

    def _on_states(
        self, header: AttemptHeader, answer: type[Committed] | type[RolledBack], steps: Steps[PhaseResult]
    ) -> Steps[None]:
        try:
            result = yield from steps
        except StaleWriterError as error:
            self._messages.put(_Deposed(error))
            return
        failure = result.failure
        if failure is not None and ends_term(failure, self._leadership.epoch):
            self._messages.put(_Deposed(StaleWriterError(failure.message, failure.epoch)))
            return
        self._answer(answer(header.txid, header.attempt_id, failure), result)

    def _closing_fence(self, header: AttemptHeader) -> Steps[None]:
        try:
            yield from self._commit.closing_fence(header)
            self._report.fence_closed()
        except StaleWriterError as error:
            self._report.fence_left(str(header), error, stale=True)
        except users_errors() as error:  # the next attempt's commit raises the same headers, or fails itself
            self._report.fence_left(str(header), error, stale=False)

    def _answer(self, event: Processed | Committed | RolledBack, result: PhaseResult) -> None:
        self._messages.put(_PhaseEnded(event, result))

    # --- published state --------------------------------------------------------------------------

    def _noted(self, ended: _PhaseEnded) -> Processed | Committed | RolledBack:
        """Record in the journal how a phase of a live attempt ended. (A dead attempt was recorded
        when it was cancelled.) Returns the event for the coordinator."""
        event, result = ended.event, ended.result
        txid, attempt_id = event.txid, event.attempt_id
        if (txid, attempt_id) not in self._headers:
            return event
        if self._traces is not None:
            phase = "processing" if isinstance(event, Processed) else "commit"
            self._traces.tasks(txid, attempt_id, phase, result.tasks)
        if isinstance(event, Processed) and event.failure is None:
            event = self._learned_from(event, result)
        if event.failure is not None:
            if event.failure.kind is FailureKind.DATA_LOSS:
                self._planner.lost(self._coordinator.plan_of(txid) or {})
            self._report.attempt_failed(event.failure, txid, attempt_id)
            return event
        match event:
            case Processed():
                self._report.processed(txid, attempt_id, result)
            case Committed():
                plan = self._coordinator.plan_of(txid)
                if plan is not None:
                    self._planning.through(plan)
                self._report.committed(txid, attempt_id, result)
            case RolledBack():
                self._report.rolled_back(txid, attempt_id)
                self._end(txid, attempt_id, self._executor.release)
        return event

    def _learned_from(self, event: Processed, result: PhaseResult) -> Processed:
        """Remember the schemas that the records name, and report the records to the planner. Both
        may reject them by raising; then the attempt has failed."""
        plan = self._coordinator.plan_of(event.txid)
        if plan is None:
            return event
        try:
            self._documents.note_schemas(result.read.schemas, accept_changed=self._accepts_schemas)
        except ConfigError as error:
            return replace(event, failure=TaskFailure.of(error, self._topology.spout.id, 0))
        try:
            self._planner.processed(plan, result.read, self._journal.elapsed_s(event.txid, event.attempt_id))
        except RatchetError as error:
            return replace(event, failure=TaskFailure.of(error, self._topology.spout.id, 0))
        return event

    def _topology_failed(self, failure: TaskFailure) -> None:
        """Note the failure that ends the topology, if this driver still leads. Raises as
        ``Leadership.confirm``. A deposed leader may miss records that its successor has committed
        and the source has deleted since."""
        self._leadership.confirm()
        self._failure = failure
        self._report.topology_failed(failure)

    def _publish(self) -> None:
        planner, coordinator = self._planner, self._coordinator
        committed, in_flight = self._plans = (coordinator.closed_plan or {}, coordinator.plans_in_flight())
        known = self._counted
        self._counted = [
            next((each for each in known if each[0] is plan), None) or (plan, planner.record_count(plan))
            for plan in in_flight
        ]
        counts = [count for _, count in self._counted]
        self._report.update(
            in_flight={txid: f"{attempt} {phase.value}" for txid, (attempt, phase) in coordinator.in_flight().items()},
            in_flight_rows=sum(count or 0 for count in counts) if None not in counts else None,
            lag=planner.lag(committed),
            waiting_for=self._planning.waiting_for,
            pace=self._planning.pace.document(),
            planned_in_s=self._planning.planned_in_s,
        )


def _policies(topology: Topology) -> dict[str, str]:
    """Component -> its policy for the records that it refuses."""
    return {each.id: each.instance.on_bad_record for each in topology.components if isinstance(each.instance, Bolt)}


def _trying_writes(topology: Topology) -> tuple[frozenset[str], frozenset[str]]:
    """The committers that can try their writes, each row alone; and those that can try them in the
    order of the records. Committers that get rows of others get them too late for that."""
    committers: dict[str, Any] = {
        each.id: each.instance for each in topology.components if isinstance(each.instance, Committer)
    }
    may_try = {
        each.id for each in topology.in_trials() if each.id in committers and committers[each.id].may_try_writes()
    }
    in_order = frozenset(name for name in may_try if committers[name].tries_in_order)
    return frozenset(may_try) - in_order, in_order | (may_try & {topology.only_writer()})


def _pace(context: DriverContext) -> CommitPace:
    """The current pace."""
    return CommitPace.of(context.config, read_pace(context.store, context.topology.id))


def ends_term(failure: TaskFailure, epoch: int) -> bool:
    """Whether a failure ends the term. Only an epoch above the term's own does (C14); otherwise the
    term's own fence has refused a dead attempt."""
    return failure.kind is FailureKind.STALE and (failure.epoch or 0) > epoch
