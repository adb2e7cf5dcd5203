"""One task of the Kafka spout of core topologies: what it has read, emitted and committed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from framework.errors import FailedException, InvariantViolation, RetryableError
from framework.topology import DEAD_LETTER_STREAM
from spouts.codecs.missing_field_warning import AbsentFields
from spouts.failed_tuple_retries import Retries, RetryPolicy
from spouts.kafka.acked_offsets import Found
from spouts.kafka.consumer.core_spout_consumer import KafkaTail
from spouts.kafka.consumer.record_chunk import RecordChunk, known_epoch
from spouts.kafka.core_partition import (
    AckedIds,
    CorePartition,
    MessageId,
    PartitionRecords,
    RecordIds,
    RecordRow,
    in_order,
)
from spouts.kafka.decoding import Decoded, RecordDecoder
from spouts.kafka.partition_plan_entries import Position, TopicPartition, partition_id

#: Decoded records that a partition may buffer.
_BUFFERED_MAX = 4_000
#: While the decoded records of a task take this many bytes, only partitions without decoded records
#: are read.
BUFFERED_BYTES_MAX = 64 << 20


class CoreTask:
    """One spout task: a consumer, its records, and their outcomes."""

    def __init__(
        self,
        tail: KafkaTail,
        decoder: RecordDecoder,
        collector: Any,
        *,
        guarantee: str,
        retry: RetryPolicy,
        keeps_records: bool,
        uncommitted_max: int,
        commit_every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tail = tail
        self._decoder = decoder
        self._collector = collector
        self._tracked = guarantee == "at_least_once"
        self._commits_first = guarantee == "at_most_once"
        self._keeps_records = keeps_records
        self._uncommitted_max = uncommitted_max
        self._commit_every_s = commit_every_s
        self._clock = clock
        self._partitions: dict[TopicPartition, CorePartition] = {}
        self._turn: deque[TopicPartition] = deque()
        self._letters: dict[MessageId, RecordRow] = {}  # of records that have failed too often
        self._retries: Retries[MessageId] = Retries(retry)
        self._published_at = clock()
        self._checkpointed: Mapping[TopicPartition, Position] | None = (
            None  # the positions of the last checkpoint, if checkpoints hold the positions
        )
        self._absent = AbsentFields()
        # read but not decoded: under at-most-once, they wait for the commit
        self._unsure: RecordChunk | None = None
        self._trouble: str | None = None
        self._emitting: PartitionRecords | None = None
        self._may_give_up = False  # whether checkpoints track the records, and may give one up

    def next_tuples(self, most: int) -> None:
        """Emit a record that is due for a retry, or up to ``most`` records of one partition."""
        try:
            self._begin()
            if self._clock() - self._published_at >= self._commit_every_s:
                self._publish()
            self._tail.advance()
            if not self._emit_again() and not self._emit_next(most):
                self._read()
                self._emit_next(most)
            self._trouble = None
        except RetryableError as error:  # the cluster does not answer: records in flight stay
            if self._trouble is None:
                self._collector.report_error(error)
            self._trouble = str(error)

    def acked(self, key: MessageId) -> None:
        found = self._find(key)
        if found is not None:
            self._partitions[key.tp].offsets.settle(found.slice, found.at, found.at + 1)
            self._forget(key)

    def acked_rows(self, ids: AckedIds) -> None:
        ids.partition.offsets.settle(ids.emitted, ids.places.start, ids.places.stop)
        if self._retries.any_failed:
            for key in ids:
                self._forget(key)

    def failed(self, key: MessageId) -> None:
        found = self._find(key)
        if found is None:
            return  # it was acked, or was emitted before this task was restarted
        records = found.slice.what
        # A dead letter has no other destination: retry it.
        is_letter = key in self._letters or records.stream == DEAD_LETTER_STREAM
        if self._retries.failed(key, self._clock(), for_ever=is_letter):
            return
        letter = self._given_up(key, records, found.at)
        if letter is not None:
            self._letters[key] = letter
            self._retries.failed(key, self._clock(), for_ever=True)
            return
        self.acked(key)

    def give_up(self, key: MessageId) -> None:
        records = self._emitting
        if records is None:
            raise InvariantViolation(f"{key} is given up, and was not emitted")
        letter = self._given_up(key, records, int(np.searchsorted(records.offsets, key.offset)))
        if letter is not None:
            self._collector.emit(letter.values, stream=letter.stream)

    def _given_up(self, key: MessageId, records: PartitionRecords, at: int) -> RecordRow | None:
        """The dead letter of a record that has failed too often. None, with a report, if the record
        is dropped."""
        letter = records.letter(at, "its tuple tree failed too often", {key.topic: key.topic_id})
        if letter is not None:
            return letter
        self._collector.report_error(
            RuntimeError(
                f"{partition_id(*key.tp)}, offset {key.offset}: given up after its retries; the record is dropped"
            )
        )
        return None

    def caught_up(self) -> bool:
        waits = self._unsure is not None or len(self._retries) or any(each.buffer for each in self._partitions.values())
        return self._tail.at_ends and not waits

    def unread(self) -> list[TopicPartition] | None:
        if not self._tail.complete:
            return None
        waits = {tp for tp, _ in self._unsure.places()} if self._unsure is not None else set()
        return [tp for tp, each in self._partitions.items() if each.buffer or tp in waits or tp not in self._tail.ended]

    def follow_checkpoints(self) -> None:
        self._tail.follow_checkpoints()
        self._checkpointed = {}
        self._tracked = self._commits_first = False  # checkpoints track the records instead
        self._may_give_up = self._retries.limited

    def begin_anew(self) -> None:
        self._tail.begin_anew()

    def position(self) -> dict[TopicPartition, Position]:
        """The position of each partition. Raises ``RetryableError`` while it is unknown where
        partitions begin, or whether the topics are still the same."""
        if not self._tail.settled:
            self._begin()
            self._tail.settle()
        self._tail.confirm()
        begun = {tp: each.position() for tp, each in self._partitions.items()}
        return {**self._tail.sought, **begun}

    def seek(self, positions: Mapping[TopicPartition, Position]) -> None:
        self._tail.seek(positions)
        if self._checkpointed is not None:
            self._checkpointed = positions

    def committed(self, positions: Mapping[TopicPartition, Position]) -> None:
        if self._checkpointed is not None:
            self._checkpointed = positions

    def close(self) -> None:
        try:
            # Under at-most-once, the group already has all emitted offsets, and perhaps newer ones
            # of another task.
            if not self._commits_first:
                self._publish()
        finally:
            self._tail.close(publish=not self._commits_first)

    # --- inside -----------------------------------------------------------------------------------

    def _begin(self) -> None:
        for tp, position in self._tail.look_up().items():
            # its records in flight belong to another log: ignore their acks
            if tp in self._partitions:
                for key in [each for each in (*self._letters, *self._retries.keys()) if each.tp == tp]:
                    self._forget(key)
                self._unsure = (self._unsure.without(tp) or None) if self._unsure is not None else None
            else:
                self._turn.append(tp)
            self._partitions[tp] = CorePartition(position)

    def _forget(self, key: MessageId) -> None:
        self._retries.done(key)
        self._letters.pop(key, None)

    def _find(self, key: MessageId) -> Found[PartitionRecords] | None:
        """A record that was emitted and is not done; None for any other."""
        partition = self._partitions.get(key.tp)
        return partition.find(key) if partition is not None else None

    def _emit_again(self) -> bool:
        """Emit the record that is due for a retry, if there is one."""
        again = self._retries.due(self._clock())
        found = self._find(again) if again is not None else None
        if again is None or found is None:
            return False
        row = self._letters.get(again) or found.slice.what.row(found.at)
        self._collector.emit(row.values, message_id=again, stream=row.stream, partition=partition_id(*again.tp))
        return True

    def _emit_next(self, most: int) -> bool:
        """Emit the next records of the partition whose turn it is. Returns False if no partition
        has a record that may be emitted."""
        for _ in range(len(self._turn)):
            tp = self._turn[0]
            self._turn.rotate(-1)
            partition = self._partitions[tp]
            records = partition.take(most, self._uncommitted_max if self._tracked else None)
            if records is not None:
                ids: RecordIds | None = None
                if self._tracked:
                    ids = AckedIds(tp, partition, partition.offsets.emitted(records.offsets, records))
                else:
                    partition.offsets.passed(int(records.offsets[-1]))
                    # A dead letter has no other destination: it is not given up.
                    if self._may_give_up and records.stream != DEAD_LETTER_STREAM:
                        ids = RecordIds(tp, partition.topic_id, records)
                self._emitting = records
                self._collector.emit_arrow(
                    records.rows, message_ids=ids, stream=records.stream, partition=partition_id(*tp)
                )
                return True
        return False

    def _read(self) -> None:
        """Fetch, decode and buffer records. Keeps them undecoded if decoding raises
        ``RetryableError``, for example because a schema registry does not answer."""
        if self._unsure is None:
            is_full = sum(each.buffered_bytes for each in self._partitions.values()) >= BUFFERED_BYTES_MAX
            most = 1 if is_full else _BUFFERED_MAX
            self._tail.pause(tp for tp, each in self._partitions.items() if each.buffered >= most)
            self._unsure = self._tail.poll()
            if self._unsure is not None and self._commits_first:
                self._commit_first(self._unsure)
        else:
            self._tail.hear()
        if self._unsure is None or (self._commits_first and not self._may_emit()):
            return
        arrived: dict[TopicPartition, list[PartitionRecords]] = {}
        topic_ids = {topic: each.topic_id for (topic, _), each in self._partitions.items()}
        for decoded in self._decoder.decode(self._unsure, topic_ids):
            if decoded.absent is not None:
                self._absent.check({decoded.stream: decoded.absent}, {decoded.stream: len(decoded.chunk)})
            for tp, records in self._by_partition(decoded):
                arrived.setdefault(tp, []).append(records)
        self._unsure = None
        for tp, found in arrived.items():
            self._partitions[tp].buffer.extend(in_order(found))

    def _by_partition(self, decoded: Decoded[RecordChunk]) -> Iterator[tuple[TopicPartition, PartitionRecords]]:
        """The records by partition. Those of several partitions are copied, so that waiting records
        of one partition do not keep the memory of the others."""
        stream = DEAD_LETTER_STREAM if decoded.letters else decoded.stream
        chunk, rows = decoded.chunk, decoded.rows
        offsets, epochs = chunk.metadata("offset").to_numpy(), chunk.epochs
        kept = chunk if self._keeps_records else None
        places = list(chunk.places())
        if len(places) == 1:
            yield places[0][0], PartitionRecords(offsets, epochs, rows, stream, kept)
            return
        for tp, place in places:
            its = np.arange(place.start, place.stop)
            yield (
                tp,
                PartitionRecords(
                    offsets[its],
                    epochs[its],
                    rows.take(pa.array(its)) if rows is not None else None,
                    stream,
                    kept.take(its) if kept is not None else None,
                ),
            )

    def _commit_first(self, chunk: RecordChunk) -> None:
        """Commit the offsets after the read records to the group. The records are emitted when the
        group has these offsets."""
        offsets, epochs = chunk.metadata("offset"), chunk.epochs
        for tp, place in chunk.places():
            its, last = self._partitions[tp], place[-1]
            its.asked = Position(offsets[last].as_py() + 1, its.topic_id, known_epoch(int(epochs[last])))
        self._tail.publish(self._asked())

    def _may_emit(self) -> bool:
        """Whether records may be emitted under at-most-once. The group must have the offsets after
        them, and they must certainly be of the present topics: a topic that was created again is
        read from its beginning, and its records would be emitted twice."""
        if not self._tail.published(self._asked()):
            return False
        try:
            self._tail.confirm()
        except FailedException:  # the next look-up drops the records
            return False
        return True

    def _asked(self) -> dict[TopicPartition, Position]:
        return {tp: each.asked for tp, each in self._partitions.items()}

    def _publish(self) -> None:
        """Commit the done position of each partition to the group."""
        self._published_at = self._clock()
        if self._checkpointed is not None:
            self._tail.publish(self._checkpointed)
        elif self._commits_first:
            self._tail.publish(self._asked())
        else:
            self._tail.publish({tp: each.done() for tp, each in self._partitions.items()})
