"""The steps that call a function of the user: per row, or per batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import polars as pl
import pyarrow as pa

from framework.errors import BadRecordError
from framework.streams.call_site import Call
from framework.streams.function_calls import Calls
from framework.streams.steps import Columns, Step
from framework.topology.columns import column_of


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionFilter(Step):
    function: Callable[[dict[str, Any]], Any]
    is_deterministic: bool

    @property
    def deterministic(self) -> bool:
        return self.is_deterministic

    @property
    def functions(self) -> Sequence[Callable[..., Any]]:
        return (self.function,)

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        kept = [bool(self.function(row)) for row in frame.iter_rows(named=True)]
        return frame.filter(pl.Series(kept, dtype=pl.Boolean))

    def needs(self, wanted: Columns) -> Columns:
        return frozenset(self.schema.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallingStep(Step):
    """A step that calls a function of the user."""

    calls: Calls
    is_deterministic: bool

    @property
    def deterministic(self) -> bool:
        return self.is_deterministic

    @property
    def functions(self) -> Sequence[Callable[..., Any]]:
        return self.calls.functions


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionMap(CallingStep):
    """Rows by a function: one per row, or any number (``many``)."""

    many: bool
    before: Columns

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        rows: list[tuple[Any, ...]] = []
        for given in self.calls.results(frame.iter_rows(named=True)):
            rows += [values_of(self.call, self.schema, each) for each in (given if self.many else [given])]
        return frame_of_values(self.call, self.schema, rows)

    def needs(self, wanted: Columns) -> Columns:
        return self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMap(CallingStep):
    """Tables by a function. ``batch_size``: rows of a table at most; None: as they come."""

    kind: Literal["arrow", "polars", "pandas"]
    before: Columns
    batch_size: int | None = None

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        if not frame.height:
            return pl.DataFrame(pl.from_arrow(self.schema.empty_table()))
        parts = frame.iter_slices(self.batch_size) if self.batch_size is not None else [frame]
        returned = self.calls.results(map(self._given, parts))
        return pl.DataFrame(pl.from_arrow(pa.concat_tables(map(self._fitting, returned))))

    def _given(self, frame: pl.DataFrame) -> Any:
        if self.kind == "polars":
            return frame
        table = frame.to_arrow(compat_level=pl.CompatLevel.oldest())
        return table if self.kind == "arrow" else table.to_pandas()

    def _fitting(self, returned: Any) -> pa.Table:
        table = self._table(returned)
        missing = next((name for name in self.schema.names if name not in table.column_names), None)
        if missing is not None:
            raise self.call.mistake(f"what it returned has no column {missing!r} ({', '.join(table.column_names)})")
        try:
            return table.select(self.schema.names).cast(self.schema)
        except (pa.ArrowException, ValueError) as error:
            raise BadRecordError(f"{self.call}: what it returned does not fit its types: {error}") from error

    def _table(self, returned: Any) -> pa.Table:
        if isinstance(returned, pa.Table):
            return returned
        if isinstance(returned, pa.RecordBatch):
            return pa.Table.from_batches([returned])
        if isinstance(returned, pl.DataFrame):
            return returned.to_arrow(compat_level=pl.CompatLevel.oldest())
        if hasattr(returned, "columns") and hasattr(returned, "iloc"):
            return pa.Table.from_pandas(returned, preserve_index=False)
        raise self.call.mistake(
            f"it returned a {type(returned).__name__}: return a table or a record batch of Arrow, or a frame of polars or pandas"
        )

    def needs(self, wanted: Columns) -> Columns:
        return self.before


def values_of(call: Call, schema: pa.Schema, given: Any) -> tuple[Any, ...]:
    """The values of a row that a function returned: a mapping, a tuple or a list, or where there is
    one column, its value. Raises ``TopologyError`` for other fields than those declared."""
    names = schema.names
    if isinstance(given, Mapping):
        unknown = next((name for name in given if name not in names), None)
        if unknown is not None:
            raise call.mistake(f"it returned a field {unknown!r}, and declares {', '.join(names)}")
        return tuple(given.get(name) for name in names)
    values = given if isinstance(given, (tuple, list)) and len(names) > 1 else (given,)
    if len(values) != len(names):
        raise call.mistake(f"it returned {given!r}, and declares {len(names)} fields: {', '.join(names)}")
    return tuple(values)


def frame_of_values(call: Call, schema: pa.Schema, rows: Sequence[tuple[Any, ...]]) -> pl.DataFrame:
    """The rows in the declared types. Raises ``BadRecordError`` for a value that does not fit."""
    columns: Iterable[Sequence[Any]] = zip(*rows, strict=True) if rows else [()] * len(schema)
    try:
        arrays = [column_of(values, declared.type) for values, declared in zip(columns, schema, strict=True)]
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise BadRecordError(f"{call}: what it returned does not fit its types: {error}") from error
    return pl.DataFrame(pl.from_arrow(pa.table(arrays, schema=schema)))
