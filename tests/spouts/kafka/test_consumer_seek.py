"""A partition is looked up before it is assigned, and sought if its position has a leader epoch."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from spouts.kafka.consumer.consumer_seek import Assignment, placed


class NotedConsumer:
    """A stand-in for a consumer that notes its calls; a look-up of None asks for all topics."""

    def __init__(self) -> None:
        self.partitions = {"a": 1, "b": 2}
        self.noted: list[tuple[str, Any]] = []
        self.away = False
        self.refusals: list[int] = []  # how many seeks are refused

    def list_topics(self, topic: str | None = None, *, timeout: float) -> Any:
        self.noted.append(("look up", topic))
        if self.away:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))
        named = {topic: self.partitions.get(topic, 0)} if topic is not None else self.partitions
        return SimpleNamespace(
            topics={name: SimpleNamespace(partitions=dict.fromkeys(range(n))) for name, n in named.items()}
        )

    def incremental_assign(self, positions: Sequence[TopicPartition]) -> None:
        self.noted += [("assign", (each.topic, each.partition)) for each in positions]

    def incremental_unassign(self, partitions: Sequence[TopicPartition]) -> None:
        self.noted += [("unassign", (each.topic, each.partition)) for each in partitions]

    def seek(self, position: TopicPartition) -> None:
        self.noted.append(("seek", (position.topic, position.partition)))
        if self.refusals:
            raise KafkaException(KafkaError(self.refusals.pop()))

    def taken(self, what: str) -> list[Any]:
        found = [value for kind, value in self.noted if kind == what]
        self.noted.clear()
        return found


def begin(assignment: Assignment, *where: tuple[str, int], epoch: int | None = None) -> None:
    assignment.begin([placed(each, 5, epoch) for each in where])


def test_an_unknown_partition_is_looked_up_before_it_is_assigned() -> None:
    consumer = NotedConsumer()
    assignment = Assignment(consumer)  # type: ignore[arg-type]
    begin(assignment, ("b", 0))
    assert consumer.noted == [("look up", "b"), ("assign", ("b", 0))]
    consumer.noted.clear()
    begin(assignment, ("b", 1))
    assert consumer.noted == [("assign", ("b", 1))]


def test_a_partition_that_was_added_is_looked_up_and_many_topics_in_one_request() -> None:
    consumer = NotedConsumer()
    assignment = Assignment(consumer)  # type: ignore[arg-type]
    begin(assignment, ("a", 0), ("b", 0))
    assert consumer.taken("look up") == [None]
    consumer.partitions["a"] = 3
    begin(assignment, ("a", 2))
    assert consumer.taken("look up") == ["a"]


def test_a_look_up_that_fails_is_repeated_the_next_time() -> None:
    consumer = NotedConsumer()
    assignment = Assignment(consumer)  # type: ignore[arg-type]
    consumer.away = True
    begin(assignment, ("a", 0))
    assert consumer.noted == [("look up", "a"), ("assign", ("a", 0))]
    consumer.away = False
    begin(assignment, ("b", 0))
    begin(assignment, ("b", 1))
    assert consumer.taken("look up") == ["a", "b"]


def test_only_positions_with_an_epoch_are_sought() -> None:
    consumer = NotedConsumer()
    assignment = Assignment(consumer)  # type: ignore[arg-type]
    begin(assignment, ("a", 0))
    begin(assignment, ("b", 1), epoch=0)
    assert consumer.taken("seek") == [("b", 1)]


def test_a_partition_that_has_not_begun_yet_is_sought_again() -> None:
    consumer = NotedConsumer()
    consumer.refusals = [KafkaError._STATE, KafkaError._STATE]
    begin(Assignment(consumer), ("b", 1), epoch=0)  # type: ignore[arg-type]
    assert [kind for kind, _ in consumer.noted] == ["look up", "assign", "seek", "seek", "seek"]


def test_a_partition_that_cannot_be_sought_is_not_assigned() -> None:
    consumer = NotedConsumer()
    consumer.refusals = [KafkaError._TIMED_OUT]
    with pytest.raises(KafkaException, match="(?i)timed out"):
        begin(Assignment(consumer), ("b", 0), ("b", 1), epoch=0)  # type: ignore[arg-type]
    assert consumer.noted[-2:] == [("unassign", ("b", 0)), ("unassign", ("b", 1))]
