"""A spout task that lives: what it has emitted and not heard of yet, and what it is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from framework.acking.living import TIMEOUT_TICKS, Living
from framework.acking.roots import SEQUENCES_PER_ROUND, Ledger, root_of
from framework.acking.rotating_map import RotatingMap
from framework.acking.rounds import Counts, Orders, Trouble
from framework.errors import RetryableError
from framework.execution.plan import TaskComponent
from framework.execution.tasks import PlannedTopology
from framework.state.checkpoints import CheckpointAction, Marker, Standing
from framework.topology import DEFAULT_STREAM, BaseRichSpout, ReplayableSpout

#: A spout task gives no more than this in one round, so that rounds stay short.
ROUND_TUPLES_MAX = 10_000
ROUND_SPOUT_S = 0.25


class SpoutCollector:
    """The ``SpoutOutputCollector`` of a spout task."""

    def __init__(self, spout: LivingSpout) -> None:
        self._spout = spout

    def emit(self, values: Sequence[Any], message_id: Any = None, stream: str = DEFAULT_STREAM) -> None:
        self._spout.emitted(values, message_id, stream, None)

    def emit_direct(
        self, task: int, values: Sequence[Any], message_id: Any = None, stream: str = DEFAULT_STREAM
    ) -> None:
        self._spout.emitted(values, message_id, stream, task)

    def report_error(self, error: BaseException) -> None:
        self._spout.report(error)


class LivingSpout(Living):
    """A spout task. ``number`` is its own among all spout tasks of the topology; ``tracked``: there are ackers.

    Invariant: each message id is acked or failed once for each time that it was emitted, unless the instance ends before."""

    def __init__(
        self,
        topology: PlannedTopology,
        component: TaskComponent,
        task: int,
        trouble: Callable[[Trouble], None],
        *,
        number: int,
        first_round: int,
        pending_max: int,
        tracked: bool,
    ) -> None:
        super().__init__(topology, component, task, trouble)
        self._number = number
        self._next = first_round * SEQUENCES_PER_ROUND
        self._pending_max = pending_max
        self._tracked = tracked
        self._pending: RotatingMap[int, tuple[Any, float]] = self._new_pending()
        self._emitted = 0
        self._exact = False
        self._said: Any = None  # its position in the checkpoint that is prepared

    def begin(self, made: BaseRichSpout) -> None:
        self._pending = self._new_pending()
        self._said = None
        made.open(self.topology.conf, self.context, SpoutCollector(self))

    def end(self, made: BaseRichSpout) -> None:
        made.close()

    def emitted(self, values: Sequence[Any], message_id: Any, stream: str, task: int | None) -> None:
        """Called by the collector."""
        self._emitted += 1
        if (message_id is None and not self._exact) or not self._tracked:
            self.out.emit(values, (), stream, task)
            if message_id is not None:
                self.out.counts.completed += 1
                self._instance.ack(message_id)
            return
        root = root_of(self._number, self._next)
        self._next += 1
        self.out.emit(values, (root,), stream, task)
        self.out.ledger.born(root)
        self._pending.put(root, (message_id, time.monotonic()))

    def tell(self, orders: Orders, ticks: int) -> None:
        """What became of its trees, and how far time has gone on."""
        if self.instance() is None:
            return
        try:
            for root in orders.completed.ids():
                self._settle(root, done=True)
            for root in orders.failed.ids():
                self._settle(root, done=False)
            for root in orders.reset.ids():
                entry = self._pending.get(root)
                if entry is not None:
                    self._pending.put(root, entry)
            for _ in range(ticks):
                self._pending.rotate()
        except Exception as error:  # noqa: BLE001 - user code
            self.died(error)

    def give(self, rounds: int) -> bool:
        """Ask the spout for tuples until it has none, has enough under way, has given its share for one of so many ``rounds``, or
        has had its time. Whether it had any."""
        spout = self.instance()
        if spout is None:
            return False
        start = time.monotonic()
        first = self._emitted
        most = min(ROUND_TUPLES_MAX, -(-self._pending_max // rounds))
        try:
            while len(self._pending) < self._pending_max and self._emitted - first < most:
                before = self._emitted
                spout.next_tuple()
                if self._emitted == before or time.monotonic() - start >= ROUND_SPOUT_S:
                    break
        except Exception as error:  # noqa: BLE001 - user code
            self.died(error)
        return self._emitted > first

    def recover(self, marker: Marker) -> None:
        """To the positions of a checkpoint, as a new instance. Where state is at-least-once, an instance that is there stays: what
        is under way fails, and it emits that again."""
        self._exact = marker.exact
        self.out.counts.failed += len(self._pending)
        if not marker.exact and self._instance is not None:
            self._fail_pending()
            return
        super().recover(marker)
        spout = self.instance()
        if isinstance(spout, ReplayableSpout):
            try:
                self._place(spout, marker)
            except RetryableError as error:
                self.report(error)
                self.close()
            except Exception as error:  # noqa: BLE001 - user code
                self.died(error)

    def _place(self, spout: ReplayableSpout, marker: Marker) -> None:
        """Tell a spout where to begin, as far as that is recorded."""
        if marker.exact:
            spout.follow_checkpoints()
        positions = marker.positions.get(self.component.id) if marker.positions is not None else None
        if positions is not None:
            spout.seek(positions)
        elif self.component.id in marker.forgotten:
            spout.begin_anew()

    def commit(self, marker: Marker) -> None:
        said, self._said = self._said, None
        if marker.durable and said is not None and isinstance(self._instance, ReplayableSpout):
            try:
                self._instance.committed(said)
            except Exception as error:  # noqa: BLE001 - user code
                self.died(error)

    def standing(self, marker: Marker) -> Standing | None:
        if not marker.exact or self._instance is None:
            return None
        position = None
        try:
            if marker.action is CheckpointAction.PREPARE:
                position = self._said = self._instance.position()
        except RetryableError as error:  # its source is away: the checkpoint is for later
            self.report(error)
            return None
        except Exception as error:  # noqa: BLE001 - user code
            self.died(error)
            return None
        return Standing(self.component.id, self.task, position=position)

    def take(self) -> tuple[Ledger, Counts]:
        self.out.counts.pending = len(self._pending)
        try:
            self.out.counts.behind = int(self._instance is None or not self._instance.caught_up())
        except Exception as error:  # noqa: BLE001 - user code
            self.out.counts.behind = 1
            self.died(error)
        return super().take()

    def _fail_pending(self) -> None:
        pending, self._pending = self._pending, self._new_pending()
        for root in pending:
            entry = pending.get(root)
            if entry is not None and entry[0] is not None and self._instance is not None:
                try:
                    self._instance.fail(entry[0])
                except Exception as error:  # noqa: BLE001 - user code
                    self.died(error)

    def _settle(self, root: int, *, done: bool) -> None:
        entry = self._pending.remove(root)
        if entry is None:
            return  # it has timed out, or is of an instance before this one
        message_id, since = entry
        if done:
            self.out.counts.completed += 1
            self.out.counts.latency_s += time.monotonic() - since
            if message_id is not None:
                self._instance.ack(message_id)
        else:
            self._failed(message_id)

    def _new_pending(self) -> RotatingMap[int, tuple[Any, float]]:
        return RotatingMap(TIMEOUT_TICKS + 1, self._expire)

    def _expire(self, root: int, entry: tuple[Any, float]) -> None:
        self.out.counts.timed_out += 1
        self._failed(entry[0])

    def _failed(self, message_id: Any) -> None:
        """Where state is exactly-once, a recovery follows, and the spout goes back."""
        self.out.counts.failed += 1
        if message_id is not None and not self._exact:
            self._instance.fail(message_id)
