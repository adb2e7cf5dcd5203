"""Aggregates per key and session; each session is sent once, when it has ended."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from framework.durations import Duration, micros_of
from framework.errors import TopologyError
from framework.operators.event_clock import NEVER
from framework.operators.event_columns import check_times, times_of
from framework.operators.sessions import Session, merged, starts_of
from framework.topology import Combiner, Fields, Input, OutputFieldsDeclarer
from framework.topology.canonical import canonical_column, python_values
from sinks.aggregates import Aggregate, Max, row_merger
from sinks.committer import Fold
from sinks.event_time.by_watermark import Key, Passing, WatermarkedCommitter, Watermarks
from sinks.event_time.windowed import LATE_STREAM
from sinks.plain_values import JsonColumns
from sinks.states import MapState

_START, _END, _DUE = "session_start", "session_end", "due_at"
_MOMENT = pa.timestamp("us", "UTC")


class SessionCommitter(WatermarkedCommitter):
    """Aggregates per key and session, in an opaque state that holds the open sessions only: one row
    per key. A session ends when no record of its key has come within ``gap`` of its last one.

    ``on``: the field with a record's event time, as of a ``WatermarkCommitter``. ``key`` and
    ``aggregates``: as of a ``StateCommitter``.

    Default stream: a session when the watermark passes its end, in the transaction whose watermark
    passes it, and then never again: the key, ``session_start`` (its first record),
    ``session_end`` (its last record and the gap; no record of the session is there), the
    aggregates. ``LATE_STREAM``: what belongs to no open session and would have ended before the
    watermark, in the same columns.

    Beside the records, subscribe it by ``all_grouping`` to a ``WatermarkCommitter``.
    """

    def __init__(
        self,
        state: MapState,
        gap: Duration,
        *,
        on: str,
        key: Sequence[str],
        aggregates: Mapping[str, Aggregate],
        unit: Literal["s", "ms", "us"] = "s",
    ) -> None:
        super().__init__(state, key)
        self.gap = micros_of(gap, "gap")
        if not self.gap:
            raise TopologyError(f"SessionCommitter: gap is {gap!r}: give a length of time above 0")
        if not aggregates:
            raise TopologyError('SessionCommitter needs at least one aggregate, such as {"count": Count()}')
        self.on, self.unit = on, unit
        self.aggregates: dict[str, Aggregate] = {}
        own = {*self.key, _START, _END}
        for name, aggregate in aggregates.items():
            for column, part in aggregate.expanded(name).items():
                if column in own:
                    raise TopologyError(
                        f"SessionCommitter: there is a column {column!r} already: rename aggregate {name!r}"
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
        types |= {_START: pa.int64(), _END: pa.int64()}
        for name, aggregate in self.aggregates.items():
            types[name] = aggregate.output_type(source.fields.type_of(aggregate.field) if aggregate.field else None)
        self._partial = Fields.of(types)
        self._codec()  # types that cannot be held are refused now
        self.state.bind(self._partial.select(list(self.key)), Fields(due_at=int, sessions=str))
        self.state.backend.order_by(_DUE)

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        if self._partial is None:
            return
        types = {name: self._partial.type_of(name) for name in self._partial} | {_START: _MOMENT, _END: _MOMENT}
        declarer.declare(Fields.of(types))
        declarer.declare(Fields.of(types), LATE_STREAM)

    def combiner(self) -> Combiner:
        return Passing(self._make_fold)

    def _make_fold(self) -> Combiner:
        return _SessionFold(self._new_fold(partial_input=False), self.key, self.on, self.unit, self.gap)

    def _new_fold(self, *, partial_input: bool) -> Fold:
        aggregates = {_END: Max(_END), **self.aggregates}
        return Fold(self._component_id, (*self.key, _START), aggregates, self._schema(), partial_input=partial_input)

    def _schema(self) -> pa.Schema:
        if self._partial is None:
            raise TopologyError(f"committer {self._component_id!r} was used outside a topology")
        return self._partial.schema()

    def _codec(self) -> JsonColumns:
        return JsonColumns(Fields.of_schema(self._schema()).select(list(self.aggregates)), "an open session")

    # --- in tasks ---------------------------------------------------------------------------------

    def _take(self, batch: pa.RecordBatch) -> None:
        if self._fold is None:
            self._fold = self._new_fold(partial_input=True)
        self._fold.add(batch)

    def _commit(self, watermarks: Watermarks) -> Iterable[pa.RecordBatch]:
        codec, merge, width = self._codec(), row_merger(self.aggregates), len(self.key)
        came: dict[Key, list[Session]] = {}
        for row in self._folded():
            session = Session(row[width], row[width + 1], row[width + 2 :], is_new=True)
            came.setdefault(row[:width], []).append(session)
        held: dict[Key, Any] = dict(zip(came, self.state.multi_get(list(came)), strict=True))
        held.update(self.state.due(_DUE, NEVER, watermarks.after, self._mine))
        ended: list[tuple[Key, Session]] = []
        late: list[tuple[Key, Session]] = []
        kept: dict[Key, tuple[int, str]] = {}
        for key, value in held.items():
            sessions = (
                [Session(first, last, codec.decode(its)) for first, last, its in json.loads(value[1])] if value else []
            )
            still_open = []
            for each in merged([*sessions, *came.get(key, ())], self.gap, merge):
                if each.is_new and each.last + self.gap <= watermarks.before:
                    late.append((key, each))
                elif each.last + self.gap <= watermarks.after:
                    ended.append((key, each))
                else:
                    still_open.append(each)
            if still_open:
                text = json.dumps([[each.first, each.last, list(codec.encode(each.values))] for each in still_open])
                kept[key] = min(each.last for each in still_open) + self.gap, text
        self.state.multi_put(list(kept), list(kept.values()))
        self.state.delete([key for key, value in held.items() if value and key not in kept])
        for batch in self._batches(late):
            self._collector.emit_arrow(batch, LATE_STREAM)
        return self._batches(ended)

    def _folded(self) -> list[tuple[Any, ...]]:
        folded, self._fold = self._fold.finish() if self._fold is not None else None, None
        if folded is None:
            return []
        table = pa.Table.from_batches([folded])
        return list(zip(*(python_values(table.column(name), name) for name in table.column_names), strict=True))

    def _batches(self, sessions: Sequence[tuple[Key, Session]]) -> list[pa.RecordBatch]:
        if not sessions:
            return []
        schema = self._schema()
        ordered = sorted(sessions, key=lambda each: (each[1].last, repr(each[0])))
        columns: dict[str, pa.Array] = {}
        for place, name in enumerate(self.key):
            columns[name] = pa.array([key[place] for key, _ in ordered], schema.field(name).type)
        columns[_START] = pa.array([each.first for _, each in ordered], pa.int64()).cast(_MOMENT)
        columns[_END] = pa.array([each.last + self.gap for _, each in ordered], pa.int64()).cast(_MOMENT)
        for place, name in enumerate(self.aggregates):
            columns[name] = pa.array([each.values[place] for _, each in ordered], schema.field(name).type)
        return [pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))]


class _SessionFold(Combiner):
    """Finds the sessions among the records of a batch, and folds each."""

    def __init__(self, fold: Fold, key: tuple[str, ...], on: str, unit: str, gap: int) -> None:
        self._fold, self._key, self._on, self._unit, self._gap = fold, key, on, unit, gap

    def add(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        times = pa.array(times_of(batch.column(self._on), self._on, self._unit))
        keys = [canonical_column(pa.chunked_array([batch.column(name)])) for name in self._key]
        names = [f"key {place}" for place in range(len(keys))]
        by_key = pa.table([*keys, times], names=[*names, "time"])
        order = pc.sort_indices(by_key, sort_keys=[(name, "ascending") for name in (*names, "time")])
        by_key = by_key.take(order)
        same = np.ones(batch.num_rows - 1, bool)
        for name in names:
            column = by_key.column(name).combine_chunks()
            same &= pc.fill_null(pc.equal(column[1:], column[:-1]), False).to_numpy(zero_copy_only=False)
        ordered = by_key.column("time").to_numpy()
        rows = batch.take(order).append_column(_START, pa.array(starts_of(ordered, same, self._gap)))
        self._fold.add(rows.append_column(_END, pa.array(ordered)))

    def finish(self) -> pa.RecordBatch | None:
        return self._fold.finish()
