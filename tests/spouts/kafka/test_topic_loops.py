"""A spout does not read what its own topology writes: records, dead letters, markers."""

from __future__ import annotations

from typing import Any

import pytest

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.config import Config
from framework.errors import ConfigError, RatchetError
from framework.preflight import preflight
from framework.transactions import MemoryStore
from integration import EmbeddedServers
from sinks import Count, DeadLetterTopic, KafkaSink, MemoryBackend, OpaqueMapState, StateCommitter
from spouts import JsonCodec, KafkaTransactionalSpout, OpaqueKafkaTransactionalSpout
from tests.kit.topics import Topics

FIELDS = Fields(word=str, n=int)
HERE = "broker:9092"


def built(name: str, sink: Any, servers: str | None = HERE, **spout: Any) -> Any:
    source = OpaqueKafkaTransactionalSpout(bootstrap_servers=servers, codec=JsonCodec(FIELDS), **spout)
    builder = TransactionalTopologyBuilder(name, "spout", source)
    builder.set_bolt("out", sink).global_grouping("spout")
    return builder.build()


def counts() -> StateCommitter:
    return StateCommitter(OpaqueMapState(MemoryBackend("counts")), ["word"], {"n": Count()})


@pytest.mark.parametrize(
    ("sink", "spout", "topic"),
    [
        (KafkaSink("orders.out", bootstrap_servers=HERE), {"pattern": r"orders\..*"}, "orders.out"),
        (KafkaSink("orders", bootstrap_servers=HERE), {"topics": ["orders"]}, "orders"),
        (KafkaSink("orders", bootstrap_servers=HERE), {"streams": {"orders": JsonCodec(FIELDS)}}, "orders"),
        (KafkaSink("out", bootstrap_servers=f"other:1, {HERE}"), {"pattern": "ratchet-.*"}, "ratchet-markers-t"),
        (KafkaSink("out", bootstrap_servers=HERE, marker_topic="orders.m"), {"pattern": "orders.*"}, "orders.m"),
    ],
)
def test_what_a_sink_writes_is_refused_before_the_start(sink: KafkaSink, spout: dict[str, Any], topic: str) -> None:
    if "streams" in spout:
        source = OpaqueKafkaTransactionalSpout(bootstrap_servers=HERE, **spout)
        builder = TransactionalTopologyBuilder("t", "spout", source)
        builder.set_bolt("out", sink).global_grouping("spout", "orders")
        topology = builder.build()
    else:
        topology = built("t", sink, **spout)
    how = "its pattern" if "pattern" in spout else "it is among its topics"
    with pytest.raises(ConfigError, match=f"bolt 'out' writes .* to topic '{topic}'.*{how}"):
        submit(topology, {}, MemoryStore(), "local")


def test_dead_letters_are_refused_before_the_start() -> None:
    letters = DeadLetterTopic("orders.bad", bootstrap_servers=HERE)
    topology = built("t", counts(), pattern="orders.*", on_bad_record="dead_letter", dead_letters=letters)
    with pytest.raises(ConfigError, match="writes dead letters to topic 'orders.bad'.*'orders.\\*'"):
        submit(topology, {}, MemoryStore(), "local")


@pytest.mark.slow
def test_check_shows_it() -> None:
    topology = built("t", KafkaSink("orders"), servers=None, topics=["orders"])
    findings = preflight(topology, Config.of({"kafka.bootstrap.servers": "127.0.0.1:1"}), "local")
    found = next(each for each in findings if each.subject == "source spout")
    assert isinstance(found.error, ConfigError) and "for ever" in found.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [OpaqueKafkaTransactionalSpout, pytest.param(KafkaTransactionalSpout, marks=pytest.mark.slow)]
)
def test_what_another_cluster_has_by_the_same_name_is_read(topics: Topics, name: str, kind: Any, tmp_path: Any) -> None:
    topics.send(topics.create(name), [b'{"word": "a", "n": 1}'])
    with EmbeddedServers(tmp_path) as others:
        there = Topics(others.bootstrap_servers)
        there.create(name)
        source = kind([name], bootstrap_servers=topics.bootstrap_servers, codec=JsonCodec(FIELDS))
        builder = TransactionalTopologyBuilder(name, "spout", source)
        sink = KafkaSink(name, bootstrap_servers=others.bootstrap_servers)
        builder.set_bolt("out", sink).global_grouping("spout")
        with submit(builder.build(), {}, MemoryStore(), "local") as run:
            run.wait_until_caught_up(120)
            assert run.status().committed_txid == 1


@pytest.mark.slow
def test_a_topic_that_appears_while_it_runs_ends_the_topology(topics: Topics, name: str) -> None:
    """The same brokers by another name, so that nothing is known before the topic is there."""
    topics.send(topics.create(f"{name}.new"), [b'{"word": "a", "n": 1}'])
    letters = DeadLetterTopic(
        f"{name}.bad", bootstrap_servers=topics.bootstrap_servers.replace("127.0.0.1", "localhost")
    )
    topology = built(
        name,
        counts(),
        servers=topics.bootstrap_servers,
        pattern=f"{name}.*",
        on_bad_record="dead_letter",
        dead_letters=letters,
    )
    with pytest.raises(RatchetError, match=rf"to topic '{name}.bad'.*{name}\.\*"):  # noqa: SIM117
        with submit(topology, {}, MemoryStore(), "local") as run:
            run.wait_until_caught_up(120)
            topics.create(f"{name}.bad")
            run.wait_for_commit(1_000, 240)
