"""A catalog of a cluster's topics for routing: which topics exist, and their partitions."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from framework.clients.kafka_settings import ConnectionErrors, KafkaSettings, is_topic_name

_ANSWER_S = 10.0
#: A new topic may not be known to every broker yet: requests are repeated for this long, for all
#: topics of a batch together.
_PATIENCE_S = 2.0
_POLL_S = 0.1
#: A missing topic is not requested again for this long, because the batches that search for the
#: record with its name follow each other quickly. After that it is requested once. The oldest
#: missing topics are forgotten.
_MISSING_S, _MISSING_MAX = 30.0, 20_000


class TopicCatalog:
    """The topics of the cluster of ``settings``. Sends requests only for unknown topics. Used by
    several threads."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._partitions: dict[str, int] = {}
        self._missing: dict[tuple[str, int], float] = {}
        self._cluster_id: str | None = None
        self._lock = threading.Lock()

    def partition_count(self, topic: str, at_least: int = 1) -> int:
        """How many partitions a topic has; 0 if it does not exist. Asks again if there are fewer
        than ``at_least``. Raises ``RetryableError`` while brokers do not answer."""
        self.look_up([(topic, at_least)])
        with self._lock:
            return self._partitions.get(topic, 0)

    def look_up(self, wanted: Iterable[tuple[str, int]]) -> None:
        """As ``partition_count``, for several topics together, each with its ``at_least``. Call it
        first if rows name topics, because each request for a missing topic takes seconds."""
        with self._lock:
            lacking = self._lacking(wanted)
            deadline = time.monotonic() + _PATIENCE_S
            while lacking:
                self._ask()
                lacking = self._lacking(lacking)
                if time.monotonic() > deadline or lacking <= self._missing.keys():
                    break
                time.sleep(_POLL_S)
            for each in lacking:
                self._missing.pop(each, None)  # the order is that of their times
                self._missing[each] = time.monotonic()
            while len(self._missing) > _MISSING_MAX:
                del self._missing[next(iter(self._missing))]

    def cluster_id(self) -> str:
        """Raises ``RetryableError`` while brokers do not answer."""
        with self._lock:
            if self._cluster_id is None:
                self._ask()
            return self._cluster_id or ""

    def forget(self) -> None:
        """Request every topic again, because one may have been deleted."""
        with self._lock:
            self._partitions = {}

    def _lacking(self, wanted: Iterable[tuple[str, int]]) -> set[tuple[str, int]]:
        """The topics that may exist, as far as is known."""
        now = time.monotonic()
        return {
            (topic, at_least)
            for topic, at_least in wanted
            if self._partitions.get(topic, 0) < at_least
            and now - self._missing.get((topic, at_least), -_MISSING_S) >= _MISSING_S
            and is_topic_name(topic)
        }

    def _ask(self) -> None:
        errors = ConnectionErrors(self._settings.bootstrap_servers)
        admin = errors.made(lambda: AdminClient({**self._settings.admin(), "error_cb": errors.on_error}))
        try:
            found = admin.list_topics(timeout=_ANSWER_S)
        except KafkaException as error:
            raise errors.explain(error, admin) from error
        self._cluster_id = str(found.cluster_id)
        self._partitions = {name: len(each.partitions) for name, each in found.topics.items()}
