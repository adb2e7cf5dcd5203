"""Simulated transactions that write tables of rows by the real committers (C41, C42).

A schedule draws changes that repeat keys, come out of order, delete and leave out values; tasks and
leaders that change; and a column that a later version of the topology adds. Attempts die between
any two statements, or after a commit whose answer is lost; the next one has the same batch, or
another one, is made after a roll-back, or meets tasks of a dead attempt. After each transaction the
table is compared with a reference that knows no attempt, no task and no SQL.
"""

from __future__ import annotations

import copy
import itertools
import os
import random
import sqlite3
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from framework import Fields
from framework.errors import RetryableError, StaleWriterError
from framework.topology import CommitFence, Header, Input, OpenCommit, TransactionAttempt
from framework.topology.groupings import FieldsGrouping, ShuffleGrouping
from sinks import AppendCommitter, SqliteTable, UpsertCommitter
from sinks.sql.sqlite_store import SqliteFile

TOPOLOGY, DIGEST = "rows", "digest"
KEYS = 5
TRANSACTIONS = 7
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


class Violation(Exception):
    pass


class Died(RetryableError):
    """A task ends before a statement, or before it hears of its commit."""


class MemoryFile(SqliteFile):
    """A database in memory, with one connection."""

    def _opened(self) -> sqlite3.Connection:
        return sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)

    def _there(self) -> tuple[int, int] | None:
        return 0, 0

    def close(self) -> None:
        """Nothing closes it but ``drop``: it would be empty then."""

    def drop(self) -> None:
        super().close()
        MemoryFile._open.pop((MemoryFile, os.getpid(), self.path), None)


class SimTable(SqliteTable):
    """A table that lets a task die before a statement, or after its commit."""

    _opens = MemoryFile
    #: How many statements are still made; None: all.
    statements_left: list[int | None]

    def _run(self, connection: Any, statement: str, parameters: Sequence[Any] = ()) -> Any:
        left = self.statements_left[0]
        if left is not None:
            if left == 0:
                raise Died("before a statement")
            self.statements_left[0] = left - 1
        return super()._run(connection, statement, parameters)

    def for_reading(self) -> SimTable:
        return self


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


class World:
    def __init__(self, chance: random.Random) -> None:
        self.chance, self.shape = chance, Shape.of(chance)
        self.struck: Counter[str] = Counter()
        self.trace: list[str] = []
        self.path = f"/simulated/{next(_numbers)}.db"
        self.left: list[int | None] = [None]
        self.columns, self.tasks, self.epoch, self.lsn = list(COLUMNS), 1, 1, 0
        self.model = Model(self.shape)
        self.before = self.model  # as of the transaction before the last one
        self.committers: dict[tuple[int, int], Any] = {}
        self.late: list[tuple[TransactionAttempt, list[Change], int]] = []  # tasks of dead attempts

    def strike(self, what: str, share: float) -> bool:
        if self.chance.random() >= share:
            return False
        self.struck[what] += 1
        return True

    def run(self) -> None:
        try:
            self._run()
        finally:
            MemoryFile.at(self.path).drop()

    def _run(self) -> None:
        if self.shape.users_rows:
            self._insert_users_rows()
        self.committer().table.prepare(TOPOLOGY)
        txid, last = 1, self.chance.randint(2, TRANSACTIONS)
        while txid <= last:
            self._change_topology()
            self.transaction(txid)
            if self.model.shape.stamp | self.shape.upserts and self.strike("undo", 0.08):
                self._undo(txid)
                last -= self.chance.random() < 0.5
                continue
            txid += 1

    def _insert_users_rows(self) -> None:
        with self.table()._reading() as connection:
            key = ", PRIMARY KEY (id)" if self.shape.upserts else ""
            connection.execute(f"CREATE TABLE t (id INTEGER, name TEXT, note TEXT, lsn INTEGER, mine TEXT{key}) STRICT")
            connection.execute("INSERT INTO t VALUES (1, 'users', 'own', 3, 'x'), (99, 'users', NULL, 0, 'y')")
        for row in ({"id": 1, "name": "users", "note": "own", "lsn": 3}, {"id": 99, "name": "users", "lsn": 0}):
            self.model.rows[row["id"]] = row, USERS
            self.model.appended.append((row, USERS))

    def _change_topology(self) -> None:
        if self.strike("other tasks", 0.3) and (self.shape.stamp or self.shape.upserts):
            self.tasks = self.chance.choice([1, 2, 3])
        if self.strike("another leader", 0.1):
            self.epoch += 1
        if self.shape.adds_column and ADDED not in self.columns and self.strike("added column", 0.3):
            self.columns = [*self.columns, ADDED]

    # --- one transaction --------------------------------------------------------------------------

    def transaction(self, txid: int) -> None:
        batch, attempt = self.batch(), 0
        while True:
            attempt += 1
            if self.attempt(txid, attempt, batch):
                if not self.strike("replay of what is done", 0.1):
                    break
            else:
                self.struck["attempt died"] += 1
            if self.strike("another leader", 0.2):
                self.epoch += 1
            if self.can_undo and self.strike("roll-back", 0.2):
                attempt += 1
                self._roll_back(txid, attempt)
                batch = self.batch()
            elif self.shape.opaque and self.strike("another batch", 0.5):
                batch = self.batch()
        self.before, self.model = self.model, self.after(txid, batch)
        table = self.committer().table
        header = table.read_header()
        if header.done != txid:
            raise Violation(f"the header says {header} after transaction {txid}")
        self.compare(txid)
        if self.strike("purge", 0.5):
            table.purge(table.read_header(), txid)
            self.model.purge(txid)

    @property
    def can_undo(self) -> bool:
        return self.shape.stamp or self.shape.upserts

    def after(self, txid: int, batch: Sequence[Change]) -> Model:
        found = self.model.copy()
        for each in batch:
            found.apply(each, txid, self.columns)
        return found

    def _open(self, txid: int, attempt: int) -> tuple[Header, Header]:
        found = self.committer().table.read_header()
        return found, found.opened(self.epoch, OpenCommit(txid, attempt, DIGEST))

    def _roll_back(self, txid: int, attempt: int) -> None:
        table = self.committer().table
        found, header = self._open(txid, attempt)
        table.raise_header(found, header)
        table.roll_back(header)
        self.trace.append(f"{txid}:{attempt} rolled back")
        self.compare_held(txid - 1, self.model, "after the roll-back")

    def _undo(self, txid: int) -> None:
        """Take the last transaction back. A deletion that was purged meanwhile stays purged."""
        self._roll_back_to(txid)
        restored = self.before.copy()
        for key, its in restored.deleted.items():
            kept = self.model.deleted.get(key, [])
            restored.deleted[key] = [each for each in its if each in kept]
        self.model = restored
        self.late.clear()
        self.compare_held(txid - 1, self.model, "after the undo")

    def _roll_back_to(self, txid: int) -> None:
        table = self.committer().table
        header = self._open(txid, 1_000)[1]
        table.raise_header(table.read_header(), header)
        table.roll_back(header)
        self.epoch += 1

    def attempt(self, txid: int, number: int, batch: Sequence[Change]) -> bool:
        """Whether the attempt has come to its end."""
        if self.strike("died in processing", 0.1):
            return False
        parts = self.parts(batch)
        found, header = self._open(txid, number)
        if self.shape.one_step and len(parts) == 1 and number == 1:
            return self._one_step(found, parts[0], txid)
        self.committer().table.raise_header(found, header)
        if self.strike("late task", 0.4):
            self._late_tasks_write()
        tasks = [*enumerate(parts)]
        self.chance.shuffle(tasks)
        for done, (task, part) in enumerate(tasks):
            attempt = self.granted(header, task)
            if self.strike("died before a statement", 0.12):
                self.left[0] = self.chance.randint(0, 12)
            try:
                self.write(attempt, part)
                if self.strike("doubled task", 0.1):
                    self.write(attempt, part)
                if self.strike("answer lost", 0.05):
                    raise Died("after its commit")
            except Died as error:
                self.trace.append(f"{txid}:{number} task {task} died {error}")
                self.late += [(self.granted(header, each), its, len(self.columns)) for each, its in tasks[done:]]
                self.left[0] = None
                self.compare_held(txid - 1, self.model, "in an attempt that died")
                return False
            finally:
                self.left[0] = None
        if self.strike("died before done", 0.1):
            return False
        self.committer().table.raise_header(header, header.finished(txid))
        self.trace.append(f"{txid}:{number} is done: {batch}")
        return True

    def _one_step(self, found: Header, part: Sequence[Change], txid: int) -> bool:
        self.struck["one step"] += 1
        fence = CommitFence(TOPOLOGY, self.epoch, DIGEST, "rows:0", opens_from=found)
        attempt = TransactionAttempt(txid, 1, fence)
        if self.strike("died before a statement", 0.15):
            self.left[0] = self.chance.randint(0, 12)
        try:
            self.write(attempt, part)
        except Died:
            return False
        finally:
            self.left[0] = None
        return not self.strike("answer lost", 0.1)

    def _late_tasks_write(self) -> None:
        for attempt, part, width in self.late:
            columns, self.columns = self.columns, self.columns[:width]
            try:
                self.write(attempt, part)
            except StaleWriterError:
                self.struck["late task refused"] += 1
            else:
                if not part:
                    continue  # there was nothing to write
                raise Violation(f"a task of the dead attempt {attempt} has written")
            finally:
                self.columns = columns
        self.late.clear()

    def granted(self, header: Header, task: int) -> TransactionAttempt:
        assert header.open is not None
        fence = CommitFence(TOPOLOGY, header.epoch, DIGEST, f"rows:{task}")
        return TransactionAttempt(header.open.txid, header.open.attempt_id, fence)

    def write(self, attempt: TransactionAttempt, part: Sequence[Change]) -> None:
        made = self.committer()
        made.prepare({}, None, None, attempt)  # type: ignore[arg-type]
        cut = self.chance.randint(0, len(part))
        for some in (part[:cut], part[cut:]):
            if some:
                made.execute_arrow(
                    pa.RecordBatch.from_pylist([self.as_row(each) for each in some], self.fields.schema())
                )
        made.finish_batch()

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
        if found != expected:
            raise Violation(f"transaction {txid}: more: {found - expected}, missing: {expected - found}")
        self.compare_held(txid, self.model, "")
        if txid > 1 and self.can_undo:
            self.compare_held(txid - 1, self.before, "")

    def compare_held(self, txid: int, model: Model, when: str) -> None:
        """Read the table as of a transaction."""
        if not self.can_undo or txid < 1:
            return
        with self.committer().table.held_rows() as held:
            found = Counter(held.rows(txid))
        expected = model.content(self.columns, stamped=False)
        if found != expected:
            raise Violation(f"read as of {txid} {when}: more: {found - expected}, missing: {expected - found}")


def run_rows(seed: int) -> tuple[str | None, World]:
    """Run the schedule of a seed. Returns what was wrong, and the world."""
    world = World(random.Random(f"rows {seed}"))
    try:
        world.run()
    except Violation as violation:
        return str(violation), world
    return None, world
