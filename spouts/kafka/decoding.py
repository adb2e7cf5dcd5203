"""Decodes Kafka's records into rows, and turns bad records into dead letters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from framework.errors import BadRecordError
from framework.topology import DEAD_LETTER_FIELDS, HIDDEN, RECORD_FIELDS
from framework.topology.dead_letters import CUT_HEADER
from spouts.codecs import codec_error_isolation
from spouts.codecs.bad_records import BadRecord, OnBadRecord
from spouts.codecs.codec import Codec, TooLargeTogetherError, UndecodableValueError, Values
from spouts.codecs.datetime_check import decoded, decoded_good
from spouts.codecs.missing_field_warning import absent_fields
from spouts.kafka.consumer.record_chunk import RecordChunk
from spouts.kafka.record_deserialization import Parts, RecordFormat
from spouts.kafka.topic_streams import StreamFormat, Streams

C = TypeVar("C", bound=RecordChunk)
#: Topic, partition and offset of a record.
Place = tuple[str, int, int]


def places_of(chunk: RecordChunk) -> Iterable[Place]:
    return zip(*(chunk.metadata(name).to_pylist() for name in ("topic", "partition", "offset")), strict=True)


class Decoded(NamedTuple, Generic[C]):
    """Records of one stream, and their rows.

    * ``letters``: whether these records could not be decoded. Then ``rows`` are dead letters, or
      None if dead letters are off. Otherwise, ``rows`` is None for records that the value's codec
      leaves out.
    * ``absent``: the fields of the value that no record has; None if no record has a value.
    * ``passed_over``: the number of records that the filter of the stream leaves out."""

    chunk: C
    rows: pa.RecordBatch | None
    stream: str
    letters: bool = False
    absent: frozenset[str] | None = None
    #: Records that are not in the chunk: a copy would cost as much as half of their decoding.
    passed_over: int = 0


class RecordDecoder:
    """Decodes chunks, each record by its topic's stream. With ``OnBadRecord.FAIL``, raises
    ``BadRecordError`` for a record that cannot be decoded."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    @property
    def parts(self) -> Parts:
        """The parts of a record that decoding needs, in addition to its value and offset."""
        records = [each.records for each in self._streams]
        named = {what.partition(" ")[0] for each in records for what, _ in each.codecs()}
        named.update(name for each in records for name in each.metadata)
        all_of_it = self._streams.want_dead_letters  # a dead letter contains the whole record
        return Parts(
            keys=all_of_it or "key" in named,
            headers=all_of_it or not named.isdisjoint({"header", "headers"}),
            timestamps=all_of_it or not named.isdisjoint({"timestamp_ms", f"{HIDDEN}timestamp_ms"}),
        )

    def warm_up(self) -> None:
        """Load the modules that decoding needs."""
        for each in self._streams:
            for _, codec in each.records.codecs():
                codec.decode([None])

    def left_out(
        self,
        chunk: C,
        reason: Callable[[Place], str],
        topic_ids: Mapping[str, str | None],
        policy: OnBadRecord | None = None,
    ) -> Iterator[Decoded[C]]:
        """Records with a reason each, as dead letters if these are configured. ``policy``: of the
        bolt that refused them, in place of that of their stream."""
        for its, of_stream in self._by_stream(chunk):
            wanted = (policy or its.on_bad_record) is OnBadRecord.DEAD_LETTER
            for part in of_stream.parts():
                reasons = [reason(place) for place in places_of(part)] if wanted else []
                letters = dead_letters("value", part, reasons, topic_ids) if wanted else None
                yield Decoded(part, letters, its.stream, letters=True)

    def decode(self, chunk: C, topic_ids: Mapping[str, str | None]) -> Iterator[Decoded[C]]:
        """Yields, for each stream, the records that could not be decoded first, then the others."""
        if chunk.unreadable:
            yield from self.left_out(chunk, lambda _: chunk.unreadable, topic_ids)
            return
        for its, of_stream in self._by_stream(chunk):
            for part in of_stream.parts():
                yield from _in_parts(its, part, topic_ids)

    def _by_stream(self, chunk: C) -> Iterator[tuple[StreamFormat, C]]:
        if self._streams.one is not None:
            yield self._streams.one, chunk
        else:
            for topic, part in chunk.by_topic():
                yield self._streams.of(topic), part


class _InPartsError(Exception):
    """The remaining records must be decoded ``count`` at a time, because together they are too
    large."""

    def __init__(self, chunk: Any, count: int) -> None:
        self.chunk, self.count = chunk, count


def _in_parts(its: StreamFormat, chunk: C, topic_ids: Mapping[str, str | None]) -> Iterator[Decoded[C]]:
    try:
        yield from _decoded(its, chunk, topic_ids)
    except _InPartsError as error:
        rest, count = error.chunk, error.count
    else:
        return
    for first in range(0, len(rest), count):
        yield from _in_parts(its, rest.take(list(range(first, min(first + count, len(rest))))), topic_ids)


def _decoded(its: StreamFormat, chunk: C, topic_ids: Mapping[str, str | None]) -> Iterator[Decoded[C]]:
    columns: list[pa.Array] = []
    large = chunk.larger_than(its.record_bytes_max) if chunk.value_bytes > its.record_bytes_max else []
    if large:
        rejected = chunk.take(large)
        chunk = chunk.take(np.delete(np.arange(len(chunk)), large).tolist())
        yield _too_large(its, rejected, topic_ids)
        if not len(chunk):
            return
    without = codec_error_isolation.left_out(its.records.value, chunk.raw("value"))
    if without is not None:
        yield Decoded(chunk.take(np.flatnonzero(without).tolist()), None, its.stream)
        chunk = chunk.take(np.flatnonzero(~without).tolist())
        if not len(chunk):
            return
    try:
        kept = _kept(its.records, chunk)
    except TooLargeTogetherError as error:
        raise _InPartsError(chunk, error.count) from error
    if kept is not None and not kept.all():
        yield Decoded(chunk.take([]), None, its.stream, passed_over=int((~kept).sum()))
        chunk = chunk.take(np.flatnonzero(kept).tolist())
        if not len(chunk):
            return
    for what, codec in its.records.codecs():
        raw = chunk.raw(what)
        bad: Sequence[BadRecord] = ()
        try:
            if its.on_bad_record is OnBadRecord.FAIL:
                batch = _decoded_or_failed(what, codec, raw, chunk)
            else:
                batch, bad = decoded_good(codec, raw)
        except TooLargeTogetherError as error:
            raise _InPartsError(chunk, error.count) from error
        if bad:
            wanted = its.on_bad_record is OnBadRecord.DEAD_LETTER
            gone = [each.index for each in bad]
            rejected = chunk.take(gone)
            reasons = [each.reason for each in bad]
            letters = dead_letters(what, rejected, reasons, topic_ids) if wanted else None
            yield Decoded(rejected, letters, its.stream, letters=True)
            good = np.delete(np.arange(len(chunk)), gone)
            columns = [column.take(pa.array(good)) for column in columns]
            chunk = chunk.take(good.tolist())
        columns += batch.columns
    if not len(chunk):
        return
    names = list(its.records.value.fields)
    found = absent_fields(names, columns[: len(names)])
    absent = None if found and _has_no_value(chunk) else found
    columns += [_metadata(chunk, name) for name in its.records.metadata]
    yield Decoded(chunk, pa.RecordBatch.from_arrays(columns, names=list(its.fields)), its.stream, absent=absent)


def _metadata(chunk: RecordChunk, name: str) -> pa.Array:
    if name not in RECORD_FIELDS:
        return chunk.metadata(name)
    return chunk.metadata(name.removeprefix(HIDDEN)).cast(RECORD_FIELDS[name])


def _kept(records: RecordFormat, chunk: RecordChunk) -> npt.NDArray[np.bool_] | None:
    """The records whose value is decoded, by the other parts; None: all of them. Where one of those
    parts is bad, too: it is dealt with where all parts are decoded."""
    if records.where is None:
        return None
    fields = records.where.fields
    columns = {name: chunk.metadata(name) for name in fields if name in records.metadata}
    for what, codec in records.codecs()[1:]:
        if not set(fields).isdisjoint(codec.fields):
            batch, bad = decoded_good(codec, chunk.raw(what))
            if bad:
                return None
            columns |= dict(zip(batch.schema.names, batch.columns, strict=True))
    return records.where.kept(pa.RecordBatch.from_arrays([columns[name] for name in fields], names=list(fields)))


def _has_no_value(chunk: RecordChunk) -> bool:
    values = chunk.raw("value")
    return values.null_count == len(values) if isinstance(values, pa.Array) else all(each is None for each in values)


def _too_large(its: StreamFormat, rejected: C, topic_ids: Mapping[str, str | None]) -> Decoded[C]:
    """Records above the limit. They are not decoded, and their dead letters have only the first
    bytes."""
    said = f"the value is larger than record_bytes_max ({its.record_bytes_max:,} bytes)"
    if its.on_bad_record is OnBadRecord.FAIL:
        topic, partition, offset = (rejected.metadata(name)[0].as_py() for name in ("topic", "partition", "offset"))
        raise BadRecordError(
            f"topic {topic!r}, partition {partition}, offset {offset}: {said}; raise it if it is wanted"
        )
    letters = None
    if its.on_bad_record is OnBadRecord.DEAD_LETTER:
        reason = f"{said}; the first {LARGE_SHOWN_BYTES:,} bytes are kept here"
        letters = dead_letters(
            "value", rejected, [reason] * len(rejected), topic_ids, value_bytes_max=LARGE_SHOWN_BYTES
        )
    return Decoded(rejected, letters, its.stream, letters=True)


def _decoded_or_failed(what: str, codec: Codec, raw: Values | pa.BinaryArray, chunk: RecordChunk) -> pa.RecordBatch:
    try:
        return decoded(codec, raw)
    except UndecodableValueError as error:
        bad = chunk.take([error.index])
        topic, partition, offset = (bad.metadata(name)[0].as_py() for name in ("topic", "partition", "offset"))
        value = _listed(bad.raw("value"))[0]
        raise BadRecordError(
            f"topic {topic!r}, partition {partition}, offset {offset}: {_reason(what, error.reason)}",
            about="" if value is None else f"value {value[:_SHOWN_BYTES]!r}",
            advice=_ADVICE,
        ) from error


_ADVICE = "mend the record's source, or give the spout on_bad_record='dead_letter' or 'skip'"
#: The most bytes of a too large value in a dead letter.
LARGE_SHOWN_BYTES = 65_536
#: The most characters of an undecodable record that are shown.
_SHOWN_BYTES = 80


def _reason(what: str, reason: str) -> str:
    return reason if what == "value" else f"{what}: {reason}"


def _listed(values: Values | pa.BinaryArray) -> Values:
    return values.to_pylist() if isinstance(values, pa.Array) else values


def dead_letters(
    what: str,
    rejected: RecordChunk,
    reasons: Sequence[str],
    topic_ids: Mapping[str, str | None],
    *,
    value_bytes_max: int | None = None,
) -> pa.RecordBatch:
    """Records as rows of ``DEAD_LETTER_FIELDS``. ``what``: the bad part of the records.
    ``value_bytes_max``: the most bytes kept of each value."""
    columns: dict[str, Any] = {
        name: rejected.metadata(name) for name in ("topic", "partition", "offset", "timestamp_ms", "key", "headers")
    }
    columns["topic_id"] = [topic_ids.get(topic) or "" for topic in columns["topic"].to_pylist()]
    columns["value"] = _beginnings(rejected.raw("value"), value_bytes_max)
    if value_bytes_max is not None:
        values = _listed(rejected.raw("value"))
        columns["headers"] = [
            [*headers, *_cut(value, value_bytes_max)]
            for headers, value in zip(columns["headers"].to_pylist(), values, strict=True)
        ]
    columns["error"] = [_reason(what, each) for each in reasons]
    columns["attempts"] = [0] * len(rejected)
    columns["settled"] = columns["kept_in"] = [None] * len(rejected)
    return pa.RecordBatch.from_arrays(
        [_typed(columns[name], DEAD_LETTER_FIELDS.type_of(name)) for name in DEAD_LETTER_FIELDS],
        names=list(DEAD_LETTER_FIELDS),
    )


def _cut(value: bytes | None, size: int) -> list[dict[str, Any]]:
    """The header of a value that was cut to this size."""
    if value is None or len(value) <= size:
        return []
    return [{"key": CUT_HEADER, "value": f"value of {len(value)} bytes".encode()}]


def _beginnings(values: Values | pa.BinaryArray, size: int | None) -> Values | pa.BinaryArray:
    if size is None:
        return _listed(values)
    if isinstance(values, pa.Array):
        return pc.binary_slice(values, 0, size)
    return [each if each is None else each[:size] for each in values]


def _typed(column: Any, declared: pa.DataType) -> pa.Array:
    if isinstance(column, pa.Array):
        return column if column.type == declared else column.cast(declared)
    return pa.array(column, declared)
