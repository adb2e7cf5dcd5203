"""The oracle: what the topics themselves hold, read by a consumer that shares no code with the spouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaError, TopicPartition


def read_topics(bootstrap_servers: str, topics: Sequence[str], take: Callable[[Any], None]) -> dict[str, int]:
    """Hand every committed record to ``take``, per partition in order. Returns where each partition ends: partition ->
    last stable offset."""
    settings = {
        "bootstrap.servers": bootstrap_servers,
        "group.id": "oracle",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
    }
    consumer = Consumer(settings)
    known = consumer.list_topics(timeout=30).topics
    where = [TopicPartition(topic, number, 0) for topic in topics for number in known[topic].partitions]
    consumer.assign(where)
    ends: dict[str, int] = {}
    while len(ends) < len(where):
        for message in consumer.consume(10_000, 1.0):
            error = message.error()
            if error is None:
                take(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                ends[f"{message.topic()}/{message.partition()}"] = message.offset()
    consumer.close()
    return ends
