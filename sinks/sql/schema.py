"""The shape of a SQL state: the columns of its table, and the SQL that creates, checks, reads and
writes it.

::

    word TEXT NOT NULL, ...        key columns, the primary key
    count INTEGER, ...             value columns, as the user named them
    _prev_count INTEGER, ...       the values before the last transaction that wrote the row
    _txid, _epoch, _attempt        the stamp
    _writer                        the task that wrote it
    _deleted, _prev_exists         whether the row is a tombstone; whether it had a value before

A table ``words`` has a view ``words_live`` for other programs: the keys and the values of the rows
that are not deleted.

Identifiers are checked against an allowed pattern and quoted. Values are bound. A ``Dialect``
describes what differs between databases.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from framework.errors import CorruptStateError, TopologyError
from framework.topology import Fields, Header, ValueType
from sinks.aggregates import Aggregate
from sinks.backend import ROLLED_BACK, SWEPT

HEADERS_TABLE = "_ratchet_headers"
HEADER_COLUMNS = "format, topology_id, incarnation, epoch, open_txid, open_attempt, open_digest, done"
STAMP_COLUMNS = ("_txid", "_epoch", "_attempt", "_writer", "_deleted", "_prev_exists")
#: The column of given rows with the stamp that a row must have to be updated.
EXPECTED = tuple(f"_expected{name}" for name in STAMP_COLUMNS[:3])
_IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,62}")
_COLUMN = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")


class Dialect(ABC):
    """The differences between databases: type names, expressions, limits on names."""

    name = ""
    #: The column types of a stamp: for integers, texts and booleans.
    integer = ""
    text = ""
    boolean = ""
    #: The placeholder of a bound value.
    mark = "?"
    #: The prefix of the name of a temporary table.
    temporary = ""
    #: The text after the list of columns when a table, or the table of headers, is created.
    table_options = ""
    headers_options = ""
    #: The text after the columns of an index of the rows that are not deleted.
    index_condition = " WHERE NOT _deleted"
    least = ""
    greatest = ""
    #: The database silently truncates names after this many bytes. None: it does not.
    name_bytes_max: int | None = None
    #: Characters that no name may contain; None: there are none.
    no_name: re.Pattern[str] | None = None
    #: A prefix, in any case, that table names must not have; names that columns must not have.
    reserved_prefix = ""
    reserved_columns: frozenset[str] = frozenset()

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)  # unpickled copies are equal

    def __hash__(self) -> int:
        return hash(type(self))

    @property
    def null_integer(self) -> str:
        """A null of the type of an integer."""
        return f"CAST(NULL AS {self.integer})"

    def folded(self, name: str) -> str:
        """The name in a form that is equal for two names which the database takes for one."""
        return name

    @abstractmethod
    def type_of(self, name: str, declared: pa.DataType) -> str:
        """The column type of a field. Raises ``TopologyError`` for a type whose values the database
        would not return unchanged."""

    def key_type_of(self, name: str, fields: Fields) -> str:
        """The column type of a field of the key."""
        return self.type_of(name, fields.type_of(name))

    def proposed(self, name: str) -> str:
        """In an upsert: the value of a column in the given row."""
        return f"excluded.{_q(name)}"

    def unless_there(self, key: str) -> str:
        """The end of an INSERT that skips a row whose key exists. Empty: the cursor handles it."""
        return f" ON CONFLICT ({key}) DO NOTHING"

    def merges(self, rule: str, declared: pa.DataType) -> bool:
        """Whether the database merges values of this type by this rule exactly as
        ``Aggregate.merge`` does."""
        return True

    def added(self, one: str, other: str, declared: pa.DataType) -> str:
        """The sum of two expressions that are not null. A sum that cannot be stored must be an
        error, not null."""
        return f"{one} + {other}"

    def compared(self, expression: str, declared: pa.DataType) -> str:
        """The expression in a form that compares as ``Aggregate`` does: text by its bytes."""
        return expression


@dataclass(frozen=True)
class HeadersTable:
    """The table that holds the headers of all states of a database, or of one schema of it."""

    dialect: Dialect
    schema: str = ""

    @property
    def name(self) -> str:
        return qualified(self.schema, HEADERS_TABLE)

    def ddl(self) -> str:
        integer, text = self.dialect.integer, self.dialect.text
        return (
            f"CREATE TABLE IF NOT EXISTS {self.name} (state {text} NOT NULL PRIMARY KEY, "
            f"format {integer} NOT NULL, topology_id {text} NOT NULL, incarnation {text} NOT NULL, "
            f"epoch {integer} NOT NULL, open_txid {integer}, open_attempt {integer}, open_digest {text}, "
            f"done {integer} NOT NULL){self.dialect.headers_options}"
        )

    def select(self, *more: str) -> str:
        """``more``: expressions to select after the columns. Parameter: state."""
        columns = ", ".join((HEADER_COLUMNS, *more))
        return f"SELECT {columns} FROM {self.name} WHERE state = {self.dialect.mark}"

    def insert(self) -> str:
        """Parameters: state, then as ``header_values``."""
        marks = ", ".join([self.dialect.mark] * 9)
        return f"INSERT INTO {self.name} (state, {HEADER_COLUMNS}) VALUES ({marks})"

    def delete(self) -> str:
        """Parameter: state."""
        return f"DELETE FROM {self.name} WHERE state = {self.dialect.mark}"

    def update(self) -> str:
        """Parameters: as ``header_values``, then state."""
        assignments = ", ".join(f"{column} = {self.dialect.mark}" for column in HEADER_COLUMNS.split(", "))
        return f"UPDATE {self.name} SET {assignments} WHERE state = {self.dialect.mark}"


def qualified(schema: str, name: str) -> str:
    """The name of a table in SQL. ``schema``: empty in a database without schemas."""
    return f"{_q(schema)}.{_q(name)}" if schema else _q(name)


def header_values(header: Header) -> tuple[Any, ...]:
    """The values of the columns ``HEADER_COLUMNS`` for a header."""
    opened = header.open
    return (
        *(header.format, header.topology_id, header.incarnation, header.epoch),
        *((opened.txid, opened.attempt_id, opened.plan_digest) if opened is not None else (None, None, None)),
        header.done,
    )


def header_of(row: tuple[Any, ...], location: str) -> Header:
    """The header with these values of ``HEADER_COLUMNS``. Raises ``CorruptStateError`` for an
    unknown format, and for values that are no header."""
    number, topology_id, incarnation, epoch, txid, attempt_id, digest, done = row[:8]
    opened = {"txid": txid, "attempt_id": attempt_id, "plan_digest": digest} if txid is not None else None
    document = {"topology_id": topology_id, "incarnation": incarnation, "epoch": epoch, "open": opened, "done": done}
    try:
        return Header.of_document({**document, "format": number}, location)
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptStateError(f"{location}: its header is damaged: {error}; restore the header") from error


def identifier(name: str, what: str) -> str:
    """Return ``name`` if it is safe in SQL. Raises ``TopologyError`` otherwise."""
    if not _IDENTIFIER.fullmatch(name):
        raise TopologyError(
            f"{what} {name!r} is not usable in SQL: 1 to 63 letters, digits and '_', starting with a letter"
        )
    return name


def _check_column(name: str, table: str) -> None:
    if not _COLUMN.fullmatch(name):
        raise TopologyError(
            f"column of table {table!r} {name!r} is not usable in SQL: 1 to 63 letters, digits and '_', not starting with a digit"
        )


@dataclass(frozen=True)
class TableShape:
    """The table of one state. ``schema``: empty while unknown, and in a database without
    schemas."""

    dialect: Dialect
    table: str
    key: Fields
    value: Fields
    schema: str = ""

    @property
    def name(self) -> str:
        """The name in SQL."""
        return qualified(self.schema, self.table)

    def __post_init__(self) -> None:
        identifier(self.table, "table")
        for name in (*self.key, *self.value):
            _check_column(name, self.table)
        if len(self.key) == 0 or len(self.value) == 0:
            raise TopologyError(f"table {self.table!r} needs at least one key column and one value column")
        both = set(self.key) & set(self.value)
        if both:
            raise TopologyError(f"table {self.table!r}: {sorted(both)[0]!r} is both a key and a value")
        self._check_names()

    def _check_names(self) -> None:
        """Raise ``TopologyError`` for a name that the database would not store unchanged (C33)."""
        dialect = self.dialect
        if dialect.reserved_prefix and self.table.lower().startswith(dialect.reserved_prefix):
            raise TopologyError(
                f"table {self.table!r}: {dialect.name} reserves names that begin with {dialect.reserved_prefix!r}; use another"
            )
        seen: dict[str, str] = {}
        own = {self.dialect.folded(each): each for each in (*STAMP_COLUMNS, *EXPECTED, *map(previous, self.value))}
        for name in (*self.key, *self.value):
            if name in dialect.reserved_columns:
                raise TopologyError(
                    f"column {name!r} of table {self.table!r}: {dialect.name} reserves this name; use another"
                )
            if (mine := own.get(self.dialect.folded(name))) is not None:
                raise TopologyError(
                    f"column {name!r} of table {self.table!r}: Ratchet keeps a column {mine!r} in its tables; rename the field"
                )
            known = seen.setdefault(self.dialect.folded(name), name)
            if known != name:
                raise TopologyError(
                    f"table {self.table!r}: {known!r} and {name!r} are one column for {dialect.name}; rename one of them"
                )
        most = dialect.name_bytes_max
        for name in self.value:
            if most is not None and len(previous(name)) > most:
                raise TopologyError(
                    f"column {name!r} of table {self.table!r}: {dialect.name} keeps {most} bytes of a name, and the value before "
                    f"is in {previous(name)!r}; use at most {most - len(previous(''))}"
                )

    @property
    def columns(self) -> list[tuple[str, str]]:
        """(name, declared SQL type) of every column, in order."""
        keys = [(name, self._column_type(name, self.key, key=True)) for name in self.key]
        values = [(name, self._column_type(name, self.value)) for name in self.value]
        before = [(previous(name), kind) for name, kind in values]
        integer, text, boolean = self.dialect.integer, self.dialect.text, self.dialect.boolean
        stamps = zip(STAMP_COLUMNS, (integer, integer, integer, text, boolean, boolean), strict=True)
        return [*keys, *values, *before, *stamps]

    def _column_type(self, name: str, fields: Fields, *, key: bool = False) -> str:
        declared = fields.type_of(name)
        if declared is None:
            raise TopologyError(f"column {name!r} needs a declared type: give Fields({name}=int) or the like")
        return self.dialect.key_type_of(name, fields) if key else self.dialect.type_of(name, declared)

    def check_columns(self, found: list[tuple[str, str]]) -> str:
        """The problem in the columns of an existing table, with the remedy; empty if there is
        none."""
        wanted = self.columns
        if sorted(found) == sorted(wanted):
            return ""
        missing = [f"{name} {kind}" for name, kind in wanted if (name, kind) not in found]
        extra = [f"{name} {kind}" for name, kind in found if (name, kind) not in wanted]
        names = {name for name, _ in found}
        required = {*self.key, *STAMP_COLUMNS}
        addable = [(name, kind) for name, kind in wanted if name not in names]
        mend = f"use another table, or drop it and create it with: {self.ddl()}"
        retyped = [(name, kind) for name, kind in wanted if name in names and (name, kind) not in found]
        if retyped and not addable and all(kind == self.dialect.boolean for _, kind in retyped):
            changes = ", ".join(f"ALTER {name} TYPE {kind} USING {name} <> 0" for name, kind in retyped)
            mend = f"an earlier version created it; change it: ALTER TABLE {self.name} {changes};"
        elif not extra and addable and not required & {name for name, _ in addable}:
            added = " ".join(f'ALTER TABLE {self.name} ADD COLUMN "{name}" {kind};' for name, kind in addable)
            mend = f"use another table, or add them: {added}"
        return (
            f"has other columns than this topology writes (missing: {', '.join(missing) or 'none'}; not expected: "
            f"{', '.join(extra) or 'none'}): {mend}"
        )

    def ddl(self) -> str:
        """The statement that creates the table."""
        required = {*self.key, *STAMP_COLUMNS}
        lines = [f'"{name}" {kind}{" NOT NULL" if name in required else ""}' for name, kind in self.columns]
        key = ", ".join(f'"{name}"' for name in self.key)
        return f"CREATE TABLE {self.name} ({', '.join(lines)}, PRIMARY KEY ({key})){self.dialect.table_options}"

    def index_ddl(self, column: str, name: str) -> str:
        """The statement that creates an index of a column, for ``due``. If the database can do
        that, the index leaves out deleted rows, so that no statement that finds a row by its key
        uses the index, although the column may be a part of the key that many rows share."""
        return f'CREATE INDEX "{name}" ON {self.name} ("{column}"){self.dialect.index_condition}'

    @property
    def live_view(self) -> str | None:
        """The name of the view of the rows that are not deleted. None: the database would truncate
        it, so there is no view."""
        name = f"{self.table}_live"
        most = self.dialect.name_bytes_max
        return name if most is None or len(name) <= most else None

    def live_view_ddl(self) -> str:
        """The statement that creates the view."""
        columns = ", ".join(map(_q, (*self.key, *self.value)))
        view = qualified(self.schema, self.live_view or "")
        return f"CREATE VIEW {view} AS SELECT {columns} FROM {self.name} WHERE NOT _deleted"

    @property
    def stage(self) -> str:
        """The temporary table for a batch of deltas."""
        return f'{self.dialect.temporary}"{self.stage_name}"'

    @property
    def stage_name(self) -> str:
        """A hash of the table's name and columns: one connection may serve several tables, and
        the same table with other columns."""
        return f"_stage_{hashlib.sha256(f'{self.table} {self._stage_columns}'.encode()).hexdigest()[:32]}"

    @property
    def _stage_columns(self) -> str:
        return ", ".join(f"{_q(name)} {kind}" for name, kind in self.columns if name in self.key or name in self.value)

    def stage_ddl(self) -> str:
        return f"CREATE TEMP TABLE IF NOT EXISTS {_q(self.stage_name)} ({self._stage_columns})"

    def mergeable(self, aggregates: Mapping[str, Aggregate]) -> bool:
        """Whether the database can merge all these aggregates by itself."""
        return all(
            each.merge_rule and self.dialect.merges(each.merge_rule, self.value.type_of(name))
            for name, each in aggregates.items()
        )

    def select(self) -> str:
        """Every column, in order."""
        columns = ", ".join(f'"{name}"' for name, _ in self.columns)
        return f"SELECT {columns} FROM {self.name}"

    def upsert(self, aggregates: Mapping[str, Aggregate], value_type: ValueType, rows: str = "") -> str:
        """The statement that merges deltas. ``rows``: their source, as an item of FROM; empty: one
        delta, given as parameters before the others. Parameters: txid, epoch, attempt, writer, then
        those of ``rows``.

        A row that already has this txid: the transactional rule skips it, the opaque rule merges
        into its previous value, the non-transactional rule merges into its value. A row with a
        higher stamp, or with the same stamp from another writer, is unchanged. The caller compares
        the number of rows changed with the number of deltas.
        """
        t = "_held"  # an alias, because a table may be called "excluded"
        same = f"{t}._txid = excluded._txid"
        skip_same_txid = value_type is ValueType.TRANSACTIONAL
        held = {name: f"{t}.{_q(name)}" for name in self.value}
        before = held
        if not skip_same_txid:
            before = {
                name: f"CASE WHEN {same} THEN {t}.{_q(previous(name))} ELSE {each} END" for name, each in held.items()
            }
        old = held if value_type is ValueType.NON_TRANSACTIONAL else before
        merged: dict[str, str] = {}
        for name, each in aggregates.items():
            if not each.derived_from:
                merged[name] = self.merged(each.merge_rule, name, old[name])
        for name, each in aggregates.items():
            if each.derived_from:
                total, count = (f"({merged[part]})" for part in each.derived_from)
                merged[name] = f"CAST({total} AS {self._column_type(name, self.value)}) / NULLIF({count}, 0)"
        assignments = [f"{_q(name)} = {merged[name]}" for name in self.value]
        assignments += [f"{_q(previous(name))} = {before[name]}" for name in self.value]
        exists = f"NOT {t}._deleted"
        if not skip_same_txid:
            exists = f"CASE WHEN {same} THEN {t}._prev_exists ELSE {exists} END"
        assignments.append(f"_prev_exists = {exists}")
        assignments += [f"{name} = excluded.{name}" for name in ("_txid", "_epoch", "_attempt", "_writer", "_deleted")]
        stamps = f"({t}._txid, {t}._epoch, {t}._attempt)"
        newer = "(excluded._txid, excluded._epoch, excluded._attempt)"
        allowed = f"{stamps} < {newer} OR ({stamps} = {newer} AND {t}._writer IN (excluded._writer, '{SWEPT}'))"
        if skip_same_txid:
            allowed = f"{t}._txid < excluded._txid"
        keys = ", ".join(_q(name) for name in self.key)
        names = ", ".join(_q(name) for name in self.value)
        columns = f"{keys}, {names}, _txid, _epoch, _attempt, _writer, _deleted, _prev_exists"
        if rows:
            marks = ", ".join([f"CAST({self.dialect.mark} AS {self.dialect.integer})"] * 3)
            source = f"SELECT {keys}, {names}, {marks}, {self.dialect.mark}, FALSE, FALSE FROM {rows} WHERE TRUE"
        else:
            marks = ", ".join([self.dialect.mark] * (len(self.key) + len(self.value) + 4))
            source = f"VALUES ({marks}, FALSE, FALSE)"
        return (
            f"INSERT INTO {self.name} AS {t} ({columns}) {source} "
            f"ON CONFLICT ({keys}) DO UPDATE SET {', '.join(assignments)} WHERE {allowed}"
        )

    def merged(self, rule: str, name: str, old: str) -> str:
        """The expression that merges the delta into ``old``; null is the neutral element."""
        declared = self.value.type_of(name)
        new = self.dialect.proposed(name)
        if rule in ("first", "last"):
            one, other = (old, new) if rule == "first" else (new, old)
            return f"COALESCE({one}, {other})"
        if rule == "add":
            both = self.dialect.added(f"({old})", new, declared)
        else:
            function = self.dialect.least if rule == "min" else self.dialect.greatest
            both = f"{function}({self.dialect.compared(old, declared)}, {self.dialect.compared(new, declared)})"
        return f"CASE WHEN ({old}) IS NULL THEN {new} WHEN {new} IS NULL THEN {old} ELSE {both} END"

    def insert_row(self) -> str:
        """Insert one row, unless its key has a row. Parameters: every column."""
        names = [name for name, _ in self.columns]
        key = ", ".join(map(_q, self.key))
        marks = ", ".join([self.dialect.mark] * len(names))
        columns = ", ".join(map(_q, names))
        return f"INSERT INTO {self.name} ({columns}) VALUES ({marks}){self.dialect.unless_there(key)}"

    def update_row(self) -> str:
        """Update one row if it has the expected stamp. Parameters: every column except the key,
        then the key, then the expected txid, epoch and attempt."""
        m = self.dialect.mark
        updates = ", ".join(f"{_q(name)} = {m}" for name, _ in self.columns if name not in self.key)
        match = " AND ".join(f"{_q(name)} = {m}" for name in self.key)
        return f"UPDATE {self.name} SET {updates} WHERE {match} AND _txid = {m} AND _epoch = {m} AND _attempt = {m}"

    def insert_given(self, given: str) -> str:
        """As ``insert_row``, for many rows. ``given``: an item of FROM called ``_given``, with all
        columns."""
        columns, key = (", ".join(map(_q, each)) for each in ([name for name, _ in self.columns], self.key))
        return f"INSERT INTO {self.name} ({columns}) SELECT {columns} FROM {given} ON CONFLICT ({key}) DO NOTHING"

    def update_given(self, given: str) -> str:
        """As ``update_row``, for many rows. ``given``: an item of FROM called ``_given``, with all
        columns, and ``EXPECTED``."""
        updates = ", ".join(f"{_q(name)} = _given.{_q(name)}" for name, _ in self.columns if name not in self.key)
        match = [f"_held.{_q(name)} = _given.{_q(name)}" for name in self.key]
        match += [f"_held.{name} = _given.{its}" for name, its in zip(STAMP_COLUMNS, EXPECTED, strict=False)]
        return f"UPDATE {self.name} AS _held SET {updates} FROM {given} WHERE {' AND '.join(match)}"

    def purge(self) -> str:
        """Parameter: txid."""
        return f"DELETE FROM {self.name} WHERE _deleted AND _txid < {self.dialect.mark}"

    def sweep(self) -> str:
        """Parameters: epoch, attempt, txid, epoch, attempt."""
        m = self.dialect.mark
        return (
            f"UPDATE {self.name} SET {self._restored(SWEPT)}, _epoch = {m}, _attempt = {m} "
            f"WHERE _txid = {m} AND (_epoch, _attempt) < ({m}, {m})"
        )

    def unswept(self) -> str:
        """Find a row that a sweep has missed. Parameters: txid, epoch, attempt."""
        m = self.dialect.mark
        return f"SELECT 1 FROM {self.name} WHERE _txid = {m} AND (_epoch, _attempt) < ({m}, {m}) LIMIT 1"

    def roll_back(self) -> str:
        """Parameters: new txid, epoch, attempt; txid to undo."""
        m = self.dialect.mark
        return (
            f"UPDATE {self.name} SET {self._restored(ROLLED_BACK)}, _txid = {m}, _epoch = {m}, _attempt = {m} "
            f"WHERE _txid = {m}"
        )

    def not_rolled_back(self) -> str:
        """Find a row that was not rolled back. Parameter: txid to undo."""
        return f"SELECT 1 FROM {self.name} WHERE _txid = {self.dialect.mark} LIMIT 1"

    def _restored(self, writer: str) -> str:
        """Assignments that restore the previous value of a row. A row without one becomes a
        tombstone."""
        values = ", ".join(f"{_q(name)} = {_q(previous(name))}" for name in self.value)
        return f"{values}, _deleted = NOT _prev_exists, _writer = '{writer}'"


def previous(name: str) -> str:
    """The name of the column that holds the previous value."""
    return f"_prev_{name}"


def _q(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
