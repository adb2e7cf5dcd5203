"""Starts reading partitions without delay, and only in the expected log.

librdkafka accepts an assignment of an unknown topic, and looks unknown topics up once a second. So
the first record would be up to a second late, at each start, recovery and new topic. To avoid that,
topics are looked up first.

librdkafka asks the broker whether an offset is still in the log of a leader epoch when it learns a
leader's epoch, and at a seek. It does not ask when it assigns a partition whose leader it knows. So
each position with an epoch is also sought.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as ClientPartition

from spouts.kafka.partition_plan_entries import TopicPartition

_LOOK_UP_S = 2.0
_BEGIN_S = 5.0
_AGAIN_AFTER_S = 0.001


def placed(tp: TopicPartition, offset: int, leader_epoch: int | None) -> ClientPartition:
    """A position for librdkafka. ``leader_epoch``: the epoch in which the offset was in the log;
    None if unknown."""
    if leader_epoch is None:
        return ClientPartition(*tp, offset)
    return ClientPartition(*tp, offset, leader_epoch=leader_epoch)


class Assignment:
    """The partitions of one consumer."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._known: dict[str, set[int]] = {}

    def look_up(self, topic: str | None = None) -> None:
        """Request the partitions of one topic, or of all topics. Raises ``KafkaException`` if no
        broker answers."""
        for name, found in self._consumer.list_topics(topic, timeout=_LOOK_UP_S).topics.items():
            self._known[name] = set(found.partitions)

    def begin(self, positions: Sequence[ClientPartition]) -> None:
        """Assign these partitions, which must not be assigned yet, and read from these positions.

        A position that is no longer in the log, or in another log, arrives later as an event with
        an error. Raises ``KafkaException``; then none of the partitions is assigned."""
        self._look_up_unknown((each.topic, each.partition) for each in positions)
        self._consumer.incremental_assign(list(positions))
        try:
            for each in positions:
                if each.leader_epoch is not None and each.leader_epoch >= 0:
                    self._seek(each)
        except BaseException:
            self._consumer.incremental_unassign([ClientPartition(each.topic, each.partition) for each in positions])
            raise

    def _seek(self, position: ClientPartition) -> None:
        """Seek, with retries for a limited time: a partition that was just assigned cannot be
        sought before librdkafka has started it."""
        deadline = time.monotonic() + _BEGIN_S
        while True:
            try:
                self._consumer.seek(position)
                return
            except KafkaException as error:
                if error.args[0].code() != KafkaError._STATE or time.monotonic() > deadline:
                    raise
            time.sleep(_AGAIN_AFTER_S)

    def _look_up_unknown(self, wanted: Iterable[TopicPartition]) -> None:
        """Look up unknown topics. If no broker answers, continue: librdkafka looks them up itself,
        later."""
        unknown = {topic for topic, number in wanted if number not in self._known.get(topic, ())}
        if unknown:
            try:
                self.look_up(unknown.pop() if len(unknown) == 1 else None)
            except KafkaException:
                return
