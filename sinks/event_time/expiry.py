"""Aggregates per key that are deleted when the key has had no record for a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from framework.durations import Duration, micros_above_0
from framework.errors import BadRecordError, TopologyError
from framework.operators.timestamps import check_times, times_of
from framework.operators.watermarks import EXPIRED_STREAM, LATE_STREAM, NEVER
from framework.topology import Fields, Input, OutputFieldsDeclarer
from framework.topology.refused_row_bisection import RefusedTogether, accepted
from sinks.aggregates import Aggregate, aggregate_settings, expanded_aggregates, input_fields, output_types, row_folder
from sinks.backend import Key, Value
from sinks.event_time.event_time_committer_base import WatermarkedCommitter, Watermarks
from sinks.key_hash_parts import halves_by_key
from sinks.keyed_committer import one_stream
from sinks.pane_aggregation import PaneFolds
from sinks.states import MapState
from sinks.value_encoding import first_number

_EXPIRES = "expires_at"
#: The most rows of a key that a try lets end one after the other.
_ENDS_MAX = 100


class _Changed(NamedTuple):
    """The rows of the keys with records in a transaction. ``live``: the rows that stay.
    ``expired``: the rows that ended, with key and end in front."""

    live: Mapping[Key, Value]
    expired: Sequence[Value]
    keys: frozenset[Key]


class ExpiringCommitter(WatermarkedCommitter):
    """Keeps aggregates per key, in one row. Deletes the row when its key has had no record for
    ``ttl`` of event time, in the transaction whose watermark reaches the newest time of its records
    plus ``ttl``.

    * ``key``, ``aggregates``: as in a ``StateCommitter``.
    * ``on``: the field with a record's event time, as in a ``WatermarkCommitter``.

    The records of a transaction count before its watermark. A record with a time before the end of
    its row prolongs the row. A record at or after the end starts another row if the watermark
    reaches the end in that transaction; otherwise it also prolongs the row. The table contains the
    end as ``expires_at``, in microseconds since 1970.

    Default stream: each changed key that has a row, with its new values. ``EXPIRED_STREAM``: each
    row that expires, once, with ``expires_at``. ``LATE_STREAM``: the records that are ``ttl`` or
    more behind the watermark, with the fields that this committer uses; they change nothing. Other
    records behind the watermark count.

    In addition to the records, subscribe it by ``all_grouping`` to a ``WatermarkCommitter``.
    """

    due_streams = frozenset({EXPIRED_STREAM})

    def __init__(
        self,
        state: MapState,
        *,
        key: Sequence[str],
        aggregates: Mapping[str, Aggregate],
        on: str,
        ttl: Duration,
        unit: Literal["s", "ms", "us"] = "s",
    ) -> None:
        super().__init__(state, key)
        self.on, self.unit = on, unit
        self.ttl = micros_above_0(ttl, "ttl")
        if _EXPIRES in self.key:
            raise TopologyError(f"ExpiringCommitter: the key has a field {_EXPIRES!r}, as the state has: rename it")
        self.aggregates = expanded_aggregates(type(self).__name__, aggregates, {*self.key, _EXPIRES})
        self._output: Fields | None = None
        self._folds: PaneFolds | None = None
        self._batches: list[pa.RecordBatch] = []

    # --- on the driver ----------------------------------------------------------------------------

    def _bind_records(self, *records: Input) -> None:
        source = one_stream(self._component_id, records, self._needed())
        check_times(self._component_id, self.on, source.fields.type_of(self.on), self.unit)
        types = {name: source.fields.type_of(name) for name in self.key}
        totals = output_types(self.aggregates, source.fields)
        self._output = Fields.of({**types, **totals})
        self._folds = PaneFolds(self._component_id, self.key, self.aggregates, self._output)
        self.state.bind(Fields.of(types), Fields.of({_EXPIRES: pa.int64(), **totals}))
        self.state.backend.order_by(_EXPIRES)

    def _needed(self) -> list[str]:
        """The fields of a record."""
        return list(dict.fromkeys([*self.key, self.on, *input_fields(self.aggregates)]))

    def state_settings(self) -> Mapping[str, Any]:
        own = {"on": self.on, "unit": self.unit, "key": list(self.key), "ttl": self.ttl}
        return {**own, **aggregate_settings(self.aggregates)}

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        if self._output is not None and self._fields is not None:
            declarer.declare(self._output)
            declarer.declare(self._expired_fields(self._output), EXPIRED_STREAM)
            declarer.declare(self._fields.select(self._needed()), LATE_STREAM)

    def _expired_fields(self, output: Fields) -> Fields:
        types = {name: output.type_of(name) for name in output.names}
        own = {name: types.pop(name) for name in self.key}
        return Fields.of({**own, _EXPIRES: pa.timestamp("us", "UTC"), **types})

    # --- in tasks ---------------------------------------------------------------------------------

    def may_try_writes(self) -> bool:
        return type(self) is ExpiringCommitter

    def _try(self, rows: pa.Table, watermark: int, folds: PaneFolds) -> None:
        """Raise ``BadRecordError`` for records of a key that are refused whatever the watermark
        after the transaction is, which depends on all its records. ``watermark``: before it."""

        def take(part: pa.Table) -> None:
            try:
                self._put(self._changed(part, watermark, folds))
            except BadRecordError:
                if halves_by_key(part, self.key) is not None or not self._tries_ends(part, watermark, folds):
                    raise

        def refuse(error: BadRecordError) -> None:
            raise error

        for _ in accepted(rows, take, refuse, partial(halves_by_key, key=self.key)):
            pass

    def _tries_ends(self, rows: pa.Table, watermark: int, folds: PaneFolds) -> bool:
        """Whether the records of one key are accepted if some of its rows end. ``watermark``: after
        which they may end."""
        times = times_of(rows.column(self.on).combine_chunks(), self.on, self.unit)
        key = self._keys(rows.slice(0, 1))[0]
        (value,) = self.state.multi_get([key])
        end = self.state.restored(key, first_number, value) if value is not None else int(times.min())
        passed = set()
        for at in sorted(times.tolist()):
            if watermark < end <= at:
                passed.add(end)
            end = max(end, at + self.ttl)
        if len(passed) > _ENDS_MAX:
            return True  # the commit decides
        for each in sorted(passed, reverse=True):
            try:
                self._put(self._changed(rows, each, folds))
            except RefusedTogether:
                raise
            except BadRecordError:
                continue
            return True
        return False

    def _take(self, batch: pa.RecordBatch) -> None:
        self._check_records(batch, self.on, self.unit)
        self._batches.append(batch)

    def _commit(self, watermarks: Watermarks) -> Iterator[pa.RecordBatch]:
        if self._folds is None or self._output is None:
            raise TopologyError(f"committer {self._component_id!r} was used outside a topology")
        folds, output, expired = self._folds, self._output, self._expired_fields(self._output)
        rows = self._on_time(watermarks.before)
        if self.state.is_tried:
            if rows is not None:
                self._try(rows, watermarks.before, folds)
            return
        changed = self._changed(rows, watermarks.after, folds)
        yield from folds.sent(((*key, *value[1:]) for key, value in changed.live.items()), output, self._on_refused)
        self._expire(changed.expired, folds, expired)
        self._put(changed)
        for page in self.state.due(_EXPIRES, NEVER, watermarks.after, self._mine):
            self._expire([(*key, *value) for key, value in page if key not in changed.keys], folds, expired)
            self.state.delete([key for key, _ in page if key not in changed.live])
            self.state.write()

    def _put(self, changed: _Changed) -> None:
        self.state.multi_put(list(changed.live), list(changed.live.values()))

    def _expire(self, rows: Iterable[Value], folds: PaneFolds, fields: Fields) -> None:
        for batch in folds.sent(rows, fields, self._on_refused):
            self._collector.emit_arrow(batch, EXPIRED_STREAM)

    def _on_time(self, watermark: int) -> pa.Table | None:
        """The arrived records, without the late ones, which are sent to their stream."""
        batches, self._batches = self._batches, []
        kept = []
        for batch in (each.select(self._needed()) for each in batches):
            late = pa.array(times_of(batch.column(self.on), self.on, self.unit) <= watermark - self.ttl)
            if late.true_count:
                self._emit_late(batch.filter(late))
                batch = batch.filter(pc.invert(late))
            if batch.num_rows:
                kept.append(batch)
        return pa.Table.from_batches(kept) if kept else None

    def _changed(self, rows: pa.Table | None, watermark: int, folds: PaneFolds) -> _Changed:
        if rows is None:
            return _Changed({}, [], frozenset())
        times = times_of(rows.column(self.on).combine_chunks(), self.on, self.unit).tolist()
        places: dict[Key, list[int]] = {}
        for place, key in enumerate(self._keys(rows)):
            places.setdefault(key, []).append(place)
        held = dict(zip(places, self.state.multi_get(list(places)), strict=True))
        parts = [0] * len(times)
        ends: dict[Key, list[int]] = {}
        for key, its in places.items():
            value = held[key]
            ends[key] = [self.state.restored(key, first_number, value)] if value is not None else []
            for place in sorted(its, key=times.__getitem__):
                parts[place] = self._extend(ends[key], times[place], watermark)
        folded = folds.fold(rows, parts)
        together = row_folder(self.aggregates)
        for key, value in held.items():
            if value is not None:
                new = folded.get((*key, 0))
                folded[(*key, 0)] = together((value[1:], new)) if new is not None else value[1:]
        folds.check_totals(list(folded.values()))
        live: dict[Key, Value] = {}
        expired: list[Value] = []
        for key, its in ends.items():
            for part, end in enumerate(its):
                if end > watermark:
                    live[key] = (end, *folded[(*key, part)])
                else:
                    expired.append((*key, end, *folded[(*key, part)]))
        return _Changed(live, expired, frozenset(ends))

    def _extend(self, ends: list[int], at: int, watermark: int) -> int:
        """Add a record to the last row of a key, or begin a row. Returns the number of the row.
        ``ends``: the ends of the rows."""
        if not ends or ends[-1] <= min(at, watermark):
            ends.append(at + self.ttl)
        else:
            ends[-1] = max(ends[-1], at + self.ttl)
        return len(ends) - 1
