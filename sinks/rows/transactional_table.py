"""Tables of rows in a database that look as if they were created by hand.

::

    <table>             the user's columns, and at most one of ours, the stamp (_txid)
    <table>_before      the rows as they were before the open transaction changed them (C41)
    <table>_deleted     with sequence_by: the sequences of deleted rows; in a mirror, if the source
                        leaves out unchanged values: the positions of their deletions
    _ratchet_headers    the header of each table (C1)
    _ratchet_written    the tasks of the open transaction that have written

Invariants:

1. Every write is one sql_txn that compares the header first.
2. The header is never open for an attempt while the table has rows of an earlier attempt at the
   same txid: the sql_txn that opens the attempt removes them, or restores the previous rows.
3. Rows that a transaction changes are copied to ``<table>_before`` in the same sql_txn, and stay
   there until a later transaction is opened. So all rows there belong to the txid for which the
   header is open.
"""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from framework.bounded_pages import pages_by_bytes
from framework.errors import BadRecordError, ConfigError, TopologyError
from framework.topology import Header, OpenCommit, TransactionAttempt, ValueType, check_granted
from framework.topology.canonical_form import form_of
from framework.topology.refused_row_bisection import OnRefused, accepted
from sinks.key_hash_parts import halves_by_key
from sinks.rows.table_definition import (
    ACTION,
    DELETED_AT,
    DUE,
    EXISTED,
    KEPT,
    NEEDED,
    NEVER,
    POSITION,
    ROW_NEEDED,
    TXID,
    WHOLE,
    WRITTEN_TABLE,
    Column,
    TableDefinition,
)
from sinks.rows.values import exactly_of, is_nested, is_text, json_form, storable
from sinks.sql.schema import header_values
from sinks.sql.table_base import SqlRollBack

#: Rows that a reader takes at a time.
READ_ROWS = 10_000

#: About the most bytes of rows that are converted to text while a sql_txn is open, because servers
#: end a sql_txn that is idle for long.
LOADED_BYTES = 4 << 20

#: What a staged row does to the row with its key.
UPSERT, DELETE, REPLACE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class HeldColumns:
    """The columns that a sql_txn finds. ``copied``: those of rows from before that the table has,
    too. ``kinds``: the types of the table's columns, of those whose values can be parameters.
    ``rounding``: those whose digits an assignment rounds to. ``folding``: those to which texts that
    differ may be one value."""

    copied: Sequence[str]
    kinds: Mapping[str, str] = field(default_factory=dict)
    rounding: frozenset[str] = frozenset()
    folding: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Look:
    """A table as a sql_txn has found it, for several changes. ``names``: its columns."""

    names: frozenset[str]
    held: HeldColumns

    def has(self, names: Iterable[str]) -> bool:
        return self.names.issuperset(names)


#: The errors for a value that is none of the declared type.
_NOT_DECLARED = (ValueError, TypeError, ArithmeticError, AttributeError, pa.ArrowException)

#: Writes rows through a connection.
WriteRows = Callable[[Any, pa.Table], None]
#: Writes rows by a function that writes rows.
WriteParts = Callable[[Any, pa.Table, WriteRows], None]
#: The most rows that the database writes one by one.
SINGLE_ROWS = 1_000


def all_at_once(connection: Any, rows: pa.Table, write: WriteRows) -> None:
    write(connection, rows)


class Apart(Protocol):
    """Changes, some of which may be left out. ``kept``: rounds of the keys that none of these
    changes; ``due``: rounds of the keys that only these change; ``both``: the changes of other
    keys in order, with a column ``DUE``."""

    @property
    def kept(self) -> Iterable[pa.Table]: ...

    @property
    def due(self) -> Iterable[pa.Table]: ...

    @property
    def both(self) -> pa.Table: ...

    def reduced(self, changes: pa.Table) -> Iterable[pa.Table]:
        """The rounds of some of ``both``."""


class Members(Protocol):
    """The tables under the header of another one."""

    def changed_last(self, connection: Any) -> Iterable[RowTable]:
        """Those that the last transaction has changed which changed any."""

    def every(self, connection: Any) -> Iterable[RowTable]:
        """All of them."""


class RowTable(TableDefinition):
    """A table of a database. ``stamp``: the column that holds the txid of the transaction that
    wrote a row; None: there is none."""

    #: Whether a table can be made in the sql_txn that writes its first row.
    makes_in_sql_txn: ClassVar[bool] = True

    def __init__(self, name: str, stamp: str | None) -> None:
        super().__init__(name, stamp)
        #: Other tables of the database that are written under this table's header.
        self.members: Members | None = None

    # --- what a database adds ---------------------------------------------------------------------

    @abstractmethod
    def _load(self, connection: Any, into: str, rows: pa.Table) -> None:
        """Insert all rows into a table, which is named as in SQL."""

    @abstractmethod
    def _stage(self, connection: Any, columns: str) -> str:
        """Create an empty table for this sql_txn with the columns that this list of expressions
        selects from the table. Returns its name in SQL."""

    @property
    def value_type(self) -> ValueType:  # type: ignore[override]
        return ValueType.OPAQUE if self.can_undo else ValueType.TRANSACTIONAL

    @property
    def can_undo(self) -> bool:
        return self._stamp is not None or self._changes is not None

    @property
    def refuses_whole(self) -> bool:
        return True  # ``write`` is one sql_txn

    @property
    def needs_one_task(self) -> bool:
        return not self.can_undo

    @property
    def commits_in_one_step(self) -> bool:
        return True

    # --- on the driver ----------------------------------------------------------------------------

    def sweep(self, header: Header) -> int:
        return 0  # the sql_txn that opened the attempt has taken back what earlier ones wrote

    def roll_back(self, header: Header) -> int:
        with self._writing() as connection:
            self._check_header(connection, header, self._own_header)
            return self._take_back(connection, header.stamp.txid)

    def purge(self, header: Header, before_txid: int) -> int:
        if self._changes is None or (self._changes.sequence is None and self.members is None):
            return 0
        with self._writing() as connection:
            self._check_header(connection, header, self._keep_header)
            return sum(
                each._forget_deletions(connection, f"{TXID} < {before_txid - each._by_key().keep_deletes:d}")
                for each in self._all(connection)
            )

    def clear(self, topology_id: str) -> Header:
        if self._stamp is None:
            raise ConfigError(
                f"{self.location} has no stamp that tells which rows are Ratchet's: empty it by its own means"
            )
        self.prepare(topology_id)
        with self._writing() as connection:
            found = self._found_header(connection, self._own_header)
            header = Header(topology_id, uuid.uuid4().hex, epoch=found.epoch)
            for each in self._all(connection):
                self._run(connection, f"DELETE FROM {each._at(each._table)} WHERE {each._q(self._stamp)} IS NOT NULL")
                if each._changes is not None:
                    each._forget_deletions(connection)
            self._forget(connection)
            self._run(connection, self._headers.update(), (*header_values(header), self._table))
            return header

    def _enter(self, connection: Any, expected: Header, new: Header) -> None:
        """Invariants 2 and 3."""
        if new.open is None or expected.same_attempt(new):
            return
        if expected.open is None:
            self._forget(connection)
        elif expected.open.txid != new.open.txid:
            self._forget(connection, expected.open.txid)
        elif new.done < new.open.txid and self.can_undo:
            self._take_back(connection, new.open.txid)

    def _take_back(self, connection: Any, txid: int) -> int:
        """Make the table what it was before the transaction. Returns the number of rows changed."""
        if self._changes is not None:
            changed = 0
            for each in (*self._changed_last(connection), self):  # itself last: it says which the others are
                changed += each._put_back(connection, txid)
                each._forget_before(connection)
        else:
            query = f"DELETE FROM {self._at(self._table)} WHERE {self._q(self._stamp or '')} = {txid:d}"
            changed = self._run(connection, query).rowcount
        self._forget(connection)
        return changed

    def _put_back(self, connection: Any, txid: int) -> int:
        changes = self._by_key()
        before = self._at(f"{self._table}_before")
        of_txid = f"{before}.{TXID} = {txid:d}"
        if self._run(connection, f"SELECT 1 FROM {before} WHERE {of_txid} LIMIT 1").fetchone() is None:
            return 0  # somebody may have given the table another key in the meantime
        count = self._delete(connection, before, f"{of_txid} AND {before}.{EXISTED} = 0")
        found = {each.name for each in self._held_columns(connection, f"{self._table}_before")}
        columns = [
            each for each in self._held_columns(connection, self._table) if not each.generated and each.name in found
        ]
        names = [each.name for each in columns]
        kept = [each.name for each in columns if each.always]
        count += self._upsert(
            connection,
            {name: self._q(name) for name in names},
            f"{before} WHERE {of_txid} AND {EXISTED} = 1",
            {name: f"excluded.{self._q(name)}" for name in names if name not in (*changes.key, *kept)},
            overriding=bool(kept),
        )
        self._forget_deletions(connection, f"{TXID} = {txid:d}")
        return count

    def _forget(self, connection: Any, txid: int | None = None) -> None:
        """``txid``: the only one that rows from before are of (invariant 3); None: any."""
        self._forget_writers(connection)
        if self._changes is not None:
            for each in (*self._changed_last(connection), self):
                each._forget_before(connection, txid)

    def _forget_writers(self, connection: Any) -> None:
        """Remove the marks of the tasks that have written."""
        self._run(
            connection, f"DELETE FROM {self._at(WRITTEN_TABLE)} WHERE state = {self.dialect.mark}", (self._table,)
        )

    def _forget_before(self, connection: Any, txid: int | None = None) -> None:
        where = f" WHERE {TXID} = {txid:d}" if txid is not None else ""
        self._run(connection, f"DELETE FROM {self._at(f'{self._table}_before')}{where}")

    def _forget_deletions(self, connection: Any, condition: str = "TRUE") -> int:
        if self._by_key().sequence is None and not self.has_positions(connection):
            return 0
        query = f"DELETE FROM {self._at(f'{self._table}_deleted')} WHERE {condition}"
        removed: int = self._run(connection, query).rowcount
        return removed

    def _all(self, connection: Any) -> list[RowTable]:
        """All tables under this table's header: this table, and the tables that it names."""
        return [*(self.members.every(connection) if self.members is not None else ()), self]

    def _changed_last(self, connection: Any) -> list[RowTable]:
        return list(self.members.changed_last(connection)) if self.members is not None else []

    # --- in tasks ---------------------------------------------------------------------------------

    def check_rows(self, rows: pa.RecordBatch) -> None:
        self._storable(pa.Table.from_batches([rows]))

    def write(
        self,
        attempt: TransactionAttempt,
        batches: Iterable[pa.RecordBatch],
        on_refused: OnRefused | None = None,
        *,
        due: Iterable[pa.RecordBatch] | None = None,
    ) -> None:
        """``due``: more rows, which may be left out. None: all rows may be."""

        def write(parts: WriteParts, refused: list[BadRecordError]) -> None:
            with self.committing(attempt) as (connection, first):
                if not first:
                    return
                self._write_rows(connection, batches, attempt.txid, parts if due is None else all_at_once)
                self._write_rows(connection, due or (), attempt.txid, parts)

        self._accepted(write, on_refused)

    def try_write(self, attempt: TransactionAttempt, batches: Iterable[pa.RecordBatch], *, alone: bool) -> None:
        """Do what ``write`` does, and undo it. Raises ``BadRecordError`` for a row that the
        database refuses. ``alone``: rows that decide about a row may be missing. So errors of
        foreign keys and of unique values do not count, and a table with triggers is not tried."""
        self._tried(lambda connection: self._write_rows(connection, batches, attempt.txid, all_at_once), alone=alone)

    def _write_rows(self, connection: Any, batches: Iterable[pa.RecordBatch], txid: int, parts: WriteParts) -> None:
        for page in pages_by_bytes(batches, LOADED_BYTES):
            rows = self._storable(pa.Table.from_batches(page, schema=self.schema))
            if not rows.num_rows:
                continue
            if self._stamp is not None:
                stamp = pa.chunked_array([pa.repeat(pa.scalar(txid, pa.int64()), rows.num_rows)])
                rows = rows.append_column(self._stamp, stamp)
            parts(connection, rows, lambda via, part: self._load(via, self._at(self._table), part))

    def _tried(self, write: Callable[[Any], None], *, alone: bool) -> None:
        """Write in a sql_txn that is rolled back. Raises as ``try_write``."""
        with self.of_rows_alone() if alone else nullcontext(), self.trying() as connection:
            if not alone:
                write(connection)
                self.check_now(connection)
            elif not self._triggers(connection):
                write(connection)

    @contextmanager
    def trying(self) -> Iterator[Any]:
        """A sql_txn that is rolled back."""
        with suppress(SqlRollBack), self._writing() as connection:
            yield connection
            raise SqlRollBack

    @contextmanager
    def of_rows_alone(self) -> Iterator[None]:
        """Ignore a ``BadRecordError``, unless the database refuses a row independently of other
        rows."""
        try:
            yield
        except BadRecordError as error:
            cause = error.__cause__
            while isinstance(cause, BadRecordError):  # the name of a table was added
                cause = cause.__cause__
            if self._is_of_row_alone(cause):
                raise

    @abstractmethod
    def _triggers(self, connection: Any) -> list[str]:
        """The names of the user's triggers that can change a row of the table while it is
        written."""

    @abstractmethod
    def _is_of_row_alone(self, error: BaseException | None) -> bool:
        """Whether an error of the database refuses a row independently of other rows."""

    def change(
        self,
        attempt: TransactionAttempt,
        rounds: Iterable[pa.Table],
        on_refused: OnRefused | None = None,
        *,
        apart: Callable[[], Iterable[Apart]] | None = None,
    ) -> None:
        """Apply rounds of changes one after the other; a round has each key once. Its columns are
        those of the schema, ``ACTION``, and with a sequence ``DELETED_AT``: the sequence of the
        deletion before a ``REPLACE``. A round with changes that leave out unchanged values has
        ``ROW_NEEDED`` and columns ``KEPT`` too. ``POSITION``: of the last deletion, or of the last
        change that takes values from the table. The rounds may be read several times.
        ``on_refused``: as of ``write``. ``apart``: the same changes, if only some of them may be
        left out."""

        def write(parts: WriteParts, refused: list[BadRecordError]) -> None:
            with self.committing(attempt, grouped=parts is all_at_once) as (connection, first):
                if not first:
                    return
                if apart is not None and parts is not all_at_once:
                    for each in apart():
                        self.apply(connection, map(self._storable, each.kept), attempt.txid)
                        self.apply(connection, map(self._storable, each.due), attempt.txid, parts)
                        self._apply_both(connection, each, attempt.txid, refused)
                elif rounds:
                    self.apply(connection, map(self._storable, rounds), attempt.txid, parts)

        self._accepted(write, on_refused)

    def try_change(self, attempt: TransactionAttempt, rounds: Iterable[pa.Table], *, alone: bool) -> None:
        """Do what ``change`` does, and undo it. Raises as ``try_write``."""
        self._tried(lambda connection: self.apply(connection, map(self._storable, rounds), attempt.txid), alone=alone)

    def _apply_both(self, connection: Any, apart: Apart, txid: int, refused: list[BadRecordError]) -> None:
        """Apply the changes of keys that have both kinds of changes. If the database refuses the
        changes of a key, leave out those that may be left out."""

        def apply(changes: pa.Table) -> None:
            self.apply(connection, map(self._storable, apart.reduced(changes)), txid)

        parts = [apart.both] if apart.both.num_rows else []
        while parts:
            part = parts.pop()
            try:
                self._saved(connection, partial(apply, part))
            except BadRecordError as error:
                smaller = halves_by_key(part, self._by_key().key)
                if smaller is not None:
                    parts += smaller
                    continue
                apply(part.filter(pc.invert(part.column(DUE))))
                refused.append(error)

    def _saved(self, connection: Any, write: Callable[[], None]) -> None:
        """Write, and take back what was written if the database refuses a part of it. Raises
        ``BadRecordError`` then."""
        self._run(connection, "SAVEPOINT _ratchet_part")
        try:
            with self._named_errors():
                write()
        except BadRecordError:
            self._run(connection, "ROLLBACK TO SAVEPOINT _ratchet_part")
            self._run(connection, "RELEASE SAVEPOINT _ratchet_part")
            raise
        self._run(connection, "RELEASE SAVEPOINT _ratchet_part")

    def _accepted(
        self, write: Callable[[WriteParts, list[BadRecordError]], None], on_refused: OnRefused | None
    ) -> None:
        """Write all rows. If the database refuses rows that may be left out, write the others in a
        second sql_txn, which finds the refused rows by savepoints and halving. If the database
        itself can write rows one by one, it does so with refused parts."""
        refused: list[BadRecordError] = []
        try:
            write(all_at_once, refused)
            return
        except BadRecordError:
            if on_refused is None:
                raise
        write(partial(self._in_parts, refused), refused)
        for each in refused:
            on_refused(each)

    def _in_parts(self, refused: list[BadRecordError], connection: Any, rows: pa.Table, write: WriteRows) -> None:
        def saved(part: pa.Table) -> None:
            try:
                self._saved(connection, lambda: write(connection, part))
            except BadRecordError:
                singly = self._singly(connection, part, write) if 1 < part.num_rows <= SINGLE_ROWS else None
                if singly is None:
                    raise
                refused.extend(singly)

        self.check_now(connection)
        for _ in accepted(rows, saved, refused.append):
            pass

    def _singly(self, connection: Any, rows: pa.Table, write: WriteRows) -> Sequence[BadRecordError] | None:
        """Let the database write rows one by one. Returns the reasons for refused rows, which have
        no effect. None: the database cannot do that, and nothing is written."""
        return None

    def check_now(self, connection: Any) -> None:
        """Let the sql_txn check what it has written, and then each statement, against the
        constraints that it would check when it commits, if the database can do that."""

    # --- under the header of another table --------------------------------------------------------

    def owner(self, connection: Any) -> str:
        """The topology that owns the table."""
        return self._found_header(connection, "").topology_id

    @property
    def name(self) -> str:
        return self._table

    @contextmanager
    def connected(self) -> Iterator[Any]:
        """A connection that is in no sql_txn."""
        with self._reading() as connection:
            yield connection

    def limited(self, write: Callable[[], None]) -> None:
        """Do something that writes, and again in smaller statements where a limit of the server has
        ended it."""
        write()

    @contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Let errors of what is done with a connection of another table name this one, and
        ``what`` it is, those that a person must mend."""
        try:
            with self._named_errors():
                yield
        except BadRecordError as error:
            raise BadRecordError(f"{what}: {error}", error.about, error.advice) from error
        except ConfigError as error:
            raise ConfigError(f"{what}: {error}") from error

    def in_schema_of(self, owner: RowTable) -> RowTable:
        """This table, in the schema of the table that owns the header."""
        self._home = owner._home
        return self

    def rows_where(self, connection: Any, columns: Sequence[str], condition: str, *values: Any) -> list[Any]:
        """Columns of the rows that a condition is true of; ``?`` in it stands for a value."""
        where = condition.replace("?", self.dialect.mark).replace("{table}", self._at(self._table))
        query = f"SELECT {self._list(columns)} FROM {self._at(self._table)} WHERE {where}"
        return list(self._run(connection, query, values).fetchall())

    def look(self, connection: Any) -> Look:
        """The table as it is after the changes that ``on_new_column`` allows."""
        self._fit(connection)
        names = frozenset(each.name for each in self._held_columns(connection, self._table))
        return Look(names, self._held(connection))

    def apply(
        self,
        connection: Any,
        rounds: Iterable[pa.Table],
        txid: int,
        parts: WriteParts = all_at_once,
        *,
        look: Look | None = None,
    ) -> None:
        """Apply rounds of changes, as ``change`` does. ``parts``: writes the rows of a round.
        ``look``: of this sql_txn, with all declared columns."""
        names = self._fit(connection) if look is None else self.schema.names
        held = self._held(connection) if look is None else look.held

        def write(via: Any, rows: pa.Table) -> None:
            self._apply(via, rows, names, held, txid)

        for each in rounds:
            parts(connection, self._with_positions(connection, each), write)

    def _with_positions(self, connection: Any, rows: pa.Table) -> pa.Table:
        """The rows without their positions, unless these count."""
        if POSITION not in rows.column_names:
            return rows
        counts = ROW_NEEDED in rows.column_names or pc.any(pc.equal(rows.column(ACTION), DELETE)).as_py()
        return rows if counts and self.has_positions(connection) else rows.drop_columns([POSITION])

    def _held(self, connection: Any) -> HeldColumns:
        return HeldColumns(self._copied(connection))

    def _copied(self, connection: Any) -> list[str]:
        """The columns of rows from before that the table has, too."""
        held = {each.name for each in self._held_columns(connection, self._table)}
        return [each.name for each in self._held_columns(connection, f"{self._table}_before") if each.name in held]

    def claim(self, connection: Any, owner: str) -> None:
        """Note that the table is under another table's header. Raises ``ConfigError`` if it has
        another owner."""
        held = self._select_header(connection, self._own_header)
        if held is None:
            self._run(
                connection, self._headers.insert(), (self._table, *header_values(Header(owner, uuid.uuid4().hex)))
            )
        elif held.topology_id != owner:
            raise ConfigError(
                f"{self.location} belongs to topology {held.topology_id!r}: a table has one owner; give the copy another name, "
                "with Mirror(name=...)"
            )

    def empty(self, connection: Any, txid: int, position: int | None = None) -> None:
        """Delete all rows, and keep them as they were before the transaction. ``position``: where
        the source has emptied the table."""
        names, table = self._list(self._copied(connection)), self._at(self._table)
        if position is not None and self.has_positions(connection):
            key = self._list(self._by_key().key)
            self._run(
                connection,
                f"INSERT INTO {self._at(f'{self._table}_deleted')} ({key}, {POSITION}, {TXID}) SELECT {key}, {position:d}, "
                f"{txid:d} FROM {table} WHERE TRUE {self._or_replace(f'{key}, {TXID}', POSITION)}",
            )
        self._run(
            connection,
            f"INSERT INTO {self._at(f'{self._table}_before')} ({names}, {TXID}, {EXISTED}) SELECT {names}, {txid:d}, 1 "
            f"FROM {table} WHERE TRUE {self._or_nothing(self._by_key().key[0])}",
        )
        self._run(connection, f"DELETE FROM {table}")

    @contextmanager
    def committing(self, attempt: TransactionAttempt, *, grouped: bool = False) -> Iterator[tuple[Any, bool]]:
        """A sql_txn that writes rows of an attempt, and whether its task has not written yet.
        ``grouped``: statements may travel together; the error of one is then raised later."""
        fence = attempt.fence
        if fence is None:
            raise TopologyError(f"{self.location} is written by topologies only: its attempts need a driver")
        with self._writing_grouped() if grouped and self.can_undo else self._writing() as connection:
            if fence.opens_from is None:
                check_granted(self._found_header(connection, self._keep_header), attempt, self.location)
                yield connection, self._is_first(connection, fence.writer, attempt.txid)
                return
            opened = OpenCommit(attempt.txid, attempt.attempt_id, fence.plan_digest)
            header = fence.opens_from.opened(fence.epoch, opened)
            self._ask_early(connection)
            self._check_header(connection, fence.opens_from, self._own_header)
            self._enter(connection, fence.opens_from, header)
            yield connection, self.can_undo or self._is_first(connection, fence.writer, attempt.txid)
            self._run(connection, self._headers.update(), (*header_values(header.done_as_open()), self._table))

    def _ask_early(self, connection: Any) -> None:
        """If statements travel together, send the query that locks the header, and then those that
        ``_held`` will need: another client may alter the table until the header is locked."""

    def _is_first(self, connection: Any, writer: str, txid: int) -> bool:
        """Note that a task writes. False: it has written before, in this attempt, or where a replay
        skips what is written, in an earlier one."""
        mark = self.dialect.mark
        statement = (
            f"INSERT INTO {self._at(WRITTEN_TABLE)} (state, writer, txid) VALUES ({mark}, {mark}, {mark}) "
            f"{self._or_nothing('state')}"
        )
        return bool(self._run(connection, statement, (self._table, writer, txid)).rowcount == 1)

    def _apply(self, connection: Any, rows: pa.Table, names: Sequence[str], held: HeldColumns, txid: int) -> None:
        """Copy what the rows change, and change it."""
        sequence = self._by_key().sequence
        own = [f"{self.dialect.null_integer} AS {ACTION}"]
        if sequence is not None:
            own.append(f"{self._q(sequence)} AS {DELETED_AT}")
        written = frozenset(names)
        kept = {f"{KEPT}{number}" for number, each in enumerate(self.schema.names) if each in written}
        marks = [each for each in rows.column_names if each in kept or each in (ROW_NEEDED, POSITION)]
        own += [f"{self.dialect.null_integer} AS {each}" for each in marks]
        staged = self._stage(connection, ", ".join([self._list(names), *own]))
        loaded = [*names, ACTION, *([DELETED_AT] if sequence is not None else []), *marks]
        self._load(connection, staged, rows.select(loaded))
        if sequence is not None:
            self._leave_out_older(connection, staged)
        if ROW_NEEDED in marks:
            self._keep_unchanged(connection, staged, marks)
        self._apply_staged(connection, staged, names, held.copied, txid)
        self._keep_deletions(connection, staged, marks, txid)

    def _apply_staged(
        self, connection: Any, staged: str, names: Sequence[str], copied: Sequence[str], txid: int
    ) -> None:
        """Apply the rows of a table that this connection sees under the name ``staged``."""
        self._keep_before(connection, staged, copied, txid)
        self._delete(connection, staged, f"{ACTION} <> {UPSERT}")
        self._write_staged(connection, staged, names, txid)

    def _keep_deletions(self, connection: Any, staged: str, columns: Sequence[str], txid: int) -> None:
        """Keep the sequences or the positions of the staged deletions. ``columns``: some of the
        staged rows."""
        changes = self._by_key()
        if changes.sequence is None and POSITION not in columns:
            return
        deleted, key = self._at(f"{self._table}_deleted"), self._list(changes.key)
        at = self._q(changes.sequence) if changes.sequence is not None else POSITION
        newest, of = (at, "") if changes.sequence is not None else (f"MAX({at})", f"GROUP BY {key}")
        self._run(
            connection,
            f"INSERT INTO {deleted} ({key}, {at}, {TXID}) SELECT {key}, {newest}, {txid:d} FROM {staged} "
            f"WHERE {ACTION} = {DELETE} {of} {self._or_replace(f'{key}, {TXID}', at)}",
        )

    def _keep_before(self, connection: Any, staged: str, copied: Sequence[str], txid: int) -> None:
        """Invariant 3, and note which keys are not there yet."""
        self._run(connection, self._keeping(staged, copied, txid))

    def _keeping(self, staged: str, copied: Sequence[str], txid: int, unless: str = "") -> str:
        """``unless``: the condition that leaves out keys that are already kept; by default, the end
        of the INSERT leaves them out."""
        key, table = self._by_key().key, self._at(self._table)
        held = {name: f"{table}.{self._q(name)}" for name in copied}
        held |= {name: f"COALESCE({table}.{self._q(name)}, {staged}.{self._q(name)})" for name in key}
        return (
            f"INSERT INTO {self._at(f'{self._table}_before')} ({self._list(held)}, {TXID}, {EXISTED}) "
            f"SELECT {', '.join(held.values())}, {txid:d}, CASE WHEN {table}.{self._q(key[0])} IS NULL THEN 0 ELSE 1 END "
            f"FROM {staged} LEFT JOIN {table} ON {self._same(table, staged)} WHERE {unless or f'TRUE {self._or_nothing(key[0])}'}"
        )

    def _write_staged(self, connection: Any, staged: str, names: Sequence[str], txid: int) -> None:
        """Insert the staged rows that are no deletions, or update those with their keys."""
        changes = self._by_key()
        written = {name: self._q(name) for name in names}
        if self._stamp is not None:
            written[self._stamp] = str(txid)
        assigned = {name: f"excluded.{self._q(name)}" for name in written if name not in changes.key}
        if changes.ignore_nulls:
            for name in names:
                if name not in changes.key:
                    assigned[name] = f"COALESCE(excluded.{self._q(name)}, _held.{self._q(name)})"
        self._upsert(connection, written, f"{staged} WHERE {ACTION} <> {DELETE}", assigned)

    def _keep_unchanged(self, connection: Any, staged: str, marks: Sequence[str]) -> None:
        """Give the staged rows the values that they keep. Raises ``BadRecordError`` for a staged
        row that keeps a value of a missing row. If a later change has deleted that row, the staged
        row is a repetition by a connector, and is left out instead."""
        key, table = self._by_key().key, self._at(self._table)
        same = self._same(table, staged)
        missing = f"NOT EXISTS (SELECT 1 FROM {table} WHERE {same})"
        of_row = f"{ROW_NEEDED} IN ({NEEDED}, {WHOLE}) AND {missing}"
        lost = f"SELECT {self._list(key)} FROM {staged} WHERE {ROW_NEEDED} = {NEVER} OR ({of_row}"
        row = self._run(connection, f"{lost}) LIMIT 1").fetchone()
        if row is not None and POSITION in marks:
            deleted = self._at(f"{self._table}_deleted")
            later = f"{self._same(deleted, staged)} AND {deleted}.{POSITION} > {staged}.{POSITION}"
            repeated = f"EXISTS (SELECT 1 FROM {deleted} WHERE {later})"
            row = self._run(connection, f"{lost} AND NOT {repeated}) LIMIT 1").fetchone()
            self._run(connection, f"DELETE FROM {staged} WHERE {ROW_NEEDED} = {NEEDED} AND {missing}")
        if row is not None:
            raise BadRecordError(
                f"{self.location}: a change leaves out unchanged values, and there is no row with its key that has them; give "
                "the source table REPLICA IDENTITY FULL, or take a snapshot of it",
                f"key {', '.join(f'{name}={value!r}' for name, value in zip(key, row, strict=True))}",
            )
        for mark in marks:
            if mark.startswith(KEPT):
                name = self._q(self.schema.names[int(mark.removeprefix(KEPT))])
                self._run(
                    connection,
                    f"UPDATE {staged} SET {name} = (SELECT {table}.{name} FROM {table} WHERE {same}) WHERE {mark} = 1",
                )

    def _leave_out_older(self, connection: Any, staged: str) -> None:
        changes = self._by_key()
        name = changes.sequence or ""
        table, at = self._at(self._table), self._q(name)
        for newer in self._newer(staged):
            self._run(connection, f"DELETE FROM {staged} WHERE {newer}")
        newer = f"{self._compared(f'{table}.{at}')} > {self._compared(f'{staged}.{DELETED_AT}')}"
        self._run(
            connection,
            f"UPDATE {staged} SET {ACTION} = {UPSERT} WHERE {ACTION} = {REPLACE} AND EXISTS (SELECT 1 FROM {table} "
            f"WHERE {self._same(table, staged)} AND {newer})",
        )

    def _newer(self, staged: str) -> list[str]:
        """Conditions that are true of a staged row if there is a change of its key with a higher
        sequence."""
        at = self._q(self._by_key().sequence or "")
        return [
            f"EXISTS (SELECT 1 FROM {held} WHERE {self._same(held, staged)} "
            f"AND {self._compared(f'{held}.{at}')} > {self._compared(f'{staged}.{at}')})"
            for held in (self._at(self._table), self._at(f"{self._table}_deleted"))
        ]

    # --- as the database returns them -------------------------------------------------------------

    def streamed(self, connection: Any, query: str) -> Iterator[tuple[Any, ...]]:
        """The rows that a query selects, without all of them in memory."""
        cursor = self._run(connection, query)
        while rows := cursor.fetchmany(READ_ROWS):
            yield from rows

    def held_form(self, name: str) -> Callable[[Any], Any]:
        """Return a function that converts a value which the database has returned to canonical
        form. A value that is none of the declared type, because the user's column has another,
        stays as it is."""
        declared = self.schema.field(name).type
        exactly, form = exactly_of(declared), form_of(declared)

        def converted(value: Any) -> Any:
            if value is None:
                return None
            try:
                return form(self._loaded(exactly(value), declared))
            except _NOT_DECLARED:
                return value

        def nested(value: Any) -> Any:
            try:
                return None if value is None else json_form(value)
            except _NOT_DECLARED:
                return value

        return nested if is_nested(declared) else converted

    def as_held(self, rows: pa.Table) -> pa.Table:
        """The rows with texts in the form in which the table returns them: a column of another
        type, such as ``uuid``, stores a text in a form of its own. Unchanged if there is no table,
        and if it does not take them."""
        texts = [each.name for each in self.schema if is_text(each.type) and each.name in rows.column_names]
        with suppress(BadRecordError):
            return self._with_held_texts(rows, texts) if texts and rows.num_rows else rows
        return rows

    def _with_held_texts(self, rows: pa.Table, texts: Sequence[str]) -> pa.Table:
        """As ``as_held``. Raises ``BadRecordError`` for a text that a column does not take."""
        return rows

    def _selected(self, column: Column) -> str:
        """The expression that selects a declared column, so that texts are returned as texts."""
        return self._q(column.name)

    def _marked(self, column: Column) -> str:
        """The mark of a parameter that is compared with a declared column."""
        return self.dialect.mark

    def among(self, columns: Sequence[Column], count: int, also: str) -> str:
        """The condition for rows with one of so many keys of these columns, for which ``also`` is
        true. Each alternative names both, so that an index with columns of both finds the rows."""
        if len(columns) == 1:
            return f"{also} AND {self._q(columns[0].name)} IN ({', '.join([self._marked(columns[0])] * count)})"
        one = " AND ".join([also, *(f"{self._q(each.name)} = {self._marked(each)}" for each in columns)])
        return " OR ".join([f"({one})"] * count)

    def key_parameter(self, column: Column, value: Any) -> Any:
        """A value of a key as a parameter that is compared with its column."""
        return self._stored(value, self.schema.field(column.name).type)

    # --- statements -------------------------------------------------------------------------------

    def _delete(self, connection: Any, source: str, where: str) -> int:
        """Delete the rows of the table that have their key in ``source``, where it is true of the
        row there. Returns their number."""
        table = self._at(self._table)
        found = f"SELECT 1 FROM {source} WHERE {where} AND {self._same(source, table)}"
        deleted: int = self._run(connection, f"DELETE FROM {table} WHERE EXISTS ({found})").rowcount
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
        """Insert ``values``, expressions by column, selected from ``source``, and for keys that are
        there make the assignments. In these, ``excluded`` is the new row and ``_held`` the old one.
        Returns the number of rows."""
        assignments = ", ".join(f"{self._q(name)} = {value}" for name, value in assigned.items())
        action = f"UPDATE SET {assignments}" if assignments else "NOTHING"
        written: int = self._run(
            connection,
            f"INSERT INTO {self._at(self._table)} AS _held ({self._list(values)}) {self._over(overriding)}"
            f"SELECT {', '.join(values.values())} FROM {source} ON CONFLICT ({self._list(self._by_key().key)}) DO {action}",
        ).rowcount
        return written

    @staticmethod
    def _over(identity: bool) -> str:
        """The part of an INSERT that gives values to columns which the database always makes."""
        return "OVERRIDING SYSTEM VALUE " if identity else ""

    def _or_replace(self, key: str, column: str) -> str:
        """The end of an INSERT that assigns this column of rows whose key is there."""
        return f"ON CONFLICT ({key}) DO UPDATE SET {column} = excluded.{column}"

    def _or_nothing(self, column: str) -> str:
        """The end of an INSERT that leaves out rows whose key is there. ``column``: of the key."""
        return "ON CONFLICT DO NOTHING"

    def _same(self, one: str, other: str) -> str:
        return " AND ".join(f"{one}.{self._q(name)} = {other}.{self._q(name)}" for name in self._by_key().key)

    def _compared(self, expression: str) -> str:
        changes = self._by_key()
        return self.dialect.compared(expression, self.schema.field(changes.sequence or "").type)

    def _storable(self, rows: pa.Table) -> pa.Table:
        """The rows with values that the database takes. Raises ``BadRecordError``."""
        return storable(rows, self.location)
