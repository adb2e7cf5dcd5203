"""Finds damaged batches in brokers' logs, so that reading can continue after them.

librdkafka reports the first offset of a damaged batch, but not the last, and its later reports are
meaningless. A position inside the batch returns the batch again. So the next readable offset is
found by a search.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as ClientPartition

from framework.clients.consumer_close_timeout import Consumer
from framework.clients.kafka_errors import kafka_error
from framework.clients.kafka_settings import ConnectionErrors, KafkaSettings
from framework.clients.kafka_stall_detection import Traffic
from framework.errors import RetryableError
from spouts.kafka.consumer.consumer_seek import Assignment
from spouts.kafka.consumer.range_consumer import DAMAGED, NOT_IN_LOG
from spouts.kafka.partition_plan_entries import TopicPartition, partition_id, topic_and_number

_ANSWER_S = 10.0
_POLL_S = 0.5
_TAKEN = 10_000


class Damage(NamedTuple):
    """Consecutive damaged batches: the first offset, and the first readable offset after them."""

    first: int
    next: int


def find_damage(
    settings: KafkaSettings, group: str, ranges: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[Damage, ...]]:
    """Partition -> the damages in its half-open range of offsets, in order. Leaves out readable
    partitions. Reads all ranges. Raises ``RetryableError`` when a broker does not answer."""
    found = {}
    with _prober(settings, group) as prober:
        for partition, (first, end) in ranges.items():
            damage: list[Damage] = []
            tp, at = topic_and_number(partition), first
            while at < end and (batch := prober.damaged_batch(tp, at, end)) is not None:
                begins, at = max(batch, at), prober.after(tp, batch, max(batch, at))
                if damage and damage[-1].next == begins:
                    begins = damage.pop().first
                damage.append(Damage(begins, at))
            if damage:
                found[partition] = tuple(damage)
    return found


def after_damage(settings: KafkaSettings, group: str, tp: TopicPartition, offset: int) -> int:
    """The first readable offset from ``offset`` on: ``offset`` itself when its batch is intact.
    Raises as ``find_damage``."""
    with _prober(settings, group) as prober:
        while (batch := prober.damaged_batch(tp, offset, offset + 1)) is not None:
            offset = prober.after(tp, batch, offset)
        return offset


@contextmanager
def _prober(settings: KafkaSettings, group: str) -> Iterator[_Prober]:
    errors = ConnectionErrors(settings.bootstrap_servers)
    prober = _Prober(settings, group, errors)
    try:
        yield prober
    except KafkaException as error:
        raise errors.explain(error) from error
    finally:
        prober.close()


class _Prober:
    """One consumer, which reads one partition at a time."""

    def __init__(self, settings: KafkaSettings, group: str, errors: ConnectionErrors) -> None:
        given = settings.consumer(group)
        self._errors, self._traffic = errors, Traffic()
        conf = {**self._traffic.settings(given), **given, "error_cb": errors.on_error}
        self._consumer = errors.made(lambda: Consumer(conf))
        self._assignment = Assignment(self._consumer)

    def close(self) -> None:
        self._consumer.close()

    def damaged_batch(self, tp: TopicPartition, first: int, end: int) -> int | None:
        """The first offset of the first damaged batch; below ``first`` if that is inside the batch.
        None if every batch up to ``end``, or to the end of the log, can be read."""
        self._assignment.begin([ClientPartition(*tp, first)])
        try:
            position, heard_at = first, time.monotonic()
            while position < end:
                for message in self._consumer.consume(_TAKEN, _POLL_S):
                    if (message.topic(), message.partition()) != tp:
                        continue
                    heard_at, error = time.monotonic(), message.error()
                    if error is None:
                        position = message.offset() + 1
                    elif error.code() in DAMAGED:
                        return int(message.offset())
                    elif error.code() == KafkaError._PARTITION_EOF or error.code() in NOT_IN_LOG:
                        return None
                    else:
                        raise kafka_error(error, f"partition {partition_id(*tp)}")
                    if position >= end:
                        return None
                if self._traffic.has_fetched(*tp):
                    heard_at = time.monotonic()
                if time.monotonic() - heard_at > _ANSWER_S:
                    raise RetryableError(
                        f"partition {partition_id(*tp)}: no word for {_ANSWER_S:g} s on whether a batch at offset {position} "
                        f"is damaged{self._errors.reason()}"
                    )
            return None
        finally:
            self._consumer.incremental_unassign([ClientPartition(*tp)])

    def after(self, tp: TopicPartition, batch: int, inside: int) -> int:
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
        return self.damaged_batch(tp, offset, offset + 1) == batch
