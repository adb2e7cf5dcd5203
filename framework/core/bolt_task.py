"""The task of a rich or basic bolt, which lives across rounds."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from secrets import randbits
from typing import Any

import numpy as np
import pyarrow as pa

from framework.core.basic_collector import BasicCollector, Rows
from framework.core.component_task import EDGE, ROOTS, AnchoredTuple, ComponentTask, anchored_class
from framework.core.outcome import Surroundings
from framework.core.roots_column import at_most_one, flat_roots, roots_of, tracked_edges, trees_among
from framework.core.round_budget import Budget
from framework.core.round_protocol import ErrorKind
from framework.errors import BadRecordError, FailedException, RetryableError, TopologyError
from framework.execution.failures import users_errors
from framework.execution.plan import Edge, TaskComponent
from framework.execution.tasks import PlannedTopology
from framework.topology import DEFAULT_STREAM, BaseBasicBolt, BaseRichBolt, Fields, Tuple
from framework.topology.rich_components import Anchors
from framework.topology.tuples import SYSTEM_COMPONENT, TICK_STREAM, rows_of

_NO_FIELDS = Fields()


def tuples_of(batch: pa.RecordBatch, fields: Fields, edge: Edge) -> Iterator[AnchoredTuple]:
    """The rows that came over an edge, as tuples."""
    made = anchored_class(fields, edge.source, edge.stream)
    return map(
        made, rows_of(batch.select(list(fields.names))), batch.column(EDGE).to_pylist(), roots_of(batch.column(ROOTS))
    )


class Inbox:
    """The tuples that have arrived at a bolt task and are not executed yet, in order of arrival.
    ``expect``: called with each batch before its first tuple is taken."""

    def __init__(self, expect: Callable[[Edge, pa.RecordBatch], None]) -> None:
        self._expect = expect
        self._first: deque[AnchoredTuple] = deque()
        self._rows: Rows | None = None
        self._batches: deque[tuple[Edge, Fields, pa.RecordBatch]] = deque()
        self._later = 0

    def put(self, edge: Edge, fields: Fields, batch: pa.RecordBatch) -> None:
        self._batches.append((edge, fields, batch))
        self._later += batch.num_rows

    def take(self) -> AnchoredTuple:
        """Remove and return the oldest tuple."""
        # convert batch by batch: rows in Arrow form need less memory than tuples
        while not self._first:
            edge, fields, batch = self._next()
            self._first.extend(tuples_of(batch, fields, edge))
        return self._first.popleft()

    def rows(self) -> Rows | None:
        """The oldest rows, if each of them is part of at most one tree; the caller takes some of
        them. None otherwise: call ``take``."""
        if not self._rows and not self._first and self._batches and at_most_one(self._batches[0][2].column(ROOTS)):
            edge, fields, batch = self._next()
            self._rows = Rows(batch, fields, edge)
        return self._rows or None

    def roots(self) -> Iterator[int]:
        """The roots of the trees that the waiting tuples are part of."""
        for tup in self._first:
            yield from tup.roots
        if self._rows is not None:
            yield from trees_among(self._rows.roots[self._rows.taken :]).tolist()
        for _, _, batch in self._batches:
            yield from trees_among(flat_roots(batch.column(ROOTS))).tolist()

    def _next(self) -> tuple[Edge, Fields, pa.RecordBatch]:
        edge, fields, batch = self._batches.popleft()
        self._expect(edge, batch)
        self._later -= batch.num_rows
        return edge, fields, batch

    def __len__(self) -> int:
        return len(self._first) + len(self._rows or ()) + self._later

    def __bool__(self) -> bool:
        return bool(self._first or self._rows or self._later)


class BoltCollector:
    """The ``RichOutputCollector`` of a bolt task. Threads of the bolt may call it, too."""

    def __init__(self, bolt: BoltTask, lock: threading.RLock) -> None:
        self._bolt = bolt
        self._out = bolt.out
        self._lock = lock

    def emit(self, values: Sequence[Any], anchors: Anchors = None, stream: str = DEFAULT_STREAM) -> None:
        with self._lock:
            self._out.emit(values, self._roots(anchors), stream, None)

    def emit_direct(
        self, task: int, values: Sequence[Any], anchors: Anchors = None, stream: str = DEFAULT_STREAM
    ) -> None:
        with self._lock:
            self._out.emit(values, self._roots(anchors), stream, task)

    def ack(self, tup: Tuple) -> None:
        with self._lock:
            self._bolt.ack(tup)

    def fail(self, tup: Tuple) -> None:
        found = received(tup)
        with self._lock:
            if self._bolt.settle(found):
                self._bolt.fail(found)
                self._bolt.outcome.blame(found.roots)

    def reset_timeout(self, tup: Tuple) -> None:
        with self._lock:
            self._bolt.outcome.ledger.reset(received(tup).roots)

    def report_error(self, error: BaseException) -> None:
        with self._lock:
            self._bolt.report(error)

    def _roots(self, anchors: Anchors) -> Sequence[int]:
        """The roots for the row that is emitted now. Binds the acks of the anchors to this
        emission."""
        found = _received(anchors)
        for each in found:
            self._bolt.bind(each)
        if len(found) == 1:
            return self._bolt.roots_for(found[0])
        return tuple(dict.fromkeys(root for each in found for root in each.roots)) or self._bolt.roots_of_nothing()


def _received(anchors: Anchors) -> Sequence[AnchoredTuple]:
    """Check that the bolt received each of the anchors, and return them."""
    if anchors is None:
        return ()
    return [received(each) for each in ((anchors,) if isinstance(anchors, Tuple) else anchors)]


def received(tup: Tuple) -> AnchoredTuple:
    """Return ``tup`` if a bolt received it. Raises ``TopologyError`` otherwise."""
    if not isinstance(tup, AnchoredTuple):
        raise TopologyError(f"give a tuple that this bolt has received, not {tup!r}")
    return tup


class BoltTask(ComponentTask):
    """A bolt task. ``tick_s``: seconds between its ticks; None for no ticks."""

    def __init__(
        self,
        topology: PlannedTopology,
        component: TaskComponent,
        task: int,
        surroundings: Surroundings,
        *,
        tick_s: float | None = None,
    ) -> None:
        super().__init__(topology, component, task, surroundings)
        self._tick_s = tick_s
        self._ticked_at = surroundings.clock()
        self._rich = BoltCollector(self, surroundings.lock)
        self._basic = BasicCollector(self.out, surroundings, self.report)
        self._inbox = Inbox(self.expect)

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
        if self.settle(found):
            self.acked(found)

    def settle(self, tup: AnchoredTuple) -> bool:
        """Mark the tuple as acked or failed. Returns False when it was marked before."""
        if tup.settled:
            return False
        tup.settled = True
        return True

    def bind(self, tup: AnchoredTuple) -> None:
        """Bind the ack of a tuple to the rows that are emitted now.

        The ack may follow many rounds later, and the outcome that carries the rows may be lost in
        between. So a random number is XORed into the tree twice: once with this outcome, once with
        the ack. If the outcome is lost, the tree cannot look complete."""
        outcome = self.outcome
        if tup.settled or tup.bound_to == outcome.serial:
            return
        number = randbits(64)  # from a generator that user code cannot seed
        tup.edge ^= number
        tup.bound_to = outcome.serial
        outcome.ledger.bound(tup.roots, number)

    def fail(self, tup: AnchoredTuple) -> None:
        """Tell the ackers that the tuple has failed."""
        self.counts.failed += 1
        self.outcome.ledger.failed(tup.roots)

    def raised(self, tup: AnchoredTuple, error: BaseException) -> None:
        """Handle an error that the bolt raised for a tuple: the tuple fails unless it was acked
        before."""
        with self._surroundings.lock:
            if self.settle(tup):
                self.fail(tup)
            self._blame(tup.roots, error)

    def _blame(self, roots: Sequence[int], error: BaseException) -> None:
        """Blame the tuple, unless the cause is an external system that does not answer, or rows
        that cannot be sent and may have been emitted for other tuples."""
        if not (isinstance(error, RetryableError) or self.out.failed):
            self.outcome.blame(roots)

    def is_fatal(self, error: BaseException, kind: ErrorKind) -> bool:
        """Whether a failure ends the topology. A bad record only fails its tuple, and the spout
        decides about the record. It is fatal if every attempt would begin at the same checkpoint,
        and no spout gives up the record."""
        decided = self._surroundings.blames or not self._surroundings.exact
        fails = kind is ErrorKind.DIED and isinstance(error, BadRecordError) and decided
        return not fails and super().is_fatal(error, kind)

    def acked(self, tup: AnchoredTuple) -> None:
        """Tell the ackers that the tuple is acked."""
        self.counts.acked += 1
        self.outcome.ledger.acked(tup.roots, tup.edge)

    def receive(self, edge: Edge, fields: Fields, batch: pa.RecordBatch) -> None:
        """Queue tuples for execution."""
        self._inbox.put(edge, fields, batch)

    def expect(self, edge: Edge, batch: pa.RecordBatch) -> None:
        """Called with the rows that are executed next."""

    @property
    def waiting(self) -> int:
        return len(self._inbox)

    def kept(self) -> Iterable[int]:
        return self._inbox.roots()

    def work(self, budget: Budget) -> None:
        """Execute waiting tuples within the budget. An error ends the instance and fails the tuple;
        the next tuple gets a new instance. While no new instance can start, all tuples wait."""
        while self._inbox:
            bolt = self.instance()
            if bolt is None or not budget.goes_on():
                return
            if not isinstance(bolt, BaseBasicBolt):
                self._execute(bolt, self._inbox.take())
            elif (rows := self._inbox.rows()) is not None:
                self._execute_rows(bolt, rows, budget)
            else:
                self._execute_basic(bolt, self._taken(budget))

    def tick(self, *, settles: bool) -> None:
        due_in_s = self._tick_due_in()
        if due_in_s is None or due_in_s > 0 or self._inbox:
            return
        bolt = self.instance()
        if bolt is not None:
            self._ticked_at = self._surroundings.clock()
            tick = AnchoredTuple(
                _NO_FIELDS,
                (),
                source_component=SYSTEM_COMPONENT,
                source_stream=TICK_STREAM,
                edge=0,
                roots=self.tick_roots(),
            )
            self._execute(bolt, tick)
            self.ack(tick)  # unless it has failed; its edge of 0 changes no ledger

    def look(self) -> None:
        self.tick_in_s = self._tick_due_in()

    def tick_roots(self) -> Sequence[int]:
        """The roots of the trees that a tick is part of."""
        return ()

    def roots_for(self, tup: AnchoredTuple) -> Sequence[int]:
        """The roots for a row that is anchored to this tuple."""
        return tup.roots or self.roots_of_nothing()

    def roots_of_nothing(self) -> Sequence[int]:
        """The roots for a row without anchors."""
        return ()

    def _tick_due_in(self) -> float | None:
        """Seconds until the next tick is due; None for no tick."""
        return self._ticked_at + self._tick_s - self._surroundings.clock() if self._tick_s is not None else None

    def _taken(self, budget: Budget) -> Iterator[AnchoredTuple]:
        """Take waiting tuples within the budget, at least one."""
        yield self._inbox.take()
        while self._inbox and self._inbox.rows() is None and budget.goes_on():
            yield self._inbox.take()

    def _execute(self, bolt: Any, tup: AnchoredTuple) -> None:
        if isinstance(bolt, BaseBasicBolt):
            self._execute_basic(bolt, [tup])
            return
        self.counts.executed += 1
        try:
            bolt.execute(tup)
        except users_errors() as error:
            self.raised(tup, error)
            self.died(error)

    def _execute_basic(self, bolt: BaseBasicBolt, tuples: Iterable[AnchoredTuple]) -> None:
        """Execute tuples, and ack each. An error ends the instance and stops the iteration; the
        remaining tuples stay in the inbox."""
        execute, collector, ledger = bolt.execute, self._basic, self.outcome.ledger
        executed = acked = 0
        for tup in tuples:
            executed += 1
            collector.roots = tup.roots
            try:
                execute(tup, collector)
            except FailedException as error:
                self.raised(tup, error)
            except users_errors() as error:
                self.raised(tup, error)
                self.died(error)
                break
            else:
                tup.settled = True
                acked += 1
                ledger.acked(tup.roots, tup.edge)
        collector.roots = ()
        self.counts.executed += executed
        self.counts.acked += acked

    def _execute_rows(self, bolt: BaseBasicBolt, rows: Rows, budget: Budget) -> None:
        """Execute and ack rows of a batch within the budget, at least one. The ledger gets their
        acks as columns. An error ends the instance, and the remaining rows stay in the inbox."""
        execute, collector, made = bolt.execute, self._basic, rows.made
        new, clock, until = made.__new__, budget.clock, budget.until
        first, failed = rows.taken, []
        raised: BaseException | None = None
        with collector.over(rows) as row_is_done:
            for values in rows.untaken:
                tup = new(made)
                tup.values = values
                try:
                    execute(tup, collector)
                except FailedException as error:
                    failed.append(rows.taken)
                    self._blame(collector.roots, error)
                except users_errors() as error:
                    failed.append(rows.taken)
                    self._blame(collector.roots, error)
                    row_is_done()
                    raised = error
                    break
                row_is_done()
                if clock() >= until:
                    break
        self._settle_rows(rows, first, failed)
        if raised is not None:
            self.died(raised)  # rows that it emits from here on are not anchored

    def _settle_rows(self, rows: Rows, first: int, failed: Sequence[int]) -> None:
        """Ack the rows that were executed since ``first``, except those that failed."""
        roots, edges = rows.roots[first : rows.taken], rows.edges[first : rows.taken]
        counts, ledger = self.counts, self.outcome.ledger
        counts.executed += len(roots)
        counts.acked += len(roots) - len(failed)
        if failed:
            counts.failed += len(failed)
            ledger.failed(trees_among(rows.roots[failed]).tolist())
            acked = np.ones(len(roots), np.bool_)
            acked[np.array(failed) - first] = False
            roots, edges = roots[acked], edges[acked]
        ledger.acked_many(*tracked_edges(roots, edges))
