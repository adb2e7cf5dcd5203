"""Plans batches of Kafka offsets, on the driver.

Invariants:

1. A range ends at or before the last stable offset, so that no open or aborted kafka_txn is in it undecided.
2. Every partition ever planned is in every later plan (C15), with an empty range when it contributes nothing.
3. A partition first seen while the topology runs starts at its beginning; ``start`` decides only the very first batch.
4. Shares are fair: a partition with little gives what it has, the others divide the rest evenly.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from confluent_kafka import (
    OFFSET_INVALID,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec

from framework.errors import DataLossError, RetryableError
from framework.topology import PartitionPlanner
from framework.topology.spouts import Meta
from spouts.kafka_partitions import partition_id, topic_and_number
from spouts.kafka_settings import KafkaSettings, kafka_error

#: How long a broker may take to answer before the planner says so and asks again.
REQUEST_TIMEOUT_S = 5.0
#: How often topics and leaders are looked up again; new partitions are seen this late.
METADATA_AGE_MAX_S = 5.0
#: A broker that comes back may for a moment report less than it has; after this long, the log is truncated.
TRUNCATED_AFTER_S = 10.0


@dataclass(frozen=True, slots=True)
class KafkaLimits:
    """How much one batch takes: records in all, and per partition (None: no limit of its own)."""

    batch_records_max: int
    partition_records_max: int | None = None


@dataclass(frozen=True, slots=True)
class KafkaSource:
    """Which topics, and where the first batch of a new topology starts: "earliest", "latest", or ms since 1970."""

    topics: tuple[str, ...]
    pattern: str | None
    start: str | int


@dataclass(slots=True)
class _Topics:
    """Topics as last looked up: ids, and partitions with or without a leader."""

    cluster_id: str
    topic_ids: dict[str, str]
    led: list[str]
    leaderless: list[str]
    looked_up: float


class KafkaPlanner(PartitionPlanner):
    """``waits_for_leaders``: an idempotent spout's batch waits for every partition; an opaque one goes on without."""

    def __init__(
        self, source: KafkaSource, settings: KafkaSettings, limits: KafkaLimits, *, waits_for_leaders: bool
    ) -> None:
        self._source = source
        self._settings = settings
        self._limits = limits
        self._waits_for_leaders = waits_for_leaders
        self._client: AdminClient | None = None
        self._topics: _Topics | None = None
        self._ends: dict[str, int] = {}
        self._short_since: dict[str, float] = {}

    # --- PartitionPlanner ------------------------------------------------------------------------------------

    def partitions(self) -> list[str]:
        topics = self._looked_up()
        return sorted([*topics.led, *topics.leaderless])

    def plan(self, previous: Mapping[str, Meta | None]) -> Mapping[str, Meta] | None:
        return self._plan(previous, self._limits)

    def plan_smaller(self, previous: Mapping[str, Meta | None], divisor: int) -> Mapping[str, Meta] | None:
        return self._plan(
            previous, replace(self._limits, batch_records_max=max(self._limits.batch_records_max // divisor, 1))
        )

    def empty_plan(self, previous: Mapping[str, Meta | None]) -> Mapping[str, Meta] | None:
        ends = [
            (partition, int(meta["next_offset"])) for partition, meta in sorted(previous.items()) if meta is not None
        ]
        return {partition: _meta(end, end) for partition, end in ends} or None

    def _plan(self, previous: Mapping[str, Meta | None], limits: KafkaLimits) -> Mapping[str, Meta] | None:
        topics = self._looked_up()
        if topics.leaderless and self._waits_for_leaders:
            self._topics = None
            raise RetryableError(f"partition {topics.leaderless[0]} has no leader; the batch waits for it")
        ends = self._offsets(topics.led, OffsetSpec.latest())
        if any(partition not in ends for partition in topics.led) and self._waits_for_leaders:
            self._topics = None
            raise RetryableError("a partition's leader has moved; looking it up again")
        self._ends.update(ends)
        firsts = self._first_offsets(previous, ends)
        available = {}
        for partition, end in ends.items():
            if end < firsts[partition] and self._is_short(partition):
                raise DataLossError(
                    f"partition {partition} ends at offset {end}, and offsets up to {firsts[partition]} were read before: the "
                    "log was truncated or the topic created again; give the topology another id to read it anew"
                )
            available[partition] = max(end - firsts[partition], 0)
            if end >= firsts[partition]:
                self._short_since.pop(partition, None)
        shares = fair_shares(available, limits)
        plan = {
            partition: _meta(first, first + shares.get(partition, 0)) for partition, first in sorted(firsts.items())
        }
        return plan if any(shares.values()) or (not previous and plan and self._source.start != "earliest") else None

    def record_count(self, plan: Mapping[str, Meta]) -> int:
        return sum(int(meta["next_offset"]) - int(meta["first_offset"]) for meta in plan.values())

    def lag(self, previous: Mapping[str, Meta | None]) -> int | None:
        if not self._ends:
            return None
        return sum(
            max(end - int(meta["next_offset"]), 0) if (meta := previous.get(partition)) is not None else end
            for partition, end in list(self._ends.items())
        )

    def source_identity(self) -> Mapping[str, Any]:
        topics = self._looked_up()
        return {"cluster": topics.cluster_id, "topics": dict(topics.topic_ids)}

    def end(self) -> Mapping[str, Meta]:
        ends = self._offsets(self._looked_up().led, OffsetSpec.latest())
        return {partition: _meta(0, end) for partition, end in ends.items()}

    def covers(self, plan: Mapping[str, Meta], goal: Mapping[str, Meta]) -> bool:
        return all(
            int(meta["next_offset"]) == 0
            or (partition in plan and int(plan[partition]["next_offset"]) >= int(meta["next_offset"]))
            for partition, meta in goal.items()
        )

    def close(self) -> None:
        self._client = None

    # --- inside ----------------------------------------------------------------------------------------------

    def _admin(self) -> AdminClient:
        if self._client is None:
            try:
                self._client = AdminClient(self._settings.admin())
            except KafkaException as error:
                raise kafka_error(error, "Kafka settings") from error
        return self._client

    def _is_short(self, partition: str) -> bool:
        """Whether a log has ended too early for so long that its broker is not just coming back."""
        now = time.monotonic()
        return now - self._short_since.setdefault(partition, now) >= TRUNCATED_AFTER_S

    def _first_offsets(self, previous: Mapping[str, Meta | None], ends: Mapping[str, int]) -> dict[str, int]:
        """Where each partition goes on, or begins."""
        known = {each: int(meta["next_offset"]) for each, meta in previous.items() if meta is not None}
        new = [partition for partition in ends if partition not in known]
        if not new:
            return known
        start = self._source.start if not previous else "earliest"
        if start == "latest":
            return {**known, **{partition: ends[partition] for partition in new}}
        spec = OffsetSpec.earliest() if start == "earliest" else OffsetSpec.for_timestamp(int(start))
        found = self._offsets(new, spec)
        if any(partition not in found for partition in new):
            self._topics = None
            raise RetryableError("a partition's leader has moved; looking it up again")
        # No record at or after the timestamp: start at the end.
        return {**known, **{each: found[each] if found[each] >= 0 else ends[each] for each in new}}

    def _offsets(self, partitions: Sequence[str], spec: OffsetSpec) -> dict[str, int]:
        """Offsets of partitions; one whose leader does not answer is left out."""
        if not partitions:
            return {}
        wanted = {TopicPartition(*topic_and_number(each)): spec for each in partitions}
        try:
            answers = self._admin().list_offsets(
                wanted, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=REQUEST_TIMEOUT_S
            )
        except KafkaException as error:
            raise self._failed(error) from error
        offsets: dict[str, int] = {}
        problem: KafkaException | None = None
        for where, future in answers.items():
            try:
                offset = future.result().offset
                if offset == OFFSET_INVALID:  # what librdkafka makes of a connection that broke at the wrong moment
                    raise KafkaException(KafkaError(KafkaError._TRANSPORT, "the offset request was cut off"))
                offsets[partition_id(where.topic, where.partition)] = offset
            except KafkaException as error:
                problem = error
        if problem is not None:
            self._topics = None
            if not offsets or self._waits_for_leaders:
                raise self._failed(problem) from problem
        return offsets

    def _failed(self, error: KafkaException) -> Exception:
        return kafka_error(error, f"Kafka at {self._settings.bootstrap_servers}")

    def _looked_up(self) -> _Topics:
        if self._topics is None or time.monotonic() - self._topics.looked_up > METADATA_AGE_MAX_S:
            before, self._topics = self._topics, self._look_up()
            for topic, topic_id in before.topic_ids.items() if before is not None else ():
                now = self._topics.topic_ids.get(topic, topic_id)
                if now != topic_id:
                    raise DataLossError(
                        f"topic {topic!r} was deleted and created again while it was read (its id was {topic_id}, is {now}); "
                        "give the topology another id to read it anew"
                    )
        return self._topics

    def _look_up(self) -> _Topics:
        client = self._admin()
        try:
            names = list(self._source.topics)
            listed = client.list_topics(timeout=REQUEST_TIMEOUT_S)
            if self._source.pattern is not None:
                names = sorted(name for name in listed.topics if re.fullmatch(self._source.pattern, name))
            missing = [name for name in names if name not in listed.topics]
            if missing:
                raise RetryableError(
                    f"topic {missing[0]!r} does not exist at {self._settings.bootstrap_servers}: create it, or correct its name"
                )
            described = (
                client.describe_topics(TopicCollection(names), request_timeout=REQUEST_TIMEOUT_S) if names else {}
            )
            topic_ids: dict[str, str] = {}
            led: list[str] = []
            leaderless: list[str] = []
            for name, future in described.items():
                topic = future.result()
                topic_ids[name] = str(topic.topic_id)
                for partition in topic.partitions:
                    (led if partition.leader is not None and partition.leader.id >= 0 else leaderless).append(
                        partition_id(name, partition.id)
                    )
        except KafkaException as error:
            raise self._failed(error) from error
        return _Topics(str(listed.cluster_id), topic_ids, led, leaderless, time.monotonic())


def fair_shares(available: Mapping[str, int], limits: KafkaLimits) -> dict[str, int]:
    """Divide the batch among partitions.

    >>> fair_shares({"a": 10, "b": 1000, "c": 1000}, KafkaLimits(batch_records_max=210))
    {'a': 10, 'b': 100, 'c': 100}
    """
    shares: dict[str, int] = {}
    left = limits.batch_records_max
    waiting = sorted(available, key=lambda each: (available[each], each))
    for position, partition in enumerate(waiting):
        even = -(-left // (len(waiting) - position))  # rounded up, so that nothing is left over
        share = min(available[partition], even, limits.partition_records_max or available[partition])
        shares[partition] = share
        left -= share
    return shares


def _meta(first_offset: int, next_offset: int) -> Meta:
    return {"first_offset": first_offset, "next_offset": next_offset}
