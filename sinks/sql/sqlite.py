"""Stamped rows in SQLite: for one host, durable, with columns that any client of the file can read.

Every write is one ``BEGIN IMMEDIATE .. COMMIT``. WAL with ``synchronous=FULL``: committed data
survives a power cut. Types that SQLite lacks are stored in other forms: timestamps, times and dates
as ISO 8601 text (in UTC if the type has a zone), durations as integers in their unit, decimals as
text. All but decimals sort correctly in these forms.
"""

from __future__ import annotations

import copy
import itertools
import os
import re
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from framework.errors import (
    BadRecordError,
    CommitOutcomeUnknown,
    ConfigError,
    CorruptStateError,
    RetryableError,
    TopologyError,
)
from framework.paths import local_path
from framework.topology import Fields, Header, Reach
from framework.topology.canonical import python_values
from sinks.backend import Key, MapBackend
from sinks.paths import check_can_be_made
from sinks.plain_values import check_storable, is_plain, plain, restored
from sinks.sql.backend import SqlBackend, SqlRollBack, Upsert
from sinks.sql.schema import Dialect

#: The first version with STRICT tables. Without STRICT, an integer sum beyond 64 bits silently
#: becomes a float.
SQLITE_MIN = (3, 37, 0)
#: How long a writer waits for another one's sql_txn before the attempt fails and is replayed.
BUSY_TIMEOUT_MS = 10_000
#: Keys per SELECT. SQLite takes at most 32,766 parameters.
_KEYS_PER_SELECT = 500
#: Finds a collation other than BINARY in the statement that created a table.
_COLLATED = re.compile(r"\bCOLLATE\s+(?![\"'\[`]?BINARY\b)", re.IGNORECASE)
#: Finds a constraint that removes or leaves out rows instead of refusing a value.
_RESOLVED = re.compile(r"\bON\s+CONFLICT\s+(REPLACE|IGNORE|FAIL|ROLLBACK)\b", re.IGNORECASE)
#: Errors that pass by themselves, or when there is room again.
_PASSING = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_SCHEMA,
        sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
    }
)


class SqliteDialect(Dialect):
    """SQLite's SQL."""

    name = "SQLite"
    integer = "INTEGER"
    text = "TEXT"
    boolean = "INTEGER"
    temporary = "temp."
    table_options = " STRICT, WITHOUT ROWID"
    headers_options = " STRICT"
    least = "min"
    greatest = "max"
    folds_case = True
    reserved_prefix = "sqlite_"

    def type_of(self, name: str, declared: pa.DataType) -> str:
        types = pa.types
        check_storable(name, declared, self.name)
        if types.is_uint64(declared):
            raise TopologyError(f"column {name!r}: SQLite has no unsigned 64-bit integers; declare it as int")
        if types.is_integer(declared) or types.is_boolean(declared) or types.is_duration(declared):
            return "INTEGER"
        if types.is_floating(declared):
            return "REAL"
        return "BLOB" if types.is_binary(declared) or types.is_large_binary(declared) else "TEXT"

    def added(self, one: str, other: str, declared: pa.DataType) -> str:
        """The sum of +inf and -inf is NaN, which SQLite turns into NULL. The text 'NaN' takes its
        place, and a STRICT column refuses text."""
        both = super().added(one, other, declared)
        return f"COALESCE({both}, 'NaN')" if pa.types.is_floating(declared) else both

    def merges(self, rule: str, declared: pa.DataType) -> bool:
        return rule in ("first", "last") or not pa.types.is_decimal(declared)  # text neither adds nor sorts as numbers


class _File:
    """The one connection of this process to a file. All copies of a backend share it, because
    opening a WAL file for every batch would cost more than the batch."""

    _open: dict[tuple[type[_File], int, str], _File] = {}
    _guard = threading.Lock()

    def __init__(self, path: str) -> None:
        self.path = path
        self.lock = threading.RLock()
        #: Device and inode of the file that the connection writes to.
        self.found: tuple[int, int] | None = None
        self._connection: sqlite3.Connection | None = None

    @classmethod
    def at(cls, path: str) -> _File:
        with cls._guard:
            key = (cls, os.getpid(), path)  # a forked worker opens its own
            return cls._open.setdefault(key, cls(path))

    def connected(self) -> sqlite3.Connection:
        """The open connection. Call it with the lock held.

        A connection stays with its file even when another file takes the name. In that case the
        connection is opened again; otherwise nobody would find what it writes."""
        if self._connection is not None and self.found != self._there():
            self.close()
        if self._connection is None:
            # Look before opening: if the file is replaced meanwhile, the next use notices it.
            found = self._there()
            self._connection, self.found = self._opened(), found or self._there()
        return self._connection

    def _opened(self) -> sqlite3.Connection:
        Path(self.path).parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(
            self.path, timeout=BUSY_TIMEOUT_MS / 1000, isolation_level=None, check_same_thread=False
        )
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA temp_store = MEMORY")
        except BaseException:
            connection.close()
            raise
        return connection

    def _there(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def close(self) -> None:
        with self.lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None


class _ReadFile(_File):
    """A connection that only reads. The file keeps the journal mode that it has, and nothing is
    left beside it."""

    _was_at_rest = False

    def _opened(self) -> sqlite3.Connection:
        if not Path(self.path).exists():
            raise ConfigError(f"there is no file {self.path} on this host")
        self._was_at_rest = not self._log.exists()
        return sqlite3.connect(
            f"{Path(self.path).as_uri()}?mode=ro",
            uri=True,
            timeout=BUSY_TIMEOUT_MS / 1000,
            isolation_level=None,
            check_same_thread=False,
        )

    @property
    def _log(self) -> Path:
        return Path(f"{self.path}-wal")

    def close(self) -> None:
        super().close()
        if self._was_at_rest and self._log.exists():
            # Reading has made a log. A writer that is the last one removes it when it closes.
            place = f"{Path(self.path).as_uri()}?mode=rw"
            with suppress(sqlite3.Error), closing(sqlite3.connect(place, uri=True)) as writer:
                writer.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()


class SqliteBackend(SqlBackend):
    """A table of a SQLite file.

    ``path``: the file; a relative path starts at the driver's current directory. ``table``: created
    when missing, checked otherwise. ``key`` and ``value``: the typed columns; when left out, a
    ``StateCommitter`` takes them from its input.
    """

    dialect = SqliteDialect()
    reach = Reach.HOST
    #: Batches of at least this many rows go through a temporary table; below, it costs more than it
    #: saves.
    _staged_from_rows = 100
    _holds_nan = False
    _opens: type[_File] = _File

    def __init__(
        self, path: str | os.PathLike[str], table: str, key: Fields | None = None, value: Fields | None = None
    ) -> None:
        if sqlite3.sqlite_version_info < SQLITE_MIN:
            raise ConfigError(
                f"SQLite {sqlite3.sqlite_version} is too old: {'.'.join(map(str, SQLITE_MIN))} or newer is needed"
            )
        self._path = str(local_path(path, "SQLite file").resolve())
        super().__init__(table, key, value)

    @property
    def location(self) -> str:
        return f"table {self._table!r} of {self._path}"

    def check(self, topology_id: str) -> Header | None:
        path = Path(self._path)
        if path.exists():
            header = None
            with self._looking() as connection, suppress(SqlRollBack), self._sql_txn(connection):
                header = self._prepare(connection, topology_id)
                raise SqlRollBack
            return header
        check_can_be_made(path, self._path)
        return None

    def for_reading(self) -> SqliteBackend:
        reader = copy.copy(self)
        reader._opens = _ReadFile
        return reader

    def exchange(self, expected: Header, new: Header, rebuilt: Header) -> None:
        with self._reading() as connection:  # held, since the setting is of the connection
            connection.execute("PRAGMA legacy_alter_table = ON")  # views go on naming the table that they named
            try:
                super().exchange(expected, new, rebuilt)
            finally:
                connection.execute("PRAGMA legacy_alter_table = OFF")

    @contextmanager
    def at_one_moment(self) -> Iterator[MapBackend]:
        """In a sql_txn that reads; it does not hold up writers. States of one file share it, so
        they are read as of the same moment."""
        reader = self.for_reading()
        with reader._reading() as connection:
            if connection.in_transaction:  # another state of this file has begun it
                yield reader
                return
            connection.execute("BEGIN")
            try:
                yield reader
            finally:
                with suppress(sqlite3.Error):  # another file may have taken its name
                    connection.execute("ROLLBACK")
                reader.close()

    def check_exchange(self, topology_id: str) -> None:
        if Path(self._path).exists():
            super().check_exchange(topology_id)

    def remove(self, topology_id: str) -> bool:
        return Path(self._path).exists() and super().remove(topology_id)

    def close(self) -> None:
        self._opens.at(self._path).close()

    # --- inside -----------------------------------------------------------------------------------

    def _store(self, connection: sqlite3.Connection) -> str:
        found = self._opens.at(self._path).found
        return f"'{found}'"

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

    def _probe(self, connection: sqlite3.Connection, *, exists: bool) -> None:
        query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name = ? COLLATE NOCASE"
        found = connection.execute(query, (self._table,)).fetchone()
        if found is not None and found[0] != self._table:
            raise ConfigError(
                f"{self.location} is the table {found[0]!r}, since SQLite does not look at case: write it so, or use another "
                "table"
            )

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
        columns = [self._stored_column(*each) for each in zip(deltas.columns, deltas.column_names, strict=True)]
        same = (itertools.repeat(each, deltas.num_rows) for each in stamp)
        return connection.executemany(upsert.into(self.shape), zip(*columns, *same, strict=True)).rowcount

    def _stage(self, connection: sqlite3.Connection, deltas: pa.Table) -> None:
        """Fill the temporary table with the deltas. Afterwards it holds nothing else."""
        connection.execute(self.shape.stage_ddl())
        connection.execute(f"DELETE FROM {self.shape.stage}")
        marks = ", ".join("?" * deltas.num_columns)
        columns = [self._stored_column(*each) for each in zip(deltas.columns, deltas.column_names, strict=True)]
        connection.executemany(f"INSERT INTO {self.shape.stage} VALUES ({marks})", zip(*columns, strict=True))

    def _stored_column(self, column: pa.ChunkedArray, name: str) -> list[Any]:
        values = python_values(column, name)
        kind = column.type
        if not is_plain(kind):
            return [None if value is None else self._stored(value, kind) for value in values]
        return values

    def _stored(self, value: Any, declared: pa.DataType) -> Any:
        return plain(value, declared)

    def _loaded(self, value: Any, declared: pa.DataType) -> Any:
        return restored(value, declared)

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

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        file = self._opens.at(self._path)
        with file.lock, self._named_errors():
            yield file.connected()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A connection in one sql_txn, committed at the end."""
        with self._reading() as connection, self._sql_txn(connection):
            yield connection

    @contextmanager
    def _looking(self) -> Iterator[sqlite3.Connection]:
        """A connection that leaves the file in the journal mode that it has."""
        with self._named_errors():
            connection = sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_MS / 1000, isolation_level=None)
            try:
                yield connection
            finally:
                connection.close()

    @contextmanager
    def _sql_txn(self, connection: sqlite3.Connection) -> Iterator[None]:
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        try:
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
                raise
            raise CommitOutcomeUnknown(f"{self.location}: {error}") from error

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._error_of(error) from error
        except OSError as error:
            raise ConfigError(f"{self._path}: {error}; check the path and its permissions") from error

    def _error_of(self, error: sqlite3.Error) -> Exception:
        text = f"{self.location}: {error}"
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the primary code, without extensions
        if code in _PASSING:
            return RetryableError(text)
        if isinstance(error, (sqlite3.IntegrityError, sqlite3.DataError)):
            return BadRecordError(
                f"{text}; this value cannot be stored: an integer beyond 64 bits, a sum that is not a number, a null key, "
                "or one that is too long"
            )
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return CorruptStateError(f"{text}; restore the file from a backup")
        if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
            return ConfigError(f"{text}; check the path and its permissions")
        return ConfigError(f"{text}; this does not pass by itself: look at the file, then run the topology again")
