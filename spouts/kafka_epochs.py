"""Which logs are still the ones that were read: a question that only their brokers can answer.

A broker knows where each leader epoch ended in its log. Asked to fetch from an offset that was known in an epoch, it first says
whether that epoch reached so far; if not, the log was truncated and has grown again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from framework.errors import RetryableError
from framework.kafka_clients import ConnectionErrors, KafkaSettings, kafka_error
from spouts.kafka_partitions import Position, partition_id, topic_and_number

#: How long all brokers together may take to answer.
ANSWER_S = 10.0
_POLL_S = 0.05
#: Only whether a fetch works is of interest, not what it brings.
_LITTLE = {"queued.min.messages": 1, "max.partition.fetch.bytes": 1}
#: What a consumer says of an offset that is not in the log, or not as it was.
NOT_IN_LOG = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE})


def truncated(settings: KafkaSettings, group: str, positions: Mapping[str, Position]) -> list[str]:
    """Of partitions with positions whose leader epochs are known, those that were truncated before them since. Raises
    ``RetryableError`` when a broker does not answer."""
    if not positions:
        return []
    errors = ConnectionErrors(settings.bootstrap_servers)
    consumer = errors.made(lambda: Consumer({**settings.consumer(group), **_LITTLE, "error_cb": errors.heard}))
    try:
        consumer.assign([_where(partition, position) for partition, position in positions.items()])
        return sorted(_lost(consumer, set(positions), errors))
    except KafkaException as error:
        raise errors.explain(error) from error
    finally:
        consumer.close()


def _lost(consumer: Consumer, waiting: set[str], errors: ConnectionErrors) -> set[str]:
    lost: set[str] = set()
    deadline = time.monotonic() + ANSWER_S
    while waiting:
        for message in consumer.consume(len(waiting), _POLL_S):
            error, partition = message.error(), partition_id(message.topic(), message.partition())
            if error is not None and error.code() in NOT_IN_LOG:
                lost.add(partition)
            elif error is not None and error.code() != KafkaError._PARTITION_EOF:
                if error.fatal() or not error.retriable():
                    raise kafka_error(error, f"partition {partition}")
                continue
            waiting.discard(partition)
        if waiting and time.monotonic() > deadline:
            raise RetryableError(
                f"partition {min(waiting)}: no word for {ANSWER_S:g} s on whether its log was truncated{errors.reason()}"
            )
    return lost


def _where(partition: str, position: Position) -> TopicPartition:
    return TopicPartition(*topic_and_number(partition), position.offset, leader_epoch=position.leader_epoch)
