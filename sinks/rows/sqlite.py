"""Tables of SQLite files."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from framework.errors import BadRecordError
from framework.topology.canonical_form import has_nan
from sinks.rows.rebuildable_table import RebuildableTable
from sinks.rows.table_definition import Column, UnfitTableError
from sinks.rows.values import is_text
from sinks.sql.sqlite_table_base import SqliteTableBase

#: The beginning of the statement that SQLite keeps of a table, with its name.
_CREATED = re.compile(
    r"""CREATE TABLE ("(?:[^"]|"")*"|'(?:[^']|'')*'|`(?:[^`]|``)*`|\[[^\]]*\]|[^\s(]+)""", re.IGNORECASE
)
_UNIQUE_INDEXES = 'SELECT name FROM pragma_index_list(?) WHERE "unique" = 1 AND partial = 0'
_COLLATIONS = "SELECT name, coll FROM pragma_index_xinfo(?) WHERE key = 1"
#: The declared types that do not make numbers of texts.
_TEXTUAL = re.compile("CHAR|CLOB|TEXT|BLOB", re.IGNORECASE)

#: Errors that refuse a row independently of other rows.
_OF_ROW_ALONE = ("SQLITE_CONSTRAINT_CHECK", "SQLITE_CONSTRAINT_NOTNULL", "SQLITE_CONSTRAINT_DATATYPE", "SQLITE_TOOBIG")


class SqliteTable(SqliteTableBase, RebuildableTable):
    """A table of a SQLite file, for ``AppendCommitter`` and ``UpsertCommitter``.

    ``path``: the file; a relative path starts at the driver's current directory. ``name``: the
    table. It is created when missing, and may have been made by hand, with constraints, defaults,
    generated columns and triggers. ``stamp``: the column that holds the txid of the transaction
    that wrote a row. None: there is none; then an ``AppendCommitter`` needs parallelism 1 and
    deterministic input.
    """

    json = "TEXT"
    adds_columns_together = False
    table_options = " STRICT"

    def __init__(self, path: str | os.PathLike[str], name: str, *, stamp: str | None = "_txid") -> None:
        self._table = name
        self._open_at(path)
        super().__init__(name, stamp)

    def check_rows(self, rows: pa.RecordBatch) -> None:
        super().check_rows(rows)
        for field, column in zip(rows.schema, rows.columns, strict=True):
            if has_nan(column):
                raise BadRecordError(
                    f"{self.location}: {field.name!r} is NaN, which SQLite stores as NULL; filter it out upstream"
                )

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._reading() as connection:
            connection.execute("PRAGMA foreign_keys = ON")
            try:
                with self._sql_txn(connection):
                    yield connection
            finally:
                connection.execute("PRAGMA foreign_keys = OFF")  # the connection is shared

    def _held_columns(self, connection: sqlite3.Connection, table: str) -> list[Column]:
        found = connection.execute("SELECT name, type, hidden FROM pragma_table_xinfo(?) WHERE hidden <> 1", (table,))
        return [Column(name, kind, generated=hidden in (2, 3)) for name, kind, hidden in found]

    def _unique(self, connection: sqlite3.Connection, table: str, columns: Sequence[str]) -> bool:
        primary = connection.execute("SELECT name FROM pragma_table_info(?) WHERE pk > 0", (table,))
        if {name for (name,) in primary} == set(columns):
            return True
        indexes = connection.execute(_UNIQUE_INDEXES, (table,)).fetchall()
        for (index,) in indexes:
            if {name for (name,) in connection.execute("SELECT name FROM pragma_index_info(?)", (index,))} == set(
                columns
            ):
                return True
        return False

    def _check_columns(self, connection: sqlite3.Connection, held: Sequence[Column]) -> None:
        super()._check_columns(connection, held)
        key = set(self._changes.key) if self._changes is not None else set[str]()
        for (index,) in connection.execute(_UNIQUE_INDEXES, (self._table,)).fetchall():
            collations = dict(connection.execute(_COLLATIONS, (index,)))
            found = [(name, its) for name, its in collations.items() if its != "BINARY"]
            if set(collations) == key and found:
                (name, collation) = found[0]
                raise UnfitTableError(
                    f"{self.location}: the key {name!r} has the collation {collation}, which takes different texts for one: "
                    "make a table whose key has COLLATE BINARY, copy the rows into it, and rename it"
                )

    def _giving_key(self, connection: sqlite3.Connection) -> str:
        key, table = self._list(self._by_key().key), self._at(self._table)
        query = "SELECT 1 FROM pragma_table_info(?) WHERE pk > 0"
        if connection.execute(query, (self._table,)).fetchone() is not None:
            return f"make a table that has PRIMARY KEY ({key}), copy the rows into it, and rename it to {table}"
        return f"CREATE UNIQUE INDEX {self._q(f'{self._table}_key')} ON {table} ({key})"

    def _giving_type(self, name: str) -> str:
        kind = self._declared()[name]
        return f"make a table that has the column as {kind}, copy the rows into it, and rename it to {self._at(self._table)}"

    def _load(self, connection: sqlite3.Connection, into: str, rows: pa.Table) -> None:
        marks = ", ".join("?" * rows.num_columns)
        statement = f"INSERT INTO {into} ({self._list(rows.column_names)}) VALUES ({marks})"
        connection.executemany(statement, self._stored_rows(rows))

    def _stage(self, connection: sqlite3.Connection, columns: str) -> str:
        staged = "temp._ratchet_staged"
        connection.execute(f"DROP TABLE IF EXISTS {staged}")
        connection.execute(
            f"CREATE TEMP TABLE _ratchet_staged AS SELECT {columns} FROM {self._at(self._table)} WHERE 0"
        )
        return "_ratchet_staged"

    def _stamp_index(self, connection: sqlite3.Connection) -> list[str]:
        index = self._q(f"{self._table}_{self._stamp}")
        return [f"CREATE INDEX IF NOT EXISTS {index} ON {self._at(self._table)} ({self._q(self._stamp or '')})"]

    def _triggers(self, connection: sqlite3.Connection) -> list[str]:
        found = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'trigger' AND tbl_name = ? COLLATE NOCASE", (self._table,)
        )
        return [name for (name,) in found]

    def _selected(self, column: Column) -> str:
        """A column of another type, such as ``UUID``, makes numbers of texts of digits."""
        name = self._q(column.name)
        if not is_text(self.schema.field(column.name).type) or _TEXTUAL.search(column.kind) or not column.kind:
            return name
        return f"CAST({name} AS TEXT)"

    # --- rebuilt ----------------------------------------------------------------------------------

    def check_exchange(self, topology_id: str) -> None:
        if Path(self._path).exists():
            super().check_exchange(topology_id)

    def remove(self, topology_id: str) -> bool:
        return Path(self._path).exists() and super().remove(topology_id)

    def _like_model(self, connection: sqlite3.Connection) -> list[str]:
        query = "SELECT sql FROM sqlite_master WHERE type = 'table' AND name = ?"
        (made,) = connection.execute(query, (self._model,)).fetchone()
        table = self._at(self._table)
        statements = [_CREATED.sub(lambda _: f"CREATE TABLE {table}", made, count=1)]
        if self._changes is not None:  # an index of the user's may be the key
            index = self._q(f"{self._table}_key")
            statements.append(f"CREATE UNIQUE INDEX {index} ON {table} ({self._list(self._changes.key)})")
        return statements

    def _references(self, connection: sqlite3.Connection) -> list[str]:
        found = connection.execute(
            "SELECT DISTINCT other.name FROM sqlite_master AS other JOIN pragma_foreign_key_list(other.name) AS key "
            "WHERE other.type = 'table' AND key.\"table\" = ? COLLATE NOCASE ORDER BY other.name",
            (self._table,),
        )
        return [f"of table {name}" for (name,) in found]

    def _equal(self, one: str, other: str, columns: Sequence[str]) -> str:
        return " AND ".join(f"{one}.{self._q(each)} IS {other}.{self._q(each)} COLLATE BINARY" for each in columns)

    def _is_of_row_alone(self, error: BaseException | None) -> bool:
        return getattr(error, "sqlite_errorname", "") in _OF_ROW_ALONE

    def _error_of(self, error: sqlite3.Error) -> Exception:
        found = super()._error_of(error)
        if isinstance(found, BadRecordError):
            return BadRecordError(f"{self.location}: {error}; the table refuses this row")
        return found

    def _run(self, connection: Any, statement: str, parameters: Sequence[Any] = ()) -> Any:
        return connection.execute(statement, tuple(parameters))
