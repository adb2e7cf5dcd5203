"""Aggregates per key and session; each session is sent once, when it has ended."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from framework.durations import Duration, micros_above_0
from framework.operators.sessions import Session, merged, starts_of
from framework.operators.timestamps import times_of
from framework.operators.watermarks import LATE_STREAM, NEVER
from framework.topology import Combiner, Fields, OutputFieldsDeclarer
from framework.topology.canonical import canonical_column
from sinks.aggregates import Aggregate, Max, row_merger
from sinks.backend import Key
from sinks.committer import Fold
from sinks.event_time.aggregation import AggregatingCommitter, Closed
from sinks.event_time.committer import Watermarks
from sinks.plain_values import JsonColumns
from sinks.states import MapState

_START, _END, _DUE = "session_start", "session_end", "due_at"


class SessionCommitter(AggregatingCommitter):
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

    _bounds = (_START, _END)
    _part = _START
    _times: ClassVar[Mapping[str, Aggregate]] = {_END: Max(_END)}  # until it is sent, the time of its last record

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
        super().__init__(state, on=on, key=key, aggregates=aggregates, unit=unit)
        self.gap = micros_above_0(gap, "gap")

    # --- on the driver ----------------------------------------------------------------------------

    def _bind_state(self, partial: Fields) -> None:
        self._codec()  # types that cannot be held are refused now
        self.state.bind(partial.select(list(self.key)), Fields(due_at=int, sessions=str))
        self.state.backend.order_by(_DUE)

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        types = self._output_types()
        if types:
            declarer.declare(Fields.of(types))
            declarer.declare(Fields.of(types), LATE_STREAM)

    def _folding(self, fold: Fold) -> Combiner:
        return _SessionFold(fold, self.key, self.on, self.unit, self.gap)

    def _codec(self) -> JsonColumns:
        return JsonColumns(Fields.of_schema(self._schema()).select(list(self.aggregates)), "an open session")

    # --- in tasks ---------------------------------------------------------------------------------

    def _commit(self, watermarks: Watermarks) -> Iterable[pa.RecordBatch]:
        codec, merge, width = self._codec(), row_merger(self.aggregates), len(self.key)
        came: dict[Key, list[Session]] = {}
        for row in self._folded():
            session = Session(row[width], row[width + 1], row[width + 2 :], is_new=True)
            came.setdefault(row[:width], []).append(session)
        held: dict[Key, Any] = dict(zip(came, self.state.multi_get(list(came)), strict=True))
        held.update(self.state.due(_DUE, NEVER, watermarks.after, self._mine))
        ended: list[Closed] = []
        late: list[Closed] = []
        kept: dict[Key, tuple[int, str]] = {}
        for key, value in held.items():
            sessions = (
                [Session(first, last, codec.decode(its)) for first, last, its in json.loads(value[1])] if value else []
            )
            still_open = []
            for each in merged([*sessions, *came.get(key, ())], self.gap, merge):
                closed = Closed(key, each.first, each.last + self.gap, each.values)
                if each.is_new and closed.end <= watermarks.before:
                    late.append(closed)
                elif closed.end <= watermarks.after:
                    ended.append(closed)
                else:
                    still_open.append(each)
            if still_open:
                text = json.dumps([[each.first, each.last, list(codec.encode(each.values))] for each in still_open])
                kept[key] = min(each.last for each in still_open) + self.gap, text
        self.state.multi_put(list(kept), list(kept.values()))
        self.state.delete([key for key, value in held.items() if value and key not in kept])
        self._emit(LATE_STREAM, late)
        batch = self._batch(ended)
        return [batch] if batch is not None else []


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
