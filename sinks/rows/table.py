"""Tables of rows in a database: they look as if somebody had made them by hand.

::

    <table>             the user's columns, and at most one of ours, the stamp (_txid)
    <table>_before      the rows as they were before the open transaction changed them (C41)
    <table>_deleted     with sequence_by: the sequences of deleted rows
    _ratchet_headers    the header of each table (C1)
    _ratchet_written    the tasks of the open transaction that have written

Invariants:

1. Every write is one sql_txn that compares the header first.
2. The header is never open for another attempt while rows of an earlier attempt at the same txid
   are there: the sql_txn that opens the attempt removes them, or puts the rows from before back.
3. What a transaction changes is copied to ``<table>_before`` in the sql_txn that changes it. It
   stays there until a later transaction is opened.
"""

from __future__ import annotations

import re
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, Protocol

import pyarrow as pa

from framework.errors import BadRecordError, ConfigError, CorruptStateError, TopologyError
from framework.topology import Fields, Header, OpenCommit, TransactionAttempt, ValueType, check_granted
from framework.topology.canonical_form import form_of
from framework.topology.table_schema import TableColumn, TableSchema
from sinks.rows.values import column_type, is_nested, json_form, storable
from sinks.sql.schema import HEADERS_TABLE, header_values, qualified
from sinks.sql.store import SqlStore
from sinks.table import Table

_DECIMAL = re.compile(r"(?:numeric|decimal)\((\d+),(\d+)\)")
#: Rows that a reader takes at a time.
READ_ROWS = 10_000
OnNewColumn = Literal["add", "ignore", "fail"]
#: A value that is written in the same way in every SQL; no text with a backslash or a %.
Default = bool | int | float | str

WRITTEN_TABLE = "_ratchet_written"
#: Columns of ours in side tables and in staged rows.
TXID, EXISTED, ACTION, DELETED_AT = "_ratchet_txid", "_ratchet_existed", "_ratchet_action", "_ratchet_deleted_at"
#: Staged rows of sources that leave out unchanged values: whether there must be a row with the key
#: (``NEEDED``: in the table; ``NEVER``: there cannot be one), and for each column that is left out,
#: by its number in the schema, whether the row keeps its value.
ROW_NEEDED, KEPT = "_ratchet_row_needed", "_ratchet_kept_"
NOT_NEEDED, NEEDED, NEVER = 0, 1, 2
OWN_COLUMNS = (TXID, EXISTED, ACTION, DELETED_AT, ROW_NEEDED)
#: What a staged row does to the row with its key.
UPSERT, DELETE, REPLACE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table as it is in the database. ``kind``: its type as the database prints it.
    ``generated``: the database computes the value. ``always``: an identity that takes no value
    unless it is overridden."""

    name: str
    kind: str
    generated: bool = False
    always: bool = False


@dataclass(frozen=True, slots=True)
class Changes:
    """How an ``UpsertCommitter`` changes a table. ``defaults``: of columns that are added, what the
    rows hold in them that are there already."""

    key: tuple[str, ...]
    sequence: str | None = None
    _: KW_ONLY
    ignore_nulls: bool = False
    on_new_column: OnNewColumn = "fail"
    keep_deletes: int = 0
    defaults: tuple[tuple[str, Default], ...] = ()


class Members(Protocol):
    """The tables under the header of another one."""

    def changed_last(self, connection: Any) -> Iterable[RowTable]:
        """Those that the last transaction has changed which changed any."""

    def every(self, connection: Any) -> Iterable[RowTable]:
        """All of them."""


class RowTable(SqlStore, Table):
    """A table of a database. ``stamp``: the column that holds the txid of the transaction that
    wrote a row; None: there is none."""

    #: The type of a column of nested values.
    json: ClassVar[str]
    #: Where a statement says ``CREATE TABLE``, after the list of columns; and for tables beside it.
    table_options: str = ""
    side_table_options: str = ""
    #: Whether a table can be made in the sql_txn that writes its first row.
    makes_in_sql_txn: ClassVar[bool] = True

    def __init__(self, name: str, stamp: str | None) -> None:
        self._table = name
        self._stamp = stamp
        self._fields: Fields | None = None
        self._changes: Changes | None = None
        #: Other tables of the database that are written under this table's header.
        self.members: Members | None = None
        for each in (name, *([stamp] if stamp is not None else [])):
            self._check_name(each, "")

    # --- what a database adds ---------------------------------------------------------------------

    @abstractmethod
    def _held_columns(self, connection: Any, table: str) -> list[Column]:
        """The columns of a table, in order; empty if there is no table."""

    @abstractmethod
    def _unique(self, connection: Any, table: str, columns: Sequence[str]) -> bool:
        """Whether a key or an index makes these columns of a table unique."""

    @abstractmethod
    def _giving_key(self, connection: Any) -> str:
        """The statement that gives the table the declared key."""

    @abstractmethod
    def _giving_type(self, name: str) -> str:
        """The statement that gives a column its declared type."""

    @abstractmethod
    def _load(self, connection: Any, into: str, rows: pa.Table) -> None:
        """Insert all rows into a table, which is named as in SQL."""

    @abstractmethod
    def _stage(self, connection: Any, columns: str) -> str:
        """Create an empty table for this sql_txn with the columns that this list of expressions
        selects from the table. Returns its name in SQL."""

    @abstractmethod
    def _stamp_index(self, connection: Any) -> list[str]:
        """The statements that create a cheap index of the stamp column, if there is none."""

    @contextmanager
    def _altering(self) -> Iterator[Any]:
        """A connection that may create and alter tables."""
        with self._writing() as connection, self._creating(connection):
            yield connection

    def _widened(self, held: str, declared: pa.DataType) -> str | None:
        """The type that a column of type ``held`` needs to hold all values of ``declared``; None:
        it holds them, or the database could not change it without loss."""
        return None

    # --- declared columns -------------------------------------------------------------------------

    @property
    def value_type(self) -> ValueType:  # type: ignore[override]
        return ValueType.OPAQUE if self.can_undo else ValueType.TRANSACTIONAL

    @property
    def can_undo(self) -> bool:
        return self._stamp is not None or self._changes is not None

    @property
    def needs_one_task(self) -> bool:
        return not self.can_undo

    @property
    def commits_in_one_step(self) -> bool:
        return True

    def bind(self, fields: Fields) -> None:
        self._bind(fields, None)

    def bind_changes(self, fields: Fields, changes: Changes) -> None:
        """As ``bind``, for a committer that changes rows by their key."""
        for name in (f"{self._table}_before", f"{self._table}_deleted"):
            self._check_name(name, f", the name of a table beside {self._table!r}")
        self._bind(fields, changes)

    def _bind(self, fields: Fields, changes: Changes | None) -> None:
        schema = fields.schema()
        if schema is None:
            untyped = next(name for name in fields if fields.type_of(name) is None)
            raise TopologyError(
                f"{self.location}: field {untyped!r} has no type; declare it, as in Fields({untyped}=str)"
            )
        if self._fields is not None and (self._fields, self._changes) != (fields, changes):
            raise TopologyError(
                f"{self.location} is written by two committers: a table has one; give each its own table"
            )
        seen: dict[str, str] = {}
        for field in schema:
            self._check_name(field.name, "")
            self._column_type(field)
            folded = field.name.casefold() if self.dialect.folds_case else field.name
            if folded in seen:
                raise TopologyError(
                    f"{self.location}: {seen[folded]!r} and {field.name!r} are the same column in {self.dialect.name}: rename one"
                )
            seen[folded] = field.name
        taken = [each for each in fields if each in (*OWN_COLUMNS, self._stamp) or each.startswith(KEPT)]
        if taken:
            raise TopologyError(
                f"{self.location}: {taken[0]!r} is a column of Ratchet's; rename the field, or the stamp"
            )
        self._fields, self._changes = fields, changes

    @property
    def schema(self) -> pa.Schema:
        if self._fields is None:
            raise TopologyError(f"{self.location} has no columns: use it in a committer of a topology")
        return self._fields.schema()

    def _check_name(self, name: str, what: str) -> None:
        longest = self.dialect.name_bytes_max
        reserved = self.dialect.reserved_prefix
        if not name or "\0" in name:
            problem = "is no name in SQL"
        elif longest is not None and len(name.encode()) > longest:
            problem = f"has more than {longest} bytes, which {self.dialect.name} would cut"
        elif name in self.dialect.reserved_columns or (reserved and name.casefold().startswith(reserved)):
            problem = f"is reserved by {self.dialect.name}"
        else:
            return
        raise TopologyError(f"{self.location}: {name!r}{what} {problem}; give another name")

    # --- on the driver ----------------------------------------------------------------------------

    def _prepare(self, connection: Any, topology_id: str) -> Header:
        columns = self._held_columns(connection, self._table)
        self._probe(connection, exists=bool(columns))
        self._create_headers(connection)
        header = self._select_header(connection, self._own_header)
        self._check_found(connection, header, columns, topology_id)
        self._create_or_stamp(connection, columns)
        self._create_side_tables(connection)
        if header is None:
            header = Header(topology_id, uuid.uuid4().hex)
            self._run(connection, self._headers.insert(), (self._table, *header_values(header)))
        return header

    def _check_found(self, connection: Any, header: Header | None, columns: Sequence[Column], topology_id: str) -> None:
        """Raise if the table and its header are not as this topology needs them. ``columns``: empty
        if there is no table."""
        if header is not None and header.topology_id != topology_id:
            raise ConfigError(
                f"{self.location} belongs to topology {header.topology_id!r}, not {topology_id!r}: a table has one owner; use "
                "another table"
            )
        if not columns:
            if header is not None:
                raise CorruptStateError(
                    f"{self.location} is gone, but its header says that it holds transactions up to {header.done}: restore it"
                )
            return
        self._check_columns(connection, columns)
        stamp = self._stamp
        if header is None and stamp is not None and any(each.name == stamp for each in columns):
            query = f"SELECT 1 FROM {self._at(self._table)} WHERE {self._q(stamp)} IS NOT NULL LIMIT 1"
            if self._run(connection, query).fetchone() is not None:
                raise ConfigError(
                    f"{self.location} has rows with a {stamp}, and no header in {HEADERS_TABLE}: restore the header, or set "
                    f"{stamp} to null in rows that are no longer to be taken back"
                )

    def _create_or_stamp(self, connection: Any, columns: Sequence[Column]) -> None:
        """Create the table, or the column that it lacks for the stamp. ``columns``: those that it
        has."""
        statements = self._stamping(connection, columns) if columns else self._creation(connection)
        if statements:
            with self._creating(connection):
                for each in statements:
                    self._run(connection, each)

    def _creation(self, connection: Any) -> list[str]:
        """The statements that create the table."""
        key = self._changes.key if self._changes is not None else ()
        columns = [
            f"{self._q(name)} {kind}{' NOT NULL' if name in key else ''}" for name, kind in self._declared().items()
        ]
        if self._stamp is not None:
            columns.append(f"{self._q(self._stamp)} {self.dialect.integer}")
        if key:
            columns.append(f"PRIMARY KEY ({self._list(key)})")
        created = f"CREATE TABLE {self._at(self._table)} ({', '.join(columns)}){self.table_options}"
        return [created, *(self._stamp_index(connection) if self._stamp is not None and self._changes is None else [])]

    def _check_names(self, held: Sequence[Column]) -> None:
        """Raise ``ConfigError`` for a declared column that the table has under another name, or
        computes by itself."""
        names = {each.name: each for each in held}
        for name in (*self.schema.names, *([self._stamp] if self._stamp is not None else [])):
            other = next((each for each in names if each.casefold() == name.casefold()), name)
            if self.dialect.folds_case and name not in names and other != name:
                raise ConfigError(
                    f"{self.location} has a column {other!r}, and the field is {name!r}, which is the same name in "
                    f"{self.dialect.name}: name the field {other!r}"
                )
            if name in names and (names[name].generated or (names[name].always and self._changes is None)):
                raise ConfigError(
                    f"{self.location} makes the values of {name!r} by itself: leave that field out, with columns=[...]"
                )

    def _check_columns(self, connection: Any, held: Sequence[Column]) -> None:
        """Compare an existing table with the declared columns."""
        self._check_names(held)
        names = {each.name for each in held}
        missing = [name for name in self.schema.names if name not in names]
        mode = self._changes.on_new_column if self._changes is not None else "fail"
        needed = [name for name in missing if self._changes is not None and name in self._changes.key]
        if needed or (missing and mode == "fail"):
            name = (needed or missing)[0]
            advice = "" if self._changes is None or needed else "; or use on_new_column='add' or 'ignore'"
            raise ConfigError(f"{self.location} has no column {name!r}: {self._adding(name)}{advice}")
        if self._changes is not None and not self._unique(connection, self._table, self._changes.key):
            raise ConfigError(
                f"{self.location} has no primary key or unique index of {', '.join(self._changes.key)}: "
                f"{self._shown(self._giving_key(connection))}"
            )

    def _stamping(self, connection: Any, columns: Sequence[Column]) -> list[str]:
        """The statements that add the column of the stamp, where a table has none."""
        if self._stamp is None or self._stamp in {each.name for each in columns}:
            return []
        added = f"ALTER TABLE {self._at(self._table)} ADD COLUMN {self._q(self._stamp)} {self.dialect.integer}"
        return [added, *(self._stamp_index(connection) if self._changes is None else [])]

    # --- the schema, for people -------------------------------------------------------------------

    def table_schema(self) -> TableSchema:
        with self._reading() as connection:
            held = self._held_columns(connection, self._table)
            statements = map(self._shown, self._pending(connection, held))
            declared = self._declared() | ({self._stamp: self.dialect.integer} if self._stamp is not None else {})
            columns = {each.name: TableColumn(each.name, declared.get(each.name), each.kind) for each in held}
            columns |= {name: TableColumn(name, kind, None) for name, kind in declared.items() if name not in columns}
            return TableSchema(tuple(columns.values()), tuple(statements))

    def apply_schema(self, topology_id: str) -> TableSchema:
        found = self.table_schema()
        with self._altering() as connection:
            for each in self._pending(connection, self._held_columns(connection, self._table)):
                self._run(connection, each)
        self.prepare(topology_id)
        return found

    def _pending(self, connection: Any, held: Sequence[Column]) -> list[str]:
        """The statements that give the table what it lacks. ``held``: the columns that it has."""
        if not held:
            return self._creation(connection)
        self._check_names(held)
        key = self._changes.key if self._changes is not None else ()
        names = {each.name for each in held}
        if missing := [name for name in key if name not in names]:
            raise ConfigError(
                f"{self.location} has no column {missing[0]!r} of the key: its rows would have no value for it; create the "
                "column, and fill it"
            )
        found = [*self._alterations(connection, held), *self._stamping(connection, held)]
        if not key or self._unique(connection, self._table, key):
            return found
        statement = self._giving_key(connection)
        if not statement.startswith(("ALTER ", "CREATE ")):
            raise ConfigError(f"{self.location} has another primary key than {', '.join(key)}: {statement}")
        return [*found, statement]

    def _alterations(self, connection: Any, held: Sequence[Column]) -> list[str]:
        """The statements that add the declared columns that the table lacks, and widen those that
        are too narrow, where nothing is lost."""
        if self._changes is not None and self._changes.on_new_column == "ignore":
            return []
        kinds = {each.name: each.kind for each in held}
        beside = [f"{self._table}_before"] if self._changes is not None else []
        tables = [self._table, *(each for each in beside if self._held_columns(connection, each))]
        statements = []
        for field in self.schema:
            if field.name not in kinds:
                statements.append(self._adding(field.name))
            elif (kind := self._widened(kinds[field.name], field.type)) is not None:
                statements += [
                    f"ALTER TABLE {self._at(each)} ALTER COLUMN {self._q(field.name)} TYPE {kind}" for each in tables
                ]
        return statements

    def _shown(self, statement: str) -> str:
        """A statement as a person types it."""
        return statement.replace("%%", "%") if self.dialect.mark == "%s" else statement

    def _create_side_tables(self, connection: Any, txid: int | None = None) -> None:
        integer, text = self.dialect.integer, self.dialect.text
        with self._creating(connection):
            self._run(
                connection,
                f"CREATE TABLE IF NOT EXISTS {self._at(WRITTEN_TABLE)} (state {text} NOT NULL, writer {text} NOT NULL, "
                f"txid {integer} NOT NULL, PRIMARY KEY (state, writer)){self.side_table_options}",
            )
            if self._changes is not None:
                self._create_before(connection, txid)

    def _create_before(self, connection: Any, txid: int | None = None) -> None:
        changes = self._by_key()
        before, integer = f"{self._table}_before", self.dialect.integer
        columns = [each for each in self._held_columns(connection, self._table) if not each.generated]
        found = self._fitting_before(connection, columns, txid)
        if not found:
            kinds = ", ".join(f"{self._q(each.name)} {each.kind}" for each in columns)
            self._run(
                connection,
                f"CREATE TABLE {self._at(before)} ({kinds}, {TXID} {integer} NOT NULL, {EXISTED} {integer} NOT NULL, "
                f"PRIMARY KEY ({self._list(changes.key)})){self.side_table_options}",
            )
        else:
            for each in columns:
                if each.name not in found:
                    self._run(connection, f"ALTER TABLE {self._at(before)} ADD COLUMN {self._q(each.name)} {each.kind}")
        if changes.sequence is not None:
            kinds_of = {each.name: each.kind for each in columns} | self._missing_kinds(columns)
            named = ", ".join(f"{self._q(name)} {kinds_of[name]} NOT NULL" for name in (*changes.key, changes.sequence))
            self._run(
                connection,
                f"CREATE TABLE IF NOT EXISTS {self._at(f'{self._table}_deleted')} ({named}, {TXID} {integer} NOT NULL, "
                f"PRIMARY KEY ({self._list(changes.key)}, {TXID})){self.side_table_options}",
            )

    def _fitting_before(self, connection: Any, columns: Sequence[Column], txid: int | None) -> set[str]:
        """The columns of ``<table>_before``; none if there is no such table. One that does not fit
        the table, because somebody has changed the table's key or types, is removed if it is empty,
        and else changed. ``txid``: of the transaction under way; rows from before an earlier one
        are not needed."""
        before, key = f"{self._table}_before", self._by_key().key
        held = {each.name: each.kind.removesuffix(" NULL") for each in self._held_columns(connection, before)}
        shared = [each for each in columns if each.name in held]
        other = [each for each in shared if held[each.name] != each.kind.removesuffix(" NULL")]
        same_key = not held or self._unique(connection, before, key)
        if same_key and not other:
            return set(held)
        if txid is not None:
            self._run(connection, f"DELETE FROM {self._at(before)} WHERE {TXID} < {txid:d}")
        if self._run(connection, f"SELECT 1 FROM {self._at(before)} LIMIT 1").fetchone() is None:
            self._run(connection, f"DROP TABLE {self._at(before)}")
            return set()
        if not same_key:
            raise ConfigError(
                f"{self.location} has another key than {before!r}, which can put its last transaction back: when that is "
                f"committed in the topology, DROP TABLE {self._at(before)}"
            )
        for each in other:
            self._retype_before(connection, each)
        return set(held)

    def _retype_before(self, connection: Any, column: Column) -> None:
        """Give a column of ``<table>_before`` the type that it has in the table."""

    def _missing_kinds(self, held: Sequence[Column]) -> dict[str, str]:
        names = {each.name for each in held}
        return {name: kind for name, kind in self._declared().items() if name not in names}

    def sweep(self, header: Header) -> int:
        return 0  # the sql_txn that opened the attempt has taken back what earlier ones wrote

    def roll_back(self, header: Header) -> int:
        with self._writing() as connection:
            self._check_header(connection, header, self._own_header)
            return self._take_back(connection, header.stamp.txid)

    def purge(self, header: Header, before_txid: int) -> int:
        if self._changes is None or self._changes.sequence is None:
            return 0
        with self._writing() as connection:
            self._check_header(connection, header, self._keep_header)
            limit = before_txid - self._changes.keep_deletes
            query = f"DELETE FROM {self._at(f'{self._table}_deleted')} WHERE {TXID} < {limit}"
            removed: int = self._run(connection, query).rowcount
            return removed

    def clear(self, topology_id: str) -> Header:
        if self._stamp is None:
            raise ConfigError(
                f"{self.location} has no stamp that tells which rows are Ratchet's: empty it by its own means"
            )
        self.prepare(topology_id)
        with self._writing() as connection:
            found = self._found_header(connection, self._own_header)
            header = Header(topology_id, uuid.uuid4().hex, epoch=found.epoch)
            for each in (*(self.members.every(connection) if self.members is not None else ()), self):
                self._run(connection, f"DELETE FROM {each._at(each._table)} WHERE {each._q(self._stamp)} IS NOT NULL")
            self._forget(connection)
            if self._changes is not None and self._changes.sequence is not None:
                self._run(connection, f"DELETE FROM {self._at(f'{self._table}_deleted')}")
            self._run(connection, self._headers.update(), (*header_values(header), self._table))
            return header

    def _enter(self, connection: Any, expected: Header, new: Header) -> None:
        """Invariants 2 and 3."""
        if new.open is None or expected.same_attempt(new):
            return
        if expected.open is None or expected.open.txid != new.open.txid:
            self._forget(connection)
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
        if changes.sequence is not None:
            self._run(connection, f"DELETE FROM {self._at(f'{self._table}_deleted')} WHERE {TXID} = {txid:d}")
        return count

    def _forget(self, connection: Any) -> None:
        self._run(
            connection, f"DELETE FROM {self._at(WRITTEN_TABLE)} WHERE state = {self.dialect.mark}", (self._table,)
        )
        if self._changes is not None:
            for each in (*self._changed_last(connection), self):
                each._forget_before(connection)

    def _forget_before(self, connection: Any) -> None:
        self._run(connection, f"DELETE FROM {self._at(f'{self._table}_before')}")

    def _changed_last(self, connection: Any) -> list[RowTable]:
        return list(self.members.changed_last(connection)) if self.members is not None else []

    # --- in tasks ---------------------------------------------------------------------------------

    def check_rows(self, rows: pa.RecordBatch) -> None:
        self._storable(pa.Table.from_batches([rows]))

    def write(self, attempt: TransactionAttempt, batches: Iterable[pa.RecordBatch]) -> None:
        rows = self._storable(pa.Table.from_batches(batches, schema=self.schema))
        with self.committing(attempt) as (connection, first):
            if not first or not rows.num_rows:
                return
            if self._stamp is not None:
                stamp = pa.chunked_array([pa.repeat(pa.scalar(attempt.txid, pa.int64()), rows.num_rows)])
                rows = rows.append_column(self._stamp, stamp)
            self._load(connection, self._at(self._table), rows)

    def change(self, attempt: TransactionAttempt, rounds: Sequence[pa.Table]) -> None:
        """Apply rounds of changes one after the other; a round has each key once. Its columns are
        those of the schema, ``ACTION``, and with a sequence ``DELETED_AT``: the sequence of the
        deletion before a ``REPLACE``. A round with changes that leave out unchanged values has
        ``ROW_NEEDED`` and columns ``KEPT`` too."""
        stored = [self._storable(each) for each in rounds]
        with self.committing(attempt) as (connection, first):
            if not first or not any(each.num_rows for each in stored):
                return
            self.apply(connection, stored, attempt.txid)

    # --- under the header of another table --------------------------------------------------------

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

    def in_schema_of(self, owner: RowTable) -> RowTable:
        """This table, in the schema of the table that owns the header."""
        self._home = owner._home
        return self

    def columns(self, connection: Any) -> list[Column]:
        """The columns of the user's, as the table has them."""
        return [each for each in self._held_columns(connection, self._table) if each.name != self._stamp]

    def rows_where(self, connection: Any, columns: Sequence[str], condition: str, *values: Any) -> list[Any]:
        """Columns of the rows that a condition is true of; ``?`` in it stands for a value."""
        where = condition.replace("?", self.dialect.mark).replace("{table}", self._at(self._table))
        query = f"SELECT {self._list(columns)} FROM {self._at(self._table)} WHERE {where}"
        return list(self._run(connection, query, values).fetchall())

    def apply(self, connection: Any, rounds: Iterable[pa.Table], txid: int) -> None:
        """Apply rounds of changes, as ``change`` does."""
        names = self._fit(connection)
        copied = self._copied(connection)
        for each in rounds:
            self._apply(connection, each, names, copied, txid)

    def _copied(self, connection: Any) -> list[str]:
        """The columns of rows from before that the table has, too."""
        held = {each.name for each in self._held_columns(connection, self._table)}
        return [each.name for each in self._held_columns(connection, f"{self._table}_before") if each.name in held]

    def keeps_all(self, connection: Any) -> bool:
        """Whether the rows from before have all columns of the table. Somebody may have added some
        by hand."""
        held = {each.name for each in self._held_columns(connection, self._table) if not each.generated}
        return held <= {each.name for each in self._held_columns(connection, f"{self._table}_before")}

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

    def make(self, connection: Any, changed: Iterable[str], txid: int) -> None:
        """Create the table if there is none; else check it, and change it as ``on_new_column``
        allows. ``changed``: the columns whose declared type is another one than before. ``txid``:
        of the transaction under way. Raises ``ConfigError`` for a column that does not hold its
        declared type."""
        columns = self._held_columns(connection, self._table)
        if columns:
            self._check_columns(connection, columns)
        self._create_or_stamp(connection, columns)
        self._create_side_tables(connection, txid)
        self._fit(connection)
        kinds = {each.name: each.kind for each in self._held_columns(connection, self._table)}
        for name in {each.name for each in columns}.intersection(changed):
            declared = self._declared()[name]
            if not _holds(kinds[name].casefold(), declared.casefold()):
                raise ConfigError(
                    f"{self.location}: column {name!r} of the source is {declared} now, and that of the table is "
                    f"{kinds[name].replace('%%', '%')}: {self._giving_type(name)}"
                )

    def empty(self, connection: Any, txid: int) -> None:
        """Delete all rows, and keep them as they were before the transaction."""
        names, table = self._list(self._copied(connection)), self._at(self._table)
        self._run(
            connection,
            f"INSERT INTO {self._at(f'{self._table}_before')} ({names}, {TXID}, {EXISTED}) SELECT {names}, {txid:d}, 1 "
            f"FROM {table} WHERE TRUE {self._or_nothing(self._by_key().key[0])}",
        )
        self._run(connection, f"DELETE FROM {table}")

    @contextmanager
    def committing(self, attempt: TransactionAttempt) -> Iterator[tuple[Any, bool]]:
        """A sql_txn that writes rows of an attempt, and whether its task has not written yet."""
        fence = attempt.fence
        if fence is None:
            raise TopologyError(f"{self.location} is written by topologies only: its attempts need a driver")
        with self._writing() as connection:
            if fence.opens_from is None:
                check_granted(self._found_header(connection, self._keep_header), attempt, self.location)
                yield connection, self._is_first(connection, fence.writer, attempt.txid)
                return
            opened = OpenCommit(attempt.txid, attempt.attempt_id, fence.plan_digest)
            header = fence.opens_from.opened(fence.epoch, opened)
            self._check_header(connection, fence.opens_from, self._own_header)
            self._enter(connection, fence.opens_from, header)
            yield connection, self.can_undo or self._is_first(connection, fence.writer, attempt.txid)
            self._run(connection, self._headers.update(), (*header_values(header.done_as_open()), self._table))

    def _is_first(self, connection: Any, writer: str, txid: int) -> bool:
        """Note that a task writes. False: it has written before, in this attempt, or where a replay
        skips what is written, in an earlier one."""
        mark = self.dialect.mark
        statement = (
            f"INSERT INTO {self._at(WRITTEN_TABLE)} (state, writer, txid) VALUES ({mark}, {mark}, {mark}) "
            f"{self._or_nothing('state')}"
        )
        return bool(self._run(connection, statement, (self._table, writer, txid)).rowcount == 1)

    def _fit(self, connection: Any) -> list[str]:
        """The declared columns that the table has, after the changes that ``on_new_column`` allows
        (C42)."""
        changes = self._by_key()
        if changes.on_new_column == "fail":
            return list(self.schema.names)
        held = self._held_columns(connection, self._table)
        if changes.on_new_column == "ignore":
            names = {each.name for each in held}
            return [name for name in self.schema.names if name in names]
        if self._alterations(connection, held):
            with self._creating(connection):
                for each in self._alterations(
                    connection, self._held_columns(connection, self._table)
                ):  # under the lock
                    self._run(connection, each)
                self._create_before(connection)
        return list(self.schema.names)

    def _adding(self, name: str) -> str:
        """The statement that adds a declared column."""
        defaults = dict(self._changes.defaults) if self._changes is not None else {}
        default = f" DEFAULT {_literal(defaults[name])}" if defaults.get(name) is not None else ""
        return f"ALTER TABLE {self._at(self._table)} ADD COLUMN {self._q(name)} {self._declared()[name]}{default}"

    def _apply(self, connection: Any, rows: pa.Table, names: Sequence[str], copied: Sequence[str], txid: int) -> None:
        """Copy what the rows change, and change it. ``copied``: the columns to copy."""
        changes = self._by_key()
        key, sequence = self._list(changes.key), changes.sequence
        own = [f"{self.dialect.null_integer} AS {ACTION}"]
        if sequence is not None:
            own.append(f"{self._q(sequence)} AS {DELETED_AT}")
        kept = [f"{KEPT}{number}" for number, each in enumerate(self.schema.names) if each in names]
        marks = [each for each in rows.column_names if each == ROW_NEEDED or each in kept]
        own += [f"{self.dialect.null_integer} AS {each}" for each in marks]
        staged = self._stage(connection, ", ".join([self._list(names), *own]))
        loaded = [*names, ACTION, *([DELETED_AT] if sequence is not None else []), *marks]
        self._load(connection, staged, rows.select(loaded))
        table, before = self._at(self._table), self._at(f"{self._table}_before")
        same = self._same(table, staged)
        if sequence is not None:
            self._leave_out_older(connection, staged)
        if ROW_NEEDED in marks:
            self._keep_unchanged(connection, staged, marks)
        nothing = self._or_nothing(changes.key[0])
        of_table = ", ".join(f"{table}.{self._q(each)}" for each in copied)
        self._run(
            connection,
            f"INSERT INTO {before} ({self._list(copied)}, {TXID}, {EXISTED}) SELECT {of_table}, {txid:d}, 1 FROM {staged} "
            f"JOIN {table} ON {same} WHERE TRUE {nothing}",
        )
        self._run(
            connection,
            f"INSERT INTO {before} ({key}, {TXID}, {EXISTED}) SELECT {key}, {txid:d}, 0 FROM {staged} "
            f"WHERE NOT EXISTS (SELECT 1 FROM {table} WHERE {same}) {nothing}",
        )
        self._delete(connection, staged, f"{ACTION} <> {UPSERT}")
        written = {name: self._q(name) for name in names}
        if self._stamp is not None:
            written[self._stamp] = str(txid)
        assigned = {name: f"excluded.{self._q(name)}" for name in written if name not in changes.key}
        if changes.ignore_nulls:
            for name in names:
                if name not in changes.key:
                    assigned[name] = f"COALESCE(excluded.{self._q(name)}, _held.{self._q(name)})"
        self._upsert(connection, written, f"{staged} WHERE {ACTION} <> {DELETE}", assigned)
        if sequence is not None:
            deleted, at = self._at(f"{self._table}_deleted"), self._q(sequence)
            self._run(
                connection,
                f"INSERT INTO {deleted} ({key}, {at}, {TXID}) SELECT {key}, {at}, {txid:d} FROM {staged} "
                f"WHERE {ACTION} = {DELETE} {self._or_replace(f'{key}, {TXID}', at)}",
            )

    def _keep_unchanged(self, connection: Any, staged: str, marks: Sequence[str]) -> None:
        """Give the staged rows the values that they keep. Raises ``BadRecordError`` for one that
        keeps a value of a row that is not there."""
        key, table = self._by_key().key, self._at(self._table)
        same = self._same(table, staged)
        lost = (
            f"SELECT {self._list(key)} FROM {staged} WHERE {ROW_NEEDED} = {NEVER} OR ({ROW_NEEDED} = {NEEDED} "
            f"AND NOT EXISTS (SELECT 1 FROM {table} WHERE {same})) LIMIT 1"
        )
        if (row := self._run(connection, lost).fetchone()) is not None:
            raise BadRecordError(
                f"{self.location}: a change leaves out unchanged values, and there is no row with its key that has them; give "
                "the source table REPLICA IDENTITY FULL, or take a snapshot of it",
                f"key {', '.join(f'{name}={value!r}' for name, value in zip(key, row, strict=True))}",
            )
        for mark in marks:
            if mark != ROW_NEEDED:
                name = self._q(self.schema.names[int(mark.removeprefix(KEPT))])
                self._run(
                    connection,
                    f"UPDATE {staged} SET {name} = (SELECT {table}.{name} FROM {table} WHERE {same}) WHERE {mark} = 1",
                )

    def _leave_out_older(self, connection: Any, staged: str) -> None:
        changes = self._by_key()
        name = changes.sequence or ""
        table, deleted, at = self._at(self._table), self._at(f"{self._table}_deleted"), self._q(name)
        for held in (table, deleted):
            newer = f"{self._compared(f'{held}.{at}')} > {self._compared(f'{staged}.{at}')}"
            self._run(
                connection,
                f"DELETE FROM {staged} WHERE EXISTS (SELECT 1 FROM {held} WHERE {self._same(held, staged)} AND {newer})",
            )
        newer = f"{self._compared(f'{table}.{at}')} > {self._compared(f'{staged}.{DELETED_AT}')}"
        self._run(
            connection,
            f"UPDATE {staged} SET {ACTION} = {UPSERT} WHERE {ACTION} = {REPLACE} AND EXISTS (SELECT 1 FROM {table} "
            f"WHERE {self._same(table, staged)} AND {newer})",
        )

    # --- as the database returns them -------------------------------------------------------------

    def streamed(self, connection: Any, query: str) -> Iterator[tuple[Any, ...]]:
        """The rows that a query selects, without all of them in memory."""
        cursor = self._run(connection, query)
        while rows := cursor.fetchmany(READ_ROWS):
            yield from rows

    def held_value(self, name: str, value: Any) -> Any:
        """A value that the database has returned, in canonical form. One that is none of the
        declared type, because the user's column has another, stays as it is."""
        declared = self.schema.field(name).type
        if value is None:
            return None
        try:
            if is_nested(declared):
                return json_form(value)
            return form_of(declared)(self._loaded(value, declared))
        except (ValueError, TypeError, ArithmeticError, pa.ArrowException):
            return value

    def key_parameter(self, name: str, value: Any) -> Any:
        """A value of a key as a parameter of a statement."""
        return self._stored(value, self.schema.field(name).type)

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
        over = "OVERRIDING SYSTEM VALUE " if overriding else ""
        written: int = self._run(
            connection,
            f"INSERT INTO {self._at(self._table)} AS _held ({self._list(values)}) {over}SELECT {', '.join(values.values())} "
            f"FROM {source} ON CONFLICT ({self._list(self._by_key().key)}) DO {action}",
        ).rowcount
        return written

    def _or_replace(self, key: str, column: str) -> str:
        """The end of an INSERT that assigns this column of rows whose key is there."""
        return f"ON CONFLICT ({key}) DO UPDATE SET {column} = excluded.{column}"

    def _or_nothing(self, column: str) -> str:
        """The end of an INSERT that leaves out rows whose key is there. ``column``: of the key."""
        return "ON CONFLICT DO NOTHING"

    def _run(self, connection: Any, statement: str, parameters: Sequence[Any] = ()) -> Any:
        return connection.execute(statement, parameters)

    def _q(self, name: str) -> str:
        """A name in a statement that takes parameters."""
        return qualified("", name).replace("%", "%%") if self.dialect.mark == "%s" else qualified("", name)

    def _at(self, table: str) -> str:
        """The name of a table in a statement that takes parameters."""
        found = qualified(self._home, table)
        return found.replace("%", "%%") if self.dialect.mark == "%s" else found

    def _list(self, names: Iterable[str]) -> str:
        return ", ".join(map(self._q, names))

    def _same(self, one: str, other: str) -> str:
        return " AND ".join(f"{one}.{self._q(name)} = {other}.{self._q(name)}" for name in self._by_key().key)

    def _compared(self, expression: str) -> str:
        changes = self._by_key()
        return self.dialect.compared(expression, self.schema.field(changes.sequence or "").type)

    def _declared(self) -> dict[str, str]:
        return {each.name: self._column_type(each) for each in self.schema}

    def _column_type(self, field: pa.Field) -> str:
        """The type of a column of our own making. Raises ``TopologyError`` for a type that the
        database cannot hold."""
        return column_type(self.dialect, self.json, field.name, field.type)

    def _storable(self, rows: pa.Table) -> pa.Table:
        """The rows with values that the database takes. Raises ``BadRecordError``."""
        return storable(rows, self.location)

    def _by_key(self) -> Changes:
        if self._changes is None:
            raise TopologyError(f"{self.location} has no key: use an UpsertCommitter")
        return self._changes


def _holds(held: str, declared: str) -> bool:
    """Whether a column of one type holds all values of another one."""
    one, other = _DECIMAL.fullmatch(held), _DECIMAL.fullmatch(declared)
    if one is not None and other is not None:
        digits, scale = map(int, one.groups())
        wanted, wanted_scale = map(int, other.groups())
        return scale >= wanted_scale and digits - scale >= wanted - wanted_scale
    return held.startswith(declared)  # what follows is a collation


def _literal(value: Default) -> str:
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value).upper()
