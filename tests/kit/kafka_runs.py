"""Topologies over a Kafka topic in this process.

Their figures are in SQLite; the topic is the oracle.
"""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from framework import Run, Topology, TransactionalTopologyBuilder, submit
from framework.clients.kafka_settings import KafkaSettings
from framework.transactions import CoordinationStore, MemoryStore
from sinks import Count, OpaqueMapState, SqliteBackend, StateCommitter, TransactionalMapState
from spouts import KafkaTransactionalSpout, OpaqueKafkaTransactionalSpout, TextCodec
from spouts.kafka.consumer.core_spout_consumer import KafkaTail
from tests.kit.oracle import read_topics
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S


class KafkaRuns:
    """One topology, run as often as one likes: counts per value, exactly once."""

    def __init__(self, topics: Topics, folder: Path, name: str, *, opaque: bool = True, **options: Any) -> None:
        self.topics = topics
        self.path = folder / "figures.db"
        self.name = name
        self.opaque = opaque
        self.options = options
        self.store: CoordinationStore = MemoryStore()

    def spout(self, **changes: Any) -> Any:
        options = {"bootstrap_servers": self.topics.bootstrap_servers, "codec": TextCodec(), **self.options, **changes}
        if "pattern" not in options:
            options.setdefault("topics", [self.name])
        return (OpaqueKafkaTransactionalSpout if self.opaque else KafkaTransactionalSpout)(**options)

    def state(self, table: str) -> Any:
        backend = SqliteBackend(self.path, table)
        return OpaqueMapState(backend) if self.opaque else TransactionalMapState(backend)

    def topology(self, **changes: Any) -> Topology:
        builder = TransactionalTopologyBuilder(self.name, "spout", self.spout(**changes), 2)
        count = StateCommitter(self.state("counts"), ["value"], {"n": Count()})
        builder.set_bolt("count", count).global_grouping("spout")
        return builder.build()

    def start(self, config: Mapping[str, Any] | None = None, *, fresh: bool = False, **changes: Any) -> Run:
        return submit(self.topology(**changes), config or {}, self.store, "local", fresh=fresh)

    def catch_up(self, config: Mapping[str, Any] | None = None, *, fresh: bool = False, **changes: Any) -> Run:
        """Run until every record that exists now is committed. Returns the run, which has ended."""
        with self.start(config, fresh=fresh, **changes) as run:
            run.wait_until_caught_up(PATIENCE_S)
        return run

    def await_counts(self, run: Run, expected: Mapping[str, int]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (found := self._counts_so_far()) != expected:
            status = run.status()
            assert status.phase != "failed" and time.monotonic() < deadline, f"{found} instead of {expected}: {status}"
            time.sleep(0.02)

    def _counts_so_far(self) -> dict[str, int]:
        """Empty while the file or its table is not there yet."""
        if not self.path.exists() or not self.rows("SELECT 1 FROM sqlite_master WHERE name = 'counts_live'"):
            return {}
        return self.counts()

    def counts(self) -> dict[str, int]:
        return dict(self.rows("SELECT value, n FROM counts_live"))

    def rows(self, query: str) -> list[Any]:
        with sqlite3.connect(self.path) as connection:
            return connection.execute(query).fetchall()


def tail_of(
    bootstrap_servers: str, topic: str, *, skip_lost: bool = False, settings: Mapping[str, Any] | None = None
) -> KafkaTail:
    """The consumer of a core spout's only task, which reads one topic from its beginning."""
    only = {"topics": (topic,), "pattern": None, "task": 0, "tasks": 1, "start": "earliest"}
    return KafkaTail(KafkaSettings(bootstrap_servers, settings), topic, **only, skip_lost=skip_lost)  # type: ignore[arg-type]


def values_in(bootstrap_servers: str, topic: str) -> Counter[str]:
    """How often each value is in a topic, by the oracle."""
    found: Counter[str] = Counter()
    read_topics(bootstrap_servers, [topic], lambda message: found.update([(message.value() or b"").decode()]))
    return found
