"""Tables of MariaDB and MySQL databases.

A statement that creates or alters a table commits there, so none stands in a sql_txn that writes
(ADR 92). Rows are staged in a temporary table, and joined: ``ON DUPLICATE KEY UPDATE`` would change
a row that has another unique value of a new row, whatever its key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from framework.errors import BadRecordError, ConfigError
from framework.topology import FORMER, REBUILT, Fields, Header, TransactionAttempt
from framework.topology.refused_row_bisection import OnRefused
from sinks.rows.rebuildable_table import RebuildableTable
from sinks.rows.table_definition import ACTION, EXISTED, TXID, WRITTEN_TABLE, Column
from sinks.rows.transactional_table import READ_ROWS, Apart, HeldColumns
from sinks.rows.values import is_text
from sinks.sql.mysql_dialect import literals, rows_of, without_width
from sinks.sql.mysql_server import code_of, is_of_row_alone, line_of
from sinks.sql.mysql_table_base import DUPLICATE, MySqlTableBase

import pymysql  # isort: skip - after the module that says how to install it
from pymysql.cursors import SSCursor  # isort: skip

_STAGED = "_ratchet_staged"
#: The most characters of a text, or bytes, in the key of a table that is created.
_KEY_LENGTH = 255
_COLUMNS = """
SELECT column_name, column_type, character_set_name, collation_name, is_nullable, extra FROM information_schema.columns
WHERE table_schema = DATABASE() AND table_name = %s ORDER BY ordinal_position
"""
_INDEXES = """
SELECT index_name, column_name, sub_part IS NOT NULL, non_unique FROM information_schema.statistics
WHERE table_schema = DATABASE() AND table_name = %s ORDER BY index_name, seq_in_index
"""
#: A row that a trigger refuses by SIGNAL, a key that no index holds, and a value for a column that
#: the database computes.
_SIGNAL = 1644
_TOO_LONG = 1071
_GENERATED = (1906, 3105)


_NUMBERS = ("tinyint", "smallint", "mediumint", "int", "bigint", "decimal", "float", "double", "year")


def _kind_of(kind: str) -> str:
    """The name of a type."""
    return re.split(r"[ (]", kind, maxsplit=1)[0]


def _cast_to(kind: str) -> str | None:
    """The type to cast a text to, so that it has the form that a column of type ``kind`` gives it;
    None: the column keeps texts as they are, or has no such cast."""
    bare = _kind_of(kind)
    if bare in ("uuid", "inet4", "inet6", "date", "datetime", "time", "decimal", "float", "double"):
        return kind.replace(" unsigned", "").replace(" zerofill", "")
    if bare == "timestamp":
        return kind.removesuffix(" NULL").replace("timestamp", "datetime")
    return "SIGNED" if bare in _NUMBERS else None


class MySqlTable(MySqlTableBase, RebuildableTable):
    """A table of a MariaDB (10.6 or newer) or MySQL (8.0.17 or newer) database, in InnoDB, for
    ``AppendCommitter`` and ``UpsertCommitter``.

    ``dsn``: as of ``MySqlBackend``. ``name``: the table. It is created when missing, and may have
    been made by hand, with constraints, defaults, generated columns, triggers and foreign keys. The
    key of an ``UpsertCommitter`` needs a collation that tells all texts apart, as
    ``utf8mb4_nopad_bin`` does. ``schema``: the database, instead of that of the address. ``stamp``:
    the column that holds the txid of the transaction that wrote a row. None: there is none; then an
    ``AppendCommitter`` needs parallelism 1 and deterministic input.
    """

    json = "json"
    makes_in_sql_txn = False

    def __init__(self, dsn: str, name: str, *, schema: str | None = None, stamp: str | None = "_txid") -> None:
        self._table = name
        self._open_at(dsn, schema)
        super().__init__(name, stamp)

    @property
    def table_options(self) -> str:  # type: ignore[override]
        return self.dialect.table_options

    @property
    def side_table_options(self) -> str:  # type: ignore[override]
        return self.dialect.table_options

    # --- on the driver ----------------------------------------------------------------------------

    def check(self, topology_id: str) -> Header | None:
        with self._reading() as connection:
            columns = self._held_columns(connection, self._table)
            self._probe(connection, exists=bool(columns))
            header = self._header_if_any(connection)
            self._check_found(connection, header, columns, topology_id)
        return header

    def prepare(self, topology_id: str) -> Header:
        """Not in a sql_txn: each statement leaves something that the next start goes on from, and
        the header is the last."""
        with self._reading() as connection:
            header = self._prepare(connection, topology_id)
            if self._stamp is not None and self._changes is None:
                for each in self._stamp_index(connection):
                    with self._creating(connection):
                        self._run(connection, each)
        return header

    def _probe(self, connection: Any, *, exists: bool) -> None:
        super()._probe(connection, exists=exists)
        if self._changes is not None:
            with self._denied("CREATE TEMPORARY TABLES on the database"):
                connection.execute("CREATE TEMPORARY TABLE IF NOT EXISTS _ratchet_probe (n int)")
                connection.execute("DROP TEMPORARY TABLE _ratchet_probe")

    def _check_columns(self, connection: Any, held: Sequence[Column]) -> None:
        super()._check_columns(connection, held)
        query = "SELECT engine FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = %s"
        (engine,) = connection.execute(query, (self._table,)).fetchone()
        if engine != "InnoDB":
            raise ConfigError(
                f"{self.location} is {f'in {engine}' if engine else 'a view'}, which has no transactions: ALTER TABLE "
                f"{self._at(self._table)} ENGINE = InnoDB"
            )
        for name, kind, charset, collation, _, _ in connection.execute(_COLUMNS, (self._table,)).fetchall():
            told_apart = collation is None or collation == "utf8mb4_0900_bin" or collation.endswith("_nopad_bin")
            if self._changes is not None and name in self._changes.key and not told_apart:
                raise ConfigError(
                    f"{self.location}: the key {name!r} has the collation {collation}, which takes different texts for one "
                    f"({'upper and lower case' if collation.endswith('_ci') else 'trailing blanks'}): ALTER TABLE "
                    f"{self._at(self._table)} MODIFY {self._q(name)} {kind} CHARACTER SET {charset} COLLATE "
                    f"{f'{charset}_nopad_bin' if connection.is_mariadb else self.dialect.collation} NOT NULL"
                )

    def _held_columns(self, connection: Any, table: str) -> list[Column]:
        found = []
        for name, kind, charset, collation, nullable, extra in connection.execute(_COLUMNS, (table,)).fetchall():
            whole = without_width(kind).replace("%", "%%")
            if collation is not None:
                whole = f"{whole} CHARACTER SET {charset} COLLATE {collation}"
            if kind.startswith("timestamp") and nullable == "YES":
                whole = f"{whole} NULL"  # without it, null would be the present moment
            made = extra.upper().replace("DEFAULT_GENERATED", "")
            found.append(Column(name, whole, generated="GENERATED" in made))
        return found

    def _unique(self, connection: Any, table: str, columns: Sequence[str]) -> bool:
        indexes: dict[str, set[str]] = {}
        for index, name, cut, repeated in connection.execute(_INDEXES, (table,)).fetchall():
            if not repeated:
                indexes.setdefault(index, set()).add("" if cut or name is None else name)
        return set(columns) in indexes.values()

    def _giving_key(self, connection: Any) -> str:
        indexes = [index for index, *_ in connection.execute(_INDEXES, (self._table,)).fetchall()]
        drop = "DROP PRIMARY KEY, " if "PRIMARY" in indexes else ""
        return f"ALTER TABLE {self._at(self._table)} {drop}ADD PRIMARY KEY ({self._list(self._by_key().key)})"

    def _giving_type(self, name: str) -> str:
        return f"ALTER TABLE {self._at(self._table)} MODIFY {self._q(name)} {self._declared()[name]}"

    def _check_width(self, connection: Any, held: Sequence[Column]) -> None:
        """In a table that is created: the server checks the width then, also of the staged rows."""
        kinds = {each.name: each.kind for each in held} | self._missing_kinds(held)
        kinds |= dict.fromkeys((TXID, EXISTED, ACTION), self.dialect.integer)
        columns = ", ".join(f"{self._q(name)} {kind}" for name, kind in kinds.items())
        self._run(connection, f"CREATE TEMPORARY TABLE _ratchet_probe ({columns}){self.side_table_options}")
        self._run(connection, "DROP TEMPORARY TABLE _ratchet_probe")

    def _retype_before(self, connection: Any, column: Column) -> None:
        before = self._at(f"{self._table}_before")
        self._run(connection, f"ALTER TABLE {before} MODIFY {self._q(column.name)} {column.kind}")

    def _stamp_index(self, connection: Any) -> list[str]:
        indexes: dict[str, str] = {}
        for index, name, _, _ in connection.execute(_INDEXES, (self._table,)).fetchall():
            indexes.setdefault(index, name)
        if self._stamp in indexes.values():
            return []
        return [f"CREATE INDEX _ratchet_stamp ON {self._at(self._table)} ({self._q(self._stamp or '')})"]

    @contextmanager
    def _altering(self) -> Iterator[Any]:
        with self._reading() as connection, self._creating(connection):
            yield connection

    def _triggers(self, connection: Any) -> list[str]:
        query = (
            "SELECT trigger_name FROM information_schema.triggers WHERE event_object_schema = DATABASE() "
            "AND event_object_table = %s ORDER BY trigger_name"
        )
        return [name for (name,) in connection.execute(query, (self._table,)).fetchall()]

    def streamed(self, connection: Any, query: str) -> Iterator[tuple[Any, ...]]:
        with connection.cursor(SSCursor) as cursor:
            cursor.execute(query, ())  # with parameters, so that %% is a %
            while rows := cursor.fetchmany(READ_ROWS):
                yield from rows

    def _with_held_texts(self, rows: pa.Table, texts: Sequence[str]) -> pa.Table:
        with self._reading() as connection:
            held = {each.name: each.kind for each in self._held_columns(connection, self._table)}
            for name in texts:
                if (cast := _cast_to(held.get(name, ""))) is not None:
                    given = rows.column(name).to_pylist()
                    query = (
                        f"SELECT CAST(CAST(given AS {cast}) AS CHAR) FROM JSON_TABLE(%s, '$[*]' COLUMNS "
                        "(n FOR ORDINALITY, given LONGTEXT PATH '$')) AS texts ORDER BY n"
                    )
                    found = connection.execute(query, (json.dumps(given),)).fetchall()
                    made = [old if text is None else text for (text,), old in zip(found, given, strict=True)]
                    rows = rows.set_column(rows.column_names.index(name), name, pa.array(made, rows.field(name).type))
        return rows

    def _selected(self, column: Column) -> str:
        name, declared = self._q(column.name), self.schema.field(column.name).type
        return f"CAST({name} AS CHAR)" if is_text(declared) and _kind_of(column.kind) in _NUMBERS else name

    def _misread(self, column: Column, declared: pa.DataType) -> str:
        is_time = _kind_of(column.kind) == "time"
        return (
            f"read a number of {declared.unit} as hours, minutes and seconds"
            if (is_time and pa.types.is_duration(declared))
            else ""
        )

    def _marked(self, column: Column) -> str:
        """A parameter is no number of single precision, which differs from a double, and bits that
        were read are bytes."""
        kind, mark = _kind_of(column.kind), self.dialect.mark
        return {"float": f"CAST({mark} AS FLOAT)", "bit": f"CAST(CONV(HEX({mark}), 16, 10) AS UNSIGNED)"}.get(
            kind, mark
        )

    # --- rebuilt ----------------------------------------------------------------------------------

    def exchange(self, expected: Header, new: Header, rebuilt: Header) -> None:
        """Tables are created before the sql_txn, and dropped after it."""
        if self._changes is not None and self._changes.on_new_column == "add":
            self._add_columns()
        with self._reading() as connection:
            other, former = self._beside(REBUILT), self._beside(FORMER)
            former._check_ours(connection, expected.topology_id)
            with self._creating(connection):
                former._drop_tables(connection)
                for each in former._like_model(connection):
                    self._run(connection, each)
        super().exchange(expected, new, rebuilt)
        with self._reading() as connection:
            other._drop_tables(connection)

    def remove(self, topology_id: str) -> bool:
        there = super().remove(topology_id)
        with self._reading() as connection:
            self._drop_tables(connection)
        return there

    def _drop_tables(self, connection: Any) -> None:
        for each in self._own_tables(connection):
            self._run(connection, f"DROP TABLE {self._at(each)}")

    def _removal(self, table: str) -> str:
        return f"DELETE FROM {self._at(table)}"

    def _create_empty(self, connection: Any) -> None:
        """It is there, and empty."""

    def _check_ours(self, connection: Any, topology_id: str) -> bool:
        """A table without a header and without rows was left by a crash before or after its
        sql_txn."""
        if self._held_columns(connection, self._table) and self._header_there(connection) is None:
            query = f"SELECT 1 FROM {self._at(self._table)} LIMIT 1"
            if self._run(connection, query).fetchone() is None:
                return False
        return super()._check_ours(connection, topology_id)

    def _like_model(self, connection: Any) -> list[str]:
        return [f"CREATE TABLE {self._at(self._table)} LIKE {self._at(self._model)}"]

    def _references(self, connection: Any) -> list[str]:
        query = (
            "SELECT constraint_name, table_name FROM information_schema.referential_constraints WHERE constraint_schema = "
            "DATABASE() AND referenced_table_name = %s AND table_name <> %s ORDER BY constraint_name"
        )
        found = connection.execute(query, (self._table, self._table)).fetchall()
        return [f"{name} of table {table}" for name, table in found]

    def _equal(self, one: str, other: str, columns: Sequence[str]) -> str:
        """As values and as bytes: texts of some collations are equal that differ, and so are the
        texts of some numbers."""
        pairs = [(f"{one}.{self._q(each)}", f"{other}.{self._q(each)}") for each in columns]
        return " AND ".join(f"{a} <=> {b} AND CAST({a} AS BINARY) <=> CAST({b} AS BINARY)" for a, b in pairs)

    # --- in tasks ---------------------------------------------------------------------------------

    def check_rows(self, rows: pa.RecordBatch) -> None:
        super().check_rows(rows)
        for field, column in zip(rows.schema, rows.columns, strict=True):
            if pa.types.is_floating(field.type) and pc.any(pc.invert(pc.is_finite(column))).as_py():
                raise BadRecordError(
                    f"{self.location}: {field.name!r} is NaN or infinite, which {self.dialect.name} does not store; filter it out "
                    "upstream"
                )

    def change(
        self,
        attempt: TransactionAttempt,
        rounds: Iterable[pa.Table],
        on_refused: OnRefused | None = None,
        *,
        apart: Callable[[], Iterable[Apart]] | None = None,
    ) -> None:
        self._add_columns_for(rounds)
        super().change(attempt, rounds, on_refused, apart=apart)

    def try_change(self, attempt: TransactionAttempt, rounds: Iterable[pa.Table], *, alone: bool) -> None:
        self._add_columns_for(rounds)
        super().try_change(attempt, rounds, alone=alone)

    def _add_columns_for(self, rounds: Iterable[pa.Table]) -> None:
        if self._by_key().on_new_column == "add" and any(each.num_rows for each in rounds):
            self._add_columns()

    def _add_columns(self) -> None:
        """Add what the table lacks before the sql_txn that writes it. A crash in between leaves an
        empty column here or there."""
        with self._reading() as connection:
            self._fit(connection)
            if not self.keeps_all(connection):
                with self._creating(connection):
                    self._create_before(connection)

    def _is_first(self, connection: Any, writer: str, txid: int) -> bool:
        statement = f"INSERT INTO {WRITTEN_TABLE} (state, writer, txid) VALUES (%s, %s, %s)"
        try:
            self._run(connection, statement, (self._table, writer, txid))
        except pymysql.err.IntegrityError as error:
            if code_of(error) != DUPLICATE:
                raise
            return False
        return True

    def _load(self, connection: Any, into: str, rows: pa.Table) -> None:
        names = self._list(rows.column_names).replace("%%", "%")
        begin = f"INSERT INTO {into.replace('%%', '%')} ({names}) VALUES "
        values = rows_of([literals(column) for column in rows.columns])
        for part in self._statements(connection, values):
            connection.execute(begin + ", ".join(part))

    def _stage(self, connection: Any, columns: str) -> str:
        """The outer join makes all columns nullable."""
        self._run(connection, f"DROP TEMPORARY TABLE IF EXISTS {_STAGED}")
        self._run(
            connection,
            f"CREATE TEMPORARY TABLE {_STAGED} (PRIMARY KEY ({self._list(self._by_key().key)})) ENGINE = InnoDB "
            f"AS SELECT {columns} FROM (SELECT 1 AS _ratchet_one) AS _ratchet_one LEFT JOIN {self._at(self._table)} ON FALSE "
            "LIMIT 0",
        )
        return _STAGED

    def _apply(self, connection: Any, rows: pa.Table, names: Sequence[str], held: HeldColumns, txid: int) -> None:
        super()._apply(connection, rows, names, held, txid)
        self._run(connection, f"DROP TEMPORARY TABLE {_STAGED}")

    # --- statements -------------------------------------------------------------------------------

    def _delete(self, connection: Any, source: str, where: str) -> int:
        """With a join, which finds the rows by their key; a subquery would read the whole table."""
        table = self._at(self._table)
        statement = f"DELETE {table} FROM {table} JOIN {source} ON {self._same(source, table)} WHERE {where}"
        deleted: int = self._run(connection, statement).rowcount
        return deleted

    def _upsert(
        self,
        connection: Any,
        values: Mapping[str, str],
        source: str,
        assigned: Mapping[str, str],
        *,
        overriding: bool = False,
    ) -> int:
        table, same = self._at(self._table), self._same("excluded", "_held")
        selected = ", ".join(f"{value} AS {self._q(name)}" for name, value in values.items())
        new = f"(SELECT {selected} FROM {source}) AS excluded"
        written: int = 0
        if assigned:
            changes = ", ".join(f"_held.{self._q(name)} = {value}" for name, value in assigned.items())
            statement = f"UPDATE {table} AS _held JOIN {new} ON {same} SET {changes}"
            written = self._run(connection, statement).rowcount
        names = self._list(values)
        missing = f"NOT EXISTS (SELECT 1 FROM {table} AS _held WHERE {same})"
        statement = f"INSERT INTO {table} ({names}) SELECT {names} FROM {new} WHERE {missing}"
        written += self._run(connection, statement).rowcount
        return written

    def _or_nothing(self, column: str) -> str:
        return self._or_replace("", self._q(column))

    def _or_replace(self, key: str, column: str) -> str:
        return f"ON DUPLICATE KEY UPDATE {column} = VALUES({column})"

    def _run(self, connection: Any, statement: str, parameters: Sequence[Any] = ()) -> Any:
        cursor = connection.cursor()
        cursor.execute(statement, tuple(parameters))  # with no parameters, too: %% is a % then
        return cursor

    def _q(self, name: str) -> str:
        """Between backticks, which a client understands in every sql_mode."""
        return "`" + name.replace("`", "``").replace("%", "%%") + "`"

    def _at(self, table: str) -> str:
        return self._q(table)

    def _declared(self) -> dict[str, str]:
        found = super()._declared()
        if self._changes is None or self._fields is None:
            return found
        key = {name: self._fields.type_of(name) for name in self._changes.key}
        whole = Fields.of({**key, TXID: pa.int64()})  # as in the table of deleted rows
        for name in key:
            kind, _, length = self.dialect.key_type_of(name, whole).partition("(")
            long = kind in ("varchar", "varbinary")
            found[name] = f"{kind}({min(int(length[:-1]), _KEY_LENGTH)})" if long else found[name]
        return found

    def _is_of_row_alone(self, error: BaseException | None) -> bool:
        return error is not None and is_of_row_alone(error)

    def _named(self, error: Exception) -> Exception:
        code = code_of(error)
        if code == _TOO_LONG:
            return ConfigError(
                f"{self.location}: {line_of(error)}; make the columns of the key shorter by 8 bytes, for a txid"
            )
        if code == _SIGNAL:
            return BadRecordError(f"{self.location}: {line_of(error)}; a trigger refuses this row")
        if code in _GENERATED:
            return ConfigError(f"{self.location}: {line_of(error)}; leave that field out, with columns=[...]")
        return super()._named(error)
