"""The committer that writes to Kafka topics: each row of a batch becomes a record, exactly once or
at least once."""

from __future__ import annotations

import copy
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from framework.arrow_spill import RowBuffer
from framework.clients.kafka_settings import KafkaSettings, checked_topic
from framework.errors import BadRecordError, ConfigError, RetryableError, TopologyError
from framework.observe.logs import get_logger
from framework.topology import (
    ArrowBolt,
    Bolt,
    Committer,
    Fields,
    Input,
    OutputCollector,
    ReadTopics,
    Standing,
    TopologyContext,
    TransactionAttempt,
    WrittenTopic,
)
from framework.topology.groupings import FieldsGrouping, GlobalGrouping
from sinks.append import AppendCommitter
from sinks.kafka.delivery import KafkaRecord
from sinks.kafka.header_forwarding import HeaderContent, Headers, checked_headers
from sinks.kafka.limits import TopicLimits
from sinks.kafka.markers import marker_of, markers_topic, writer_of
from sinks.kafka.record_content import BYTES, Content, Encoder, Part, checked_field
from sinks.kafka.routing import Route, check_partition, check_timestamp, partition_column, timestamp_column
from sinks.kafka.writer import check_markers, probe, renew_markers, writers
from sinks.rows.sqlite_standin_table import ScratchTable

_log = get_logger()


class KafkaSink(ArrowBolt, Committer):
    """Writes its input to ``topic``, which must exist, or to several topics.

    **Topic.** ``topic``, or ``topic_from``: the text field that names it. The topics of a batch are
    written in one kafka_txn. ``topics``, a list, or ``pattern``, a regular expression that whole
    names match, restrict the names; without both, a row may name any existing topic. A row is a bad
    record if it names another topic, a topic that does not exist, a topic that the spout of the
    topology reads, a topic of its markers or dead letters, or an internal topic of Kafka.

    **Value and key.** ``value`` and ``key``: one of

    * the name of a text or bytes field; null becomes null (as a value: a tombstone),
    * a list of field names, written as a JSON object: timestamps are RFC 3339 text, bytes are
      base64, decimals are text,
    * a function from a row (a mapping of names to values) to bytes or None.

    By default the value is a JSON object of all fields that are not used for topic, headers,
    timestamp, partition or ``tombstone``, and the key is null. ``value_codec`` and ``key_codec``
    encode the fields: a codec that encodes, such as ``spouts.AvroCodec``. A codec of a Schema
    Registry finds its schema there at the start, or registers it. ``tombstone``: a boolean field;
    if it is true, the value is null, whatever ``value`` says.

    **Headers, timestamp, partition.** ``headers``: a field that holds headers, such as the
    ``headers`` of the spout's metadata, which are kept; a mapping of headers to add (name -> field,
    bytes, or function of the row); or ``Headers``, which does both, and removes some.
    ``timestamp``: a field of timestamps, or of milliseconds such as ``timestamp_ms`` of the spout's
    metadata. For null, and by default, it is the time at which the record is sent. ``partition``:
    an integer field. For null, and by default, the partitioner chooses. A row is a bad record if
    the topic does not have its partition, if its time is at or before 1970, or if the topic refuses
    its time.

    **Exactly once.** Each commit task has a transactional producer, and writes a marker of the
    transaction in the kafka_txn of its records. Readers with ``isolation.level=read_committed`` see
    a task's part of a batch completely, and once. Records in Kafka cannot be undone, so a batch
    whose commit was opened is never planned again (C8). Markers are in ``marker_topic``, by default
    ``ratchet-markers-<topology id>``, which is created if missing.

    With several tasks, a replay may find the parts of some tasks written and others not. So each
    row must reach the same task again: the input must be grouped by fields or globally, and every
    component before the sink must be deterministic (C11). The builder checks this.

    **At least once.** ``at_least_once=True``: plain producers, no markers, any grouping. A replay
    writes the records again. Give ``at_least_once=True`` to the builder, too.

    **Limits.** A record without a key for a compacted topic is a bad record. So is a record larger
    than ``message.max.bytes`` of the client or, compressed if the client compresses,
    ``max.message.bytes`` of the topic. All bad records are found before the commit is opened. Of
    rows due by time, such as closed windows, the bad ones are found before the first is written.

    ``bootstrap_servers`` and ``settings``: as for the spout. Both may come from the configuration's
    ``kafka.*`` keys.
    """

    deterministic = True
    takes_batches_whole = True

    def __init__(
        self,
        topic: str | None = None,
        *,
        topic_from: str | None = None,
        topics: Sequence[str] | None = None,
        pattern: str | None = None,
        value: Content | None = None,
        key: Content | None = None,
        headers: Headers | str | Mapping[str, HeaderContent] | None = None,
        timestamp: str | None = None,
        partition: str | None = None,
        tombstone: str | None = None,
        value_codec: Encoder | None = None,
        key_codec: Encoder | None = None,
        bootstrap_servers: str | None = None,
        marker_topic: str | None = None,
        settings: Mapping[str, Any] | None = None,
        at_least_once: bool = False,
    ) -> None:
        self.exactly_once = not at_least_once
        self._route = Route(topic, topic_from, topics, pattern)
        self._value, self._value_codec = value, value_codec
        # for named fields; replaced when the sink is bound
        self._value_part = Part("value", value, value_codec)
        self._key = Part("key", key, key_codec)
        self._headers = checked_headers(headers)
        self._timestamp, self._partition, self._tombstone = timestamp, partition, tombstone
        self._marker_topic = checked_topic(marker_topic, "marker_topic=") if marker_topic is not None else None
        if self._marker_topic is not None and self._marker_topic in self._route.topics:
            raise ConfigError(
                f"marker_topic={marker_topic!r} is also a topic of records: keep markers in another topic"
            )
        self._settings = KafkaSettings(bootstrap_servers, settings)
        self._fields: Fields | None = None
        self._merged: KafkaSettings | None = None
        self._conf: Mapping[str, Any] = {}
        self._batches = self._no_records()
        self._attempt: TransactionAttempt | None = None
        self._context: TopologyContext | None = None

    def bind(self, component_id: str, inputs: Sequence[Input], parallelism: int) -> None:
        shapes = {each.fields for each in inputs}
        if len(shapes) != 1:
            raise TopologyError(f"committer {component_id!r}: its inputs have other fields; make them equal")
        self._fields = fields = shapes.pop()
        if self._value is None:
            self._value_part = Part("value", self._other_fields(component_id, fields), self._value_codec)
        self._value_part, self._key = (each.for_topics(self._route.topics) for each in (self._value_part, self._key))
        for part in (self._value_part, self._key):
            part.check(component_id, fields)
        self._route.check(component_id, fields)
        if self._headers is not None:
            self._headers.check(component_id, fields)
        if self._timestamp is not None:
            check_timestamp(component_id, self._timestamp, fields)
        if self._partition is not None:
            check_partition(component_id, self._partition, fields)
        if self._tombstone is not None and checked_field(component_id, self._tombstone, fields) != pa.bool_():
            raise TopologyError(f"committer {component_id!r}: field {self._tombstone!r} is no field of truths (bool)")
        if parallelism > 1 and self.exactly_once:
            self.needs_deterministic_input = True
            for each in inputs:
                if not isinstance(each.grouping, (FieldsGrouping, GlobalGrouping)):
                    raise TopologyError(
                        f"committer {component_id!r} has {parallelism} tasks, and {type(each.grouping).__name__} from "
                        f"{each.component_id!r} can bring a row to another task when the batch is replayed: use fields_grouping, "
                        "global_grouping, or parallelism 1"
                    )

    def _other_fields(self, component_id: str, fields: Fields) -> list[str]:
        """The fields that no other setting uses."""
        field = self._headers.field if self._headers is not None else None
        used = (self._route.field, field, self._timestamp, self._partition, self._tombstone)
        left = [name for name in fields if name not in used]
        if not left:
            raise TopologyError(f"committer {component_id!r}: no field is left for the value: name one by value=")
        return left

    def bind_read_topics(self, read: ReadTopics | None) -> None:
        self._route.bind_read_topics(read)

    def bind_written_topics(self, written: Sequence[WrittenTopic]) -> None:
        self._route.bind_written_topics(written)

    def written_topics(self, topology_id: str) -> Sequence[WrittenTopic]:
        records = [WrittenTopic(each, "records", self._settings) for each in self._route.topics]
        if not self.exactly_once:
            return records
        return (*records, WrittenTopic(markers_topic(topology_id, self._marker_topic), "markers", self._settings))

    def check_before_start(self, conf: Mapping[str, Any]) -> None:
        if self._route.is_open:
            _log.warning("kafka_sink.any_topic", field=self._route.field, advice="give topics= or pattern=")
        with suppress(RetryableError):  # the first batch waits for brokers that do not answer
            self.check_servers(conf)
            self._route.check_named(writers.catalog, self._settings.with_conf(conf), conf)

    def check_servers(self, conf: Mapping[str, Any]) -> None:
        for part in (self._value_part, self._key):
            part.check_schema()
        probe(self._settings.with_conf(conf), self._route.topics)

    def check_written(self, conf: Mapping[str, Any], context: TopologyContext, standing: Standing) -> None:
        for part in (self._value_part, self._key):
            part.register_schema()
        if self.exactly_once:
            check_markers(self._settings.with_conf(conf), context, self._marker_topic, standing)

    def renew_written(self, conf: Mapping[str, Any], context: TopologyContext, standing: Standing) -> None:
        if self.exactly_once:
            renew_markers(self._settings.with_conf(conf), context, self._marker_topic, standing)

    # --- in tests ---------------------------------------------------------------------------------

    def substitute(self, folder: Path) -> Bolt:
        if not self.exactly_once:
            raise ConfigError("it writes at least once, and a table in place of its topic would hold each row once")
        sink = copy.copy(self)
        sink._value_part, sink._key = (each.without_registry() for each in (self._value_part, self._key))
        return _TableForTopic(sink, ScratchTable(folder, self._fields))

    def check_encoding(self, batch: pa.RecordBatch) -> None:
        """Raise ``BadRecordError`` for a row that makes no record, independent of the brokers."""
        self._parts(batch)
        self._route.column(batch, self._route.check_names)

    # --- in tasks ---------------------------------------------------------------------------------

    def prepare(
        self,
        conf: Mapping[str, Any],
        context: TopologyContext,
        collector: OutputCollector,
        batch_id: TransactionAttempt,
    ) -> None:
        self._attempt, self._context, self._conf = batch_id, context, conf
        self._merged = self._settings.with_conf(conf)
        self._batches = self._no_records()

    def execute_arrow(self, batch: pa.RecordBatch) -> None:
        """Make the records, so that bad ones are found before the commit is opened."""
        if not batch.num_rows:
            return
        if self._merged is None:
            raise TopologyError("a KafkaSink was used outside a topology")
        records = self._encoded(self._merged, batch)
        self._check_limits(self._merged, records)
        self._batches.append(records)

    def finish_batch(self) -> None:
        attempt, context, merged = self._attempt, self._context, self._merged
        if attempt is None or context is None or merged is None:
            raise TopologyError("a KafkaSink was used outside a topology")
        if not self._batches:
            return  # nothing to write, so a replay cannot write it twice
        topics = self._topics(self._batches)
        marker = marker_of(attempt, context)
        try:
            if self.exactly_once:
                writers.marked(merged, context, self._marker_topic).write(topics, _Records(self._batches), marker)
            else:
                batch = f"{attempt.txid} {marker.plan_digest}"
                writer = f"{context.topology_id}/{writer_of(context)}"
                writers.plain(merged).write(topics, _Records(self._batches), writer, batch)
        except RetryableError:
            writers.catalog(merged).forget()  # a topic may have been deleted
            raise

    def _no_records(self) -> RowBuffer:
        return RowBuffer(f"{self._route}: more records come")

    def _parts(self, batch: pa.RecordBatch) -> dict[str, pa.Array]:
        """The columns of the records that need no request to the brokers: one for each part of a
        record that does not have its default everywhere."""
        if self._fields is None:
            raise TopologyError("a KafkaSink was used outside a topology")
        where = str(self._route)
        columns = {"key": self._key.column(self._fields, batch, where)}
        if self._tombstone is None:
            columns["value"] = self._value_part.column(self._fields, batch, where)
        else:  # the other fields of a tombstone may be null, and make no value
            alive = pc.invert(pc.fill_null(batch.column(self._tombstone), False))
            values = self._value_part.column(self._fields, batch.filter(alive), where)
            columns["value"] = pc.replace_with_mask(pa.nulls(batch.num_rows, BYTES), alive, values)
        if self._headers is not None:
            columns["headers"] = self._headers.column(batch, where)
        if self._timestamp is not None:
            columns["timestamp_ms"] = timestamp_column(self._timestamp, batch)
        return columns

    def _encoded(self, merged: KafkaSettings, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The records of a batch."""
        columns = self._parts(batch)
        if wanted := self._route.wanted(batch, self._partition):
            writers.catalog(merged).look_up(wanted)
        topic = self._route.column(batch, lambda names: self._route.admit(names, writers.catalog, merged, self._conf))
        if topic is not None:
            columns["topic"] = topic
        if self._partition is not None:
            topics = topic.to_pylist() if topic is not None else [*self._route.topics] * batch.num_rows
            columns["partition"] = partition_column(self._partition, batch, topics, writers.catalog(merged))
        return pa.RecordBatch.from_arrays([*columns.values()], [*columns])

    def _topics(self, batches: Iterable[pa.RecordBatch]) -> list[str]:
        """The topics of these records, each once."""
        if self._route.field is None:
            return [*self._route.topics]
        return sorted({topic for each in batches for topic in pc.unique(each.column("topic")).to_pylist()})

    def _check_limits(self, merged: KafkaSettings, records: pa.RecordBatch) -> None:
        """Raise ``BadRecordError`` for a record that its topic or the client certainly refuses."""
        for topic in self._topics([records]):
            rows = records if self._route.field is None else records.filter(pc.equal(records.column("topic"), topic))
            refusal = _refusal(rows, writers.limits(merged, topic))
            if refusal is not None:  # the topic's settings may have changed since they were read
                refusal = _refusal(rows, writers.limits(merged, topic, fresh_for=self._running()))
            if refusal is not None:
                raise BadRecordError(f"topic {topic!r}: {refusal}")

    def _running(self) -> Hashable:
        """The attempt that runs. Its probes, and the parts of its batches, belong to the same
        attempt."""
        attempt, context = self._attempt, self._context
        return (context.topology_id, attempt.txid, attempt.attempt_id) if attempt and context else None


class _TableForTopic(AppendCommitter):
    """Writes the rows of a topic to a table, after checking that each can be encoded."""

    def __init__(self, sink: KafkaSink, table: ScratchTable) -> None:
        super().__init__(table)
        self._fields = Fields.of_schema(table.schema)
        self._sink = sink

    def execute_arrow(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            self._sink.check_encoding(batch)
            super().execute_arrow(batch)


class _Records:
    """The records of a batch. Can be iterated several times."""

    def __init__(self, batches: Iterable[pa.RecordBatch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[KafkaRecord]:
        for batch in self._batches:
            names = batch.schema.names
            if names == ["key", "value"]:
                yield from map(KafkaRecord, *(column.to_pylist() for column in batch.columns))
                continue
            for row in batch.to_pylist():
                headers = row.pop("headers", ())
                if row.get("partition", 0) is None:
                    del row["partition"]
                yield KafkaRecord(headers=[(each["key"], each["value"]) for each in headers], **row)


def _refusal(records: pa.RecordBatch, limits: TopicLimits) -> str | None:
    """Why one of the records is refused; None if there is no known reason."""
    names = records.schema.names
    keys, values = (pc.binary_length(records.column(each)).to_pylist() for each in ("key", "value"))
    headers: list[list[tuple[str, bytes | None]]] = [[]] * records.num_rows
    if "headers" in names:
        headers = [[(each["key"], each["value"]) for each in row] for row in records.column("headers").to_pylist()]
    sizes = zip(keys, values, headers, strict=True)
    unsure = [n for n, (key, value, its) in enumerate(sizes) if not limits.fits(key, value, its)]
    for number in unsure:
        key, value = (records.column(each)[number].as_py() for each in ("key", "value"))
        refusal = limits.refusal(key, value, headers[number])
        if refusal is not None:
            return refusal
    if "timestamp_ms" in names:
        now_ms = int(time.time() * 1_000)
        for bound in pc.min_max(records.column("timestamp_ms")).as_py().values():
            refusal = limits.timestamp_refusal(bound, now_ms) if bound is not None else None
            if refusal is not None:
                return refusal
    return None
