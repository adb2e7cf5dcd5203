"""A committer with user code, a value and timers per key."""

from __future__ import annotations

import datetime
import json
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from framework.errors import TopologyError
from framework.operators.timestamps import check_times, micros_since_epoch, times_of
from framework.operators.watermarks import LATE_STREAM, NEVER
from framework.topology import Fields, Input, OutputFieldsDeclarer
from framework.topology.canonical_form import python_values
from sinks.backend import Key, Value
from sinks.event_time.committer import WatermarkedCommitter, Watermarks
from sinks.states import MapState
from sinks.value_encoding import JsonColumns

_DUE = "due_at"
#: The columns that identify a row of a key: its value and timers, or a waiting record, by its
#: transaction and a number.
_PARTS = ("row_kind", "row_txid", "row_number")
_VALUE = Fields(at=int, due_at=int, content=str)
_ENTRY, _WAITING = 0, 1
#: The due time of a row that is never due.
_NOT_DUE = (1 << 62) - 1
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


class _Waiting(NamedTuple):
    at: int
    came: tuple[int, int]
    values: Value


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
        """Emit a row: the declared fields by name."""
        self._emitted.append(row)


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
    ) -> None:
        super().__init__(state, key)
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
        (source,) = records
        source.require(self._component_id, (self.on,))
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
        self._batches.append(batch)

    def _commit(self, watermarks: Watermarks) -> Iterable[pa.RecordBatch]:
        codec, txid = self._bound_codec(), self._attempt.txid if self._attempt is not None else 0
        records: dict[Key, list[_Waiting]] = defaultdict(list)
        touched: dict[Key, None] = {}
        gone: list[Key] = []
        for place, (at, _, content) in self.state.due(_DUE, NEVER, watermarks.after, self._mine):
            key, kind = place[: -len(_PARTS)], place[-3]
            if kind == _ENTRY:
                touched[key] = None
            elif at < watermarks.after:
                gone.append(place)
                records[key].append(_Waiting(at, (place[-2], place[-1]), codec.decode(json.loads(content))))
        puts: dict[Key, Value] = {}
        for number, (key, at, values) in enumerate(self._on_time(watermarks.before)):
            if at < watermarks.after:
                records[key].append(_Waiting(at, (txid, number), values))
            else:
                content = json.dumps(list(codec.encode(values)))
                puts[(*key, _WAITING, txid, number)] = at, at, content
        keys = list(touched | dict.fromkeys(records))
        out: list[Mapping[str, Any]] = []
        for key, held in zip(keys, self.state.multi_get([(*key, _ENTRY, 0, 0) for key in keys]), strict=True):
            value, timers = json.loads(held[2]) if held is not None else (None, [])
            entry = Entry(key, value, timers)
            self._let_pass(entry, sorted(records.get(key, ())), watermarks.after)
            out += entry._emitted
            place = (*key, _ENTRY, 0, 0)
            if entry.value is not None or entry._timers:
                left = sorted(entry._timers)
                puts[place] = 0, left[0] if left else _NOT_DUE, json.dumps([entry.value, left])
            elif held is not None:
                gone.append(place)
        self.state.multi_put(list(puts), list(puts.values()))
        self.state.delete(gone)
        return [pa.RecordBatch.from_pylist([dict(row) for row in out], self.output.schema())] if out else []

    def _let_pass(self, entry: Entry, records: Sequence[_Waiting], watermark: int) -> None:
        """Call the two methods for records and timers that the watermark has passed, in the order
        of time.
        """
        for at, _, values in records:
            self._fire(entry, at)
            entry._now = at
            names = (*self.key, *self._own)
            self.on_record(entry, dict(zip(names, (*entry.key, *values), strict=True)), _moment(at))
        self._fire(entry, watermark)

    def _fire(self, entry: Entry, upto: int) -> None:
        while (at := min(entry._timers, default=_NOT_DUE)) <= upto:
            entry._timers.remove(at)
            entry._now = at
            self.on_timer(entry, _moment(at))

    def _on_time(self, watermark: int) -> Iterable[tuple[Key, int, Value]]:
        """The arrived records, without the late ones, which are sent to their stream."""
        batches, self._batches = self._batches, []
        for batch in batches:
            table = pa.Table.from_batches([batch])
            times = times_of(batch.column(self.on), self.on, self.unit).tolist()
            own = zip(*(python_values(table.column(name), name) for name in self._own), strict=True)
            late = []
            for place, (key, at, values) in enumerate(zip(self._keys(table), times, own, strict=True)):
                if at < watermark:
                    late.append(place)
                else:
                    yield key, at, values
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
