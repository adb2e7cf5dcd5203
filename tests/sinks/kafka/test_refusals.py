"""What brokers never accept ends the topology, with the name of what to change."""

from __future__ import annotations

from typing import Any

import pytest

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.errors import ConfigError, RatchetError
from framework.transactions import MemoryStore
from sinks import DeadLetterTopic, KafkaSink
from spouts import MemoryTransactionalSpout
from tests.kit.topics import Topics

pytestmark = pytest.mark.integration
FIELDS = Fields(k=str, n=int)


def ran(name: str, sink: KafkaSink, rows: list[list[Any]]) -> None:
    """Run a topology until it has caught up or has failed."""
    at_least_once = not sink.exactly_once
    builder = TransactionalTopologyBuilder(
        name, "spout", MemoryTransactionalSpout({0: rows}, FIELDS, 100), at_least_once=at_least_once
    )
    builder.set_bolt("out", sink).global_grouping("spout")
    with submit(builder.build(), {}, MemoryStore(), "local") as run:
        run.wait_until_caught_up(120)


@pytest.mark.parametrize("at_least_once", [False, True])
@pytest.mark.parametrize("key", ["k", None])
def test_a_record_without_a_key_for_a_compacted_topic(
    topics: Topics, name: str, at_least_once: bool, key: str | None
) -> None:
    topic = topics.create(name, cleanup_policy="compact")
    sink = KafkaSink(topic, key=key, bootstrap_servers=topics.bootstrap_servers, at_least_once=at_least_once)
    with pytest.raises(RatchetError, match=f"{topic}.*without a key.*key"):
        ran(name, sink, [["a", 1], [None, 2]])


@pytest.mark.parametrize("at_least_once", [False, True])
def test_a_record_that_is_too_large_for_the_topic(topics: Topics, name: str, at_least_once: bool) -> None:
    topic = topics.create(name, max_message_bytes="2000")
    sink = KafkaSink(topic, key="k", bootstrap_servers=topics.bootstrap_servers, at_least_once=at_least_once)
    with pytest.raises(RatchetError, match=f"{topic}.*max.message.bytes"):
        ran(name, sink, [["x" * 5_000, 1]])


def test_topologies_whose_topics_of_markers_collide(topics: Topics, name: str) -> None:
    """Kafka takes no topic of which the name differs from another's in a dot and an underscore."""
    topic = topics.create(name)
    ran(f"{name}.eu", KafkaSink(topic, key="k", bootstrap_servers=topics.bootstrap_servers), [["a", 1]])
    with pytest.raises(RatchetError, match=f"ratchet-markers-{name}_eu.*marker_topic="):
        ran(f"{name}_eu", KafkaSink(topic, key="k", bootstrap_servers=topics.bootstrap_servers), [["a", 1]])
    own = KafkaSink(topic, key="k", bootstrap_servers=topics.bootstrap_servers, marker_topic=f"markers-{name}")
    ran(f"{name}_eu", own, [["a", 1]])


@pytest.mark.parametrize("wrong", ["o:ut", "", "m" * 250, ".."])
def test_names_that_kafka_takes_for_no_topic(wrong: str) -> None:
    for make in (
        lambda: KafkaSink(wrong),
        lambda: DeadLetterTopic(wrong),
        lambda: KafkaSink("out", marker_topic=wrong),
        lambda: DeadLetterTopic("bad", marker_topic=wrong),
    ):
        with pytest.raises(ConfigError, match=f"'{wrong}' is not a Kafka topic name"):
            make()
