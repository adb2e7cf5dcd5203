"""A key-value state in layers: what is committed, in a store; above it what is prepared; above that
what has changed since.

Stores keep bytes and know nothing of types. Changes stay here until they are prepared, so a
checkpoint costs in proportion to what has changed, whatever the size of the state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from framework.errors import CorruptStateError, InvariantViolation
from framework.state.serialization import MsgpackSerializer, Serializer, TimedSerializer
from framework.topology.canonical_form import key_form
from framework.topology.stateful import KeyValueState, StateSize

#: Changes to a state: key -> value, None for a deleted key.
Changes = Mapping[bytes, bytes | None]
#: How many entries ``load`` writes at once.
LOAD_BATCH = 50_000
#: So many bytes of a damaged key are shown.
_SHOWN = 60
_NOWHERE = object()


class CommittedStore(Protocol):
    """The lowest layer of one namespace.

    Invariants: ``commit`` takes effect once for each id, whoever calls it and however often. A
    commit of an id that is not higher than the last one changes nothing. A crash in ``prepare`` or
    ``discard`` leaves what is committed as it was. After a crash in ``commit``, the same commit
    completes it.
    """

    @property
    def location(self) -> str:
        """Where it is, for messages."""

    def txid(self) -> int:
        """The last committed checkpoint; 0 for none."""

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]: ...

    def count(self) -> int:
        """How many keys there are, without looking at all of them."""

    def scan(self) -> Iterator[tuple[bytes, bytes]]:
        """All entries. It does not block others, so what is committed meanwhile may be seen."""

    #: Whether what ``snapshot`` returns stays as it is.
    frozen: bool

    def snapshot(self) -> tuple[int, Iterator[tuple[bytes, bytes]]]:
        """The last committed checkpoint, and all entries that it holds."""

    def part(self, cursor: Any, most: int) -> tuple[list[tuple[bytes, bytes]], Any]:
        """About ``most`` entries, and the cursor for those that follow. A cursor of None begins; a
        returned None says that there are no more."""

    def prepare(self, txid: int, changes: Changes) -> None:
        """Save changes for ``commit``, in place of what was prepared under this id before. Forget
        what was prepared under lower ids."""

    def commit(self, txid: int) -> None:
        """Commit what is prepared. Raises ``CorruptStateError`` when ``txid`` is higher than the
        last id and nothing is prepared under it."""

    def discard(self, upto: int | None) -> None:
        """Forget what is prepared under ids up to ``upto``; None for all."""

    def write(self, changes: Changes, txid: int | None) -> None:
        """Change what is committed, in as many steps as it takes, and then set the id; None leaves
        it."""

    def close(self) -> None: ...


class LayeredState(KeyValueState[Any, Any]):
    """Keys that are equal are one key, whatever their types (C29): they are stored in the form of
    ``key_form``. Earlier versions stored them as they came, so a key that has another form is also
    looked for as it is; it is stored in its form when it is put.

    ``cached_max``: how many entries that were read from the store are kept here, for stores that
    are far away."""

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
        """From here on, take values as pairs: the time that each was put, and the value."""
        if not isinstance(self._values, MsgpackSerializer):
            self._values = TimedSerializer(self._values)

    def keep_nothing(self) -> None:
        """Cache nothing, because others write to the store: read again what was read."""
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
            self._cached.clear()  # another object has prepared it, and only that one knows what has changed
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
        """How a key is stored, and how earlier versions stored it; None where that is the same."""
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
        """A value. ``encoded``: its key."""
        try:
            return self._values.loads(value)
        except CorruptStateError as error:
            raise self._damaged(encoded, error) from error

    def _damaged(self, encoded: bytes, error: CorruptStateError) -> CorruptStateError:
        return CorruptStateError(
            f"{self._store.location}, key {encoded[:_SHOWN]!r}: {error}; restore the data of the store, or a snapshot (ratchet "
            "state restore)"
        )

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
        """The value of a key as the layers above the store have it; None for a deleted key, and
        ``_NOWHERE`` for one that only the store may have."""
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
