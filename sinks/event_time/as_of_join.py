"""Joins each record with the row of another stream that was valid at the record's time."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from framework.durations import Duration, micros_of
from framework.errors import TopologyError
from framework.operators.watermarks import NEVER
from framework.topology import Fields, Input
from sinks.backend import Key, Value
from sinks.event_time.committer import Watermarks
from sinks.event_time.two_stream_join import PairCommitter
from sinks.join_inputs import LEFT, RIGHT
from sinks.states import MapState

_DUE = "due_at"
_PARTS = ("join_kind", "join_txid", "join_row")
_VALUE = Fields(at=int, due_at=int, waiting=str)
#: The kinds of rows: the newest row of a key before the watermark; and records after the watermark,
#: of each side.
_LATEST, _WAITING = 0, (1, 2)
#: The due time of a row that is never due.
_NOT_DUE = (1 << 62) - 1


class _Timed(NamedTuple):
    """A record with its time. ``came``: the order of arrival, for records of the same time."""

    at: int
    came: tuple[int, int]
    values: Value


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

    def _commit(self, watermarks: Watermarks) -> Iterable[pa.RecordBatch]:
        due = self.state.due(_DUE, NEVER, watermarks.after - 1, self._mine)
        sides: tuple[dict[Key, list[_Timed]], dict[Key, list[_Timed]]] = (defaultdict(list), defaultdict(list))
        txid, gone = self._attempt.txid if self._attempt is not None else 0, []
        for place, value in due:
            gone.append(place)
            if place[-3] != _LATEST:
                side = _WAITING.index(place[-3])
                record = _Timed(value[0], (place[-2], place[-1]), self._decoded(side, value[2]))
                sides[side][place[: -len(_PARTS)]].append(record)
        puts: dict[Key, Value] = {}
        for side in (LEFT, RIGHT):
            for number, (key, at, values, is_late) in enumerate(self._new(side, watermarks.before)):
                if at >= watermarks.after:
                    puts[(*key, _WAITING[side], txid, number)] = at, at, self._encoded(side, values)
                elif side == RIGHT or not is_late:
                    sides[side][key].append(_Timed(at, (txid, number), values))
        keys = list(dict.fromkeys((*sides[LEFT], *sides[RIGHT])))
        held = self.state.multi_get([(*key, _LATEST, 0, 0) for key in keys])
        out: list[Value] = []
        for key, value in zip(keys, held, strict=True):
            held_row = _Timed(value[0], (0, 0), self._decoded(RIGHT, value[2])) if value is not None else None
            latest = held_row
            events = [(each.at, LEFT, each) for each in sides[LEFT].get(key, ())]
            events += [(each.at, RIGHT, each) for each in sides[RIGHT].get(key, ())]
            for _, side, each in sorted(events, key=lambda event: (event[0], event[1] == LEFT, event[2].came)):
                if side == LEFT:
                    out += self._joined(key, each, latest)
                elif latest is None or each.at >= latest.at:
                    latest = each
            if latest is not None and latest is not held_row:
                until = _NOT_DUE if self.within is None else latest.at + self.within
                if until >= watermarks.after:
                    puts[(*key, _LATEST, 0, 0)] = latest.at, until, self._encoded(RIGHT, latest.values)
        self.state.multi_put(list(puts), list(puts.values()))
        self.state.delete([place for place in gone if place not in puts])
        return self._bound().batches(out)

    def _joined(self, key: Key, left: _Timed, latest: _Timed | None) -> list[Value]:
        if latest is not None and latest.at <= left.at and (self.within is None or left.at - latest.at <= self.within):
            return [(*key, *left.values, *latest.values)]
        return [self._bound().alone(key, LEFT, left.values)] if self.how == "left" else []

    def _encoded(self, side: int, values: Value) -> str:
        return json.dumps(list(self._bound()[side].codec.encode(values)))

    def _decoded(self, side: int, text: str) -> Value:
        return self._bound()[side].codec.decode(json.loads(text))
