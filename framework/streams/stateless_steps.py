"""The stateless steps of a stream: each turns a frame into a frame, row by row.

Steps travel to the tasks inside a ``StepsBolt``. On the driver they name the columns that they
need, so that unused columns are neither computed nor decoded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import polars as pl
import pyarrow as pa

from framework.call_site import Call
from framework.errors import InvariantViolation
from framework.operators.count_windows import CountWindow
from framework.operators.event_window_assigner import EventWindows
from framework.operators.sessions import Sessions
from framework.operators.timestamps import times_of
from framework.streams.expression_memory_limits import Repeated, growing_in, parts_within
from framework.streams.hidden_columns import MARK, hidden_of
from framework.streams.polars_frames import arrow_of, frame_of, refusing
from framework.streams.row_growth_limits import copies_at_a_time, parts_of
from framework.streams.watermark_bounds import WatermarkBounds
from framework.topology.arrow_columns import check_cast

WINDOW_START, WINDOW_END = "window_start", "window_end"
SESSION_END = "session_end"
#: The column of closed windows that is true if a window is sent again.
CORRECTION = "correction"
#: The time of a closed window: the last moment in it, as in Flink.
WINDOW_TIME = "window_time"
MOMENT = pa.timestamp("us", "UTC")
AnyWindows: TypeAlias = EventWindows | Sessions | CountWindow
#: The windows whose rows are known only when they close, so that only ``when_closed`` follows.
KNOWN_WHEN_CLOSED: Mapping[type[AnyWindows], str] = {Sessions: "a session", CountWindow: "a window by count"}

Columns = frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(ABC):
    """One operator. ``schema``: the schema of its output."""

    call: Call
    schema: pa.Schema

    @property
    def deterministic(self) -> bool:
        """Whether equal rows always give equal rows."""
        return True

    @property
    def carries(self) -> bool:
        """Whether each row is made of one row, and has its hidden columns."""
        return True

    @property
    def functions(self) -> Sequence[Callable[..., Any]]:
        """The functions of the user that the step calls."""
        return ()

    def parts(self, frame: pl.DataFrame) -> Iterable[pl.DataFrame]:
        """The rows in parts, to which the step is applied one by one, in order, so that it makes
        few bytes at a time. Raises ``BadRecordError`` for a row of which it makes too many
        bytes."""
        return (frame,)

    def applied(self, frame: pl.DataFrame) -> Iterable[pl.DataFrame]:
        """The rows after the step, in small frames."""
        return map(self.apply, self.parts(frame))

    @abstractmethod
    def apply(self, frame: pl.DataFrame) -> pl.DataFrame: ...

    @abstractmethod
    def needs(self, wanted: Columns) -> Columns:
        """The input columns that the step needs for these output columns."""

    def narrowed(self, wanted: Columns) -> Step:
        """The step with only these outputs."""
        return self

    def leaves(self, column: str) -> bool:
        """Whether each row is one of the rows before the step, with the same value in this
        column."""
        return False

    # --- tombstones: see framework.streams.tombstones ---------------------------------------------

    def known(self, known: Columns, above: pa.Schema) -> Columns:
        """The columns in which a tombstone has its values after the step. ``known``: those columns
        before the step. ``above``: all columns before the step."""
        return known

    def tombstone_needs(self, wanted: Columns) -> Columns:
        """The columns that a tombstone must have for these output columns."""
        return self.needs(wanted)

    def carry(self, frame: pl.DataFrame, known: Columns, checked: Columns) -> pl.DataFrame:
        """The same as ``apply`` for a frame with the column ``MARK``, which stays. ``known``: the
        columns in which tombstones have values after the step. ``checked``: the columns that a
        function must not change."""
        return self.apply(frame)

    def carried(self, frame: pl.DataFrame, known: Columns, checked: Columns) -> Iterable[pl.DataFrame]:
        """The same as ``applied`` for such a frame."""
        return (self.carry(part, known, checked) for part in self.parts(frame))


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter(Step):
    condition: pl.Expr
    growing: Sequence[Repeated] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "growing", growing_in([self.condition]))

    def parts(self, frame: pl.DataFrame) -> Iterable[pl.DataFrame]:
        return parts_within(self.call, self.growing, frame)

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        with refusing(self.call):
            return frame.filter(self.condition)

    def needs(self, wanted: Columns) -> Columns:
        return wanted | set(self.condition.meta.root_names())

    def leaves(self, column: str) -> bool:
        return True

    def carry(self, frame: pl.DataFrame, known: Columns, checked: Columns) -> pl.DataFrame:
        if self.needs(frozenset()) <= known:
            return self.apply(frame)
        passes = self.condition | pl.col(MARK).fill_null(False)
        with refusing(self.call):
            return frame.filter(passes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute(Step):
    """Columns by expressions. ``keeps``: whether input columns without a new value stay."""

    columns: Mapping[str, pl.Expr]
    keeps: bool
    growing: Sequence[Repeated] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "growing", growing_in(self.columns.values()))

    def parts(self, frame: pl.DataFrame) -> Iterable[pl.DataFrame]:
        return parts_within(self.call, self.growing, frame)

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        named = [expression.alias(name) for name, expression in self.columns.items()]
        with refusing(self.call):
            made = frame.with_columns(named)
        if self.keeps:
            return made
        # Where all columns are literals, select alone would give one row.
        return made.select([*self.columns, *(each for each in hidden_of(frame.columns) if each not in self.columns)])

    def needs(self, wanted: Columns) -> Columns:
        roots = {root for name in wanted & set(self.columns) for root in self.columns[name].meta.root_names()}
        return frozenset(roots | (wanted - set(self.columns) if self.keeps else set()))

    def narrowed(self, wanted: Columns) -> Step:
        return replace(self, columns={name: each for name, each in self.columns.items() if name in wanted})

    def leaves(self, column: str) -> bool:
        made = self.columns.get(column)
        return self.keeps if made is None else made.meta.eq(pl.col(column))

    def known(self, known: Columns, above: pa.Schema) -> Columns:
        made = {name for name, each in self.columns.items() if set(each.meta.root_names()) <= known}
        return frozenset(made | (known - set(self.columns) if self.keeps else set()))


class Cast(Compute):
    """Gives columns other types. Rounds as polars does, and refuses numbers beyond a float."""

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        made = super().apply(frame)
        with refusing(self.call, ValueError):
            for name in self.columns:
                before, after = (arrow_of(each.get_column(name)) for each in (frame, made))
                check_cast(before, after, exact=False)
        return made


class ClosedTime(Compute):
    """Gives closed windows the column ``WINDOW_TIME``."""

    @classmethod
    def of(cls, call: Call, schema: pa.Schema, end: str) -> ClosedTime:
        """``end``: the column of their ends. Their bounds as windows are left out."""
        kept = [each for each in schema if each.name not in (WINDOW_START, WINDOW_END)]
        columns = {each.name: pl.col(each.name) for each in kept}
        columns[WINDOW_TIME] = pl.col(end) - pl.duration(microseconds=1)
        return cls(call=call, schema=pa.schema([*kept, pa.field(WINDOW_TIME, MOMENT)]), columns=columns, keeps=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explode(Step):
    column: str

    def parts(self, frame: pl.DataFrame) -> Iterable[pl.DataFrame]:
        with refusing(self.call):
            items = frame.get_column(self.column).list.len().fill_null(0).to_numpy()
            parts = parts_of(self.call, frame.drop(self.column), frame, items, f"item of {self.column!r}")
        for part in parts:
            if part.height == 1:
                yield from self._shortened(part)
            else:
                yield part

    def _shortened(self, row: pl.DataFrame) -> Iterable[pl.DataFrame]:
        """One row as several, with the items of a part each."""
        items, most = row.get_column(self.column), copies_at_a_time(row.drop(self.column))
        for first in range(0, max(items.list.len()[0] or 0, 1), most):
            yield row.with_columns(items.list.slice(first, most))

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        with refusing(self.call):
            return frame.filter(pl.col(self.column).list.len() > 0).explode(self.column)

    def needs(self, wanted: Columns) -> Columns:
        return wanted | {self.column}

    def known(self, known: Columns, above: pa.Schema) -> Columns:
        return known - {self.column}

    def carry(self, frame: pl.DataFrame, known: Columns, checked: Columns) -> pl.DataFrame:
        items, is_tombstone = pl.col(self.column), pl.col(MARK).fill_null(False)
        with refusing(self.call):
            live = frame.with_columns(pl.when(~is_tombstone).then(items))
            return live.filter((items.list.len() > 0) | is_tombstone).explode(self.column)


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows(Step):
    """Each row once per window that contains its time. ``on``: the column of the time; None: the
    windows use no time."""

    windows: AnyWindows
    on: str | None
    bounds: WatermarkBounds

    def parts(self, frame: pl.DataFrame) -> Iterable[pl.DataFrame]:
        if not isinstance(self.windows, EventWindows):
            return (frame,)
        with refusing(self.call):
            windows = np.full(frame.height, -(-self.windows.length // self.windows.step))
            return parts_of(self.call, frame, frame, windows, "window")

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        return pl.concat(self.applied(frame))

    def applied(self, frame: pl.DataFrame) -> Iterable[pl.DataFrame]:
        if not isinstance(self.windows, EventWindows) or self.on is None:
            raise InvariantViolation(f"{KNOWN_WHEN_CLOSED[type(self.windows)]} is known when it closes")
        for part in self.parts(frame):
            with refusing(self.call):
                yield from self._assigned(part, self.windows, self.on)

    def _assigned(self, frame: pl.DataFrame, windows: EventWindows, on: str) -> Iterable[pl.DataFrame]:
        rows, starts, ends = windows.assign(times_of(frame.get_column(on).to_arrow(), on, "s"))
        order = np.argsort(rows, kind="stable")
        most = copies_at_a_time(frame) if frame.height == 1 else len(order)
        for first in range(0, max(len(order), 1), max(most, 1)):
            its = order[first : first + most]
            made = {WINDOW_START: starts[its], WINDOW_END: ends[its]}
            yield frame[rows[its]].with_columns(
                [pl.Series(name, each).cast(pl.Datetime("us", "UTC")) for name, each in made.items()]
            )

    def needs(self, wanted: Columns) -> Columns:
        return (wanted - {WINDOW_START, WINDOW_END}) | ({self.on} if self.on is not None else set())

    def known(self, known: Columns, above: pa.Schema) -> Columns:
        """None: a tombstone has no time."""
        return frozenset()


def applied(steps: Iterable[Step], batch: pa.RecordBatch) -> pl.DataFrame:
    """The rows of a batch after all of the steps."""
    frame = frame_of(batch)
    for step in steps:
        frame = pl.concat(step.applied(frame))
    return frame
