"""The base of joins of two streams by key."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from framework.errors import TopologyError
from framework.operators.timestamps import check_times, times_of
from framework.topology import Fields, Input, OutputFieldsDeclarer
from framework.topology.canonical_form import python_values
from sinks.backend import Key, Value
from sinks.event_time.event_time_committer_base import WatermarkedCommitter
from sinks.event_time.records_below_watermark import Place
from sinks.join_inputs import JoinInputs
from sinks.keyed_committer import one_stream
from sinks.states import MapState

#: Records behind the watermark, of each side.
LATE_LEFT_STREAM = "late_left"
LATE_RIGHT_STREAM = "late_right"


class Came(NamedTuple):
    """A record of the transaction. ``values``: of the fields outside of the key. ``place``: its
    topic and partition."""

    key: Key
    at: int
    values: Value
    is_late: bool
    place: Place


class PairCommitter(WatermarkedCommitter):
    """Has a left and a right stream with the same key, distinguished by their event time fields."""

    late_streams = frozenset({LATE_LEFT_STREAM, LATE_RIGHT_STREAM})

    def __init__(self, state: MapState, *, key: Sequence[str], left: str, right: str, unit: str) -> None:
        super().__init__(state, key)
        self.unit = unit
        self._on = (left, right)
        self._sides: JoinInputs | None = None
        self._came: tuple[list[pa.RecordBatch], list[pa.RecordBatch]] = ([], [])

    # --- on the driver ----------------------------------------------------------------------------

    def _bind_records(self, *records: Input) -> None:
        component_id = self._component_id
        if self._on[0] == self._on[1]:
            raise TopologyError(
                f"committer {component_id!r}: left and right are both {self._on[0]!r}, and these fields tell its streams apart: "
                "rename the field of one stream in a bolt upstream, and give the new name"
            )
        found = []
        for on, other in (self._on, self._on[::-1]):
            its = [each for each in records if on in each.fields and other not in each.fields]
            if not its:
                given = ", ".join(repr(each.component_id) for each in records)
                raise TopologyError(
                    f"committer {component_id!r}: one of its streams ({given}) must have the field {on!r} and not {other!r}; "
                    "rename fields upstream"
                )
            side = one_stream(component_id, its)
            check_times(component_id, on, side.fields.type_of(on), self.unit)
            found.append((side, its))
        (left, lefts), (right, rights) = found
        neither = next((each for each in records if each not in [*lefts, *rights]), None)
        if neither is not None:
            raise TopologyError(
                f"committer {component_id!r}: {neither.component_id!r} must have one of the fields {self._on[0]!r} and "
                f"{self._on[1]!r}, which tell its streams apart"
            )
        self._sides = JoinInputs(component_id, self.key, left, right)
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
        declarer.declare(Fields.of_schema(self._sides.schema()))
        for side, stream in zip(self._sides, (LATE_LEFT_STREAM, LATE_RIGHT_STREAM), strict=True):
            declarer.declare(side.fields, stream)

    def _bound(self) -> JoinInputs:
        if self._sides is None:
            raise TopologyError(f"committer {self._component_id!r} was used outside a topology")
        return self._sides

    # --- in tasks ---------------------------------------------------------------------------------

    def _take(self, batch: pa.RecordBatch) -> None:
        side = self._on[1] in batch.schema.names
        self._check_records(batch, self._on[side], self.unit)
        self._came[side].append(batch)

    def _new(self, number: int, watermark: int) -> Iterator[Came]:
        """The records of a side, in the order of arrival. Sends late ones to their stream."""
        side, on, batches = self._bound()[number], self._on[number], self._came[number]
        for batch in batches:
            table = pa.Table.from_batches([batch])
            times = times_of(batch.column(on), on, self.unit).tolist()
            keys = self._keys(table)
            own = zip(*(python_values(table.column(name), name) for name in side.own), strict=True)
            late = []
            for row, (key, at, values, place) in enumerate(zip(keys, times, own, self._places(batch), strict=True)):
                if at < watermark:
                    late.append(row)
                yield Came(key, at, values, at < watermark, place)
            if late:
                stream = (LATE_LEFT_STREAM, LATE_RIGHT_STREAM)[number]
                self._emit_late(batch.take(pa.array(late)), stream)
        batches.clear()
