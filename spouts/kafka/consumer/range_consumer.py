"""Consumers that read exact ranges, message by message.

Each consumer is kept for a worker process, configuration and spout task, positioned at the end of
the last range. So the records of the next batch may already be fetched.

Invariants:

1. A range is complete at a record at or after its end, or when the consumer reports the end of the
   partition at or after it (C16). So transaction markers, aborted records and compacted records at
   the end of a range do not block it.
2. Every record of the range that a ``read_committed`` reader may see is delivered once, in the
   order of its partition.
3. A record that belongs to no range of this read is kept for the next read, never dropped. From
   offset ``resume`` on, no record has been dropped.
4. A session is used by one read at a time.
5. Records that were fetched from one log are never returned for another (C26). If the plan has
   another topic id or leader epoch than the last read, a kept consumer is positioned again, and the
   broker checks the position. A record with a later leader epoch than the plan's is not the planned
   record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from confluent_kafka import KafkaError, KafkaException, Message

from framework.clients.consumer_close_timeout import Consumer
from framework.clients.kafka_errors import kafka_error
from framework.clients.kafka_settings import KafkaSettings
from framework.clients.kafka_stall_detection import Traffic
from framework.errors import RetryableError
from spouts.kafka.consumer.adaptive_fetch_size import LARGE_BYTES
from spouts.kafka.consumer.consumer_seek import Assignment
from spouts.kafka.consumer.damaged_batches import DAMAGED, NOT_IN_LOG, DamagedBatch
from spouts.kafka.consumer.decompression_failures import unreadable_chunk
from spouts.kafka.consumer.range_consumer_base import Assigned, Range, RangeSession, fails, records_of, replaced
from spouts.kafka.consumer.record_chunk import ColumnChunk, MessageChunk
from spouts.kafka.partition_plan_entries import TopicPartition, partition_id
from spouts.kafka.record_deserialization import EVERYTHING, Parts

#: Records per call of ``consume`` and per record batch.
CHUNK_RECORDS = 50_000
#: A task reads as many partitions concurrently as have about this many records in total.
SIDE_BY_SIDE_RECORDS_MAX = 20_000
#: A partition without progress for this long fails the attempt. The replay waits longer, and
#: fetches less per request (``FetchPace``).
SILENCE_MAX_S = 10.0
#: After this long without a record, the client's statistics decide whether it makes progress.
QUIET_S = 0.5
#: About the most bytes of records that are kept for later ranges. Beyond it, partitions that are
#: not read now are fetched again later.
AHEAD_BYTES_MAX = 64 << 20
_POLL_S = 0.05
#: The size that a record is expected to have before one was read.
_FIRST_RECORD_BYTES = 16 << 10


@dataclass(slots=True)
class _Assigned(Assigned):
    """A partition of a consumer. ``ahead``: records of later ranges, from ``resume`` on.
    ``ahead_bytes``: of their values."""

    ahead: list[Message] = field(default_factory=list)
    ahead_bytes: int = 0


#: Yields the chunks of a read; returns the remaining ranges.
_Reading = Generator[MessageChunk | ColumnChunk, None, dict[TopicPartition, Range]]


def read_together(ranges: Mapping[TopicPartition, Range]) -> dict[TopicPartition, Range]:
    """The first of these partitions, with at most ``SIDE_BY_SIDE_RECORDS_MAX`` records in total,
    and at least one partition. Each partition costs the broker's answer time, even with few
    records.

    >>> ranges = {("t", number): Range(0, 4) for number in range(6_000)}
    >>> len(read_together(ranges)), len(read_together({("s", 0): Range(0, 90_000), **ranges}))
    (5000, 1)
    """
    found: dict[TopicPartition, Range] = {}
    records = 0
    for tp, each in ranges.items():
        records += each.end - each.first
        if found and records > SIDE_BY_SIDE_RECORDS_MAX:
            break
        found[tp] = each
    return found


class KafkaSession(RangeSession[_Assigned]):
    """Reads message by message."""

    def __init__(self, settings: KafkaSettings, group: str) -> None:
        super().__init__(settings, group)
        self._record_bytes = _FIRST_RECORD_BYTES  # of the last records, on average
        self._passed: dict[TopicPartition, DamagedBatch] = {}  # unreadable batches that were just found
        self._open()

    def read(
        self,
        ranges: Mapping[TopicPartition, Range],
        parts: Parts = EVERYTHING,
        check_alive: Callable[[], None] = lambda: None,
        takes_out: Callable[[str], bool] = fails,
    ) -> Iterator[MessageChunk | ColumnChunk]:
        """The records of all ranges, in chunks. A chunk may contain several partitions. Messages
        always have all parts."""
        self._check_alive, self._takes_out = check_alive, takes_out
        yield from self._read_all(ranges)
        self._pace.went_well()

    def _open(self) -> None:
        conf = self._pace.settings(self._settings.consumer(self._group))
        traffic = Traffic()
        made = {**traffic.settings(conf, self._pace.report_every_ms(1)), **conf, "error_cb": self._errors.on_error}
        self._consumer = self._errors.made(lambda: Consumer(made))
        self._traffic = traffic
        self._assignment = Assignment(self._consumer)

    def _read_all(self, ranges: Mapping[TopicPartition, Range]) -> Iterator[MessageChunk | ColumnChunk]:
        wanted = {tp: each for tp, each in ranges.items() if each.first < each.end}
        while wanted:
            if self._pace.is_stale:
                self._open_anew()
            group = dict(islice(wanted.items(), 1)) if self._pace.is_narrow else read_together(wanted)
            at_once = not self._pace.is_narrow and records_of(group) <= SIDE_BY_SIDE_RECORDS_MAX
            if not at_once or len(group) < len(wanted):
                self._unassign([other for other in self._assigned if other not in group])
            rest = yield from self._read_side_by_side(group) if at_once else self._read(group, at_once=False)
            wanted = rest | {other: its for other, its in wanted.items() if other not in group}

    def _read_side_by_side(self, ranges: Mapping[TopicPartition, Range]) -> _Reading:
        """As ``_read``: one chunk with all records, or several if they are large."""
        reading = self._read(ranges, at_once=True)
        records: list[Message] = []
        size = 0
        while True:
            try:
                chunk = next(reading)
            except StopIteration as ended:
                if records:
                    yield _sorted_chunk(records)
                left: dict[TopicPartition, Range] = ended.value
                return left
            if isinstance(chunk, ColumnChunk):  # it stands for an unreadable batch
                yield chunk
                continue
            records += chunk.messages
            size += chunk.value_bytes
            if size > LARGE_BYTES:
                yield _sorted_chunk(records)
                records, size = [], 0

    def _open_anew(self) -> None:
        former = self._consumer
        self._open()
        self._assigned.clear()
        former.close()

    def _read(self, ranges: Mapping[TopicPartition, Range], *, at_once: bool) -> _Reading:
        """Read until the ranges are complete, or the consumer must be replaced. Returns the
        remaining ranges."""
        began_s = time.monotonic()
        try:
            return (yield from self._until_complete(ranges, at_once))
        except BaseException:
            self._unassign(list(self._assigned.keys() - self._kept))  # the next read must start clean
            self._kept.clear()
            self._passed.clear()
            if self._traffic.was_throttled_since(began_s):
                self._pace.was_throttled()
            raise

    def _consume(self, most: int, at_once: bool) -> list[Message]:
        """Up to ``most`` records and events, of about ``LARGE_BYTES``. ``at_once``: return those
        available, or the first to arrive. Otherwise wait briefly for full chunks, which cost less
        per record."""
        most = min(most, CHUNK_RECORDS, LARGE_BYTES // self._record_bytes + 1)
        try:
            if at_once:
                heard: list[Message] = self._consumer.consume(most, 0) or self._consumer.consume(1, _POLL_S)
            else:
                heard = self._consumer.consume(most, _POLL_S)
            return heard
        except KafkaException as error:
            raise kafka_error(error, f"Kafka at {self._where}") from error

    def _until_complete(self, ranges: Mapping[TopicPartition, Range], at_once: bool) -> _Reading:
        open_ranges = dict(ranges)
        position = {tp: each.first for tp, each in ranges.items()}
        self._position(ranges)
        for tp, each in ranges.items():
            early = self._take_ahead(tp, each)
            if early:
                position[tp] = early[-1].offset() + 1
                yield MessageChunk(early)
        last_heard = time.monotonic()
        while True:
            for tp in list(open_ranges):
                assigned, end = self._assigned[tp], open_ranges[tp].end
                is_complete = position[tp] >= end or assigned.ahead or assigned.end_seen >= end
                if is_complete and self._is_confirmed(tp, position[tp]):
                    assigned = self._assigned[tp]
                    del open_ranges[tp]
                    assigned.resume = max(assigned.resume, end)
            if not open_ranges:
                return {}
            if self._pace.is_stale:
                return {tp: each.rest(position[tp]) for tp, each in open_ranges.items()}
            missing = sum(each.end - position[tp] for tp, each in open_ranges.items())
            heard = self._consume(missing, at_once)
            if not heard:
                self._check(ranges, position)
            if heard or (
                time.monotonic() - last_heard > QUIET_S and any(self._traffic.has_fetched(*tp) for tp in open_ranges)
            ):
                last_heard = time.monotonic()
            elif time.monotonic() - last_heard > SILENCE_MAX_S * self._pace.patience:
                self._pace.was_silent()
                tp = next(iter(open_ranges))
                raise silent(tp, position[tp], open_ranges[tp], self._errors.reason())
            records = self._sorted_out(heard, open_ranges, position)
            del heard  # frees the decompressed records when the caller has finished with them
            chunk = MessageChunk(records)
            if records:
                self._record_bytes = chunk.value_bytes // len(records) + 1
            ahead = self._traffic.ahead_bytes(shared=True)
            alone = chunk.value_bytes if len(records) == 1 else 0
            self._pace.has_seen(piece=alone, ahead=ahead, received=self._traffic.received)
            if records:
                yield chunk
            del records, chunk
            yield from self._pass_over(open_ranges, position)

    def _check(self, ranges: Mapping[TopicPartition, Range], position: Mapping[TopicPartition, int]) -> None:
        """Let the caller end the read. Partitions without delivered records keep their position."""
        try:
            self._check_alive()
        except BaseException:
            untouched = {tp for tp, each in ranges.items() if position[tp] == each.first}
            self._kept = {tp for tp in untouched & self._assigned.keys() if not self._assigned[tp].ahead}
            raise

    def _pass_over(
        self, open_ranges: Mapping[TopicPartition, Range], position: dict[TopicPartition, int]
    ) -> Iterator[ColumnChunk]:
        """Continue after the unreadable batches that were just found. Yields a record for each."""
        passed, self._passed = self._passed, {}
        for tp, batch in passed.items():
            yield unreadable_chunk(tp, batch.first, min(batch.next, open_ranges[tp].end))
            position[tp] = batch.next

    def _sorted_out(
        self, heard: list[Message], open_ranges: Mapping[TopicPartition, Range], position: dict[TopicPartition, int]
    ) -> list[Message]:
        """The records of open ranges. Handles events, and keeps records of later ranges."""
        # errors are truthy; a third faster than a loop over the messages
        eventful = any(map(Message.error, heard))
        before = self._assigned
        if eventful:
            before = dict(self._assigned)
            heard = self._handled(heard, position)
        if not heard:
            return heard
        if (
            len(self._assigned) == 1 and not eventful
        ):  # an event may unassign the partition of later messages in this loop
            # With one partition, and never more records than its range can hold, check only both
            # ends.
            tp, only = next(iter(open_ranges.items()))
            first = heard[0].offset()
            begins = first == position[tp] or (first > position[tp] > only.first)
            if begins and heard[-1].offset() < only.end:
                position[tp] = heard[-1].offset() + 1
                _check_epochs(tp, only, heard)
                return heard
        records = []
        placed_now: set[TopicPartition] = set()
        of_range: dict[TopicPartition, list[Message]] = {tp: [] for tp in open_ranges}
        for message in heard:
            tp = (message.topic(), message.partition())
            offset = message.offset()
            wanted = open_ranges.get(tp)
            if tp in placed_now:
                continue
            if wanted is None or offset >= wanted.end:
                assigned = self._assigned.get(tp)
                # If an event has repositioned the partition, the record is delivered again.
                if assigned is not None and assigned is before.get(tp) and offset >= assigned.resume:
                    assigned.ahead.append(message)
                    assigned.ahead_bytes += len(message)
                    if len(assigned.ahead) > CHUNK_RECORDS and wanted is None:
                        # not needed any more: another worker reads the partition
                        self._unassign([tp])
            elif offset >= position[tp]:
                if offset > position[tp] == wanted.first and not self._is_confirmed(tp, wanted.first):
                    placed_now.add(tp)
                    continue
                records.append(message)
                of_range[tp].append(message)
                position[tp] = offset + 1
        for tp, its in of_range.items():
            _check_epochs(tp, open_ranges[tp], its)
        if sum(each.ahead_bytes for each in self._assigned.values()) > AHEAD_BYTES_MAX:
            self._unassign([tp for tp in self._assigned if tp not in open_ranges])
        return records

    def _handled(self, heard: list[Message], position: Mapping[TopicPartition, int]) -> list[Message]:
        """Handle the events. Returns the records, without those after an event that repositioned
        their partition: these belong to the old position, and after a damaged batch they may not be
        valid records."""
        records, elsewhere = [], set()
        for message in heard:
            tp = (message.topic(), message.partition())
            if tp in elsewhere:
                continue
            if message.error() is None:
                records.append(message)
                continue
            assigned = self._assigned.get(tp)
            self._hear(message, position)
            if self._assigned.get(tp) is not assigned:
                elsewhere.add(tp)
        return records

    def _hear(self, message: Message, position: Mapping[TopicPartition, int]) -> None:
        """Handle an event. Notes an unreadable batch in ``_passed``."""
        error, tp = message.error(), (message.topic(), message.partition())
        offset = message.offset() if message.offset() is not None else -1
        assigned = self._assigned.get(tp)
        if tp[0] is None:
            self._errors.heard(error)
        elif assigned is not None and tp in position:
            found = self._event(tp, position[tp], error, offset)
            if found is not None:
                self._passed[tp] = found
        elif assigned is not None and error.code() == KafkaError._PARTITION_EOF:
            assigned.end_seen = max(assigned.end_seen, offset)
        elif error.code() in NOT_IN_LOG or error.code() in DAMAGED:
            self._unassign([tp])
        elif error.code() != KafkaError._PARTITION_EOF and (error.fatal() or not error.retriable()):
            raise kafka_error(error, f"partition {partition_id(*tp)}")

    def _begun(self, wanted: Range) -> _Assigned:
        return _Assigned(wanted.first, wanted)

    def _take_ahead(self, tp: TopicPartition, wanted: Range) -> list[Message]:
        """Records of the range that an earlier read has already received."""
        assigned = self._assigned[tp]
        taken = [message for message in assigned.ahead if wanted.first <= message.offset() < wanted.end]
        if taken and taken[0].offset() > wanted.first and not self._is_confirmed(tp, wanted.first):
            return []
        assigned.ahead = [message for message in assigned.ahead if message.offset() >= wanted.end]
        assigned.ahead_bytes = sum(map(len, assigned.ahead))
        _check_epochs(tp, wanted, taken)
        return taken


def _sorted_chunk(records: list[Message]) -> MessageChunk:
    """A chunk in the order of partitions. Offsets stay in order."""
    return MessageChunk(sorted(records, key=lambda each: (each.topic(), each.partition())))


def _check_epochs(tp: TopicPartition, wanted: Range, records: list[Message]) -> None:
    """Raises ``DataLossError`` if a record was written after the range was planned: then it has
    replaced a planned record. ``records``: of the range, in order."""
    last = wanted.end_epoch
    if last is None or not records or (records[-1].leader_epoch() or 0) <= last:
        return
    first = next(message for message in records if (message.leader_epoch() or 0) > last)
    raise replaced(tp, wanted, first.offset(), first.leader_epoch())


def silent(tp: TopicPartition, position: int, wanted: Range, reason: str) -> RetryableError:
    """The error for a partition without progress for ``SILENCE_MAX_S``, or longer."""
    return RetryableError(
        f"partition {partition_id(*tp)} delivered nothing for {SILENCE_MAX_S:g} s or more, at offset {position} of a range to "
        f"{wanted.end}{reason}"
    )
