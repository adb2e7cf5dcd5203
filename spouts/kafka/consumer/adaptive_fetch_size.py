"""The pace of a consumer: how much it fetches in one request, and how long it may be silent.

A consumer returns no part of a response before the whole response has arrived and is decompressed.
So a slow link, or batches that become a thousand times larger, look like silence. After a silence,
and after a read that took too long because a quota throttled it, the next consumer fetches less per
request, down to single batches, and may be silent for longer. So every partition is read
eventually, but an attempt that waits for a dead leader still fails soon.

Batches that become much larger take memory before their size is known. So the first consumer
fetches little. A long read, as of a backlog, needs larger fetches, and so does a topic with more
than ``BUSY_BYTES_PER_S``. Then the statistics tell the rate of expansion, and so how much a fetch
may have. When a fetch has become much larger, the next consumer fetches less, down to one batch of
one partition, and holds less. So the memory does not grow with the number of such batches (ADR
129). Seconds later, fetches are as large as the first one, so a producer of such batches slows down
the other partitions only while he writes them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from framework.clients.kafka_stall_detection import NOTHING, REPORT_EVERY_MS, Received, is_silent

#: The bytes of a response to the first consumer.
FIRST_FETCH_BYTES = 8 << 10
#: The target for the decompressed bytes of the fetches of all queues together, and the least and
#: the most for one queue.
FETCHED_BYTES, _FETCHED_MIN, _FETCHED_MAX = 64 << 20, 1 << 20, 8 << 20
#: The bytes of received records that suffice to measure the rate of expansion.
TELLING_BYTES = 256 << 10
#: A consumer is busy after this many reports before the end of a read, or at this rate.
_BUSY_REPORTS, BUSY_BYTES_PER_S = 2, 1 << 20
#: A consumer that holds this much more than its fetch-ahead limit, or returns this much in one
#: piece, has received a batch that became much larger.
EXPANDED_BYTES = 128 << 20
LARGE_BYTES = 32 << 20
#: The factor by which a silence makes fetches smaller; the factor by which a fetch may miss its
#: target before the next fetches change.
_SMALLER, _TOLERANCE = 16, 4
#: Fetches of this few bytes return single batches.
_SINGLE_BATCH = 64
#: The limit to which patience grows from one silence to the next: librdkafka's own timeout of a
#: request.
_PATIENCE_MAX = 6
#: After this time without silence, fetches may grow again. If the consumer was not busy in this
#: time, they are small again.
_AGAIN_S = 60.0
#: The same after a batch that became very large, if the consumer reports how large records become.
_AGAIN_AFTER_LARGE_S = 2.0
#: While the expansion is unknown, a consumer of at most this many partitions reports this often.
_SOON_MS, _FEW_QUEUES = 100, 64
#: librdkafka accepts two names for this setting.
_FETCH_BYTES, _FETCH_BYTES_TOO = "max.partition.fetch.bytes", "fetch.message.max.bytes"
#: The bytes of all partitions in a response. librdkafka requires at least the largest record of a
#: producer, which must be at least 1,000.
_RESPONSE_BYTES, _SENT_MAX, _SENT_MAX_MIN = "fetch.max.bytes", "message.max.bytes", 1_000
_AHEAD_KBYTES = "queued.max.messages.kbytes"


class FetchPace:
    """The pace of one session. ``is_stale``: a consumer that was made earlier must be replaced.
    ``is_narrow``: read one partition after the other."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bytes: float = FIRST_FETCH_BYTES  # of a fetch; inf: as the settings say
        self._usual_bytes = 0
        self._slow_until: float | None = None  # after a silence or a large batch; None: may grow
        self._latest = self._before = NOTHING  # the last report, and the last one that told enough
        self._before_at = 0.0
        self._reports = 0  # in this read
        self._busy_at = 0.0
        self._target = _FETCHED_MAX
        self._is_reported = True
        self.patience = 1
        self.is_stale = False
        self._ahead_max = 0

    @property
    def is_narrow(self) -> bool:
        return self._bytes == 1

    def settings(self, conf: Mapping[str, Any], queues: int = 1) -> dict[str, Any]:
        """The settings of a consumer with this number of queues, at this pace."""
        self.is_stale, self._latest, self._before = False, NOTHING, NOTHING
        self._before_at = self._clock()
        self._usual_bytes = int(conf.get(_FETCH_BYTES_TOO, conf[_FETCH_BYTES]))
        ahead_kbytes = int(conf.get(_AHEAD_KBYTES, 0))
        self._is_reported = not is_silent(conf)
        if self._slow_until is None and not self._is_reported:
            self._bytes = math.inf
        share = FETCHED_BYTES // queues
        self._target = min(max(share, _FETCHED_MIN), _FETCHED_MAX)
        if math.isfinite(self._bytes):
            ahead_kbytes = 1 if self.is_narrow else min(ahead_kbytes, share // 1024)
        self._ahead_max = ahead_kbytes * 1024 * queues
        if math.isinf(self._bytes):
            return dict(conf)
        size = int(self._bytes)
        response = min(int(conf.get(_RESPONSE_BYTES, size)), max(size, _SENT_MAX_MIN))
        return {
            **{name: value for name, value in conf.items() if name != _FETCH_BYTES_TOO},
            _FETCH_BYTES: min(size, self._usual_bytes),
            _RESPONSE_BYTES: response,
            _SENT_MAX: response,
            _AHEAD_KBYTES: ahead_kbytes,
        }

    def report_every_ms(self, queues: int) -> int:
        """How often the consumer must report what it receives."""
        is_first = math.isfinite(self._bytes) and self._slow_until is None
        return _SOON_MS if is_first and queues <= _FEW_QUEUES else REPORT_EVERY_MS

    def has_seen(self, *, piece: int, ahead: int, received: Received = NOTHING) -> None:
        """Note the bytes that a consumer has returned in one piece, that it holds in its queues,
        and that it has received so far."""
        if self.is_stale:
            return
        if piece > LARGE_BYTES:
            self._fetch_less(1, self._again_after_large_s)
        elif ahead > self._ahead_max + EXPANDED_BYTES:
            self._fetch_less(self._fetched * self._target / (ahead - self._ahead_max), self._again_after_large_s)
        elif received != self._latest:
            self._latest = received
            self._reports += 1
            self._adapt(received)

    def _adapt(self, received: Received) -> None:
        """Adapt the size of fetches to how much larger the records have become."""
        size, became = (now - before for now, before in zip(received, self._before, strict=True))
        now = self._clock()
        is_busy = self._reports >= _BUSY_REPORTS or size > BUSY_BYTES_PER_S * max(now - self._before_at, 0.1)
        if is_busy:
            self._busy_at = now
        if became < TELLING_BYTES:
            return
        self._before, self._before_at = received, now
        # the bytes of a fetch may have been reported before its records
        wanted = self._target * max(size, self._fetched) / became
        if self._fetched > wanted * _TOLERANCE:
            self._fetch_less(wanted, _AGAIN_S)
        elif is_busy and self._slow_until is None:
            wanted = self._target * size / became
            if wanted >= self._fetched * _TOLERANCE:
                self._fetch_more(wanted)

    def was_silent(self) -> None:
        """Note that a read has failed because a partition was silent."""
        self._bytes = _or_single(self._fetched / _SMALLER)
        self.patience = min(self.patience * 2, _PATIENCE_MAX)
        self._slow_until = self._clock() + _AGAIN_S
        self.is_stale = True

    def was_throttled(self) -> None:
        """Note that a read was ended while a quota throttled it. A broker returns nothing of a
        fetch that exceeds the quota, so the next consumer requests less."""
        self._bytes = min(self._bytes, _or_single(self._usual_bytes / _SMALLER))
        self._slow_until = self._clock() + _AGAIN_S
        self.is_stale = True

    def went_well(self) -> None:
        """Note that a read is complete."""
        self._reports = 0
        if self._slow_until is not None and self._clock() > self._slow_until:
            self._slow_until = None
            self.patience = 1
            self._fetch_more(FIRST_FETCH_BYTES if self._is_reported else math.inf)
        elif self._bytes > FIRST_FETCH_BYTES and self._is_reported and self._clock() - self._busy_at > _AGAIN_S:
            self._bytes = FIRST_FETCH_BYTES
            self.is_stale = True

    @property
    def _fetched(self) -> float:
        return min(self._bytes, self._usual_bytes)

    @property
    def _again_after_large_s(self) -> float:
        return _AGAIN_AFTER_LARGE_S if self._is_reported else _AGAIN_S

    def _fetch_less(self, size: float, again_s: float) -> None:
        self._slow_until = max(self._slow_until or 0.0, self._clock() + again_s)
        self.patience = _PATIENCE_MAX
        if not self.is_narrow:  # otherwise no fetch can be smaller
            self._bytes = _or_single(min(size, self._fetched / 2))
            self.is_stale = True

    def _fetch_more(self, size: float) -> None:
        if size > self._bytes:
            self._bytes = math.inf if size >= self._usual_bytes else int(size)
            self.is_stale = True


def _or_single(size: float) -> int:
    return int(size) if size > _SINGLE_BATCH else 1
