"""A catalog of a cluster's topics for routing: which topics exist, and their partitions."""

from __future__ import annotations

import threading
import time

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from framework.clients.kafka_settings import ConnectionErrors, KafkaSettings

_ANSWER_S = 10.0
#: A new topic may not be known to every broker yet: requests are repeated for this long.
_PATIENCE_S = 2.0
_POLL_S = 0.1
#: A missing topic is not requested again for this long, because the batches that search for the
#: record naming it follow each other quickly.
_MISSING_S, _MISSING_MAX = 30.0, 1_000


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
        with self._lock:
            deadline = time.monotonic() + _PATIENCE_S
            if time.monotonic() - self._missing.get((topic, at_least), -_MISSING_S) < _MISSING_S:
                return self._partitions.get(topic, 0)
            while self._partitions.get(topic, 0) < at_least:
                self._ask()
                if self._partitions.get(topic, 0) < at_least:
                    if time.monotonic() > deadline:
                        if len(self._missing) >= _MISSING_MAX:
                            self._missing.clear()
                        self._missing[topic, at_least] = time.monotonic()
                        break
                    time.sleep(_POLL_S)
            return self._partitions.get(topic, 0)

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

    def close(self) -> None:
        """Does nothing. Exists because catalogs are cached like writers."""

    def _ask(self) -> None:
        errors = ConnectionErrors(self._settings.bootstrap_servers)
        admin = errors.made(lambda: AdminClient({**self._settings.admin(), "error_cb": errors.on_error}))
        try:
            found = admin.list_topics(timeout=_ANSWER_S)
        except KafkaException as error:
            raise errors.explain(error, admin) from error
        self._cluster_id = str(found.cluster_id)
        self._partitions = {name: len(each.partitions) for name, each in found.topics.items()}
