"""Transactions of a source that a mirror keeps together."""

from __future__ import annotations

import contextlib
import json
import random
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest

from framework.transactions import MemoryStore
from integration import ConnectWorker, EmbeddedServers, PostgresServer
from integration.external import ExternalServers
from integration.folder_permissions import open_folder
from ratchet import Pipeline, sqlite
from tests.kit.change_records import INT, change_record, transaction_marker
from tests.kit.debezium import JSON_WITH_SCHEMAS, change_source
from tests.kit.targets import Often
from tests.kit.topics import Topics
from tests.kit.waiting import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.rule("C41")]

TABLES = ("debit", "credit")
KEYS, TRANSACTIONS = 5, 120


class Connector:
    """Writes transactions. Each sets the same number in rows of both tables, which have the same
    keys."""

    def __init__(self, topics: Topics, prefix: str) -> None:
        self._prefix = prefix
        for each in (*(f"public.{table}" for table in TABLES), "transaction"):
            topics.create(f"{prefix}.{each}")
        self._producer = topics.producer()

    def write(self, numbers: range) -> None:
        for number in numbers:
            transaction = str(number)
            keys = [(number + each) % KEYS for each in range(1 + number % 4)]
            self._mark("BEGIN", transaction, {})
            for table in TABLES:
                for order, key in enumerate(keys, 1):
                    self._change(table, transaction, order, {"id": key, "number": number})
                self._producer.arrived()
            self._mark("END", transaction, {f"public.{table}": len(keys) for table in TABLES})
        self._producer.arrived()

    def _change(self, table: str, transaction: str, order: int, row: Mapping[str, Any]) -> None:
        key, value = change_record(table, {"id": INT, "number": INT}, "u", row)
        record = json.loads(value or b"")
        place = f"{transaction}:{TABLES.index(table) + 1}{order}"  # as PostgreSQL: where the change is in the log
        record["payload"]["transaction"] = {"id": place, "total_order": order, "data_collection_order": order}
        self._producer.produce(f"{self._prefix}.public.{table}", json.dumps(record, separators=(",", ":")), key, 0)

    def _mark(self, status: str, transaction: str, changes: Mapping[str, int]) -> None:
        value = transaction_marker(status, f"{transaction}:9", changes)
        self._producer.produce(f"{self._prefix}.transaction", value, transaction, 0)


@contextlib.contextmanager
def divided(path: Path) -> Iterator[list[tuple[Any, ...]]]:
    """The rows that a reader saw with different numbers in the two tables."""
    found: list[tuple[Any, ...]] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.002):
            with contextlib.suppress(sqlite3.OperationalError):
                found.extend(differing(path))

    reader = threading.Thread(target=look)
    reader.start()
    try:
        yield found
    finally:
        over.set()
        reader.join()


def differing(path: Path) -> list[tuple[Any, ...]]:
    query = "SELECT d.id, d.number, c.number FROM debit d FULL JOIN credit c USING (id) WHERE d.number IS NOT c.number"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


def numbers(path: Path) -> dict[int, int]:
    with contextlib.suppress(sqlite3.OperationalError), contextlib.closing(sqlite3.connect(path)) as connection:
        return dict(connection.execute("SELECT id, number FROM credit").fetchall())
    return {}


def test_a_reader_sees_the_transactions_of_the_source_whole(
    servers: EmbeddedServers | ExternalServers, topics: Topics, name: str, tmp_path: Path, often: Often
) -> None:
    """Whenever it looks, also after the driver was started again. A batch has at most three records
    or one transaction."""
    path, count = tmp_path / "copy.db", often(48, TRANSACTIONS)
    connector = Connector(topics, name)
    copy = Pipeline("copy")
    copy.mirror(
        pattern=rf"{name}\..*",
        into=sqlite(str(path)),
        bootstrap_servers=servers.bootstrap_servers,
        keep_transactions=True,
        batch_records_max=3,
    )
    store = MemoryStore()
    with divided(path) as found:
        for some in (range(count // 2), range(count // 2, count)):
            with copy.submit(store=store, executor="local") as run:
                connector.write(some)
                run.wait_until_caught_up(60)
                transactions = run.transactions()
            assert numbers(path)[some[-1] % KEYS] == some[-1]
    assert found == differing(path) == []
    assert len(transactions) > count // 4


@pytest.mark.slow
def test_transactions_that_debezium_writes_are_kept_together(
    servers: EmbeddedServers | ExternalServers, name: str, tmp_path: Path
) -> None:
    """The transactions of a PostgreSQL: inserts, updates, deletes and changes of keys, over two
    tables, while others roll back."""
    path = tmp_path / "copy.db"
    with contextlib.ExitStack() as stack:
        where = stack.enter_context(open_folder())
        source = stack.enter_context(PostgresServer(where / "source", settings={"wal_level": "logical"}))
        worker = stack.enter_context(
            ConnectWorker(where / "connect", bootstrap_servers=servers.bootstrap_servers, group=name)
        )
        connection = stack.enter_context(psycopg.connect(source.dsn, autocommit=True))
        for table in TABLES:
            connection.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, number int)".encode())
            connection.execute(f"INSERT INTO {table} SELECT i, 0 FROM generate_series(0, {KEYS - 1}) i".encode())
        settings = change_source(source, name, table_include_list=",".join(f"public.{table}" for table in TABLES))
        worker.put(name, {**settings, "provide.transaction.metadata": "true", **JSON_WITH_SCHEMAS})
        copy = Pipeline("copy")
        copy.mirror(
            pattern=rf"{name}\..*",
            into=sqlite(str(path)),
            bootstrap_servers=servers.bootstrap_servers,
            keep_transactions=True,
            batch_records_max=3,
        )
        chance = random.Random(7)
        found = stack.enter_context(divided(path))
        run = stack.enter_context(copy.submit(store=MemoryStore(), executor="local"))
        wait_for(lambda: len(numbers(path)) == KEYS and not differing(path), what="the rows of the snapshot")
        found.clear()  # a snapshot has no transactions
        for number in range(1, TRANSACTIONS):
            with contextlib.suppress(psycopg.errors.UniqueViolation, psycopg.Rollback), connection.transaction():
                for key in chance.sample(range(KEYS), chance.randint(1, 3)):
                    _change_both(connection, chance.choice(("update", "key", "delete")), key, number)
                if chance.random() < 0.1:
                    raise psycopg.Rollback
        for table in TABLES:  # the last change, by which the end is known
            connection.execute(f"INSERT INTO {table} VALUES (1000, 0)".encode())
        wait_for(lambda: 1000 in numbers(path), what="the last transaction")
        run.wait_until_caught_up(60)
        expected = dict(connection.execute("SELECT id, number FROM credit").fetchall())
        worker.delete(name)
    assert numbers(path) == expected
    assert [row for row in found if row[0] != 1000] == differing(path) == []


def _change_both(connection: psycopg.Connection[Any], kind: str, key: int, number: int) -> None:
    for table in TABLES:
        if kind == "delete":
            connection.execute(f"DELETE FROM {table} WHERE id = %s".encode(), [key])
        elif kind == "key":
            connection.execute(
                f"UPDATE {table} SET id = %s, number = %s WHERE id = %s".encode(), [key + 50, number, key]
            )
        else:
            upsert = f"INSERT INTO {table} VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET number = excluded.number"
            connection.execute(upsert.encode(), [key, number])
