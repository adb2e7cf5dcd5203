"""Reads planned ranges of Kafka, in tasks: exactly the range, decoded, or an error.

Invariant: every record in the range that a ``read_committed`` reader may see becomes a row. If it
cannot be decoded, it becomes what ``on_bad_record`` says: an error, a count, or a row on the stream
of dead letters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from framework.clients.kafka import KafkaSettings
from framework.topology import (
    DEAD_LETTER_STREAM,
    DEFAULT_STREAM,
    OnStream,
    PartitionReader,
    ReadCounts,
    TransactionAttempt,
)
from framework.topology.spouts import LEFT_OUT, REFUSED, Meta, Rows
from spouts.kafka.consumer.chunk import RecordChunk
from spouts.kafka.consumer.consumer_pool import sessions
from spouts.kafka.consumer.range_consumer import Range
from spouts.kafka.decoding import Decoded, Place, RecordDecoder, places_of
from spouts.kafka.partitions import position_after, position_of, topic_and_number
from spouts.kafka.streams import Streams

C = TypeVar("C", bound=RecordChunk)

#: The error of a dead letter that is none.
LEFT_OUT_REASON = "left out by ratchet undo --skip-records"


class KafkaReader(PartitionReader):
    """Reads for one spout task. ``slot``: keeps the consumers of different tasks in one worker
    apart."""

    def __init__(self, settings: KafkaSettings, group: str, streams: Streams, slot: int) -> None:
        self._settings = settings
        self._group = group
        self._decoder = RecordDecoder(streams)
        self._slot = slot
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
        left_out = _left_out(ranges)
        topic_ids = {topic_and_number(partition)[0]: meta.get("topic_id") for partition, meta in ranges.items()}
        with sessions.lend(self._settings, self._group, self._slot) as session:
            for chunk in session.read(asked, self._decoder.parts, self.check_alive):
                self._counts.records += len(chunk)
                self._counts.bytes += chunk.value_bytes
                if chunk.sampled_ms is not None:
                    self._counts.sampled(*chunk.sampled_ms)
                if left_out:
                    chunk, *gone = _parts(chunk, left_out)
                    for part in filter(len, gone):
                        for each in self._decoder.left_out(part, lambda at: left_out[at] or LEFT_OUT_REASON, topic_ids):
                            if part is gone[0]:
                                self._count(each)
                            if each.rows is not None:
                                yield OnStream(DEAD_LETTER_STREAM, each.rows)
                for decoded in self._decoder.decode(chunk, topic_ids):
                    self._count(decoded)
                    stream = DEAD_LETTER_STREAM if decoded.letters else decoded.stream
                    if decoded.rows is not None:
                        yield decoded.rows if stream == DEFAULT_STREAM else OnStream(stream, decoded.rows)

    def _count(self, decoded: Decoded[C]) -> None:
        bad = len(decoded.chunk) if decoded.letters else 0
        self._counts.bad_records += bad
        self._counts.on_stream(decoded.stream, len(decoded.chunk), bad)
        if decoded.absent is not None:
            self._counts.without(decoded.stream, decoded.absent)

    def warm_up(self) -> None:
        with sessions.lend(self._settings, self._group, self._slot) as session:
            session.connect()
        self._decoder.warm_up()


def _parts(chunk: C, left_out: Mapping[Place, str]) -> Sequence[C]:
    """The records that are not left out; those whose values were refused; and the others, which do
    not count as bad: somebody has decided about them."""
    gone: tuple[list[int], list[int]] = [], []
    for row, place in enumerate(places_of(chunk)):
        if place in left_out:
            gone[not left_out[place]].append(row)
    kept = chunk.take(np.delete(np.arange(len(chunk)), [*gone[0], *gone[1]]).tolist()) if any(gone) else chunk
    return kept, chunk.take(gone[0]), chunk.take(gone[1])


def _left_out(ranges: Mapping[str, Meta]) -> Mapping[Place, str]:
    """The records of these ranges that are left out, each with the reason why its value was
    refused; empty where it was not."""
    return {
        (*topic_and_number(partition), offset): str(meta.get(REFUSED, {}).get(str(offset), ""))
        for partition, meta in ranges.items()
        for offset in meta.get(LEFT_OUT, ())
        if int(meta["first_offset"]) <= offset < int(meta["next_offset"])
    }


def _range(meta: Meta) -> Range:
    begin, end = position_of(meta), position_after(meta)
    return Range(begin.offset, end.offset, begin.leader_epoch, begin.topic_id, end.leader_epoch)
