"""The committer that keeps a copy of tables of another database."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from framework.errors import BadRecordError, BatchTooLargeError, TopologyError
from framework.topology import Bolt, Fields, Input
from framework.topology.bolts import OnBadRecord
from framework.topology.canonical_form import canonical_column
from framework.topology.table_changes import COLUMNS_MAX, ChangeReader, TableChanges
from sinks.rows.inspectable_mirror import MirrorState
from sinks.rows.mirror_catalog import (
    CATALOG,
    CATALOG_CHANGES,
    CATALOG_FIELDS,
    KEY_COLUMNS_MAX,
    NAME_MAX,
    Catalog,
    Part,
    cannot_be_called,
    is_reserved,
)
from sinks.rows.mirror_reference_model import ReferenceMirror
from sinks.rows.reduction import DELETED, UNCHANGED, reduced
from sinks.rows.sqlite import SqliteTable
from sinks.rows.table_definition import POSITION, Changes
from sinks.rows.transactional_table import RowTable
from sinks.rows.values import is_nested, storable
from sinks.table_committer import TableCommitter

#: The most tables that a batch may change. For each created table, PostgreSQL takes about twelve
#: locks until the commit, and it has some 16,000 by default.
TABLES_MAX = 500
#: The fields of keys, values and topics of the records.
KEY, VALUE, TOPIC = "key", "value", "topic"


class _Told(NamedTuple):
    """Changes, and the topic of their records; None: the topic does not count."""

    topic: str | None
    changes: TableChanges


class Mirror(TableCommitter[RowTable, list[list[_Told]]]):
    """Keeps a copy of the tables of another database, exactly once: one table for each source
    table, in one sql_txn for all of them, so a reader sees all tables as of one transaction.

    ``into``: makes the table of a name, as in ``lambda name: PostgresTable(dsn, name,
    schema="mirror")``; all must be in one database. ``changes``: reads the records, such as
    ``spouts.DebeziumChanges()``. The input has the fields ``key`` and ``value``, as bytes, and goes
    to one task. If it also has a field ``topic``, as text, the topic with the first change of a
    table owns the table, and a change from another topic is a bad record. ``shared_tables``: any
    topic may change any table, for connectors that write the changes of one table to several
    topics.

    A table is created with its first change, with the source's columns and primary key. ``name``
    makes its name from the source's database, schema and name; by default it is the name alone.
    Columns that the source adds are added; existing rows get the source's default, if that is a
    number, a truth value or a plain text. Types are widened if nothing is lost. A column that the
    source drops stays, with its values. Rows are changed, deleted and truncated as in the source. A
    change without unchanged large values (TOAST) keeps the values of the row. A change is a bad
    record if the table cannot have its name, columns (up to 1,000), key or types; if a statement
    helps, the reason has it.

    The table ``catalog`` has a row for each table: its source, key and columns, the last txid that
    changed the table, and the owning topic. ``on_bad_record``: as of an ``UpsertCommitter``; a
    change that is left out is missing in the copy.
    """

    def __init__(
        self,
        into: Callable[[str], RowTable],
        changes: ChangeReader,
        *,
        name: Callable[[Sequence[str]], str] | None = None,
        catalog: str = CATALOG,
        on_bad_record: OnBadRecord = "fail",
        shared_tables: bool = False,
    ) -> None:
        made = into(catalog)
        if not isinstance(made, RowTable):
            raise TopologyError(
                f"Mirror: into gives a {type(made).__name__}: give a function from a name to a table of a database, such as "
                "lambda name: PostgresTable(dsn, name)"
            )
        super().__init__(made, None, on_bad_record)
        self._reader, self._named, self._component_id = changes, name or _last, ""
        self._shared_tables, self._by_topic = shared_tables, False
        self._write_to(made, into)

    def _write_to(self, catalog: RowTable, into: Callable[[str], RowTable]) -> None:
        self.table, self._into = catalog, into
        self._state = MirrorState(catalog, into)
        catalog.bind_changes(CATALOG_FIELDS, CATALOG_CHANGES)
        catalog.members = Catalog(catalog, into)

    def states(self) -> Sequence[MirrorState]:
        return [self._state]

    def recounting(self, folder: Path) -> Bolt:
        return ReferenceMirror(folder, self._reader, self._named)

    def replaying(self, folder: Path, txid: int, topology_id: str) -> Bolt:
        self._state.check_replayed(topology_id)
        return ReferenceMirror(folder, self._reader, self._named, self._state, txid)

    def substitute(self, folder: Path) -> Bolt:
        """In a test, the copy is a SQLite file. Its rows are ``table`` and ``row``, the row as
        JSON."""
        folder.mkdir(parents=True)
        self._write_to(SqliteTable(folder / "copy.db", CATALOG), partial(SqliteTable, folder / "copy.db"))
        return self

    # --- on the driver ----------------------------------------------------------------------------

    def bind(self, component_id: str, inputs: Sequence[Input], parallelism: int) -> None:
        self._component_id = component_id
        if parallelism != 1:
            raise TopologyError(f"committer {component_id!r} writes all tables in one sql_txn: give it parallelism 1")
        self._common_fields(component_id, inputs)
        texts = [TOPIC in each.fields and each.fields.type_of(TOPIC) == pa.string() for each in inputs]
        self._by_topic = all(texts) and not self._shared_tables

    def _chosen(self, component_id: str, source: Input) -> tuple[str, ...]:
        source.require(component_id, (KEY, VALUE))
        for each in (KEY, VALUE):
            if source.fields.type_of(each) != pa.binary():
                raise TopologyError(f"committer {component_id!r}: field {each!r} must be the bytes of the records")
        return KEY, VALUE

    # --- in tasks ---------------------------------------------------------------------------------

    def _no_rows(self) -> list[list[_Told]]:
        return []

    def execute_arrow(self, batch: pa.RecordBatch) -> None:
        found = [
            _Told(topic, each)
            for topic, its in self._of_topics(batch)
            for each in self._reader.read(its.column(KEY), its.column(VALUE))
        ]
        for each in found:
            self._check(each.changes)
        if len({each.changes.table for batch in (*self._batches, found) for each in batch}) > TABLES_MAX:
            raise BatchTooLargeError(
                f"component {self._component_id!r}: a batch changes more than {TABLES_MAX} tables, whose locks a database holds "
                "until the commit"
            )
        if found:
            self._batches.append(found)

    def _of_topics(self, batch: pa.RecordBatch) -> Iterator[tuple[str | None, pa.RecordBatch]]:
        """The records of each topic, in their order."""
        if not self._by_topic:
            yield None, batch
            return
        column = batch.column(TOPIC)
        topics = pc.unique(column).to_pylist()
        if len(topics) == 1:
            yield topics[0], batch
            return
        for each in topics:
            yield each, batch.filter(pc.equal(column, each) if each is not None else column.is_null())

    def _check(self, changes: TableChanges) -> None:
        """Raise ``BadRecordError`` for a change that certainly cannot be written."""
        rows = changes.rows
        for each in (changes.server, *changes.table, *changes.key, *(rows.column_names if rows is not None else ())):
            if len(each) > NAME_MAX:
                shown = f"a name of {len(each):,} characters, {each[:40]!r}..."
                raise BadRecordError(f"component {self._component_id!r}: {shown}: the most is {NAME_MAX}")
        try:
            name = self._named(changes.table)
        except Exception as error:  # code of the user, which expects names that a record lacks
            raise BadRecordError(f"{self._shown(changes)}: name raised {type(error).__name__}: {error}") from error
        if is_reserved(name, self.table.name):
            raise BadRecordError(f"{self._shown(changes)} {cannot_be_called(name)}")
        try:
            table = self._into(name)
            if rows is not None:
                table.bind_changes(Fields.of_schema(rows.schema), Changes(changes.key))
        except TopologyError as error:
            raise BadRecordError(f"{self._shown(changes)}: {error}") from error
        if rows is not None:
            self._check_rows(changes, rows, table)

    def _check_rows(self, changes: TableChanges, rows: pa.Table, table: RowTable) -> None:
        if rows.num_columns > COLUMNS_MAX:
            raise BadRecordError(
                f"{self._shown(changes)} has {rows.num_columns:,} columns: the most is {COLUMNS_MAX:,}"
            )
        if len(changes.key) > KEY_COLUMNS_MAX:
            raise BadRecordError(
                f"{self._shown(changes)} has a key of {len(changes.key):,} columns: the most is {KEY_COLUMNS_MAX}"
            )
        if len(set(changes.key)) != len(changes.key):
            raise BadRecordError(f"{self._shown(changes)}: the record's key has a column twice")
        missing = [name for name in changes.key if name not in rows.column_names]
        if missing:
            raise BadRecordError(f"{self._shown(changes)}: the record's key has {missing[0]!r}, which is no column")
        for name in changes.key:
            if rows.column(name).null_count:
                raise BadRecordError(f"{self._shown(changes)}: the key {name!r} is null")
            if is_nested(rows.schema.field(name).type):
                raise BadRecordError(
                    f"{self._shown(changes)}: the key {name!r} is an array, which a copy cannot have as key"
                )
        for batch in rows.to_batches():
            table.check_rows(batch)

    def _shown(self, changes: TableChanges) -> str:
        return f"component {self._component_id!r}: table {'.'.join(changes.table)}"

    def may_try_writes(self) -> bool:
        return True

    def try_writes(self, *, alone: bool) -> None:
        parts = self._all_parts()
        if self._attempt is not None and parts:
            catalog = Catalog(self.table, self._into)
            self.table.limited(partial(catalog.try_change, self._attempt, parts, alone=alone))

    def _all_parts(self) -> list[Part]:
        return list(_parts((each for batch in self._batches for each in batch), self._named, self._into))

    def finish_batch(self) -> None:
        if self._attempt is None:
            return
        parts = self._all_parts()
        if parts or self._attempt.is_one_step:
            catalog = Catalog(self.table, self._into)
            self.table.limited(partial(catalog.change, self._attempt, parts))


def _last(table: Sequence[str]) -> str:
    return table[-1]


def _parts(
    changes: Iterable[_Told], named: Callable[[Sequence[str]], str], into: Callable[[str], RowTable]
) -> Iterator[Part]:
    by_table: dict[tuple[str | None, str, tuple[str, ...]], list[TableChanges]] = defaultdict(list)
    for topic, each in changes:
        by_table[topic, each.server, each.table].append(each)
    for (topic, server, table), its in by_table.items():
        name, shown = named(table), f"{'.'.join(table)} of {server}" if server else ".".join(table)
        for run in _runs(its):
            first, settings = run[0], Changes(run[0].key)
            if first.rows is None:
                positions = first.positions.to_pylist() if first.positions is not None else []
                emptied_at = positions[0] if positions else None
                yield Part(name, shown, first.key, None, None, emptied_at=emptied_at, topic=topic)
                continue
            location = into(name).location
            rounds = [storable(each, location) for each in reduced(_rows(run, settings), settings)]
            yield Part(name, shown, first.key, first.rows.schema, rounds, topic=topic)


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
    has_positions = any(each.positions is not None for each in run)
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
        if has_positions:
            nowhere = pa.nulls(rows.num_rows, pa.int64())
            rows = rows.append_column(POSITION, each.positions if each.positions is not None else nowhere)
        found.append(rows)
    return pa.concat_tables(found)
