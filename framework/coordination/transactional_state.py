"""Transactional state, and its rotation over txids, on any store.

Source: ``org.apache.storm.transactional.state.TransactionalState`` and
``RotatingTransactionalState``. Departures: values are JSON documents with a format version, and
several changes can be made in one atomic step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from framework.coordination.store import Change, Delete, Put
from framework.errors import ConfigError, CorruptStateError, InvariantViolation

#: The versions of a document's format. The second has plans in packed form (ADR 44). A document
#: without a packed plan is still written in the first, which earlier releases can read.
PLAIN, PACKED = 1, 2
FORMAT = PACKED  # the newest
#: ZooKeeper refuses requests above 1 MiB by default. A document must leave room for others in the
#: same multi.
DOCUMENT_BYTES_MAX = 900_000
#: The deepest nesting of lists and objects in a document, because readers recurse into it.
DEPTH_MAX = 64


class StateAccess(Protocol):
    """The operations that a state needs from the store or from the state on which it is built."""

    def get(self, path: str) -> bytes | None: ...
    def children(self, path: str) -> list[str]: ...
    def apply(self, changes: Sequence[Change]) -> None: ...


class TransactionalState:
    """JSON documents below one path. ``apply`` applies the changes: the method of a leadership, or
    by default that of ``access``.

    >>> from framework.coordination.store import MemoryStore
    >>> state = TransactionalState(MemoryStore(), "global-count")
    >>> state.get_data("coordinator/currtx") is None
    True
    >>> with state.atomically():
    ...     state.set_data("coordinator/currtx", 2)
    ...     state.set_data("coordinator/attempts", {"2": 1})
    >>> state.get_data("coordinator/currtx")
    2
    """

    def __init__(
        self, access: StateAccess, path: str = "", apply: Callable[[Sequence[Change]], None] | None = None
    ) -> None:
        self._access = access
        self._path = path.strip("/")
        self._apply = apply if apply is not None else access.apply
        self._staged: list[Change] | None = None

    def get_data(self, path: str) -> Any:
        """The document at ``path``, or None when the node does not exist. Raises
        ``CorruptStateError`` when it cannot be parsed."""
        raw = self.get(path)
        return None if raw is None else decode_document(raw, self._full(path))

    def set_data(self, path: str, value: Any, form: int = PLAIN) -> None:
        self.apply([Put(path, encode_document(value, self._full(path), form))])

    def delete(self, path: str) -> None:
        self.apply([Delete(path)])

    def get(self, path: str) -> bytes | None:
        return self._access.get(self._full(path))

    def children(self, path: str) -> list[str]:
        return self._access.children(self._full(path))

    def apply(self, changes: Sequence[Change]) -> None:
        located = [
            Put(self._full(each.path), each.data) if isinstance(each, Put) else Delete(self._full(each.path))
            for each in changes
        ]
        if self._staged is not None:
            self._staged.extend(located)
        else:
            self._apply(located)

    @contextmanager
    def atomically(self) -> Iterator[None]:
        """Collect the changes made in the block and apply them in one step at its end. Apply none
        when the block raises."""
        if self._staged is not None:
            raise InvariantViolation("atomically() does not nest")
        self._staged = []
        try:
            yield
            staged, self._staged = self._staged, None
            if staged:
                self._apply(_last_of_each(staged))
        finally:
            self._staged = None

    def _full(self, path: str) -> str:
        return f"{self._path}/{path.strip('/')}" if self._path else path.strip("/")


class RotatingTransactionalState:
    """One value per txid. A missing value is made from the previous one; old values can be removed.

    ``strict_order=True``: only the txid right after the newest may be created. Otherwise, creating
    a txid below an existing one stores None: that txid emits nothing. Values are read once and then
    cached, because there is only one writer.

    >>> from framework.coordination.store import MemoryStore
    >>> state = RotatingTransactionalState(MemoryStore(), "meta", strict_order=True)
    >>> state.get_state(1, lambda txid, previous: [txid, previous])
    [1, None]
    >>> state.get_state_or_create(2, lambda txid, previous: [txid, previous]) is None
    True
    >>> state.get_previous_state(2), state.last_state()
    ([1, None], [2, [1, None]])
    """

    def __init__(self, store: StateAccess, path: str, strict_order: bool = False) -> None:
        self._store = store
        self._path = path.strip("/")
        self._strict_order = strict_order
        self._values: dict[int, Any] = {}
        for name in store.children(self._path):
            node = f"{self._path}/{name}"
            if not name.isascii() or not name.isdigit():
                raise CorruptStateError(
                    f"{self._named(node)}: the name is not a txid; remove the node if Ratchet did not make it"
                )
            raw = store.get(node)
            if raw is not None:
                self._values[int(name)] = decode_document(raw, self._named(node))

    def txids(self) -> list[int]:
        """Every txid that has a value, ascending."""
        return sorted(self._values)

    def get_state(self, txid: int, initializer: Callable[[int, Any], Any]) -> Any:
        """The value of ``txid``. When there is none, ``initializer(txid, previous value)`` makes
        it."""
        if txid not in self._values:
            self.override_state(txid, self._initial(txid, initializer))
        return self._values[txid]

    def get_state_or_create(self, txid: int, initializer: Callable[[int, Any], Any]) -> Any:
        """The existing value, or None when this call created it."""
        if txid in self._values:
            return self._values[txid]
        self.get_state(txid, initializer)
        return None

    def get_previous_state(self, txid: int) -> Any:
        """The value of the greatest txid below ``txid``, or None."""
        below = [each for each in self._values if each < txid]
        return self._values[max(below)] if below else None

    def has_cache(self, txid: int) -> bool:
        return txid in self._values

    def override_state(self, txid: int, value: Any, form: int = PLAIN) -> None:
        """Store a value, replacing any that exists."""
        node = f"{self._path}/{txid}"
        self._store.apply([Put(node, encode_document(value, node, form))])
        self._values[txid] = value

    def remove_state(self, txid: int) -> None:
        if txid in self._values:
            self._store.apply([Delete(f"{self._path}/{txid}")])
            del self._values[txid]

    def cleanup_before(self, txid: int) -> None:
        """Remove every value below ``txid``."""
        for each in [each for each in self.txids() if each < txid]:
            self.remove_state(each)

    def last_state(self) -> Any:
        """The value of the greatest txid, or None."""
        return self._values[max(self._values)] if self._values else None

    def _named(self, node: str) -> str:
        """The full path of a node, for messages."""
        return self._store._full(node) if isinstance(self._store, TransactionalState) else node

    def _initial(self, txid: int, initializer: Callable[[int, Any], Any]) -> Any:
        newest = max(self._values, default=None)
        if self._strict_order:
            if newest is None and txid != 1:
                raise InvariantViolation(f"{self._path}: txid {txid} would be the first; the first txid is 1")
            if newest is not None and txid != newest + 1:
                raise InvariantViolation(f"{self._path}: txid {txid} cannot follow {newest}")
        if newest is not None and txid < newest:
            return None
        return initializer(txid, self.get_previous_state(txid))


def encode_document(value: Any, path: str, form: int = PLAIN) -> bytes:
    """Encode a value as a JSON document in this version of the format. Raises ``ConfigError`` when
    it does not fit into a znode."""
    encoded = json.dumps({"format": form, "value": value}, separators=(",", ":"), allow_nan=False).encode()
    if len(encoded) > DOCUMENT_BYTES_MAX:
        raise ConfigError(
            f"{path}: the document has {len(encoded):,} bytes, more than the {DOCUMENT_BYTES_MAX:,} that fit into a znode; "
            "divide the source among several topologies"
        )
    return encoded


def decode_document(raw: bytes, path: str) -> Any:
    """Decode a document. Raises ``CorruptStateError`` naming ``path`` for bytes that are not a
    document or are nested deeper than ``DEPTH_MAX``, and for a newer format version."""
    try:
        document = json.loads(raw, parse_constant=_no_constant)
        if _is_deeper(document, DEPTH_MAX):
            raise ValueError(f"nested more than {DEPTH_MAX} deep")
    except (ValueError, RecursionError) as error:
        raise CorruptStateError(
            f"{path}: {len(raw)} bytes that are not JSON ({error}); restore the node from a backup, or remove the "
            "topology's state if it may start again"
        ) from error
    if not isinstance(document, dict) or "value" not in document or not isinstance(document.get("format"), int):
        raise CorruptStateError(f"{path}: JSON, but not a document of Ratchet; restore the node from a backup")
    if document["format"] > FORMAT:
        raise CorruptStateError(
            f"{path}: format version {document['format']}, and this Ratchet knows up to {FORMAT}; run the newer version"
        )
    return document["value"]


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _is_deeper(value: Any, levels: int) -> bool:
    nested = [value] if isinstance(value, (dict, list)) else []
    for _ in range(levels):
        nested = [
            inner
            for outer in nested
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not nested:
            return False
    return True


def _last_of_each(changes: Sequence[Change]) -> list[Change]:
    """Keep only the last change of each path."""
    last = {each.path: each for each in changes}
    return list(last.values())
