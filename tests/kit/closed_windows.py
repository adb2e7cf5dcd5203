"""Clicks from a Kafka topic, counted per page and minute; each minute is sent once, to a topic, a
table and a folder of files. ``run`` kills processes meanwhile, on Spark."""

from __future__ import annotations

import datetime
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq

from framework import CLOCK_STREAM, Fields, Topology, TransactionalTopologyBuilder, arrow_spill, tumbling
from framework.transactions import ZooKeeperStore, committed_txid
from integration import EmbeddedServers, PostgresServer
from integration.folder_permissions import open_folder
from sinks import (
    AppendCommitter,
    Count,
    KafkaSink,
    OpaqueMapState,
    ParquetTable,
    PostgresBackend,
    PostgresTable,
    SqliteBackend,
    StateCommitter,
    Sum,
    WatermarkCommitter,
    WindowedCommitter,
)
from spouts import JsonCodec, OpaqueKafkaTransactionalSpout
from tests.kit.kills import TOPIC, Kills, kill_often, restarted
from tests.kit.oracle import is_stable, read_topics
from tests.kit.topics import Topics

MINUTE = 60
#: How late a record may be in the runs on Spark: its partitions are read from their first records
#: in different transactions.
LAG = 1_200
Minutes = Counter[tuple[str, int]]


class SpillingWindows(WindowedCommitter):
    """Lets what it sends wait in a file, however little it is."""

    def prepare(self, *given: Any) -> None:
        arrow_spill.MEMORY_BYTES = 0
        super().prepare(*given)


def topology(app: Mapping[str, Any]) -> Topology:
    """The settings are ``app.kafka``, ``app.name`` (the topics are NAME and NAME-closed),
    ``app.folder``, ``app.records``; ``app.dsn``, for states and tables in PostgreSQL instead of
    SQLite; ``app.lag``."""
    name, folder = app["app.name"], Path(app["app.folder"])

    dsn, lag = app.get("app.dsn"), int(app.get("app.lag", 0))

    def state(table: str) -> OpaqueMapState:
        return OpaqueMapState(
            PostgresBackend(dsn, table) if dsn is not None else SqliteBackend(folder / "windows.db", table)
        )

    spout = OpaqueKafkaTransactionalSpout(
        [name],
        bootstrap_servers=app["app.kafka"],
        codec=JsonCodec(Fields(page=str, at=int)),
        metadata=["topic", "partition"],
        batch_records_max=int(app["app.records"]),
    )
    builder = TransactionalTopologyBuilder(name, "clicks", spout, 2)
    watermark = WatermarkCommitter(
        state("clock"), "at", partition=["topic", "partition"], max_ahead="100000 days", out_of_orderness=lag
    )
    builder.set_bolt("watermark", watermark).global_grouping("clicks").global_grouping("clicks", CLOCK_STREAM)
    windows = SpillingWindows(
        state("open_windows"), tumbling(MINUTE), on="at", key=["page"], aggregates={"clicks": Count()}
    )
    builder.set_bolt("windows", windows, 2).fields_grouping("clicks", Fields("page")).all_grouping("watermark")
    topic = KafkaSink(f"{name}-closed", key="page", bootstrap_servers=app["app.kafka"])
    builder.set_bolt("topic", topic).global_grouping("windows")
    table = StateCommitter(state("sent"), ["page", "window_end"], {"times": Count(), "clicks": Sum("clicks")})
    builder.set_bolt("table", table, 2).fields_grouping("windows", Fields("page"))
    files = ParquetTable(folder / "files", shared=dsn is not None)
    builder.set_bolt("files", AppendCommitter(files)).global_grouping("windows")
    if dsn is not None:
        rows = AppendCommitter(PostgresTable(dsn, "closed"))
        builder.set_bolt("rows", rows, 2).fields_grouping("windows", Fields("page"))
    return builder.build()


def clicks(partition: int, count: int) -> list[bytes]:
    """In the order of their times; partitions are of different speed."""
    return [json.dumps({"page": f"p{number % 7}", "at": number * (partition + 2)}).encode() for number in range(count)]


def click(number: int) -> bytes:
    """The record of a number: a second is as long as a record of any partition."""
    return json.dumps({"page": f"p{number % 7}", "at": number}).encode()


def closed(partitions: Iterable[list[bytes]], lag: int = 0) -> Minutes:
    """What must be sent: (page, end) -> clicks, of the minutes that all partitions have passed, by
    ``lag`` seconds."""
    its = [[json.loads(value) for value in values] for values in partitions]
    watermark = min(values[-1]["at"] for values in its) - lag
    counted: Minutes = Counter()
    for values in its:
        for value in values:
            end = (value["at"] // MINUTE + 1) * MINUTE
            if end <= watermark:
                counted[value["page"], end] += 1
    return counted


@dataclass
class Outcome:
    """The kills, what must be sent, and what each store holds."""

    seen: Kills
    expected: Minutes
    found: dict[str, list[tuple[str, int, int]]] = field(default_factory=dict)

    def problems(self) -> list[str]:
        """What is missing or too much in a store; a line each."""
        wanted = Counter((page, end, clicks) for (page, end), clicks in self.expected.items())
        lines = []
        for store, rows in self.found.items():
            for what, much in (("missing", wanted - Counter(rows)), ("too many", Counter(rows) - wanted)):
                if much:
                    lines.append(f"{store}: {what}: {much.total()}, such as {sorted(much)[:5]}")
        return lines

    def summary(self) -> dict[str, Any]:
        return {**self.seen.summary(), "windows": len(self.expected)}


def run(folder: Path, order: Sequence[str], chance: random.Random, *, workers: int, **settings: Any) -> Outcome:
    """Kill what ``order`` says: kinds of ``kill_often``, or "postgres"."""
    with (
        EmbeddedServers(folder / "servers") as servers,
        open_folder() as place,
        PostgresServer(place / "postgres") as postgres,
        closing(ZooKeeperStore(servers.zookeeper, "/ratchet")) as coordination,
    ):
        Topics(servers.bootstrap_servers).create(f"{TOPIC}-closed", 2)
        app = {"app.name": TOPIC, "app.dsn": postgres.dsn, "app.records": 400, "app.lag": LAG}
        seen = kill_often(
            folder,
            "tests.kit.closed_windows:topology",
            {
                **app,
                "transactional.zookeeper.servers": servers.zookeeper,
                "transactional.zookeeper.session.timeout.secs": 2,
                "topology.max.spout.pending": 4,
                "topology.max.attempts": 1_000,
                "topology.message.timeout.secs": 40,
                **settings,
            },
            order,
            lambda: committed_txid(coordination, TOPIC),
            servers,
            per_second=40,
            more={"postgres": lambda: restarted(postgres)},
            record=click,
            workers=workers,
            chance=chance,
            messages_min=LAG + 10 * MINUTE,
        )
        assert is_stable(servers.bootstrap_servers, [f"{TOPIC}-closed"], 120), "a kafka_txn stays open"
        sent: dict[int, list[bytes]] = defaultdict(list)
        read_topics(
            servers.bootstrap_servers, [TOPIC], lambda message: sent[message.partition()].append(message.value())
        )
        return Outcome(seen, closed(sent.values(), LAG), _found(servers.bootstrap_servers, postgres.dsn, folder))


def _found(bootstrap_servers: str, dsn: str, folder: Path) -> dict[str, list[tuple[str, int, int]]]:
    found: dict[str, list[tuple[str, int, int]]] = {"topic": []}

    def take(message: Any) -> None:
        row = json.loads(message.value())
        found["topic"].append((row["page"], seconds(row["window_end"]), row["clicks"]))

    read_topics(bootstrap_servers, [f"{TOPIC}-closed"], take)
    with psycopg.connect(dsn) as connection:
        rows = connection.execute("SELECT page, extract(epoch FROM window_end)::int, clicks FROM closed").fetchall()
        sums = connection.execute(
            "SELECT page, extract(epoch FROM window_end)::int, clicks, times FROM sent_live"
        ).fetchall()
    found["rows"] = rows
    found["state"] = [(page, end, clicks) for page, end, clicks, times in sums for _ in range(times)]
    in_files = pq.read_table(folder / "files", columns=["page", "window_end", "clicks"]).to_pylist()
    found["files"] = [(row["page"], int(row["window_end"].timestamp()), row["clicks"]) for row in in_files]
    return found


def seconds(moment: str) -> int:
    return int(datetime.datetime.fromisoformat(moment).timestamp())
