"""Aggregates per key over windows of a number of records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import pyarrow as pa

from framework.operators.count_windows import CountWindow
from framework.topology import (
    Fields,
    Input,
    OutputFieldsDeclarer,
)
from framework.topology.refused_row_bisection import accepted
from sinks.aggregates import (
    Aggregate,
    aggregate_settings,
    expanded_aggregates,
    input_fields,
    output_types,
    row_folder,
)
from sinks.backend import Key, Value
from sinks.key_hash_parts import halves_by_key
from sinks.keyed_committer import KeyedCommitter, one_stream
from sinks.pane_aggregation import PaneFolds
from sinks.state_committer import check_no_null_key
from sinks.states import MapState
from sinks.value_encoding import first_number

_FIRST, _END, _COUNT = "window_start", "window_end", "records"
#: The part of a window in a row of the state. The row of part ``_COUNTER`` contains the number of
#: records of the key.
_PART = "window_part"
_COUNTER = -1


class CountWindowCommitter(KeyedCommitter):
    """Aggregates the last ``count`` records of each key, every ``step`` records: once for each such
    window, in the transaction that brings its last record. ``step`` None: one window after the
    other.

    ``key`` and ``aggregates``: as in a ``StateCommitter``. The opaque state holds the records of
    open windows, folded: one row per common divisor of ``count`` and ``step``, and the count.

    Default stream: the key, ``window_start`` (the number of its first record, counted from 0 per
    key), ``window_end`` (the number after its last one), the aggregates. Records are counted in the
    order of arrival. It needs no watermark.
    """

    def __init__(
        self,
        state: MapState,
        count: int,
        *,
        key: Sequence[str],
        aggregates: Mapping[str, Aggregate],
        step: int | None = None,
    ) -> None:
        super().__init__(state, key)
        self.window = CountWindow(count, step)
        self.part = self.window.pane
        taken = {*self.key, _FIRST, _END, _COUNT, _PART}
        self.aggregates = expanded_aggregates(type(self).__name__, aggregates, taken)
        self._output: Fields | None = None
        self._folds: PaneFolds | None = None
        self._batches: list[pa.RecordBatch] = []

    # --- on the driver ----------------------------------------------------------------------------

    def bind(self, component_id: str, inputs: Sequence[Input], parallelism: int) -> None:
        source = one_stream(component_id, inputs, self._needed())
        self._bind_keyed(component_id, inputs, parallelism)
        types = {name: source.fields.type_of(name) for name in self.key}
        totals = output_types(self.aggregates, source.fields)
        self._output = Fields.of({**types, _FIRST: pa.int64(), _END: pa.int64(), **totals})
        self._folds = PaneFolds(component_id, self.key, self.aggregates, self._output)
        self.state.bind(Fields.of({**types, _PART: pa.int64()}), Fields.of({_COUNT: pa.int64(), **totals}))

    def _needed(self) -> list[str]:
        """The fields of a record."""
        return list(dict.fromkeys([*self.key, *input_fields(self.aggregates)]))

    def state_settings(self) -> Mapping[str, Any]:
        own = {"count": self.window.length, "step": self.window.every, "key": list(self.key)}
        return {**own, **aggregate_settings(self.aggregates)}

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        if self._output is not None:
            declarer.declare(self._output)

    # --- in tasks ---------------------------------------------------------------------------------

    def _begin_attempt(self) -> None:
        self._batches = []

    def may_try_writes(self) -> bool:
        return type(self) is CountWindowCommitter

    def execute_arrow(self, batch: pa.RecordBatch) -> None:
        check_no_null_key(self._component_id, self.key, batch)
        self._batches.append(batch)

    def finish_batch(self) -> Iterable[pa.RecordBatch]:
        if self._attempt is None or self._folds is None or self._output is None:
            return []
        batches, self._batches = self._batches, []
        self.state.begin_commit(self._attempt)
        out = self._commit(batches, self._folds) if batches else ()
        self.state.commit(self._attempt)
        return self._folds.sent(out, self._output, self._on_refused)

    def _commit(self, batches: Sequence[pa.RecordBatch], folds: PaneFolds) -> Iterator[Value]:
        """Returns the windows that close, one by one: each may have large values."""
        rows = pa.concat_tables(pa.Table.from_batches([each]).select(self._needed()) for each in batches)
        halves = partial(halves_by_key, key=self.key)
        added = accepted(rows, partial(self._added, folds=folds), self._on_refused, halves)
        return chain.from_iterable(list(added))

    def _added(self, rows: pa.Table, folds: PaneFolds) -> Iterator[Value]:
        """Add records to the state, and return the windows that close, unless a sum leaves its
        type."""
        keys = self._keys(rows)
        distinct = list(dict.fromkeys(keys))
        held = self.state.multi_get([(*key, _COUNTER) for key in distinct])
        before = {
            key: self.state.restored((*key, _COUNTER), first_number, value) if value is not None else 0
            for key, value in zip(distinct, held, strict=True)
        }
        counts, parts = dict(before), []
        for key in keys:
            parts.append(counts[key] // self.part)
            counts[key] += 1
        folded = folds.fold(rows, parts)
        together = row_folder(self.aggregates)
        merged = {
            place: together((value[1:], folded[place]))
            for place, value in zip(folded, self.state.multi_get(list(folded)), strict=True)
            if value is not None
        }
        folds.check_totals(list(merged.values()))
        folded |= merged
        closed = [
            (key, end) for key in distinct for end in range(before[key] + 1, counts[key] + 1) if self.window.due(end)
        ]
        needed = [(*key, part) for key, end in closed for part in self._parts(end)]
        read = [place for place in dict.fromkeys(needed) if place not in folded]
        known = {
            place: value[1:] for place, value in zip(read, self.state.multi_get(read), strict=True) if value
        } | folded
        gone = [(*key, number // self.part) for key, end in closed for number in self.window.gone(end)[:: self.part]]
        over = set(gone)
        left = {place: values for place, values in folded.items() if place not in over}
        nothing = (None,) * len(self.aggregates)
        puts: dict[Key, Value] = {(*key, _COUNTER): (counts[key], *nothing) for key in distinct}
        puts |= {place: (0, *values) for place, values in left.items()}
        self.state.multi_put(list(puts), list(puts.values()))
        self.state.delete(gone)
        return (
            (*key, self.window.start(end), end, *together([known[(*key, part)] for part in self._parts(end)]))
            for key, end in closed
        )

    def _parts(self, end: int) -> range:
        """The parts of the window that ends before record ``end``."""
        return range(self.window.start(end) // self.part, end // self.part)
