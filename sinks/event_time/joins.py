"""Joins of two streams by key, within a bound of event time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa

from framework.durations import Duration, micros_of
from framework.errors import TopologyError
from framework.operators.joins import pairs
from framework.operators.timestamps import check_times, times_of
from framework.topology import Fields, Input, OutputFieldsDeclarer
from framework.topology.canonical import python_values
from sinks.backend import Key, Value
from sinks.event_time.committer import WatermarkedCommitter, Watermarks
from sinks.event_time.waiting import DUE, VALUE_FIELDS, Sides, Waiting, WaitingRows, key_fields
from sinks.plain_values import JsonColumns
from sinks.states import MapState

#: Records behind the watermark, of each side.
LATE_LEFT_STREAM = "late_left"
LATE_RIGHT_STREAM = "late_right"


class _Side:
    """One of the two streams. ``own``: its fields without the key."""

    def __init__(self, source: Input, key: tuple[str, ...], on: str) -> None:
        self.fields, self.on = source.fields, on
        self.own = [name for name in source.fields if name not in key]
        self.codec = JsonColumns(source.fields.select(self.own), "a waiting record")


class JoiningCommitter(WatermarkedCommitter):
    """Joins the records of two streams that have the same key, and of which the event times are no
    further apart than ``within``. Its opaque state holds the records that may still find a partner,
    a few in a row: a record costs the same whether its key has one record or a million, and so does
    each pair.

    ``left`` and ``right``: the event time fields of the two streams, which tell them apart: each
    stream has its own and not the other's. Both have the fields of ``key``, with the same types,
    and share no other field. ``how``: "inner", "left", "right" or "outer".

    Default stream: the key, the other fields of the left record, those of the right one. A pair is
    sent in the transaction that reads the second of the two. A record of an outer side that found
    no partner is sent once, with nulls, when the watermark has passed the bound.
    ``LATE_LEFT_STREAM`` and ``LATE_RIGHT_STREAM``: records behind the watermark, whose partners may
    be gone.

    Beside the two streams, subscribe it by ``all_grouping`` to a ``WatermarkCommitter`` that is
    subscribed to both.
    """

    _streams = 2

    def __init__(
        self,
        state: MapState,
        *,
        key: Sequence[str],
        left: str,
        right: str,
        within: Duration,
        how: Literal["inner", "left", "right", "outer"] = "inner",
        unit: Literal["s", "ms", "us"] = "s",
    ) -> None:
        super().__init__(state, key)
        if how not in ("inner", "left", "right", "outer"):
            raise TopologyError(f"JoiningCommitter: how is {how!r}: give 'inner', 'left', 'right' or 'outer'")
        self.within, self.unit = micros_of(within, "within"), unit
        self._on, self.how = (left, right), how
        self._outer = (how in ("left", "outer"), how in ("right", "outer"))
        self._sides: tuple[_Side, _Side] | None = None
        self._came: tuple[list[pa.RecordBatch], list[pa.RecordBatch]] = ([], [])

    # --- on the driver ----------------------------------------------------------------------------

    def _bind_records(self, *records: Input) -> None:
        component_id = self._component_id
        found = []
        for on, other in (self._on, self._on[::-1]):
            its = [each for each in records if on in each.fields and other not in each.fields]
            if len(its) != 1:
                raise TopologyError(
                    f"committer {component_id!r}: one of its streams must have the field {on!r} and not {other!r}; rename "
                    "fields upstream"
                )
            check_times(component_id, on, its[0].fields.type_of(on), self.unit)
            found.append(its[0])
        left, right = found
        for name in self.key:
            kinds = left.fields.type_of(name), right.fields.type_of(name)
            if kinds[0] != kinds[1]:
                raise TopologyError(
                    f"committer {component_id!r}: key field {name!r} is {kinds[0]} on the left and {kinds[1]} on the right; "
                    "make them equal"
                )
        if left.grouping != right.grouping:
            raise TopologyError(f"committer {component_id!r}: group both streams by the same fields, in the same order")
        shared = (set(left.fields) & set(right.fields)) - set(self.key)
        untyped = [name for each in found for name in each.fields if each.fields.type_of(name) is None]
        if shared or untyped:
            raise TopologyError(
                f"committer {component_id!r}: both streams have a field {min(shared)!r}; rename one of them"
                if shared
                else f"committer {component_id!r}: field {untyped[0]!r} has no type; declare it"
            )
        self._sides = _Side(left, self.key, self._on[0]), _Side(right, self.key, self._on[1])
        self.state.bind(key_fields(left.fields.select(list(self.key))), VALUE_FIELDS)
        self.state.backend.order_by(DUE)

    def state_settings(self) -> Mapping[str, Any]:
        left, right = self._on
        how = {"left": left, "right": right, "within": self.within, "how": self.how}
        return {**how, "unit": self.unit, "key": list(self.key)}

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        if self._sides is None:
            return
        declarer.declare(Fields.of_schema(self._output()))
        for side, stream in zip(self._sides, (LATE_LEFT_STREAM, LATE_RIGHT_STREAM), strict=True):
            declarer.declare(side.fields, stream)

    def _output(self) -> pa.Schema:
        left, right = self._bound()
        columns = [(name, left.fields.type_of(name)) for name in (*self.key, *left.own)]
        return pa.schema([*columns, *((name, right.fields.type_of(name)) for name in right.own)])

    def _bound(self) -> tuple[_Side, _Side]:
        if self._sides is None:
            raise TopologyError(f"committer {self._component_id!r} was used outside a topology")
        return self._sides

    # --- in tasks ---------------------------------------------------------------------------------

    def _take(self, batch: pa.RecordBatch) -> None:
        self._came[self._on[1] in batch.schema.names].append(batch)

    def _commit(self, watermarks: Watermarks) -> Iterable[pa.RecordBatch]:
        sides, came = self._bound(), self._came
        self._came = ([], [])
        new: dict[Key, Sides] = {}
        for number, (side, batches) in enumerate(zip(sides, came, strict=True)):
            for batch in batches:
                self._sort_in(new, number, side, batch, watermarks.before)
        codecs = [side.codec for side in sides]
        rows = WaitingRows(self.state, codecs, self.within, self._outer, watermarks.after)
        rows.read(new, self._mine)
        out: list[Value] = []
        for key, (lefts, rights) in new.items():
            held = rows.of(key, 0), rows.of(key, 1)
            for left, right in (*pairs(lefts, held[1] + rights, self.within), *pairs(held[0], rights, self.within)):
                rows.match(0, left)
                rows.match(1, right)
                out.append((*key, *left.values, *right.values))
        for key, its in new.items():
            for number, records in enumerate(its):
                for each in records:
                    if not rows.is_over(each):
                        rows.add(key, number, each)
                    elif self._outer[number] and not each.matched:
                        out.append(self._alone(key, number, each))
        out += [self._alone(*each) for each in rows.write()]
        if not out:
            return []
        schema = self._output()
        columns = [pa.array(column, kind) for column, kind in zip(zip(*out, strict=True), schema.types, strict=True)]
        return [pa.RecordBatch.from_arrays(columns, schema=schema)]

    def _sort_in(
        self,
        new: dict[Key, Sides],
        number: int,
        side: _Side,
        batch: pa.RecordBatch,
        watermark: int,
    ) -> None:
        """Put the records of a batch to their keys, and send those that are late."""
        times = times_of(batch.column(side.on), side.on, self.unit).tolist()
        table = pa.Table.from_batches([batch])
        keys = self._keys(table)
        own = zip(*(python_values(table.column(name), name) for name in side.own), strict=True)
        late = []
        for place, (key, at, values) in enumerate(zip(keys, times, own, strict=True)):
            if at < watermark:
                late.append(place)
            else:
                new.setdefault(key, ([], []))[number].append(Waiting(at, values))
        if late:
            stream = (LATE_LEFT_STREAM, LATE_RIGHT_STREAM)[number]
            self._collector.emit_arrow(batch.take(pa.array(late)), stream)

    def _alone(self, key: Key, number: int, each: Waiting) -> Value:
        left, right = self._bound()
        if number == 0:
            return (*key, *each.values, *[None] * len(right.own))
        return (*key, *[None] * len(left.own), *each.values)
