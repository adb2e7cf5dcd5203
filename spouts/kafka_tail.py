"""A consumer that follows partitions to their ends and commits positions to its group, for spouts that are acked tuple by tuple.

Partitions are assigned by hand: which spout task reads which is decided by their names and numbers alone, so that no task has to
talk to another, and none loses its partitions when another is slow.
"""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Iterable, Mapping

import structlog
from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from framework.errors import DataLossError, RetryableError
from framework.kafka_clients import ConnectionErrors, KafkaSettings, kafka_error
from spouts.kafka_partitions import partition_id
from spouts.kafka_session import NOT_IN_LOG, Where

_log = structlog.get_logger()

#: How often topics are looked up again; new topics and partitions are seen this late.
LOOK_UP_EVERY_S = 5.0
#: And how soon after that has failed.
AGAIN_AFTER_S = 0.25
_REQUEST_S = 5.0
CHUNK_RECORDS = 2_000


def task_of(topic: str, partition: int, tasks: int) -> int:
    """Which of the spout's tasks reads a partition; the same whatever else there is."""
    return (zlib.crc32(topic.encode()) + partition) % tasks


class KafkaTail:
    """One consumer. ``start``: where a partition begins that the group has no position for: "earliest", "latest", or milliseconds
    since 1970. ``skip_lost``: go on at the first offset there is when the position is no longer in the log; otherwise that raises
    ``DataLossError``. Every method may raise ``RetryableError``, after which it may be called again, and ``ConfigError``."""

    def __init__(
        self,
        settings: KafkaSettings,
        group: str,
        *,
        topics: tuple[str, ...],
        pattern: str | None,
        start: str | int,
        skip_lost: bool,
        task: int,
        tasks: int,
    ) -> None:
        self._where = settings.bootstrap_servers
        self._topics = topics
        self._pattern = re.compile(pattern) if pattern is not None else None
        self._start = start
        self._skip_lost = skip_lost
        self._task, self._tasks = task, tasks
        self._errors = ConnectionErrors(self._where)
        heard = {"error_cb": self._errors.heard}
        self._consumer = self._errors.made(lambda: Consumer({**settings.consumer(group), **heard}))
        self._assigned: set[Where] = set()
        self._paused: set[Where] = set()
        self._ended: set[Where] = set()
        self._looked_up: float | None = None
        self._missing: frozenset[str] = frozenset()
        self._known = False
        #: Whether partitions that are not known yet begin at their earliest offsets.
        self.settled = False
        #: Where partitions begin, by a checkpoint, that have not begun yet.
        self.sought: dict[Where, int] = {}

    def seek(self, positions: Mapping[Where, int]) -> None:
        """Begin at these offsets, as far as they are this task's, and at the earliest of other partitions. Before ``look_up``."""
        mine = {where: at for where, at in positions.items() if task_of(*where, self._tasks) == self._task}
        self.sought, self.settled = mine, True

    def settle(self) -> None:
        """Partitions that appear from now on begin at their earliest offsets, wherever the group is. Raises ``RetryableError`` when
        it is not known yet which there are."""
        if not self._known:
            raise RetryableError(f"Kafka at {self._where} has not told which partitions there are")
        self.settled = True

    def look_up(self) -> dict[Where, int]:
        """Assign partitions that are new. Returns the offset that each of those begins at. Cheap when it was called lately."""
        now = time.monotonic()
        if self._looked_up is not None and now - self._looked_up < LOOK_UP_EVERY_S:
            return {}
        self._looked_up = now - LOOK_UP_EVERY_S + AGAIN_AFTER_S  # when it fails: not in every round, but soon
        try:
            listed = self._consumer.list_topics(timeout=_REQUEST_S).topics
            names = self._wanted(listed)
            mine = [
                (name, number)
                for name in names
                for number in listed[name].partitions
                if task_of(name, number, self._tasks) == self._task
            ]
            begins = self._begins([where for where in mine if where not in self._assigned])
            if begins:
                self._consumer.incremental_assign([TopicPartition(*where, offset) for where, offset in begins.items()])
        except KafkaException as error:
            raise self._errors.explain(error) from error
        self._errors.connected = self._known = True
        self._looked_up = now
        for where in begins:
            self.sought.pop(where, None)
        self._assigned.update(begins)
        return begins

    @property
    def at_ends(self) -> bool:
        """Whether every partition that there is has been read to its end."""
        return self._known and self._assigned <= self._ended

    def poll(self, wait_s: float = 0.0) -> list[Message]:
        """Records that have come, in the order of their partitions."""
        try:
            heard = self._consumer.consume(CHUNK_RECORDS, wait_s)
        except KafkaException as error:
            raise kafka_error(error, f"Kafka at {self._where}") from error
        records = []
        for message in heard:
            if message.error() is None:
                self._ended.discard((message.topic(), message.partition()))
                records.append(message)
            else:
                self._event(message)
        return records

    def pause(self, wanted: Iterable[Where]) -> None:
        """Fetch nothing from these partitions; go on with the others."""
        now = set(wanted) & self._assigned
        try:
            if now - self._paused:
                self._consumer.pause([TopicPartition(*where) for where in now - self._paused])
            if self._paused - now:
                self._consumer.resume([TopicPartition(*where) for where in self._paused - now])
        except KafkaException as error:
            raise kafka_error(error, f"Kafka at {self._where}") from error
        self._paused = now

    def commit(self, offsets: Mapping[Where, int]) -> None:
        """Commit the next offset to read of each partition to the group, and wait for the answer."""
        if not offsets:
            return
        wanted = [TopicPartition(*where, offset) for where, offset in offsets.items()]
        try:
            for answer in self._consumer.commit(offsets=wanted, asynchronous=False) or ():
                if answer.error is not None:
                    raise KafkaException(answer.error)
        except KafkaException as error:
            raise self._errors.explain(error) from error

    def close(self) -> None:
        self._consumer.close()

    def _wanted(self, listed: Mapping[str, object]) -> list[str]:
        if self._pattern is not None:
            return sorted(name for name in listed if self._pattern.fullmatch(name) and not name.startswith("__"))
        missing = frozenset(name for name in self._topics if name not in listed)
        if missing - self._missing:
            _log.warning("source.topics_missing", topics=sorted(missing), reason="waiting for them to be created")
        self._missing = missing
        return [name for name in self._topics if name in listed]

    def _begins(self, new: list[Where]) -> dict[Where, int]:
        """Where partitions begin: where a checkpoint says; else at what the group has committed, or else where ``start`` says, and
        that is committed, so that it stays where it was first said to be."""
        if not new:
            return {}
        if self.settled:
            return {where: self.sought[where] if where in self.sought else self._low_of(where) for where in new}
        found = self._consumer.committed([TopicPartition(*where) for where in new], timeout=_REQUEST_S)
        begins: dict[Where, int] = {}
        fresh: dict[Where, int] = {}
        for each in found:
            if each.error is not None:
                raise KafkaException(each.error)
            where = each.topic, each.partition
            if each.offset >= 0:
                begins[where] = each.offset
            else:
                begins[where] = fresh[where] = self._start_of(where)
        self.commit(fresh)
        return begins

    def _start_of(self, where: Where) -> int:
        low, high = self._consumer.get_watermark_offsets(TopicPartition(*where), timeout=_REQUEST_S)
        if self._start == "earliest":
            return int(low)
        if self._start == "latest":
            return int(high)
        asked = self._consumer.offsets_for_times([TopicPartition(*where, int(self._start))], timeout=_REQUEST_S)[0]
        return int(asked.offset) if asked.offset >= 0 else int(high)

    def _low_of(self, where: Where) -> int:
        low, _ = self._consumer.get_watermark_offsets(TopicPartition(*where), timeout=_REQUEST_S)
        return int(low)

    def _event(self, message: Message) -> None:
        error, where = message.error(), (message.topic(), message.partition())
        if error.code() == KafkaError._PARTITION_EOF:
            self._ended.add(where)
            return
        if error.code() not in NOT_IN_LOG:
            if error.fatal() or not error.retriable():
                raise kafka_error(error, f"Kafka at {self._where}")
            return
        lost = f"partition {partition_id(*where)} no longer holds offset {message.offset()}: {error.str()}"
        if not self._skip_lost:
            raise DataLossError(
                f"{lost}. Retention removed it, the log was truncated, or the topic was created again; say on_data_loss='skip' to "
                "go on with what is there"
            )
        _log.warning("source.offsets_lost", reason=lost)
        self._consumer.incremental_unassign([TopicPartition(*where)])
        self._consumer.incremental_assign([TopicPartition(*where, OFFSET_BEGINNING)])
