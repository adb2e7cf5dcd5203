"""A cache of the clients that a process keeps between batches."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

#: A client without use for this long is forgotten. The next use makes a new client, which takes a
#: few requests.
IDLE_S = 60.0
T = TypeVar("T")


class ClientCache(Generic[T]):
    """The clients of this process that are in use, or were used in the last minute, by key.

    A client takes memory, threads and connections, and a process may serve many topologies over its
    life. So each use of the cache forgets idle clients, which then end. It never forgets a client
    that a caller holds, so there is at most one client for each key.

    After a fork, the child starts without clients, because their threads exist only in the
    parent."""

    def __init__(self) -> None:
        self._start()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The client of this key, which ``make`` creates if there is none."""
        if self._process != os.getpid():
            self._start()
        with self._lock:
            now = time.monotonic()
            found = self._alive.get(key)
            if found is None:
                found = self._alive[key] = make()
            self._used.pop(key, None)  # the least recently used is the first
            self._used[key] = now, found
            idle = self._idle(now)
        del idle  # without the lock, because the end of a client may take long
        return found

    def forget(self, key: Hashable) -> None:
        """Let the next use make a new client, also if a caller still holds the present one."""
        with self._lock:
            self._alive.pop(key, None)
            forgotten = self._used.pop(key, None)
        del forgotten

    def clear(self) -> None:
        """As ``forget``, for all keys."""
        for key in list(self._used):
            self.forget(key)
        self._alive.clear()

    def __len__(self) -> int:
        return len(self._used)

    def _idle(self, now: float) -> list[tuple[float, T]]:
        """Take out the clients that were not used for long."""
        idle = []
        while self._used:
            key, (used, _) = next(iter(self._used.items()))
            if now - used < IDLE_S:
                break
            idle.append(self._used.pop(key))
        return idle

    def _start(self) -> None:
        self._used: OrderedDict[Hashable, tuple[float, T]] = OrderedDict()
        self._alive: WeakValueDictionary[Hashable, T] = WeakValueDictionary()
        self._lock = threading.Lock()
        self._process = os.getpid()
