"""How much a consumer fetches at a time, and how long it may be silent.

A consumer hands out nothing of a response before all of it has come and is decompressed. So a slow
link, or batches that become a thousand times larger, look like silence. After a silence the next
consumer fetches less at a time, down to single batches, and may be silent for longer. So a
partition is read in the end, whatever its records are, while an attempt that waits for a dead
leader fails soon.

Batches that become much larger take memory before anybody sees their size. When a consumer has seen
such a batch, the next one is narrow: it fetches one partition at a time, and one batch, and fetches
the next when that was taken. So the memory does not grow with the number of such batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

#: A silence makes fetches so many times smaller, and so many silences in a row at most.
_SMALLER, _SMALLEST = 16, 16**4
#: Patience grows from one silence to the next, up to librdkafka's own timeout of a request.
_PATIENCE_MAX = 6
#: A consumer that holds so much more than it was allowed to fetch ahead, or hands out so much in
#: one piece, has seen a batch that became much larger.
EXPANDED_BYTES = 128 << 20
LARGE_BYTES = 32 << 20
#: Small fetches cost throughput: after this time without silence or large batches, they are large
#: again.
_LARGE_AGAIN_S = 60.0
#: librdkafka knows this setting by two names.
_FETCH_BYTES, _FETCH_BYTES_TOO = "max.partition.fetch.bytes", "fetch.message.max.bytes"
_AHEAD_KBYTES = "queued.max.messages.kbytes"


class FetchPace:
    """The pace of one session. ``is_stale``: a consumer that was made before is to be replaced.
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
        """The settings of a consumer at this pace, which has so many queues."""
        self.is_stale = False
        self._ahead_max = int(conf.get(_AHEAD_KBYTES, 0)) * 1024 * queues
        if self._divisor == 1:
            return dict(conf)
        size = int(conf.get(_FETCH_BYTES_TOO, conf[_FETCH_BYTES])) // self._divisor
        slow = {**{name: value for name, value in conf.items() if name != _FETCH_BYTES_TOO}, _FETCH_BYTES: max(size, 1)}
        return {**slow, _FETCH_BYTES: 1, _AHEAD_KBYTES: 1} if self.is_narrow else slow

    def has_seen(self, *, piece: int, ahead: int) -> None:
        """A consumer has handed out so many bytes in one piece, and holds so many that it has
        fetched ahead."""
        if piece > LARGE_BYTES or ahead > self._ahead_max + EXPANDED_BYTES:
            self.is_stale = self.is_stale or not self.is_narrow
            self._divisor, self.patience = _SMALLEST, _PATIENCE_MAX
            self._silent_at = self._clock()

    def was_silent(self) -> None:
        """A read has failed because a partition was silent."""
        self._divisor = min(self._divisor * _SMALLER, _SMALLEST)
        self.patience = min(self.patience * 2, _PATIENCE_MAX)
        self._silent_at = self._clock()
        self.is_stale = True

    def went_well(self) -> None:
        """A read is complete."""
        if self._divisor > 1 and self._clock() - self._silent_at > _LARGE_AGAIN_S:
            self._divisor = self.patience = 1
            self.is_stale = True
