"""Connections to MariaDB and MySQL, by PyMySQL.

The meaning of statements does not depend on the server's settings: each connection makes the
relevant ones itself. A connection is never shared, and never reopened in place.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from framework.config import resolved_address, shown_host
from framework.errors import ConfigError

try:
    import pymysql
    from pymysql.constants import CLIENT, ER, FIELD_TYPE
    from pymysql.converters import conversions
except ImportError as error:  # PyMySQL is an optional extra
    raise ConfigError("MySQL needs the package PyMySQL: pip install 'ratchet-pipelines[mysql]'") from error

ADDRESS = "the address of a MySQL table"
#: How long an idle sql_txn may lock the header, and how long another one waits for the lock.
IDLE_TIMEOUT_S = 10
LOCK_TIMEOUT_S = 10
CONNECT_TIMEOUT_S = 10
#: How long sent bytes may stay unacknowledged before the connection is closed.
TCP_TIMEOUT_MS = 15_000
#: Idle connections kept per process and database.
_IDLE_CONNECTIONS = 4
_PORT = 3306
#: Without these, the server would truncate or replace values that do not fit instead of refusing
#: them.
_SQL_MODE = (
    "ANSI_QUOTES,STRICT_ALL_TABLES,NO_ZERO_IN_DATE,NO_ZERO_DATE,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION"
)
#: Settings of every session. READ COMMITTED: a statement sees the commits of others, and locks no
#: gaps between keys.
_SETTINGS = {
    "sql_mode": f"'{_SQL_MODE}'",
    "autocommit": "1",
    "time_zone": "'+00:00'",
    "innodb_lock_wait_timeout": str(LOCK_TIMEOUT_S),
    "lock_wait_timeout": str(LOCK_TIMEOUT_S),
    "net_read_timeout": str(IDLE_TIMEOUT_S),
    "foreign_key_checks": "1",
    "unique_checks": "1",
    "sql_safe_updates": "0",
    "sql_select_limit": "DEFAULT",
}
#: The options that a URL may have, under PyMySQL's names.
_TEXTS = ("ssl_ca", "ssl_cert", "ssl_key", "unix_socket")
_FLAGS = ("ssl_verify_cert", "ssl_verify_identity")
#: Moments, days and times are read as text: Python's types do not cover all years.
_TEXT_TYPES = (FIELD_TYPE.DATE, FIELD_TYPE.NEWDATE, FIELD_TYPE.DATETIME, FIELD_TYPE.TIMESTAMP, FIELD_TYPE.TIME)
_CONVERSIONS = {kind: how for kind, how in conversions.items() if kind not in _TEXT_TYPES}


@dataclass(frozen=True, kw_only=True)
class Address:
    """A parsed URL."""

    host: str
    port: int
    database: str
    user: str
    password: str = field(repr=False)
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{shown_host(self.host)}:{self.port}/{self.database}"


def address_of(dsn: str) -> Address:
    """The parts of a URL. ``${NAME}`` in it stands for an environment variable. Raises
    ``ConfigError``."""
    form = "mysql://user:password@host:3306/database"
    try:
        parts = urlsplit(resolved_address(ADDRESS, dsn, "/?#"))
        port = parts.port or _PORT
    except ValueError:
        raise ConfigError(f"{ADDRESS} does not parse: check its form, {form}") from None
    database = unquote(parts.path.lstrip("/"))
    if parts.scheme not in ("mysql", "mariadb") or not parts.hostname or not database or "/" in database:
        raise ConfigError(f"{ADDRESS} does not parse: check its form, {form}")
    options: list[tuple[str, Any]] = []
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name in _TEXTS:
            options.append((name, value))
        elif name in _FLAGS and value in ("true", "false"):
            options.append((name, value == "true"))
        else:
            known = ", ".join((*_TEXTS, *(f"{each}=true" for each in _FLAGS)))
            raise ConfigError(f"{ADDRESS}: the option {name!r} is not known with this value; there are: {known}")
    user = unquote(parts.username or "") or os.environ.get("USER", "root")
    password = unquote(parts.password or "")
    return Address(
        host=parts.hostname, port=port, database=database, user=user, password=password, options=tuple(options)
    )


class Cursor(pymysql.cursors.Cursor):
    """A cursor that detects by the error number that an inserted row exists already."""

    def executemany(self, query: str, args: Any) -> int | None:
        try:
            return super().executemany(query, args)
        except pymysql.err.IntegrityError as error:
            if error.args[0] != ER.DUP_ENTRY:
                raise
            self.rowcount = -1
            return None


class UnbufferedCursor(pymysql.cursors.SSCursor):
    """A cursor that reads each row from the server on demand. Until it has read all rows, the
    connection has no other use; closing the cursor reads the rest."""


class Connection(pymysql.connections.Connection):
    """A connection with the settings of ``_SETTINGS``."""

    is_mariadb = True
    version: tuple[int, ...] = ()
    packet_bytes = 0
    _sock: socket.socket | None

    def execute(self, statement: str, parameters: Sequence[Any] = ()) -> Any:
        """Execute a statement; returns the cursor with the selected or changed rows."""
        cursor = self.cursor()
        cursor.execute(statement, parameters or None)
        return cursor

    def _create_ssl_ctx(self, sslp: Any) -> ssl.SSLContext:
        """Without options of TLS nothing is verified. PyMySQL would load all authorities of the
        system all the same, which takes longer than to connect."""
        if sslp:
            return super()._create_ssl_ctx(sslp)  # type: ignore[misc, no-any-return]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context

    def settle(self) -> None:
        _keep_alive(self._sock)
        found, self.packet_bytes = self.execute("SELECT VERSION(), @@max_allowed_packet").fetchone()
        self.is_mariadb = "mariadb" in found.lower()
        numbers = found.split("-")[0].split(".")
        self.version = tuple(int(each) for each in numbers if each.isdigit())
        settings = dict(_SETTINGS)
        if self.is_mariadb:
            settings["max_statement_time"] = "0"
        # MySQL can only end an idle session, inside a sql_txn or not
        settings["idle_transaction_timeout" if self.is_mariadb else "wait_timeout"] = str(IDLE_TIMEOUT_S)
        self.execute("SET SESSION " + ", ".join(f"{name} = {value}" for name, value in settings.items()))
        self.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")

    def was_ended(self) -> bool:
        """Whether the server has ended an idle connection: an idle connection receives nothing
        else.
        """
        if not self.open or self._sock is None:
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def end(self) -> None:
        with suppress(pymysql.Error, OSError):
            self.close()


def _keep_alive(connected: Any) -> None:
    if connected is not None and connected.family != socket.AF_UNIX and hasattr(socket, "TCP_USER_TIMEOUT"):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_TIMEOUT_MS)


def connect(address: Address) -> Connection:
    connection = Connection(
        host=address.host,
        port=address.port,
        user=address.user,
        password=address.password,
        database=address.database,
        charset="utf8mb4",
        connect_timeout=CONNECT_TIMEOUT_S,
        client_flag=CLIENT.FOUND_ROWS,  # counts an unchanged row as found
        autocommit=True,
        conv=_CONVERSIONS,
        cursorclass=Cursor,
        program_name="ratchet",
        **dict(address.options),
    )
    try:
        connection.settle()
    except BaseException:
        connection.end()
        raise
    return connection


class Connections:
    """The idle connections of this process, by address."""

    def __init__(self) -> None:
        self._idle: dict[Address, list[Connection]] = {}
        self._lock = threading.Lock()
        self._process = os.getpid()

    def take(self, address: Address) -> Connection:
        with self._lock:
            if self._process != os.getpid():  # after a fork: these belong to the parent
                self._idle.clear()
                self._process = os.getpid()
            idle = self._idle.get(address, [])
            while idle:
                connection = idle.pop()
                if not connection.was_ended():
                    return connection
                connection.end()
        return connect(address)

    def give_back(self, address: Address, connection: Connection, *, usable: bool) -> None:
        with self._lock:
            idle = self._idle.setdefault(address, [])
            if usable and connection.open and len(idle) < _IDLE_CONNECTIONS:
                idle.append(connection)
                return
        connection.end()

    def close(self, address: Address) -> None:
        with self._lock:
            closing = self._idle.pop(address, [])
        for each in closing:
            each.end()
