"""The stores of scratch copies, which ``verify`` and ``replay`` fill and delete."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from framework.errors import InvariantViolation, TopologyError
from framework.topology import Fields, Header, OpenCommit, Reach, Stamp, TransactionAttempt
from framework.topology.canonical_form import RowForm
from sinks.backend import Key, MapBackend, Row, Value
from sinks.memory import MemoryBackend
from sinks.read_as_of import as_of, check_held, for_reading
from sinks.sql.sqlite_backend import SqliteBackend


def scratch_backend(folder: Path, key: Fields, value: Fields) -> MapBackend:
    """An empty store in ``folder`` for values of any type."""
    types = [fields.type_of(name) for fields in (key, value) for name in fields]
    try:
        plain = SqliteBackend(folder / "scratch.db", "scratch", key, value)
    except TopologyError:  # types that SQLite lacks
        return PickledBackend(folder, key, value)
    # SQLite has no NaN.
    return PickledBackend(folder, key, value) if any(map(pa.types.is_floating, types)) else plain


class _Upon(MapBackend):
    """A backend that keeps its rows and its header in another backend."""

    def __init__(self, rows: MapBackend) -> None:
        self._rows = rows

    @property
    def location(self) -> str:
        return self._rows.location

    def bind(self, key: Fields, value: Fields) -> None:
        raise InvariantViolation(f"{self.location} is a scratch copy, whose columns are known")

    def prepare(self, topology_id: str) -> Header:
        return self._rows.prepare(topology_id)

    def check(self, topology_id: str) -> Header | None:
        return self._rows.check(topology_id)

    def read_header(self) -> Header:
        return self._rows.read_header()

    def raise_header(self, expected: Header, new: Header) -> None:
        self._rows.raise_header(expected, new)

    def sweep(self, header: Header) -> int:
        return self._rows.sweep(header)

    def roll_back(self, header: Header) -> int:
        return self._rows.roll_back(header)

    def purge(self, header: Header, before_txid: int) -> int:
        return self._rows.purge(header, before_txid)

    def clear(self, topology_id: str) -> Header:
        return self._rows.clear(topology_id)

    def close(self) -> None:
        self._rows.close()


class PickledBackend(_Upon):
    """Rows in a SQLite file, pickled. They are found by the text of their keys, which is the same
    for equal keys in canonical form. Slower than columns, but stores values of any type. A
    tombstone whose key had no value before is not scanned."""

    def __init__(self, folder: Path, key: Fields, value: Fields) -> None:
        super().__init__(
            SqliteBackend(folder / "scratch.db", "scratch", Fields(name=str), Fields(key=bytes, row=bytes))
        )
        self._fields = (key, value)

    @property
    def fields(self) -> tuple[Fields, Fields]:
        return self._fields

    def multi_get(self, keys: Sequence[Key]) -> list[Row | None]:
        of_value = RowForm(self._fields[1])
        found = self._rows.multi_get([*map(_name, keys)])
        return [_unpickled(row, of_value) if row is not None else None for row in found]

    def scan(self) -> Iterator[tuple[Key, Row]]:
        of_key, of_value = map(RowForm, self._fields)
        for _, row in self._rows.scan():
            held = row.value or row.prev
            if held is not None:
                yield of_key(pickle.loads(held[0])), _unpickled(row, of_value)

    def multi_put(
        self, header: Header, keys: Sequence[Key], expected_stamps: Sequence[Stamp | None], rows: Sequence[Row]
    ) -> None:
        pickled = [_pickled(key, row) for key, row in zip(keys, rows, strict=True)]
        self._rows.multi_put(header, [*map(_name, keys)], expected_stamps, pickled)


def _name(key: Key) -> Key:
    return (repr(key),)


def _pickled(key: Key, row: Row) -> Row:
    def pickled(value: Value | None) -> Value | None:
        return (pickle.dumps(key), pickle.dumps(value)) if value is not None else None

    return row._replace(value=pickled(row.value), prev=pickled(row.prev))


def _unpickled(row: Row, form: RowForm) -> Row:
    value, prev = (form(pickle.loads(each[1])) if each is not None else None for each in (row.value, row.prev))
    return row._replace(value=value, prev=prev)


class TriedBackend(_Upon):
    """The rows of a sink, as an attempt that only tries its commit uses them: it drops writes,
    and finds no rows that fall due by time."""

    def __init__(self, rows: MapBackend, attempt: TransactionAttempt) -> None:
        super().__init__(rows)
        self._attempt = attempt

    @property
    def fields(self) -> tuple[Fields, Fields]:
        return self._rows.fields

    def read_header(self) -> Header:
        """The header as it would be in the commit."""
        txid, attempt_id, fence = self._attempt.txid, self._attempt.attempt_id, self._attempt.fence
        if fence is None:
            raise InvariantViolation(f"{self.location}: only attempts of a driver try their commit")
        opened = OpenCommit(txid, attempt_id, fence.plan_digest)
        return replace(self._rows.read_header(), epoch=fence.epoch, open=opened, done=txid - 1)

    def multi_get(self, keys: Sequence[Key]) -> list[Row | None]:
        return self._rows.multi_get(keys)

    def scan(self) -> Iterator[tuple[Key, Row]]:
        return self._rows.scan()

    def due(self, column: str, after: int, upto: int, *, txid: int | None) -> Iterator[tuple[Key, Row]]:
        return iter(())

    def multi_put(
        self, header: Header, keys: Sequence[Key], expected_stamps: Sequence[Stamp | None], rows: Sequence[Row]
    ) -> None:
        pass


#: The writer of marks in a replay: keys that were read, and whose values are unknown.
_ASKED = "asked"


class InSink(NamedTuple):
    """A sink's knowledge of a key. ``known``: whether it still contains the value ``before`` the
    replayed transaction; then ``held``, the value after it, is known too."""

    known: bool
    before: Value | None
    held: Value | None


class ReplayBackend(_Upon):
    """The rows of a sink as they were before a transaction, overlaid with the rows that its replay
    writes into a scratch store. The sink is only read. ``knows_past``: whether its rows have
    previous values.

    A key that a later transaction has changed has no row here, because its earlier value is
    unknown. When it is read, the scratch store gets a mark, which the replay's own row replaces. So
    ``scan`` finds each key that the replay wrote, and each that it read in vain.

    A replay writes the keys of one batch only, so they are kept in this process, which supports
    values of any type. Raises ``ConfigError`` for the sink of another topology, or of other
    columns."""

    reach = Reach.PROCESS

    def __init__(self, sink: MapBackend, txid: int, topology_id: str, *, knows_past: bool) -> None:
        rows = MemoryBackend(f"replay of {sink.location}")
        rows.bind(*sink.fields)
        super().__init__(rows)
        self._sink = for_reading(sink)
        try:
            self._is_empty = check_held(self._sink, topology_id) is None
        finally:
            self._sink.close()  # the next use opens it again
        self._txid, self._knows_past = txid, knows_past

    @property
    def fields(self) -> tuple[Fields, Fields]:
        return self._rows.fields

    def in_sink(self, keys: Sequence[Key]) -> list[InSink]:
        if self._is_empty:
            return [InSink(True, None, None)] * len(keys)
        rows = self._sink.multi_get(keys) if keys else []
        before = as_of(self._sink, rows, self._txid - 1)
        held = [row.as_of(self._txid)[1] if row is not None else None for row in rows]
        return [
            InSink(True, value, after) if known and self._knows_past else InSink(False, None, None)
            for (known, value), after in zip(before, held, strict=True)
        ]

    def multi_get(self, keys: Sequence[Key]) -> list[Row | None]:
        found = dict(zip(keys, self._written(keys), strict=True))
        missing = [key for key, row in found.items() if row is None]
        told = dict(zip(missing, self.in_sink(missing), strict=True))
        unknown = [key for key, each in told.items() if not each.known]
        if unknown:
            self._mark(unknown)
        found.update((key, Row(each.before, self._stamp)) for key, each in told.items() if each.before is not None)
        return [found[key] for key in keys]

    def _written(self, keys: Sequence[Key]) -> list[Row | None]:
        """The replay's own rows."""
        rows = self._rows.multi_get(keys)
        return [row if row is not None and row.writer != _ASKED else None for row in rows]

    @property
    def _stamp(self) -> Stamp:
        return Stamp(self._txid - 1, 0, 0)

    def _mark(self, keys: Sequence[Key]) -> None:
        mark = Row(None, self._stamp, None, _ASKED)
        self.multi_put(self._rows.read_header(), keys, [None] * len(keys), [mark] * len(keys))

    def scan(self) -> Iterator[tuple[Key, Row]]:
        """Only the replay's rows and marks."""
        return self._rows.scan()

    def multi_put(
        self, header: Header, keys: Sequence[Key], expected_stamps: Sequence[Stamp | None], rows: Sequence[Row]
    ) -> None:
        """The sink's rows are not in the scratch store, whatever their stamps."""
        own = [row.stamp if row is not None else None for row in self._rows.multi_get(keys)]
        self._rows.multi_put(header, keys, own, rows)

    def purge(self, header: Header, before_txid: int) -> int:
        """Does nothing: the replay ends with its transaction, and its marks are still needed."""
        return 0

    def close(self) -> None:
        super().close()
        self._sink.close()
