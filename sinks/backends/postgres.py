"""Stamped rows in PostgreSQL: many tasks write at a time, and any client of the database can read
the columns.

Every write is one sql_txn that locks the header: shared to write rows, exclusive to change the
header (C1). A batch goes by COPY into a temporary table, and from there by one
``INSERT .. ON CONFLICT DO UPDATE`` into the state.
"""

from __future__ import annotations

import copy
import io
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv

from framework.config import resolved_address
from framework.errors import (
    BadRecordError,
    CommitOutcomeUnknown,
    ConfigError,
    CorruptStateError,
    RetryableError,
)
from framework.topology import REBUILT, Fields, Reach
from framework.topology.canonical import NAN, python_values
from sinks.backends.backend import Key, MapBackend
from sinks.backends.sql import SqlBackend
from sinks.backends.sql_schema import HEADERS_TABLE, Dialect, identifier
from sinks.plain_values import check_storable

try:
    import psycopg
    from psycopg import conninfo
except ImportError as error:  # an extra
    raise ConfigError("PostgresBackend needs the package psycopg: pip install 'ratchet-pipelines[postgres]'") from error

_ADDRESS = "the address of a PostgresBackend"
#: How long an idle sql_txn may hold the header, and how long another one waits for the lock.
IDLE_TIMEOUT_MS = 10_000
LOCK_TIMEOUT_MS = 10_000
CONNECT_TIMEOUT_S = 10
#: How long an exchange of two tables waits for those who read them.
RENAME_TIMEOUT_MS = 2_000
#: How long sent bytes may stay unacknowledged before the connection is given up.
TCP_TIMEOUT_MS = 15_000
#: Connections kept per process and database.
_IDLE_CONNECTIONS = 4
#: How values travel, whatever the server, the database, the user or the environment set: COPY sends
#: UTF-8, ISO 8601 and hexadecimal bytes, and the server returns every digit.
_FORMS = {
    "client_encoding": "UTF8",
    "timezone": "UTC",
    "DateStyle": "ISO, YMD",
    "extra_float_digits": 1,
    "bytea_output": "hex",
    "standard_conforming_strings": "on",
}
#: What the server answers to a client that it will refuse every time.
_REFUSALS = (
    *("authentication failed", "no pg_hba.conf entry", "no password supplied", "does not exist", "certificate"),
    "does not support SSL",
)
#: SQLSTATE classes and codes of errors that pass by themselves, or when there is room again:
#: connections, serialization and deadlocks, resources, locks, timeouts and restarts, the disk, and
#: a table that another client has just created.
_PASSING = (
    *("08", "40", "53", "55006", "55P03", "25P03", "25P04", "57014", "57P01", "57P02", "57P03", "57P05"),
    *("58000", "58030", "42P07"),
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
    temporary = "pg_temp."
    temporary_options = " ON COMMIT DELETE ROWS"
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


#: The identity of the store: the database cluster, its timeline, and the start time of the server.
#: It changes after a restore, after the promotion of a standby, and after a restart (which may have
#: used a copy of the files).
_SERVER = (
    "(SELECT system_identifier FROM pg_control_system()) || '/' || left(pg_walfile_name(pg_current_wal_lsn()), 8) || '/' || "
    "extract(epoch FROM pg_postmaster_start_time())"
)


#: The statements that take from a table, once it is called ``name``, all rights that its users
#: have. Parameters: rebuilt, name.
_REVOKED = """
SELECT DISTINCT format('REVOKE ALL ON %%I FROM %%s', %(name)s::text,
                       CASE WHEN grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END)
FROM pg_class, aclexplode(relacl) WHERE pg_class.oid = to_regclass(%(rebuilt)s) AND grantee <> relowner
"""
#: The statements that give it the rights that others have on ``table``, and its comment.
_GRANTED = """
SELECT format('GRANT %%s ON %%I TO %%s%%s', privilege_type, %(name)s::text,
              CASE WHEN grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END,
              CASE WHEN is_grantable THEN ' WITH GRANT OPTION' ELSE '' END)
FROM pg_class, aclexplode(relacl) WHERE pg_class.oid = to_regclass(%(table)s) AND grantee <> relowner
UNION ALL
SELECT format('COMMENT ON TABLE %%I IS %%L', %(name)s::text, obj_description(to_regclass(%(table)s)::oid, 'pg_class'))
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
UNION ALL SELECT 'its schema, which is not the first of the search path: name it, as in PostgresBackend(..., schema=...)'
    FROM own WHERE relnamespace <> (SELECT oid FROM pg_namespace WHERE nspname = current_schema())
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


class _Connections:
    """The idle connections of this process, by schema and address."""

    def __init__(self) -> None:
        self._idle: dict[str, list[_Connection]] = {}
        self._lock = threading.Lock()
        self._process = os.getpid()

    def take(self, dsn: str, schema: str | None) -> _Connection:
        with self._lock:
            if self._process != os.getpid():  # after a fork: these are the parent's
                self._idle.clear()
                self._process = os.getpid()
            idle = self._idle.get(f"{schema} {dsn}")
            if idle:
                return idle.pop()
        return _Connection(dsn, schema)

    def give_back(self, connection: _Connection) -> None:
        with self._lock:
            idle = self._idle.setdefault(connection.key, [])
            if not connection.raw.closed and len(idle) < _IDLE_CONNECTIONS:
                idle.append(connection)
                return
        connection.close()

    def close(self, key: str) -> None:
        with self._lock:
            closing = self._idle.pop(key, [])
        for each in closing:
            each.close()


class _Connection:
    """One connection and its temporary tables."""

    def __init__(self, dsn: str, schema: str | None) -> None:
        self.key = f"{schema} {dsn}"
        settings = {
            "connect_timeout": CONNECT_TIMEOUT_S,
            "tcp_user_timeout": TCP_TIMEOUT_MS,
            "application_name": "ratchet",
            **conninfo.conninfo_to_dict(dsn),
        }
        self.raw = psycopg.connect(autocommit=True, **settings)  # type: ignore[arg-type]
        self.staged: set[str] = set()
        settled = {"idle_in_transaction_session_timeout": IDLE_TIMEOUT_MS, "lock_timeout": LOCK_TIMEOUT_MS, **_FORMS}
        self.raw.execute(
            f"SELECT {', '.join(['set_config(%s, %s, false)'] * len(settled))}, set_config('synchronous_commit', CASE "
            "current_setting('synchronous_commit') WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END, false)",
            [str(each) for setting in settled.items() for each in setting],
        )
        if schema is not None:
            self.raw.execute(f'SET search_path TO "{schema}"')

    def close(self) -> None:
        with suppress(psycopg.Error):
            self.raw.close()


_connections = _Connections()


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
    ``_ratchet_headers``, CREATE on the schema if one of these tables is missing, and TEMPORARY on
    the database. With CREATE, it also gets the view ``<table>_live`` of the rows that are not
    deleted; then ``DROP TABLE`` needs ``CASCADE``.
    """

    dialect = PostgresDialect()
    reach = Reach.NETWORK
    _keep_header = " FOR SHARE"
    _own_header = " FOR UPDATE"
    _staged_from_rows = 20  # below, COPY costs more than it saves
    #: The connection of a reader of one moment.
    _pinned: _Connection | None = None

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
        reader = copy.copy(self)
        with self._connected() as connection:
            connection.raw.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            try:
                connection.raw.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
                reader._pinned = connection
                yield reader
            finally:
                with suppress(psycopg.Error):
                    connection.raw.execute("ROLLBACK")

    def close(self) -> None:
        _connections.close(f"{self._schema} {self._dsn}")

    # --- inside -----------------------------------------------------------------------------------

    @contextmanager
    def _connected(self) -> Iterator[_Connection]:
        if self._pinned is not None:
            try:
                yield self._pinned
            except psycopg.Error as error:
                raise self._named(error) from error
            return
        connection: _Connection | None = None
        try:
            try:
                connection = _connections.take(self._dsn, self._schema)
                yield connection
            except psycopg.Error as error:
                raise self._named(error) from error
        finally:
            if connection is not None:
                if connection.raw.closed or connection.raw.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
                    connection.close()
                else:
                    _connections.give_back(connection)

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        with self._connected() as connection:
            yield connection.raw

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        with self._connected() as connection:
            if self._shape is not None:
                self._make_stage(connection)
            raw = connection.raw
            raw.execute("BEGIN")
            try:
                yield raw
            except BaseException:
                with suppress(psycopg.Error):
                    raw.execute("ROLLBACK")
                raise
            try:
                ended = raw.execute("COMMIT").statusmessage
            except psycopg.OperationalError as error:
                raise CommitOutcomeUnknown(f"{self.location}: {_line(error)}") from error
            if ended != "COMMIT":
                raise RetryableError(f"{self.location}: the database answered COMMIT by {ended}")

    def _make_stage(self, connection: _Connection) -> None:
        """Create the temporary table once per connection: it lasts as long as the connection."""
        name = self.shape.stage_name
        if name not in connection.staged:
            with self._denied("TEMPORARY on the database"):
                connection.raw.execute(self.shape.stage_ddl())
            connection.staged.add(name)

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
        self._warn_of_losses(connection)
        for table in (*([self._table] if exists else []), HEADERS_TABLE):
            for right in ("SELECT", "INSERT", "UPDATE", "DELETE"):
                query = "SELECT has_table_privilege(to_regclass(%s), %s)"
                (granted,) = connection.execute(query, (f'"{table}"', right)).fetchone()
                if granted is False:
                    raise self._may_not(f"{right} on table {table}")

    def _warn_of_losses(self, connection: Any) -> None:
        """Log the settings with which the server can lose committed data."""
        settings = {
            setting: connection.execute("SELECT current_setting(%s)", (setting,)).fetchone()[0]
            for setting in ("fsync", "full_page_writes", "synchronous_commit", "synchronous_standby_names")
        }
        for setting in ("fsync", "full_page_writes"):
            if settings[setting] == "off":
                self._may_lose_writes(f"{setting} is off", f"set {setting} = on")
        (followers,) = connection.execute("SELECT count(*) FROM pg_stat_replication").fetchone()
        if followers and (not settings["synchronous_standby_names"] or settings["synchronous_commit"] == "local"):
            self._may_lose_writes(
                f"{followers} standby{'s' if followers > 1 else ''} may follow later than a commit is acknowledged",
                "set synchronous_standby_names, and synchronous_commit = on",
            )
        for table in (self._table, HEADERS_TABLE):
            query = "SELECT relpersistence = 'u' FROM pg_class WHERE oid = to_regclass(%s)"
            if connection.execute(query, (f'"{table}"',)).fetchone() == (True,):
                self._may_lose_writes(f"table {table} is unlogged", f'ALTER TABLE "{table}" SET LOGGED')

    def _create_headers(self, connection: Any) -> None:
        if connection.execute("SELECT to_regclass(%s)", (f'"{HEADERS_TABLE}"',)).fetchone()[0] is None:
            with self._creating(connection):
                super()._create_headers(connection)

    def _create_table(self, connection: Any) -> None:
        with self._creating(connection):
            if self._model:  # with the indexes that others have made
                connection.execute(f'CREATE TABLE "{self._table}" (LIKE "{self._model}" INCLUDING ALL)')
            else:
                super()._create_table(connection)

    def _in_the_way(self, connection: Any) -> list[str]:
        names = {"table": f'"{self._table}"', "rebuilt": f'"{self.beside(REBUILT)._table}"'}
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
        with self._own_sql_txn(connection):
            found = connection.execute(_PLAIN_VIEW, (f'"{view}"',)).fetchone()
            if found is None:
                return 0
            probe = self.shape.live_view_ddl().replace(f'CREATE VIEW "{view}"', "CREATE TEMP VIEW _ratchet_probe", 1)
            connection.execute(probe)
            (text,) = connection.execute("SELECT pg_get_viewdef('pg_temp._ratchet_probe'::regclass)").fetchone()
            connection.execute("DROP VIEW pg_temp._ratchet_probe")
        return int(found[0]) if found[1] == text else 0

    @contextmanager
    def _own_sql_txn(self, connection: Any) -> Iterator[None]:
        """A sql_txn, unless one is open."""
        if connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
            with connection.transaction():
                yield
        else:
            yield

    def _lock_briefly(self, connection: Any) -> None:
        connection.execute("SELECT set_config('lock_timeout', %s, true)", (str(RENAME_TIMEOUT_MS),))

    def _rename(self, connection: Any, former: str, rebuilt: str) -> None:
        view = self._own_view(connection)
        names = {"table": f'"{self._table}"', "rebuilt": f'"{rebuilt}"', "name": self._table}
        taken = connection.execute(_REVOKED, names).fetchall()
        given = connection.execute(_GRANTED, names).fetchall()
        connection.execute(f'ALTER TABLE "{self._table}" RENAME TO "{former}"')
        connection.execute(f'ALTER TABLE "{rebuilt}" RENAME TO "{self._table}"')
        for (statement,) in [*taken, *given]:
            connection.execute(statement)
        if view:
            connection.execute(self.shape.live_view_ddl().replace("CREATE VIEW", "CREATE OR REPLACE VIEW", 1))

    def _may_create_view(self, connection: Any, name: str) -> bool:
        def may() -> bool:
            query = "SELECT to_regclass(%s) IS NULL AND has_schema_privilege(current_schema(), 'CREATE')"
            return bool(connection.execute(query, (f'"{name}"',)).fetchone()[0])

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
        return [(name, kind) for name, kind in connection.execute(query, (f'"{self._table}"',))]

    def _told_apart(self, connection: Any) -> str:
        table = f'"{self._table}"'
        query = (
            "SELECT 1 FROM pg_index WHERE indrelid = to_regclass(%s) AND indisunique AND indisvalid AND indimmediate "
            'AND indpred IS NULL AND indexprs IS NULL AND (SELECT array_agg(attname::text ORDER BY attname::text COLLATE "C") '
            "FROM pg_attribute WHERE attrelid = indrelid AND attnum = ANY(indkey[0:indnkeyatts - 1])) = %s::text[]"
        )
        if connection.execute(query, (table, sorted(self.shape.key))).fetchone() is None:
            return f"has no primary key of {', '.join(self.shape.key)}"
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
        columns = [list(column) for column in zip(*keys, strict=True)]
        yield from connection.execute(
            f"{self.shape.select()} WHERE ({names}) IN (SELECT * FROM unnest({arrays}))", columns
        )

    def _stage(self, connection: Any, deltas: pa.Table) -> None:
        text = io.BytesIO()
        table = pa.table([_copyable(column) for column in deltas.columns], names=deltas.column_names)
        pacsv.write_csv(table, text, pacsv.WriteOptions(include_header=False))
        with connection.cursor().copy(f"COPY {self.shape.stage} FROM STDIN (FORMAT csv)") as stage:
            stage.write(text.getbuffer())

    def _merge(self, connection: Any, statement: str, deltas: pa.Table, stamp: tuple[Any, ...]) -> int:
        columns = [
            [None if value is None else self._stored(value, column.type) for value in python_values(column)]
            for column in deltas.columns
        ]
        cursor = connection.cursor()
        cursor.executemany(statement, [(*row, *stamp) for row in zip(*columns, strict=True)])
        return int(cursor.rowcount)

    def _select(self, connection: Any, statement: str) -> Any:
        try:
            return super()._select(connection, statement)
        except psycopg.errors.LockNotAvailable:
            if statement.endswith(self._own_header):
                self._end_stuck_writers()
            raise

    def _store(self, connection: Any) -> str:
        return _SERVER

    def _end_stuck_writers(self) -> None:
        """End the sessions that hold the header and send nothing.

        The database does not count a writer that stopped in the middle of a statement as idle, and
        would wait for it forever. Called when another attempt has waited for the header in vain."""
        with suppress(psycopg.Error), self._connected() as connection:
            connection.raw.execute(
                "SELECT pg_terminate_backend(activity.pid) FROM pg_stat_activity AS activity "
                "JOIN pg_locks AS held ON held.pid = activity.pid AND held.granted "
                "WHERE held.relation = to_regclass(%s) AND held.mode = 'RowShareLock' AND activity.usename = current_user "
                "AND activity.application_name = current_setting('application_name') "
                "AND activity.pid <> pg_backend_pid() AND activity.wait_event = 'ClientRead' "
                "AND activity.xact_start < now() - %s * interval '1 millisecond'",
                (f'"{HEADERS_TABLE}"', LOCK_TIMEOUT_MS),
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
        if state.startswith(_PASSING) or (state == "23505" and self._created_by_another(error)):
            return RetryableError(text)
        if state.startswith(_VALUES) or isinstance(error, psycopg.DataError):
            return BadRecordError(f"{text}; this value cannot be stored as it is")
        if state.startswith("28") or state in ("3D000", "3F000", "42501", "25006"):
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


def _copyable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column in a type that Arrow's CSV writer writes as PostgreSQL reads it. Arrow quotes
    every text and no null, so the two differ."""
    types, kind = pa.types, column.type
    if types.is_binary(kind) or types.is_large_binary(kind):
        return pa.chunked_array(
            [[None if value is None else "\\x" + value.hex() for value in column.to_pylist()]], pa.string()
        )
    if types.is_duration(kind):
        return column.cast(pa.int64())
    if types.is_floating(kind):
        return column.cast(pa.float64())
    if types.is_decimal(kind):
        return column.cast(pa.string())
    return column
