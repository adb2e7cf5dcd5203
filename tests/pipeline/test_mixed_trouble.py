"""An hour's worth of mixed trouble in minutes, for both spouts; at the end every figure is exact.

The trouble: aborted and open kafka_txns, new topics and partitions, bad records, brokers and
ZooKeeper killed or paused, drivers killed. The oracle reads the topics themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from framework.transactions import TransactionalState, ZooKeeperStore
from framework.transactions.documents import read_plan
from integration import EmbeddedServers
from tests.kit.oracle import is_stable, read_topics
from tests.kit.processes import RunProcess
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

#: The number of steps of a script; by default, the target decides it.
STEPS = os.environ.get("RATCHET_TROUBLE_STEPS")
KEYS = 40
PARTITIONS_MAX = 6
TOPICS_MAX = 3

pytestmark = [pytest.mark.integration, pytest.mark.kills]


@pytest.fixture(scope="module")
def own_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServers]:
    with EmbeddedServers(tmp_path_factory.mktemp("trouble")) as servers:
        yield servers


class Script:
    """Decides from a seed what happens next, and does it."""

    def __init__(self, seed: int, servers: EmbeddedServers, run: RunProcess, name: str) -> None:
        self.chance = random.Random(seed)
        self.servers = servers
        self.run = run
        self.name = name
        self.topics = Topics(servers.bootstrap_servers)
        self.partitions = {f"{name}-0": 2}
        self.topics.create(f"{name}-0", 2)
        self.open: list[Producer] = []
        self.happened: Counter[str] = Counter()
        self._number = 0
        self._plain = self.topics.producer(acks="all")

    def steps(self) -> dict[Callable[[], None], int]:
        """What may happen, by weight."""
        return {
            self.produce: 14,
            self.produce_in_kafka_txn: 8,
            self.abort: 5,
            self.leave_open: 3,
            self.end_open: 4,
            self.add_partition: 3,
            self.add_topic: 2,
            self.kill_driver: 5,
            self.kill_broker: 3,
            self.restart_broker: 2,
            self.pause_broker: 2,
            self.kill_zookeeper: 2,
            self.breathe: 8,
        }

    def play(self, steps: int) -> None:
        for _ in range(steps):
            choices = self.steps()
            step = self.chance.choices(list(choices), list(choices.values()))[0]
            step()
            self.happened[step.__name__] += 1
        self._plain.flush(PATIENCE_S)
        while self.open:
            self.end_open()

    # --- what may happen --------------------------------------------------------------------------

    def _value(self) -> bytes:
        self._number += 1
        if self.chance.random() < 0.01:
            return b"not JSON %d" % self._number
        return json.dumps({"key": f"k{self.chance.randrange(KEYS)}", "n": self._number}).encode()

    def _some(self, producer: Producer, most: int) -> None:
        for _ in range(self.chance.randrange(1, most)):
            topic = self.chance.choice(list(self.partitions))
            partition = self.chance.randrange(self.partitions[topic])
            try:
                producer.produce(topic, self._value(), partition=partition)
            except KafkaException as error:  # this producer does not know a new partition yet
                if error.args[0].code() != KafkaError._UNKNOWN_PARTITION:
                    raise
            producer.poll(0)

    def produce(self) -> None:
        self._some(self._plain, 1_500)

    def _begun(self) -> Producer | None:
        producer = self.topics.producer(
            transactional_id=f"{self.name}-{self._number}", transaction_timeout_ms=8_000, message_timeout_ms=8_000
        )
        try:
            producer.init_transactions(60)
            producer.begin_transaction()
            self._some(producer, 300)
            producer.flush(PATIENCE_S)
        except KafkaException:
            return None  # the topic says what became of it
        return producer

    @staticmethod
    def _end(end: Callable[[float], None]) -> None:
        with contextlib.suppress(KafkaException):  # the broker ends it after its timeout
            end(20)

    def produce_in_kafka_txn(self) -> None:
        producer = self._begun()
        if producer is not None:
            self._end(producer.commit_transaction)

    def abort(self) -> None:
        producer = self._begun()
        if producer is not None:
            self._end(producer.abort_transaction)

    def leave_open(self) -> None:
        producer = self._begun()
        if producer is not None:
            self.open.append(producer)

    def end_open(self) -> None:
        if self.open:
            producer = self.open.pop(0)
            self._end(self.chance.choice([producer.commit_transaction, producer.abort_transaction]))

    def add_partition(self) -> None:
        topic = self.chance.choice(list(self.partitions))
        if self.partitions[topic] < PARTITIONS_MAX:
            wanted = self.partitions[topic] + 1
            self.topics.add_partitions(topic, wanted)
            self.partitions[topic] = wanted

    def add_topic(self) -> None:
        if len(self.partitions) < TOPICS_MAX:
            topic = f"{self.name}-{len(self.partitions)}"
            self.topics.create(topic, 2)
            self.partitions[topic] = 2

    def kill_driver(self) -> None:
        if self.chance.random() < 0.8:
            self.run.wait_for(lambda: self.run.said("driver.leads"))
            time.sleep(self.chance.uniform(0, 1.5))  # a random moment is the point
        assert self.run.kill(), f"the driver has ended by itself:\n{self.run.tail()}"
        self.run.start()

    def kill_broker(self) -> None:
        self.servers.kafka.kill()
        self.servers.kafka.start()

    def restart_broker(self) -> None:
        self.servers.kafka.stop()
        self.servers.kafka.start()

    def pause_broker(self) -> None:
        self.servers.kafka.pause()
        time.sleep(self.chance.uniform(0.5, 3))
        self.servers.kafka.resume()

    def kill_zookeeper(self) -> None:
        self.servers.zookeeper_server.kill()
        self.servers.zookeeper_server.start()

    def breathe(self) -> None:
        time.sleep(self.chance.uniform(0.2, 2))


class Oracle:
    """A fold over the committed records of the topics, up to the topology's positions.

    ``ends``: the last stable offsets, which the topology must have reached.
    """

    def __init__(self, servers: str, topics: list[str], positions: dict[str, int]) -> None:
        self.records: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()
        self.letters: set[tuple[str, int, int, bytes]] = set()
        self._positions = positions
        self.ends = read_topics(servers, topics, self._take)

    def _take(self, message: Any) -> None:
        if message.offset() >= self._positions.get(f"{message.topic()}/{message.partition()}", 0):
            return
        try:
            row = json.loads(message.value())
        except ValueError:
            self.letters.add((message.topic(), message.partition(), message.offset(), message.value()))
            return
        self.records[row["key"]] += 1
        self.totals[row["key"]] += row["n"]


def positions_of(zookeeper: str, root: str, spout: str) -> dict[str, int]:
    """The positions of the topology in the coordination store: partition -> next offset."""
    store = ZooKeeperStore(zookeeper, root)
    try:
        currtx = TransactionalState(store, f"trouble-{spout}").get_data("coordinator/currtx")
        _, plan = read_plan(store, f"trouble-{spout}", "events", currtx - 1)
    finally:
        store.close()
    return {partition: int(meta["next_offset"]) for partition, meta in plan.items()}


@pytest.mark.slow
@pytest.mark.behaviour("2.1")
@pytest.mark.parametrize("spout", ["opaque", pytest.param("transactional", marks=pytest.mark.slow)])
def test_mixed_trouble_ends_exact(
    own_servers: EmbeddedServers, tmp_path: Path, spout: str, name: str, seed: int, in_all: bool
) -> None:
    database = tmp_path / "trouble.db"
    settings = {
        "app.kafka": own_servers.bootstrap_servers,
        "app.database": database,
        "app.pattern": f"{name}-.*",
        "app.spout": spout,
        "transactional.zookeeper.servers": own_servers.zookeeper,
        "transactional.zookeeper.session.timeout.secs": 2,
        "transactional.zookeeper.root": f"/{name}",
        "topology.max.spout.pending": 3,
        "spark.master": "local[2]",
    }
    executor = "spark" if in_all else "local"
    run = RunProcess(tmp_path / "run.log", "tests.kit.mixed_trouble:topology", settings, executor=executor)
    script = Script(seed, own_servers, run, name)
    try:
        run.start()
        script.play(int(STEPS or (30 if in_all else 8)))
        stable = is_stable(own_servers.bootstrap_servers, list(script.partitions), 45)
        assert run.kill(), run.tail()
        # A driver that starts knows all topics and partitions, so it catches up on all of them.
        run.start("--until-caught-up")
        assert run.finish() == 0, run.tail()
        positions = positions_of(own_servers.zookeeper, f"/{name}", spout)
        oracle = Oracle(own_servers.bootstrap_servers, sorted(script.partitions), positions)
        assert len(oracle.ends) == sum(script.partitions.values())
        # A partition without records is in no plan yet.
        assert not stable or oracle.ends == {partition: positions.get(partition, 0) for partition in oracle.ends}
        print(f"{dict(script.happened)}; {sum(oracle.records.values())} records, {len(oracle.letters)} bad")
        with sqlite3.connect(database) as connection:
            found = connection.execute("SELECT key, records, total FROM sums_live").fetchall()
            letters = connection.execute("SELECT topic, partition, offset, record_value FROM letters_live").fetchall()
        assert {key: records for key, records, _ in found} == dict(oracle.records)
        assert {key: total for key, _, total in found} == dict(oracle.totals)
        assert set(letters) == oracle.letters
        assert len(letters) == len(oracle.letters)
    finally:
        run.end()
