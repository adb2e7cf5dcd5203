"""Detects from librdkafka's statistics whether a Kafka client makes progress: a slow link or a
throttled connection is not silence.

Give ``Traffic.settings`` to the client. librdkafka then reports at an interval; a report is parsed
only on demand.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

#: How often librdkafka reports.
REPORT_EVERY_MS = 1_000
#: This many sent bytes count as progress. A client that only searches for brokers sends less.
_SENT_BYTES_MIN = 16_384
#: The number of records in the queue of one partition, and their bytes, decompressed.
_AHEAD = re.compile(r'"fetchq_cnt": *(\d+), *"fetchq_size": *(\d+)')
#: All bytes that a client has received, and those of the records in them, decompressed.
_RECEIVED = re.compile(r'"rx_bytes": *(\d+).*"rxmsg_bytes": *(\d+)', re.DOTALL)
#: librdkafka's memory for each record in addition to its bytes.
RECORD_BYTES = 256


class Received(NamedTuple):
    """The bytes that a consumer has received so far. ``record_bytes``: the bytes of its records,
    decompressed."""

    bytes: int = 0
    record_bytes: int = 0


NOTHING = Received()


def is_silent(settings: Mapping[str, Any]) -> bool:
    """Whether no client with these settings reports here: the user reads the reports, or has
    disabled them."""
    return "stats_cb" in settings or "statistics.interval.ms" in settings


class Traffic:
    """The statistics of one client. ``report`` may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._latest: str | None = None
        self._ahead: list[int] = []
        self.received = NOTHING
        self._brokers: list[Mapping[str, Any]] = []
        self._topics: Mapping[str, Any] = {}
        self._sent_bytes = 0
        self._offsets: Mapping[tuple[str, int], int] = {}
        self._throttled_until_s = 0.0

    def settings(self, given: Mapping[str, Any], every_ms: int = REPORT_EVERY_MS) -> dict[str, Any]:
        """Settings of a client that reports here at this interval; none if it ``is_silent``."""
        if is_silent(given):
            return {}
        return {"statistics.interval.ms": every_ms, "stats_cb": self.report}

    def report(self, document: str) -> None:
        """The ``stats_cb`` of a client."""
        self._latest = document
        self._ahead = [int(count) * RECORD_BYTES + int(size) for count, size in _AHEAD.findall(document)]
        received = _RECEIVED.search(document, max(document.rfind('"rx_bytes"'), 0))
        if received is not None:
            self.received = Received(*map(int, received.groups()))

    def ahead_bytes(self, *, shared: bool) -> int:
        """The bytes in the queues of partitions at the last report. ``shared``: all partitions have
        one queue, and each reports the whole."""
        return (max if shared else sum)(self._ahead or [0])

    def has_sent(self) -> bool:
        """Whether the client has sent much since the last call that returned True, or is throttled
        by a broker's quota."""
        self._parse()
        sent = sum(int(each.get("txbytes", 0)) for each in self._brokers)
        if sent - self._sent_bytes >= _SENT_BYTES_MIN:
            self._sent_bytes = sent
            return True
        return self._is_throttled()

    def has_fetched(self, topic: str, partition: int) -> bool:
        """Whether the client has made progress in a partition since the last call, or is throttled
        by a broker's quota. Records that it does not deliver, such as those of aborted kafka_txns,
        count as progress."""
        self._parse()
        found = self._topics.get(topic, {}).get("partitions", {}).get(str(partition), {})
        offset, known = int(found.get("next_offset", -1)), self._offsets.get((topic, partition), -1)
        if offset >= 0 and offset != known:  # lower after the partition was repositioned
            self._offsets = {**self._offsets, (topic, partition): offset}
        if 0 <= known < offset:
            return True
        return self._is_throttled()

    def was_throttled_since(self, moment_s: float) -> bool:
        """Whether a broker's quota has throttled the client after this moment of the clock."""
        self._parse()
        return self._throttled_until_s > moment_s

    def _is_throttled(self) -> bool:
        return self._clock() < self._throttled_until_s

    def _parse(self) -> None:
        document, self._latest = self._latest, None
        if document is None:
            return
        found = json.loads(document)
        self._brokers, self._topics = list(found.get("brokers", {}).values()), found.get("topics", {})
        throttle_ms = max((int(each.get("throttle", {}).get("max", 0)) for each in self._brokers), default=0)
        if throttle_ms > 0:
            self._throttled_until_s = max(self._throttled_until_s, self._clock() + throttle_ms / 1000)
