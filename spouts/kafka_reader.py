"""Reads planned ranges of Kafka, in tasks: exactly the range, or an error.

Consumers are kept per worker process and configuration, positioned where the last range ended, so that the next batch
may find its records fetched already.

Invariants:

1. A range is complete at a record at or after its end, or when the consumer reports the end of the partition at or after
   it (C16): transaction markers, aborted and compacted records at the end of a range do not hang it.
2. Every record of the range that a committed reader may see is delivered once, in the order of its partition.
3. A record that belongs to no range of this read is kept for the next one, never dropped; ``resume`` says from which
   offset on nothing has been dropped.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Consumer, KafkaError, KafkaException, Message, TopicPartition

from framework.errors import BadRecordError, DataLossError, RetryableError
from framework.topology import Fields, PartitionReader, TransactionAttempt
from framework.topology.spouts import Meta
from spouts.codecs import Codec, UndecodableValueError
from spouts.kafka_partitions import partition_id, topic_and_number
from spouts.kafka_settings import KafkaSettings, kafka_error

#: Records per call of ``consume`` and per record batch.
CHUNK_RECORDS = 50_000
#: Up to this many records in all, a task's partitions are read side by side; above, one after the other.
SIDE_BY_SIDE_RECORDS_MAX = 20_000
#: Records that a consumer may have ahead of a range and drops, before seeking is cheaper.
SKIP_RECORDS_MAX = 5_000
#: A partition that delivers nothing for this long fails the attempt; the replay waits in its turn.
SILENCE_MAX_S = 20.0
_POLL_S = 0.05
CONNECT_TIMEOUT_S = 2.0

_METADATA_TYPES = {
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp_ms": pa.int64(),
    "key": pa.binary(),
    "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
}


def metadata_fields(names: tuple[str, ...]) -> dict[str, pa.DataType]:
    """The types of the record's own fields that a spout may add. Raises ``KeyError`` for an unknown one."""
    return {name: _METADATA_TYPES[name] for name in names}


Where = tuple[str, int]
Range = tuple[int, int]


@dataclass(slots=True)
class _Assigned:
    """A partition of a consumer. ``resume``: from this offset on, everything is in ``ahead`` or still to come."""

    resume: int
    ahead: list[Message] = field(default_factory=list)
    end_seen: int = -1


class KafkaSession:
    """One consumer with its positions. Used by one read at a time: ``KafkaReader`` lends it out."""

    def __init__(self, settings: dict[str, Any], where: str) -> None:
        self._consumer = Consumer(settings)
        self._where = where
        self._assigned: dict[Where, _Assigned] = {}

    def read(self, ranges: Mapping[Where, Range]) -> Iterator[list[Message]]:
        """The records of all ranges, in chunks; a chunk may hold several partitions."""
        wanted = {where: each for where, each in ranges.items() if each[0] < each[1]}
        if sum(end - first for first, end in wanted.values()) <= SIDE_BY_SIDE_RECORDS_MAX:
            records = [record for chunk in self._read(wanted, at_once=True) for record in chunk]
            if records:
                yield sorted(
                    records, key=lambda each: (each.topic(), each.partition())
                )  # stable: offsets stay in order
        else:
            for where, each in wanted.items():
                self._unassign([other for other in self._assigned if other != where])
                yield from self._read({where: each}, at_once=False)

    def connect(self) -> None:
        """Open the connections that the first read would open."""
        try:
            self._consumer.list_topics(timeout=CONNECT_TIMEOUT_S)
        except KafkaException as error:
            raise kafka_error(error, f"Kafka at {self._where}") from error

    def close(self) -> None:
        self._consumer.close()

    def _read(self, ranges: Mapping[Where, Range], *, at_once: bool) -> Iterator[list[Message]]:
        try:
            yield from self._until_complete(ranges, at_once)
        except BaseException:
            self._unassign(list(self._assigned))  # whatever was under way, the next read starts clean
            raise

    def _consume(self, most: int, at_once: bool) -> list[Message]:
        """Up to ``most`` records and events. ``at_once``: whatever is there, or the first to come; otherwise wait a
        little for full chunks, which cost less per record."""
        try:
            if at_once:
                heard: list[Message] = self._consumer.consume(most, 0) or self._consumer.consume(1, _POLL_S)
            else:
                heard = self._consumer.consume(min(most, CHUNK_RECORDS), _POLL_S)
            return heard
        except KafkaException as error:
            raise kafka_error(error, f"Kafka at {self._where}") from error

    def _until_complete(self, ranges: Mapping[Where, Range], at_once: bool) -> Iterator[list[Message]]:
        open_ranges = dict(ranges)
        position = {where: first for where, (first, _) in ranges.items()}
        for where, (first, end) in ranges.items():
            self._position(where, first)
            early = self._take_ahead(where, first, end)
            if early:
                position[where] = early[-1].offset() + 1
                yield early
        last_heard = time.monotonic()
        while True:
            for where in list(open_ranges):
                assigned, end = self._assigned[where], open_ranges[where][1]
                if position[where] >= end or assigned.ahead or assigned.end_seen >= end:
                    del open_ranges[where]
                    assigned.resume = end
            if not open_ranges:
                return
            missing = sum(end - position[where] for where, (_, end) in open_ranges.items())
            heard = self._consume(missing, at_once)
            if heard:
                last_heard = time.monotonic()
            elif time.monotonic() - last_heard > SILENCE_MAX_S:
                silent = next(iter(open_ranges))
                raise RetryableError(
                    f"partition {partition_id(*silent)} delivered nothing for {SILENCE_MAX_S:g} s, at offset "
                    f"{position[silent]} of a range to {open_ranges[silent][1]}"
                )
            records = self._sorted_out(heard, open_ranges, position)
            if records:
                yield records

    def _sorted_out(
        self, heard: list[Message], open_ranges: Mapping[Where, Range], position: dict[Where, int]
    ) -> list[Message]:
        """The records of open ranges; events are acted on, what belongs to later ranges is kept."""
        if any(message.error() is not None for message in heard):
            for message in heard:
                if message.error() is not None:
                    self._event(message, position)
            heard = [message for message in heard if message.error() is None]
        if not heard:
            return heard
        if len(self._assigned) == 1:
            # One partition and never more records asked for than its range can hold: only the ends need a look.
            where, (first, end) = next(iter(open_ranges.items()))
            if heard[0].offset() >= first and heard[-1].offset() < end:
                position[where] = heard[-1].offset() + 1
                return heard
        records = []
        for message in heard:
            where = (message.topic(), message.partition())
            offset = message.offset()
            wanted = open_ranges.get(where)
            if wanted is None or offset >= wanted[1]:
                assigned = self._assigned.get(where)
                if assigned is not None and offset >= assigned.resume:
                    assigned.ahead.append(message)
                    if len(assigned.ahead) > CHUNK_RECORDS and wanted is None:
                        self._unassign([where])  # nobody asks for these here: another worker reads the partition
            elif offset >= wanted[0]:
                records.append(message)
                position[where] = offset + 1
        return records

    def _event(self, message: Message, position: Mapping[Where, int]) -> None:
        error, where = message.error(), (message.topic(), message.partition())
        assigned = self._assigned.get(where)
        if error.code() == KafkaError._PARTITION_EOF:
            if assigned is not None:
                assigned.end_seen = max(assigned.end_seen, message.offset())
            return
        if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            raise DataLossError(
                f"partition {partition_id(*where)} no longer holds offset {position.get(where)}: {error.str()}. Retention removed "
                "it, or the topic was created again; give the topology another id to start from what is left"
            )
        if error.fatal() or not error.retriable():
            raise kafka_error(error, f"partition {partition_id(*where)}")

    def _position(self, where: Where, first: int) -> None:
        """Make sure that everything from ``first`` on is ahead or still to come."""
        assigned = self._assigned.get(where)
        if assigned is not None and assigned.resume <= first <= assigned.resume + SKIP_RECORDS_MAX:
            return
        self._unassign([where])
        try:
            self._consumer.incremental_assign([TopicPartition(where[0], where[1], first)])
        except KafkaException as error:
            raise kafka_error(error, f"Kafka at {self._where}") from error
        self._assigned[where] = _Assigned(first)

    def _take_ahead(self, where: Where, first: int, end: int) -> list[Message]:
        """Records of the range that an earlier read has received already."""
        assigned = self._assigned[where]
        taken = [message for message in assigned.ahead if first <= message.offset() < end]
        assigned.ahead = [message for message in assigned.ahead if message.offset() >= end]
        assigned.resume = max(assigned.resume, first)
        return taken

    def _unassign(self, gone: list[Where]) -> None:
        known = [where for where in gone if where in self._assigned]
        if known:
            self._consumer.incremental_unassign([TopicPartition(topic, partition) for topic, partition in known])
            for where in known:
                del self._assigned[where]


#: Sessions that nobody reads with at the moment.
_idle: dict[tuple[int, str, int], KafkaSession] = {}
_idle_lock = threading.Lock()
#: Idle consumers kept per process: one per spout task that this worker has served lately.
SESSIONS_MAX = 8


class KafkaReader(PartitionReader):
    """Reads and decodes. ``slot`` keeps the consumers of different tasks in one worker apart."""

    def __init__(
        self, settings: KafkaSettings, group: str, codec: Codec, metadata: tuple[str, ...], fields: Fields, slot: int
    ) -> None:
        self._settings = settings
        self._group = group
        self._codec = codec
        self._metadata = metadata
        self._fields = fields
        self._slot = slot

    def read(self, attempt: TransactionAttempt, partition: str, meta: Meta) -> Iterator[pa.RecordBatch]:
        yield from self.read_all(attempt, {partition: meta})

    def read_all(self, attempt: TransactionAttempt, ranges: Mapping[str, Meta]) -> Iterator[pa.RecordBatch]:
        asked: dict[Where, Range] = {}
        for partition, meta in ranges.items():
            asked[topic_and_number(partition)] = (int(meta["first_offset"]), int(meta["next_offset"]))
        if not any(first < end for first, end in asked.values()):
            return
        with self._session() as session:
            for messages in session.read(asked):
                yield self._decoded(messages)

    def warm_up(self) -> None:
        with self._session() as session:
            session.connect()
        self._codec.decode([None])

    @contextmanager
    def _session(self) -> Iterator[KafkaSession]:
        """A session that is nobody else's until it is given back. In a Spark worker tasks come one after the other; in the
        in-process executor several attempts read at once, and a cancelled one may still be reading."""
        key = (os.getpid(), f"{self._group}|{self._settings.bootstrap_servers}", self._slot)
        with _idle_lock:
            session = _idle.pop(key, None)
        if session is None:
            try:
                session = KafkaSession(self._settings.consumer(self._group), self._settings.bootstrap_servers)
            except KafkaException as error:
                raise kafka_error(error, "Kafka settings") from error
        try:
            yield session
        finally:
            with _idle_lock:
                surplus = [_idle.pop(key)] if key in _idle else []
                while len(_idle) >= SESSIONS_MAX:
                    surplus.append(_idle.pop(next(iter(_idle))))
                _idle[key] = session
            for each in surplus:
                each.close()

    def _decoded(self, messages: list[Message]) -> pa.RecordBatch:
        try:
            batch = self._codec.decode([message.value() for message in messages])
        except UndecodableValueError as error:
            bad = messages[error.index]
            raise BadRecordError(
                f"topic {bad.topic()!r}, partition {bad.partition()}, offset {bad.offset()}: {error.reason}"
            ) from error
        if not self._metadata:
            return batch
        columns = [pa.array(_metadata_column(name, messages), _METADATA_TYPES[name]) for name in self._metadata]
        return pa.RecordBatch.from_arrays([*batch.columns, *columns], names=list(self._fields))


def _metadata_column(name: str, messages: list[Message]) -> list[Any]:
    if name == "topic":
        return [message.topic() for message in messages]
    if name == "partition":
        return [message.partition() for message in messages]
    if name == "offset":
        return [message.offset() for message in messages]
    if name == "key":
        return [message.key() for message in messages]
    if name == "timestamp_ms":
        stamps = (message.timestamp() for message in messages)
        return [None if kind == TIMESTAMP_NOT_AVAILABLE else stamp for kind, stamp in stamps]
    return [
        [
            {"key": key, "value": value.encode() if isinstance(value, str) else value}
            for key, value in message.headers() or ()
        ]
        for message in messages
    ]
