"""The base of joins of two streams by key."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from framework.errors import TopologyError
from framework.operators.timestamps import check_times, times_of
from framework.topology import Fields, Input, OutputFieldsDeclarer
from framework.topology.canonical_form import python_values
from sinks.backend import Key, Value
from sinks.event_time.committer import WatermarkedCommitter
from sinks.states import MapState
from sinks.value_encoding import JsonColumns

#: Records behind the watermark, of each side.
LATE_LEFT_STREAM = "late_left"
LATE_RIGHT_STREAM = "late_right"
#: The sides.
LEFT, RIGHT = 0, 1


class _Side:
    """One of the two streams. ``own``: its fields without the key."""

    def __init__(self, source: Input, key: tuple[str, ...], on: str) -> None:
        self.fields, self.on = source.fields, on
        self.own = [name for name in source.fields if name not in key]
        self.codec = JsonColumns(source.fields.select(self.own), "a waiting record")


class Came(NamedTuple):
    """A record of the transaction. ``values``: of the fields outside of the key."""

    key: Key
    at: int
    values: Value
    is_late: bool


class PairCommitter(WatermarkedCommitter):
    """Has a left and a right stream with the same key, distinguished by their event time fields."""

    _streams = 2

    def __init__(self, state: MapState, *, key: Sequence[str], left: str, right: str, unit: str) -> None:
        super().__init__(state, key)
        self.unit = unit
        self._on = (left, right)
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
        self._bind_state(left)

    @abstractmethod
    def _bind_state(self, left: Input) -> None:
        """Bind the state. ``left``: the fields of the key are in both streams."""

    def state_settings(self) -> Mapping[str, Any]:
        left, right = self._on
        return {"left": left, "right": right, "unit": self.unit, "key": list(self.key)}

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

    def _new(self, number: int, watermark: int) -> Iterator[Came]:
        """The records of a side, in the order of arrival. Sends late ones to their stream."""
        side, batches = self._bound()[number], self._came[number]
        for batch in batches:
            table = pa.Table.from_batches([batch])
            times = times_of(batch.column(side.on), side.on, self.unit).tolist()
            keys = self._keys(table)
            own = zip(*(python_values(table.column(name), name) for name in side.own), strict=True)
            late = []
            for place, (key, at, values) in enumerate(zip(keys, times, own, strict=True)):
                if at < watermark:
                    late.append(place)
                yield Came(key, at, values, at < watermark)
            if late:
                stream = (LATE_LEFT_STREAM, LATE_RIGHT_STREAM)[number]
                self._emit_late(batch.take(pa.array(late)), stream)
        batches.clear()

    def _alone(self, key: Key, side: int, values: Value) -> Value:
        """The row of a record without a partner."""
        left, right = self._bound()
        if side == LEFT:
            return (*key, *values, *[None] * len(right.own))
        return (*key, *[None] * len(left.own), *values)

    def _sent(self, out: Sequence[Value]) -> Iterable[pa.RecordBatch]:
        """The rows of the default stream."""
        if not out:
            return []
        schema = self._output()
        columns = [pa.array(column, kind) for column, kind in zip(zip(*out, strict=True), schema.types, strict=True)]
        return [pa.RecordBatch.from_arrays(columns, schema=schema)]
