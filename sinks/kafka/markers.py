"""Markers: records in a compacted topic of one partition that describe the last kafka_txn of each
writer.

A marker is written in the same kafka_txn as the records it describes. Its key is
``topology/component/task``; ids contain no ``/``.

Invariants:

1. A writer writes only if the last marker is of its own topology and incarnation, or if there is no
   marker (C25).
2. A marker belongs to the last committed transaction that had records for its writer, or to the
   transaction that is being committed.
3. A reader does not wait for a dead writer: it ends the kafka_txn that the writer left open (ADR
   10).
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, replace
from typing import Any

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ClusterMetadata, OffsetSpec

from framework.clients.consumer_close_timeout import Consumer
from framework.clients.kafka_settings import ConnectionErrors, KafkaSettings
from framework.clients.kafka_stall_detection import Traffic
from framework.errors import ConfigError, CorruptStateError, InvariantViolation, RetryableError, StaleWriterError
from framework.observe.logs import get_logger
from framework.topology import Standing, TopologyContext, TransactionAttempt
from sinks.kafka.limits import CLIENT_BYTES_MAX, topic_configuration

_log = get_logger()
#: The logger of transactional clients, without output. Their log is redundant: they report a lost
#: lease as fatal, and they raise all other errors too.
_client_log = logging.getLogger(__name__)
_client_log.addHandler(logging.NullHandler())

#: Format 1 had no incarnation, and its keys did not contain the topology.
MARKER_FORMAT = 2
#: The limit for each step with the broker. It is below the driver's patience, so an attempt fails
#: before the driver gives it up.
STEP_TIMEOUT_S = 15.0
#: How long a reader waits for an open kafka_txn. A live writer is faster; a slower writer loses its
#: kafka_txn, and its attempt fails.
OPEN_PATIENCE_S = 3.0
#: Where the broker keeps a kafka_txn open that its coordinator has ended.
_HANGS = (
    ": the kafka_txn that began at offset {at} was ended, and the broker keeps it open. If this message stays, the broker has lost "
    "its end: see 'A kafka_txn hangs' in docs/operating/recover.md of the repository"
)
#: The broker aborts the open kafka_txn of a dead writer after this time, unless settings= contain
#: another ``transaction.timeout.ms``. A batch must be delivered within it.
TRANSACTION_TIMEOUT_MS = 60_000
_POLL_S = 0.05
_ANEW = "restore the one that was lost, or start anew with `ratchet reset --everything`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """A record saying that its kafka_txn contains this task's part of this txid.

    ``txid`` 0: nothing was written since a reset. ``incarnation``: empty if the topology's state is
    older than incarnations."""

    topology_id: str
    writer: str
    epoch: int
    txid: int
    attempt_id: int
    plan_digest: str
    tasks: int = 1
    incarnation: str = ""
    format: int = MARKER_FORMAT

    @property
    def key(self) -> bytes:
        return f"{self.topology_id}/{self.writer}".encode()

    @property
    def document(self) -> bytes:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(fields, separators=(",", ":")).encode()

    def already_holds(self, wanted: Marker) -> bool:
        """Whether ``wanted`` is already written, given that ``self`` is the last marker.

        Raises ``StaleWriterError`` if ``wanted`` has a lower epoch, or the same epoch and a lower
        txid. Raises ``ConfigError`` if it has another incarnation, or a newer epoch and a lower
        txid. Raises ``InvariantViolation`` if it has the same txid but another plan or another
        number of tasks."""
        self.check_incarnation(wanted.topology_id, wanted.incarnation)
        if wanted.epoch < self.epoch or (wanted.epoch == self.epoch and wanted.txid < self.txid):
            raise StaleWriterError(f"{wanted.writer}: txid {self.txid} of epoch {self.epoch} is written", self.epoch)
        if wanted.txid < self.txid:
            raise self._ahead(wanted.txid)
        if wanted.txid > self.txid:
            return False
        if wanted.plan_digest != self.plan_digest:
            raise InvariantViolation(
                f"txid {wanted.txid} was written by {self.writer} under plan {self.plan_digest}, and the plan is "
                f"{wanted.plan_digest} now: what Kafka holds cannot be undone"
            )
        if wanted.tasks != self.tasks:
            raise InvariantViolation(
                f"txid {wanted.txid} was written by {self.writer} as one of {self.tasks} tasks, and there are {wanted.tasks} "
                "now: finish it with the parallelism that it was begun with"
            )
        return True

    def check(self, topology_id: str, standing: Standing) -> None:
        """Raise ``ConfigError`` if this marker contradicts ZooKeeper's state of the topology."""
        self.check_incarnation(topology_id, standing.incarnation)
        if self.txid > standing.currtx:
            raise self._ahead(standing.currtx)
        if self.epoch >= standing.epoch:  # also if equal: the new leader has written nothing yet
            raise ConfigError(
                f"{self.writer} has written to Kafka in epoch {self.epoch}, and ZooKeeper is at epoch {standing.epoch}: "
                f"ZooKeeper's state is older than what Kafka holds; {_ANEW}"
            )
        if self.txid == standing.currtx and self.plan_digest != standing.opened:
            raise ConfigError(
                f"{self.writer} has written txid {self.txid} to Kafka with plan {self.plan_digest}, and ZooKeeper says that "
                f"{standing.opened or 'no plan'} was opened: one of the two was restored from a backup; {_ANEW}"
            )

    def check_incarnation(self, topology_id: str, incarnation: str) -> None:
        if (self.topology_id, self.incarnation) != (topology_id, incarnation):
            raise ConfigError(
                f"the marker of {self.writer} is of topology {self.topology_id!r}, incarnation {self.incarnation or '(none)'}, "
                f"and this is {topology_id!r}, incarnation {incarnation or '(none)'}: ZooKeeper's state was wiped, or belongs "
                f"to other writers of the same names; {_ANEW}"
            )

    def _ahead(self, currtx: int) -> ConfigError:
        return ConfigError(
            f"{self.writer} has written transactions up to {self.txid} to Kafka, and ZooKeeper says that {currtx} is next: "
            f"ZooKeeper's state is older than what Kafka holds; {_ANEW}"
        )


def marker_of(attempt: TransactionAttempt, context: TopologyContext) -> Marker:
    """Make the marker for this task's part of an attempt."""
    fence = attempt.fence
    return Marker(
        topology_id=context.topology_id,
        writer=writer_of(context),
        epoch=fence.epoch if fence is not None else 0,
        txid=attempt.txid,
        attempt_id=attempt.attempt_id,
        plan_digest=fence.plan_digest if fence is not None else "",
        tasks=context.task_count,
        incarnation=fence.incarnation if fence is not None else "",
    )


def writer_of(context: TopologyContext) -> str:
    """The name of a task's writer within its topology."""
    return f"{context.component_id}/{context.task_index}"


def transactional_id_of(topology_id: str, writer: str) -> str:
    """The transactional id of a writer. It is unique, because ids contain no ``/``."""
    return f"ratchet-{topology_id}/{writer}"


def initialised(
    settings: KafkaSettings,
    errors: ConnectionErrors,
    transactional_id: str,
    traffic: Traffic | None = None,
    batch_bytes: int | None = None,
) -> Producer:
    """Make a new producer. It has fenced every other producer of this id and ended their open
    kafka_txn. ``traffic``: receives the producer's progress. ``batch_bytes``: the topic's limit for
    a batch. Raises ``KafkaException``."""
    given = settings.producer()
    made = {
        "logger": _client_log,
        "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
        **(traffic.settings(given) if traffic is not None else {}),
        **({"batch.size": batch_bytes} if batch_bytes is not None and batch_bytes < CLIENT_BYTES_MAX else {}),
        **given,
        "transactional.id": transactional_id,
        "error_cb": errors.on_error,
    }
    producer = errors.made(lambda: Producer(made))
    producer.init_transactions(STEP_TIMEOUT_S)
    return producer


def markers_topic(topology_id: str, given: str | None) -> str:
    return given or f"ratchet-markers-{topology_id}"


def has_markers(cluster: ClusterMetadata, topic: str) -> bool:
    """Whether the topic exists. Raises ``ConfigError`` if it has several partitions, because
    markers must be in one order."""
    found = cluster.topics.get(topic)
    if found is not None and len(found.partitions) > 1:
        raise ConfigError(
            f"topic {topic!r} has {len(found.partitions)} partitions, and markers need an order: make it with one partition and "
            "cleanup.policy=compact, or let Ratchet make it"
        )
    return found is not None


def _check_kept(admin: AdminClient, topic: str) -> None:
    """Raise ``ConfigError`` if the broker would remove old markers: after a longer pause, a
    transaction whose marker is missing would be written again."""
    policy = topic_configuration(admin, topic).get("cleanup.policy", "")
    if "delete" in policy:
        raise ConfigError(
            f"topic {topic!r} has cleanup.policy={policy}, so that the broker removes old markers, and what they name would be "
            "written again: set cleanup.policy=compact, without delete"
        )


def find_markers(settings: KafkaSettings, topic: str, topology_id: str) -> dict[str, Marker]:
    """As ``read_markers``, but returns no markers if the topic does not exist. Do not use it before
    a write: a broker's answer may briefly lack an existing topic."""
    errors, admin = _client(settings)
    try:
        there = has_markers(admin.list_topics(timeout=STEP_TIMEOUT_S), topic)
        if there:
            _check_kept(admin, topic)
    except KafkaException as error:
        raise errors.explain(error, admin) from error
    return read_markers(settings, topic, topology_id) if there else {}


def read_markers(settings: KafkaSettings, topic: str, topology_id: str) -> dict[str, Marker]:
    """The last marker of each writer of a topology, by writer.

    Raises ``ConfigError`` if another topology has markers in the topic, ``CorruptStateError`` for a
    record that is not a marker, and ``RetryableError`` if the topic cannot be read to its end in
    time."""
    errors, admin = _client(settings)
    found: dict[str, Marker] = {}
    for offset, value in _last_of_each_key(settings, errors, admin, topic, topology_id):
        marker = _parsed(value, f"topic {topic!r}, offset {offset}")
        if marker.topology_id != topology_id:
            raise ConfigError(
                f"topic {topic!r} has markers of topology {marker.topology_id!r}: give topology {topology_id!r} a "
                "marker_topic of its own"
            )
        found[marker.writer] = marker
    return found


def _client(settings: KafkaSettings) -> tuple[ConnectionErrors, AdminClient]:
    errors = ConnectionErrors(settings.bootstrap_servers)
    return errors, errors.made(lambda: AdminClient({**settings.admin(), "error_cb": errors.on_error}))


def _last_of_each_key(
    settings: KafkaSettings, errors: ConnectionErrors, admin: AdminClient, topic: str, topology_id: str
) -> list[tuple[int, bytes]]:
    """(offset, value) of the last record of each key, in the order of the log.

    Reads to the end offset at the time of the call. The last stable offset is not enough: while
    another task's kafka_txn is open, committed markers may lie behind it."""
    where = TopicPartition(topic, 0)
    deadline = time.monotonic() + STEP_TIMEOUT_S
    patience = time.monotonic() + OPEN_PATIENCE_S
    end = _end_of(where, errors, admin, deadline, IsolationLevel.READ_UNCOMMITTED)
    consumer = errors.made(lambda: Consumer(settings.consumer(topic)))
    last: dict[bytes | None, tuple[int, bytes]] = {}
    ended: int | None = None  # where a kafka_txn began that was ended
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        position = 0
        while position < end:
            for message in consumer.consume(1_000, _POLL_S):
                error = message.error()
                if error is None:
                    last.pop(message.key(), None)
                    if message.value() is not None:
                        last[message.key()] = (message.offset(), message.value())
                    position = max(position, message.offset() + 1)
                elif error.code() == KafkaError._PARTITION_EOF:
                    position = max(position, message.offset())
                elif error.code() == KafkaError._AUTO_OFFSET_RESET:  # compaction has moved the beginning
                    low, _ = consumer.get_watermark_offsets(where, STEP_TIMEOUT_S)
                    consumer.assign([TopicPartition(topic, 0, low)])
            if time.monotonic() > deadline:
                hangs = _HANGS.format(at=ended) if ended is not None and position <= ended else ""
                raise RetryableError(f"the markers in {topic!r} could not be read to offset {end} yet{hangs}")
            if position < end and time.monotonic() > patience:
                stable = _end_of(where, errors, admin, deadline, IsolationLevel.READ_COMMITTED)
                blocking = TopicPartition(topic, 0, stable)
                is_new = position >= stable < end and stable != ended
                if is_new and _end_open(settings, errors, blocking, topology_id, deadline):
                    ended = stable
    except KafkaException as error:
        raise errors.explain(error) from error
    finally:
        consumer.close()
    return list(last.values())


def _end_open(
    settings: KafkaSettings, errors: ConnectionErrors, where: TopicPartition, topology_id: str, deadline: float
) -> bool:
    """End the kafka_txn that blocks the last stable offset, which is the offset of ``where``.

    The record at that offset is the marker of this kafka_txn, and its key names the writer. Returns
    False if the writer belongs to another topology."""
    given = {**settings.consumer(where.topic), "isolation.level": "read_uncommitted"}
    consumer = errors.made(lambda: Consumer(given))
    try:
        consumer.assign([where])
        found = None
        while found is None and time.monotonic() < deadline:
            found = consumer.poll(_POLL_S)
    finally:
        consumer.close()
    if found is None or found.error() is not None:
        return False
    topology, _, writer = (found.key() or b"").decode(errors="replace").partition("/")
    if topology != topology_id or not writer:
        return False
    _log.info("kafka_txn.ended", topology=topology, writer=writer, reason="its writer left it open")
    initialised(settings, errors, transactional_id_of(topology, writer))
    return True


def _end_of(
    where: TopicPartition, errors: ConnectionErrors, admin: AdminClient, deadline: float, level: IsolationLevel
) -> int:
    """The end offset at this isolation level. Retries until the deadline, because a new topic is
    not immediately known to every broker."""
    while True:
        try:
            wanted = {where: OffsetSpec.latest()}
            asked = admin.list_offsets(wanted, isolation_level=level, request_timeout=STEP_TIMEOUT_S)
            return int(asked[where].result().offset)
        except KafkaException as error:
            if time.monotonic() > deadline:
                raise errors.explain(error, admin) from error
            time.sleep(_POLL_S)


def _parsed(value: bytes, location: str) -> Marker:
    try:
        document: dict[str, Any] = json.loads(value)
        if document["format"] > MARKER_FORMAT:
            raise CorruptStateError(
                f"{location}: format {document['format']}, and this Ratchet knows up to {MARKER_FORMAT}; run the newer version"
            )
        return replace(Marker(**document), format=MARKER_FORMAT)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptStateError(f"{location}: not a marker ({error})") from error
