"""The first record of each key within a horizon of event time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from framework.durations import Duration, micros_above_0
from framework.operators.timestamps import check_times, times_of
from framework.operators.watermarks import LATE_STREAM, NEVER
from framework.topology import HIDDEN, Fields, ForwardsRows, Input, OutputFieldsDeclarer
from sinks.backend import Key
from sinks.event_time.event_time_committer_base import WatermarkedCommitter, Watermarks
from sinks.event_time.records_below_watermark import Place
from sinks.keyed_committer import one_stream
from sinks.states import MapState

_UNTIL = "until"


class _Record(NamedTuple):
    """A record of the transaction. ``row``: the numbers of its batch and of its row in it.
    ``until``: of its key, in the state."""

    place: Place
    row: tuple[int, int]
    key: Key
    at: int
    until: int | None


class DeduplicatingCommitter(WatermarkedCommitter, ForwardsRows):
    """Emits the first record of each key, and drops later records whose event time is less than
    ``within`` after it. Its opaque state holds the keys of that horizon, and deletes them when the
    watermark has passed it.

    * ``on``: the field with a record's event time, as in a ``WatermarkCommitter``.
    * ``partition``: the fields that name the partition of a record, as in a ``WatermarkCommitter``.
      Records of one transaction have the order of their partitions, and in each that in which they
      arrived. Without it, tasks that read in parallel decide which of them is the first.

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
        partition: Sequence[str] = (),
    ) -> None:
        super().__init__(state, key)
        self.partition = tuple(partition)
        self.on, self.unit = on, unit
        self.within = micros_above_0(within, "within")
        self._batches: list[pa.RecordBatch] = []

    def _bind_records(self, *records: Input) -> None:
        source = one_stream(self._component_id, records)
        source.require(self._component_id, self._seen((self.on, *self.partition)))
        if self.on in source.fields:
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
        records = self._records(batches)
        seen: dict[Key, int] = {}
        first: list[list[int]] = [[] for _ in batches]
        late: list[list[int]] = [[] for _ in batches]
        for each in sorted(records, key=attrgetter("place")) if self.partition else records:
            until = seen.get(each.key, each.until)
            if until is not None and each.at < until:
                continue  # a repeat
            batch, row = each.row
            if each.at < watermarks.before:
                late[batch].append(row)
            else:
                seen[each.key] = each.at + self.within
                first[batch].append(row)
        for rows, its_first, its_late in zip(batches, first, late, strict=True):
            if its_late:
                self._emit_late(rows.take(pa.array(its_late)))
            if its_first:
                yield rows.select(self._seen(rows.schema.names)).take(pa.array(its_first))
        kept = {key: until for key, until in seen.items() if until > watermarks.after}
        self.state.multi_put(list(kept), list(kept.values()))
        for page in self.state.due(_UNTIL, NEVER, watermarks.after, self._mine):
            self.state.delete([key for key, _ in page if key not in kept])
            self.state.write()

    def _records(self, batches: Sequence[pa.RecordBatch]) -> Iterator[_Record]:
        for number, batch in enumerate(batches):
            keys = self._keys(pa.Table.from_batches([batch]))
            times = times_of(batch.column(self.on), self.on, self.unit).tolist()
            held = self.state.multi_get(keys) if keys else []
            for row, (place, key, at, until) in enumerate(zip(self._places(batch), keys, times, held, strict=True)):
                yield _Record(place, (number, row), key, at, until)

    def _seen(self, names: Iterable[str]) -> list[str]:
        """The fields of emitted rows: without hidden ones that no bolt below takes."""
        return [each for each in names if not each.startswith(HIDDEN) or each in self.forwarded]
