"""The sources of a pipeline: topics of Kafka as one spout, or rows in memory."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from framework.call_site import Call
from framework.streams.ports import EarlyFilter, Reading, Source
from framework.topology import DEFAULT_STREAM, HIDDEN, RECORD_FIELDS, TOMBSTONE, Fields, Spout
from framework.topology.bolts import OnBadRecord
from ratchet.streams.formats import Format
from spouts import OpaqueKafkaTransactionalSpout, OpaqueMemoryTransactionalSpout, TopicStream
from spouts.kafka.record_deserialization import METADATA_TYPES

#: Rows of ``read(rows)`` in a batch.
TAKE = 1_000
#: A smaller number is a moment of 1970 in milliseconds, or of the years up to 2286 in seconds.
_SECONDS_MAX = 10_000_000_000
_OWN = {
    "topics",
    "pattern",
    "streams",
    "codec",
    "key_codec",
    "header_codecs",
    "metadata",
    "on_bad_record",
    "dead_letters",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Topics:
    """The topics of one stream, and how their records become rows."""

    name: str
    topics: tuple[str, ...]
    pattern: str | None
    value: Format
    key: Format | None
    headers: Mapping[str, Format]
    metadata: tuple[str, ...]
    on_bad_record: OnBadRecord

    @property
    def source(self) -> Source:
        """The columns: those of the value, of the key, of the headers, then the metadata."""
        parts = [self.value, *([self.key] if self.key is not None else []), *self.headers.values()]
        fields = [field for part in parts for field in part.schema]
        fields += [pa.field(name, METADATA_TYPES[name]) for name in self.metadata]
        return Source(self.name, pa.schema(fields))

    @property
    def leaves_out_tombstones(self) -> bool:
        """Whether a record without a value has no row, as in Debezium's format."""
        left_out = self.value.codec(self.value.schema.names).left_out([None])
        return left_out is not None and bool(left_out[0])

    def parts(self, used: Sequence[str]) -> dict[str, Any]:
        """The arguments of the spout, or of its stream, for these columns."""

        def of(part: Format) -> list[str]:
            return [name for name in part.schema.names if name in used]

        hidden = [*([TOMBSTONE] if TOMBSTONE not in self.source.schema.names else []), *RECORD_FIELDS]

        return {
            "codec": self.value.codec(of(self.value) or self.value.schema.names[:1]),
            "key_codec": self.key.codec(of(self.key)) if self.key is not None and of(self.key) else None,
            "header_codecs": {name: part.codec(of(part)) for name, part in self.headers.items() if of(part)} or None,
            "metadata": [name for name in (*self.metadata, *hidden) if name in used],
        }


class Kafka(Reading):
    """One or several streams of topics. ``options``: of the spout."""

    spout_id = "kafka"
    partition = ("topic", "partition")

    def __init__(self, options: Mapping[str, Any], parallelism: int, dead_letters: Any = None) -> None:
        self.options, self.parallelism, self.dead_letters = dict(options), parallelism, dead_letters
        self.added: list[Topics] = []

    def spout(self, used: Mapping[str, Sequence[str]]) -> Spout:
        options = {**self.options, "dead_letters": self.dead_letters}
        if len(self.added) == 1:
            (only,) = self.added
            return OpaqueKafkaTransactionalSpout(
                only.topics,
                pattern=only.pattern,
                on_bad_record=only.on_bad_record,
                **only.parts(used[only.name]),
                **options,
            )
        streams = {
            each.name: TopicStream(
                topic=each.topics[0], on_bad_record=each.on_bad_record, **each.parts(used[each.name])
            )
            for each in self.added
        }
        return OpaqueKafkaTransactionalSpout(streams=streams, **options)

    @property
    def asked(self) -> frozenset[str]:
        return frozenset(name for each in self.added for name in each.metadata)

    def early(self, source: str) -> frozenset[str]:
        """The columns of the key, of headers and of the metadata."""
        (read,) = (each for each in self.added if each.name == source)
        return frozenset(read.source.schema.names) - set(read.value.schema.names) - {"value"}

    def hidden(self, source: str) -> frozenset[str]:
        return frozenset(RECORD_FIELDS)

    def metadata(self, source: str) -> Mapping[str, str]:
        """Hidden column -> its metadata, unless a column of the key, the headers or the value has
        that name."""
        (read,) = (each for each in self.added if each.name == source)
        own = set(read.source.schema.names) - set(read.metadata)
        names = {each: each.removeprefix(HIDDEN) for each in RECORD_FIELDS}
        return {each: name for each, name in names.items() if name not in own}

    def tombstones(self, source: str) -> frozenset[str]:
        (read,) = (each for each in self.added if each.name == source)
        has_key = read.key is not None or "key" in read.metadata
        if not has_key or TOMBSTONE in read.source.schema.names or read.leaves_out_tombstones:
            return frozenset()
        return self.early(source)

    def filtered(self, spout: Spout, filters: Mapping[str, EarlyFilter]) -> Spout:
        streams = self.streams()
        if not isinstance(spout, OpaqueKafkaTransactionalSpout):
            return spout
        return spout.where({streams[source]: each for source, each in filters.items()})

    def streams(self) -> Mapping[str, str]:
        several = len(self.added) > 1
        return {each.name: each.name if several else DEFAULT_STREAM for each in self.added}

    def add(self, call: Call, topics: Topics) -> None:
        """Raises ``TopologyError`` if the spout cannot read these topics together with the
        others."""
        every = [*self.added, topics]
        if len(every) > 1 and any(each.pattern is not None or len(each.topics) > 1 for each in every):
            raise call.mistake("a pipeline that reads several streams reads one topic in each: name one topic here")
        twice = next((each.name for each in self.added if each.name == topics.name), None)
        if twice is not None:
            raise call.mistake(f"the pipeline reads {twice!r} already: go on with that stream, or give another name=")
        if len(every) > 1 and {name for each in self.added for name in each.topics} & set(topics.topics):
            raise call.mistake(f"the pipeline reads topic {topics.topics[0]!r} already: go on with that stream")
        self.added.append(topics)


#: The options of ``read_kafka`` that it gives to the spout.
OPTIONS = tuple(name for name in inspect.signature(OpaqueKafkaTransactionalSpout).parameters if name not in _OWN)


def check_moment(call: Call, what: str, given: object) -> None:
    """Raise ``TopologyError`` for seconds in place of milliseconds."""
    if isinstance(given, int | float) and not isinstance(given, bool) and 0 < given < _SECONDS_MAX:
        raise call.mistake(
            f"{what} is {given!r}, which is in 1970 as milliseconds: give datetime(..., tzinfo=UTC), or seconds times 1000"
        )


class Rows(Reading):
    """Rows in memory."""

    def __init__(self, name: str, rows: Sequence[Mapping[str, Any]], schema: pa.Schema, parallelism: int) -> None:
        self.spout_id, self.rows, self.schema, self.parallelism = name, rows, schema, parallelism

    def spout(self, used: Mapping[str, Sequence[str]]) -> Spout:
        names = used[self.spout_id]
        values = [[row.get(name) for name in names] for row in self.rows]
        fields = Fields.of({name: self.schema.field(name).type for name in names})
        dealt = {number: values[number :: self.parallelism] for number in range(self.parallelism)}
        return OpaqueMemoryTransactionalSpout(dealt, fields, TAKE)

    def streams(self) -> Mapping[str, str]:
        return {self.spout_id: DEFAULT_STREAM}
