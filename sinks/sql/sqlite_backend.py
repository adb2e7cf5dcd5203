"""Stamped rows in SQLite: for one host, durable, with columns that any client of the file can read.

Every write is one ``BEGIN IMMEDIATE .. COMMIT``. WAL with ``synchronous=FULL``: committed data
survives a power cut. Types that SQLite lacks are stored in other forms: timestamps, times and dates
as ISO 8601 text (in UTC if the type has a zone), durations as integers in their unit, decimals as
text. All but decimals sort correctly in these forms.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from framework.topology import Fields, Header
from sinks.backend import Key
from sinks.sql.backend import SqlBackend, Upsert
from sinks.sql.sqlite_table_base import SqliteTableBase

#: Keys per SELECT. SQLite takes at most 32,766 parameters.
_KEYS_PER_SELECT = 500
#: Finds a collation other than BINARY in the statement that created a table.
_COLLATED = re.compile(r"\bCOLLATE\s+(?![\"'\[`]?BINARY\b)", re.IGNORECASE)
#: Finds a constraint that removes or skips rows instead of refusing a value.
_RESOLVED = re.compile(r"\bON\s+CONFLICT\s+(REPLACE|IGNORE|FAIL|ROLLBACK)\b", re.IGNORECASE)


class SqliteBackend(SqliteTableBase, SqlBackend):
    """A table of a SQLite file.

    * ``path``: the file; a relative path starts at the driver's current directory.
    * ``table``: created if missing, checked otherwise.
    * ``key``, ``value``: the typed columns; by default, a ``StateCommitter`` takes them from its
      input.
    """

    #: Batches of at least this many rows go through a temporary table; below, it costs more than it
    #: saves.
    _staged_from_rows = 100
    _holds_nan = False

    def __init__(
        self, path: str | os.PathLike[str], table: str, key: Fields | None = None, value: Fields | None = None
    ) -> None:
        self._open_at(path)
        super().__init__(table, key, value)

    def exchange(self, expected: Header, new: Header, rebuilt: Header) -> None:
        with self._reading() as connection:  # held, because the setting belongs to the connection
            # views continue to name the table that they named
            connection.execute("PRAGMA legacy_alter_table = ON")
            try:
                super().exchange(expected, new, rebuilt)
            finally:
                connection.execute("PRAGMA legacy_alter_table = OFF")

    def check_exchange(self, topology_id: str) -> None:
        if Path(self._path).exists():
            super().check_exchange(topology_id)

    def remove(self, topology_id: str) -> bool:
        return Path(self._path).exists() and super().remove(topology_id)

    # --- inside -----------------------------------------------------------------------------------

    def _found_columns(self, connection: sqlite3.Connection) -> list[tuple[str, str]]:
        found = connection.execute(f'PRAGMA table_info("{self._table}")')
        return [(name, kind) for _, name, kind, *_ in found]

    def _told_apart(self, connection: sqlite3.Connection) -> str:
        found = connection.execute(f'PRAGMA table_info("{self._table}")')
        if {name for _, name, *_, place in found if place} != set(self.shape.key):
            return f"has another primary key than {', '.join(self.shape.key)}"
        query = (
            "SELECT strict, sql FROM pragma_table_list AS list JOIN sqlite_master AS made USING (name) WHERE name = ?"
        )
        strict, made = connection.execute(
            f"{query} AND list.schema = 'main' AND made.type = 'table'", (self._table,)
        ).fetchone()
        if not strict:
            return "is not STRICT, so that a sum beyond 64 bits would become a float in silence"
        if _COLLATED.search(made):
            return "has a collation, which would take different texts for one"
        resolved = _RESOLVED.search(made)
        if resolved is not None:
            return (
                f"has a constraint {resolved[0]}, by which a value that it refuses would change other rows in silence"
            )
        return ""

    def _select_keys(self, connection: sqlite3.Connection, keys: Sequence[Key]) -> Iterator[tuple[Any, ...]]:
        names = ", ".join(f'"{name}"' for name in self.shape.key)
        one = "(" + ", ".join("?" * len(self.shape.key)) + ")"
        for start in range(0, len(keys), _KEYS_PER_SELECT):
            part = keys[start : start + _KEYS_PER_SELECT]
            query = f"{self.shape.select()} WHERE ({names}) IN (VALUES {', '.join([one] * len(part))})"
            yield from connection.execute(query, [item for key in part for item in key])

    def _merge(self, connection: sqlite3.Connection, upsert: Upsert, deltas: pa.Table, stamp: tuple[Any, ...]) -> int:
        if deltas.num_rows >= self._staged_from_rows:
            self._stage(connection, deltas)
            return connection.execute(upsert.into(self.shape, self.shape.stage), stamp).rowcount
        rows = ((*row, *stamp) for row in self._stored_rows(deltas))
        return connection.executemany(upsert.into(self.shape), rows).rowcount

    def _stage(self, connection: sqlite3.Connection, deltas: pa.Table) -> None:
        """Fill the temporary table with the deltas. Afterwards it holds nothing else."""
        connection.execute(self.shape.stage_ddl())
        connection.execute(f"DELETE FROM {self.shape.stage}")
        marks = ", ".join("?" * deltas.num_columns)
        connection.executemany(f"INSERT INTO {self.shape.stage} VALUES ({marks})", self._stored_rows(deltas))

    def _in_the_way(self, connection: sqlite3.Connection) -> list[str]:
        found = connection.execute(
            "SELECT 'trigger ' || name FROM sqlite_master WHERE type = 'trigger' AND tbl_name = ? COLLATE NOCASE",
            (self._table,),
        )
        return [name for (name,) in found]

    def _rename(self, connection: sqlite3.Connection, former: str, rebuilt: str) -> None:
        query = "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND tbl_name = ? COLLATE NOCASE AND sql IS NOT NULL"
        indexes = connection.execute(query, (self._table,)).fetchall()
        for name, _ in indexes:
            connection.execute(f'DROP INDEX "{name.replace(chr(34), 2 * chr(34))}"')
        connection.execute(f'ALTER TABLE "{self._table}" RENAME TO "{former}"')
        connection.execute(f'ALTER TABLE "{rebuilt}" RENAME TO "{self._table}"')
        for _, statement in indexes:
            connection.execute(statement)

    def _may_create_view(self, connection: sqlite3.Connection, name: str) -> bool:
        query = "SELECT 1 FROM sqlite_master WHERE name = ? COLLATE NOCASE"
        return connection.execute(query, (name,)).fetchone() is None
