"""The first record of each key within a horizon of event time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa

from framework.durations import Duration, micros_above_0
from framework.operators.timestamps import check_times, times_of
from framework.operators.watermarks import LATE_STREAM, NEVER
from framework.topology import Fields, Input, OutputFieldsDeclarer
from sinks.backend import Key
from sinks.event_time.event_time_committer_base import WatermarkedCommitter, Watermarks
from sinks.keyed_committer import one_stream
from sinks.states import MapState

_UNTIL = "until"


class DeduplicatingCommitter(WatermarkedCommitter):
    """Emits the first record of each key, and drops later records whose event time is less than
    ``within`` after it. Its opaque state holds the keys of that horizon, and deletes them when the
    watermark has passed it.

    ``on``: the field with a record's event time, as in a ``WatermarkCommitter``.

    Default stream: the first records, unchanged. ``LATE_STREAM``: records behind the watermark
    whose key is not, or no longer, in the state; they are not on the default stream.

    In addition to the records, subscribe it by ``all_grouping`` to a ``WatermarkCommitter``.
    """

    due_streams = frozenset()  # a row is a record of its transaction

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
        self.within = micros_above_0(within, "within")
        self._batches: list[pa.RecordBatch] = []

    def _bind_records(self, *records: Input) -> None:
        source = one_stream(self._component_id, records)
        source.require(self._component_id, (self.on,))
        check_times(self._component_id, self.on, source.fields.type_of(self.on), self.unit)
        self.state.bind(source.fields.select(self.key), Fields(until=int))
        self.state.backend.order_by(_UNTIL)

    def state_settings(self) -> Mapping[str, Any]:
        return {"on": self.on, "unit": self.unit, "key": list(self.key), "within": self.within}

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        if self._fields is not None:
            declarer.declare(self._fields)
            declarer.declare(self._fields, LATE_STREAM)

    def _take(self, batch: pa.RecordBatch) -> None:
        self._check_records(batch, self.on, self.unit)
        self._batches.append(batch)

    def _commit(self, watermarks: Watermarks) -> Iterator[pa.RecordBatch]:
        batches, self._batches = self._batches, []
        seen: dict[Key, int] = {}
        for batch in batches:
            keys = self._keys(pa.Table.from_batches([batch]))
            times = times_of(batch.column(self.on), self.on, self.unit).tolist()
            held = self.state.multi_get(keys) if keys else []
            first, late = [], []
            for number, (key, at, known) in enumerate(zip(keys, times, held, strict=True)):
                until = seen.get(key, known)
                if until is not None and at < until:
                    continue  # a repeat
                if at < watermarks.before:
                    late.append(number)
                else:
                    seen[key] = at + self.within
                    first.append(number)
            if late:
                self._emit_late(batch.take(pa.array(late)))
            if first:
                yield batch.take(pa.array(first))
        kept = {key: until for key, until in seen.items() if until > watermarks.after}
        self.state.multi_put(list(kept), list(kept.values()))
        for page in self.state.due(_UNTIL, NEVER, watermarks.after, self._mine):
            self.state.delete([key for key, _ in page if key not in kept])
            self.state.write()
