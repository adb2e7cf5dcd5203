"""Simulated logs that lose their ends and grow again, under the real sessions, which fetch ahead
(C26).

The broker and the client are simulated as librdkafka behaves. The client hands out what it has
fetched, whatever has become of the log. The broker checks a position that is given with a leader
epoch, and checks where a consumer stands when the log gets another leader.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
from confluent_kafka import KafkaError, TopicPartition

from framework.clients.kafka_settings import KafkaSettings
from framework.errors import DataLossError, RetryableError
from spouts.kafka.consumer import native_range_consumer
from spouts.kafka.consumer import range_consumer as kafka_session
from spouts.kafka.consumer.native_range_consumer import NativeSession
from spouts.kafka.consumer.range_consumer import KafkaSession
from spouts.kafka.consumer.range_consumer_base import Range
from spouts.kafka.consumer.record_chunk import MessageChunk
from spouts.kafka.record_deserialization import EVERYTHING

PARTITIONS = 2
BATCHES = 12
WORKERS = 2
SILENCE_S = 0.5


@dataclass(frozen=True)
class SimMessage:
    """As much of a ``confluent_kafka.Message`` as a session uses; ``failure``:
    an event instead of a record.
    """

    number: int
    at: int
    epoch: int = 0
    record: int = 0
    failure: int | None = None

    def __len__(self) -> int:
        return 8  # bytes of the value

    def topic(self) -> str:
        return "topic"

    def partition(self) -> int:
        return self.number

    def offset(self) -> int:
        return self.at

    def leader_epoch(self) -> int:
        return self.epoch

    def error(self) -> KafkaError | None:
        return None if self.failure is None else KafkaError(self.failure)


@dataclass
class SimLog:
    """A partition. ``records``: (leader epoch, record)."""

    number: int
    epoch: int = 0
    records: list[tuple[int, int]] = field(default_factory=list)

    def lose_end(self, left: int) -> None:
        """An unclean election: another leader has less of the log."""
        del self.records[left:]
        self.epoch += 1

    def end_of(self, epoch: int) -> int:
        """The end of the records that were written in ``epoch`` or before."""
        return next((offset for offset, (each, _) in enumerate(self.records) if each > epoch), len(self.records))


@dataclass
class _Fetching:
    """Where a consumer stands in a log, and the epoch of what it has read there."""

    log: SimLog
    position: int
    epoch: int | None
    leader: int
    ended: int = -1


class SimConsumer:
    def __init__(self, world: SessionsWorld) -> None:
        self._world = world
        self._fetching: dict[int, _Fetching] = {}
        self._fetched: list[SimMessage] = []

    def list_topics(self, topic: str | None = None, *, timeout: float) -> Any:
        return SimpleNamespace(topics={"topic": SimpleNamespace(partitions=range(len(self._world.logs)))})

    def incremental_assign(self, positions: Sequence[TopicPartition]) -> None:
        for each in positions:
            epoch = each.leader_epoch if each.leader_epoch is not None and each.leader_epoch >= 0 else None
            log = self._world.logs[each.partition]
            self._fetching[each.partition] = _Fetching(log, each.offset, epoch, leader=log.epoch)

    def seek(self, position: TopicPartition) -> None:
        """Have the next fetch ask the broker whether the log is still the same,
        as after a change of leader.
        """
        self._fetching[position.partition].leader = -1

    def incremental_unassign(self, positions: Sequence[TopicPartition]) -> None:
        for each in positions:
            del self._fetching[each.partition]
            self._fetched = [message for message in self._fetched if message.number != each.partition]

    def fetch(self) -> None:
        """Ask the leader of each partition for a few more records; the client does so by itself."""
        for each in self._fetching.values():
            log = each.log
            truncated = each.leader != log.epoch and each.epoch is not None and log.end_of(each.epoch) < each.position
            each.leader = log.epoch
            if truncated or each.position > len(log.records):
                self._fetched.append(SimMessage(log.number, each.position, failure=KafkaError._AUTO_OFFSET_RESET))
                continue
            more = log.records[each.position : each.position + self._world.chance.randint(1, 6)]
            for epoch, record in more:
                self._fetched.append(SimMessage(log.number, each.position, epoch, record))
                each.position, each.epoch = each.position + 1, epoch
            if not more and each.ended != each.position:
                each.ended = each.position
                self._fetched.append(SimMessage(log.number, each.position, failure=KafkaError._PARTITION_EOF))

    def consume(self, most: int, timeout_s: float) -> list[SimMessage]:
        self._world.meanwhile()
        if timeout_s or self._world.chance.random() < 0.5:
            self.fetch()
        self._world.now += timeout_s
        given, self._fetched = self._fetched[:most], self._fetched[most:]
        return given

    def close(self) -> None:
        pass


class SimQueues(SimConsumer):
    """The same consumer as the compiled part shows it: a queue for each partition, read into
    columns.
    """

    checks_epochs = True

    def serve(self) -> tuple[list[Any], list[Any], None]:
        return [], [], None

    def partitions_of(self, topic: str | None, timeout_ms: int) -> list[tuple[str, list[int]]]:
        return [("topic", list(range(len(self._world.logs))))]

    def incremental_assign(self, positions: Sequence[Any]) -> None:
        super().incremental_assign([_client_partition(*each) for each in positions])

    def incremental_unassign(self, positions: Sequence[Any]) -> None:
        super().incremental_unassign([_client_partition(*each) for each in positions])

    def seek(self, position: Any, timeout_ms: int = 0) -> None:
        super().seek(_client_partition(*position))

    def begin(self, *parts: Any) -> None:
        self._rows: list[SimMessage] = []

    def fill(
        self,
        *,
        topic: str,
        partition: int,
        position: int,
        end: int,
        epoch_max: int | None,
        rows_max: int,
        bytes_max: int,
        wait_ms: int,
    ) -> tuple[int, int, str, int, int, str]:
        """As in ``spouts/native/src/reader.rs``."""
        self._world.meanwhile()
        before = len(self._rows)
        for waits in (False, True):
            if waits or self._world.chance.random() < 0.5:
                self.fetch()
            for message in [each for each in self._fetched if each.number == partition]:
                if position >= end:
                    return len(self._rows) - before, position, "complete", -1, 0, ""
                if message.failure is not None:
                    self._fetched.remove(message)
                    if message.failure == KafkaError._PARTITION_EOF and message.at < end:
                        continue
                    return len(self._rows) - before, position, "event", message.at, message.failure, ""
                if message.at >= position:
                    if message.at >= end:
                        return len(self._rows) - before, position, "complete", -1, 0, ""
                    if self.checks_epochs and epoch_max is not None and message.epoch > epoch_max:
                        return len(self._rows) - before, position, "replaced", message.at, message.epoch, ""
                    self._rows.append(message)
                    position = message.at + 1
                self._fetched.remove(message)
            if position >= end:
                return len(self._rows) - before, position, "complete", -1, 0, ""
        self._world.now += wait_ms / 1000
        return len(self._rows) - before, position, "waiting", -1, 0, ""

    def finish(self) -> dict[str, Any]:
        values = pa.array([b"%d" % row.record for row in self._rows], pa.binary())
        keys = pa.array([None] * len(values), pa.binary())
        numbers = pa.array([row.at for row in self._rows], pa.int64())
        headers = {"rows": 0, "offsets": pa.array([0] * (len(values) + 1), pa.int32()).buffers()[1]}
        headers |= {name: _binary(pa.array([], pa.binary())) for name in ("names", "values")}
        return {
            "rows": len(values),
            "value_bytes": 0,
            "values": _binary(values),
            "offsets": numbers.buffers()[1],
            "keys": _binary(keys),
            "headers": headers,
            "timestamps": {"validity": None, "nulls": 0, "data": numbers.buffers()[1]},
        }


def _client_partition(topic: str, number: int, offset: int, epoch: int | None) -> TopicPartition:
    return TopicPartition(topic, number, offset, leader_epoch=-1 if epoch is None else epoch)


def _binary(column: pa.BinaryArray) -> dict[str, Any]:
    validity, offsets, data = column.buffers()
    empty = pa.py_buffer(b"\0\0\0\0")
    return {"validity": validity, "offsets": offsets or empty, "data": data or empty, "nulls": column.null_count}


class SessionsWorld:
    """Batches are planned and read, by one worker or another, while logs grow,
    lose their ends, and grow again.
    """

    def __init__(self, seed: int, reader: str = "python") -> None:
        self.reader = reader
        self.chance = random.Random(f"sessions {seed}")
        self.now = 0.0
        self.next_record = 0
        self.logs = [SimLog(number) for number in range(PARTITIONS)]
        self.lost = 0
        self.told = False  # of a loss: only then the planner asks which logs have changed
        self.truncations = 0
        self.troubled = self.chance.random() < 0.8

    def grow(self, log: SimLog) -> None:
        for _ in range(self.chance.randint(0, 6)):
            self.next_record += 1
            log.records.append((log.epoch, self.next_record))

    def meanwhile(self) -> None:
        """Let a random log grow; now and then, it loses its end."""
        log = self.chance.choice(self.logs)
        if self.troubled and self.chance.random() < 0.08 and log.records:
            log.lose_end(len(log.records) - self.chance.randint(0, min(5, len(log.records))))
            self.truncations += 1
        if self.chance.random() < 0.5:
            self.grow(log)

    def run(self) -> str | None:
        """Run the world: each batch is what was planned, or an error that has a loss as its cause.

        Returns None. Raises ``Wrong``.
        """
        consumers: list[SimConsumer] = []
        native = self.reader == "native"

        def made(*conf: Any) -> SimConsumer:
            consumers.append(SimQueues(self) if native else SimConsumer(self))
            return consumers[-1]

        with instead_of_kafka(made, self):
            kind = NativeSession if native else KafkaSession
            sessions: list[Any] = [kind(KafkaSettings("simulated:9092", None), "group") for _ in range(WORKERS)]
            positions: list[tuple[int, int | None]] = [(0, 0)] * PARTITIONS
            for _ in range(BATCHES):
                for log in self.logs:
                    self.grow(log)
                self.meanwhile()
                positions = self._batch(sessions, positions)
                for each in consumers:
                    each.fetch()  # ahead of any request
        return None

    def _batch(self, sessions: list[Any], positions: list[tuple[int, int | None]]) -> list[Any]:
        ranges, planned, after = {}, [], []
        misplaced = False
        told, self.told = self.told, False
        for log, (first, epoch) in zip(self.logs, positions, strict=True):
            cut = epoch is not None and min(log.end_of(epoch), len(log.records)) < first
            if cut and epoch is not None and (told or len(log.records) < first):
                first, epoch, cut = log.end_of(epoch), None, False  # go on where the log changed
            end = min(first + self.chance.randint(0, 5), len(log.records))
            misplaced = misplaced or (cut and first < end)
            ranges["topic", log.number] = Range(first, end, epoch, "id", log.epoch)
            planned += [record for _, record in log.records[first:end]]
            after.append((end, log.epoch if end > first or epoch is None else epoch))
        for _ in range(3):  # attempts
            self.meanwhile()
            still = [log.records[r.first : r.end] for log, r in zip(self.logs, ranges.values(), strict=True)]
            try:
                chunks = self.chance.choice(sessions).read(ranges, EVERYTHING)
                found = [record for chunk in chunks for record in records_in(chunk)]
            except (DataLossError, RetryableError) as error:
                self.lost += 1
                self.told = self.told or isinstance(error, DataLossError)
                there = [record for records in still for _, record in records] == planned
                now = [log.records[r.first : r.end] for log, r in zip(self.logs, ranges.values(), strict=True)]
                if there and now == still and isinstance(error, DataLossError) and not misplaced:
                    raise Wrong(f"{ranges} are as they were planned: {error}") from error
                continue
            if found != planned:
                raise Wrong(f"{planned} were planned in {ranges}, and {found} came")
            if misplaced:
                raise Wrong(f"{ranges} begin behind the end of a log that was truncated, and were read")
            return after
        return [(position, epoch) for position, epoch in positions] if planned else after


def records_in(chunk: Any) -> list[int]:
    """The numbers of the records in a chunk of either reader."""
    if isinstance(chunk, MessageChunk):
        return [message.record for message in chunk.messages]  # type: ignore[attr-defined]
    return [int(value) for value in chunk.raw("value").to_pylist()]


class Wrong(AssertionError):
    """A batch that is not what was planned, or an error without a cause."""


def run_sessions(seed: int, reader: str = "python") -> tuple[str | None, SessionsWorld]:
    world = SessionsWorld(seed, reader)
    try:
        return world.run(), world
    except Wrong as wrong:
        return str(wrong), world


@contextmanager
def instead_of_kafka(consumer: Any, world: SessionsWorld) -> Iterator[None]:
    clock = SimpleNamespace(monotonic=lambda: world.now)
    ours: dict[Any, dict[str, Any]] = {
        kafka_session: {"Consumer": consumer, "Message": SimMessage, "time": clock, "SILENCE_MAX_S": SILENCE_S},
        native_range_consumer: {
            "native": lambda: SimpleNamespace(Consumer=consumer),
            "why_not_native": lambda: None,
            "time": clock,
        },
    }
    before = {module: {name: getattr(module, name) for name in names} for module, names in ours.items()}
    try:
        for module, names in ours.items():
            vars(module).update(names)
        yield
    finally:
        for module, names in before.items():
            vars(module).update(names)
