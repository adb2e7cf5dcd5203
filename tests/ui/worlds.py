"""Topologies over real servers, in each state that the page shows."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from framework import (
    BaseBasicBolt,
    BaseStatefulBolt,
    CoreRun,
    FailedException,
    Fields,
    Run,
    TopologyBuilder,
    TransactionalTopologyBuilder,
    submit,
)
from framework.config import Config
from framework.coordination import store_of
from framework.errors import RetryableError
from framework.ui.server import serve_page
from framework.ui.sources.root import RootSource
from integration import EmbeddedServers
from integration.external import ExternalServers
from integration.server import free_port
from sinks import Count, DeadLetterTable, OpaqueMapState, SqliteBackend, StateCommitter
from spouts import OpaqueKafkaTransactionalSpout, TextCodec
from tests.kit.core_parts import ListSpout
from tests.kit.topics import Topics

#: Topic -> what goes wrong with its words: nothing, ``away``, ``failed``, or ``broken``.
TROUBLE: dict[str, str] = {}


class Words(BaseBasicBolt):
    """A line into words, unless there is trouble."""

    deterministic = True

    def __init__(self, topic: str) -> None:
        self.topic = topic

    def execute(self, tup: Any, collector: Any) -> None:
        trouble = TROUBLE.get(self.topic)
        if trouble == "away":
            raise RetryableError("PostgreSQL at 127.0.0.1:15433 does not answer: connection refused")
        if trouble == "failed":
            raise FailedException("the price list is not loaded yet")
        if trouble is not None:
            raise ValueError(trouble)
        for word in tup["value"].split():
            collector.emit([word])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


class Prints(BaseBasicBolt):
    """Hands numbers on, slowly enough to be seen, and some of them not at once."""

    def __init__(self) -> None:
        self.refused: set[int] = set()

    def execute(self, tup: Any, collector: Any) -> None:
        time.sleep(0.001)
        if tup[0] % 50 == 7 and tup[0] not in self.refused:
            self.refused.add(tup[0])
            raise FailedException("not the first time")
        collector.emit([tup[0] % 1000])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(rest=int))


class Rests(BaseStatefulBolt):
    """How often each number came."""

    def prepare(self, conf: Any, context: Any, collector: Any) -> None:
        self.collector = collector

    def init_state(self, state: Any) -> None:
        self.counts = state

    def execute(self, tup: Any) -> None:
        self.counts.put(tup["rest"], (self.counts.get(tup["rest"]) or 0) + 1)
        self.collector.ack(tup)


class World:
    """Topologies under one root of ZooKeeper, each with its page, and the page of all."""

    def __init__(self, servers: EmbeddedServers | ExternalServers, name: str, folder: Path) -> None:
        self._servers = servers
        self._name = name
        self._folder = folder
        self._stack = ExitStack()
        self.topics = Topics(servers.bootstrap_servers)
        self.settings = {
            "transactional.zookeeper.servers": servers.zookeeper,
            "transactional.zookeeper.root": f"/{name}",
            "transactional.zookeeper.session.timeout.secs": 2,
            "topology.max.spout.pending": 3,
            "topology.max.attempts": 1_000_000,
        }

    def topic(self, topology: str) -> str:
        return f"{self._name}-{topology}"

    def start(self, topology: str, *, partitions: int = 4, **settings: Any) -> tuple[Run, int]:
        """A word count, and the port of its page."""
        topic, port = self.topic(topology), free_port()
        with suppress(Exception):  # it is there already
            self.topics.create(topic, partitions)
        spout = OpaqueKafkaTransactionalSpout(
            [topic],
            bootstrap_servers=self._servers.bootstrap_servers,
            codec=TextCodec(),
            batch_records_max=500,
            on_bad_record="dead_letter",
            dead_letters=DeadLetterTable(OpaqueMapState(SqliteBackend(self._folder / f"{topology}.db", "refused"))),
        )
        builder = TransactionalTopologyBuilder(topology, "lines", spout, 2)
        builder.set_bolt("words", Words(topic), 2).shuffle_grouping("lines")
        for table in ("count", "letters"):
            state = OpaqueMapState(SqliteBackend(self._folder / f"{topology}.db", table))
            committer = StateCommitter(state, ["word"], {"n": Count()})
            builder.set_bolt(table, committer, 2).fields_grouping("words", Fields("word"))
        config = {**self.settings, "ui.port": port, "app.password": "not to be seen", **settings}
        return self._stack.enter_context(submit(builder.build(), config, executor="local")), port

    def start_core(self, topology: str = "numbers", *, count: int = 200_000) -> tuple[CoreRun, int]:
        """A core topology, and the port of its page."""
        port = free_port()
        builder = TopologyBuilder(topology)
        builder.set_spout("numbers", ListSpout(self._name, list(range(count))), 2)
        builder.set_bolt("prints", Prints(), 2).shuffle_grouping("numbers")
        builder.set_bolt("rests", Rests(), 2).fields_grouping("prints", Fields("rest"))
        config = {**self.settings, "ui.port": port}
        return self._stack.enter_context(submit(builder.build(), config, executor="local")), port

    def send_unreadable(self, topology: str) -> None:
        """A record that is no text."""
        self.topics.send(self.topic(topology), [b"\xff\xfe"])

    def send(self, topology: str, lines: int, line: str = "the quick brown fox jumps over the lazy dog") -> None:
        producer = self.topics.producer()
        for number in range(lines):
            producer.produce(self.topic(topology), f"{line} {number % 97}".encode())
            producer.poll(0)
        producer.arrived()

    @contextmanager
    def sending(self, topology: str, *, each: int, every_s: float) -> Iterator[None]:
        """Records that go on coming."""
        ended = threading.Event()

        def send() -> None:
            while not ended.wait(every_s):
                self.send(topology, each)

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def root_page(self) -> int:
        """The port of the page that ``ratchet ui`` serves."""
        port = free_port()
        config = Config.of(self.settings)
        store = self._stack.enter_context(closing(store_of(config, observes=True)))
        self._stack.callback(serve_page(RootSource(store, config.zookeeper_root), config, port))
        return port

    def close(self) -> None:
        for topology in list(TROUBLE):
            del TROUBLE[topology]
        self._stack.close()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
