"""Aggregates per key and window of event time; each window is sent once, when it closes."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import pyarrow as pa
import pyarrow.compute as pc

from framework.bounded_pages import slices_of
from framework.durations import Duration, micros_of
from framework.errors import BadRecordError, TopologyError
from framework.operators.event_window_assigner import EventWindows
from framework.operators.timestamps import times_of
from framework.operators.watermarks import CHANGED_STREAM, LATE_STREAM, NEVER
from framework.topology import Combiner, Fields, OutputFieldsDeclarer
from framework.topology.canonical_form import python_values
from framework.topology.refused_row_bisection import RefusedTogether, accepted
from sinks import external_row_sorter
from sinks.aggregates import Aggregate
from sinks.backend import Key, Value
from sinks.event_time.event_time_committer_base import Watermarks
from sinks.event_time.windowed_aggregation_base import RECORDS, AggregatingCommitter, TimedFold
from sinks.external_row_sorter import PAGE_BYTES, by_time
from sinks.state_committer import Fold
from sinks.states import MapState

_START, _END = "window_start", "window_end"
_AT_START, _AT_END = "@start", "@end"
_CORRECTION = "correction"
_FOREVER = (1 << 63) - 1


class WindowedCommitter(AggregatingCommitter):
    """Aggregates per key and window, in an opaque state that holds the open windows only.

    * ``window``: ``tumbling(...)``, ``hopping(...)`` or ``sliding(...)``.
    * ``on``: the field with a record's event time, as in a ``WatermarkCommitter``.
    * ``key``, ``aggregates``: as in a ``StateCommitter``.

    Default stream: each window once, in the transaction whose watermark passes its end: the key,
    ``window_start``, ``window_end``, the aggregates. With ``allowed_lateness``, a window is kept
    for this long after its end, and each transaction with records for it sends it again with
    ``correction`` true.

    ``LATE_STREAM``: later records, aggregated per key and window within their transaction.
    ``CHANGED_STREAM``: each window that a transaction changes, with its values so far, in the order
    of their ends.

    Records are aggregated before the shuffle. The content of a window when it closes does not
    depend on the sizes of batches, on tasks, or on failures.

    In addition to the records, subscribe it by ``all_grouping`` to a ``WatermarkCommitter``.
    """

    _bounds = (_START, _END)
    _parts: ClassVar[Mapping[str, str]] = {_AT_START: _START, _AT_END: _END}

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
        super().__init__(state, on=on, key=key, aggregates=aggregates, unit=unit, own=[_CORRECTION])
        if not isinstance(window, EventWindows):
            raise TopologyError(
                f"WindowedCommitter: {window!r} is no window: give tumbling(...), hopping(...) or sliding(...)"
            )
        self.window = window
        self.allowed_lateness = micros_of(allowed_lateness, "allowed_lateness")

    # --- on the driver ----------------------------------------------------------------------------

    def _bind_state(self, partial: Fields) -> None:
        self.state.bind(self._state_key(partial), partial.select(list(self.aggregates)))
        self.state.backend.order_by(_END)

    def state_settings(self) -> Mapping[str, Any]:
        own = {"window": self.window.settings(), "allowed_lateness": self.allowed_lateness}
        return {**super().state_settings(), **own}

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        types = self._output_types()
        if types:
            declarer.declare(Fields.of(types), LATE_STREAM)
            declarer.declare(Fields.of(types), CHANGED_STREAM)
            declarer.declare(Fields.of({**types, _CORRECTION: pa.bool_()} if self.allowed_lateness else types))

    def _folding(self, fold: Fold) -> Combiner:
        return _WindowFold(fold, self)

    def late_for(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**super().late_for(row), **{name: row[name] for name in self._bounds}}

    # --- in tasks ---------------------------------------------------------------------------------

    def may_try_writes(self) -> bool:
        return type(self) is WindowedCommitter

    def _commit(self, watermarks: Watermarks) -> Iterator[pa.RecordBatch]:
        came = self._folded_rows()
        over_before = watermarks.before - self.allowed_lateness
        over_after = watermarks.after - self.allowed_lateness  # windows that end later are kept
        late = self._ordered(_ending(came, NEVER, over_before))
        if late.num_rows:
            self._emit_late(self._sent(late), LATE_STREAM, pc.sum(late.column(RECORDS)).as_py())
        # The due rows contain the windows of the state.
        ending = _ending(came, watermarks.before, watermarks.after)
        still_open = _ending(came, watermarks.after, _FOREVER)
        corrected = self._corrected(_ending(came, over_before, watermarks.before))
        self._emit_changed(corrected)
        self._put(_ending(corrected, over_after, _FOREVER))
        gone = self._window_keys(_ending(corrected, NEVER, over_after))
        self.state.delete(gone)
        # Windows that an earlier transaction has sent, and that were kept for late records until
        # now.
        deleted = frozenset(gone)
        for page in self.state.due(_END, NEVER, min(watermarks.before, over_after), self._mine):
            self.state.delete([key for key, _ in page if key not in deleted])
            self.state.write()
        # Rows without records of the transaction: it has written their windows already.
        own = pa.concat_tables([ending, self._table(self._rows(corrected))])
        del came, ending, corrected  # they are copies, and may be large
        for ended, held in self._ended(own, watermarks):
            yield self._closed(ended, watermarks.before)
            came_now = ended.filter(pc.greater(ended.column(RECORDS), 0))
            self._emit_changed(came_now)
            self._put(_ending(came_now, over_after, _FOREVER))
            if self._attempt is None or self._attempt.attempt_id != 1:
                # An earlier attempt may have written a row of any window with records.
                held = list(dict.fromkeys([*held, *self._window_keys(came_now)]))
            self.state.delete([key for key in held if key[-1] <= over_after])
            self.state.write()
        if self._is_subscribed(CHANGED_STREAM):
            still_open = self._ordered(still_open)  # and after the others: ``CHANGED_STREAM`` has them in their order
        for page in slices_of(still_open, PAGE_BYTES):
            self._keep_open(page)

    def _keep_open(self, came: pa.Table) -> None:
        """Add records to windows that do not end yet."""
        deltas = came.drop_columns([RECORDS]).rename_columns(dict(self._parts))
        merge = partial(self.state.merge, aggregates=self.aggregates, want_values=self._is_subscribed(CHANGED_STREAM))
        for changed in accepted(deltas, merge, self._on_refused):
            if changed is not None:
                self._emit_changed(changed.rename_columns({name: part for part, name in self._parts.items()}))

    def _corrected(self, came: pa.Table) -> pa.Table:
        """Windows that an earlier transaction has sent, with these records."""
        keys = self._window_keys(came)
        held = zip(keys, self.state.multi_get(keys), strict=True)
        return self._joined(self._table([(key, _row(values)) for key, values in held if values is not None]), came)

    def _ended(self, own: pa.Table, watermarks: Watermarks) -> Iterator[tuple[pa.Table, list[Key]]]:
        """Pages of the windows that the transaction sends, in their order, and the keys of those
        that are due in the state. ``own``: those with records, and those that are sent again."""
        own, first = self._ordered(own), 0
        places = range(own.num_rows)
        for page in self.state.due(_END, watermarks.before, watermarks.after, self._mine, _order):
            last = _order(page[-1][0][-1], page[-1][0])
            end = bisect.bisect_right(places, last, first, key=lambda place: self._orders(own.slice(place, 1))[0])
            yield self._joined(self._table(page), own.slice(first, end - first)), [key for key, _ in page]
            first = end
        rows = external_row_sorter.PAGE_ROWS
        for start in places[first::rows]:
            yield own.slice(start, rows), []

    def _joined(self, held: pa.Table, came: pa.Table) -> pa.Table:
        """The windows of the state and of the transaction, one row each. Pages stay in order."""
        if not held.num_rows or not came.num_rows:
            return pa.concat_tables([held, came])
        fold = self._new_fold(partial_input=True)
        try:
            for batch in (*held.to_batches(), *came.to_batches()):
                fold.add(batch)
            joined = fold.finish()
        except RefusedTogether as error:
            raise BadRecordError(str(error)) from error
        return self._ordered(pa.Table.from_batches([joined]))

    def _ordered(self, rows: pa.Table) -> pa.Table:
        orders = self._orders(rows)
        return rows.take(pa.array(sorted(range(len(orders)), key=orders.__getitem__), pa.int64()))

    def _orders(self, rows: pa.Table) -> list[tuple[Any, ...]]:
        return [_order(key[-1], key) for key in self._window_keys(rows)]

    def _put(self, rows: pa.Table) -> None:
        windows = self._rows(rows)
        self.state.multi_put([key for key, _ in windows], [_bare(values) for _, values in windows])

    def _emit_changed(self, rows: pa.Table) -> None:
        if rows.num_rows and self._is_subscribed(CHANGED_STREAM):
            self._collector.emit_arrow(self._sent(self._ordered(rows)), CHANGED_STREAM)

    def _closed(self, rows: pa.Table, before: int) -> pa.RecordBatch:
        batch = self._sent(rows)
        if not self.allowed_lateness:
            return batch
        sent_before = pc.less_equal(batch.column(_END).cast(pa.int64()), before)
        return batch.append_column(_CORRECTION, sent_before)

    def _sent(self, rows: pa.Table) -> pa.RecordBatch:
        """Folded rows as those of a stream."""
        columns = [rows.column(name).combine_chunks() for name in (*self.key, _AT_START, _AT_END, *self.aggregates)]
        types = self._output_types()
        arrays = [column.cast(kind) for column, kind in zip(columns, types.values(), strict=True)]
        return pa.RecordBatch.from_arrays(arrays, names=list(types))

    def _table(self, windows: Sequence[tuple[Key, Value]]) -> pa.Table:
        """Windows as folded rows, without records of the transaction."""
        schema = self._schema()
        if not windows:
            return schema.empty_table()
        keys, values = zip(*windows, strict=True)
        columns = (*zip(*keys, strict=True), (0,) * len(keys), *zip(*values, strict=True))
        arrays = [pa.array(column, kind) for column, kind in zip(columns, schema.types, strict=True)]
        return pa.table(arrays, schema=schema)

    def _rows(self, rows: pa.Table) -> list[tuple[Key, Value]]:
        """Folded rows as those of the state."""
        values = zip(*(python_values(rows.column(name), name) for name in self.aggregates), strict=True)
        return list(zip(self._window_keys(rows), values, strict=True))

    def _window_keys(self, rows: pa.Table) -> list[Key]:
        columns = (python_values(rows.column(name), name) for name in (*self.key, *self._parts))
        return list(zip(*columns, strict=True))


class _WindowFold(TimedFold):
    """Assigns windows to each record, and folds."""

    def __init__(self, fold: Fold, committer: WindowedCommitter) -> None:
        super().__init__(fold)
        self._committer = committer

    def add(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        its = self._committer
        assigned = its.window.assign(times_of(batch.column(its.on), its.on, its.unit))
        rows = batch.take(pa.array(assigned.rows)) if its.window.step < its.window.length else batch
        self._fold.add(its._with_times(rows, {_AT_START: assigned.starts, _AT_END: assigned.ends}))


def _ending(rows: pa.Table, after: int, upto: int) -> pa.Table:
    """The windows that end after ``after``, and not after ``upto``."""
    ends = rows.column(_AT_END)
    return rows.filter(pc.and_(pc.greater(ends, after), pc.less_equal(ends, upto)))


def _order(end: int, key: Key) -> tuple[Any, ...]:
    """The order of windows. Those with the same end have the same start."""
    return by_time(end, key[:-2])


def _row(held: Any) -> Value:
    """A result of ``multi_get`` as a row: a state of one column returns bare values."""
    return held if isinstance(held, tuple) else (held,)


def _bare(values: Value) -> Any:
    return values[0] if len(values) == 1 else values
