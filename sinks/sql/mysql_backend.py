"""Stamped rows in MariaDB and MySQL: many tasks write concurrently, and any client of the database
can read the columns.

Every write is one sql_txn that locks the header: shared to write rows, exclusive to change the
header (C1). A batch goes as many rows into ``INSERT .. ON DUPLICATE KEY UPDATE``.

A statement that creates, drops or renames a table commits its sql_txn (ADR 92). So tables are
created before the sql_txn that needs them, and dropped after it, and rebuilt rows are copied into
the table that they replace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from framework.bounded_pages import pages_of
from framework.errors import BadRecordError, ConfigError
from framework.topology import FORMER, REBUILT, Fields, Header
from framework.topology.canonical_form import python_values
from sinks.backend import Key
from sinks.refused_rows import explained_in
from sinks.sql.backend import SqlBackend, Upsert
from sinks.sql.mysql_connections import Connection, UnbufferedCursor
from sinks.sql.mysql_dialect import literals, rows_of, upsert, without_width, write_rows
from sinks.sql.mysql_table_base import MySqlTableBase
from sinks.sql.schema import STAMP_COLUMNS

#: Keys per SELECT.
_KEYS_PER_SELECT = 500


class MySqlBackend(MySqlTableBase, SqlBackend):
    """A table of a MariaDB (10.6 or newer) or MySQL (8.0.17 or newer) database, in InnoDB.

    * ``dsn``: ``mysql://user:password@host:3306/database``. ``${NAME}`` in it stands for an
      environment variable. Options after a ``?``: ``ssl_ca``, ``ssl_cert``, ``ssl_key``,
      ``ssl_verify_cert=true``, ``ssl_verify_identity=true``, ``unix_socket``. Raises
      ``ConfigError`` for an address that does not parse.
    * ``table``: created if missing, checked otherwise.
    * ``key``, ``value``: the typed columns; by default, a ``StateCommitter`` takes them from its
      input.

    Integers are stored as ``bigint``, unsigned 64-bit integers as ``bigint unsigned``, durations as
    ``bigint`` in their unit, moments as ``datetime(6)`` in UTC. Neither database holds NaN or an
    infinity: these values are refused. A key has up to 3,072 bytes, and text counts four for each
    character. The user needs SELECT, INSERT, UPDATE and DELETE on the table and on
    ``_ratchet_headers``, and CREATE on the database if one of these tables is missing. With CREATE
    VIEW, it also gets the view ``<table>_live`` of the rows that are not deleted.
    """

    _holds_nan = False

    def __init__(self, dsn: str, table: str, key: Fields | None = None, value: Fields | None = None) -> None:
        self._open_at(dsn)
        super().__init__(table, key, value)

    # --- tables, each in a statement that commits by itself ---------------------------------------

    def check(self, topology_id: str) -> Header | None:
        with self._reading() as connection:
            columns = self._found_columns(connection)
            self._probe(connection, exists=bool(columns))
            header = self._header_if_any(connection)
            self._check_found(header, connection, columns, topology_id)
        return header

    def prepare(self, topology_id: str) -> Header:
        if self.check(topology_id) is None:
            with self._reading() as connection, self._creating(connection), self._denied("CREATE on the database"):
                self._create_headers(connection)
                if not self._found_columns(connection):
                    self._create_table(connection)
        if not self._model and self.shape.live_view is not None:
            with self._reading() as connection, suppress(ConfigError):  # the view is optional
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

    def _create_table(self, connection: Any) -> None:
        if self._model:  # including the indexes of other users
            connection.execute(f'CREATE TABLE {self.shape.name} LIKE "{self._model}"')
        else:
            super()._create_table(connection)

    def _create_view(self, connection: Any) -> None:
        """Does nothing here: it would commit the sql_txn."""

    def _drop_table(self) -> None:
        with self._reading() as connection:
            connection.execute(f"DROP TABLE IF EXISTS {self.shape.name}")

    def _drop(self, connection: Any) -> None:
        """Empty the table. It is dropped after the sql_txn, because a drop would commit it."""
        if self._found_columns(connection):
            connection.execute(f"DELETE FROM {self.shape.name}")
        connection.execute(self._headers.delete(), (self._table,))

    def _check_ours(self, connection: Any, topology_id: str) -> bool:
        """A table without a header and without rows was left by a crash before or after its
        sql_txn."""
        if self._found_columns(connection) and self._select_header(connection, "") is None:
            return connection.execute(f"SELECT 1 FROM {self.shape.name} LIMIT 1").fetchone() is not None and (
                super()._check_ours(connection, topology_id)
            )
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

    # --- existing tables --------------------------------------------------------------------------

    def _settle(self, connection: Connection) -> None:
        super()._settle(connection)
        if self._shape is not None and self._shape.dialect != self.dialect:
            self._shape = replace(self._shape, dialect=self.dialect)

    def _found_columns(self, connection: Any) -> list[tuple[str, str]]:
        query = (
            "SELECT column_name, column_type FROM information_schema.columns "
            "WHERE table_schema = DATABASE() AND table_name = %s"
        )
        return [(name, without_width(kind)) for name, kind in connection.execute(query, (self._table,)).fetchall()]

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

    # --- rows -------------------------------------------------------------------------------------

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
                reason = (
                    f"it is longer than the {length} {'characters' if _is_text(kind) else 'bytes'} that the key holds"
                )
            else:
                continue
            row = pc.index(wrong, True).as_py()
            if row >= 0:
                raise explained_in(BadRecordError(f"{self.location}: {reason}"), deltas, row, name, tuple(key))

    def _refuse_nan(self, table: pa.Table) -> None:
        super()._refuse_nan(table)
        for field, column in zip(table.schema, table.columns, strict=True):
            if pa.types.is_floating(field.type) and pc.any(pc.is_inf(column)).as_py():
                raise BadRecordError(
                    f"{self.location}: {field.name!r} is infinite, and {self.dialect.name} has no infinity; filter it out upstream"
                )

    def _longest(self, name: str) -> int | None:
        kind = self.shape.key.type_of(name)
        if not _is_text(kind) and not pa.types.is_binary(kind) and not pa.types.is_large_binary(kind):
            return None
        return self.dialect.key_length(name, self.shape.key)

    def _stored_key(self, key: Key) -> tuple[Any, ...]:
        for name, value in zip(self.shape.key, key, strict=True):
            if isinstance(value, (str, bytes)) and (length := self._longest(name)) is not None and len(value) > length:
                raise BadRecordError(
                    f"{self.location}, key {str(key)[:60]}...: {name!r} is longer than the {length} that it holds"
                )
        return super()._stored_key(key)

    def _select_keys(self, connection: Any, keys: Sequence[Key]) -> Iterator[tuple[Any, ...]]:
        for where, parameters in _conditions([*self.shape.key], keys):
            yield from self._fetched(connection, f"{self.shape.select()} WHERE {where}", parameters)

    def _streamed(self, connection: Any, query: str, parameters: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        with connection.cursor(UnbufferedCursor) as cursor:
            cursor.execute(query, parameters)
            yield from cursor.fetchall_unbuffered()

    def _update_rows(self, connection: Any, rows: Sequence[tuple[Any, ...]]) -> int:
        """Lock the rows that have the expected stamps, and write them if no row is missing. The
        database can update many rows to different values only by an INSERT that finds their
        keys."""
        own, names = len(self.shape.columns), [*self.shape.key, *STAMP_COLUMNS[:3]]
        found = 0
        for where, parameters in _conditions(names, [row[own - len(self.shape.key) :] for row in rows]):
            query = f"SELECT COUNT(*) FROM {self.shape.name} WHERE {where} FOR UPDATE"
            found += connection.execute(query, parameters).fetchone()[0]
        if found == len(rows):
            self._for_each(connection, write_rows(self.shape), [row[:own] for row in rows])
        return found

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

    def _written(self, connection: Any, deltas: pa.Table, stamp: tuple[Any, ...]) -> int:
        """The number of rows with the stamp and the writer. The database's own count does not
        distinguish an unchanged row from an inserted one."""
        keys = list(zip(*(python_values(deltas.column(name)) for name in self.shape.key), strict=True))
        stored = [self._stored_key(key) for key in keys]
        count = 0
        for where, parameters in _conditions([*self.shape.key], stored):
            query = (
                f"SELECT COUNT(*) FROM {self.shape.name} WHERE ({where}) AND _txid = %s AND _epoch = %s AND _attempt = %s "
                "AND _writer = %s"
            )
            count += connection.execute(query, [*parameters, *stamp]).fetchone()[0]
        return count


def _conditions(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[tuple[str, list[Any]]]:
    """Conditions that together select the rows with these values in these columns, and their
    parameters. MariaDB uses no index for a list of pairs."""
    quoted = [f'"{name}"' for name in names]
    one = "(" + " AND ".join(f"{name} = %s" for name in quoted) + ")"
    for page in pages_of(rows, _KEYS_PER_SELECT):
        if len(quoted) == 1:
            condition = f"{quoted[0]} IN ({', '.join(['%s'] * len(page))})"
        else:
            condition = " OR ".join([one] * len(page))
        yield condition, [part for row in page for part in row]


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
