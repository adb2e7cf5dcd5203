"""One schedule, from the first batch to the last: runs the topology under faults, then runs the
same batches once each without faults, and compares.

The driver, its terms and its commits are those of a real run. In place of Spark there is an
executor that runs the tasks in this process, and injects faults. When all batches are committed, a
fresh worker processes and commits them once more, in order. Then:

1. A component that promises to be deterministic, or was so without faults, has emitted the same
   rows in every attempt at the same batch.
2. Each state has the same content as after one commit of each committed batch.
3. So has each ``Outside``.
4. The run has reached its end.

The first says that bolts may be replayed, the others that committers may. Both sides give the
committers the same rows, even if a bolt emits other rows each time, as it may above opaque states.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from framework.config import Config
from framework.coordination.store import MemoryStore
from framework.errors import ConfigError, InvariantViolation
from framework.execution.failures import TaskFailure
from framework.execution.plan import ExecutionPlan, Phase, plan_execution
from framework.inspect.comparison import compare
from framework.inspect.sandbox import LeftOut, shadow_of, with_ends
from framework.observe.logs import no_logs
from framework.testing.simulation.executor import FaultyExecutor, OnceExecutor
from framework.testing.simulation.external_effects import Outside, outsides_of
from framework.testing.simulation.fault_injector import Execution, FaultInjector, Kept
from framework.testing.simulation.findings import Broken
from framework.testing.simulation.hash_seed_worker import SecondWorker
from framework.testing.simulation.sample_records import Sample, SampleRecord, Source, spout_over
from framework.testing.simulation.schedule import Kind, Schedule
from framework.testing.simulation.tasks import RowsSeen
from framework.testing.simulation.virtual_threads import DriverDied, NoProgress, VirtualThreads
from framework.testing.simulation.worker_globals import WorkerMemory
from framework.topology import Bolt, Difference, Topology, ValueType
from framework.topology.graph import Component
from framework.topology.inspectable import inspectable, with_scratch_states
from framework.transactions.commit import CommitPhase
from framework.transactions.documents import committed_txid
from framework.transactions.driver import Driver

#: A driver that needs more steps makes no progress: a transaction takes some fifty, and a batch may
#: be as small as a record.
_STEPS_MAX = 20_000
_STEPS_PER_RECORD_MAX = 200
#: The most differences that are shown, and the most parts of a value.
_SHOWN_MAX = 3
_CHARACTERS_MAX = 200


@dataclass(slots=True, kw_only=True)
class World:
    """The settings that all schedules of a simulation share.

    * ``left_out``: says why a component is not simulated, or nothing.
    * ``steady``: the components that gave the same rows with another clock, as another attempt and
      in another process.
    * ``ignored``: differences that occur without any fault.
    * ``uncompared``: location of a state -> why it is not compared."""

    topology: Topology
    sample: Sample
    config: Config
    folder: Path
    memory: WorkerMemory
    other: SecondWorker
    left_out: Callable[[Component], str]
    connect: bool = False
    steady: frozenset[str] = frozenset()
    ignored: set[tuple[Broken, str]] = field(default_factory=set)
    uncompared: dict[str, str] = field(default_factory=dict)
    trials: int = 0


@dataclass(frozen=True, slots=True)
class Wrong:
    """A broken promise, before it becomes a finding."""

    broken: Broken
    component: str
    what: str
    details: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The result of a schedule. ``failure``: why the run ended early. ``keeps``: changes in the
    memory of the worker. ``batches``: the committed ones."""

    plan: ExecutionPlan
    left_out: Sequence[LeftOut]
    story: Sequence[str]
    met: Sequence[Kind]
    wrong: Sequence[Wrong]
    failure: TaskFailure | BaseException | None
    keeps: Sequence[str]
    batches: Mapping[int, Kept]


def simulate_schedule(world: World, schedule: Schedule) -> Outcome:
    """Run a schedule. Raises ``ConfigError`` when the topology cannot be simulated."""
    world.trials += 1
    folder = world.folder / f"trial-{world.trials}"
    trial = _SimulationRun(world, schedule, folder)
    try:
        with no_logs():
            return trial.run()
    finally:
        trial.close()
        world.memory.restore()
        shutil.rmtree(folder, ignore_errors=True)


class _SimulationRun:
    def __init__(self, world: World, schedule: Schedule, folder: Path) -> None:
        self._world, self._schedule, self._folder = world, schedule, folder
        kept: dict[str, list[SampleRecord]] = {}
        for partition, place in schedule.kept:
            kept.setdefault(partition, []).append(world.sample[partition][place])
        self._source = Source(kept, schedule.take)
        self._copies: list[Topology] = []
        self._shadow, self._left_out = self._copy("faulty")
        self._plan = plan_execution(with_ends(self._shadow, self._left_out))
        self._conf = world.config.for_components()
        self._threads: VirtualThreads | None = None
        self._failure: TaskFailure | BaseException | None = None
        self._found: list[Wrong] = []
        self._injector = FaultInjector(
            schedule, self._source, world.memory, other=world.other, folder=world.folder, connect=world.connect
        )

    def _copy(self, name: str) -> tuple[Topology, list[LeftOut]]:
        topology = self._world.topology
        spout = replace(topology.spout, instance=spout_over(topology, self._source), factory=None)
        over_sample = Topology(topology.id, (spout, *topology.components[1:]), topology.at_least_once)
        copy, left_out = shadow_of(
            over_sample, self._folder / name, with_scratch_states, strict=False, unseen=self._world.left_out
        )
        self._copies.append(copy)
        return copy, left_out

    def close(self) -> None:
        if self._threads is not None:
            self._threads.kill()
        for copy in self._copies:
            for state in copy.states:
                state.close()

    def run(self) -> Outcome:
        memory, injector = self._world.memory, self._injector
        memory.restore()
        for each in memory.outside:
            each.clear()
        self._drive()
        keeps = memory.changed()
        memory.restore()
        if self._failure is not None:
            self._found.append(_stopped(self._failure))
        else:
            self._check()
        return Outcome(
            plan=self._plan,
            left_out=self._left_out,
            story=injector.story,
            met=injector.met,
            wrong=[each for each in self._found if (each.broken, each.component) not in self._world.ignored],
            failure=self._failure,
            keeps=keeps,
            batches=injector.committed,
        )

    def _drive(self) -> None:
        """Run the driver, and a new one whenever it dies, until all batches are committed."""
        world, injector = self._world, self._injector
        config = world.config.model_copy(update={"spout_pending": self._schedule.pending})
        store = MemoryStore()
        steps_max = _STEPS_MAX + _STEPS_PER_RECORD_MAX * len(self._schedule.kept)
        while True:
            executor = FaultyExecutor(self._plan, self._conf, injector)
            threads = self._threads = VirtualThreads(injector.thread_ended, steps_max)
            driver = Driver(self._shadow, executor, store, config, threads=threads)
            threads.spawn("driver", driver.running())
            try:
                threads.run(lambda leads=driver: leads.covers({}) or leads.status().phase in ("failed", "stopped"))  # type: ignore[misc]
            except DriverDied:
                threads.kill()
                executor.closed_to(committed_txid(store, self._shadow.id))
                world.memory.restore()
                injector.tell("another driver takes over, with workers that have just begun")
                continue
            except NoProgress:
                self._failure = InvariantViolation("the run goes on and on, and does not come to its end")
            else:
                self._failure = driver.failure or driver.error
            break
        injector.end()
        threads.kill()

    # --- the check --------------------------------------------------------------------------------

    def _check(self) -> None:
        injector, outside = self._injector, self._world.memory.outside
        held = [
            (_texts(each.items), {repr(key): repr(value) for key, value in each.values.items()}) for each in outside
        ]
        for each in outside:
            each.clear()
        reference, _ = self._copy("once")
        once = OnceExecutor(plan_execution(with_ends(reference, self._left_out)), self._conf, injector, reference)
        _commit_once(reference, once, injector.committed)
        self._check_rows(once.attempts)
        if self._found:
            return  # the committers cannot be blamed for effects of differing rows
        self._check_states(reference)
        for stands, (items, values) in zip(outside, held, strict=True):
            self._check_outside(stands, items, values)

    def _check_rows(self, once: Mapping[tuple[Phase, int], Execution]) -> None:
        for each in self._injector.attempts:
            clean = once.get((each.phase, each.header.txid))
            if clean is None or clean.header.plan_digest != each.header.plan_digest:
                continue  # the batch was planned again
            if each.phase is Phase.COMMIT and each.header != clean.header:
                continue  # the rows may depend on the clock; the states are compared
            found = differing(self._plan, each, clean)
            if found is not None and self._is_held_to(found.component, each.phase):
                self._wrong(Broken.ROWS, found.component, *self._told_rows(found, each.header))

    def _is_held_to(self, component_id: str, phase: Phase) -> bool:
        """Whether a component must emit the same rows again."""
        return phase is Phase.COMMIT or self._promises(component_id) or component_id in self._world.steady

    def _promises(self, component_id: str) -> bool:
        return bool(getattr(self._world.topology[component_id].instance, "deterministic", False))

    def _told_rows(self, found: DifferingRows, header: Any) -> tuple[str, tuple[str, ...]]:
        instance = self._world.topology[found.component].instance
        kind = "bolt" if isinstance(instance, Bolt) else "spout"
        says = "says deterministic = True, and " if self._promises(found.component) else ""
        return f"{kind} {found.component!r} {says}gives other rows for the same batch", (
            f"{found.edge}, attempt {header.attempt_id} at transaction {header.txid}: {_few(found.rows)}",
            f"{found.edge}, the same batch in a worker that has just begun: {_few(found.others)}",
        )

    def _check_states(self, reference: Topology) -> None:
        txid = max(self._injector.committed, default=0)
        for component in self._shadow.components:
            real = self._world.topology[component.id].states
            for place, state in enumerate(component.states):
                if state.value_type is ValueType.NON_TRANSACTIONAL:
                    self._world.uncompared[real[place].location] = "it counts a replayed batch twice, as its type says"
                    continue
                found: list[Difference] = []
                try:
                    watched = inspectable(state, purpose="be compared")
                    compare(watched, reference[component.id].states[place], txid, found.append, lambda key: None)
                except ConfigError as error:
                    self._world.uncompared[real[place].location] = str(error)
                    continue
                if found:
                    shown = [
                        f"{each.key!r}: it holds {_value(each.found)}; one commit of each batch gives {_value(each.expected)}"
                        for each in found[:_SHOWN_MAX]
                    ]
                    more = [f"and {len(found) - _SHOWN_MAX:,} more"] if len(found) > _SHOWN_MAX else []
                    what = f"bolt {component.id!r} leaves other values in {real[place].location} than one commit of each batch"
                    self._wrong(Broken.STATE, component.id, what, (*shown, *more))

    def _check_outside(self, stands: Outside, items: Sequence[str], values: Mapping[str, str]) -> None:
        expected = {repr(key): repr(value) for key, value in stands.values.items()}
        details: list[str] = []
        if items != _texts(stands.items):
            details += [f"appended: {_few(items)}", f"one commit of each batch appends: {_few(_texts(stands.items))}"]
        for key in dict.fromkeys([*values, *expected]):
            if values.get(key) != expected.get(key) and len(details) < _SHOWN_MAX:
                details.append(
                    f"{key}: it holds {values.get(key, 'nothing')}; one commit of each batch gives {expected.get(key, 'nothing')}"
                )
        if details:
            component = self._writer_of(stands)
            what = (
                f"bolt {component!r} leaves something else in {stands.name!r}, outside, than one commit of each batch"
            )
            self._wrong(Broken.OUTSIDE, component, what, tuple(details))

    def _writer_of(self, stands: Outside) -> str:
        writers = [
            each.id
            for each in self._world.topology.components
            if any(own.is_same(stands) for own in outsides_of(each.instance))
        ]
        committers = [each for each in writers if self._world.topology[each].committer]
        return next(iter(committers or writers), "?")

    def _wrong(self, broken: Broken, component: str, what: str, details: tuple[str, ...]) -> None:
        if all((each.broken, each.component) != (broken, component) for each in self._found):
            self._found.append(Wrong(broken, component, what, details))


def _commit_once(topology: Topology, executor: OnceExecutor, committed: Mapping[int, Kept]) -> None:
    """Commit in order, each batch under the attempt that was committed."""
    commit: CommitPhase | None = None
    epoch, digests = 0, dict[int, str]()
    for txid, kept in sorted(committed.items()):
        header = kept.header
        if commit is None or header.epoch != epoch:
            epoch = header.epoch
            commit = CommitPhase(topology.id, topology.states, executor, epoch, incarnation=header.incarnation)
            commit.open(txid, digests)
        digests[txid] = header.plan_digest
        executor.take(kept)
        result = commit.run(header, replay=False)
        if result.failure is not None:
            raise InvariantViolation(f"transaction {txid} could not be committed once more: {result.failure}")


def _stopped(failure: TaskFailure | BaseException) -> Wrong:
    if isinstance(failure, TaskFailure):
        what = f"component {failure.component_id!r} fails, and does not without faults"
        return Wrong(Broken.STOPPED, failure.component_id, what, tuple(failure.lines()))
    return Wrong(Broken.STOPPED, "?", "the run ends, and does not without faults", (str(failure),))


@dataclass(frozen=True, slots=True)
class DifferingRows:
    """The rows of a component on an edge, in two executions."""

    component: str
    edge: str
    rows: Sequence[str]
    others: Sequence[str]


def differing(plan: ExecutionPlan, one: Execution, other: Execution) -> DifferingRows | None:
    """The first component, from the top, that emitted other rows for the same input."""
    edges = {each.index: each for each in plan.edges}
    by_edge = [_by_edge(each.rows) for each in (one, other)]
    changed = {index for index in edges if by_edge[0].get(index, {}) != by_edge[1].get(index, {})}
    for component_id in plan.components:
        out = [each for each in plan.edges if each.source == component_id and each.index in changed]
        if out and not any(each.target == component_id and each.index in changed for each in plan.edges):
            rows, others = (
                [row for _, its in sorted(each.get(out[0].index, {}).items()) for row in its] for each in by_edge
            )
            return DifferingRows(component_id, out[0].label, rows, others)
    return None


def _by_edge(rows: RowsSeen) -> dict[int, dict[tuple[int, int], list[str]]]:
    found: dict[int, dict[tuple[int, int], list[str]]] = {}
    for (edge, task), its in rows.items():
        found.setdefault(edge, {})[task] = its
    return found


def _texts(values: Sequence[Any]) -> list[str]:
    return [*map(repr, values)]


def _few(rows: Sequence[str]) -> str:
    if not rows:
        return "none"
    more = f" and {len(rows) - 2 * _SHOWN_MAX:,} more" if len(rows) > 2 * _SHOWN_MAX else ""
    return ", ".join(map(_short, rows[: 2 * _SHOWN_MAX])) + more


def _value(value: Any) -> str:
    if value is None:
        return "nothing"
    return _short(repr(value[0] if isinstance(value, tuple) and len(value) == 1 else value))


def _short(text: str) -> str:
    return text if len(text) <= _CHARACTERS_MAX else f"{text[:_CHARACTERS_MAX]}…"
