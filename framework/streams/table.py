"""Tables: one row per key. Grouped streams and the newest rows become them."""

from __future__ import annotations

import dataclasses
import datetime
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import polars as pl
import pyarrow as pa

from framework.call_site import Call, called, without_none
from framework.durations import Duration, micros_above_0
from framework.errors import ConfigError, InvariantViolation, RatchetError, TopologyError
from framework.operators.count_windows import CountWindow
from framework.operators.event_window_assigner import EventWindows
from framework.operators.sessions import Sessions
from framework.operators.watermarks import CHANGED_STREAM, MAX_AHEAD
from framework.streams.hidden_columns import TIMESTAMP, check_new_names, field_of, hidden_of
from framework.streams.plan import BeforeWindows, Node, Placed, SideOutput, Stepped, name_of, ways_to
from framework.streams.polars_expressions import column_or_expression
from framework.streams.ports import JoinHow, StatefulSteps, Target
from framework.streams.stateless_steps import (
    KNOWN_WHEN_CLOSED,
    SESSION_END,
    WINDOW_END,
    WINDOW_START,
    AnyWindows,
    Compute,
    Filter,
    Windows,
)
from framework.streams.unknown_operator_hints import of_grouped, of_table
from framework.streams.watermark_bounds import WatermarkBounds
from framework.topology import TOMBSTONE, Bolt, Committer, Fields, FieldsGrouping
from framework.topology.graph import valid_id
from framework.user_call_argument_checks import checks_arguments

if TYPE_CHECKING:
    from framework.streams.stream import Stream

#: The columns with the ends of windows, for windows that end at a time.
_ENDS: Mapping[type[AnyWindows], str] = {EventWindows: WINDOW_END, Sessions: SESSION_END}


@checks_arguments
class Grouped:
    """A stream grouped by a key. ``agg`` makes a table of it."""

    def __init__(self, stream: Stream, key: tuple[str, ...]) -> None:
        self._stream = stream
        self._key = key

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise of_grouped(self, name)

    def agg(self, *_unnamed: Any, **aggregates: Any) -> AggregatesTable:
        """A row per key with these columns, such as ``count()`` or ``sum_("cents")``. What an
        aggregate takes may be an expression: ``sum_("price * pieces")``."""
        call = called("agg", *_unnamed, **aggregates)
        if _unnamed:
            raise call.mistake(f"{_unnamed[0]} has no name: name each aggregate, as in agg(orders=count())")
        if not aggregates:
            raise call.mistake("give at least one aggregate, as in agg(orders=count())")
        check_new_names(call, aggregates)
        stream = self._stream
        columns: dict[str, pl.Expr] = {}
        made: dict[str, Any] = {}
        for name, each in aggregates.items():
            if not dataclasses.is_dataclass(each) or isinstance(each, type) or not hasattr(each, "output_type"):
                raise call.mistake(
                    f"{name} is a {type(each).__name__}: give an aggregate, such as count() or sum_('cents')"
                )
            if name in self._key:
                raise call.mistake(f"there is a column {name!r} in the key already: give the aggregate another name")
            taken: Any = getattr(each, "field", None)
            made[name] = each
            if taken is None or (isinstance(taken, str) and taken in stream.schema.names):
                continue
            hidden = f"{name}_input"
            if hidden in stream.schema.names:
                raise call.mistake(f"there is a column {hidden!r} already: rename it")
            columns[hidden] = column_or_expression(call, taken, stream.schema)
            made[name] = dataclasses.replace(each, field=hidden)
        if columns:
            stream = stream._with(call, columns)
        for name, each in made.items():
            kind = stream.schema.field(each.field).type if each.field is not None else None
            if type(each).__name__ == "Count" and each.field == f"{name}_input" and pa.types.is_boolean(kind):
                raise call.mistake(
                    f"{name} would count the rows for which {str(aggregates[name].field)!r} is false, too: write sum_(...), which "
                    "counts those for which it is true"
                )
            try:
                each.output_type(kind)
            except RatchetError as error:
                raise call.mistake(error) from None
        return AggregatesTable(stream, self._key, made)

    def process(
        self,
        kind: type[Bolt],
        *,
        on: str | None = None,
        output: Fields,
        name: str,
        late: Duration = 0,
        max_ahead: Duration = MAX_AHEAD,
        idle_after: Duration | None = None,
        advance_when_idle: bool = False,
        parallelism: int = 1,
    ) -> Stream:
        """The rows that your own code emits. It gets the rows of a key in the order of their times
        ``on``, by default the timestamps of their records in the topic, those of the same time by
        topic and partition and then as they arrived. It keeps a value per key, and sets timers.
        ``kind``: a subclass of ``TimerCommitter``, with ``on_record`` and ``on_timer``. ``output``:
        the columns that it emits, as in ``Fields(order=str, cents=int)``.

        ``late``: how far a row may be behind the newest one of its partition; rows that are later
        are left out: ``late()`` of this stream has them. ``max_ahead``, ``idle_after``,
        ``advance_when_idle``: as of ``window``. ``name``: the id, which the state follows."""
        stream, key = self._stream, self._key
        call = called("process", getattr(kind, "__name__", kind), **without_none(on=on, name=name))
        at = stream._event_time(call, on)
        bounds = WatermarkBounds(late, max_ahead, idle_after, advance_when_idle).checked(call)
        if not isinstance(output, Fields) or not output.names or output.schema() is None:
            raise call.mistake("say which columns it emits, and their types, as in output=Fields(order=str, cents=int)")
        check_new_names(call, output.names)
        steps = stream._pipeline.stateful_steps(call)
        place = stream._pipeline.place_of(stream._node) or ()
        bolt = stream._bolt(call, lambda: steps.timers(name, kind, key=key, on=at, output=output, partition=place))
        return stream._placed(
            call,
            bolt,
            name,
            FieldsGrouping(Fields(*key)),
            parallelism=parallelism,
            **stream._by_time(call, name, at, bounds, place=place),
        )


@checks_arguments
class Table(ABC):
    """One row per key, whose values change with the stream."""

    def __init__(self, stream: Stream, key: tuple[str, ...]) -> None:
        self._stream = stream
        self._key = key
        self._name: str | None = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise of_table(self, name)

    def __bool__(self) -> NoReturn:
        raise called("bool", self).mistake(
            "a table has no rows while a pipeline is made: filter(...) of the stream that it is made of chooses rows"
        )

    def upsert_into(
        self, target: Target, *, name: str | None = None, parallelism: int = 1, on_bad_record: str | Bolt = "fail"
    ) -> Stream:
        """Keep the table there, exactly once. Returns the stream of the rows that change, with
        their new values. ``name``: the id of the sink, which its state follows. ``on_bad_record``:
        what becomes of a record whose row the sink refuses, as of ``Stream.append_into``."""
        call = called("upsert_into", target, **without_none(name=name))
        bolt = of_target(call, self._stream._pipeline.note, target, self._committer)
        self.check_tombstones()
        if isinstance(bolt, Committer) and (windows := _windows_above(self._stream._node)) is not None:
            bolt.settings_above = {"window": windows.settings()}
        self._stream._pipeline.set_policy(call, bolt, on_bad_record)
        own = next(each for each in (name, self._name, target.name) if each is not None)
        return self._stream._placed(
            call,
            bolt,
            own,
            FieldsGrouping(Fields(*self._key)),
            parallelism=parallelism,
            uses=self._uses(),
            keys=self.tombstone_keys(),
            **self._by_time(call, own),
        )

    def append_into(self, target: Target, **options: Any) -> Stream:
        """Refused: a table has no rows to append, because they change."""
        raise called("append_into", target).mistake(
            "a table changes its rows: use upsert_into(...), or append the stream that it is made of"
        )

    @abstractmethod
    def _committer(self, target: Target) -> Bolt: ...

    @abstractmethod
    def _uses(self) -> tuple[str, ...] | None:
        """The columns that the committer takes; None: all."""

    def _by_time(self, call: Call, name: str) -> Mapping[str, Any]:
        """The options of a ``Placed`` that uses event time."""
        return {}

    def tombstone_keys(self) -> tuple[str, ...]:
        """The columns that a tombstone needs to delete its row; none where it deletes none."""
        return ()

    def check_tombstones(self) -> None:
        """Raise ``TopologyError`` if the table gets tombstones that it cannot order."""


@checks_arguments
class AggregatesTable(Table):
    """Aggregates per key."""

    def __init__(self, stream: Stream, key: tuple[str, ...], aggregates: Mapping[str, Any]) -> None:
        super().__init__(stream, key)
        self._aggregates = aggregates
        #: The steps that keep the open windows: name -> its options, and the step.
        self._closing: dict[str, tuple[tuple[Duration, int], Placed]] = {}

    def __repr__(self) -> str:
        return f"Table({', '.join(self._key)} -> {', '.join(self._aggregates)})"

    def expire(
        self,
        after: Duration,
        *,
        on: str | None = None,
        late: Duration = 0,
        max_ahead: Duration = MAX_AHEAD,
        idle_after: Duration | None = None,
        advance_when_idle: bool = False,
    ) -> ExpiringTable:
        """The table without the rows of keys that have had no row for this time, by the time
        ``on``, by default the timestamp of the record in its topic. A row is deleted in the
        transaction whose watermark reaches the newest time of its key plus ``after``. The rows of
        that transaction count first.

        ``upsert_into(...)`` keeps the table, with a column ``expires_at``, and returns a stream:
        its ``expired()`` has each deleted row once, and its ``late()`` the rows that are ``after``
        or more behind the watermark, which change nothing. ``late``: how far a row may be behind
        the newest one of its partition. ``max_ahead``, ``idle_after``, ``advance_when_idle``: as of
        ``window``."""
        call = called("expire", after, **without_none(on=on))
        bounds = WatermarkBounds(late, max_ahead, idle_after, advance_when_idle).checked(call)
        at = self._stream._event_time(call, on)
        try:
            micros_above_0(after, "the time after which a row expires")
        except ConfigError as error:
            raise call.mistake(error) from None
        return ExpiringTable(self._stream, self._key, self._aggregates, on=at, after=after, bounds=bounds)

    def when_closed(self, *, name: str | None = None, allowed_lateness: Duration = 0, parallelism: int = 1) -> Stream:
        """Each window once, when the watermark passes its end: the key, ``window_start``,
        ``window_end`` (of sessions: ``session_start``, ``session_end``) and the aggregates. Rows
        that are too late for their window are left out: ``late()`` of this stream has them.

        A window by count comes in the transaction of its last row. Its ``window_start`` is the
        number of its first row among those of its key, from 0, and its ``window_end`` the number
        after its last one.

        ``allowed_lateness``: how long after its end a window still takes rows; the window is then
        sent again, with the column ``correction`` true. ``name``: the id of the step and its state;
        by default it is made of the source and the key, as ``orders-per-shop``."""
        call = called("when_closed", **without_none(name=name))
        return self._stream._of(self._windows(call, name, allowed_lateness, parallelism))

    def when_changed(self, *, name: str | None = None, allowed_lateness: Duration = 0, parallelism: int = 1) -> Stream:
        """Each change of a window that is open, with its values so far, in the columns of
        ``when_closed``: one row per window and transaction, in the order of their ends. Of one
        table, ``when_changed`` and ``when_closed`` with the same ``name`` are two streams of one
        step."""
        call = called("when_changed", **without_none(name=name))
        what = KNOWN_WHEN_CLOSED.get(type(self._before(call).windows.windows))
        if what is not None:
            raise call.mistake(f"{what} is known when it closes: use when_closed(name=...)")
        return self._stream._of(SideOutput(self._windows(call, name, allowed_lateness, parallelism), CHANGED_STREAM))

    def _before(self, call: Call) -> BeforeWindows:
        """The rows before they were put into windows."""
        found = _before_windows(self._stream._node, self._stream._pipeline.before_windows)
        if found is None:
            raise call.mistake(
                "only windows close: begin with window(tumbling('1 h'), on=...), and then group_by(...), without steps between "
                "that use the start or the end"
            )
        return found

    def _windows(self, call: Call, given: str | None, allowed_lateness: Duration, parallelism: int) -> Placed:
        """The step that keeps the open windows."""
        name = given if given is not None else self._own_name(call)
        options = (allowed_lateness, parallelism)
        if name in self._closing:
            made_with, placed = self._closing[name]
            if made_with != options:
                raise call.mistake(f"{placed.call} has other options: give both the same")
            return placed
        pipeline = self._stream._pipeline
        node, windows = self._before(call)
        kind, on = windows.windows, windows.on
        key = tuple(each for each in self._key if each != WINDOW_START)
        if not key:
            raise call.mistake("group by at least one column besides the window")
        if allowed_lateness and not isinstance(kind, EventWindows):
            raise call.mistake(f"{KNOWN_WHEN_CLOSED[type(kind)]} that is over stays over: leave allowed_lateness out")
        try:
            bolt = self._committer_of(pipeline.stateful_steps(call), name, windows, key, allowed_lateness)
        except (ConfigError, TopologyError) as error:
            raise call.mistake(error) from None
        watermarks = pipeline.watermarks(call, name, node, on=on, bounds=windows.bounds) if on is not None else ()
        timed = [on] if on is not None else []
        uses = tuple(dict.fromkeys([*timed, *(each for each in self._uses() if each != WINDOW_START)]))
        placed = self._stream._of(node)._component(
            call,
            bolt,
            name,
            FieldsGrouping(Fields(*key)),
            parallelism=parallelism,
            uses=uses,
            hidden=frozenset(hidden_of(uses)),
            watermarks=watermarks,
            closes=_ENDS.get(type(kind)),
        )
        self._closing[name] = options, placed
        return placed

    def _committer_of(
        self, committers: StatefulSteps, name: str, windows: Windows, key: Sequence[str], allowed_lateness: Duration
    ) -> Bolt:
        kind, on = windows.windows, windows.on
        if isinstance(kind, CountWindow):
            return committers.count_windows(name, kind, key, self._aggregates)
        if on is None:
            raise InvariantViolation(f"{kind} goes by a time")
        if isinstance(kind, Sessions):
            gap = datetime.timedelta(microseconds=kind.gap)
            return committers.sessions(name, gap, on, key, self._aggregates)
        return committers.windows(
            name, kind, on=on, key=key, aggregates=self._aggregates, allowed_lateness=allowed_lateness
        )

    def _own_name(self, call: Call) -> str:
        """The default name, made of the source and the key."""
        sources = dict.fromkeys(name_of(component) for component, _ in ways_to(self._stream._node))
        name = f"{'-'.join(sources)}-per-{'-'.join(each for each in self._key if each != WINDOW_START)}"
        try:
            return valid_id("bolt", name)
        except TopologyError:
            raise call.mistake(f"its state needs a name, and {name!r} is none: give name=") from None

    def _committer(self, target: Target) -> Bolt:
        return target.aggregates(self._key, self._aggregates)

    def _uses(self) -> tuple[str, ...]:
        return _used(self._key, self._aggregates)


class ExpiringTable(Table):
    """Aggregates per key, without keys that have had no row for a time."""

    def __init__(
        self,
        stream: Stream,
        key: tuple[str, ...],
        aggregates: Mapping[str, Any],
        *,
        on: str,
        after: Duration,
        bounds: WatermarkBounds,
    ) -> None:
        super().__init__(stream, key)
        self._aggregates, self._on, self._after, self._bounds = aggregates, on, after, bounds

    def __repr__(self) -> str:
        return f"Table({', '.join(self._key)} -> {', '.join(self._aggregates)}, for {self._after})"

    def _committer(self, target: Target) -> Bolt:
        return target.expiring(self._key, self._aggregates, self._on, self._after)

    def _uses(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*_used(self._key, self._aggregates), self._on]))

    def _by_time(self, call: Call, name: str) -> Mapping[str, Any]:
        return self._stream._by_time(call, name, self._on, self._bounds)


def _used(key: Sequence[str], aggregates: Mapping[str, Any]) -> tuple[str, ...]:
    """The columns that aggregates per key take."""
    fields = [each.field for each in aggregates.values() if each.field is not None]
    return tuple(dict.fromkeys([*key, *fields]))


class NewestTable(Table):
    """The newest row of each key. ``call``: its ``latest_by``. ``name``: the default name of its
    sink."""

    def __init__(
        self, stream: Stream, key: tuple[str, ...], sequence_by: str | None, call: Call, name: str | None = None
    ) -> None:
        super().__init__(stream, key)
        self._name = name
        self._sequence_by, self._call = sequence_by, call
        found = [each for each in stream.schema if each.name == TOMBSTONE]
        self._deletes = bool(found) and found[0].type == pa.bool_()

    def __repr__(self) -> str:
        return f"Table({', '.join(self._key)} -> the newest row)"

    def rows_of_join(self, call: Call, on: tuple[str, ...], times: tuple[str, str] | None) -> Stream:
        """The rows that a join takes. With times, the newest by event time is that of a moment.
        Raises ``TopologyError`` where the table has another order then, or other keys."""
        if set(on) != set(self._key):
            raise call.mistake(
                f"the table has a row per {', '.join(self._key)}: give the same columns as on=; rename(...) before "
                "latest_by(...) makes names equal"
            )
        if times is None:
            if not self._own():
                raise call.mistake("the table has no column beside its key: keep one, or use deduplicate(...)")
            return self._stream
        at = times[1]
        if self._sequence_by not in (None, at):
            by = "the record's timestamp" if at == TIMESTAMP else repr(at)
            raise call.mistake(
                f"the row of a moment is the newest by {by}, and the table goes by {self._sequence_by!r}: leave sequence_by out"
            )
        if self._deletes:
            raise call.mistake(
                f"a row that is deleted cannot be told from an older one here: leave delete_when out, and the column {TOMBSTONE!r}"
            )
        return self._stream

    def joining(
        self, committers: StatefulSteps, name: str, names: Mapping[str, str], how: JoinHow, *, tombstones: bool
    ) -> Bolt:
        """The committer that joins rows with the present rows of the table. ``names``: the names of
        the table's columns in the joined rows. ``tombstones``: whether the table's rows get the
        column ``TOMBSTONE``."""
        sequence = names[self._sequence_by] if self._sequence_by is not None else None
        deleted = names.get(TOMBSTONE, TOMBSTONE) if self._deletes or tombstones else None
        return committers.current_rows(name, self._key, names[self._own()[0]], sequence, deleted=deleted, how=how)

    def _own(self) -> list[str]:
        """The columns beside the key that a join keeps."""
        other = (
            *self._key,
            *self._stream._pipeline.left_out_of_joins(self._stream._node),
            *([TOMBSTONE] if self._deletes else []),
        )
        return [each for each in self._stream.schema.names if each not in other]

    def _committer(self, target: Target) -> Bolt:
        return target.newest(self._key, self._sequence_by)

    def _uses(self) -> None:
        return None

    def tombstone_keys(self) -> tuple[str, ...]:
        return (*self._key, *([self._sequence_by] if self._sequence_by is not None else []))

    def check_tombstones(self) -> None:
        if self._sequence_by is not None:
            self._stream._pipeline.check_sequence(self._call, self._stream._node, self._key, self._sequence_by)


def _windows_above(node: Node) -> EventWindows | None:
    """The windows that rows were put into, if they are windows of a fixed length."""
    while isinstance(node, Stepped):
        if isinstance(node.step, Windows):
            return node.step.windows if isinstance(node.step.windows, EventWindows) else None
        node = node.above
    return None


def _before_windows(node: Node, known: dict[Node, BeforeWindows | None]) -> BeforeWindows | None:
    """The rows before they were put into windows; None if there are no windows, or if the steps
    after them use their start or end, or leave out columns. ``known``: such rows of other nodes, so
    that the same rows are one node."""
    if node in known or not isinstance(node, Stepped):
        return known.get(node)
    step = node.step
    if isinstance(step, Windows):
        return BeforeWindows(node.above, step)
    found = _before_windows(node.above, known)
    known[node] = None
    if found is None or not (isinstance(step, Filter) or (isinstance(step, Compute) and step.keeps)):
        return None
    own, on = {WINDOW_START, WINDOW_END}, found.windows.on
    made = frozenset(step.columns) if isinstance(step, Compute) else frozenset()
    if own & (step.needs(made) | made) or on in made:
        return None
    schema = pa.schema([each for each in step.schema if each.name not in own])
    known[node] = BeforeWindows(Stepped(found.rows, dataclasses.replace(step, schema=schema)), found.windows)
    return known[node]


def check_time(call: Call, name: str, schema: pa.Schema) -> None:
    """Refuse a number as a time, because it has no unit."""
    kind = field_of(schema, name).type
    if not pa.types.is_temporal(kind):
        raise call.mistake(f"column {name!r} is {kind}, and event time needs a timestamp: cast it first")


def of_target(call: Call, note: Callable[[Target], None], target: object, make: Callable[[Any], Bolt]) -> Bolt:
    """The committer that ``make`` gives for a target; raises the mistake of this call if there is
    none. ``note`` takes the target."""
    if not isinstance(target, Target):
        raise call.mistake(f"{target!r} is a {type(target).__name__}: give a place such as sqlite('shop.db', 'orders')")
    note(target)
    try:
        return make(target)
    except RatchetError as error:
        raise call.mistake(error) from None
