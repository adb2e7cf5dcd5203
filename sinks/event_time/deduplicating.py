"""The first record of each key within a horizon of event time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import pyarrow as pa

from framework.durations import Duration, micros_of
from framework.errors import BadRecordError, TopologyError
from framework.operators.event_clock import NEVER
from framework.operators.event_columns import check_times, times_of
from framework.topology import Fields, Input, OutputFieldsDeclarer
from framework.topology.canonical import python_values
from sinks.event_time.by_watermark import WatermarkedCommitter, Watermarks
from sinks.event_time.windowed import LATE_STREAM
from sinks.states import MapState

_UNTIL = "until"


class DeduplicatingCommitter(WatermarkedCommitter):
    """Emits the first record of each key, and drops the later ones whose event time is less than
    ``within`` after it. Its opaque state holds the keys of that horizon, and deletes them when the
    watermark has passed it.

    ``on``: the field with a record's event time, as of a ``WatermarkCommitter``.

    Default stream: the first records, as they came. ``LATE_STREAM``: records behind the watermark
    whose key is not held, or not any more; they are not on the default stream.

    Beside the records, subscribe it by ``all_grouping`` to a ``WatermarkCommitter``.
    """

    def __init__(
        self,
        state: MapState,
        *,
        key: Sequence[str],
        on: str,
        within: Duration,
        unit: Literal["s", "ms", "us"] = "s",
    ) -> None:
        super().__init__(state, key)
        self.on, self.unit = on, unit
        self.within = micros_of(within, "within")
        if not self.within:
            raise TopologyError(f"DeduplicatingCommitter: within is {within!r}: give a length of time above 0")
        self._batches: list[pa.RecordBatch] = []

    def _bind_records(self, *records: Input) -> None:
        (source,) = records
        source.require(self._component_id, (self.on,))
        check_times(self._component_id, self.on, source.fields.type_of(self.on), self.unit)
        self.state.bind(source.fields.select(self.key), Fields(until=int))
        self.state.backend.order_by(_UNTIL)

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        if self._fields is not None:
            declarer.declare(self._fields)
            declarer.declare(self._fields, LATE_STREAM)

    def _take(self, batch: pa.RecordBatch) -> None:
        self._batches.append(batch)

    def _commit(self, watermarks: Watermarks) -> Iterable[pa.RecordBatch]:
        gone = [key for key, _ in self.state.due(_UNTIL, NEVER, watermarks.after, self._mine)]
        batches, self._batches = self._batches, []
        seen: dict[tuple[object, ...], int] = {}
        out: list[pa.RecordBatch] = []
        for batch in batches:
            keys = self._keys(batch)
            untils = (times_of(batch.column(self.on), self.on, self.unit) + self.within).tolist()
            held = self.state.multi_get(keys) if keys else []
            first, late = [], []
            for number, (key, until, known) in enumerate(zip(keys, untils, held, strict=True)):
                if (seen.get(key, known) or until - self.within) > until - self.within:
                    continue  # a repeat
                if until - self.within < watermarks.before:
                    late.append(number)
                    continue
                seen[key] = until
                first.append(number)
            if late:
                self._collector.emit_arrow(batch.take(pa.array(late)), LATE_STREAM)
            if first:
                out.append(batch.take(pa.array(first)))
        kept = dict.fromkeys(key for key, until in seen.items() if until > watermarks.after)
        self.state.multi_put(list(kept), [seen[key] for key in kept])
        self.state.delete([key for key in gone if key not in kept])
        return out

    def _keys(self, batch: pa.RecordBatch) -> list[tuple[object, ...]]:
        columns = [batch.column(name) for name in self.key]
        for name, column in zip(self.key, columns, strict=True):
            if column.null_count:
                raise BadRecordError(
                    f"component {self._component_id!r}: key field {name!r} is null; a key cannot be null, so filter such "
                    "tuples out upstream or give them a value"
                )
        values = [python_values(pa.chunked_array([each]), name) for name, each in zip(self.key, columns, strict=True)]
        return list(zip(*values, strict=True))
