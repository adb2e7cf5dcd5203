"""Aggregates per key and window of event time; each window is sent once, when it closes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa

from framework.durations import Duration, micros_of
from framework.errors import TopologyError
from framework.operators.event_clock import NEVER
from framework.operators.event_columns import check_times, times_of
from framework.operators.event_windows import EventWindows
from framework.topology import Combiner, Fields, Input, OutputFieldsDeclarer
from framework.topology.canonical import python_values
from sinks.aggregates import Aggregate, row_merger
from sinks.committer import Fold
from sinks.event_time.by_watermark import Passing, WatermarkedCommitter, Watermarks
from sinks.states import MapState

#: Records whose window has closed.
LATE_STREAM = "late"
#: What changed in open windows.
CHANGED_STREAM = "changed"
_END = "window_end"
_MOMENT = pa.timestamp("us", "UTC")


class WindowedCommitter(WatermarkedCommitter):
    """Aggregates per key and window, in an opaque state that holds the open windows only.

    ``window``: ``tumbling(...)`` or ``hopping(...)``. ``on``: the field with a record's event time,
    as of a ``WatermarkCommitter``. ``key`` and ``aggregates``: as of a ``StateCommitter``.

    Default stream: a window when the watermark passes its end, in the transaction whose watermark
    passes it, and then never again: the key, ``window_start``, ``window_end``, the aggregates. With
    ``allowed_lateness``, a window is kept for so long after its end, and each transaction with
    records for it sends it again with ``correction`` true.

    ``LATE_STREAM``: what came later than that, aggregated per key and window within its
    transaction. ``CHANGED_STREAM``: each window that a transaction changes, with its values so far.

    Records are aggregated before the shuffle. What is in a window when it closes does not depend on
    the sizes of batches, on tasks, or on failures.

    Beside the records, subscribe it by ``all_grouping`` to a ``WatermarkCommitter``.
    """

    def __init__(
        self,
        state: MapState,
        window: EventWindows,
        *,
        on: str,
        key: Sequence[str],
        aggregates: Mapping[str, Aggregate],
        allowed_lateness: Duration = 0,
        unit: Literal["s", "ms", "us"] = "s",
    ) -> None:
        super().__init__(state, key)
        if not isinstance(window, EventWindows):
            raise TopologyError(f"WindowedCommitter: {window!r} is no window: give tumbling(...) or hopping(...)")
        if not aggregates:
            raise TopologyError('WindowedCommitter needs at least one aggregate, such as {"count": Count()}')
        self.window, self.on, self.unit = window, on, unit
        self.allowed_lateness = micros_of(allowed_lateness, "allowed_lateness")
        self.aggregates: dict[str, Aggregate] = {}
        own = {_END, "window_start", "correction"}
        taken = own.intersection(self.key)
        if taken:
            raise TopologyError(f"WindowedCommitter: key field {min(taken)!r} is a column of its own: rename the field")
        own.update(self.key)
        for name, aggregate in aggregates.items():
            for column, part in aggregate.expanded(name).items():
                if column in own:
                    raise TopologyError(
                        f"WindowedCommitter: there is a column {column!r} already: rename aggregate {name!r}"
                    )
                own.add(column)
                self.aggregates[column] = part
        self._partial: Fields | None = None
        self._fold: Fold | None = None

    # --- on the driver ----------------------------------------------------------------------------

    def _bind_records(self, *records: Input) -> None:
        (source,) = records
        fields = [each.field for each in self.aggregates.values() if each.field is not None]
        source.require(self._component_id, (self.on, *fields))
        check_times(self._component_id, self.on, source.fields.type_of(self.on), self.unit)
        types: dict[str, Any] = {name: source.fields.type_of(name) for name in self.key}
        types[_END] = pa.int64()
        for name, aggregate in self.aggregates.items():
            types[name] = aggregate.output_type(source.fields.type_of(aggregate.field) if aggregate.field else None)
        self._partial = Fields.of(types)
        self.state.bind(self._partial.select([*self.key, _END]), self._partial.select(list(self.aggregates)))
        self.state.backend.order_by(_END)

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        if self._partial is None:
            return
        partial = self._partial
        types: dict[str, Any] = {name: partial.type_of(name) for name in self.key}
        types |= {"window_start": _MOMENT, _END: _MOMENT}
        types |= {name: partial.type_of(name) for name in self.aggregates}
        declarer.declare(Fields.of(types), LATE_STREAM)
        declarer.declare(Fields.of(types), CHANGED_STREAM)
        declarer.declare(Fields.of({**types, "correction": pa.bool_()} if self.allowed_lateness else types))

    def combiner(self) -> Combiner:
        return Passing(self._make_fold)

    def _make_fold(self) -> Combiner:
        return _WindowFold(self._new_fold(partial_input=False), self.window, self.on, self.unit)

    def _new_fold(self, *, partial_input: bool) -> Fold:
        return Fold(self._component_id, (*self.key, _END), self.aggregates, self._schema(), partial_input=partial_input)

    def _schema(self) -> pa.Schema:
        if self._partial is None:
            raise TopologyError(f"committer {self._component_id!r} was used outside a topology")
        return self._partial.schema()

    # --- in tasks ---------------------------------------------------------------------------------

    def _take(self, batch: pa.RecordBatch) -> None:
        if self._fold is None:
            self._fold = self._new_fold(partial_input=True)
        self._fold.add(batch)

    def _commit(self, watermarks: Watermarks) -> Iterable[pa.RecordBatch]:
        folded = self._fold.finish() if self._fold is not None else None
        self._fold = None
        width = len(self.key) + 1
        rows = list(zip(*(python_values(column, name) for name, column in _columns(folded)), strict=True))
        kept_after = watermarks.before - self.allowed_lateness
        late = [row for row in rows if row[width - 1] <= kept_after]
        rows = [row for row in rows if row[width - 1] > kept_after]
        merge, nothing = row_merger(self.aggregates), (None,) * len(self.aggregates)
        closed: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        changed: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        ends_after = watermarks.after - self.allowed_lateness  # what ends later is kept
        keys = [row[:width] for row in rows]
        for row, key, held in zip(rows, keys, self._held(keys), strict=True):
            value = merge(held or nothing, row[width:])
            changed[key] = value
            if key[-1] <= watermarks.after:
                closed[key] = value
        for key, value in self.state.due(_END, watermarks.before, watermarks.after, self._mine):
            closed.setdefault(key, _row(value))
        over = [key for key, _ in self.state.due(_END, NEVER, ends_after, self._mine)]
        over += [key for key in changed if key[-1] <= ends_after]
        kept = [key for key in changed if key[-1] > ends_after]
        self.state.multi_put(kept, [self._value(changed[key]) for key in kept])
        self.state.delete(list(dict.fromkeys(over)))
        self._emit(LATE_STREAM, {row[:width]: row[width:] for row in late})
        self._emit(CHANGED_STREAM, changed)
        return self._batches(closed, watermarks if self.allowed_lateness else None)

    def _held(self, keys: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...] | None]:
        return [_row(value) if value is not None else None for value in self.state.multi_get(keys)]

    def _value(self, row: tuple[Any, ...]) -> Any:
        return row[0] if len(row) == 1 else row

    def _emit(self, stream: str, windows: Mapping[tuple[Any, ...], tuple[Any, ...]]) -> None:
        for batch in self._batches(windows, None):
            self._collector.emit_arrow(batch, stream)

    def _batches(
        self, windows: Mapping[tuple[Any, ...], tuple[Any, ...]], watermarks: Watermarks | None
    ) -> list[pa.RecordBatch]:
        """The rows of a stream, in the order of their ends. ``watermarks``: with ``correction``."""
        if not windows:
            return []
        ordered = sorted(windows.items(), key=lambda each: (each[0][-1], repr(each[0])))
        schema = self._schema()
        columns: dict[str, pa.Array] = {}
        for position, name in enumerate(self.key):
            columns[name] = pa.array([key[position] for key, _ in ordered], schema.field(name).type)
        ends = [key[-1] for key, _ in ordered]
        columns["window_start"] = pa.array([self.window.start_of(end) for end in ends], pa.int64()).cast(_MOMENT)
        columns[_END] = pa.array(ends, pa.int64()).cast(_MOMENT)
        for position, name in enumerate(self.aggregates):
            columns[name] = pa.array([value[position] for _, value in ordered], schema.field(name).type)
        if watermarks is not None:
            columns["correction"] = pa.array([end <= watermarks.before for end in ends])
        return [pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))]


class _WindowFold(Combiner):
    """Gives each record its windows, and folds."""

    def __init__(self, fold: Fold, window: EventWindows, on: str, unit: str) -> None:
        self._fold, self._window, self._on, self._unit = fold, window, on, unit

    def add(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        assigned = self._window.assign(times_of(batch.column(self._on), self._on, self._unit))
        rows = batch.take(pa.array(assigned.rows)) if self._window.step < self._window.length else batch
        self._fold.add(rows.append_column(_END, pa.array(assigned.ends)))

    def finish(self) -> pa.RecordBatch | None:
        return self._fold.finish()


def _columns(rows: pa.RecordBatch | None) -> list[tuple[str, pa.ChunkedArray]]:
    if rows is None:
        return []
    return [(name, pa.chunked_array([column])) for name, column in zip(rows.schema.names, rows.columns, strict=True)]


def _row(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
