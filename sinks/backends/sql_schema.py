"""The shape of a SQL state: which columns a table has, and the SQL that creates, checks, reads and writes it.

::

    word TEXT NOT NULL, ...        key columns, the primary key
    count INTEGER, ...             value columns, as the user named them
    _prev_count INTEGER, ...       the values before the transaction that wrote last
    _txid, _epoch, _attempt        the stamp
    _writer                        the task that wrote it
    _deleted, _prev_exists         0 or 1: a tombstone; whether there was a row before

Identifiers are checked against an allow-list and quoted; values are bound. Where databases differ, a ``Dialect`` says how.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from framework.errors import TopologyError
from framework.topology import Fields, Header, OpenCommit, ValueType
from framework.topology.fencing import check_format
from sinks.aggregates import Aggregate

HEADERS_TABLE = "_ratchet_headers"
HEADER_COLUMNS = "format, topology_id, incarnation, epoch, open_txid, open_attempt, open_digest, done"
STAMP_COLUMNS = ("_txid", "_epoch", "_attempt", "_writer", "_deleted", "_prev_exists")
_IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,62}")


class Dialect(ABC):
    """How one database says what the others say differently."""

    name = ""
    #: The types of the stamp columns' integers and text.
    integer = ""
    text = ""
    #: A bound value.
    mark = "?"
    #: What the name of a temporary table begins with.
    temporary = ""
    #: What follows the list of columns of a table, and of a temporary table.
    table_options = ""
    temporary_options = ""
    least = ""
    greatest = ""
    #: So many bytes of a name are kept, and the rest cut off in silence; None: all of them.
    name_bytes_max: int | None = None
    #: Whether names that differ in case alone are one name.
    folds_case = False
    #: What no table's name may begin with, in any case, and what no column may be called.
    reserved_prefix = ""
    reserved_columns: frozenset[str] = frozenset()

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)  # copies that travelled are the same

    def __hash__(self) -> int:
        return hash(type(self))

    @abstractmethod
    def type_of(self, name: str, declared: pa.DataType) -> str:
        """The column type of a field. Raises ``TopologyError`` for types that would not come back as they went in."""

    def merges(self, rule: str, declared: pa.DataType) -> bool:
        """Whether the database merges values of that type by that rule exactly as ``Aggregate.merge`` does."""
        return True

    def added(self, one: str, other: str, declared: pa.DataType) -> str:
        """The sum of two expressions that are not null. It must be an error when the sum cannot be stored, not null."""
        return f"{one} + {other}"

    def compared(self, expression: str, declared: pa.DataType) -> str:
        """An expression to be compared with others of its type: text by its bytes."""
        return expression

    def headers_ddl(self) -> str:
        return (
            f"CREATE TABLE IF NOT EXISTS {HEADERS_TABLE} (state {self.text} NOT NULL PRIMARY KEY, "
            f"format {self.integer} NOT NULL, topology_id {self.text} NOT NULL, incarnation {self.text} NOT NULL, "
            f"epoch {self.integer} NOT NULL, open_txid {self.integer}, open_attempt {self.integer}, open_digest {self.text}, "
            f"done {self.integer} NOT NULL)"
        )

    def select_header(self, *more: str) -> str:
        """``more``: expressions behind the columns. Parameter: state."""
        columns = ", ".join((HEADER_COLUMNS, *more))
        return f"SELECT {columns} FROM {HEADERS_TABLE} WHERE state = {self.mark}"

    def insert_header(self) -> str:
        """Parameters: state, then as ``header_values``."""
        marks = ", ".join([self.mark] * 9)
        return f"INSERT INTO {HEADERS_TABLE} (state, {HEADER_COLUMNS}) VALUES ({marks})"

    def update_header(self) -> str:
        """Parameters: as ``header_values``, then state."""
        assignments = ", ".join(f"{column} = {self.mark}" for column in HEADER_COLUMNS.split(", "))
        return f"UPDATE {HEADERS_TABLE} SET {assignments} WHERE state = {self.mark}"


def header_values(header: Header) -> tuple[Any, ...]:
    """A header as the columns ``HEADER_COLUMNS``."""
    opened = header.open
    return (
        *(header.format, header.topology_id, header.incarnation, header.epoch),
        *((opened.txid, opened.attempt_id, opened.plan_digest) if opened is not None else (None, None, None)),
        header.done,
    )


def header_of(row: tuple[Any, ...], location: str) -> Header:
    """A header from the columns ``HEADER_COLUMNS``. Raises ``CorruptStateError`` for a format that is not known."""
    check_format(row[0], location)
    opened = OpenCommit(row[4], row[5], row[6]) if row[4] is not None else None
    return Header(row[1], row[2], row[3], opened, row[7], row[0])


def identifier(name: str, what: str) -> str:
    """A name that is safe in SQL. Raises ``TopologyError``."""
    if not _IDENTIFIER.fullmatch(name):
        raise TopologyError(
            f"{what} {name!r} is not usable in SQL: 1 to 63 letters, digits and '_', starting with a letter"
        )
    return name


@dataclass(frozen=True)
class TableShape:
    """One state's table."""

    dialect: Dialect
    table: str
    key: Fields
    value: Fields

    def __post_init__(self) -> None:
        identifier(self.table, "table")
        for name in (*self.key, *self.value):
            identifier(name, f"column of table {self.table!r}")
        if len(self.key) == 0 or len(self.value) == 0:
            raise TopologyError(f"table {self.table!r} needs at least one key column and one value column")
        both = set(self.key) & set(self.value)
        if both:
            raise TopologyError(f"table {self.table!r}: {sorted(both)[0]!r} is both a key and a value")
        self._check_names()

    def _check_names(self) -> None:
        """Raise ``TopologyError`` for a name that the database would not keep as it is (C33)."""
        dialect = self.dialect
        if dialect.reserved_prefix and self.table.lower().startswith(dialect.reserved_prefix):
            raise TopologyError(
                f"table {self.table!r}: {dialect.name} reserves names that begin with {dialect.reserved_prefix!r}; use another"
            )
        seen: dict[str, str] = {}
        for name in (*self.key, *self.value):
            if name in dialect.reserved_columns:
                raise TopologyError(
                    f"column {name!r} of table {self.table!r}: {dialect.name} reserves this name; use another"
                )
            known = seen.setdefault(name.lower() if dialect.folds_case else name, name)
            if known != name:
                raise TopologyError(
                    f"table {self.table!r}: {known!r} and {name!r} are one column for {dialect.name}; rename one of them"
                )
        most = dialect.name_bytes_max
        for name in self.value:
            if most is not None and len(_previous(name)) > most:
                raise TopologyError(
                    f"column {name!r} of table {self.table!r}: {dialect.name} keeps {most} bytes of a name, and the value before "
                    f"is in {_previous(name)!r}; use at most {most - len(_previous(''))}"
                )

    @property
    def columns(self) -> list[tuple[str, str]]:
        """(name, declared SQL type) of every column, in order."""
        keys = [(name, self._column_type(name, self.key)) for name in self.key]
        values = [(name, self._column_type(name, self.value)) for name in self.value]
        previous = [(_previous(name), kind) for name, kind in values]
        integer, text = self.dialect.integer, self.dialect.text
        stamps = zip(STAMP_COLUMNS, (integer, integer, integer, text, integer, integer), strict=True)
        return [*keys, *values, *previous, *stamps]

    def _column_type(self, name: str, fields: Fields) -> str:
        declared = fields.type_of(name)
        if declared is None:
            raise TopologyError(f"column {name!r} needs a declared type: give Fields({name}=int) or the like")
        return self.dialect.type_of(name, declared)

    def check_columns(self, found: list[tuple[str, str]]) -> str:
        """What is wrong with the columns of a table that exists, and the statements that would mend it; empty when
        nothing is."""
        wanted = self.columns
        if sorted(found) == sorted(wanted):
            return ""
        missing = [f"{name} {kind}" for name, kind in wanted if (name, kind) not in found]
        extra = [f"{name} {kind}" for name, kind in found if (name, kind) not in wanted]
        names = {name for name, _ in found}
        required = {*self.key, *STAMP_COLUMNS}
        addable = [(name, kind) for name, kind in wanted if name not in names]
        mend = f"use another table, or drop it and create it with: {self.ddl()}"
        if not extra and addable and not required & {name for name, _ in addable}:
            added = " ".join(f'ALTER TABLE "{self.table}" ADD COLUMN "{name}" {kind};' for name, kind in addable)
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
        return f'CREATE TABLE "{self.table}" ({", ".join(lines)}, PRIMARY KEY ({key})){self.dialect.table_options}'

    @property
    def stage(self) -> str:
        """A temporary table that takes a batch of deltas."""
        return f'{self.dialect.temporary}"{self.stage_name}"'

    @property
    def stage_name(self) -> str:
        """Names the table and its columns, whatever their length: a connection outlives both."""
        return f"_stage_{hashlib.sha256(f'{self.table} {self._stage_columns}'.encode()).hexdigest()[:32]}"

    @property
    def _stage_columns(self) -> str:
        return ", ".join(f"{_q(name)} {kind}" for name, kind in self.columns if name in self.key or name in self.value)

    def stage_ddl(self) -> str:
        options = self.dialect.temporary_options
        return f"CREATE TEMP TABLE IF NOT EXISTS {_q(self.stage_name)} ({self._stage_columns}){options}"

    def mergeable(self, aggregates: Mapping[str, Aggregate]) -> bool:
        """Whether the database can merge all of them by itself."""
        return all(
            each.merge_rule and self.dialect.merges(each.merge_rule, self.value.type_of(name))
            for name, each in aggregates.items()
        )

    def select(self) -> str:
        """Every column, in order."""
        columns = ", ".join(f'"{name}"' for name, _ in self.columns)
        return f'SELECT {columns} FROM "{self.table}"'

    def upsert(self, aggregates: Mapping[str, Aggregate], value_type: ValueType, *, staged: bool) -> str:
        """The statement that merges deltas: all that are ``staged``, or one at a time. Parameters: the delta, unless it is
        staged; then txid, epoch, attempt, writer.

        A row of the same txid is left alone by the transactional rule, starts again from its previous value by the opaque one,
        and takes every delta otherwise. Rows whose stamp is above, or the same from another writer, are left alone: the
        caller compares the number of rows changed.
        """
        t = "_held"  # an alias, since a table may be called "excluded"
        same = f"{t}._txid = excluded._txid"
        skip_same_txid = value_type is ValueType.TRANSACTIONAL
        held = {name: f"{t}.{_q(name)}" for name in self.value}
        before = held
        if not skip_same_txid:
            before = {
                name: f"CASE WHEN {same} THEN {t}.{_q(_previous(name))} ELSE {each} END" for name, each in held.items()
            }
        old = held if value_type is ValueType.NON_TRANSACTIONAL else before
        merged: dict[str, str] = {}
        for name, each in aggregates.items():
            if not each.derived_from:
                merged[name] = self._merged(each.merge_rule, name, old[name])
        for name, each in aggregates.items():
            if each.derived_from:
                total, count = (f"({merged[part]})" for part in each.derived_from)
                merged[name] = f"CAST({total} AS {self._column_type(name, self.value)}) / NULLIF({count}, 0)"
        assignments = [f"{_q(name)} = {merged[name]}" for name in self.value]
        assignments += [f"{_q(_previous(name))} = {before[name]}" for name in self.value]
        exists = f"1 - {t}._deleted"
        if not skip_same_txid:
            exists = f"CASE WHEN {same} THEN {t}._prev_exists ELSE {exists} END"
        assignments.append(f"_prev_exists = {exists}")
        assignments += [f"{name} = excluded.{name}" for name in ("_txid", "_epoch", "_attempt", "_writer", "_deleted")]
        stamps = f"({t}._txid, {t}._epoch, {t}._attempt)"
        newer = "(excluded._txid, excluded._epoch, excluded._attempt)"
        allowed = f"{stamps} < {newer} OR ({stamps} = {newer} AND {t}._writer IN (excluded._writer, 'sweep'))"
        if skip_same_txid:
            allowed = f"{t}._txid < excluded._txid"
        keys = ", ".join(_q(name) for name in self.key)
        names = ", ".join(_q(name) for name in self.value)
        columns = f"{keys}, {names}, _txid, _epoch, _attempt, _writer, _deleted, _prev_exists"
        if staged:
            marks = ", ".join([f"CAST({self.dialect.mark} AS {self.dialect.integer})"] * 3)
            source = f"SELECT {keys}, {names}, {marks}, {self.dialect.mark}, 0, 0 FROM {self.stage} WHERE true"
        else:
            marks = ", ".join([self.dialect.mark] * (len(self.key) + len(self.value) + 4))
            source = f"VALUES ({marks}, 0, 0)"
        return (
            f"INSERT INTO {_q(self.table)} AS {t} ({columns}) {source} "
            f"ON CONFLICT ({keys}) DO UPDATE SET {', '.join(assignments)} WHERE {allowed}"
        )

    def _merged(self, rule: str, name: str, old: str) -> str:
        """Merge with null as the neutral element."""
        declared = self.value.type_of(name)
        new = f"excluded.{_q(name)}"
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
        """One row, unless there is one of its key. Parameters: every column."""
        names = [name for name, _ in self.columns]
        marks = ", ".join([self.dialect.mark] * len(names))
        columns = ", ".join(map(_q, names))
        return f'INSERT INTO "{self.table}" ({columns}) VALUES ({marks}) ON CONFLICT DO NOTHING'

    def update_row(self) -> str:
        """One row, if its stamp is the expected one. Parameters: every column but the key, the key, the stamp."""
        m = self.dialect.mark
        updates = ", ".join(f"{_q(name)} = {m}" for name, _ in self.columns if name not in self.key)
        match = " AND ".join(f"{_q(name)} = {m}" for name in self.key)
        return f'UPDATE "{self.table}" SET {updates} WHERE {match} AND _txid = {m} AND _epoch = {m} AND _attempt = {m}'

    def purge(self) -> str:
        """Parameter: txid."""
        return f'DELETE FROM "{self.table}" WHERE _deleted = 1 AND _txid < {self.dialect.mark}'

    def sweep(self) -> str:
        """Parameters: epoch, attempt, txid, epoch, attempt."""
        m = self.dialect.mark
        return (
            f'UPDATE "{self.table}" SET {self._restored()}, _epoch = {m}, _attempt = {m} '
            f"WHERE _txid = {m} AND (_epoch, _attempt) < ({m}, {m})"
        )

    def roll_back(self) -> str:
        """Parameters: new txid, epoch, attempt; txid to undo."""
        m = self.dialect.mark
        return (
            f'UPDATE "{self.table}" SET {self._restored()}, _txid = {m}, _epoch = {m}, _attempt = {m} WHERE _txid = {m}'
        )

    def _restored(self) -> str:
        """Assignments that put a row back to its previous value; a row that had none becomes a tombstone."""
        values = ", ".join(f"{_q(name)} = {_q(_previous(name))}" for name in self.value)
        return f"{values}, _deleted = 1 - _prev_exists, _writer = 'sweep'"


def _previous(name: str) -> str:
    """The column of the value before."""
    return f"_prev_{name}"


def _q(name: str) -> str:
    return f'"{name}"'
