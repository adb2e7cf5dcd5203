"""A backend in memory, for tests and for runs in a single process (C23)."""

from __future__ import annotations

import copy
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from framework.errors import ConfigError, InvariantViolation, StaleWriterError, TopologyError
from framework.topology import FORMER, REBUILT, Fields, Header, Reach, Stamp
from framework.topology.fencing import check_format
from sinks.backend import Key, Row
from sinks.read_as_of import SnapshotBackend
from sinks.rebuild_exchange import ExchangeBackend


class _Rows:
    """The data that all copies of one backend share."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.rows: dict[Key, Row] = {}
        self.header: Header | None = None
        self.beside: dict[str, _Rows] = {}


_shared: WeakValueDictionary[str, _Rows] = WeakValueDictionary()


class MemoryBackend(SnapshotBackend, ExchangeBackend):
    """Rows in this process. Copies made for tasks share the rows while they stay in this process.
    In any other process, the first use raises ``ConfigError``.

    >>> backend = MemoryBackend()
    >>> backend.multi_get([("dog",)])
    [None]
    """

    reach = Reach.PROCESS
    commits_in_one_step = True

    def __init__(self, name: str | None = None) -> None:
        self._id = f"memory:{name or uuid.uuid4().hex[:8]}:{uuid.uuid4().hex[:8]}"
        self._name = name or self._id.split(":")[1]
        self._fields: tuple[Fields, Fields] | None = None
        self._place = ""
        self._own: _Rows | None = _Rows()
        _shared[self._id] = self._own

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_own": None}

    def _rows(self) -> _Rows:
        rows = self._own or _shared.get(self._id)
        if rows is None:
            raise ConfigError(
                f"{self.location} lives in the process that made it, and this is another one: use the executor 'local', or "
                "a backend that several processes can reach, such as SqliteBackend"
            )
        return rows.beside.setdefault(self._place, _Rows()) if self._place else rows

    @property
    def location(self) -> str:
        return f"memory backend {self._name!r}{f', {self._place}' if self._place else ''}"

    def bind(self, key: Fields, value: Fields) -> None:
        self._fields = (key, value)

    @property
    def fields(self) -> tuple[Fields, Fields]:
        if self._fields is None:
            raise TopologyError(f"{self.location} has no columns: use it in a StateCommitter, or call bind()")
        return self._fields

    @property
    def value_columns(self) -> int:
        return len(self._fields[1]) if self._fields is not None else 1

    def check(self, topology_id: str) -> Header | None:
        header = self._rows().header
        if header is not None and header.topology_id != topology_id:
            raise ConfigError(
                f"{self.location} belongs to topology {header.topology_id!r}, not {topology_id!r}: a state has one owner; use "
                "another backend"
            )
        return header

    def check_held(self, topology_id: str) -> Header | None:
        return self.check(topology_id)

    def prepare(self, topology_id: str) -> Header:
        shared = self._rows()
        with shared.lock:
            if shared.header is None:
                shared.header = Header(topology_id, uuid.uuid4().hex)
            self.check(topology_id)
            return shared.header

    def read_header(self) -> Header:
        header = self._rows().header
        if header is None:
            raise InvariantViolation(f"{self.location} is used before it is prepared")
        check_format(header.format, self.location)
        return header

    def raise_header(self, expected: Header, new: Header) -> None:
        shared = self._rows()
        with shared.lock:
            self._check(expected)
            shared.header = new

    def multi_get(self, keys: Sequence[Key]) -> list[Row | None]:
        shared = self._rows()
        with shared.lock:
            return [shared.rows.get(key) for key in keys]

    def scan(self) -> Iterator[tuple[Key, Row]]:
        yield from self.items().items()

    def multi_put(
        self, header: Header, keys: Sequence[Key], expected_stamps: Sequence[Stamp | None], rows: Sequence[Row]
    ) -> None:
        shared = self._rows()
        with shared.lock:
            self._check(self._opens_from or header)
            for key, expected in zip(keys, expected_stamps, strict=True):
                found = shared.rows.get(key)
                if (found.stamp if found is not None else None) != expected:
                    raise StaleWriterError(f"{self.location}, key {key!r}: stamp {found}, expected {expected}")
            shared.rows.update(zip(keys, rows, strict=True))
            if self._opens_from is not None:
                shared.header = header.done_as_open()

    def sweep(self, header: Header) -> int:
        shared = self._rows()
        stamp = header.stamp
        with shared.lock:
            self._check(header)
            stale = [key for key, row in shared.rows.items() if row.stamp.txid == stamp.txid and row.stamp < stamp]
            for key in stale:
                shared.rows[key] = shared.rows[key].restored(stamp)
            return len(stale)

    def roll_back(self, header: Header) -> int:
        shared = self._rows()
        opened = header.stamp
        with shared.lock:
            self._check(header)
            undone = [key for key, row in shared.rows.items() if row.stamp.txid == opened.txid]
            for key in undone:
                shared.rows[key] = shared.rows[key].rolled_back(opened)
            return len(undone)

    def purge(self, header: Header, before_txid: int) -> int:
        shared = self._rows()
        with shared.lock:
            self._check(header)
            gone = [key for key, row in shared.rows.items() if row.value is None and row.stamp.txid < before_txid]
            for key in gone:
                del shared.rows[key]
            return len(gone)

    def clear(self, topology_id: str) -> Header:
        shared = self._rows()
        with shared.lock:
            header = self.prepare(topology_id)
            shared.rows.clear()
            shared.header = Header(topology_id, uuid.uuid4().hex, epoch=header.epoch)
            return shared.header

    def beside(self, place: str) -> MemoryBackend:
        other = copy.copy(self)
        other._place = place
        return other

    def check_exchange(self, topology_id: str) -> None:
        """Always possible."""

    def exchange(self, expected: Header, new: Header, rebuilt: Header) -> None:
        shared, other = self._rows(), self.beside(REBUILT)
        with shared.lock:
            self._check(expected)
            other._check(rebuilt)
            former = shared.beside[FORMER] = _Rows()
            former.rows, former.header = shared.rows, replace(expected, incarnation=rebuilt.incarnation)
            shared.rows, shared.header = other._rows().rows, new
            other.remove(expected.topology_id)

    def remove(self, topology_id: str) -> bool:
        if not self._place:
            raise InvariantViolation(f"{self.location} does not stand beside another one")
        self.check(topology_id)
        shared = self._rows()
        there, shared.rows, shared.header = shared.header is not None, {}, None
        return there

    def close(self) -> None:
        """Does nothing: there is nothing to release."""

    def items(self) -> dict[Key, Row]:
        """A copy of all rows, tombstones included. For tests and inspection."""
        shared = self._rows()
        with shared.lock:
            return dict(shared.rows)

    def _check(self, expected: Header) -> None:
        found = self._rows().header
        if found != expected:
            raise StaleWriterError(
                f"{self.location}: the header is {found}, this writer holds {expected}",
                found.epoch if found is not None else None,
            )
