"""Joins two streams by key, within a bound of event time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import pyarrow as pa

from framework.durations import Duration, micros_of
from framework.errors import TopologyError
from framework.operators.interval_join_buckets import pairs
from framework.topology import Input
from sinks.backend import Key, Value
from sinks.event_time.event_time_committer_base import Watermarks
from sinks.event_time.join_buffer import DUE, VALUE_FIELDS, Sides, Waiting, WaitingRows, key_fields
from sinks.event_time.two_stream_committer import LATE_LEFT_STREAM, LATE_RIGHT_STREAM, PairCommitter
from sinks.join_inputs import LEFT, RIGHT
from sinks.states import MapState

__all__ = ["LATE_LEFT_STREAM", "LATE_RIGHT_STREAM", "JoiningCommitter"]


class JoiningCommitter(PairCommitter):
    """Joins records of two streams that have the same key, and whose event times differ by at most
    ``within``. Its opaque state holds the records that may still find a partner, several per row: a
    record, and each pair, costs the same whether its key has one record or a million.

    * ``left``, ``right``: the event time fields of the two streams, which tell them apart: each
      stream has its own field, and not the other's. Both have the fields of ``key``, with the same
      types, and share no other field.
    * ``how``: "inner", "left", "right" or "outer".

    Default stream: the key, the other fields of the left record, those of the right one. A pair is
    sent in the transaction that reads the second of the two. A record of an outer side without a
    partner is sent once, with nulls, when the watermark has passed the bound. ``LATE_LEFT_STREAM``
    and ``LATE_RIGHT_STREAM``: records behind the watermark, whose partners may already be deleted.

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
        within: Duration,
        how: Literal["inner", "left", "right", "outer"] = "inner",
        unit: Literal["s", "ms", "us"] = "s",
    ) -> None:
        super().__init__(state, key=key, left=left, right=right, unit=unit)
        if how not in ("inner", "left", "right", "outer"):
            raise TopologyError(f"JoiningCommitter: how is {how!r}: give 'inner', 'left', 'right' or 'outer'")
        self.within, self.how = micros_of(within, "within"), how
        self._outer = (how in ("left", "outer"), how in ("right", "outer"))
        if not any(self._outer):
            self.due_streams = frozenset()  # the second record of a pair is one of its transaction

    # --- on the driver ----------------------------------------------------------------------------

    def _bind_state(self, left: Input) -> None:
        self.state.bind(key_fields(left.fields.select(list(self.key))), VALUE_FIELDS)
        self.state.backend.order_by(DUE)

    def state_settings(self) -> Mapping[str, Any]:
        return {**super().state_settings(), "within": self.within, "how": self.how}

    # --- in tasks ---------------------------------------------------------------------------------

    def _commit(self, watermarks: Watermarks) -> Iterator[pa.RecordBatch]:
        new: dict[Key, Sides] = {}
        for side in (LEFT, RIGHT):
            for key, at, values, is_late, _ in self._new(side, watermarks.before):
                if not is_late:
                    new.setdefault(key, ([], []))[side].append(Waiting(at, values))
        codecs = [side.codec for side in self._bound()]
        rows = WaitingRows(self.state, codecs, self.within, self._outer, watermarks.after)
        rows.read(new)
        yield from self._bound().batches(self._pairs(new, rows))
        out: list[Value] = []
        for key, its in new.items():
            for side, records in enumerate(its):
                for each in sorted(records, key=_by_content):
                    if not rows.is_over(each):
                        rows.add(key, side, each)
                    elif self._outer[side] and not each.matched:
                        out.append(self._bound().alone(key, side, each.values))
        yield from self._bound().batches(out)
        for page in rows.write(self._mine):
            yield from self._bound().batches([self._bound().alone(key, side, each.values) for key, side, each in page])

    def _pairs(self, new: Mapping[Key, Sides], rows: WaitingRows) -> Iterator[Value]:
        """The rows of the pairs of new records, made one by one, because n records on the left and
        m on the right with one key are n * m pairs."""
        for key, (lefts, rights) in new.items():
            held = rows.of(key, LEFT), rows.of(key, RIGHT)
            for left, right in chain(
                pairs(lefts, held[RIGHT] + rights, self.within), pairs(held[LEFT], rights, self.within)
            ):
                rows.match(LEFT, left)
                rows.match(RIGHT, right)
                yield (*key, *left.values, *right.values)


def _by_content(each: Waiting) -> tuple[int, str]:
    """The order in which rows hold the records of a transaction. Records that tasks read in
    parallel arrive in any order, and ``verify`` computes the same rows."""
    return each.at, repr(each.values)
