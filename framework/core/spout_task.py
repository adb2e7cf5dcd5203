"""The task of a spout, which lives from round to round: what it has emitted and not heard of yet,
and what it is told."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from framework.acking.ledger import SEQUENCES_PER_ROUND, root_of
from framework.acking.rotating_map import RotatingMap
from framework.core.checkpoints import CheckpointAction, CheckpointMarker, CheckpointReport
from framework.core.component_task import ROTATIONS_PER_TIMEOUT, ComponentTask
from framework.core.outcome import Surroundings
from framework.core.rounds import TreeOutcomes
from framework.errors import RetryableError, TopologyError
from framework.execution.failures import USER_ERRORS
from framework.execution.plan import TaskComponent
from framework.execution.tasks import PlannedTopology
from framework.topology import DEFAULT_STREAM, BaseRichSpout, ReplayableSpout

#: How long a spout task gives tuples in one round.
ROUND_SPOUT_S = 0.25
#: How often in a row a tuple is emitted again because of lost rounds. So a tuple that ends its
#: process each time fails in the end.
LOSSES_MAX = 5


class _Emitted(NamedTuple):
    """A tuple whose fate is open. ``values``: kept where it may have to be emitted again without
    its spout. ``losses``: how often it was emitted again because of a lost round."""

    message_id: Any
    since: float
    values: Sequence[Any]
    stream: str
    task: int | None
    losses: int = 0


class SpoutCollector:
    """The ``SpoutOutputCollector`` of a spout task."""

    def __init__(self, spout: SpoutTask) -> None:
        self.spout = spout  # replaced in a recovery that the user's object outlives

    def emit(self, values: Sequence[Any], message_id: Any = None, stream: str = DEFAULT_STREAM) -> None:
        self.spout.emitted(values, message_id, stream, None)

    def emit_direct(
        self, task: int, values: Sequence[Any], message_id: Any = None, stream: str = DEFAULT_STREAM
    ) -> None:
        self.spout.emitted(values, message_id, stream, task)

    def report_error(self, error: BaseException) -> None:
        self.spout.report(error)


class SpoutTask(ComponentTask):
    """A spout task. ``number``: its own among all spout tasks of the topology. ``tracked``: there
    are ackers.

    Invariants:

    1. Each message id is acked or failed once for each time that it was emitted, unless the
       instance ends before.
    2. A recovery does not fail the tuples that were under way (C36). Where the instance stays, they
       are emitted again, and the instance hears nothing of that."""

    def __init__(
        self,
        topology: PlannedTopology,
        component: TaskComponent,
        task: int,
        surroundings: Surroundings,
        *,
        number: int,
        first_round: int,
        pending_max: int,
        tracked: bool,
    ) -> None:
        super().__init__(topology, component, task, surroundings)
        self._number = number
        self._next = first_round * SEQUENCES_PER_ROUND
        self._pending_max = pending_max
        self._tracked = tracked
        self._pending = self._new_pending()
        self._again: deque[_Emitted] = deque()
        self._lost = 0  # the last lost round that this task has heard of
        self._unsure: set[int] = set()  # trees that were under way at that time
        self._stayed = False
        self._collector = SpoutCollector(self)
        self._emitted = 0
        self._exact = False
        self._said: Any = None  # its position in the checkpoint that is prepared
        self._begins: CheckpointMarker | None = None  # the checkpoint to begin as of, until it has begun for good

    def begin(self, made: BaseRichSpout) -> None:
        """Open the spout, and send it to where it begins. If it cannot be sent there, it gives
        nothing."""
        self._pending, self._again = self._new_pending(), deque()
        self._unsure.clear()
        self._said = None
        self._collector = SpoutCollector(self)
        made.open(self.topology.conf, self.context, self._collector)
        if self._begins is not None and isinstance(made, ReplayableSpout):
            try:
                self._place(made, self._begins)
            except USER_ERRORS:
                with contextlib.suppress(*USER_ERRORS):
                    made.close()
                raise
        if not (self._begins_anew and isinstance(made, ReplayableSpout)):
            self._begins = None

    def instance(self) -> Any:
        """The user's object. Where state is exactly-once, None from an error until the recovery,
        which says where to begin."""
        return self._instance if self._exact else super().instance()

    @property
    def open(self) -> bool:
        """Whether there is a user's object."""
        return self._instance is not None

    def end(self, made: BaseRichSpout) -> None:
        made.close()

    def emitted(self, values: Sequence[Any], message_id: Any, stream: str, task: int | None) -> None:
        """Called by the collector. Raises ``TopologyError`` in a thread of the spout."""
        if threading.get_ident() != self._surroundings.thread:
            raise TopologyError(
                f"spout {self.component.id!r} emits in a thread of its own: put what comes into a queue, and emit it "
                "in next_tuple"
            )
        self._emitted += 1
        if (message_id is None and not self._exact) or not self._tracked:
            self.out.emit(values, (), stream, task)
            if message_id is not None:
                self.counts.completed += 1
                self._instance.ack(message_id)
            return
        kept = tuple(values) if not self._exact else ()
        self._emit(values, _Emitted(message_id, time.monotonic(), kept, stream, task))

    def _emit(self, values: Sequence[Any], emitted: _Emitted) -> None:
        root = root_of(self._number, self._next)
        self._next += 1
        self.out.emit(values, (root,), emitted.stream, emitted.task)
        self.outcome.ledger.born(root)
        self._pending.put(root, emitted)

    def tell(self, outcomes: TreeOutcomes, lost: int, *, rotates: bool) -> None:
        """Hear what became of its trees, which round was lost last, and whether time has gone
        on."""
        if self.instance() is None:
            return
        if lost > self._lost:
            self._lost = lost
            self._unsure.update(self._pending)
        if rotates:
            self._pending.age()
        try:
            for root in outcomes.completed.ids():
                self._settle(root, done=True)
            for root in outcomes.failed.ids():
                self._settle(root, done=False)
            for root in outcomes.expired.ids():
                entry = self._pending.remove(root)
                if entry is not None:
                    self._expire(root, entry)
            for root in outcomes.reset.ids():
                entry = self._pending.get(root)
                if entry is not None:
                    self._pending.put(root, entry)
            if self._stayed:
                self._emit_again()
            if rotates:
                self._pending.expire()
        except USER_ERRORS as error:
            self.died(error)

    def give(self, rounds: int, share: int) -> bool:
        """Ask the spout for tuples. Those that were under way at a recovery come first. Stop when
        it has none, when enough are under way, when it has given its ``share`` or its part of one
        of ``rounds`` rounds, or when its time is over. Returns whether there were any."""
        spout = self.instance()
        if spout is None:
            return False
        start = time.monotonic()
        first = self._emitted
        most = min(share, -(-self._pending_max // rounds))
        try:
            while self._again and self._emitted - first < most:
                again = self._again.popleft()
                self._emitted += 1
                self._emit(again.values, again)
            while len(self._pending) + len(self._again) < self._pending_max and self._emitted - first < most:
                before = self._emitted
                spout.next_tuple()
                if self._emitted == before or time.monotonic() - start >= ROUND_SPOUT_S:
                    break
        except USER_ERRORS as error:
            self.died(error)
        return self._emitted > first

    def end_for(self, marker: CheckpointMarker) -> None:
        """Where state is at-least-once, the user's object stays: the next task goes on with it."""
        if marker.exact:
            self.close()

    def recover(self, marker: CheckpointMarker, before: ComponentTask | None) -> None:
        """Go to the positions of a checkpoint. Where state is at-least-once, take over the object
        that was here before, and what it had under way. That is emitted again, once the object has
        heard what had become of it before."""
        self._exact = marker.exact
        if isinstance(before, SpoutTask) and before._instance is not None:
            self._go_on_from(before)
            return
        self._begins = marker
        super().instance()

    def _place(self, spout: ReplayableSpout, marker: CheckpointMarker) -> None:
        """Tell a spout where to begin, if that is recorded."""
        if marker.exact:
            spout.follow_checkpoints()
        positions = marker.positions.get(self.component.id) if marker.positions is not None else None
        if positions is not None:
            spout.seek(positions)
        elif self.component.id in marker.forgotten:
            spout.begin_anew()

    def commit(self, marker: CheckpointMarker) -> None:
        said, self._said = self._said, None
        if marker.durable and said is not None and isinstance(self._instance, ReplayableSpout):
            try:
                self._instance.committed(said)
            except USER_ERRORS as error:
                self.died(error)

    @property
    def _begins_anew(self) -> bool:
        """Whether the spout was told to begin anew, and may still keep positions from before
        elsewhere. Where state is exactly-once, the first checkpoint replaces those."""
        return self._begins is not None and not self._begins.exact and self.component.id in self._begins.forgotten

    def checkpoint_report(self, marker: CheckpointMarker) -> CheckpointReport | None:
        if self._instance is None:
            return None
        position = None
        try:
            if marker.action is CheckpointAction.PREPARE:
                if marker.exact:
                    position = self._said = self._instance.position()
                elif self._begins_anew:
                    self._instance.position()
                    self._begins = None
        except RetryableError as error:
            if marker.exact:  # its source does not answer: this checkpoint is given up
                self.report(error)
            return None
        except USER_ERRORS as error:
            self.died(error)
            return None
        return CheckpointReport(self.component.id, self.task, position=position)

    def look(self) -> None:
        self.counts.pending = len(self._pending) + len(self._again)
        try:
            self.counts.behind = int(self._instance is None or not self._instance.caught_up())
        except USER_ERRORS as error:
            self.counts.behind = 1
            self.died(error)

    def _go_on_from(self, before: SpoutTask) -> None:
        self._instance, self._collector = before._instance, before._collector
        self._collector.spout = self
        self._next = max(self._next, before._next)
        for root in before._pending:
            emitted = before._pending.get(root)
            if emitted is not None:
                self._pending.put(root, emitted)
        self._again = before._again
        self._begins = before._begins
        self._stayed = True

    def _emit_again(self) -> None:
        """Queue all that is under way, to be emitted when the spouts give the next time."""
        under_way, self._pending, self._stayed = self._pending, self._new_pending(), False
        self._unsure.clear()
        self._again.extend(each for each in map(under_way.get, under_way) if each is not None)

    def _settle(self, root: int, *, done: bool) -> None:
        entry = self._pending.remove(root)
        if entry is None:
            return  # it has timed out, or an earlier instance emitted it
        self._unsure.discard(root)
        if done:
            self.counts.completed += 1
            self.counts.latency_s += time.monotonic() - entry.since
            if entry.message_id is not None:
                self._instance.ack(entry.message_id)
        else:
            self._failed(entry.message_id)

    def _new_pending(self) -> RotatingMap[int, _Emitted]:
        return RotatingMap(ROTATIONS_PER_TIMEOUT + 1, self._expire)

    def _expire(self, root: int, entry: _Emitted) -> None:
        self.counts.timed_out += 1
        if root in self._unsure:
            self._unsure.remove(root)
            if entry.losses < LOSSES_MAX:
                self._again.append(entry._replace(losses=entry.losses + 1))
                return
        self._failed(entry.message_id)

    def _failed(self, message_id: Any) -> None:
        """Count a failure and tell the spout. Where state is exactly-once, the spout is not told: a
        recovery follows and takes it back."""
        self.counts.failed += 1
        if message_id is not None and not self._exact:
            self._instance.fail(message_id)
