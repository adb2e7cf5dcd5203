"""Decodes Kafka's messages into rows, and turns bad records into dead letters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Message

from framework.errors import BadRecordError
from framework.topology import DEAD_LETTER_FIELDS
from spouts.codecs.bad_records import OnBadRecord
from spouts.codecs.codec import Codec, UndecodableValueError
from spouts.kafka.format import METADATA_TYPES, RecordFormat


class Decoded(NamedTuple):
    """Messages and their rows on the default stream. With ``letters``: messages that could not be
    decoded; then ``rows`` are dead letters, or None if dead letters are not wanted."""

    messages: list[Message]
    rows: pa.RecordBatch | None
    letters: bool = False


class RecordDecoder:
    """Decodes chunks. With ``OnBadRecord.FAIL``, raises ``BadRecordError`` for a record that cannot
    be decoded."""

    def __init__(self, record_format: RecordFormat, on_bad_record: OnBadRecord) -> None:
        self._format = record_format
        self._names = list(record_format.fields())
        self._on_bad_record = on_bad_record

    def warm_up(self) -> None:
        """Load the modules that decoding needs."""
        for _, codec in self._format.codecs():
            codec.decode([None])

    def decode(self, messages: list[Message], topic_ids: Mapping[str, str | None]) -> Iterator[Decoded]:
        """Yields the messages that could not be decoded first, then the others."""
        columns: list[pa.Array] = []
        for what, codec in self._format.codecs():
            raw = _raw(what, messages)
            if self._on_bad_record is OnBadRecord.FAIL:
                batch = self._decoded_or_failed(what, codec, raw, messages)
            else:
                batch, bad = codec.decode_good(raw)
                if bad:
                    wanted = self._on_bad_record is OnBadRecord.DEAD_LETTER
                    rejected = [messages[each.index] for each in bad]
                    reasons = [each.reason for each in bad]
                    letters = dead_letters(what, rejected, reasons, topic_ids) if wanted else None
                    yield Decoded(rejected, letters, letters=True)
                    gone = {each.index for each in bad}
                    kept = pa.array([index for index in range(len(messages)) if index not in gone], pa.int64())
                    columns = [column.take(kept) for column in columns]
                    messages = [message for index, message in enumerate(messages) if index not in gone]
            columns += batch.columns
        if not messages:
            return
        columns += [pa.array(_metadata_column(name, messages), METADATA_TYPES[name]) for name in self._format.metadata]
        yield Decoded(messages, pa.RecordBatch.from_arrays(columns, names=self._names))

    def _decoded_or_failed(
        self, what: str, codec: Codec, raw: Sequence[bytes | None], messages: Sequence[Message]
    ) -> pa.RecordBatch:
        try:
            return codec.decode(raw)
        except UndecodableValueError as error:
            bad = messages[error.index]
            value = bad.value()
            raise BadRecordError(
                f"topic {bad.topic()!r}, partition {bad.partition()}, offset {bad.offset()}: {_reason(what, error.reason)}",
                about="" if value is None else f"value {value[:_SHOWN_BYTES]!r}",
            ) from error


#: How much of a record that cannot be decoded is shown.
_SHOWN_BYTES = 80


def _reason(what: str, reason: str) -> str:
    return reason if what == "value" else f"{what}: {reason}"


def _raw(what: str, messages: Sequence[Message]) -> list[bytes | None]:
    """The bytes that a codec decodes: values, keys, or the last header of a name."""
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


def dead_letters(
    what: str, rejected: Sequence[Message], reasons: Sequence[str], topic_ids: Mapping[str, str | None]
) -> pa.RecordBatch:
    """Records as rows of ``DEAD_LETTER_FIELDS``. ``what``: the part of the records that is bad."""
    columns = {
        name: _metadata_column(name, rejected)
        for name in ("topic", "partition", "offset", "timestamp_ms", "key", "headers")
    }
    columns["topic_id"] = [topic_ids.get(topic) or "" for topic in columns["topic"]]
    columns["value"] = [message.value() for message in rejected]
    columns["error"] = [_reason(what, each) for each in reasons]
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
