"""All tables of a mirror as one state, as the tools see them. A key is the name of a table and the
key of a row in it; a value is the row, by column.

The catalog says which columns a table has. A column that the source has dropped is not among them.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from framework.bounded_pages import PAGE_KEYS, pages_of
from framework.errors import ConfigError, InvariantViolation, MovedOnError
from framework.topology import Change, Difference, FencedState, Fields, Header, KeyedState, Reach, ValueType
from framework.topology.json_values import json_encoder
from framework.topology.state_snapshot_reader import StateReading
from framework.topology.table_schema_diff import TableSchema
from sinks.expected_values import Recomputed
from sinks.key_parser import key_values
from sinks.rows.inspectable_table import InspectableTable
from sinks.rows.rows_as_of import Key, RowSnapshot
from sinks.rows.table_definition import Changes
from sinks.rows.transactional_table import READ_ROWS, RowTable
from sinks.rows.values import is_nested

#: The row of a key, by column. As a value of a state it is the only item of a tuple.
MirroredRow = dict[str, Any]
_ROWS = Fields.of({"table": pa.string(), "row": pa.string()})
_PLAIN = (
    *(pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
    *(pa.float32(), pa.float64(), pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.date32()),
    *(pa.time64("us"), pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.duration("us")),
)
_TYPES = {str(each): each for each in _PLAIN}
_DECIMAL = re.compile(r"decimal(128|256)\((\d+), (-?\d+)\)")


class RecomputedRows(Protocol):
    """The rows that a mirror should hold."""

    def expected_keys(self) -> Iterator[Key]: ...

    def expected_rows(self, keys: Sequence[Key]) -> list[MirroredRow | None]:
        """The rows with these keys, in canonical form; None: there is none."""

    def changed_keys(self, txid: int) -> list[Key]:
        """The keys of the rows that this transaction, the last one, has changed."""


class MirrorSnapshot:
    """The tables of a mirror at one moment. ``catalog``: its rows."""

    def __init__(self, catalog: RowSnapshot, into: Callable[[str], RowTable]) -> None:
        self._catalog, self._into = catalog, into
        self.header, self.connection = catalog.header, catalog.connection
        #: The key and the columns of each table, as the last transaction left them.
        self.shapes = {
            name: (tuple(json.loads(key)), Fields.of({each: type_of(kind) for each, kind in json.loads(columns)}))
            for name, _, key, columns, *_ in catalog.rows(self.header.done)
        }

    def table(self, name: str) -> RowSnapshot:
        key, fields = self.shapes[name]
        table = self._into(name).in_schema_of(self._catalog.table)
        table.bind_changes(fields, Changes(key))
        return RowSnapshot(table, self._catalog.connection, self.header)

    def values(self, keys: Sequence[Key], txid: int) -> dict[Key, tuple[MirroredRow] | None]:
        """The rows that these keys had after a transaction; None: no row. Without the keys of which
        the tables do not tell any more."""
        found: dict[Key, tuple[MirroredRow] | None] = {}
        for name, its in _by_table(keys).items():
            if name not in self.shapes:
                if txid <= self.header.done:
                    found |= {(name, *key): None for key in its}
                continue
            own, fields = self.shapes[name]
            others = [each for each in fields if each not in own]
            for of, values in self.table(name).values(its, txid).items():
                row = dict(zip((*own, *others), (*of, *values), strict=True)) if values is not None else None
                found[(name, *of)] = ({each: row[each] for each in fields},) if row is not None else None
        return found

    def rows(self, txid: int) -> Iterator[tuple[str, MirroredRow]]:
        """All rows after a transaction. Raises ``MovedOnError`` where the tables do not tell."""
        for name, (_, fields) in self.shapes.items():
            for values in self.table(name).rows(txid):
                yield name, dict(zip(fields, values, strict=True))

    def as_json(self, name: str, row: MirroredRow) -> str:
        fields = self.shapes[name][1]
        return json.dumps({each: _json_value(value, fields.type_of(each)) for each, value in row.items()})


class MirrorState(KeyedState):
    """``catalog``: the table that owns the header. ``into``: makes the table of a name."""

    def __init__(self, catalog: RowTable, into: Callable[[str], RowTable]) -> None:
        self._catalog, self._into = catalog, into

    # --- for the driver ---------------------------------------------------------------------------

    @property
    def value_type(self) -> ValueType:  # type: ignore[override]
        return self._catalog.value_type

    @property
    def can_undo(self) -> bool:
        return self._catalog.can_undo

    @property
    def reach(self) -> Reach:
        return self._catalog.reach

    @property
    def location(self) -> str:
        return self._catalog.location

    def prepare(self, topology_id: str) -> Header:
        header = self._catalog.prepare(topology_id)
        if self._catalog.table_schema().statements:  # an older version of Ratchet has made it
            self._catalog.apply_schema(topology_id)
        return header

    def check(self, topology_id: str) -> Header | None:
        return self._catalog.check(topology_id)

    def read_header(self) -> Header:
        return self._catalog.read_header()

    def raise_header(self, expected: Header, new: Header) -> None:
        self._catalog.raise_header(expected, new)

    def sweep(self, header: Header) -> int:
        return self._catalog.sweep(header)

    def roll_back(self, header: Header) -> int:
        return self._catalog.roll_back(header)

    def purge(self, header: Header, before_txid: int) -> int:
        return self._catalog.purge(header, before_txid)

    def clear(self, topology_id: str) -> Header:
        return self._catalog.clear(topology_id)

    def close(self) -> None:
        self._catalog.close()

    def table_schema(self) -> TableSchema:
        """Of the catalog: the other tables follow the source."""
        return self._catalog.table_schema()

    def apply_schema(self, topology_id: str) -> TableSchema:
        return self._catalog.apply_schema(topology_id)

    # --- as of a transaction ----------------------------------------------------------------------

    @contextmanager
    def held_rows(self, topology_id: str | None = None) -> Iterator[MirrorSnapshot]:
        """The rows, at one moment. Raises ``ConfigError`` as ``InspectableTable.held_rows``."""
        with self._inspected.held_rows(topology_id) as catalog:
            yield MirrorSnapshot(catalog, self._into)

    @property
    def _inspected(self) -> InspectableTable:
        if not isinstance(self._catalog, InspectableTable):
            raise ConfigError(f"{self.location} does not tell what it held after a transaction")
        return self._catalog

    @contextmanager
    def reading(self, topology_id: str | None = None) -> Iterator[MirrorReading]:
        with self.held_rows(topology_id) as held:
            yield MirrorReading(self, held)

    def rows_written(self) -> pa.Table:
        """For a test: all rows, as ``reading`` gives them."""
        with self.reading() as reading:
            return pa.Table.from_batches(reading.rows(reading.header().done), reading.schema)

    # --- compared ---------------------------------------------------------------------------------

    def become_scratch(self, folder: Path) -> None:
        raise ConfigError(f"{self.location} is recomputed by its Mirror only")

    def become_replay(self, folder: Path, txid: int, topology_id: str) -> None:
        raise ConfigError(f"{self.location} is replayed by its Mirror only")

    def check_replayed(self, topology_id: str) -> None:
        """Raise ``ConfigError`` for the tables of another topology."""
        self._inspected.check_replayed(topology_id)

    def before(self, keys: Sequence[Key], txid: int) -> dict[Key, MirroredRow | None]:
        """The rows with these keys before a transaction, as far as the tables tell; None: there was
        none."""
        with self.held_rows() as held:
            return {key: _bare(row) for key, row in held.values(keys, txid - 1).items()}

    def changed_keys(self, name: str, txid: int) -> list[Key]:
        """The keys in a table that a transaction has changed, as far as the table tells."""
        with self.held_rows() as held:
            opened = held.header.open
            if name not in held.shapes or opened is None or opened.txid != txid:
                return []
            return [(name, *key) for key in held.table(name).changed_keys()]

    def changes(self, replayed: FencedState, txid: int) -> Iterator[Change]:
        for keys in pages_of(_recomputed(replayed).changed_keys(txid), PAGE_KEYS):
            with self.held_rows() as held:
                before, now = held.values(keys, txid - 1), held.values(keys, txid)
            for key, after in zip(keys, _recomputed(replayed).expected_rows(keys), strict=True):
                if key not in before or key not in now:
                    yield Change(key, None, after, None, agrees=None)
                elif after is not None or before[key] is not None or now[key] is not None:
                    yield Change(key, _bare(before[key]), after, _bare(now[key]), agrees=_agree(now[key], after))

    def pages(self, scratch: FencedState) -> Iterator[Sequence[Key]]:
        """Without the keys of rows that Ratchet has not written, unless ``scratch`` has them."""
        with self.held_rows() as held:
            names = list(held.shapes)
        for name in names:
            after: Key | None = None
            while True:
                with self.held_rows() as held:
                    found, after = held.table(name).stamped_keys(after)
                if not found:
                    break
                yield [(name, *each) for each in found]
        for some in pages_of(_recomputed(scratch).expected_keys(), PAGE_KEYS):
            yield self._without_stamped(some)

    def _without_stamped(self, keys: Sequence[Key]) -> list[Key]:
        with self.held_rows() as held:
            there = {
                (name, *key)
                for name, its in _by_table(keys).items()
                if name in held.shapes
                for key in held.table(name).stamped(its)
            }
        return [each for each in keys if each not in there]

    def held(self, keys: Sequence[Key], txid: int) -> Mapping[Key, tuple[MirroredRow] | None]:
        with self.held_rows() as held:
            return held.values(keys, txid)

    def compare(self, held: Mapping[Any, Any], scratch: FencedState, differs: Callable[[Difference], None]) -> int:
        compared, keys = 0, list(held)
        for key, expected in zip(keys, _recomputed(scratch).expected_rows(keys), strict=True):
            found = held[key]
            compared += found is not None or expected is not None
            if not _agree(found, expected):
                differs(Difference(key, _bare(found), expected))
        return compared

    def doubts(self, differences: Sequence[Difference]) -> str:
        with self.held_rows() as held:
            for name in dict.fromkeys(each.key[0] for each in differences if each.key[0] in held.shapes):
                table = held.table(name).table
                triggers = table._triggers(held.connection) if isinstance(table, InspectableTable) else []
                if triggers:
                    return f"trigger {', '.join(triggers)} of table {name!r} may have changed them"
        return ""

    # --- explained --------------------------------------------------------------------------------

    def key_of(self, text: str) -> Key:
        values: Any = None
        with suppress(ValueError):
            values = json.loads(text, parse_float=str, parse_int=str)
        if not isinstance(values, list) or len(values) < 2:
            raise ConfigError(
                f"{text!r} is no key of {self.location}: write a JSON array of a table and of the key in it, as in "
                '["people", 7]'
            )
        name, *key = values
        with self.held_rows() as held:
            if name not in held.shapes:
                raise ConfigError(f"{self.location} has no table {name!r}: it has {', '.join(sorted(held.shapes))}")
            own, fields = held.shapes[name]
            table = held.table(name)
        written = json.dumps(key) if len(key) > 1 or len(own) > 1 else key[0]
        where = f"table {name!r} of {self.location}"
        return (name, *table.key(key_values(str(written), fields.select(list(own)), where)))

    def by_column(self, value: tuple[Any, ...] | None) -> Mapping[str, Any] | None:
        return value[0] if value is not None else None

    def written(self, key: Key, txid: int) -> bool:
        raise InvariantViolation(f"{self.location} is no scratch copy")

    def recomputed(self, key: Key) -> tuple[Any, ...] | None:
        raise InvariantViolation(f"{self.location} is no scratch copy")


class MirrorReading(StateReading):
    """The rows of all tables: the table's name, and the row as JSON."""

    def __init__(self, state: MirrorState, held: MirrorSnapshot) -> None:
        self._state, self._held = state, held

    @property
    def schema(self) -> pa.Schema:
        return _ROWS.schema()

    def header(self) -> Header:
        return self._held.header

    def rows(self, txid: int, keys: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        held = self._held
        found = held.rows(txid) if keys is None else self._named(keys, txid)
        for page in pages_of(found, READ_ROWS):
            columns = [[name for name, _ in page], [held.as_json(name, row) for name, row in page]]
            yield pa.RecordBatch.from_arrays([pa.array(each, pa.string()) for each in columns], schema=self.schema)

    def _named(self, keys: Sequence[str], txid: int) -> Iterator[tuple[str, MirroredRow]]:
        wanted = list(dict.fromkeys(map(self._state.key_of, keys)))
        known = self._held.values(wanted, txid)
        for key in wanted:
            if key not in known:
                raise MovedOnError(f"{self._state.location}, key {key!r}: changed after transaction {txid}")
            row = known[key]
            if row is not None:
                yield key[0], row[0]


def _by_table(keys: Sequence[Key]) -> dict[str, list[Key]]:
    """The keys of rows in each table."""
    found: dict[str, list[Key]] = defaultdict(list)
    for name, *key in keys:
        found[name].append(tuple(key))
    return found


def type_of(text: str) -> pa.DataType:
    """The type with this text, as a table stores it: nested values are JSON. Raises
    ``ConfigError``."""
    if (known := _TYPES.get(text)) is not None:
        return known
    if (digits := _DECIMAL.fullmatch(text)) is not None:
        make = pa.decimal128 if digits[1] == "128" else pa.decimal256
        return make(int(digits[2]), int(digits[3]))
    if text.startswith(("list<", "struct<", "map<", "large_list<")):
        return pa.list_(pa.null())  # of which only that it is nested counts
    raise ConfigError(
        f"the catalog of a mirror has a column of type {text!r}, which this version of Ratchet does not know"
    )


def _json_value(value: Any, declared: pa.DataType) -> Any:
    if value is None:
        return None
    if is_nested(declared):
        return json.loads(value)
    try:
        return json_encoder(declared)(value)
    except (ValueError, TypeError, AttributeError):  # somebody has given the column another type
        return str(value)


def _bare(value: tuple[MirroredRow] | None) -> MirroredRow | None:
    return value[0] if value is not None else None


def _agree(found: tuple[MirroredRow] | None, expected: MirroredRow | None) -> bool:
    if found is None or expected is None:
        return found is None and expected is None
    names = [each for each in expected if each in found[0]]
    return Recomputed(tuple(expected[each] for each in names)).agrees(tuple(found[0][each] for each in names))


def _recomputed(state: Any) -> RecomputedRows:
    found: RecomputedRows = state
    return found
