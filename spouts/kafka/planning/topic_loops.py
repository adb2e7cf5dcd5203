"""Refuses to read what the topology itself writes: each record would come back, for ever.

Names are compared before the start. Two lists of brokers that share none may still be of one
cluster: the ids of the clusters are compared when such a topic is found, also while the topology
runs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from framework.clients.kafka_settings import ConnectionErrors, KafkaSettings
from framework.errors import ConfigError
from framework.topology import WrittenTopic

_ANSWER_S = 10.0


class OwnTopics:
    """What a topology writes, as its spout sees it. ``topics`` and ``pattern``: what the spout
    reads."""

    def __init__(
        self,
        settings: KafkaSettings,
        topics: Collection[str],
        pattern: str | None,
        written: Sequence[WrittenTopic],
        conf: Mapping[str, Any],
    ) -> None:
        self._pattern = pattern
        matches = re.compile(pattern).fullmatch if pattern is not None else topics.__contains__
        self._read = {
            each.topic: (each, each.settings.with_conf(conf))
            for each in written
            if isinstance(each.settings, KafkaSettings) and matches(each.topic)
        }
        self._settings = settings
        self._elsewhere: set[str] = set()  # they are in another cluster

    def check_names(self) -> None:
        """Raise ``ConfigError`` if the spout reads a topic that the topology writes by the same
        brokers, whether or not the topic exists."""
        for written, settings in self._read.values():
            if self._settings.share_brokers(settings):
                raise self._loop(written)

    def check_found(self, found: Collection[str], cluster_id: str) -> None:
        """Raise ``ConfigError`` if one of the topics that were found in the spout's cluster is
        written by the topology. Raises ``RetryableError`` if that cannot be known yet."""
        for topic in self._read.keys() & set(found) - self._elsewhere:
            written, settings = self._read[topic]
            if self._settings.share_brokers(settings) or _cluster_id(settings) == cluster_id:
                raise self._loop(written)
            self._elsewhere.add(topic)

    def _loop(self, written: WrittenTopic) -> ConfigError:
        how = f"its pattern {self._pattern!r} matches it" if self._pattern is not None else "it is among its topics"
        return ConfigError(
            f"bolt {written.component_id!r} writes {written.holds} to topic {written.topic!r}, and the spout of the same "
            f"topology reads that topic ({how}): what is written would come back as input, for ever; give the spout other "
            "topics or a narrower pattern, or the bolt another topic"
        )


def _cluster_id(settings: KafkaSettings) -> str:
    errors = ConnectionErrors(settings.bootstrap_servers)
    admin = errors.made(lambda: AdminClient({**settings.admin(), "error_cb": errors.on_error}))
    try:
        return str(admin.list_topics(timeout=_ANSWER_S).cluster_id)
    except KafkaException as error:
        raise errors.explain(error, admin) from error
