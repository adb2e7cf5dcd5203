"""Searches for schedules that break exactly-once, and shrinks them."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from framework.config import Config
from framework.errors import ConfigError
from framework.execution.failures import TaskFailure
from framework.execution.plan import Phase
from framework.execution.tasks import PlannedTopology
from framework.testing.simulation.clock import TurnCounter
from framework.testing.simulation.external_effects import guarded, install_guard, outsides_of, struck, unseen_library
from framework.testing.simulation.fault_injector import Execution, Kept
from framework.testing.simulation.findings import Finding, Report
from framework.testing.simulation.hash_seed_worker import SecondWorker
from framework.testing.simulation.run import Outcome, World, Wrong, differing, simulate_schedule
from framework.testing.simulation.sample_records import Sample
from framework.testing.simulation.schedule import Fault, Kind, Schedule, drawn
from framework.testing.simulation.tasks import RowsTaken, process
from framework.testing.simulation.worker_globals import WorkerMemory
from framework.topology import DataFrameBolt, Topology
from framework.topology.graph import Component
from framework.transactions.run import TopologyFailed

#: The most schedules that shrinking one finding may cost.
_SHRINK_MAX = 300
#: The most records of schedules that are tried in all combinations, and of how many records.
_SMALLEST_MAX = 2
_COMBINED_MAX = 6
#: The search ends after this many findings.
_FINDINGS_MAX = 20
_NOT_OUTSIDE = (
    "it writes where nothing can be compared: give it an Outside of framework.testing in place of what it writes to"
)

#: Called after each schedule, with the number of schedules run.
Progress = Callable[[int], None]


def run_schedules(
    topology: Topology,
    sample: Sample,
    config: Mapping[str, Any] | Config | None = None,
    *,
    schedules: int = 200,
    seed: int = 0,
    connect: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Run ``schedules`` schedules over the sample, those of the seeds ``seed``, ``seed + 1`` and so
    on, and shrink the schedule of each finding. ``connect``: bolts may open connections.

    Nothing is written to the topology's targets. User code runs in the calling thread; for a few
    batches, the processing phase runs in a child process. The clock and the random numbers of this
    process are replaced while user code runs.

    Raises ``ConfigError`` when no part of the topology can be simulated, and ``TopologyFailed``
    when the topology fails without any fault.
    """
    with _world(topology, sample, Config.of(config or {}), connect=connect) as world:
        return _Search(world, Report(topology_id=topology.id, seed=seed)).run(schedules, progress)


@contextmanager
def _world(topology: Topology, sample: Sample, config: Config, *, connect: bool) -> Iterator[World]:
    in_memory = Path("/dev/shm")
    place = in_memory if in_memory.is_dir() else None  # an fsync costs nothing there
    with tempfile.TemporaryDirectory(prefix="ratchet-simulate-", dir=place, ignore_cleanup_errors=True) as folder:
        install_guard()
        other = SecondWorker(topology, config.for_components(), Path(folder), connect=connect)
        try:
            yield World(
                topology=topology,
                sample=sample,
                config=config,
                folder=Path(folder),
                memory=WorkerMemory(topology),
                other=other,
                left_out=partial(_why_not, connect=connect),
                connect=connect,
            )
        finally:
            other.close()


def _why_not(component: Component, *, connect: bool) -> str:
    """Why a component cannot be simulated; empty when it can."""
    library = None if connect else unseen_library(component.instance)
    if library is not None:
        return f"its code uses {library}, which a simulation cannot hold back: give it something in place of that"
    if isinstance(component.instance, DataFrameBolt):
        return "Spark SQL is not simulated"
    if component.committer and not component.states and not outsides_of(component.instance):
        return _NOT_OUTSIDE
    return ""


class _Search:
    def __init__(self, world: World, report: Report) -> None:
        self._world, self._report = world, report
        self._places = tuple(
            (partition, place) for partition in sorted(world.sample) for place in range(len(world.sample[partition]))
        )
        report.records = len(self._places)

    def run(self, schedules: int, progress: Progress | None) -> Report:
        report = self._report
        self._look_without_faults()
        for number in range(schedules):
            schedule = drawn(report.seed + number, self._places)
            outcome = simulate_schedule(self._world, schedule)
            report.schedules += 1
            for kind in outcome.met:
                report.met[kind.name.lower()] = report.met.get(kind.name.lower(), 0) + 1
            for wrong in outcome.wrong:
                if all((each.broken, each.component) != (wrong.broken, wrong.component) for each in report.findings):
                    report.findings.append(self._shortest(schedule, wrong))
            if progress is not None:
                progress(report.schedules)
            if len(report.findings) >= _FINDINGS_MAX:
                break
        if self._world.other.failed:
            report.notes.append(f"no batch was given to another Python process: {self._world.other.failed}")
        return report

    # --- without faults --------------------------------------------------------------------------

    def _look_without_faults(self) -> None:
        """Find out which components can be simulated, and which of their rows are the same each
        time.
        """
        world, report = self._world, self._report
        outcome = self._possible()
        report.left_out = {each.component.id: each.why for each in outcome.left_out}
        if len({*outcome.plan.components} - {*report.left_out}) == 1:  # only the spout is left
            told = "; ".join(map(str, outcome.left_out)) or "it has no bolt"
            raise ConfigError(f"nothing of topology {world.topology.id!r} can be simulated: {told}")
        if isinstance(outcome.failure, TaskFailure):
            raise TopologyFailed.of(outcome.failure)
        if outcome.failure is not None:
            raise outcome.failure
        for wrong in outcome.wrong:
            promises = getattr(world.topology[wrong.component].instance, "deterministic", False)
            if promises:
                report.findings.append(self._shortest(self._calm(), wrong))
            else:
                world.ignored.add((wrong.broken, wrong.component))
                report.notes.append(f"{wrong.what} without any fault, too: it is not compared")
        report.notes += [f"{what} is not compared: {why}" for what, why in world.uncompared.items()]
        world.steady = self._steady(outcome)

    def _calm(self) -> Schedule:
        longest = max(len(records) for records in self._world.sample.values())
        return Schedule(seed=self._report.seed, kept=self._places, take=max(-(-longest // 3), 1))

    def _possible(self) -> Outcome:
        """Run without faults, with all components that change nothing outside."""
        world = self._world
        refused: dict[str, str] = {}

        def left_out(component: Component) -> str:
            return refused.get(component.id) or _why_not(component, connect=world.connect)

        world.left_out = left_out
        while True:
            struck()
            outcome = simulate_schedule(world, self._calm())
            tried, failure = struck(), outcome.failure
            if tried is not None and not isinstance(failure, TaskFailure):
                self._report.notes.append(f"your code {tried}, which was refused")
            if tried is None or not isinstance(failure, TaskFailure) or failure.component_id in refused:
                return outcome
            refused[failure.component_id] = (
                f"it {tried}, at {failure.where or 'a library of its'}: give it something in place of that"
            )

    def _steady(self, outcome: Outcome) -> frozenset[str]:
        """The components that give the same rows with another clock, as another attempt, and in
        another process."""
        plan, batches = outcome.plan, outcome.batches
        world, unsteady, judged = self._world, set[str](), set[str]()
        turns = TurnCounter(self._report.seed - 1, list(world.memory.namespaces.values()))
        first, *others = (
            {txid: rows for txid, kept in sorted(batches.items()) if (rows := once(kept)) is not None}
            for once in self._passes(outcome, turns)
        )
        for other in others:
            for txid, rows in other.items():
                found = differing(plan, rows, first[txid])
                if found is not None:
                    unsteady.add(found.component)
                changed = _edges_that_differ(rows, first[txid])
                judged |= {each.source for each in plan.edges if each.index not in changed}
        world.memory.restore()
        below = {each.target for each in plan.edges if each.source in unsteady}
        return frozenset(judged - unsteady - below)

    def _passes(self, outcome: Outcome, turns: TurnCounter) -> Iterator[Callable[[Kept], Execution | None]]:
        world, plan, seed = self._world, outcome.plan, self._report.seed - 1
        conf = world.config.for_components()

        def here(attempt_id: int) -> Callable[[Kept], Execution | None]:
            world.memory.restore()
            planned = PlannedTopology(plan, conf, RowsTaken())

            def once(kept: Kept) -> Execution:
                header = replace(kept.header, attempt_id=attempt_id, epoch=attempt_id)
                with turns.turn(turns.next()), guarded(world.folder, connect=world.connect):
                    done = process(planned, replace(kept.job, header=header))
                return Execution(kept.header, Phase.PROCESSING, done.rows)

            return once

        def elsewhere(kept: Kept) -> Execution | None:
            done = world.other.process(plan, kept.job, seed=seed, turn=turns.next())
            return Execution(kept.header, Phase.PROCESSING, done.rows) if done is not None else None

        yield here(1)
        yield here(7)
        yield elsewhere

    # --- shrinking --------------------------------------------------------------------------------

    def _shortest(self, schedule: Schedule, wrong: Wrong) -> Finding:
        """Remove faults and records, as long as the same promise is broken."""
        best, shown = schedule, self._shows(schedule, wrong)
        tries = 0
        for ways in (_smaller, _smallest):
            progressed = shown is not None
            while progressed:
                progressed = False
                for smaller in itertools.islice(ways(best), max(_SHRINK_MAX - tries, 0)):
                    tries += 1
                    found = self._shows(smaller, wrong)
                    if found is not None:
                        best, shown, progressed = smaller, found, ways is _smaller
                        break
        if shown is None:  # it does not recur: random numbers that cannot be repeated
            return Finding(
                broken=wrong.broken,
                component=wrong.component,
                what=wrong.what,
                details=wrong.details,
                schedule=schedule,
                story=("it did not show again in the same schedule: what it depends on cannot be repeated",),
            )
        return _finding(shown[0], best, shown[1])

    def _shows(self, schedule: Schedule, wrong: Wrong) -> tuple[Wrong, Outcome] | None:
        outcome = simulate_schedule(self._world, schedule)
        for each in outcome.wrong:
            if (each.broken, each.component) == (wrong.broken, wrong.component):
                return each, outcome
        return None


def _edges_that_differ(one: Execution, other: Execution) -> set[int]:
    places = {*one.rows, *other.rows}
    return {edge for edge, task in places if one.rows.get((edge, task), []) != other.rows.get((edge, task), [])}


def _finding(wrong: Wrong, schedule: Schedule, outcome: Outcome) -> Finding:
    return Finding(
        broken=wrong.broken,
        component=wrong.component,
        what=wrong.what,
        details=wrong.details,
        story=tuple(outcome.story),
        keeps=tuple(outcome.keeps),
        schedule=schedule,
    )


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Smaller schedules, the smallest first."""
    kept, faults = schedule.kept, schedule.faults
    longest = max(Counter(partition for partition, _ in kept).values())
    for number in range(len(faults)):
        yield replace(schedule, faults=(*faults[:number], *faults[number + 1 :]))
    size = len(kept) // 2
    while size:
        for first in range(0, len(kept), size):
            rest = (*kept[:first], *kept[first + size :])
            if rest:
                yield replace(schedule, kept=rest)
        size //= 2
    if schedule.take < longest:
        yield replace(schedule, take=longest)
        yield replace(schedule, take=schedule.take * 2)
    if schedule.pending > 1:
        yield replace(schedule, pending=1)
    if not schedule.collapsed:
        yield replace(schedule, collapsed=True)
    for number, each in enumerate(faults):
        for simpler in _simpler(each):
            yield replace(schedule, faults=(*faults[:number], simpler, *faults[number + 1 :]))


def _smallest(schedule: Schedule) -> Iterator[Schedule]:
    """Schedules of one record, then of two, each in a batch of its own, with one fault: removal
    step by step may end at a larger schedule."""
    kinds = dict.fromkeys([*(each.kind for each in schedule.faults), Kind.PROCESSING_LOST, Kind.ANSWER_LOST])
    picks = dict.fromkeys([0, *(each.pick for each in schedule.faults)])
    sizes = len(schedule.kept) if len(schedule.faults) > 1 else len(schedule.kept) - 1
    for size in range(1, min(sizes, _SMALLEST_MAX) + 1):
        for kept in itertools.combinations(schedule.kept[:_COMBINED_MAX], size):
            for kind, pick, txid in itertools.product(kinds, picks, range(1, size + 1)):
                faults = (Fault(kind, txid, pick),)
                yield replace(schedule, kept=kept, take=1, pending=1, collapsed=True, faults=faults)


def _simpler(fault: Fault) -> Iterator[Fault]:
    kinds = list(Kind)
    for kind in (Kind.PROCESSING_LOST, Kind.ANSWER_LOST):
        if kinds.index(kind) < kinds.index(fault.kind):
            yield Fault(kind, fault.txid)
    if fault.txid > 1:
        yield replace(fault, txid=1)
        yield replace(fault, txid=fault.txid - 1)
    if fault.pick:
        yield replace(fault, pick=0)
        yield replace(fault, pick=fault.pick // 2)
