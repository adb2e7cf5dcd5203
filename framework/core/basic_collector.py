"""The collector of a basic bolt, and the rows of a batch that a basic bolt executes one by one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from framework.acking.ack_reports import Ids
from framework.core.component_task import EDGE, ROOTS, Outflow
from framework.core.outcome import Surroundings
from framework.core.roots_column import as_roots, flat_roots
from framework.execution.collector import BUFFERED_ROWS_MAX
from framework.execution.plan import Edge
from framework.topology import DEFAULT_STREAM, Fields
from framework.topology.tuples import plain_class, rows_of

#: Replaces the row width in an ``emit`` function whose batch is over, so that no row fits and every
#: call goes to the collector.
_OVER = -1


class Rows:
    """The rows of a batch, and how many of them were executed.

    * ``roots``: the tree that each row is part of, or ``NO_TREE``.
    * ``edges``: the ids of the edges on which the rows arrived.
    * ``untaken``: the values of the rows that are not executed yet."""

    def __init__(self, batch: pa.RecordBatch, fields: Fields, edge: Edge) -> None:
        self.made = plain_class(fields, edge.source, edge.stream)
        self.roots = flat_roots(batch.column(ROOTS))
        self.edges: Ids = batch.column(EDGE).to_numpy()
        self.untaken = rows_of(batch.select(list(fields.names)))
        self.taken = 0

    def take(self) -> None:
        """Count one more row as executed."""
        self.taken += 1

    def __len__(self) -> int:
        return len(self.roots) - self.taken


class BasicCollector:
    """Anchors emitted rows to the tuple that is being executed: to a single tuple (``roots``), or
    to each row of a batch in turn (``over``). ``report``: shows an error."""

    def __init__(self, out: Outflow, surroundings: Surroundings, report: Callable[[BaseException], None]) -> None:
        self._out = out
        self._surroundings = surroundings
        self.report_error = report
        self._roots: Sequence[int] = ()
        self._rows: Rows | None = None

    @property
    def roots(self) -> Sequence[int]:
        """The roots of the tuple that is being executed."""
        return self._roots if self._rows is None else as_roots(int(self._rows.roots[self._rows.taken]))

    @roots.setter
    def roots(self, roots: Sequence[int]) -> None:
        self._roots = roots

    def emit(self, values: Sequence[Any], stream: str = DEFAULT_STREAM) -> None:
        # the bolt kept a reference to this method, and a batch is being executed
        if "emit" in vars(self):
            self.emit(values, stream)
        else:
            self._emit(values, stream)

    def emit_direct(self, task: int, values: Sequence[Any], stream: str = DEFAULT_STREAM) -> None:
        self._out.emit(values, self.roots, stream, task)

    def emit_arrow(self, batch: pa.RecordBatch, stream: str = DEFAULT_STREAM) -> None:
        for values in rows_of(batch):
            self.emit(values, stream)

    def emit_arrow_direct(self, task: int, batch: pa.RecordBatch, stream: str = DEFAULT_STREAM) -> None:
        for values in rows_of(batch):
            self.emit_direct(task, values, stream)

    @contextlib.contextmanager
    def over(self, rows: Rows) -> Iterator[Callable[[], None]]:
        """Anchor to the rows of a batch, starting with the first that is not executed. Yields a
        function; call it after each row to mark the row as executed.

        Meanwhile ``emit`` is replaced by a faster function for the default stream, which carries
        nearly all rows. It records no roots per row: they follow from the number of values emitted
        for each row of the batch. A bolt may keep a reference to either function; both do the same
        at any time."""
        self._rows = rows
        next_row, end = rows.take, _nothing
        if self._out.takes_rows(DEFAULT_STREAM):
            made = _MadeOfRows(self._out, rows)
            next_row = made.next_row
            self.emit, end = self._emit_of(made)  # type: ignore[method-assign]
        try:
            yield next_row
        finally:
            vars(self).pop("emit", None)
            self._rows = None
            end()

    def _emit(self, values: Sequence[Any], stream: str) -> None:
        self._out.emit(values, self.roots, stream, None)

    def _emit_of(self, made: _MadeOfRows) -> tuple[Callable[..., None], Callable[[], None]]:
        """Return the fast ``emit`` for a batch, and a function to call when the batch is over."""
        other, thread = self._emit, self._surroundings.thread
        width, kept = made.unsent.width, made.unsent.values
        keep, most, checked = kept.extend, width * BUFFERED_ROWS_MAX, self._out.checked

        def emit(values: Sequence[Any], stream: str = DEFAULT_STREAM) -> None:
            nonlocal kept, keep
            if stream != DEFAULT_STREAM:
                other(values, stream)
                return
            kind = values.__class__
            if (kind is not list and kind is not tuple) or len(values) != width:
                if width == _OVER:
                    self.emit(values, stream)
                    return
                values = checked(values, DEFAULT_STREAM)
            keep(values)
            if len(kept) >= most and threading.get_ident() == thread:
                try:
                    made.send()
                finally:
                    kept = made.unsent.values
                    keep = kept.extend

        def end() -> None:
            nonlocal width
            width = _OVER
            made.anchor()

        return emit, end


def _nothing() -> None: ...


class _MadeOfRows:
    """The rows of the default stream that are emitted for the rows of a batch. ``unsent``: the
    emitted rows that are not sent yet."""

    def __init__(self, out: Outflow, rows: Rows) -> None:
        self._out = out
        self._rows = rows
        self._begin()

    def _begin(self) -> None:
        self.unsent = self._out.unsent(DEFAULT_STREAM)
        self._first = self._rows.taken
        # number of values before the first row and after each row
        self._ends = [len(self.unsent.values)]

    def next_row(self) -> None:
        self._rows.taken += 1
        self._ends.append(len(self.unsent.values))

    def anchor(self) -> None:
        """Assign roots to the rows that were emitted since the last call."""
        # the last entry is for the row that is being executed
        ends = [*self._ends, len(self.unsent.values)]
        counts = np.diff(ends) // self.unsent.width
        if counts.any():
            which = np.repeat(np.arange(self._first, self._first + len(counts)), counts)
            self.unsent.roots.extend(self._rows.roots[which])
        self._begin()

    def send(self) -> None:
        """Send the rows that were emitted so far. Raises the error of rows that cannot be sent."""
        self.anchor()
        try:
            self._out.flush_stream(DEFAULT_STREAM)
        finally:
            self._begin()
