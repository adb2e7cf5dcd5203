"""The price of exactly-once in a sink: rows updated per second with stamps, compared with the
store's own bulk upsert without stamps."""

from __future__ import annotations

import sqlite3
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import redis

from framework import Fields, TransactionAttempt
from framework.topology import CommitFence, OpenCommit
from integration import PostgresServer, RedisServer
from integration.folder_permissions import open_folder
from sinks import (
    Count,
    MapBackend,
    MapState,
    NonTransactionalMapState,
    OpaqueMapState,
    PostgresBackend,
    RedisBackend,
    SqliteBackend,
    Sum,
    TransactionalMapState,
)

KEY, VALUE = Fields(word=str), Fields(count=int, total=int)
AGGREGATES = {"count": Count(), "total": Sum("total")}
STATES: list[type[MapState]] = [NonTransactionalMapState, TransactionalMapState, OpaqueMapState]
SIZES = (1, 1_000, 1_000_000)


def deltas(size: int) -> pa.Table:
    """One row per key, unordered, as a committer merges them."""
    words = [f"word{(each * 7_368_787) % 10_000_019:08d}" for each in range(size)]
    ones = pa.array([1] * size, pa.int64())
    return pa.table({"word": words, "count": ones, "total": ones})


class Plain(ABC):
    """The store's own bulk upsert of the same deltas, durable and without stamps."""

    @abstractmethod
    def upsert(self, table: pa.Table) -> None: ...

    @abstractmethod
    def total(self) -> int:
        """The sum of all counts, to check that everything was written."""


class PlainSqlite(Plain):
    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute(
            "CREATE TABLE plain (word TEXT PRIMARY KEY NOT NULL, count INTEGER, total INTEGER) STRICT, WITHOUT ROWID"
        )

    def upsert(self, table: pa.Table) -> None:
        rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany(
            "INSERT INTO plain VALUES (?, ?, ?) ON CONFLICT (word) DO UPDATE SET count = count + excluded.count, "
            "total = total + excluded.total",
            rows,
        )
        self._connection.execute("COMMIT")

    def total(self) -> int:
        return int(self._connection.execute("SELECT sum(count) FROM plain").fetchone()[0])


class PlainPostgres(Plain):
    def __init__(self, dsn: str) -> None:
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._table = f"plain_{uuid.uuid4().hex[:8]}"
        self._connection.execute(f"CREATE TABLE {self._table} (word text PRIMARY KEY, count bigint, total bigint)")
        self._connection.execute(
            "CREATE TEMP TABLE staged (word text, count bigint, total bigint) ON COMMIT DELETE ROWS"
        )

    def upsert(self, table: pa.Table) -> None:
        rows = list(zip(*(column.to_pylist() for column in table.columns), strict=True))
        merge = "DO UPDATE SET count = t.count + excluded.count, total = t.total + excluded.total"
        with self._connection.transaction(), self._connection.cursor() as cursor:
            if len(rows) < 20:  # COPY is faster from about this size
                insert = f"INSERT INTO {self._table} AS t VALUES (%s, %s, %s) ON CONFLICT (word) {merge}"
                cursor.executemany(insert, rows)
                return
            with cursor.copy("COPY staged FROM STDIN (FORMAT binary)") as copy:
                copy.set_types(["text", "int8", "int8"])
                for row in rows:
                    copy.write_row(row)
            cursor.execute(f"INSERT INTO {self._table} AS t SELECT * FROM staged ON CONFLICT (word) {merge}")

    def total(self) -> int:
        row = self._connection.execute(f"SELECT sum(count) FROM {self._table}").fetchone()
        return int(row[0]) if row is not None else 0


class PlainRedis(Plain):
    """A hash per column. HINCRBY, Redis's own addition, increases each field."""

    def __init__(self, url: str) -> None:
        self._client: Any = redis.Redis.from_url(url)
        self._name = f"plain-{uuid.uuid4().hex[:8]}"

    def upsert(self, table: pa.Table) -> None:
        rows = list(zip(*(column.to_pylist() for column in table.columns), strict=True))
        for start in range(0, len(rows), 10_000):
            pipeline = self._client.pipeline(transaction=False)
            for word, count, total in rows[start : start + 10_000]:
                pipeline.hincrby(f"{self._name}:count", word, count)
                pipeline.hincrby(f"{self._name}:total", word, total)
            pipeline.execute()

    def total(self) -> int:
        return sum(int(value) for _, value in self._client.hscan_iter(f"{self._name}:count", count=10_000))


class _Stamped:
    """A state with the headers that a driver writes, one transaction after the other."""

    def __init__(self, state: MapState) -> None:
        self.state = state
        self.txid = 0
        state.prepare("bench")

    def upsert(self, table: pa.Table) -> tuple[float, float]:
        """(seconds of the tasks' part, seconds in all, with the driver's two header writes)."""
        begun = time.perf_counter()
        self.txid += 1
        header = self.state.read_header()
        opened = header.opened(1, OpenCommit(self.txid, 1, "digest"))
        self.state.raise_header(header, opened)
        task = time.perf_counter()
        granted = TransactionAttempt(self.txid, 1, CommitFence("bench", 1, "digest", "bolt:0"))
        self.state.apply(granted, table, AGGREGATES, want_values=False)
        written = time.perf_counter() - task
        self.state.raise_header(opened, opened.finished(self.txid))
        return written, time.perf_counter() - begun

    def total(self) -> int:
        return sum(row.value[0] for _, row in self.state.backend.scan() if row.value is not None)


def measure(folder: Path, repeat: int, sizes: tuple[int, ...] = SIZES) -> Iterator[dict[str, Any]]:
    """Yields one result per store, value type and size. Runs with and without stamps alternate, and
    the best of each counts."""
    with open_folder() as reachable:
        database, cache = PostgresServer(reachable), RedisServer(folder / "redis")
        database.start()
        cache.start()
        try:
            for size in sizes:
                for store in ("sqlite", "postgres", "redis"):
                    yield from _of_store(store, size, repeat, folder, database.dsn, cache.url)
        finally:
            database.stop()
            cache.stop()


def _of_store(store: str, size: int, repeat: int, folder: Path, dsn: str, url: str) -> list[dict[str, Any]]:
    table = deltas(size)
    rounds = repeat if size > 1_000 else 50
    plain: Plain
    if store == "sqlite":
        plain = PlainSqlite(folder / f"plain-{size}.db")
    else:
        plain = PlainPostgres(dsn) if store == "postgres" else PlainRedis(url)
    stamped = {each.value_type.value: _Stamped(each(_backend(store, folder, dsn, url))) for each in STATES}
    plain.upsert(table)
    for each in stamped.values():
        each.upsert(table)
    without: list[float] = []
    written: dict[str, list[float]] = {name: [] for name in stamped}
    whole: dict[str, list[float]] = {name: [] for name in stamped}
    for _ in range(rounds):
        begun = time.perf_counter()
        plain.upsert(table)
        without.append(time.perf_counter() - begun)
        for name, each in stamped.items():
            task_s, all_s = each.upsert(table)
            written[name].append(task_s)
            whole[name].append(all_s)
    if {plain.total(), *(each.total() for each in stamped.values())} != {size * (rounds + 1)}:
        raise RuntimeError(f"{store}: the rows do not hold what was written")
    best = min(without)
    results = [
        {
            "workload": "state",
            "store": store,
            "keys": size,
            "value_type": name,
            "rows_per_s": round(size / min(written[name])),
            "plain_rows_per_s": round(size / best),
            "ratio": round(best / min(written[name]), 2),
            "ratio_with_headers": round(best / min(whole[name]), 2),
        }
        for name in stamped
    ]
    for each in stamped.values():
        each.state.clear("bench")
        each.state.close()
    return results


def _backend(store: str, folder: Path, dsn: str, url: str) -> MapBackend:
    name = f"rows_{uuid.uuid4().hex[:8]}"
    if store == "sqlite":
        return SqliteBackend(folder / f"{name}.db", name, KEY, VALUE)
    return PostgresBackend(dsn, name, KEY, VALUE) if store == "postgres" else RedisBackend(url, name, KEY, VALUE)
