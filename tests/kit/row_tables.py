"""Tables of databases, written to as a driver does, and read by another client."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa

from framework import Fields
from framework.topology import Header
from sinks import MySqlTable, PostgresTable, SqliteTable
from sinks.rows.transactional_table import RowTable
from tests.kit.file_tables import granted, opened
from tests.kit.mysql import client


class Database(ABC):
    """A database of a test. ``run`` is another client's connection."""

    #: The type to cast to for a text.
    text = "text"

    @abstractmethod
    def table(self, name: str = "events", **options: Any) -> RowTable: ...

    @abstractmethod
    def run(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]: ...

    def rows(self, name: str = "events", columns: str = "*") -> list[tuple[Any, ...]]:
        return sorted(self.run(f'SELECT {columns} FROM "{name}"'), key=repr)


class SqliteDatabase(Database):
    def __init__(self, path: Path) -> None:
        self.path = path

    def table(self, name: str = "events", **options: Any) -> RowTable:
        return SqliteTable(self.path, name, **options)

    def run(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.path)) as connection, connection:
            return connection.execute(statement, parameters).fetchall()


class PostgresDatabase(Database):
    def __init__(self, dsn: str, schema: str) -> None:
        self.dsn, self.schema = dsn, schema
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {schema}")  # type: ignore[call-overload]

    def table(self, name: str = "events", **options: Any) -> RowTable:
        return PostgresTable(self.dsn, name, schema=self.schema, **options)

    def run(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn, autocommit=True, options=f"-c search_path={self.schema}") as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description is not None else []


class MySqlDatabase(Database):
    text = "char"

    def __init__(self, dsn: str, name: str) -> None:
        self.dsn = f"{dsn.rpartition('/')[0]}/{name}"
        with client(dsn) as admin:
            admin.execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")

    def table(self, name: str = "events", **options: Any) -> RowTable:
        return MySqlTable(self.dsn, name, **options)

    def run(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with client(self.dsn) as other:
            return other.execute(statement, *parameters)


def bound(table: RowTable, fields: Fields) -> RowTable:
    table.bind(fields)
    table.prepare("topology")
    return table


def append(
    table: RowTable, txid: int, *rows: dict[str, Any], attempt: int = 1, epoch: int = 1, digest: str = "digest"
) -> Header:
    """Write a whole transaction, with one task. Returns its opened header."""
    header = opened(table, txid, attempt, epoch, digest)
    table.write(granted(header), [batch_of(table, rows)])
    table.raise_header(header, header.finished(txid))
    return header


def batch_of(table: RowTable, rows: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows), schema=table.schema)
