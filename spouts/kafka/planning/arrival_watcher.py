"""Notices that a record has come to a source that has nothing, without asking for it.

Asking for the ends of all logs costs a millisecond, so an idle source is asked seldom. Meanwhile a
consumer waits at the ends: brokers hold its request until a record comes. It only says that
something came. The records that it reads are dropped, and the planner itself asks the source. So
nothing depends on the watch except how soon a first record is planned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as ClientPartition

from framework.clients.consumer_close_timeout import Consumer
from framework.clients.kafka_settings import ConnectionErrors, KafkaSettings
from framework.errors import ConfigError
from spouts.kafka.consumer.consumer_seek import Assignment
from spouts.kafka.partition_plan_entries import topic_and_number

#: How long brokers hold a request, at least. A request names each partition, and so does its
#: answer: those of a wide source are held for longer, so that they cost the same share of a core.
_HELD_MS = 1_000
_HELD_MS_PER_PARTITION = 3
#: How soon the end of the watch is noticed.
_POLL_S = 0.1
#: A watch that could not begin is not tried again for so long.
_AGAIN_AFTER_S = 10.0
#: One record is enough to know.
_LITTLE = {
    "queued.min.messages": 1,
    "max.partition.fetch.bytes": 1,
    "fetch.min.bytes": 1,
}


class KafkaWatch:
    """One consumer, in a thread that lives as long as a watch lasts. Call the methods from one
    thread. ``group``: the group id of the readers; nothing is committed to it."""

    def __init__(self, settings: KafkaSettings, group: str) -> None:
        self._settings = settings
        self._group = group
        self._client: tuple[Consumer, Assignment] | None = None
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._not_before = 0.0

    def begin(self, ends: Mapping[str, int], arrived: Callable[[], None]) -> bool:
        """Call ``arrived`` once, in another thread, when a partition has a record at or after its
        offset in ``ends``, or anything else to say. Returns at once; False when no watch can begin
        now. While a watch lasts, nothing changes."""
        if self._thread is not None and self._thread.is_alive():
            return True
        if self._closed.is_set() or time.monotonic() < self._not_before:
            return False
        positions = [ClientPartition(*topic_and_number(each), offset) for each, offset in ends.items()]
        self._thread = threading.Thread(
            target=self._watching, args=(positions, arrived), name="ratchet-watch", daemon=True
        )
        self._thread.start()
        return True

    def join(self) -> None:
        """Wait for the end of a watch that has called ``arrived``."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """End the watch, and close the consumer. Safe to call twice."""
        self._closed.set()
        self.join()
        client, self._client = self._client, None
        if client is not None:
            client[0].close()

    def _watching(self, positions: list[ClientPartition], arrived: Callable[[], None]) -> None:
        try:
            consumer, assignment = self._client = self._client or self._connected(len(positions))
            assignment.begin(positions)
            try:
                found = self._has_arrived(consumer)
            finally:
                consumer.incremental_unassign(positions)
        except (KafkaException, ConfigError):  # the planner asks the same brokers, and says what is wrong
            self._not_before = time.monotonic() + _AGAIN_AFTER_S
            return
        if found:
            arrived()

    def _connected(self, partitions: int) -> tuple[Consumer, Assignment]:
        errors = ConnectionErrors(self._settings.bootstrap_servers)
        held_ms = max(_HELD_MS, _HELD_MS_PER_PARTITION * partitions)
        own = {**_LITTLE, "fetch.wait.max.ms": held_ms, "error_cb": errors.on_error}
        settings = {**self._settings.consumer(self._group), **own}
        consumer = errors.made(lambda: Consumer(settings))
        return consumer, Assignment(consumer)

    def _has_arrived(self, consumer: Consumer) -> bool:
        while not self._closed.is_set():
            message = consumer.poll(_POLL_S)
            error = message.error() if message is not None else None
            if message is not None and (error is None or error.code() != KafkaError._PARTITION_EOF):
                return True
        return False
