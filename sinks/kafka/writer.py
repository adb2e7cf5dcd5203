"""Writes to Kafka exactly once: records and a marker in one kafka_txn.

The order of steps (C11), also after an unknown outcome:

a. Initialise the transactional id. This fences every other producer of the id and ends its open
   kafka_txn.
b. Read the markers to the end.
c. Unless this txid is already written, produce the records and the marker, and commit.

A zombie that wakes up finds the marker, or writes what its successor would have written.

A producer that is kept between batches holds a lease on its transactional id: it may go on until
another process of the topology initialises the id. Then it repeats these steps at once, and the
attempt does not fail (C26).

Invariants:

1. A txid's records are committed together with its marker, or neither is.
2. The marker that was read is the last one: nobody else has written under this id since it was
   initialised.
3. A transactional id belongs to one task of one component of one topology: ids contain no ``/``.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from framework.clients.kafka import ConnectionErrors, KafkaSettings
from framework.errors import CommitOutcomeUnknown, ConfigError, InvariantViolation, RetryableError, StaleWriterError
from framework.topology import Standing, TopologyContext
from sinks.kafka.markers import (
    STEP_TIMEOUT_S,
    Marker,
    find_markers,
    has_markers,
    initialised,
    markers_topic,
    read_markers,
    transactional_id_of,
    writer_of,
)

PROBE_TIMEOUT_S = 10.0
#: A new producer reads all markers, so compaction must remove outdated ones soon.
MARKERS_CONFIG = {"cleanup.policy": "compact", "segment.ms": "3600000", "min.cleanable.dirty.ratio": "0.1"}
_POLL_S = 0.05
#: The one partition of a topic of markers.
_MARKERS_PARTITION = 0
_ANY_PARTITION = -1
_TAKEN = (KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED)
#: Errors of a client that has failed for good. They do not name the reason.
_OVER = (KafkaError._FATAL, KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT)
W = TypeVar("W")


class _LeaseLost(StaleWriterError):
    """Another process of the topology has initialised the transactional id."""


class _ClientFailed(RetryableError):
    """The client failed without a reason. Most often its transactional id was taken over."""


class KafkaRecord(NamedTuple):
    """One record to write. ``headers``: (name, value) pairs."""

    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]] = ()


def probe(settings: KafkaSettings, topic: str) -> None:
    """Fail before the start on what would fail in the first batch. Raises ``ConfigError`` if the
    topic does not exist or the brokers refuse the client, and ``RetryableError`` if they do not
    answer."""
    errors = ConnectionErrors(settings.bootstrap_servers)
    admin = errors.made(lambda: AdminClient({**settings.admin(), "error_cb": errors.on_error}))
    try:
        known = admin.list_topics(timeout=PROBE_TIMEOUT_S).topics
    except KafkaException as error:
        raise errors.explain(error, admin) from error
    if topic not in known:
        raise ConfigError(f"topic {topic!r} does not exist at {settings.bootstrap_servers}: create it")


def produce(
    producer: Producer,
    topic: str,
    record: KafkaRecord,
    delivered: Callable[[KafkaError | None, Any], None],
    partition: int = _ANY_PARTITION,
) -> None:
    """Hand a record to the client, waiting for room in its queue."""
    while True:
        try:
            producer.produce(
                topic, record.value, record.key, partition, headers=list(record.headers), on_delivery=delivered
            )
            producer.poll(0)
            return
        except BufferError:  # the queue is full: wait for deliveries
            producer.poll(_POLL_S)


class MarkedWriter:
    """The writer of one task of one component, with a ``transactional_id`` of its own. One thread
    writes at a time."""

    def __init__(self, settings: KafkaSettings, transactional_id: str, marker_topic: str, writer: str) -> None:
        self._settings = settings
        self._transactional_id = transactional_id
        self._marker_topic = marker_topic
        self._writer = writer
        self._errors = ConnectionErrors(settings.bootstrap_servers)
        self._producer: Producer | None = None
        self._last: Marker | None = None
        self._undelivered: list[KafkaError] = []
        self._lock = threading.Lock()

    def write(self, topic: str, records: Iterable[KafkaRecord], marker: Marker) -> bool:
        """Write all records with their marker. Returns False if they are already written. May
        iterate ``records`` twice.

        Raises ``StaleWriterError`` if a newer writer is active, ``ConfigError`` if the last marker
        is of another incarnation, everything else that ``Marker.already_holds`` raises,
        ``CommitOutcomeUnknown``, or ``RetryableError``. After an error, the next call starts with a
        new producer."""
        with self._lock:
            if self._producer is not None:
                try:
                    return self._guarded(lambda: self._write(topic, records, marker))
                except (_LeaseLost, _ClientFailed):
                    pass  # try once with a new producer: it aborts what is open, or finds the marker
            return self._guarded(lambda: self._write(topic, records, marker))

    def renew(self, marker: Marker) -> None:
        """Fence every other producer of this writer and write ``marker``, whatever the last marker
        is. Raises as ``write``."""
        with self._lock:
            self._producer = None
            self._guarded(lambda: self._renew(marker))

    def close(self) -> None:
        self._producer = None

    # --- inside -----------------------------------------------------------------------------------

    def _guarded(self, write: Callable[[], W]) -> W:
        try:
            return write()
        except SystemError as error:
            # The client raises this if a fatal error and a delivery report come at the same time.
            cause = error.__cause__ if isinstance(error.__cause__, KafkaException) else self._fatal()
            self._producer = None
            if cause is not None:
                raise self._explained(cause) from error
            raise _ClientFailed(f"{self._writer}: the Kafka client failed: {error}{self._errors.reason()}") from error
        except BaseException:
            self._producer = None
            raise

    def _fatal(self) -> KafkaException | None:
        """The reason why the client failed for good; None if it has not. Later calls fail without a
        reason."""
        if self._producer is None:
            return None
        try:
            self._producer.poll(0)
        except KafkaException as error:
            return error
        except SystemError as error:
            return error.__cause__ if isinstance(error.__cause__, KafkaException) else None
        return None

    def _write(self, topic: str, records: Iterable[KafkaRecord], marker: Marker) -> bool:
        if self._producer is None:
            self._begin(topic, marker.topology_id)
        if self._last is not None and self._last.already_holds(marker):
            return False
        self._in_one_kafka_txn(topic, records, marker)
        self._last = marker
        return True

    def _renew(self, marker: Marker) -> None:
        self._begin(self._marker_topic, marker.topology_id)
        self._in_one_kafka_txn(self._marker_topic, (), marker)
        self._last = marker

    def _begin(self, topic: str, topology_id: str) -> None:
        self._check_topics(topic)
        producer = self._initialised()
        self._last = self._last_marker(topology_id)
        self._producer = producer

    def _initialised(self) -> Producer:
        try:
            return initialised(self._settings, self._errors, self._transactional_id)
        except KafkaException as error:
            raise self._explained(error) from error

    def _last_marker(self, topology_id: str) -> Marker | None:
        return read_markers(self._settings, self._marker_topic, topology_id).get(self._writer)

    def _check_topics(self, topic: str) -> None:
        settings = {**self._settings.admin(), "error_cb": self._errors.on_error}
        admin = self._errors.made(lambda: AdminClient(settings))
        try:
            known = admin.list_topics(timeout=STEP_TIMEOUT_S)
            self._errors.connected = True
            if topic not in (*known.topics, self._marker_topic):
                raise RetryableError(f"topic {topic!r} does not exist at {self._settings.bootstrap_servers}: create it")
            if not has_markers(known, self._marker_topic):
                new = NewTopic(self._marker_topic, 1, config=MARKERS_CONFIG)
                admin.create_topics([new], operation_timeout=STEP_TIMEOUT_S)[self._marker_topic].result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise self._errors.explain(error, admin) from error

    def _in_one_kafka_txn(self, topic: str, records: Iterable[KafkaRecord], marker: Marker) -> None:
        producer = self._producer
        if producer is None:
            raise InvariantViolation("a kafka_txn without a producer")
        self._undelivered.clear()
        try:
            producer.begin_transaction()
            for record in records:
                produce(producer, topic, record, self._delivered)
            last = KafkaRecord(marker.key, marker.document)
            produce(producer, self._marker_topic, last, self._delivered, _MARKERS_PARTITION)
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
        why = self._fatal() or error
        if any(each.args[0].code() in _TAKEN for each in (error, why)):
            return _LeaseLost(f"{self._writer}: another writer has taken over {self._transactional_id!r}")
        if why.args[0].code() in _OVER:
            return _ClientFailed(f"{self._writer}: the Kafka client failed: {why.args[0].str()}{self._errors.reason()}")
        return _too_large(self._writer, error) or self._errors.explain(why)


def _too_large(where: str, error: KafkaException) -> ConfigError | None:
    """The error for a record that is too large for every broker; None for another error."""
    if error.args[0].code() != KafkaError.MSG_SIZE_TOO_LARGE:
        return None
    return ConfigError(f"{where}: {error.args[0].str()}; raise message.max.bytes of client and topic")


class PlainWriter:
    """Writes, and waits until all replicas have acknowledged everything. After an error, the caller
    writes everything again."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._errors = ConnectionErrors(settings.bootstrap_servers)
        self._producer: Producer | None = None

    def write(self, topic: str, records: Iterable[KafkaRecord]) -> None:
        """Raises ``RetryableError`` if it is not certain that everything was written, and
        ``ConfigError`` for a record that the broker will never accept."""
        failed: list[KafkaError] = []

        def delivered(error: KafkaError | None, _: Any) -> None:
            if error is not None:
                failed.append(error)

        settings = {**self._settings.producer(), "enable.idempotence": True, "error_cb": self._errors.on_error}
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
            self._producer = None  # drops the records it still holds
            raise RetryableError(f"topic {topic!r}: not everything was delivered within {STEP_TIMEOUT_S:g} s")
        if failed:
            raise self._explained(topic, KafkaException(failed[0]))

    def _explained(self, topic: str, error: KafkaException) -> Exception:
        return _too_large(f"topic {topic!r}", error) or self._errors.explain(error, self._producer)

    def close(self) -> None:
        self._producer = None


class Writers:
    """The writers of this process. Keeping them saves initialising their ids for every batch."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, ...], Any] = {}
        self._lock = threading.Lock()
        self._process = os.getpid()

    def marked(
        self, settings: KafkaSettings, context: TopologyContext, marker_topic: str | None = None
    ) -> MarkedWriter:
        """The writer of a task of a topology."""
        transactional_id = transactional_id_of(context.topology_id, writer_of(context))
        markers = markers_topic(context, marker_topic)
        return self._get(
            (settings.fingerprint(), transactional_id, markers),
            lambda: MarkedWriter(settings, transactional_id, markers, writer_of(context)),
        )

    def plain(self, settings: KafkaSettings) -> PlainWriter:
        """A writer without transactions."""
        return self._get((settings.fingerprint(),), lambda: PlainWriter(settings))

    def _get(self, key: tuple[str, ...], make: Callable[[], W]) -> W:
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


def check_markers(
    settings: KafkaSettings, context: TopologyContext, marker_topic: str | None, standing: Standing
) -> None:
    """Compare the markers of a component with ZooKeeper's state. Raises ``ConfigError`` if they
    contradict each other (C25)."""
    topic = markers_topic(context, marker_topic)
    for marker in find_markers(settings, topic, context.topology_id).values():
        if marker.writer.startswith(f"{context.component_id}/"):
            marker.check(context.topology_id, standing)


def renew_markers(
    settings: KafkaSettings, context: TopologyContext, marker_topic: str | None, standing: Standing
) -> None:
    """Write a first marker of the new incarnation for every present and former writer of a
    component. This fences the producers of the old incarnation. If one of them initialises its id
    again, it finds the new marker and fails."""
    found = find_markers(settings, markers_topic(context, marker_topic), context.topology_id)
    if not found:
        return
    prefix = f"{context.component_id}/"
    before = {int(writer.removeprefix(prefix)) for writer in found if writer.startswith(prefix)}
    for task in sorted({*range(context.task_count), *before}):
        mine = replace(context, task_index=task)
        first = Marker(
            topology_id=context.topology_id,
            writer=writer_of(mine),
            epoch=standing.epoch,
            txid=0,
            attempt_id=0,
            plan_digest="",
            tasks=context.task_count,
            incarnation=standing.incarnation,
        )
        writers.marked(settings, mine, marker_topic).renew(first)


writers = Writers()
atexit.register(writers.close)
