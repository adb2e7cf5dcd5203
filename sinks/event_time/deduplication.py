"""The first record of each key within a horizon of event time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal, NamedTuple

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


class _Arrived(NamedTuple):
    """A record, as row ``row`` of batch ``batch``. ``until``: how long its key was known before the
    transaction."""

    batch: int
    row: int
    key: Key
    at: int
    until: int | None


class DeduplicatingCommitter(WatermarkedCommitter):
    """Emits the first record of each key, and drops later records whose event time is less than
    ``within`` after it. Its opaque state holds the keys of that horizon, and deletes them when the
    watermark has passed it.

    ``on``: the field with a record's event time, as in a ``WatermarkCommitter``. The records of a
    transaction are taken in the order of their times, so the first one does not depend on tasks
    that read in parallel.

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
        first: list[list[int]] = [[] for _ in batches]
        late: list[list[int]] = [[] for _ in batches]
        for came in sorted(self._arrived(batches), key=attrgetter("at")):
            until = seen.get(came.key, came.until)
            if until is not None and came.at < until:
                continue  # a repeat
            if came.at < watermarks.before:
                late[came.batch].append(came.row)
            else:
                seen[came.key] = came.at + self.within
                first[came.batch].append(came.row)
        for batch, late_rows, first_rows in zip(batches, late, first, strict=True):
            if late_rows:
                self._emit_late(batch.take(pa.array(sorted(late_rows))))
            if first_rows:
                yield batch.take(pa.array(sorted(first_rows)))
        kept = {key: until for key, until in seen.items() if until > watermarks.after}
        self.state.multi_put(list(kept), list(kept.values()))
        for page in self.state.due(_UNTIL, NEVER, watermarks.after, self._mine):
            self.state.delete([key for key, _ in page if key not in kept])
            self.state.write()

    def _arrived(self, batches: Sequence[pa.RecordBatch]) -> Iterator[_Arrived]:
        """The records in the order of arrival."""
        for number, batch in enumerate(batches):
            keys = self._keys(pa.Table.from_batches([batch]))
            times = times_of(batch.column(self.on), self.on, self.unit).tolist()
            held = self.state.multi_get(keys) if keys else []
            for row, (key, at, until) in enumerate(zip(keys, times, held, strict=True)):
                yield _Arrived(number, row, key, at, until)
