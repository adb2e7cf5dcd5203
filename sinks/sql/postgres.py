"""Stamped rows in PostgreSQL: many tasks write at a time, and any client of the database can read
the columns.

Every write is one sql_txn that locks the header: shared to write rows, exclusive to change the
header (C1). A batch goes as arrays, one per column, into ``INSERT .. ON CONFLICT DO UPDATE``.

A pooler may give each sql_txn another session of the server (ADR 78). So nothing is left to the
session: names carry their schema, settings are local to the sql_txn, there are no temporary tables
and no prepared statements, and locks end with the sql_txn.
"""

from __future__ import annotations

import copy
import os
import select
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from framework.config import resolved_address
from framework.errors import (
    BadRecordError,
    CommitOutcomeUnknown,
    ConfigError,
    CorruptStateError,
    RetryableError,
)
from framework.topology import REBUILT, Fields, Header, Reach, Stamp, ValueType
from framework.topology.canonical import NAN, python_values
from sinks.aggregates import Aggregate
from sinks.backend import Key, MapBackend, Row
from sinks.plain_values import check_storable
from sinks.refusals import explained, refused_row
from sinks.sql.backend import SqlBackend, SqlRollBack, Upsert
from sinks.sql.postgres_limits import SETTINGS, LimitReached, StatementSize, limit_of, reached
from sinks.sql.postgres_rows import first_nul, long_keys
from sinks.sql.postgres_server import identity, losses
from sinks.sql.schema import HEADERS_TABLE, Dialect, identifier, qualified

try:
    import psycopg
    from psycopg import conninfo
    from psycopg.types.datetime import TimestamptzBinaryLoader
    from psycopg.types.string import BytesBinaryDumper
except ImportError as error:  # an extra
    raise ConfigError("PostgresBackend needs the package psycopg: pip install 'ratchet-pipelines[postgres]'") from error

T = TypeVar("T")

_ADDRESS = "the address of a PostgresBackend"
#: How long an idle sql_txn may hold the header, and how long another one waits for the lock (at
#: most half of the time that the server allows for a statement).
IDLE_TIMEOUT_MS = 10_000
LOCK_TIMEOUT_MS = 10_000
CONNECT_TIMEOUT_S = 10
#: How long an exchange of two tables waits for those who read them.
RENAME_TIMEOUT_MS = 2_000
#: How long sent bytes may stay unacknowledged before the connection is given up.
TCP_TIMEOUT_MS = 15_000
#: Connections kept per process and database.
_IDLE_CONNECTIONS = 4
#: Rows and bytes of a batch that go into one statement.
_STATEMENT_ROWS = 20_000
_STATEMENT_BYTES = 16 * 2**20
#: What the server, or a pooler, answers to a client that it will refuse every time.
_REFUSALS = (
    *("authentication failed", "no pg_hba.conf entry", "no password supplied", "does not exist", "certificate"),
    *("does not support SSL", "unsupported startup parameter"),
)
#: What a pooler answers that gives each statement another session.
_STATEMENT_POOLING = "statement pooling mode"
#: The SQLSTATE of a write to a server that is read-only. At the start it is refused; later it means
#: that another server is becoming the primary.
_READ_ONLY = "25006"
#: SQLSTATE classes and codes of errors that pass by themselves, or when there is room again:
#: connections, serialization and deadlocks, resources, locks, timeouts and restarts, the disk, and
#: a table that another client has just created.
_PASSING = (
    *("08", "40", "53", "55006", "55P03", "25P03", "57P01", "57P02", "57P03", "57P05"),
    *("58000", "58030", "42P07"),
    _READ_ONLY,
)
#: The key of the advisory lock for creating tables: any number that nobody else uses.
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


#: The statements that take from a table, once it is called ``name``, all rights that its users
#: have. Parameters: rebuilt, name.
_REVOKED = """
SELECT DISTINCT format('REVOKE ALL ON %%s FROM %%s', %(name)s::text,
                       CASE WHEN grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END)
FROM pg_class, aclexplode(relacl) WHERE pg_class.oid = to_regclass(%(rebuilt)s) AND grantee <> relowner
"""
#: The statements that give it the rights that others have on ``table``, and its comment.
_GRANTED = """
SELECT format('GRANT %%s ON %%s TO %%s%%s', privilege_type, %(name)s::text,
              CASE WHEN grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END,
              CASE WHEN is_grantable THEN ' WITH GRANT OPTION' ELSE '' END)
FROM pg_class, aclexplode(relacl) WHERE pg_class.oid = to_regclass(%(table)s) AND grantee <> relowner
UNION ALL
SELECT format('COMMENT ON TABLE %%s IS %%L', %(name)s::text, obj_description(to_regclass(%(table)s)::oid, 'pg_class'))
WHERE obj_description(to_regclass(%(table)s)::oid, 'pg_class') IS NOT NULL
"""
#: A view of this user's without options, and its text. Parameter: its name.
_PLAIN_VIEW = """
SELECT oid, pg_get_viewdef(oid) FROM pg_class WHERE oid = to_regclass(%s) AND relkind = 'v' AND reloptions IS NULL
    AND pg_has_role(relowner, 'USAGE')
"""
#: What stays with a table that is renamed, and what else keeps this user from renaming it.
#: Parameters: table, view (the oid of that of its live rows, which is replaced).
_IN_THE_WAY = """
WITH own AS (SELECT *, pg_class.oid AS own_oid FROM pg_class WHERE oid = to_regclass(%(table)s))
SELECT 'its owner, ' || pg_get_userbyid(relowner) || ', who alone may rename it: rebuild it as that user' FROM own
    WHERE NOT pg_has_role(relowner, 'USAGE') OR relowner <> (SELECT oid FROM pg_roles WHERE rolname = current_user)
UNION ALL SELECT DISTINCT 'view ' || pg_rewrite.ev_class::regclass::text FROM pg_depend
    JOIN pg_rewrite ON pg_rewrite.oid = objid, own
    WHERE classid = 'pg_rewrite'::regclass AND refobjid = own_oid AND ev_class NOT IN (%(view)s::oid, own_oid)
UNION ALL SELECT 'rule ' || rulename FROM pg_rewrite, own WHERE ev_class = own_oid
UNION ALL SELECT 'function ' || objid::regprocedure::text FROM pg_depend, own
    WHERE classid = 'pg_proc'::regclass AND refobjid = own_oid
UNION ALL SELECT 'trigger ' || tgname FROM pg_trigger, own WHERE tgrelid = own_oid AND NOT tgisinternal
UNION ALL SELECT 'foreign key ' || conname FROM pg_constraint, own
    WHERE contype = 'f' AND (confrelid = own_oid OR conrelid = own_oid)
UNION ALL SELECT 'policy ' || polname FROM pg_policy, own WHERE polrelid = own_oid
UNION ALL SELECT 'row level security' FROM own WHERE relrowsecurity
UNION ALL SELECT 'publication ' || pubname FROM pg_publication_rel JOIN pg_publication ON pg_publication.oid = prpubid, own
    WHERE prrelid = own_oid
UNION ALL SELECT 'inheritance of ' || inhparent::regclass::text || ' by ' || inhrelid::regclass::text FROM pg_inherits, own
    WHERE own_oid IN (inhparent, inhrelid)
UNION ALL SELECT 'rights on column ' || attname FROM pg_attribute, own WHERE attrelid = own_oid AND attacl IS NOT NULL
UNION ALL SELECT 'its replica identity' FROM own WHERE relreplident <> 'd'
UNION ALL SELECT 'its storage parameters' FROM own WHERE reloptions IS NOT NULL
"""
#: A row if both tables are there, and do not have as many indexes. Parameters: table, rebuilt.
_HAS_OTHER_INDEXES = """
SELECT 1 WHERE to_regclass(%(rebuilt)s) IS NOT NULL
    AND (SELECT count(*) FROM pg_index WHERE indrelid = to_regclass(%(table)s))
     <> (SELECT count(*) FROM pg_index WHERE indrelid = to_regclass(%(rebuilt)s))
"""


class _UtcLoader(TimestamptzBinaryLoader):
    """Loads moments in UTC, whatever the time zone of the session."""

    def __init__(self, oid: int, context: Any = None) -> None:
        super().__init__(oid, None)


class _Connections:
    """The idle connections of this process, and what it knows of the servers, by address."""

    def __init__(self) -> None:
        self._idle: dict[str, list[psycopg.Connection[Any]]] = {}
        self._homes: dict[str, str] = {}
        self._identities: dict[str, tuple[str, str]] = {}
        self._lock = threading.Lock()
        self._process = os.getpid()

    def take(self, dsn: str) -> psycopg.Connection[Any]:
        with self._lock:
            if self._process != os.getpid():  # after a fork: these are the parent's
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

    def home(self, dsn: str, connection: psycopg.Connection[Any]) -> str:
        """The first schema of the user's search path, whatever another client of a pooler has set
        in this session. Raises ``ConfigError`` where there is none."""
        if dsn not in self._homes:
            with connection.transaction():
                connection.execute("SET LOCAL search_path TO DEFAULT")
                (found,) = connection.execute("SELECT current_schema()").fetchone() or (None,)
            if found is None or set(found) & set('%"'):
                reason = "no schema of the user's search path exists" if found is None else f"the name {found!r}"
                raise ConfigError(f"{reason} cannot be used: name a schema, as in PostgresBackend(..., schema=...)")
            self._homes[dsn] = found
        return self._homes[dsn]

    def identity(self, dsn: str, connection: psycopg.Connection[Any]) -> tuple[str, str]:
        if dsn not in self._identities:
            self._identities[dsn] = identity(connection)
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
    connection.adapters.register_dumper(bytes, BytesBinaryDumper)  # the text form depends on a setting of the session
    return connection


def _was_ended(connection: psycopg.Connection[Any]) -> bool:
    """Whether the server, or a pooler, has ended an idle connection, which is all that it says to
    one."""
    if connection.closed:
        return True
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def _close(connection: psycopg.Connection[Any]) -> None:
    with suppress(psycopg.Error):
        connection.close()


def _begin() -> str:
    """The statements that begin a sql_txn that writes, in one exchange.

    Without ``array_nulls``, a null in a batch would be the text NULL. Without ``row_security``, a
    policy that hides rows is an error: hidden rows would be left out of a sweep.
    """
    return (
        "BEGIN ISOLATION LEVEL READ COMMITTED; "
        f"SELECT set_config('idle_in_transaction_session_timeout', '{IDLE_TIMEOUT_MS}', true), "
        f"set_config('lock_timeout', least({LOCK_TIMEOUT_MS}, nullif(floor(extract(epoch FROM "
        "current_setting('statement_timeout')::interval) * 500), 0)::int)::text, true), "
        "set_config('synchronous_commit', replace(current_setting('synchronous_commit'), 'off', 'on'), true), "
        "set_config('array_nulls', 'on', true), set_config('row_security', 'off', true)"
    )


_connections = _Connections()
_size = StatementSize(_STATEMENT_ROWS)


class PostgresBackend(SqlBackend):
    """A table of a PostgreSQL database.

    ``dsn``: a libpq address, ``postgresql://user@host:5432/database`` or ``host=... dbname=...``.
    ``${NAME}`` in it stands for an environment variable. libpq's own ``PGPASSWORD``, ``~/.pgpass``
    and services work as usual. Raises ``ConfigError`` for an address that does not parse.
    ``table``: created when missing, checked otherwise. ``schema``: where the table is; by default
    the first schema of the user's search path. ``key`` and ``value``: the typed columns; when left
    out, a ``StateCommitter`` takes them from its input.

    Integers are stored as ``bigint``, unsigned 64-bit integers as ``numeric(20,0)``, durations as
    ``bigint`` in their unit. The user needs SELECT, INSERT, UPDATE and DELETE on the table and on
    ``_ratchet_headers``, and CREATE on the schema if one of these tables is missing. With CREATE,
    it also gets the view ``<table>_live`` of the rows that are not deleted; then ``DROP TABLE``
    needs ``CASCADE``. The address may lead to a pooler, such as PgBouncer, that gives each
    transaction another session.
    """

    dialect = PostgresDialect()
    reach = Reach.NETWORK
    _keep_header = " FOR SHARE"
    _own_header = " FOR UPDATE"
    #: Arrow makes the arrays of batches of at least this many rows; below, its calls cost more.
    _columnar_from_rows = 50
    #: The connection of a reader of one moment.
    _pinned: psycopg.Connection[Any] | None = None

    def __init__(
        self,
        dsn: str,
        table: str,
        key: Fields | None = None,
        value: Fields | None = None,
        *,
        schema: str | None = None,
    ) -> None:
        self._dsn = resolved_address(_ADDRESS, dsn, "/")
        try:
            self._address = conninfo.conninfo_to_dict(self._dsn)
        except psycopg.ProgrammingError as error:
            raise ConfigError(f"{_ADDRESS} does not parse: {_without_secrets(error, self._dsn)}") from None
        self._schema = identifier(schema, "schema") if schema is not None else None
        self._home = schema or ""
        super().__init__(table, key, value)

    def __repr__(self) -> str:
        return f"PostgresBackend({self.location})"

    @property
    def location(self) -> str:
        found = self._address
        where = f"{found.get('host', 'localhost')}:{found.get('port', 5432)}/{found.get('dbname', '')}"
        table = f"{self._schema}.{self._table}" if self._schema is not None else self._table
        return f"table {table!r} of PostgreSQL at {where}"

    @contextmanager
    def at_one_moment(self) -> Iterator[MapBackend]:
        """In a sql_txn that reads; it holds up nobody."""
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

    def close(self) -> None:
        _connections.close(self._dsn)

    # --- in statements that the server allows -----------------------------------------------------

    def raise_header(self, expected: Header, new: Header) -> None:
        self._within_limits("header", 1, partial(super().raise_header, expected, new))

    def multi_get(self, keys: Sequence[Key]) -> list[Row | None]:
        return self._within_limits("get", len(keys), partial(super().multi_get, keys))

    def multi_put(
        self, header: Header, keys: Sequence[Key], expected_stamps: Sequence[Stamp | None], rows: Sequence[Row]
    ) -> None:
        self._within_limits("put", 1, partial(super().multi_put, header, keys, expected_stamps, rows))

    def check_rows(self, deltas: pa.Table) -> None:
        key = tuple(self.shape.key)
        if (found := first_nul(deltas)) is not None:
            row = deltas.slice(found[0], 1)
            values = {name: python_values(row.column(name))[0] for name in {*key, found[1]}}
            own = {name: values.pop(name) for name in key}
            error = BadRecordError(f"{self.location}: PostgreSQL stores no text with a NUL (0x00)")
            raise explained(error, own, values, lambda name: not name and found[1] not in key)
        if keys := long_keys(deltas, key):
            with (
                self._explaining(partial(self._refused_long_key, keys)),
                suppress(SqlRollBack),
                self._writing() as each,
            ):
                self._insert_keys(each, keys)
                raise SqlRollBack

    def _refused_long_key(self, keys: Sequence[Key], error: BadRecordError) -> BadRecordError:
        found = refused_row(
            len(keys), lambda first, end: self._accepts(lambda each: self._insert_keys(each, keys[first:end]))
        )
        if found is None:
            return error
        return explained(error, dict(zip(self.shape.key, keys[found], strict=True)), {}, lambda _: False)

    def _insert_keys(self, connection: Any, keys: Sequence[Key]) -> None:
        """Insert keys into a copy of the table's index, for this sql_txn. Does nothing where the
        user may not create it: then the commit finds what is refused."""
        (may,) = connection.execute("SELECT has_database_privilege(current_database(), 'TEMP')").fetchone()
        if not may:
            return
        names = ", ".join(f'"{name}"' for name in self.shape.key)
        connection.execute(
            f"CREATE TEMP TABLE _ratchet_keys ON COMMIT DROP AS SELECT {names} FROM {self.shape.name} WITH NO DATA"
        )
        connection.execute(f"ALTER TABLE pg_temp._ratchet_keys ADD PRIMARY KEY ({names})")
        marks = ", ".join([self.dialect.mark] * len(self.shape.key))
        connection.cursor().executemany(
            f"INSERT INTO pg_temp._ratchet_keys VALUES ({marks})", [self._stored_key(each) for each in keys]
        )

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
        apply = super().apply

        def do() -> pa.Table | None:
            return apply(header, writer, value_type, deltas, aggregates, want_values=want_values)

        return self._within_limits("apply", deltas.num_rows, do)

    def _changed_under(
        self,
        header: Header,
        statement: str,
        parameters: tuple[Any, ...],
        left: tuple[str, tuple[Any, ...]] | None = None,
    ) -> int:
        return self._within_limits("change", 1, partial(super()._changed_under, header, statement, parameters, left))

    def _within_limits(self, work: str, rows: int, do: Callable[[], T]) -> T:
        """Do something, and repeat it with fewer rows per statement when a limit of the server has
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
                if limit is None:  # somebody has cancelled the statement
                    raise
                if _size.halve(self._dsn, rows, error):
                    continue
                text = f"{error}; {limit}"
                raise (ConfigError if _size.failed(self._dsn, name) else RetryableError)(text) from error
            _size.succeeded(self._dsn, name)
            return done

    # --- inside -----------------------------------------------------------------------------------

    @contextmanager
    def _connected(self) -> Iterator[psycopg.Connection[Any]]:
        if self._pinned is not None:
            try:
                yield self._pinned
            except psycopg.Error as error:
                raise self._named(error) from error
            return
        connection: psycopg.Connection[Any] | None = None
        try:
            try:
                connection = _connections.take(self._dsn)
                self._settle(connection)
                yield connection
            except psycopg.Error as error:
                if error.sqlstate == _READ_ONLY and connection is not None:  # the address may lead elsewhere by now
                    _close(connection)
                    self.close()
                raise self._named(error) from error
        finally:
            if connection is not None:
                _connections.give_back(self._dsn, connection)

    def _settle(self, connection: psycopg.Connection[Any]) -> None:
        """Find out in which schema the tables are."""
        if not self._home:
            self._home = _connections.home(self._dsn, connection)
            if self._shape is not None:
                self._shape = replace(self._shape, schema=self._home)

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        with self._connected() as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        with self._connected() as connection:
            connection.execute(_begin())
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
            if ended != "COMMIT":
                raise RetryableError(f"{self.location}: the database answered COMMIT by {ended}")

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

    def _create_table(self, connection: Any) -> None:
        with self._creating(connection):
            if self._model:  # with the indexes that others have made
                model = qualified(self._home, self._model)
                connection.execute(f"CREATE TABLE {self.shape.name} (LIKE {model} INCLUDING ALL)")
            else:
                super()._create_table(connection)

    def _in_the_way(self, connection: Any) -> list[str]:
        names = {"table": self.shape.name, "rebuilt": self.beside(REBUILT).shape.name}
        found = [name for (name,) in connection.execute(_IN_THE_WAY, {**names, "view": self._own_view(connection)})]
        if not found and connection.execute(_HAS_OTHER_INDEXES, names).fetchone() is not None:
            found = [
                "an index that was made or dropped after the rebuild began: ratchet rebuild --clean, then begin anew"
            ]
        return found

    def _own_view(self, connection: Any) -> int:
        """The view of the live rows, if it is still as Ratchet made it; 0: there is none, or
        somebody has changed it."""
        view = self.shape.live_view
        if view is None:
            return 0
        found = connection.execute(_PLAIN_VIEW, (qualified(self._home, view),)).fetchone()
        if found is None:
            return 0
        probe = qualified(self._home, "_ratchet_probe")
        with self._denied("CREATE on the schema"), connection.transaction(force_rollback=True):
            connection.execute(self.shape.live_view_ddl().replace(qualified(self._home, view), probe, 1))
            (text,) = connection.execute("SELECT pg_get_viewdef(%s::regclass)", (probe,)).fetchone()
        return int(found[0]) if found[1] == text else 0

    def _lock_briefly(self, connection: Any) -> None:
        connection.execute("SELECT set_config('lock_timeout', %s, true)", (str(RENAME_TIMEOUT_MS),))

    def _rename(self, connection: Any, former: str, rebuilt: str) -> None:
        view = self._own_view(connection)
        table, other = self.shape.name, qualified(self._home, rebuilt)
        names = {"table": table, "rebuilt": other, "name": table}
        taken = connection.execute(_REVOKED, names).fetchall()
        given = connection.execute(_GRANTED, names).fetchall()
        connection.execute(f'ALTER TABLE {table} RENAME TO "{former}"')
        connection.execute(f'ALTER TABLE {other} RENAME TO "{self._table}"')
        for (statement,) in [*taken, *given]:
            connection.execute(statement)
        if view:
            connection.execute(self.shape.live_view_ddl().replace("CREATE VIEW", "CREATE OR REPLACE VIEW", 1))

    def _may_create_view(self, connection: Any, name: str) -> bool:
        def may() -> bool:
            query = "SELECT to_regclass(%s) IS NULL AND has_schema_privilege(%s, 'CREATE')"
            return bool(connection.execute(query, (qualified(self._home, name), self._home)).fetchone()[0])

        if not may():
            return False
        with self._creating(connection):
            return may()

    @contextmanager
    def _creating(self, connection: Any) -> Iterator[None]:
        """Only one client of a database creates tables at a time: ``IF NOT EXISTS`` does not see
        the uncommitted tables of others."""
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (_CREATING,))
        with self._denied("CREATE on the schema"):
            yield

    def _found_columns(self, connection: Any) -> list[tuple[str, str]]:
        query = (
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
            "WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped"
        )
        return [(name, kind) for name, kind in connection.execute(query, (self.shape.name,))]

    def _told_apart(self, connection: Any) -> str:
        table = self.shape.name
        query = (
            "SELECT 1 FROM pg_index WHERE indrelid = to_regclass(%s) AND indisunique AND indisvalid AND indimmediate "
            'AND indpred IS NULL AND indexprs IS NULL AND (SELECT array_agg(attname::text ORDER BY attname::text COLLATE "C") '
            "FROM pg_attribute WHERE attrelid = indrelid AND attnum = ANY(indkey[0:indnkeyatts - 1])) = %s::text[]"
        )
        if connection.execute(query, (table, sorted(self.shape.key))).fetchone() is None:
            return f"has no primary key of {', '.join(self.shape.key)}"
        if connection.execute("SELECT row_security_active(to_regclass(%s))", (table,)).fetchone() == (True,):
            return (
                "has row level security, which hides rows from this user, so that they would begin again from nothing"
            )
        query = (
            "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped "
            "AND (attgenerated <> '' OR attidentity = 'a')"
        )
        generated = connection.execute(query, (table,)).fetchone()
        if generated is not None:
            return f"makes the values of {generated[0]!r} by itself (GENERATED ALWAYS)"
        query = (
            "SELECT attname FROM pg_attribute JOIN pg_collation ON pg_collation.oid = attcollation "
            "WHERE attrelid = to_regclass(%s) AND NOT attisdropped AND NOT collisdeterministic"
        )
        found = connection.execute(query, (table,)).fetchone()
        return f"has a collation for {found[0]!r} that takes different texts for one" if found is not None else ""

    def _select_keys(self, connection: Any, keys: Sequence[Key]) -> Iterator[tuple[Any, ...]]:
        names = ", ".join(f'"{name}"' for name in self.shape.key)
        kinds = dict(self.shape.columns)
        arrays = ", ".join(f"%s::{kinds[name]}[]" for name in self.shape.key)
        query = f"{self.shape.select()} WHERE ({names}) IN (SELECT * FROM unnest({arrays}))"
        rows = _size.rows(self._dsn)
        for start in range(0, len(keys), rows):
            columns = [_array_of(column) for column in zip(*keys[start : start + rows], strict=True)]
            yield from self._fetched(connection, query, columns)

    def _fetched(self, connection: Any, query: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        """In the binary form, which no setting of a session changes."""
        rows: list[tuple[Any, ...]] = connection.execute(query, parameters, binary=True).fetchall()
        return rows

    def _merge(self, connection: Any, upsert: Upsert, deltas: pa.Table, stamp: tuple[Any, ...]) -> int:
        kinds = dict(self.shape.columns)
        arrays = ", ".join(f'unnest(%s::{kinds[name]}[]) AS "{name}"' for name in deltas.column_names)
        statement, changed = upsert.into(self.shape, f"(SELECT {arrays}) AS _given"), 0
        for start in range(0, deltas.num_rows, rows := self._rows_per_statement(deltas)):
            columns = map(self._array, deltas.slice(start, rows).columns, deltas.column_names)
            changed += connection.execute(statement, (*stamp, *columns)).rowcount
        return changed

    def _rows_per_statement(self, deltas: pa.Table) -> int:
        fitting: int = deltas.num_rows * _STATEMENT_BYTES // max(deltas.nbytes, 1)
        return max(min(fitting, _size.rows(self._dsn)), 1)

    def _array(self, column: pa.ChunkedArray, name: str) -> str:
        """The column as the text of an array. Arrow makes those of large batches, and Python those
        of small ones."""
        if len(column) >= self._columnar_from_rows:
            return _array_text(column)
        values = python_values(column, name)
        return _array_of(None if value is None else self._stored(value, column.type) for value in values)

    def _select(self, connection: Any, statement: str) -> Any:
        try:
            return super()._select(connection, statement)
        except psycopg.errors.LockNotAvailable:
            if statement.endswith(self._own_header):
                self._end_stuck_writers(connection)
            raise

    def _store(self, connection: Any) -> str:
        return _connections.identity(self._dsn, connection)[0]

    def _end_stuck_writers(self, connection: Any) -> None:
        """End the sessions that hold the header and send nothing.

        The database does not count a writer that stopped in the middle of a statement as idle, and
        would wait for it forever. Called when another attempt has waited for the header in vain.
        Ends the sql_txn first: a pooler may have no second session for this."""
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

    def _stored(self, value: Any, declared: pa.DataType) -> Any:
        if pa.types.is_duration(declared):
            return pa.scalar(value, declared).value
        return value

    def _loaded(self, value: Any, declared: pa.DataType) -> Any:
        if pa.types.is_duration(declared):
            return pa.scalar(value, declared).as_py()
        if pa.types.is_uint64(declared):
            return int(value)
        return NAN if pa.types.is_floating(declared) and value != value else value

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


def _line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


def _array_of(values: Iterable[Any]) -> str:
    """The text of an array."""
    return f"{{{','.join('NULL' if value is None else _element(value) for value in values)}}}"


def _element(value: Any) -> str:
    """A value as an element of the text of an array."""
    if isinstance(value, bytes):
        text = f"\\x{value.hex()}"
    else:
        text = value.isoformat() if hasattr(value, "isoformat") else str(value)
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _texted(kind: pa.DataType) -> pa.DataType:
    """The type whose texts PostgreSQL takes for the same values. The offset of a zone in hours and
    minutes would lose the seconds that it has in early years."""
    if pa.types.is_duration(kind):
        return pa.int64()
    if pa.types.is_floating(kind):
        return pa.float64()
    return pa.timestamp(kind.unit, "UTC") if pa.types.is_timestamp(kind) and kind.tz is not None else kind


def _array_text(column: pa.ChunkedArray) -> str:
    types, kind = pa.types, column.type
    if types.is_binary(kind) or types.is_large_binary(kind):
        texts = [None if value is None else _element(value) for value in column.to_pylist()]
        column = pa.chunked_array([texts], pa.string())
    elif types.is_string(kind) or types.is_large_string(kind):
        escaped = pc.replace_substring(pc.replace_substring(column, "\\", "\\\\"), '"', '\\"')
        column = pc.binary_join_element_wise('"', escaped, '"', "")
    else:
        column = column.cast(_texted(kind)).cast(pa.string())
    elements = pa.concat_arrays(pc.fill_null(column, "NULL").chunks)
    whole = pa.LargeListArray.from_arrays(pa.array([0, len(elements)], pa.int64()), elements)
    return f"{{{pc.binary_join(whole, ',')[0].as_py()}}}"
