"""Stamped rows in PostgreSQL: many tasks write concurrently, and any client of the database can
read the columns.

Every write is one sql_txn that locks the header: shared to write rows, exclusive to change the
header (C1). A batch goes as arrays, one per column, into ``INSERT .. ON CONFLICT DO UPDATE``.

A pooler may give each sql_txn another session of the server (ADR 78). So nothing depends on the
session: names contain their schema, settings are local to the sql_txn, there are no temporary
tables and no prepared statements, and locks end with the sql_txn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg
import pyarrow as pa

from framework.bounded_pages import pages_within, rows_that_fit
from framework.errors import (
    BadRecordError,
)
from framework.topology import REBUILT, Fields, Header, Stamp, ValueType
from framework.topology.canonical_form import python_values
from framework.value_size import fixed_size
from sinks.aggregates import Aggregate
from sinks.backend import Key, Row
from sinks.external_row_sorter import PAGE_BYTES
from sinks.refused_rows import explained, explained_in, refused_row
from sinks.sql.backend import SqlBackend, Upsert
from sinks.sql.postgres_arrays import array_of, array_text
from sinks.sql.postgres_pipeline_mode import changed_rows, ungrouped
from sinks.sql.postgres_table_base import SIZE, PostgresTableBase
from sinks.sql.postgres_value_limits import first_nul, long_keys
from sinks.sql.schema import EXPECTED, qualified
from sinks.sql.table_base import SqlRollBack

#: How long an exchange of two tables waits for their readers.
RENAME_TIMEOUT_MS = 2_000
_STATEMENT_BYTES = 16 * 2**20
#: The cursor for the rows that are due, and how many rows it returns first.
_DUE_CURSOR = "ratchet_due"
_FIRST_ROWS = 500
#: Rows of more bytes of texts on average are written one by one: the text of an array would cost
#: more.
_LONG_ROW_BYTES = 32 * 2**10


#: The statements that remove all of its users' permissions from a table, once it is called
#: ``name``. Parameters: rebuilt, name.
_REVOKED = """
SELECT DISTINCT format('REVOKE ALL ON %%s FROM %%s', %(name)s::text,
                       CASE WHEN grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END)
FROM pg_class, aclexplode(relacl) WHERE pg_class.oid = to_regclass(%(rebuilt)s) AND grantee <> relowner
"""
#: The statements that give it the permissions of other users on ``table``, and its comment.
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
#: The objects that stay with a renamed table, and the reasons why this user cannot rename it.
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
#: A row if both tables exist and have different numbers of indexes. Parameters: table, rebuilt.
_HAS_OTHER_INDEXES = """
SELECT 1 WHERE to_regclass(%(rebuilt)s) IS NOT NULL
    AND (SELECT count(*) FROM pg_index WHERE indrelid = to_regclass(%(table)s))
     <> (SELECT count(*) FROM pg_index WHERE indrelid = to_regclass(%(rebuilt)s))
"""


class PostgresBackend(PostgresTableBase, SqlBackend):
    """A table of a PostgreSQL database.

    * ``dsn``: a libpq address, ``postgresql://user@host:5432/database`` or ``host=... dbname=...``.
      ``${NAME}`` in it stands for an environment variable. libpq's own ``PGPASSWORD``,
      ``~/.pgpass`` and services work as usual. Raises ``ConfigError`` for an address that does not
      parse.
    * ``table``: created if missing, checked otherwise.
    * ``schema``: of the table; by default the first schema of the user's search path.
    * ``key``, ``value``: the typed columns; by default, a ``StateCommitter`` takes them from its
      input.

    Integers are stored as ``bigint``, unsigned 64-bit integers as ``numeric(20,0)``, durations as
    ``bigint`` in their unit. The user needs SELECT, INSERT, UPDATE and DELETE on the table and on
    ``_ratchet_headers``, and CREATE on the schema if one of these tables is missing. With CREATE,
    it also gets the view ``<table>_live`` of the rows that are not deleted; then ``DROP TABLE``
    needs ``CASCADE``. The address may lead to a pooler, such as PgBouncer, that gives each
    transaction another session.
    """

    #: Arrow makes the arrays of batches of at least this many rows; below, its calls cost more.
    _columnar_from_rows = 50

    def __init__(
        self,
        dsn: str,
        table: str,
        key: Fields | None = None,
        value: Fields | None = None,
        *,
        schema: str | None = None,
    ) -> None:
        self._open_at(dsn, schema)
        super().__init__(table, key, value)

    # --- in statements within the server's limits -------------------------------------------------

    def multi_get(self, keys: Sequence[Key]) -> list[Row | None]:
        return self._within_limits("get", len(keys), partial(super().multi_get, keys))

    def multi_put(
        self, header: Header, keys: Sequence[Key], expected_stamps: Sequence[Stamp | None], rows: Sequence[Row]
    ) -> None:
        self._within_limits("put", len(keys), partial(super().multi_put, header, keys, expected_stamps, rows))

    def check_rows(self, deltas: pa.Table) -> None:
        key = tuple(self.shape.key)
        if (found := first_nul(deltas)) is not None:
            error = BadRecordError(f"{self.location}: PostgreSQL stores no text with a NUL (0x00)")
            raise explained_in(error, deltas, *found, key)
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
        """Insert keys into a copy of the table's index, for this sql_txn. Does nothing if the user
        may not create it: then the commit finds refused keys."""
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

    # --- inside -----------------------------------------------------------------------------------

    def _settle(self, connection: psycopg.Connection[Any]) -> None:
        super()._settle(connection)
        if self._shape is not None and self._shape.schema != self._home:
            self._shape = replace(self._shape, schema=self._home)

    def _create_table(self, connection: Any) -> None:
        with self._creating(connection):
            if self._model:  # including the indexes of other users
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
        """The view of the live rows, if it is unchanged since Ratchet made it; 0 if there is none,
        or it was changed."""
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

    def _found_columns(self, connection: Any) -> list[tuple[str, str]]:
        query = (
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
            "WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped"
        )
        return [(name, kind) for name, kind in connection.execute(query, (self.shape.name,))]

    def _told_apart(self, connection: Any) -> str:
        table = self.shape.name
        if not self._is_unique(connection, table, self.shape.key):
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
        rows = SIZE.rows(self._dsn)
        for start in range(0, len(keys), rows):
            columns = [array_of(column) for column in zip(*keys[start : start + rows], strict=True)]
            yield from self._fetched(connection, query, columns)

    def _fetched(self, connection: Any, query: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Rows in the binary form, which is independent of session settings."""
        rows: list[tuple[Any, ...]] = connection.execute(query, parameters, binary=True).fetchall()
        return rows

    def _streamed(self, connection: Any, query: str, parameters: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        """By a cursor of the server, which ends with its sql_txn. The first rows determine the
        number of rows of a page."""
        with connection.transaction(), connection.cursor(_DUE_CURSOR, binary=True) as cursor:
            connection.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
            cursor.execute(query, parameters)
            size = _FIRST_ROWS
            while rows := cursor.fetchmany(size):
                yield from rows
                most = min(2 * size, SIZE.rows(self._dsn))
                size = rows_that_fit(len(rows), sum(map(_length, rows)), PAGE_BYTES, most)

    def _merge(self, connection: Any, upsert: Upsert, deltas: pa.Table, stamp: tuple[Any, ...]) -> int:
        kinds = dict(self.shape.columns)
        arrays = ", ".join(f'unnest(%s::{kinds[name]}[]) AS "{name}"' for name in deltas.column_names)
        statement, changed = upsert.into(self.shape, f"(SELECT {arrays}) AS _given"), 0
        for start in range(0, deltas.num_rows, rows := self._rows_per_statement(deltas)):
            columns = map(self._array, deltas.slice(start, rows).columns, deltas.column_names)
            changed += changed_rows(connection, statement, (*stamp, *columns))
        return changed

    def _insert_rows(self, connection: Any, rows: Sequence[tuple[Any, ...]]) -> int:
        shape = self.shape
        names = [name for name, _ in shape.columns]
        return self._for_given(connection, shape.insert_given, shape.insert_row(), names, rows)

    def _update_rows(self, connection: Any, rows: Sequence[tuple[Any, ...]]) -> int:
        shape = self.shape
        names = [*(name for name, _ in shape.columns if name not in shape.key), *shape.key, *EXPECTED]
        return self._for_given(connection, shape.update_given, shape.update_row(), names, rows)

    def _for_given(
        self,
        connection: Any,
        statement: Callable[[str], str],
        alone: str,
        names: Sequence[str],
        rows: Sequence[tuple[Any, ...]],
    ) -> int:
        """Execute a statement for given rows, in parts; for long rows, execute ``alone``, which
        takes one row. Returns the number of changed rows."""
        kinds, changed = {**dict.fromkeys(EXPECTED, self.dialect.integer), **dict(self.shape.columns)}, 0
        arrays = ", ".join(f'unnest(%s::{kinds[name]}[]) AS "{name}"' for name in names)
        text = statement(f"(SELECT {arrays}) AS _given")
        length = _length if self._has_long_values() else lambda _: 0
        for part, size in pages_within(rows, SIZE.rows(self._dsn), _STATEMENT_BYTES, length):
            if size > len(part) * _LONG_ROW_BYTES:
                changed += self._for_each(ungrouped(connection), alone, part)
            else:
                columns = [array_of(column) for column in zip(*part, strict=True)]
                changed += changed_rows(connection, text, columns)
        return changed

    def _has_long_values(self) -> bool:
        return any(fixed_size(map(each.type_of, each)) is None for each in self.fields)

    def _rows_per_statement(self, deltas: pa.Table) -> int:
        fitting: int = deltas.num_rows * _STATEMENT_BYTES // max(deltas.nbytes, 1)
        return max(min(fitting, SIZE.rows(self._dsn)), 1)

    def _array(self, column: pa.ChunkedArray, name: str) -> str:
        """The column as the text of an array. Arrow makes the text for large batches, Python for
        small ones."""
        if len(column) >= self._columnar_from_rows:
            return array_text(column)
        values = python_values(column, name)
        return array_of(None if value is None else self._stored(value, column.type) for value in values)


def _length(row: tuple[Any, ...]) -> int:
    """The bytes of a row's texts, approximately."""
    return sum([len(each) for each in row if isinstance(each, (str, bytes))])
