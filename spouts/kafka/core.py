"""The Kafka spout of core topologies: records one by one, each acked or failed by its tuple tree.

Source: storm-kafka-client's ``KafkaSpout``.
"""

from __future__ import annotations

import copy
import datetime
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self, overload

import numpy as np
import pyarrow as pa

from framework.clients.kafka import KafkaSettings
from framework.errors import ConfigError, FailedException, InvariantViolation, RetryableError
from framework.topology import (
    DEAD_LETTER_STREAM,
    Fields,
    OutputFieldsDeclarer,
    ReplayableSpout,
    TopologyContext,
)
from framework.topology.tuples import rows_of
from spouts.codecs.absent_fields import AbsentFields
from spouts.codecs.codec import Codec
from spouts.kafka.acked_offsets import AckedOffsets, Found, Offsets, Slice
from spouts.kafka.consumer.chunk import Epochs, RecordChunk, known_epoch
from spouts.kafka.consumer.consumer_pool import reader_of, say_reader
from spouts.kafka.consumer.partition_follower import KafkaTail
from spouts.kafka.decoding import Decoded, RecordDecoder, dead_letters
from spouts.kafka.metadata import KafkaMetadata
from spouts.kafka.options import above_0, at_least_1, checked_group
from spouts.kafka.partitions import Position, TopicPartition, partition_id, position_after, topic_and_number
from spouts.kafka.read_bounds import checked_bound
from spouts.kafka.record_format import EVERYTHING
from spouts.kafka.streams import RECORD_BYTES_MAX, TopicStream, checked_source, checked_streams
from spouts.retries import Retries, RetryPolicy

COMMIT_EVERY_S = 5.0
#: How far a partition may read ahead of its committable offset, in offsets.
UNCOMMITTED_MAX = 10_000
#: Decoded records that a partition may buffer.
_BUFFERED_MAX = 4_000
_GUARANTEES = ("at_least_once", "at_most_once", "none")


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


class _Row(NamedTuple):
    """A record to emit again, or its dead letter."""

    values: Sequence[Any]
    stream: str


class _Records:
    """Consecutive records of one partition.

    * ``epochs``: their leader epochs; negative for unknown.
    * ``rows``: None for records that are left out.
    * ``chunk``: their raw records, kept if they may become dead letters; they begin at its row
      ``first``."""

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

    def part(self, start: int, stop: int) -> _Records:
        rows = self.rows.slice(start, stop - start) if self.rows is not None else None
        offsets, epochs = self.offsets[start:stop], self.epochs[start:stop]
        return _Records(offsets, epochs, rows, self.stream, self.chunk, first=self.first + start)

    def id_of(self, tp: TopicPartition, topic_id: str | None, at: int) -> MessageId:
        return MessageId(*tp, int(self.offsets[at]), topic_id, known_epoch(int(self.epochs[at])))

    def row(self, at: int) -> _Row:
        if self.rows is None:
            raise InvariantViolation("a record without a row was emitted")
        return _Row(next(rows_of(self.rows.slice(at, 1))), self.stream)

    def letter(self, at: int, reason: str, topic_ids: Mapping[str, str | None]) -> _Row | None:
        """The dead letter of a record; None if dead letters are off. ``topic_ids``: of its topic,
        at least."""
        if self.chunk is None:
            return None
        letter = dead_letters("value", self.chunk.take([self.first + at]), [reason], topic_ids)
        return _Row(next(rows_of(letter)), DEAD_LETTER_STREAM)


class _Ids(Sequence[MessageId]):
    """The ids of records emitted in one call, if checkpoints track them. ``places``: the indices in
    ``records``; slicing selects a part. ``topic_id``: as in the ids."""

    def __init__(self, tp: TopicPartition, topic_id: str | None, records: _Records) -> None:
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


class _RowIds(_Ids):
    """The same if acks track them: one call marks a whole part as done. ``emitted``: the entries in
    ``partition``."""

    def __init__(self, tp: TopicPartition, partition: _Partition, emitted: Slice[_Records]) -> None:
        super().__init__(tp, partition.topic_id, emitted.what)
        self.partition = partition
        self.emitted = emitted


class KafkaSpout(ReplayableSpout):
    """Reads topics in the tasks of a core topology. Records do not pass through the driver.

    **Input and output.** ``topics`` or ``pattern``, ``codec``, ``key_codec``, ``header_codecs`` and
    ``metadata``, or ``streams``: as for ``KafkaTransactionalSpout``. One task reads each partition:
    the same task as long as the parallelism stays the same.

    **Positions.** The positions are those of the consumer group ``group``, by default
    ``ratchet-<topology id>``. They contain the ids of the topics. ``start``: where to begin a
    partition for which the group has no position: "earliest", "latest", milliseconds since 1970, a
    ``datetime`` with a zone, or an ISO text with one.

    **Guarantee.**

    * ``"at_least_once"``: an offset is committed when it and all offsets before it in its partition
      are acked. Commits happen every ``commit_every_s`` seconds, changed or not, and at the end. A
      record that fails is emitted again by ``retry``: by default immediately the first time, then
      after 2 ms, and then after twice the previous delay, up to 10 s. After ``retry.retries_max``
      retries, ``on_exhausted`` decides: "dead_letter" emits the record on the stream
      ``dead_letters``, with ``DEAD_LETTER_FIELDS``; "drop" reports and drops it.
    * ``"at_most_once"``: offsets are committed before their records are emitted. No record is
      emitted twice, and records that fail are lost.
    * ``"none"``: no tracking. Offsets are committed every ``commit_every_s`` seconds and at the
      end. Records may be lost or emitted twice.

    **With stateful bolts.** Checkpoints hold the positions, and the spout goes back to them. The
    state is exactly-once; ``guarantee`` has no effect. After a failure the whole topology goes back
    to the last checkpoint, and reads its input again. When a record's own tuple has failed, or
    timed out, more than ``retry.retries_max`` times, ``on_exhausted`` applies to the record, and
    its tuple is not emitted. The delays of ``retry`` have no effect: the topology pauses. Without
    ``retries_max``, a record that fails ``topology.max.attempts`` times in a row ends the topology.
    The group only decides where the spout begins when it starts for the first time. After that, its
    offsets show the position of the last committed checkpoint to other tools, and the spout does
    not read them. A partition that appears after the first checkpoint is read from its earliest
    offset.

    **Reading ahead.** ``topology.max.spout.pending`` bounds the pending tuples of a task.
    ``uncommitted_max`` bounds, for each partition, the offsets between the committable offset and
    the next one. So the others cannot run arbitrarily far ahead of one record that always fails.
    After a restart, all records from the committed offset on are emitted again.

    **Errors.** ``on_bad_record``: a record that cannot be decoded fails the topology ("fail"), is
    left out ("skip"), or is emitted on the stream ``dead_letters`` ("dead_letter"). A value of more
    than ``record_bytes_max`` bytes counts as such a record. ``on_data_loss``: an offset that was
    lost before it was read (by retention, a truncated log, or a topic that was deleted and created
    again) fails the topology ("fail") or is skipped ("skip"). With "skip", a topic that was created
    again is read from its beginning.

    ``bootstrap_servers`` and ``settings``: as for the transactional spouts.
    """

    def __init__(
        self,
        topics: Sequence[str] = (),
        *,
        bootstrap_servers: str | None = None,
        pattern: str | None = None,
        streams: Mapping[str, Codec | TopicStream] | None = None,
        codec: Codec | None = None,
        key_codec: Codec | None = None,
        header_codecs: Mapping[str, Codec] | None = None,
        metadata: Sequence[str] = (),
        group: str | None = None,
        start: str | int | datetime.datetime = "earliest",
        end: None = None,
        start_group: None = None,
        guarantee: Literal["at_least_once", "at_most_once", "none"] = "at_least_once",
        retry: RetryPolicy | None = None,
        on_exhausted: Literal["dead_letter", "drop"] = "drop",
        uncommitted_max: int = UNCOMMITTED_MAX,
        commit_every_s: float = COMMIT_EVERY_S,
        on_bad_record: Literal["fail", "skip", "dead_letter"] = "fail",
        on_data_loss: Literal["fail", "skip"] = "fail",
        record_bytes_max: int = RECORD_BYTES_MAX,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if guarantee not in _GUARANTEES:
            raise ConfigError(f"guarantee must be one of {', '.join(map(repr, _GUARANTEES))}, not {guarantee!r}")
        if on_exhausted not in ("dead_letter", "drop"):
            raise ConfigError(f"on_exhausted must be 'dead_letter' or 'drop', not {on_exhausted!r}")
        if on_data_loss not in ("fail", "skip"):
            raise ConfigError(f"on_data_loss must be 'fail' or 'skip', not {on_data_loss!r}")
        if retry is not None and guarantee != "at_least_once":
            raise ConfigError(f"retry= needs guarantee='at_least_once': with {guarantee!r} nothing is emitted again")
        if end is not None or start_group is not None:
            raise ConfigError(
                f"{'end' if end is not None else 'start_group'}= is for the spouts of transactional topologies, such as "
                "OpaqueKafkaTransactionalSpout; a core topology goes on until it is stopped, from the offsets of its own group="
            )
        self._topics = checked_source(topics, pattern, streams)
        self._pattern = pattern
        self._start = checked_bound("start", start, ("earliest", "latest"))
        self._group = checked_group("group", group) if group is not None else None
        self._settings = KafkaSettings(bootstrap_servers, settings)
        self._streams = checked_streams(
            streams,
            codec=codec,
            key_codec=key_codec,
            header_codecs=header_codecs,
            metadata=metadata,
            on_bad_record=on_bad_record,
            record_bytes_max=record_bytes_max,
        )
        self._guarantee = guarantee
        self._retry = retry if retry is not None else RetryPolicy()
        self._on_exhausted = on_exhausted
        self._uncommitted_max = at_least_1("uncommitted_max", uncommitted_max)
        self._commit_every_s = above_0("commit_every_s", commit_every_s)
        self._skip_lost = on_data_loss == "skip"

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        exhausted = self._on_exhausted == "dead_letter"
        self._streams.declare(declarer, dead_letters=exhausted or self._streams.want_dead_letters)

    def output_fields(self) -> Fields:
        """The fields of the only stream. Raises ``ConfigError`` if there are several."""
        return self._streams.fields()

    def check_before_start(self, conf: Mapping[str, Any]) -> None:
        reader_of(self._settings.with_conf(conf))

    def check_servers(self, conf: Mapping[str, Any]) -> None:
        metadata = KafkaMetadata(self._settings.with_conf(conf), self._topics, self._pattern)
        try:
            metadata.check_topics()
        finally:
            metadata.close()

    def open(self, conf: Mapping[str, Any], context: TopologyContext, collector: Any) -> None:
        settings = self._settings.with_conf(conf)
        say_reader(settings)
        decoder = RecordDecoder(self._streams)
        # a dead letter contains the whole record
        keeps_records = self._on_exhausted == "dead_letter"
        self._task = _Task(
            KafkaTail(
                settings,
                self._group if self._group is not None else f"ratchet-{context.topology_id}",
                topics=self._topics,
                pattern=self._pattern,
                start=self._start,
                skip_lost=self._skip_lost,
                task=context.task_index,
                tasks=context.task_count,
                parts=EVERYTHING if keeps_records else decoder.parts,
            ),
            decoder,
            collector,
            guarantee=self._guarantee,
            retry=self._retry,
            keeps_records=keeps_records,
            uncommitted_max=self._uncommitted_max,
            commit_every_s=self._commit_every_s,
        )

    def next_tuple(self) -> None:
        self._task.next_tuples(1)

    def next_tuples(self, most: int) -> None:
        if type(self).next_tuple is KafkaSpout.next_tuple:
            self._task.next_tuples(most)
        else:
            self.next_tuple()

    def caught_up(self) -> bool:
        """Whether every partition has been read to its end."""
        return self._task.caught_up()

    def unread(self) -> dict[str, str | None] | None:
        """The partitions that have not been read to their ends."""
        found = self._task.unread()
        if found is None:
            return None
        letters = self._on_exhausted == "dead_letter" or self._streams.want_dead_letters
        return {partition_id(*tp): None if letters else self._streams.of(tp[0]).stream for tp in found}

    def follow_checkpoints(self) -> None:
        self._task.follow_checkpoints()

    def begin_anew(self) -> None:
        self._task.begin_anew()

    def position(self) -> dict[str, Any]:
        """Partition -> its next offset, in the form of plans (``spouts.kafka.partitions``)."""
        return {partition_id(*tp): at.after() for tp, at in self._task.position().items()}

    def seek(self, positions: Sequence[Any]) -> None:
        self._task.seek(_recorded(*positions))

    def committed(self, position: Any) -> None:
        self._task.committed(_recorded(position))

    @property
    def retries_max(self) -> int | None:
        return self._retry.retries_max

    def give_up(self, message_id: MessageId) -> None:
        self._task.give_up(message_id)

    def ack(self, message_id: MessageId) -> None:
        self._task.acked(message_id)

    def ack_all(self, message_ids: Sequence[MessageId]) -> None:
        if type(self).ack is not KafkaSpout.ack or not isinstance(message_ids, _Ids):
            super().ack_all(message_ids)
        elif isinstance(message_ids, _RowIds):
            self._task.acked_rows(message_ids)

    def fail(self, message_id: MessageId) -> None:
        self._task.failed(message_id)

    def close(self) -> None:
        self._task.close()


def _recorded(*positions: Mapping[str, Any]) -> dict[TopicPartition, Position]:
    """The positions in checkpoints. Older checkpoints have bare offsets."""
    return {
        topic_and_number(name): Position(at, None) if isinstance(at, int) else position_after(at)
        for each in positions
        for name, at in each.items()
    }


class _Partition:
    """One partition: which of its offsets are done, and the records that wait to be emitted.
    ``asked``: the position last sent to the group."""

    def __init__(self, begins: Position) -> None:
        self.topic_id = begins.topic_id
        self.offsets: AckedOffsets[_Records] = AckedOffsets(begins.offset)
        self.buffer: deque[_Records] = deque()
        self.asked = begins
        self._epochs = deque([(begins.offset, begins.leader_epoch)])  # (first offset, leader epoch)

    @property
    def buffered(self) -> int:
        return sum(map(len, self.buffer))

    def find(self, key: MessageId) -> Found[_Records] | None:
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

    def take(self, most: int, uncommitted_max: int | None) -> _Records | None:
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

    def _took(self, records: _Records) -> _Records:
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


class _Task:
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
        self._partitions: dict[TopicPartition, _Partition] = {}
        self._turn: deque[TopicPartition] = deque()
        self._letters: dict[MessageId, _Row] = {}  # of records that have failed too often
        self._retries: Retries[MessageId] = Retries(retry)
        self._published_at = clock()
        self._checkpointed: Mapping[TopicPartition, Position] | None = (
            None  # the positions of the last checkpoint, if checkpoints hold the positions
        )
        self._absent = AbsentFields()
        # read but not decoded: under at-most-once, they wait for the commit
        self._unsure: RecordChunk | None = None
        self._trouble: str | None = None
        self._emitting: _Records | None = None
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

    def acked_rows(self, ids: _RowIds) -> None:
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

    def _given_up(self, key: MessageId, records: _Records, at: int) -> _Row | None:
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
            self._partitions[tp] = _Partition(position)

    def _forget(self, key: MessageId) -> None:
        self._retries.done(key)
        self._letters.pop(key, None)

    def _find(self, key: MessageId) -> Found[_Records] | None:
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
                ids: _Ids | None = None
                if self._tracked:
                    ids = _RowIds(tp, partition, partition.offsets.emitted(records.offsets, records))
                else:
                    partition.offsets.passed(int(records.offsets[-1]))
                    # A dead letter has no other destination: it is not given up.
                    if self._may_give_up and records.stream != DEAD_LETTER_STREAM:
                        ids = _Ids(tp, partition.topic_id, records)
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
            self._tail.pause(tp for tp, each in self._partitions.items() if each.buffered >= _BUFFERED_MAX)
            self._unsure = self._tail.poll()
            if self._unsure is not None and self._commits_first:
                self._commit_first(self._unsure)
        else:
            self._tail.hear()
        if self._unsure is None or (self._commits_first and not self._may_emit()):
            return
        arrived: dict[TopicPartition, list[_Records]] = {}
        topic_ids = {topic: each.topic_id for (topic, _), each in self._partitions.items()}
        for decoded in self._decoder.decode(self._unsure, topic_ids):
            if decoded.absent is not None:
                self._absent.check({decoded.stream: decoded.absent}, {decoded.stream: len(decoded.chunk)})
            for tp, records in self._by_partition(decoded):
                arrived.setdefault(tp, []).append(records)
        self._unsure = None
        for tp, found in arrived.items():
            self._partitions[tp].buffer.extend(_in_order(found))

    def _by_partition(self, decoded: Decoded[RecordChunk]) -> Iterator[tuple[TopicPartition, _Records]]:
        """The records by partition. Those of several partitions are copied, so that waiting records
        of one partition do not keep the memory of the others."""
        stream = DEAD_LETTER_STREAM if decoded.letters else decoded.stream
        chunk, rows = decoded.chunk, decoded.rows
        offsets, epochs = chunk.metadata("offset").to_numpy(), chunk.epochs
        kept = chunk if self._keeps_records else None
        places = list(chunk.places())
        if len(places) == 1:
            yield places[0][0], _Records(offsets, epochs, rows, stream, kept)
            return
        for tp, place in places:
            its = np.arange(place.start, place.stop)
            yield (
                tp,
                _Records(
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


def _in_order(records: list[_Records]) -> list[_Records]:
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
