"""Records with a key go to the partition where Java's producer puts them, or where another
partitioner of librdkafka does."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.clients.kafka_settings import KafkaSettings
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


def fnv1a(key: bytes) -> int:
    """The hash of Go's Sarama client, whose sign bit is dropped there."""
    found = 0x811C9DC5
    for byte in key:
        found = ((found ^ byte) * 0x01000193) & 0xFFFFFFFF
    return abs(found - (1 << 32) if found >> 31 else found)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("partitioner", "hashed"),
    [
        ("consistent_random", zlib.crc32),  # of librdkafka
        pytest.param("consistent", zlib.crc32, marks=pytest.mark.slow),
        pytest.param("fnv1a_random", fnv1a, marks=pytest.mark.slow),
    ],
)
def test_another_partitioner_of_librdkafka_may_be_chosen(
    topics: Topics, name: str, partitioner: str, hashed: Callable[[bytes], int]
) -> None:
    topic = topics.create(name, PARTITIONS)
    keys = [f"key-{number}" for number in range(60)]
    spout = MemoryTransactionalSpout({0: [[key] for key in keys]}, Fields(key=str), 100)
    builder = TransactionalTopologyBuilder(name, "spout", spout, at_least_once=True)
    sink = KafkaSink(
        topic,
        key="key",
        bootstrap_servers=topics.bootstrap_servers,
        settings={"partitioner": partitioner},
        at_least_once=True,
    )
    builder.set_bolt("out", sink).global_grouping("spout")
    with submit(builder.build(), {}, MemoryStore(), "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    found: dict[str, int] = {}
    read_topics(
        topics.bootstrap_servers, [topic], lambda message: found.update({message.key().decode(): message.partition()})
    )
    assert found == {key: hashed(key.encode()) % PARTITIONS for key in keys}


def test_the_partitioner_is_java_s_unless_another_is_chosen() -> None:
    assert KafkaSettings("h:1", None).producer()["partitioner"] == "murmur2_random"
    assert KafkaSettings("h:1", {"partitioner": "consistent"}).producer()["partitioner"] == "consistent"
