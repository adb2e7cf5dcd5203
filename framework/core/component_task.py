"""Spout and bolt tasks that live across rounds. They hold the user's objects, and enter each emit,
ack and fail in the ledger.

Rows of a core topology carry two columns besides their own: the id of the edge that they travel on,
and the roots of the trees that they are part of. A row that is sent to several tasks is several
edges.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import pyarrow as pa

from framework.acking.ack_reports import EdgeIds, Ids
from framework.core.checkpoint_messages import CheckpointMarker, CheckpointReport
from framework.core.outcome import Outcome, Surroundings, UnsentRows
from framework.core.roots_column import (
    edges_of,
    flat_roots,
    no_roots,
    roots_of,
    shared_edges_of,
    trees_among,
    untracked,
)
from framework.core.round_budget import Budget
from framework.core.round_protocol import ComponentError, Counts, ErrorKind
from framework.errors import DataLossError, RetryableError
from framework.execution.collector import BUFFERED_ROWS_MAX, Streams, bounded
from framework.execution.failures import FATAL_ERRORS, users_errors
from framework.execution.plan import Edge, TaskComponent
from framework.execution.tasks import PlannedTopology
from framework.topology import Fields, Tuple
from framework.topology.bolts import OWN_COLUMNS
from framework.topology.tuples import specialised

EDGE, ROOTS = OWN_COLUMNS
#: How often the maps of pending trees rotate in one timeout. A tuple fails between one timeout and
#: one and a half after it was emitted.
ROTATIONS_PER_TIMEOUT = 2


class AnchoredTuple(Tuple):
    """A tuple of a core topology.

    * ``roots``: the trees that it is part of.
    * ``edge``: the value that its ack reports: the edge on which it arrived, XORed with the numbers
      that the ack is bound to.
    * ``bound_to``: the last outcome that has such a number; 0 for none."""

    __slots__ = ("bound_to", "edge", "roots", "settled")

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
        self.bound_to = 0


class _StreamTuple(AnchoredTuple):
    __slots__ = ()

    def __init__(self, values: tuple[Any, ...], edge: int, roots: Sequence[int]) -> None:
        self._attempt = None
        self.values = values
        self.edge = edge
        self.roots = roots
        self.settled = False
        self.bound_to = 0

    def __reduce__(self) -> tuple[Any, ...]:
        whole = (self.fields, self.values, self.source_component, self.source_stream, self.edge, self.roots)
        return AnchoredTuple, whole, (None, {"settled": self.settled, "bound_to": self.bound_to})


@lru_cache(maxsize=1024)
def anchored_class(
    fields: Fields, source_component: str, source_stream: str
) -> Callable[[tuple[Any, ...], int, Sequence[int]], AnchoredTuple]:
    """Return a function that makes the tuples of one stream of a core topology."""
    return specialised(_StreamTuple, fields, source_component, source_stream, first=0)


class Outflow:
    """The rows that a component emits in one task. It collects rows per stream and divides them by
    the groupings. Each copy of a row becomes an edge of the trees that the row is part of."""

    def __init__(
        self, component: TaskComponent, task: int, edges: Iterable[Edge], ids: EdgeIds, surroundings: Surroundings
    ) -> None:
        self._streams = Streams(component.id, component.streams, component.direct_streams)
        self._component_id = component.id
        self._ids = ids
        self._edges: dict[str, list[Edge]] = defaultdict(list)
        for edge in edges:
            self._edges[edge.stream].append(edge)
        self._turn = task
        self._surroundings = surroundings
        #: Whether rows could not be sent. They may stem from tuples that were executed earlier.
        self.failed = False

    def emit(self, values: Sequence[Any], roots: Sequence[int], stream: str, task: int | None) -> None:
        rows = self.unsent(stream, task)
        kind = values.__class__
        if (kind is not list and kind is not tuple) or len(values) != rows.width:
            values = self.checked(values, stream, task)
        rows.values.extend(values)
        rows.roots.append(roots)
        if len(rows) >= BUFFERED_ROWS_MAX and threading.get_ident() == self._surroundings.thread:
            self._flush(stream, task)

    def checked(self, values: Sequence[Any], stream: str, task: int | None = None) -> tuple[Any, ...]:
        """Return the values of a row as a tuple. Raises ``TopologyError`` if the stream declares
        another number."""
        return self._streams.checked(values, stream, task)

    def unsent(self, stream: str, task: int | None = None) -> UnsentRows:
        """The rows of a stream that are not sent yet."""
        made = self._surroundings.outcome.of[self._component_id]
        rows = made.rows.get((stream, task))
        if rows is None:
            rows = made.rows[(stream, task)] = UnsentRows(len(self._streams.fields(stream, task)))
        return rows

    def takes_rows(self, stream: str) -> bool:
        """Whether rows may be emitted without a target task: the stream is declared, and is not
        direct."""
        return self._streams.takes_rows(stream)

    def emit_rows(self, batch: pa.RecordBatch, roots: Ids | None, stream: str) -> None:
        """Emit many rows, each part of one tree, or all of none (``roots`` None). Raises
        ``TopologyError`` when the rows do not fit the stream."""
        typed = self._streams.typed(batch, stream, None)
        self._flush(stream, None)
        self._surroundings.outcome.of[self._component_id].counts.emitted += typed.num_rows
        if self._edges[stream] and typed.num_rows:
            trees = no_roots(typed.num_rows) if roots is None else pa.array(roots)
            self._give_all(stream, None, bounded(typed), trees)

    def flush_stream(self, stream: str) -> None:
        """Send the rows of one stream. If they cannot be sent, fail their trees and raise the
        error."""
        self._flush(stream, None)

    def flush(self) -> None:
        """Send all rows of all streams. If the rows of one stream cannot be sent, fail their trees
        and still send the other streams. Raises the first error."""
        failed: BaseException | None = None
        for stream, task in list(self._surroundings.outcome.of[self._component_id].rows):
            try:
                self._flush(stream, task)
            except users_errors() as error:
                failed = failed if failed is not None else error
        if failed is not None:
            raise failed

    def _flush(self, stream: str, task: int | None) -> None:
        """Send the rows of a stream. If they cannot be sent, fail their trees and raise the
        error."""
        made = self._surroundings.outcome.of[self._component_id]
        rows = made.rows.pop((stream, task), None)
        if rows is None:
            return
        made.counts.emitted += len(rows)
        if not rows.values or not self._edges[stream]:
            return
        trees, width = rows.roots.column(), rows.width

        def of_part(start: int, stop: int) -> None:
            list(self._streams.batches(stream, rows.values[start * width : stop * width]))

        with self._failing(trees, of_part):
            batches = list(self._streams.batches(stream, rows.values))
        self._give_all(stream, task, batches, trees)

    def _give_all(self, stream: str, task: int | None, batches: Iterable[pa.RecordBatch], trees: pa.Array) -> None:
        """Send rows in several batches. If one cannot be sent, fail its trees and those of the
        batches after it."""
        at = 0
        for batch in batches:
            first, at = at, at + batch.num_rows
            try:
                self._give(stream, task, batch, trees.slice(first, batch.num_rows))
            except users_errors():
                self._fail(trees.slice(at))
                raise

    def _fail(self, trees: pa.Array) -> None:
        """Fail the trees of rows that are not sent."""
        outcome = self._surroundings.outcome
        outcome.ledger.failed(trees_among(flat_roots(trees)).tolist())
        outcome.of[self._component_id].counts.failed += untracked(trees)

    def _give(self, stream: str, task: int | None, batch: pa.RecordBatch, trees: pa.Array) -> None:
        rows = batch.append_column(ROOTS, trees)

        def cut_part(start: int, stop: int) -> None:
            for edge in self._edges[stream]:
                list(edge.cut(rows.slice(start, stop - start), self._turn, task))

        with self._failing(trees, cut_part):
            self._cut(stream, task, rows)

    @contextlib.contextmanager
    def _failing(self, trees: pa.Array, attempt: Callable[[int, int], None]) -> Iterator[None]:
        """Fail the trees of rows that cannot be sent, because the emitter may have acked the input
        tuples already. ``attempt``: tries to convert a part of the rows; rows that fail alone are
        blamed."""
        try:
            yield
        except users_errors():
            self.failed = True
            outcome = self._surroundings.outcome
            if self._surroundings.blames:
                roots = list(roots_of(trees))
                for at in _failing_rows(attempt, 0, len(roots)):
                    outcome.blame(roots[at])
            self._fail(trees)
            raise

    def _cut(self, stream: str, task: int | None, batch: pa.RecordBatch) -> None:
        for edge in self._edges[stream]:
            for target, part in edge.cut(batch, self._turn, task):
                self._send(edge, target, part)
            self._turn += task is None

    def _send(self, edge: Edge, target: int, part: pa.RecordBatch) -> None:
        ids = self._ids.take(part.num_rows)
        self._surroundings.outcome.sent[edge.index] += part.num_rows
        ledger, roots = self._surroundings.outcome.ledger, part.column(ROOTS)
        ledger.emitted(*edges_of(roots, ids))
        ledger.shared(*shared_edges_of(roots, ids))
        self._surroundings.deliver(edge, target, part.append_column(EDGE, pa.array(ids)))


def _failing_rows(attempt: Callable[[int, int], None], start: int, stop: int) -> Iterator[int]:
    """The rows for which ``attempt`` fails when it gets that row alone."""
    try:
        attempt(start, stop)
    except users_errors():
        if stop - start == 1:
            yield start
        else:
            middle = (start + stop) // 2
            yield from _failing_rows(attempt, start, middle)
            yield from _failing_rows(attempt, middle, stop)


class ComponentTask:
    """One component in one task. Errors in user code go into the task's outcome. They end the
    instance; the next use makes a new one."""

    def __init__(
        self, topology: PlannedTopology, component: TaskComponent, task: int, surroundings: Surroundings
    ) -> None:
        self.topology = topology
        self.component = component
        self.task = task
        self.context = topology.context(component, task)
        self.out = Outflow(component, task, topology.plan.edges_from(component.id), EdgeIds(), surroundings)
        self._surroundings = surroundings
        self._instance: Any = None
        #: Seconds until the component wants a tick, as of the last ``look``; None for no tick.
        self.tick_in_s: float | None = None

    @property
    def outcome(self) -> Outcome:
        """The outcome of the round that is under way, or of the next one."""
        return self._surroundings.outcome

    @property
    def counts(self) -> Counts:
        """This component's counters in the outcome."""
        return self._surroundings.outcome.of[self.component.id].counts

    def work(self, budget: Budget) -> None:
        """Process waiting tuples within the budget."""

    def tick(self, *, settles: bool) -> None:
        """Execute a tick if one is due and no tuple waits. ``settles``: as in ``Round``."""

    @property
    def waiting(self) -> int:
        """Number of tuples that have arrived and are not executed yet."""
        return 0

    def kept(self) -> Iterable[int]:
        """Roots of tuples that wait to be executed, or for a checkpoint. Their waiting time does
        not count towards their timeout."""
        return ()

    def look(self) -> None:
        """Update the counters that describe the present. Called at the end of a round."""

    def instance(self) -> Any:
        """Return the user's object. Makes and opens one if there is none; None when that fails."""
        if self._instance is None:
            try:
                self._instance = self.topology.instance(self.component)
                self.begin(self._instance)
            except users_errors() as error:
                self._instance = None
                self.report(
                    error,
                    ErrorKind.AWAY if isinstance(error, RetryableError) else ErrorKind.CANNOT_START,
                )
        return self._instance

    def begin(self, made: Any) -> None:
        """Open or prepare the user's object."""
        raise NotImplementedError

    def end(self, made: Any) -> None:
        """Close the user's object or clean it up."""
        raise NotImplementedError

    def end_for(self, marker: CheckpointMarker) -> None:
        """End the task because the topology goes back to a checkpoint."""
        self.close()

    def recover(self, marker: CheckpointMarker, before: ComponentTask | None) -> None:
        """Restore the task to a checkpoint. ``before``: the previous task in this place, already
        ended."""

    def prepare(self, marker: CheckpointMarker) -> None:
        """Save the component's part of a checkpoint."""

    def commit(self, marker: CheckpointMarker) -> None:
        """Commit the prepared part."""

    def checkpoint_report(self, marker: CheckpointMarker) -> CheckpointReport | None:
        """The report for the checkpoint after the round; None when the component has none, or could
        not do its part."""
        return None

    def close(self) -> None:
        made, self._instance = self._instance, None
        if made is not None:
            try:
                self.end(made)
            except users_errors() as error:
                self.report(error)

    def died(self, error: BaseException) -> None:
        """End an instance after an error. The tuples that it held are lost, so their trees time
        out."""
        self.counts.died += 1
        self.report(error, ErrorKind.DIED)
        self.close()

    def report(self, error: BaseException, kind: ErrorKind = ErrorKind.REPORTED) -> None:
        if kind is not ErrorKind.REPORTED and self.is_fatal(error, kind):
            kind = ErrorKind.FATAL
        self.outcome.add_error(ComponentError.of(error, kind, self.component.id, self.task))

    def is_fatal(self, error: BaseException, kind: ErrorKind) -> bool:
        """Whether a new instance would fail in the same way."""
        # A TopologyError is not fatal: here one tuple of a wrong type fails alone, not with its
        # batch.
        return isinstance(error, (*FATAL_ERRORS, DataLossError))
