"""The committer that keeps a copy of tables of another database."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from framework.errors import BadRecordError, ConfigError, TopologyError
from framework.topology import Bolt, Fields, Input, TransactionAttempt
from framework.topology.bolts import OnBadRecord
from framework.topology.canonical_form import canonical_column
from framework.topology.mirror_changes import DEFAULT, ChangeReader, TableChanges
from sinks.rows.reduction import DELETED, UNCHANGED, reduced
from sinks.rows.sqlite import SqliteTable
from sinks.rows.table import Members, RowTable
from sinks.rows.table_definition import Changes
from sinks.rows.values import is_nested, storable
from sinks.table_committer import TableCommitter

#: The table with a row for each table of the copy.
CATALOG = "ratchet_mirror"
_NAME, _SOURCE, _KEY, _COLUMNS, _CHANGED_IN = "table_name", "source_name", "key_columns", "columns", "changed_in"
_CATALOG = Fields.of(dict.fromkeys((_NAME, _SOURCE, _KEY, _COLUMNS), pa.string()) | {_CHANGED_IN: pa.int64()})
#: The fields of the records' keys and values.
KEY, VALUE = "key", "value"
#: What the names of tables beside a table end with.
_BESIDE = ("_before", "_deleted")


class Mirror(TableCommitter[RowTable, list[TableChanges]]):
    """Keeps a copy of the tables of another database, exactly once: one table for each source
    table, in one sql_txn for all of them, so a reader sees all tables as of one transaction.

    ``into``: makes the table of a name, as in ``lambda name: PostgresTable(dsn, name,
    schema="mirror")``; all must be in one database. ``changes``: reads the records, such as
    ``spouts.DebeziumChanges()``. The input has the fields ``key`` and ``value``, as bytes, and
    comes to one task.

    A table is made when its first change comes, with the source's columns and primary key, under
    the name that ``name`` gives for its database, schema and name; by default the name alone. It
    gets the columns that the source gets later (rows that are there have the source's default in
    them, where that is a number, a truth value or a plain text), and wider types where nothing is
    lost. A column
    that the source drops stays, and rows keep their values in it. Rows are changed, deleted, and
    all removed (truncate) as in the source. A change that leaves out unchanged large values (TOAST)
    keeps those that the row has. Every other change of a schema ends the topology, with the
    statement that would help.

    The table ``catalog`` has a row for each table: its source, key and columns, and the txid that
    changed it last. ``on_bad_record``: as of an ``UpsertCommitter``. A change that is left out is
    missing in the copy.
    """

    def __init__(
        self,
        into: Callable[[str], RowTable],
        changes: ChangeReader,
        *,
        name: Callable[[Sequence[str]], str] | None = None,
        catalog: str = CATALOG,
        on_bad_record: OnBadRecord = "fail",
    ) -> None:
        made = into(catalog)
        if not isinstance(made, RowTable):
            raise TopologyError(
                f"Mirror: into gives a {type(made).__name__}: give a function from a name to a table of a database, such as "
                "lambda name: PostgresTable(dsn, name)"
            )
        super().__init__(made, None, on_bad_record)
        self._reader, self._named, self._component_id = changes, name or _last, ""
        self._write_to(made, into)

    def _write_to(self, catalog: RowTable, into: Callable[[str], RowTable]) -> None:
        self.table, self._into = catalog, into
        catalog.bind_changes(_CATALOG, Changes((_NAME,)))
        catalog.members = _Catalog(catalog, into)

    def substitute(self, folder: Path) -> Bolt:
        """In a test, the copy is a SQLite file. Its rows are ``table`` and ``row``, the row as
        JSON."""
        folder.mkdir(parents=True)
        self._write_to(_ScratchCatalog(folder / "copy.db", CATALOG), partial(SqliteTable, folder / "copy.db"))
        return self

    # --- on the driver ----------------------------------------------------------------------------

    def bind(self, component_id: str, inputs: Sequence[Input], parallelism: int) -> None:
        self._component_id = component_id
        if parallelism != 1:
            raise TopologyError(f"committer {component_id!r} writes all tables in one sql_txn: give it parallelism 1")
        self._common_fields(component_id, inputs)

    def _chosen(self, component_id: str, source: Input) -> tuple[str, ...]:
        source.require(component_id, (KEY, VALUE))
        for each in (KEY, VALUE):
            if source.fields.type_of(each) != pa.binary():
                raise TopologyError(f"committer {component_id!r}: field {each!r} must be the bytes of the records")
        return KEY, VALUE

    # --- in tasks ---------------------------------------------------------------------------------

    def execute_arrow(self, batch: pa.RecordBatch) -> None:
        found = list(self._reader.read(batch.column(KEY), batch.column(VALUE)))
        for each in found:
            if each.rows is not None:
                self._check(each)
        if found:
            self._batches.append(found)

    def _check(self, changes: TableChanges) -> None:
        """Raise ``BadRecordError`` for a change that certainly cannot be written."""
        rows = changes.rows
        missing = [name for name in changes.key if rows is not None and name not in rows.column_names]
        if rows is None or missing:
            raise BadRecordError(f"{self._shown(changes)}: the record's key has {missing[0]!r}, which is no column")
        for name in changes.key:
            if rows.column(name).null_count:
                raise BadRecordError(f"{self._shown(changes)}: the key {name!r} is null")
            if is_nested(rows.schema.field(name).type):
                raise BadRecordError(
                    f"{self._shown(changes)}: the key {name!r} is an array, which a copy cannot have as key"
                )
        table = self._into(self._named(changes.table))
        table.bind_changes(Fields.of_schema(rows.schema), Changes(changes.key))
        for batch in rows.to_batches():
            table.check_rows(batch)

    def _shown(self, changes: TableChanges) -> str:
        return f"component {self._component_id!r}: table {'.'.join(changes.table)}"

    def finish_batch(self) -> None:
        if self._attempt is None:
            return
        changes = [each for batch in self._batches for each in batch]
        parts = list(_parts(changes, self._named, self._into))
        if parts or self._attempt.is_one_step:
            catalog = _Catalog(self.table, self._into)
            self.table.limited(partial(catalog.change, self._attempt, parts))


def _last(table: Sequence[str]) -> str:
    return table[-1]


class _ScratchCatalog(SqliteTable):
    """The catalog of the copy of a test."""

    def rows_written(self) -> pa.Table:
        found: list[tuple[str, str]] = []
        with self.connected() as connection:
            for table in self.members.every(connection) if self.members is not None else ():
                names = [each.name for each in table.columns(connection)]
                for row in table.rows_where(connection, names, "TRUE"):
                    found.append((table.name, json.dumps(dict(zip(names, row, strict=True)), default=bytes.hex)))
        names_of, rows = zip(*found, strict=True) if found else ((), ())
        return pa.table({"table": pa.array(names_of, pa.string()), "row": pa.array(rows, pa.string())})


class _Part(NamedTuple):
    """Changes of a table with one set of columns. ``rounds``: as ``RowTable.change`` takes them;
    None: all rows are removed."""

    name: str
    source: str
    key: tuple[str, ...]
    columns: pa.Schema | None
    rounds: Sequence[pa.Table] | None


def _parts(
    changes: Iterable[TableChanges], named: Callable[[Sequence[str]], str], into: Callable[[str], RowTable]
) -> Iterator[_Part]:
    by_table: dict[tuple[str, tuple[str, ...]], list[TableChanges]] = defaultdict(list)
    for each in changes:
        by_table[each.server, each.table].append(each)
    for (server, table), its in by_table.items():
        name, shown = named(table), f"{'.'.join(table)} of {server}" if server else ".".join(table)
        for run in _runs(its):
            columns = run[0].rows.schema if run[0].rows is not None else None
            rounds = None
            if columns is not None:
                settings = Changes(run[0].key)
                location = into(name).location
                rounds = [storable(each, location) for each in reduced(_rows(run, settings), settings)]
            yield _Part(name, shown, run[0].key, columns, rounds)


def _runs(changes: Sequence[TableChanges]) -> Iterator[list[TableChanges]]:
    """Neighbours that can be written together."""
    run: list[TableChanges] = []
    for each in changes:
        if run and (each.rows is None or run[-1].rows is None or _shape(each) != _shape(run[-1])):
            yield run
            run = []
        run.append(each)
    if run:
        yield run


def _shape(changes: TableChanges) -> tuple[Any, ...]:
    return changes.key, changes.rows.schema if changes.rows is not None else None


def _rows(run: Sequence[TableChanges], settings: Changes) -> pa.Table:
    """The rows, with the columns that ``reduced`` reads."""
    leaves_out = any(each.unchanged is not None for each in run)
    found = []
    for each in run:
        rows = each.rows
        if rows is None:
            continue
        for name in settings.key:
            place = rows.schema.get_field_index(name)
            rows = rows.set_column(place, rows.schema.field(place), canonical_column(rows.column(place)))
        rows = rows.append_column(DELETED, each.deleted)
        if leaves_out:
            nothing = pa.array([[]] * rows.num_rows, pa.list_(pa.string()))
            rows = rows.append_column(UNCHANGED, each.unchanged if each.unchanged is not None else nothing)
        found.append(rows)
    return pa.concat_tables(found)


class _Entry(NamedTuple):
    """What the catalog has of a table."""

    source: str
    key: tuple[str, ...]
    columns: str


class _Catalog(Members):
    """The tables of a copy, as the catalog has them: the table that owns the header."""

    def __init__(self, own: RowTable, into: Callable[[str], RowTable]) -> None:
        self._own, self._into = own, into

    def changed_last(self, connection: Any) -> Iterator[RowTable]:
        return self._held(connection, f"{_CHANGED_IN} = (SELECT MAX({_CHANGED_IN}) FROM {{table}})")

    def every(self, connection: Any) -> Iterator[RowTable]:
        return self._held(connection, f"{_NAME} IS NOT NULL")

    def _held(self, connection: Any, condition: str) -> Iterator[RowTable]:
        for name, key in self._own.rows_where(connection, [_NAME, _KEY], condition):
            yield self._table(name, tuple(json.loads(key)))

    def _table(self, name: str, key: tuple[str, ...], columns: pa.Schema | None = None) -> RowTable:
        """``columns``: without them, the table can be emptied and taken back."""
        table = self._into(name).in_schema_of(self._own)
        fields = Fields.of_schema(columns) if columns is not None else Fields.of(dict.fromkeys(key, pa.string()))
        metadata = {each.name: each.metadata or {} for each in columns or ()}
        defaults = [(name, json.loads(each[DEFAULT])) for name, each in metadata.items() if DEFAULT in each]
        table.bind_changes(fields, Changes(key, on_new_column="add", defaults=tuple(defaults)))
        return table

    def change(self, attempt: TransactionAttempt, parts: Sequence[_Part]) -> None:
        """Write the changes of all tables, and which tables they are, in one sql_txn."""
        own = self._own
        if parts and not own.makes_in_sql_txn:
            with own.connected() as connection:
                self._make(connection, parts, attempt)
        with own.committing(attempt) as (connection, first):
            if not first or not parts:
                return
            if own.makes_in_sql_txn:
                known = self._make(connection, parts, attempt)
            else:
                known = self._known(self._entries(connection, parts), parts)
            for each in parts:
                if each.columns is not None and each.rounds is not None:
                    self._table(each.name, each.key, each.columns).apply(connection, each.rounds, attempt.txid)
                elif each.name in known:
                    self._table(each.name, known[each.name].key).empty(connection, attempt.txid)
            own.apply(connection, reduced(_entries(known, parts, attempt.txid), Changes((_NAME,))), attempt.txid)

    def _known(self, held: Mapping[str, _Entry], parts: Sequence[_Part]) -> dict[str, _Entry]:
        """The entries of the catalog after the changes. ``held``: those that it has."""
        known = dict(held)
        for each in parts:
            if (entry := known.get(each.name)) is not None and entry.source != each.source:
                raise ConfigError(
                    f"{self._own.location}: tables {entry.source} and {each.source} would both be table {each.name!r}: give them "
                    "different names, Mirror(name=lambda table: '_'.join(table)), or each connector a mirror of its own in "
                    "another schema"
                )
            if each.columns is not None:
                known[each.name] = _Entry(each.source, each.key, _shown(each.columns))
        return known

    def _entries(self, connection: Any, parts: Sequence[_Part]) -> dict[str, _Entry]:
        names = list(dict.fromkeys(each.name for each in parts))
        marks = ", ".join("?" * len(names))
        rows = self._own.rows_where(connection, [_NAME, _SOURCE, _KEY, _COLUMNS], f"{_NAME} IN ({marks})", *names)
        return {name: _Entry(source, tuple(json.loads(key)), columns) for name, source, key, columns in rows}

    def _make(self, connection: Any, parts: Sequence[_Part], attempt: TransactionAttempt) -> dict[str, _Entry]:
        """Create the tables that are missing, and add what others lack."""
        held = self._entries(connection, parts)
        known = self._known(held, parts)
        for each in parts:
            if each.columns is None:
                continue
            wanted, before = _Entry(each.source, each.key, _shown(each.columns)), held.get(each.name)
            table = self._table(each.name, each.key, each.columns)
            if before == wanted and table.keeps_all(connection):
                continue
            if before is None:
                names = self._own.rows_where(connection, [_NAME], f"{_NAME} IS NOT NULL")
                self._check_name(each, {*held, *(name for (name,) in names)})
                topology_id = attempt.fence.topology_id if attempt.fence is not None else ""
                table.claim(connection, f"{topology_id} ({self._own.name})")
            types = dict(json.loads(before.columns)) if before is not None else dict(json.loads(wanted.columns))
            changed = [name for name, kind in json.loads(wanted.columns) if types.get(name) != kind]
            table.make(connection, changed, attempt.txid)
            held[each.name] = wanted
        return known

    def _check_name(self, part: _Part, held: Collection[str]) -> None:
        name = part.name.casefold()  # some databases tell names apart by it, some do not
        others = {each.casefold() for each in held}
        beside = {f"{each}{end}" for each in (*others, name, self._own.name.casefold()) for end in _BESIDE}
        taken = name in others or name in beside or any(f"{name}{end}" in others for end in _BESIDE)
        if taken or name == self._own.name.casefold() or name.startswith("_ratchet_"):
            raise ConfigError(
                f"{self._own.location}: table {part.source} cannot be called {part.name!r}, which is the name of another table, "
                "or of one beside it: give it another name, with Mirror(name=...)"
            )


def _shown(columns: pa.Schema) -> str:
    return json.dumps([[each.name, str(each.type)] for each in columns])


def _entries(known: Mapping[str, _Entry], parts: Sequence[_Part], txid: int) -> pa.Table:
    names = [each for each in dict.fromkeys(part.name for part in parts) if each in known]
    entries = [known[name] for name in names]
    columns = {
        _NAME: names,
        _SOURCE: [each.source for each in entries],
        _KEY: [json.dumps(each.key) for each in entries],
        _COLUMNS: [each.columns for each in entries],
        _CHANGED_IN: [txid] * len(names),
    }
    schema = _CATALOG.schema()
    rows = pa.table({name: pa.array(values, _CATALOG.type_of(name)) for name, values in columns.items()}, schema)
    return rows.append_column(DELETED, pa.array([False] * len(names)))
