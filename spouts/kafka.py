"""The Kafka spouts: what a user gives them, and the two kinds of guarantee."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from framework.errors import ConfigError
from framework.topology import (
    Fields,
    OpaquePartitionedTransactionalSpout,
    PartitionedTransactionalSpout,
    PartitionPlanner,
    PartitionReader,
    TopologyContext,
)
from spouts.codecs import BytesCodec, Codec
from spouts.kafka_planner import KafkaLimits, KafkaPlanner, KafkaSource
from spouts.kafka_reader import KafkaReader, metadata_fields
from spouts.kafka_settings import KafkaSettings

#: Records per batch while there is a backlog: a job's own cost hardly matters any more, and a replay repeats seconds.
BATCH_RECORDS_MAX = 500_000
_TOPIC = re.compile(r"[A-Za-z0-9._\-]{1,249}")


class _KafkaSpout:
    """What both kinds take.

    ``topics``: names; or ``pattern``: a regular expression that whole names must match. Topics and partitions that appear
    later are read from their beginning. ``codec`` decodes values; its fields come first. ``metadata`` adds fields of the
    record itself: any of ``topic``, ``partition``, ``offset``, ``timestamp_ms``, ``key``, ``headers``. ``start``: where a
    new topology begins, "earliest", "latest" or milliseconds since 1970; a resumed one ignores it. ``batch_records_max``
    and ``partition_records_max`` bound a batch. ``settings``: librdkafka's own, such as security; those that would break
    a guarantee are refused.
    """

    _waits_for_leaders: bool

    def __init__(
        self,
        topics: Sequence[str] = (),
        *,
        bootstrap_servers: str,
        pattern: str | None = None,
        codec: Codec | None = None,
        metadata: Sequence[str] = (),
        start: str | int = "earliest",
        batch_records_max: int = BATCH_RECORDS_MAX,
        partition_records_max: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._source = _checked_source(topics, pattern, start)
        self._settings = KafkaSettings(bootstrap_servers, settings)
        self._codec = codec if codec is not None else BytesCodec()
        self._metadata = tuple(metadata)
        _check_limit("batch_records_max", batch_records_max)
        if partition_records_max is not None:
            _check_limit("partition_records_max", partition_records_max)
        self._limits = KafkaLimits(batch_records_max, partition_records_max)
        try:
            added = metadata_fields(self._metadata)
        except KeyError as error:
            raise ConfigError(
                f"metadata field {error.args[0]!r} is not known: topic, partition, offset, timestamp_ms, key or headers"
            ) from None
        decoded = {name: self._codec.fields.type_of(name) for name in self._codec.fields}
        both = sorted(set(added) & set(decoded))
        if both:
            raise ConfigError(f"{both[0]!r} is both a field of the codec and a metadata field: rename the codec's")
        self._fields = Fields.of({**decoded, **added})

    def output_fields(self) -> Fields:
        return self._fields

    def planner(self, conf: Mapping[str, Any], context: TopologyContext) -> PartitionPlanner:
        return KafkaPlanner(self._source, self._settings, self._limits, waits_for_leaders=self._waits_for_leaders)

    def reader(self, conf: Mapping[str, Any], context: TopologyContext) -> PartitionReader:
        group = f"ratchet-{context.topology_id}"
        return KafkaReader(self._settings, group, self._codec, self._metadata, self._fields, context.task_index)


class KafkaTransactionalSpout(_KafkaSpout, PartitionedTransactionalSpout):
    """Idempotent: a replayed batch is the same records in the same order per partition. While a partition has no leader
    the topology waits for it.

    Source: ``org.apache.storm.kafka.spout.trident.KafkaTridentSpoutTransactional``.
    """

    _waits_for_leaders = True


class OpaqueKafkaTransactionalSpout(_KafkaSpout, OpaquePartitionedTransactionalSpout):
    """Opaque: a batch that failed before its commit opened is planned afresh, without partitions that are away. Needs
    opaque states.

    Source: ``org.apache.storm.kafka.spout.trident.KafkaTridentSpoutOpaque``.
    """

    _waits_for_leaders = False


def _checked_source(topics: Sequence[str], pattern: str | None, start: str | int) -> KafkaSource:
    if isinstance(topics, str):
        topics = [topics]
    if bool(topics) == (pattern is not None):
        raise ConfigError("a Kafka spout needs topics=[...] or pattern=..., one of them")
    for topic in topics:
        if not _TOPIC.fullmatch(topic) or topic in (".", ".."):
            raise ConfigError(f"{topic!r} is not a Kafka topic name: 1 to 249 letters, digits, '.', '_' and '-'")
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"pattern {pattern!r} is not a regular expression: {error}") from None
    valid = start in ("earliest", "latest") if isinstance(start, str) else isinstance(start, int) and start >= 0
    if not valid or isinstance(start, bool):
        raise ConfigError(f"start must be 'earliest', 'latest' or milliseconds since 1970, not {start!r}")
    return KafkaSource(tuple(topics), pattern, start)


def _check_limit(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be 1 or more, not {value!r}")
