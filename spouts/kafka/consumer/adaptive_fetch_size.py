"""The pace of a consumer: how much it fetches in one request, and how long it may be silent.

A consumer returns no part of a response before the whole response has arrived and is decompressed.
So a slow link, or batches that become a thousand times larger, look like silence. After a silence,
and after a read that took too long because a quota throttled it,
the next consumer fetches less per request, down to single batches, and may be silent for longer. So
any partition is read in the end, while an attempt that waits for a dead leader still fails soon.

Batches that become much larger take memory before their size is known. After such a batch, the next
consumer is narrow: it fetches one partition at a time, and one batch, and fetches the next batch
when that one was taken. So the memory does not grow with the number of such batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

#: The factor by which a silence makes fetches smaller, and the limit of that factor.
_SMALLER, _SMALLEST = 16, 16**4
#: The limit to which patience grows from one silence to the next: librdkafka's own timeout of a
#: request.
_PATIENCE_MAX = 6
#: A consumer that holds this much more than its fetch-ahead limit, or returns this much in one
#: piece, has received a batch that became much larger.
EXPANDED_BYTES = 128 << 20
LARGE_BYTES = 32 << 20
#: Small fetches cost throughput: after this time without silence or large batches, fetches are
#: large again.
_LARGE_AGAIN_S = 60.0
#: librdkafka accepts two names for this setting.
_FETCH_BYTES, _FETCH_BYTES_TOO = "max.partition.fetch.bytes", "fetch.message.max.bytes"
_AHEAD_KBYTES = "queued.max.messages.kbytes"


class FetchPace:
    """The pace of one session. ``is_stale``: a consumer that was made earlier must be replaced.
    ``is_narrow``: read one partition after the other."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._divisor = 1
        self._silent_at = 0.0
        self.patience = 1
        self.is_stale = False
        self._ahead_max = 0

    @property
    def is_narrow(self) -> bool:
        return self._divisor == _SMALLEST

    def settings(self, conf: Mapping[str, Any], queues: int = 1) -> dict[str, Any]:
        """The settings of a consumer with this number of queues, at this pace."""
        self.is_stale = False
        self._ahead_max = int(conf.get(_AHEAD_KBYTES, 0)) * 1024 * queues
        if self._divisor == 1:
            return dict(conf)
        size = int(conf.get(_FETCH_BYTES_TOO, conf[_FETCH_BYTES])) // self._divisor
        slow = {**{name: value for name, value in conf.items() if name != _FETCH_BYTES_TOO}, _FETCH_BYTES: max(size, 1)}
        return {**slow, _FETCH_BYTES: 1, _AHEAD_KBYTES: 1} if self.is_narrow else slow

    def has_seen(self, *, piece: int, ahead: int) -> None:
        """Note how many bytes a consumer has returned in one piece, and how many it holds in its
        queues."""
        if piece > LARGE_BYTES or ahead > self._ahead_max + EXPANDED_BYTES:
            self.is_stale = self.is_stale or not self.is_narrow
            self._divisor, self.patience = _SMALLEST, _PATIENCE_MAX
            self._silent_at = self._clock()

    def was_silent(self) -> None:
        """Note that a read has failed because a partition was silent."""
        self._divisor = min(self._divisor * _SMALLER, _SMALLEST)
        self.patience = min(self.patience * 2, _PATIENCE_MAX)
        self._silent_at = self._clock()
        self.is_stale = True

    def was_throttled(self) -> None:
        """Note that a read was ended while a quota throttled it. A broker returns nothing of a
        fetch that exceeds the quota, so the next consumer requests less."""
        self._divisor = max(self._divisor, _SMALLER)
        self._silent_at = self._clock()
        self.is_stale = True

    def went_well(self) -> None:
        """Note that a read is complete."""
        if self._divisor > 1 and self._clock() - self._silent_at > _LARGE_AGAIN_S:
            self._divisor = self.patience = 1
            self.is_stale = True
