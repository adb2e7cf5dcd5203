"""The committer that writes to a Kafka topic: each row of a batch becomes a record, exactly once or
at least once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Union

import pyarrow as pa
import pyarrow.compute as pc

from framework.clients.kafka import KafkaSettings, checked_topic
from framework.errors import BadRecordError, ConfigError, RetryableError, TopologyError
from framework.topology import (
    ArrowBolt,
    Bolt,
    Committer,
    Fields,
    Input,
    OutputCollector,
    Standing,
    TopologyContext,
    TransactionAttempt,
    WrittenTopic,
)
from framework.topology.groupings import FieldsGrouping, GlobalGrouping
from framework.topology.tuples import rows_of
from sinks.append import AppendCommitter
from sinks.kafka.delivery import KafkaRecord
from sinks.kafka.limits import TopicLimits
from sinks.kafka.markers import marker_of, markers_topic, writer_of
from sinks.kafka.writer import check_markers, probe, renew_markers, writers
from sinks.plain_values import JsonColumns
from sinks.rows.scratch_table import ScratchTable

RowDict = Mapping[str, Any]
_BYTES = pa.large_binary()  # a batch may have more than 2 GB
#: The source of a key or a value: one field as it is, several fields as a JSON object, or a
#: function of the row.
Content = Union[str, Sequence[str], Callable[[RowDict], "bytes | None"]]


class KafkaSink(ArrowBolt, Committer):
    """Writes its input to ``topic``, which must exist.

    ``value`` and ``key``: one of

    * the name of a text or bytes field; null becomes null (as a value: a tombstone),
    * a list of field names, written as a JSON object: timestamps are RFC 3339 text, bytes are
      base64, decimals are text,
    * a function from a row (a mapping of names to values) to bytes or None.

    By default the value is a JSON object of all fields, and the key is null.

    Exactly once: each commit task has a transactional producer, and writes a marker of the
    transaction in the kafka_txn of its records. Readers with ``isolation.level=read_committed`` see
    a task's part of a batch whole, and once. Records in Kafka cannot be undone, so a batch whose
    commit was opened is never planned anew (C8). Markers are in ``marker_topic``, by default
    ``ratchet-markers-<topology id>``, which is created when it is missing.

    With more than one task, a replay may find the parts of some tasks written and others not. So
    each row must reach the same task again: the input must be grouped by fields or globally, and
    every component before it must be deterministic (C11). The builder checks this.

    ``at_least_once=True``: plain producers, no markers, any grouping. A replay writes the records
    again. Give ``at_least_once=True`` to the builder, too.

    A record without a key for a compacted topic is a bad record. So is one that is larger than
    ``message.max.bytes`` of the client or, compressed if the client compresses,
    ``max.message.bytes`` of the topic. Both are found before the commit is opened.

    ``bootstrap_servers`` and ``settings``: as for the spout. Both may come from the configuration's
    ``kafka.*`` keys.
    """

    deterministic = True

    def __init__(
        self,
        topic: str,
        *,
        value: Content | None = None,
        key: Content | None = None,
        bootstrap_servers: str | None = None,
        marker_topic: str | None = None,
        settings: Mapping[str, Any] | None = None,
        at_least_once: bool = False,
    ) -> None:
        self.exactly_once = not at_least_once
        self._topic = checked_topic(topic, "KafkaSink: ")
        self._value, self._key = value, key
        self._marker_topic = checked_topic(marker_topic, "marker_topic=") if marker_topic is not None else None
        self._settings = KafkaSettings(bootstrap_servers, settings)
        self._fields: Fields | None = None
        self._merged: KafkaSettings | None = None
        self._batches: list[pa.RecordBatch] = []
        self._attempt: TransactionAttempt | None = None
        self._context: TopologyContext | None = None

    def bind(self, component_id: str, inputs: Sequence[Input], parallelism: int) -> None:
        shapes = {each.fields for each in inputs}
        if len(shapes) != 1:
            raise TopologyError(f"committer {component_id!r}: its inputs have other fields; make them equal")
        self._fields = shapes.pop()
        for content in (self._value if self._value is not None else self._fields.names, self._key):
            self._check(component_id, content, self._fields)
        if parallelism > 1 and self.exactly_once:
            self.needs_deterministic_input = True
            for each in inputs:
                if not isinstance(each.grouping, (FieldsGrouping, GlobalGrouping)):
                    raise TopologyError(
                        f"committer {component_id!r} has {parallelism} tasks, and {type(each.grouping).__name__} from "
                        f"{each.component_id!r} can bring a row to another task when the batch is replayed: use fields_grouping, "
                        "global_grouping, or parallelism 1"
                    )

    @staticmethod
    def _check(component_id: str, content: Content | None, fields: Fields) -> None:
        if content is None or callable(content):
            return
        for name in (content,) if isinstance(content, str) else content:
            if name not in fields:
                raise TopologyError(
                    f"committer {component_id!r} needs field {name!r}, which its input does not have (it has: "
                    f"{', '.join(fields.names)})"
                )
        if isinstance(content, str):
            kind = fields.type_of(content)
            if kind is None or not (pa.types.is_string(kind) or pa.types.is_binary(kind)):
                raise TopologyError(
                    f"committer {component_id!r}: field {content!r} is {kind}, and a record holds text or bytes: give a list, "
                    f"[{content!r}], for JSON, or a function"
                )
        else:
            JsonColumns(fields.select(content), "JSON")

    def written_topics(self, topology_id: str) -> Sequence[WrittenTopic]:
        records = WrittenTopic(self._topic, "records", self._settings)
        if not self.exactly_once:
            return (records,)
        return (records, WrittenTopic(markers_topic(topology_id, self._marker_topic), "markers", self._settings))

    def check_before_start(self, conf: Mapping[str, Any]) -> None:
        with suppress(RetryableError):  # the first batch waits for brokers that do not answer
            probe(self._settings.with_conf(conf), self._topic)

    def check_servers(self, conf: Mapping[str, Any]) -> None:
        probe(self._settings.with_conf(conf), self._topic)

    def check_written(self, conf: Mapping[str, Any], context: TopologyContext, standing: Standing) -> None:
        if self.exactly_once:
            check_markers(self._settings.with_conf(conf), context, self._marker_topic, standing)

    def renew_written(self, conf: Mapping[str, Any], context: TopologyContext, standing: Standing) -> None:
        if self.exactly_once:
            renew_markers(self._settings.with_conf(conf), context, self._marker_topic, standing)

    # --- in tests ---------------------------------------------------------------------------------

    def substitute(self, folder: Path) -> Bolt:
        if not self.exactly_once:
            raise ConfigError("it writes at least once, and a table in place of its topic would hold each row once")
        return _TableForTopic(self, ScratchTable(folder, self._fields))

    def check_encoding(self, batch: pa.RecordBatch) -> None:
        """Raise ``BadRecordError`` for a row that makes no record."""
        self._encoded(batch)

    # --- in tasks ---------------------------------------------------------------------------------

    def prepare(
        self,
        conf: Mapping[str, Any],
        context: TopologyContext,
        collector: OutputCollector,
        batch_id: TransactionAttempt,
    ) -> None:
        self._attempt, self._context = batch_id, context
        self._merged = self._settings.with_conf(conf)
        self._batches = []

    def execute_arrow(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        records = self._encoded(batch)
        self._check_sizes(records)
        self._batches.append(records)

    def finish_batch(self) -> None:
        attempt, context, merged = self._attempt, self._context, self._merged
        if attempt is None or context is None or merged is None:
            raise TopologyError("a KafkaSink was used outside a topology")
        if not self._batches:
            return  # nothing to write, so a replay cannot write it twice
        if not self.exactly_once:
            batch = f"{attempt.txid} {marker_of(attempt, context).plan_digest}"
            writer = f"{context.topology_id}/{writer_of(context)}"
            writers.plain(merged).write(self._topic, _Records(self._batches), writer, batch)
            return
        marker = marker_of(attempt, context)
        writers.marked(merged, context, self._marker_topic).write(self._topic, _Records(self._batches), marker)

    def _encoded(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The records of a batch: a column of keys and one of values. They are made in the
        processing phase, so that bad ones are found before the commit is opened."""
        if self._fields is None:
            raise TopologyError("a KafkaSink was used outside a topology")
        value = self._value if self._value is not None else self._fields.names
        columns = [self._column(content, self._fields, batch) for content in (self._key, value)]
        return pa.RecordBatch.from_arrays(columns, ["key", "value"])

    def _column(self, content: Content | None, fields: Fields, batch: pa.RecordBatch) -> pa.Array:
        if content is None:
            return pa.nulls(batch.num_rows, _BYTES)
        if isinstance(content, str):
            return batch.column(content).cast(pa.binary()).cast(_BYTES)
        if callable(content):
            rows = (dict(zip(batch.schema.names, row, strict=True)) for row in rows_of(batch))
            return pa.array([self._called(content, row) for row in rows], _BYTES)
        chosen = fields.select(content)
        columns = JsonColumns(chosen, "JSON")
        encoded = map(columns.encode, rows_of(batch.select([*chosen])))
        return pa.array([self._json(dict(zip(chosen, row, strict=True))) for row in encoded], _BYTES)

    def _check_sizes(self, records: pa.RecordBatch) -> None:
        """Raise ``BadRecordError`` for a record that the topic or the client certainly refuses."""
        if self._merged is None:
            raise TopologyError("a KafkaSink was used outside a topology")
        refusal = _refusal(records, writers.limits(self._merged, self._topic))
        if refusal is not None:  # the topic may have been changed since it was asked
            refusal = _refusal(records, writers.limits(self._merged, self._topic, fresh=True))
        if refusal is not None:
            raise BadRecordError(f"topic {self._topic!r}: {refusal}")

    def _json(self, document: RowDict) -> bytes:
        try:
            return json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        except ValueError as error:
            raise BadRecordError(
                f"topic {self._topic!r}: {dict(document)!r} cannot be written as JSON: {error}"
            ) from error

    def _called(self, function: Callable[[RowDict], bytes | None], row: RowDict) -> bytes | None:
        made = function(row)
        if made is not None and not isinstance(made, bytes):
            raise BadRecordError(
                f"topic {self._topic!r}: the function given for key or value returned a {type(made).__name__}, not bytes"
            )
        return made


class _TableForTopic(AppendCommitter):
    """Writes the rows of a topic to a table, once each has been encoded."""

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

    def __init__(self, batches: Sequence[pa.RecordBatch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[KafkaRecord]:
        for batch in self._batches:
            yield from map(KafkaRecord, *(column.to_pylist() for column in batch.columns))


def _refusal(records: pa.RecordBatch, limits: TopicLimits) -> str | None:
    """Why one of the records is refused; None if nothing is known against them."""
    sizes = zip(*(pc.binary_length(column).to_pylist() for column in records.columns), strict=True)
    unsure = [number for number, each in enumerate(sizes) if not limits.fits(*each)]
    refusals = (limits.refusal(*(column[number].as_py() for column in records.columns)) for number in unsure)
    return next(filter(None, refusals), None)
