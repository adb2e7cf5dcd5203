"""One topology on each kind of sink, as a process of its own;
and what its sinks and its topic hold.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sinks
from framework import Fields, Topology, TransactionalTopologyBuilder
from integration.folder_permissions import open_folder
from integration.server import Server
from sinks import (
    AppendCommitter,
    Count,
    DeltaLakeTable,
    MapBackend,
    Max,
    OpaqueMapState,
    ParquetTable,
    StateCommitter,
    Sum,
    TransactionalMapState,
)
from spouts import JsonCodec, KafkaTransactionalSpout, OpaqueKafkaTransactionalSpout
from tests.kit.oracle import read_topics
from tests.kit.topics import SureProducer
from tests.kit.waiting import PATIENCE_S

PARTITIONS = 3
WORDS = 50
FIELDS = Fields(word=str, n=int)
STORES = ["sqlite", "postgres", "redis", "mysql"]


def backend(app: Mapping[str, Any], table: str) -> MapBackend:
    kinds = {
        "sqlite": "SqliteBackend",
        "postgres": "PostgresBackend",
        "redis": "RedisBackend",
        "mysql": "MySqlBackend",
    }
    kind: Callable[[str, str], MapBackend] = getattr(sinks, kinds[app["app.store"]])  # imports no client of another one
    return kind(app["app.address"], table)


def topology(app: Mapping[str, Any]) -> Topology:
    """Two states in the store, with different keys, and a folder of files."""
    opaque = app["app.values"] == "opaque"
    spout_kind = OpaqueKafkaTransactionalSpout if opaque else KafkaTransactionalSpout
    state_kind = OpaqueMapState if opaque else TransactionalMapState
    spout = spout_kind(
        [app["app.topic"]], bootstrap_servers=app["app.kafka"], codec=JsonCodec(FIELDS), batch_records_max=300
    )
    builder = TransactionalTopologyBuilder(app["app.topic"], "spout", spout, PARTITIONS)
    aggregates = {"count": Count(), "total": Sum("n"), "most": Max("n")}
    words = StateCommitter(state_kind(backend(app, "words")), ["word"], aggregates)
    builder.set_bolt("words", words, int(app.get("app.parallelism", 2))).fields_grouping("spout", Fields("word"))
    numbers = StateCommitter(state_kind(backend(app, "numbers")), ["n"], {"count": Count()})
    builder.set_bolt("numbers", numbers).global_grouping("spout")
    kind = DeltaLakeTable if opaque else ParquetTable
    files = kind(app["app.folder"], shared=bool(app.get("app.shared", False)))
    builder.set_bolt("files", AppendCommitter(files), 2).shuffle_grouping("spout")
    return builder.build()


@contextmanager
def server_of(store: str, tmp_path: Path) -> Iterator[tuple[str, Server | None]]:
    """Start a store for one test.

    Yields its address, and its server, which may be killed: None for "sqlite" and "none".
    """
    if store in ("sqlite", "none"):
        yield str(tmp_path / "x.db"), None
        return
    from integration import MariaDbServer, PostgresServer, RedisServer  # not in each driver

    with open_folder() as folder:
        kinds: dict[str, type[PostgresServer | RedisServer | MariaDbServer]] = {
            "postgres": PostgresServer,
            "redis": RedisServer,
            "mysql": MariaDbServer,
        }
        server = kinds[store](folder)
        server.start()
        try:
            yield server.url if isinstance(server, RedisServer) else server.dsn, server
        finally:
            server.stop()


class Feed:
    """Sends messages until it is stopped, a few at a time."""

    def __init__(self, bootstrap_servers: str, topic: str, *, pause_s: float = 0.05, burst: int = 5) -> None:
        self._producer = SureProducer({"bootstrap.servers": bootstrap_servers, "enable.idempotence": True})
        self._topic, self._pause_s, self._burst = topic, pause_s, burst
        self._stopped = threading.Event()
        self.sent = 0
        self._thread = threading.Thread(target=self._feed, daemon=True)

    def __enter__(self) -> Feed:
        self._thread.start()
        return self

    def _feed(self) -> None:
        while not self._stopped.wait(self._pause_s):
            for _ in range(self._burst):
                self.sent += 1
                document = {"word": f"w{self.sent * 7 % WORDS}", "n": self.sent % 200}
                self._producer.produce(self._topic, json.dumps(document), partition=self.sent % PARTITIONS)
            self._producer.poll(0)

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._thread.join(PATIENCE_S)
        self._producer.arrived()


def expected(bootstrap_servers: str, topic: str) -> tuple[dict[str, tuple[int, int, int]], Counter[int], Counter[Any]]:
    """What the sinks must hold, by the topic and plain Python: words, numbers, rows."""
    rows: list[tuple[str, int]] = []

    def take(message: Any) -> None:
        document = json.loads(message.value())
        rows.append((document["word"], document["n"]))

    read_topics(bootstrap_servers, [topic], take)
    words: dict[str, tuple[int, int, int]] = {}
    for word, n in rows:
        count, total, most = words.get(word, (0, 0, n))
        words[word] = (count + 1, total + n, max(most, n))
    return words, Counter(n for _, n in rows), Counter(rows)


def found(built: Topology) -> tuple[dict[str, Any], dict[int, int], Counter[Any]]:
    """What the sinks hold: words, numbers, rows."""
    words, numbers, files = built.states
    assert isinstance(words, (OpaqueMapState, TransactionalMapState))
    assert isinstance(numbers, (OpaqueMapState, TransactionalMapState))
    assert isinstance(files, (ParquetTable, DeltaLakeTable))
    table = files.to_table()
    return (
        {key[0]: row.value for key, row in words.backend.scan() if row.value is not None},
        {key[0]: row.value[0] for key, row in numbers.backend.scan() if row.value is not None},
        Counter(zip(*(column.to_pylist() for column in table.columns), strict=True)),
    )
