"""Tables of MariaDB and MySQL databases, their headers, and the sql_txns that write them.

A statement that creates, drops, renames or alters a table commits its sql_txn (ADR 92). So tables
are created and altered outside of the sql_txns that need them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Self

import pyarrow as pa

from framework.bounded_pages import pages_within
from framework.errors import BadRecordError, CommitOutcomeUnknown, ConfigError, InvariantViolation, RetryableError
from framework.topology import Header, Reach
from framework.topology.json_values import plain
from sinks.sql.mysql_connections import Connection, Connections, address_of
from sinks.sql.mysql_dialect import MariaDbDialect, MySqlDialect
from sinks.sql.mysql_server import READ_ONLY, code_of, identity, line_of, losses, named, unfit
from sinks.sql.schema import HEADERS_TABLE, qualified
from sinks.sql.table_base import SqlTableBase
from sinks.value_encoding import is_plain, restored

import pymysql  # isort: skip - after the module that says how to install it
from pymysql.constants import SERVER_STATUS  # isort: skip

#: The answers to COMMIT that report a roll-back: a lock, a deadlock.
_ROLLED_BACK = (1205, 1213)
#: A statement that the user has no permission for.
_DENIED = (1142, 1143, 1044, 1227, 1370)
#: A row with an existing key, and the name of the lock for creating and altering tables.
DUPLICATE = 1062
_CREATING = "ratchet"
_CREATING_TIMEOUT_S = 60
#: The most rows and bytes of a batch in one statement.
_STATEMENT_ROWS = 5_000
_STATEMENT_BYTES = 8 * 2**20
_connections = Connections()


class MySqlTableBase(SqlTableBase):
    """A table of a MariaDB or MySQL database, in InnoDB."""

    dialect: MariaDbDialect = MariaDbDialect()  # type: ignore[misc]
    reach = Reach.NETWORK
    _keep_header = " LOCK IN SHARE MODE"
    _own_header = " FOR UPDATE"
    #: The connection of a reader at one moment.
    _pinned: Connection | None = None

    def _open_at(self, dsn: str, database: str | None = None) -> None:
        """``database``: replaces that of the address."""
        self._address = address_of(dsn)
        if database is not None:
            self._address = replace(self._address, database=database)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.location})"

    @property
    def location(self) -> str:
        return f"table {self._table!r} of {self.dialect.name} at {self._address}"

    def close(self) -> None:
        _connections.close(self._address)

    # --- the server and its tables ----------------------------------------------------------------

    def _store(self, connection: Any) -> str:
        return identity(connection)

    def _exists(self, connection: Any, name: str) -> bool:
        query = "SELECT 1 FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = %s"
        return connection.execute(query, (name,)).fetchone() is not None

    def _create_headers(self, connection: Any) -> None:
        if not self._exists(connection, HEADERS_TABLE):
            super()._create_headers(connection)

    def _header_if_any(self, connection: Any) -> Header | None:
        return self._select_header(connection, "") if self._exists(connection, HEADERS_TABLE) else None

    @contextmanager
    def _creating(self, connection: Any) -> Iterator[None]:
        """Only one client of a database creates and alters tables at a time, and outside of a
        sql_txn, which would be committed."""
        if connection.server_status & SERVER_STATUS.SERVER_STATUS_IN_TRANS:
            raise RetryableError(f"{self.location}: its columns have changed since the attempt has looked at them")
        lock = "SELECT GET_LOCK(CONCAT(%s, '/', DATABASE()), %s)"
        (granted,) = connection.execute(lock, (_CREATING, _CREATING_TIMEOUT_S)).fetchone()
        if granted != 1:
            raise RetryableError(
                f"{self.location}: another client creates or alters tables for {_CREATING_TIMEOUT_S} s"
            )
        try:
            yield
        finally:
            with suppress(pymysql.Error, OSError):
                connection.execute("SELECT RELEASE_LOCK(CONCAT(%s, '/', DATABASE()))", (_CREATING,))

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
        if exists:
            self._check_rights(connection, self._table)
        if self._exists(connection, HEADERS_TABLE):
            self._check_rights(connection, HEADERS_TABLE)

    def _check_rights(self, connection: Any, table: str) -> None:
        """Try the statements of a run, on no row."""
        query = (
            "SELECT column_name FROM information_schema.columns WHERE table_schema = DATABASE() AND table_name = %s "
            "AND extra NOT LIKE %s ORDER BY ordinal_position"
        )
        columns = [qualified("", each) for (each,) in connection.execute(query, (table, "% GENERATED")).fetchall()]
        name, names, one = qualified("", table), ", ".join(columns), columns[0]
        for right, statement in (
            ("SELECT", f"SELECT 1 FROM {name} WHERE FALSE"),
            ("INSERT", f"INSERT INTO {name} ({names}) SELECT {names} FROM {name} WHERE FALSE"),
            ("UPDATE", f"UPDATE {name} SET {one} = {one} WHERE FALSE"),
            ("DELETE", f"DELETE FROM {name} WHERE FALSE"),
        ):
            with self._denied(f"{right} on table {table}"):
                connection.execute(statement)

    @contextmanager
    def _denied(self, right: str) -> Iterator[None]:
        try:
            yield
        except pymysql.Error as error:
            if code_of(error) not in _DENIED:
                raise
            raise ConfigError(
                f"{self.location}: {self._address.user!r} may not do what is needed: grant {right}"
            ) from error

    def _statements(self, connection: Any, rows: list[str]) -> Iterator[list[str]]:
        """Rows as literals, divided into statements. Raises ``BadRecordError`` for a row that the
        server accepts in no statement."""

        def length(row: str) -> int:
            length = len(row) if row.isascii() else len(row.encode())
            if length > connection.packet_bytes - 2**14:
                raise BadRecordError(
                    f"{self.location}: a row of {length:,} bytes is longer than max_allowed_packet, {connection.packet_bytes:,}"
                )
            return length

        most = min(_STATEMENT_BYTES, connection.packet_bytes // 2)
        return (part for part, _ in pages_within(rows, _STATEMENT_ROWS, most, length))

    # --- connections ------------------------------------------------------------------------------

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
                if code_of(error) in READ_ONLY:  # the address may lead to another server now
                    self.close()
                raise
            finally:
                _connections.give_back(self._address, connection, usable=usable)

    def _settle(self, connection: Connection) -> None:
        """Find out whether it is MariaDB or MySQL."""
        if not connection.is_mariadb and not isinstance(self.dialect, MySqlDialect):
            self.dialect = MySqlDialect()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (pymysql.Error, UnicodeError, OSError) as error:
            raise self._named(error) from error

    def _named(self, error: Exception) -> Exception:
        return named(error, self.location)

    @contextmanager
    def at_one_moment(self) -> Iterator[Self]:
        """In a sql_txn that only reads, so it blocks no other client."""
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

    def _stored(self, value: Any, declared: pa.DataType) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            raise BadRecordError(
                f"{self.location}: {self.dialect.name} has no NaN and no infinity, and this is {value}"
            )
        if pa.types.is_integer(declared) and not isinstance(value, int):
            raise BadRecordError(f"{self.location}: {value!r} is no whole number, and would be rounded")
        if is_plain(declared) or pa.types.is_boolean(declared):
            return value
        return plain(value, declared)

    def _keeps(self, declared: pa.DataType) -> bool:
        types = pa.types
        return is_plain(declared) and not (types.is_integer(declared) or types.is_floating(declared))

    def _loaded(self, value: Any, declared: pa.DataType) -> Any:
        return restored(value, declared)

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
