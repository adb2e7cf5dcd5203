"""A key-value state in three layers: committed entries in a store, prepared changes above them, and
later changes on top.

Stores keep bytes and know no types. Changes stay in memory until they are prepared, so the cost of
a checkpoint grows with the changes, not with the size of the state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from framework.errors import CorruptStateError, InvariantViolation
from framework.state.corrupt_entries import RESTORE, shown
from framework.state.serialization import MsgpackSerializer, Serializer, TimedSerializer
from framework.topology.canonical_form import key_form
from framework.topology.stateful import KeyValueState, StateSize

#: Changes to a state: key -> value, None for a deleted key.
Changes = Mapping[bytes, bytes | None]
#: How many entries ``load`` writes at once.
LOAD_BATCH = 50_000
_NOWHERE = object()


class CommittedStore(Protocol):
    """The lowest layer of one namespace.

    Invariants: ``commit`` takes effect once per id, whichever process calls it and however often. A
    commit of an id that is not above the last one changes nothing. A crash in ``prepare`` or
    ``discard`` leaves committed entries as they were. After a crash in ``commit``, the same commit
    completes it.
    """

    @property
    def location(self) -> str:
        """The place of the store, for messages."""

    def txid(self) -> int:
        """The last committed checkpoint; 0 for none."""

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]: ...

    def count(self) -> int:
        """The number of keys, found without a scan."""

    def scan(self) -> Iterator[tuple[bytes, bytes]]:
        """All entries. The scan blocks no writer, so it may return entries that are committed
        meanwhile."""

    #: Whether the result of ``snapshot`` is unaffected by later commits.
    frozen: bool

    def snapshot(self) -> tuple[int, Iterator[tuple[bytes, bytes]]]:
        """The last committed checkpoint, and all entries of it."""

    def part(self, cursor: Any, most: int) -> tuple[list[tuple[bytes, bytes]], Any]:
        """About ``most`` entries, and the cursor for the entries after them. Start with the cursor
        None; a returned None marks the end."""

    def prepare(self, txid: int, changes: Changes) -> None:
        """Save changes for ``commit``. They replace those prepared under the same id before;
        changes prepared under lower ids are discarded."""

    def commit(self, txid: int) -> None:
        """Commit the prepared changes. Raises ``CorruptStateError`` when ``txid`` is above the last
        id and nothing is prepared under it."""

    def discard(self, upto: int | None) -> None:
        """Discard changes prepared under ids up to ``upto``; None for all."""

    def write(self, changes: Changes, txid: int | None) -> None:
        """Write committed entries directly, in as many steps as needed, then set the id; None keeps
        the id."""

    def close(self) -> None: ...


class LayeredState(KeyValueState[Any, Any]):
    """A key-value state over a ``CommittedStore``.

    Equal keys are one key, whatever their types (C29): they are stored in the form that
    ``key_form`` makes. Earlier versions stored keys unchanged, so a key whose form differs is also
    looked up unchanged; the next put stores it in its form.

    ``cached_max``: how many entries read from the store are cached in memory, for remote stores."""

    def __init__(self, store: CommittedStore, keys: Serializer, values: Serializer, cached_max: int = 0) -> None:
        self._store = store
        self._keys = keys
        self._values = values
        self._changes: dict[bytes, bytes | None] = {}
        self._prepared: dict[bytes, bytes | None] = {}
        self._prepared_txid: int | None = None
        self._cached: OrderedDict[bytes, bytes | None] = OrderedDict()
        self._cached_max = cached_max
        self._swept: Any = None
        self._written = (0, 0)  # keys and bytes that the last checkpoint changed

    def keep_times(self) -> None:
        """From now on, take values as pairs of the put time and the value."""
        if not isinstance(self._values, MsgpackSerializer):
            self._values = TimedSerializer(self._values)

    def keep_nothing(self) -> None:
        """Disable the cache, because other processes write to the store."""
        self._cached_max = 0

    @property
    def txid(self) -> int:
        return self._store.txid()

    @property
    def size(self) -> StateSize:
        return StateSize(self._store.count(), *self._written)

    def get(self, key: Any, default: Any = None) -> Any:
        encoded, before = self._encoded(key)
        found = self._above(encoded)
        if found is _NOWHERE:
            found = self._read([encoded])[0]
        if found is None and before is not None:
            found = self._found([before])[before]
        return default if found is None else self._loaded(found, encoded)

    def multi_get(self, keys: Sequence[Any]) -> list[Any]:
        encoded = [self._encoded(key) for key in keys]
        found = self._found(_all(encoded))
        values = [
            found[each] if found[each] is not None or before is None else found[before] for each, before in encoded
        ]
        return [
            None if value is None else self._loaded(value, each)
            for value, (each, _) in zip(values, encoded, strict=True)
        ]

    @property
    def reads_ahead(self) -> bool:  # type: ignore[override]
        return self._cached_max > 0

    def read_ahead(self, keys: Iterable[Any]) -> None:
        self._found(list(dict.fromkeys(_all(map(self._encoded, keys)))))

    def put(self, key: Any, value: Any) -> None:
        encoded, before = self._encoded(key)
        self._changes[encoded] = self._values.dumps(value)
        self._forget_as_before(before)

    def delete(self, key: Any) -> None:
        encoded, before = self._encoded(key)
        self._changes[encoded] = None
        self._forget_as_before(before)

    def items(self) -> Iterator[tuple[Any, Any]]:
        above = {**self._prepared, **self._changes}
        for key, value in self._store.scan():
            if key not in above:
                yield self._loaded_key(key), self._loaded(value, key)
        for key, changed in above.items():
            if changed is not None:
                yield self._loaded_key(key), self._loaded(changed, key)

    def prepare_commit(self, txid: int) -> None:
        if self._prepared_txid not in (None, txid):
            raise InvariantViolation(
                f"cannot prepare checkpoint {txid}: checkpoint {self._prepared_txid} is still undecided"
            )
        prepared = {**self._prepared, **self._changes}
        self._store.prepare(txid, prepared)
        self._prepared, self._prepared_txid = prepared, txid
        self._changes = {}

    def commit(self, txid: int | None = None) -> None:
        if txid is None:
            changes = {**self._prepared, **self._changes}
            self._store.write(changes, None)
            self._store.discard(self._prepared_txid)
            self._settle(changes)
            self._changes = {}
            return
        if self._prepared_txid not in (None, txid):
            raise InvariantViolation(f"checkpoint {txid} is to be committed, and {self._prepared_txid} is prepared")
        self._store.commit(txid)
        if self._prepared_txid is None:
            # another object prepared it, and only that object knows the changes
            self._cached.clear()
        self._written = len(self._prepared), sum(len(key) + len(value or b"") for key, value in self._prepared.items())
        self._settle(self._prepared)

    def recover(self, txid: int, *, prepared: bool, upto: int) -> None:
        if prepared:
            self.commit(txid)
        self._forget(upto)

    def rollback(self) -> None:
        self._forget(None)

    def _forget(self, upto: int | None) -> None:
        self._store.discard(upto)
        self._changes, self._prepared, self._prepared_txid = {}, {}, None
        self._cached.clear()

    def sweep(self, unwanted: Callable[[Any], bool], most: int) -> None:
        entries, self._swept = self._store.part(self._swept, most)
        for key, value in entries:
            above = self._changes.get(key, self._prepared.get(key, value))
            if above is not None and unwanted(self._loaded(above, key)):
                self._changes[key] = None

    @property
    def frozen(self) -> bool:  # type: ignore[override]
        return self._store.frozen

    def committed_items(self) -> tuple[int, Iterator[tuple[Any, Any]]]:
        txid, scanned = self._store.snapshot()
        return txid, ((self._loaded_key(key), self._loaded(value, key)) for key, value in scanned)

    def load(self, items: Iterable[tuple[Any, Any]], txid: int) -> None:
        batch: dict[bytes, bytes | None] = {}
        for key, value in items:
            batch[self._encoded(key)[0]] = self._values.dumps(value)
            if len(batch) >= LOAD_BATCH:
                self._store.write(batch, None)
                batch = {}
        self._store.write(batch, txid)
        self._cached.clear()

    def close(self) -> None:
        self._store.close()

    def _encoded(self, key: Any) -> tuple[bytes, bytes | None]:
        """The stored form of a key, and its form in earlier versions; None when both are the
        same."""
        form = key_form(key)
        encoded = self._keys.dumps(form)
        before = None if form is key else self._keys.dumps(key)
        return encoded, None if before == encoded else before

    def _loaded_key(self, encoded: bytes) -> Any:
        try:
            return self._keys.loads(encoded)
        except CorruptStateError as error:
            raise self._damaged(encoded, error) from error

    def _loaded(self, value: bytes, encoded: bytes) -> Any:
        """Decode a value. ``encoded``: its key, for errors."""
        try:
            return self._values.loads(value)
        except CorruptStateError as error:
            raise self._damaged(encoded, error) from error

    def _damaged(self, encoded: bytes, error: CorruptStateError) -> CorruptStateError:
        return CorruptStateError(f"{self._store.location}, key {shown(encoded)}: {error}; {RESTORE}")

    def _forget_as_before(self, before: bytes | None) -> None:
        if before is not None and self._found([before])[before] is not None:
            self._changes[before] = None

    def _found(self, keys: Sequence[bytes]) -> dict[bytes, bytes | None]:
        found = {key: self._above(key) for key in keys}
        missing = [key for key, value in found.items() if value is _NOWHERE]
        if missing:
            found.update(zip(missing, self._read(missing), strict=True))
        return found

    def _above(self, key: bytes) -> Any:
        """Look up a key in the layers above the store. None for a deleted key, ``_NOWHERE`` for a
        key that only the store may have."""
        for layer in (self._changes, self._prepared, self._cached):
            if key in layer:
                return layer[key]
        return _NOWHERE

    def _read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        values = self._store.get(keys)
        if self._cached_max:
            self._remember(dict(zip(keys, values, strict=True)))
        return values

    def _settle(self, changes: Changes) -> None:
        self._remember(changes)
        self._prepared, self._prepared_txid = {}, None

    def _remember(self, entries: Changes) -> None:
        if not self._cached_max:
            return
        for key, value in entries.items():
            self._cached[key] = value
            self._cached.move_to_end(key)
        while len(self._cached) > self._cached_max:
            self._cached.popitem(last=False)


def _all(encoded: Iterable[tuple[bytes, bytes | None]]) -> list[bytes]:
    return [each for both in encoded for each in both if each is not None]
