"""What brokers never accept ends the topology, with the name of what to change."""

from __future__ import annotations

import json
import random
import sqlite3
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException, Producer

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.clients.kafka_settings import KafkaSettings
from framework.errors import ConfigError, RatchetError
from framework.transactions import MemoryStore
from sinks import Count, DeadLetterTopic, KafkaSink, OpaqueMapState, SqliteBackend, StateCommitter
from sinks.kafka.limits import headers_bytes, limits_of
from spouts import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from tests.kit.oracle import read_topics
from tests.kit.refusing import refused
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


@pytest.mark.each_value_once
@pytest.mark.rule("C51")
@pytest.mark.parametrize("at_least_once", [False, True])
@pytest.mark.parametrize("tasks", [1, 2])
def test_what_a_topic_never_takes_is_left_out(
    topics: Topics, name: str, tmp_path: Path, at_least_once: bool, tasks: int
) -> None:
    """Also beside a state: it is found before the commit is opened."""
    topic = topics.create(name, 1, cleanup_policy="compact", max_message_bytes="2000")
    rows: list[list[Any]] = [[f"k{number}", number] for number in range(40)]
    rows[7:7] = [[None, -1]]
    rows[20:20] = [["x" * 1_990, -2]]
    spout = OpaqueMemoryTransactionalSpout({0: rows}, FIELDS, 100, on_bad_record="skip")
    builder = TransactionalTopologyBuilder(name, "spout", spout, at_least_once=at_least_once)
    sink = KafkaSink(
        topic, key="k", value=["n"], bootstrap_servers=topics.bootstrap_servers, at_least_once=at_least_once
    )
    builder.set_bolt("out", sink, tasks).fields_grouping("spout", Fields("k"))
    counting = StateCommitter(OpaqueMapState(SqliteBackend(tmp_path / "x.db", "n")), ["n"], {"count": Count()})
    builder.set_bolt("counts", counting).global_grouping("spout")
    store = MemoryStore()
    with submit(builder.build(), {}, store, "local") as run:
        run.wait_until_caught_up(120)
    assert set(refused(store, name)) == {("0", 7), ("0", 20)}
    found: list[Any] = []
    read_topics(topics.bootstrap_servers, [topic], found.append)
    assert sorted(json.loads(each.value())["n"] for each in found) == list(range(40))
    with sqlite3.connect(tmp_path / "x.db") as connection:
        counted = connection.execute("SELECT n, count FROM n WHERE NOT _deleted ORDER BY n").fetchall()
    assert counted == [(number, 1) for number in range(40)]


@pytest.mark.rule("C51")
def test_a_limit_that_was_raised_meanwhile_refuses_nothing(topics: Topics, name: str) -> None:
    topic = topics.create(name, max_message_bytes="2000")
    sink = KafkaSink(topic, key="k", bootstrap_servers=topics.bootstrap_servers)
    ran(f"{name}-1", sink, [["a", 1]])
    topics.alter(topic, max_message_bytes="20000")
    ran(f"{name}-2", KafkaSink(topic, key="k", bootstrap_servers=topics.bootstrap_servers), [["x" * 5_000, 1]])


@pytest.mark.each_value_once
@pytest.mark.parametrize(
    ("key", "headers"),
    [
        (b"k", []),
        (b"", []),
        (None, []),
        (b"k", [("a", b"b"), ("ä" * 70, None), ("", b"x" * 100), *[("n", b"")] * 70]),
    ],
)
@pytest.mark.parametrize("limit", ["client", "topic"])
def test_a_record_is_refused_from_the_byte_at_which_kafka_refuses_it(
    topics: Topics, name: str, key: bytes | None, headers: list[tuple[str, bytes | None]], limit: str
) -> None:
    topics.create(name, max_message_bytes="1000" if limit == "topic" else "5000")
    settings = {"message.max.bytes": 1_000} if limit == "client" else {}
    limits = limits_of(KafkaSettings(topics.bootstrap_servers, settings), name)
    producer = Producer({"bootstrap.servers": topics.bootstrap_servers, "linger.ms": 0, "acks": "all", **settings})
    taken = {}
    most = 1_000 - headers_bytes(headers)
    for size in range(most - 100, most):
        reports: list[Any] = []
        try:
            producer.produce(name, b"x" * size, key, headers=headers, on_delivery=partial(_noted, reports))
        except KafkaException as error:
            reports.append(error)
        assert producer.flush(60) == 0
        taken[size] = all(each is None for each in reports)
    assert {size: limits.refusal(key, b"x" * size, headers) is None for size in taken} == taken
    assert set(taken.values()) == {True, False}


@pytest.mark.rule("C51")
@pytest.mark.parametrize("codec", ["gzip", "lz4", "zstd", "snappy"])
def test_a_record_that_is_too_large_when_it_is_compressed_is_left_out(
    topics: Topics, name: str, tmp_path: Path, codec: str
) -> None:
    """Also beside a state, and those that fit are written."""
    topic = topics.create(name, 1, max_message_bytes="20000")
    chance = random.Random(1)
    rows: list[list[Any]] = [[f"k{number}", number] for number in range(20)]
    rows[7:7] = [["x" * 200_000, 20]]  # it fits
    rows[12:12] = [[chance.randbytes(40_000).hex(), -1]]
    spout = OpaqueMemoryTransactionalSpout({0: rows}, FIELDS, 100, on_bad_record="skip")
    builder = TransactionalTopologyBuilder(name, "spout", spout)
    settings = {"compression.type": codec}
    sink = KafkaSink(topic, key="k", value=["n"], bootstrap_servers=topics.bootstrap_servers, settings=settings)
    builder.set_bolt("out", sink).global_grouping("spout")
    counting = StateCommitter(OpaqueMapState(SqliteBackend(tmp_path / "x.db", "n")), ["n"], {"count": Count()})
    builder.set_bolt("counts", counting).global_grouping("spout")
    store = MemoryStore()
    with submit(builder.build(), {}, store, "local") as run:
        run.wait_until_caught_up(120)
    assert set(refused(store, name)) == {("0", 12)}
    found: list[Any] = []
    read_topics(topics.bootstrap_servers, [topic], found.append)
    assert sorted(json.loads(each.value())["n"] for each in found) == list(range(21))


@pytest.mark.parametrize("codec", ["gzip", "lz4", "zstd", "snappy"])
def test_what_is_not_refused_is_taken_when_it_is_compressed(topics: Topics, name: str, codec: str, seed: int) -> None:
    """Around the limit, for contents that compress well, badly, and hardly."""
    topics.create(name, max_message_bytes="20000")
    settings = {"compression.type": codec}
    limits = limits_of(KafkaSettings(topics.bootstrap_servers, settings), name)
    producer = Producer({"bootstrap.servers": topics.bootstrap_servers, "linger.ms": 0, "acks": "all", **settings})
    chance = random.Random(seed)
    words = [chance.randbytes(4).hex().encode()[: chance.randint(2, 8)] for _ in range(2_000)]
    contents = [
        b" ".join(chance.choices(words, k=50_000)),
        chance.randbytes(50_000),
        chance.randbytes(50_000).hex().encode(),
        json.dumps([{"id": chance.randrange(10**6), "value": chance.random()} for _ in range(5_000)]).encode(),
    ]
    outcomes = set()
    for content in contents:
        low, high = 0, len(content)
        while high - low > 1:  # the largest that is not refused
            half = (low + high) // 2
            low, high = (half, high) if limits.refusal(b"k", content[:half]) is None else (low, half)
        for size in [low - 50, low, high + high // 2]:
            if limits.refusal(b"k", content[:size]) is None:
                reports: list[Any] = []
                producer.produce(name, content[:size], b"k", on_delivery=partial(_noted, reports))
                assert producer.flush(60) == 0
                assert reports == [None], (seed, size)
            outcomes.add(limits.refusal(b"k", content[:size]) is None)
    assert outcomes == {True, False}


def _noted(reports: list[Any], error: Any, message: Any) -> None:
    reports.append(error)


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
