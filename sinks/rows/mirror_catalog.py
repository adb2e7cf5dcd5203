"""The catalog of a mirror: the table that owns the header of all tables of a copy, and has a row
for each of them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from framework.errors import BadRecordError, ConfigError
from framework.topology import Fields, TransactionAttempt
from framework.topology.table_changes import COLUMNS_MAX, DEFAULT
from sinks.rows.reduction import DELETED, reduced
from sinks.rows.table_definition import KEEP_DELETES, ROW_NEEDED, Changes, Column, UnfitTableError
from sinks.rows.transactional_table import Look, Members, RowTable

#: The table with a row for each table of the copy.
CATALOG = "ratchet_mirror"
NAME, SOURCE, KEY, COLUMNS, CHANGED_IN = "table_name", "source_name", "key_columns", "columns", "changed_in"
#: The topic that owns the table; null: the next topic that changes the table becomes the owner.
OWNER = "owner_topic"
CATALOG_FIELDS = Fields.of(
    dict.fromkeys((NAME, SOURCE, KEY, COLUMNS), pa.string()) | {CHANGED_IN: pa.int64(), OWNER: pa.string()}
)
#: A catalog of an older version gets the columns that it lacks.
CATALOG_CHANGES = Changes((NAME,), on_new_column="add")
#: The most columns of a primary key: PostgreSQL's limit.
KEY_COLUMNS_MAX = 32
#: The most characters of the name of a server, a table or a column. The databases of Debezium's
#: connectors take up to 128.
NAME_MAX = 255
#: The names of the tables beside a table end so.
_BESIDE = ("_before", "_deleted")


class Part(NamedTuple):
    """Changes of a table with one set of columns. ``rounds``: as ``RowTable.change`` takes them;
    None: all rows are removed, at the position ``emptied_at`` if that is known. ``topic``: the
    topic of the changes; None: it does not count."""

    name: str
    source: str
    key: tuple[str, ...]
    columns: pa.Schema | None
    rounds: Sequence[pa.Table] | None
    emptied_at: int | None = None
    topic: str | None = None

    @property
    def leaves_out(self) -> bool:
        """Whether changes leave out unchanged values."""
        return any(ROW_NEEDED in each.column_names for each in self.rounds or ())


class _Entry(NamedTuple):
    """The row of a table in the catalog."""

    source: str
    key: tuple[str, ...]
    columns: str
    topic: str | None


class _Fit:
    """The shape of a table, as a transaction knows it. ``fields``: the first field of each column
    of the changes, by the name that the database compares."""

    def __init__(self) -> None:
        self.fields: dict[str, pa.Field] = {}
        self._kinds: set[tuple[str, str]] = set()
        self._has_positions = False

    def has(self, part: Part) -> bool:
        """Whether the table holds all values of the part."""
        return (self._has_positions or not part.leaves_out) and self._kinds.issuperset(_kinds(part.columns or ()))

    def add(self, part: Part, columns: pa.Schema) -> None:
        """Note that the table has these columns, and what else the part needs."""
        self._kinds.update(_kinds(columns))
        self._has_positions |= part.leaves_out


class Catalog(Members):
    """The tables of a copy, as the catalog has them: the table that owns the header."""

    def __init__(self, own: RowTable, into: Callable[[str], RowTable]) -> None:
        self._own, self._into = own, into

    def changed_last(self, connection: Any) -> Iterator[RowTable]:
        return self._held(connection, f"{CHANGED_IN} = (SELECT MAX({CHANGED_IN}) FROM {{table}})")

    def every(self, connection: Any) -> Iterator[RowTable]:
        return self._held(connection, f"{NAME} IS NOT NULL")

    def _held(self, connection: Any, condition: str) -> Iterator[RowTable]:
        for name, key in self._own.rows_where(connection, [NAME, KEY], condition):
            yield self._table(name, tuple(json.loads(key)))

    def _table(
        self, name: str, key: tuple[str, ...], columns: pa.Schema | None = None, *, keeps_positions: bool = False
    ) -> RowTable:
        """``columns``: without them, the table can be emptied and taken back."""
        table = self._into(name).in_schema_of(self._own)
        fields = Fields.of_schema(columns) if columns is not None else Fields.of(dict.fromkeys(key, pa.string()))
        metadata = {each.name: each.metadata or {} for each in columns or ()}
        defaults = [(name, json.loads(each[DEFAULT])) for name, each in metadata.items() if DEFAULT in each]
        changes = Changes(
            key,
            on_new_column="add",
            keep_deletes=KEEP_DELETES,
            defaults=tuple(defaults),
            keeps_positions=keeps_positions,
        )
        table.bind_changes(fields, changes)
        return table

    def change(self, attempt: TransactionAttempt, parts: Sequence[Part]) -> None:
        """Write the changes of all tables, and which tables they are, in one sql_txn."""
        own = self._own
        self._make_before(parts, attempt)
        with own.committing(attempt) as (connection, first):
            if not first or not parts:
                return
            if own.makes_in_sql_txn:
                known = self._make(connection, parts, attempt.txid)
            else:
                known = self._known(self._entries(connection, parts), parts)
            self._apply(connection, parts, known, attempt.txid)
            own.apply(connection, reduced(_entries(known, parts, attempt.txid), Changes((NAME,))), attempt.txid)

    def try_change(self, attempt: TransactionAttempt, parts: Sequence[Part], *, alone: bool) -> None:
        """Do what ``change`` does, and undo it, except new tables and columns in a database whose
        statements for them commit. Raises ``BadRecordError`` for a table that cannot be as a change
        needs it, and for a row that the database refuses; with ``alone``, as ``RowTable.try_write``
        says. Then changes that keep values of the previous row are not tried, because that row may
        be of the same batch."""
        own = self._own
        made = self._make_before(parts, attempt)
        with own.trying() as connection:
            known = made if made is not None else self._make(connection, parts, attempt.txid)
            if not alone:
                self._apply(connection, parts, known, attempt.txid)
                own.check_now(connection)
                return
            names = dict.fromkeys(each.name for each in parts)
            plain = {each for each in names if not self._into(each).in_schema_of(own)._triggers(connection)}
            with own.of_rows_alone():
                tried = [each for each in parts if each.name in plain and not each.leaves_out]
                self._apply(connection, tried, known, attempt.txid)

    def _make_before(self, parts: Sequence[Part], attempt: TransactionAttempt) -> dict[str, _Entry] | None:
        """As ``_make``, before the sql_txn; None: not in this database."""
        if not parts or self._own.makes_in_sql_txn:
            return None
        with self._own.connected() as connection:
            return self._make(connection, parts, attempt.txid)

    def _apply(self, connection: Any, parts: Sequence[Part], known: Mapping[str, _Entry], txid: int) -> None:
        looks: dict[str, Look] = {}
        for each in parts:
            if each.columns is not None and each.rounds is not None:
                table = self._table(each.name, each.key, each.columns)
                with table.named(_copy_of(each)):
                    if each.name not in looks or not looks[each.name].has(each.columns.names):
                        looks[each.name] = table.look(connection)
                    table.apply(connection, each.rounds, txid, look=looks[each.name])
            elif each.name in known:
                table = self._table(each.name, known[each.name].key)
                with table.named(_copy_of(each)):
                    table.empty(connection, txid, each.emptied_at)

    def _known(self, held: Mapping[str, _Entry], parts: Sequence[Part]) -> dict[str, _Entry]:
        """The entries of the catalog after the changes. ``held``: those that it has."""
        known = dict(held)
        for each in parts:
            if (entry := known.get(each.name)) is not None and entry.source != each.source:
                raise BadRecordError(
                    f"{self._own.location}: tables {entry.source} and {each.source} would both be table {each.name!r}: give them "
                    "different names, Mirror(name=lambda table: '_'.join(table)), or each connector a mirror of its own in "
                    "another schema"
                )
            if entry is not None and None not in (entry.topic, each.topic) and entry.topic != each.topic:
                raise BadRecordError(
                    f"{self._own.location}: table {each.name!r} has its changes from topic {entry.topic!r}, and this one is from "
                    f"topic {each.topic!r}; where several topics have the changes of one table, use shared_tables=True"
                )
            owner = entry.topic if entry is not None and entry.topic is not None else each.topic
            if each.columns is not None:
                known[each.name] = _Entry(each.source, each.key, _shown(each.columns), owner)
            elif entry is not None:
                known[each.name] = entry._replace(topic=owner)
        return known

    def _entries(self, connection: Any, parts: Sequence[Part]) -> dict[str, _Entry]:
        names = list(dict.fromkeys(each.name for each in parts))
        marks = ", ".join("?" * len(names))
        rows = self._own.rows_where(connection, [NAME, SOURCE, KEY, COLUMNS, OWNER], f"{NAME} IN ({marks})", *names)
        return {name: _Entry(source, tuple(json.loads(key)), *more) for name, source, key, *more in rows}

    def _make(self, connection: Any, parts: Sequence[Part], txid: int) -> dict[str, _Entry]:
        """Create the tables that are missing, and add what others lack."""
        held = self._entries(connection, parts)
        known = self._known(held, parts)
        fits = self._fits(parts)
        for each in parts:
            if each.columns is None:
                continue
            wanted, before = _Entry(each.source, each.key, _shown(each.columns), each.topic), held.get(each.name)
            fit = fits[each.name, each.key]
            if fit.has(each):  # the table has become wider since, if anything
                held[each.name] = wanted
                continue
            table = self._table(each.name, each.key, each.columns, keeps_positions=each.leaves_out)
            is_same = before is not None and before[:3] == wanted[:3]
            if is_same and table.keeps_all(connection):
                fit.add(each, each.columns)
                continue
            if before is None:
                names = self._own.rows_where(connection, [NAME], f"{NAME} IS NOT NULL")
                self._check_name(each, {*held, *(name for (name,) in names)})
                self._claim(table, connection, f"{self._own.owner(connection)} ({self._own.name})")
            types = dict(json.loads(before.columns if before is not None else wanted.columns))
            with table.named(_copy_of(each)):
                present = table.columns(connection)
                _check_number(present, each)
                if before is not None:  # rows that a new table gets have no defaults
                    table = self._widest(each, fit.fields, present)
                changed = [field.name for field in table.schema if types.get(field.name) != str(field.type)]
                try:
                    table.make(connection, changed, txid)
                except UnfitTableError as error:
                    if is_same:
                        raise  # somebody has changed the table
                    raise BadRecordError(str(error)) from error
            fit.add(each, table.schema)
            held[each.name] = wanted
        return known

    def _fits(self, parts: Sequence[Part]) -> Mapping[tuple[str, tuple[str, ...]], _Fit]:
        """The known shape of each table, by its name and key."""
        fits: dict[tuple[str, tuple[str, ...]], _Fit] = defaultdict(_Fit)
        for each in parts:
            for field in each.columns or ():
                fits[each.name, each.key].fields.setdefault(self._own.dialect.folded(field.name), field)
        return fits

    def _widest(self, part: Part, fields: Mapping[str, pa.Field], present: Sequence[Column]) -> RowTable:
        """The table, with the columns of a part, and those of ``fields`` that it can have besides,
        so that all of them are added together. ``present``: the columns that it has."""
        folded = self._own.dialect.folded
        columns = {folded(each.name): each for each in part.columns or ()}
        table = self._table(part.name, part.key, pa.schema(fields.values()))
        names = {each.name for each in present}.union(each.name for each in columns.values())
        for name in table.could_have(present):
            names.add(name)
            if len(names) > COLUMNS_MAX:
                break
            columns.setdefault(folded(name), fields[folded(name)])
        return self._table(part.name, part.key, pa.schema(columns.values()), keeps_positions=part.leaves_out)

    def _claim(self, table: RowTable, connection: Any, owner: str) -> None:
        """Raise ``BadRecordError`` for the name of a table with another owner."""
        try:
            table.claim(connection, owner)
        except ConfigError as error:
            raise BadRecordError(str(error)) from error

    def _check_name(self, part: Part, held: Collection[str]) -> None:
        folded = self._own.dialect.folded
        name, others = folded(part.name), set(map(folded, held))
        beside = {f"{each}{folded(end)}" for each in (*others, name) for end in _BESIDE}
        taken = name in others or name in beside or any(f"{name}{folded(end)}" in others for end in _BESIDE)
        if taken or is_reserved(part.name, self._own.name):
            raise BadRecordError(f"{self._own.location}: table {part.source} {cannot_be_called(part.name)}")


def is_reserved(name: str, catalog: str) -> bool:
    """Whether a name is Ratchet's own in every copy. ``catalog``: the name of the catalog."""
    own, folded = catalog.casefold(), name.casefold()
    return folded in (own, *(f"{own}{end}" for end in _BESIDE)) or folded.startswith("_ratchet_")


def cannot_be_called(name: str) -> str:
    return (
        f"cannot be called {name!r}, which is the name of another table, or of one beside it: give it another name, with "
        "Mirror(name=...)"
    )


def _check_number(held: Sequence[Column], part: Part) -> None:
    """Raise ``BadRecordError`` if the table would have too many columns. ``held``: its present
    columns."""
    names = {*(each.name for each in held), *(part.columns.names if part.columns is not None else ())}
    if len(names) > COLUMNS_MAX:
        raise BadRecordError(f"table {part.name!r} would have {len(names):,} columns: the most is {COLUMNS_MAX:,}")


def _copy_of(part: Part) -> str:
    return f"copy of {part.source}"


def _kinds(columns: Iterable[pa.Field]) -> list[tuple[str, str]]:
    return [(each.name, str(each.type)) for each in columns]


def _shown(columns: pa.Schema) -> str:
    return json.dumps(_kinds(columns))


def _entries(known: Mapping[str, _Entry], parts: Sequence[Part], txid: int) -> pa.Table:
    names = [each for each in dict.fromkeys(part.name for part in parts) if each in known]
    entries = [known[name] for name in names]
    columns = {
        NAME: names,
        SOURCE: [each.source for each in entries],
        KEY: [json.dumps(each.key) for each in entries],
        COLUMNS: [each.columns for each in entries],
        CHANGED_IN: [txid] * len(names),
        OWNER: [each.topic for each in entries],
    }
    schema = CATALOG_FIELDS.schema()
    rows = pa.table({name: pa.array(values, CATALOG_FIELDS.type_of(name)) for name, values in columns.items()}, schema)
    return rows.append_column(DELETED, pa.array([False] * len(names)))
