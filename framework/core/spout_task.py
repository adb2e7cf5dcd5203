"""The task of a spout, which lives across rounds: its pending tuples, and the decisions about
them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from framework.acking.ack_reports import ORIGINS_MAX, SEQUENCES_PER_ROUND, Roots, root_of
from framework.core.checkpoint_messages import CheckpointAction, CheckpointMarker, CheckpointReport, name_of
from framework.core.component_task import ROTATIONS_PER_TIMEOUT, ComponentTask
from framework.core.event_times import Unread
from framework.core.outcome import Surroundings
from framework.core.round_protocol import TreeOutcomes
from framework.core.spout_pending import Emitted, EmittedRows, Pending, Told
from framework.errors import RetryableError, TopologyError
from framework.execution.failures import ignoring_users_errors, users_errors
from framework.execution.plan import TaskComponent
from framework.execution.tasks import PlannedTopology
from framework.topology import DEFAULT_STREAM, BaseRichSpout, ReplayableSpout
from framework.value_size import size_of

#: How long a spout task emits in one round, in seconds.
ROUND_SPOUT_S = 0.25
#: The bytes of pending tuples, or of untracked tuples in a round, from which on a spout task emits
#: nothing more in the round. The last call may exceed them.
PENDING_BYTES_MAX = 128 << 20
#: How often in a row a tuple is emitted again because of lost rounds. So a tuple that ends its
#: process each time fails in the end.
LOSSES_MAX = 5


class Origins:
    """The origins of one spout task: its own number first, then every ``step``-th number. Source
    partitions get origins in the order of their first use. ``step``: the number of tasks at which
    trees begin."""

    def __init__(self, number: int, step: int) -> None:
        self._number, self._step = number, step
        self._known: dict[str, int] = {}

    def of(self, partition: str) -> int:
        """The origin of a partition. When no more origins are left, partitions share the last
        one."""
        found = self._known.get(partition)
        if found is None:
            found = self._number + self._step * len(self._known)
            if found >= ORIGINS_MAX:
                found = max(self._known.values(), default=self._number)
            self._known[partition] = found
        return found


class SpoutCollector:
    """The ``SpoutOutputCollector`` of a spout task."""

    def __init__(self, spout: SpoutTask) -> None:
        self.spout = spout  # replaced in a recovery when the user's object stays

    def emit(
        self, values: Sequence[Any], message_id: Any = None, stream: str = DEFAULT_STREAM, *, partition: str = ""
    ) -> None:
        self.spout.emitted(values, message_id, stream, partition=partition)

    def emit_direct(
        self,
        task: int,
        values: Sequence[Any],
        message_id: Any = None,
        stream: str = DEFAULT_STREAM,
        *,
        partition: str = "",
    ) -> None:
        self.spout.emitted(values, message_id, stream, task=task, partition=partition)

    def emit_arrow(
        self,
        batch: pa.RecordBatch,
        message_ids: Sequence[Any] | None = None,
        stream: str = DEFAULT_STREAM,
        *,
        partition: str = "",
    ) -> None:
        self.spout.emitted_rows(batch, message_ids, stream, partition=partition)

    def report_error(self, error: BaseException) -> None:
        self.spout.report(error)


class SpoutTask(ComponentTask):
    """A spout task.

    * ``number``: its number among all tasks of the topology at which trees begin.
    * ``origins``: set if bolts need to know from which source partition a tree stems.
    * ``tracked``: there are ackers.

    Invariants:

    1. Each message id is acked or failed once for each emission, unless the instance ends first.
    2. A recovery does not fail the tuples that were under way (C36). If the instance stays, the
       task emits them again by itself, without a call to the instance."""

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
        origins: Origins | None = None,
    ) -> None:
        super().__init__(topology, component, task, surroundings)
        self._number = number
        self._next = first_round * SEQUENCES_PER_ROUND
        self._pending_max = pending_max
        self._tracked = tracked
        self._origins = origins
        self._pending = self._new_pending()
        self._again: deque[Emitted] = deque()
        self._lost = 0  # the last lost round that this task knows of
        self._unsure: set[int] = set()  # trees that were pending at that time
        self._stayed = False
        self._collector = SpoutCollector(self)
        self._emitted = 0
        self._emitted_size = 0
        # bytes that may be pending, increased if bolts wait for more tuples
        self._size_max = PENDING_BYTES_MAX
        # since the last rotation: whether tuples reached the bound, and whether any has ended
        self._is_full = self._any_ended = False
        self._exact = False
        self._failed_ids: dict[int, Any] = {}  # tree -> message id, until the recovery that follows
        # records that have failed; True: the record is given up
        self._suspects: dict[str, bool] = {}
        self._passed: set[str] = set()  # suspects that were emitted or given up
        self._named: Sequence[str] = ()  # the records that the recovery has asked for
        self._said: Any = None  # the position in the prepared checkpoint
        # the checkpoint to start from, until the start is final
        self._begins: CheckpointMarker | None = None

    def begin(self, made: BaseRichSpout) -> None:
        """Open the spout, and set its start position. If that fails, the spout emits nothing."""
        self._pending, self._again = self._new_pending(), deque()
        self._unsure.clear()
        self._said = None
        self._collector = SpoutCollector(self)
        made.open(self.topology.conf, self.context, self._collector)
        if self._begins is not None and isinstance(made, ReplayableSpout):
            try:
                self._place(made, self._begins)
            except users_errors():
                with ignoring_users_errors():
                    made.close()
                raise
        if not (self._begins_anew and isinstance(made, ReplayableSpout)):
            self._begins = None

    def instance(self) -> Any:
        """The user's object. Under exactly-once, None from an error until the recovery, which sets
        the start position."""
        return self._instance if self._exact else super().instance()

    @property
    def open(self) -> bool:
        """Whether there is a user's object."""
        return self._instance is not None

    def end(self, made: BaseRichSpout) -> None:
        made.close()

    def emitted(
        self, values: Sequence[Any], message_id: Any, stream: str, *, task: int | None = None, partition: str = ""
    ) -> None:
        """Emit a tuple for the collector. Raises ``TopologyError`` in any thread but the task's."""
        self._check_thread()
        if self._suspects and self._gives_up(message_id):
            return
        self._emitted += 1
        size = size_of(values)
        self._emitted_size += size
        if (message_id is None and not self._exact) or not self._tracked:
            self.out.emit(values, (), stream, task)
            if message_id is not None:
                self.counts.completed += 1
                self._instance.ack(message_id)
            return
        kept = tuple(values) if not self._exact else ()
        origin = self._origin_of(partition)
        self._emit(values, Emitted(message_id, time.monotonic(), kept, stream, task, origin=origin, size=size))

    def emitted_rows(
        self, batch: pa.RecordBatch, message_ids: Sequence[Any] | None, stream: str, *, partition: str = ""
    ) -> None:
        """As ``emitted``, for many rows. Also raises ``TopologyError`` when the numbers of ids and
        rows differ."""
        self._check_thread()
        if message_ids is not None and len(message_ids) != batch.num_rows:
            raise TopologyError(
                f"spout {self.component.id!r} emitted {batch.num_rows} rows with {len(message_ids)} message ids"
            )
        count = batch.num_rows
        if not count:
            return
        origin = self._origin_of(partition)
        if self._suspects and message_ids is not None:
            gone = [at for at, message_id in enumerate(message_ids) if self._gives_up(message_id)]
            for start, stop in zip([0, *(at + 1 for at in gone)], [*gone, count], strict=True):
                if start < stop:
                    self._emit_rows(batch.slice(start, stop - start), message_ids[start:stop], stream, origin)
        else:
            self._emit_rows(batch, message_ids, stream, origin)

    def _gives_up(self, message_id: Any) -> bool:
        """Call the spout's ``give_up`` for a record that has failed too often. Returns whether it
        did."""
        name = name_of(message_id)
        if name is None or name not in self._suspects:
            return False
        self._passed.add(name)
        if not self._suspects[name]:
            return False
        before = self._emitted
        self._instance.give_up(message_id)
        # the spout dropped the record, and a checkpoint should cover that
        if self._emitted == before:
            self._emitted += 1
            self.counts.completed += 1
        return True

    def _emit_rows(self, batch: pa.RecordBatch, message_ids: Sequence[Any] | None, stream: str, origin: int) -> None:
        count, size = batch.num_rows, batch.nbytes
        self._emitted += count
        self._emitted_size += size
        if (message_ids is None and not self._exact) or not self._tracked:
            self.out.emit_rows(batch, None, stream)
            if message_ids is not None:
                self.counts.completed += count
                self._instance.ack_all(message_ids)
            return
        first = root_of(origin, self._next)
        roots = np.arange(first, first + count, dtype=np.uint64)
        self.out.emit_rows(batch, roots, stream)
        self._next += count
        self.outcome.ledger.born_many(roots)
        kept = None if self._exact else batch
        rows = EmittedRows(message_ids, time.monotonic(), kept, stream, count, origin=origin, size=size)
        self._pending.put_rows(first, rows)

    def _origin_of(self, partition: str) -> int:
        return self._number if self._origins is None else self._origins.of(partition)

    def _unread(self) -> Unread | None:
        """The origins that the spout has not read to the end."""
        found = self._instance.unread() if self._instance is not None else None
        return None if found is None else {self._origin_of(name): stream for name, stream in found.items()}

    def _check_thread(self) -> None:
        if threading.get_ident() != self._surroundings.thread:
            raise TopologyError(
                f"spout {self.component.id!r} emits in a thread of its own: put what comes into a queue, and emit it "
                "in next_tuple"
            )

    def _emit(self, values: Sequence[Any], emitted: Emitted) -> None:
        root = root_of(emitted.origin, self._next)
        self._next += 1
        self.out.emit(values, (root,), emitted.stream, emitted.task)
        self.outcome.ledger.born(root)
        self._pending.put(root, emitted)

    def tell(self, outcomes: TreeOutcomes, lost: int, *, rotates: bool) -> None:
        """Take in decisions about the task's trees, the last lost round, and whether time has gone
        on."""
        if self.instance() is None:
            return
        if lost > self._lost:
            self._lost = lost
            self._unsure.update(self._pending.roots())
        before = len(self._pending)
        if rotates:
            self._pending.age()
        try:
            for told in self._pending.settle(outcomes.completed):
                self._complete(told)
            for told in self._pending.settle(outcomes.failed):
                self._unsure.difference_update(told.roots)
                for root, entry in zip(told.roots, told.each(), strict=True):
                    self._failed(root, entry.message_id)
            self._any_ended = self._any_ended or len(self._pending) < before
            for told in self._pending.settle(outcomes.expired):
                self._expire(told)
            self._pending.touch(outcomes.reset)
            if self._stayed:
                self._emit_again()
            if rotates:
                self._make_room()
                for told in self._pending.expire():
                    self._expire(told)
        except users_errors() as error:
            self.died(error)

    def give(self, rounds: int, share: int) -> bool:
        """Let the spout emit. Tuples that were pending at a recovery come first. Stops when the
        spout has none, when enough tuples are pending, when the spout has emitted its ``share`` or
        its part of one of ``rounds`` rounds, or when its time is over. Returns whether anything was
        emitted."""
        spout = self.instance()
        if spout is None:
            return False
        start = time.monotonic()
        first = self._emitted
        most = min(share, -(-self._pending_max // rounds))
        self._emitted_size = 0
        try:
            while self._again and self._emitted - first < most and self._has_room():
                again = self._again.popleft()
                self._emitted += 1
                self._emitted_size += again.size
                self._emit(again.values, again)
            while (
                wanted := min(self._pending_max - len(self._pending) - len(self._again), most - (self._emitted - first))
            ) > 0 and self._has_room():
                before = self._emitted
                spout.next_tuples(wanted)
                if self._emitted == before or time.monotonic() - start >= ROUND_SPOUT_S:
                    break
        except users_errors() as error:
            self.died(error)
        return self._emitted > first

    def _has_room(self) -> bool:
        """Whether the bytes of pending tuples allow another tuple, as they always do if none is
        pending. Notes a reached bound."""
        has_room = max(self._pending.size, self._emitted_size) < self._size_max
        self._is_full = self._is_full or not has_room
        return has_room

    def _make_room(self) -> None:
        """At a rotation, double the bound of pending bytes if it was reached since the last
        rotation and no tuple has ended, because a bolt then waits for more tuples, or for a
        checkpoint."""
        if self._is_full and not self._any_ended:
            self._size_max *= 2
        self._is_full = self._any_ended = False

    def end_for(self, marker: CheckpointMarker) -> None:
        """Under at-least-once the user's object stays, and the next task takes it over."""
        if marker.exact:
            self.close()

    def recover(self, marker: CheckpointMarker, before: ComponentTask | None) -> None:
        """Go to the positions of a checkpoint, and name the source records of trees that the driver
        asks for. Under at-least-once, take over the previous task's object and its pending tuples.
        These are emitted again, after earlier decisions about them have been delivered."""
        self._exact = marker.exact
        if marker.exact:
            asked = before.message_ids(marker.failed) if isinstance(before, SpoutTask) else {}
            self._failed_ids = asked
            named = (name_of(message_id) for _, message_id in sorted(asked.items()))
            self._named = [name for name in named if name is not None][: marker.few]
            self._suspects = {**dict.fromkeys(self._named, False), **marker.suspects.get(self.component.id, {})}
        if isinstance(before, SpoutTask) and before._instance is not None:
            self._go_on_from(before)
            return
        self._begins = marker
        super().instance()

    def message_ids(self, roots: Roots) -> dict[int, Any]:
        """The message ids of this task's trees among ``roots``."""
        found = {root: self._failed_ids[root] for root in roots.ids() if root in self._failed_ids}
        for told in self._pending.settle(roots):
            found.update((root, each.message_id) for root, each in zip(told.roots, told.each(), strict=True))
        return found

    def _place(self, spout: ReplayableSpout, marker: CheckpointMarker) -> None:
        """Set the start position of a spout, if one is recorded."""
        if marker.exact:
            spout.follow_checkpoints()
        positions = marker.positions.get(self.component.id) if marker.positions is not None else None
        if positions is not None:
            spout.seek(positions)
        elif self.component.id in marker.forgotten:
            spout.begin_anew()

    def commit(self, marker: CheckpointMarker) -> None:
        said, self._said = self._said, None
        self._suspects = {name: gone for name, gone in self._suspects.items() if name not in self._passed}
        self._passed.clear()
        if marker.durable and said is not None and isinstance(self._instance, ReplayableSpout):
            try:
                self._instance.committed(said)
            except users_errors() as error:
                self.died(error)

    @property
    def _begins_anew(self) -> bool:
        """Whether the spout was told to restart from the beginning, and may still keep old
        positions elsewhere. Under exactly-once, the first checkpoint replaces old positions."""
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
            if marker.exact:  # its source does not answer: abandon this checkpoint
                self.report(error)
            return None
        except users_errors() as error:
            self.died(error)
            return None
        recovers, prepares = (marker.action is each for each in (CheckpointAction.RECOVER, CheckpointAction.PREPARE))
        return CheckpointReport(
            self.component.id,
            self.task,
            position=position,
            failed=self._named if recovers else (),
            passed=sorted(self._passed) if prepares else (),
        )

    def look(self) -> None:
        self.counts.pending = len(self._pending) + len(self._again)
        try:
            self.counts.behind = int(self._instance is None or not self._instance.caught_up())
            if self._origins is not None:
                self.outcome.unread[(self.component.id, self.task)] = self._unread()
        except users_errors() as error:
            self.counts.behind = 1
            self.died(error)

    def _go_on_from(self, before: SpoutTask) -> None:
        self._instance, self._collector = before._instance, before._collector
        self._collector.spout = self
        self._next = max(self._next, before._next)
        self._origins = before._origins
        self._pending = before._pending
        self._pending.touch_all()
        self._again = before._again
        self._size_max = before._size_max
        self._begins = before._begins
        self._stayed = True

    def _emit_again(self) -> None:
        """Queue all pending tuples; the next ``give`` emits them first."""
        under_way, self._pending, self._stayed = self._pending, self._new_pending(), False
        self._unsure.clear()
        self._again.extend(entry for told in under_way.all() for entry in told.each())

    def _complete(self, told: Told) -> None:
        if self._unsure:
            self._unsure.difference_update(told.roots)
        self.counts.completed += told.size
        self.counts.latency_s += told.waited_s(time.monotonic())
        message_ids = told.message_ids()
        if len(message_ids):
            self._instance.ack_all(message_ids)

    def _new_pending(self) -> Pending:
        return Pending(ROTATIONS_PER_TIMEOUT + 1)

    def _expire(self, told: Told) -> None:
        self.counts.timed_out += told.size
        for root, entry in zip(told.roots, told.each(), strict=True):
            if root in self._unsure:
                self._unsure.remove(root)
                if entry.losses < LOSSES_MAX:
                    self._again.append(entry._replace(losses=entry.losses + 1))
                    continue
            if self._exact:
                self.outcome.timed_out.append(root)
            self._failed(root, entry.message_id)

    def _failed(self, root: int, message_id: Any) -> None:
        """Count a failure, and tell the spout. Under exactly-once the spout is not told: a recovery
        follows and sets it back."""
        self.counts.failed += 1
        if self._exact:
            self._failed_ids[root] = message_id
        elif message_id is not None:
            self._instance.fail(message_id)
