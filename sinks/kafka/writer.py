"""Writes to Kafka exactly once: records and a marker in one kafka_txn.

The order of steps (C11), even after an unknown outcome:

a. Initialise the transactional id. This fences every other producer of the id and ends its open
   kafka_txn.
b. Read the markers to the end.
c. Unless this txid is already written, produce the records and the marker, and commit.

A zombie that resumes finds the marker, or writes the same records as its successor would.

A producer that is kept between batches holds a lease on its transactional id, which ends when
another process of the topology initialises the id. Then the writer repeats these steps immediately,
and the attempt does not fail (C26).

Invariants:

1. A txid's records are committed together with its marker, or neither is.
2. The marker that was read is the last one: no other producer has written under this id since it
   was initialised.
3. A transactional id belongs to one task of one component of one topology: ids contain no ``/``.
"""

from __future__ import annotations

import atexit
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from framework.clients.client_cache import ClientCache
from framework.clients.kafka_errors import kafka_error, passes
from framework.clients.kafka_settings import ConnectionErrors, KafkaSettings
from framework.clients.kafka_stall_detection import Traffic
from framework.errors import CommitOutcomeUnknown, ConfigError, InvariantViolation, RetryableError, StaleWriterError
from framework.topology import Standing, TopologyContext
from sinks.kafka.delivery import Delivery, KafkaRecord, shown_topics
from sinks.kafka.limits import TopicLimits, limits_of, topic_bytes_max
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
from sinks.kafka.topic_metadata_cache import TopicCatalog

PROBE_TIMEOUT_S = 10.0
#: A new producer reads all markers, so compaction must remove outdated ones soon.
MARKERS_CONFIG = {"cleanup.policy": "compact", "segment.ms": "3600000", "min.cleanable.dirty.ratio": "0.1"}
#: The only partition of a topic of markers.
_MARKERS_PARTITION = 0
_TAKEN = (KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED)
#: Errors of a client that has failed permanently. They do not contain the reason.
_OVER = (KafkaError._FATAL, KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT)
W = TypeVar("W")


class _LeaseLost(StaleWriterError):
    """Another process of the topology has initialised the transactional id."""


class _ClientFailed(RetryableError):
    """The client failed without a reason. Usually its transactional id was taken over."""


def probe(settings: KafkaSettings, topics: Sequence[str]) -> None:
    """Report before the start any problem that would fail the first batch. Raises ``ConfigError``
    if a topic does not exist or the brokers refuse the client, and ``RetryableError`` if they do
    not answer."""
    errors = ConnectionErrors(settings.bootstrap_servers)
    admin = errors.made(lambda: AdminClient({**settings.admin(), "error_cb": errors.on_error}))
    try:
        known = admin.list_topics(timeout=PROBE_TIMEOUT_S).topics
    except KafkaException as error:
        raise errors.explain(error, admin) from error
    missing = [topic for topic in topics if topic not in known]
    if missing:
        raise ConfigError(f"{_does_not_exist(missing)} at {settings.bootstrap_servers}: create {_it(missing)}")


def _does_not_exist(topics: Sequence[str]) -> str:
    return f"{shown_topics(topics)} {'does' if len(topics) == 1 else 'do'} not exist"


def _it(topics: Sequence[str]) -> str:
    return "it" if len(topics) == 1 else "them"


class MarkedWriter:
    """The writer of one task of one component, with a ``transactional_id`` of its own. One thread
    writes at a time."""

    def __init__(self, settings: KafkaSettings, transactional_id: str, marker_topic: str, writer: str) -> None:
        self._settings = settings
        self._transactional_id = transactional_id
        self._marker_topic = marker_topic
        self._writer = writer
        self._errors = ConnectionErrors(settings.bootstrap_servers)
        self._traffic = Traffic()
        self._batch_bytes: int | None = None
        self._known: set[str] = set()  # topics that are included in batch_bytes
        self._producer: Producer | None = None
        self._last: Marker | None = None
        self._lock = threading.Lock()

    def write(self, topics: Sequence[str], records: Iterable[KafkaRecord], marker: Marker) -> bool:
        """Write all records, possibly of several topics, with their marker in one kafka_txn.
        Returns False if they are already written. May iterate ``records`` twice. ``topics``: all
        topics of the records; the first applies to records that name none.

        Raises ``StaleWriterError`` if a newer writer is active, ``ConfigError`` if the last marker
        is of another incarnation, the other errors of ``Marker.already_holds``,
        ``CommitOutcomeUnknown``, or ``RetryableError``. After an error, the next call starts with a
        new producer."""
        with self._lock:
            if self._producer is not None:
                try:
                    return self._guarded(lambda: self._write(topics, records, marker))
                except (_LeaseLost, _ClientFailed):
                    # try once with a new producer: it aborts the open kafka_txn, or finds the
                    # marker
                    pass
            return self._guarded(lambda: self._write(topics, records, marker))

    def renew(self, marker: Marker) -> None:
        """Fence every other producer of this writer and write ``marker``, whatever the last marker
        is. Raises as ``write``."""
        with self._lock:
            self._producer = None
            self._guarded(lambda: self._renew(marker))

    # --- inside -----------------------------------------------------------------------------------

    def _guarded(self, write: Callable[[], W]) -> W:
        try:
            return write()
        except SystemError as error:
            # The client raises this if a fatal error and a delivery report arrive together.
            cause = error.__cause__ if isinstance(error.__cause__, KafkaException) else self._fatal()
            self._producer = None
            if cause is not None:
                raise self._explained(cause) from error
            raise _ClientFailed(f"{self._writer}: the Kafka client failed: {error}{self._errors.reason()}") from error
        except BaseException:
            self._producer = None
            raise

    def _fatal(self) -> KafkaException | None:
        """The reason for a permanent failure of the client; None if there is none. Later calls fail
        without a reason."""
        if self._producer is None:
            return None
        try:
            self._producer.poll(0)
        except KafkaException as error:
            return error
        except SystemError as error:
            return error.__cause__ if isinstance(error.__cause__, KafkaException) else None
        return None

    def _write(self, topics: Sequence[str], records: Iterable[KafkaRecord], marker: Marker) -> bool:
        if self._producer is not None and not self._known.issuperset(topics):
            before = self._batch_bytes
            self._check_topics(topics)
            if self._batch_bytes != before:  # the producer's batches are too large for a new topic
                self._producer = None
        if self._producer is None:
            self._begin(topics, marker.topology_id)
        self._known.update(topics)
        if self._last is not None and self._last.already_holds(marker):
            return False
        self._in_one_kafka_txn(topics, records, marker)
        self._last = marker
        return True

    def _renew(self, marker: Marker) -> None:
        self._begin([self._marker_topic], marker.topology_id)
        self._in_one_kafka_txn([self._marker_topic], (), marker)
        self._last = marker

    def _begin(self, topics: Sequence[str], topology_id: str) -> None:
        self._batch_bytes = None  # the topics' settings may have changed
        self._known.clear()
        self._check_topics(topics)
        producer = self._initialised()
        self._last = self._last_marker(topology_id)
        self._producer = producer

    def _initialised(self) -> Producer:
        try:
            self._traffic = Traffic()
            return initialised(self._settings, self._errors, self._transactional_id, self._traffic, self._batch_bytes)
        except KafkaException as error:
            raise self._explained(error) from error

    def _last_marker(self, topology_id: str) -> Marker | None:
        return read_markers(self._settings, self._marker_topic, topology_id).get(self._writer)

    def _check_topics(self, topics: Sequence[str]) -> None:
        settings = {**self._settings.admin(), "error_cb": self._errors.on_error}
        admin = self._errors.made(lambda: AdminClient(settings))
        try:
            known = admin.list_topics(timeout=STEP_TIMEOUT_S)
            self._errors.connected = True
            missing = [topic for topic in topics if topic not in (*known.topics, self._marker_topic)]
            if missing:
                raise RetryableError(
                    f"{_does_not_exist(missing)} at {self._settings.bootstrap_servers}: create {_it(missing)}"
                )
        except KafkaException as error:
            raise self._errors.explain(error, admin) from error
        found = (topic_bytes_max(admin, topic) for topic in topics if topic not in self._known)
        bounds = [each for each in (self._batch_bytes, *found) if each is not None]
        self._batch_bytes = min(bounds) if bounds else None
        if not has_markers(known, self._marker_topic):
            self._create_markers(admin)

    def _create_markers(self, admin: AdminClient) -> None:
        new = NewTopic(self._marker_topic, 1, config=MARKERS_CONFIG)
        try:
            admin.create_topics([new], operation_timeout=STEP_TIMEOUT_S)[self._marker_topic].result()
        except KafkaException as error:
            if error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS:
                return
            if passes(error):
                raise self._errors.explain(error, admin) from error
            what = f"the topic of markers {self._marker_topic!r} cannot be created: give the sink marker_topic="
            raise kafka_error(error, what) from error

    def _in_one_kafka_txn(self, topics: Sequence[str], records: Iterable[KafkaRecord], marker: Marker) -> None:
        producer = self._producer
        if producer is None:
            raise InvariantViolation("a kafka_txn without a producer")
        delivery = Delivery(producer, self._traffic, topics)
        try:
            producer.begin_transaction()
            for record in records:
                delivery.send(topics[0], record)
            delivery.send(self._marker_topic, KafkaRecord(marker.key, marker.document, partition=_MARKERS_PARTITION))
            delivery.finish()
        except KafkaException as error:
            raise self._explained(error, f"{delivery.where}{delivery.about}") from error
        try:
            self._commit(producer)
        except KafkaException as error:
            if error.args[0].retriable():
                raise CommitOutcomeUnknown(f"{delivery.where}: the kafka_txn of {marker.txid} has no answer") from error
            raise self._explained(error) from error

    def _commit(self, producer: Producer) -> None:
        """Commit the kafka_txn. A broker's quota may delay this request, too: on a further call,
        librdkafka continues with the same request."""
        while True:
            try:
                producer.commit_transaction(STEP_TIMEOUT_S)
                return
            except KafkaException as error:
                if not error.args[0].retriable() or not self._traffic.has_sent():
                    raise

    def _explained(self, error: KafkaException, what: str = "") -> Exception:
        why = self._fatal() or error
        if any(each.args[0].code() in _TAKEN for each in (error, why)):
            return _LeaseLost(f"{self._writer}: another writer has taken over {self._transactional_id!r}")
        if why.args[0].code() in _OVER:
            return _ClientFailed(f"{self._writer}: the Kafka client failed: {why.args[0].str()}{self._errors.reason()}")
        if not passes(error):  # it is more informative than the later error
            return kafka_error(error, f"{self._writer}: {what}" if what else self._writer)
        return self._errors.explain(why)


class PlainWriter:
    """Writes, and waits until all replicas have acknowledged every record. After an error, the
    caller writes everything again; records that an earlier call for the same batch has written are
    left out, as far as this process knows. So a batch that fails repeatedly does not add its
    records each time."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._errors = ConnectionErrors(settings.bootstrap_servers)
        self._client: tuple[Producer, Traffic] | None = None
        self._written: dict[str, tuple[str, Counter[bytes]]] = {}  # writer -> (batch, records)

    def write(self, topics: Sequence[str], records: Iterable[KafkaRecord], writer: str, batch: str) -> None:
        """Write the records of one batch of a task.

        * ``topics``: as in ``MarkedWriter.write``.
        * ``batch``: the same for each repetition.

        May iterate ``records`` twice. Raises ``RetryableError`` if it is not certain that every
        record was written, and ``ConfigError`` for a record that the broker will never accept."""
        known, written = self._written.pop(writer, ("", Counter()))
        if known != batch:
            written = Counter()
        producer, traffic = self._client = self._client or self._made()
        delivery = Delivery(producer, traffic, topics)
        left = list(_without(records, written)) if written else records
        try:
            for record in left:
                delivery.send(topics[0], record)
            delivery.finish()
        except (KafkaException, RetryableError) as error:
            self._client = None  # drops the records it still holds
            for record, is_delivered in zip(left, delivery.delivered(), strict=False):
                if is_delivered:
                    written[_digest(record)] += 1
            self._written[writer] = batch, written
            if isinstance(error, RetryableError):
                raise
            if not passes(error):
                raise kafka_error(error, f"{delivery.where}{delivery.about}") from error
            raise self._errors.explain(error, producer) from error

    def _made(self) -> tuple[Producer, Traffic]:
        traffic, settings = Traffic(), self._settings.producer()
        made = {**traffic.settings(settings), **settings, "error_cb": self._errors.on_error}
        return self._errors.made(lambda: Producer(made)), traffic


def _without(records: Iterable[KafkaRecord], written: Counter[bytes]) -> Iterator[KafkaRecord]:
    """The records without those already written; each written record counts once."""
    left = written.copy()
    for record in records:
        if left[digest := _digest(record)] > 0:
            left[digest] -= 1
        else:
            yield record


def _digest(record: KafkaRecord) -> bytes:
    return hashlib.blake2b(repr(record).encode(), digest_size=16).digest()


@dataclass(frozen=True)
class _ReadLimits:
    limits: TopicLimits
    read_for: Hashable


class Writers:
    """The writers of this process, kept so that their ids are not initialised for every batch, and
    their knowledge of topics."""

    def __init__(self) -> None:
        self._kept: ClientCache[Any] = ClientCache()

    def marked(
        self, settings: KafkaSettings, context: TopologyContext, marker_topic: str | None = None
    ) -> MarkedWriter:
        """The writer of a task of a topology."""
        transactional_id = transactional_id_of(context.topology_id, writer_of(context))
        markers = markers_topic(context.topology_id, marker_topic)
        return self._get(
            (settings.fingerprint(), transactional_id, markers),
            lambda: MarkedWriter(settings, transactional_id, markers, writer_of(context)),
        )

    def plain(self, settings: KafkaSettings) -> PlainWriter:
        """A writer without transactions."""
        return self._get((settings.fingerprint(),), lambda: PlainWriter(settings))

    def limits(self, settings: KafkaSettings, topic: str, *, fresh_for: Hashable = None) -> TopicLimits:
        """The limits of a topic. Read once while they are used, and again if they were not read
        for ``fresh_for``."""
        key = settings.fingerprint(), topic, "limits"

        def read() -> _ReadLimits:
            return _ReadLimits(limits_of(settings, topic), fresh_for)

        found = self._get(key, read)
        if fresh_for not in (None, found.read_for):
            self._kept.forget(key)
            found = self._get(key, read)
        return found.limits

    def catalog(self, settings: KafkaSettings) -> TopicCatalog:
        """The topics of the cluster."""
        return self._get((settings.fingerprint(), "catalog"), lambda: TopicCatalog(settings))

    def _get(self, key: tuple[str, ...], make: Callable[[], W]) -> W:
        return cast("W", self._kept.get(key, make))

    def close(self) -> None:
        self._kept.clear()


def check_markers(
    settings: KafkaSettings, context: TopologyContext, marker_topic: str | None, standing: Standing
) -> None:
    """Compare the markers of a component with ZooKeeper's state. Raises ``ConfigError`` if they
    contradict each other (C25)."""
    topic = markers_topic(context.topology_id, marker_topic)
    for marker in find_markers(settings, topic, context.topology_id).values():
        if marker.writer.startswith(f"{context.component_id}/"):
            marker.check(context.topology_id, standing)


def renew_markers(
    settings: KafkaSettings, context: TopologyContext, marker_topic: str | None, standing: Standing
) -> None:
    """Write a first marker of the new incarnation for every present and former writer of a
    component. This fences the producers of the old incarnation. A producer that initialises its id
    again finds the new marker and fails."""
    found = find_markers(settings, markers_topic(context.topology_id, marker_topic), context.topology_id)
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
