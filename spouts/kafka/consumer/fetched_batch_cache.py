"""Reads parts of a batch again, one after the other, from a copy in memory (ADR 128). After a seek,
a consumer drops its fetched records, and its next answer waits for the previous fetch. So the read
of the first part fetches the whole range of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from spouts.kafka.consumer.range_consumer_base import Range
from spouts.kafka.partition_plan_entries import TopicPartition
from spouts.kafka.record_deserialization import Parts

#: The largest copy that is kept; each part of a larger batch is fetched separately.
KEPT_BYTES_MAX = 32 << 20


class _Session(Protocol):
    def read(
        self,
        ranges: Mapping[TopicPartition, Range],
        parts: Parts,
        check_alive: Callable[[], None],
        takes_out: Callable[[str], bool],
    ) -> Iterator[Any]: ...


class _Rows(NamedTuple):
    """Consecutive rows of a chunk, with their offsets."""

    chunk: Any
    first: int
    offsets: Any


class FetchedBatchCache:
    """The copies, one per session. A session is used by one thread at a time."""

    def __init__(self) -> None:
        self._copies: WeakKeyDictionary[_Session, dict[TopicPartition, tuple[Range, list[_Rows] | None]]]
        self._copies = WeakKeyDictionary()

    def read(
        self,
        session: _Session,
        ranges: Mapping[TopicPartition, Range],
        wholes: Mapping[TopicPartition, Range],
        parts: Parts,
        check_alive: Callable[[], None],
        *,
        takes_out: Callable[[str], bool],
    ) -> Iterator[Any]:
        """As ``read`` of the session. ``wholes``: the ranges of which ``ranges`` are parts. A range
        that is not a part of another range is read directly, and ends the copies."""
        if not wholes:
            self._copies.pop(session, None)
            yield from session.read(ranges, parts, check_alive, takes_out)
            return
        copies = self._copies.setdefault(session, {})
        missing = {tp: whole for tp, whole in wholes.items() if tp not in copies or copies[tp][0] != whole}
        if missing:
            copied = _copied(session.read(missing, parts, check_alive, takes_out))
            for tp, whole in missing.items():
                copies[tp] = whole, None if copied is None else copied.get(tp, [])
        fetched = {tp: each for tp, each in ranges.items() if tp not in wholes or copies[tp][1] is None}
        if fetched:
            yield from session.read(fetched, parts, check_alive, takes_out)
        for tp, wanted in ranges.items():
            for rows in (tp not in fetched and copies[tp][1]) or ():
                first, end = np.searchsorted(rows.offsets, [wanted.first, wanted.end]).tolist()
                if first < end:
                    yield rows.chunk.take(range(rows.first + first, rows.first + end))


def _copied(chunks: Iterator[Any]) -> dict[TopicPartition, list[_Rows]] | None:
    """The rows of each partition; None if they are too large."""
    found: dict[TopicPartition, list[_Rows]] = {}
    size = 0
    for chunk in chunks:
        size += chunk.value_bytes
        if size > KEPT_BYTES_MAX:
            return None
        offsets, first = chunk.metadata("offset").to_numpy(), 0
        for run in chunk.runs():
            found.setdefault(run.tp, []).append(_Rows(chunk, first, offsets[first : first + run.rows]))
            first += run.rows
    return found
