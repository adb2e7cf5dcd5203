"""W2: a steady stream. The latency of a message lasts from its sending until the store shows its
transaction."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import psycopg
import redis
from confluent_kafka import Consumer, TopicPartition

from benchmarks import parts, workload
from framework import submit
from framework.transactions.commit import CommitPhase
from integration import EmbeddedServers, PostgresServer, RedisServer, SparkCluster
from integration.folder_permissions import open_folder
from sinks import MapBackend, PostgresBackend, RedisBackend, SqliteBackend

STORES = ["sqlite", "postgres", "redis"]
#: How W2 can be run beside the default, in turns with it.
VARIANTS = ["single-steps", "pending-2", "pending-3", "jobs", "cluster"]
#: The latency of all messages is shown, and of those that were sent so long after the first one.
WARM_AFTER_MS = 2_000
#: Milliseconds per bar of the histogram.
BIN_MS = 1
#: How long a topology is left alone before its idle costs are measured.
IDLE_AFTER_S = 8.0
#: How often the watcher asks the store.
WATCH_EVERY_S = 0.002


@dataclass(frozen=True)
class Table:
    """One state: its backend, and who tells its last finished txid (None: there is none yet). The
    latter is called once per watcher, for a connection of its own."""

    backend: MapBackend
    looking: Callable[[], Callable[[], int | None]]


@dataclass
class Store:
    """Where the words are counted: a file, or a server that is started for it."""

    kind: str
    folder: Path
    address: str = ""
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> Store:
        if self.kind != "sqlite":
            made = self._stack.enter_context(open_folder())
            server = PostgresServer(made) if self.kind == "postgres" else RedisServer(made)
            server.start()
            self._stack.callback(server.stop)
            self.address = server.dsn if isinstance(server, PostgresServer) else server.url
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def table(self, name: str) -> Table:
        match self.kind:
            case "sqlite":
                path = self.folder / f"{name}.db"
                return Table(SqliteBackend(path, "words"), lambda: _in_sqlite(path))
            case "postgres":
                return Table(PostgresBackend(self.address, name), lambda: _in_postgres(self.address, name))
        return Table(RedisBackend(self.address, name), lambda: _in_redis(self.address, name))


def _in_sqlite(path: Path) -> Callable[[], int | None]:
    connection: list[sqlite3.Connection] = []

    def done() -> int | None:
        if not path.exists():
            return None
        if not connection:
            connection.append(sqlite3.connect(path, check_same_thread=False))
        with contextlib.suppress(sqlite3.OperationalError):
            row = connection[0].execute("SELECT done FROM _ratchet_headers").fetchone()
            return int(row[0]) if row is not None else None
        return None

    return done


def _in_postgres(dsn: str, table: str) -> Callable[[], int | None]:
    connection = psycopg.connect(dsn, autocommit=True)

    def done() -> int | None:
        with contextlib.suppress(psycopg.errors.UndefinedTable):
            row = connection.execute("SELECT done FROM _ratchet_headers WHERE state = %s", (table,)).fetchone()
            return int(row[0]) if row is not None else None
        return None

    return done


def _in_redis(url: str, name: str) -> Callable[[], int | None]:
    client: Any = redis.Redis.from_url(url)

    def done() -> int | None:
        found = client.get(f"{{{name}}}:header")
        return int(json.loads(found)["done"]) if found is not None else None

    return done


def measure(
    servers: EmbeddedServers, folder: Path, arguments: argparse.Namespace, config: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """W2 as ``arguments`` say; with ``--turns``, ``--repeat`` rounds of it and of each variant."""
    turns = ["default", *arguments.turns]
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(Store(arguments.store, folder))
        spark = None
        if "cluster" in turns:
            spark = stack.enter_context(SparkCluster(folder / "spark", 2))
        for _ in range(arguments.repeat if arguments.turns else 1):
            for variant in turns:
                settings = {**config, "topology.collapse.resident": not arguments.jobs}
                if variant == "cluster" and spark is not None:
                    settings = {**settings, **spark.settings, "spark.executor.memory": "512m"}
                elif variant == "jobs":
                    settings["topology.collapse.resident"] = False
                elif variant.startswith("pending-"):
                    settings["topology.max.spout.pending"] = int(variant.removeprefix("pending-"))
                with _single_steps() if variant == "single-steps" else contextlib.nullcontext():
                    found = _measured(servers, store, arguments, settings)
                shown = {"variant": variant, "store": arguments.store} if arguments.turns else {}
                yield {"workload": "W2", **shown, **found}


@contextlib.contextmanager
def _single_steps() -> Iterator[None]:
    """Raise, apply and finish one after the other, as where a topology has several states."""
    real = CommitPhase._takes_one_step
    CommitPhase._takes_one_step = lambda self, attempt, *, replay: False  # type: ignore[method-assign]
    try:
        yield
    finally:
        CommitPhase._takes_one_step = real  # type: ignore[method-assign]


def _measured(
    servers: EmbeddedServers, store: Store, arguments: argparse.Namespace, settings: Mapping[str, Any]
) -> dict[str, Any]:
    traced = arguments.parts and settings["topology.max.spout.pending"] == 1
    with parts.tracing() if traced else contextlib.nullcontext() as trace:
        found = latency(servers, store, arguments, settings)
    if trace is None:
        return found
    return {**found, "parts_ms": trace.summary(without_first=1), "tail": trace.tail(without_first=1)}


def latency(
    servers: EmbeddedServers,
    store: Store,
    arguments: argparse.Namespace,
    settings: Mapping[str, Any],
    *,
    name: str = "",
) -> dict[str, Any]:
    """One run. ``name``: of the topology; a new one by default."""
    topic = f"steady-{uuid.uuid4().hex[:6]}"
    total = arguments.per_second * arguments.seconds
    workload.create_topic(servers.bootstrap_servers, topic)
    table = store.table(topic.replace("-", "_"))
    topology, spout = workload.word_count(
        name or f"w2-{uuid.uuid4().hex[:6]}", servers.bootstrap_servers, topic, table.backend
    )
    run = submit(topology, settings)
    try:
        visible, done = _watch(table)
        producer = multiprocessing.get_context("spawn").Process(
            target=workload.produce_steadily,
            args=(servers.bootstrap_servers, topic, arguments.per_second, arguments.seconds),
        )
        producer.start()
        producer.join()
        run.wait_until_caught_up(60)
        plans = list(spout.plans)
        _wait_for(lambda: len(visible) >= len(plans))
        done.set()
        idle = {"idle_share_of_a_core": _idle(arguments.idle)} if arguments.idle else {}
    finally:
        run.stop()
    latencies = _latencies_ms(servers.bootstrap_servers, topic, plans, visible, total)
    probes, latencies = latencies[:-total], latencies[-total:]
    warm_from_ms = latencies[0][0] + WARM_AFTER_MS
    return {
        **idle,
        "messages": total,
        "transactions": len(plans),
        "first_ms": round(probes[0][1], 1),
        "first_of_round": summary([latency for _, latency in probes[workload.PARTITIONS :: workload.PARTITIONS]]),
        "one_by_one": summary([latency for _, latency in probes[workload.PARTITIONS :]]),
        **summary([latency for _, latency in latencies]),
        "after_2s": summary([latency for sent_ms, latency in latencies if sent_ms >= warm_from_ms]),
        "histogram": _histogram([latency for _, latency in latencies]),
    }


def _idle(seconds: float) -> dict[str, float]:
    """Shares of a core that a topology takes while nothing comes: its driver, which is this
    process, Spark's JVM, and the Python workers."""
    time.sleep(IDLE_AFTER_S)
    own = psutil.Process()
    spark = [each for each in own.children() if any("org.apache.spark" in part for part in each.cmdline())]
    parts = {
        "driver": [own],
        "jvm": spark,
        "workers": [below for each in spark for below in each.children(recursive=True)],
    }
    before = {name: _used_s(processes) for name, processes in parts.items()}
    time.sleep(seconds)
    return {name: round((_used_s(parts[name]) - since_s) / seconds, 4) for name, since_s in before.items()}


def _used_s(processes: list[psutil.Process]) -> float:
    """Seconds of processor time so far."""
    times = [each.cpu_times() for each in processes if each.is_running()]
    return float(sum(each.user + each.system for each in times))


def summary(latencies_ms: list[float]) -> dict[str, float]:
    ordered = sorted(latencies_ms)
    found = {f"p{percent}_ms": round(ordered[int(len(ordered) * percent / 100)], 1) for percent in (50, 95, 99)}
    return {**found, "max_ms": round(ordered[-1], 1)}


def _histogram(latencies_ms: list[float]) -> dict[str, Any]:
    """How many messages each ``BIN_MS`` of latency has, from 0 up."""
    counts = np.bincount(np.asarray(latencies_ms).clip(0).astype(int) // BIN_MS)
    return {"bin_ms": BIN_MS, "counts": counts.tolist()}


def _watch(table: Table) -> tuple[dict[int, float], threading.Event]:
    """Poll the store from a separate connection, once there is a header. Returns txid -> wall-clock
    time when it was first seen done, and the event that ends the polling."""
    visible: dict[int, float] = {}
    over = threading.Event()
    done = table.looking()
    _wait_for(lambda: done() is not None)

    def look() -> None:
        while not over.is_set():
            txid = done() or 0
            now = time.time()
            for each in range(len(visible) + 1, txid + 1):
                visible[each] = now
            time.sleep(WATCH_EVERY_S)

    threading.Thread(target=look, daemon=True).start()
    return visible, over


def _latencies_ms(
    bootstrap_servers: str, topic: str, plans: list[Any], visible: dict[int, float], total: int
) -> list[tuple[float, float]]:
    """When each message was sent, and its latency, in milliseconds; probes first."""
    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": "w2", "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(workload.PARTITIONS)])
    latencies: list[tuple[float, float]] = []
    ends = {
        partition: np.asarray([plan[f"{topic}/{partition}"]["next_offset"] for plan in plans])
        for partition in range(workload.PARTITIONS)
    }
    while len(latencies) < total + workload.PROBES * workload.PARTITIONS:
        for message in consumer.consume(10_000, 1.0):
            txid = 1 + int(np.searchsorted(ends[message.partition()], message.offset(), side="right"))
            sent_ms = json.loads(message.value())["ts"] / 1000
            latencies.append((sent_ms, visible[txid] * 1000 - sent_ms))
    consumer.close()
    return sorted(latencies)


def _wait_for(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the benchmark waited in vain")
        time.sleep(0.01)
