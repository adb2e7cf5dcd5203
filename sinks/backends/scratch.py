"""The stores of scratch copies, which ``verify`` and ``replay`` fill and throw away."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from framework.errors import InvariantViolation, TopologyError
from framework.topology import Fields, Header, Reach, Stamp
from sinks.backends.backend import Key, MapBackend, Row
from sinks.backends.memory import MemoryBackend
from sinks.backends.sqlite import SqliteBackend


def scratch_backend(folder: Path, key: Fields, value: Fields) -> MapBackend:
    """An empty store in ``folder``, or in memory for types that SQLite lacks."""
    try:
        return SqliteBackend(folder / "scratch.db", "scratch", key, value)
    except TopologyError:
        memory = MemoryBackend("scratch")
        memory.bind(key, value)
        return memory


class ReplayBackend(MapBackend):
    """The rows of a sink as they were before a transaction, and over them the rows that its replay
    writes, in a scratch store. The sink is only read. A key that a later transaction has changed
    has no row here: what it held before is no longer known. ``knows_past``: whether the rows of the
    sink have previous values.

    What a replay writes is the keys of one batch, so they are kept in this process, which takes
    values of any type."""

    reach = Reach.PROCESS

    def __init__(self, sink: MapBackend, txid: int, *, knows_past: bool) -> None:
        self._sink, self._txid, self._knows_past = sink, txid, knows_past
        self._scratch = MemoryBackend(f"replay of {sink.location}")
        self._scratch.bind(*sink.fields)

    @property
    def location(self) -> str:
        return self._scratch.location

    def bind(self, key: Fields, value: Fields) -> None:
        self._scratch.bind(key, value)

    @property
    def fields(self) -> tuple[Fields, Fields]:
        return self._scratch.fields

    def prepare(self, topology_id: str) -> Header:
        return self._scratch.prepare(topology_id)

    def read_header(self) -> Header:
        return self._scratch.read_header()

    def raise_header(self, expected: Header, new: Header) -> None:
        self._scratch.raise_header(expected, new)

    def multi_get(self, keys: Sequence[Key]) -> list[Row | None]:
        written = self._scratch.multi_get(keys)
        missing = [key for key, row in zip(keys, written, strict=True) if row is None]
        found = iter(self._sink.multi_get(missing) if missing else [])
        return [row if row is not None else self._before(next(found)) for row in written]

    def _before(self, row: Row | None) -> Row | None:
        known, value = row.as_of(self._txid - 1) if row is not None and self._knows_past else (False, None)
        return Row(value, Stamp(self._txid - 1, 0, 0)) if known and value is not None else None

    def scan(self) -> Iterator[tuple[Key, Row]]:
        """Only what the replay wrote."""
        return self._scratch.scan()

    def multi_put(
        self, header: Header, keys: Sequence[Key], expected_stamps: Sequence[Stamp | None], rows: Sequence[Row]
    ) -> None:
        """The rows of the sink are not in the scratch store, whatever their stamps."""
        own = [row.stamp if row is not None else None for row in self._scratch.multi_get(keys)]
        self._scratch.multi_put(header, keys, own, rows)

    def sweep(self, header: Header) -> int:
        return self._scratch.sweep(header)

    def roll_back(self, header: Header) -> int:
        return self._scratch.roll_back(header)

    def purge(self, header: Header, before_txid: int) -> int:
        return 0

    def clear(self, topology_id: str) -> Header:
        raise InvariantViolation(f"{self.location} is a replay, which nobody clears")

    def close(self) -> None:
        self._scratch.close()
        self._sink.close()
