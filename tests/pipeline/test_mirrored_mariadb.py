"""A MariaDB database that Debezium and a mirror copy: its types, and changes of its tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from framework.transactions import MemoryStore
from integration import ConnectWorker, EmbeddedServers, MariaDbServer
from integration.external import ExternalServers
from ratchet import Pipeline, mysql
from tests.kit.debezium import JSON_WITH_SCHEMAS
from tests.kit.mysql import client
from tests.kit.waiting import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.rule("C41")]

TABLE = """
CREATE TABLE everything (id int PRIMARY KEY, small smallint, big bigint, price decimal(12,2), ratio double,
name varchar(40), prose text, at datetime(6), at_3 datetime(3), seen timestamp(6) NULL, day date, clock time(6), born year,
truth tinyint(1), mood enum('glad','sad'), tags set('a','b'), raw blob, bits varbinary(8))
"""
ROW = (
    "({}, -5, 9007199254740993, 1234567890.12, 0.1, 'grüße 😀', 'a\\\\b''c', '2024-02-29 12:34:56.123456', "
    "'1999-12-31 23:59:59.999', '2024-02-29 12:34:56.654321', '1970-01-01', '23:59:59.000001', 2024, 1, 'sad', 'a,b', "
    "x'00ff', x'01')"
)


def connector(dsn: str, servers: EmbeddedServers | ExternalServers, name: str, database: str) -> dict[str, str]:
    address = urlsplit(dsn)
    return {
        "connector.class": "io.debezium.connector.mariadb.MariaDbConnector",
        "database.hostname": str(address.hostname),
        "database.port": str(address.port),
        "database.user": unquote(address.username or ""),
        "database.password": unquote(address.password or ""),
        "database.ssl.mode": "disable",
        "database.server.id": "5400",
        "database.include.list": database,
        "topic.prefix": name,
        "include.schema.changes": "false",
        "schema.history.internal.kafka.bootstrap.servers": servers.bootstrap_servers,
        "schema.history.internal.kafka.topic": f"{name}-history",
        "topic.creation.default.replication.factor": "1",
        "topic.creation.default.partitions": "1",
        **JSON_WITH_SCHEMAS,
    }


def rows(dsn: str, database: str, table: str) -> list[tuple[Any, ...]]:
    with client(f"{dsn.rpartition('/')[0]}/{database}") as other:
        if not other.execute(f"SHOW TABLES LIKE '{table}'"):
            return []
        names = [name for name, *_ in other.execute(f"SHOW COLUMNS FROM {table}") if name != "_txid"]
        return sorted(other.execute(f"SELECT {', '.join(names)} FROM {table}"), key=repr)


@pytest.mark.slow
def test_a_mariadb_database_is_mirrored_with_its_types(
    servers: EmbeddedServers | ExternalServers, mariadb: MariaDbServer, name: str, tmp_path: Path
) -> None:
    source, target = f"source_{name.replace('-', '_')}", f"target_{name.replace('-', '_')}"
    with client(mariadb.dsn) as admin:
        for each in (source, target):
            admin.execute(f"CREATE DATABASE {each} CHARACTER SET utf8mb4")
    address = mariadb.dsn.rpartition("/")[0]

    def run(*statements: str) -> None:
        with client(f"{address}/{source}") as other:
            for statement in statements:
                other.execute(statement)

    def same(table: str) -> bool:
        return rows(mariadb.dsn, source, table) == rows(mariadb.dsn, target, table) != []

    run(
        TABLE, f"INSERT INTO everything VALUES {ROW.format(1)}", "CREATE TABLE pairs (a int, b int, PRIMARY KEY (a, b))"
    )
    run("INSERT INTO pairs VALUES (1, 2)")
    with ConnectWorker(tmp_path, bootstrap_servers=servers.bootstrap_servers, group=name) as worker:
        worker.put(name, connector(mariadb.dsn, servers, name, source))
        copy = Pipeline("copy")
        copy.mirror(
            pattern=rf"{name}\.{source}\..*",
            into=mysql(f"{address}/{target}"),
            bootstrap_servers=servers.bootstrap_servers,
            start="earliest",
        )
        with copy.submit(store=MemoryStore(), executor="local"):
            wait_for(lambda: same("everything") and same("pairs"), what="the rows of the snapshot")
            nulls = ", ".join(["NULL"] * 17)
            run(
                f"INSERT INTO everything VALUES {ROW.format(2)}, (3, {nulls})",
                "UPDATE everything SET id = 7, small = 6 WHERE id = 2",
                "INSERT INTO pairs VALUES (1, 3), (2, 2)",
                "DELETE FROM pairs WHERE b = 2",
            )
            wait_for(lambda: same("everything") and same("pairs"), what="the changes")
            run(
                "ALTER TABLE pairs ADD COLUMN note varchar(20) DEFAULT 'new'",
                "INSERT INTO pairs VALUES (5, 5, NULL)",
                "CREATE TABLE later (id int PRIMARY KEY, n int)",
                "INSERT INTO later VALUES (1, 1)",
            )
            wait_for(lambda: same("pairs") and same("later"), what="a new column, and a new table")
        worker.delete(name)
