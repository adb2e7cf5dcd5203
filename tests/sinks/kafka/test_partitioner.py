"""Records with a key go to the partition where Java's producer puts them."""

from __future__ import annotations

import pytest

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.clients.kafka import KafkaSettings
from framework.transactions import MemoryStore
from sinks import KafkaSink
from spouts import MemoryTransactionalSpout
from tests.kit.oracle import read_topics
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

#: Kafka's own vectors of murmur2 (org.apache.kafka.common.utils.UtilsTest).
MURMUR2 = {
    "21": -973932308,
    "foobar": -790332482,
    "a-little-bit-long-string": -985981536,
    "a-little-bit-longer-string": -1486304829,
    "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    "abc": 479470107,
}
PARTITIONS = 7


@pytest.mark.integration
@pytest.mark.parametrize("at_least_once", [False, True])
def test_keys_are_where_java_puts_them(topics: Topics, name: str, at_least_once: bool) -> None:
    topic = topics.create(name, PARTITIONS)
    rows = [[key] for key in MURMUR2]
    spout = MemoryTransactionalSpout({0: rows}, Fields(key=str), 100)
    builder = TransactionalTopologyBuilder(name, "spout", spout, at_least_once=at_least_once)
    sink = KafkaSink(topic, key="key", bootstrap_servers=topics.bootstrap_servers, at_least_once=at_least_once)
    builder.set_bolt("out", sink).global_grouping("spout")
    with submit(builder.build(), {}, MemoryStore(), "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    found: dict[str, int] = {}
    read_topics(
        topics.bootstrap_servers,
        [topic],
        lambda message: found.update({message.key().decode(): message.partition()}),
    )
    assert found == {key: (value & 0x7FFFFFFF) % PARTITIONS for key, value in MURMUR2.items()}


def test_another_partitioner_may_be_chosen() -> None:
    assert KafkaSettings("h:1", None).producer()["partitioner"] == "murmur2_random"
    assert KafkaSettings("h:1", {"partitioner": "consistent"}).producer()["partitioner"] == "consistent"
