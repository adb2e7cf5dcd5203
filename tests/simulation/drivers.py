"""Simulated drivers and tasks: the real parts, wired as ``framework.transactions.term`` wires them, one step at a time.

A *process* is a generator of steps. Each step is an event of the schedule: it may succeed, fail before or after it did
its work, come late, come twice, or meet a crash. Processes of a driver die with it; commit tasks do not: they run
elsewhere, and may write long after whoever started them is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from functools import partial
from itertools import groupby
from typing import Any

import pyarrow as pa

from framework import TransactionalTopologyBuilder
from framework.errors import (
    ConfigError,
    CorruptStateError,
    DataLossError,
    LeadershipLostError,
    RatchetError,
    RetryableError,
    StaleWriterError,
)
from framework.execution.ports import PhaseResult
from framework.execution.records import AttemptHeader, FailureKind, TaskFailure
from framework.topology import Standing, Topology, TopologyContext, TransactionAttempt
from framework.transactions import term
from framework.transactions.commit import CommitPhase
from framework.transactions.coordinator import (
    AskPlan,
    Cancel,
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
    SpoutKind,
    Started,
    Stop,
    StopRequested,
    Tick,
    plan_digest,
)
from framework.transactions.documents import TopologyDocuments
from framework.transactions.reset import resetting_positions
from sinks import MapState, Sum, states
from sinks.kafka_markers import marker_of
from sinks.kafka_writer import KafkaRecord
from spouts.memory import complete
from tests.kit.bolts import UpdateGlobalCount
from tests.simulation.kafka import LETTERS, TopicSink
from tests.simulation.world import (
    SESSION_MS,
    SINKS,
    SPOUTS,
    TOPIC,
    TOPOLOGY,
    Crashed,
    SimLeadership,
    Violation,
    World,
    applied,
)

TASKS = 2
TOTAL = {"total": Sum("weight")}
TIMEOUT_MS = 1_500
TICK_MS = 150
POLL_MS = 60
#: What runs in threads of its own in a driver.
ABANDONED = ("process", "commit", "roll back", "close fence")

Steps = Generator[Callable[[], Any], Any, Any]


class SimExecutor:
    """What survives drivers: kept results, and tasks."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.kept: dict[AttemptHeader, list[list[tuple[str, int | None]]]] = {}

    def commit(self, header: AttemptHeader) -> PhaseResult:
        raise AssertionError("a driver starts the tasks and waits for them")

    def task(self, header: AttemptHeader, sink: int, task: int, operations: list[tuple[str, int | None]]) -> Steps:
        """One commit task: begin, read and compute, write. Returns its failure, or None."""
        state = self.world.state(sink)
        attempt = header.attempt(SINKS[sink], task)
        try:
            if self.world.shape.merges:
                yield partial(self.merge, state, attempt, operations)
                return None
            yield partial(state.begin_commit, attempt)
            for weight, group in groupby(operations, lambda each: each[1] and 1):
                changes = list(group)
                keys = [(key,) for key, _ in changes]
                if weight is None:
                    yield partial(state.delete, keys)
                elif weight == 0:
                    yield partial(state.multi_put, keys, [0] * len(keys))
                else:
                    yield partial(state.multi_update, keys, [_updater(each) for _, each in changes])
            yield partial(state.commit, attempt)
        except Exception as error:  # noqa: BLE001 - the boundary of a task
            return TaskFailure.of(error, SINKS[sink], task)
        return None

    def merge(self, state: MapState, attempt: TransactionAttempt, operations: list[tuple[str, int | None]]) -> None:
        """Hand over what was counted, in one of the workers, each of which knows the states that it has written to."""
        workers = self.world.workers
        worker = int(self.world.chance.random() * len(workers))
        if self.world.fault("worker", ("dies",), 0.03):
            workers[worker] = {}
        states._incarnations = workers[worker]
        counts: Counter[str] = Counter()
        for key, weight in operations:
            counts[key] += weight or 0
        deltas = pa.table({"key": pa.array(counts, pa.string()), "total": pa.array(counts.values(), pa.int64())})
        if counts:
            state.apply(attempt, deltas, TOTAL, want_values=False)

    def topic_task(
        self, header: AttemptHeader, task: int, operations: list[tuple[str, int | None]], life: int
    ) -> Steps:
        """One commit task of the committer to Kafka, in workers of this life. Returns its failure, or None."""
        context = TopologyContext(TOPOLOGY, TOPIC, task, self.world.shape.topic_tasks)
        marker = marker_of(header.attempt(TOPIC, task), context)
        records = [KafkaRecord(key.encode(), str(record).encode()) for key, record in operations]
        try:
            if records:
                yield partial(self.world.kafka.write, records, marker, life)
        except Exception as error:  # noqa: BLE001 - the boundary of a task
            return TaskFailure.of(error, TOPIC, task)
        return None

    def letters_task(self, header: AttemptHeader, bad: list[tuple[str, int | None]], life: int) -> Steps:
        """The commit task of the dead letters. Returns its failure, or None."""
        try:
            records = [record or 0 for _, record in bad]
            yield partial(self.world.kafka.write_letters, header.attempt(LETTERS, 0), records, life)
        except Exception as error:  # noqa: BLE001 - the boundary of a task
            return TaskFailure.of(error, LETTERS, 0)
        return None

    def share(self, operations: list[tuple[str, int | None]], task: int, tasks: int) -> list[tuple[str, int | None]]:
        """The operations of one task: one key has one writer (C12)."""
        return [each for each in operations if hash_of(each[0]) % tasks == task]


def hash_of(key: str) -> int:
    return int(key[1:])


def _updater(weight: int | None) -> Callable[[Any], Any]:
    return partial(applied, weight)


class SimProcess:
    """A generator of steps under the scheduler. ``owner`` None: a task, which nobody's death ends."""

    FAULTS = ("fails before", "fails after", "late", "crash before", "crash after", "freeze")
    TASK_FAULTS = ("fails before", "fails after", "late", "doubled")

    def __init__(
        self,
        world: World,
        name: str,
        steps: Steps,
        owner: SimDriver | None,
        on_end: Callable[[Any], None],
        again: Callable[[], Steps] | None = None,
    ) -> None:
        self.world = world
        self.name = name
        self.owner = owner
        self.life = owner.life if owner is not None else 0
        self.outlives = owner is not None and name in ABANDONED and world.chance.random() < 0.5
        self.steps = steps
        self.on_end = on_end
        self.again = again
        self.step: Callable[[], Any] | None = None

    def start(self) -> None:
        self._advance(lambda: next(self.steps))

    def _advance(self, move: Callable[[], Callable[[], Any]]) -> None:
        try:
            self.step = move()
        except StopIteration as end:
            if self._heard:
                self.on_end(end.value)
            return
        except (StaleWriterError, LeadershipLostError, RetryableError) as error:
            if self.owner is None:
                raise Violation(f"a task raised {error!r}") from error
            if self._heard:
                self.owner.step_down(error)
            return
        self.world.soon(self.perform)

    @property
    def _heard(self) -> bool:
        """Whether the term that began this still lasts."""
        return self.owner is None or self.owner.life == self.life

    @property
    def _over(self) -> bool:
        """A driver that dies takes its threads with it; a term that ends leaves those that hang, to end when they can."""
        return not self._heard and not (self.outlives and self.owner is not None and self.life in self.owner.ended)

    def perform(self) -> None:
        owner, world = self.owner, self.world
        if owner is not None:
            if self._over:
                return
            if owner.frozen_until > world.now:
                world.at(owner.frozen_until - world.now + 1, self.perform)
                return
        step = self.step
        assert step is not None
        function = step.func if isinstance(step, partial) else step
        label = f"{self.name}: {function.__name__.strip('_')}"
        if owner is not None and function == owner.executor.commit:
            owner.run_tasks(step.args[0], self.life, lambda result: self._advance(lambda: self.steps.send(result)))  # type: ignore[attr-defined]
            return
        fault = world.fault(label, self.FAULTS if owner is not None else self.TASK_FAULTS)
        if fault == "late":
            world.at(int(world.chance.random() * 2_500), partial(self._perform, step, label, None))
        elif fault == "freeze" and owner is not None:
            owner.freeze()
            world.at(owner.frozen_until - world.now + 1, self.perform)
        elif fault == "crash before" and owner is not None:
            owner.crash()
        elif fault == "doubled" and self.again is not None:
            SimProcess(world, self.name, self.again(), None, lambda value: None).start()
            self._perform(step, label, None)
        else:
            self._perform(step, label, fault)

    def _perform(self, step: Callable[[], Any], label: str, fault: str | None) -> None:
        if self._over:
            return
        world = self.world
        try:
            if fault == "fails before":
                raise RetryableError(f"{label} was not done")
            answer = step()
            world.note(label)
            if fault == "fails after":
                raise RetryableError(f"{label} was done, and its answer lost")
        except Crashed:
            assert self.owner is not None
            self.owner.crash()
            return
        except Violation:
            raise
        except Exception as error:  # noqa: BLE001 - handed to the generator, as ``perform`` does
            world.note(f"{label} raises {error!r}"[:300])
            failed = error
            self._advance(lambda: self.steps.throw(failed))
            return
        if fault == "crash after" and self.owner is not None:
            self.owner.crash()
            return
        self._advance(lambda: self.steps.send(answer))


class SimDriver:
    """A driver: stands for election, leads, dies, comes back."""

    def __init__(self, world: World, executor: SimExecutor, topology: Topology, name: str) -> None:
        self.world = world
        self.executor = executor
        self.topology = topology
        self.next_topology = topology  # what it is started with the next time
        self.name = name
        self.life = 0
        self.frozen_until = 0
        self.leadership: SimLeadership | None = None
        self.coordinator: Coordinator | None = None
        self.headers: dict[tuple[int, int], AttemptHeader] = {}
        self.ended: set[int] = set()  # terms of this process that ended otherwise than by its death

    # --- life and death ------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._spawn("start", self._lead())

    def crash(self) -> None:
        """Nothing of this driver goes on; its session ends a while later; it comes back some time."""
        self.world.note(f"{self.name} dies")
        for state in self.topology.states:
            state.backend.forget_process()  # type: ignore[attr-defined]
        self.ended.clear()
        self.topology = self.next_topology
        self._end_of_life(int(self.world.chance.random() * SESSION_MS))
        self.start_after(int(self.world.chance.random() * 1_000))

    def freeze(self) -> None:
        """Stops, as under SIGSTOP, and goes on as if nothing had been; its session may end meanwhile."""
        pause = int(self.world.chance.random() * 3 * SESSION_MS)
        self.frozen_until = self.world.now + pause
        self.world.note(f"{self.name} freezes for {pause} ms")
        if pause > SESSION_MS:
            self.expire(after_ms=SESSION_MS)

    def expire(self, after_ms: int = 0) -> None:
        """The session ends; the driver hears of it only later, and may try to write before."""
        leadership = self.leadership
        if leadership is not None:
            self.world.at(after_ms, partial(self.world.store.expire, leadership))
            notice = max(after_ms, self.frozen_until - self.world.now) + int(self.world.chance.random() * 200)
            self.world.at(notice, partial(self._notice, leadership))

    def step_down(self, error: Exception) -> None:
        self.world.note(f"{self.name} steps down: {error}")
        if isinstance(error, StaleWriterError) and (error.epoch or 0) <= (
            self.leadership.epoch if self.leadership else 0
        ):
            raise Violation(f"C14: {self.name} stepped down without having met an epoch above its own: {error}")
        self._end_term()
        self.start_after(1 + int(self.world.chance.random() * 12))

    def request_stop(self) -> None:
        """As ``kill`` would, or a user who stops the run: what is being committed is finished, the rest is abandoned."""
        if self.coordinator is not None:
            self.handle(StopRequested())

    def _stopped(self) -> None:
        """The run is over, as it was asked to be; it is resumed some time."""
        self.world.note(f"{self.name} has stopped")
        self._end_term()
        self.topology = self.next_topology
        self.start_after(int(self.world.chance.random() * 1_000))

    def _end_term(self) -> None:
        for header in self.headers.values():
            self.executor.kept.pop(header, None)
        self.ended.add(self.life)
        self._end_of_life(0)

    def start_after(self, after_ms: int) -> None:
        life = self.life
        self.world.at(after_ms, lambda: self.start() if self.life == life else None)

    def _notice(self, leadership: SimLeadership) -> None:
        if self.leadership is leadership and not leadership.noticed:
            leadership.noticed = True
            self.step_down(LeadershipLostError("the session ended"))

    def _end_of_life(self, session_ms: int) -> None:
        self.life += 1
        self.frozen_until = 0
        leadership, self.leadership, self.coordinator = self.leadership, None, None
        self.headers = {}
        if leadership is not None:
            leadership.noticed = True
            self.world.at(session_ms, partial(self.world.store.expire, leadership))

    def _spawn(self, name: str, steps: Steps, on_end: Callable[[Any], None] = lambda value: None) -> None:
        SimProcess(self.world, name, steps, self, on_end).start()

    # --- recovery ------------------------------------------------------------------------------------------------

    def _lead(self) -> Steps:
        yield self._stand
        if self.leadership is None:
            life = self.life
            self.world.store.waiting.append(lambda: self._wake(life))
            return
        try:
            documents = self.documents = yield self._read
            accept = not self.world.joined and self._is_whole
            joining = yield partial(documents.claim, {}, accept_changed=accept)
            self.incarnation = yield documents.incarnation
            recovered, digests = yield documents.recover
            self.commit = CommitPhase(
                TOPOLOGY,
                self.topology.states,
                self.executor,
                self.leadership.epoch,
                incarnation=self.incarnation,
                purge_every=2,
            )
            opened = (yield from self.commit.opening(recovered.currtx, digests, joining=joining)) or recovered.opened
            yield partial(self._check_written, recovered.currtx, digests[recovered.currtx] if opened else None)
        except (ConfigError, CorruptStateError) as error:
            refusal = error
            yield self.leadership.confirm
            if self.topology is not self.next_topology:  # the state is of another topology now
                self._stopped()
                return
            if isinstance(refusal, CorruptStateError) and self.world.corrupted in str(refusal):
                self.world.finished = True  # refused, and named: what must happen
                return
            if self.world.oracle.may_stop(str(refusal)):
                self.world.stop(str(refusal))
                return
            raise Violation(f"{self.name} refuses to start: {refusal}") from error
        self.world.joined = self.world.joined or self._is_whole
        opaque = self.world.shape.opaque
        self.coordinator = Coordinator(
            SpoutKind.OPAQUE if opaque else SpoutKind.TRANSACTIONAL,
            type(recovered)(recovered.currtx, recovered.attempts, recovered.plans, opened),
            max_pending=self.world.shape.pending,
            timeout_ms=TIMEOUT_MS,
            max_attempts=1_000,
            skips_lost_data=opaque,
            may_replan=opaque and not self.topology.irreversible(),
            records_open=bool(self.topology.headerless()),
        )
        self.planner = self.world.spout.planner({}, None)  # type: ignore[arg-type]
        self.asked: AskPlan | None = None
        self.handle(Started())
        self._tick(self.life)

    @property
    def _is_whole(self) -> bool:
        shape, parts = self.world.shape, self.topology.parallelisms()
        return SPOUTS[shape.renames] in parts and (not shape.joins or shape.joins in parts)

    def _stand(self) -> None:
        """Stand for election. The epoch rises before anything is read (C3)."""
        self.leadership = self.world.store.lead(TOPOLOGY, self.name)

    def _wake(self, life: int) -> None:
        if self.life == life and self.leadership is None:
            self.start()

    def _read(self) -> TopologyDocuments:
        assert self.leadership is not None
        return TopologyDocuments(self.world.store, self.leadership, self.topology)

    def _check_written(self, currtx: int, opened: str | None) -> None:
        assert self.leadership is not None
        standing = Standing(self.incarnation, self.leadership.epoch, currtx, opened)
        for bolt, context in term.committers_elsewhere(self.topology, {}):
            bolt.check_written({}, context, standing)

    # --- the loop ------------------------------------------------------------------------------------------------

    def _tick(self, life: int) -> None:
        if self.life == life:
            self.handle(Tick())
            self.world.at(TICK_MS, lambda: self._tick(life))

    def deliver(self, event: Event, label: str) -> None:
        """An answer on its way to the loop: late, twice, or with a crash around it."""
        world, life = self.world, self.life
        fault = world.fault(f"answer: {label}", ("late", "doubled", "crash before", "crash after", "freeze"))

        def arrive(again: bool = False) -> None:
            if self.life != life:
                return
            if self.frozen_until > world.now:
                world.at(self.frozen_until - world.now + 1, arrive)
                return
            if fault == "crash before":
                self.crash()
                return
            self.handle(event)
            if fault == "crash after" and self.life == life:
                self.crash()

        if fault == "freeze":
            self.freeze()
        world.at(int(world.chance.random() * 2_500), arrive) if fault == "late" else world.soon(arrive)
        if fault == "doubled":
            world.soon(arrive)

    def handle(self, event: Event) -> None:
        coordinator = self.coordinator
        if coordinator is None:
            return
        if self.frozen_until > self.world.now:
            life = self.life
            self.world.at(
                self.frozen_until - self.world.now + 1, lambda: self.handle(event) if self.life == life else None
            )
            return
        if not isinstance(event, Tick):
            self.world.note(f"{self.name} {event}"[:200])
        try:
            late = self._is_late(event, coordinator)
            if late:
                for command in coordinator.handle(Tick(), self.world.now):
                    self._carry_out(command)
            commands = coordinator.handle(event, self.world.now)
            if late and commands:
                raise Violation(f"an answer of a dead attempt changes something: {event} gives {commands}")
            for command in commands:
                if self.coordinator is coordinator:
                    self._carry_out(command)
        except Crashed:
            self.crash()
        except (StaleWriterError, LeadershipLostError) as error:
            self.step_down(error)

    @staticmethod
    def _is_late(event: Event, coordinator: Coordinator) -> bool:
        """Whether an answer is that of an attempt which is not the live one."""
        if not isinstance(event, (Processed, Committed, RolledBack)):
            return False
        live = coordinator.in_flight().get(event.txid)
        return live is None or live[0] != event.attempt_id

    def _carry_out(self, command: Any) -> None:
        world = self.world
        self._die_between(f"command: {type(command).__name__}")
        if isinstance(command, Persist):
            self.documents.save(command)
        elif isinstance(command, AskPlan):
            self.asked = command
            self._plan_later(command)
        elif isinstance(command, Process):
            header = self._begin(command.txid, command.attempt_id, command.plan)
            self._spawn("process", self._process(header, command.plan))
        elif isinstance(command, RollBack):
            header = self._begin(command.txid, command.attempt_id, command.plan)
            self._on_states("roll back", header, self.commit.rolling_back(header), RolledBack)
        elif isinstance(command, Commit):
            header = self.headers[(command.txid, command.attempt_id)]
            self._on_states("commit", header, self.commit.committing(header, replay=command.replay), Committed)
        elif isinstance(command, Cancel):
            cancelled = self.headers.pop((command.txid, command.attempt_id), None)
            if cancelled is not None:
                self.executor.kept.pop(cancelled, None)
                if command.committing:
                    self._spawn("close fence", self._close_fence(cancelled))
        elif isinstance(command, Release):
            released = self.headers.pop((command.txid, command.attempt_id), None)
            if released is not None:
                self.executor.kept.pop(released, None)
        elif isinstance(command, Stop):
            self._stop(command.failure)
        if world.finished:
            raise Crashed

    def _stop(self, failure: TaskFailure | None) -> None:
        """A stop was asked for, or is one that cannot be avoided, and says why."""
        if failure is None:
            self._stopped()
            return
        if self.world.oracle.may_stop(failure.message):
            self.world.stop(str(failure))
            return
        irreversible = self.topology.irreversible()
        if failure.kind is not FailureKind.DATA_LOSS or not irreversible:
            raise Violation(f"the topology stops: {failure}")
        if "was opened with this plan" not in failure.message or not self.world.opened_range_is_lost():
            raise Violation(f"C8: the topology stops, and could have gone on: {failure}")
        self.world.stop(str(failure))

    def _die_between(self, label: str) -> None:
        if self.world.fault(label, ("crash before",), 0.02):
            raise Crashed

    def _begin(self, txid: int, attempt_id: int, plan: Plan) -> AttemptHeader:
        assert self.leadership is not None
        self.world.oracle.emitting(txid, attempt_id)
        digest = plan_digest(plan)
        header = AttemptHeader(TOPOLOGY, txid, attempt_id, self.leadership.epoch, digest, self.incarnation)
        self.headers[(txid, attempt_id)] = header
        return header

    # --- planning ------------------------------------------------------------------------------------------------

    def _plan_later(self, asked: AskPlan, delay_ms: int = 0) -> None:
        life = self.life
        self.world.at(delay_ms + 1, lambda: self._plan(asked, life))

    def _plan(self, asked: AskPlan, life: int) -> None:
        if self.life != life or self.asked is not asked:
            return
        if self.frozen_until > self.world.now:
            self._plan_later(asked, self.frozen_until - self.world.now)
            return
        try:
            plan = self.planner.plan_smaller(asked.previous or {}, asked.divisor)
        except RetryableError:
            plan = None
        if plan is None:
            self._plan_later(asked, POLL_MS)
            return
        self.asked = None
        self.deliver(Planned(asked.generation, asked.txid, plan), "planned")

    # --- processing ----------------------------------------------------------------------------------------------

    def _process(self, header: AttemptHeader, plan: Plan) -> Steps:
        failure = None
        try:
            rows = yield partial(self._read_rows, plan)
            yield partial(self._compute, header, rows)
        except RetryableError as error:
            failure = TaskFailure(FailureKind.RETRYABLE, "spout", 0, str(error))
        except DataLossError as error:
            failure = TaskFailure.of(error, "spout", 0)
        self.deliver(Processed(header.txid, header.attempt_id, failure), "processed")

    def _read_rows(self, plan: Plan) -> list[int]:
        """What the tasks read: every range whole, or an error."""
        found: list[int] = []
        for partition in sorted(plan):
            meta = self.planner.for_reading(partition, plan[partition])
            if meta["rows"] and self.world.fault("read", ("short read",), 0.03):
                meta = {**meta, "rows": meta["rows"][:-1]}
            found += [row[0] for row in complete(partition, meta)]
        return found

    def _compute(self, header: AttemptHeader, records: list[int]) -> None:
        world = self.world
        attempt_id, shape = header.attempt_id, world.shape
        bad = [("", record) for record in records if world.is_bad(record)]
        records = [record for record in records if not world.is_bad(record)]
        result = [[world.operations(sink, record, attempt_id) for record in records] for sink in range(shape.states)]
        if shape.topic_tasks:
            result.append([(world.operations(len(SINKS), record, attempt_id)[0], record) for record in records])
        result.append(bad)
        world.oracle.processed(header, result)
        if (header.txid, header.attempt_id) in self.headers:
            self.executor.kept[header] = result

    # --- committing ----------------------------------------------------------------------------------------------

    def run_tasks(self, header: AttemptHeader, life: int, answer: Callable[[PhaseResult], None]) -> None:
        """Start the commit tasks; answer when all have ended, or at the first failure, while the others go on."""
        result = self.executor.kept.get(header)
        if result is None:
            answer(PhaseResult(TaskFailure(FailureKind.RETRYABLE, "executor", 0, "the result is gone")))
            return
        answered = False
        shape = self.world.shape
        parts = self.topology.parallelisms()
        sinks = [sink for sink in range(shape.states) if SINKS[sink] in parts]
        topic_tasks = parts.get(TOPIC, 0)
        waiting = len(sinks) * TASKS + topic_tasks + shape.letters

        def ended(failure: TaskFailure | None) -> None:
            nonlocal waiting, answered
            waiting -= 1
            if not answered and (failure is not None or waiting == 0):
                answered = True
                self._when_awake(life, lambda: answer(PhaseResult(failure)))

        for sink in sinks:
            for task in range(TASKS):
                mine = self.executor.share(result[sink], task, TASKS)
                again = partial(self.executor.task, header, sink, task, mine)
                SimProcess(self.world, "task", again(), None, ended, again).start()
        for task in range(topic_tasks):
            mine = self.executor.share(result[shape.states], task, topic_tasks)
            again = partial(self.executor.topic_task, header, task, mine, self.world.kafka.life)
            SimProcess(self.world, "task", again(), None, ended, again).start()

        if shape.letters:
            again = partial(self.executor.letters_task, header, result[-1], self.world.kafka.life)
            SimProcess(self.world, "task", again(), None, ended, again).start()

    def _when_awake(self, life: int, action: Callable[[], None]) -> None:
        if self.life != life and life not in self.ended:
            return
        if self.frozen_until > self.world.now:
            self.world.at(self.frozen_until - self.world.now + 1, lambda: self._when_awake(life, action))
        else:
            action()

    def _on_states(self, name: str, header: AttemptHeader, steps: Steps, answer: Any) -> None:
        def ended(result: PhaseResult) -> None:
            failure = result.failure
            if failure is not None and self.leadership is not None and term.ends_term(failure, self.leadership.epoch):
                self.step_down(StaleWriterError(failure.message, failure.epoch))
                return
            self.deliver(answer(header.txid, header.attempt_id, failure), name)

        self._spawn(name, steps, ended)

    def _close_fence(self, header: AttemptHeader) -> Steps:
        try:
            yield from self.commit.closing_fence(header)
            self.world.oracle.dead.add((header.incarnation, header.epoch, header.txid, header.attempt_id))
        except RatchetError as error:
            self.world.note(f"the fence of {header} stays: {error}")


class ResetTool:
    """``reset`` of the positions, as an operator would call it: takes the leadership when it is free."""

    def __init__(self, driver: SimDriver) -> None:
        self.driver = driver

    def run(self) -> None:
        driver = self.driver
        store = driver.world.store
        if not driver.world.joined:
            return  # nobody does both at once
        leadership = store.lead(TOPOLOGY, "reset")
        if leadership is None:
            store.waiting.append(self.run)
            return
        try:
            documents = TopologyDocuments(store, leadership, driver.next_topology)
            incarnation = documents.incarnation()
            commit = CommitPhase(
                TOPOLOGY, driver.next_topology.states, driver.executor, leadership.epoch, incarnation=incarnation
            )
            irreversible = driver.next_topology.irreversible()
            steps = resetting_positions(documents, commit, TOPOLOGY, leadership.epoch, irreversible)
            step = next(steps)
            while True:
                step = steps.send(step())
        except StopIteration:
            driver.world.oracle.positions_forgotten()
        except (ConfigError, CorruptStateError) as error:
            opened = store.opened()
            is_open = opened is not None and opened["txid"] == store.currtx()
            named = driver.world.corrupted in str(error) or driver.world.oracle.may_stop(str(error))
            if not named and not (is_open and "cannot be undone" in str(error)):
                raise Violation(f"reset refuses: {error}") from error
        except RetryableError as error:
            driver.world.note(f"reset: {error}")
        except Crashed:
            driver.world.note("reset dies")
            if not store.plan(store.currtx() - 1) and not store.plan(store.currtx()):
                driver.world.oracle.positions_forgotten()
        leadership.resign()


def build_topology(world: World, *, whole: bool) -> Topology:
    """The topology as it becomes, or as it is at first."""
    shape = world.shape
    spout, without = SPOUTS[whole and shape.renames], "" if whole else shape.joins
    builder = TransactionalTopologyBuilder(TOPOLOGY, spout, world.spout, 1)
    for sink, name in enumerate(shape.names):
        if name != without:
            builder.set_bolt(name, UpdateGlobalCount(world.state(sink)), TASKS).shuffle_grouping(spout)
    if shape.topic_tasks and without != TOPIC:
        builder.set_bolt(TOPIC, TopicSink(world.kafka), shape.topic_tasks).shuffle_grouping(spout)
    return builder.build()
