"""Copies records to a Kafka topic, undecodable ones to dead letters, under many kills; and the
oracle.

With a state beside the topics, the topology has a header. Without one, it has only the markers in
Kafka and what is written down in ZooKeeper.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from framework import Fields, Topology, TransactionalTopologyBuilder
from framework.transactions import ZooKeeperStore, committed_txid
from integration import EmbeddedServers, TcpProxy
from sinks import Count, DeadLetterTopic, KafkaSink, OpaqueMapState, StateCommitter, Sum
from spouts import JsonCodec, OpaqueKafkaTransactionalSpout
from tests.kit.kills import TOPIC, Kills, kill_often
from tests.kit.oracle import is_stable, read_topics
from tests.kit.stores import backend
from tests.kit.striking import lose_a_reply
from tests.kit.topics import Topics

#: What may be struck, by weight.
KINDS = {
    "driver": 4,
    "worker": 3,
    "broker": 2,
    "broker stopped": 1,
    "zookeeper": 2,
    "Kafka cut": 1,
    "Kafka reset": 1,
    "Kafka's reply lost": 1,
    "ZooKeeper cut": 1,
    "ZooKeeper reset": 1,
    "ZooKeeper's reply lost": 1,
}
#: What may be struck as well where there is a Spark cluster, by weight.
ON_CLUSTER = {"executor": 4}
OUT, DEAD = "copies", "letters"
KEYS = 40
BAD_SHARE = 0.05
#: Tasks of the sink, and of the state.
TASKS = 3


def record(number: int) -> bytes:
    """The record of a number; some are not JSON, or JSON of another shape, or empty."""
    if random.Random(number).random() < BAD_SHARE:
        return (b"not JSON %d" % number, b'{"key": %d}' % number, b"")[number % 3]
    return json.dumps({"key": f"k{number * 7 % KEYS}", "n": number}).encode()


def topology(app: Mapping[str, Any]) -> Topology:
    """``app.store``: the store of the state beside the topics; "none" for no state."""
    spout = OpaqueKafkaTransactionalSpout(
        [app["app.topic"]],
        bootstrap_servers=app["app.kafka"],
        codec=JsonCodec(Fields(key=str, n=int)),
        batch_records_max=150,
        on_bad_record="dead_letter",
        dead_letters=DeadLetterTopic(DEAD, bootstrap_servers=app["app.kafka"]),
        bad_record_share_max=None,
    )
    builder = TransactionalTopologyBuilder("copies", "records", spout, 2)
    sink = KafkaSink(OUT, key="key", bootstrap_servers=app["app.kafka"])
    builder.set_bolt("copy", sink, TASKS).fields_grouping("records", Fields("key"))
    if app["app.store"] != "none":
        sums = StateCommitter(OpaqueMapState(backend(app, "sums")), ["key"], {"records": Count(), "total": Sum("n")})
        builder.set_bolt("sums", sums, TASKS).fields_grouping("records", Fields("key"))
    return builder.build()


@dataclass
class Copied:
    """Good records by (key, n); bad ones by (topic, partition, offset, value).

    ``sums``: key -> (number of records, their sum); None where there is no state.
    """

    good: Counter[tuple[str, int]] = field(default_factory=Counter)
    bad: Counter[tuple[str, int, int, bytes]] = field(default_factory=Counter)
    sums: dict[str, tuple[int, int]] | None = None


def expected(bootstrap_servers: str) -> Copied:
    """What the sinks must hold, by the input topic alone."""
    copied = Copied(sums={})

    def take(message: Any) -> None:
        try:
            document = json.loads(message.value())
            each = (document["key"], document["n"])
        except (ValueError, KeyError):
            copied.bad[(message.topic(), message.partition(), message.offset(), message.value())] += 1
            return
        copied.good[each] += 1
        records, total = copied.sums.get(each[0], (0, 0))  # type: ignore[union-attr]
        copied.sums[each[0]] = (records + 1, total + each[1])  # type: ignore[index]

    read_topics(bootstrap_servers, [TOPIC], take)
    return copied


def found(bootstrap_servers: str, app: Mapping[str, Any]) -> Copied:
    """What the sinks hold."""
    copied = Copied()

    def take(message: Any) -> None:
        document = json.loads(message.value())
        assert message.key() == document["key"].encode()
        copied.good[(document["key"], document["n"])] += 1

    def take_letter(message: Any) -> None:
        said = dict(message.headers())
        where = (int(said[f"ratchet.{name}"]) for name in ("partition", "offset"))
        copied.bad[(said["ratchet.topic"].decode(), *where, message.value() or b"")] += 1  # type: ignore[index]

    read_topics(bootstrap_servers, [OUT], take)
    read_topics(bootstrap_servers, [DEAD], take_letter)
    if app["app.store"] != "none":
        state = topology(app).states[0]
        assert isinstance(state, OpaqueMapState)
        copied.sums = {key[0]: row.value for key, row in state.backend.scan() if row.value is not None}
        state.close()
    return copied


@dataclass
class Outcome:
    """What was killed, what the sinks must hold, and what they hold."""

    seen: Kills
    expected: Copied
    found: Copied

    def problems(self) -> list[str]:
        """What is missing, doubled or foreign; a line each."""
        lines = []
        for name in ("good", "bad"):
            wanted, there = getattr(self.expected, name), getattr(self.found, name)
            for what, much in (("missing", wanted - there), ("too many", there - wanted)):
                if much:
                    lines.append(f"{name} records {what}: {much.total()}, such as {sorted(much)[:5]}")
        if self.found.sums is not None and self.found.sums != self.expected.sums:
            lines.append(f"the state holds {self.found.sums}, and the records say {self.expected.sums}")
        return lines

    def summary(self) -> dict[str, Any]:
        return {**self.seen.summary(), "good": self.expected.good.total(), "bad": self.expected.bad.total()}


def run(
    folder: Path, order: list[str], chance: random.Random, *, store: str, address: str, workers: int, **settings: Any
) -> Outcome:
    """Kill what ``order`` says: of ``KINDS`` and, where there are Spark ``workers``, of
    ``ON_CLUSTER``.

    All clients of Kafka go through one proxy, the driver's ZooKeeper client through another.
    """
    with TcpProxy("127.0.0.1:1") as to_kafka, TcpProxy("127.0.0.1:1") as to_zookeeper:
        advertised = {"advertised.listeners": f"PLAINTEXT://{to_kafka.address}"}
        with EmbeddedServers(folder / "servers", kafka_settings=advertised) as servers:
            to_kafka.retarget(servers.kafka.address)
            to_zookeeper.retarget(servers.zookeeper)
            topics = Topics(servers.bootstrap_servers)
            for topic in (OUT, DEAD):
                topics.create(topic, 2)
            app = {
                "app.store": store,
                "app.address": address,
                "app.kafka": servers.bootstrap_servers,
                "app.topic": TOPIC,
            }
            with closing(ZooKeeperStore(servers.zookeeper, "/ratchet")) as coordination:
                seen = kill_often(
                    folder,
                    "tests.kit.kafka_copies:topology",
                    {
                        **app,
                        "transactional.zookeeper.servers": to_zookeeper.address,
                        "transactional.zookeeper.session.timeout.secs": 2,
                        "topology.max.spout.pending": 4,
                        "topology.max.attempts": 1_000,
                        **settings,
                    },
                    order,
                    lambda: committed_txid(coordination, "copies"),
                    servers,
                    per_second=60,
                    more={
                        "broker stopped": lambda: (servers.kafka.stop(), servers.kafka.start()),
                        **_strikes("Kafka", to_kafka, chance),
                        **_strikes("ZooKeeper", to_zookeeper, chance),
                    },
                    record=record,
                    workers=workers,
                    chance=chance,
                    overlapping=0.2,
                )
            assert is_stable(servers.bootstrap_servers, [OUT, DEAD], 120), "a kafka_txn stays open"
            return Outcome(seen, expected(servers.bootstrap_servers), found(servers.bootstrap_servers, app))


def _strikes(name: str, link: TcpProxy, chance: random.Random) -> dict[str, Callable[[], object]]:
    def cut() -> None:
        link.cut()
        time.sleep(chance.uniform(0.1, 3.0))
        link.heal()

    return {f"{name} cut": cut, f"{name} reset": link.reset, f"{name}'s reply lost": lose_a_reply(link)}
