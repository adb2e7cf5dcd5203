"""The steps that call a function of the user: per row, or per batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import polars as pl
import pyarrow as pa

from framework.call_site import Call
from framework.errors import BadRecordError
from framework.streams.function_calls import Calls
from framework.streams.hidden_columns import MARK, with_hidden_of, without_hidden
from framework.streams.polars_frames import UNREPRESENTABLE, dicts_of, refusing
from framework.streams.row_growth_limits import FEW, PART_BYTES, ROWS_AT_A_TIME, Growth, gathered
from framework.streams.stateless_steps import Columns, Step
from framework.topology.arrow_columns import cast_column, column_of
from framework.topology.canonical_form import equal


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
        kept = [bool(self.function(row)) for row in dicts_of(self.call, without_hidden(frame))]
        return frame.filter(pl.Series(kept, dtype=pl.Boolean))

    def carry(self, frame: pl.DataFrame, known: Columns, checked: Columns) -> pl.DataFrame:
        rows = zip(dicts_of(self.call, without_hidden(frame)), frame.get_column(MARK), strict=True)
        kept = [is_tombstone is True or bool(self.function(row)) for row, is_tombstone in rows]
        return frame.filter(pl.Series(kept, dtype=pl.Boolean))

    def needs(self, wanted: Columns) -> Columns:
        return frozenset(self.schema.names)

    def leaves(self, column: str) -> bool:
        return True


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
class RemakingStep(CallingStep):
    """A step whose function makes all columns of its rows. A tombstone passes by the function: it
    keeps the columns that the rows have before and after the step, and has nulls in the others.
    So the function must not change the columns that say whose row a tombstone deletes."""

    before: Columns

    def needs(self, wanted: Columns) -> Columns:
        return self.before

    def known(self, known: Columns, above: pa.Schema) -> Columns:
        return frozenset(
            each.name for each in self.schema if each.name in known and each.type == above.field(each.name).type
        )

    def tombstone_needs(self, wanted: Columns) -> Columns:
        return wanted

    def _passed(self, row: Mapping[str, Any], known: Columns) -> tuple[Any, ...]:
        """A tombstone after the step."""
        return tuple(row[name] if name in known else None for name in self.schema.names)

    def _changes(self, names: Iterable[str]) -> BadRecordError:
        """The refusal of a row in which a function changes a column that it must keep."""
        return refusal(
            self.call,
            f"the function changes {', '.join(map(repr, sorted(names)))}, which says whose row a tombstone deletes: give the "
            "other value another name, or ask read_kafka for metadata=['tombstone'] and return that column, too",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionMap(RemakingStep):
    """Rows by a function: one per row, or any number (``many``)."""

    many: bool

    def _rows_in(self, given: Any) -> Iterable[Any]:
        """The rows that the function made of one."""
        if not self.many:
            if isinstance(given, Iterator):
                raise self.call.mistake("the function yields rows: use flat_map(...), or return one row")
            return [given]
        if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
            raise refusal(self.call, f"it returned {given!r}, which is no list of rows: return a list, or yield rows")
        return given

    def _made_of(self, given: Any) -> Iterator[tuple[Any, ...]]:
        """The values of the rows that the function made of one."""
        return map(partial(values_of, self.call, self.schema), self._rows_in(given))

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        return pl.concat(self.applied(frame))

    def applied(self, frame: pl.DataFrame) -> Iterable[pl.DataFrame]:
        given = dicts_of(self.call, without_hidden(frame))
        return self._in_parts(map(self._made_of, self.calls.each(given)), frame)

    def carried(self, frame: pl.DataFrame, known: Columns, checked: Columns) -> Iterable[pl.DataFrame]:
        return self._in_parts(self._carried_rows(frame, known, checked), frame)

    def _carried_rows(
        self, frame: pl.DataFrame, known: Columns, checked: Columns
    ) -> Iterator[Iterable[tuple[Any, ...]]]:
        marks, given = frame.get_column(MARK).to_list(), without_hidden(frame)
        live = given.filter(~frame.get_column(MARK).fill_null(False))
        results = iter(self.calls.each(dicts_of(self.call, live)))
        places = [(name, self.schema.names.index(name)) for name in sorted(checked)]
        for row, mark in zip(dicts_of(self.call, given), marks, strict=True):
            if mark:
                yield [self._passed(row, known)]
            elif mark is None:
                yield self._unchanged(self._made_of(next(results)), row, places)
            else:
                yield self._made_of(next(results))

    def _unchanged(
        self, made: Iterable[tuple[Any, ...]], row: Mapping[str, Any], places: Sequence[tuple[str, int]]
    ) -> Iterator[tuple[Any, ...]]:
        """The rows made of one row. Raises for a row with another value at one of ``places``."""
        for each in made:
            changed = [name for name, place in places if not equal(each[place], row[name])]
            if changed:
                raise self._changes(changed)
            yield each

    def _in_parts(self, made: Iterable[Iterable[tuple[Any, ...]]], frame: pl.DataFrame) -> Iterator[pl.DataFrame]:
        """Small frames of the rows that were made of each row of ``frame``."""
        return gathered(self._in_small_parts(made, frame))

    def _in_small_parts(self, made: Iterable[Iterable[tuple[Any, ...]]], frame: pl.DataFrame) -> Iterator[pl.DataFrame]:
        rows: list[tuple[Any, ...]] = []
        origins: list[int] = []
        held = size = 0
        for origin, its in enumerate(made):
            growth = Growth(self.call) if self.many else None
            for place, row in enumerate(its):
                rows.append(row)
                origins.append(origin)
                if growth is not None and (place == 0 or place >= FEW):
                    size = growth.by(row)
                held += size
                if held >= PART_BYTES or (growth is None and len(rows) == ROWS_AT_A_TIME):
                    yield with_hidden_of(frame_of_values(self.call, self.schema, rows), frame, origins)
                    rows, origins, held = [], [], 0
        yield with_hidden_of(frame_of_values(self.call, self.schema, rows), frame, origins)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStep(RemakingStep):
    """A step whose function takes and returns tables of a kind."""

    kind: Literal["arrow", "polars", "pandas"]

    @property
    def carries(self) -> bool:
        return False

    def _given(self, frame: pl.DataFrame) -> Any:
        if self.kind == "polars":
            return frame
        with refusing(self.call, *UNREPRESENTABLE):
            table = frame.to_arrow(compat_level=pl.CompatLevel.oldest())
            return table if self.kind == "arrow" else table.to_pandas()

    def _fitting(self, returned: Any) -> pa.Table:
        table = self._table(returned)
        missing = next((name for name in self.schema.names if name not in table.column_names), None)
        if missing is not None:
            raise refusal(self.call, f"what it returned has no column {missing!r} ({', '.join(table.column_names)})")
        for declared in self.schema:
            kind = table.schema.field(declared.name).type
            if pa.types.is_temporal(declared.type) and (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
                raise refusal(
                    self.call,
                    f"it returned {kind} for {declared.name!r}, and a number of a time has no unit: return timestamps",
                )
        try:
            return pa.table([_cast(table.column(each.name), each.type) for each in self.schema], self.schema)
        except (pa.ArrowException, ValueError) as error:
            raise self._misfit(error) from error

    def _misfit(self, error: Exception) -> BadRecordError:
        return refusal(self.call, f"what it returned does not fit its types: {error}")

    def _table(self, returned: Any) -> pa.Table:
        try:
            table = table_of(returned)
        except (pa.ArrowException, *UNREPRESENTABLE) as error:  # values of a frame of pandas
            raise self._misfit(error) from error
        if table is None:
            raise self.call.mistake(
                f"it returned a {type(returned).__name__}: return a table or a record batch of Arrow, or a frame of polars or "
                "pandas"
            )
        return table


def _brings(after: pl.DataFrame, before: pl.DataFrame) -> bool:
    """Whether a row is not among the former rows. A join of polars would not find NaN in a frame of
    one row."""
    sides = [frame.with_columns(pl.lit(is_new).alias(MARK)) for frame, is_new in ((after, True), (before, False))]
    return bool(pl.concat(sides).group_by(pl.exclude(MARK)).agg(pl.col(MARK).all()).get_column(MARK).any())


def _cast(column: pa.ChunkedArray, declared: pa.DataType) -> pa.ChunkedArray:
    return pa.chunked_array([cast_column(each, declared) for each in column.chunks], declared)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMap(TableStep):
    """Tables by a function. ``batch_size``: the most rows of a table; None: tables as they come."""

    batch_size: int | None = None

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        if not frame.height:
            return pl.DataFrame(pl.from_arrow(self.schema.empty_table()))
        frame = without_hidden(frame)
        parts = frame.iter_slices(self.batch_size) if self.batch_size is not None else [frame]
        returned = self.calls.results(map(self._given, parts))
        return pl.DataFrame(pl.from_arrow(pa.concat_tables(map(self._fitting, returned))))

    def carry(self, frame: pl.DataFrame, known: Columns, checked: Columns) -> pl.DataFrame:
        """Tombstones part the rows into tables, so that each stays between the rows that came
        before it and those after it."""
        made = []
        lengths = frame.get_column(MARK).rle().struct.field("len").to_list() or [0]
        for end, length in zip(accumulate(lengths), lengths, strict=True):
            run = frame.slice(end - length, length)
            mark = run.get_column(MARK)[0] if run.height else None
            given = without_hidden(run)
            if mark:
                rows = [self._passed(row, known) for row in dicts_of(self.call, given)]
                its = frame_of_values(self.call, self.schema, rows)
            else:
                its = self.apply(given)
                names = sorted(checked)
                before = given.select(names)
                if self.kind == "pandas":  # it has one value for NaN and null
                    before = before.fill_nan(None)
                if mark is None and names and _brings(its.select(names), before):
                    raise self._changes(names)
            made.append(its.with_columns(pl.lit(mark, pl.Boolean).alias(MARK)))
        return pl.concat(made)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionMap(TableStep):
    """Tables by a function of all tables that a task has of a transaction."""

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Of one table."""
        return pl.concat([pl.DataFrame(pl.from_arrow(self.schema.empty_table())), *self.partition([frame])])

    def partition(self, frames: Iterable[pl.DataFrame]) -> Iterator[pl.DataFrame]:
        """The tables that the function makes, as it makes them."""
        (returned,) = self.calls.results([map(self._given, map(without_hidden, frames))])
        if table_of(returned) is not None or isinstance(returned, (str, bytes, Mapping)):
            raise self.call.mistake(f"it returned a {type(returned).__name__}: yield tables, or return a list of them")
        if not isinstance(returned, Iterable):
            raise self.call.mistake(f"it returned {returned!r}: yield tables, or return a list of them")
        for each in returned:
            yield pl.DataFrame(pl.from_arrow(self._fitting(each)))

    def known(self, known: Columns, above: pa.Schema) -> Columns:
        """None, because a tombstone has no place among the rows that the function makes."""
        return frozenset()


def table_of(given: Any) -> pa.Table | None:
    """A table or frame of a known kind as Arrow; None for anything else."""
    if isinstance(given, pa.Table):
        return given
    if isinstance(given, pa.RecordBatch):
        return pa.Table.from_batches([given])
    if isinstance(given, pl.DataFrame):
        return given.to_arrow(compat_level=pl.CompatLevel.oldest())
    if hasattr(given, "columns") and hasattr(given, "iloc"):
        return pa.Table.from_pandas(given, preserve_index=False)
    return None


def refusal(call: Call, problem: str) -> BadRecordError:
    """The error for rows for which a function returns something that it must not return. Other rows
    may be good: a function that reads JSON returns values that a producer has written."""
    return BadRecordError(f"{call}: {problem}")


def values_of(call: Call, schema: pa.Schema, given: Any) -> tuple[Any, ...]:
    """The values of a row that a function returned: a mapping, a tuple or a list, or the value of
    the only column. Raises ``BadRecordError`` for other fields than those declared."""
    names = schema.names
    if isinstance(given, Mapping):
        unknown = next((name for name in given if name not in names), None)
        if unknown is not None:
            raise refusal(call, f"it returned a field {unknown!r}, and declares {', '.join(names)}")
        return tuple(given.get(name) for name in names)
    values = given if isinstance(given, (tuple, list)) and len(names) > 1 else (given,)
    if len(values) != len(names):
        raise refusal(call, f"it returned {given!r}, and declares {len(names)} fields: {', '.join(names)}")
    return tuple(values)


def frame_of_values(call: Call, schema: pa.Schema, rows: Sequence[tuple[Any, ...]]) -> pl.DataFrame:
    """The rows in the declared types. Raises ``BadRecordError`` for a value that does not fit."""
    columns: list[Sequence[Any]] = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    for values, declared in zip(columns, schema, strict=True):
        if pa.types.is_temporal(declared.type):
            number = next(
                (each for each in values if isinstance(each, int | float) and not isinstance(each, bool)), None
            )
            if number is not None:
                raise refusal(
                    call,
                    f"it returned {number!r} for {declared.name!r}, and a number of a time has no unit: return a datetime",
                )
    arrays = []
    for values, declared in zip(columns, schema, strict=True):
        try:
            arrays.append(column_of(values, declared.type))
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise refusal(call, f"what it returned for {declared.name!r} is no {declared.type}: {error}") from error
    return pl.DataFrame(pl.from_arrow(pa.table(arrays, schema=schema)))
