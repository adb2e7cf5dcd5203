"""A map whose entries expire unless they are put again in time. Source: *Acking framework
implementation*."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from framework.errors import ConfigError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

BUCKETS_MIN = 2


class RotatingMap(Generic[K, V]):
    """Entries in ``buckets`` cohorts; the entries of a cohort expire together. ``put`` moves an
    entry to the youngest cohort; ``rotate`` expires the oldest cohort, and ages every other. An
    entry that is not put again expires at the ``buckets``-th rotation after its last ``put``. So an
    entry lives for more than ``buckets - 1`` and at most ``buckets`` intervals between rotations.

    ``put``, ``get``, ``remove`` and ``contains`` take time in proportion to the number of buckets;
    ``rotate`` to the number of expired entries. Not thread-safe. Raises ``ConfigError`` for fewer
    than two buckets.

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
        self._count = buckets
        self._buckets: list[dict[K, V]] = [{} for _ in range(buckets)]  # the youngest first

    def put(self, key: K, value: V) -> None:
        """Store an entry in the youngest cohort, and remove it from any other."""
        youngest, *older = self._buckets
        for bucket in older:
            bucket.pop(key, None)
        youngest[key] = value

    def get(self, key: K, default: V | None = None) -> V | None:
        """The value of a key. Its age does not change."""
        for bucket in self._buckets:
            if key in bucket:
                return bucket[key]
        return default

    def remove(self, key: K) -> V | None:
        """Remove an entry without the callback. Returns its value, None when it was not there."""
        for bucket in self._buckets:
            if key in bucket:
                return bucket.pop(key)
        return None

    def contains(self, key: K) -> bool:
        return key in self

    def rotate(self) -> dict[K, V]:
        """Expire the oldest cohort and return its entries. They are removed from the map before
        ``on_expire`` is called for each. If a callback raises, the map stays rotated, and the
        remaining callbacks are skipped."""
        self.age()
        return self.expire()

    def age(self) -> None:
        """First half of a rotation: age every cohort, and begin a new youngest one. Entries that
        are put or removed before ``expire`` do not expire."""
        self._buckets.insert(0, {})

    def expire(self) -> dict[K, V]:
        """Second half of a rotation: expire the oldest cohort, as ``rotate`` does."""
        dead: dict[K, V] = {}
        while len(self._buckets) > self._count:
            dead.update(self._buckets.pop())
        if self._on_expire is not None:
            for key, value in dead.items():
                self._on_expire(key, value)
        return dead

    def __contains__(self, key: object) -> bool:
        for bucket in self._buckets:  # noqa: SIM110 - called for every tuple, and any() costs three times as much
            if key in bucket:
                return True
        return False

    def __len__(self) -> int:
        return sum(map(len, self._buckets))

    def __iter__(self) -> Iterator[K]:
        """The keys, the youngest cohort first."""
        for bucket in self._buckets:
            yield from bucket
