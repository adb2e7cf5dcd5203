"""Simulated transactions that copy the tables of another database by the real ``Mirror`` (C41, C42,
C49).

A simulated source commits transactions over several tables: rows are inserted, updated, deleted and
get another key; tables are emptied, get columns, lose them, and join later. Its connector writes
each change to a log, leaves out large values that did not change, takes snapshots, and after a
restart repeats changes, sometimes from where it stopped in a repetition. A transaction of the
mirror takes the next records of the log. After each one, the copy is compared with a reference that
applies record by record, and with the source itself where the log has come to the end of a
transaction of the source.
"""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from framework import Fields
from framework.topology import Input
from framework.topology.groupings import ShuffleGrouping
from sinks import Mirror
from spouts import DebeziumChanges
from tests.kit.change_records import BIG, INT, TEXT, UNAVAILABLE, Record, change_record
from tests.simulation.table_world import SimTable, TableWorld, Violation, compare_rows

FIELDS = Fields.of({"key": pa.binary(), "value": pa.binary()})
#: The tables of the source, and their keys. The last one joins later.
TABLES = {"people": ("id",), "parts": ("id", "part"), "Orders": ("id",)}
KEYS = 4
HEARTBEAT = (
    b'{"serverName":"shop"}',
    b'{"schema":{"type":"struct","fields":[],"name":"io.debezium.connector.common.Heartbeat"},"payload":{"ts_ms":1}}',
)

Row = dict[str, Any]
Key = tuple[int, ...]
#: Rows by table and key.
Tables = dict[str, dict[Key, Row]]


@dataclass
class Change:
    """A record of the log. ``op``: as of Debezium; None: no change. ``settled``: the source's
    tables, if the record is the last one of its transaction and no older one is repeated yet."""

    record: Record
    table: str = ""
    op: str | None = None
    key: Key = ()
    row: Row = field(default_factory=dict)
    defaults: Row = field(default_factory=dict)
    settled: Tables | None = None

    def __repr__(self) -> str:
        return f"{self.op} {self.table} {self.row or self.key}" if self.op else "no change"


class Source:
    """The source database, with its connector."""

    def __init__(self, world: TableWorld[Any, Any]) -> None:
        chance = world.chance
        self.chance, self.struck, self._strikes = chance, world.struck, world.strike
        self.rows: Tables = {"people": {}, "parts": {}}
        self.columns: dict[str, dict[str, Any]] = {}
        for table, key in TABLES.items():
            self.columns[table] = {**dict.fromkeys(key, INT), "name": TEXT, "note": TEXT, "age": INT}
        self.defaults: dict[str, Row] = {table: {} for table in TABLES}
        self.full = chance.random() < 0.3  # REPLICA IDENTITY FULL: no value is left out
        self.leaves_out = not self.full and chance.random() < 0.6
        self.number = 0
        #: The changes, without repetitions.
        self.history: list[Change] = []
        self.log: list[Change] = []

    def commit(self) -> None:
        """Let the source commit a transaction, and the connector write its changes."""
        begin = len(self.history)
        for _ in range(self.chance.choice([1, 1, 2, 3, 5])):
            self._change()
        self._write(self.history[begin:])
        if self._strikes("restarted connector", 0.2):
            begin = max(0, len(self.history) - self.chance.randint(1, 12))
            while self._strikes("restarted again", 0.3):
                end = self.chance.randint(begin, len(self.history))
                self._write(self.history[begin:end], whole=False)
                begin = self.chance.randint(begin, end)
            self._write(self.history[begin:])

    def _write(self, changes: Sequence[Change], *, whole: bool = True) -> None:
        for each in changes:
            self.log.append(each)
            if each.op == "d":
                self.log.append(Change((each.record[0], None)))
            if self.chance.random() < 0.05:
                self.log.append(Change(HEARTBEAT))
        if changes and whole:
            self.log[-1] = copy.copy(self.log[-1])
            self.log[-1].settled = copy.deepcopy(self.rows)

    def _change(self) -> None:
        if "Orders" not in self.rows and self._strikes("new table", 0.1):
            self.rows["Orders"] = {}
        table = self.chance.choice([*self.rows])
        if self._strikes("schema change", 0.1):
            self._alter(table)
        if self._strikes("truncate", 0.05):
            self.rows[table] = {}
            self._note(table, "t", (), {})
        elif self._strikes("snapshot", 0.05):
            for key, row in self.rows[table].items():
                self._note(table, "r", key, row)
        else:
            self._change_row(table)

    def _change_row(self, table: str) -> None:
        key = self._any_key(table)
        held = self.rows[table].get(key)
        if held is not None and self.chance.random() < 0.25:
            self._delete(table, key)
            return
        if held is not None and self._strikes("key change", 0.2):
            other = self._any_key(table)
            if other not in self.rows[table]:
                self._delete(table, key)
                row = {**held, **dict(zip(TABLES[table], other, strict=True))}
                self.rows[table][other] = row
                self._note(table, "c", other, row)
                return
        self.number += 1
        row = {**dict(zip(TABLES[table], key, strict=True)), **self._values(table)}
        left_out = []
        if held is not None and self.leaves_out and self._strikes("left out", 0.5):
            left_out = ["note"] if held["note"] is not None else []
            row |= {name: held[name] for name in left_out}
        self.rows[table][key] = row
        self._note(table, "c" if held is None else "u", key, row | dict.fromkeys(left_out, UNAVAILABLE))

    def _values(self, table: str) -> Row:
        found: Row = {}
        for name, kind in self.columns[table].items():
            if name not in TABLES[table]:
                value = f"{name} {self.number}" if kind is TEXT or kind["type"] == "string" else self.number
                found[name] = None if self.chance.random() < 0.2 else value
        return found

    def _any_key(self, table: str) -> Key:
        return tuple(
            self.chance.randrange(KEYS) if place == 0 else self.number % 2 for place in range(len(TABLES[table]))
        )

    def _delete(self, table: str, key: Key) -> None:
        row = self.rows[table].pop(key)
        self._note(table, "d", key, row if self.full else dict(zip(TABLES[table], key, strict=True)))

    def _alter(self, table: str) -> None:
        columns = self.columns[table]
        own = [name for name in columns if name not in (*TABLES[table], "note", "age")]
        what = self.chance.random()
        if what < 0.6:
            name = f"more_{len(self.defaults[table])}_{self.number}"
            default = self.chance.choice([None, None, 7, "word"])
            kind = INT if isinstance(default, int) else TEXT
            columns[name] = {**kind, "default": default} if default is not None else kind
            self.defaults[table][name] = default
            for row in self.rows[table].values():
                row[name] = default
        elif what < 0.8 and own:
            dropped = self.chance.choice(own)
            del columns[dropped]
            for row in self.rows[table].values():
                del row[dropped]
        else:
            columns["age"] = BIG

    def _note(self, table: str, op: str, key: Key, row: Row) -> None:
        columns = self.columns[table]
        its = None if op == "t" else row
        record = change_record(table, columns, op, its, key=TABLES[table], lsn=len(self.history))
        defaults = {name: self.defaults[table].get(name) for name in columns}
        self.history.append(Change(record, table, op, key, dict(row), defaults))


@dataclass
class Copy:
    """The reference: rows by table and key. For each table: its columns, also dropped ones, with
    what older rows hold in them; the columns of its last change; and the txid of that."""

    rows: Tables = field(default_factory=dict)
    columns: dict[str, Row] = field(default_factory=dict)
    newest: dict[str, list[str]] = field(default_factory=dict)
    changed_in: dict[str, int] = field(default_factory=dict)

    def apply(self, change: Change, txid: int) -> None:
        table = change.table
        if change.op is None:
            return
        if change.op == "t":
            if table in self.rows:
                self.rows[table] = {}
                self.changed_in[table] = txid
            return
        known = self.columns.setdefault(table, {})
        rows = self.rows.setdefault(table, {})
        for name, default in change.defaults.items():
            if name not in known:
                known[name] = default if table in self.newest else None
                for row in rows.values():
                    row[name] = known[name]
        self.newest[table], self.changed_in[table] = list(change.defaults), txid
        if change.op == "d":
            rows.pop(change.key, None)
            return
        if change.key not in rows and UNAVAILABLE in change.row.values():
            return  # it is repeated, and so will be the deletion of its row
        held = rows.get(change.key, known)
        rows[change.key] = held | {name: value for name, value in change.row.items() if value != UNAVAILABLE}


class World(TableWorld[Change, Copy]):
    opaque, can_undo = True, True

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.model = self.before = Copy()
        self.source = Source(self)
        self.stamped, self.one_step = chance.random() < 0.7, chance.random() < 0.3
        self.at = self.at_before = 0  # where the next transaction, and the last one, begins in the log
        self.bound: Mirror | None = None

    def committer(self) -> Mirror:
        if self.bound is None:
            self.bound = Mirror(self.table, DebeziumChanges())
            self.bound.bind("mirror", [Input("spout", "default", FIELDS, ShuffleGrouping())], 1)
        return copy.copy(self.bound)

    def table(self, name: str) -> SimTable:
        table = SimTable(self.path, name, stamp="_txid" if self.stamped else None)
        table.statements_left = self.left
        return table

    def batch(self) -> list[Change]:
        """A transaction of the mirror may end within one of the source, and within what a restarted
        connector repeats."""
        end = self.at + self.chance.choice([0, 1, 2, 4, 8, 12])
        while len(self.source.log) < end:
            self.source.commit()
        return self.source.log[self.at : end]

    def rows(self, records: Sequence[Change]) -> pa.RecordBatch:
        columns = zip(*(each.record for each in records), strict=True)
        return pa.RecordBatch.from_arrays([pa.array(each, pa.binary()) for each in columns], names=list(FIELDS))

    def is_written(self, part: Sequence[Change]) -> bool:
        return any(each.op is not None for each in part)

    def after(self, txid: int, batch: Sequence[Change]) -> Copy:
        found = copy.deepcopy(self.model)
        for each in batch:
            found.apply(each, txid)
        self.at_before, self.at = self.at, self.at + len(batch)
        return found

    def restored(self) -> Copy:
        self.at = self.at_before
        return self.before

    # --- what is checked --------------------------------------------------------------------------

    def compare(self, txid: int) -> None:
        table = self.table("ratchet_mirror")
        with table._reading() as connection:
            catalog = dict(connection.execute("SELECT table_name, changed_in FROM ratchet_mirror").fetchall())
            if catalog != self.model.changed_in:
                raise Violation(f"transaction {txid}: the catalog has {catalog}, expected: {self.model.changed_in}")
            for name, columns in self.model.columns.items():
                listed = ", ".join(f'"{each}"' for each in columns)
                found = Counter(connection.execute(f'SELECT {listed} FROM "{name}"').fetchall())
                compare_rows(f"transaction {txid}, {name}", found, self._expected(self.model, name, columns))
        self._compare_with_source(txid)
        self.compare_held(txid, self.model, "")
        if txid > 1:
            self.compare_held(txid - 1, self.before, "")

    def _compare_with_source(self, txid: int) -> None:
        settled = self.source.log[self.at - 1].settled if self.at else {}
        if settled is None:
            return
        self.struck["compared with the source"] += 1
        for name, rows in settled.items():
            known = self.model.columns.get(name, {})
            its = [{column: row[column] for column in row if column in known} for row in rows.values()]
            own = self.model.rows.get(name, {}).values()
            mirrored = [{column: row[column] for column in known if column in some} for row in own for some in its[:1]]
            if Counter(map(_frozen, its)) != Counter(map(_frozen, mirrored)) or len(own) != len(its):
                raise Violation(f"transaction {txid}: {name} of the source has {its}, the copy {[*own]}")

    def compare_held(self, txid: int, model: Copy, when: str) -> None:
        """Read the copy as of a transaction: the tables and columns are those of the last one."""
        if txid < 1:
            return
        with self.committer().states()[0].held_rows() as held:
            found: dict[str, Counter[Any]] = {name: Counter() for name in held.shapes}
            for name, row in held.rows(txid):
                found[name][tuple(row.values())] += 1
            shapes = {name: [*fields] for name, (_, fields) in held.shapes.items()}
        if shapes != self.model.newest:
            raise Violation(f"as of {txid} {when}: the catalog has {shapes}, expected: {self.model.newest}")
        for name, columns in shapes.items():
            compare_rows(f"{name} as of {txid} {when}", found[name], self._expected(model, name, columns))

    def _expected(self, model: Copy, name: str, columns: Sequence[str]) -> Counter[Any]:
        """The rows; those from before a column hold its default."""
        known = self.model.columns[name]
        return Counter(
            tuple(row.get(each, known.get(each)) for each in columns) for row in model.rows.get(name, {}).values()
        )


def _frozen(row: Row) -> str:
    return json.dumps(row, sort_keys=True)


def run_mirror(seed: int) -> tuple[str | None, World]:
    """Run the schedule of a seed. Returns what was wrong, and the world."""
    world = World(random.Random(f"mirror {seed}"))
    return world.verdict(), world
