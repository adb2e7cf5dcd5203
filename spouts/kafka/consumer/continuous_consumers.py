"""Consumers that follow partitions for ``KafkaTail``: as Arrow columns, by the compiled part of the
spouts, or message by message, by confluent-kafka's consumer.

They only read partitions continuously. ``KafkaTail`` interprets events, and decides where a
partition begins.

Invariants:

1. A record is returned once, in the order of its partition, even if an event or an error came with
   it.
2. A partition that began at a position returns no record fetched before that ``begin``.
3. After a damaged batch, no record of its partition is returned until the partition begins again:
   librdkafka continues at an undefined position behind the batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException, Message
from confluent_kafka import TopicPartition as ClientPartition

from framework.clients.consumer_close_timeout import Consumer
from framework.clients.kafka_settings import ConnectionErrors, KafkaSettings
from framework.clients.kafka_stall_detection import Traffic
from spouts.kafka.consumer.adaptive_fetch_size import FetchPace
from spouts.kafka.consumer.consumer_seek import Assignment, placed
from spouts.kafka.consumer.damaged_batches import DAMAGED
from spouts.kafka.consumer.native_range_consumer import ChunkBuilder, NativeConsumer, event_error, queues_for
from spouts.kafka.consumer.record_chunk import ColumnChunk, MessageChunk, RecordChunk, known_epoch, partition_of
from spouts.kafka.partition_plan_entries import Position, TopicPartition
from spouts.kafka.record_deserialization import Parts

#: Records of one chunk.
CHUNK_RECORDS = 2_000
#: The most messages to hold while none are taken.
EARLY_MAX = 10_000


class Event(NamedTuple):
    """A consumer's report other than a record. ``tp``: meaningless if the error concerns the whole
    consumer. ``offset``: the requested offset, if known."""

    tp: TopicPartition
    error: KafkaError
    offset: int | None = None


class Feed(ABC):
    """One consumer, used by one thread. Methods raise ``KafkaException``."""

    def __init__(self) -> None:
        #: The partitions that have been read to their ends.
        self.ended: set[TopicPartition] = set()
        self._damaged: set[TopicPartition] = set()

    @abstractmethod
    def begin(self, positions: Mapping[TopicPartition, Position]) -> None:
        """Read these partitions from these positions, whether they are being read or not. If it
        raises, none of them is read; other partitions continue."""

    @abstractmethod
    def pause(self, wanted: Set[TopicPartition]) -> None:
        """Stop taking records of these partitions, and resume all others."""

    @abstractmethod
    def position(self, tp: TopicPartition) -> int | None:
        """The offset after the last taken record of a partition. None while arrived records have
        not been taken."""

    @abstractmethod
    def take(self) -> tuple[RecordChunk | None, list[Event]]:
        """Up to about ``CHUNK_RECORDS`` arrived records, by partition, and the events. Never
        waits."""

    @abstractmethod
    def hear(self) -> list[Event]:
        """Let the consumer work while no records are taken. Never waits."""

    @abstractmethod
    def close(self) -> None: ...

    def _event(self, tp: TopicPartition, error: KafkaError, offset: int | None) -> Event:
        if error.code() in DAMAGED:
            self._damaged.add(tp)
        return Event(tp, error, offset)


class MessageFeed(Feed):
    """confluent-kafka's consumer. All partitions share one queue, so records that arrive while none
    are wanted are buffered here."""

    def __init__(self, consumer: Consumer) -> None:
        super().__init__()
        self._consumer = consumer
        self._assignment = Assignment(consumer)
        self._assigned: set[TopicPartition] = set()
        self._paused: Set[TopicPartition] = set()
        self._early: list[Message] = []
        self._next: dict[TopicPartition, int] = {}  # offset after the taken records

    def begin(self, positions: Mapping[TopicPartition, Position]) -> None:
        if not self._assigned.isdisjoint(positions):
            held = [each for each in self._consumer.assignment() if (each.topic, each.partition) in positions]
            self._consumer.incremental_unassign(held)
        self._assignment.begin([placed(tp, at.offset, at.leader_epoch) for tp, at in positions.items()])
        self._assigned.update(positions)
        self._next.update({tp: at.offset for tp, at in positions.items()})
        # librdkafka remembers the pause of a partition even if it was unassigned meanwhile.
        self.pause(self._paused - positions.keys())
        self.ended -= positions.keys()
        self._damaged -= positions.keys()
        self._early = [each for each in self._early if partition_of(each) not in positions]

    def pause(self, wanted: Set[TopicPartition]) -> None:
        if wanted - self._paused:
            self._consumer.pause([ClientPartition(*tp) for tp in wanted - self._paused])
        if self._paused - wanted:
            self._consumer.resume([ClientPartition(*tp) for tp in self._paused - wanted])
        self._paused = wanted

    def position(self, tp: TopicPartition) -> int | None:
        return None if any(partition_of(each) == tp for each in self._early) else self._next[tp]

    def take(self) -> tuple[MessageChunk | None, list[Event]]:
        events = self.hear() if not self._early else []
        # A stable sort keeps the order within each partition.
        records, self._early = sorted(self._early, key=partition_of), []
        self._next.update({partition_of(each): each.offset() + 1 for each in records})
        return MessageChunk(records) if records else None, events

    def hear(self) -> list[Event]:
        if len(self._early) >= EARLY_MAX:
            self.pause(frozenset(self._assigned))  # the next call of ``pause`` resumes them
        events = []
        for message in self._consumer.consume(CHUNK_RECORDS, 0):
            tp, error = partition_of(message), message.error()
            if tp in self._damaged:
                continue
            if error is None:
                self.ended.discard(tp)
                self._early.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                self.ended.add(tp)
            else:
                events.append(self._event(tp, error, self._requested(tp, message)))
        return events

    def close(self) -> None:
        self._consumer.close()

    def _requested(self, tp: TopicPartition, message: Message) -> int | None:
        """The requested offset, which an event about another log lacks: it is the one after the
        last record."""
        if message.offset() is not None:
            return int(message.offset())
        if tp not in self._assigned:
            return None
        # negative when no record has arrived
        after: int = self._consumer.position([ClientPartition(*tp)])[0].offset
        return after if after >= 0 else None


class ColumnFeed(Feed):
    """A consumer that reads into columns. Each partition has a queue of its own, in which unwanted
    records stay."""

    def __init__(self, settings: KafkaSettings, group: str, errors: ConnectionErrors, parts: Parts) -> None:
        super().__init__()
        self._settings = settings
        self._group = group
        self._errors = errors
        self._parts = parts._replace(epochs=True)
        self._next: dict[TopicPartition, Position] = {}  # offset after the taken records
        self._served: dict[TopicPartition, int] = {}  # the last call of ``take`` that served it
        self._calls = 0
        self._paused: Set[TopicPartition] = frozenset()
        self._pace = FetchPace()
        self._consumer, self._traffic, self._queues = self._opened(1)
        self._assignment = Assignment(self._consumer)
        self._chunk = self._begun()

    def begin(self, positions: Mapping[TopicPartition, Position]) -> None:
        again = self._next.keys() & positions.keys()
        if again:
            for tp in again:
                del self._next[tp]
                del self._served[tp]
            self._consumer.incremental_unassign([ClientPartition(*tp) for tp in again])
        if len(self._next) + len(positions) > self._queues:
            self._open_anew(positions)
        else:
            self._place(self._assignment, positions)
        self._next.update({tp: Position(at.offset, None, at.leader_epoch) for tp, at in positions.items()})
        self._served.update(dict.fromkeys(positions, 0))
        self._paused -= positions.keys()
        self.ended -= positions.keys()
        self._damaged -= positions.keys()

    def pause(self, wanted: Set[TopicPartition]) -> None:
        self._paused = wanted

    def position(self, tp: TopicPartition) -> int:
        return self._next[tp].offset

    def take(self) -> tuple[ColumnChunk | None, list[Event]]:
        if self._pace.is_stale and self._next and not len(self._chunk):
            self._open_anew({})
        events = self.hear()
        self._calls += 1
        held = self._paused | self._damaged
        arrived = [tp for tp in self._consumer.raw.arrived() if tp in self._next and tp not in held]
        for tp in sorted(arrived, key=self._served.__getitem__):  # the longest waiting comes first
            self._served[tp] = self._calls
            if self._fill(tp, events):
                break
        if not len(self._chunk):
            self._pace.went_well()
            return None, events
        chunk, self._chunk = self._chunk.finish(), self._begun()
        self._pace.has_seen(piece=chunk.value_bytes, ahead=0)
        for tp, place in chunk.places():
            self._next[tp].leader_epoch = known_epoch(int(chunk.epochs[place[-1]]))
        return chunk, events

    def hear(self) -> list[Event]:
        events = []
        for error, topic, number in self._consumer.poll()[0]:
            tp = topic or "", number
            events.append(Event(tp, error, self._next[tp].offset if tp in self._next else None))
        self._pace.has_seen(piece=0, ahead=self._traffic.ahead_bytes(shared=False), received=self._traffic.received)
        return events

    def close(self) -> None:
        self._consumer.close()

    def _fill(self, tp: TopicPartition, events: list[Event]) -> bool:
        """Add a partition's arrived records to the chunk. Returns whether the chunk is full."""
        position = self._next[tp]
        while True:
            try:
                rows, offset, how, at, code, text = self._chunk.fill(
                    tp, position.offset, end=None, epoch_max=None, wait_ms=0
                )
            except KafkaException as error:  # records added before are still returned
                events.append(Event(tp, error.args[0]))
                return False
            position.offset = offset
            if rows:
                self.ended.discard(tp)
            if how != "event":
                return how == "full"
            if code == KafkaError._PARTITION_EOF:
                self.ended.add(tp)
            else:
                events.append(self._event(tp, event_error(code, text), at if at >= 0 else offset))
                if tp in self._damaged:
                    return False

    def _opened(self, partitions: int) -> tuple[NativeConsumer, Traffic, int]:
        queues = queues_for(partitions)
        conf = self._pace.settings(self._settings.consumer(self._group, queues=queues), queues)
        traffic = Traffic()
        made = {**traffic.settings(conf, self._pace.report_every_ms(queues)), **conf}
        return self._errors.made(lambda: NativeConsumer(made, self._errors.on_error)), traffic, queues

    def _open_anew(self, positions: Mapping[TopicPartition, Position]) -> None:
        """Replace the consumer by one that reads these partitions, too; keep the old one if that
        fails."""
        made, traffic, queues = self._opened(len(self._next) + len(positions))
        assignment = Assignment(made)
        try:
            self._place(assignment, {**self._next, **positions})
        except BaseException:
            made.close()
            raise
        former = self._consumer
        self._consumer, self._traffic, self._queues, self._assignment = made, traffic, queues, assignment
        self._chunk = self._begun()
        self.ended.clear()
        former.close()

    def _begun(self) -> ChunkBuilder:
        return ChunkBuilder(self._consumer.raw, self._parts, CHUNK_RECORDS, CHUNK_RECORDS)

    @staticmethod
    def _place(assignment: Assignment, positions: Mapping[TopicPartition, Position]) -> None:
        assignment.begin([placed(tp, at.offset, at.leader_epoch) for tp, at in positions.items()])
