"""Reads the values of records that are not planned yet, on the driver."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import closing
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as ClientPartition

from framework.clients.kafka_settings import KafkaSettings
from framework.clients.kafka_stall_detection import Traffic
from framework.errors import RetryableError
from spouts.kafka.consumer.adaptive_fetch_size import FetchPace
from spouts.kafka.consumer.damaged_batches import DAMAGED, BatchProber, damage_from
from spouts.kafka.consumer.lazily_connected_consumer import LazilyConnectedConsumer
from spouts.kafka.partition_plan_entries import partition_id, topic_and_number

_ANSWER_S = 10.0
_RECORDS = 10_000


class Ahead(NamedTuple):
    """A record, or the end of the log: then ``offset`` is the end, and ``is_end`` is set."""

    partition: str
    offset: int
    value: bytes | None
    is_end: bool = False


class LookaheadReader(LazilyConnectedConsumer):
    """Reads the partitions given to ``begin``, each from its own position. Fetches little until it
    is known how much larger batches become (``FetchPace``)."""

    def __init__(self, settings: KafkaSettings, group: str) -> None:
        super().__init__(settings, group)
        self._pace, self._traffic = FetchPace(), Traffic()
        self._assigned: dict[str, int] = {}  # partition -> the offset that is read next

    def begin(self, partition: str, offset: int) -> None:
        """Read this partition from ``offset`` on."""
        _, assignment = self._connected()
        self.end(partition)
        with self._explained():
            assignment.begin([ClientPartition(*topic_and_number(partition), offset)])
        self._assigned[partition] = offset

    def end(self, partition: str) -> None:
        """Read nothing more of this partition."""
        if partition in self._assigned:
            del self._assigned[partition]
            with self._explained():
                self._connected()[0].incremental_unassign([ClientPartition(*topic_and_number(partition))])
            if not self._assigned:
                self._pace.went_well()

    def beginning(self, partition: str) -> int:
        """The first offset that the partition has."""
        consumer, _ = self._connected()
        with self._explained():
            low, _ = consumer.get_watermark_offsets(ClientPartition(*topic_and_number(partition)), timeout=_ANSWER_S)
        return int(low)

    def read(self) -> list[Ahead]:
        """Some records of the partitions given to ``begin``. Raises ``RetryableError`` if none
        arrives."""
        if self._pace.is_stale:
            self._renew()
        consumer, _ = self._connected()
        found: list[Ahead] = []
        damaged: set[str] = set()
        with self._explained():
            messages = consumer.consume(_RECORDS, 0.0) or consumer.consume(1, _ANSWER_S)
            if not messages:
                self._pace.was_silent()
                raise RetryableError(f"no record was read ahead for {_ANSWER_S:g} s{self._errors.reason()}")
            for each in messages:
                error = each.error()
                partition = partition_id(each.topic(), each.partition())
                if partition in damaged:
                    continue  # what is said of it after the damage means nothing
                if error is not None and error.code() in DAMAGED:
                    damaged.add(partition)
                elif error is not None and error.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(error)
                elif partition in self._assigned:
                    is_end = error is not None
                    found.append(Ahead(partition, each.offset(), None if is_end else each.value(), is_end))
                    self._assigned[partition] = each.offset() + (not is_end)
        alone = len(found[0].value or b"") if len(found) == 1 else 0
        self._pace.has_seen(piece=alone, ahead=self._traffic.ahead_bytes(shared=True), received=self._traffic.received)
        return [*found, *self._after(damaged)] if damaged else found

    def _consumer_settings(self) -> dict[str, Any]:
        conf = self._pace.settings(super()._consumer_settings())
        self._traffic = Traffic()
        return {**self._traffic.settings(conf, self._pace.report_every_ms(1)), **conf}

    def _renew(self) -> None:
        """Continue with a consumer at the present pace."""
        for partition, offset in self._ended().items():
            self.begin(partition, offset)

    def _ended(self) -> dict[str, int]:
        """Close the consumer. Returns its positions."""
        positions, self._assigned = self._assigned, {}
        self.close()
        return positions

    def _after(self, damaged: Collection[str]) -> Iterator[Ahead]:
        """Continue after batches that cannot be read, as if they had one record without a value,
        because the reader of the batch decides about them. A new consumer continues, because this
        consumer has lost its position there."""
        positions = self._ended()
        with closing(BatchProber(self._settings, self._group)) as prober:
            for partition, offset in positions.items():
                after = offset
                if partition in damaged:
                    for batch in damage_from(prober, topic_and_number(partition), offset):
                        after = batch.next
                self.begin(partition, after)
                if after > offset:
                    yield Ahead(partition, after - 1, None)
