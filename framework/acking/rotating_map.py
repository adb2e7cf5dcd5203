"""A map whose entries die when they are left alone for long enough. Source: *Acking framework implementation*."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from framework.errors import ConfigError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

BUCKETS_MIN = 2


class RotatingMap(Generic[K, V]):
    """Entries in ``buckets`` cohorts that expire together. ``put`` moves an entry to the youngest one; ``rotate`` lets the oldest
    one die and every other grow older. An entry that is not put again dies at the rotation number ``buckets`` after its last
    ``put``, so its life is more than ``buckets - 1`` and at most ``buckets`` intervals between rotations.

    ``put``, ``get``, ``remove`` and ``contains`` take time in proportion to the number of buckets; ``rotate`` to that of the dead.
    Not for several threads. Raises ``ConfigError`` for fewer than two buckets.

    >>> dead = []
    >>> pending = RotatingMap(2, on_expire=lambda key, value: dead.append(key))
    >>> pending.put("a", 1); pending.put("b", 2)
    >>> _ = pending.rotate()
    >>> pending.put("a", 3)
    >>> pending.rotate(), dead, len(pending)
    ({'b': 2}, ['b'], 1)
    """

    def __init__(self, buckets: int = 3, on_expire: Callable[[K, V], object] | None = None) -> None:
        if isinstance(buckets, bool) or not isinstance(buckets, int) or buckets < BUCKETS_MIN:
            raise ConfigError(f"a RotatingMap needs {BUCKETS_MIN} buckets or more, not {buckets!r}")
        self._on_expire = on_expire
        self._buckets: list[dict[K, V]] = [{} for _ in range(buckets)]  # the youngest first

    def put(self, key: K, value: V) -> None:
        """Store it among the youngest, wherever it was."""
        youngest, *older = self._buckets
        for bucket in older:
            bucket.pop(key, None)
        youngest[key] = value

    def get(self, key: K, default: V | None = None) -> V | None:
        """Its value; its age stays as it is."""
        for bucket in self._buckets:
            if key in bucket:
                return bucket[key]
        return default

    def remove(self, key: K) -> V | None:
        """Take it out, without the callback; returns what it was, None when it was not there."""
        for bucket in self._buckets:
            if key in bucket:
                return bucket.pop(key)
        return None

    def contains(self, key: K) -> bool:
        return any(key in bucket for bucket in self._buckets)

    def rotate(self) -> dict[K, V]:
        """Let the oldest cohort die: ``on_expire`` is called for each of its entries, which are gone from the map by then.
        Returns them. What the callback raises leaves the map rotated, and the callbacks after it are not made."""
        dead = self._buckets.pop()
        self._buckets.insert(0, {})
        if self._on_expire is not None:
            for key, value in dead.items():
                self._on_expire(key, value)
        return dead

    def __contains__(self, key: object) -> bool:
        return any(key in bucket for bucket in self._buckets)

    def __len__(self) -> int:
        return sum(map(len, self._buckets))

    def __iter__(self) -> Iterator[K]:
        """The keys, the youngest cohort first."""
        for bucket in self._buckets:
            yield from bucket
