"""Asks brokers which logs were truncated and may have grown again."""

from __future__ import annotations

import time
from collections.abc import Mapping

from confluent_kafka import KafkaError, KafkaException

from framework.clients.consumer_close_timeout import Consumer
from framework.clients.kafka_errors import kafka_error
from framework.clients.kafka_settings import ConnectionErrors, KafkaSettings
from framework.errors import RetryableError
from spouts.kafka.consumer.consumer_seek import Assignment, placed
from spouts.kafka.consumer.damaged_batches import NOT_IN_LOG
from spouts.kafka.partition_plan_entries import Position, partition_id, topic_and_number

#: How long all brokers together may be silent. There may be thousands of logs.
ANSWER_S = 10.0
_POLL_S = 0.05
#: Only the success of a fetch matters, so fetch little.
_LITTLE = {"queued.min.messages": 1, "max.partition.fetch.bytes": 1}


def truncated(settings: KafkaSettings, group: str, positions: Mapping[str, Position]) -> list[str]:
    """The partitions whose log was truncated below their position and may have grown again.

    ``positions``: with known leader epochs. A broker knows where each epoch ended in its log. When
    it gets a fetch request for an offset with an epoch, it first reports whether that epoch reached
    the offset. Raises ``RetryableError`` if a broker does not answer."""
    if not positions:
        return []
    errors = ConnectionErrors(settings.bootstrap_servers)
    consumer = errors.made(lambda: Consumer({**settings.consumer(group), **_LITTLE, "error_cb": errors.on_error}))
    try:
        Assignment(consumer).begin(
            [placed(topic_and_number(each), at.offset, at.leader_epoch) for each, at in positions.items()]
        )
        return sorted(_lost(consumer, set(positions), errors))
    except KafkaException as error:
        raise errors.explain(error) from error
    finally:
        consumer.close()


def _lost(consumer: Consumer, waiting: set[str], errors: ConnectionErrors) -> set[str]:
    lost: set[str] = set()
    heard_at = time.monotonic()
    while waiting:
        left = len(waiting)
        for message in consumer.consume(len(waiting), _POLL_S):
            error, partition = message.error(), partition_id(message.topic(), message.partition())
            if error is not None and error.code() in NOT_IN_LOG:
                lost.add(partition)
            elif error is not None and error.code() != KafkaError._PARTITION_EOF:
                if error.fatal() or not error.retriable():
                    raise kafka_error(error, f"partition {partition}")
                continue
            waiting.discard(partition)
        if len(waiting) < left:
            heard_at = time.monotonic()
        elif waiting and time.monotonic() - heard_at > ANSWER_S:
            raise RetryableError(
                f"partition {min(waiting)}: no word for {ANSWER_S:g} s on whether its log was truncated{errors.reason()}"
            )
    return lost
