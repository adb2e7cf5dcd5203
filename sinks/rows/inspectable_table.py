"""Tables of rows, as the tools see them: read as of a transaction, compared, and explained."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import pyarrow as pa

from framework.bounded_pages import PAGE_KEYS, pages_of
from framework.errors import ConfigError, InvariantViolation, MovedOnError
from framework.topology import (
    Change,
    Difference,
    FencedState,
    Fields,
    Header,
    KeyedState,
    StateReading,
)
from framework.topology.canonical_form import RowForm, equal
from sinks.expected_values import Expected, Recomputed
from sinks.key_parser import key_values
from sinks.rows.row_multiset import RowMultiset
from sinks.rows.rows_as_of import Key, RowSnapshot, Values
from sinks.rows.transactional_table import READ_ROWS, RowTable
from sinks.rows.values import is_text, stored_fields
from sinks.sql.schema import HEADERS_TABLE
from sinks.states import MapState

T = TypeVar("T")
#: What stands for the rows of a table without keys.
_ALL_ROWS = "rows"


class InspectableTable(RowTable, KeyedState):
    """A table of a database that tools look into. A key is one of an ``UpsertCommitter``; its value
    is the other declared columns. Columns of nested values are JSON text. A table of an
    ``AppendCommitter`` has no keys: it is compared whole."""

    # --- what a database adds ---------------------------------------------------------------------

    @abstractmethod
    def at_one_moment(self) -> AbstractContextManager[Self]:
        """A copy for one thread that only reads: header and rows are those of one moment."""

    # --- values -----------------------------------------------------------------------------------

    @property
    def stored_fields(self) -> Fields:
        """The declared columns, with the types of what the table holds."""
        if self._fields is None:
            raise InvariantViolation(f"{self.location} has no columns yet")
        return stored_fields(self._fields)

    @property
    def value_names(self) -> list[str]:
        """The declared columns beside the key."""
        return [each for each in self.schema.names if each not in self._by_key().key]

    # --- as of a transaction ----------------------------------------------------------------------

    @contextmanager
    def held_rows(self, topology_id: str | None = None) -> Iterator[RowSnapshot]:
        """The rows, at one moment. Raises ``ConfigError`` where there is nothing yet, and for the
        table of another topology."""
        with self.at_one_moment() as table, table._reading() as connection:
            header = table._header_there(connection)
            if header is None:
                raise ConfigError(f"{self.location}: there is nothing yet")
            if topology_id is not None and header.topology_id != topology_id:
                raise ConfigError(f"{self.location} belongs to topology {header.topology_id!r}, not {topology_id!r}")
            yield RowSnapshot(table, connection, header)

    def _header_there(self, connection: Any) -> Header | None:
        """The header; None where there is nothing yet."""
        written = self._held_columns(connection, self._table) and self._held_columns(connection, HEADERS_TABLE)
        return self._select_header(connection, "") if written else None

    @contextmanager
    def reading(self, topology_id: str | None = None) -> Iterator[RowsReading]:
        with self.held_rows(topology_id) as held:
            yield RowsReading(self, held)

    # --- compared ---------------------------------------------------------------------------------

    def become_scratch(self, folder: Path) -> None:
        raise ConfigError(f"{self.location} is recomputed only for an AppendCommitter or an UpsertCommitter")

    def become_replay(self, folder: Path, txid: int, topology_id: str) -> None:
        raise ConfigError(f"{self.location} is replayed only for an AppendCommitter or an UpsertCommitter")

    def check_replayed(self, topology_id: str) -> None:
        """Raise ``ConfigError`` for the table of another topology."""
        self._told(lambda held: None, None, topology_id)

    def _told(self, read: Callable[[RowSnapshot], T], nothing: T, topology_id: str | None = None) -> T:
        """What the table tells; ``nothing`` where no transaction has been there."""
        with self.at_one_moment() as table, table._reading() as connection:
            if table._header_there(connection) is None:
                return nothing
        with self.held_rows(topology_id) as held:
            return read(held)

    def before(self, keys: Sequence[Key], txid: int) -> list[tuple[Key, Values]]:
        """The rows with these keys before a transaction, as far as the table tells."""
        found = self._told(lambda held: held.values(keys, txid - 1), dict[Key, Values | None]())
        return [(key, values) for key, values in found.items() if values is not None]

    def deletions(self, keys: Sequence[Key], txid: int) -> list[tuple[Key, Any]]:
        """The greatest sequence of a deletion of each of these keys before a transaction."""
        return self._told(lambda held: held.deletions(keys, txid), [])

    def changes(self, replayed: FencedState, txid: int) -> Iterator[Change]:
        """Of a table without keys, the rows as a multiset: ``key`` is a row; ``after`` and ``held``
        are how often the transaction wrote it."""
        if not isinstance(replayed, InspectableTable):
            raise InvariantViolation(f"{self.location} is compared with {replayed.location}")
        if self._changes is None:
            return self._appended(replayed, txid)
        return self._changed(replayed, txid)

    def _appended(self, replayed: InspectableTable, txid: int) -> Iterator[Change]:
        bag = RowMultiset()
        with replayed.held_rows() as held:
            bag.add_expected(held.rows(held.header.done))
        known = self._stamp is not None
        if known:
            self._told(lambda held: bag.add_found(held.rows_of(txid)), None)
        for row, found, expected in bag.rows():
            yield Change(row, None, expected, found if known else None, agrees=found == expected if known else None)

    def _changed(self, replayed: InspectableTable, txid: int) -> Iterator[Change]:
        with replayed.held_rows() as held:
            keys = held.changed_keys()
            after = held.values(keys, txid)
        empty: dict[Key, Values | None] = dict.fromkeys(keys)
        before = self._told(lambda held: held.values(keys, txid - 1), empty)
        now = self._told(lambda held: held.values(keys, txid), dict[Key, Values | None]())
        for key in keys:
            bare = key[0] if len(key) == 1 else key
            if key not in before or key not in now:
                yield Change(bare, None, after[key], None, agrees=None)
            else:
                yield Change(bare, before[key], after[key], now[key], agrees=equal(after[key], now[key]))

    def pages(self, scratch: FencedState) -> Iterator[Sequence[Any]]:
        """Without the keys of rows that Ratchet has not written, unless ``scratch`` has them."""
        if self._changes is None:
            yield [_ALL_ROWS]
            return
        yield from self._stamped_pages()
        for some in pages_of(_expected(scratch).expected_keys(), PAGE_KEYS):
            yield self._without_stamped(some)

    def _stamped_pages(self) -> Iterator[list[Key]]:
        """The keys of the rows that Ratchet has written."""
        after: Key | None = None
        while True:
            with self.held_rows() as held:
                keys, last = held.stamped_keys(after)
            if not keys:
                return
            if last == after:
                raise ConfigError(f"{self.location}: its keys cannot be read in order: {last!r} comes after itself")
            yield keys
            after = last

    def _without_stamped(self, keys: Sequence[Key]) -> list[Key]:
        with self.held_rows() as held:
            stamped = held.stamped(keys)
        return [each for each in keys if each not in stamped]

    def held(self, keys: Sequence[Any], txid: int) -> Mapping[Any, Any]:
        with self.held_rows() as held:
            if self._changes is not None:
                return held.values(keys, txid)
            bag = RowMultiset()
            try:
                bag.add_found(held.written(txid))
            except MovedOnError:
                return {}
            return {_ALL_ROWS: bag}

    def compare(self, held: Mapping[Any, Any], scratch: FencedState, differs: Callable[[Difference], None]) -> int:
        if self._changes is None:
            return self._compare_all(held, scratch, differs)
        compared = 0
        keys = list(held)
        for key, expected in zip(keys, _expected(scratch).expected(keys), strict=True):
            found = held[key]
            compared += found is not None or expected is not None
            if (found is None) is not (expected is None) or (expected is not None and not expected.agrees(found)):
                bare = key[0] if len(key) == 1 else key
                differs(Difference(bare, found, expected.value if expected is not None else None))
        return compared

    def _compare_all(self, held: Mapping[Any, Any], scratch: FencedState, differs: Callable[[Difference], None]) -> int:
        """Compares rows as a multiset. In a difference, ``key`` is the row, and the other two
        fields are how often it occurs in the sink and in the scratch copy."""
        if not isinstance(scratch, InspectableTable):
            raise InvariantViolation(f"{self.location} is compared with {scratch.location}")
        if not held:
            return 0
        bag: RowMultiset = held[_ALL_ROWS]
        with scratch.held_rows() as expected:
            bag.add_expected(expected.rows(expected.header.done))
        for row, found, wanted in bag.differing():
            differs(Difference(row, found, wanted))
        return bag.compared()

    def doubts(self, differences: Sequence[Difference]) -> str:
        with self.held_rows() as held:
            triggers = self._triggers(held.connection)
            others = held.has_unstamped()
        changes = self._changes
        if triggers:
            return f"trigger {', '.join(triggers)} of the table may have changed them"
        if changes is None or not differences:
            return ""
        if self._stamp is None and any(each.expected is None for each in differences):
            return "the table has no stamp, which would tell rows of the user's from those of the topology"
        if others and (changes.sequence is not None or changes.ignore_nulls):
            return "rows that the topology has not written take part in what it writes"
        return ""

    # --- as the copy of a rebuild -----------------------------------------------------------------

    def expected_keys(self) -> Iterator[Key]:
        """The keys of all rows."""
        return (key for page in self._stamped_pages() for key in page)

    def expected(self, keys: Sequence[Key]) -> Sequence[Expected | None]:
        """The rows with these keys after the last transaction; None: there is none."""
        with self.held_rows() as held:
            found = held.values(keys, held.header.done)
        return [Recomputed(values) if (values := found.get(key)) is not None else None for key in keys]

    # --- explained --------------------------------------------------------------------------------

    def key_of(self, text: str) -> Key:
        if self._changes is None:
            raise ConfigError(f"{self.location} has no keys, so no row in it can be explained: it is appended to")
        fields = self.stored_fields.select(list(self._changes.key))
        return self._held_key(RowForm(fields)(key_values(text, fields, self.location)))

    def _held_key(self, key: Key) -> Key:
        """A key as the table returns it."""
        own = self._by_key().key
        texts = {name: [part] for name, part in zip(own, key, strict=True) if is_text(self.schema.field(name).type)}
        held = self.as_held(pa.table(texts)).to_pydict()
        return tuple([held[name][0] if name in held else part for name, part in zip(own, key, strict=True)])

    def key_columns(self) -> Sequence[str]:
        return list(self._changes.key) if self._changes is not None else ()

    def by_column(self, value: Values | None) -> Mapping[str, Any] | None:
        return dict(zip(self.value_names, value, strict=True)) if value is not None else None

    def written(self, key: Key, txid: int) -> bool:
        raise self._no_copy()

    def recomputed(self, key: Key) -> Values | None:
        raise self._no_copy()

    def _no_copy(self) -> InvariantViolation:
        return InvariantViolation(f"{self.location} is no scratch copy: its rows are recomputed in a ReferenceRows")


class RowsReading(StateReading):
    """The rows of a table of a database."""

    def __init__(self, table: InspectableTable, held: RowSnapshot) -> None:
        self._table, self._held = table, held

    @property
    def schema(self) -> pa.Schema:
        return self._table.stored_fields.schema()

    def header(self) -> Header:
        return self._held.header

    def rows(self, txid: int, keys: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        schema = self.schema
        found = self._held.rows(txid) if keys is None else self._named(keys, txid)
        for page in pages_of(found, READ_ROWS):
            columns = zip(*page, strict=True)
            arrays = [self._array(values, field) for values, field in zip(columns, schema, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _array(self, values: Sequence[Any], field: pa.Field) -> pa.Array:
        try:
            return pa.array(values, field.type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"{self._table.location}: {field.name!r} holds values that are no {field.type} ({error}): read it by SQL"
            ) from error

    def _named(self, keys: Sequence[str], txid: int) -> Iterator[Values]:
        table = self._table
        wanted = list(dict.fromkeys(map(table.key_of, keys)))
        known = self._held.values(wanted, txid)
        own = table._by_key().key
        for key in wanted:
            if key not in known:
                raise MovedOnError(f"{table.location}, key {key!r}: changed after transaction {txid}")
            values = known[key]
            if values is not None:
                row = {**dict(zip(own, key, strict=True)), **dict(zip(table.value_names, values, strict=True))}
                yield tuple([row[name] for name in table.schema.names])


def _expected(scratch: FencedState) -> MapState | InspectableTable:
    if not isinstance(scratch, (MapState, InspectableTable)):
        raise InvariantViolation(f"rows by key are compared with {scratch.location}")
    return scratch
