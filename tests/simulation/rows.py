"""Simulated transactions that write tables of rows by the real committers (C41, C42).

A schedule draws changes that repeat keys, come out of order, delete and leave out values; tasks and
leaders that change; and a column that a later version of the topology adds. After each transaction
the table is compared with a reference that knows no attempt, no task and no SQL.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from framework import Fields
from framework.topology import Input, TransactionAttempt
from framework.topology.groupings import FieldsGrouping, ShuffleGrouping
from sinks import AppendCommitter, UpsertCommitter
from tests.simulation.table_world import SimTable, TableWorld, compare_rows

KEYS = 5
#: The txid of rows that were there before, in the reference.
USERS = None
FIELDS: dict[str, pa.DataType] = {
    "id": pa.int64(),
    "name": pa.string(),
    "note": pa.string(),
    "lsn": pa.int64(),
    "tombstone": pa.bool_(),
    "unavailable": pa.list_(pa.string()),
}
ADDED = "extra"
COLUMNS = ["id", "name", "note", "lsn"]
_NARROW, _WIDER = Fields.of(FIELDS), Fields.of({**FIELDS, ADDED: pa.string()})
_numbers = itertools.count()

Row = dict[str, Any]
Change = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """What a seed decides about a schedule."""

    upserts: bool
    sequence: bool
    ignore_nulls: bool
    leaves_out: bool
    stamp: bool
    opaque: bool
    adds_column: bool
    keep_deletes: int
    users_rows: bool
    one_step: bool

    @classmethod
    def of(cls, chance: random.Random) -> Shape:
        upserts = chance.random() < 0.75
        stamp = chance.random() < 0.7
        sequence = upserts and chance.random() < 0.6
        return cls(
            upserts,
            sequence,
            upserts and chance.random() < 0.25,
            upserts and not sequence and chance.random() < 0.25,
            stamp,
            (stamp or upserts) and chance.random() < 0.7,
            upserts and chance.random() < 0.4,
            chance.choice([0, 1, 2, 100]),
            stamp and chance.random() < 0.3,
            chance.random() < 0.3,
        )


@dataclass
class Model:
    """The reference: rows by key, with the txid that wrote them, and the sequences of deletions;
    or the rows that were appended, with their txids."""

    shape: Shape
    rows: dict[int, tuple[Row, int | None]] = field(default_factory=dict)
    deleted: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # key -> (sequence, txid)
    appended: list[tuple[Row, int | None]] = field(default_factory=list)

    def copy(self) -> Model:
        deleted = {key: list(its) for key, its in self.deleted.items()}
        return replace(self, rows=dict(self.rows), deleted=deleted, appended=list(self.appended))

    def apply(self, change: Change, txid: int, columns: Sequence[str]) -> None:
        row = {name: change.get(name) for name in columns}
        if not self.shape.upserts:
            self.appended.append((row, txid))
            return
        key, (held, _) = change["id"], self.rows.get(change["id"], (None, None))
        if self.shape.sequence:
            floor = max(
                [*([held["lsn"]] if held else []), *(each for each, _ in self.deleted.get(key, []))], default=-1
            )
            if change["lsn"] < floor:
                return
        if change["tombstone"]:
            self.rows.pop(key, None)
            if self.shape.sequence:
                self.deleted.setdefault(key, []).append((change["lsn"], txid))
            return
        for name in columns:
            keeps = name in change["unavailable"] or (self.shape.ignore_nulls and row[name] is None)
            if keeps and held is not None:
                row[name] = held.get(name)
        self.rows[key] = row, txid

    def purge(self, before: int) -> None:
        for key, its in self.deleted.items():
            self.deleted[key] = [each for each in its if each[1] >= before - self.shape.keep_deletes]

    def content(self, columns: Sequence[str], *, stamped: bool) -> Counter[tuple[Any, ...]]:
        rows = self.rows.values() if self.shape.upserts else self.appended
        return Counter((*(row.get(each) for each in columns), *([txid] if stamped else [])) for row, txid in rows)


class World(TableWorld[Change, Model]):
    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.shape = Shape.of(chance)
        self.trace.append(str(self.shape))
        self.columns, self.tasks, self.lsn = list(COLUMNS), 1, 0
        self.model = self.before = Model(self.shape)
        self.committers: dict[tuple[int, int], Any] = {}
        self.opaque, self.one_step = self.shape.opaque, self.shape.one_step
        self.can_undo = self.shape.stamp or self.shape.upserts

    def _run(self) -> None:
        if self.shape.users_rows:
            self._insert_users_rows()
        super()._run()

    def _insert_users_rows(self) -> None:
        with self.table()._reading() as connection:
            key = ", PRIMARY KEY (id)" if self.shape.upserts else ""
            connection.execute(f"CREATE TABLE t (id INTEGER, name TEXT, note TEXT, lsn INTEGER, mine TEXT{key}) STRICT")
            connection.execute("INSERT INTO t VALUES (1, 'users', 'own', 3, 'x'), (99, 'users', NULL, 0, 'y')")
        for row in ({"id": 1, "name": "users", "note": "own", "lsn": 3}, {"id": 99, "name": "users", "lsn": 0}):
            self.model.rows[row["id"]] = row, USERS
            self.model.appended.append((row, USERS))

    def change_topology(self) -> None:
        if self.strike("other tasks", 0.3) and self.can_undo:
            self.tasks = self.chance.choice([1, 2, 3])
        super().change_topology()
        if self.shape.adds_column and ADDED not in self.columns and self.strike("added column", 0.3):
            self.columns = [*self.columns, ADDED]

    def after(self, txid: int, batch: Sequence[Change]) -> Model:
        found = self.model.copy()
        for each in batch:
            found.apply(each, txid, self.columns)
        return found

    def purge(self, txid: int) -> None:
        table = self.committer().table
        table.purge(table.read_header(), txid)
        self.model.purge(txid)

    def restored(self) -> Model:
        """A deletion that was purged meanwhile stays purged."""
        restored = self.before.copy()
        for key, its in restored.deleted.items():
            kept = self.model.deleted.get(key, [])
            restored.deleted[key] = [each for each in its if each in kept]
        return restored

    @property
    def version(self) -> int:
        return len(self.columns)

    def write_late(self, attempt: TransactionAttempt, part: Sequence[Change], version: int) -> None:
        columns, self.columns = self.columns, self.columns[:version]
        try:
            self.write(attempt, part)
        finally:
            self.columns = columns

    def rows(self, records: Sequence[Change]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([self.as_row(each) for each in records], self.fields.schema())

    # --- what is written --------------------------------------------------------------------------

    def batch(self) -> list[Change]:
        made: list[Change] = []
        rows = dict.fromkeys(self.model.rows, True)
        for _ in range(self.chance.choice([0, 1, 2, 4, 8])):
            key = self.chance.randrange(KEYS)
            self.lsn += self.chance.choice([0, 1, 1])
            lsn = self.lsn
            if self.strike("out of order", 0.3):
                lsn = max(0, lsn - self.chance.randint(1, 10))
            dead = self.shape.upserts and self.strike("deletion", 0.25)
            left_out = []
            if self.shape.leaves_out and key in rows and not dead and self.strike("left out", 0.4):
                left_out = ["note"]
            text = f"{key}.{next(_numbers)}"
            change: Change = {
                "id": key,
                "name": None if self.chance.random() < 0.2 else text,
                "note": None if left_out or self.chance.random() < 0.3 else f"note {text}",
                "lsn": lsn,
                ADDED: f"more {text}",
                "tombstone": dead,
                "unavailable": left_out,
            }
            made.append(change)
            if dead:
                rows.pop(key, None)
            else:
                rows[key] = True
        return made

    def parts(self, batch: Sequence[Change]) -> list[list[Change]]:
        tasks = self.tasks if self.shape.upserts or self.shape.stamp else 1
        return [[each for each in batch if each["id"] % tasks == task] for task in range(tasks)]

    @property
    def fields(self) -> Fields:
        return _WIDER if ADDED in self.columns else _NARROW

    def as_row(self, change: Change) -> Row:
        row = {name: change[name] for name in self.fields}
        if change["tombstone"]:
            row.update(dict.fromkeys(("name", "note")))
        return row

    def table(self) -> SimTable:
        table = SimTable(self.path, "t", stamp="_txid" if self.shape.stamp else None)
        table.statements_left = self.left
        return table

    def committer(self) -> Any:
        """A copy of the committer, as a task gets one."""
        version = (self.tasks, len(self.columns))
        if version not in self.committers:
            self.committers[version] = self.bound()
        return copy.copy(self.committers[version])

    def bound(self) -> Any:
        made: Any
        if self.shape.upserts:
            made = UpsertCommitter(
                self.table(),
                ["id"],
                sequence_by="lsn" if self.shape.sequence else None,
                ignore_nulls=self.shape.ignore_nulls,
                on_new_column="add",
                keep_deletes=self.shape.keep_deletes,
                columns=self.columns,
            )
        else:
            made = AppendCommitter(self.table(), self.columns)
        grouping = FieldsGrouping(Fields("id")) if self.tasks > 1 and self.shape.upserts else ShuffleGrouping()
        made.bind("rows", [Input("spout", "default", self.fields, grouping)], self.tasks if self.can_undo else 1)
        return made

    # --- what is checked --------------------------------------------------------------------------

    def compare(self, txid: int) -> None:
        table = self.committer().table
        with table._reading() as connection:
            held = {each.name for each in table._held_columns(connection, "t")}
            columns = [each for each in (*COLUMNS, ADDED) if each in held]
            names = [*columns, *(["_txid"] if self.shape.stamp else [])]
            found = Counter(connection.execute(f"SELECT {', '.join(names)} FROM t").fetchall())
        expected = self.model.content(columns, stamped=self.shape.stamp)
        compare_rows(f"transaction {txid}", found, expected)
        self.compare_held(txid, self.model, "")
        if txid > 1 and self.can_undo:
            self.compare_held(txid - 1, self.before, "")

    def compare_held(self, txid: int, model: Model, when: str) -> None:
        """Read the table as of a transaction."""
        if not self.can_undo or txid < 1:
            return
        with self.committer().table.held_rows() as held:
            found = Counter(held.rows(txid))
        compare_rows(f"read as of {txid} {when}", found, model.content(self.columns, stamped=False))


def run_rows(seed: int) -> tuple[str | None, World]:
    """Run the schedule of a seed. Returns what was wrong, and the world."""
    world = World(random.Random(f"rows {seed}"))
    return world.verdict(), world
