"""A committer with user code, a value and timers per key."""

from __future__ import annotations

import datetime
import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa

from framework.errors import TopologyError
from framework.operators.timestamps import check_times, micros_since_epoch, times_of
from framework.operators.watermarks import LATE_STREAM, NEVER
from framework.topology import HIDDEN, Fields, Input, OutputFieldsDeclarer
from framework.topology.canonical_form import python_values
from sinks.backend import Key, Value
from sinks.event_time.event_time_committer_base import WatermarkedCommitter, Watermarks
from sinks.event_time.records_below_watermark import NOT_DUE, OF_KEY, ONE_ROW, Passed, Place, in_order, numbered
from sinks.external_row_sorter import merged
from sinks.keyed_committer import one_stream
from sinks.states import MapState
from sinks.value_encoding import JsonColumns, whole_number

_DUE = "due_at"
#: The columns that identify a row of a key: its value and timers, or a waiting record, by its
#: transaction and a number.
_PARTS = ("row_kind", "row_txid", "row_number")
_VALUE = Fields(at=int, due_at=int, content=str)
#: The kind of a waiting record. The single row of a key is its entry.
_WAITING = 1
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


class Entry:
    """The stored data of a key in a ``TimerCommitter``. ``value``: any JSON-able value; None for a
    new key. A key with None and without timers is deleted."""

    def __init__(self, key: Key, value: Any, timers: Iterable[int]) -> None:
        self.key, self.value = key, value
        self._timers, self._now = set(timers), NEVER
        self._emitted: list[Mapping[str, Any]] = []

    def set_timer(self, at: datetime.datetime) -> None:
        """Have ``on_timer`` called at a time after that of the present record or timer. Setting a
        timer twice has no further effect."""
        moment = _micros(at)
        if moment <= self._now:
            raise ValueError(f"key {self.key!r}: a timer at {at} is not after {_moment(self._now)}, which is now")
        self._timers.add(moment)

    def clear_timer(self, at: datetime.datetime) -> None:
        self._timers.discard(_micros(at))

    def emit(self, **row: Any) -> None:
        """Emit a row: the declared fields by name. A field that is left out is null."""
        self._emitted.append(row)

    def _taken(self) -> list[Mapping[str, Any]]:
        """The rows that were emitted since the last call."""
        taken, self._emitted = self._emitted, []
        return taken


class TimerCommitter(WatermarkedCommitter):
    """Calls ``on_record`` with the records of a key in the order of their event times, and
    ``on_timer`` at the times that were set. Both happen in the transaction whose watermark passes
    that time, a timer before the records of its time. So the results depend neither on batches nor
    on tasks. Write a subclass::

        class Unpaid(TimerCommitter):
            def on_record(self, entry, record, at):
                if record["kind"] == "order":
                    entry.value = record["cents"]
                    entry.set_timer(at + timedelta(hours=1))
                else:
                    entry.value = None

            def on_timer(self, entry, at):
                if entry.value is not None:
                    entry.emit(order=entry.key[0], cents=entry.value)
                    entry.value = None

        unpaid = Unpaid(OpaqueMapState(backend), key=["order"], on="at", output=Fields(order=str, cents=int))

    * ``output``: the fields of emitted rows.
    * ``on``: the field with a record's event time, as in a ``WatermarkCommitter``.
    * ``partition``: the fields that name the partition of a record, as in a ``WatermarkCommitter``.
      Records of the same time come in the order of their partitions, and in each as they arrived.
      Without it, they come as they arrived, and tasks that read in parallel decide their order.

    ``LATE_STREAM``: records behind the watermark; ``on_record`` does not get them.

    In addition to the records, subscribe it by ``all_grouping`` to a ``WatermarkCommitter``.
    """  # noqa: W505 - the example is not wrapped

    def __init__(
        self,
        state: MapState,
        *,
        key: Sequence[str],
        on: str,
        output: Fields,
        unit: Literal["s", "ms", "us"] = "s",
        partition: Sequence[str] = (),
    ) -> None:
        super().__init__(state, key)
        self.partition = tuple(partition)
        self.on, self.unit, self.output = on, unit, output
        self._own: list[str] = []
        self._codec: JsonColumns | None = None
        self._batches: list[pa.RecordBatch] = []

    @abstractmethod
    def on_record(self, entry: Entry, record: Mapping[str, Any], at: datetime.datetime) -> None:
        """Handle a record by changing ``entry``. ``record``: its fields. ``at``: its event time."""

    @abstractmethod
    def on_timer(self, entry: Entry, at: datetime.datetime) -> None:
        """Handle a timer that the watermark has passed, by changing ``entry``."""

    # --- on the driver ----------------------------------------------------------------------------

    def _bind_records(self, *records: Input) -> None:
        source = one_stream(self._component_id, records)
        source.require(self._component_id, (self.on, *self._seen(self.partition)))
        check_times(self._component_id, self.on, source.fields.type_of(self.on), self.unit)
        untyped = [name for name in source.fields if source.fields.type_of(name) is None]
        if untyped or self.output.schema() is None:
            what = f"field {untyped[0]!r}" if untyped else "a field of output"
            raise TopologyError(f"committer {self._component_id!r}: {what} has no type; declare it")
        self._own = [name for name in source.fields if name not in self.key]
        self._codec = JsonColumns(source.fields.select(self._own), "a waiting record")
        types = {name: source.fields.type_of(name) for name in self.key}
        self.state.bind(Fields.of({**types, **dict.fromkeys(_PARTS, pa.int64())}), _VALUE)
        self.state.backend.order_by(_DUE)

    def state_settings(self) -> Mapping[str, Any]:
        return {"on": self.on, "unit": self.unit, "key": list(self.key)}

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(self.output)
        if self._fields is not None:
            declarer.declare(self._fields, LATE_STREAM)

    # --- in tasks ---------------------------------------------------------------------------------

    def _take(self, batch: pa.RecordBatch) -> None:
        self._check_records(batch, self.on, self.unit)
        self._batches.append(batch)

    def _commit(self, watermarks: Watermarks) -> Iterator[pa.RecordBatch]:
        codec, txid = self._bound_codec(), self._attempt.txid if self._attempt is not None else 0
        puts: dict[Key, Value] = {}
        own = []
        for key, number, at, values in numbered(self._on_time(watermarks.before)):
            place = (*key, _WAITING, txid, number)
            if at < watermarks.after:
                own.append(Passed(place, at, values))
            else:
                puts[place] = at, at, codec.text_of(values)
        self.state.multi_put(list(puts), list(puts.values()))
        entry: Entry | None = None
        for page in merged(self._due(watermarks.after), own, lambda each: in_order(each.at, each.place)):
            out: list[Mapping[str, Any]] = []
            keys = list(dict.fromkeys(each.key for each in page))
            held = dict(zip(keys, self.state.multi_get([(*key, *ONE_ROW) for key in keys]), strict=True))
            for each in page:
                if entry is None or entry.key != each.key:
                    out += self._end(entry, watermarks.after)
                    value = held[each.key]
                    place = (*each.key, *ONE_ROW)
                    entry = Entry(each.key, *(self._held(place, value) if value is not None else (None, [])))
                if each.values is not None:
                    self._pass(entry, each.at, each.values)
            self.state.delete([each.place for each in page if each.values is not None and each.place[-2] != txid])
            out += entry._taken() if entry is not None else ()
            yield from self._rows(out)
            self.state.write()
        yield from self._rows(self._end(entry, watermarks.after))

    def _due(self, upto: int) -> Iterator[list[Passed]]:
        """Pages of the rows that the watermark has passed: key by key, and by time. A record of the
        time of the watermark waits for the timers of that time."""
        for page in self.state.due(_DUE, NEVER, upto, self._mine, in_order):
            yield [
                Passed(place, value[0], self._record(place, value) if place[-3] == _WAITING else None)
                for place, value in page
                if place[-3] == OF_KEY or value[0] < upto
            ]

    def _held(self, place: Key, value: Value) -> tuple[Any, Sequence[int]]:
        """The value of a key and its timers."""

        def restore(its: Value) -> tuple[Any, Sequence[int]]:
            held, timers = json.loads(its[2])
            return held, list(map(whole_number, timers))

        return self.state.restored(place, restore, value)

    def _record(self, place: Key, value: Value) -> Value:
        values_of = self._bound_codec().values_of
        return self.state.restored(place, lambda its: values_of(its[2]), value)

    def _pass(self, entry: Entry, at: int, values: Value) -> None:
        """Call the two methods for a record that the watermark has passed, and for the timers
        before it."""
        self._fire(entry, at)
        entry._now = at
        record = dict(zip((*self.key, *self._own), (*entry.key, *values), strict=True))
        seen = {name: each for name, each in record.items() if not name.startswith(HIDDEN)}
        self.on_record(entry, seen, _moment(at))

    def _end(self, entry: Entry | None, watermark: int) -> Sequence[Mapping[str, Any]]:
        """After all records of a key: call its remaining due timers, and write its entry. Returns
        the emitted rows."""
        if entry is None:
            return ()
        self._fire(entry, watermark)
        place = (*entry.key, *ONE_ROW)
        if entry.value is not None or entry._timers:
            left = sorted(entry._timers)
            content = json.dumps([entry.value, left])
            self.state.multi_put([place], [(0, left[0] if left else NOT_DUE, content)])
        else:
            self.state.delete([place])
        return entry._taken()

    def _rows(self, emitted: Sequence[Mapping[str, Any]]) -> Iterator[pa.RecordBatch]:
        unknown = next((name for row in emitted for name in row if name not in self.output.names), None)
        if unknown is not None:
            raise TopologyError(
                f"committer {self._component_id!r} emits a field {unknown!r}, which output= does not declare (there are: "
                f"{', '.join(self.output.names)})"
            )
        if emitted:
            yield pa.RecordBatch.from_pylist([dict(row) for row in emitted], self.output.schema())

    def _fire(self, entry: Entry, upto: int) -> None:
        while (at := min(entry._timers, default=NOT_DUE)) <= upto:
            entry._timers.remove(at)
            entry._now = at
            self.on_timer(entry, _moment(at))

    def _on_time(self, watermark: int) -> Iterable[tuple[Key, int, Value, Place]]:
        """The arrived records, without the late ones, which are sent to their stream."""
        batches, self._batches = self._batches, []
        for batch in batches:
            table = pa.Table.from_batches([batch])
            times = times_of(batch.column(self.on), self.on, self.unit).tolist()
            own = zip(*(python_values(table.column(name), name) for name in self._own), strict=True)
            late = []
            records = zip(self._keys(table), times, own, self._places(batch), strict=True)
            for number, (key, at, values, place) in enumerate(records):
                if at < watermark:
                    late.append(number)
                else:
                    yield key, at, values, place
            if late:
                self._emit_late(batch.take(pa.array(late)))

    def _bound_codec(self) -> JsonColumns:
        if self._codec is None:
            raise TopologyError(f"committer {self._component_id!r} was used outside a topology")
        return self._codec


def _micros(moment: datetime.datetime) -> int:
    if moment.tzinfo is None:
        raise ValueError(f"{moment} has no zone, so it names no moment: a timer needs a datetime with one")
    return micros_since_epoch(moment)


def _moment(micros: int) -> datetime.datetime:
    return _EPOCH + datetime.timedelta(microseconds=micros)
