"""Copies of a topology, or of a part of it, that write nothing where the topology writes.
``verify``, ``explain``, ``replay``, ``rebuild`` and ``simulate`` run them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import cloudpickle
import pyarrow as pa

from framework.errors import ConfigError, TopologyError
from framework.execution import AttemptHeader, LocalExecutor, TaskFailure, plan_execution
from framework.execution.plan import ExecutionPlan
from framework.execution.ports import ProcessingJob, TaskWatcher
from framework.topology import ArrowBolt, Bolt, Component, FencedState, Topology
from framework.topology.inspectable import RecountedBolt, SubstitutedBolt, with_scratch_states
from framework.topology.spouts import PartitionPlanner
from framework.transactions.commit import CommitPhase
from framework.transactions.plans import Plan, plan_digest
from framework.transactions.spout_planners import planner_of, processing_job

#: Turns a copy of a bolt with states into the bolt of the shadow, which keeps them in a folder that
#: does not exist yet. Raises ``ConfigError`` when it cannot.
Shadowed = Callable[[Bolt, Path], Bolt]
#: Makes the processing phase of an attempt at a plan. Raises ``ConfigError`` when it cannot.
JobMaker = Callable[[AttemptHeader, PartitionPlanner, Plan], ProcessingJob]

#: The attempt of every transaction in a shadow. Those of drivers count from 1, so the fence of a
#: real state refuses it, should user code reach for that state all the same.
SHADOW_ATTEMPT = 0
_ADVICE = "so that a copy would write where it does itself: keep states as attributes of the object, made in __init__"


def recounting(bolt: Bolt, folder: Path) -> Bolt:
    """The ``Shadowed`` of tools that compute the content of the states again."""
    return bolt.recounting(folder) if isinstance(bolt, RecountedBolt) else with_scratch_states(bolt, folder)


def unseen(component: Component) -> str:
    """Why a component cannot be in a shadow at all; nothing where it can."""
    return "it writes where nothing can be compared" if component.committer and not component.states else ""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A component that the shadow does not have, and why."""

    component: Component
    why: str

    def __str__(self) -> str:
        return f"bolt {self.component.id!r}: {self.why}"


def shadow_of(
    topology: Topology,
    folder: Path,
    shadowed: Shadowed,
    *,
    joined: Mapping[str, int] = MappingProxyType({}),
    strict: bool = True,
    unseen: Callable[[Component], str] = unseen,
) -> tuple[Topology, list[LeftOut]]:
    """The topology with other states, and the components that are left out: those that are
    ``unseen``, by default those that write where Ratchet does not see it; those whose state is
    among the ``joined`` (location -> first txid); unless ``strict`` those that ``shadowed``
    refuses; and all below them."""
    kept: list[Component] = []
    left_out: dict[str, LeftOut] = {}
    for component in topology.components:
        bolt = component.instance
        since = max((joined[state.location] for state in component.states if state.location in joined), default=None)
        why, copy = "", bolt
        if since is not None:
            why = f"its state joined at transaction {since}, and holds nothing from before"
        elif any(sub.component_id in left_out for sub in component.subscriptions):
            why = "it is below one that is not"
        elif unseen(component):
            why = unseen(component)
        elif isinstance(bolt, Bolt) and (component.states or isinstance(bolt, SubstitutedBolt)):
            try:
                copy = _shadowed(bolt, component.states, shadowed, folder / component.id)
            except (ConfigError, TopologyError) as error:
                if strict:
                    raise ConfigError(f"bolt {component.id!r}: {error}") from error
                why = str(error)
        if why:
            left_out[component.id] = LeftOut(component, why)
        else:
            kept.append(component if copy is bolt else replace(component, instance=copy, factory=None))
    return Topology(topology.id, tuple(kept), topology.at_least_once), list(left_out.values())


def with_what_it_needs(topology: Topology, component: Component, letters: Component | None = None) -> Topology:
    """The component, and all above it; and ``letters``, which keeps the dead letters that were
    replayed."""
    needed, waiting = set(), [each.id for each in (component, letters) if each is not None]
    while waiting:
        each = waiting.pop()
        if each not in needed:
            needed.add(each)
            waiting += [sub.component_id for sub in topology[each].subscriptions]
    return Topology(
        topology.id, tuple(each for each in topology.components if each.id in needed), topology.at_least_once
    )


class Sandbox:
    """Runs a shadow in this process: processes recorded plans, and commits them into the states of
    the shadow, under the fence of ``epoch``. ``topology``: whose spout has made the plans.
    ``execution``: of the shadow, where it has more than the shadow's components."""

    def __init__(
        self,
        topology: Topology,
        shadow: Topology,
        conf: Mapping[str, Any],
        *,
        execution: ExecutionPlan | None = None,
        watcher: TaskWatcher | None = None,
        epoch: int = 1,
    ) -> None:
        self.planner: PartitionPlanner = planner_of(topology, conf, letters_of=shadow)
        self._executor = LocalExecutor(execution or plan_execution(shadow), conf, watcher)
        self._shadow, self._epoch = shadow, epoch
        self.commit = CommitPhase(shadow.id, shadow.states, self._executor, epoch)

    def start(self) -> None:
        self._executor.start()

    def close(self) -> None:
        self._executor.close()
        self.planner.close()
        for state in self._shadow.states:
            state.close()

    def forget(self) -> None:
        """Begin again with states that were emptied."""
        self.commit = CommitPhase(self._shadow.id, self._shadow.states, self._executor, self._epoch)

    def run(self, txid: int, plan: Plan, *, replay: bool = False, job: JobMaker = processing_job) -> TaskFailure | None:
        """Process a plan and commit it. Returns how it fails; None when it does not. ``replay``:
        its commit was opened before. Raises ``DataLossError`` when the source no longer holds what
        was planned."""
        header = AttemptHeader(
            self._shadow.id,
            txid=txid,
            attempt_id=SHADOW_ATTEMPT,
            epoch=self._epoch,
            plan_digest=plan_digest(plan),
        )
        try:
            result = self._executor.process(job(header, self.planner, plan))
            if result.failure is None:
                self.planner.confirm(plan)
                result = self.commit.run(header, replay=replay)
        finally:
            self._executor.release(header)
        return result.failure


class End(ArrowBolt):
    """Takes rows, and does nothing."""

    def execute_arrow(self, batch: pa.RecordBatch) -> None:
        return None


def with_ends(shadow: Topology, left_out: Iterable[LeftOut]) -> Topology:
    """The shadow with an end for each component that is left out, so that its rows can be seen."""
    kept = {each.id for each in shadow.components}
    ends = [
        replace(each.component, instance=End(), factory=None, committer=False, streams={}, subscriptions=taken)
        for each in left_out
        if (taken := tuple(sub for sub in each.component.subscriptions if sub.component_id in kept))
    ]
    return Topology(shadow.id, (*shadow.components, *ends), shadow.at_least_once)


def _shadowed(bolt: Bolt, real: Sequence[FencedState], shadowed: Shadowed, folder: Path) -> Bolt:
    """The bolt of the shadow. Raises ``ConfigError`` unless it, and each copy of it that a task
    gets, has states of its own, which are those of the shadow: what it commits would reach the real
    ones otherwise."""
    copy = _copied(bolt)
    _check_own(copy, real)
    made = shadowed(copy, folder)
    made.on_bad_record = bolt.on_bad_record
    _check_own(made, real)
    in_task = _copied(made)
    _check_own(in_task, real)
    if [each.location for each in in_task.states()] != [each.location for each in made.states()]:
        raise ConfigError(f"a copy of it makes its states anew, {_ADVICE}")
    return made


def _copied(bolt: Bolt) -> Bolt:
    copy: Bolt = cloudpickle.loads(cloudpickle.dumps(bolt))
    return copy


def _check_own(copy: Bolt, real: Sequence[FencedState]) -> None:
    states = list(copy.states())
    if [*map(id, states)] != [*map(id, copy.states())]:
        raise ConfigError(f"its states() makes its states anew at each call, {_ADVICE}")
    if {*map(id, states)} & {*map(id, real)}:
        raise ConfigError(f"its states are shared by all copies of it, {_ADVICE}")
