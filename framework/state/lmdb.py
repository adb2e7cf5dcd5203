"""State on a local disk, in LMDB: the recommended provider on a single machine.

Each namespace is an environment of its own, with three databases: ``values``, ``prepared`` (by
checkpoint id and key; the first byte tells a value from a deletion) and ``meta``. A commit is one
LMDB transaction. Other processes can read the last committed checkpoint meanwhile, without delaying
the writer.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from framework.errors import ConfigError, CorruptStateError, RetryableError
from framework.local_paths import check_made_here, local_path, warn_of_others
from framework.observe.logs import get_logger
from framework.state.checkpointed_key_value_state import Changes, LayeredState
from framework.state.corrupt_entries import shown
from framework.state.provider_settings import LmdbSettings, settings_of
from framework.state.serialization import Serializer
from framework.topology.context import TopologyContext
from framework.topology.stateful import KeyValueState, StateProvider

try:
    import lmdb
except ImportError as error:  # lmdb is an optional extra
    raise ConfigError(
        "LmdbKeyValueStateProvider needs the package lmdb: pip install 'ratchet-pipelines[lmdb]'"
    ) from error

_log = get_logger()
_PATH = "topology.state.provider.config.path"

T = TypeVar("T")

_MAP_BYTES = 1 << 26
#: LMDB limits keys to 511 bytes. A stored key also contains a checkpoint id, and a byte that tells
#: whether the key is whole.
_KEY_BYTES_MAX = 500
_SCAN_BATCH = 5_000
_ID = struct.Struct(">Q")
#: The length of the key that precedes a value.
_LENGTH = struct.Struct(">I")
_NO_KEY = _LENGTH.pack(0)
_TXID = b"txid"
_READY = b"ready:"
_PUT, _DELETED = b"+", b"-"
#: Errors of the file itself, which persist on a retry.
_DAMAGED = (
    lmdb.BadDbiError,
    lmdb.BadValsizeError,
    lmdb.CorruptedError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
)
#: The open environments, with the number of providers that hold each: a process may open an
#: environment only once.
_open: dict[Path, tuple[LmdbStore, int]] = {}
_lock = threading.Lock()


class LmdbKeyValueStateProvider(StateProvider):
    """Set ``topology.state.provider.config.path`` to a folder."""

    def __init__(self) -> None:
        self._held: set[Path] = set()

    def new_state(
        self, namespace: str, conf: Mapping[str, Any], context: TopologyContext | None
    ) -> KeyValueState[Any, Any]:
        settings = settings_of(conf, LmdbSettings)
        return LayeredState(self._store(settings, namespace), settings.keys(), settings.values())

    def check_before_start(self, conf: Mapping[str, Any]) -> None:
        settings = settings_of(conf, LmdbSettings)
        settings.keys(), settings.values()
        try:
            _path(settings).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{_PATH}: {error}") from None
        check_made_here(_path(settings), _PATH)
        warn_of_others(_path(settings), _log)

    def serializers(self, conf: Mapping[str, Any]) -> tuple[Serializer, Serializer]:
        settings = settings_of(conf, LmdbSettings)
        return settings.keys(), settings.values()

    def exists(self, namespace: str, conf: Mapping[str, Any]) -> bool:
        settings = settings_of(conf, LmdbSettings)
        # the file exists even if nothing was ever committed
        there = (_folder(settings, namespace) / "data.mdb").exists()
        return there and self._store(settings, namespace).txid() > 0

    def drop(self, namespace: str, conf: Mapping[str, Any]) -> None:
        folder = _folder(settings_of(conf, LmdbSettings), namespace)
        self._let_go([folder])
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # fails unless this was the last namespace of its layout
            folder.parent.rmdir()

    def close(self) -> None:
        self._let_go(list(self._held))

    def _store(self, settings: LmdbSettings, namespace: str) -> LmdbStore:
        folder = _folder(settings, namespace)
        with _lock:
            if folder not in _open:
                _open[folder] = LmdbStore(folder, sync=settings.sync), 0
            if folder not in self._held:
                self._held.add(folder)
                _open[folder] = _open[folder][0], _open[folder][1] + 1
            return _open[folder][0]

    def _let_go(self, folders: Sequence[Path]) -> None:
        with _lock:
            for folder in self._held.intersection(folders):
                store, holders = _open.pop(folder)
                if holders > 1:
                    _open[folder] = store, holders - 1
                else:
                    store.end()
            self._held.difference_update(folders)


class LmdbStore:
    """A ``CommittedStore``: one environment, which stays open until ``end``."""

    def __init__(self, folder: Path, *, sync: bool) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._snapshots: weakref.WeakSet[_Snapshot] = weakref.WeakSet()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for each in (folder.parent, folder):
                check_made_here(each, _PATH)
            # the folder belongs to another user, who grants access to it
            with contextlib.suppress(PermissionError):
                folder.chmod(0o700)
            self._environment = lmdb.open(
                str(folder), map_size=_MAP_BYTES, max_dbs=3, sync=sync, metasync=sync, mode=0o600
            )
            self._fill_up()
            self._values, self._prepared, self._meta = (
                self._environment.open_db(name) for name in (b"values", b"prepared", b"meta")
            )
        except (OSError, lmdb.Error) as error:
            raise _raised(folder, error) from error

    @property
    def location(self) -> str:
        return f"state in {self._folder}"

    def _fill_up(self) -> None:
        """Extend the file to its last page, because reading a missing page would end the process.
        LMDB does not write empty last pages. If the file was truncated, the missing pages become
        zeros, which no valid page is, and LMDB or this module reports the damage."""

        def lacking() -> int:
            wanted = (self._environment.info()["last_pgno"] + 1) * self._environment.stat()["psize"]
            return int(wanted) if file.stat().st_size < wanted else 0

        file = self._folder / "data.mdb"
        if lacking():
            # the lock keeps other processes from growing the file meanwhile
            with self._environment.begin(write=True):
                if size := lacking():
                    os.truncate(file, size)

    def txid(self) -> int:
        with self._reading(self._meta) as reading:
            found = reading.get(_TXID)
        return self._id(found)

    def _id(self, found: bytes | memoryview | None) -> int:
        """Decode a stored checkpoint id."""
        if found is None:
            return 0
        if len(found) != _ID.size:
            raise _damaged(self._folder, f"{shown(bytes(found))} is no id of a checkpoint")
        return int(_ID.unpack(found)[0])

    def _value(self, stored: bytes | memoryview | None) -> bytes | None:
        if stored is None:
            return None
        return bytes(stored[_LENGTH.size + self._key_bytes(stored) :])

    def _key(self, short: bytes, stored: bytes) -> bytes:
        length = self._key_bytes(stored)
        return stored[_LENGTH.size :][:length] if length else short[1:]

    def _key_bytes(self, stored: bytes | memoryview) -> int:
        """The length of the key that precedes a value."""
        length = _LENGTH.unpack_from(stored)[0] if len(stored) >= _LENGTH.size else len(stored)
        if _LENGTH.size + length > len(stored):
            raise _damaged(self._folder, f"{shown(bytes(stored))} is no value")
        return int(length)

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        # without _reading: a bolt reads once per tuple, and the wrapper costs more than the read
        try:
            with self._lock, self._begun(self._values) as reading:
                return [self._value(reading.get(_short(key))) for key in keys]
        except lmdb.Error as error:
            raise _raised(self._folder, error) from error

    def count(self) -> int:
        with self._reading(self._values) as reading:
            return int(reading.stat(self._values)["entries"])

    def part(self, cursor: Any, most: int) -> tuple[list[tuple[bytes, bytes]], Any]:
        found: list[tuple[bytes, bytes]] = []
        with self._reading(self._values) as reading, reading.cursor() as scanning:
            more = scanning.set_range(cursor) if cursor is not None else scanning.first()
            while more and len(found) < most:
                stored = bytes(scanning.value())
                found.append((self._key(bytes(scanning.key()), stored), stored))
                more = scanning.next()
            after = bytes(scanning.key()) if more else None
        return [(key, self._value(stored) or b"") for key, stored in found], after

    frozen = True

    def scan(self) -> Iterator[tuple[bytes, bytes]]:
        """Read part by part, so that no LMDB transaction stays open while the caller works."""
        cursor, more = None, True
        while more:
            entries, cursor = self.part(cursor, _SCAN_BATCH)
            yield from entries
            more = cursor is not None

    def snapshot(self) -> tuple[int, Iterator[tuple[bytes, bytes]]]:
        with self._lock:
            try:
                reading = self._begun(self._values)
                found = reading.get(_TXID, db=self._meta)
                snapshot = _Snapshot(self, reading)
            except lmdb.Error as error:
                raise _raised(self._folder, error) from error
            self._snapshots.add(snapshot)
        return self._id(found), snapshot

    def prepare(self, txid: int, changes: Changes) -> None:
        def write(writing: lmdb.Transaction) -> None:
            self._drop_prepared(writing, txid)
            number = _ID.pack(txid)
            for key, value in changes.items():
                marked = _DELETED + _stored(key, b"") if value is None else _PUT + _stored(key, value)
                writing.put(number + _short(key), marked, db=self._prepared)
            writing.put(_READY + number, b"", db=self._meta)

        self._write(write)

    def commit(self, txid: int) -> None:
        def write(writing: lmdb.Transaction) -> None:
            done = writing.get(_TXID, db=self._meta)
            if self._id(done) >= txid:
                return
            number = _ID.pack(txid)
            if writing.get(_READY + number, db=self._meta) is None:
                raise CorruptStateError(f"{self._folder} has nothing prepared as checkpoint {txid}: was it restored?")
            for prepared, marked in _range(writing, self._prepared, number):
                short, stored = prepared[_ID.size :], bytes(marked[1:])
                if marked[:1] == _PUT:
                    writing.put(short, stored, db=self._values)
                elif marked[:1] == _DELETED:
                    writing.delete(short, db=self._values)
                else:
                    raise _damaged(self._folder, f"{shown(bytes(marked))} is no change")
            writing.put(_TXID, number, db=self._meta)
            self._drop_prepared(writing, txid)

        self._write(write)

    def discard(self, upto: int | None) -> None:
        self._write(lambda writing: self._drop_prepared(writing, upto))

    def write(self, changes: Changes, txid: int | None) -> None:
        def write(writing: lmdb.Transaction) -> None:
            for key, value in changes.items():
                if value is None:
                    writing.delete(_short(key), db=self._values)
                else:
                    writing.put(_short(key), _stored(key, value), db=self._values)
            if txid is not None:
                writing.put(_TXID, _ID.pack(txid), db=self._meta)

        self._write(write)

    def close(self) -> None:
        """Keep the environment open: the next state of this namespace uses it."""

    def end(self) -> None:
        self._environment.close()

    def _drop_prepared(self, writing: lmdb.Transaction, upto: int | None) -> None:
        for each, _ in list(_range(writing, self._meta, _READY)):
            number = each[len(_READY) :]
            if upto is None or self._id(number) <= upto:
                for key, _ in list(_range(writing, self._prepared, number)):
                    writing.delete(key, db=self._prepared)
                writing.delete(each, db=self._meta)

    def _make_room(self, size: int) -> None:
        """Resize the map: to ``size`` bytes, or for 0 to the size that another process has set.
        This requires that no transaction of this process is open, so snapshots are read to their
        ends first."""
        with self._lock:
            for each in list(self._snapshots):
                each.finish()
            self._environment.set_mapsize(size)

    @contextmanager
    def _reading(self, database: Any) -> Iterator[Any]:
        try:
            with self._lock, self._begun(database) as reading:
                yield reading
        except lmdb.Error as error:
            raise _raised(self._folder, error) from error

    def _begun(self, database: Any) -> lmdb.Transaction:
        while True:
            try:
                return self._environment.begin(db=database)
            except lmdb.MapResizedError:
                self._make_room(0)  # another process has enlarged the map

    def _write(self, change: Callable[[lmdb.Transaction], None]) -> None:
        while True:
            try:
                with self._environment.begin(write=True) as writing:
                    change(writing)
                return
            except lmdb.MapFullError:
                self._make_room(2 * self._environment.info()["map_size"])
            except lmdb.MapResizedError:
                self._make_room(0)
            except lmdb.Error as error:
                raise _raised(self._folder, error) from error


class _Snapshot(Iterator[tuple[bytes, bytes]]):
    """All entries at one moment, in one read transaction. It lasts until the iterator ends or is
    garbage-collected, or until the map has to grow; then the rest is read into memory immediately.
    """

    def __init__(self, store: LmdbStore, reading: lmdb.Transaction) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._reading: lmdb.Transaction | None = reading
        self._left: Iterator[Any] = reading.cursor().iternext()

    def __next__(self) -> tuple[bytes, bytes]:
        with self._lock:
            try:
                short, stored = next(self._left)
            except StopIteration:
                self._end()
                raise
            except lmdb.Error as error:
                raise _raised(self._store._folder, error) from error
        return self._store._key(short, stored), self._store._value(stored) or b""

    def finish(self) -> None:
        with self._lock:
            if self._reading is not None:
                self._left = iter(list(self._left))
                self._end()

    def _end(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.abort()


def _folder(settings: LmdbSettings, namespace: str) -> Path:
    return _path(settings).absolute() / namespace


def _path(settings: LmdbSettings) -> Path:
    return local_path(settings.path, f"{_PATH}:")


def _range(reading: lmdb.Transaction, database: Any, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    with reading.cursor(database) as cursor:
        found = cursor.set_range(prefix)
        while found and (key := bytes(cursor.key())).startswith(prefix):
            yield key, bytes(cursor.value())
            found = cursor.next()


def _short(key: bytes) -> bytes:
    """The stored key: the key itself, or its digest when the key is too long."""
    return b"k" + key if len(key) < _KEY_BYTES_MAX else b"d" + hashlib.sha256(key).digest()


def _stored(key: bytes, value: bytes) -> bytes:
    """The stored value: preceded by its key when only the key's digest is stored."""
    if len(key) < _KEY_BYTES_MAX:
        return _NO_KEY + value
    return _LENGTH.pack(len(key)) + key + value


def _raised(folder: Path, error: Exception) -> RetryableError | CorruptStateError:
    """Convert an LMDB error into Ratchet's error class for its recovery."""
    if isinstance(error, _DAMAGED):
        return _damaged(folder, str(error))
    return RetryableError(f"state in {folder}: {error}")


def _damaged(folder: Path, what: str) -> CorruptStateError:
    return CorruptStateError(
        f"state in {folder}: {what}; the files are damaged, or another program has written them: restore the folder, or a "
        "snapshot (ratchet state restore)"
    )
