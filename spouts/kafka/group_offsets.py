"""Commits positions to a Kafka consumer group: for tools that show lag, and for spouts that keep
their positions there.

The group's offsets are never ahead of what is done; they may be behind. A failure is logged once
and retried. Each offset is committed with the id of its topic (as the offset's metadata) and a
leader epoch, because an offset has a meaning in one log only.

A consumer sends the commits: the spout's own, or one without assigned partitions. librdkafka's
admin client is unsuitable: it ends the process (an assertion fails) if the group's coordinator
answers after the request has timed out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from framework.clients.consumer_close_timeout import Consumer
from framework.clients.kafka_settings import ConnectionErrors, KafkaSettings
from framework.errors import ConfigError
from framework.observe.logs import get_logger
from spouts.kafka.partition_plan_entries import Position, partition_id, topic_and_number

_log = get_logger()

#: How long ``close`` waits until the last offsets are published.
CLOSE_TIMEOUT_S = 5.0
#: The same if the last request has failed.
_CLOSE_FAILING_S = 0.5
#: A request without an answer for this long counts as failed, although librdkafka still retries it.
ANSWER_TIMEOUT_S = 30.0
#: Brokers delete the offsets of an inactive group, ``offsets.retention.minutes`` after their
#: commit, so the offsets of quiet partitions are committed again this often.
RENEW_EVERY_S = 600.0
#: How long to wait for a group's committed offsets.
_ANSWER_S = 5.0
#: How long to wait before a failed request is retried.
_AGAIN_AFTER_S = 0.25


class GroupOffsets:
    """Commits offsets to one group. ``publish`` returns immediately. While a request is in flight,
    only the latest offsets wait. Use it from one thread.

    It creates its own client, unless you give it one with ``use``. ``errors``: where the client
    reports why it cannot connect."""

    def __init__(self, settings: KafkaSettings, group: str, errors: ConnectionErrors | None = None) -> None:
        self._settings = settings
        self._group = group
        self._client: Consumer | None = None
        self._lent = False
        self._errors = errors if errors is not None else ConnectionErrors(settings.bootstrap_servers)
        self._published: dict[str, Position] = {}
        self._waiting: dict[str, Position] = {}
        self._sent: dict[str, Position] = {}  # the request in flight
        self._sent_at = 0.0
        self._failed_at: float | None = None
        self._problem: KafkaError | None = None
        self._renewed_at = time.monotonic()

    def consumer(self) -> Consumer:
        """A new consumer that can commit: its callbacks are set. Raises ``ConfigError``."""
        heard = {"error_cb": self._errors.on_error, "on_commit": self.answered}
        settings = {**self._settings.consumer(self._group), **heard}
        return self._errors.made(lambda: Consumer(settings))

    def use(self, consumer: Consumer) -> None:
        """Use this consumer, made by ``consumer``. Its owner must poll it."""
        self._client, self._lent = consumer, True

    def stored(self, partitions: Iterable[tuple[str, int]], timeout_s: float) -> dict[tuple[str, int], Position]:
        """The group's positions for those of these partitions that have one. Raises
        ``KafkaException``."""
        asked = [TopicPartition(*tp) for tp in partitions]
        if not asked:
            return {}
        client = self._client_of_group()
        if not self._lent:
            client.poll(0)  # runs the callbacks, such as for a new token
        found: dict[tuple[str, int], Position] = {}
        for each in client.committed(asked, timeout=timeout_s):
            if each.error is not None:
                raise KafkaException(each.error)
            if each.offset >= 0:
                found[(each.topic, each.partition)] = position_of_group(each)
        return found

    def publish(self, offsets: Mapping[str, int | Position], *, again: bool = False) -> None:
        """Publish committed offsets: partition -> next offset to read. ``again``: publish unchanged
        offsets too, so that the group does not delete those of an idle partition."""
        wanted = {each: at if isinstance(at, Position) else Position(at, None) for each, at in offsets.items()}
        known = {} if again else self._published
        self._waiting.update({each: at for each, at in wanted.items() if known.get(each) != at})
        self.advance()

    def has(self, partition: str, position: Position) -> bool:
        """Whether the group has confirmed this position of a partition."""
        return self._published.get(partition) == position

    def advance(self) -> None:
        """Process an answer and send what waits. Call it regularly, even if nothing is
        committed."""
        if self._client is not None and self._sent and not self._lent:
            self._client.poll(0)  # runs the callback with the answer
            if self._sent and time.monotonic() - self._sent_at > ANSWER_TIMEOUT_S:
                self._failed(self._sent, f"no answer for {ANSWER_TIMEOUT_S:g} s{self._errors.reason()}")
        if time.monotonic() - self._renewed_at > RENEW_EVERY_S:
            self._renewed_at = time.monotonic()
            self._waiting = {**self._published, **self._waiting}
        if self._waiting and not self._sent and not self._rests():
            self._send()

    def adopt(self, partitions: Iterable[str], timeout_s: float) -> None:
        """Commit the group's present offsets of these partitions again, now and regularly. If the
        group does not answer, only logs that."""
        try:
            found = self.stored([topic_and_number(each) for each in partitions], timeout_s)
        except KafkaException as error:
            _log.warning("group.not_published", group=self._group, reason=str(self._errors.explain(error)))
            return
        self._waiting = {**{partition_id(*tp): at for tp, at in found.items()}, **self._waiting}

    def problem(self) -> KafkaException | None:
        """Why requests have begun to fail. Returned once; None otherwise."""
        problem, self._problem = self._problem, None
        return None if problem is None else KafkaException(problem)

    def close(self, *, publish: bool = True) -> None:
        """Publish what waits, within ``CLOSE_TIMEOUT_S`` seconds, or drop it (``publish`` False).
        Closes the client, unless it was given to ``use``."""
        if not publish:
            self._waiting = {}
        failing = self._failed_at
        deadline = time.monotonic() + (CLOSE_TIMEOUT_S if failing is None else _CLOSE_FAILING_S)
        while (self._sent or self._waiting) and time.monotonic() < deadline and self._failed_at == failing:
            self.advance()
            if self._client is not None:
                self._client.poll(0.02)
        if self._client is not None and not self._lent:
            self._client.close()
        self._client = None

    def answered(self, error: KafkaError | None, partitions: list[Any]) -> None:
        """The ``on_commit`` callback of the consumer."""
        refused: dict[str, Position] = {}
        stored: dict[str, Position] = {}
        reason = error
        for each in partitions or ():
            partition = partition_id(each.topic, each.partition)
            position = self._sent.get(partition)
            if position is None or position.offset != each.offset:
                continue  # the answer to an abandoned request
            if error is None and each.error is None:
                stored[partition] = position
            else:
                refused[partition] = position
                reason = reason or each.error
        self._published.update(stored)
        if reason is not None:
            self._problem = reason if self._failed_at is None else self._problem
            self._failed(refused or self._sent, reason.str())
        elif stored:
            self._sent = {}
            self._failed_at = None

    # --- inside -----------------------------------------------------------------------------------

    def _rests(self) -> bool:
        return self._failed_at is not None and time.monotonic() - self._failed_at < _AGAIN_AFTER_S

    def _client_of_group(self) -> Consumer:
        if self._client is None:
            self._client = self.consumer()
        return self._client

    def _send(self) -> None:
        try:
            client = self._client_of_group()
            wanted = [_stored(each, position) for each, position in self._waiting.items()]
            self._sent, self._waiting = self._waiting, {}
            self._sent_at = time.monotonic()
            client.commit(offsets=wanted, asynchronous=True)
        except KafkaException as error:
            self._failed(self._sent, str(self._errors.explain(error)))

    def _failed(self, offsets: Mapping[str, Position], reason: str) -> None:
        self._waiting = {**offsets, **self._waiting}
        self._sent = {}
        if self._failed_at is None:
            _log.warning("group.not_published", group=self._group, reason=reason)
        self._failed_at = time.monotonic()


def committed_positions(settings: KafkaSettings, group: str, partitions: Sequence[str]) -> dict[str, Position]:
    """A group's committed positions for those of these partitions that have one. Commits nothing.
    Raises ``RetryableError`` when no broker answers, and ``ConfigError`` when the group has no
    position for any of them."""
    errors = ConnectionErrors(settings.bootstrap_servers)
    offsets = GroupOffsets(settings, group, errors)
    try:
        found = offsets.stored([topic_and_number(each) for each in partitions], _ANSWER_S)
    except KafkaException as error:
        raise errors.explain(error) from error
    finally:
        offsets.close(publish=False)
    if not found:
        topics = ", ".join(sorted({topic_and_number(each)[0] for each in partitions}))
        raise ConfigError(
            f"start_group: group {group!r} has committed no offset of {topics}: correct its name, or leave start_group= out to "
            "begin where start= says"
        )
    return {partition_id(*tp): position for tp, position in found.items()}


def _stored(partition: str, position: Position) -> TopicPartition:
    note = json.dumps({"topic_id": position.topic_id}) if position.topic_id is not None else ""
    topic, number = topic_and_number(partition)
    if position.leader_epoch is None:
        return TopicPartition(topic, number, position.offset, note)
    return TopicPartition(topic, number, position.offset, note, position.leader_epoch)


def position_of_group(stored: TopicPartition) -> Position:
    """The position of a partition in a result of ``Consumer.committed``. Other clients may have
    committed it, so an offset without a topic id is accepted."""
    try:
        note = json.loads(stored.metadata or "{}")
        topic_id = note.get("topic_id") if isinstance(note, dict) else None
    except ValueError:
        topic_id = None
    epoch = stored.leader_epoch
    return Position(
        stored.offset,
        topic_id if isinstance(topic_id, str) else None,
        epoch if epoch is not None and epoch >= 0 else None,
    )
