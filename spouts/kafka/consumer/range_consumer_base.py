"""The positions of a session that reads exact ranges, and the consumer's events about them.

``range_consumer`` has the invariants, and the session that reads message by message;
``native_range_consumer`` has the one that reads into columns.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as ClientPartition

from framework.clients.kafka_errors import kafka_error
from framework.clients.kafka_settings import ConnectionErrors, KafkaSettings
from framework.errors import DataLossError, RetryableError
from spouts.kafka.consumer.adaptive_fetch_size import FetchPace
from spouts.kafka.consumer.consumer_seek import Assignment, placed
from spouts.kafka.consumer.damaged_batches import DAMAGED, NOT_IN_LOG, PLACED_AGAIN_MAX, DamagedBatch, is_unreadable
from spouts.kafka.consumer.decompression_failures import UnreadableBatches
from spouts.kafka.partition_plan_entries import TopicPartition, partition_id

#: Up to this many records before a range are read and dropped; for more, a seek is cheaper.
SKIP_RECORDS_MAX = 5_000
#: Of a consumer that has lost its position: the next read places it again.
NEVER = sys.maxsize
#: How often a damaged batch is read, since it may have been damaged only in transit.
DAMAGED_READ_MAX = 2


class Range(NamedTuple):
    """A half-open range of offsets.

    * ``leader_epoch``: the epoch in which ``first`` was in the log. With it, the broker reports if
      the log was truncated and has grown again.
    * ``end_epoch``: the same for ``end``. Every record of the range was written in this epoch or
      before.
    * ``topic_id``: the planned topic. Records fetched from another topic of this name must not be
      used."""

    first: int
    end: int
    leader_epoch: int | None = None
    topic_id: str | None = None
    end_epoch: int | None = None

    def of_same_log(self, other: Range) -> bool:
        """Whether records fetched for ``other`` can serve this range. An unknown end epoch is
        accepted."""
        return self.topic_id == other.topic_id and self.end_epoch in (None, other.end_epoch)

    def follows(self, former: Range, resume: int) -> bool:
        """Whether a consumer that has read ``former``, and can still deliver every record from
        ``resume`` on, can continue with this range. Otherwise a seek is needed, or cheaper."""
        return resume <= self.first <= resume + SKIP_RECORDS_MAX and self.of_same_log(former)

    def rest(self, position: int) -> Range:
        """The rest of the range from ``position`` on. The epoch of the end is valid for every
        offset in between."""
        return self if position == self.first else self._replace(first=position, leader_epoch=self.end_epoch)


@dataclass(slots=True)
class Assigned:
    """A partition of a consumer.

    * ``wanted``: the current or last range.
    * ``resume``: every record from this offset on is still to come, or was kept for later ranges.
    * ``is_fresh``: it was assigned in this read.
    * ``placed_again``: how often this read has repositioned the consumer.
    * ``damaged_read``: how often this read has met a damaged batch.
    * ``end_seen``: the highest offset at which the partition ended."""

    resume: int
    wanted: Range
    _: KW_ONLY
    is_fresh: bool = True
    placed_again: int = 0
    damaged_read: int = 0
    end_seen: int = -1


A = TypeVar("A", bound=Assigned)


def records_of(ranges: Mapping[TopicPartition, Range]) -> int:
    """How many records these ranges have at most."""
    return sum(each.end - each.first for each in ranges.values())


def fails(topic: str) -> bool:
    """The policy for a topic of which no record may be left out."""
    return False


class RangeSession(ABC, Generic[A]):
    """One consumer with its positions. A subclass opens the consumer, and reads."""

    _consumer: Any
    _assignment: Assignment

    def __init__(self, settings: KafkaSettings, group: str) -> None:
        self._settings, self._group = settings, group
        self._where = settings.bootstrap_servers
        self._errors = ConnectionErrors(self._where)
        self._assigned: dict[TopicPartition, A] = {}
        self._pace = FetchPace()
        self._check_alive: Callable[[], None] = lambda: None
        self._takes_out: Callable[[str], bool] = fails
        self._unreadable = UnreadableBatches(settings, group)
        self._kept: set[TopicPartition] = set()  # keep their position although the read failed

    @abstractmethod
    def _begun(self, wanted: Range) -> A:
        """The state of a partition that was just placed at a range."""

    def connect(self) -> None:
        """Open the connections that the first read needs."""
        try:
            self._assignment.look_up()
        except KafkaException as error:
            self._take_reports()
            raise self._errors.explain(error) from error

    def rest(self) -> None:
        """Stop fetching until the next read, which assigns its partitions again."""
        self._unassign(list(self._assigned))
        self._unreadable.close()

    def close(self) -> None:
        self._unreadable.close()
        self._consumer.close()

    def _take_reports(self) -> None:
        """Take the consumer's reports about errors that it has not delivered by itself."""

    def _position(self, ranges: Mapping[TopicPartition, Range]) -> None:
        """Ensure that every record from the ranges' first offsets on is still to come, or was kept
        by an earlier read."""
        unplaced = {}
        for tp, wanted in ranges.items():
            assigned = self._assigned.get(tp)
            if assigned is not None and wanted.follows(assigned.wanted, assigned.resume):
                assigned.wanted, assigned.resume, assigned.is_fresh = wanted, wanted.first, False
                assigned.placed_again = assigned.damaged_read = 0
            else:
                unplaced[tp] = wanted
        if unplaced:
            self._assign(unplaced)

    def _is_confirmed(self, tp: TopicPartition, position: int) -> bool:
        """Whether a consumer that has a record or an end beyond ``position`` has all records before
        it. If it has none of the range, and has read on from an earlier range, it may have missed
        records, because a producer can make a batch with false offsets (``SECURITY.md``): then it
        is placed at the range."""
        assigned = self._assigned[tp]
        if position > assigned.wanted.first or assigned.is_fresh:
            return True
        self._assign({tp: assigned.wanted})
        return False

    def _event(self, tp: TopicPartition, position: int, error: KafkaError, offset: int) -> DamagedBatch | None:
        """Handle an event of a partition that has been read up to ``position``. ``offset``: where
        the consumer was; negative if it does not say. Returns a batch that the read passes over.

        An event about another position comes from an earlier read, or from a batch with false
        offsets: librdkafka reports late. So it is not believed, and the partition is placed again.
        Raises ``DataLossError`` if the wanted offset is not in the log."""
        assigned = self._assigned[tp]
        if error.code() == KafkaError._PARTITION_EOF:
            assigned.end_seen = max(assigned.end_seen, offset)
            return None
        if error.code() in DAMAGED:
            return self._damaged(tp, position, error, offset)
        is_lost = error.code() in NOT_IN_LOG
        if not is_lost and error.retriable() and not error.fatal():
            return None  # librdkafka goes on by itself
        if (is_lost and 0 <= offset != position) or not (assigned.is_fresh or error.fatal()):
            if assigned.placed_again == PLACED_AGAIN_MAX:
                raise elsewhere(tp, position, offset)
            self._assign({tp: assigned.wanted.rest(position)})
            self._assigned[tp].placed_again = assigned.placed_again + 1
            return None
        raise not_in_log(tp, position, error) if is_lost else kafka_error(error, f"partition {partition_id(*tp)}")

    def _damaged(self, tp: TopicPartition, position: int, error: KafkaError, offset: int) -> DamagedBatch | None:
        """Handle a damaged batch: read it once more. If it still is damaged, returns it where its
        producer made it so and its records may be left out; otherwise raises ``DataLossError``."""
        assigned, at = self._assigned[tp], max(position, offset)
        if at >= assigned.wanted.end:
            assigned.end_seen, assigned.resume = at, NEVER
            return None
        if is_unreadable(error) and self._takes_out(tp[0]):
            found = self._unreadable.at(tp, at)
            if found is not None:
                self._assign({tp: assigned.wanted.rest(found.next)})
                return found
        if assigned.damaged_read >= DAMAGED_READ_MAX - 1:
            raise damaged(tp, at, error)
        self._assign({tp: assigned.wanted.rest(position)})
        self._assigned[tp].damaged_read = assigned.damaged_read + 1
        return None

    def _assign(self, ranges: Mapping[TopicPartition, Range]) -> None:
        """Start at the ranges' first offsets. Drops all records fetched before."""
        self._unassign(ranges)
        try:
            self._assignment.begin([placed(tp, each.first, each.leader_epoch) for tp, each in ranges.items()])
        except KafkaException as error:
            raise kafka_error(error, f"Kafka at {self._where}") from error
        for tp, wanted in ranges.items():
            self._assigned[tp] = self._begun(wanted)

    def _unassign(self, gone: Iterable[TopicPartition]) -> None:
        known = [tp for tp in gone if tp in self._assigned]
        if known:
            for tp in known:
                del self._assigned[tp]
            self._consumer.incremental_unassign([ClientPartition(*tp) for tp in known])


def elsewhere(tp: TopicPartition, position: int, offset: int) -> RetryableError:
    """The error for a consumer that is not at its position after several assignments."""
    return RetryableError(
        f"partition {partition_id(*tp)}: the consumer was placed at offset {position} {PLACED_AGAIN_MAX} times, and says of "
        f"offset {offset} that it is not in the log; the next attempt begins with another position"
    )


def not_in_log(tp: TopicPartition, position: int, error: KafkaError) -> DataLossError:
    """The error for a wanted offset that is not in the log."""
    return DataLossError(
        f"partition {partition_id(*tp)} no longer holds offset {position} as it was: {error.str()}. "
        "Retention removed it, the log was truncated, or the topic was created again"
    )


def damage(tp: TopicPartition, position: int, text: str, *, made_so: bool) -> str:
    """The reason why a batch in its leader's log cannot be read. ``text``: of the consumer's
    error. ``made_so``: whether its producer is the reason."""
    batch = f"partition {partition_id(*tp)}: the batch that holds offset {position}"
    if not made_so:
        return f"{batch} is damaged in the broker's log: {text}"
    return (
        f"{batch} cannot be decompressed: {text}. Its checksum is right, so its producer made it so; "
        "on_bad_record='dead_letter' or 'skip' would leave it out"
    )


def damaged(tp: TopicPartition, position: int, error: KafkaError) -> DataLossError:
    """The error for a damaged batch at the wanted offset in its leader's log."""
    made_so = is_unreadable(error)
    advice = "on_data_loss='skip' of an opaque spout goes on after the batch and records the gap"
    if not made_so:
        advice = f"restore it from another replica, by another leader; {advice}"
    return DataLossError(f"{damage(tp, position, error.str(), made_so=made_so)}; {advice}")


def replaced(tp: TopicPartition, wanted: Range, offset: int, leader_epoch: int) -> DataLossError:
    """The error for a record at ``offset`` that was written after the range was planned."""
    return DataLossError(
        f"partition {partition_id(*tp)} holds another record at offset {offset} than when it was planned (of leader "
        f"epoch {leader_epoch}, and the plan is of {wanted.end_epoch}): the log was truncated and has grown again"
    )
