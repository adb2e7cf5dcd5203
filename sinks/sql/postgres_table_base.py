"""Connections to PostgreSQL, and PostgreSQL's SQL."""

from __future__ import annotations

import copy
import os
import select
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Self, TypeVar

import pyarrow as pa

from framework.config import resolved_address, shown_host
from framework.errors import (
    BadRecordError,
    CommitOutcomeUnknown,
    ConfigError,
    CorruptStateError,
    RetryableError,
)
from framework.topology import Header, Reach
from framework.topology.canonical_form import NAN
from sinks.sql.postgres_adaptive_batch_size import SETTINGS, LimitReached, StatementSize, limit_of, reached
from sinks.sql.postgres_pipeline_mode import StatementGroup, ungrouped
from sinks.sql.postgres_server import identity, losses
from sinks.sql.schema import HEADERS_TABLE, Dialect, identifier, qualified
from sinks.sql.table_base import SqlTableBase
from sinks.value_encoding import check_storable

try:
    import psycopg
    from psycopg import conninfo
    from psycopg.types.datetime import TimestamptzBinaryLoader
    from psycopg.types.string import BytesBinaryDumper
except ImportError as error:  # psycopg is an optional extra
    raise ConfigError("PostgreSQL needs the package psycopg: pip install 'ratchet-pipelines[postgres]'") from error

T = TypeVar("T")

_ADDRESS = "the address of a PostgreSQL table"
#: How long an idle sql_txn may lock the header, and how long another one waits for the lock (at
#: most half of the server's limit for a statement).
IDLE_TIMEOUT_MS = 10_000
LOCK_TIMEOUT_MS = 10_000
CONNECT_TIMEOUT_S = 10
#: How long sent bytes may stay unacknowledged before the connection is closed.
TCP_TIMEOUT_MS = 15_000
#: Idle connections kept per process and database.
_IDLE_CONNECTIONS = 4
#: The most rows and bytes of a batch in one statement.
_STATEMENT_ROWS = 20_000
#: Permanent refusals of a server or a pooler.
_REFUSALS = (
    *("authentication failed", "no pg_hba.conf entry", "no password supplied", "does not exist", "certificate"),
    *("does not support SSL", "unsupported startup parameter"),
)
#: The answer of a pooler that gives each statement another session.
_STATEMENT_POOLING = "statement pooling mode"
#: The SQLSTATE of a write to a read-only server. At the start it is refused; later it means that
#: another server is becoming the primary.
_READ_ONLY = "25006"
#: SQLSTATE classes and codes of transient errors, including lack of space: connections,
#: serialization and deadlocks, resources, locks, timeouts and restarts, the disk, and a table that
#: another client has just created.
_PASSING = (
    *("08", "40", "53", "55006", "55P03", "25P03", "57P01", "57P02", "57P03", "57P05"),
    *("58000", "58030", "42P07"),
    _READ_ONLY,
)
#: The key of the advisory lock for creating tables: any number that no other program uses.
_CREATING = int.from_bytes(b"ratchet")
#: SQLSTATE classes of values that the table will never accept: data, cardinality, constraints,
#: limits.
_VALUES = ("21", "22", "23", "54")


class PostgresDialect(Dialect):
    """PostgreSQL's SQL. Type names are spelled as the database itself prints them."""

    name = "PostgreSQL"
    integer = "bigint"
    text = "text"
    boolean = "boolean"
    mark = "%s"
    least = "LEAST"
    greatest = "GREATEST"
    name_bytes_max = 63
    reserved_columns = frozenset({"tableoid", "xmin", "cmin", "xmax", "cmax", "ctid"})

    def type_of(self, name: str, declared: pa.DataType) -> str:
        types = pa.types
        check_storable(name, declared, self.name)
        if types.is_uint64(declared):
            return "numeric(20,0)"
        if types.is_integer(declared) or types.is_duration(declared):
            return "bigint"
        if types.is_decimal(declared):
            return f"numeric({declared.precision},{declared.scale})"
        if types.is_timestamp(declared):
            return f"timestamp {'with' if declared.tz is not None else 'without'} time zone"
        if types.is_time(declared):
            return "time without time zone"
        return next(column for kinds, column in _PLAIN if any(kind(declared) for kind in kinds))

    def compared(self, expression: str, declared: pa.DataType) -> str:
        if pa.types.is_string(declared) or pa.types.is_large_string(declared):
            return f'({expression}) COLLATE "C"'
        return expression


_PLAIN = (
    ((pa.types.is_boolean,), "boolean"),
    ((pa.types.is_floating,), "double precision"),
    ((pa.types.is_string, pa.types.is_large_string), "text"),
    ((pa.types.is_binary, pa.types.is_large_binary), "bytea"),
    ((pa.types.is_date,), "date"),
)


class _UtcLoader(TimestamptzBinaryLoader):
    """Loads moments in UTC, independent of the session's time zone."""

    def __init__(self, oid: int, context: Any = None) -> None:
        super().__init__(oid, None)


class _Connections:
    """The idle connections of this process, and cached facts about the servers, by address."""

    def __init__(self) -> None:
        self._idle: dict[str, list[psycopg.Connection[Any]]] = {}
        self._homes: dict[str, str] = {}
        self._identities: dict[str, tuple[str, str]] = {}
        self._lock = threading.Lock()
        self._process = os.getpid()

    def take(self, dsn: str) -> psycopg.Connection[Any]:
        with self._lock:
            if self._process != os.getpid():  # after a fork: these belong to the parent
                self._idle.clear()
                self._process = os.getpid()
            idle = self._idle.get(dsn, [])
            while idle:
                connection = idle.pop()
                if not _was_ended(connection):
                    return connection
                _close(connection)
        return _connect(dsn)

    def give_back(self, dsn: str, connection: psycopg.Connection[Any]) -> None:
        usable = not connection.closed and connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        with self._lock:
            idle = self._idle.setdefault(dsn, [])
            if usable and len(idle) < _IDLE_CONNECTIONS:
                idle.append(connection)
                return
        _close(connection)

    def close(self, dsn: str) -> None:
        with self._lock:
            closing = self._idle.pop(dsn, [])
        for each in closing:
            _close(each)

    def default_schema(self, dsn: str, connection: psycopg.Connection[Any]) -> str:
        """The first schema of the user's search path, even if another client of a pooler has
        changed it in this session. Raises ``ConfigError`` if there is none."""
        if dsn not in self._homes:
            with connection.transaction():
                connection.execute("SET LOCAL search_path TO DEFAULT")
                (found,) = connection.execute("SELECT current_schema()").fetchone() or (None,)
            if found is None or set(found) & set('%"'):
                reason = "no schema of the user's search path exists" if found is None else f"the name {found!r}"
                raise ConfigError(f"{reason} cannot be used: name a schema, as in schema='public'")
            self._homes[dsn] = found
        return self._homes[dsn]

    def identity(self, dsn: str, connection: Any) -> tuple[str, str]:
        if dsn not in self._identities:
            self._identities[dsn] = identity(ungrouped(connection))
        return self._identities[dsn]


def _connect(dsn: str) -> psycopg.Connection[Any]:
    settings = {
        "connect_timeout": CONNECT_TIMEOUT_S,
        "tcp_user_timeout": TCP_TIMEOUT_MS,
        "application_name": "ratchet",
        **conninfo.conninfo_to_dict(dsn),
        "client_encoding": "UTF8",
    }
    connection = psycopg.connect(autocommit=True, prepare_threshold=None, **settings)  # type: ignore[arg-type]
    connection.adapters.register_loader("timestamptz", _UtcLoader)
    # the text form depends on a setting of the session
    connection.adapters.register_dumper(bytes, BytesBinaryDumper)
    return connection


def _was_ended(connection: psycopg.Connection[Any]) -> bool:
    """Whether the server, or a pooler, has ended an idle connection: an idle connection receives
    nothing else."""
    if connection.closed:
        return True
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def _close(connection: psycopg.Connection[Any]) -> None:
    with suppress(psycopg.Error):
        connection.close()


def _begin() -> tuple[str, str]:
    """The statements that begin a writing sql_txn.

    Without ``array_nulls``, a null in a batch would become the text NULL. With ``row_security``
    off, a policy that hides rows is an error, because a sweep would miss hidden rows.
    """
    return (
        "BEGIN ISOLATION LEVEL READ COMMITTED",
        f"SELECT set_config('idle_in_transaction_session_timeout', '{IDLE_TIMEOUT_MS}', true), "
        f"set_config('lock_timeout', least({LOCK_TIMEOUT_MS}, nullif(floor(extract(epoch FROM "
        "current_setting('statement_timeout')::interval) * 500), 0)::int)::text, true), "
        "set_config('synchronous_commit', replace(current_setting('synchronous_commit'), 'off', 'on'), true), "
        "set_config('array_nulls', 'on', true), set_config('row_security', 'off', true)",
    )


_connections = _Connections()
SIZE = StatementSize(_STATEMENT_ROWS)


class PostgresTableBase(SqlTableBase):
    """A table of a PostgreSQL database."""

    dialect = PostgresDialect()
    reach = Reach.NETWORK
    _keep_header = " FOR SHARE"
    _own_header = " FOR UPDATE"
    #: The connection of a reader at one moment.
    _pinned: psycopg.Connection[Any] | None = None

    def _open_at(self, dsn: str, schema: str | None) -> None:
        self._dsn = resolved_address(_ADDRESS, dsn, "/")
        try:
            self._address = conninfo.conninfo_to_dict(self._dsn)
        except psycopg.ProgrammingError as error:
            raise ConfigError(f"{_ADDRESS} does not parse: {_without_secrets(error, self._dsn)}") from None
        self._schema = identifier(schema, "schema") if schema is not None else None
        self._home = schema or ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.location})"

    @property
    def location(self) -> str:
        found = self._address
        where = f"{shown_host(str(found.get('host', 'localhost')))}:{found.get('port', 5432)}/{found.get('dbname', '')}"
        table = f"{self._schema}.{self._table}" if self._schema is not None else self._table
        return f"table {table!r} of PostgreSQL at {where}"

    def close(self) -> None:
        _connections.close(self._dsn)

    def raise_header(self, expected: Header, new: Header) -> None:
        self._within_limits("header", 1, partial(super().raise_header, expected, new))

    def _within_limits(self, work: str, rows: int, do: Callable[[], T]) -> T:
        """Run ``do``, and repeat it with fewer rows per statement when a limit of the server has
        ended it."""
        name = f"{work} {self._table}"
        while True:
            try:
                done = do()
            except LimitReached as error:
                if self._pinned is not None:
                    raise
                with self._connected() as connection:
                    limit = limit_of(connection, error)
                if limit is None:  # the statement was cancelled by a user
                    raise
                if SIZE.halve(self._dsn, rows, error):
                    continue
                text = f"{error}; {limit}"
                raise (ConfigError if SIZE.failed(self._dsn, name) else RetryableError)(text) from error
            SIZE.succeeded(self._dsn, name)
            return done

    @contextmanager
    def _connected(self) -> Iterator[psycopg.Connection[Any]]:
        if self._pinned is not None:
            with self._named_errors():
                yield self._pinned
            return
        connection: psycopg.Connection[Any] | None = None
        try:
            try:
                connection = _connections.take(self._dsn)
                self._settle(connection)
                yield connection
            except psycopg.Error as error:
                # the address may lead to another server now
                if error.sqlstate == _READ_ONLY and connection is not None:
                    _close(connection)
                    self.close()
                raise self._named(error) from error
        finally:
            if connection is not None:
                _connections.give_back(self._dsn, connection)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise self._named(error) from error

    def _settle(self, connection: psycopg.Connection[Any]) -> None:
        """Find out in which schema the tables are."""
        if not self._home:
            self._home = _connections.default_schema(self._dsn, connection)

    @contextmanager
    def at_one_moment(self) -> Iterator[Self]:
        """In a sql_txn that only reads, so it blocks no other client."""
        with self._connected() as connection:
            reader = copy.copy(self)
            connection.execute(
                "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET LOCAL idle_in_transaction_session_timeout = 0"
            )
            try:
                reader._pinned = connection
                yield reader
            finally:
                with suppress(psycopg.Error):
                    connection.execute("ROLLBACK")

    def _stored(self, value: Any, declared: pa.DataType) -> Any:
        if pa.types.is_duration(declared):
            return pa.scalar(value, declared).value
        return value

    def _keeps(self, declared: pa.DataType) -> bool:
        types = pa.types
        return not (types.is_duration(declared) or types.is_uint64(declared) or types.is_floating(declared))

    def _loaded(self, value: Any, declared: pa.DataType) -> Any:
        if pa.types.is_duration(declared):
            return pa.scalar(value, declared).as_py()
        if pa.types.is_uint64(declared):
            return int(value)
        return NAN if pa.types.is_floating(declared) and value != value else value

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        with self._connected() as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        with self._connected() as connection:
            connection.execute("; ".join(_begin()))
            try:
                yield connection
            except BaseException:
                with suppress(psycopg.Error):
                    connection.execute("ROLLBACK")
                raise
            try:
                ended = connection.execute("COMMIT").statusmessage
            except psycopg.OperationalError as error:
                raise CommitOutcomeUnknown(f"{self.location}: {_line(error)}") from error
            self._check_commit(ended)

    @contextmanager
    def _writing_grouped(self) -> Iterator[Any]:
        """The statements that begin and end the sql_txn travel with the others."""
        committing = False
        with self._connected() as connection:
            try:
                with StatementGroup(connection) as group:
                    for each in _begin():
                        group.execute(each)
                    yield group
                    committing = True
                    ended = group.execute("COMMIT")
            except BaseException as error:
                with suppress(psycopg.Error):
                    connection.execute("ROLLBACK")
                if committing and isinstance(error, psycopg.OperationalError) and _lost(error):
                    raise CommitOutcomeUnknown(f"{self.location}: {_line(error)}") from error
                raise
            self._check_commit(ended.statusmessage)

    def _check_commit(self, answer: str | None) -> None:
        if answer != "COMMIT":
            raise RetryableError(f"{self.location}: the database answered COMMIT by {answer}")

    @contextmanager
    def _denied(self, right: str) -> Iterator[None]:
        try:
            yield
        except psycopg.errors.InsufficientPrivilege as error:
            raise self._may_not(right) from error

    def _may_not(self, right: str) -> ConfigError:
        user = self._address.get("user", "the user")
        return ConfigError(f"{self.location}: {user!r} may not do what is needed: grant {right}")

    def _probe(self, connection: Any, *, exists: bool) -> None:
        standby, read_only = connection.execute(
            "SELECT pg_is_in_recovery(), current_setting('transaction_read_only')"
        ).fetchone()
        if standby or read_only == "on":
            raise ConfigError(
                f"{self.location} cannot be written: the server is {'a standby' if standby else 'read-only'}; give the "
                "address of the primary"
            )
        untold = _connections.identity(self._dsn, connection)[1]
        names = {table: qualified(self._home, table) for table in (self._table, HEADERS_TABLE)}
        for reason, advice in losses(connection, names, untold):
            self._may_lose_writes(reason, advice)
        for table in (*([self._table] if exists else []), HEADERS_TABLE):
            for right in ("SELECT", "INSERT", "UPDATE", "DELETE"):
                query = "SELECT has_table_privilege(to_regclass(%s), %s)"
                (granted,) = connection.execute(query, (qualified(self._home, table), right)).fetchone()
                if granted is False:
                    raise self._may_not(f"{right} on table {table}")

    def _create_headers(self, connection: Any) -> None:
        if connection.execute("SELECT to_regclass(%s)", (self._headers.name,)).fetchone()[0] is None:
            with self._creating(connection):
                super()._create_headers(connection)

    @contextmanager
    def _creating(self, connection: Any) -> Iterator[None]:
        """Only one client of a database creates tables at a time: ``IF NOT EXISTS`` does not see
        the uncommitted tables of others."""
        ungrouped(connection).execute("SELECT pg_advisory_xact_lock(%s)", (_CREATING,))
        with self._denied("CREATE on the schema"):
            yield

    def _select(self, connection: Any, statement: str) -> Any:
        try:
            return super()._select(connection, statement)
        except psycopg.errors.LockNotAvailable:
            if statement.endswith(self._own_header):
                self._end_stuck_writers(connection)
            raise

    def _is_unique(self, connection: Any, table: str, columns: Iterable[str]) -> bool:
        """Whether a key or an index makes these columns of a table unique."""
        query = (
            "SELECT 1 FROM pg_index WHERE indrelid = to_regclass(%s) AND indisunique AND indisvalid AND indimmediate "
            'AND indpred IS NULL AND indexprs IS NULL AND (SELECT array_agg(attname::text ORDER BY attname::text COLLATE "C") '
            "FROM pg_attribute WHERE attrelid = indrelid AND attnum = ANY(indkey[0:indnkeyatts - 1])) = %s::text[]"
        )
        return connection.execute(query, (table, sorted(columns))).fetchone() is not None

    def _store(self, connection: Any) -> str:
        return _connections.identity(self._dsn, connection)[0]

    def _end_stuck_writers(self, connection: Any) -> None:
        """End the sessions that hold the header and send nothing.

        The database does not treat a writer that stopped in the middle of a statement as idle, and
        would wait for it for ever. Called when another attempt has waited for the header in vain.
        Ends the sql_txn first, because a pooler may have no second session for this."""
        with suppress(psycopg.Error):
            ungrouped(connection)
        with suppress(psycopg.Error):
            connection.execute("ROLLBACK")
            connection.execute(
                "SELECT pg_terminate_backend(activity.pid) FROM pg_stat_activity AS activity "
                "JOIN pg_locks AS held ON held.pid = activity.pid AND held.granted "
                "WHERE held.relation = to_regclass(%s) AND held.mode = 'RowShareLock' AND activity.usename = current_user "
                "AND activity.application_name = current_setting('application_name') "
                "AND activity.pid <> pg_backend_pid() AND activity.wait_event = 'ClientRead' "
                "AND activity.xact_start < now() - %s * interval '1 millisecond'",
                (self._headers.name, LOCK_TIMEOUT_MS),
            )

    def _named(self, error: psycopg.Error) -> Exception:
        text = f"{self.location}: {_line(error)}"
        state = error.sqlstate or ""
        if _STATEMENT_POOLING in text:
            return ConfigError(f"{text}; the pooler must keep a session for a transaction: set pool_mode = transaction")
        if state in SETTINGS:
            return reached(text, state)
        if state.startswith(_PASSING) or (state == "23505" and self._created_by_another(error)):
            return RetryableError(text)
        if state.startswith(_VALUES) or isinstance(error, psycopg.DataError):
            return BadRecordError(f"{text}; this value cannot be stored as it is")
        if state.startswith("28") or state in ("3D000", "3F000", "42501"):
            return ConfigError(f"{text}; check the address, the user and its rights")
        if not state and any(words in text for words in _REFUSALS):
            return ConfigError(f"{text}; check the address, the user and the password")
        if not state and isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)):
            return RetryableError(text)  # the connection failed
        if state in ("XX001", "XX002"):
            return CorruptStateError(f"{text}; restore the database from a backup")
        return ConfigError(f"{text}; this does not pass by itself: look at the database, then run the topology again")

    @staticmethod
    def _created_by_another(error: psycopg.Error) -> bool:
        """Whether another client has just created the same table or header."""
        return error.diag.schema_name == "pg_catalog" or error.diag.table_name == HEADERS_TABLE


def _without_secrets(error: Exception, dsn: str) -> str:
    return (
        _line(error) if "@" not in dsn and "password" not in dsn else "check its form, postgresql://user@host/database"
    )


def _lost(error: psycopg.Error) -> bool:
    """Whether the connection failed, or the server ended it."""
    return error.sqlstate is None or error.sqlstate.startswith(("08", "57P"))


def _line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
