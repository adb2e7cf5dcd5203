"""Spout and bolt tasks that live: user objects that stay as they are from round to round, and what they do to the ledger.

Rows of a core topology carry two columns beside their own: the id of the edge that they travel on, and the roots of the trees
that they are part of. A row that is sent to several tasks is several edges.
"""

from __future__ import annotations

import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from framework.acking.roots import SEQUENCES_PER_ROUND, EdgeIds, Ids, Ledger, root_of
from framework.acking.rotating_map import RotatingMap
from framework.acking.rounds import Counts, Orders, Trouble, TroubleKind
from framework.errors import (
    BadRecordError,
    ConfigError,
    CorruptStateError,
    DataLossError,
    FailedException,
    InvariantViolation,
    RetryableError,
    TopologyError,
)
from framework.execution.collector import BUFFERED_ROWS_MAX, Streams
from framework.execution.plan import Edge, TaskComponent
from framework.execution.tasks import PlannedTopology, no_such_task
from framework.state.checkpoints import CheckpointAction, Marker, Standing
from framework.topology import (
    DEFAULT_STREAM,
    BaseBasicBolt,
    BaseRichBolt,
    BaseRichSpout,
    Fields,
    Tuple,
)
from framework.topology.core import Anchors
from framework.topology.tuples import rows_of

EDGE, ROOTS = "__edge", "__roots"
#: Shares of the timeout by which time goes on: a tuple fails between one timeout and one and a half after it was emitted.
TIMEOUT_TICKS = 2
#: A spout task gives no more than this in one round, so that rounds stay short.
ROUND_TUPLES_MAX = 10_000
ROUND_SPOUT_S = 0.25
#: What no new instance would do better at: the topology fails.
_FATAL = (BadRecordError, ConfigError, CorruptStateError, DataLossError, InvariantViolation)

#: Takes rows of one edge for one task.
Deliver = Callable[[Edge, int, pa.RecordBatch], None]


class AnchoredTuple(Tuple):
    """A tuple of a core topology: it knows the edge that it came on, and the roots of the trees that it is part of."""

    __slots__ = ("edge", "roots", "settled")

    def __init__(
        self,
        fields: Fields,
        values: tuple[Any, ...],
        source_component: str,
        source_stream: str,
        edge: int,
        roots: Sequence[int],
    ) -> None:
        super().__init__(None, fields, values, source_component, source_stream)
        self.edge = edge
        self.roots = roots
        self.settled = False


class Outflow:
    """What a component emits in one task: rows are gathered per stream, cut by the groupings, and each copy of a row becomes an
    edge of the trees that it is part of."""

    def __init__(self, component: TaskComponent, task: int, edges: Iterable[Edge], ids: EdgeIds) -> None:
        self._streams = Streams(component.id, component.streams, component.direct_streams)
        self._component_id = component.id
        self._task = task
        self._ids = ids
        self._edges: dict[str, list[Edge]] = defaultdict(list)
        for edge in edges:
            self._edges[edge.stream].append(edge)
        self._rows: dict[tuple[str, int | None], tuple[list[Sequence[Any]], list[Sequence[int]]]] = {}
        self._turn = task
        self.ledger = Ledger()
        self.counts = Counts()
        self.deliver: Deliver | None = None

    def emit(self, values: Sequence[Any], roots: Sequence[int], stream: str, task: int | None) -> None:
        rows, trees = self._rows.setdefault((stream, task), ([], []))
        rows.append(tuple(self._streams.checked(values, stream, task)))
        trees.append(roots)
        self.counts.emitted += 1
        if len(rows) >= BUFFERED_ROWS_MAX:
            self._flush(stream, task)

    def flush(self) -> None:
        for stream, task in list(self._rows):
            self._flush(stream, task)

    def _flush(self, stream: str, task: int | None) -> None:
        rows, trees = self._rows.pop((stream, task), ([], []))
        if not rows or not self._edges[stream]:
            return
        try:
            self._cut(stream, task, rows, trees)
        except Exception:
            # Nobody will ever receive these rows, and whoever emitted them may have acked what they were made of.
            self.ledger.failed(root for roots in trees for root in roots)
            raise

    def _cut(
        self, stream: str, task: int | None, rows: Sequence[Sequence[Any]], trees: Sequence[Sequence[int]]
    ) -> None:
        batch = self._streams.batch(stream, rows).append_column(ROOTS, pa.array(trees, pa.list_(pa.uint64())))
        for edge in self._edges[stream]:
            if task is None:
                split: Iterable[tuple[int, pa.RecordBatch]] = edge.grouping.split(batch, edge.target_tasks, self._turn)
                self._turn += 1
            else:
                split = [(task, batch)]
            for target, part in split:
                if not 0 <= target < edge.target_tasks:
                    raise TopologyError(no_such_task(edge, target))
                self._send(edge, target, part)

    def _send(self, edge: Edge, target: int, part: pa.RecordBatch) -> None:
        ids = self._ids.take(part.num_rows)
        trees = part.column(ROOTS)
        self.ledger.emitted(*_edges_of(trees, ids))
        if self.deliver is None:
            raise TopologyError(f"component {self._component_id!r} emitted while nothing runs")
        self.deliver(edge, target, part.append_column(EDGE, pa.array(ids)))


def _edges_of(trees: pa.ListArray, ids: Ids) -> tuple[Ids, Ids]:
    """A root and an edge for every tree that every row is part of."""
    lengths = trees.value_lengths().to_numpy(zero_copy_only=False)
    return trees.flatten().to_numpy(zero_copy_only=False), np.repeat(ids, lengths)


def tuples_of(batch: pa.RecordBatch, fields: Fields, edge: Edge) -> Iterator[AnchoredTuple]:
    """The tuples of rows that came over an edge."""
    ids = batch.column(EDGE).to_pylist()
    trees = batch.column(ROOTS).to_pylist()
    values = rows_of(batch.select(list(fields.names))) if len(fields) else iter([()] * batch.num_rows)
    for row, edge_id, roots in zip(values, ids, trees, strict=True):
        yield AnchoredTuple(fields, row, edge.source, edge.stream, edge_id, roots)


class Living:
    """One component in one task. ``trouble`` hears of errors in user code; they end the instance, and the next use makes
    another."""

    def __init__(
        self, topology: PlannedTopology, component: TaskComponent, task: int, trouble: Callable[[Trouble], None]
    ) -> None:
        self.topology = topology
        self.component = component
        self.task = task
        self.context = topology.context(component, task)
        self.out = Outflow(component, task, topology.plan.edges_from(component.id), EdgeIds())
        self._trouble = trouble
        self._instance: Any = None

    def take(self) -> tuple[Ledger, Counts]:
        """What has happened since this was last asked."""
        taken = self.out.ledger, self.out.counts
        self.out.ledger, self.out.counts = Ledger(), Counts()
        return taken

    def instance(self) -> Any:
        """The user's object, made and opened when there is none. None when that fails."""
        if self._instance is None:
            try:
                self._instance = self.topology.instance(self.component)
                self.begin(self._instance)
            except Exception as error:  # noqa: BLE001 - user code
                self._instance = None
                self.report(error, TroubleKind.CANNOT_START)
        return self._instance

    def begin(self, made: Any) -> None:
        """Open or prepare."""
        raise NotImplementedError

    def end(self, made: Any) -> None:
        """Close or clean up."""
        raise NotImplementedError

    def recover(self, marker: Marker) -> None:
        """Begin anew, as of a checkpoint."""
        self.close()

    def prepare(self, marker: Marker) -> None:
        """Save for a checkpoint what there is to save."""

    def commit(self, marker: Marker) -> None:
        """Make it the state."""

    def standing(self, marker: Marker) -> Standing | None:
        """What to say of it after the round; None for nothing, and when it could not be done."""
        return None

    def close(self) -> None:
        made, self._instance = self._instance, None
        if made is not None:
            try:
                self.end(made)
            except Exception as error:  # noqa: BLE001 - user code
                self.report(error)

    def died(self, error: BaseException) -> None:
        """What the instance held is gone with it: those trees will time out."""
        self.out.counts.died += 1
        self.report(error, TroubleKind.DIED)
        self.close()

    def report(self, error: BaseException, kind: TroubleKind = TroubleKind.REPORTED) -> None:
        trace = "".join(traceback.format_exception(error))
        if isinstance(error, _FATAL) and kind is not TroubleKind.REPORTED:
            kind = TroubleKind.FATAL
        self._trouble(Trouble(kind, self.component.id, self.task, f"{type(error).__name__}: {error}", trace))


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

    def begin(self, made: BaseRichSpout) -> None:
        self._pending = self._new_pending()
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
        """To the positions of a checkpoint, as a new instance; without them everything that is under way fails, and comes again
        from this one."""
        self._exact = marker.exact
        self.out.counts.failed += len(self._pending)
        if not marker.exact:
            self._fail_pending()
            return
        super().recover(marker)
        spout = self.instance()
        positions = marker.positions.get(self.component.id) if marker.positions is not None else None
        if spout is not None and positions is not None:
            try:
                spout.seek(positions)
            except RetryableError as error:
                self.report(error)
                self.close()
            except Exception as error:  # noqa: BLE001 - user code
                self.died(error)

    def standing(self, marker: Marker) -> Standing | None:
        if not marker.exact or self._instance is None:
            return None
        try:
            position = self._instance.position() if marker.action is CheckpointAction.PREPARE else None
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
            self.out.counts.failed += 1
            if message_id is not None:
                self._instance.fail(message_id)

    def _new_pending(self) -> RotatingMap[int, tuple[Any, float]]:
        return RotatingMap(TIMEOUT_TICKS + 1, self._expire)

    def _expire(self, root: int, entry: tuple[Any, float]) -> None:
        self.out.counts.timed_out += 1
        self.out.counts.failed += 1
        if entry[0] is not None:
            self._instance.fail(entry[0])


class BoltCollector:
    """The ``RichOutputCollector`` of a bolt task."""

    def __init__(self, bolt: LivingBolt) -> None:
        self._bolt = bolt
        self._out = bolt.out

    def emit(self, values: Sequence[Any], anchors: Anchors = None, stream: str = DEFAULT_STREAM) -> None:
        self._out.emit(values, _roots(anchors), stream, None)

    def emit_direct(
        self, task: int, values: Sequence[Any], anchors: Anchors = None, stream: str = DEFAULT_STREAM
    ) -> None:
        self._out.emit(values, _roots(anchors), stream, task)

    def ack(self, tup: Tuple) -> None:
        self._bolt.ack(tup)

    def fail(self, tup: Tuple) -> None:
        found = received(tup)
        if not found.settled:
            found.settled = True
            self._out.counts.failed += 1
            self._out.ledger.failed(found.roots)

    def reset_timeout(self, tup: Tuple) -> None:
        self._out.ledger.reset(received(tup).roots)

    def report_error(self, error: BaseException) -> None:
        self._bolt.report(error)


class BasicCollector:
    """The collector of a basic bolt: what is emitted is anchored to the tuple that is being executed."""

    def __init__(self, bolt: LivingBolt) -> None:
        self._bolt = bolt
        self._out = bolt.out
        self.roots: Sequence[int] = ()

    def emit(self, values: Sequence[Any], stream: str = DEFAULT_STREAM) -> None:
        self._out.emit(values, self.roots, stream, None)

    def emit_direct(self, task: int, values: Sequence[Any], stream: str = DEFAULT_STREAM) -> None:
        self._out.emit(values, self.roots, stream, task)

    def emit_arrow(self, batch: pa.RecordBatch, stream: str = DEFAULT_STREAM) -> None:
        for values in rows_of(batch):
            self._out.emit(values, self.roots, stream, None)

    def emit_arrow_direct(self, task: int, batch: pa.RecordBatch, stream: str = DEFAULT_STREAM) -> None:
        for values in rows_of(batch):
            self._out.emit(values, self.roots, stream, task)

    def report_error(self, error: BaseException) -> None:
        self._bolt.report(error)


def _roots(anchors: Anchors) -> Sequence[int]:
    """The roots of all anchors, each once."""
    if anchors is None:
        return ()
    if isinstance(anchors, AnchoredTuple):
        return anchors.roots
    if isinstance(anchors, Tuple):
        return received(anchors).roots
    return tuple(dict.fromkeys(root for each in anchors for root in received(each).roots))


def received(tup: Tuple) -> AnchoredTuple:
    """A tuple that a bolt has been given. Raises ``TopologyError`` for another."""
    if not isinstance(tup, AnchoredTuple):
        raise TopologyError(f"give a tuple that this bolt has received, not {tup!r}")
    return tup


class LivingBolt(Living):
    """A bolt task."""

    def __init__(
        self, topology: PlannedTopology, component: TaskComponent, task: int, trouble: Callable[[Trouble], None]
    ) -> None:
        super().__init__(topology, component, task, trouble)
        self._rich = BoltCollector(self)
        self._basic = BasicCollector(self)

    def begin(self, made: Any) -> None:
        if isinstance(made, BaseRichBolt):
            made.prepare(self.topology.conf, self.context, self._rich)
        else:
            made.prepare(self.topology.conf, self.context, self._basic, None)

    def end(self, made: Any) -> None:
        made.cleanup()

    def ack(self, tup: Tuple) -> None:
        """Called by the collector."""
        found = received(tup)
        if not found.settled:
            found.settled = True
            self.acked(found)

    def acked(self, tup: AnchoredTuple) -> None:
        """Tell the ackers."""
        self.out.counts.acked += 1
        self.out.ledger.acked(tup.roots, tup.edge)

    def execute(self, edge: Edge, fields: Fields, batch: pa.RecordBatch) -> None:
        """Every tuple of a batch. An error ends the instance and fails the tuple; the next one finds a new instance."""
        for tup in tuples_of(batch, fields, edge):
            bolt = self.instance()
            if bolt is None:
                return  # it cannot start: what is lost here times out
            self.out.counts.executed += 1
            try:
                if isinstance(bolt, BaseBasicBolt):
                    self._execute_basic(bolt, tup)
                else:
                    bolt.execute(tup)
            except Exception as error:  # noqa: BLE001 - user code
                self._rich.fail(tup)
                self.died(error)

    def _execute_basic(self, bolt: BaseBasicBolt, tup: AnchoredTuple) -> None:
        self._basic.roots = tup.roots
        try:
            bolt.execute(tup, self._basic)
        except FailedException:
            self._rich.fail(tup)
        else:
            self._rich.ack(tup)
        finally:
            self._basic.roots = ()
