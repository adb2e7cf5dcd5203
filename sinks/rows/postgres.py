"""Tables of PostgreSQL databases."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from framework.bounded_pages import slices_of
from framework.errors import BadRecordError, ConfigError
from framework.topology import Header, TransactionAttempt
from framework.topology.refused_row_bisection import OnRefused
from sinks.rows.rebuildable_table import RebuildableTable
from sinks.rows.table_definition import ACTION, POSITION, ROW_NEEDED, TXID, Column, UnfitTableError
from sinks.rows.transactional_table import (
    DELETE,
    LOADED_BYTES,
    READ_ROWS,
    REPLACE,
    UPSERT,
    Apart,
    HeldColumns,
    WriteRows,
)
from sinks.rows.values import is_text
from sinks.sql.postgres_arrays import array_of
from sinks.sql.postgres_pipeline_mode import StatementGroup, ungrouped
from sinks.sql.postgres_plpgsql_row_loop import NUMBER, ROWS_TABLE, RowByRow, allows_blocks
from sinks.sql.postgres_table_base import PostgresTableBase
from sinks.sql.postgres_value_limits import first_nul
from sinks.sql.schema import qualified
from sinks.value_encoding import restored

_COLUMNS = """
SELECT attname, format_type(atttypid, atttypmod), attgenerated <> '', attidentity = 'a' FROM pg_attribute
WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped ORDER BY attnum
"""
_IS_VIEW = "SELECT 1 FROM pg_class WHERE oid = to_regclass(%s) AND relkind IN ('v', 'm')"
_PRIMARY_KEY = "SELECT conname FROM pg_constraint WHERE conrelid = to_regclass(%s) AND contype = 'p'"
_TRIGGERS = """
SELECT tgname FROM pg_trigger WHERE tgrelid = to_regclass(%s) AND NOT tgisinternal AND tgenabled <> 'D' ORDER BY tgname
"""
_REFERENCES = """
SELECT conname, conrelid::regclass::text FROM pg_constraint WHERE confrelid = to_regclass(%s) AND contype = 'f'
    AND conrelid <> confrelid ORDER BY conname
"""
#: The columns of two tables: whether the table is the second, the name, the type without digits or
#: length, whether an assignment rounds to the digits of the column, and whether texts that differ
#: may be one value to it. Parameters: table, tables.
_KINDS = """
SELECT attrelid <> to_regclass(%s), attname, format_type(atttypid, -1),
    atttypmod >= 0 AND atttypid NOT IN ('varchar'::regtype, 'bpchar'::regtype),
    atttypid NOT IN ('text'::regtype, 'varchar'::regtype) OR NOT coalesce(collisdeterministic, true)
FROM pg_attribute LEFT JOIN pg_collation ON pg_collation.oid = attcollation
WHERE attrelid IN (to_regclass(%s), to_regclass(%s)) AND attnum > 0 AND NOT attisdropped
ORDER BY attnum
"""
#: Whether the order of the rows of a statement has no effect on a table: except for its key, it has
#: no unique or exclusive values, no triggers, and no columns that count. Parameter: table.
_ANY_ORDER = """
SELECT (SELECT count(*) FROM pg_index WHERE indrelid = held.oid AND (indisunique OR indisexclusion)) = 1
    AND NOT EXISTS (SELECT 1 FROM pg_trigger WHERE tgrelid = held.oid AND NOT tgisinternal)
    AND NOT EXISTS (SELECT 1 FROM pg_attribute WHERE attrelid = held.oid AND attidentity <> '' AND NOT attisdropped)
    AND NOT EXISTS (
        SELECT 1 FROM pg_attrdef WHERE adrelid = held.oid AND pg_get_expr(adbin, adrelid) LIKE '%%nextval(%%'
    )
FROM pg_class AS held WHERE oid = to_regclass(%s)
"""
#: The number of those columns whose type stores and compares every value unchanged. Parameters:
#: table, columns.
_EXACT = """
SELECT count(*) FROM pg_attribute LEFT JOIN pg_collation ON pg_collation.oid = attcollation
WHERE attrelid = to_regclass(%s) AND attname = ANY(%s::text[]) AND coalesce(collisdeterministic, true) AND (atttypid IN (
    'text'::regtype, 'smallint'::regtype, 'integer'::regtype, 'bigint'::regtype, 'uuid'::regtype,
    'bytea'::regtype, 'date'::regtype, 'boolean'::regtype) OR (atttypid = 'varchar'::regtype AND atttypmod < 0))
"""
#: The name of rows that are parameters, and the most rows and bytes of them.
_GIVEN, _GIVEN_ROWS, _GIVEN_BYTES = "_ratchet_given", 1_000, 2**20
#: As PostgreSQL is compiled by default.
_INDEX_COLUMNS_MAX = 32
_INFINITIES = (2**63 - 1, -(2**63))
#: Types that return a text as it was written, and the digits or the length of a type.
_TEXTS, _VARCHAR, _DIGITS = (
    ("text", "name", "citext"),
    re.compile(r"character varying(\(\d+\))?"),
    re.compile(r"\([^)]*\)"),
)
_NUMERIC = re.compile(r"numeric\((\d+),(\d+)\)")
#: The type that holds every value of a column's own type and of a field.
_WIDENINGS = (
    (pa.types.is_integer, ("smallint", "integer"), "bigint"),
    (pa.types.is_float64, ("real",), "double precision"),
    (pa.types.is_string, ("character varying",), "text"),
)


class PostgresTable(PostgresTableBase, RebuildableTable):
    """A table of a PostgreSQL database, for ``AppendCommitter`` and ``UpsertCommitter``.

    ``dsn``: as of ``PostgresBackend``. ``name``: the table. It is created when missing, and may
    have been made by hand, with constraints, defaults, generated columns, triggers and foreign
    keys. ``schema``: where the table is; by default the first schema of the user's search path.
    ``stamp``: the column that holds the txid of the transaction that wrote a row. None: there is
    none; then an ``AppendCommitter`` needs parallelism 1 and deterministic input.
    """

    json = "jsonb"

    def __init__(self, dsn: str, name: str, *, schema: str | None = None, stamp: str | None = "_txid") -> None:
        self._table = name
        self._open_at(dsn, schema)
        super().__init__(name, stamp)

    def check_rows(self, rows: pa.RecordBatch) -> None:
        super().check_rows(rows)
        if (found := first_nul(pa.Table.from_batches([rows]))) is not None:
            raise BadRecordError(f"{self.location}: {found[1]!r} has a NUL (0x00), which PostgreSQL does not store")

    def write(
        self,
        attempt: TransactionAttempt,
        batches: Iterable[pa.RecordBatch],
        on_refused: OnRefused | None = None,
        *,
        due: Iterable[pa.RecordBatch] | None = None,
    ) -> None:
        self._within_limits("append", 1, partial(super().write, attempt, batches, on_refused, due=due))

    def try_write(self, attempt: TransactionAttempt, batches: Iterable[pa.RecordBatch], *, alone: bool) -> None:
        self._within_limits("append", 1, partial(super().try_write, attempt, batches, alone=alone))

    def try_change(self, attempt: TransactionAttempt, rounds: Iterable[pa.Table], *, alone: bool) -> None:
        self._within_limits("upsert", 1, partial(super().try_change, attempt, rounds, alone=alone))

    def change(
        self,
        attempt: TransactionAttempt,
        rounds: Iterable[pa.Table],
        on_refused: OnRefused | None = None,
        *,
        apart: Callable[[], Iterable[Apart]] | None = None,
    ) -> None:
        self._within_limits("upsert", 1, partial(super().change, attempt, rounds, on_refused, apart=apart))

    def limited(self, write: Callable[[], None]) -> None:
        self._within_limits("upsert", 1, write)

    def roll_back(self, header: Header) -> int:
        return self._within_limits("roll back", 1, partial(super().roll_back, header))

    def _probe(self, connection: Any, *, exists: bool) -> None:
        super()._probe(connection, exists=exists)
        if self._changes is not None:
            (may,) = connection.execute("SELECT has_database_privilege(current_database(), 'TEMP')").fetchone()
            if not may:
                raise self._may_not("TEMP on the database")

    def _held_columns(self, connection: Any, table: str) -> list[Column]:
        return [Column(*row) for row in connection.execute(_COLUMNS, (qualified(self._home, table),))]

    def _unique(self, connection: Any, table: str, columns: Sequence[str]) -> bool:
        return self._is_unique(connection, qualified(self._home, table), columns)

    def _giving_key(self, connection: Any) -> str:
        held = connection.execute(_PRIMARY_KEY, (qualified(self._home, self._table),)).fetchone()
        drop = f"DROP CONSTRAINT {qualified('', held[0])}, " if held is not None else ""
        return f"ALTER TABLE {self._at(self._table)} {drop}ADD PRIMARY KEY ({self._list(self._by_key().key)})"

    def _giving_type(self, name: str) -> str:
        kind, column = self._declared()[name], self._q(name)
        return f"ALTER TABLE {self._at(self._table)} ALTER COLUMN {column} TYPE {kind} USING {column}::{kind}"

    def _retype_before(self, connection: Any, column: Column) -> None:
        before, name = self._at(f"{self._table}_before"), self._q(column.name)
        self._run(
            connection, f"ALTER TABLE {before} ALTER COLUMN {name} TYPE {column.kind} USING {name}::{column.kind}"
        )

    def _load(self, connection: Any, into: str, rows: pa.Table) -> None:
        if isinstance(connection, _Singly):
            kinds = connection.kinds
            if kinds.keys() >= set(rows.column_names):
                names = self._list(rows.column_names)
                given = connection.given({self._q(name): kinds[name] for name in rows.column_names})
                connection.execute(f"INSERT INTO {into} ({names}) {given}")
            return
        statement = f"COPY {into} ({self._list(rows.column_names)}) FROM STDIN (FORMAT csv)"
        for part in slices_of(rows, LOADED_BYTES):
            readable = pa.table([_readable(each) for each in part.columns], rows.column_names)
            sink = pa.BufferOutputStream()
            pa_csv.write_csv(readable, sink, pa_csv.WriteOptions(include_header=False))
            with connection.cursor().copy(statement.replace("%%", "%")) as copy:
                copy.write(memoryview(sink.getvalue()))

    def _stage(self, connection: Any, columns: str) -> str:
        staged = "pg_temp._ratchet_staged"
        self._run(connection, f"DROP TABLE IF EXISTS {staged}")
        self._run(
            connection,
            f"CREATE TEMP TABLE _ratchet_staged ON COMMIT DROP AS SELECT {columns} FROM {self._at(self._table)} WITH NO DATA",
        )
        return staged

    def _ask_early(self, connection: Any) -> None:
        if isinstance(connection, StatementGroup):
            connection.send_early(self._headers.select() + self._own_header, (self._table,))
            connection.send_early(_KINDS, self._kinds_of())

    def check_now(self, connection: Any) -> None:
        connection.execute("SET CONSTRAINTS ALL IMMEDIATE")

    def _singly(self, connection: Any, rows: pa.Table, write: WriteRows) -> Sequence[BadRecordError] | None:
        """In a block of PL/pgSQL."""
        if not allows_blocks(connection):
            return None
        block = _Singly(self._held(connection).kinds)
        write(block, rows)
        if block.is_empty:
            return None
        columns = ", ".join(f"{self._q(name)} text" for name in rows.column_names).replace("%%", "%")
        connection.execute(f"DROP TABLE IF EXISTS {ROWS_TABLE}")
        connection.execute(
            f"CREATE TEMP TABLE {ROWS_TABLE.partition('.')[2]} ({columns}, {NUMBER} integer PRIMARY KEY) ON COMMIT DROP"
        )
        self._load(connection, ROWS_TABLE, rows.append_column(NUMBER, pa.array(range(rows.num_rows), pa.int32())))
        refused = []
        for error in block.run(connection, rows.num_rows):
            found = self._named(error)
            if not isinstance(found, BadRecordError):
                raise found from error
            refused.append(found)
        return refused

    def _is_first(self, connection: Any, writer: str, txid: int) -> bool:
        return super()._is_first(ungrouped(connection), writer, txid)

    def _held(self, connection: Any) -> HeldColumns:
        found = connection.execute(_KINDS, self._kinds_of()).fetchall()
        kinds = {name: kind for before, name, kind, *_ in found if not before}
        return HeldColumns(
            [name for before, name, *_ in found if before and name in kinds],
            {name: kind.replace("%", "%%") for name, kind in kinds.items() if not kind.endswith("[]")},
            frozenset(name for before, name, _, rounds, _ in found if rounds and not before),
            frozenset(name for before, name, *_, folds in found if folds and not before),
        )

    def _kinds_of(self) -> tuple[str, str, str]:
        """The parameters of ``_KINDS``."""
        table, before = (qualified(self._home, each) for each in (self._table, f"{self._table}_before"))
        return table, table, before

    def _apply(self, connection: Any, rows: pa.Table, names: Sequence[str], held: HeldColumns, txid: int) -> None:
        """A small batch is a parameter of each statement: to create a temporary table would cost
        more than all of them."""
        changes = self._by_key()
        singly = isinstance(connection, _Singly)
        if not singly:
            self._check_keys_apart(connection, rows, held)
        if not self._can_give(rows, names, held):
            if singly:
                return
            plain = ungrouped(connection)
            super()._apply(plain, self._sorted(plain, rows), names, held, txid)
            return
        own = [each for each in (ACTION, POSITION) if each in rows.column_names]
        kinds = {name: held.kinds[name] for name in names} | dict.fromkeys(own, self.dialect.integer)
        given, arrays = self._given(connection, kinds, rows)
        if changes.sequence is not None:
            given = f"SELECT * FROM ({given}) AS {_GIVEN} WHERE NOT ({' OR '.join(self._newer(_GIVEN))})"
        is_grouped = singly or isinstance(connection, StatementGroup)
        with nullcontext(connection) if is_grouped else StatementGroup(connection) as group:
            if pc.all(pc.equal(rows.column(ACTION), UPSERT)).as_py():
                keeping = f"_ratchet_kept AS ({self._keeping(_GIVEN, held.copied, txid)})"
                self._write_staged(_Given(group, given, arrays, keeping), _GIVEN, names, txid)
            else:
                self._apply_staged(_Given(group, given, arrays), _GIVEN, names, held.copied, txid)
                self._keep_deletions(_Given(group, given, arrays), _GIVEN, rows.column_names, txid)

    def _check_keys_apart(self, connection: Any, rows: pa.Table, held: HeldColumns) -> None:
        """Raise ``BadRecordError`` if a deletion follows an upsert of another text that is the same
        key to the table: statements delete first."""
        key = self._by_key().key
        texts = [name for name in key if is_text(self.schema.field(name).type)]
        deletes = pc.equal(rows.column(ACTION), DELETE)
        if not pc.any(deletes).as_py() or not held.folding.intersection(texts) or not held.kinds.keys() >= set(key):
            return
        given, arrays = self._given(
            connection, {**{name: held.kinds[name] for name in key}, ACTION: self.dialect.integer}, rows
        )
        table, names = self._at(self._table), self._list(key)
        # the first query gives the columns the collations of the table
        every = f"SELECT {names}, 0 AS {ACTION}, 0 AS place FROM {table} WHERE FALSE UNION ALL "
        every += f"SELECT {names}, {ACTION}, row_number() OVER () FROM ({given}) AS given"
        order = f"max(place) FILTER (WHERE {ACTION} = {DELETE}) > min(place) FILTER (WHERE {ACTION} <> {DELETE})"
        query = f"SELECT 1 FROM ({every}) AS {_GIVEN} GROUP BY {names} HAVING {order} LIMIT 1"
        if ungrouped(connection).execute(query, arrays).fetchone() is not None:
            raise self._one_key()

    def _one_key(self) -> BadRecordError:
        return BadRecordError(
            f"{self.location}: a batch has texts that differ and are one value of the key "
            f"({', '.join(self._by_key().key)}), such as a uuid in upper and lower case; give keys one form before this "
            "committer"
        )

    def _given(self, connection: Any, kinds: Mapping[str, str], rows: pa.Table) -> tuple[str, Sequence[str]]:
        """The query that selects the rows, as ``kinds``, and its parameters."""
        if isinstance(connection, _Singly):
            return connection.given({self._q(name): kind for name, kind in kinds.items()}), ()
        selected = ", ".join(f"unnest(%s::{kind}[]) AS {self._q(name)}" for name, kind in kinds.items())
        columns = (_readable(rows.column(name)).cast(pa.string()) for name in kinds)
        return f"SELECT {selected}", [array_of(each.to_pylist()) for each in columns]

    def _sorted(self, connection: Any, rows: pa.Table) -> pa.Table:
        """The rows in the order of their keys, if the table allows any order, so that neighbours in
        an index are written one after the other. Unchanged if Arrow cannot order a key."""
        (allows,) = connection.execute(_ANY_ORDER, (qualified(self._home, self._table),)).fetchone()
        if allows:
            with suppress(pa.ArrowNotImplementedError, pa.ArrowInvalid, pa.ArrowTypeError):
                return rows.sort_by([(name, "ascending") for name in self._by_key().key])
        return rows

    def _can_give(self, rows: pa.Table, names: Sequence[str], held: HeldColumns) -> bool:
        """Whether the rows can be parameters. A cast to an array does not round to a column's
        digits as an assignment does, so a rounded key would be another one."""
        changes = self._by_key()
        replaces = changes.sequence is not None and pc.any(pc.equal(rows.column(ACTION), REPLACE)).as_py()
        if rows.num_rows > _GIVEN_ROWS or rows.nbytes > _GIVEN_BYTES or ROW_NEEDED in rows.column_names or replaces:
            return False
        return held.kinds.keys() >= set(names) and not held.rounding.intersection((*changes.key, changes.sequence))

    def _keep_before(self, connection: Any, staged: str, copied: Sequence[str], txid: int) -> None:
        """For many rows, an anti-join costs less than ``ON CONFLICT``, which confirms each row. The
        anti-join needs keys that are all different to the database."""
        if staged == _GIVEN or not self._tells_keys_apart(connection):
            super()._keep_before(connection, staged, copied, txid)
            return
        before = self._at(f"{self._table}_before")
        unless = f"NOT EXISTS (SELECT 1 FROM {before} WHERE {TXID} = {txid:d} AND {self._same(before, staged)})"
        self._run(connection, self._keeping(staged, copied, txid, unless))

    def _tells_keys_apart(self, connection: Any) -> bool:
        """Whether keys that differ in a batch differ in the table, too."""
        key = list(self._by_key().key)
        found = connection.execute(_EXACT, (qualified(self._home, self._table), key)).fetchone()
        return bool(found[0] == len(key))

    def _stamping(self, connection: Any, columns: Sequence[Column]) -> list[str]:
        statements = super()._stamping(connection, columns)
        if statements and connection.execute(_IS_VIEW, (qualified(self._home, self._table),)).fetchone() is not None:
            raise UnfitTableError(
                f"{self.location} is a view, to which no column {self._stamp!r} can be added: write to the table under it"
            )
        return statements

    def _stamp_index(self, connection: Any) -> list[str]:
        return [f"CREATE INDEX ON {self._at(self._table)} USING brin ({self._q(self._stamp or '')})"]

    def _key_before(self, key: Sequence[str]) -> Sequence[str]:
        """Every transaction deletes all rows, and the table keeps their space until it is vacuumed:
        without an index of the txid, the next transaction would read through it. There is no room
        for the txid in a key of as many columns as an index may have."""
        return (TXID, *key) if len(key) < _INDEX_COLUMNS_MAX else key

    def _triggers(self, connection: Any) -> list[str]:
        return [name for (name,) in connection.execute(_TRIGGERS, (qualified(self._home, self._table),))]

    def streamed(self, connection: Any, query: str) -> Iterator[tuple[Any, ...]]:
        with connection.cursor(name="_ratchet_rows") as cursor:
            cursor.execute(query, ())
            while rows := cursor.fetchmany(READ_ROWS):
                yield from rows

    def _with_held_texts(self, rows: pa.Table, texts: Sequence[str]) -> pa.Table:
        with self._reading() as connection:
            held = {each.name: each for each in self._held_columns(connection, self._table)}
            for name in texts:
                if name in held and self._is_cast(held[name]):
                    kind = held[name].kind.replace("%", "%%")
                    query = (
                        f"SELECT given::{kind}::text FROM unnest(%s::text[]) WITH ORDINALITY AS _ (given, n) ORDER BY n"
                    )
                    given = array_of(rows.column(name).to_pylist())
                    found = [text for (text,) in connection.execute(query, (given,)).fetchall()]
                    rows = rows.set_column(rows.column_names.index(name), name, pa.array(found, rows.field(name).type))
        return rows

    def _selected(self, column: Column) -> str:
        return f"{self._q(column.name)}::text" if self._is_cast(column) else self._q(column.name)

    def _is_cast(self, column: Column) -> bool:
        """Whether a column of another type holds texts."""
        return is_text(self.schema.field(column.name).type) and not _keeps_texts(column)

    def key_parameter(self, column: Column, value: Any) -> Any:
        """In a column of texts as the text that was written."""
        declared = self.schema.field(column.name).type
        if is_text(declared) or not _keeps_texts(column):
            return super().key_parameter(column, value)
        return _readable(pa.chunked_array([pa.array([value], declared)])).cast(pa.string())[0].as_py()

    def held_form(self, name: str) -> Callable[[Any], Any]:
        """Also of times that are returned as texts."""
        declared, form = self.schema.field(name).type, super().held_form(name)
        if not pa.types.is_temporal(declared) or pa.types.is_duration(declared):
            return form

        def converted(value: Any) -> Any:
            if isinstance(value, str):
                with suppress(ValueError):
                    value = restored(value, declared)
            return form(value)

        return converted

    def _misread(self, column: Column, declared: pa.DataType) -> str:
        types = pa.types
        if types.is_duration(declared) and column.kind.startswith(("interval", "time")):
            return f"read a number of {declared.unit} as seconds"
        if (types.is_binary(declared) or types.is_large_binary(declared)) and _keeps_texts(column):
            return "hold bytes as a text of hexadecimal digits"
        return ""

    def _marked(self, column: Column) -> str:
        """With the type of the column, which the parameter may not have."""
        return self.dialect.mark if is_text(self.schema.field(column.name).type) else self._typed(column)

    def _typed(self, column: Column) -> str:
        kind = _DIGITS.sub("", column.kind).replace("%", "%%")
        return f"{self.dialect.mark}::{'bpchar' if kind == 'character' else kind}"

    def among(self, columns: Sequence[Column], count: int, also: str) -> str:
        """Keys of several columns are joined. PostgreSQL would compare each row with each of them,
        if its statistics are too old to choose the index."""
        if len(columns) == 1:
            return super().among(columns, count, also)
        row = f"({', '.join(map(self._typed, columns))})"
        return f"{also} AND ({self._list([each.name for each in columns])}) IN (VALUES {', '.join([row] * count)})"

    def _like_model(self, connection: Any) -> list[str]:
        return [f"CREATE TABLE {self._at(self._table)} (LIKE {self._at(self._model)} INCLUDING ALL)"]

    def _references(self, connection: Any) -> list[str]:
        found = connection.execute(_REFERENCES, (qualified(self._home, self._table),))
        return [f"{name} of table {table}" for name, table in found]

    def _equal(self, one: str, other: str, columns: Sequence[str]) -> str:
        """As text: not every type has a comparison."""
        rows = [f"ROW({', '.join(f'{table}.{self._q(each)}' for each in columns)})::text" for table in (one, other)]
        return " = ".join(rows)

    def _unlimited(self, connection: Any) -> None:
        connection.execute("SET LOCAL statement_timeout = 0")

    def _widened(self, held: str, declared: pa.DataType) -> str | None:
        bare = held.partition("(")[0]
        if (known := _NUMERIC.fullmatch(held)) is not None and pa.types.is_decimal(declared):
            digits, scale = map(int, known.groups())
            wide_scale = max(scale, declared.scale)
            whole = max(digits - scale, declared.precision - declared.scale)
            widened = f"numeric({whole + wide_scale},{wide_scale})"
            return widened if widened != held else None
        found = (wide for fits, kinds, wide in _WIDENINGS if bare in kinds and fits(declared))
        wide = next(found, None)
        return None if wide == "bigint" and declared.bit_width < 32 else wide

    def _is_of_row_alone(self, error: BaseException | None) -> bool:
        """A value that its column, a check or an index does not take."""
        state = (error.sqlstate or "") if isinstance(error, psycopg.Error) else ""
        return state.startswith(("22", "54")) or state in ("23502", "23514")

    def _named(self, error: psycopg.Error) -> Exception:
        if error.sqlstate == "P0001":  # a trigger refuses the row
            return BadRecordError(f"{self.location}: {error}; a trigger refuses this row")
        found = super()._named(error)
        if error.sqlstate == "21000" and self._changes is not None:
            return self._one_key()
        if isinstance(found, ConfigError) and error.sqlstate == "428C9":
            return ConfigError(f"{self.location}: {error}; leave that field out, with columns=[...]")
        return found


class _Singly(RowByRow):
    """``kinds``: the types of the table's columns."""

    def __init__(self, kinds: Mapping[str, str]) -> None:
        super().__init__()
        self.kinds = kinds


class _Given:
    """A connection whose statements see given rows as a table. ``rows``: the query that selects
    them. ``arrays``: its parameters. ``also``: what a statement does besides."""

    def __init__(self, connection: Any, rows: str, arrays: Sequence[str], also: str = "") -> None:
        self._connection, self._arrays = connection, arrays
        self._with = f"WITH {_GIVEN} AS ({rows}){f', {also}' if also else ''}"

    def execute(self, statement: str, parameters: Sequence[Any] = ()) -> Any:
        return self._connection.execute(f"{self._with} {statement}", (*self._arrays, *parameters))


def _keeps_texts(column: Column) -> bool:
    """Whether a column returns each text as it was written."""
    return column.kind in _TEXTS or _VARCHAR.fullmatch(column.kind) is not None


def _readable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column with values whose text form PostgreSQL reads."""
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        texts = [None if each is None else f"\\x{each.hex()}" for each in column.to_pylist()]
        return pa.chunked_array([pa.array(texts, pa.string())])
    return _with_infinities(column) if pa.types.is_timestamp(column.type) else column


def _with_infinities(moments: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column as text if it has PostgreSQL's infinities: the least and the greatest number."""
    which = pc.index_in(moments.cast(pa.int64()), value_set=pa.array(_INFINITIES))
    if which.null_count == len(which):
        return moments
    return pc.coalesce(pc.take(pa.array(["infinity", "-infinity"]), which), moments.cast(pa.string()))
