"""A home: the place where tasks of a core topology live, and where their part of every round is run.

A home holds whole tasks: a segment of fused components, or an acker. Which of them come to which home is not its business; one
that it has not heard of starts when its first round comes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from framework.acking.acker import Acker
from framework.acking.ledger import LedgerPart, Roots, spout_task_of
from framework.core.bolt_task import BoltTask
from framework.core.budget import ROUND_EXECUTE_S, Budget
from framework.core.checkpoints import CheckpointAction, CheckpointMarker
from framework.core.component_task import TIMEOUT_TICKS, ComponentTask
from framework.core.outcome import Outcome
from framework.core.rounds import Addressed, Decisions, Round, RoundRecord, RoundReport, TreeOutcomes
from framework.core.spout_task import SpoutTask
from framework.core.stateful_bolt_task import StatefulBoltTask
from framework.core.turns import OVERTAKE_S, Turns
from framework.errors import InvariantViolation
from framework.execution.failures import USER_ERRORS
from framework.execution.plan import Edge, ExecutionPlan, Phase, Segment, TaskComponent
from framework.execution.records import Piece, decode_batch, encode_batch
from framework.execution.tasks import PlannedTopology, arrival
from framework.state.settings import provider_of
from framework.topology import StateProvider

#: How long spouts with nothing to give are left alone: longer and longer.
_POLL_MIN_S, _POLL_MAX_S = 0.001, 0.025


@dataclass(frozen=True, slots=True)
class CorePlan:
    """A plan with what a core topology adds to it. ``pending_max``: tuples of unknown fate per spout task. ``ackers``: 0 for
    none. ``conf``: what components see. ``stateful``: the components whose state is kept. ``ticks``: bolts that are given a tick
    every so many seconds."""

    plan: ExecutionPlan
    conf: Mapping[str, Any]
    ackers: int
    pending_max: int
    stateful: frozenset[str] = frozenset()
    ticks: Mapping[str, float] = field(default_factory=dict)

    @property
    def widths(self) -> list[int]:
        """Tasks per level; the ackers are the last one."""
        return [level.partitions for level in self.plan.processing] + ([self.ackers] if self.ackers else [])

    def spout_tasks(self) -> list[tuple[str, int]]:
        """Component id and task of every spout task."""
        return self._tasks_of(each for each in self.plan.components.values() if not each.inputs)

    def rooted_tasks(self) -> list[tuple[str, int]]:
        """Of every task that trees may begin at; the place in the list is its number."""
        stateful = (each for each in self.plan.components.values() if each.id in self.stateful)
        return self.spout_tasks() + self._tasks_of(stateful)

    @staticmethod
    def _tasks_of(components: Iterable[TaskComponent]) -> list[tuple[str, int]]:
        return [(each.id, task) for each in components for task in range(each.parallelism)]


class Home:
    """Where tasks live. ``encode``: rows leave the process between levels. Several threads may run tasks."""

    def __init__(
        self,
        plan: CorePlan,
        *,
        encode: bool,
        overtake_s: float = OVERTAKE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._plan = plan
        self._overtake_s = overtake_s
        self._topology = PlannedTopology(plan.plan, plan.conf)
        self._encode = encode
        self._tasks: dict[tuple[int, int], SegmentTask | AckerTask] = {}
        self._turns: dict[tuple[int, int], Turns] = {}
        self._lock = threading.Lock()
        self._hurried = threading.Condition()
        self._hurried_round = 0
        self._waiting_round = 0
        self._numbers = {each: number for number, each in enumerate(plan.rooted_tasks())}
        self._provider = provider_of(plan.conf) if plan.stateful else None

    def run_task(
        self, round_: Round, level: int, partition: int, records: Sequence[RoundRecord]
    ) -> Sequence[Addressed]:
        """Run one task of one level for a round: ``RunTask``. Raises ``OvertakenError``."""
        return self.run_tasks(round_, level, [(partition, records)])

    def run_tasks(
        self, round_: Round, level: int, arriving: Sequence[tuple[int, Sequence[RoundRecord]]]
    ) -> Sequence[Addressed]:
        """Run several, when it is that round's turn at each: partitions, with what came for them. Raises ``OvertakenError``."""
        with ExitStack() as turns:
            for partition, _ in arriving:
                self._await_turn(turns, round_, level, partition)
            tasks = [(self._task(round_, level, partition), records) for partition, records in arriving]
            try:
                for task, _ in tasks:
                    task.begin(round_)
                givers = [task for task, _ in tasks if isinstance(task, SegmentTask) and task.gives]
                if givers and round_.spout_wait_s and not round_.drain:
                    self._await_a_spout(round_, givers)
                budget = Budget(self._clock, None if _prepares(round_) else ROUND_EXECUTE_S)
                return [exit_ for task, records in tasks for exit_ in task.run(round_, records, budget)]
            except BaseException:
                for task, _ in tasks:
                    task.throw_away()
                raise

    def wake(self, number: int) -> None:
        """Have the spouts wait no longer in a round; in any, when it is 0."""
        with self._hurried:
            self._hurried_round = max(self._hurried_round, number or self._waiting_round)
            self._hurried.notify_all()

    def _await_a_spout(self, round_: Round, tasks: Sequence[SegmentTask]) -> None:
        """Ask one spout after the other, less and less often, until one has given something or time is up."""
        until = time.monotonic() + round_.spout_wait_s
        pause_s = _POLL_MIN_S
        with self._hurried:
            self._waiting_round = round_.number
            while (left := until - time.monotonic()) > 0 and self._hurried_round < round_.number:
                gave = [task.give(round_) for task in tasks]
                if any(gave):
                    break
                self._hurried.wait(min(pause_s, left))
                pause_s = min(pause_s * 2, _POLL_MAX_S)
            self._waiting_round = 0

    def _await_turn(self, turns: ExitStack, round_: Round, level: int, partition: int) -> None:
        with self._lock:
            its = self._turns.setdefault((level, partition), Turns(self._overtake_s))
        turns.enter_context(its.of(round_.number, round_.follows))

    def _task(self, round_: Round, level: int, partition: int) -> SegmentTask | AckerTask:
        """The task that lives there; a new one when there is none, and in place of the one that is there when everything goes back
        to a checkpoint."""
        place = level, partition
        found, marker = self._tasks.get(place), round_.checkpoint
        if found is not None and (marker is None or marker.action is not CheckpointAction.RECOVER):
            return found
        made = self._begin(round_, level, partition)
        if isinstance(made, SegmentTask) and marker is not None and marker.action is CheckpointAction.RECOVER:
            self._tasks.pop(place, None)
            made.recover(marker, found if isinstance(found, SegmentTask) else None)
        self._tasks[place] = made
        return made

    def close(self) -> None:
        """Close spouts and clean bolts up."""
        tasks, self._tasks = self._tasks, {}
        for task in tasks.values():
            task.close()
        if self._provider is not None:
            self._provider.close()

    def _begin(self, round_: Round, level: int, partition: int) -> SegmentTask | AckerTask:
        levels = self._plan.plan.processing
        if level == len(levels):
            return AckerTask(partition, round_.number)
        segment, task = levels[level].slot(partition)
        return SegmentTask(
            self._plan,
            self._topology,
            segment,
            task,
            level,
            partition,
            self._numbers,
            round_.number,
            self._encode,
            self._provider,
            self._clock,
        )


class SegmentTask:
    """The fused components of one task, alive: the ``Surroundings`` of each. Where there is state, a new one waits for a recovery
    before its spouts give anything."""

    def __init__(
        self,
        plan: CorePlan,
        topology: PlannedTopology,
        segment: Segment,
        task: int,
        level: int,
        partition: int,
        numbers: Mapping[tuple[str, int], int],
        first_round: int,
        encode: bool,
        provider: StateProvider | None,
        clock: Callable[[], float],
    ) -> None:
        self.clock = clock
        self._plan = plan
        self._level = level
        self._partition = partition
        self._encode = encode
        self._task = task
        self._sequence = 0
        self._unrecovered = bool(plan.stateful)
        self.outcome = Outcome(segment.components)
        self._spouts: dict[int, SpoutTask] = {}
        self._rooted: dict[int, SpoutTask | StatefulBoltTask] = {}
        self._component_tasks: dict[str, ComponentTask] = {}
        for component_id in segment.components:
            component = plan.plan.components[component_id]
            component_task: ComponentTask
            tick_s = plan.ticks.get(component_id)
            if component_id in plan.stateful and provider is not None:
                number = numbers[(component_id, task)]
                component_task = self._rooted[number] = StatefulBoltTask(
                    topology, component, task, self, provider, number=number, first_round=first_round, tick_s=tick_s
                )
            elif component.inputs:
                component_task = BoltTask(topology, component, task, self, tick_s=tick_s)
            else:
                number = numbers[(component_id, task)]
                component_task = self._rooted[number] = self._spouts[number] = SpoutTask(
                    topology,
                    component,
                    task,
                    self,
                    number=number,
                    first_round=first_round,
                    pending_max=plan.pending_max,
                    tracked=plan.ackers > 0,
                )
            self._component_tasks[component_id] = component_task

    def recover(self, marker: CheckpointMarker, before: SegmentTask | None) -> None:
        """Begin as of a checkpoint, in place of who was here before: of what that one has made, nobody hears any more."""
        if before is not None:
            before.throw_away()
            for component_task in before._component_tasks.values():
                component_task.end_for(marker)
            for trouble in before.outcome.troubles:
                self.outcome.hear(trouble)
        self._unrecovered = False
        for component_id, component_task in self._component_tasks.items():
            component_task.recover(marker, before._component_tasks[component_id] if before is not None else None)

    def begin(self, round_: Round) -> None:
        """Commit a checkpoint, and tell those that trees begin at what became of them. Nobody begins before the recovery that says
        where from."""
        if self._unrecovered:
            return
        if round_.checkpoint is not None and round_.checkpoint.action is CheckpointAction.COMMIT:
            for component_task in self._component_tasks.values():
                component_task.commit(round_.checkpoint)
        for number, rooted in self._rooted.items():
            rooted.tell(round_.orders.get(number, TreeOutcomes()), round_.ticks, round_.lost)

    @property
    def gives(self) -> bool:
        """Whether there is a spout among the components."""
        return bool(self._spouts)

    def give(self, round_: Round) -> bool:
        """Have the spouts give what they have. Whether they had anything. Where there is state, they give nothing before they know
        from where on."""
        if self._unrecovered:
            return False
        gave = [spout.give(round_.at_once, round_.share) for spout in self._spouts.values()]
        return any(gave)

    def run(self, round_: Round, records: Sequence[RoundRecord], budget: Budget) -> Sequence[Addressed]:
        """The task's part of a round. Raises only what is a bug, or the end of the process: then the outcome is thrown away."""
        pieces: list[Piece] = []
        for record in records:
            if isinstance(record, Piece) and self._is_mine(record):
                pieces.append(record)
            else:
                self._pass_on(record)
        for piece in sorted(pieces, key=arrival):
            self._receive(self._plan.plan.edges[piece.edge], decode_batch(piece.payload))
        if not round_.drain:
            self.give(round_)
        for component_task in self._component_tasks.values():  # in topological order: fused rows come before the flush
            component_task.work(budget)
            if self._may_tick(round_):
                component_task.tick(settles=round_.settles)
            if round_.checkpoint is not None and _prepares(round_):
                component_task.prepare(round_.checkpoint)
            self._flush(component_task)
        for component_task in self._component_tasks.values():
            standing = component_task.standing(round_.checkpoint) if round_.checkpoint is not None else None
            if standing is not None:
                self.outcome.standings.append(standing)
            component_task.look()
        while any(made.rows for made in self.outcome.of.values()):  # instances that have died since have emitted these
            for component_task in self._component_tasks.values():
                self._flush(component_task)
        return self._hand_over(round_)

    def _may_tick(self, round_: Round) -> bool:
        """Not before a recovery, nor in its round: nobody hears of failures then."""
        marker = round_.checkpoint
        return not self._unrecovered and (marker is None or marker.action is not CheckpointAction.RECOVER)

    def throw_away(self) -> None:
        """The round is lost, and all that this task has made in it."""
        self.outcome = Outcome(self._component_tasks)

    def close(self) -> None:
        for component_task in self._component_tasks.values():
            component_task.close()

    def deliver(self, edge: Edge, target: int, batch: pa.RecordBatch) -> None:
        if edge.fused:
            self._receive(edge, batch)
            return
        payload = encode_batch(batch) if self._encode else batch
        piece = Piece(edge.index, target, self._task, self._sequence, batch.num_rows, payload)
        self._sequence += 1
        self._pass_on(piece)

    def _flush(self, component_task: ComponentTask) -> None:
        try:
            component_task.out.flush()
        except USER_ERRORS as error:  # what was emitted does not fit what was declared
            component_task.died(error)

    def _receive(self, edge: Edge, batch: pa.RecordBatch) -> None:
        component_task = self._component_tasks[edge.target]
        fields = self._plan.plan.components[edge.source].streams[edge.stream]
        if not isinstance(component_task, BoltTask):
            raise InvariantViolation(f"{edge.target} is no bolt, and an edge leads to it")
        component_task.receive(edge, fields, batch)

    def _hand_over(self, round_: Round) -> Sequence[Addressed]:
        outcome = self.outcome
        for component_id, component_task in self._component_tasks.items():
            outcome.of[component_id].counts.waiting = component_task.waiting
            if round_.ticks:
                outcome.ledger.reset(component_task.kept())
        for part in outcome.ledger.parts(self._plan.ackers, (self._level, self._partition), round_.number):
            self._pass_on(part)
        counts = {(component_id, self._task): made.counts for component_id, made in outcome.of.items()}
        ticks = [each.tick_in_s for each in self._component_tasks.values() if each.tick_in_s is not None]
        tick_in_s = min(ticks, default=None)
        self._pass_on(
            RoundReport(round_.number, counts, outcome.troubles, outcome.standings, self._unrecovered, tick_in_s)
        )
        self.outcome = Outcome(self._component_tasks)
        return outcome.exits

    def _is_mine(self, piece: Piece) -> bool:
        plan = self._plan.plan
        return plan.segment_of[(Phase.PROCESSING, plan.edges[piece.edge].target)].level == self._level

    def _pass_on(self, record: RoundRecord) -> None:
        plan = self._plan.plan
        if isinstance(record, Piece):
            partition, _ = plan.next_partition(
                Phase.PROCESSING, self._level, self._partition, record.edge, record.target_task
            )
        elif self._level + 1 < len(plan.processing):
            partition = plan.onward(Phase.PROCESSING, self._level, self._partition)
        else:
            partition = record.acker if isinstance(record, LedgerPart) else 0
        self.outcome.exits.append((partition, record))


def _prepares(round_: Round) -> bool:
    """Whether everything that comes must be done before the round ends: a checkpoint holds nothing that waits."""
    return round_.checkpoint is not None and round_.checkpoint.action is CheckpointAction.PREPARE


class AckerTask:
    """An acker, alive: it tells of trees in the round in which it decides about them.

    Invariant: what a task says of a round is taken once, and nothing that it has said before it is taken after it. A tree that
    misses something for that times out; one that heard something twice could have passed for complete. Nor is anything taken of
    rounds before its ``first_round``: of those nobody tracks a tree any more."""

    def __init__(self, number: int, first_round: int) -> None:
        self._number = number
        self._before = first_round - 1
        self._heard: dict[tuple[int, int], int] = {}  # task -> the last round that it has spoken of
        self._completed: list[int] = []
        self._failed: list[int] = []
        self._expired: list[int] = []
        self._acker: Acker[int, int] = Acker(
            on_complete=lambda root, task: self._completed.append(root),
            on_fail=lambda root, task: self._failed.append(root),
            buckets=TIMEOUT_TICKS + 1,
            on_expire=lambda root, task: self._expired.append(root),
        )

    def begin(self, round_: Round) -> None:
        """Nothing to do before the round."""

    def run(self, round_: Round, records: Sequence[RoundRecord], budget: Budget) -> Sequence[Addressed]:
        passing: list[Addressed] = []
        reset: set[int] = set()
        for record in records:
            if isinstance(record, LedgerPart):
                if record.round > self._heard.get(record.task, self._before):
                    self._heard[record.task] = record.round
                    reset.update(self._apply(record))
            else:
                passing.append((0, record))
        for _ in range(round_.ticks):
            self._acker.tick()
        decisions = Decisions(
            round_.number,
            self._number,
            Roots.of(self._completed),
            Roots.of(self._failed),
            Roots.of(reset),
            Roots.of(self._expired),
            self._acker.pending,
        )
        for each in (self._completed, self._failed, self._expired):
            each.clear()
        return [*passing, (0, decisions)]

    def throw_away(self) -> None:
        """What has been decided is told in the next round: the spouts have not heard of it."""

    def close(self) -> None:
        """Nothing to let go."""

    def _apply(self, part: LedgerPart) -> Iterable[int]:
        """Take in what a task says; returns the trees that are given the whole timeout again."""
        values = dict(zip(part.roots.tolist(), part.values.tolist(), strict=True))
        for root in part.failed.tolist():  # before anything that could complete the tree
            self._acker.fail(root)
            values.pop(root, None)
        for root in part.born.tolist():
            self._acker.init(root, spout_task_of(root), values.pop(root, 0))
        for root, value in values.items():
            self._acker.ack(root, value)
        for root in part.reset.tolist():
            self._acker.reset_timeout(root)
        return part.reset.tolist()  # type: ignore[no-any-return]
