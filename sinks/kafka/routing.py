"""Routing: the topic, partition and timestamp of each row.

Invariant: a row is never written to a topic that does not exist, that the sink's arguments exclude,
or that the topology reads or uses for its markers or dead letters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from framework.clients.kafka_settings import KafkaSettings, checked_topic
from framework.errors import BadRecordError, ConfigError, TopologyError
from framework.topology import Fields, ReadTopics, WrittenTopic
from sinks.kafka.record_content import checked_field
from sinks.kafka.topic_metadata_cache import TopicCatalog

CatalogOf = Callable[[KafkaSettings], TopicCatalog]

#: Topics of Kafka itself, and of Ratchet: no row may name one of these.
_RESERVED = re.compile(r"__.*|ratchet-markers-.*")
#: Kafka numbers partitions in 32 bits.
_PARTITIONS_MAX = 2**31
#: Kafka's timestamp for a record without a time.
_NO_TIME_MS = -1
#: librdkafka replaces this timestamp by the present time.
_EPOCH_MS = 0


class Route:
    """The topic of each row. ``topic``: the only topic; or ``field``: the field that names the
    topic, with ``topics`` or ``pattern`` as the allowed names."""

    def __init__(self, topic: str | None, field: str | None, topics: Sequence[str] | None, pattern: str | None) -> None:
        if (topic is None) == (field is None):
            raise ConfigError("KafkaSink: give a topic, or topic_from=, the field that names it: one of the two")
        if field is None and (topics is not None or pattern is not None):
            raise ConfigError("KafkaSink: topics= and pattern= say what topic_from= may name: give the field, too")
        if topics is not None and (isinstance(topics, str) or not topics or pattern is not None):
            raise ConfigError(f"KafkaSink: topics={topics!r}: give a list of topics, or a pattern=: one of the two")
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ConfigError(f"KafkaSink: pattern={pattern!r} is no regular expression: {error}") from None
        self.field = field
        self.topics = tuple(
            checked_topic(each, "KafkaSink: ") for each in (topics or ([] if topic is None else [topic]))
        )
        self._pattern = pattern
        self._reads: ReadTopics | None = None
        self._internal: list[WrittenTopic] = []

    @property
    def is_open(self) -> bool:
        """Whether a row may name any topic that exists."""
        return not self.topics and self._pattern is None

    def bind_read_topics(self, read: ReadTopics | None) -> None:
        self._reads = read

    def bind_written_topics(self, written: Sequence[WrittenTopic]) -> None:
        self._internal = [each for each in written if each.is_internal]

    def check_named(self, catalog_of: CatalogOf, settings: KafkaSettings, conf: Mapping[str, Any]) -> None:
        """Raises ``ConfigError`` if a topic of the configuration is one that the topology uses
        itself."""
        for topic in self.topics:
            own = self._internal_topic(topic, catalog_of, settings, conf)
            if own is not None:
                raise ConfigError(
                    f"KafkaSink: topic {topic!r} holds the {own.holds} of bolt {own.component_id!r}: give another topic"
                )

    def check(self, component_id: str, fields: Fields) -> None:
        """Raises ``TopologyError`` if the field cannot name a topic."""
        if self.field is None:
            return
        declared = checked_field(component_id, self.field, fields)
        if declared is None or not (pa.types.is_string(declared) or pa.types.is_large_string(declared)):
            raise TopologyError(f"committer {component_id!r}: field {self.field!r} is {declared}, and a topic is text")

    def __str__(self) -> str:
        return f"topic {self.topics[0]!r}" if self.field is None else f"the topic of field {self.field!r}"

    def column(self, batch: pa.RecordBatch, admit: Callable[[Sequence[str]], None]) -> pa.Array | None:
        """The topic of each row; None if there is only one. ``admit`` gets all topics of the batch,
        and raises ``BadRecordError`` for one that must not be written."""
        if self.field is None:
            return None
        column = batch.column(self.field)
        if column.null_count:
            raise BadRecordError(f"field {self.field!r} is null, and names the topic of the row")
        admit(pc.unique(column).to_pylist())
        return column.cast(pa.string())

    def wanted(self, batch: pa.RecordBatch, partition: str | None) -> set[tuple[str, int]]:
        """The topics that the rows name, each with the least number of partitions that it must
        have, to look them up together before rows are refused one by one. ``partition``: the field
        that names the partition."""
        if partition is None:
            topics = pc.unique(batch.column(self.field)).to_pylist() if self.field is not None else []
            return {(topic, 1) for topic in topics if topic is not None and self._allows(topic)}
        topics = batch.column(self.field).to_pylist() if self.field is not None else [*self.topics] * batch.num_rows
        pairs = {*zip(topics, batch.column(partition).to_pylist(), strict=True)}
        named = {topic for topic, _ in pairs if topic is not None and self._allows(topic)}
        numbered = {
            (topic, number + 1)
            for topic, number in pairs
            if topic in named and number is not None and 0 <= number < _PARTITIONS_MAX
        }
        return numbered if self.field is None else numbered | {(topic, 1) for topic in named}

    def check_names(self, topics: Sequence[str]) -> None:
        """Raises ``BadRecordError`` for a topic that no row may name."""
        for topic in topics:
            if self._allows(topic):
                continue
            names = f"one of {', '.join(self.topics)}" if self.topics else f"a topic that matches {self._pattern!r}"
            only = "a topic that is not Kafka's own nor one of markers" if self.is_open else names
            raise BadRecordError(f"field {self.field!r} names topic {topic!r}, and the sink writes only {only}")

    def admit(
        self, topics: Sequence[str], catalog_of: CatalogOf, settings: KafkaSettings, conf: Mapping[str, Any]
    ) -> None:
        """Raises ``BadRecordError`` if one of the topics must not be written. ``catalog_of``:
        returns the catalog of a cluster, cached from batch to batch."""
        self.check_names(topics)
        for topic in topics:
            own = self._internal_topic(topic, catalog_of, settings, conf)
            if own is not None:
                raise BadRecordError(
                    f"field {self.field!r} names topic {topic!r}, which holds the {own.holds} of bolt {own.component_id!r}"
                )
            if self._is_read(topic, catalog_of, settings, conf):
                raise BadRecordError(
                    f"field {self.field!r} names topic {topic!r}, which the spout of the same topology reads: what is written "
                    "would come back as input, for ever"
                )
        catalog = catalog_of(settings)
        for topic in topics:
            if not catalog.partition_count(topic):
                raise BadRecordError(
                    f"field {self.field!r} names topic {topic!r}, which does not exist at {settings.bootstrap_servers}: create "
                    "it"
                )

    def _allows(self, topic: str) -> bool:
        if self.topics:
            return topic in self.topics
        if _RESERVED.fullmatch(topic):
            return False
        return self._pattern is None or re.fullmatch(self._pattern, topic) is not None

    def _is_read(self, topic: str, catalog_of: CatalogOf, settings: KafkaSettings, conf: Mapping[str, Any]) -> bool:
        read = self._reads
        return read is not None and read.include(topic) and _one_cluster(read.settings, catalog_of, settings, conf)

    def _internal_topic(
        self, topic: str, catalog_of: CatalogOf, settings: KafkaSettings, conf: Mapping[str, Any]
    ) -> WrittenTopic | None:
        for own in self._internal:
            if own.topic == topic and _one_cluster(own.settings, catalog_of, settings, conf):
                return own
        return None


def _one_cluster(other: Any, catalog_of: CatalogOf, settings: KafkaSettings, conf: Mapping[str, Any]) -> bool:
    if not isinstance(other, KafkaSettings):
        return False
    merged = other.with_conf(conf)
    return merged.share_brokers(settings) or catalog_of(merged).cluster_id() == catalog_of(settings).cluster_id()


def check_partition(component_id: str, name: str, fields: Fields) -> None:
    """Raises ``TopologyError`` if the field cannot name a partition."""
    declared = checked_field(component_id, name, fields)
    if declared is None or not pa.types.is_integer(declared):
        raise TopologyError(f"committer {component_id!r}: field {name!r} is {declared}, and a partition is an integer")


def partition_column(name: str, batch: pa.RecordBatch, topics: Sequence[str], catalog: TopicCatalog) -> pa.Array:
    """The partition of each row; null for the partitioner's choice. ``topics``: of the rows. Raises
    ``BadRecordError`` for a partition that the topic does not have."""
    column = batch.column(name)
    named = {each for each in zip(topics, column.to_pylist(), strict=True) if each[1] is not None}
    for topic, partition in named:
        count = catalog.partition_count(topic, partition + 1) if 0 <= partition < _PARTITIONS_MAX else 0
        if not 0 <= partition < count:
            has = catalog.partition_count(topic)
            raise BadRecordError(f"field {name!r} names partition {partition} of topic {topic!r}, which has {has:,}")
    return column.cast(pa.int32())


def check_timestamp(component_id: str, name: str, fields: Fields) -> None:
    """Raises ``TopologyError`` if the field cannot hold a time."""
    declared = checked_field(component_id, name, fields)
    if declared is None or not (pa.types.is_timestamp(declared) or pa.types.is_integer(declared)):
        raise TopologyError(
            f"committer {component_id!r}: field {name!r} is {declared}, and the time of a record is a timestamp, or an integer "
            "of milliseconds since 1970"
        )


def timestamp_column(name: str, batch: pa.RecordBatch) -> pa.Array:
    """The time of each row in milliseconds; null for the time of writing. Raises ``BadRecordError``
    for a time that Kafka cannot store."""
    column = batch.column(name)
    try:
        if pa.types.is_timestamp(column.type):  # digits below milliseconds are truncated
            column = column.cast(pa.timestamp("ms", column.type.tz), safe=column.type.unit == "s")
        column = column.cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise BadRecordError(f"field {name!r} is no time of a record: {error}") from None
    column = pc.if_else(pc.equal(column, _NO_TIME_MS), pa.scalar(None, pa.int64()), column)
    least = pc.min(column).as_py()
    if least is not None and least <= _EPOCH_MS:
        raise BadRecordError(f"field {name!r} is {least} ms, and the time of a record is after 1970-01-01T00:00:00Z")
    return column
