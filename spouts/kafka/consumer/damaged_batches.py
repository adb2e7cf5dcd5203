"""Finds damaged batches in brokers' logs, so that reading can continue after them.

librdkafka reports the first offset of a damaged batch, but not the last, and its later reports are
meaningless. A position inside the batch returns the batch again. So the next readable offset is
found by a search.

A batch that matches its checksum, and that librdkafka cannot decompress, is as its producer made
it. Kafka's own library may be able to decompress it (ADR 136).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException, Message
from confluent_kafka import TopicPartition as ClientPartition

from framework.clients.consumer_close_timeout import Consumer
from framework.clients.kafka_errors import kafka_error
from framework.clients.kafka_settings import ConnectionErrors, KafkaSettings
from framework.clients.kafka_stall_detection import Traffic
from framework.errors import RetryableError
from spouts.kafka.consumer.consumer_seek import Assignment
from spouts.kafka.partition_plan_entries import TopicPartition, partition_id, topic_and_number

#: A consumer's errors for an offset that is not in the log, or is in another log.
NOT_IN_LOG = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE})
#: A consumer's errors for a batch that does not match its checksum, or cannot be decompressed. The
#: consumer's later reports about this partition are meaningless.
DAMAGED = frozenset({KafkaError._BAD_MSG, KafkaError._BAD_COMPRESSION})
#: The beginning of librdkafka's text where the checksum is right, and decompression failed. For
#: lz4, it reports that with the code ``_BAD_MSG``.
_DECOMPRESSION = "Decompression "
#: How many consecutive damaged batches a search passes over: each takes some milliseconds.
AT_ONCE_MAX = 100
#: How often a consumer is placed at one position again when it turns out to have another one.
PLACED_AGAIN_MAX = 5
_ANSWER_S = 10.0
_POLL_S = 0.5
_TAKEN = 10_000


class Damage(NamedTuple):
    """Consecutive damaged batches: the first offset, and the first readable offset after them."""

    first: int
    next: int


class DamagedBatch(NamedTuple):
    """The offsets of a damaged batch from the given one on: the first, and the one after the last.
    ``is_unreadable``: whether its producer made it so."""

    first: int
    next: int
    is_unreadable: bool


def is_unreadable(error: KafkaError) -> bool:
    """Whether this is about a batch that its producer made so that it cannot be decompressed."""
    if error.code() not in DAMAGED:
        return False
    return error.code() == KafkaError._BAD_COMPRESSION or str(error.str()).startswith(_DECOMPRESSION)


def find_damage(
    settings: KafkaSettings, group: str, ranges: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[Damage, ...]]:
    """Partition -> the damages in its half-open range of offsets, in order. Leaves out readable
    partitions. Reads all ranges. Raises ``RetryableError`` when a broker does not answer."""
    found = {}
    with closing(BatchProber(settings, group)) as prober:
        for partition, (first, end) in ranges.items():
            damage: list[Damage] = []
            tp, at = topic_and_number(partition), first
            while at < end and (batch := prober.damaged_batch(tp, at, end)) is not None:
                begins, at = batch.first, batch.next
                if damage and damage[-1].next == begins:
                    begins = damage.pop().first
                damage.append(Damage(begins, at))
            if damage:
                found[partition] = tuple(damage)
    return found


def damage_from(prober: BatchProber, tp: TopicPartition, offset: int) -> list[DamagedBatch]:
    """The consecutive damaged batches from ``offset`` on, up to ``AT_ONCE_MAX``; none when its
    batch is intact. Raises as ``find_damage``."""
    found: list[DamagedBatch] = []
    while len(found) < AT_ONCE_MAX and (batch := prober.damaged_batch(tp, offset, offset + 1)) is not None:
        found.append(batch)
        offset = batch.next
    return found


class BatchProber:
    """One consumer, which reads one partition at a time. Raises ``RetryableError`` when a broker
    does not answer."""

    def __init__(self, settings: KafkaSettings, group: str) -> None:
        given = settings.consumer(group)
        self._errors, self._traffic = ConnectionErrors(settings.bootstrap_servers), Traffic()
        conf = {**self._traffic.settings(given), **given, "error_cb": self._errors.on_error}
        self._consumer = self._errors.made(lambda: Consumer(conf))
        self._assignment = Assignment(self._consumer)

    def close(self) -> None:
        self._consumer.close()

    def damaged_batch(self, tp: TopicPartition, first: int, end: int) -> DamagedBatch | None:
        """The first damaged batch. None if every batch from ``first`` up to ``end``, or to the end
        of the log, can be read."""
        try:
            found = self._damaged(tp, first, end)
            if found is None:
                return None
            begin, error = found
            inside = max(begin, first)
            return DamagedBatch(inside, self._after(tp, begin, inside), is_unreadable(error))
        except KafkaException as error:
            raise self._errors.explain(error) from error

    def _damaged(self, tp: TopicPartition, first: int, end: int) -> tuple[int, KafkaError] | None:
        """The first offset of the first damaged batch, and the error. The offset is below ``first``
        if that is inside the batch."""
        position, at, since = first, first, time.monotonic()
        while position > at or time.monotonic() - since < _ANSWER_S:
            if position > at:
                at, since = position, time.monotonic()
            self._assignment.begin([ClientPartition(*tp, at)])
            try:
                position, found = self._next_event(tp, at, end)
            finally:
                self._consumer.incremental_unassign([ClientPartition(*tp)])
            if found is None or found.error().code() == KafkaError._PARTITION_EOF:
                return None
            if found.error().code() in DAMAGED:
                return int(found.offset()), found.error()
            if found.error().code() not in NOT_IN_LOG:
                raise kafka_error(found.error(), f"partition {partition_id(*tp)}")
            if found.offset() in (None, position):
                return None
            # After a damaged batch, librdkafka asks for any offset. The answer may come only now.
        raise RetryableError(f"partition {partition_id(*tp)}: the consumer cannot be placed at offset {position}")

    def _next_event(self, tp: TopicPartition, position: int, end: int) -> tuple[int, Message | None]:
        """Read on from ``position``. Returns the position after the records, and the first event
        other than a record; None if there is none up to ``end``."""
        heard_at = time.monotonic()
        while position < end:
            for message in self._consumer.consume(_TAKEN, 0) or self._consumer.consume(1, _POLL_S):
                if (message.topic(), message.partition()) != tp:
                    continue
                heard_at = time.monotonic()
                if message.error() is not None:
                    return position, message
                position = message.offset() + 1
                if position >= end:
                    return position, None
            if self._traffic.has_fetched(*tp):
                heard_at = time.monotonic()
            if time.monotonic() - heard_at > _ANSWER_S:
                raise RetryableError(
                    f"partition {partition_id(*tp)}: no word for {_ANSWER_S:g} s on whether a batch at offset {position} "
                    f"is damaged{self._errors.reason()}"
                )
        return position, None

    def _after(self, tp: TopicPartition, batch: int, inside: int) -> int:
        """The first offset after the damaged batch that begins at ``batch`` and contains
        ``inside``."""
        _, end = self._consumer.get_watermark_offsets(ClientPartition(*tp), _ANSWER_S)
        low, step = inside, 1
        while (high := min(low + step, end)) < end and self._is_inside(tp, batch, high):
            low, step = high, step * 2
        while high - low > 1:
            middle = (low + high) // 2
            if self._is_inside(tp, batch, middle):
                low = middle
            else:
                high = middle
        return int(high)

    def _is_inside(self, tp: TopicPartition, batch: int, offset: int) -> bool:
        found = self._damaged(tp, offset, offset + 1)
        return found is not None and found[0] == batch
