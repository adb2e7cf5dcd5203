"""``Stream``: what a pipeline's operators are called on."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import polars as pl
import pyarrow as pa

from framework.call_site import ByName, Call, called, without_none
from framework.durations import Duration, micros_above_0
from framework.errors import ConfigError, TopologyError
from framework.operators.count_windows import CountWindow
from framework.operators.watermarks import EXPIRED_STREAM, LATE_STREAM, MAX_AHEAD
from framework.streams.function_calls import Calls, calls_of, is_async
from framework.streams.function_checks import check_function, check_returns
from framework.streams.function_steps import BatchMap, FunctionFilter, FunctionMap, PartitionMap
from framework.streams.hidden_columns import (
    TIMESTAMP,
    check_new_names,
    field_of,
    hidden_of,
)
from framework.streams.joins import Join, JoinOptions
from framework.streams.lookups import CACHE_SIZE, Lookup
from framework.streams.plan import Joined, Merged, Node, Placed, SideOutput, Stepped, check_once, closed_once
from framework.streams.polars_expressions import (
    TIME_TEXT,
    Expression,
    check_cast,
    check_names,
    checked_types,
    column_or_expression,
    is_always_true,
    is_named,
    parsed,
    time_of_number,
)
from framework.streams.polars_frames import empty_frame
from framework.streams.ports import JoinHow, Target
from framework.streams.sql_select_parser import select_of
from framework.streams.stateless_steps import (
    KNOWN_WHEN_CLOSED,
    MOMENT,
    SESSION_END,
    WINDOW_END,
    WINDOW_START,
    WINDOW_TIME,
    AnyWindows,
    Cast,
    ClosedTime,
    Compute,
    Explode,
    Filter,
    Step,
    Windows,
)
from framework.streams.table import Grouped, NewestTable, Table, check_time, of_target
from framework.streams.unknown_operator_hints import of_item, of_stream
from framework.streams.watermark_bounds import WatermarkBounds
from framework.topology import TOMBSTONE, Bolt, Fields, FieldsGrouping, Grouping
from framework.topology.fields import FieldType
from framework.topology.groupings import (
    AllGrouping,
    GlobalGrouping,
    LocalOrShuffleGrouping,
    ShuffleGrouping,
)
from framework.user_call_argument_checks import checks_arguments

if TYPE_CHECKING:
    from framework.streams.pipeline import Pipeline

_GROUPINGS: Mapping[str, Callable[[], Grouping]] = {
    "local": LocalOrShuffleGrouping,
    "shuffle": ShuffleGrouping,
    "global": GlobalGrouping,
    "all": AllGrouping,
}
RowFunction = Callable[[dict[str, Any]], Any]
GroupingName = Literal["local", "shuffle", "global", "all"]


@checks_arguments
class Stream:
    """Rows, of which every one counts. Made by a ``Pipeline``; each operator returns another
    stream and leaves this one as it is, so several may begin at the same."""

    def __init__(self, pipeline: Pipeline, node: Node) -> None:
        self._pipeline = pipeline
        self._node = node

    @property
    def schema(self) -> pa.Schema:
        """The columns and their types."""
        return self._node.schema

    def __repr__(self) -> str:
        columns = ", ".join(f"{each.name}: {each.type}" for each in self.schema)
        return f"Stream({columns})"

    def __bool__(self) -> NoReturn:
        raise called("bool", self).mistake(
            "a stream has no rows while a pipeline is made: filter(...) and branch(...) choose rows"
        )

    def __getitem__(self, item: Any) -> NoReturn:
        raise of_item(item)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            node = self.__dict__.get("_node")
            raise of_stream(self, name, node.schema.names if node is not None else ())

    # --- row by row -------------------------------------------------------------------------------

    def filter(self, condition: Expression | RowFunction, *, deterministic: bool = False) -> Stream:
        """Keep the rows for which the condition is true: SQL text, a polars expression, or a
        function of the row (a mapping of names to values). ``deterministic``: this function always
        gives the same for the same row."""
        call = called("filter", condition)
        if callable(condition) and not isinstance(condition, pl.Expr):
            if is_async(condition):
                raise call.mistake("filter takes no async def: make a column by map(...), and filter by that")
            check_function(call, condition, ["the row"])
            check_returns(call, condition)
            step: Step = FunctionFilter(
                call=call, schema=self.schema, function=condition, is_deterministic=deterministic
            )
            return self._after(step)
        return self._filtered(call, condition)

    def select(self, *columns: Expression, **named: Expression) -> Stream:
        """These columns only: names or expressions, and ``name=expression``."""
        return self._computed(called("select", *columns, **named), columns, named)

    def sql(self, query: str) -> Stream:
        """The rows and columns of ``SELECT ... FROM stream WHERE ...``: expressions of columns, and
        a condition, as of ``select`` and ``filter``. ``*`` stands for all columns."""
        call = called("sql", query)
        if not isinstance(query, str):
            raise call.mistake(f"{query!r} is a {type(query).__name__}: give SQL text")
        found = select_of(call, query)
        stream = self if found.condition is None else self._filtered(call, found.condition)
        columns = [name for each in found.columns for name in (self.schema.names if each == "*" else [each])]
        return stream._computed(call, columns, {})

    def with_columns(self, *columns: Expression, **named: Expression) -> Stream:
        """Add columns, or give them other values: ``name=expression``."""
        call = called("with_columns", *columns, **named)
        made = self._columns(call, columns, named)
        if not made:
            raise call.mistake("give at least one column, as in with_columns(euros='cents / 100.0')")
        return self._with(call, made)

    def drop(self, *columns: str) -> Stream:
        """All columns but these."""
        call = called("drop", *columns)
        check_names(call, columns, self.schema)
        kept = {name: pl.col(name) for name in self.schema.names if name not in columns}
        if not kept:
            raise call.mistake("no column would be left")
        return self._after(Compute(call=call, schema=checked_types(call, kept, self.schema), columns=kept, keeps=False))

    def rename(self, names: Mapping[str, str] | None = None, /, **more: str) -> Stream:
        """Give columns other names: ``rename(old="new")``, or a mapping."""
        if not isinstance(names, Mapping | None):
            raise called("rename", names).mistake(
                f"{names!r} is a {type(names).__name__}: give new names, as in rename(old='new')"
            )
        renamed = {**(names or {}), **more}
        call = called("rename", **renamed)
        check_names(call, renamed, self.schema)
        columns: dict[str, pl.Expr] = {}
        for name in self.schema.names:
            new = renamed.get(name, name)
            check_new_names(call, [new])
            if not isinstance(new, str) or not new:
                raise call.mistake(f"{new!r} is no name for a column")
            if new in columns:
                raise call.mistake(f"there would be two columns {new!r}")
            columns[new] = pl.col(name)
        return self._after(
            Compute(call=call, schema=checked_types(call, columns, self.schema), columns=columns, keeps=False)
        )

    def cast(self, **types: FieldType) -> Stream:
        """Give columns another type, of Python or of Arrow. A number is rounded to the scale of a
        decimal, and cut to an integer. A value that does not fit is a bad record."""
        call = called("cast", **types)
        check_names(call, types, self.schema)
        declared = self._declared(call, types)
        columns = {}
        for each in declared:
            was = self.schema.field(each.name).type
            if pa.types.is_timestamp(each.type) and (pa.types.is_integer(was) or pa.types.is_floating(was)):
                raise call.mistake(
                    f"{each.name!r} is {was}, and a number of a time has no unit: {time_of_number(each.name)}"
                )
            try:
                kind = pl.Schema(pa.schema([each]))[each.name]
                check_cast(empty_frame(self.schema).schema[each.name], kind)
                is_time_text = pa.types.is_time(was) and kind == pl.String
                column = pl.col(each.name)
                columns[each.name] = column.dt.to_string(TIME_TEXT) if is_time_text else column.cast(kind)
            except (pl.exceptions.PolarsError, pa.ArrowException) as error:
                raise call.mistake(error) from None
        return self._with(call, columns, declared, Cast)

    def explode(self, column: str) -> Stream:
        """One row per item of a list. An empty list, and null, give no row."""
        call = called("explode", column)
        check_names(call, [column], self.schema)
        kind = self.schema.field(column).type
        if not pa.types.is_list(kind):
            raise call.mistake(f"column {column!r} is {kind}, and only a list has items")
        schema = pa.schema([pa.field(column, kind.value_type) if e.name == column else e for e in self.schema])
        return self._after(Explode(call=call, schema=schema, column=column))

    def map(
        self,
        function: RowFunction,
        *,
        setup: Callable[[], Any] | None = None,
        concurrency: int | None = None,
        timeout: Duration | None = None,
        retries: int = 0,
        deterministic: bool = False,
        **types: FieldType,
    ) -> Stream:
        """One row per row by a Python function. ``types`` are the columns that it returns, as a
        mapping, a tuple, or, where there is one, the value.

        An ``async def`` is called for up to ``concurrency`` rows at a time (by default 32), and may
        take up to ``timeout`` (by default 30 s) for each; rows keep their order. ``retries``: how
        often a call that failed is made again, after 0.1 s, 0.2 s, and so on up to 10 s. A row that
        is bad raises ``BadRecordError``, for the ``on_bad_record`` of the source. While time is
        over or a connection fails, the batch is tried again, without end; any other error counts
        for ``topology.max.attempts``.
        ``setup``: called once per process, to load a model or to open a client; what it returned is
        the function's second argument."""
        call = called("map", function)
        calls = self._calls(call, function, setup, concurrency=concurrency, timeout=timeout, retries=retries)
        check_returns(call, function)
        return self._mapped(calls, types, deterministic=deterministic, many=False)

    def flat_map(
        self,
        function: RowFunction,
        *,
        setup: Callable[[], Any] | None = None,
        concurrency: int | None = None,
        timeout: Duration | None = None,
        retries: int = 0,
        deterministic: bool = False,
        **types: FieldType,
    ) -> Stream:
        """Any number of rows per row by a Python function, which returns or yields them; an ``async
        def`` returns them. The rest as of ``map``."""
        call = called("flat_map", function)
        calls = self._calls(call, function, setup, concurrency=concurrency, timeout=timeout, retries=retries)
        check_returns(call, function)
        return self._mapped(calls, types, deterministic=deterministic, many=True)

    def map_batches(
        self,
        function: Callable[..., Any],
        *,
        setup: Callable[[], Any] | None = None,
        kind: Literal["arrow", "polars", "pandas"] = "arrow",
        batch_size: int | None = None,
        concurrency: int | None = None,
        timeout: Duration | None = None,
        retries: int = 0,
        deterministic: bool = False,
        **types: FieldType,
    ) -> Stream:
        """Rows by a function of a table. ``kind``: what it takes. ``batch_size``: the rows of a
        table at most. ``types``: the columns that it returns. The rows of a table have nothing in
        common: a replay may divide them in another way. ``concurrency``, ``timeout``: tables at a
        time, and for each. The rest as of ``map``."""
        call = called("map_batches", function)
        _check_kind(call, kind)
        calls = self._calls(
            call, function, setup, concurrency=concurrency, timeout=timeout, retries=retries, given="a table"
        )
        check_returns(call, function)
        step = BatchMap(
            call=call,
            schema=self._of_function(call, types),
            calls=calls,
            is_deterministic=deterministic,
            kind=kind,
            before=frozenset(self.schema.names),
            batch_size=_number_above_0(call, "batch_size", batch_size),
        )
        return self._after(step)

    def map_partitions(
        self,
        function: Callable[..., Any],
        *,
        setup: Callable[[], Any] | None = None,
        kind: Literal["arrow", "polars", "pandas"] = "arrow",
        deterministic: bool = False,
        **types: FieldType,
    ) -> Stream:
        """The rows that a function makes of all tables of a task and transaction. The function
        takes an iterator of tables, and yields tables, or returns a list of them; it is called once
        per transaction in each task that has rows. ``kind``, ``setup``, ``types``: as of
        ``map_batches``.

        A replay, or another parallelism, may divide the rows in another way, so ``deterministic``
        also promises that the division makes no difference. A replay repeats side effects of the
        function; its rows count once."""
        call = called("map_partitions", function)
        _check_kind(call, kind)
        if is_async(function) or inspect.isasyncgenfunction(function):
            raise call.mistake("map_partitions takes no async def: use map_batches(...), which takes one")
        calls = self._calls(
            call, function, setup, concurrency=None, timeout=None, retries=0, given="an iterator of tables"
        )
        check_returns(call, function)
        step = PartitionMap(
            call=call,
            schema=self._of_function(call, types),
            calls=calls,
            is_deterministic=deterministic,
            kind=kind,
            before=frozenset(self.schema.names),
        )
        return self._after(step)

    def lookup(
        self,
        function: Callable[..., Any],
        *,
        on: str | Sequence[str],
        cache: Duration | None = None,
        cache_size: int = CACHE_SIZE,
        batch_size: int | None = None,
        setup: Callable[[], Any] | None = None,
        concurrency: int | None = None,
        timeout: Duration | None = None,
        retries: int = 3,
        deterministic: bool = False,
        **types: FieldType,
    ) -> Stream:
        """Each row with what a function knows about its key. ``on``: the column of the key, or
        several, which the function gets as a tuple. ``types``: the columns that it returns, as of
        ``map``; None stands for nulls in all of them. A key with a null is not looked up, and gets
        nulls.

        The function is called once per key of a transaction and task. ``batch_size``: it gets a
        list of up to so many keys, and returns a mapping of keys to answers, or a list of answers.
        ``cache``: how long a process keeps an answer, also None, for at most ``cache_size`` keys,
        and 8 KiB per key on average; by default, for the transaction. The other arguments are those
        of ``map``.

        Each row is written exactly once, with one answer. A replay calls the function again, and
        may get another answer. Opaque states and tables keep the answer of the last attempt. Sinks
        that skip a replay (Kafka, Delta Lake) keep the answer of the attempt that they have
        committed, which may differ from that of other sinks. ``deterministic``: the answer for a
        key never changes."""
        keys = (on,) if isinstance(on, str) else tuple(on)
        call = called("lookup", function, **without_none(on=on, cache=cache))
        if not keys:
            raise call.mistake("name at least one column, as in on='customer'")
        check_names(call, keys, self.schema)
        nested = next((each for each in keys if pa.types.is_nested(self.schema.field(each).type)), None)
        if nested is not None:
            raise call.mistake(
                f"column {nested!r} is {self.schema.field(nested).type}, which is no key: name plain columns"
            )
        answers = self._of_function(call, types)
        taken = next((each for each in answers.names if each in self.schema.names), None)
        if taken is not None:
            raise call.mistake(f"there is a column {taken!r} already: give the answer another name")
        try:
            cache_s = micros_above_0(cache, "cache") / 1_000_000 if cache is not None else None
        except ConfigError as error:
            raise call.mistake(error) from None
        step = Lookup(
            call=call,
            schema=pa.schema([*self.schema, *answers]),
            calls=self._calls(
                call,
                function,
                setup,
                concurrency=concurrency,
                timeout=timeout,
                retries=retries,
                given="a key" if batch_size is None else "a list of keys",
            ),
            on=keys,
            answers=answers,
            is_deterministic=deterministic,
            batch_size=_number_above_0(call, "batch_size", batch_size),
            cache_s=cache_s,
            cache_size=_number_above_0(call, "cache_size", cache_size) or CACHE_SIZE,
        )
        return self._after(step)

    # --- several streams --------------------------------------------------------------------------

    def branch(self, **conditions: Expression | RowFunction) -> dict[str, Stream]:
        """A stream per condition. A row is in the first one whose condition is true for it; rows
        for which none is true are in none."""
        call = called("branch", **conditions)
        if not conditions:
            raise call.mistake("give at least one condition, as in branch(large='cents > 100')")
        if any(callable(each) and not isinstance(each, pl.Expr) for each in conditions.values()):
            raise call.mistake("a branch takes expressions: give SQL text or polars expressions")
        taken: list[pl.Expr] = []
        streams: ByName[Stream] = ByName()
        for name, condition in conditions.items():
            if taken and is_always_true(taken[-1]):
                before = list(conditions)[len(taken) - 1]
                raise call.mistake(f"every row is in {before!r}, which comes before {name!r}: put it last")
            call = called("branch", **{name: condition})
            own = self._condition(call, condition).fill_null(False)
            streams[name] = self._filtered(call, pl.all_horizontal(own, *(~each for each in taken)) if taken else own)
            taken.append(own)
        return streams

    def merge(self, *others: Stream) -> Stream:
        """The rows of this stream and of the others, which have the same columns."""
        call = called("merge")
        if not others:
            raise call.mistake("give at least one other stream, as in orders.merge(returns)")
        for other in others:
            if not isinstance(other, Stream):
                raise call.mistake(f"{other!r} is a {type(other).__name__}: give streams")
            if other._pipeline is not self._pipeline:
                raise call.mistake("the streams are of two pipelines: read both topics in one")
            if {e.name: e.type for e in other.schema} != {e.name: e.type for e in self.schema}:
                raise call.mistake(
                    f"the columns differ: {_listed(self.schema)}; and {_listed(other.schema)}: make them equal by select(...)"
                )
        names = {each: each for each in self.schema.names}
        ordered = [each if each.schema.names == list(names) else each._selected(call, names) for each in others]
        node = Merged((self._node, *(each._node for each in ordered)), self.schema)
        check_once(call, node)
        return Stream(self._pipeline, node)

    # --- tables -----------------------------------------------------------------------------------

    def window(
        self,
        windows: AnyWindows,
        *,
        on: str | None = None,
        late: Duration = 0,
        max_ahead: Duration = MAX_AHEAD,
        idle_after: Duration | None = None,
        advance_when_idle: bool = False,
    ) -> Stream:
        """Put each row into the windows that contain its time ``on``, by default the timestamp of
        its record in the topic. The columns ``window_start`` and ``window_end`` are added, and
        ``window_start`` becomes part of the key of a following ``group_by``. So late rows correct
        their window without a time limit. ``late``: for ``when_closed``, how far a row may be
        behind the newest one of its partition. Sessions, and windows by count, are known when they
        close: after ``group_by(...).agg(...)`` only ``when_closed`` follows.

        ``by_count(100)``: windows of that number of rows of a key, in the order of arrival. They
        use no time, so they take none of the other arguments.

        The time of a closed window, or session, is its last moment, which becomes the column
        ``window_time``. The bounds of the new windows replace its bounds, and the watermark stays
        the same.

        ``max_ahead``: for ``when_closed``, a row whose time is further ahead of the planning time
        of its transaction is a bad record. ``idle_after``: a partition without rows for this long
        no longer holds windows open; None: it always does. ``advance_when_idle``: while all
        partitions are idle, event time advances with the clock, by transactions without rows
        (``topology.spout.emit.empty.batches``)."""
        call = called("window", windows, **without_none(on=on))
        if not isinstance(windows, AnyWindows):
            raise call.mistake(
                f"{getattr(windows, '__name__', repr(windows))} is no window: "
                "give tumbling('1 h'), sliding('10 min', '5 min'), session('30 min') or by_count(100)"
            )
        bounds = WatermarkBounds(late, max_ahead, idle_after, advance_when_idle).checked(call)
        if isinstance(windows, CountWindow):
            if on is not None or bounds != WatermarkBounds():
                raise call.mistake("a window by count goes by no time: leave on, late, max_ahead and idle_after out")
            return self._in_windows(call, windows, None, bounds)
        rows = self._closed(call) if on is None else None
        on, rows = (WINDOW_TIME, rows) if rows is not None else (self._time(call, on), self)
        kind = field_of(rows.schema, on).type
        if not (pa.types.is_timestamp(kind) and kind.tz is not None):
            raise call.mistake(f"column {on!r} is {kind}, and windows need a timestamp with a zone: cast it first")
        return rows._in_windows(call, windows, on, bounds)

    def _in_windows(self, call: Call, windows: AnyWindows, on: str | None, bounds: WatermarkBounds) -> Stream:
        taken = next((name for name in (WINDOW_START, WINDOW_END) if name in self.schema.names), None)
        if taken is not None:
            raise call.mistake(f"there is a column {taken!r} already: rename it")
        bound = MOMENT if on is not None else pa.int64()
        schema = pa.schema([*self.schema, pa.field(WINDOW_START, bound), pa.field(WINDOW_END, bound)])
        return self._after(Windows(call=call, schema=schema, windows=windows, on=on, bounds=bounds))

    def group_by(self, *columns: str, **named: Expression) -> Grouped:
        """Rows with equal values in these columns belong together. The window that they are in is
        part of the key."""
        call = called("group_by", *columns, **named)
        known: Sequence[object] = self.schema.names
        for each in map(str, (each for each in columns if isinstance(each, str | pl.Expr) and each not in known)):
            if not each.isidentifier():
                raise call.mistake(f"{each!r} is no column: name what it gives, as in group_by(part='cents / 100')")
        check_names(call, columns, self.schema)
        stream = self
        if named:
            stream = self._with(call, self._columns(call, (), named))
        window = [WINDOW_START] if _in_windows(self._node) and WINDOW_START not in columns else []
        key = [*window, *columns, *named]
        if not key:
            raise call.mistake("name at least one column")
        twice = next((name for name in key if key.count(name) > 1), None)
        if twice is not None:
            raise call.mistake(f"column {twice!r} is named twice")
        return Grouped(stream, tuple(key))

    def latest_by(
        self,
        *key: str,
        sequence_by: str | None = None,
        delete_when: Expression | None = None,
        name: str | None = None,
    ) -> Table:
        """The newest row of each key. ``sequence_by``: a column that rises with each change of a
        key; without it, the row that arrives later is newer. Tombstones that delete rows need the
        column, too: for a topic with the record's key, use ``"offset"``. ``delete_when``: the row
        of its key is deleted if this is true. ``name``: the default for ``name=`` of
        ``upsert_into``."""
        more = {"sequence_by": sequence_by, "delete_when": delete_when, "name": name}
        call = called("latest_by", *key, **{name: each for name, each in more.items() if each is not None})
        if not key:
            raise call.mistake("name at least one column, as in latest_by('order')")
        check_names(call, [*key, *([sequence_by] if sequence_by is not None else [])], self.schema)
        stream = self
        if delete_when is not None:
            told = TOMBSTONE in self.schema.names
            if told and self.schema.field(TOMBSTONE).type != pa.bool_():
                raise call.mistake(f"there is a column {TOMBSTONE!r} already: rename it, or leave delete_when out")
            condition = parsed(call, delete_when, self.schema)
            kind = checked_types(call, {TOMBSTONE: condition}, self.schema).field(0).type
            if kind != pa.bool_():
                raise call.mistake(f"a condition is true or false, and this is {kind}")
            deleted = condition.fill_null(False)
            stream = self._with(call, {TOMBSTONE: deleted | pl.col(TOMBSTONE).fill_null(False) if told else deleted})
        return NewestTable(stream, key, sequence_by, call, name)

    def deduplicate(
        self,
        key: str | Sequence[str],
        *,
        within: Duration,
        on: str | None = None,
        name: str,
        late: Duration = 0,
        max_ahead: Duration = MAX_AHEAD,
        idle_after: Duration | None = None,
        advance_when_idle: bool = False,
        parallelism: int = 1,
    ) -> Stream:
        """The first row of each key: of one transaction's rows by topic and partition, and in each
        as they arrived. A later row is dropped if its time ``on``, by default the timestamp of its
        record in the topic, is less than ``within`` after the first. ``late``: how far a row may be
        behind the newest one of its partition; rows that are later are dropped. ``max_ahead``,
        ``idle_after``, ``advance_when_idle``: as of ``window``. ``name``: the id, which the state
        follows."""
        keys = (key,) if isinstance(key, str) else tuple(key)
        call = called("deduplicate", *keys, **without_none(within=within, on=on, name=name))
        check_names(call, keys, self.schema)
        at = self._event_time(call, on)
        bounds = WatermarkBounds(late, max_ahead, idle_after, advance_when_idle).checked(call)
        steps = self._pipeline.stateful_steps(call)
        place = self._pipeline.place_of(self._node) or ()
        bolt = self._bolt(call, lambda: steps.first_rows(name, keys, at, within, partition=place))
        return self._placed(
            call,
            bolt,
            name,
            FieldsGrouping(Fields(*keys)),
            parallelism=parallelism,
            **self._by_time(call, name, at, bounds, place=place),
        )

    def join(
        self,
        other: Stream | Table,
        *,
        on: str | Sequence[str],
        times: str | tuple[str, str] | None = None,
        within: Duration | None = None,
        name: str,
        how: JoinHow = "inner",
        late: Duration = 0,
        max_ahead: Duration = MAX_AHEAD,
        idle_after: Duration | None = None,
        advance_when_idle: bool = False,
        parallelism: int = 1,
    ) -> Stream:
        """With a stream, pairs of rows with the same key whose times are no further apart than
        ``within``; each pair once, in the transaction that reads its second row.

        With a table of newest rows, ``customers.latest_by("customer")``, each row of this stream
        once. Without ``times`` and ``within``: in its own transaction, with the row that the table
        has after all of the table's rows in that transaction. With ``times`` or ``within``: with
        the row that the table had at its time, no older than ``within``, in the transaction whose
        watermark passes the row. ``how="left"``: also rows without a row of the table, with nulls.

        Either side may be closed windows, with ``window_end`` as their time.

        ``on``: the key, columns of both streams. ``times``: the column of the time, or a pair: the
        columns of this and of the other stream; by default, the timestamps of the records in their
        topics. ``how``: a row of an outer side without a partner is emitted once, with nulls, when
        the watermark has passed the bound. ``late``: how far a row may be behind the newest one of
        its partition; rows that are later are left out. ``max_ahead``, ``idle_after``,
        ``advance_when_idle``: as of ``window``. A column that both streams have is called
        ``<name>_right`` if it is from the other stream. ``name``: the id of the step and its
        state."""
        call = called("join", **without_none(on=on, within=within, name=name))
        if not isinstance(other, Stream | NewestTable):
            raise call.mistake(
                f"{other!r} is a {type(other).__name__}: give a stream, or a table of latest_by(...)"
                + (
                    "; of aggregates, upsert_into(...) returns the stream of changes, and its latest_by(...) is a table"
                    if isinstance(other, Table)
                    else ""
                )
            )
        pair = (times, times) if isinstance(times, str) else times
        if pair is None and within is not None:
            pair = TIMESTAMP, TIMESTAMP
        options = JoinOptions(
            on=(on,) if isinstance(on, str) else tuple(on),
            times=pair,
            within=within,
            how=how,
            name=name,
            bounds=WatermarkBounds(late, max_ahead, idle_after, advance_when_idle).checked(call),
        )
        return self._of(Join(call, self, other, options).placed(parallelism))

    def _bolt(self, call: Call, make: Callable[[], Bolt]) -> Bolt:
        try:
            return make()
        except (ConfigError, TopologyError) as error:
            raise call.mistake(error) from None

    def late(self, side: Literal["left", "right"] | None = None) -> Stream:
        """The rows that came too late for the step of this stream: ``when_closed``,
        ``deduplicate``, ``join``, ``process``, or ``upsert_into`` of a table that expires. Late
        rows of windows and sessions are aggregated per window and transaction, in the columns of
        the step. Late rows of a table have the columns that it uses; others are unchanged.
        ``side``: which side of a join, this stream or the other."""
        call = called("late", *([side] if side is not None else []))
        stream = LATE_STREAM if side is None else f"{LATE_STREAM}_{side}"
        node = self._node
        if not isinstance(node, Placed) or not any(each.startswith(LATE_STREAM) for each in node.side_schemas):
            raise call.mistake(
                "only a step that goes by event time has late rows: call it on what when_closed(...), deduplicate(...), "
                "join(...) or process(...) returned"
            )
        if stream not in node.side_schemas:
            raise call.mistake(
                "a join has late rows of two sides: late('left') or late('right')"
                if side is None
                else "give 'left' or 'right', the side of the join"
                if any(each.startswith(f"{LATE_STREAM}_") for each in node.side_schemas)
                else "only the late rows of a join have a side: late()"
            )
        return self._of(SideOutput(node, stream))

    def expired(self) -> Stream:
        """The expired rows of a table, each once, with ``expires_at``, the time that the watermark
        has reached. Call it on the stream that ``upsert_into`` of ``agg(...).expire(...)``
        returned."""
        node = self._node
        if not isinstance(node, Placed) or EXPIRED_STREAM not in node.side_schemas:
            raise called("expired").mistake(
                "only the rows of a table expire: call it on what agg(...).expire('30 days').upsert_into(...) returned"
            )
        return self._of(SideOutput(node, EXPIRED_STREAM))

    # --- out of the stream ------------------------------------------------------------------------

    def append_into(
        self, target: Target, *, name: str | None = None, parallelism: int = 1, on_bad_record: str | Bolt = "fail"
    ) -> Stream:
        """Write every row, exactly once. ``name``: the id of the sink, which its state follows.
        ``on_bad_record``: what becomes of a record whose row the sink refuses: "skip",
        ``dead_letters(...)`` or, where the pipeline has them, "dead_letter"; "fail": the
        ``on_bad_record`` of the source decides. The record is left out of all sinks."""
        call = called("append_into", target, **without_none(name=name))
        bolt = of_target(call, self._pipeline.note, target, lambda place: place.append())
        self._pipeline.set_policy(call, bolt, on_bad_record)
        return self._placed(
            call, bolt, target.name if name is None else name, LocalOrShuffleGrouping(), parallelism=parallelism
        )

    def to_kafka(
        self,
        topic: str | None = None,
        *,
        topic_from: str | None = None,
        key: str | Sequence[str] | RowFunction | None = None,
        value: str | Sequence[str] | RowFunction | None = None,
        headers: Any = None,
        timestamp: str | None = None,
        partition: str | None = None,
        name: str | None = None,
        on_bad_record: str | Bolt = "fail",
        **options: Any,
    ) -> Stream:
        """Write every row to a topic, or to the topic that the column ``topic_from`` names, exactly
        once, by one task. ``key`` and ``value``: a column of text or bytes, a list of columns for
        JSON, or a function of the row that returns bytes; by default no key, and JSON of all
        columns that are used for nothing else. ``headers``: a column that holds headers, a mapping
        of those to add, or ``Headers``. ``timestamp``, ``partition``: columns. ``value_codec`` and
        ``key_codec``: formats that encode, such as ``Json`` or ``Csv``. ``on_bad_record``: as of
        ``append_into``. ``options``: the rest of ``sinks.KafkaSink``."""
        said = {"topic_from": topic_from} if topic_from else {}
        call = called("to_kafka", *([topic] if topic else []), **said, **({"name": name} if name else {}))
        given = {"topic_from": topic_from, "key": key, "value": value, "headers": headers}
        given = {**given, "timestamp": timestamp, "partition": partition, **options}
        place = self._pipeline.topic(call, topic, given)
        bolt = of_target(call, self._pipeline.note, place, lambda place: place.append())
        self._pipeline.set_policy(call, bolt, on_bad_record)
        return self._placed(call, bolt, name or topic or topic_from or "kafka", GlobalGrouping(), parallelism=1)

    def through(
        self,
        bolt: Bolt,
        *,
        name: str,
        grouping: GroupingName | Sequence[str] | Grouping = "local",
        parallelism: int = 1,
    ) -> Stream:
        """Send the rows through a bolt of your own, and go on with what it emits. ``grouping``:
        "local", "shuffle", "global", "all", the names of columns, or a ``Grouping``."""
        call = called("through", type(bolt).__name__, name=name)
        if not isinstance(bolt, Bolt):
            raise call.mistake(
                f"{bolt.__name__} is a class: give an object, {bolt.__name__}(...)"
                if isinstance(bolt, type)
                else f"{bolt!r} is a {type(bolt).__name__}: give a bolt; map(...) and map_batches(...) take functions"
            )
        return self._placed(call, bolt, name, self._grouping(call, grouping), parallelism=parallelism)

    def into(
        self,
        committer: Bolt,
        *,
        name: str,
        grouping: GroupingName | Sequence[str] | Grouping = "global",
        parallelism: int = 1,
    ) -> Stream:
        """Give the rows to a committer of your own."""
        call = called("into", type(committer).__name__, name=name)
        if not hasattr(committer, "finish_batch"):
            raise call.mistake(f"a {type(committer).__name__} is no committer: use through(...)")
        keys, sequence = committer.tombstone_keys, getattr(committer, "sequence_by", None)
        if isinstance(sequence, str) and sequence in keys:
            self._pipeline.check_sequence(call, self._node, set(keys) - {sequence}, sequence)
        return self._placed(
            call,
            committer,
            name,
            self._grouping(call, grouping),
            parallelism=parallelism,
            keys=keys,
        )

    # --- parts ------------------------------------------------------------------------------------

    def _after(self, step: Step) -> Stream:
        self._pipeline.check_open(step.call)
        return Stream(self._pipeline, Stepped(self._node, step))

    def _filtered(self, call: Call, condition: Expression) -> Stream:
        return self._after(Filter(call=call, schema=self.schema, condition=self._condition(call, condition)))

    def _condition(self, call: Call, condition: Expression | RowFunction) -> pl.Expr:
        expression = parsed(call, condition, self.schema)
        kind = checked_types(call, {"condition": expression}, self.schema).field(0).type
        if kind != pa.bool_():
            raise call.mistake(f"a condition is true or false, and this is {kind}")
        return expression

    def _computed(self, call: Call, columns: Sequence[Expression], named: Mapping[str, Expression]) -> Stream:
        made = self._columns(call, columns, named)
        if not made:
            raise call.mistake("name at least one column")
        return self._after(Compute(call=call, schema=checked_types(call, made, self.schema), columns=made, keeps=False))

    def _with(
        self, call: Call, columns: Mapping[str, pl.Expr], types: pa.Schema | None = None, step: type[Compute] = Compute
    ) -> Stream:
        made = types if types is not None else checked_types(call, columns, self.schema)
        if types is not None:
            checked_types(call, columns, self.schema)
        before = [made.field(each.name) if each.name in columns else each for each in self.schema]
        schema = pa.schema([*before, *(each for each in made if each.name not in self.schema.names)])
        return self._after(step(call=call, schema=schema, columns=columns, keeps=True))

    def _selected(self, call: Call, names: Mapping[str, str]) -> Stream:
        """These columns, under new names."""
        schema = pa.schema([field_of(self.schema, each).with_name(name) for each, name in names.items()])
        columns = {name: pl.col(each) for each, name in names.items()}
        return self._after(Compute(call=call, schema=schema, columns=columns, keeps=False))

    def _columns(
        self, call: Call, columns: Sequence[Expression], named: Mapping[str, Expression]
    ) -> dict[str, pl.Expr]:
        made: dict[str, pl.Expr] = {}
        check_new_names(call, named)
        for each in columns:
            expression = column_or_expression(call, each, self.schema)
            name = expression.meta.output_name(raise_if_undetermined=False)
            if not name or name in ("literal", "len") or (isinstance(each, str) and not is_named(expression)):
                raise call.mistake(f"{str(each)!r} has no name: write name=... or ... AS name")
            if name in made:
                raise call.mistake(f"there would be two columns {name!r}")
            check_new_names(call, [name])
            made[name] = expression
        for name, each in named.items():
            if name in made:
                raise call.mistake(f"there would be two columns {name!r}")
            made[name] = parsed(call, each, self.schema)
        return made

    def _declared(self, call: Call, types: Mapping[str, FieldType]) -> pa.Schema:
        check_new_names(call, types)
        try:
            schema = Fields.of(types).schema()
        except TopologyError as error:
            raise call.mistake(error) from None
        if schema is None:
            raise call.mistake("a column needs a type, as in name=str")
        return schema

    def _of_function(self, call: Call, types: Mapping[str, FieldType]) -> pa.Schema:
        if not types:
            raise call.mistake("say which columns the function returns, as in word=str, length=int")
        return self._declared(call, types)

    def _calls(
        self,
        call: Call,
        function: Callable[..., Any],
        setup: Callable[[], Any] | None,
        *,
        concurrency: int | None,
        timeout: Duration | None,
        retries: int,
        given: str = "the row",
    ) -> Calls:
        if not callable(function):
            raise call.mistake(f"{function!r} is a {type(function).__name__}: give a function")
        calls = calls_of(
            call, function, uuid.uuid4().hex, setup=setup, concurrency=concurrency, timeout=timeout, retries=retries
        )
        check_function(call, function, [given, *(["what setup made"] if setup is not None else [])])
        return calls

    def _mapped(self, calls: Calls, types: Mapping[str, FieldType], *, deterministic: bool, many: bool) -> Stream:
        step = FunctionMap(
            call=calls.call,
            schema=self._of_function(calls.call, types),
            calls=calls,
            is_deterministic=deterministic,
            many=many,
            before=frozenset(self.schema.names),
        )
        return self._after(step)

    def _grouping(self, call: Call, grouping: GroupingName | Sequence[str] | Grouping) -> Grouping:
        if isinstance(grouping, Grouping):
            return grouping
        if isinstance(grouping, str):
            if grouping not in _GROUPINGS:
                raise call.mistake(f"grouping is {grouping!r}: give {', '.join(_GROUPINGS)}, or a list of columns")
            return _GROUPINGS[grouping]()
        check_names(call, grouping, self.schema)
        return FieldsGrouping(Fields(*grouping))

    def _closed(self, call: Call) -> Stream | None:
        """The rows with ``WINDOW_TIME`` if they are closed windows; otherwise None."""
        ends = (WINDOW_END, SESSION_END)
        end = next((each for each in ends if closed_once(call, self._node, each) is not None), None)
        if end is None:
            return None
        if WINDOW_TIME in self.schema.names:
            raise call.mistake(f"there is a column {WINDOW_TIME!r} already: rename it")
        return self._after(ClosedTime.of(call, self.schema, end))

    def _time(self, call: Call, on: str | None) -> str:
        """The column of the time. None: that of the record."""
        if on is None:
            self._pipeline.check_timestamps(call, self._node, "on")
            return TIMESTAMP
        check_names(call, [on], self.schema)
        return on

    def _event_time(self, call: Call, on: str | None) -> str:
        """The column of the time, which has a type of times."""
        on = self._time(call, on)
        check_time(call, on, self.schema)
        return on

    def _by_time(
        self, call: Call, name: str, on: str, bounds: WatermarkBounds, *, place: Sequence[str] = ()
    ) -> Mapping[str, Any]:
        """The options of a ``Placed`` of this name that uses event time. Places its watermarks.
        ``place``: the columns that name a row's partition, if it takes them."""
        watermarks = self._pipeline.watermarks(call, name, self._node, on=on, bounds=bounds)
        return {"watermarks": watermarks, "hidden": frozenset(hidden_of([on, *place]))}

    def _placed(
        self,
        call: Call,
        bolt: Bolt,
        name: str,
        grouping: Grouping,
        *,
        keys: Sequence[str] = (),
        **options: Any,
    ) -> Stream:
        """Give the rows to a bolt. ``keys``: those that a tombstone needs to delete its row."""
        if keys and self._pipeline.carries_tombstones(call, self._node, keys):
            options |= {"deletes": self._node, "keys": frozenset(keys)}
        return self._of(self._component(call, bolt, name, grouping, **options))

    def _component(self, call: Call, bolt: Bolt, name: str, grouping: Grouping, **options: Any) -> Placed:
        """``options``: of ``Placed``."""
        for kind, what in KNOWN_WHEN_CLOSED.items():
            if _in_windows(self._node, kind):
                raise call.mistake(f"{what} is known when it closes: group_by(...).agg(...).when_closed(name=...)")
        placed = Placed(id=name, above=self._node, bolt=bolt, grouping=grouping, call=call, **options)
        return self._pipeline.place(placed)

    def _of(self, node: Node) -> Stream:
        """The rows of another node of the same pipeline."""
        return Stream(self._pipeline, node)


def _number_above_0(call: Call, what: str, number: int | None) -> int | None:
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
        raise call.mistake(f"{what} is {number!r}: give a number of 1 or more")
    return number


def _check_kind(call: Call, kind: object) -> None:
    if kind not in ("arrow", "polars", "pandas"):
        raise call.mistake(f"kind is {kind!r}: give 'arrow', 'polars' or 'pandas'")


def _in_windows(node: Node, kind: type[AnyWindows] | None = None) -> bool:
    """Whether rows have been put into windows, of this kind, and still say into which."""
    if kind is None and WINDOW_START not in node.schema.names:
        return False
    while isinstance(node, Stepped):
        if isinstance(node.step, Windows):
            return kind is None or isinstance(node.step.windows, kind)
        node = node.above
    if isinstance(node, Joined):
        return kind is not None and any(_in_windows(each, kind) for each in node.sides)
    if not isinstance(node, Merged):
        return False
    return (all if kind is None else any)(_in_windows(each, kind) for each in node.above)


def _listed(schema: pa.Schema) -> str:
    return ", ".join(f"{each.name}: {each.type}" for each in schema)
