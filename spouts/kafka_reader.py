"""Reads planned ranges of Kafka, in tasks: exactly the range, decoded, or an error.

Invariant: every record that a committed reader may see in the range becomes a row, or, when it cannot be decoded, what
``on_bad_record`` says: an error, a count, or a row on the stream of dead letters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Message

from framework.errors import BadRecordError
from framework.kafka_clients import KafkaSettings
from framework.topology import (
    DEAD_LETTER_FIELDS,
    DEAD_LETTER_STREAM,
    Fields,
    OnStream,
    PartitionReader,
    ReadCounts,
    TransactionAttempt,
)
from framework.topology.spouts import Meta, Rows
from spouts.bad_records import BadRecord, OnBadRecord
from spouts.codecs import Codec, UndecodableValueError
from spouts.kafka_partitions import topic_and_number
from spouts.kafka_session import Range, sessions

_METADATA_TYPES = {
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp_ms": pa.int64(),
    "key": pa.binary(),
    "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
}


def metadata_fields(names: tuple[str, ...]) -> dict[str, pa.DataType]:
    """The types of the record's own fields that a spout may add. Raises ``KeyError`` for an unknown one."""
    return {name: _METADATA_TYPES[name] for name in names}


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """How records become rows: the value's codec, the key's (None: the key is not decoded), one per header, and which of
    the record's own fields come last."""

    value: Codec
    key: Codec | None = None
    headers: Mapping[str, Codec] | None = None
    metadata: tuple[str, ...] = ()

    def fields(self) -> Fields:
        """In their order: value, key, headers, metadata. Raises ``ValueError`` naming a field that two of them have."""
        types: dict[str, Any] = {}
        parts: list[tuple[str, Mapping[str, Any]]] = [
            (what, {name: codec.fields.type_of(name) for name in codec.fields}) for what, codec in self.codecs()
        ]
        for what, part in (*parts, ("metadata", metadata_fields(self.metadata))):
            for name, declared in part.items():
                if name in types:
                    raise ValueError(f"{name!r} is both a field of the {what} and one before it: rename one of them")
                types[name] = declared
        return Fields.of(types)

    def codecs(self) -> list[tuple[str, Codec]]:
        """What each codec decodes, as messages name it, and the codec."""
        found: list[tuple[str, Codec]] = [("value", self.value)]
        if self.key is not None:
            found.append(("key", self.key))
        return found + [(f"header {name}", codec) for name, codec in (self.headers or {}).items()]


class KafkaReader(PartitionReader):
    """``slot`` keeps the consumers of different tasks in one worker apart."""

    def __init__(
        self, settings: KafkaSettings, group: str, record_format: RecordFormat, on_bad_record: OnBadRecord, slot: int
    ) -> None:
        self._settings = settings
        self._group = group
        self._format = record_format
        self._names = list(record_format.fields())
        self._on_bad_record = on_bad_record
        self._slot = slot
        self._counts = ReadCounts()

    @property
    def counts(self) -> ReadCounts:
        return self._counts

    def read(self, attempt: TransactionAttempt, partition: str, meta: Meta) -> Iterator[Rows]:
        yield from self.read_all(attempt, {partition: meta})

    def read_all(self, attempt: TransactionAttempt, ranges: Mapping[str, Meta]) -> Iterator[Rows]:
        asked = {topic_and_number(partition): _range(meta) for partition, meta in ranges.items()}
        if not any(each.first < each.end for each in asked.values()):
            return
        topic_ids = {topic_and_number(partition)[0]: meta.get("topic_id") for partition, meta in ranges.items()}
        with sessions.lend(self._settings, self._group, self._slot) as session:
            for messages in session.read(asked):
                self._counts.records += len(messages)
                self._counts.bytes += sum(map(len, messages))
                yield from self._decoded(messages, topic_ids)

    def warm_up(self) -> None:
        with sessions.lend(self._settings, self._group, self._slot) as session:
            session.connect()
        for _, codec in self._format.codecs():
            codec.decode([None])

    def _decoded(self, messages: list[Message], topic_ids: Mapping[str, str | None]) -> Iterator[Rows]:
        columns: list[pa.Array] = []
        for what, codec in self._format.codecs():
            raw = _raw(what, messages)
            if self._on_bad_record is OnBadRecord.FAIL:
                batch = self._decoded_or_failed(what, codec, raw, messages)
            else:
                batch, bad = codec.decode_good(raw)
                if bad:
                    self._counts.bad_records += len(bad)
                    if self._on_bad_record is OnBadRecord.DEAD_LETTER:
                        yield OnStream(DEAD_LETTER_STREAM, _dead_letters(what, messages, bad, topic_ids))
                    gone = {each.index for each in bad}
                    kept = pa.array([index for index in range(len(messages)) if index not in gone], pa.int64())
                    columns = [column.take(kept) for column in columns]
                    messages = [message for index, message in enumerate(messages) if index not in gone]
            columns += batch.columns
        if not messages:
            return
        columns += [pa.array(_metadata_column(name, messages), _METADATA_TYPES[name]) for name in self._format.metadata]
        yield pa.RecordBatch.from_arrays(columns, names=self._names)

    def _decoded_or_failed(
        self, what: str, codec: Codec, raw: Sequence[bytes | None], messages: Sequence[Message]
    ) -> pa.RecordBatch:
        try:
            return codec.decode(raw)
        except UndecodableValueError as error:
            bad = messages[error.index]
            raise BadRecordError(
                f"topic {bad.topic()!r}, partition {bad.partition()}, offset {bad.offset()}: {_reason(what, error.reason)}"
            ) from error


def _range(meta: Meta) -> Range:
    epoch = meta.get("first_leader_epoch")
    first, end = int(meta["first_offset"]), int(meta["next_offset"])
    return Range(first, end, None if epoch is None else int(epoch), meta.get("topic_id"))


def _reason(what: str, reason: str) -> str:
    return reason if what == "value" else f"{what}: {reason}"


def _raw(what: str, messages: Sequence[Message]) -> list[bytes | None]:
    """What a codec decodes: values, keys, or the last header of a name."""
    if what == "value":
        return [message.value() for message in messages]
    if what == "key":
        return [message.key() for message in messages]
    name = what.removeprefix("header ")
    found: list[bytes | None] = []
    for message in messages:
        values = [value for key, value in message.headers() or () if key == name]
        found.append(_bytes(values[-1]) if values else None)
    return found


def _dead_letters(
    what: str, messages: Sequence[Message], bad: Sequence[BadRecord], topic_ids: Mapping[str, str | None]
) -> pa.RecordBatch:
    rejected = [messages[each.index] for each in bad]
    columns = {
        name: _metadata_column(name, rejected)
        for name in ("topic", "partition", "offset", "timestamp_ms", "key", "headers")
    }
    columns["topic_id"] = [topic_ids.get(topic) or "" for topic in columns["topic"]]
    columns["value"] = [message.value() for message in rejected]
    columns["error"] = [_reason(what, each.reason) for each in bad]
    return pa.RecordBatch.from_arrays(
        [pa.array(columns[name], DEAD_LETTER_FIELDS.type_of(name)) for name in DEAD_LETTER_FIELDS],
        names=list(DEAD_LETTER_FIELDS),
    )


def _metadata_column(name: str, messages: Sequence[Message]) -> list[Any]:
    if name == "topic":
        return [message.topic() for message in messages]
    if name == "partition":
        return [message.partition() for message in messages]
    if name == "offset":
        return [message.offset() for message in messages]
    if name == "key":
        return [message.key() for message in messages]
    if name == "timestamp_ms":
        stamps = (message.timestamp() for message in messages)
        return [None if kind == TIMESTAMP_NOT_AVAILABLE else stamp for kind, stamp in stamps]
    return [[{"key": key, "value": _bytes(value)} for key, value in message.headers() or ()] for message in messages]


def _bytes(value: bytes | str | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value
