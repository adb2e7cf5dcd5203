"""Committers for the records that a spout could not decode: into a table, or into a Kafka topic.

Both subscribe to the hidden stream of a spout with ``on_bad_record="dead_letter"``. The builder
adds them to the topology. A dead letter is identified by (topic id, partition, offset), and written
exactly once, under the txid of its batch (C20). A letter that is replayed or dropped ends under the
txid of that transaction, and a letter that is refused again keeps its coordinates (C48).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from framework.arrow_spill import RowBuffer
from framework.clients.kafka_settings import KafkaSettings, checked_topic
from framework.errors import ConfigError, RetryableError, TopologyError
from framework.topology import (
    DEAD_LETTER_FIELDS,
    ArrowBolt,
    Committer,
    Input,
    OutputCollector,
    Standing,
    TopologyContext,
    TransactionAttempt,
    WrittenTopic,
)
from framework.topology.dead_letters import LetterReader
from sinks.backend import Key
from sinks.dead_letter_table_reader import LETTER_KEY, LETTER_VALUE, TableLetters, row_of
from sinks.kafka.dead_letter_reader import HEADER, TopicLetters
from sinks.kafka.delivery import KafkaRecord
from sinks.kafka.markers import Marker, marker_of, markers_topic
from sinks.kafka.record_truncation import fitted
from sinks.kafka.writer import check_markers, renew_markers, writers
from sinks.states import MapState, checked_state


class _DeadLetters(ArrowBolt, Committer):
    """Collects the dead letters of a batch until its commit."""

    deterministic = True
    commits_on_driver = True

    def __init__(self) -> None:
        self._letters = RowBuffer("")
        self._attempt: TransactionAttempt | None = None
        self._context: TopologyContext | None = None

    def bind(self, component_id: str, inputs: Sequence[Input], parallelism: int) -> None:
        for each in inputs:
            if each.fields != DEAD_LETTER_FIELDS:
                raise TopologyError(
                    f"bolt {component_id!r} takes the dead letters of a spout: give it to the spout as dead_letters="
                )

    def prepare(
        self,
        conf: Mapping[str, Any],
        context: TopologyContext,
        collector: OutputCollector,
        batch_id: TransactionAttempt,
    ) -> None:
        self._letters = RowBuffer(f"{context.component_id}: more dead letters come")
        self._attempt, self._context = batch_id, context

    def execute_arrow(self, batch: pa.RecordBatch) -> None:
        self._letters.append(batch)

    def _prepared(self) -> tuple[TransactionAttempt, TopologyContext]:
        if self._attempt is None or self._context is None:
            raise TopologyError("a committer of dead letters was used outside a topology")
        return self._attempt, self._context


class DeadLetterTable(_DeadLetters):
    """Dead letters as rows of a state.

    Key: ``topic_id``, ``partition``, ``offset``. Columns: ``topic``, ``timestamp_ms``, ``error``,
    ``record_key`` and ``record_value`` (the raw bytes), ``headers`` (JSON: a list of [name, value
    in base64 or null]), and ``attempts``: how often the letter was replayed and refused again. A
    letter that is replayed or dropped is deleted.

    ::

        bad = OpaqueMapState(SqliteBackend("orders.db", "bad"))
        OpaqueKafkaTransactionalSpout(["orders"], ..., on_bad_record="dead_letter",
                                      dead_letters=DeadLetterTable(bad))
    """

    def __init__(self, state: MapState) -> None:
        super().__init__()
        self.state = checked_state(type(self).__name__, state)

    def bind(self, component_id: str, inputs: Sequence[Input], parallelism: int) -> None:
        super().bind(component_id, inputs, parallelism)
        self.state.bind(DEAD_LETTER_FIELDS.select(LETTER_KEY), LETTER_VALUE)

    def finish_batch(self) -> None:
        attempt, _ = self._prepared()
        if not self._letters:
            return
        kept: set[Key] = set()
        ended: set[Key] = set()
        for batch in self._letters:
            keys = zip(*(batch.column(name).to_pylist() for name in LETTER_KEY), strict=True)
            for key, is_ended in zip(keys, batch.column("settled").is_valid().to_pylist(), strict=True):
                (ended if is_ended else kept).add(key)
        self.state.begin_commit(attempt)
        self.state.delete(sorted(ended - kept))
        for batch in self._letters:
            rows = [row_of(letter) for letter in batch.to_pylist() if letter["settled"] is None]
            self.state.multi_put([key for key, _ in rows], [value for _, value in rows])
            if self._letters.is_large:
                self.state.write()
        self.state.commit(attempt)

    def letter_reader(self, conf: Mapping[str, Any], topology_id: str, incarnation: str) -> LetterReader:
        return TableLetters(self.state, topology_id)


class DeadLetterTopic(_DeadLetters):
    """Dead letters as records of a Kafka topic.

    Key, value and headers are those of the original record. These headers are added:
    ``ratchet.topology``, ``.incarnation``, ``.txid``, ``.topic``, ``.topic_id``, ``.partition``,
    ``.offset``, ``.timestamp_ms``, ``.error``, and ``.attempts``: how often the letter was replayed
    and refused again. When a letter is replayed or dropped, another record is added, with the
    header ``ratchet.settled``, the coordinates, and no value. All records of a letter are in one
    partition, so that the broker removes the oldest first.

    If a record does not fit into ``message.max.bytes`` of the client and ``max.message.bytes`` of
    the topic, the largest of value, key and headers are cut. The header ``ratchet.cut`` names them
    and their sizes; the record itself is at its topic, partition and offset.

    Each task writes its part of a batch in one kafka_txn, so consumers with
    ``isolation.level=read_committed`` see each letter once. ``topic`` must exist, and must not be
    compacted. ``marker_topic`` (by default ``ratchet-markers-<topology id>``) is created if
    missing. Records in Kafka cannot be undone, so a batch whose commit was opened is never planned
    again (C8).

    ``bootstrap_servers`` and ``settings``: as for the spout. Both may come from the configuration's
    ``kafka.*`` keys.
    """

    def __init__(
        self,
        topic: str,
        *,
        bootstrap_servers: str | None = None,
        marker_topic: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._topic = checked_topic(topic, "DeadLetterTopic: ")
        self._marker_topic = checked_topic(marker_topic, "marker_topic=") if marker_topic is not None else None
        self._settings = KafkaSettings(bootstrap_servers, settings)
        self._merged: KafkaSettings | None = None

    def written_topics(self, topology_id: str) -> Sequence[WrittenTopic]:
        records = WrittenTopic(self._topic, "dead letters", self._settings)
        return (records, WrittenTopic(markers_topic(topology_id, self._marker_topic), "markers", self._settings))

    def check_written(self, conf: Mapping[str, Any], context: TopologyContext, standing: Standing) -> None:
        merged = self._settings.with_conf(conf)
        with suppress(RetryableError):  # the topic may be made before the first letter
            if writers.limits(merged, self._topic, fresh_for=object()).needs_key:
                raise ConfigError(
                    f"topic {self._topic!r} is compacted, so that the broker would refuse dead letters without a key and "
                    "remove others: set cleanup.policy=delete, or give another topic"
                )
        check_markers(merged, context, self._marker_topic, standing)

    def renew_written(self, conf: Mapping[str, Any], context: TopologyContext, standing: Standing) -> None:
        renew_markers(self._settings.with_conf(conf), context, self._marker_topic, standing)

    def prepare(
        self,
        conf: Mapping[str, Any],
        context: TopologyContext,
        collector: OutputCollector,
        batch_id: TransactionAttempt,
    ) -> None:
        super().prepare(conf, context, collector, batch_id)
        self._merged = self._settings.with_conf(conf)

    def finish_batch(self) -> None:
        attempt, context = self._prepared()
        if not self._letters or self._merged is None:
            return  # nothing to write, so a replay cannot write it twice
        marker = marker_of(attempt, context)
        bytes_max = writers.limits(self._merged, self._topic).record_bytes_max
        marked = writers.marked(self._merged, context, self._marker_topic)
        marked.write([self._topic], _Records(self._letters, marker, bytes_max), marker)

    def letter_reader(self, conf: Mapping[str, Any], topology_id: str, incarnation: str) -> LetterReader:
        return TopicLetters(partial(self._settings.with_conf, conf), self._topic, topology_id, incarnation)


@dataclass(frozen=True)
class _Records:
    """Dead letters as records. Can be iterated several times."""

    letters: Iterable[pa.RecordBatch]
    marker: Marker
    bytes_max: int

    def __iter__(self) -> Iterator[KafkaRecord]:
        for batch in self.letters:
            for letter in batch.to_pylist():
                yield fitted(_record(letter, self.marker), self.bytes_max)


_ADDED = ("topic", "topic_id", "partition", "offset", "timestamp_ms", "error", "attempts", "settled")


def _record(letter: Mapping[str, Any], marker: Marker) -> KafkaRecord:
    added = {
        "topology": marker.topology_id,
        "incarnation": marker.incarnation,
        "txid": marker.txid,
        **{name: letter[name] for name in _ADDED},
    }
    headers = [(each["key"], each["value"]) for each in letter["headers"] or ()]
    headers += [(f"{HEADER}{name}", str(value).encode()) for name, value in added.items() if value is not None]
    record = KafkaRecord(letter["key"], letter["value"], headers)
    return record if letter["kept_in"] is None else record._replace(partition=letter["kept_in"])
