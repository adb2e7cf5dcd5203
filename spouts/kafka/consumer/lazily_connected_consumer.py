"""A consumer that connects at its first use, for occasional reads of the driver."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from confluent_kafka import KafkaException

from framework.clients.consumer_close_timeout import Consumer
from framework.clients.kafka_settings import ConnectionErrors, KafkaSettings
from spouts.kafka.consumer.consumer_seek import Assignment


class LazilyConnectedConsumer:
    """One consumer. Used by one thread. ``group``: the group id of the readers; nothing is
    committed to it. ``more``: further settings of librdkafka."""

    def __init__(self, settings: KafkaSettings, group: str, more: Mapping[str, Any] | None = None) -> None:
        self._settings, self._group, self._more = settings, group, more or {}
        self._errors = ConnectionErrors(settings.bootstrap_servers)
        self._client: tuple[Consumer, Assignment] | None = None

    def close(self) -> None:
        """Safe to call twice. A next use connects again."""
        client, self._client = self._client, None
        if client is not None:
            client[0].close()

    def _connected(self) -> tuple[Consumer, Assignment]:
        if self._client is None:
            settings = {**self._consumer_settings(), "error_cb": self._errors.on_error}
            consumer = self._errors.made(lambda: Consumer(settings))
            self._client = consumer, Assignment(consumer)
        return self._client

    def _consumer_settings(self) -> dict[str, Any]:
        return {**self._settings.consumer(self._group), **self._more}

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors of Kafka's client become Ratchet's, with the reason."""
        try:
            yield
        except KafkaException as error:
            raise self._errors.explain(error) from error
