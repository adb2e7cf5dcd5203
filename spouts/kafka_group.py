"""Publishes committed offsets to a Kafka consumer group, for tools that show lag. Nothing ever reads them back here.

The group's offsets are never ahead of what is committed; they may be behind. What fails is said once and tried again
with the next batch.

A consumer does it, one that is assigned nothing. librdkafka's admin client has such a request too, and ends the process
(an assertion fails) when the group's coordinator answers after the request has timed out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from framework.kafka_clients import ConnectionErrors, KafkaSettings
from spouts.kafka_partitions import topic_and_number

_log = structlog.get_logger()

#: How long ``close`` waits for the last offsets to be published.
CLOSE_TIMEOUT_S = 5.0
#: A request that has not been answered for this long counts as failed; librdkafka goes on trying meanwhile.
ANSWER_TIMEOUT_S = 30.0


class GroupOffsets:
    """``publish`` returns at once; while a request is under way, only the latest offsets wait for their turn. Used from
    the planner's thread."""

    def __init__(self, settings: KafkaSettings, group: str) -> None:
        self._settings = settings
        self._group = group
        self._client: Consumer | None = None
        self._errors = ConnectionErrors(settings.bootstrap_servers)
        self._published: dict[str, int] = {}
        self._waiting: dict[str, int] = {}
        self._sent: dict[str, int] = {}  # the request under way
        self._sent_at = 0.0
        self._failing = False

    def publish(self, offsets: Mapping[str, int]) -> None:
        """Partition -> next offset to read, as committed."""
        self._waiting.update({each: offset for each, offset in offsets.items() if self._published.get(each) != offset})
        self.advance()

    def advance(self) -> None:
        """Take an answer that has come, and send what waits. Called now and then, also when nothing is committed."""
        if self._client is not None and self._sent:
            self._client.poll(0)  # the answer comes by the callback
            if self._sent and time.monotonic() - self._sent_at > ANSWER_TIMEOUT_S:
                self._failed(f"no answer for {ANSWER_TIMEOUT_S:g} s{self._errors.reason()}")
        if self._waiting and not self._sent:
            self._send()

    def close(self) -> None:
        """Publish what waits, for as long as that may take."""
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while (self._sent or self._waiting) and time.monotonic() < deadline and not self._failing:
            self.advance()
            if self._client is not None:
                self._client.poll(0.02)
        if self._client is not None:
            self._client.close()
            self._client = None

    def _send(self) -> None:
        try:
            if self._client is None:
                heard = {"error_cb": self._errors.heard, "on_commit": self._answered}
                settings = {**self._settings.consumer(self._group), **heard}
                self._client = self._errors.made(lambda: Consumer(settings))
            wanted = [TopicPartition(*topic_and_number(each), offset) for each, offset in self._waiting.items()]
            self._sent, self._waiting = self._waiting, {}
            self._sent_at = time.monotonic()
            self._client.commit(offsets=wanted, asynchronous=True)
        except KafkaException as error:
            self._failed(str(self._errors.explain(error)))

    def _answered(self, error: KafkaError | None, partitions: list[Any]) -> None:
        problems = [error] if error is not None else [each.error for each in partitions if each.error is not None]
        if problems:
            self._failed(problems[0].str())
        else:
            self._published.update(self._sent)
            self._sent = {}
            self._failing = False

    def _failed(self, reason: str) -> None:
        self._waiting = {**self._sent, **self._waiting}
        self._sent = {}
        if not self._failing:
            _log.warning("group.not_published", group=self._group, reason=reason)
        self._failing = True
