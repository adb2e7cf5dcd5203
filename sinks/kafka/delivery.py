"""Delivers records through a producer, and waits as long as the producer makes progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial as bound
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from framework.clients.kafka_stall_detection import Traffic
from framework.errors import RetryableError

#: A producer that delivers nothing, sends nothing and is not throttled for this long makes no
#: progress.
SILENCE_MAX_S = 15.0
_POLL_S = 0.05
_WAITING, _DELIVERED, _REFUSED = range(3)
#: The broker refused the batch because of another record in it.
_WITH_ANOTHER = KafkaError._INVALID_DIFFERENT_RECORD
_ANY_PARTITION, _NOW = -1, 0
_TOPICS_SHOWN = 3


class KafkaRecord(NamedTuple):
    """One record to write.

    * ``headers``: (name, value) pairs.
    * ``topic``: None for the only topic of the batch.
    * ``partition``: -1 for the partitioner's choice.
    * ``timestamp_ms``: None for the time of sending."""

    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]] = ()
    topic: str | None = None
    partition: int = _ANY_PARTITION
    timestamp_ms: int | None = None


class Delivery:
    """The delivery of one batch. Used by one thread; others may poll the producer. ``where``: the
    topics, for messages; after a refusal, the topic of the refused record."""

    def __init__(self, producer: Producer, traffic: Traffic, topics: Collection[str]) -> None:
        self._producer = producer
        self._traffic = traffic
        self.where = shown_topics(topics)
        self._outcomes = bytearray()  # in the order of ``send``
        self._refusal: KafkaError | None = None
        self.about = ""  # details of the refused record, for a message
        self._moved_at = time.monotonic()

    def send(self, topic: str, record: KafkaRecord) -> None:
        """Pass a record to the producer, waiting for room in its queue. ``topic``: for a record
        that names none. Raises ``KafkaException``, and ``RetryableError`` when the producer makes
        no progress."""
        answered = bound(self._answered, len(self._outcomes))
        self._outcomes.append(_WAITING)
        while True:
            try:
                self._producer.produce(
                    record.topic or topic,
                    record.value,
                    record.key,
                    record.partition,
                    headers=list(record.headers),
                    timestamp=record.timestamp_ms if record.timestamp_ms is not None else _NOW,
                    on_delivery=answered,
                )
                self._producer.poll(0)
                return
            except BufferError:  # the queue is full: wait for deliveries
                self._wait(self._producer.poll)

    def finish(self) -> None:
        """Wait until every record is delivered or refused. Raises ``KafkaException`` with the
        reason of a refusal, ``RetryableError`` when the producer makes no progress."""
        while _WAITING in self._outcomes:
            self._wait(self._producer.flush)
        if self._refusal is not None:
            raise KafkaException(self._refusal)

    def delivered(self) -> Iterator[bool]:
        """Whether each record is delivered, in the order of ``send``."""
        return (each == _DELIVERED for each in self._outcomes)

    def _wait(self, serve: Callable[[float], int]) -> None:
        """Raise ``RetryableError`` when the producer makes no progress."""
        serve(_POLL_S)
        if self._traffic.has_sent():
            self._moved_at = time.monotonic()
        elif time.monotonic() - self._moved_at > SILENCE_MAX_S:
            raise RetryableError(
                f"{self.where}: not everything was delivered, and the producer did not get on for {SILENCE_MAX_S:g} s"
            )

    def _answered(self, index: int, error: KafkaError | None, message: Message) -> None:
        self._outcomes[index] = _DELIVERED if error is None else _REFUSED
        self._moved_at = time.monotonic()
        # The records of a batch are refused together with the faulty one: report that one.
        if error is not None and (self._refusal is None or self._refusal.code() == _WITH_ANOTHER):
            size = len(message.key() or b"") + len(message.value() or b"")
            self._refusal = error
            self.where = shown_topics([message.topic() or ""])
            self.about = f", a record of {size:,} bytes{' without a key' if message.key() is None else ''}"


def shown_topics(topics: Collection[str]) -> str:
    """Topics, for a message.

    >>> shown_topics(["a"]), shown_topics(["a", "b", "c", "d", "e"])
    ("topic 'a'", "topics 'a', 'b', 'c' and 2 more")
    """
    if len(topics) == 1:
        return f"topic {next(iter(topics))!r}"
    shown = ", ".join(map(repr, sorted(topics)[:_TOPICS_SHOWN]))
    more = len(topics) - _TOPICS_SHOWN
    return f"topics {shown}{f' and {more} more' if more > 0 else ''}"
