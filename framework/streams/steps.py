"""The stateless steps of a stream: each turns a frame into a frame, row by row.

Steps travel to the tasks inside a ``StepsBolt``. On the driver they say which columns they need,
so that a column that nothing uses is not computed, and not decoded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa

from framework.durations import Duration
from framework.errors import BadRecordError, InvariantViolation
from framework.operators.event_windows import EventWindows
from framework.operators.sessions import Sessions
from framework.operators.timestamps import times_of
from framework.streams.call_site import Call
from framework.streams.frames import frame_of
from framework.topology.columns import column_of

WINDOW_START, WINDOW_END = "window_start", "window_end"
MOMENT = pa.timestamp("us", "UTC")
#: What ``setup=`` has made in this process. Models are large.
_SETUPS_MAX = 16
_setups: OrderedDict[str, Any] = OrderedDict()

Columns = frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(ABC):
    """One operator. ``schema``: what comes out of it."""

    call: Call
    schema: pa.Schema

    @property
    def deterministic(self) -> bool:
        """Whether equal rows always give equal rows."""
        return True

    @abstractmethod
    def apply(self, frame: pl.DataFrame) -> pl.DataFrame: ...

    @abstractmethod
    def needs(self, wanted: Columns) -> Columns:
        """The columns that must come in where these are wanted."""

    def narrowed(self, wanted: Columns) -> Step:
        """The step without outputs that are not wanted."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter(Step):
    condition: pl.Expr

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        return _computed(self.call, lambda: frame.filter(self.condition))

    def needs(self, wanted: Columns) -> Columns:
        return wanted | set(self.condition.meta.root_names())


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute(Step):
    """Columns by expressions. ``keeps``: the columns that came in stay, where they have no new
    value."""

    columns: Mapping[str, pl.Expr]
    keeps: bool

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        named = [expression.alias(name) for name, expression in self.columns.items()]
        if self.keeps:
            return _computed(self.call, lambda: frame.with_columns(named))
        # Where all columns are literals, select alone would give one row.
        made = _computed(self.call, lambda: frame.with_columns(named))
        return made.select(list(self.columns))

    def needs(self, wanted: Columns) -> Columns:
        roots = {root for name in wanted & set(self.columns) for root in self.columns[name].meta.root_names()}
        return frozenset(roots | (wanted - set(self.columns) if self.keeps else set()))

    def narrowed(self, wanted: Columns) -> Step:
        return replace(self, columns={name: each for name, each in self.columns.items() if name in wanted})


@dataclass(frozen=True, slots=True, kw_only=True)
class Explode(Step):
    column: str

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        return frame.filter(pl.col(self.column).list.len() > 0).explode(self.column)

    def needs(self, wanted: Columns) -> Columns:
        return wanted | {self.column}


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows(Step):
    """Each row once per window that its time belongs to. Of sessions, only ``when_closed`` makes
    something."""

    windows: EventWindows | Sessions
    on: str
    late: Duration = 0

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        if isinstance(self.windows, Sessions):
            raise InvariantViolation("a session is known when it closes")
        column = frame.get_column(self.on).to_arrow()
        rows, starts, ends = self.windows.assign(times_of(column, self.on, "s"))
        order = np.argsort(rows, kind="stable")
        made = {WINDOW_START: starts[order], WINDOW_END: ends[order]}
        return frame[rows[order]].with_columns(
            [pl.Series(name, each).cast(pl.Datetime("us", "UTC")) for name, each in made.items()]
        )

    def needs(self, wanted: Columns) -> Columns:
        return (wanted - {WINDOW_START, WINDOW_END}) | {self.on}


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionFilter(Step):
    function: Callable[[dict[str, Any]], Any]
    is_deterministic: bool

    @property
    def deterministic(self) -> bool:
        return self.is_deterministic

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        kept = [bool(self.function(row)) for row in frame.iter_rows(named=True)]
        return frame.filter(pl.Series(kept, dtype=pl.Boolean))

    def needs(self, wanted: Columns) -> Columns:
        return frozenset(self.schema.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionMap(Step):
    """Rows by a Python function: one per row, or any number (``many``)."""

    function: Callable[[dict[str, Any]], Any]
    is_deterministic: bool
    many: bool
    before: Columns

    @property
    def deterministic(self) -> bool:
        return self.is_deterministic

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        rows: list[tuple[Any, ...]] = []
        for row in frame.iter_rows(named=True):
            given = self.function(row)
            rows += [self._values(each) for each in given] if self.many else [self._values(given)]
        columns = zip(*rows, strict=True) if rows else [()] * len(self.schema)
        try:
            arrays = [column_of(values, declared.type) for values, declared in zip(columns, self.schema, strict=True)]
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise BadRecordError(f"{self.call}: what it returned does not fit its types: {error}") from error
        return pl.DataFrame(pl.from_arrow(pa.table(arrays, schema=self.schema)))

    def _values(self, given: Any) -> tuple[Any, ...]:
        names = self.schema.names
        if isinstance(given, Mapping):
            unknown = next((name for name in given if name not in names), None)
            if unknown is not None:
                raise self.call.mistake(f"it returned a field {unknown!r}, and declares {', '.join(names)}")
            return tuple(given.get(name) for name in names)
        values = given if isinstance(given, (tuple, list)) and len(names) > 1 else (given,)
        if len(values) != len(names):
            raise self.call.mistake(f"it returned {given!r}, and declares {len(names)} fields: {', '.join(names)}")
        return tuple(values)

    def needs(self, wanted: Columns) -> Columns:
        return self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMap(Step):
    """Batches by a Python function. ``setup`` is called once per process; what it returned is the
    second argument."""

    function: Callable[..., Any]
    is_deterministic: bool
    kind: Literal["arrow", "polars", "pandas"]
    before: Columns
    setup: Callable[[], Any] | None = None
    key: str = field(default="", compare=False)

    @property
    def deterministic(self) -> bool:
        return self.is_deterministic

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        if not frame.height:
            return pl.DataFrame(pl.from_arrow(self.schema.empty_table()))
        given: Any = frame
        if self.kind == "arrow":
            given = frame.to_arrow(compat_level=pl.CompatLevel.oldest())
        elif self.kind == "pandas":
            given = frame.to_arrow(compat_level=pl.CompatLevel.oldest()).to_pandas()
        returned = self.function(given) if self.setup is None else self.function(given, self._made(self.setup))
        table = self._table(returned)
        missing = next((name for name in self.schema.names if name not in table.column_names), None)
        if missing is not None:
            raise self.call.mistake(f"what it returned has no column {missing!r} ({', '.join(table.column_names)})")
        try:
            made = table.select(self.schema.names).cast(self.schema)
        except (pa.ArrowException, ValueError) as error:
            raise BadRecordError(f"{self.call}: what it returned does not fit its types: {error}") from error
        return pl.DataFrame(pl.from_arrow(made))

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

    def _made(self, setup: Callable[[], Any]) -> Any:
        if self.key not in _setups:
            _setups[self.key] = setup()
            while len(_setups) > _SETUPS_MAX:
                _setups.popitem(last=False)
        return _setups[self.key]

    def needs(self, wanted: Columns) -> Columns:
        return self.before


def _computed(call: Call, compute: Callable[[], pl.DataFrame]) -> pl.DataFrame:
    """Raises ``BadRecordError`` for a value that an expression refuses."""
    try:
        return compute()
    except (pl.exceptions.InvalidOperationError, pl.exceptions.ComputeError) as error:
        raise BadRecordError(f"{call}: {str(error).strip().splitlines()[0]}") from error


def applied(steps: Iterable[Step], batch: pa.RecordBatch) -> pl.DataFrame:
    """The rows of a batch after all of the steps."""
    frame = frame_of(batch)
    for step in steps:
        frame = step.apply(frame)
    return frame
