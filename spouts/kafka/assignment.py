"""Partitions begin to be read: at once, and only in the log that is meant.

librdkafka accepts a partition of a topic that it does not know, and looks such topics up once a second: the first record would come
up to a second late, at each start, recovery and new topic. So they are looked up first.

It asks the broker whether an offset is still of the log that a leader epoch knew when it learns of a leader's epoch, and at a seek,
but not when a partition is assigned whose leader it knows. So each position that has an epoch is sought as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from spouts.kafka.partitions import Where

_LOOK_UP_S = 2.0
_BEGIN_S = 5.0
_AGAIN_AFTER_S = 0.001


def placed(where: Where, offset: int, leader_epoch: int | None) -> TopicPartition:
    """A position. ``leader_epoch``: in which the offset was in the log; None when that is not known."""
    if leader_epoch is None:
        return TopicPartition(*where, offset)
    return TopicPartition(*where, offset, leader_epoch=leader_epoch)


class Assignment:
    """The partitions of one consumer."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._known: dict[str, set[int]] = {}

    def look_up(self, topic: str | None = None) -> None:
        """Ask for the partitions of one topic, or of all. Raises ``KafkaException`` when nobody answers."""
        for name, found in self._consumer.list_topics(topic, timeout=_LOOK_UP_S).topics.items():
            self._known[name] = set(found.partitions)

    def begin(self, positions: Sequence[TopicPartition]) -> None:
        """Read these partitions, which are not assigned yet, from there on. What is not there as it was comes as an event with an
        error. Raises ``KafkaException``; then none of them is assigned."""
        self._look_up_unknown((each.topic, each.partition) for each in positions)
        self._consumer.incremental_assign(list(positions))
        try:
            for each in positions:
                if each.leader_epoch is not None and each.leader_epoch >= 0:
                    self._seek(each)
        except BaseException:
            self._consumer.incremental_unassign([TopicPartition(each.topic, each.partition) for each in positions])
            raise

    def _seek(self, position: TopicPartition) -> None:
        """A partition that was just assigned may not have begun yet, and cannot be sought then."""
        deadline = time.monotonic() + _BEGIN_S
        while True:
            try:
                self._consumer.seek(position)
                return
            except KafkaException as error:
                if error.args[0].code() != KafkaError._STATE or time.monotonic() > deadline:
                    raise
            time.sleep(_AGAIN_AFTER_S)

    def _look_up_unknown(self, wanted: Iterable[Where]) -> None:
        """When nobody answers, what is assigned waits as it would have."""
        unknown = {topic for topic, number in wanted if number not in self._known.get(topic, ())}
        if unknown:
            try:
                self.look_up(unknown.pop() if len(unknown) == 1 else None)
            except KafkaException:
                return
