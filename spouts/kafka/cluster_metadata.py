"""Queries of the driver to a Kafka cluster: topics, the leaders of their partitions, and where
partitions begin and end.

A partition whose leader does not answer must not delay the others. Each leader gets its own
request, concurrently. A late leader is left out until it has answered.
"""

from __future__ import annotations

import ctypes
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from confluent_kafka import (
    OFFSET_INVALID,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from framework.clients.kafka_settings import ConnectionErrors, KafkaSettings
from framework.errors import ConfigError, DataLossError, RetryableError
from framework.observe.logs import get_logger
from spouts.kafka.partition_plan_entries import partition_id, topic_and_number

_log = get_logger()

#: A broker that does not answer within this time counts as unavailable.
REQUEST_TIMEOUT_S = 5.0
#: How long a newly late leader delays the others, once.
LATE_AFTER_S = 0.5
#: How often topics and leaders are looked up again: the longest delay until new topics and
#: partitions are found.
METADATA_AGE_MAX_S = 5.0
#: Looking up this many partitions is cheap. Wider sources are looked up less often, in proportion,
#: so that this costs the same share of a core.
NARROW_PARTITIONS = 2_000
#: Offsets are requested for this many partitions at a time. librdkafka searches the whole request
#: for each answer, so one large request costs more than several small ones.
ASKED_TOGETHER = 200
#: Special times in Kafka's protocol for the end and the beginning of a log.
_LATEST, _EARLIEST = -1, -2

#: The most topics that a message names.
_OTHERS_SHOWN = 20


@dataclass(frozen=True)
class KafkaTopics:
    """The result of the last look-up of topics.

    * ``leaders``: partition -> broker id, or None without a leader.
    * ``missing``: topics given by name that do not exist.
    * ``others``: the existing topics, if topics are missing."""

    cluster_id: str
    topic_ids: Mapping[str, str]
    leaders: Mapping[str, int | None]
    missing: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @cached_property
    def leaderless(self) -> list[str]:
        return sorted(each for each, leader in self.leaders.items() if leader is None)

    @cached_property
    def led(self) -> list[str]:
        return sorted(each for each, leader in self.leaders.items() if leader is not None)


class Offset(NamedTuple):
    """An offset, and the leader epoch in which the broker knew it (None: not reported)."""

    offset: int
    leader_epoch: int | None = None


class _OffsetsClient(AdminClient):  # type: ignore[misc]
    """An admin client that returns all answers of a request together. confluent-kafka's own method
    makes a future for each partition, which was most of the cost of a plan."""

    def offsets_at(self, wanted: list[TopicPartition], level: IsolationLevel) -> Future[Mapping[TopicPartition, Any]]:
        """``wanted``: partitions with a time as their offset. The answer has a
        ``ListOffsetsResultInfo`` or a ``KafkaError`` for each. Raises ``KafkaException``."""
        answers: Future[Mapping[TopicPartition, Any]] = Future()
        super(AdminClient, self).list_offsets(  # its own base class, below the futures
            wanted,
            answers,
            isolation_level_value=level.value,
            request_timeout=REQUEST_TIMEOUT_S,
        )
        return answers


def check_settings(settings: KafkaSettings) -> None:
    """Raise ``ConfigError`` for settings of which no client can be made, such as an unknown one. No
    broker is asked."""
    ConnectionErrors(settings.bootstrap_servers).made(lambda: AdminClient(settings.admin()))


class KafkaMetadata:
    """One admin client. ``topics``: names. ``pattern``: a regular expression that whole names must
    match; it never matches Kafka's internal topics. Call ``confirm_topics`` from any thread, and
    everything else from the planner's thread."""

    def __init__(self, settings: KafkaSettings, topics: tuple[str, ...], pattern: str | None) -> None:
        self._settings = settings
        self._topics = topics
        self._pattern = re.compile(pattern) if pattern is not None else None
        self._client: _OffsetsClient | None = None
        self._errors = ConnectionErrors(settings.bootstrap_servers)
        self._known: KafkaTopics | None = None
        self._looked_up = -math.inf
        self._late: dict[int, list[Future[Any]]] = {}
        self._ends: tuple[KafkaTopics, dict[int, list[list[TopicPartition]]]] | None = None

    def close(self) -> None:
        self._client = None

    def refresh(self) -> None:
        """Look topics and leaders up again at the next call."""
        self._looked_up = -math.inf

    def topics(self) -> KafkaTopics:
        """Topics and leaders, at most ``METADATA_AGE_MAX_S`` old, or older in proportion above
        ``NARROW_PARTITIONS``. Raises ``RetryableError`` if no broker answers, and ``ConfigError``
        if security settings or permissions are wrong."""
        if self._known is None or time.monotonic() - self._looked_up > age_max_s(len(self._known.leaders)):
            self._known = self._asked(self._look_up)
            self._looked_up = time.monotonic()
        return self._known

    def check_topics(self) -> None:
        """Raises ``ConfigError`` when a topic that was named does not exist; else as ``topics``. A
        pattern may match nothing yet."""
        self.refresh()  # it may have been created a moment ago
        found = self.topics()
        if not found.missing:
            return
        there = ", ".join(found.others[:_OTHERS_SHOWN]) + (", ..." if len(found.others) > _OTHERS_SHOWN else "")
        raise ConfigError(
            f"topic {found.missing[0]!r} does not exist at {self._settings.bootstrap_servers}; there are: {there or 'none'}"
        )

    def confirm_topics(self, topic_ids: Mapping[str, str]) -> None:
        """Raises ``DataLossError`` if a topic has another id now. Ignores a missing topic, which
        may be created again."""
        if not topic_ids:
            return
        try:
            described = self._described(sorted(topic_ids))
        except KafkaException as error:
            raise self._errors.explain(error) from error
        for topic, (topic_id, _) in described.items():
            if topic_id != topic_ids[topic]:
                raise DataLossError(
                    f"topic {topic!r} was deleted and created again while it was read: its id was {topic_ids[topic]}, is "
                    f"{topic_id}"
                )

    def cleanup_policies(self, topics: Sequence[str]) -> dict[str, str]:
        """Topic -> its cleanup policy: ``delete``, ``compact``, or both. Leaves out topics that do
        not exist. Raises ``ConfigError`` if the user may not read it."""
        found: dict[str, str] = {}
        if not topics:
            return found
        wanted = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
        for resource, future in self._admin().describe_configs(wanted, request_timeout=REQUEST_TIMEOUT_S).items():
            try:
                found[resource.name] = str(future.result()["cleanup.policy"].value)
            except KafkaException as error:
                code = error.args[0].code()
                if code == KafkaError.UNKNOWN_TOPIC_OR_PART:
                    continue
                if code == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                    raise ConfigError(
                        f"whether topic {resource.name!r} is compacted cannot be seen: allow DescribeConfigs on it, or use opaque "
                        "states only"
                    ) from error
                raise self._errors.explain(error, self._client) from error
        return found

    def ends(self, partitions: Iterable[str] | None = None, *, patient: bool) -> dict[str, Offset]:
        """The last stable offset of these partitions, by default of every partition with a leader.
        A plan that ends there contains no open kafka_txn. ``patient``: wait for every leader;
        otherwise late leaders are left out."""
        topics = self.topics()
        if partitions is not None:
            return self._offsets(self._by_leader(partitions, _LATEST), patient=patient)
        if self._ends is None or self._ends[0] is not topics:
            self._ends = topics, self._by_leader(topics.led, _LATEST)
        return self._offsets(self._ends[1], patient=patient)

    def open_ends(self) -> dict[str, Offset]:
        """The end of every partition with a leader, including records behind open kafka_txns.
        Leaves out late leaders."""
        by_leader = self._by_leader(self.topics().led, _LATEST)
        return self._offsets(by_leader, patient=False, level=IsolationLevel.READ_UNCOMMITTED)

    def beginnings(self, partitions: Iterable[str], *, patient: bool) -> dict[str, Offset]:
        """The first offset that each partition still holds."""
        return self._offsets(self._by_leader(partitions, _EARLIEST), patient=patient)

    def at_timestamp(self, partitions: Iterable[str], timestamp_ms: int, *, patient: bool = True) -> dict[str, Offset]:
        """The offset of the first record at or after a time; -1 if there is none."""
        return self._offsets(self._by_leader(partitions, timestamp_ms), patient=patient)

    # --- inside -----------------------------------------------------------------------------------

    def _asked(self, question: Callable[[], Any]) -> Any:
        try:
            answer = question()
        except KafkaException as error:
            raise self._errors.explain(error, self._client) from error
        self._errors.connected = True
        return answer

    def _admin(self) -> _OffsetsClient:
        if self._client is None:
            self._client = self._errors.made(
                lambda: _OffsetsClient({**self._settings.admin(), "error_cb": self._errors.on_error})
            )
        return self._client

    def _look_up(self) -> KafkaTopics:
        listed = self._admin().list_topics(timeout=REQUEST_TIMEOUT_S)
        missing: list[str] = []
        if self._pattern is not None:
            names = sorted(name for name in listed.topics if self._pattern.fullmatch(name))
        else:
            names = [name for name in self._topics if name in listed.topics]
            missing = [name for name in self._topics if name not in listed.topics]
        topic_ids: dict[str, str] = {}
        leaders: dict[str, int | None] = {}
        for name, (topic_id, led_by) in self._described(names, internal=self._pattern is None).items():
            topic_ids[name] = topic_id
            leaders.update(led_by)
        others = sorted(name for name in listed.topics if not name.startswith("__")) if missing else []
        return KafkaTopics(str(listed.cluster_id), topic_ids, leaders, tuple(missing), tuple(others))

    def _described(self, names: list[str], *, internal: bool = True) -> dict[str, tuple[str, dict[str, int | None]]]:
        """Topic -> its id, and partition -> leader. Topics that do not exist are left out."""
        found: dict[str, tuple[str, dict[str, int | None]]] = {}
        if not names:
            return found
        answers = self._admin().describe_topics(TopicCollection(names), request_timeout=REQUEST_TIMEOUT_S)
        for name, future in answers.items():
            try:
                topic = future.result()
            except KafkaException as error:
                if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                    continue
                raise
            if topic.is_internal and not internal:
                continue
            leaders = {partition_id(name, each.id): _leader(each) for each in topic.partitions}
            found[name] = str(topic.topic_id), leaders
            _release_leaked_reference(topic)
        return found

    def _by_leader(self, partitions: Iterable[str], at: int) -> dict[int, list[list[TopicPartition]]]:
        """The requests to each leader. ``at``: a time in ms since 1970, ``_LATEST`` or
        ``_EARLIEST``."""
        its: dict[int, list[TopicPartition]] = {}
        leaders = self.topics().leaders
        for partition in partitions:
            leader = leaders.get(partition)
            if leader is not None:
                its.setdefault(leader, []).append(TopicPartition(*topic_and_number(partition), at))
        return {
            leader: [wanted[first : first + ASKED_TOGETHER] for first in range(0, len(wanted), ASKED_TOGETHER)]
            for leader, wanted in its.items()
        }

    def _offsets(
        self,
        by_leader: Mapping[int, list[list[TopicPartition]]],
        *,
        patient: bool,
        level: IsolationLevel = IsolationLevel.READ_COMMITTED,
    ) -> dict[str, Offset]:
        if not by_leader:
            return {}
        asked: dict[int, list[Future[Any]]] = {}
        for leader, requests in by_leader.items():
            if not patient and any(not future.done() for future in self._late.get(leader, ())):
                continue  # it has not answered an earlier request yet
            asked[leader] = [self._ask(wanted, level) for wanted in requests]
        self._wait(asked, patient=patient)
        offsets: dict[str, Offset] = {}
        problem: KafkaException | None = None
        for leader, answers in asked.items():
            if any(not future.done() for future in answers):
                if not self._late.get(leader):
                    _log.warning("source.leader_late", broker=leader, partitions=sum(map(len, by_leader[leader])))
                self._late[leader] = answers
                continue
            failed = self._take(answers, offsets)
            problem = failed or problem
            self._late[leader] = [] if failed is None else answers
        if problem is not None:
            self.refresh()
            if patient or not offsets:
                raise self._errors.explain(problem, self._client)
        if not offsets and not patient:
            raise RetryableError(f"Kafka at {self._settings.bootstrap_servers}: no leader of any partition answers")
        return offsets

    def _ask(self, wanted: list[TopicPartition], level: IsolationLevel) -> Future[Any]:
        try:
            return self._admin().offsets_at(wanted, level)
        except KafkaException as error:
            raise self._errors.explain(error, self._client) from error

    def _wait(self, asked: Mapping[int, Sequence[Future[Any]]], *, patient: bool) -> None:
        """Wait for the answers. Wait for all of them if patient, if only one leader was asked, or
        if all leaders were late before. Otherwise wait ``LATE_AFTER_S`` for the leaders that were
        not late; if none has answered then, wait for the first answer."""
        every = [future for answers in asked.values() for future in answers]
        prompt = [future for leader, answers in asked.items() if not self._late.get(leader) for future in answers]
        if patient or not prompt or len(asked) == 1:
            wait(every, REQUEST_TIMEOUT_S + 1)
            return
        wait(prompt, LATE_AFTER_S)
        if not any(future.done() for future in every):
            wait(every, REQUEST_TIMEOUT_S, return_when="FIRST_COMPLETED")

    def _take(self, answers: Sequence[Future[Any]], offsets: dict[str, Offset]) -> KafkaException | None:
        """Put the answers into ``offsets``. Returns the error of one that failed, or None."""
        problem: KafkaException | None = None
        for future in answers:
            try:
                answered = future.result()
            except KafkaException as error:
                problem = error
                continue
            for where, answer in answered.items():
                if isinstance(answer, KafkaError):
                    problem = KafkaException(answer)
                    continue
                offset, epoch = answer.offset, answer.leader_epoch
                if offset == OFFSET_INVALID:
                    # librdkafka returns this if a connection breaks at the wrong moment.
                    problem = KafkaException(KafkaError(KafkaError._TRANSPORT, "the offset request was cut off"))
                    continue
                known = epoch if epoch is not None and epoch >= 0 else None
                offsets[f"{where.topic}/{where.partition}"] = Offset(offset, known)
        return problem


def age_max_s(partitions: int) -> float:
    """The maximum age of cached data about this many partitions, in seconds."""
    return METADATA_AGE_MAX_S * max(1.0, partitions / NARROW_PARTITIONS)


def _release_leaked_reference(topic: Any) -> None:
    """Works around a leak: confluent-kafka 2.16.1 holds one reference too many to the id in every
    ``TopicDescription``, which is then never freed. That is 130 bytes per request and one request
    per transaction: a hundred megabytes a day at ten transactions a second. No other code has the
    description yet, so every reference beyond the three counted here is leaked."""
    topic_id = topic.topic_id
    own = 3  # the description's attribute, this function's variable, and the argument of getrefcount
    for _ in range(sys.getrefcount(topic_id) - own):
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(topic_id))


def _leader(partition: Any) -> int | None:
    """The broker id of the leader in a ``TopicPartitionInfo``; None without a leader."""
    leader = partition.leader
    return int(leader.id) if leader is not None and leader.id >= 0 else None
