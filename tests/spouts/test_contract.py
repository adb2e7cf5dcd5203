"""Every partitioned spout passes the contract suite, which authors of spouts can use for their
own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from framework import Fields
from framework.testing.conformance import PartitionedSpoutContract
from framework.topology import PartitionPlanner
from framework.topology.spouts import Meta, PartitionedSpout
from integration.plugin import MakeTopic
from spouts import (
    KafkaTransactionalSpout,
    MemoryTransactionalSpout,
    OpaqueKafkaTransactionalSpout,
    OpaqueMemoryTransactionalSpout,
    TextCodec,
    TopicStream,
)

DATA = {0: [["a"], ["b"], ["c"]], 1: [["d"]], 2: []}


class TestMemory(PartitionedSpoutContract):
    @pytest.fixture(autouse=True, params=[MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout])
    def source(self, request: pytest.FixtureRequest) -> None:
        self.made: PartitionedSpout = request.param(DATA, Fields(word=str), 2)

    def spout(self) -> PartitionedSpout:
        return self.made


@pytest.mark.integration
class TestKafka(PartitionedSpoutContract):
    @pytest.fixture(autouse=True, params=[KafkaTransactionalSpout, OpaqueKafkaTransactionalSpout])
    def source(self, request: pytest.FixtureRequest, ratchet_topic: MakeTopic, ratchet_servers: Any) -> None:
        self.kind, self.address = request.param, ratchet_servers.bootstrap_servers
        self.topics = [
            ratchet_topic([(b"%d" % number, b"v%d" % number) for number in range(20)], partitions=3),
            ratchet_topic([b"x", b"y"]),
        ]

    def spout(self) -> PartitionedSpout:
        one, other = self.topics
        made: PartitionedSpout = self.kind(
            streams={"one": TopicStream(TextCodec(), topic=one), "other": TopicStream(TextCodec("it"), topic=other)},
            bootstrap_servers=self.address,
            batch_records_max=7,
        )
        return made


class Unsteady(PartitionPlanner):
    """Forgets where it was, or what it has planned."""

    def __init__(self, planner: PartitionPlanner) -> None:
        self._planner, self._first = planner, True

    def partitions(self) -> list[str]:
        return self._planner.partitions()

    def for_reading(self, partition: str, meta: Meta) -> Meta:
        return self._planner.for_reading(partition, meta)

    def plan(self, previous: Mapping[str, Meta | None]) -> Mapping[str, Meta] | None:
        first, self._first = self._first, False
        return self._planner.plan({} if first else previous)


class WrongSpout(MemoryTransactionalSpout):
    def planner(self, conf: Any, context: Any) -> PartitionPlanner:
        return Unsteady(super().planner(conf, context))


def test_the_suite_notices_a_planner_that_begins_anew() -> None:
    suite = TestMemory()
    suite.made = WrongSpout(DATA, Fields(word=str), 2)
    suite.test_all_batches_together_hold_every_record_once()
    with pytest.raises(AssertionError):
        suite.test_another_planner_goes_on_where_the_last_plan_ended()


def test_the_suite_notices_a_plan_that_is_not_json() -> None:
    class Tuples(WrongSpout):
        def planner(self, conf: Any, context: Any) -> PartitionPlanner:
            planner = MemoryTransactionalSpout.planner(self, conf, context)
            plan = planner.plan
            planner.plan = lambda previous: (  # type: ignore[method-assign]
                None if (made := plan(previous)) is None else {each: {**meta, "x": (1,)} for each, meta in made.items()}
            )
            return planner

    suite = TestMemory()
    suite.made = Tuples(DATA, Fields(word=str), 2)
    with pytest.raises(AssertionError, match="the same after a journey through JSON"):
        suite.test_a_plan_says_json_and_names_every_partition_of_the_one_before()
