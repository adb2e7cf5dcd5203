"""What a table of rows is in its database: its columns, its key, and the tables beside it (C42).

A table is created where it is missing. One that somebody has made by hand is compared with the
declared columns, and altered only as its user allows.
"""

from __future__ import annotations

import re
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal

import pyarrow as pa

from framework.errors import ConfigError, CorruptStateError, TopologyError
from framework.topology import Fields, Header
from framework.topology.table_schema_diff import TableColumn, TableSchema
from sinks.appendable_table import Table
from sinks.rows.values import column_type
from sinks.sql.schema import HEADERS_TABLE, header_values, qualified
from sinks.sql.table_base import SqlTableBase

_DECIMAL = re.compile(r"(?:numeric|decimal)\((\d+),(\d+)\)")
OnNewColumn = Literal["add", "ignore", "fail"]
#: A value that is written in the same way in every SQL; no text with a backslash or a %.
Default = bool | int | float | str

WRITTEN_TABLE = "_ratchet_written"
#: Columns of ours in side tables and in staged rows.
TXID, EXISTED, ACTION, DELETED_AT = "_ratchet_txid", "_ratchet_existed", "_ratchet_action", "_ratchet_deleted_at"
#: Staged rows of sources that leave out unchanged values: whether there must be a row with the key
#: (``NEEDED``: in the table; ``WHOLE``: too, but a later change has all values; ``NEVER``: there
#: cannot be one), and for each column that is left out, by its number in the schema, whether the
#: row keeps its value.
ROW_NEEDED, KEPT = "_ratchet_row_needed", "_ratchet_kept_"
NOT_NEEDED, NEEDED, NEVER, WHOLE = 0, 1, 2, 3
#: In staged rows and in ``<table>_deleted``: where a source that leaves out unchanged values has
#: made a change.
POSITION = "_ratchet_position"
#: In changes that are not reduced yet: whether the change falls due by time, and may be left out.
DUE = "_ratchet_due"
OWN_COLUMNS = (TXID, EXISTED, ACTION, DELETED_AT, ROW_NEEDED, POSITION, DUE)
#: For how many transactions the sequence or the position of a deleted row is kept.
KEEP_DELETES = 100_000


class UnfitTableError(ConfigError):
    """An existing table does not fit the declared columns."""


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
    """How an ``UpsertCommitter`` changes a table. ``defaults``: the values of existing rows in
    added columns. ``keeps_positions``: whether the table needs the positions of deletions."""

    key: tuple[str, ...]
    sequence: str | None = None
    _: KW_ONLY
    ignore_nulls: bool = False
    on_new_column: OnNewColumn = "fail"
    keep_deletes: int = 0
    defaults: tuple[tuple[str, Default], ...] = ()
    keeps_positions: bool = False


class TableDefinition(SqlTableBase, Table):
    """A table of a database, without its rows. ``stamp``: the column that holds the txid of the
    transaction that wrote a row; None: there is none."""

    #: The type of a column of nested values.
    json: ClassVar[str]
    #: Whether a statement can add several columns.
    adds_columns_together: ClassVar[bool] = True
    #: Where a statement says ``CREATE TABLE``, after the list of columns; and for tables beside it.
    table_options: str = ""
    side_table_options: str = ""

    def __init__(self, name: str, stamp: str | None) -> None:
        self._table = name
        self._stamp = stamp
        self._fields: Fields | None = None
        self._changes: Changes | None = None
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
    def _stamp_index(self, connection: Any) -> list[str]:
        """The statements that create a cheap index of the stamp column, if there is none."""

    def _key_before(self, key: Sequence[str]) -> Sequence[str]:
        """The columns of the primary key of ``<table>_before``. They begin with the txid where the
        database needs an index to find the rows of the last transaction."""
        return key

    @contextmanager
    def _altering(self) -> Iterator[Any]:
        """A connection that may create and alter tables."""
        with self._writing() as connection, self._creating(connection):
            yield connection

    def _widened(self, held: str, declared: pa.DataType) -> str | None:
        """The type that a column of type ``held`` needs to hold all values of ``declared``; None:
        it holds them, or the database could not change it without loss."""
        return None

    def _misread(self, column: Column, declared: pa.DataType) -> str:
        """The wrong reading that a column of another type would give values of ``declared``; empty
        if it takes them for what they are."""
        return ""

    def _check_width(self, connection: Any, held: Sequence[Column]) -> None:
        """Raise ``BadRecordError`` if rows with the existing and the declared columns are too wide
        to write, although the database adds the columns."""

    def _retype_before(self, connection: Any, column: Column) -> None:
        """Give a column of ``<table>_before`` the type that it has in the table."""

    # --- declared columns -------------------------------------------------------------------------

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
            known = seen.setdefault(self.dialect.folded(field.name), field.name)
            if known != field.name:
                raise TopologyError(
                    f"{self.location}: {known!r} and {field.name!r} are the same column in {self.dialect.name}: rename one"
                )
        own, kept = {*map(self.dialect.folded, (*OWN_COLUMNS, self._stamp or TXID))}, self.dialect.folded(KEPT)
        taken = [name for folded, name in seen.items() if folded in own or folded.startswith(kept)]
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
        elif self.dialect.no_name is not None and self.dialect.no_name.search(name):
            problem = f"is no name in {self.dialect.name}"
        elif longest is not None and len(name.encode()) > longest:
            problem = f"has more than {longest} bytes, which {self.dialect.name} would cut"
        elif name in self.dialect.reserved_columns or (reserved and name.casefold().startswith(reserved)):
            problem = f"is reserved by {self.dialect.name}"
        else:
            return
        raise TopologyError(f"{self.location}: {name!r}{what} {problem}; give another name")

    def _declared(self) -> dict[str, str]:
        return {each.name: self._column_type(each) for each in self.schema}

    def _column_type(self, field: pa.Field) -> str:
        """The type of a column of our own making. Raises ``TopologyError`` for a type that the
        database cannot hold."""
        return column_type(self.dialect, self.json, field.name, field.type)

    def _by_key(self) -> Changes:
        if self._changes is None:
            raise TopologyError(f"{self.location} has no key: use an UpsertCommitter")
        return self._changes

    # --- created and compared, on the driver ------------------------------------------------------

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
                "another table, or, if that topology is gone for good, "
                f"DELETE FROM {HEADERS_TABLE} WHERE state = '{self._table}'"
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
        """Raise ``UnfitTableError`` for a declared column that the table has under another name, or
        as a generated column."""
        names = {each.name: each for each in held}
        folded = {self.dialect.folded(name): name for name in names}
        for name in (*self.schema.names, *([self._stamp] if self._stamp is not None else [])):
            other = folded.get(self.dialect.folded(name), name)
            if name not in names and other != name:
                raise UnfitTableError(
                    f"{self.location} has a column {other!r}, and the field is {name!r}, which is the same name in "
                    f"{self.dialect.name}: name the field {other!r}"
                )
            if name in names and (names[name].generated or (names[name].always and self._changes is None)):
                raise UnfitTableError(
                    f"{self.location} makes the values of {name!r} by itself: leave that field out, with columns=[...]"
                )

    def _check_columns(self, connection: Any, held: Sequence[Column]) -> None:
        """Compare an existing table with the declared columns."""
        self._check_names(held)
        names, declared = {each.name for each in held}, {each.name: each.type for each in self.schema}
        for each in held:
            if each.name in declared and (meaning := self._misread(each, declared[each.name])):
                raise UnfitTableError(
                    f"{self.location}: column {each.name!r} is {each.kind}, which would {meaning}: make the column "
                    f"{self._declared()[each.name]}, or convert the field before this committer"
                )
        missing = [name for name in declared if name not in names]
        mode = self._changes.on_new_column if self._changes is not None else "fail"
        needed = [name for name in missing if self._changes is not None and name in self._changes.key]
        if needed or (missing and mode == "fail"):
            name = (needed or missing)[0]
            kind = self._declared()[name]
            advice = "" if self._changes is None or needed else "; or use on_new_column='add' or 'ignore'"
            raise UnfitTableError(
                f"{self.location} has no column {name!r}: {self._additions(self._table, {name: kind})[0]}{advice}"
            )
        if self._changes is not None and not self._unique(connection, self._table, self._changes.key):
            raise UnfitTableError(
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

    def _shown(self, statement: str) -> str:
        """A statement as a person types it."""
        return statement.replace("%%", "%") if self.dialect.mark == "%s" else statement

    # --- changed, also in tasks -------------------------------------------------------------------

    def make(self, connection: Any, changed: Iterable[str], txid: int) -> None:
        """Create the table if it does not exist; otherwise check it, and change it as
        ``on_new_column`` allows. ``changed``: the columns with another declared type than before.
        ``txid``: of the present transaction. Raises ``UnfitTableError`` for a table with another
        key, or a column that does not hold its declared type."""
        columns = self._held_columns(connection, self._table)
        if columns:
            self._check_columns(connection, columns)
        self._create_or_stamp(connection, columns)
        self._create_side_tables(connection, txid)
        self._fit(connection)
        kinds = {each.name: each.kind for each in self._held_columns(connection, self._table)}
        declared = self._declared()
        for name in {each.name for each in columns}.intersection(changed):
            if not _holds(kinds[name].casefold(), declared[name].casefold()):
                raise UnfitTableError(
                    f"{self.location}: column {name!r} of the source is {declared[name]} now, and that of the table is "
                    f"{kinds[name].replace('%%', '%')}: {self._giving_type(name)}"
                )

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
                held = self._held_columns(connection, self._table)  # under the lock
                self._check_width(connection, held)
                for each in self._alterations(connection, held):
                    self._run(connection, each)
                self._create_before(connection)
        return list(self.schema.names)

    def could_have(self, held: Sequence[Column]) -> list[str]:
        """The declared columns that the table has with a type that holds their values, or that
        ``make`` can add or widen. ``held``: the columns that the table has."""
        names = {self.dialect.folded(each.name): each for each in held}
        found = []
        for name, kind in self._declared().items():
            its = names.get(self.dialect.folded(name))
            if its is None:
                found.append(name)
            elif its.name == name and not its.generated:
                widened = self._widened(its.kind, self.schema.field(name).type)
                if widened is not None or _holds(its.kind.casefold(), kind.casefold()):
                    found.append(name)
        return found

    def _alterations(self, connection: Any, held: Sequence[Column]) -> list[str]:
        """The statements that add the declared columns that the table lacks, and widen those that
        are too narrow, where nothing is lost."""
        if self._changes is not None and self._changes.on_new_column == "ignore":
            return []
        kinds = {each.name: each.kind for each in held}
        missing = self._missing_kinds(held) if not kinds.keys() >= {*self.schema.names} else {}
        added = self._additions(self._table, missing)
        widened = {
            field.name: kind
            for field in self.schema
            if field.name in kinds and (kind := self._widened(kinds[field.name], field.type)) is not None
        }
        if not widened:  # as in almost every transaction
            return added
        for table, its in self._with_side_tables(connection, widened):
            kinds_in = [f"ALTER COLUMN {self._q(name)} TYPE {kind}" for name, kind in widened.items() if name in its]
            if kinds_in:  # one statement, which writes the rows of the table once
                added.append(f"ALTER TABLE {self._at(table)} {', '.join(kinds_in)}")
        return added

    def _with_side_tables(self, connection: Any, names: Iterable[str]) -> Iterator[tuple[str, set[str]]]:
        """The table and its side tables, with the columns of the table that each of them has.
        ``names``: only these columns."""
        yield self._table, set(names)
        if self._changes is not None:
            for table in (f"{self._table}_before", f"{self._table}_deleted"):
                held = {each.name for each in self._held_columns(connection, table)}
                if TXID in held:
                    yield table, held

    def _additions(self, table: str, kinds: Mapping[str, str]) -> list[str]:
        """The statements that add columns to a table, by their types. Rows that are there get the
        declared defaults in the table itself."""
        its = self._changes.defaults if self._changes is not None and table == self._table else ()
        defaults = {name: f" DEFAULT ({_literal(value)})" for name, value in its if value is not None}
        added = [f"ADD COLUMN {self._q(name)} {kind}{defaults.get(name, '')}" for name, kind in kinds.items()]
        together = [", ".join(added)] if added and self.adds_columns_together else added
        return [f"ALTER TABLE {self._at(table)} {each}" for each in together]

    def columns(self, connection: Any) -> list[Column]:
        """The columns of the user's, as the table has them."""
        return [each for each in self._held_columns(connection, self._table) if each.name != self._stamp]

    def keeps_all(self, connection: Any) -> bool:
        """Whether the side tables have all columns that they need. A user may have added columns to
        the table."""
        held = {each.name for each in self._held_columns(connection, self._table) if not each.generated}
        if not held <= {each.name for each in self._held_columns(connection, f"{self._table}_before")}:
            return False
        return not self._by_key().keeps_positions or self.has_positions(connection)

    def has_positions(self, connection: Any) -> bool:
        """Whether the positions of deletions are kept, under the key that the table has."""
        key = self._by_key().key
        held = {each.name: _kind(each) for each in self._held_columns(connection, f"{self._table}_deleted")}
        if held.keys() != {*key, POSITION, TXID}:
            return False
        return all(
            held[each.name] == _kind(each) for each in self._held_columns(connection, self._table) if each.name in key
        )

    # --- the tables beside it ---------------------------------------------------------------------

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
                f"PRIMARY KEY ({self._list(self._key_before(changes.key))})){self.side_table_options}",
            )
        else:
            for each in self._additions(before, {each.name: each.kind for each in columns if each.name not in found}):
                self._run(connection, each)
        if changes.sequence is not None or self._lacks_positions(connection):
            kinds_of = {each.name: each.kind for each in columns} | self._missing_kinds(columns) | {POSITION: integer}
            names = (*changes.key, changes.sequence or POSITION)
            named = ", ".join(f"{self._q(name)} {kinds_of[name]} NOT NULL" for name in names)
            self._run(
                connection,
                f"CREATE TABLE IF NOT EXISTS {self._at(f'{self._table}_deleted')} ({named}, {TXID} {integer} NOT NULL, "
                f"PRIMARY KEY ({self._list(changes.key)}, {TXID})){self.side_table_options}",
            )

    def _lacks_positions(self, connection: Any) -> bool:
        """Whether a table of the positions of deletions must be created. If a user has changed the
        key of the table, the existing one is removed."""
        deleted, needed = f"{self._table}_deleted", self._by_key().keeps_positions
        names = {each.name for each in self._held_columns(connection, deleted)}
        if not names:
            return needed
        if not {POSITION, TXID} <= names:
            if needed:
                raise ConfigError(
                    f"{self.location} needs a table {deleted!r} beside it, and there is another one of that name: rename it"
                )
            return False
        if self.has_positions(connection):
            return False
        self._run(connection, f"DROP TABLE {self._at(deleted)}")
        return True

    def _fitting_before(self, connection: Any, columns: Sequence[Column], txid: int | None) -> set[str]:
        """The columns of ``<table>_before``; none if there is no such table. One that does not fit
        the table, because somebody has changed the table's key or types, is removed if it is empty,
        and else changed. ``txid``: of the transaction under way; rows from before an earlier one
        are not needed."""
        before, key = f"{self._table}_before", self._by_key().key
        held = {each.name: _kind(each) for each in self._held_columns(connection, before)}
        shared = [each for each in columns if each.name in held]
        other = [each for each in shared if held[each.name] != _kind(each)]
        # an older table beside it may have its key without the txid, which is right, too
        same_key = not held or any(self._unique(connection, before, each) for each in (self._key_before(key), key))
        if same_key and not other:
            return set(held)
        if txid is not None:
            self._run(connection, f"DELETE FROM {self._at(before)} WHERE {TXID} < {txid:d}")
        if self._run(connection, f"SELECT 1 FROM {self._at(before)} LIMIT 1").fetchone() is None:
            self._run(connection, f"DROP TABLE {self._at(before)}")
            return set()
        if not same_key:
            raise UnfitTableError(
                f"{self.location} has another key than {before!r}, which can put its last transaction back: when that is "
                f"committed in the topology, DROP TABLE {self._at(before)}"
            )
        for each in other:
            self._retype_before(connection, each)
        return set(held)

    def _missing_kinds(self, held: Sequence[Column]) -> dict[str, str]:
        names = {each.name for each in held}
        return {name: kind for name, kind in self._declared().items() if name not in names}

    # --- statements -------------------------------------------------------------------------------

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


def _kind(column: Column) -> str:
    """The type of a column, which may take null or not."""
    return column.kind.removesuffix(" NULL")


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
