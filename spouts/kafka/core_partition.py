"""One partition of a core spout's task: its records, their message ids, and which are done."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self, overload

import numpy as np
import pyarrow as pa

from framework.errors import InvariantViolation
from framework.topology import DEAD_LETTER_STREAM
from framework.topology.tuples import rows_of
from spouts.kafka.acked_offsets import AckedOffsets, Found, Offsets, Slice
from spouts.kafka.consumer.record_chunk import Epochs, RecordChunk, known_epoch
from spouts.kafka.decoding import dead_letters
from spouts.kafka.partition_plan_entries import Position, TopicPartition


class MessageId(NamedTuple):
    """A message id. It identifies a record even if its topic was created again, or if its log was
    truncated and has grown again."""

    topic: str
    partition: int
    offset: int
    topic_id: str | None
    leader_epoch: int | None

    @property
    def tp(self) -> TopicPartition:
        return self.topic, self.partition


class RecordRow(NamedTuple):
    """A record to emit again, or its dead letter."""

    values: Sequence[Any]
    stream: str


class PartitionRecords:
    """Consecutive records of one partition.

    * ``epochs``: their leader epochs; negative for unknown.
    * ``rows``: None for records that are left out.
    * ``chunk``: the raw records, if they are kept for dead letters. The first record here is row
      ``first`` of the chunk."""

    def __init__(
        self,
        offsets: Offsets,
        epochs: Epochs,
        rows: pa.RecordBatch | None,
        stream: str,
        chunk: RecordChunk | None,
        *,
        first: int = 0,
    ) -> None:
        self.offsets = offsets
        self.epochs = epochs
        self.rows = rows
        self.stream = stream
        self.chunk = chunk
        self.first = first

    def __len__(self) -> int:
        return len(self.offsets)

    def part(self, start: int, stop: int) -> PartitionRecords:
        rows = self.rows.slice(start, stop - start) if self.rows is not None else None
        offsets, epochs = self.offsets[start:stop], self.epochs[start:stop]
        return PartitionRecords(offsets, epochs, rows, self.stream, self.chunk, first=self.first + start)

    def id_of(self, tp: TopicPartition, topic_id: str | None, at: int) -> MessageId:
        return MessageId(*tp, int(self.offsets[at]), topic_id, known_epoch(int(self.epochs[at])))

    def row(self, at: int) -> RecordRow:
        if self.rows is None:
            raise InvariantViolation("a record without a row was emitted")
        return RecordRow(next(rows_of(self.rows.slice(at, 1))), self.stream)

    def letter(self, at: int, reason: str, topic_ids: Mapping[str, str | None]) -> RecordRow | None:
        """The dead letter of a record; None if dead letters are off. ``topic_ids``: of its topic,
        at least."""
        if self.chunk is None:
            return None
        letter = dead_letters("value", self.chunk.take([self.first + at]), [reason], topic_ids)
        return RecordRow(next(rows_of(letter)), DEAD_LETTER_STREAM)


class RecordIds(Sequence[MessageId]):
    """The ids of records emitted in one call, if checkpoints track them. ``places``: the indices in
    ``records``; slicing selects a part. ``topic_id``: as in the ids."""

    def __init__(self, tp: TopicPartition, topic_id: str | None, records: PartitionRecords) -> None:
        self.tp = tp
        self.topic_id = topic_id
        self.records = records
        self.places = range(len(records))

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, at: int) -> MessageId: ...
    @overload
    def __getitem__(self, at: slice) -> Self: ...
    def __getitem__(self, at: int | slice) -> MessageId | Self:
        if isinstance(at, slice):
            part = copy.copy(self)
            part.places = self.places[at]
            return part
        return self.records.id_of(self.tp, self.topic_id, self.places[at])


class CorePartition:
    """One partition: which of its offsets are done, and the records that wait to be emitted.
    ``asked``: the position last sent to the group."""

    def __init__(self, begins: Position) -> None:
        self.topic_id = begins.topic_id
        self.offsets: AckedOffsets[PartitionRecords] = AckedOffsets(begins.offset)
        self.buffer: deque[PartitionRecords] = deque()
        self.asked = begins
        self._epochs = deque([(begins.offset, begins.leader_epoch)])  # (first offset, leader epoch)

    @property
    def buffered(self) -> int:
        return sum(map(len, self.buffer))

    @property
    def buffered_bytes(self) -> int:
        """The bytes of the decoded records."""
        return sum(each.rows.nbytes for each in self.buffer if each.rows is not None)

    def find(self, key: MessageId) -> Found[PartitionRecords] | None:
        """A record that was emitted and is not done; None for any other, and for records of another
        log.
        """
        found = self.offsets.find(key.offset) if key.topic_id == self.topic_id else None
        if found is None or found.slice.what.id_of(key.tp, self.topic_id, found.at) != key:
            return None
        return found

    def pass_left_out(self) -> None:
        """Pass left-out records at the beginning of the buffer."""
        while self.buffer and self.buffer[0].rows is None:
            gone = self._took(self.buffer.popleft())
            self.offsets.passed(int(gone.offsets[-1]))

    def take(self, most: int, uncommitted_max: int | None) -> PartitionRecords | None:
        """Take up to ``most`` records from the buffer, so that no more than ``uncommitted_max``
        offsets lie between the committable one and the next. None if there are none."""
        self.pass_left_out()
        if not self.buffer:
            return None
        first = self.buffer[0]
        count = min(most, len(first))
        if uncommitted_max is not None:
            begins = self.offsets.committable if self.offsets.span else int(first.offsets[0])
            if self.offsets.span >= uncommitted_max:
                return None
            count = 1 + int(np.searchsorted(first.offsets[: count - 1] + 1, begins + uncommitted_max))
        if count == len(first):
            return self._took(self.buffer.popleft())
        self.buffer[0] = first.part(count, len(first))
        return self._took(first.part(0, count))

    def _took(self, records: PartitionRecords) -> PartitionRecords:
        """Note that records have left the buffer."""
        last = self._epochs[-1][1]
        if (records.epochs != (-1 if last is None else last)).any():
            for offset, epoch in zip(records.offsets.tolist(), records.epochs.tolist(), strict=True):
                if known_epoch(epoch) != self._epochs[-1][1]:
                    self._epochs.append((offset + 1, known_epoch(epoch)))
        return records

    def position(self) -> Position:
        """The position after all emitted records."""
        return Position(self.offsets.position, self.topic_id, self._epochs[-1][1])

    def done(self) -> Position:
        """The position before which all records are done."""
        offset = self.offsets.committable
        while len(self._epochs) > 1 and self._epochs[1][0] <= offset:
            self._epochs.popleft()
        return Position(offset, self.topic_id, self._epochs[0][1])


class AckedIds(RecordIds):
    """The same if acks track them: one call marks a whole part as done. ``emitted``: the entries in
    ``partition``."""

    def __init__(self, tp: TopicPartition, partition: CorePartition, emitted: Slice[PartitionRecords]) -> None:
        super().__init__(tp, partition.topic_id, emitted.what)
        self.partition = partition
        self.emitted = emitted


def in_order(records: list[PartitionRecords]) -> list[PartitionRecords]:
    """The same records of a partition, in the order of their offsets."""
    if len(records) == 1:
        return records
    offsets = np.concatenate([each.offsets for each in records])
    whose = np.repeat(np.arange(len(records)), [len(each) for each in records])
    where = np.concatenate([np.arange(len(each)) for each in records])
    order = np.argsort(offsets, kind="stable")
    whose, where = whose[order], where[order]
    starts = np.concatenate(([0], np.flatnonzero(np.diff(whose)) + 1)).tolist()
    return [
        records[whose[start]].part(int(where[start]), int(where[stop - 1]) + 1)
        for start, stop in zip(starts, [*starts[1:], len(order)], strict=True)
    ]
