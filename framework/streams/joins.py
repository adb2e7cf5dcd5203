"""Joins of a stream with another stream or a table: the columns of both sides, and the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from framework.call_site import Call
from framework.durations import Duration
from framework.errors import InvariantViolation
from framework.streams.hidden_columns import PLACE, TIME, TIME_RIGHT, TIMESTAMP, is_hidden
from framework.streams.plan import Joined, Merged, Node, Placed, closed_once, ways_to
from framework.streams.polars_expressions import check_names
from framework.streams.ports import JoinHow
from framework.streams.table import NewestTable, check_time
from framework.streams.watermark_bounds import WatermarkBounds
from framework.topology import TOMBSTONE, Bolt, Fields, FieldsGrouping

if TYPE_CHECKING:
    from framework.streams.stream import Stream

#: The column of the times of both sides of a join.
_EVENT_TIME = "event_time"


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """``times``: the columns of the times of both sides; None: a table is joined as it is in the
    transaction. The others: as of ``Stream.join``."""

    on: tuple[str, ...]
    times: tuple[str, str] | None
    within: Duration | None
    how: JoinHow
    name: str
    bounds: WatermarkBounds


class Join:
    """One ``join``. Raises ``TopologyError`` for sides that cannot be joined."""

    def __init__(self, call: Call, left: Stream, other: Stream | NewestTable, options: JoinOptions) -> None:
        self._call, self._left, self._options = call, left, options
        self._pipeline = left._pipeline
        self._table = other if isinstance(other, NewestTable) else None
        self._right = right = self._right_side(other)
        self._check_sides()
        place, other_place = (self._pipeline.left_out_of_joins(each._node) for each in (left, right))
        on = options.on
        #: The columns of the left side that the joined rows have.
        self._taken = [each for each in left.schema.names if each not in place or each in on]
        #: The columns of the right side -> their names in the joined rows.
        self._names = {
            each: each if each in on or each not in self._taken else f"{each}_right" for each in right.schema.names
        }
        twice = next((each for each in self._names.values() if list(self._names.values()).count(each) > 1), None)
        if twice is not None:
            raise call.mistake(f"there would be two columns {twice!r}: rename one")
        ours = {each: each for each in self._taken}
        theirs = {each: self._names[each] for each in right.schema.names if each not in other_place or each in on}
        left_time, right_time = options.times or ("", "")
        if left_time == TIMESTAMP:
            for side in (left, right):
                self._pipeline.check_timestamps(call, side._node, "times")
            ours[left_time], theirs[right_time] = TIME, TIME_RIGHT
        #: The columns of the times in the rows that the step gets.
        self._own_times = ours.get(left_time, left_time), theirs.get(right_time, right_time)
        self._sides = left._selected(call, ours)._node, right._selected(call, theirs)._node

    def placed(self, parallelism: int) -> Placed:
        """The step."""
        table, times = self._table, self._options.times
        if times is not None:
            bolt, more = self._by_event_time(times)
        elif table is not None:
            bolt, more = self._with_current_rows(table)
        else:
            raise InvariantViolation("streams are joined without times")
        return self._left._of(Joined(self._sides))._component(
            self._call,
            bolt,
            self._options.name,
            FieldsGrouping(Fields(*self._options.on)),
            parallelism=parallelism,
            **more,
        )

    # --- the sides --------------------------------------------------------------------------------

    def _right_side(self, other: Stream | NewestTable) -> Stream:
        """The rows of the other side."""
        call, options = self._call, self._options
        if isinstance(other, NewestTable):
            rows = other.rows_of_join(call, options.on, options.times)
        elif options.within is None:
            raise call.mistake("say how far apart the rows of a pair may be, as in within='1 h'")
        else:
            rows = other
        if rows._pipeline is not self._pipeline:
            raise call.mistake("the streams are of two pipelines: read both topics in one")
        return rows

    def _check_sides(self) -> None:
        """Raise ``TopologyError`` unless both sides have the key, and are not the same rows."""
        call, on, left, right = self._call, self._options.on, self._left, self._right
        for side, has, lacks in (("this", left, right), ("the other", right, left)):
            for each in on:
                if isinstance(each, str) and each in has.schema.names and each not in lacks.schema.names:
                    raise call.mistake(
                        f"{side} stream has a column {each!r}, and the one that it is joined with has not (it has: "
                        f"{', '.join(lacks.schema.names)}): both need the columns of on=, so rename one before"
                    )
        check_names(call, on, left.schema)
        if self._table is None and set(ways_to(left._node)) & set(ways_to(right._node)):
            raise call.mistake(
                "a stream is joined with itself, so each of its rows would find itself: filter one of them"
            )

    # --- the step ---------------------------------------------------------------------------------

    def _with_current_rows(self, table: NewestTable) -> tuple[Bolt, Mapping[str, Any]]:
        """The committer that joins rows with the table as it is in their transaction, and options
        of its ``Placed``."""
        call, options = self._call, self._options
        if options.bounds != WatermarkBounds():
            raise call.mistake(
                "without times= and within= there is no time to compare: leave late, max_ahead, idle_after and "
                "advance_when_idle out"
            )
        table.check_tombstones()
        keys = [self._names[each] for each in table.tombstone_keys()]
        rows = self._sides[1]
        tombstones = self._pipeline.carries_tombstones(call, rows, keys)
        if tombstones and TOMBSTONE in self._taken:
            raise call.mistake(f"there would be two columns {TOMBSTONE!r}: rename one")
        steps = self._pipeline.stateful_steps(call)
        bolt = self._left._bolt(
            call, lambda: table.joining(steps, options.name, self._names, options.how, tombstones=tombstones)
        )
        return bolt, {"deletes": rows, "keys": frozenset(keys)} if tombstones else {}

    def _by_event_time(self, times: tuple[str, str]) -> tuple[Bolt, Mapping[str, Any]]:
        """The committer that joins rows by their times, and options of its ``Placed``."""
        call, options = self._call, self._options
        sides = list(zip((self._left, self._right), times, strict=True))
        windows = [closed_once(call, side._node, time) for side, time in sides]
        timed = [each for each, its in zip(sides, windows, strict=True) if its is None]
        moments = (self._moments(timed), _EVENT_TIME) if timed else None
        steps = self._pipeline.stateful_steps(call)
        common = options.name, options.on, self._own_times
        hidden: Sequence[str] = ()
        if self._table is None:
            bolt = self._left._bolt(call, lambda: steps.pairs(*common, options.within or 0, options.how))
        else:
            hidden = PLACE if all(self._pipeline.carries(side._node, PLACE) for side, _ in sides) else ()
            bolt = self._left._bolt(
                call, lambda: steps.latest_rows(*common, options.within, options.how, partition=hidden)
            )
        closed = [each for each in windows if each is not None]
        watermarks = self._pipeline.watermarks_of(call, options.name, moments, closed, options.bounds)
        return bolt, {"hidden": frozenset(hidden), "watermarks": watermarks}

    def _moments(self, sides: Sequence[tuple[Stream, str]]) -> Node:
        """The times of the rows of one side, or of both."""
        call = self._call
        for stream, time in sides:
            check_names(call, [time] if time != TIMESTAMP else [], stream.schema)
        place = self._pipeline.place_of(*(stream._node for stream, _ in sides))
        if place is None:
            streams = [stream for stream, _ in sides]
            lacking = next((each for each in streams if self._pipeline.place_of(each._node) is None), streams[0])
            raise call.mistake(self._pipeline.without_partition(lacking._node))
        moments = [
            stream._selected(call, {each: each for each in place if not is_hidden(each)} | {time: _EVENT_TIME})
            for stream, time in sides
        ]
        schema = moments[0].schema
        if moments[-1].schema != schema:
            left, right = (stream.schema.field(time).type for stream, time in sides)
            raise call.mistake(f"the times differ: {left} and {right}: cast one")
        stream, time = sides[0]
        check_time(call, time, stream.schema)
        return Merged(tuple(each._node for each in moments), schema) if len(moments) > 1 else moments[0]._node
