"""A world of transactions that write tables of a database by a real committer.

Attempts die between any two statements, or after a commit whose answer is lost; the next one has
the same batch, or another one, is made after a roll-back, or meets tasks of a dead attempt.
"""

from __future__ import annotations

import itertools
import os
import random
import sqlite3
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import pyarrow as pa

from framework.errors import RetryableError, StaleWriterError
from framework.topology import CommitFence, Header, OpenCommit, TransactionAttempt
from sinks import SqliteTable
from sinks.sql.sqlite_table_base import SqliteFile

TOPOLOGY, DIGEST = "rows", "digest"
#: How many of a hundred worlds have so many transactions: what goes wrong concerns a few of them.
TRANSACTIONS = {2: 25, 3: 30, 4: 25, 5: 12, 7: 8}
_numbers = itertools.count()

Record = TypeVar("Record")
Model = TypeVar("Model")


class Violation(Exception):
    pass


class Died(RetryableError):
    """A task ends before a statement, or before it hears of its commit."""


def compare_rows(what: str, found: Counter[Any], expected: Counter[Any]) -> None:
    """Raise ``Violation`` unless the rows are the expected ones."""
    if found != expected:
        raise Violation(f"{what}: more: {found - expected}, missing: {expected - found}")


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


class TableWorld(ABC, Generic[Record, Model]):
    """``model``: the reference: what the tables hold after the last transaction."""

    model: Model
    #: As of the transaction before the last one.
    before: Model
    #: Whether a replay may have another batch, whether it can be taken back, and whether a
    #: transaction may be one step.
    opaque: bool
    can_undo: bool
    one_step: bool

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.struck: Counter[str] = Counter()
        self.trace: list[str] = []
        self.path = f"/simulated/{next(_numbers)}.db"
        self.left: list[int | None] = [None]
        self.epoch = 1
        #: Tasks of dead attempts, with the version that they run.
        self.late: list[tuple[TransactionAttempt, Sequence[Record], int]] = []

    # --- what a world of one committer adds -------------------------------------------------------

    @abstractmethod
    def committer(self) -> Any:
        """A copy of the committer, as a task gets one."""

    @abstractmethod
    def batch(self) -> list[Record]:
        """The records of the next transaction."""

    def parts(self, batch: Sequence[Record]) -> list[list[Record]]:
        """The records of each task."""
        return [list(batch)]

    @abstractmethod
    def rows(self, records: Sequence[Record]) -> pa.RecordBatch:
        """Records as the committer takes them."""

    @abstractmethod
    def after(self, txid: int, batch: Sequence[Record]) -> Model:
        """The reference after a transaction."""

    @abstractmethod
    def restored(self) -> Model:
        """The reference after the last transaction was undone."""

    @abstractmethod
    def compare(self, txid: int) -> None:
        """Raise ``Violation`` unless the tables hold what the reference holds."""

    @abstractmethod
    def compare_held(self, txid: int, model: Model, when: str) -> None:
        """Raise ``Violation`` unless the tables tell what they held after a transaction."""

    @property
    def version(self) -> int:
        """Of the topology that runs."""
        return 0

    def write_late(self, attempt: TransactionAttempt, part: Sequence[Record], version: int) -> None:
        self.write(attempt, part)

    def is_written(self, part: Sequence[Record]) -> bool:
        """Whether a task that has these records writes something."""
        return bool(part)

    def change_topology(self) -> None:
        if self.strike("another leader", 0.1):
            self.epoch += 1

    def purge(self, txid: int) -> None:
        """Let the table and the reference forget what they need no longer."""

    # --- a schedule -------------------------------------------------------------------------------

    def verdict(self) -> str | None:
        """Run the schedule. Returns what was wrong."""
        try:
            self.run()
        except Violation as violation:
            return str(violation)
        return None

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
        self.committer().table.prepare(TOPOLOGY)
        txid, (last,) = 1, self.chance.choices([*TRANSACTIONS], [*TRANSACTIONS.values()])
        while txid <= last:
            self.change_topology()
            self.transaction(txid)
            if self.can_undo and self.strike("undo", 0.08):
                self._undo(txid)
                last -= self.chance.random() < 0.5
                continue
            txid += 1

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
            elif self.opaque and self.strike("another batch", 0.5):
                batch = self.batch()
        self.before, self.model = self.model, self.after(txid, batch)
        header = self.committer().table.read_header()
        if header.done != txid:
            raise Violation(f"the header says {header} after transaction {txid}")
        self.compare(txid)
        if self.strike("purge", 0.5):
            self.purge(txid)

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
        """Take the last transaction back."""
        table = self.committer().table
        header = self._open(txid, 1_000)[1]
        table.raise_header(table.read_header(), header)
        table.roll_back(header)
        self.epoch += 1
        self.model = self.restored()
        self.late.clear()
        self.trace.append(f"{txid} undone")
        self.compare_held(txid - 1, self.model, "after the undo")

    def attempt(self, txid: int, number: int, batch: Sequence[Record]) -> bool:
        """Whether the attempt has come to its end."""
        if self.strike("died in processing", 0.1):
            return False
        parts = self.parts(batch)
        found, header = self._open(txid, number)
        if self.one_step and len(parts) == 1 and number == 1:
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
                self.late += [(self.granted(header, each), its, self.version) for each, its in tasks[done:]]
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

    def write(self, attempt: TransactionAttempt, part: Sequence[Record]) -> None:
        """Write the records of a task, in up to two batches."""
        made = self.committer()
        made.prepare({}, None, None, attempt)
        cut = self.chance.randint(0, len(part))
        for some in (part[:cut], part[cut:]):
            if some:
                made.execute_arrow(self.rows(some))
        made.finish_batch()

    def _one_step(self, found: Header, part: Sequence[Record], txid: int) -> bool:
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
        self.trace.append(f"{txid} in one step: {part}")
        return not self.strike("answer lost", 0.1)

    def _late_tasks_write(self) -> None:
        for attempt, part, version in self.late:
            try:
                self.write_late(attempt, part, version)
            except StaleWriterError:
                self.struck["late task refused"] += 1
            else:
                if not self.is_written(part):
                    continue
                raise Violation(f"a task of the dead attempt {attempt} has written")
        self.late.clear()

    def granted(self, header: Header, task: int) -> TransactionAttempt:
        assert header.open is not None
        fence = CommitFence(TOPOLOGY, header.epoch, DIGEST, f"rows:{task}")
        return TransactionAttempt(header.open.txid, header.open.attempt_id, fence)
