"""Tables: one row per key. Grouped streams and the newest rows become them."""

from __future__ import annotations

import dataclasses
import datetime
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import polars as pl
import pyarrow as pa

from framework.call_site import Call, called, without_none
from framework.durations import Duration
from framework.errors import ConfigError, RatchetError, TopologyError
from framework.operators.sessions import Sessions
from framework.operators.watermarks import CHANGED_STREAM
from framework.streams.hidden_columns import TIMESTAMP, check_new_names, hidden_of
from framework.streams.plan import BeforeWindows, Node, Placed, SideOutput, Stepped, name_of, ways_to
from framework.streams.polars_expressions import column_or_expression
from framework.streams.ports import JoinHow, StatefulSteps, Target
from framework.streams.stateless_steps import SESSION_END, WINDOW_END, WINDOW_START, Compute, Filter, Windows
from framework.streams.unknown_operator_hints import of_grouped, of_table
from framework.topology import TOMBSTONE, Bolt, Fields, FieldsGrouping
from framework.topology.graph import valid_id
from framework.user_call_argument_checks import checks_arguments

if TYPE_CHECKING:
    from framework.streams.stream import Stream


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
        self._stream._pipeline.set_policy(call, bolt, on_bad_record)
        grouping = FieldsGrouping(Fields(*self._key))
        return self._stream._placed(
            call,
            bolt,
            next(each for each in (name, self._name, target.name) if each is not None),
            grouping,
            parallelism=parallelism,
            uses=self._uses(),
            keys=self.tombstone_keys(),
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

    def tombstone_keys(self) -> tuple[str, ...]:
        """The columns that a tombstone needs to delete its row; none where it deletes none."""
        return ()

    def check_tombstones(self) -> None:
        """Raise ``TopologyError`` where tombstones come that the table cannot put in order."""


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

    def when_closed(self, *, name: str | None = None, allowed_lateness: Duration = 0, parallelism: int = 1) -> Stream:
        """Each window once, when the watermark passes its end: the key, ``window_start``,
        ``window_end`` (of sessions: ``session_start``, ``session_end``) and the aggregates. Rows
        that are too late for their window are left out: ``late()`` of this stream has them.

        ``allowed_lateness``: how long after its end a window still takes rows; it is then sent
        again, and the column ``correction`` is true. ``name``: the id, which the state follows; by
        default it is made of the source and the key, as ``orders-per-shop``."""
        call = called("when_closed", **without_none(name=name))
        return self._stream._of(self._windows(call, name, allowed_lateness, parallelism))

    def when_changed(self, *, name: str | None = None, allowed_lateness: Duration = 0, parallelism: int = 1) -> Stream:
        """Each change of a window that is open, with its values so far, in the columns of
        ``when_closed``: one row per window and transaction. Of one table, ``when_changed`` and
        ``when_closed`` with the same ``name`` are two streams of one step."""
        call = called("when_changed", **without_none(name=name))
        placed = self._windows(call, name, allowed_lateness, parallelism)
        if CHANGED_STREAM not in placed.side_schemas:
            raise call.mistake("a session is known when it closes: use when_closed(name=...)")
        return self._stream._of(SideOutput(placed, CHANGED_STREAM))

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
        found = _before_windows(self._stream._node, pipeline.before_windows)
        if found is None:
            raise call.mistake(
                "only windows close: begin with window(tumbling('1 h'), on=...), and then group_by(...), without steps between "
                "that use the start or the end"
            )
        node, windows = found.rows, found.windows
        key = tuple(each for each in self._key if each != WINDOW_START)
        if not key:
            raise call.mistake("group by at least one column besides the window")
        try:
            committers, kind = pipeline.stateful_steps(call), windows.windows
            if isinstance(kind, Sessions):
                if allowed_lateness:
                    raise call.mistake("a session that is over stays over: leave allowed_lateness out")
                gap = datetime.timedelta(microseconds=kind.gap)
                bolt = committers.sessions(name, gap, windows.on, key, self._aggregates)
            else:
                bolt = committers.windows(
                    name,
                    kind,
                    on=windows.on,
                    key=key,
                    aggregates=self._aggregates,
                    allowed_lateness=allowed_lateness,
                )
        except (ConfigError, TopologyError) as error:
            raise call.mistake(error) from None
        watermarks = pipeline.watermarks(call, name, node, on=windows.on, bounds=windows.bounds)
        uses = tuple(dict.fromkeys([windows.on, *(each for each in self._uses() if each != WINDOW_START)]))
        placed = self._stream._of(node)._component(
            call,
            bolt,
            name,
            FieldsGrouping(Fields(*key)),
            parallelism=parallelism,
            uses=uses,
            hidden=frozenset(hidden_of(uses)),
            watermarks=watermarks,
            closes=SESSION_END if isinstance(kind, Sessions) else WINDOW_END,
        )
        self._closing[name] = options, placed
        return placed

    def _own_name(self, call: Call) -> str:
        """The name where the user gives none: of what is read, and of the key."""
        sources = dict.fromkeys(name_of(component) for component, _ in ways_to(self._stream._node))
        name = f"{'-'.join(sources)}-per-{'-'.join(each for each in self._key if each != WINDOW_START)}"
        try:
            return valid_id("bolt", name)
        except TopologyError:
            raise call.mistake(f"its state needs a name, and {name!r} is none: give name=") from None

    def _committer(self, target: Target) -> Bolt:
        return target.aggregates(self._key, self._aggregates)

    def _uses(self) -> tuple[str, ...]:
        fields = [each.field for each in self._aggregates.values() if each.field is not None]
        return tuple(dict.fromkeys([*self._key, *fields]))


class NewestTable(Table):
    """The newest row of each key. ``call``: its ``latest_by``. ``name``: that of its sink, where
    the sink is given none."""

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
        """The committer that joins rows with those that the table has now. ``names``: those of the
        table's columns in the joined rows. ``tombstones``: whether its rows come with the column
        ``TOMBSTONE``, which they need not have by themselves."""
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


def _before_windows(node: Node, known: dict[Node, BeforeWindows | None]) -> BeforeWindows | None:
    """The rows before they were put into windows; None where there are no windows, or where the
    steps after them use their start or end, or leave out columns. ``known``: those of other
    nodes, so that the same rows are one node."""
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


def of_target(call: Call, note: Callable[[Target], None], target: object, make: Callable[[Any], Bolt]) -> Bolt:
    """The committer that ``make`` gives for a target, and the mistake of this call where there is
    none. ``note`` takes the target."""
    if not isinstance(target, Target):
        raise call.mistake(f"{target!r} is a {type(target).__name__}: give a place such as sqlite('shop.db', 'orders')")
    note(target)
    try:
        return make(target)
    except RatchetError as error:
        raise call.mistake(error) from None
