"""Reads planned ranges of Kafka, in tasks: exactly the range, decoded, or an error.

Invariant: every record in the range that a ``read_committed`` reader may see becomes a row. If it
cannot be decoded, ``on_bad_record`` decides: it becomes an error, a count, or a row on the stream
of dead letters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from framework.clients.kafka_settings import KafkaSettings
from framework.errors import BatchTooLargeError
from framework.malloc_trim import FreedMemory
from framework.topology import (
    DEAD_LETTER_STREAM,
    DEFAULT_STREAM,
    OnStream,
    PartitionReader,
    ReadCounts,
    TransactionAttempt,
)
from framework.topology.dead_letters import Letter
from framework.topology.spouts import LEFT_OUT, ON_REFUSED, PART_OF, REFUSED, Meta, Rows
from spouts.codecs.bad_records import OnBadRecord
from spouts.codecs.registry_schema_usage import take_used
from spouts.kafka.consumer.consumer_pool import sessions
from spouts.kafka.consumer.fetched_batch_cache import FetchedBatchCache
from spouts.kafka.consumer.range_consumer_base import Range
from spouts.kafka.consumer.record_chunk import ColumnChunk, RecordChunk, Run
from spouts.kafka.decoding import Decoded, Place, RecordDecoder, dead_letters, places_of
from spouts.kafka.partition_plan_entries import position_after, position_of, topic_and_number
from spouts.kafka.planning import batch_limits
from spouts.kafka.record_deserialization import METADATA_TYPES
from spouts.kafka.topic_streams import Streams

C = TypeVar("C", bound=RecordChunk)

#: With ``keep_transactions``, a task may read more than ``TASK_ROWS_BYTES_MAX`` bytes of rows for
#: one batch, up to this multiple of the bytes of their values; for metadata, each record counts
#: this many more bytes.
EXPANSION_MAX, _RECORD_BYTES = 20, 50
#: The error text of a record that was left out on request.
LEFT_OUT_REASON = "left out by ratchet undo --skip-records"
_fetched = FetchedBatchCache()
_freed = FreedMemory()


class KafkaReader(PartitionReader):
    """Reads for one spout task.

    * ``slot``: separates the consumers of different tasks in one worker.
    * ``batch_bytes_max``: about how many bytes of values a batch is meant to have.
    * ``divides``: a batch that is too large may be divided anywhere."""

    def __init__(
        self,
        settings: KafkaSettings,
        group: str,
        streams: Streams,
        slot: int,
        *,
        batch_bytes_max: int | None = None,
        divides: bool = True,
    ) -> None:
        self._settings = settings
        self._group = group
        self._streams = streams
        self._decoder = RecordDecoder(streams)
        self._slot = slot
        self._bytes_max = (
            batch_bytes_max * batch_limits.OVERSIZE_MAX if batch_bytes_max is not None and divides else math.inf
        )
        self._divides = divides
        self._counts = ReadCounts()

    @property
    def counts(self) -> ReadCounts:
        return self._counts

    def read(self, attempt: TransactionAttempt, partition: str, meta: Meta) -> Iterator[Rows]:
        yield from self.read_all(attempt, {partition: meta})

    def read_all(self, attempt: TransactionAttempt, ranges: Mapping[str, Meta]) -> Iterator[Rows]:
        asked = {topic_and_number(partition): _range(meta) for partition, meta in ranges.items()}
        if not any(each.first < each.end for each in asked.values()):
            return
        wholes = {topic_and_number(each): _range(meta[PART_OF]) for each, meta in ranges.items() if PART_OF in meta}
        left_out = _left_out(ranges)
        topic_ids = {topic_and_number(partition)[0]: meta.get("topic_id") for partition, meta in ranges.items()}
        _freed.return_much()
        size = _Size()
        with sessions.lend(self._settings, self._group, self._slot) as session:
            for chunk in _fetched.read(
                session, asked, wholes, self._decoder.parts, self.check_alive, takes_out=self._streams.takes_out
            ):
                self._counts.records += len(chunk)
                self._counts.bytes += chunk.value_bytes
                if chunk.sampled_ms is not None:
                    self._counts.sampled(*chunk.sampled_ms)
                if left_out:
                    chunk, gone = _parts(chunk, left_out)
                    for (is_refused, policy), part in gone.items():
                        for each in self._decoder.left_out(part, lambda at: left_out[at].reason, topic_ids, policy):
                            if is_refused:  # the others were left out on request
                                self._count(each)
                            if each.rows is not None:
                                yield OnStream(DEAD_LETTER_STREAM, each.rows)
                for decoded in self._decoder.decode(chunk, topic_ids):
                    self._count(decoded)
                    self._counts.schemas |= take_used()
                    stream = DEAD_LETTER_STREAM if decoded.letters else decoded.stream
                    if decoded.rows is None:
                        continue
                    size.records += len(decoded.chunk)
                    size.value_bytes += decoded.chunk.value_bytes
                    size.row_bytes += decoded.rows.nbytes
                    self._counts.row_bytes = max(self._counts.row_bytes, size.row_bytes)
                    _freed.note(size.records, size.row_bytes)
                    self._check(size)
                    yield decoded.rows if stream == DEFAULT_STREAM else OnStream(stream, decoded.rows)

    def _check(self, size: _Size) -> None:
        """Raise ``BatchTooLargeError`` if several records are too large together."""
        if size.records < 2:
            return
        if size.value_bytes > self._bytes_max:
            raise BatchTooLargeError(
                f"{size.records:,} records have {size.value_bytes:,} bytes of values, far more than batch_bytes_max"
            )
        most = batch_limits.TASK_ROWS_BYTES_MAX
        if not self._divides:
            most = max(most, EXPANSION_MAX * (size.value_bytes + _RECORD_BYTES * size.records))
        if size.row_bytes > most:
            raise BatchTooLargeError(
                f"{size.records:,} records became rows of {size.row_bytes:,} bytes, and those of a task may all wait in memory"
            )

    def read_letters(self, letters: Sequence[Letter]) -> Iterator[Rows]:
        streams = self._streams.for_letters()
        decoder = RecordDecoder(streams)
        for topic_id, its in groupby(sorted(letters, key=_in_chunk), key=lambda each: each.topic_id):
            parts: tuple[list[Letter], list[Letter]] = [], []
            for each in its:
                parts[streams.has(each.topic)].append(each)
            for part, is_known in zip(parts, (False, True), strict=True):
                if not part:
                    continue
                chunk, topic_ids = letter_chunk(part), {each.topic: topic_id for each in part}
                self._counts.records += len(chunk)
                self._counts.bytes += chunk.value_bytes
                if not is_known:
                    reasons = [f"topic {each.topic!r} has no stream in the spout" for each in part]
                    yield OnStream(DEAD_LETTER_STREAM, dead_letters("value", chunk, reasons, topic_ids))
                    continue
                for decoded in decoder.decode(chunk, topic_ids):
                    self._counts.schemas |= take_used()
                    stream = DEAD_LETTER_STREAM if decoded.letters else decoded.stream
                    if decoded.rows is not None:
                        yield OnStream(stream, decoded.rows)

    def _count(self, decoded: Decoded[C]) -> None:
        bad = len(decoded.chunk) if decoded.letters else 0
        self._counts.bad_records += bad
        self._counts.on_stream(decoded.stream, len(decoded.chunk) + decoded.passed_over, bad)
        if decoded.absent is not None:
            self._counts.without(decoded.stream, decoded.absent)

    def warm_up(self) -> None:
        with sessions.lend(self._settings, self._group, self._slot) as session:
            session.connect()
        self._decoder.warm_up()


@dataclass(slots=True)
class _Size:
    """The size of the records that a task has read for a batch. Records without rows do not
    count."""

    records: int = 0
    value_bytes: int = 0
    row_bytes: int = 0


def _in_chunk(letter: Letter) -> tuple[str, str, int, int]:
    return letter.topic_id, letter.topic, letter.partition, letter.offset


def letter_chunk(letters: Sequence[Letter]) -> ColumnChunk:
    """Letters as their original records. Those of a partition are consecutive."""
    places = ((each.topic, each.partition) for each in letters)
    headers = [[{"key": name, "value": value} for name, value in each.headers] for each in letters]
    return ColumnChunk(
        [Run(*place, sum(1 for _ in its)) for place, its in groupby(places)],
        pa.array([each.value for each in letters], pa.binary()),
        pa.array([each.offset for each in letters], pa.int64()),
        value_bytes=sum(len(each.value or b"") for each in letters),
        keys=pa.array([each.key for each in letters], pa.binary()),
        headers=pa.array(headers, METADATA_TYPES["headers"]),
        timestamps=pa.array([each.timestamp_ms for each in letters], pa.int64()),
    )


class _LeftOut(NamedTuple):
    """Why a record is left out. ``is_refused``: because of its value. ``policy``: of the bolt that
    refused it; None: that of its stream applies."""

    reason: str
    is_refused: bool
    policy: OnBadRecord | None


def _parts(chunk: C, left_out: Mapping[Place, _LeftOut]) -> tuple[C, Mapping[tuple[bool, OnBadRecord | None], C]]:
    """The records that are not left out, and the others, grouped by whether they are refused and by
    policy."""
    gone: dict[tuple[bool, OnBadRecord | None], list[int]] = {}
    for row, place in enumerate(places_of(chunk)):
        if place in left_out:
            gone.setdefault(left_out[place][1:], []).append(row)
    if not gone:
        return chunk, {}
    kept = chunk.take(np.delete(np.arange(len(chunk)), [row for rows in gone.values() for row in rows]).tolist())
    return kept, {each: chunk.take(rows) for each, rows in gone.items()}


def _left_out(ranges: Mapping[str, Meta]) -> Mapping[Place, _LeftOut]:
    """The records of these ranges that are left out."""

    def of(meta: Meta, offset: int) -> _LeftOut:
        reason, policy = meta.get(REFUSED, {}).get(str(offset)), meta.get(ON_REFUSED)
        if reason is None:
            return _LeftOut(LEFT_OUT_REASON, False, None)
        return _LeftOut(str(reason), True, OnBadRecord(policy) if policy is not None else None)

    return {
        (*topic_and_number(partition), offset): of(meta, offset)
        for partition, meta in ranges.items()
        for offset in meta.get(LEFT_OUT, ())
        if int(meta["first_offset"]) <= offset < int(meta["next_offset"])
    }


def _range(meta: Meta) -> Range:
    begin, end = position_of(meta), position_after(meta)
    return Range(begin.offset, end.offset, begin.leader_epoch, begin.topic_id, end.leader_epoch)
