"""Aggregates the records of a transaction in panes of each key, and makes columns of results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import pyarrow as pa

from framework.bounded_pages import pages_within
from framework.topology import Fields
from framework.topology.canonical_form import python_values
from framework.topology.refused_row_bisection import OnRefused, accepted
from framework.value_size import size_of
from sinks.aggregates import Aggregate, results_column
from sinks.backend import Key, Value
from sinks.external_row_sorter import PAGE_BYTES, PAGE_ROWS
from sinks.state_committer import Fold

_AT_PART = "@part"


class PaneFolds:
    """Folds records by key and pane, a part of the key's records that the caller numbers. ``key``:
    the names of its fields. ``results``: the fields of the key and of the aggregates, with their
    types."""

    def __init__(
        self, component_id: str, key: Sequence[str], aggregates: Mapping[str, Aggregate], results: Fields
    ) -> None:
        self._component_id, self._key, self._aggregates = component_id, tuple(key), aggregates
        types = {name: results.type_of(name) for name in self._key} | {_AT_PART: pa.int64()}
        self._totals = results.select(list(aggregates))
        self._folded = Fields.of(types | {name: results.type_of(name) for name in aggregates})

    def fold(self, rows: pa.Table, parts: Sequence[int]) -> dict[Key, Value]:
        """The key and its part -> the aggregates of the rows there. ``parts``: of each row."""
        key, schema = (*self._key, _AT_PART), self._folded.schema()
        fold = Fold(self._component_id, key, self._aggregates, schema, partial_input=False)
        for batch in rows.append_column(_AT_PART, pa.array(parts, pa.int64())).to_batches():
            fold.add(batch)
        folded = fold.finish()
        if folded is None:
            return {}
        table = pa.Table.from_batches([folded])
        columns = (python_values(table.column(name), name) for name in table.column_names)
        return {tuple(row[: len(key)]): tuple(row[len(key) :]) for row in zip(*columns, strict=True)}

    def check_totals(self, totals: Sequence[Value]) -> None:
        """Raise ``BadRecordError`` for aggregates that their types do not hold."""
        self._columns(totals, self._totals)

    def sent(self, rows: Iterable[Value], fields: Fields, on_refused: OnRefused | None) -> Iterator[pa.RecordBatch]:
        """Rows in small batches. ``on_refused``: called for a row with a value that its type does
        not hold; None: such a row raises ``BadRecordError``."""
        columns, schema = partial(self._columns, fields=fields), fields.schema()
        for page, _ in pages_within(rows, PAGE_ROWS, PAGE_BYTES, size_of):
            for each in accepted(list(page), columns, on_refused):
                yield pa.RecordBatch.from_arrays(each, schema=schema)

    def _columns(self, rows: Sequence[Value], fields: Fields) -> list[pa.Array]:
        columns = zip(fields.names, zip(*rows, strict=True), strict=True) if rows else ()
        where = f"component {self._component_id!r}"
        return [results_column(where, name, values, fields.type_of(name)) for name, values in columns]
