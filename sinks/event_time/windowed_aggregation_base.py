"""The base of windows and sessions: folds records per key and time range, before the shuffle and
again in the commit phase."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa

from framework.errors import TopologyError
from framework.operators.timestamps import check_times
from framework.topology import Combiner, Fields, Input
from framework.topology.refused_row_bisection import OnRefused
from sinks.aggregates import (
    Aggregate,
    Count,
    aggregate_settings,
    expanded_aggregates,
    input_fields,
    output_types,
    results_column,
)
from sinks.backend import Key, Value
from sinks.event_time.event_time_committer_base import WatermarkedCommitter
from sinks.event_time.watermark import WATERMARK_FIELDS, Passing
from sinks.keyed_committer import one_stream
from sinks.state_committer import Fold
from sinks.states import MapState

_MOMENT = pa.timestamp("us", "UTC")
RECORDS = "@records"


class Closed(NamedTuple):
    """A window or a session of a key, from ``start`` to before ``end``, with its aggregates."""

    key: Key
    start: int
    end: int
    values: Value


class Folded(NamedTuple):
    """The fold of a transaction's records for a time range of a key. ``values``: the times, and the
    aggregates."""

    records: int
    values: Value


class TimedFold(Combiner):
    """The base of combiners that add the columns of time to records, and fold."""

    def __init__(self, fold: Fold) -> None:
        self._fold = fold

    def leave_out_refused(self, on_refused: OnRefused | None) -> None:
        self._fold.leave_out_refused(on_refused)

    def finish(self) -> pa.RecordBatch | None:
        return self._fold.finish()

    def finish_parts(self) -> Iterable[pa.RecordBatch]:
        return self._fold.finish_parts()


class AggregatingCommitter(WatermarkedCommitter):
    """Folds records per key and time range. ``_folding`` adds the columns of the times, whose names
    no field can have."""

    #: The columns for start and end in the output.
    _bounds: ClassVar[tuple[str, str]]
    #: Columns of microseconds that identify the time ranges of a key: as folded, and as in the
    #: state.
    _parts: ClassVar[Mapping[str, str]]
    #: Columns of microseconds that are folded too, before the user's aggregates.
    _times: ClassVar[Mapping[str, Aggregate]] = {}

    def __init__(
        self,
        state: MapState,
        *,
        on: str,
        key: Sequence[str],
        aggregates: Mapping[str, Aggregate],
        unit: str,
        own: Sequence[str] = (),
    ) -> None:
        """``own``: columns of the output in addition to the key, the bounds and the aggregates."""
        super().__init__(state, key)
        name = type(self).__name__
        taken = {*self._bounds, *self._parts.values(), *own}
        if taken.intersection(self.key):
            field = min(taken.intersection(self.key))
            raise TopologyError(f"{name}: key field {field!r} is a column of its own: rename the field")
        self.on, self.unit = on, unit
        self.aggregates = expanded_aggregates(name, aggregates, taken.union(self.key))
        self._partial: Fields | None = None  # the columns of folded records
        self._fold: Fold | None = None

    # --- on the driver ----------------------------------------------------------------------------

    def _bind_records(self, *records: Input) -> None:
        source = one_stream(self._component_id, records, (*self.key, self.on, *input_fields(self.aggregates)))
        check_times(self._component_id, self.on, source.fields.type_of(self.on), self.unit)
        types = {name: source.fields.type_of(name) for name in self.key}
        types |= dict.fromkeys((*self._parts, RECORDS, *self._times), pa.int64())
        self._partial = Fields.of({**types, **output_types(self.aggregates, source.fields)})
        self._bind_state(self._partial)

    @abstractmethod
    def _bind_state(self, partial: Fields) -> None:
        """Bind the state. ``partial``: the columns of folded records."""

    def _state_key(self, partial: Fields) -> Fields:
        """The key columns of the state: the key, and the columns of its time range."""
        types = {name: partial.type_of(name) for name in self.key}
        return Fields.of({**types, **dict.fromkeys(self._parts.values(), pa.int64())})

    def state_settings(self) -> Mapping[str, Any]:
        own = {"on": self.on, "unit": self.unit, "key": list(self.key)}
        return {**own, **aggregate_settings(self.aggregates)}

    def _output_types(self) -> dict[str, Any]:
        """The columns of ``_batch``; none outside of a topology."""
        if self._partial is None:
            return {}
        partial = self._partial
        types = {name: partial.type_of(name) for name in self.key} | dict.fromkeys(self._bounds, _MOMENT)
        return types | {name: partial.type_of(name) for name in self.aggregates}

    def combiner(self) -> Combiner:
        return Passing(WATERMARK_FIELDS, lambda: self._folding(self._new_fold(partial_input=False)))

    @abstractmethod
    def _folding(self, fold: Fold) -> Combiner:
        """Adds the columns of time to records, and passes them to ``fold``."""

    def _new_fold(self, *, partial_input: bool) -> Fold:
        aggregates = {RECORDS: Count(), **self._times, **self.aggregates}
        fold = Fold(
            self._component_id, (*self.key, *self._parts), aggregates, self._schema(), partial_input=partial_input
        )
        fold.leave_out_refused(self._on_refused)
        return fold

    def _schema(self) -> pa.Schema:
        if self._partial is None:
            raise TopologyError(f"committer {self._component_id!r} was used outside a topology")
        return self._partial.schema()

    # --- for explain ------------------------------------------------------------------------------

    def is_late_with(self, row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        """Whether the time range of ``row`` is in that of ``other``."""
        start, end = self._bounds
        is_inside = other[start] <= row[start] and row[end] <= other[end]
        return is_inside and all(row[name] == other[name] for name in self.key)

    # --- in tasks ---------------------------------------------------------------------------------

    def try_writes(self, *, alone: bool) -> None:
        """Does nothing for a batch that waits in a file."""
        if self._fold is not None and not self._fold.is_large:
            super().try_writes(alone=alone)

    def _with_times(self, rows: pa.RecordBatch, times: Mapping[str, Any]) -> pa.RecordBatch:
        """The folded columns of records, and these columns of times."""
        names = list(dict.fromkeys([*self.key, *input_fields(self.aggregates)]))
        columns = [*(rows.column(name) for name in names), *(pa.array(each, pa.int64()) for each in times.values())]
        return pa.RecordBatch.from_arrays(columns, names=[*names, *times])

    def _take(self, batch: pa.RecordBatch) -> None:
        if self._fold is None:
            self._fold = self._new_fold(partial_input=True)
        self._fold.add(batch)

    def _folded_rows(self) -> pa.Table:
        """The folded records of the transaction: key, time range, their number, the times and the
        aggregates."""
        folded, self._fold = self._fold.finish() if self._fold is not None else None, None
        return pa.Table.from_batches([folded] if folded is not None else [], self._schema())

    def _batch(self, closed: Iterable[Closed]) -> pa.RecordBatch | None:
        """The rows of a stream, ordered by their ends; None if there are none."""
        ordered = sorted(closed, key=lambda each: (each.end, repr(each.key)))
        if not ordered:
            return None
        types = self._output_types()
        rows = zip(*((*each.key, each.start, each.end, *each.values) for each in ordered), strict=True)
        columns = [
            pa.array(values, pa.int64()).cast(_MOMENT) if name in self._bounds else self._column(name, values, kind)
            for (name, kind), values in zip(types.items(), rows, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, names=list(types))

    def _column(self, name: str, values: Sequence[Any], kind: Any) -> pa.Array:
        """Raises ``BadRecordError`` for a value that its type does not hold."""
        return results_column(f"component {self._component_id!r}", name, values, kind)
