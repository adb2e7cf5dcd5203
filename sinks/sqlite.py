"""Stamped rows in SQLite: for one host, durable, with columns that any client of the file can read.

Every write is one ``BEGIN IMMEDIATE .. COMMIT`` that first compares the header (C1); a batch is merged by one
``INSERT .. ON CONFLICT DO UPDATE`` statement. WAL with ``synchronous=FULL``: what is committed survives a power cut.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from framework.errors import (
    BadRecordError,
    CommitOutcomeUnknown,
    ConfigError,
    CorruptStateError,
    InvariantViolation,
    RetryableError,
    StaleWriterError,
    TopologyError,
)
from framework.topology import Fields, Header, OpenCommit, Reach, Stamp, ValueType
from framework.topology.fencing import FORMAT
from sinks.aggregates import Aggregate
from sinks.backend import Key, MapBackend, Row
from sinks.sqlite_schema import HEADERS_DDL, HEADERS_TABLE, STAMP_COLUMNS, TableShape, identifier

#: STRICT tables came with 3.37; without them an integer sum beyond 64 bits would silently become a float.
SQLITE_MIN = (3, 37, 0)
#: How long a writer waits for another one's sql_txn before the attempt fails and is replayed.
BUSY_TIMEOUT_MS = 10_000
#: Keys per SELECT: SQLite takes 32,766 parameters.
_KEYS_PER_SELECT = 500


class _File:
    """The one connection of this process to a file. Copies of a backend share it: opening a WAL file for every batch
    would cost more than the batch."""

    _open: dict[tuple[int, str], _File] = {}
    _guard = threading.Lock()

    def __init__(self, path: str) -> None:
        self.path = path
        self.lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None

    @classmethod
    def at(cls, path: str) -> _File:
        with cls._guard:
            key = (os.getpid(), path)  # a forked worker opens its own
            return cls._open.setdefault(key, cls(path))

    def connected(self) -> sqlite3.Connection:
        """Call it with the lock held."""
        if self._connection is None:
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
            self._connection = connection
        return self._connection

    def close(self) -> None:
        with self.lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None


class SqliteBackend(MapBackend):
    """A table of a SQLite file.

    ``path``: the file; relative paths are taken from the current directory, on the driver. ``table``: created when
    missing, checked otherwise. ``key`` and ``value``: the typed columns; a ``StateCommitter`` fills them in from its
    input when they are left out.
    """

    reach = Reach.HOST

    def __init__(
        self, path: str | os.PathLike[str], table: str, key: Fields | None = None, value: Fields | None = None
    ) -> None:
        if sqlite3.sqlite_version_info < SQLITE_MIN:
            raise ConfigError(
                f"SQLite {sqlite3.sqlite_version} is too old: {'.'.join(map(str, SQLITE_MIN))} or newer is needed"
            )
        self._path = str(Path(path).absolute())
        self._table = identifier(table, "table")
        self._shape = TableShape(table, key, value) if key is not None and value is not None else None
        if self._shape is not None:
            _ = self._shape.columns  # types are checked now, not in a task

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self._path, "table": self._table, "shape": self._shape}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._path, self._table, self._shape = state["path"], state["table"], state["shape"]

    # --- shape -----------------------------------------------------------------------------------------------

    @property
    def location(self) -> str:
        return f"table {self._table!r} of {self._path}"

    def bind(self, key: Fields, value: Fields) -> None:
        shape = TableShape(self._table, key, value)
        if self._shape is not None and self._shape.columns != shape.columns:
            raise TopologyError(
                f"{self.location} was declared with {self._shape.key} -> {self._shape.value}, and its committer writes {key} "
                f"-> {value}: leave key and value out, or make them equal"
            )
        _ = shape.columns
        self._shape = shape

    @property
    def shape(self) -> TableShape:
        if self._shape is None:
            raise TopologyError(
                f"{self.location} has no columns: give key=Fields(...) and value=Fields(...), or use it in a StateCommitter"
            )
        return self._shape

    @property
    def value_columns(self) -> int:
        return len(self.shape.value)

    # --- header ----------------------------------------------------------------------------------------------

    def prepare(self, topology_id: str) -> Header:
        with self._writing() as connection:
            connection.execute(HEADERS_DDL)
            found = connection.execute(f'PRAGMA table_info("{self._table}")').fetchall()
            header = self._select_header(connection)
            if header is not None and header.topology_id != topology_id:
                raise ConfigError(
                    f"{self.location} belongs to topology {header.topology_id!r}, not {topology_id!r}: a state has one "
                    "owner; use another table"
                )
            if found:
                self._check_columns([(name, kind) for _, name, kind, *_ in found])
            else:
                if header is not None:
                    raise CorruptStateError(
                        f"{self.location} is gone, but its header says that it holds transactions up to {header.done}: "
                        "restore the table"
                    )
                connection.execute(self.shape.ddl())
            if header is None:
                if found and connection.execute(f'SELECT 1 FROM "{self._table}" LIMIT 1').fetchone():
                    raise ConfigError(f"{self.location} has rows and no header in {HEADERS_TABLE}: restore the header")
                header = Header(topology_id, uuid.uuid4().hex)
                connection.execute(
                    f"INSERT INTO {HEADERS_TABLE} VALUES (?, ?, ?, ?, ?, NULL, NULL, NULL, ?)",
                    (self._table, header.format, topology_id, header.incarnation, header.epoch, header.done),
                )
            return header

    def read_header(self) -> Header:
        with self._reading() as connection:
            return self._found_header(connection)

    def raise_header(self, expected: Header, new: Header) -> None:
        with self._writing() as connection:
            self._check_header(connection, expected)
            opened = new.open
            connection.execute(
                f"UPDATE {HEADERS_TABLE} SET epoch = ?, open_txid = ?, open_attempt = ?, open_digest = ?, done = ? "
                "WHERE state = ?",
                (
                    new.epoch,
                    opened.txid if opened else None,
                    opened.attempt_id if opened else None,
                    opened.plan_digest if opened else None,
                    new.done,
                    self._table,
                ),
            )

    # --- rows ------------------------------------------------------------------------------------------------

    def multi_get(self, keys: Sequence[Key]) -> list[Row | None]:
        shape = self.shape
        width = len(shape.key)
        columns = ", ".join(f'"{name}"' for name, _ in shape.columns)
        names = ", ".join(f'"{name}"' for name in shape.key)
        found: dict[Key, Row] = {}
        with self._reading() as connection:
            for start in range(0, len(keys), _KEYS_PER_SELECT):
                part = keys[start : start + _KEYS_PER_SELECT]
                marks = ", ".join(["(" + ", ".join("?" * width) + ")"] * len(part))
                query = f'SELECT {columns} FROM "{self._table}" WHERE ({names}) IN (VALUES {marks})'
                for row in connection.execute(query, [item for key in part for item in key]):
                    found[row[:width]] = self._row(row)
        return [found.get(key) for key in keys]

    def multi_put(
        self, header: Header, keys: Sequence[Key], expected_stamps: Sequence[Stamp | None], rows: Sequence[Row]
    ) -> None:
        shape = self.shape
        names = [name for name, _ in shape.columns]
        marks = ", ".join("?" * len(names))
        keys_match = " AND ".join(f'"{name}" = ?' for name in shape.key)
        updates = ", ".join(f'"{name}" = ?' for name in names if name not in shape.key)
        with self._writing() as connection:
            self._check_header(connection, header)
            for key, expected, row in zip(keys, expected_stamps, rows, strict=True):
                values = self._columns_of(row)
                if expected is None:
                    cursor = connection.execute(
                        f'INSERT OR IGNORE INTO "{self._table}" ({", ".join(map(_quoted, names))}) VALUES ({marks})',
                        (*key, *values),
                    )
                else:
                    cursor = connection.execute(
                        f'UPDATE "{self._table}" SET {updates} WHERE {keys_match} AND _txid = ? AND _epoch = ? AND _attempt = ?',
                        (*values, *key, expected.txid, expected.epoch, expected.attempt_id),
                    )
                if cursor.rowcount != 1:
                    raise StaleWriterError(f"{self.location}, key {key!r}: its stamp is no longer {expected}")

    def sweep(self, header: Header) -> int:
        if header.open is None:
            raise InvariantViolation("a sweep needs an open transaction")
        with self._writing() as connection:
            self._check_header(connection, header)
            stamp = (header.epoch, header.open.attempt_id)
            return connection.execute(self.shape.sweep(), (*stamp, header.open.txid, *stamp)).rowcount

    def roll_back(self, header: Header) -> int:
        if header.open is None:
            raise InvariantViolation("a roll-back needs an open transaction")
        with self._writing() as connection:
            self._check_header(connection, header)
            stamp = (header.open.txid - 1, header.epoch, header.open.attempt_id)
            return connection.execute(self.shape.roll_back(), (*stamp, header.open.txid)).rowcount

    def purge(self, header: Header, before_txid: int) -> int:
        with self._writing() as connection:
            self._check_header(connection, header)
            query = f'DELETE FROM "{self._table}" WHERE _deleted = 1 AND _txid < ?'
            return connection.execute(query, (before_txid,)).rowcount

    def clear(self, topology_id: str) -> Header:
        self.prepare(topology_id)
        with self._writing() as connection:
            found = self._found_header(connection)
            header = Header(topology_id, uuid.uuid4().hex, found.epoch)
            connection.execute(f'DELETE FROM "{self._table}"')
            connection.execute(
                f"UPDATE {HEADERS_TABLE} SET incarnation = ?, open_txid = NULL, open_attempt = NULL, open_digest = NULL, "
                "done = 0 WHERE state = ?",
                (header.incarnation, self._table),
            )
            return header

    def apply(
        self,
        header: Header,
        writer: str,
        value_type: ValueType,
        deltas: pa.Table,
        aggregates: Mapping[str, Aggregate],
        *,
        want_values: bool,
    ) -> pa.Table | None:
        shape = self.shape
        if header.open is None:
            raise InvariantViolation("apply needs an open transaction")
        rows = _python_rows(deltas, self.location)
        statement = shape.upsert(
            {name: aggregate.merge_rule for name, aggregate in aggregates.items()},
            keep_previous=value_type is not ValueType.NON_TRANSACTIONAL,
            skip_same_txid=value_type is ValueType.TRANSACTIONAL,
        )
        stamp = (header.open.txid, header.epoch, header.open.attempt_id)
        with self._writing() as connection:
            self._check_header(connection, header)
            connection.execute(f'DELETE FROM temp."{shape.stage}"')
            marks = ", ".join("?" * deltas.num_columns)
            connection.executemany(f'INSERT INTO temp."{shape.stage}" VALUES ({marks})', rows)
            changed = connection.execute(statement, (*stamp, writer)).rowcount
            if changed != deltas.num_rows:
                self._explain_unchanged(connection, stamp, writer, value_type)
            if not want_values:
                return None
            current = connection.execute(shape.staged_rows()).fetchall()
        columns = list(zip(*current, strict=True)) if current else [()] * deltas.num_columns
        return pa.table(
            {
                field.name: pa.array(column, type=field.type)
                for field, column in zip(deltas.schema, columns, strict=True)
            }
        )

    def close(self) -> None:
        _File.at(self._path).close()

    # --- inside ----------------------------------------------------------------------------------------------

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        file = _File.at(self._path)
        with file.lock, self._named_errors():
            yield file.connected()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One sql_txn, with errors named by what to do about them."""
        with self._reading() as connection:
            if self._shape is not None:
                connection.execute(self._shape.stage_ddl())
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
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
        except sqlite3.IntegrityError as error:
            raise BadRecordError(
                f"{self.location} refuses a value: {error}; an integer beyond 64 bits and a null key cannot be stored"
            ) from error
        except sqlite3.OperationalError as error:
            text = str(error)
            if "unable to open" in text or "readonly" in text or "attempt to write" in text:
                raise ConfigError(f"{self.location}: {text}; check the path and its permissions") from error
            raise RetryableError(f"{self.location}: {text}") from error
        except sqlite3.DatabaseError as error:
            raise CorruptStateError(f"{self._path}: {error}; restore the file from a backup") from error
        except OSError as error:
            raise ConfigError(f"{self._path}: {error}; check the path and its permissions") from error

    def _select_header(self, connection: sqlite3.Connection) -> Header | None:
        row = connection.execute(
            f"SELECT format, topology_id, incarnation, epoch, open_txid, open_attempt, open_digest, done FROM {HEADERS_TABLE} "
            "WHERE state = ?",
            (self._table,),
        ).fetchone()
        if row is None:
            return None
        if row[0] != FORMAT:
            raise CorruptStateError(f"{self.location}: header format {row[0]}, and this Ratchet knows {FORMAT}")
        opened = OpenCommit(row[4], row[5], row[6]) if row[4] is not None else None
        return Header(row[1], row[2], row[3], opened, row[7], row[0])

    def _found_header(self, connection: sqlite3.Connection) -> Header:
        header = self._select_header(connection)
        if header is None:
            raise CorruptStateError(f"{self.location}: its header is gone from {HEADERS_TABLE}; restore the file")
        return header

    def _check_header(self, connection: sqlite3.Connection, expected: Header) -> None:
        found = self._found_header(connection)
        if found != expected:
            raise StaleWriterError(
                f"{self.location}: open for {found.open} of epoch {found.epoch}, this writer holds {expected.open} of epoch "
                f"{expected.epoch}",
                found.epoch,
            )

    def _check_columns(self, found: list[tuple[str, str]]) -> None:
        wanted = self.shape.columns
        if sorted(found) != sorted(wanted):
            missing = [f"{name} {kind}" for name, kind in wanted if (name, kind) not in found]
            extra = [f"{name} {kind}" for name, kind in found if (name, kind) not in wanted]
            raise ConfigError(
                f"{self.location} has other columns than this topology writes (missing: {', '.join(missing) or 'none'}; "
                f"not expected: {', '.join(extra) or 'none'}): use another table, or drop it and create it with: "
                f"{self.shape.ddl()}"
            )

    def _explain_unchanged(
        self, connection: sqlite3.Connection, stamp: tuple[int, int, int], writer: str, value_type: ValueType
    ) -> None:
        """Some staged keys were not written: skipped by the transactional rule, or refused."""
        floor = (stamp[0] + 1, 0, 0) if value_type is ValueType.TRANSACTIONAL else stamp
        row = connection.execute(self.shape.newer_rows(), floor).fetchone()
        if row is None:
            if value_type is ValueType.TRANSACTIONAL:
                return
            raise InvariantViolation(f"{self.location}: rows were not written, and none says why")
        *key, txid, epoch, attempt, found_writer = row
        if (txid, epoch, attempt) == stamp:
            raise InvariantViolation(
                f"{self.location}, key {tuple(key)!r}: written in the same attempt by {found_writer} and by {writer} (C12): "
                "one key has one writer; group the input by the key"
            )
        raise StaleWriterError(
            f"{self.location}, key {tuple(key)!r}: stamp ({txid}, {epoch}, {attempt}), this writer has {stamp}", epoch
        )

    def _row(self, row: tuple[Any, ...]) -> Row:
        keys, values = len(self.shape.key), len(self.shape.value)
        value, previous = row[keys : keys + values], row[keys + values : keys + 2 * values]
        txid, epoch, attempt, writer, deleted, prev_exists = row[-len(STAMP_COLUMNS) :]
        return Row(
            None if deleted else self._typed(value),
            Stamp(txid, epoch, attempt),
            self._typed(previous) if prev_exists else None,
            writer,
        )

    def _typed(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        types = [self.shape.value.type_of(name) for name in self.shape.value]
        return tuple(
            bool(value) if value is not None and kind is not None and pa.types.is_boolean(kind) else value
            for value, kind in zip(values, types, strict=True)
        )

    def _columns_of(self, row: Row) -> tuple[Any, ...]:
        nothing = (None,) * len(self.shape.value)
        value = row.value if row.value is not None else nothing
        for name, item in zip(self.shape.value, value, strict=True):
            if isinstance(item, float) and item != item:
                raise BadRecordError(
                    f"{self.location}: {name!r} is NaN, which SQLite stores as NULL; filter it out upstream"
                )
        stamp = row.stamp
        return (
            *value,
            *(row.prev if row.prev is not None else nothing),
            *(stamp.txid, stamp.epoch, stamp.attempt_id, row.writer, int(row.value is None), int(row.prev is not None)),
        )


def _quoted(name: str) -> str:
    return f'"{name}"'


def _python_rows(table: pa.Table, location: str) -> Iterator[tuple[Any, ...]]:
    for field, column in zip(table.schema, table.columns, strict=True):
        if pa.types.is_floating(field.type) and pc.any(pc.is_nan(column)).as_py():
            raise BadRecordError(
                f"{location}: {field.name!r} is NaN, which SQLite stores as NULL; filter it out upstream"
            )
    return zip(*(column.to_pylist() for column in table.columns), strict=True)
