"""How to write your own backend: stamped rows in LMDB, a key-value store in one file with one
writer at a time.

A backend must do one thing: in one atomic step, write rows only if the header and the stamp of each
row are as the writer expects. LMDB's write transactions can do that.
``tests/sinks/backends/test_backends.py`` runs the contract suite on this class:

::

    class TestLmdbBackend(BackendContract):
        def make(self, name, key, value):
            return LmdbBackend(self.folder / name, key, value)
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lmdb

from framework.topology import Fields, Header, Reach, Stamp
from ratchet import BadRecordError, ConfigError, CorruptStateError, RetryableError, StaleWriterError
from sinks.backend import Key, MapBackend, Row
from sinks.value_encoding import JsonColumns

_HEADER, _ROW = b"header", b"row:"
_MAP_BYTES = 1 << 32
_KEY_BYTES_MAX = 511
_environments: dict[tuple[int, str], Any] = {}


class LmdbBackend(MapBackend):
    """One LMDB file per state. Every process on the same host may write."""

    reach = Reach.HOST

    def __init__(self, path: str | Path, key: Fields | None = None, value: Fields | None = None) -> None:
        self._path = str(Path(path).absolute())
        self._fields: tuple[Fields, Fields] | None = None
        if key is not None and value is not None:
            self.bind(key, value)

    # --- shape ------------------------------------------------------------------------------------

    @property
    def location(self) -> str:
        return f"LMDB file {self._path}"

    def bind(self, key: Fields, value: Fields) -> None:
        JsonColumns(key, "LMDB")  # raises for types that it cannot store
        JsonColumns(value, "LMDB")
        self._fields = (key, value)

    @property
    def fields(self) -> tuple[Fields, Fields]:
        if self._fields is None:
            raise ConfigError(f"{self.location} has no columns: use it in a StateCommitter, or call bind()")
        return self._fields

    # --- header -----------------------------------------------------------------------------------

    def prepare(self, topology_id: str) -> Header:
        with self._transaction(write=True) as store:
            if store.get(_HEADER) is None:
                store.put(_HEADER, _dumped(asdict(Header(topology_id, uuid.uuid4().hex))))
            header = self._header(store)
            if header.topology_id != topology_id:
                raise ConfigError(
                    f"{self.location} belongs to topology {header.topology_id!r}, not {topology_id!r}: a state has one owner"
                )
            return header

    def read_header(self) -> Header:
        with self._transaction() as store:
            return self._header(store)

    def raise_header(self, expected: Header, new: Header) -> None:
        with self._transaction(write=True) as store:
            self._check(store, expected)
            store.put(_HEADER, _dumped(asdict(new)))

    # --- rows -------------------------------------------------------------------------------------

    def multi_get(self, keys: Sequence[Key]) -> list[Row | None]:
        names = [self._name(key) for key in keys]
        with self._transaction() as store:
            return [self._row(name, store.get(name)) for name in names]

    def scan(self) -> Iterator[tuple[Key, Row]]:
        with self._transaction() as store:
            found = [(name, text) for name, text in store.cursor() if name.startswith(_ROW)]
        keys = JsonColumns(self.fields[0], "LMDB")
        for name, text in found:
            row = self._row(name, text)
            if row is not None:
                yield keys.decode(json.loads(name[len(_ROW) :])), row

    def multi_put(
        self, header: Header, keys: Sequence[Key], expected_stamps: Sequence[Stamp | None], rows: Sequence[Row]
    ) -> None:
        written = [(self._name(key), self._text(row)) for key, row in zip(keys, rows, strict=True)]
        with self._transaction(write=True) as store:
            self._check(store, header)
            for (name, text), expected in zip(written, expected_stamps, strict=True):
                found = self._row(name, store.get(name))
                if (found.stamp if found is not None else None) != expected:
                    raise StaleWriterError(f"{self.location}, key {name!r}: its stamp is no longer {expected}")
                store.put(name, text)

    def sweep(self, header: Header) -> int:
        stamp = header.stamp
        return self._change(
            header,
            lambda row: row.stamp.txid == stamp.txid and row.stamp < stamp,
            lambda row: row.restored(stamp),
        )

    def roll_back(self, header: Header) -> int:
        stamp = header.stamp
        return self._change(header, lambda row: row.stamp.txid == stamp.txid, lambda row: row.rolled_back(stamp))

    def purge(self, header: Header, before_txid: int) -> int:
        return self._change(header, lambda row: row.value is None and row.stamp.txid < before_txid, lambda row: None)

    def clear(self, topology_id: str) -> Header:
        self.prepare(topology_id)
        with self._transaction(write=True) as store:
            header = Header(topology_id, uuid.uuid4().hex, epoch=self._header(store).epoch)
            for name in [name for name, _ in store.cursor() if name.startswith(_ROW)]:
                store.delete(name)
            store.put(_HEADER, _dumped(asdict(header)))
            return header

    def close(self) -> None:
        environment = _environments.pop((os.getpid(), self._path), None)
        if environment is not None:
            environment.close()

    # --- inside -----------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self, *, write: bool = False) -> Iterator[Any]:
        """One atomic step. It is on disk when the block ends, and undone if the block raises."""
        try:
            where = (os.getpid(), self._path)  # each process opens a file once; a fork opens its own
            if where not in _environments:
                Path(self._path).parent.mkdir(parents=True, exist_ok=True)
                _environments[where] = lmdb.open(self._path, map_size=_MAP_BYTES, subdir=False)
            with _environments[where].begin(write=write) as store:
                yield store
        except lmdb.Error as error:
            raise RetryableError(f"{self.location}: {error}") from error

    def _header(self, store: Any) -> Header:
        try:
            return Header.of_document(json.loads(store.get(_HEADER)), self.location)
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptStateError(f"{self.location}: its header cannot be read ({error})") from error

    def _check(self, store: Any, expected: Header) -> None:
        found = self._header(store)
        if found != expected:
            raise StaleWriterError(f"{self.location} is open for {found.open}, not for {expected.open}", found.epoch)

    def _change(self, header: Header, chosen: Callable[[Row], bool], made: Callable[[Row], Row | None]) -> int:
        """Under the header, replace or remove every chosen row. Returns the number of rows."""
        with self._transaction(write=True) as store:
            self._check(store, header)
            rows = [(name, self._row(name, text)) for name, text in store.cursor() if name.startswith(_ROW)]
            changed = [(name, made(row)) for name, row in rows if row is not None and chosen(row)]
            for name, row in changed:
                if row is None:
                    store.delete(name)
                else:
                    store.put(name, self._text(row))
            return len(changed)

    def _name(self, key: Key) -> bytes:
        if None in key:
            raise BadRecordError(f"{self.location}, key {key!r}: a null key cannot be stored")
        name = _ROW + _dumped(self._encoded(0, key))
        if len(name) > _KEY_BYTES_MAX:
            raise BadRecordError(f"{self.location}: the key {key!r} is longer than {_KEY_BYTES_MAX} bytes")
        return name

    def _text(self, row: Row) -> bytes:
        value, prev = (None if each is None else self._encoded(1, each) for each in (row.value, row.prev))
        return _dumped({"stamp": row.stamp, "writer": row.writer, "value": value, "prev": prev})

    def _encoded(self, which: int, values: Sequence[Any]) -> Sequence[Any]:
        try:
            return JsonColumns(self.fields[which], "LMDB").encode(values)
        except (ValueError, TypeError, AttributeError) as error:
            raise BadRecordError(f"{self.location} cannot hold {values!r}: {error}") from error

    def _row(self, name: bytes, text: bytes | None) -> Row | None:
        if text is None:
            return None
        try:
            found = json.loads(text)
            columns = JsonColumns(self.fields[1], "LMDB")
            value, prev = (None if found[each] is None else columns.decode(found[each]) for each in ("value", "prev"))
            return Row(value, Stamp(*found["stamp"]), prev, found["writer"])
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptStateError(f"{self.location}, key {name!r}: not a row ({error}); restore the file") from error


def _dumped(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
