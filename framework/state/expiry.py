"""State that expires: a value disappears when it has not been put for ``ttl_s``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from framework.errors import CorruptStateError
from framework.state.corrupt_entries import RESTORE, shown
from framework.topology.stateful import KeyValueState, StateSize

#: The put time of a value that never expires: in seconds since 1970, later than any clock shows.
FOR_EVER = 1e15
#: How many entries are checked for expiry per checkpoint. The next checkpoint continues after them.
SWEEP_MAX = 20_000


def kept(value: Any, put_at: float | None, ttl_s: float | None) -> Any:
    """The stored form of a value: with the time when it was put, or the plain value if values live
    for ever (``ttl_s`` None or 0). ``put_at``: seconds since 1970; None: the time is unknown, use
    the present."""
    if not ttl_s:
        return value
    return (time.time() if put_at is None else put_at), value


def fresh(items: Iterable[tuple[Any, Any]], ttl_s: float | None, now: float) -> Iterator[tuple[Any, Any, float | None]]:
    """Convert stored items to keys, values and put times (None if values do not expire). Expired
    items are left out."""
    for key, each in items:
        if not ttl_s:
            yield key, each, None
            continue
        put_at, value = _timed(each)
        if put_at >= now - ttl_s:
            yield key, value, put_at


def _timed(kept: Any) -> tuple[float, Any]:
    """The time and the value of a stored value."""
    if isinstance(kept, (tuple, list)) and len(kept) == 2 and type(kept[0]) in (int, float):
        return kept[0], kept[1]
    raise CorruptStateError(
        f"a state holds {shown(kept)}, which has no time: was state_ttl_s set only now? Else {RESTORE}"
    )


class ExpiringState(KeyValueState[Any, Any]):
    """Wraps another state, and stores each value with the time when it was put.

    A value older than ``ttl_s`` is hidden. It is deleted when a checkpoint is prepared; each
    checkpoint checks a part of the state.

    * ``clock``: seconds since 1970.
    * ``expires``: whether the value of a key expires."""

    def __init__(
        self,
        state: KeyValueState[Any, Any],
        ttl_s: float,
        clock: Callable[[], float] = time.time,
        expires: Callable[[Any], bool] = lambda key: True,
    ) -> None:
        self._state = state
        self._ttl_s = ttl_s
        self._clock = clock
        self._expires = expires

    @property
    def txid(self) -> int | None:
        return self._state.txid

    @property
    def size(self) -> StateSize | None:
        """Includes expired keys until they are deleted."""
        return self._state.size

    @property
    def frozen(self) -> bool:  # type: ignore[override]
        return self._state.frozen

    def get(self, key: Any, default: Any = None) -> Any:
        return self._fresh(self._state.get(key), default)

    def multi_get(self, keys: Sequence[Any]) -> list[Any]:
        return [self._fresh(each, None) for each in self._state.multi_get(keys)]

    @property
    def reads_ahead(self) -> bool:  # type: ignore[override]
        return self._state.reads_ahead

    def read_ahead(self, keys: Iterable[Any]) -> None:
        self._state.read_ahead(keys)

    def put(self, key: Any, value: Any) -> None:
        self._state.put(key, (self._clock() if self._expires(key) else FOR_EVER, value))

    def delete(self, key: Any) -> None:
        self._state.delete(key)

    def items(self) -> Iterator[tuple[Any, Any]]:
        return ((key, value) for key, value, _ in fresh(self._state.items(), self._ttl_s, self._clock()))

    def committed_items(self) -> tuple[int, Iterator[tuple[Any, Any]]]:
        txid, entries = self.committed_entries()
        return txid, ((key, value) for key, value, _ in entries)

    def committed_entries(self) -> tuple[int, Iterator[tuple[Any, Any, float | None]]]:
        """The last committed checkpoint, and its keys, values, and put times."""
        txid, items = self._state.committed_items()
        return txid, fresh(items, self._ttl_s, self._clock())

    def prepare_commit(self, txid: int) -> None:
        oldest = self._clock() - self._ttl_s
        self._state.sweep(lambda kept: _timed(kept)[0] < oldest, SWEEP_MAX)
        self._state.prepare_commit(txid)

    def commit(self, txid: int | None = None) -> None:
        self._state.commit(txid)

    def rollback(self) -> None:
        self._state.rollback()

    def recover(self, txid: int, *, prepared: bool, upto: int) -> None:
        self._state.recover(txid, prepared=prepared, upto=upto)

    def close(self) -> None:
        self._state.close()

    def _fresh(self, kept: Any, default: Any) -> Any:
        if kept is None:
            return default
        put_at, value = _timed(kept)
        return value if put_at >= self._clock() - self._ttl_s else default
