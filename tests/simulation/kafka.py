"""A simulated Kafka: two topics, markers, transactional ids. The writer is real; the broker loses
answers.

A commit without an answer may be done, or may never be done, or may be done later, as long as
nobody has initialised its transactional id meanwhile. Between two requests of a writer, other
processes may go on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException

from framework import BaseTransactionalBolt, Committer
from framework.clients.kafka_settings import KafkaSettings
from framework.errors import RetryableError
from framework.topology import DEAD_LETTER_FIELDS, Standing, TopologyContext, TransactionAttempt
from sinks import DeadLetterTable, DeadLetterTopic, dead_letter_committers
from sinks.kafka.delivery import KafkaRecord
from sinks.kafka.limits import TopicLimits
from sinks.kafka.markers import Marker, writer_of
from sinks.kafka.writer import MarkedWriter

if TYPE_CHECKING:
    from tests.simulation.world import World

WORKERS = 3
#: The committer that the builder adds for the spout's dead letters.
LETTERS = "spout-dead-letters"
_LETTER = {"topic_id": "id", "partition": 0, "topic": "source", "error": "bad", "key": None, "headers": []}
_SETTINGS = KafkaSettings("simulated:9092", None)


@dataclass(slots=True)
class SimMessage:
    """A record, as ``confluent_kafka.Message`` shows it."""

    _value: bytes | None
    _key: bytes | None
    _headers: list[tuple[str, bytes | None]]
    _offset: int = -1

    def value(self) -> bytes | None:
        return self._value

    def key(self) -> bytes | None:
        return self._key

    def headers(self) -> list[tuple[str, bytes | None]]:
        return self._headers

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self._offset


class SimKafka:
    """What the broker holds, and the workers that keep producers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.epochs: dict[str, int] = {}  # of transactional ids
        self.markers: dict[str, Marker] = {}
        self.life = 0
        self._writers: dict[tuple[int, str], SimWriter] = {}

    def initialise(self, transactional_id: str) -> int:
        self.epochs[transactional_id] = self.epochs.get(transactional_id, 0) + 1
        return self.epochs[transactional_id]

    def commit(self, transactional_id: str, epoch: int, marker: Marker, messages: list[SimMessage]) -> bool:
        """Commit a kafka_txn. False when another producer has taken over its transactional id."""
        if self.epochs[transactional_id] != epoch:
            return False
        self.world.oracle.sent(marker.writer.split("/")[0], marker, list(map(self.shown, messages)))
        self.markers[marker.writer] = marker
        return True

    def shown(self, message: SimMessage) -> Any:
        """What the oracle compares of a record."""
        return int(message.value() or b"")

    def check(self, context: TopologyContext, standing: Standing) -> None:
        """Check the markers of a component against what a new leader knows."""
        for marker in self.markers.values():
            if marker.writer.startswith(f"{context.component_id}/"):
                marker.check(context.topology_id, standing)

    def restart_workers(self) -> None:
        """End the tasks that are under way, and the kept producers."""
        self.life += 1
        self._writers.clear()

    def write(self, records: Sequence[KafkaRecord], marker: Marker, life: int) -> None:
        if life != self.life:
            raise RetryableError("the worker is gone")
        self._writer(marker.writer).write(["topic"], records, marker)

    def write_letters(self, attempt: TransactionAttempt, letters: Sequence[Mapping[str, Any]], life: int) -> None:
        """Run the real commit task of the dead letters."""
        if life != self.life:
            raise RetryableError("the worker is gone")
        committer = DeadLetterTopic("letters", bootstrap_servers="simulated:9092")
        real, dead_letter_committers.writers = dead_letter_committers.writers, self  # type: ignore[assignment]
        try:
            commit_letters(committer, attempt, letters)
        finally:
            dead_letter_committers.writers = real

    def marked(self, settings: KafkaSettings, context: TopologyContext, marker_topic: str | None) -> SimWriter:
        return self._writer(writer_of(context))

    def limits(self, settings: KafkaSettings, topic: str) -> TopicLimits:
        return TopicLimits(1_000_000)

    def _writer(self, name: str) -> SimWriter:
        """The writer that a random worker keeps; the worker may have died meanwhile.

        Never one that is in use.
        """
        chance = self.world.chance
        first = int(chance.random() * WORKERS)
        if self.world.fault("worker", ("dies",), 0.03):
            self._writers.pop((first, name), None)
        worker = first
        while (kept := self._writers.get((worker, name))) is not None and kept.in_use:
            worker += 1
        return self._writers.setdefault((worker, name), SimWriter(self.world, name))


def commit_letters(
    committer: DeadLetterTable | DeadLetterTopic, attempt: TransactionAttempt, letters: Sequence[Mapping[str, Any]]
) -> None:
    """Run the commit task of a committer of dead letters."""
    committer.prepare({}, TopologyContext("sim", LETTERS, 0, 1), None, attempt)  # type: ignore[arg-type]
    if letters:
        committer.execute_arrow(pa.RecordBatch.from_pylist([*letters], DEAD_LETTER_FIELDS.schema()))
    committer.finish_batch()


def letter_row(record: int) -> Mapping[str, Any]:
    """A record as a dead letter."""
    return {**_LETTER, "offset": record, "value": str(record).encode()}


class SimWriter(MarkedWriter):
    """The real writer; its requests go to the simulated broker."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(_SETTINGS, f"sim/{name}", "markers", name)
        self._world = world
        self._life = world.kafka.life

    @property
    def in_use(self) -> bool:
        return self._lock.locked()

    def _check_topics(self, topics: Sequence[str]) -> None:
        pass

    def _initialised(self) -> Any:
        fault = self._world.fault("kafka: initialise", ("request lost", "answer lost"))
        if fault == "request lost":
            raise RetryableError("the broker did not initialise the id")
        producer = SimProducer(self._world, self._transactional_id, self._life)
        if fault == "answer lost":
            raise RetryableError("the broker's answer was lost")
        self._world.meanwhile()
        return producer

    def _last_marker(self, topology_id: str) -> Marker | None:
        last = self._world.kafka.markers.get(self._writer)
        self._world.meanwhile()
        return last


class SimProducer:
    """As much of ``confluent_kafka.Producer`` as a writer uses."""

    def __init__(self, world: World, transactional_id: str, life: int) -> None:
        self._world = world
        self._id = transactional_id
        self._epoch = world.kafka.initialise(transactional_id)
        self._life = life
        self._sent: list[SimMessage] = []
        self._waiting: list[Callable[[None, None], None]] = []
        self._fenced = False

    def begin_transaction(self) -> None:
        self._sent = []

    def produce(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        *arguments: Any,
        on_delivery: Any,
        **options: Any,
    ) -> None:
        self._sent.append(SimMessage(value, key, options.get("headers", [])))
        self._waiting.append(on_delivery)

    def poll(self, timeout_s: float) -> int:
        if self._fenced:
            raise KafkaException(KafkaError(KafkaError._FENCED, "fenced", fatal=True))
        return 0

    def flush(self, timeout_s: float) -> int:
        self._world.meanwhile()
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each(None, None)
        return 0

    def commit_transaction(self, timeout_s: float) -> None:
        fault = self._world.fault("kafka: commit", ("request lost", "request late", "answer lost"))
        if fault == "request late":
            self._world.at(int(self._world.chance.random() * 2_500), self._commit)
        elif fault != "request lost":
            self._commit()
        if fault is not None:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer", retriable=True))
        if self._fenced:
            raise KafkaException(KafkaError(KafkaError.PRODUCER_FENCED, "fenced", fatal=True))

    def _commit(self) -> None:
        *records, marker = self._sent
        done = self._life == self._world.kafka.life and self._world.kafka.commit(
            self._id, self._epoch, Marker(**json.loads(marker.value() or b"")), records
        )
        self._fenced = not done


class SimLetters(DeadLetterTopic):
    """The committer of dead letters in the topology. The simulator runs its tasks itself."""

    def __init__(self, kafka: SimKafka) -> None:
        super().__init__("letters")
        self._kafka = kafka

    def check_written(self, conf: Mapping[str, Any], context: TopologyContext, standing: Standing) -> None:
        self._kafka.check(context, standing)


class TopicSink(BaseTransactionalBolt, Committer):
    """Stands for a ``KafkaSink`` in the topology. The simulator runs its tasks itself."""

    deterministic = True

    def __init__(self, kafka: SimKafka) -> None:
        self._kafka = kafka

    def execute(self, tup: Any) -> None:
        raise AssertionError("the simulator has tasks of its own")

    def finish_batch(self) -> None:
        raise AssertionError("the simulator has tasks of its own")

    def check_written(self, conf: Mapping[str, Any], context: TopologyContext, standing: Standing) -> None:
        self._kafka.check(context, standing)
