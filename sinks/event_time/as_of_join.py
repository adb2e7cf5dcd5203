"""Joins each record with the row of another stream that was valid at the record's time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from framework.durations import Duration, micros_of
from framework.errors import TopologyError
from framework.operators.watermarks import NEVER
from framework.topology import Fields, Input
from sinks.backend import Key, Value
from sinks.event_time.event_time_committer_base import Watermarks
from sinks.event_time.records_below_watermark import NOT_DUE, OF_KEY, ONE_ROW, Passed, in_order, numbered
from sinks.event_time.two_stream_committer import PairCommitter
from sinks.external_row_sorter import merged
from sinks.join_inputs import LEFT, RIGHT
from sinks.states import MapState
from sinks.value_encoding import whole_number

_DUE = "due_at"
_PARTS = ("join_kind", "join_txid", "join_row")
_VALUE = Fields(at=int, due_at=int, waiting=str)
#: The kinds of records after the watermark, by side. The single row of a key is its newest row
#: before the watermark. Of records of the same time, those of the right side pass first.
_WAITING = (1, 2)


class _Timed(NamedTuple):
    """A record with its time."""

    at: int
    values: Value


@dataclass(slots=True)
class _Run:
    """The key whose records are passing. ``held``: its newest row in the state. ``is_over``: that
    row is due."""

    key: Key
    held: _Timed | None
    latest: _Timed | None
    is_over: bool = False


class AsOfJoiningCommitter(PairCommitter):
    """Joins each left record with the right record of its key that was the newest one at the time
    of the left one: an order with the price that was valid then.

    * ``left``, ``right``: the event time fields of the two streams, which tell them apart, as in a
      ``JoiningCommitter``.
    * ``within``: the maximum age of the right record; None: no limit.
    * ``how``: "left" sends a left record without a right one, with nulls; "inner" does not send it.

    Default stream: the key, the other fields of the left record, those of the right one. A row is
    sent once, in the transaction whose watermark passes the left record, because right records for
    it may arrive until then. Among right records of the same time, the last to arrive counts.
    ``LATE_LEFT_STREAM`` and ``LATE_RIGHT_STREAM``: records behind the watermark. A late left record
    is not joined. A late right record applies to rows sent from then on.

    The state holds the records ahead of the watermark, and one row per key behind it.

    In addition to the two streams, subscribe it by ``all_grouping`` to a ``WatermarkCommitter``
    that is subscribed to both.
    """

    def __init__(
        self,
        state: MapState,
        *,
        key: Sequence[str],
        left: str,
        right: str,
        within: Duration | None = None,
        how: Literal["inner", "left"] = "left",
        unit: Literal["s", "ms", "us"] = "s",
    ) -> None:
        super().__init__(state, key=key, left=left, right=right, unit=unit)
        if how not in ("inner", "left"):
            raise TopologyError(f"AsOfJoiningCommitter: how is {how!r}: give 'inner' or 'left'")
        self.how = how
        self.within = micros_of(within, "within") if within is not None else None

    # --- on the driver ----------------------------------------------------------------------------

    def _bind_state(self, left: Input) -> None:
        types = {name: left.fields.type_of(name) for name in self.key}
        self.state.bind(Fields.of({**types, **dict.fromkeys(_PARTS, pa.int64())}), _VALUE)
        self.state.backend.order_by(_DUE)

    def state_settings(self) -> Mapping[str, Any]:
        return {**super().state_settings(), "within": self.within, "how": self.how}

    # --- in tasks ---------------------------------------------------------------------------------

    def _commit(self, watermarks: Watermarks) -> Iterator[pa.RecordBatch]:
        txid, own = self._attempt.txid if self._attempt is not None else 0, []
        puts: dict[Key, Value] = {}
        for side in (LEFT, RIGHT):
            came = self._new(side, watermarks.before)
            counted = ((its.key, its.at, its.values, its.place) for its in came if side == RIGHT or not its.is_late)
            for key, number, at, values in numbered(counted):
                place = (*key, _WAITING[side], txid, number)
                if at >= watermarks.after:
                    puts[place] = at, at, self._bound()[side].codec.text_of(values)
                else:
                    own.append(Passed(place, at, values))
        self.state.multi_put(list(puts), list(puts.values()))
        run: _Run | None = None
        for page in merged(self._due(watermarks.after), own, lambda each: in_order(each.at, each.place)):
            out: list[Value] = []
            keys = list(dict.fromkeys(each.key for each in page))
            held = dict(zip(keys, self.state.multi_get([(*key, *ONE_ROW) for key in keys]), strict=True))
            for each in page:
                if run is None or run.key != each.key:
                    self._end(run, watermarks.after)
                    value = held[each.key]
                    latest = self._restored((*each.key, *ONE_ROW), RIGHT, value) if value is not None else None
                    run = _Run(each.key, latest, latest)
                out += self._pass(run, each)
            self.state.delete([each.place for each in page if each.kind != OF_KEY and each.place[-2] != txid])
            yield from self._bound().batches(out)
            self.state.write()
        self._end(run, watermarks.after)

    def _due(self, upto: int) -> Iterator[list[Passed]]:
        """Pages of the rows that the watermark has passed: key by key, and by time."""
        for page in self.state.due(_DUE, NEVER, upto - 1, self._mine, in_order):
            yield [
                Passed(place, value[0], None)
                if place[-3] == OF_KEY
                else Passed(place, *self._restored(place, _WAITING.index(place[-3]), value))
                for place, value in page
            ]

    def _pass(self, run: _Run, each: Passed) -> Iterable[Value]:
        """The rows of a record that the watermark has passed."""
        if each.values is None:
            run.is_over = True
        elif each.kind == _WAITING[LEFT]:
            return self._joined(run.key, _Timed(each.at, each.values), run.latest)
        elif run.latest is None or each.at >= run.latest.at:
            run.latest = _Timed(each.at, each.values)
        return ()

    def _end(self, run: _Run | None, watermark: int) -> None:
        """Write the newest row of a key, after all its records that the watermark has passed."""
        if run is None:
            return
        place, latest = (*run.key, *ONE_ROW), run.latest
        if latest is not None and latest is not run.held:
            until = NOT_DUE if self.within is None else latest.at + self.within
            if until >= watermark:
                self.state.multi_put([place], [(latest.at, until, self._bound()[RIGHT].codec.text_of(latest.values))])
                return
        if run.is_over:
            self.state.delete([place])

    def _joined(self, key: Key, left: _Timed, latest: _Timed | None) -> list[Value]:
        if latest is not None and latest.at <= left.at and (self.within is None or left.at - latest.at <= self.within):
            return [(*key, *left.values, *latest.values)]
        return [self._bound().alone(key, LEFT, left.values)] if self.how == "left" else []

    def _restored(self, place: Key, side: int, value: Value) -> _Timed:
        values_of = self._bound()[side].codec.values_of
        return self.state.restored(place, lambda its: _Timed(whole_number(its[0]), values_of(its[2])), value)
