"""Shows one record of a topic in the broker's form."""

from __future__ import annotations

from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as ClientPartition

from framework.clients.consumer_close_timeout import Consumer
from framework.clients.kafka_settings import KafkaSettings
from framework.errors import RetryableError
from framework.topology import SourceRecord
from spouts.kafka.consumer.lazily_connected_consumer import LazilyConnectedConsumer
from spouts.kafka.partition_plan_entries import topic_and_number

_ANSWER_S = 10.0
#: Only one record is needed.
_LITTLE = {"queued.min.messages": 1, "fetch.min.bytes": 1}


class RecordViewer(LazilyConnectedConsumer):
    """Shows single records."""

    def __init__(self, settings: KafkaSettings, group: str) -> None:
        super().__init__(settings, group, _LITTLE)

    def first(self, partition: str, first: int, end: int) -> SourceRecord | None:
        """The first committed record at or after ``first`` and below ``end``; None if there is
        none. Raises ``RetryableError`` when no broker answers."""
        consumer, assignment = self._connected()
        with self._explained():
            assignment.begin([ClientPartition(*topic_and_number(partition), first)])
            try:
                message = self._next(consumer, partition)
            finally:
                consumer.incremental_unassign([ClientPartition(*topic_and_number(partition))])
        if message is None or message.offset() >= end:
            return None
        kind, timestamp_ms = message.timestamp()
        return SourceRecord(partition, message.offset(), timestamp_ms if kind else None, message.key(), message.value())

    def _next(self, consumer: Consumer, partition: str) -> Any:
        message = consumer.poll(_ANSWER_S)
        if message is None:
            raise RetryableError(f"partition {partition} did not answer for {_ANSWER_S:g} s{self._errors.reason()}")
        error = message.error()
        if error is None:
            return message
        if error.code() == KafkaError._PARTITION_EOF:
            return None
        raise KafkaException(error)
