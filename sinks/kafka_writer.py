"""Writes to Kafka exactly once: records and a marker in one kafka_txn.

A marker says what the last kafka_txn of a writer held: key ``component/task``, in a compacted topic of one partition per
topology. Order (C11), also after an unknown outcome: initialise the transactional id, which ends every other producer of
that id and whatever it left open; read the markers to the end; then, unless this txid is there already, produce records and
marker and commit. A zombie that wakes up is fenced by the id, or finds the marker.

Invariants:

1. A txid's records are committed together with its marker, or neither is.
2. The marker that was read is the last one: nobody else writes under this id since it was initialised.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar, cast

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

from framework.errors import (
    CommitOutcomeUnknown,
    ConfigError,
    CorruptStateError,
    InvariantViolation,
    RetryableError,
    StaleWriterError,
)
from framework.kafka_clients import ConnectionErrors, KafkaSettings
from framework.topology import TopologyContext, TransactionAttempt

MARKER_FORMAT = 1
#: For every single step with the broker; below the driver's patience, so that an attempt fails by itself.
STEP_TIMEOUT_S = 15.0
PROBE_TIMEOUT_S = 10.0
#: A broker aborts what a dead writer left open after this long.
TRANSACTION_TIMEOUT_MS = 60_000
_POLL_S = 0.05
W = TypeVar("W")


class KafkaRecord(NamedTuple):
    """What is written. ``headers``: (name, value) pairs."""

    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]] = ()


@dataclass(frozen=True, slots=True)
class Marker:
    """What a kafka_txn held: the records of this task's part of this txid."""

    topology_id: str
    writer: str
    epoch: int
    txid: int
    attempt_id: int
    plan_digest: str
    tasks: int = 1
    format: int = MARKER_FORMAT

    def already_holds(self, wanted: Marker) -> bool:
        """Whether ``wanted`` was written before, given that ``self`` is the last marker. Raises ``StaleWriterError`` for
        a writer of the past, ``InvariantViolation`` for another plan of the same txid."""
        if wanted.epoch > self.epoch and wanted.txid < self.txid:
            return False  # the topology was reset and has begun again with txid 1; epochs go on rising
        if wanted.txid == self.txid and wanted.plan_digest == self.plan_digest:
            if wanted.tasks != self.tasks:
                raise InvariantViolation(
                    f"txid {wanted.txid} was written by {self.writer} as one of {self.tasks} tasks, and there are {wanted.tasks} "
                    "now: finish it with the parallelism that it was begun with"
                )
            return True
        if wanted.txid == self.txid and wanted.epoch >= self.epoch:
            raise InvariantViolation(
                f"txid {wanted.txid} was written by {self.writer} under plan {self.plan_digest}, and the plan is "
                f"{wanted.plan_digest} now: what Kafka holds cannot be undone"
            )
        if wanted.txid <= self.txid or wanted.epoch < self.epoch:
            raise StaleWriterError(f"{wanted.writer}: txid {self.txid} of epoch {self.epoch} is written", self.epoch)
        return False


def marker_of(attempt: TransactionAttempt, context: TopologyContext) -> Marker:
    """The marker of this task's part of an attempt."""
    fence = attempt.fence
    return Marker(
        context.topology_id,
        f"{context.component_id}/{context.task_index}",
        fence.epoch if fence is not None else 0,
        attempt.txid,
        attempt.attempt_id,
        fence.plan_digest if fence is not None else "",
        context.task_count,
    )


def probe(settings: KafkaSettings, topic: str) -> None:
    """Find out, before anything starts, what would fail in the first batch. Raises ``ConfigError`` for a topic that is not
    there and for a client that is refused; brokers that do not answer are left to the batch, which waits for them."""
    errors = ConnectionErrors(settings.bootstrap_servers)
    admin = errors.made(lambda: AdminClient({**settings.admin(), "error_cb": errors.heard}))
    try:
        known = admin.list_topics(timeout=PROBE_TIMEOUT_S).topics
    except KafkaException as error:
        found = errors.explain(error, admin)
        if isinstance(found, ConfigError):
            raise found from error
        return
    if topic not in known:
        raise ConfigError(f"topic {topic!r} does not exist at {settings.bootstrap_servers}: create it")


def produce(
    producer: Producer, topic: str, record: KafkaRecord, delivered: Callable[[KafkaError | None, Any], None]
) -> None:
    """Hand a record to the client, waiting for room in its queue."""
    while True:
        try:
            producer.produce(topic, record.value, record.key, headers=list(record.headers), on_delivery=delivered)
            producer.poll(0)
            return
        except BufferError:  # the queue is full: let some of it go
            producer.poll(_POLL_S)


class MarkedWriter:
    """One writer: ``transactional_id`` belongs to one task of one component. Used from one thread at a time."""

    def __init__(self, settings: KafkaSettings, transactional_id: str, marker_topic: str, writer: str) -> None:
        self._settings = settings
        self._transactional_id = transactional_id
        self._marker_topic = marker_topic
        self._writer = writer
        self._errors = ConnectionErrors(settings.bootstrap_servers)
        self._producer: Producer | None = None
        self._last: Marker | None = None
        self._undelivered: list[KafkaError] = []

    def write(self, topic: str, records: Iterable[KafkaRecord], marker: Marker) -> bool:
        """Write all records with their marker, or find that they are there: then False. Raises ``StaleWriterError`` when
        a newer writer is at work, ``CommitOutcomeUnknown``, or ``RetryableError``; the next call begins anew."""
        try:
            if self._producer is None:
                self._begin(topic)
            if self._last is not None and self._last.already_holds(marker):
                return False
            self._in_one_kafka_txn(topic, records, marker)
            self._last = marker
            return True
        except SystemError as error:
            # What the client makes of a fatal error and a delivery report that come at the same time.
            self._producer = None
            if isinstance(error.__cause__, KafkaException):
                raise self._explained(error.__cause__) from error
            raise RetryableError(f"{self._writer}: the Kafka client failed: {error}{self._errors.reason()}") from error
        except BaseException:
            self._producer = None
            raise

    def close(self) -> None:
        self._producer = None

    # --- inside ----------------------------------------------------------------------------------------------

    def _begin(self, topic: str) -> None:
        heard = {"error_cb": self._errors.heard}
        settings = {
            **self._settings.producer(),
            "transactional.id": self._transactional_id,
            "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
            **heard,
        }
        admin = self._errors.made(lambda: AdminClient({**self._settings.admin(), **heard}))
        self._check_topics(admin, topic)
        producer = self._errors.made(lambda: Producer(settings))
        try:
            producer.init_transactions(STEP_TIMEOUT_S)
        except KafkaException as error:
            raise self._explained(error) from error
        self._last = self._last_marker(admin)
        self._producer = producer

    def _check_topics(self, admin: AdminClient, topic: str) -> None:
        try:
            known = admin.list_topics(timeout=STEP_TIMEOUT_S).topics
            self._errors.connected = True
            if topic not in known:
                raise RetryableError(f"topic {topic!r} does not exist at {self._settings.bootstrap_servers}: create it")
            if self._marker_topic not in known:
                new = NewTopic(self._marker_topic, 1, config={"cleanup.policy": "compact"})
                admin.create_topics([new], operation_timeout=STEP_TIMEOUT_S)[self._marker_topic].result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise self._errors.explain(error, admin) from error

    def _last_marker(self, admin: AdminClient) -> Marker | None:
        """Read the markers to what was the end of the log when this was called: not only to the last stable offset, behind
        which a marker may stand while another task's kafka_txn is open."""
        where = TopicPartition(self._marker_topic, 0)
        deadline = time.monotonic() + STEP_TIMEOUT_S
        end = self._end_of_markers(admin, where, deadline)
        consumer = Consumer(self._settings.consumer(f"{self._transactional_id}-markers"))
        found: Marker | None = None
        try:
            consumer.assign([TopicPartition(self._marker_topic, 0, 0)])
            position = 0
            while position < end:
                for message in consumer.consume(1_000, _POLL_S):
                    error = message.error()
                    if error is None:
                        found = self._parsed(message) or found
                        position = max(position, message.offset() + 1)
                    elif error.code() == KafkaError._PARTITION_EOF:
                        position = max(position, message.offset())
                    elif error.code() == KafkaError._AUTO_OFFSET_RESET:  # compaction has moved the beginning
                        low, _ = consumer.get_watermark_offsets(where, STEP_TIMEOUT_S)
                        consumer.assign([TopicPartition(self._marker_topic, 0, low)])
                if time.monotonic() > deadline:
                    raise RetryableError(f"the markers in {self._marker_topic!r} could not be read to offset {end} yet")
        except KafkaException as error:
            raise self._errors.explain(error) from error
        finally:
            consumer.close()
        return found

    def _end_of_markers(self, admin: AdminClient, where: TopicPartition, deadline: float) -> int:
        """A topic that was just made is not known to everybody yet: ask again until the deadline."""
        while True:
            try:
                asked = admin.list_offsets(
                    {where: OffsetSpec.latest()}, isolation_level=IsolationLevel.READ_UNCOMMITTED
                )
                return int(asked[where].result(STEP_TIMEOUT_S).offset)
            except KafkaException as error:
                if time.monotonic() > deadline:
                    raise self._errors.explain(error, admin) from error
                time.sleep(_POLL_S)

    def _parsed(self, message: Any) -> Marker | None:
        if message.key() != self._writer.encode() or message.value() is None:
            return None
        try:
            found = Marker(**json.loads(message.value()))
        except (ValueError, TypeError) as error:
            raise CorruptStateError(
                f"topic {self._marker_topic!r}, offset {message.offset()}: not a marker ({error})"
            ) from error
        if found.format != MARKER_FORMAT:
            raise CorruptStateError(
                f"topic {self._marker_topic!r}, offset {message.offset()}: format {found.format}; a newer version wrote it"
            )
        return found

    def _in_one_kafka_txn(self, topic: str, records: Iterable[KafkaRecord], marker: Marker) -> None:
        producer = self._producer
        if producer is None:
            raise InvariantViolation("a kafka_txn without a producer")
        self._undelivered.clear()
        try:
            producer.begin_transaction()
            for record in records:
                produce(producer, topic, record, self._delivered)
            document = json.dumps(asdict(marker), separators=(",", ":")).encode()
            produce(producer, self._marker_topic, KafkaRecord(marker.writer.encode(), document), self._delivered)
            if producer.flush(STEP_TIMEOUT_S):
                raise RetryableError(f"topic {topic!r}: not everything was delivered within {STEP_TIMEOUT_S:g} s")
        except KafkaException as error:
            raise self._explained(error) from error
        if self._undelivered:
            raise self._explained(KafkaException(self._undelivered[0]))
        try:
            producer.commit_transaction(STEP_TIMEOUT_S)
        except KafkaException as error:
            if error.args[0].retriable():
                raise CommitOutcomeUnknown(f"topic {topic!r}: the kafka_txn of {marker.txid} has no answer") from error
            raise self._explained(error) from error

    def _delivered(self, error: KafkaError | None, message: Any) -> None:
        if error is not None:
            self._undelivered.append(error)

    def _explained(self, error: KafkaException) -> Exception:
        code = error.args[0].code()
        if code in (KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED):
            return StaleWriterError(f"{self._writer}: another writer has taken over {self._transactional_id!r}")
        return _too_large(self._writer, error) or self._errors.explain(error, self._producer)


def _too_large(where: str, error: KafkaException) -> ConfigError | None:
    """A record that no broker will ever take."""
    if error.args[0].code() != KafkaError.MSG_SIZE_TOO_LARGE:
        return None
    return ConfigError(f"{where}: {error.args[0].str()}; raise message.max.bytes of client and topic")


class PlainWriter:
    """Writes and waits until everything is acknowledged by all replicas; a caller that fails writes again."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._errors = ConnectionErrors(settings.bootstrap_servers)
        self._producer: Producer | None = None

    def write(self, topic: str, records: Iterable[KafkaRecord]) -> None:
        """Raises ``RetryableError`` when not everything is known to be written, ``ConfigError`` for a record that the broker
        will never take."""
        failed: list[KafkaError] = []

        def delivered(error: KafkaError | None, _: Any) -> None:
            if error is not None:
                failed.append(error)

        settings = {**self._settings.producer(), "enable.idempotence": True, "error_cb": self._errors.heard}
        if self._producer is None:
            self._producer = self._errors.made(lambda: Producer(settings))
        producer = self._producer
        try:
            for record in records:
                produce(producer, topic, record, delivered)
            left = producer.flush(STEP_TIMEOUT_S)
        except KafkaException as error:
            raise self._explained(topic, error) from error
        if left:
            self._producer = None  # what it still holds goes with it
            raise RetryableError(f"topic {topic!r}: not everything was delivered within {STEP_TIMEOUT_S:g} s")
        if failed:
            raise self._explained(topic, KafkaException(failed[0]))

    def _explained(self, topic: str, error: KafkaException) -> Exception:
        return _too_large(f"topic {topic!r}", error) or self._errors.explain(error, self._producer)

    def close(self) -> None:
        self._producer = None


class Writers:
    """The writers of this process, kept so that their ids need not be initialised for every batch."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Any] = {}
        self._lock = threading.Lock()
        self._process = os.getpid()

    def marked(
        self, settings: KafkaSettings, context: TopologyContext, marker_topic: str | None = None
    ) -> MarkedWriter:
        """The writer of a task of a topology."""
        transactional_id = f"ratchet-{context.topology_id}-{context.component_id}-{context.task_index}"
        markers = marker_topic or f"ratchet-markers-{context.topology_id}"
        writer = f"{context.component_id}/{context.task_index}"
        return self._get(
            (settings.fingerprint(), transactional_id),
            lambda: MarkedWriter(settings, transactional_id, markers, writer),
        )

    def plain(self, settings: KafkaSettings) -> PlainWriter:
        """A writer without transactions."""
        return self._get((settings.fingerprint(), ""), lambda: PlainWriter(settings))

    def _get(self, key: tuple[str, str], make: Callable[[], W]) -> W:
        with self._lock:
            if self._process != os.getpid():  # after a fork: librdkafka's threads are the parent's
                self._kept.clear()
                self._process = os.getpid()
            if key not in self._kept:
                self._kept[key] = make()
            return cast("W", self._kept[key])

    def close(self) -> None:
        with self._lock:
            for each in self._kept.values():
                each.close()
            self._kept.clear()


writers = Writers()
atexit.register(writers.close)
