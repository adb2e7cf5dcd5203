"""Simulated processes, one step at a time: drivers (the real ``Driver`` and ``Term``) and commit
tasks.

A *process* performs a generator of steps, as ``framework.coordination.step_generators.perform``
does in a run. Each step is an event of the schedule: it may succeed, fail before or after it did
its work, come late, come twice, or meet a crash. The threads of a driver die with it. Commit tasks
do not: they run elsewhere, and may write long after the driver that started them is gone.

A step that waits (for messages, the end of a pause, an election, commit tasks) returns a ``Later``.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import groupby
from typing import Any, TypeVar, cast

import pyarrow as pa

from framework import Config, TransactionalTopologyBuilder
from framework.coordination.step_generators import Step, Steps, Threads, perform
from framework.coordination.store import Change, Leadership
from framework.errors import (
    BadRecordError,
    BatchTooLargeError,
    ConfigError,
    CorruptStateError,
    RatchetError,
    RetryableError,
    StaleWriterError,
)
from framework.execution.failures import FailureKind, TaskFailure
from framework.execution.messages import AttemptHeader
from framework.execution.plan import Phase
from framework.execution.ports import DeadAttempts, PhaseResult, ProcessingJob
from framework.topology import Topology, TopologyContext, TransactionAttempt
from framework.transactions import CoordinationStore, Driver
from framework.transactions.commit import CommitPhase
from framework.transactions.coordinator import (
    AskPlan,
    Command,
    Commit,
    Committed,
    Coordinator,
    Event,
    Processed,
    RolledBack,
    StopRequested,
    Tick,
    TransactionPhase,
)
from framework.transactions.document_writer import TopologyDocuments
from framework.transactions.plans import Plan
from framework.transactions.recovery import Recovery
from framework.transactions.reset import resetting_positions
from framework.transactions.term_loop import Term
from sinks import MapState, Sum, states
from sinks.kafka.delivery import KafkaRecord
from sinks.kafka.markers import marker_of
from spouts.memory import complete
from tests.kit.bolts import UpdateGlobalCount
from tests.simulation.kafka import LETTERS, TopicSink, letter_row
from tests.simulation.world import (
    REASON,
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
IDLE_POLL_MAX_S = 0.06
#: A pause of this length or more ends at a random moment before its end: steps are faster here than
#: in a run.
PAUSE_S = 0.2
#: How many times as long as in a run a term waits for messages that do not come: a tick finds
#: nothing to do, unless an attempt has timed out.
TICKS_LATE = 3
#: Thread name of a driver -> its name in the labels of steps.
NAMES = {"rollback": "roll back", "fence": "close fence"}

Operations = list[tuple[str, int | None]]
F = TypeVar("F", bound=Callable[..., Any])


def waits(function: F) -> F:
    """Mark a step that only waits: it has no faults of its own."""
    function.waits = True  # type: ignore[attr-defined]
    return function


Move = Callable[[Steps[Any]], Step]


class Later:
    """What a step returns when its answer comes later. Only the first answer counts."""

    def __init__(self) -> None:
        self.over = False
        self._move: Move = next
        self._resume: Callable[[Move], None] | None = None

    def then(self, resume: Callable[[Move], None]) -> None:
        if self.over:
            resume(self._move)
        self._resume = resume

    def answer(self, value: Any) -> None:
        self._end(lambda steps: steps.send(value))

    def fail(self, error: Exception) -> None:
        self._end(lambda steps: steps.throw(error))

    def _end(self, move: Move) -> None:
        if not self.over:
            self.over, self._move = True, move
            if self._resume is not None:
                self._resume(move)


class SimExecutor:
    """The ``BatchExecutor`` of one run; it keeps the results of batches. Its tasks outlive it."""

    def __init__(self, world: World, topology: Topology) -> None:
        self.world = world
        self.topology = topology
        self.kept: dict[AttemptHeader, list[Operations]] = {}
        self.refused: dict[AttemptHeader, tuple[int, str]] = {}  # the sink and the key of a refused value
        self.dead = DeadAttempts()
        self.committing: dict[AttemptHeader, Later] = {}

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    def process(self, job: ProcessingJob) -> PhaseResult:
        world, shape, header = self.world, self.world.shape, job.header
        if header in self.dead:
            return PhaseResult(DeadAttempts.failure(header, Phase.PROCESSING))
        try:
            records = self._read(job)
        except RetryableError as error:
            return PhaseResult(TaskFailure.of(error, "spout", 0))
        attempt_id = header.attempt_id
        gone = world.left_out(job.ranges)
        bad = self.letters(records, gone)
        records = [each for each in records if not world.is_bad(each) and each not in gone]
        if shape.room and len(records) > shape.room:
            return self.too_large(records)
        refused = [each for each in records if world.is_refused(each)]
        if refused and (shape.refuses == "bolt" or not self._sinks()):
            return self.refused_by_bolt(refused[0])
        if refused and header.is_probe and header.tries_writes:
            return self.refused_by_try(refused[0])
        result = [[world.operations(sink, each, attempt_id) for each in records] for sink in range(shape.states)]
        if shape.topic_tasks:
            result.append([(world.operations(len(SINKS), each, attempt_id)[0], each) for each in records])
        result.append(bad)
        return self.processed(header, result, refused)

    def processed(self, header: AttemptHeader, result: list[Any], refused: Sequence[int]) -> PhaseResult:
        """Keep the result of a batch. ``refused``: the records that a sink will refuse."""
        world = self.world
        if header.is_probe:
            return PhaseResult()
        world.oracle.processed(header, result)
        self.kept[header] = result
        if refused and not (world.shape.moves and world.chance.random() < 0.3):
            # Which sink says so, and which task, is as random as anything else there.
            sinks = self._sinks()
            sink = sinks[int(world.chance.random() * len(sinks))]
            self.refused[header] = sink, world.operations(sink, refused[0], header.attempt_id)[0]
        return PhaseResult()

    def _sinks(self) -> list[int]:
        return [sink for sink, name in enumerate(SINKS) if name in self.topology.parallelisms()]

    @staticmethod
    def refused_by_bolt(record: int) -> PhaseResult:
        return PhaseResult(TaskFailure.of(BadRecordError(f"{record}: {REASON}"), "bolt", 0))

    def refused_by_try(self, record: int) -> PhaseResult:
        self.world.coverage[("tries", "refused")] += 1
        failure = TaskFailure.of(BadRecordError(f"{record}: {REASON}"), SINKS[self._sinks()[0]], 0)
        return PhaseResult(replace(failure, is_of_try=True))

    @staticmethod
    def too_large(records: Sequence[int]) -> PhaseResult:
        return PhaseResult(TaskFailure.of(BatchTooLargeError(f"{len(records)} records"), "bolt", 0))

    def letters(self, records: Sequence[int], gone: Sequence[int]) -> Operations:
        """What goes to the dead letters."""
        return [("", each) for each in records if self.world.is_bad(each) or each in gone]

    def _read(self, job: ProcessingJob) -> list[int]:
        """What the tasks read: every range whole. Raises an error when a range is short."""
        return [row[0] for partition, meta in self.came(job.ranges) for row in complete(partition, meta)]

    def came(self, ranges: Plan) -> Iterator[tuple[str, Any]]:
        """The ranges as they come to the tasks; some are short."""
        for partition in sorted(ranges):
            meta = ranges[partition]
            if meta["rows"] and self.world.fault("read", ("short read",), 0.03):
                meta = {**meta, "rows": meta["rows"][:-1]}
            yield partition, meta

    @property
    def keeps_letters(self) -> bool:
        return self.world.shape.letters

    def commits_in_one_step(self, header: AttemptHeader) -> bool:
        return self.world.shape.one_step

    @waits
    def commit(self, header: AttemptHeader) -> Any:
        """Start the commit tasks; when those of the states have ended well, those to Kafka.

        The answer comes when all have ended, or at the first failure; the others go on then.
        """
        result = self.kept.get(header)
        if result is None:
            return PhaseResult(TaskFailure(FailureKind.RETRYABLE, "executor", 0, "the result is gone"))
        shape, parts, life = self.world.shape, self.topology.parallelisms(), self.world.kafka.life
        sinks = self._sinks()
        topic_tasks = parts.get(TOPIC, 0)
        tasks = 1 if shape.one_step else TASKS
        first = [
            partial(self._task, header, sink, task, self.share(result[sink], task, tasks))
            for sink in sinks
            for task in range(tasks)
        ]
        last = [
            partial(self._topic_task, header, task, self.share(result[shape.states], task, topic_tasks), life)
            for task in range(topic_tasks)
        ]
        if self.keeps_letters:
            last.append(partial(self._letters_task, header, result[-1], life))
        later = self.committing[header] = Later()

        def run(tasks: list[Callable[[], Steps[Any]]], then: Callable[[], None]) -> None:
            waiting = len(tasks)

            def ended(failure: TaskFailure | None) -> None:
                nonlocal waiting
                waiting -= 1
                if failure is not None:
                    later.answer(PhaseResult(failure))
                    waiting = -1
                elif waiting == 0:
                    then()

            for each in tasks:
                self._start(each, ended)
            if not tasks:
                then()

        def write_for_good() -> None:
            if last:
                self.world.for_good.add(header.txid)
            run(last, lambda: later.answer(PhaseResult()))

        run(first, write_for_good)
        return later

    def cancel(self, header: AttemptHeader) -> None:
        """Perhaps fail the wait for the tasks soon.

        The tasks themselves go on: nobody can reach them.
        """
        self.dead.add(header)
        self.kept.pop(header, None)
        self.refused.pop(header, None)
        later = self.committing.pop(header, None)
        if later is not None and self.world.chance.random() < 0.5:
            failure = DeadAttempts.failure(header, Phase.COMMIT)
            self.world.soon(lambda: later.answer(PhaseResult(failure)))

    def release(self, header: AttemptHeader) -> None:
        self.kept.pop(header, None)
        self.refused.pop(header, None)
        self.committing.pop(header, None)

    def _start(self, steps: Callable[[], Steps[Any]], ended: Callable[[TaskFailure | None], None]) -> None:
        SimProcess(self.world, "task", steps(), None, ended, steps).start()

    def _task(self, header: AttemptHeader, sink: int, task: int, operations: Operations) -> Steps[TaskFailure | None]:
        """One commit task: begin, read and compute, write. Returns its failure, or None."""
        state = self.world.state(sink)
        attempt = header.attempt(SINKS[sink], task)
        at, key = self.refused.get(header, (None, ""))
        tasks = 1 if self.world.shape.one_step else TASKS
        try:
            if at == sink and hash_of(key) % tasks == task:
                yield partial(self._refuse, state, attempt)
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
            return replace(TaskFailure.of(error, SINKS[sink], task), nothing_after=True)
        return None

    def _refuse(self, state: MapState, attempt: TransactionAttempt) -> None:
        """A sink refuses a value of this task; the other tasks may have written."""
        if not self.world.shape.one_step:
            state.begin_commit(attempt)
        raise BadRecordError(REASON)

    def merge(self, state: MapState, attempt: TransactionAttempt, operations: Operations) -> None:
        """Hand over the counts, in one of the workers.

        Each worker remembers the states that it has written to.
        """
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
        else:
            state.commit_unchanged(attempt)

    def _topic_task(
        self, header: AttemptHeader, task: int, operations: Operations, life: int
    ) -> Steps[TaskFailure | None]:
        """One commit task of the committer to Kafka, in the workers of ``life``.

        Returns its failure, or None.
        """
        context = TopologyContext(TOPOLOGY, TOPIC, task, self.world.shape.topic_tasks)
        marker = marker_of(header.attempt(TOPIC, task), context)
        records = [KafkaRecord(key.encode(), str(record).encode()) for key, record in operations]
        try:
            if records:
                yield partial(self.world.kafka.write, records, marker, life)
        except Exception as error:  # noqa: BLE001 - the boundary of a task
            return TaskFailure.of(error, TOPIC, task)
        return None

    def _letters_task(self, header: AttemptHeader, bad: Operations, life: int) -> Steps[TaskFailure | None]:
        """The commit task of the dead letters. Returns its failure, or None."""
        try:
            letters = [letter_row(record or 0) for _, record in bad]
            yield partial(self.world.kafka.write_letters, header.attempt(LETTERS, 0), letters, life)
        except Exception as error:  # noqa: BLE001 - the boundary of a task
            return TaskFailure.of(error, LETTERS, 0)
        return None

    def share(self, operations: Operations, task: int, tasks: int) -> Operations:
        """The operations of one task: one key has one writer (C12)."""
        return [each for each in operations if hash_of(each[0]) % tasks == task]


def hash_of(key: str) -> int:
    return int(key[1:])


def _updater(weight: int | None) -> Callable[[Any], Any]:
    return partial(applied, weight)


class SimProcess:
    """A generator of steps under the scheduler.

    ``owner``: the driver whose thread it is; None: a task, which ends with no driver.
    """

    FAULTS = ("fails before", "fails after", "late", "crash before", "crash after", "freeze")
    TASK_FAULTS = ("fails before", "fails after", "late", "doubled")
    COMMAND_FAULTS = ("crash before", "crash before", "crash before", "late")

    def __init__(
        self,
        world: World,
        name: str,
        steps: Steps[Any],
        owner: SimDriver | None,
        on_end: Callable[[Any], None] = lambda value: None,
        again: Callable[[], Steps[Any]] | None = None,
    ) -> None:
        self.world = world
        self.name = name
        self.owner = owner
        self.steps = steps
        self.on_end = on_end
        self.again = again
        self.step: Step = lambda: None
        self.label = ""
        self.waits = False  # the step only waits
        self.command = False  # the step carries out a command of the coordinator
        self.over = False  # ended, or killed
        self.disturbed = False  # a step has failed

    def start(self) -> None:
        if self._advance(next):
            self.world.soon(self.perform)

    def kill(self) -> None:
        self.over = True
        self.steps.close()

    def perform(self) -> None:
        """Perform the step that is due, and those after it that take no time of their own."""
        world = self.world
        while not self.over and not world.finished:
            if self._wait_for_thaw(self.perform):
                return
            if not self._perform(self._fault()):
                return
            if not self._at_once():
                world.soon(self.perform)
                return

    def _fault(self) -> str | None:
        if self.waits:
            return None
        if self.command:
            return self.world.fault(self.label, self.COMMAND_FAULTS, 0.02)
        return self.world.fault(self.label, self.FAULTS if self.owner is not None else self.TASK_FAULTS)

    def _at_once(self) -> bool:
        """Whether the next step follows without a pause: always after a wait,
        mostly after a command.
        """
        return self.waits or (self.command and self.world.chance.random() < 0.9)

    def _perform(self, fault: str | None) -> bool:
        """Perform the step with a fault.

        Returns whether there is another step to perform now or soon.
        """
        world, owner, step = self.world, self.owner, self.step
        if fault == "late":
            world.at(int(world.chance.random() * 2_500), self._perform_late)
            return False
        if fault == "doubled" and self.again is not None:
            SimProcess(world, self.name, self.again(), None).start()
        if owner is not None and fault == "freeze":
            owner.freeze()
            return True
        if owner is not None and fault == "crash before":
            owner.crash()
            return False
        try:
            if fault == "fails before":
                raise RetryableError(f"{self.label} was not done")
            answer = step()
            if isinstance(answer, Later):
                answer.then(self._resume)
                return False
            if not self.waits:
                world.note(self.label)
            if fault == "fails after":
                raise RetryableError(f"{self.label} was done, and its answer lost")
        except Crashed:
            assert owner is not None
            owner.crash()
            return False
        except RatchetError as error:  # handed to the generator, as ``perform`` does
            failed = error
            world.note(lambda: f"{self.label} raises {failed!r}"[:300])
            self.disturbed = True
            return self._advance(lambda steps: steps.throw(failed))
        except Exception as error:
            raise error if isinstance(error, Violation) else Violation(f"{self.label} raises {error!r}") from error
        if owner is not None and fault == "crash after":
            owner.crash()
            return False
        return self._advance(lambda steps: steps.send(answer))

    def _perform_late(self) -> None:
        if not self.over and self._perform(None):
            self.world.soon(self.perform)

    def _resume(self, move: Move) -> None:
        """Go on: the answer that the step waited for has come."""
        if self.over or self._wait_for_thaw(partial(self._resume, move)):
            return
        if self._advance(move):
            self.perform() if self._at_once() else self.world.soon(self.perform)

    def _wait_for_thaw(self, action: Callable[[], None]) -> bool:
        owner, world = self.owner, self.world
        if owner is None or owner.frozen_until <= world.now:
            return False
        world.at(owner.frozen_until - world.now + 1, action)
        return True

    def _advance(self, move: Move) -> bool:
        """Move the generator on. Returns whether there is another step."""
        try:
            step = self.step = move(self.steps)
        except StopIteration as end:
            self.over = True
            self.on_end(end.value)
            return False
        except RatchetError as error:
            raise Violation(f"{self.name} raised {error!r}") from error
        function = step.func if isinstance(step, partial) else step
        name = function.__name__
        self.waits, self.command = getattr(function, "waits", False), name == "_carry_out"
        if self.command and isinstance(step, partial):
            self.label = f"command: {type(step.args[0]).__name__}"
        else:
            self.label = f"{self.name}: {name.strip('_')}"
        return True


class SimThreads(Threads):
    """The threads of one driver."""

    def __init__(self, driver: SimDriver) -> None:
        self._driver = driver

    def now_ms(self) -> int:
        return self._driver.world.now

    def used_s(self) -> float:
        return 0.0  # a simulation depends on its seed alone

    def queue(self) -> queue.Queue[Any]:
        return SimQueue(self._driver)

    def event(self) -> threading.Event:
        return cast(threading.Event, SimEvent(self._driver.world))

    def spawn(self, name: str, steps: Steps[None]) -> threading.Thread:
        return cast(threading.Thread, SimThread(self._driver, name, steps))


class SimThread:
    def __init__(self, driver: SimDriver, name: str, steps: Steps[None]) -> None:
        self.name = name
        self._driver = driver
        self._restored = dict(driver.world.restored)
        kind = name.split("-")[0]
        self._process = driver.thread(NAMES.get(kind, kind), steps, self._ended)
        self._process.start()

    def is_alive(self) -> bool:
        return not self._process.over

    def join(self, timeout_s: float) -> None:
        """End the thread of a term that ends, one time in two.

        Otherwise it hangs, and ends when it can. A planner always does so.
        """
        if self._process.name != "planner" and self._driver.world.chance.random() < 0.5:
            self._process.kill()

    def _ended(self, value: Any) -> None:
        process = self._process
        # A sink that went back meanwhile may have lost the fence that was closed in it.
        kept = self._restored == self._driver.world.restored
        if process.name == "close fence" and kept and not process.disturbed and isinstance(process.step, partial):
            header = process.step.args[1]
            self._driver.world.oracle.dead.add((header.incarnation, header.epoch, header.txid, header.attempt_id))


class SimEvent:
    def __init__(self, world: World) -> None:
        self._world = world
        self._set = False
        self._later: Later | None = None

    def set(self) -> None:
        self._set = True
        later = self._later
        if later is not None and not later.over:
            self._world.soon(lambda: later.answer(True))

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    @waits
    def wait(self, timeout_s: float | None = None) -> Any:
        if self._set:
            return True
        later = self._later = Later()
        if timeout_s is not None:
            world = self._world
            if timeout_s >= PAUSE_S:
                timeout_s *= world.chance.random() ** 3
            world.at(max(int(timeout_s * 1000), 1), lambda: later.answer(self._set))
        return later


class SimQueue(queue.Queue[Any]):
    """The messages to a term. Answers come late, twice, or with a crash before or after them."""

    def __init__(self, driver: SimDriver) -> None:
        self._driver = driver
        self._life = driver.life
        self._messages: deque[Any] = deque()
        self._later: Later | None = None

    def put(self, message: Any, *arguments: Any, **options: Any) -> None:
        if isinstance(message, StopRequested):
            self._arrive(message, None)
            return
        driver, world = self._driver, self._driver.world
        label = type(getattr(message, "event", message)).__name__.strip("_").lower()
        fault = world.fault(f"answer: {label}", ("late", "doubled", "crash before", "crash after", "freeze"))
        if fault == "freeze":
            driver.freeze()
        arrive = partial(self._arrive, message, fault)
        world.at(int(world.chance.random() * 2_500), arrive) if fault == "late" else world.soon(arrive)
        if fault == "doubled":
            world.soon(arrive)

    def _arrive(self, message: Any, fault: str | None) -> None:
        driver = self._driver
        if driver.life != self._life:
            return
        if fault == "crash before":
            driver.crash()
            return
        later = self._later
        if later is not None and not later.over:
            later.answer(message)
        else:
            self._messages.append(message)
        if fault == "crash after" and driver.life == self._life:
            driver.crash()

    @waits
    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if self._messages:
            return self._messages.popleft()
        later = self._later = Later()
        assert timeout is not None
        self._driver.world.at(int(timeout * 1000) * TICKS_LATE, lambda: later.fail(queue.Empty()))
        return later


class SimClient(CoordinationStore):
    """The connection of one driver to ZooKeeper."""

    def __init__(self, driver: SimDriver) -> None:
        self._driver = driver
        self._store = driver.world.store
        self._life = driver.life

    def get(self, path: str) -> bytes | None:
        return self._store.get(path)

    def children(self, path: str) -> list[str]:
        return self._store.children(path)

    def apply(self, changes: Sequence[Change]) -> None:
        self._store.apply(changes)

    def announce(self, path: str, data: bytes | None) -> None:
        self._store.announce(path, data)

    def is_led(self, path: str) -> bool:
        return self._store.is_led(path)

    def close(self) -> None:
        pass

    def lead(self, path: str, identity: str, timeout_s: float | None = None) -> Any:
        """Stand for election. The epoch rises before anything is read (C3)."""
        driver, world = self._driver, self._driver.world
        if driver.leadership is not None:
            driver.leadership.resign()  # the answer to the election was lost
        if self._stand():
            return driver.leadership
        later = Later()

        def again() -> None:
            if later.over or driver.life != self._life:
                return
            if driver.frozen_until > world.now:
                world.at(driver.frozen_until - world.now + 1, again)
            elif self._stand():
                later.answer(driver.leadership)

        self._store.waiting.append(again)
        world.at(int((timeout_s or 0) * 1000), lambda: later.answer(None))
        return later

    def _stand(self) -> bool:
        leadership = self._store.lead(TOPOLOGY, self._driver.name)
        if leadership is not None:
            self._driver.leadership = leadership
        return leadership is not None


@cache
def config_with(pending: int, interval_ms: int = 0, rate: int = 0) -> Config:
    pace = {"topology.commit.interval": interval_ms / 1000, "topology.rate.records.per.second": rate}
    return Config.of(
        {
            **{key: value for key, value in pace.items() if value},
            "topology.max.spout.pending": pending,
            "topology.message.timeout.secs": TIMEOUT_MS / 1000,
            "topology.max.attempts": 1_000,
            "topology.spout.idle.poll.max.ms": round(IDLE_POLL_MAX_S * 1000),
        }
    )


class WatchedDriver(Driver):
    """The real driver, with checks of invariants on what only the driver itself can see."""

    def __init__(self, owner: SimDriver) -> None:
        shape = owner.world.shape
        executor = owner.executor_type(owner.world, owner.topology)
        config = config_with(shape.pending, shape.interval_ms, shape.rate)
        threads = SimThreads(owner)
        super().__init__(owner.topology, executor, SimClient(owner), config, purge_every=2, threads=threads)
        self._owner = owner
        emitted = self.journal.emitted

        def emitting(txid: int, attempt_id: int, epoch: int, plan: Plan, digest: str) -> None:
            owner.world.oracle.emitting(txid, attempt_id)
            emitted(txid, attempt_id, epoch, plan, digest)

        self.journal.emitted = emitting  # type: ignore[method-assign]

    def _stand_by(self, error: Exception | None) -> None:
        owner = self._owner
        if error is not None:
            owner.world.note(f"{owner.name} steps down: {error}")
        if isinstance(error, StaleWriterError) and (error.epoch or 0) <= owner.epoch:
            raise Violation(f"C14: {owner.name} stepped down without having met an epoch above its own: {error}")
        super()._stand_by(error)

    def _lead(self, leadership: Leadership) -> Steps[bool]:
        self._context = replace(self._context, accept_changed_topology=self._owner.accepts_change)
        return (yield from super()._lead(leadership))

    def _begin_term(self, leadership: Leadership, recovery: Recovery) -> Term:
        term = super()._begin_term(leadership, recovery)
        self._owner.world.joined |= self._owner.is_whole
        coordinator = term._coordinator
        handle = coordinator.handle
        pace, planned = PaceCheck(self._owner.world), term._planning._on_plan

        def planning(asked: AskPlan, plan: Plan) -> None:
            pace.check(asked.txid, plan)
            planned(asked, plan)

        term._planning._on_plan = planning

        def watched(event: Event, now_ms: int) -> list[Command]:
            if not isinstance(event, Tick):
                self._owner.world.note(lambda: f"{self._owner.name} {event}"[:200])
            if not _is_late(event, coordinator):
                if isinstance(event, Committed):
                    committing = event.attempt_id, TransactionPhase.COMMITTING
                    if coordinator.in_flight().get(event.txid) == committing:
                        self._owner.world.unanswered.discard((event.txid, event.attempt_id))
                commands = handle(event, now_ms)
                begun = {(each.txid, each.attempt_id) for each in commands if isinstance(each, Commit)}
                self._owner.world.unanswered |= begun
                return commands
            due = handle(Tick(), now_ms)
            commands = handle(event, now_ms)
            if commands:
                raise Violation(f"an answer of a dead attempt changes something: {event} gives {commands}")
            return due

        coordinator.handle = watched  # type: ignore[method-assign]
        return term


class PaceCheck:
    """Holds the plans of one term against the pace (C45)."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._begun = world.now
        self._planned: tuple[int, int] | None = None  # the newest txid that was planned, and when
        self._records = 0

    def check(self, txid: int, plan: Plan) -> None:
        shape, now = self._world.shape, self._world.now
        self._records += sum(int(meta["next"]) - int(meta["first"]) for meta in plan.values())
        if shape.rate and self._records > shape.rate * (now - self._begun) / 1000 + 1:
            raise Violation(f"C45: {self._records} records were planned in {now - self._begun} ms")
        known = self._planned
        if shape.interval_ms and known is not None and txid > known[0] and now - known[1] < shape.interval_ms:
            raise Violation(f"C45: txid {txid} was planned {now - known[1]} ms after txid {known[0]}")
        if known is None or txid >= known[0]:
            self._planned = txid, now


def _is_late(event: Event, coordinator: Coordinator) -> bool:
    """Whether an event is the answer of an attempt that is not the live one."""
    if not isinstance(event, (Processed, Committed, RolledBack)):
        return False
    live = coordinator.in_flight().get(event.txid)
    return live is None or live[0] != event.attempt_id


class SimDriver:
    """The process of a driver: it dies, freezes, is stopped, and comes back."""

    executor_type: type[SimExecutor] = SimExecutor

    def __init__(self, world: World, topology: Topology, name: str) -> None:
        self.world = world
        self.topology = topology
        self.next_topology = topology  # for its next start
        self.name = name
        self.life = 0
        self.frozen_until = 0
        self.epoch = 0
        self._leadership: SimLeadership | None = None
        self._driver: Driver | None = None
        self._threads: list[SimProcess] = []

    def start(self) -> None:
        self.topology = self.next_topology
        driver = self._driver = WatchedDriver(self)
        self.thread("start", driver.running(), lambda value: self._ended(driver)).start()

    def thread(self, name: str, steps: Steps[None], on_end: Callable[[Any], None]) -> SimProcess:
        process = SimProcess(self.world, name, steps, self, on_end)
        self._threads = [each for each in self._threads if not each.over]
        self._threads.append(process)
        return process

    def start_after(self, after_ms: int) -> None:
        life = self.life
        self.world.at(after_ms, lambda: self.start() if self.life == life else None)

    @property
    def leadership(self) -> SimLeadership | None:
        """The leadership that the driver believes it has."""
        held = self._leadership
        return held if held is not None and not held.noticed else None

    @leadership.setter
    def leadership(self, leadership: SimLeadership) -> None:
        self._leadership = leadership
        self.epoch = leadership.epoch

    @property
    def leads(self) -> bool:
        """Whether a term is under way."""
        return self._driver is not None and self._driver._term is not None

    @property
    def is_whole(self) -> bool:
        """Whether its topology is the changed one."""
        shape, parts = self.world.shape, self.topology.parallelisms()
        return SPOUTS[shape.renames] in parts and (not shape.joins or shape.joins in parts)

    @property
    def accepts_change(self) -> bool:
        """Whether the user accepts a changed topology: once, at the first run of it."""
        return not self.world.joined and self.is_whole

    # --- trouble ----------------------------------------------------------------------------------

    def crash(self) -> None:
        """Everything of this driver ends at once; its session ends a while later;
        it starts again some time.
        """
        world = self.world
        world.note(f"{self.name} dies")
        for state in self.topology.states:
            state.backend.forget_process()  # type: ignore[attr-defined]
        self.life += 1
        self.frozen_until = 0
        leadership, self._leadership, self._driver = self._leadership, None, None
        if leadership is not None:
            leadership.die()
            world.at(int(world.chance.random() * SESSION_MS), partial(world.store.expire, leadership))
        threads, self._threads = self._threads, []
        for each in threads:
            each.kill()
        self.start_after(int(world.chance.random() * 1_000))

    def freeze(self) -> None:
        """Stop for a while, as under SIGSTOP, and go on as before;
        the session may end meanwhile.
        """
        pause = int(self.world.chance.random() * 3 * SESSION_MS)
        self.frozen_until = self.world.now + pause
        self.world.note(f"{self.name} freezes for {pause} ms")
        if pause > SESSION_MS:
            self.expire(after_ms=SESSION_MS)

    def expire(self, after_ms: int = 0) -> None:
        """End the session; the driver learns of it only later, and may try to write before."""
        leadership = self.leadership
        if leadership is not None:
            self.world.at(after_ms, partial(self.world.store.expire, leadership))
            notice = max(after_ms, self.frozen_until - self.world.now) + int(self.world.chance.random() * 200)
            self.world.at(notice, partial(setattr, leadership, "noticed", True))

    def request_stop(self) -> None:
        """Stop as on SIGTERM: the commit under way is finished, the rest is abandoned."""
        if self._driver is not None:
            self._driver.request_stop()

    # --- the end of a run -------------------------------------------------------------------------

    def _ended(self, driver: Driver) -> None:
        self._driver = None
        if driver.error is not None:
            self._failed(driver.error)
        elif driver.failure is not None:
            self._stopped_by(driver.failure)
        else:
            self._resume_some_time()  # it was asked to stop

    def _resume_some_time(self) -> None:
        self.world.note(f"{self.name} has stopped")
        self.start_after(int(self.world.chance.random() * 1_000))

    def _failed(self, error: Exception) -> None:
        world = self.world
        refused = isinstance(error, (ConfigError, CorruptStateError))
        if refused and self.topology is not self.next_topology:
            self._resume_some_time()  # the state is of another topology now
        elif isinstance(error, CorruptStateError) and world.corrupted in str(error):
            world.finished = True  # the corrupt node was refused and named, as it must be
        elif refused and world.oracle.may_stop(str(error)):
            world.stop(str(error))
        elif isinstance(error, Violation):
            raise error
        else:
            raise Violation(f"{self.name} fails: {error!r}") from error

    def _stopped_by(self, failure: TaskFailure) -> None:
        """The topology stopped. Raises ``Violation`` unless it had to, and says why."""
        if self.world.oracle.may_stop(failure.message):
            self.world.stop(str(failure))
            return
        refused, lost = failure.kind is FailureKind.BAD_RECORD, failure.kind is FailureKind.DATA_LOSS
        if (refused and self._cannot_take_out(failure)) or (lost and self._cannot_replan(failure)):
            self.world.stop(str(failure))
            return
        raise Violation(f"C8: the topology stops, and could have gone on: {failure}")

    def _cannot_take_out(self, failure: TaskFailure) -> bool:
        """Whether a refused value had to stop the topology: its commit was opened, and a sink that
        cannot undo may have written (C8).
        """
        opened = self.world.is_open(self.world.store.currtx()) or bool(self.world.restored)
        return "may have written to a sink that cannot undo" in failure.message and opened and self._may_be_written()

    def _cannot_replan(self, failure: TaskFailure) -> bool:
        """The same for a range that is lost."""
        named = "was opened with this plan" in failure.message
        return named and self.world.opened_range_is_lost() and self._may_be_written()

    def _may_be_written(self) -> bool:
        """Whether a sink that cannot undo may have written rows of the next transaction."""
        world, txid = self.world, self.world.store.currtx()
        unknown = txid in {each for each, _ in world.unanswered} or len(world.oracle.opened_by[txid]) > 1
        may_be_written = txid in world.for_good or unknown or bool(world.restored)
        return bool(self.topology.irreversible()) and may_be_written


class ResetTool:
    """``reset`` of the positions, as an operator calls it:
    it takes the leadership when that is free.
    """

    def __init__(self, driver: SimDriver) -> None:
        self.driver = driver

    def run(self) -> None:
        driver = self.driver
        store = driver.world.store
        if not driver.world.joined:
            return  # no operator resets while the topology changes
        leadership = store.lead(TOPOLOGY, "reset")
        if leadership is None:
            store.waiting.append(self.run)
            return
        try:
            topology = driver.next_topology
            documents = TopologyDocuments(store, leadership, topology)
            incarnation = documents.incarnation()
            executor = driver.executor_type(driver.world, topology)
            commit = CommitPhase(TOPOLOGY, topology.states, executor, leadership.epoch, incarnation=incarnation)
            irreversible = topology.irreversible()
            perform(resetting_positions(documents, commit, TOPOLOGY, leadership.epoch, irreversible))
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


class TryingCount(UpdateGlobalCount):
    """``tries``: whether it says that it can try its writes. ``SimExecutor`` answers for it."""

    tries_in_order = True

    def __init__(self, state: MapState, *, tries: bool) -> None:
        super().__init__(state)
        self._tries = tries

    def may_try_writes(self) -> bool:
        return self._tries


def build_topology(world: World, *, whole: bool) -> Topology:
    """The topology as it is at first or, with ``whole``, as it is after the change."""
    shape = world.shape
    spout, without = SPOUTS[whole and shape.renames], "" if whole else shape.joins
    builder = TransactionalTopologyBuilder(TOPOLOGY, spout, world.spout, 1)
    for sink, name in enumerate(shape.names):
        if name != without:
            builder.set_bolt(
                name, TryingCount(world.state(sink), tries=shape.tries), 1 if shape.one_step else TASKS
            ).shuffle_grouping(spout)
    if shape.topic_tasks and without != TOPIC:
        builder.set_bolt(TOPIC, TopicSink(world.kafka), shape.topic_tasks).shuffle_grouping(spout)
    return builder.build()
