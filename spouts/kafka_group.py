"""Publishes committed offsets to a Kafka consumer group, for tools that show lag. Nothing ever reads them back here.

The group's offsets are never ahead of what is committed; they may be behind. What fails is said once and tried again
with the next batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import structlog
from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from framework.kafka_clients import ConnectionErrors, KafkaSettings
from spouts.kafka_partitions import topic_and_number

_log = structlog.get_logger()

REQUEST_TIMEOUT_S = 5.0


class GroupOffsets:
    """``publish`` returns at once; while a request is under way, only the latest offsets wait for their turn. Used from
    the planner's thread."""

    def __init__(self, settings: KafkaSettings, group: str) -> None:
        self._settings = settings
        self._group = group
        self._client: AdminClient | None = None
        self._errors = ConnectionErrors(settings.bootstrap_servers)
        self._under_way: Future[Any] | None = None
        self._published: dict[str, int] = {}
        self._waiting: dict[str, int] = {}
        self._failing = False

    def publish(self, offsets: Mapping[str, int]) -> None:
        """Partition -> next offset to read, as committed."""
        self._waiting.update({each: offset for each, offset in offsets.items() if self._published.get(each) != offset})
        if self._under_way is None or self._under_way.done():
            self._send()

    def close(self) -> None:
        """Publish what waits, for as long as one request may take."""
        if self._under_way is not None:
            self._settle()
        if self._waiting:
            self._send()
            self._settle()
        self._client = None

    def _send(self) -> None:
        if self._under_way is not None:
            self._settle()
        if not self._waiting:
            return
        offsets, self._waiting = self._waiting, {}
        wanted = [TopicPartition(*topic_and_number(each), offset) for each, offset in offsets.items()]
        try:
            if self._client is None:
                self._client = self._errors.made(
                    lambda: AdminClient({**self._settings.admin(), "error_cb": self._errors.heard})
                )
            request = ConsumerGroupTopicPartitions(self._group, wanted)
            answers = self._client.alter_consumer_group_offsets([request], request_timeout=REQUEST_TIMEOUT_S)
            self._under_way = answers[self._group]
            self._published.update(offsets)
        except KafkaException as error:
            self._failed(str(self._errors.explain(error)))

    def _settle(self) -> None:
        """Wait for the request under way, and say when it failed."""
        request, self._under_way = self._under_way, None
        if request is None:
            return
        try:
            answer = request.result(REQUEST_TIMEOUT_S + 1)
            problems = [each.error.str() for each in answer.topic_partitions if each.error is not None]
        except (KafkaException, TimeoutError) as error:
            problems = [str(error)]
        if problems:
            self._failed(problems[0])
        else:
            self._failing = False

    def _failed(self, reason: str) -> None:
        self._waiting = {**self._published, **self._waiting}
        self._published = {}
        if not self._failing:
            _log.warning("group.not_published", group=self._group, reason=reason)
        self._failing = True
