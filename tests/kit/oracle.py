"""The oracle: what the topics themselves hold, read by a consumer
that shares no code with the spouts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec, TopicMetadata

from tests.kit.waiting import PATIENCE_S


def told_of(
    client: Consumer | AdminClient, wanted: Mapping[str, int], seconds: float = PATIENCE_S
) -> dict[str, TopicMetadata]:
    """Wait until a broker knows all ``wanted`` topics, and return its metadata.

    A broker learns of a topic a moment after it was created. ``wanted``: topic -> least number of
    partitions.
    """
    deadline = time.monotonic() + seconds
    while True:
        found: dict[str, TopicMetadata] = client.list_topics(timeout=PATIENCE_S).topics
        if all(topic in found and len(found[topic].partitions) >= count for topic, count in wanted.items()):
            return found
        assert time.monotonic() < deadline, f"no broker tells of {dict(wanted)}"
        time.sleep(0.01)


def read_topics(bootstrap_servers: str, topics: Sequence[str], take: Callable[[Any], None]) -> dict[str, int]:
    """Hand every committed record to ``take``, in order per partition.

    Returns where each partition ends: partition -> last stable offset.
    """
    settings = {
        "bootstrap.servers": bootstrap_servers,
        "group.id": "oracle",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
    }
    consumer = Consumer(settings)
    known = told_of(consumer, dict.fromkeys(topics, 1))
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


def is_stable(bootstrap_servers: str, topics: Sequence[str], timeout_s: float) -> bool:
    """Wait until no kafka_txn is open in ``topics``. Returns False after ``timeout_s``.

    The broker aborts a kafka_txn that its producer does not end. A broker that was killed often
    sometimes forgets one. Then the last stable offset stays where it is, for the topology and for
    the oracle.
    """
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(KafkaException):  # a broker that was restarted a moment ago
            known = told_of(admin, dict.fromkeys(topics, 1))
            where = [TopicPartition(topic, number) for topic in topics for number in known[topic].partitions]

            def ends(level: IsolationLevel, where: list[TopicPartition] = where) -> list[int]:
                answers = admin.list_offsets({each: OffsetSpec.latest() for each in where}, isolation_level=level)
                return [answer.result(PATIENCE_S).offset for answer in answers.values()]

            if ends(IsolationLevel.READ_COMMITTED) == ends(IsolationLevel.READ_UNCOMMITTED):
                return True
        time.sleep(0.2)
    return False
