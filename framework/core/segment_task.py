"""A task of a core topology: the fused components of one segment, and their part of each round."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import pyarrow as pa

from framework.acking.ack_reports import LedgerPart, Roots
from framework.arrow_spill import decode_batch, encode_batch
from framework.core.bolt_task import BoltTask
from framework.core.checkpoint_messages import CheckpointAction, CheckpointMarker
from framework.core.component_task import ComponentTask
from framework.core.outcome import Outcome
from framework.core.plan import CorePlan
from framework.core.round_budget import Budget
from framework.core.round_protocol import Addressed, Round, RoundRecord, RoundReport, TreeOutcomes
from framework.core.spout_task import Origins, SpoutTask
from framework.core.stateful_bolt_task import Follows, StatefulBoltTask
from framework.errors import InvariantViolation
from framework.execution.failures import users_errors
from framework.execution.messages import Piece
from framework.execution.plan import Edge, Phase, Segment
from framework.execution.tasks import PlannedTopology, arrival
from framework.topology import StateProvider


class SegmentTask:
    """The fused components of one task, and the ``Surroundings`` of each. If the topology has
    state, the spouts of a new task emit nothing before a recovery."""

    def __init__(
        self,
        plan: CorePlan,
        topology: PlannedTopology,
        segment: Segment,
        *,
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
        self.lock = threading.RLock()
        self.thread = threading.get_ident()
        self.blames = self.exact = False
        self._plan = plan
        self._level = level
        self._partition = partition
        self._encode = encode
        is_last = level + 1 == len(plan.plan.processing)
        self._onward = None if is_last else plan.plan.onward(Phase.PROCESSING, level, partition)
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
                    topology,
                    component,
                    task,
                    self,
                    provider,
                    number=number,
                    first_round=first_round,
                    tick_s=tick_s,
                    follows=self._follows(component_id),
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
                    origins=Origins(number, len(numbers)) if plan.paths else None,
                )
            self._component_tasks[component_id] = component_task

    def _follows(self, component_id: str) -> Follows | None:
        paths = self._plan.paths.get(component_id)
        return None if paths is None else Follows(paths, len(self._plan.spout_tasks()), len(self._plan.rooted_tasks()))

    def recover(self, marker: CheckpointMarker, before: SegmentTask | None) -> None:
        """Restore the task to a checkpoint, in place of the previous task. The output of that task
        is discarded, except for errors raised while it ended."""
        if before is not None:
            before.throw_away()
            for component_task in before._component_tasks.values():
                component_task.end_for(marker)
            for error in before.outcome.errors:
                self.outcome.add_error(error)
        self._unrecovered = False
        self.blames, self.exact = marker.gives_up, marker.exact
        for component_id, component_task in self._component_tasks.items():
            component_task.recover(marker, before._component_tasks[component_id] if before is not None else None)

    def begin(self, round_: Round) -> None:
        """Commit a checkpoint, and give the decisions about trees to the components at which they
        began. Before the first recovery, do nothing."""
        self.thread = threading.get_ident()
        if self._unrecovered:
            return
        if round_.checkpoint is not None and round_.checkpoint.action is CheckpointAction.COMMIT:
            for component_task in self._component_tasks.values():
                component_task.commit(round_.checkpoint)
        for number, rooted in self._rooted.items():
            rooted.tell(round_.outcomes.get(number, TreeOutcomes()), round_.lost, rotates=round_.rotates)
            if isinstance(rooted, StatefulBoltTask):
                rooted.hear_marks(round_.number, round_.marks)

    @property
    def gives(self) -> bool:
        """Whether one of the components is a spout."""
        return bool(self._spouts)

    @property
    def open(self) -> bool:
        """Whether every spout that has a start position is open."""
        return self._unrecovered or all(spout.open for spout in self._spouts.values())

    def give(self, round_: Round) -> bool:
        """Let the spouts emit. Returns whether they emitted anything. If the topology has state,
        they emit nothing before they have a start position."""
        if self._unrecovered:
            return False
        gave = False
        for spout in self._spouts.values():
            with _busy(spout):
                gave = spout.give(round_.at_once, round_.share) or gave
        return gave

    def run(self, round_: Round, records: Sequence[RoundRecord], budget: Budget) -> Sequence[Addressed]:
        """Do the task's part of a round. Raises only on a bug, or at the end of the process; then
        the outcome is discarded."""
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
        # in topological order: fused rows arrive before their receiver is flushed
        for component_task in self._component_tasks.values():
            with _busy(component_task):
                component_task.work(budget)
                if self._may_tick(round_):
                    component_task.tick(settles=round_.settles)
                if round_.checkpoint is not None and round_.prepares:
                    component_task.prepare(round_.checkpoint)
                self._flush(component_task)
        for component_task in self._component_tasks.values():
            report = component_task.checkpoint_report(round_.checkpoint) if round_.checkpoint is not None else None
            if report is not None:
                self.outcome.checkpoint_reports.append(report)
            component_task.look()
        while True:  # repeat until the outcome to hand over holds the rows that were emitted last
            with self.lock:
                failed = [found for each in self._component_tasks.values() if (found := _unsent(each)) is not None]
                if not failed:
                    return self._hand_over(round_)
            for component_task, error in failed:
                component_task.died(error)  # may emit once more

    def _may_tick(self, round_: Round) -> bool:
        """Whether ticks are allowed: not before a recovery, nor in its round, because failures are
        not tracked then."""
        marker = round_.checkpoint
        return not self._unrecovered and (marker is None or marker.action is not CheckpointAction.RECOVER)

    def throw_away(self) -> None:
        """Discard the task's results of a lost round."""
        with self.lock:
            self.outcome = Outcome(self._component_tasks)

    def close(self) -> None:
        for component_task in self._component_tasks.values():
            component_task.close()

    def deliver(self, edge: Edge, target: int, batch: pa.RecordBatch) -> None:
        if edge.fused:
            self._receive(edge, batch)
            return
        payload = encode_batch(batch) if self._encode else batch
        piece = Piece(
            edge.index,
            target_task=target,
            source_task=self._task,
            sequence=self._sequence,
            rows=batch.num_rows,
            payload=payload,
        )
        self._sequence += 1
        self._pass_on(piece)

    def _flush(self, component_task: ComponentTask) -> None:
        with self.lock:
            failed = _unsent(component_task)
        if failed is not None:
            component_task.died(failed[1])

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
            if round_.rotates:
                outcome.ledger.reset(component_task.kept())
        for part in outcome.ledger.parts(self._plan.ackers, (self._level, self._partition), round_.number):
            self._pass_on(part)
        counts = {(component_id, self._task): made.counts for component_id, made in outcome.of.items()}
        ticks = [each.tick_in_s for each in self._component_tasks.values() if each.tick_in_s is not None]
        tick_in_s = min(ticks, default=None)
        self._pass_on(
            RoundReport(
                round_.number,
                counts=counts,
                errors=outcome.errors,
                checkpoint_reports=outcome.checkpoint_reports,
                unrecovered=self._unrecovered,
                tick_in_s=tick_in_s,
                sent=dict(outcome.sent),
                timed_out=Roots.of(outcome.timed_out) if self.blames and outcome.timed_out else Roots(),
                unread=outcome.unread,
                newest=outcome.newest,
                blamed=Roots.of(outcome.blamed) if self.blames and outcome.blamed else Roots(),
            )
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
        elif self._onward is not None:
            partition = self._onward
        else:
            partition = record.acker if isinstance(record, LedgerPart) else 0
        self.outcome.exits.append((partition, record))


def _unsent(component_task: ComponentTask) -> tuple[ComponentTask, BaseException] | None:
    """Send the rows that the component has emitted. Returns the component and the error, if rows do
    not fit the declared fields."""
    try:
        component_task.out.flush()
    except users_errors() as error:
        return component_task, error
    return None


@contextlib.contextmanager
def _busy(component_task: ComponentTask) -> Iterator[None]:
    """Measure the time that a component takes."""
    began = time.perf_counter()
    try:
        yield
    finally:
        component_task.counts.busy_s += time.perf_counter() - began
