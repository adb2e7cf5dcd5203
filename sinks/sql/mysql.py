"""Stamped rows in MariaDB and MySQL: many tasks write at a time, and any client of the database can
read the columns.

Every write is one sql_txn that locks the header: shared to write rows, exclusive to change the
header (C1). A batch goes as many rows into ``INSERT .. ON DUPLICATE KEY UPDATE``.

A statement that creates, drops or renames a table commits the sql_txn that it stands in (ADR 92).
So tables are created before the sql_txn that needs them, and dropped after it, and rebuilt rows are
copied into the table that they replace.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from framework.errors import BadRecordError, CommitOutcomeUnknown, ConfigError, InvariantViolation
from framework.topology import FORMER, REBUILT, Fields, Header, Reach
from framework.topology.canonical import python_values
from sinks.backend import Key, MapBackend
from sinks.plain_values import is_plain, plain, restored
from sinks.refusals import explained
from sinks.sql.backend import SqlBackend, Upsert
from sinks.sql.mysql_connections import Connection, Connections, address_of
from sinks.sql.mysql_dialect import MariaDbDialect, MySqlDialect, literals, rows_of, upsert, without_width
from sinks.sql.mysql_server import READ_ONLY, code_of, identity, line_of, losses, named, unfit
from sinks.sql.schema import HEADERS_TABLE

import pymysql  # isort: skip - after the module that says how to install it

#: Rows and bytes of a batch that go into one statement, and keys per SELECT.
_STATEMENT_ROWS = 5_000
_STATEMENT_BYTES = 8 * 2**20
_KEYS_PER_SELECT = 500
#: The answers to COMMIT by which the server says that it has rolled back: a lock, a deadlock.
_ROLLED_BACK = (1205, 1213)
#: A statement that the user may not do, and one on a table that is not there.
_DENIED = (1142, 1143, 1044, 1227, 1370)
_connections = Connections()


class MySqlBackend(SqlBackend):
    """A table of a MariaDB (10.6 or newer) or MySQL (8.0.17 or newer) database, in InnoDB.

    ``dsn``: ``mysql://user:password@host:3306/database``. ``${NAME}`` in it stands for an
    environment variable. Options after a ``?``: ``ssl_ca``, ``ssl_cert``, ``ssl_key``,
    ``ssl_verify_cert=true``, ``ssl_verify_identity=true``, ``unix_socket``. Raises ``ConfigError``
    for an address that does not parse. ``table``: created when missing, checked otherwise. ``key``
    and ``value``: the typed columns; when left out, a ``StateCommitter`` takes them from its input.

    Integers are stored as ``bigint``, unsigned 64-bit integers as ``bigint unsigned``, durations as
    ``bigint`` in their unit, moments as ``datetime(6)`` in UTC. Neither database holds NaN or an
    infinity: these values are refused. A key has up to 3,072 bytes, and text counts four for each
    character. The user needs SELECT, INSERT, UPDATE and DELETE on the table and on
    ``_ratchet_headers``, and CREATE on the database if one of these tables is missing. With CREATE
    VIEW, it also gets the view ``<table>_live`` of the rows that are not deleted.
    """

    dialect: MariaDbDialect = MariaDbDialect()  # type: ignore[misc]
    reach = Reach.NETWORK
    _keep_header = " LOCK IN SHARE MODE"
    _own_header = " FOR UPDATE"
    _holds_nan = False
    #: The connection of a reader of one moment.
    _pinned: Connection | None = None

    def __init__(self, dsn: str, table: str, key: Fields | None = None, value: Fields | None = None) -> None:
        self._address = address_of(dsn)
        super().__init__(table, key, value)

    def __repr__(self) -> str:
        return f"MySqlBackend({self.location})"

    @property
    def location(self) -> str:
        return f"table {self._table!r} of {self.dialect.name} at {self._address}"

    def close(self) -> None:
        _connections.close(self._address)

    @contextmanager
    def at_one_moment(self) -> Iterator[MapBackend]:
        """In a sql_txn that reads; it holds up nobody."""
        with self._connected() as connection:
            reader = copy.copy(self)
            if connection.is_mariadb:
                connection.execute("SET SESSION idle_transaction_timeout = 0")
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            connection.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")
            try:
                reader._pinned = connection
                yield reader
            finally:
                connection.end()  # with the setting

    # --- tables, each in a statement that commits by itself -----------------------------------------

    def check(self, topology_id: str) -> Header | None:
        with self._reading() as connection:
            columns = self._found_columns(connection)
            self._probe(connection, exists=bool(columns))
            there = self._exists(connection, HEADERS_TABLE)
            header = self._select_header(connection, "") if there else None
            self._check_found(header, connection, columns, topology_id)
        return header

    def prepare(self, topology_id: str) -> Header:
        if self.check(topology_id) is None:
            with self._reading() as connection:
                self._create_headers(connection)
                if not self._found_columns(connection):
                    self._create_table(connection)
        if not self._model and self.shape.live_view is not None:
            with self._reading() as connection, suppress(ConfigError):  # nothing depends on it
                if self._may_create_view(connection, self.shape.live_view):
                    connection.execute(self.shape.live_view_ddl())
        return super().prepare(topology_id)

    def exchange(self, expected: Header, new: Header, rebuilt: Header) -> None:
        former, other = self.beside(FORMER), self.beside(REBUILT)
        with self._reading() as connection:
            former._check_ours(connection, expected.topology_id)
            if not former._found_columns(connection):
                former._create_table(connection)
        super().exchange(expected, new, rebuilt)
        other._drop_table()

    def remove(self, topology_id: str) -> bool:
        there = super().remove(topology_id)
        self._drop_table()
        return there

    def beside(self, place: str) -> MySqlBackend:
        return cast(MySqlBackend, super().beside(place))

    def _create_headers(self, connection: Any) -> None:
        if not self._exists(connection, HEADERS_TABLE):
            super()._create_headers(connection)

    def _create_table(self, connection: Any) -> None:
        if self._model:  # with the indexes that others have made
            connection.execute(f'CREATE TABLE {self.shape.name} LIKE "{self._model}"')
        else:
            super()._create_table(connection)

    def _create_view(self, connection: Any) -> None:
        """Not here: it would commit."""

    def _drop_table(self) -> None:
        with self._reading() as connection:
            connection.execute(f"DROP TABLE IF EXISTS {self.shape.name}")

    def _drop(self, connection: Any) -> None:
        """Empty the table. It is dropped after the sql_txn, which would end by that."""
        if self._found_columns(connection):
            connection.execute(f"DELETE FROM {self.shape.name}")
        connection.execute(self._headers.delete(), (self._table,))

    def _check_ours(self, connection: Any, topology_id: str) -> bool:
        """A table without a header and without rows was left by a crash before or after the sql_txn
        that it is for."""
        if self._found_columns(connection) and self._select_header(connection, "") is None:
            if connection.execute(f"SELECT 1 FROM {self.shape.name} LIMIT 1").fetchone() is None:
                return False
        return super()._check_ours(connection, topology_id)

    def _rename(self, connection: Any, former: str, rebuilt: str) -> None:
        """Copy the rows, in one sql_txn: the table keeps its rights, indexes and view."""
        names = ", ".join(f'"{name}"' for name, _ in self.shape.columns)
        for source, target in ((self._table, former), (rebuilt, self._table)):
            connection.execute(f'INSERT INTO "{target}" ({names}) SELECT {names} FROM "{source}"')
            connection.execute(f'DELETE FROM "{source}"')

    def _in_the_way(self, connection: Any) -> list[str]:
        triggers = "SELECT trigger_name FROM information_schema.triggers WHERE event_object_schema = DATABASE() AND "
        found = connection.execute(f"{triggers} event_object_table = %s", (self._table,)).fetchall()
        keys = (
            "SELECT constraint_name FROM information_schema.referential_constraints WHERE constraint_schema = DATABASE() "
            "AND %s IN (table_name, referenced_table_name)"
        )
        others = connection.execute(keys, (self._table,)).fetchall()
        return [*(f"trigger {name}" for (name,) in found), *(f"foreign key {name}" for (name,) in others)]

    def _may_create_view(self, connection: Any, name: str) -> bool:
        return not self._exists(connection, name)

    # --- what is found ------------------------------------------------------------------------------

    def _exists(self, connection: Any, name: str) -> bool:
        query = "SELECT 1 FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = %s"
        return connection.execute(query, (name,)).fetchone() is not None

    def _found_columns(self, connection: Any) -> list[tuple[str, str]]:
        query = (
            "SELECT column_name, column_type FROM information_schema.columns WHERE table_schema = DATABASE() AND table_name = %s"
        )
        return [(name, without_width(kind)) for name, kind in connection.execute(query, (self._table,)).fetchall()]

    def _probe(self, connection: Any, *, exists: bool) -> None:
        problem = unfit(connection)
        if problem:
            raise ConfigError(f"{self.location} cannot be written: {problem}")
        (folded,) = connection.execute("SELECT @@lower_case_table_names").fetchone()
        if folded and self._table != self._table.lower():
            raise ConfigError(
                f"{self.location}: the server does not keep the case of names (lower_case_table_names is {folded}); use a name "
                f"in small letters, {self._table.lower()!r}"
            )
        for reason, advice in losses(connection):
            self._may_lose_writes(reason, advice)
        for table in (*([self._table] if exists else []), HEADERS_TABLE):
            if self._exists(connection, table):
                self._check_rights(connection, table)

    def _check_rights(self, connection: Any, table: str) -> None:
        """Try what a run does, on no row."""
        for right, statement in (
            ("SELECT", f'SELECT 1 FROM "{table}" WHERE FALSE'),
            ("INSERT", f'INSERT INTO "{table}" SELECT * FROM "{table}" WHERE FALSE'),
            ("UPDATE", f'UPDATE "{table}" SET {"_txid = 0" if table == self._table else "done = 0"} WHERE FALSE'),
            ("DELETE", f'DELETE FROM "{table}" WHERE FALSE'),
        ):
            try:
                connection.execute(statement)
            except pymysql.Error as error:
                if code_of(error) not in _DENIED:
                    raise
                raise ConfigError(
                    f"{self.location}: {self._address.user!r} may not do what is needed: grant {right} on table {table}"
                ) from error

    def _told_apart(self, connection: Any) -> str:
        query = (
            "SELECT engine, table_type, create_options FROM information_schema.tables "
            "WHERE table_schema = DATABASE() AND table_name = %s"
        )
        engine, kind, _ = connection.execute(query, (self._table,)).fetchone()
        if engine != "InnoDB":
            return f"is {'a view' if kind == 'VIEW' else f'in {engine}'}, and only InnoDB has transactions that Ratchet knows"
        query = (
            "SELECT index_name, GROUP_CONCAT(column_name ORDER BY column_name), SUM(sub_part IS NOT NULL) "
            "FROM information_schema.statistics WHERE table_schema = DATABASE() AND table_name = %s AND non_unique = 0 "
            "GROUP BY index_name"
        )
        wanted = ",".join(sorted(self.shape.key, key=str.lower))
        found = connection.execute(query, (self._table,)).fetchall()
        if ("PRIMARY", wanted.lower(), 0) not in [(name, columns.lower(), cut) for name, columns, cut in found]:
            return f"has no primary key of {', '.join(self.shape.key)}"
        for name, *_ in found:
            if name != "PRIMARY":
                return f"has a unique index {name}, by which a value would lead to the row of another key"
        query = (
            "SELECT column_name, collation_name, extra FROM information_schema.columns "
            "WHERE table_schema = DATABASE() AND table_name = %s"
        )
        for name, collation, extra in connection.execute(query, (self._table,)).fetchall():
            if "GENERATED" in extra.upper() and "DEFAULT_GENERATED" not in extra.upper():
                return f"makes the values of {name!r} by itself (GENERATED)"
            if "on update" in extra.lower():
                return f"changes the values of {name!r} by itself (ON UPDATE)"
            if collation not in (None, self.dialect.collation):
                return (
                    f"has the collation {collation} for {name!r}, which takes different texts for one, or sorts otherwise than "
                    f"by code points; it must be {self.dialect.collation}"
                )
        return ""

    def _store(self, connection: Any) -> str:
        return identity(connection)

    # --- rows ---------------------------------------------------------------------------------------

    def check_rows(self, deltas: pa.Table) -> None:
        """Find keys that are too long, and numbers that MySQL lacks."""
        key = self.shape.key
        for name in deltas.column_names:
            column, kind = deltas.column(name), deltas.schema.field(name).type
            if pa.types.is_floating(kind):
                wrong = pc.invert(pc.is_finite(column))
                reason = f"{self.dialect.name} has no NaN and no infinity"
            elif name in key and (length := self._longest(name)) is not None:
                measured = pc.utf8_length(column) if _is_text(kind) else pc.binary_length(column)
                wrong = pc.greater(measured, length)
                reason = f"it is longer than the {length} {'characters' if _is_text(kind) else 'bytes'} that the key holds"
            else:
                continue
            row = pc.index(wrong, True).as_py()
            if row >= 0:
                values = {each: python_values(deltas.column(each).slice(row, 1))[0] for each in {*key, name}}
                own = {each: values.pop(each) for each in key}
                error = BadRecordError(f"{self.location}: {reason}")
                raise explained(error, own, values, lambda each, where=name: not each and where not in key)

    def _longest(self, name: str) -> int | None:
        kind = self.shape.key.type_of(name)
        if not _is_text(kind) and not pa.types.is_binary(kind) and not pa.types.is_large_binary(kind):
            return None
        return self.dialect.key_length(name, self.shape.key)

    def _stored_key(self, key: Key) -> tuple[Any, ...]:
        for name, value in zip(self.shape.key, key, strict=True):
            if isinstance(value, (str, bytes)) and (length := self._longest(name)) is not None and len(value) > length:
                raise BadRecordError(f"{self.location}, key {str(key)[:60]}...: {name!r} is longer than the {length} that it holds")
        return super()._stored_key(key)

    def _select_keys(self, connection: Any, keys: Sequence[Key]) -> Iterator[tuple[Any, ...]]:
        for start in range(0, len(keys), _KEYS_PER_SELECT):
            where, parameters = self._where(keys[start : start + _KEYS_PER_SELECT])
            yield from self._fetched(connection, f"{self.shape.select()} WHERE {where}", parameters)

    def _where(self, keys: Sequence[Key]) -> tuple[str, list[Any]]:
        """The condition that a row has one of these keys, and its parameters. MariaDB finds no
        index for a list of pairs."""
        names = [f'"{name}"' for name in self.shape.key]
        if len(names) == 1:
            condition = f"{names[0]} IN ({', '.join(['%s'] * len(keys))})"
        else:
            one = "(" + " AND ".join(f"{name} = %s" for name in names) + ")"
            condition = " OR ".join([one] * len(keys))
        return condition, [part for key in keys for part in key]

    def _merge(self, connection: Any, merge: Upsert, deltas: pa.Table, stamp: tuple[Any, ...]) -> int:
        if deltas.num_rows == 0:
            return 0
        begin, end = upsert(self.shape, dict(merge.aggregates), merge.value_type)
        names = [*self.shape.key, *self.shape.value]
        columns = [literals(deltas.column(name)) for name in names]
        *numbers, writer = stamp
        own = [*map(str, numbers), literals(pa.chunked_array([[writer]]))[0].as_py()]
        constant = f", {', '.join(own)}, FALSE, FALSE"
        rows = rows_of(columns, constant)
        for part in self._statements(connection, rows):
            connection.execute(f"{begin}{', '.join(part)}{end}")
        return self._written(connection, deltas, stamp)

    def _statements(self, connection: Any, rows: list[str]) -> Iterator[list[str]]:
        """Rows for one statement each. Raises ``BadRecordError`` for one that the server takes in
        none."""
        most = min(_STATEMENT_BYTES, connection.packet_bytes // 2)
        part: list[str] = []
        size = 0
        for row in rows:
            length = len(row) if row.isascii() else len(row.encode())
            if length > connection.packet_bytes - 2**14:
                raise BadRecordError(
                    f"{self.location}: a row of {length:,} bytes is longer than max_allowed_packet, {connection.packet_bytes:,}"
                )
            if part and (size + length > most or len(part) == _STATEMENT_ROWS):
                yield part
                part, size = [], 0
            part.append(row)
            size += length
        yield part

    def _written(self, connection: Any, deltas: pa.Table, stamp: tuple[Any, ...]) -> int:
        """How many rows have the stamp and the writer. The database's own count does not tell a row
        that was left as it was from one that was inserted."""
        keys = list(zip(*(python_values(deltas.column(name)) for name in self.shape.key), strict=True))
        stored = [self._stored_key(key) for key in keys]
        count = 0
        for start in range(0, len(stored), _KEYS_PER_SELECT):
            where, parameters = self._where(stored[start : start + _KEYS_PER_SELECT])
            query = (
                f"SELECT COUNT(*) FROM {self.shape.name} WHERE ({where}) AND _txid = %s AND _epoch = %s AND _attempt = %s "
                "AND _writer = %s"
            )
            count += connection.execute(query, [*parameters, *stamp]).fetchone()[0]
        return count

    def _stored(self, value: Any, declared: pa.DataType) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            raise BadRecordError(f"{self.location}: {self.dialect.name} has no NaN and no infinity, and this is {value}")
        if pa.types.is_integer(declared) and not isinstance(value, int):
            raise BadRecordError(f"{self.location}: {value!r} is no whole number, and would be rounded")
        if is_plain(declared) or pa.types.is_boolean(declared):
            return value
        return plain(value, declared)

    def _loaded(self, value: Any, declared: pa.DataType) -> Any:
        return restored(value, declared)

    # --- connections --------------------------------------------------------------------------------

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        if self._pinned is not None:
            with self._named_errors():
                yield self._pinned
            return
        with self._named_errors():
            connection = _connections.take(self._address)
            self._settle(connection)
            usable = False
            try:
                yield connection
                usable = True
            except pymysql.Error as error:
                if code_of(error) in READ_ONLY:  # the address may lead elsewhere by now
                    self.close()
                raise
            finally:
                _connections.give_back(self._address, connection, usable=usable)

    def _settle(self, connection: Connection) -> None:
        """Find out which of the two databases it is."""
        if not connection.is_mariadb and not isinstance(self.dialect, MySqlDialect):
            self.dialect = MySqlDialect()  # type: ignore[misc]
            if self._shape is not None:
                self._shape = replace(self._shape, dialect=self.dialect)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (pymysql.Error, UnicodeError, OSError) as error:
            raise named(error, self.location) from error

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        with self._connected() as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        if self._pinned is not None:
            raise InvariantViolation(f"{self.location}: a reader does not write")
        with self._connected() as connection:
            connection.execute("START TRANSACTION READ WRITE")
            try:
                yield connection
            except BaseException:
                with suppress(pymysql.Error, OSError):
                    connection.execute("ROLLBACK")
                raise
            try:
                connection.execute("COMMIT")
            except (pymysql.Error, OSError) as error:
                if code_of(error) in _ROLLED_BACK:
                    raise
                raise CommitOutcomeUnknown(f"{self.location}: {line_of(error)}") from error


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
