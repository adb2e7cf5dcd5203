"""Spout and bolt tasks that live: user objects that stay as they are from round to round, and what they do to the ledger.

Rows of a core topology carry two columns beside their own: the id of the edge that they travel on, and the roots of the trees
that they are part of. A row that is sent to several tasks is several edges.
"""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from framework.acking.roots import EdgeIds, Ids, Ledger
from framework.acking.rounds import Counts, Trouble, TroubleKind
from framework.errors import (
    BadRecordError,
    ConfigError,
    CorruptStateError,
    DataLossError,
    InvariantViolation,
    TopologyError,
)
from framework.execution.collector import BUFFERED_ROWS_MAX, Streams
from framework.execution.plan import Edge, TaskComponent
from framework.execution.tasks import PlannedTopology, no_such_task
from framework.state.checkpoints import Marker, Standing
from framework.topology import (
    Fields,
    Tuple,
)

EDGE, ROOTS = "__edge", "__roots"
#: Shares of the timeout by which time goes on: a tuple fails between one timeout and one and a half after it was emitted.
TIMEOUT_TICKS = 2
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
