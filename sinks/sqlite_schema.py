"""The shape of a SQLite state: which columns a table has, and the SQL that creates, checks, reads and writes it.

::

    word TEXT NOT NULL, ...        key columns, the primary key
    count INTEGER, ...             value columns, as the user named them
    _prev_count INTEGER, ...       the values before the transaction that wrote last
    _txid, _epoch, _attempt        the stamp
    _writer                        the task that wrote it
    _deleted, _prev_exists         0 or 1: a tombstone; whether there was a row before

Identifiers are checked against an allow-list and quoted; values are bound.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pyarrow as pa

from framework.errors import TopologyError
from framework.topology import Fields

HEADERS_TABLE = "_ratchet_headers"
HEADERS_DDL = f"""CREATE TABLE IF NOT EXISTS {HEADERS_TABLE} (
    state TEXT NOT NULL PRIMARY KEY, format INTEGER NOT NULL, topology_id TEXT NOT NULL, incarnation TEXT NOT NULL,
    epoch INTEGER NOT NULL, open_txid INTEGER, open_attempt INTEGER, open_digest TEXT, done INTEGER NOT NULL
) STRICT"""

STAMP_COLUMNS = ("_txid", "_epoch", "_attempt", "_writer", "_deleted", "_prev_exists")
_STAMP_TYPES = ("INTEGER", "INTEGER", "INTEGER", "TEXT", "INTEGER", "INTEGER")
_IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,62}")


def identifier(name: str, what: str) -> str:
    """A name that is safe in SQL. Raises ``TopologyError``."""
    if not _IDENTIFIER.fullmatch(name):
        raise TopologyError(
            f"{what} {name!r} is not usable in SQL: 1 to 63 letters, digits and '_', starting with a letter"
        )
    return name


def sql_type(name: str, declared: pa.DataType | None) -> str:
    """The SQLite type of a field. Raises ``TopologyError`` for types that would not come back as they went in."""
    if declared is None:
        raise TopologyError(f"column {name!r} needs a declared type: give Fields({name}=int) or the like")
    if pa.types.is_uint64(declared):
        raise TopologyError(f"column {name!r}: SQLite has no unsigned 64-bit integers; declare it as int")
    if pa.types.is_integer(declared) or pa.types.is_boolean(declared):
        return "INTEGER"
    if pa.types.is_floating(declared):
        return "REAL"
    if pa.types.is_string(declared) or pa.types.is_large_string(declared):
        return "TEXT"
    if pa.types.is_binary(declared) or pa.types.is_large_binary(declared):
        return "BLOB"
    raise TopologyError(
        f"column {name!r}: SQLite cannot hold {declared} exactly; cast it to an integer, a float, a string or bytes first"
    )


@dataclass(frozen=True)
class TableShape:
    """One state's table."""

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

    @property
    def columns(self) -> list[tuple[str, str]]:
        """(name, declared SQL type) of every column, in order."""
        keys = [(name, sql_type(name, self.key.type_of(name))) for name in self.key]
        values = [(name, sql_type(name, self.value.type_of(name))) for name in self.value]
        previous = [(f"_prev_{name}", kind) for name, kind in values]
        return [*keys, *values, *previous, *zip(STAMP_COLUMNS, _STAMP_TYPES, strict=True)]

    def ddl(self) -> str:
        """The statement that creates the table."""
        required = {*self.key, *STAMP_COLUMNS}
        lines = [f'"{name}" {kind}{" NOT NULL" if name in required else ""}' for name, kind in self.columns]
        key = ", ".join(f'"{name}"' for name in self.key)
        return f'CREATE TABLE "{self.table}" ({", ".join(lines)}, PRIMARY KEY ({key})) STRICT, WITHOUT ROWID'

    @property
    def stage(self) -> str:
        return f"_stage_{self.table}"

    def stage_ddl(self) -> str:
        """A temporary table that takes a batch of deltas."""
        columns = ", ".join(f'"{name}"' for name in (*self.key, *self.value))
        return f'CREATE TEMP TABLE IF NOT EXISTS "{self.stage}" ({columns})'

    def upsert(self, merge_rules: dict[str, str], *, keep_previous: bool, skip_same_txid: bool) -> str:
        """The one statement that merges the staged deltas. Parameters: txid, epoch, attempt, writer.

        ``skip_same_txid`` is the transactional rule; otherwise, with ``keep_previous``, a row of the same txid starts
        again from its previous value (opaque), and without it every delta is applied. Rows whose stamp is above, or the
        same from another writer, are left alone: the caller compares the number of rows changed.
        """
        t = f'"{self.table}"'
        names = [f'"{name}"' for name in self.value]
        same = f"{t}._txid = excluded._txid"
        assignments = []
        for name in self.value:
            old = f'{t}."{name}"'
            if keep_previous and not skip_same_txid:
                old = f'CASE WHEN {same} THEN {t}."_prev_{name}" ELSE {t}."{name}" END'
            assignments.append(f'"{name}" = {_merged(merge_rules[name], old, f"excluded.{_q(name)}")}')
            if keep_previous:
                assignments.append(f'"_prev_{name}" = {old}')
        if keep_previous:
            exists = "1 - " + f"{t}._deleted"
            if not skip_same_txid:
                exists = f"CASE WHEN {same} THEN {t}._prev_exists ELSE 1 - {t}._deleted END"
            assignments.append(f"_prev_exists = {exists}")
        assignments += [f"{name} = excluded.{name}" for name in ("_txid", "_epoch", "_attempt", "_writer", "_deleted")]
        stamps = f"({t}._txid, {t}._epoch, {t}._attempt)"
        newer = "(excluded._txid, excluded._epoch, excluded._attempt)"
        allowed = f"{stamps} < {newer} OR ({stamps} = {newer} AND {t}._writer IN (excluded._writer, 'sweep'))"
        if skip_same_txid:
            allowed = f"{t}._txid < excluded._txid"
        keys = ", ".join(_q(name) for name in self.key)
        return (
            f"INSERT INTO {t} ({keys}, {', '.join(names)}, _txid, _epoch, _attempt, _writer, _deleted, _prev_exists) "
            f'SELECT {keys}, {", ".join(names)}, ?, ?, ?, ?, 0, 0 FROM temp."{self.stage}" WHERE true '
            f"ON CONFLICT ({keys}) DO UPDATE SET {', '.join(assignments)} WHERE {allowed}"
        )

    def staged_rows(self) -> str:
        """Keys and values of every staged key, as they are in the table now."""
        columns = ", ".join(f"t.{_q(name)}" for name in (*self.key, *self.value))
        match = " AND ".join(f"t.{_q(name)} = s.{_q(name)}" for name in self.key)
        return f'SELECT {columns} FROM temp."{self.stage}" s JOIN "{self.table}" t ON {match} ORDER BY s.rowid'

    def newer_rows(self) -> str:
        """One staged key whose row has a txid above the parameter, or the same txid and a higher (epoch, attempt)."""
        keys = ", ".join(f"t.{_q(name)}" for name in self.key)
        match = " AND ".join(f"t.{_q(name)} = s.{_q(name)}" for name in self.key)
        return (
            f'SELECT {keys}, t._txid, t._epoch, t._attempt, t._writer FROM temp."{self.stage}" s '
            f'JOIN "{self.table}" t ON {match} WHERE (t._txid, t._epoch, t._attempt) >= (?, ?, ?) LIMIT 1'
        )

    def sweep(self) -> str:
        """Parameters: epoch, attempt, txid, epoch, attempt."""
        return (
            f'UPDATE "{self.table}" SET {self._restored()}, _epoch = ?, _attempt = ? '
            "WHERE _txid = ? AND (_epoch, _attempt) < (?, ?)"
        )

    def roll_back(self) -> str:
        """Parameters: new txid, epoch, attempt; txid to undo."""
        return f'UPDATE "{self.table}" SET {self._restored()}, _txid = ?, _epoch = ?, _attempt = ? WHERE _txid = ?'

    def _restored(self) -> str:
        """Assignments that put a row back to its previous value; a row that had none becomes a tombstone."""
        values = ", ".join(f'"{name}" = "_prev_{name}"' for name in self.value)
        return f"{values}, _deleted = 1 - _prev_exists, _writer = 'sweep'"


def _merged(rule: str, old: str, new: str) -> str:
    """Merge with null as the neutral element."""
    both = {"add": f"({old}) + {new}", "min": f"min({old}, {new})", "max": f"max({old}, {new})"}[rule]
    return f"CASE WHEN ({old}) IS NULL THEN {new} WHEN {new} IS NULL THEN {old} ELSE {both} END"


def _q(name: str) -> str:
    return f'"{name}"'
