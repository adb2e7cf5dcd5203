"""Connections to SQLite files, and SQLite's SQL."""

from __future__ import annotations

import copy
import os
import sqlite3
import string
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from framework.bounded_pages import slices_of
from framework.errors import (
    BadRecordError,
    CommitOutcomeUnknown,
    ConfigError,
    CorruptStateError,
    RetryableError,
    TopologyError,
)
from framework.local_paths import check_made_here, local_path, made_by_others
from framework.topology import Header, Reach
from framework.topology.canonical_form import python_values
from framework.topology.json_values import plain
from sinks.external_row_sorter import PAGE_BYTES
from sinks.path_checks import check_can_be_made, warn_of_files_beside
from sinks.sql.schema import Dialect
from sinks.sql.table_base import SqlRollBack, SqlTableBase
from sinks.value_encoding import check_storable, is_plain, restored

#: The first version with STRICT tables. Without STRICT, an integer sum beyond 64 bits silently
#: becomes a float.
SQLITE_MIN = (3, 37, 0)
#: How long a writer waits for another one's sql_txn before the attempt fails and is replayed.
BUSY_TIMEOUT_MS = 10_000
#: Transient errors, including lack of space.
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
_SMALL = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)


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
    reserved_prefix = "sqlite_"

    def folded(self, name: str) -> str:
        """Only letters of ASCII have two cases in SQLite."""
        return name.translate(_SMALL)

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
        """The sum of +inf and -inf is NaN, which SQLite turns into NULL. The text 'NaN' replaces
        it, and a STRICT column refuses text."""
        both = super().added(one, other, declared)
        return f"COALESCE({both}, 'NaN')" if pa.types.is_floating(declared) else both

    def merges(self, rule: str, declared: pa.DataType) -> bool:
        # decimals are text, which neither adds nor sorts as numbers
        return rule in ("first", "last") or not pa.types.is_decimal(declared)


def _connected(path: str, mode: str | None = None, **options: Any) -> sqlite3.Connection:
    """Open a file. ``mode``: of SQLite's URI. Raises ``ConfigError`` if another user has made a
    journal or log of this name in a folder for everybody: SQLite would write its pages into the
    file."""
    try:
        owner = os.stat(path).st_uid
    except FileNotFoundError:
        owner = os.geteuid()
    for each in (Path(f"{path}{ending}") for ending in ("-journal", "-wal", "-shm")):
        if made_by_others(each) and each.lstat().st_uid != owner:
            raise ConfigError(
                f"{each}: another user has made it, and SQLite would read it as a part of {path}; remove it, and keep the file in "
                "a folder of this user's"
            )
    place = path if mode is None else f"{Path(path).as_uri()}?mode={mode}"
    connection: sqlite3.Connection = sqlite3.connect(place, uri=mode is not None, **options)
    return connection


class SqliteFile:
    """The one connection of this process to a file. All copies of a backend share it, because
    opening a WAL file for every batch would cost more than the batch."""

    _open: dict[tuple[type[SqliteFile], int, str], SqliteFile] = {}
    _guard = threading.Lock()

    def __init__(self, path: str) -> None:
        self.path = path
        self.lock = threading.RLock()
        #: Device and inode of the connection's file.
        self.found: tuple[int, int] | None = None
        self._connection: sqlite3.Connection | None = None

    @classmethod
    def at(cls, path: str) -> SqliteFile:
        with cls._guard:
            key = (cls, os.getpid(), path)  # a forked worker opens its own
            return cls._open.setdefault(key, cls(path))

    def connected(self) -> sqlite3.Connection:
        """The open connection. Call it with the lock held.

        A connection stays with its file even when another file takes the name. In that case the
        connection is opened again, because other programs would not find its writes."""
        if self._connection is not None and self.found != self._there():
            self.close()
        if self._connection is None:
            # Look before opening: if the file is replaced meanwhile, the next use notices it.
            found = self._there()
            self._connection, self.found = self._opened(), found or self._there()
        return self._connection

    def _opened(self) -> sqlite3.Connection:
        Path(self.path).parent.mkdir(parents=True, exist_ok=True)
        # A user who may read a file of SQLite may lock it, too, and so hold up every commit.
        with suppress(FileExistsError):
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        connection = _connected(
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


class ReadFile(SqliteFile):
    """A connection that only reads. The file keeps its journal mode, and no other files are left
    behind."""

    _was_at_rest = False

    def _opened(self) -> sqlite3.Connection:
        if not Path(self.path).exists():
            raise ConfigError(f"there is no file {self.path} on this host")
        self._was_at_rest = not self._log.exists()
        return _connected(
            self.path, "ro", timeout=BUSY_TIMEOUT_MS / 1000, isolation_level=None, check_same_thread=False
        )

    @property
    def _log(self) -> Path:
        return Path(f"{self.path}-wal")

    def close(self) -> None:
        super().close()
        if self._was_at_rest and self._log.exists():
            # Reading has created a log. A last writer removes it when it closes.
            with suppress(sqlite3.Error, ConfigError), closing(_connected(self.path, "rw")) as writer:
                writer.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()


class SqliteTableBase(SqlTableBase):
    """A table of a SQLite file."""

    dialect = SqliteDialect()
    reach = Reach.HOST
    _opens: type[SqliteFile] = SqliteFile
    _path: str

    def _open_at(self, path: str | os.PathLike[str]) -> None:
        if sqlite3.sqlite_version_info < SQLITE_MIN:
            raise ConfigError(
                f"SQLite {sqlite3.sqlite_version} is too old: {'.'.join(map(str, SQLITE_MIN))} or newer is needed"
            )
        self._path = str(local_path(path, "SQLite file").resolve())

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

    def prepare(self, topology_id: str) -> Header:
        check_made_here(Path(self._path), self.location)
        warn_of_files_beside(Path(self._path))
        return super().prepare(topology_id)

    def close(self) -> None:
        self._opens.at(self._path).close()

    def for_reading(self) -> Self:
        reader = copy.copy(self)
        reader._opens = ReadFile
        return reader

    @contextmanager
    def at_one_moment(self) -> Iterator[Self]:
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

    def _store(self, connection: sqlite3.Connection) -> str:
        found = self._opens.at(self._path).found
        return f"'{found}'"

    def _probe(self, connection: sqlite3.Connection, *, exists: bool) -> None:
        query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name = ? COLLATE NOCASE"
        found = connection.execute(query, (self._table,)).fetchone()
        if found is not None and found[0] != self._table:
            raise ConfigError(
                f"{self.location} is the table {found[0]!r}, since SQLite does not look at case: write it so, or use another "
                "table"
            )

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
        """A connection that does not change the file's journal mode."""
        with self._named_errors():
            connection = _connected(self._path, timeout=BUSY_TIMEOUT_MS / 1000, isolation_level=None)
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

    def _stored_rows(self, rows: pa.Table) -> Iterator[tuple[Any, ...]]:
        """Rows in their stored form, of which about ``PAGE_BYTES`` are in memory."""
        for page in slices_of(rows, PAGE_BYTES):
            yield from zip(*map(self._stored_column, page.columns, page.column_names), strict=True)

    def _stored_column(self, column: pa.ChunkedArray, name: str) -> list[Any]:
        values = python_values(column, name)
        kind = column.type
        if not is_plain(kind):
            return [None if value is None else self._stored(value, kind) for value in values]
        return values

    def _keeps(self, declared: pa.DataType) -> bool:
        return is_plain(declared)

    def _loaded(self, value: Any, declared: pa.DataType) -> Any:
        return restored(value, declared)

    def _stored(self, value: Any, declared: pa.DataType) -> Any:
        return plain(value, declared)
