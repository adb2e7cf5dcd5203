"""The streams of a Kafka spout: one for all topics, or one per topic, each with codecs of its own.

Invariant: a topic belongs to one stream. So a record's topic says how it is decoded, in every
attempt and in every process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal

from framework.errors import ConfigError
from framework.topology import (
    DEAD_LETTER_FIELDS,
    DEAD_LETTER_STREAM,
    DEFAULT_STREAM,
    TOMBSTONE,
    Fields,
    OutputFieldsDeclarer,
)
from spouts.codecs.bad_records import OnBadRecord
from spouts.codecs.codec import Codec
from spouts.kafka.record_deserialization import RecordFilter, RecordFormat
from spouts.kafka.spout_argument_checks import at_least_1, checked_format, checked_topics, fields_of

#: A value that is larger is a bad record. Compressed, it may be a few bytes on the broker.
RECORD_BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True)
class TopicStream:
    """How the records of one topic become the rows of one stream of a Kafka spout.

    ``codec``: decodes the values. ``topic``: None, the default: that of the stream's name.
    ``key_codec``, ``header_codecs``, ``metadata`` and ``on_bad_record``: for this stream, in place
    of what the spout was given. None, the default: as the spout.

    >>> from spouts import BytesCodec, TextCodec
    >>> TopicStream(BytesCodec(), topic="shop.orders", key_codec=TextCodec("order")).topic
    'shop.orders'
    """

    codec: Codec
    _: KW_ONLY
    topic: str | None = None
    key_codec: Codec | None = None
    header_codecs: Mapping[str, Codec] | None = None
    metadata: Sequence[str] | None = None
    on_bad_record: Literal["fail", "skip", "dead_letter"] | None = None


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """A stream: its name, how records become its rows, and what is done with bad ones."""

    stream: str
    records: RecordFormat
    fields: Fields
    on_bad_record: OnBadRecord
    record_bytes_max: int = RECORD_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Streams:
    """All streams of a spout. ``by_topic``: topic -> its stream. Without it, all topics are on
    ``one``. ``bolts_letters``: whether records that bolts refuse may become dead letters, whatever
    their stream says."""

    one: StreamFormat | None
    by_topic: Mapping[str, StreamFormat]
    bolts_letters: bool = False

    def __iter__(self) -> Iterator[StreamFormat]:
        return iter(self.by_topic.values() if self.one is None else (self.one,))

    @property
    def want_dead_letters(self) -> bool:
        """Whether a bad record may become a row of the stream of dead letters."""
        return self.bolts_letters or self.have_dead_letters

    @property
    def have_dead_letters(self) -> bool:
        """Whether records that cannot be decoded become rows, on one of the streams at least."""
        return any(each.on_bad_record is OnBadRecord.DEAD_LETTER for each in self)

    def takes_out(self, topic: str) -> bool:
        """Whether a bad record of this topic is left out, and does not end the run."""
        found = self.one if self.one is not None else self.by_topic.get(topic)
        return found is not None and found.on_bad_record is not OnBadRecord.FAIL

    def has(self, topic: str) -> bool:
        return self.one is not None or topic in self.by_topic

    def for_letters(self) -> Streams:
        """The same streams, where bad records become rows, whatever the user says about them."""

        def changed(its: StreamFormat) -> StreamFormat:
            return replace(its, on_bad_record=OnBadRecord.DEAD_LETTER)

        one = changed(self.one) if self.one is not None else None
        return replace(self, one=one, by_topic={topic: changed(its) for topic, its in self.by_topic.items()})

    def of(self, topic: str) -> StreamFormat:
        """Raises ``ConfigError`` for a topic without a stream: it had one when its records were
        planned."""
        found = self.one if self.one is not None else self.by_topic.get(topic)
        if found is None:
            raise ConfigError(
                f"topic {topic!r} has no stream in the spout's streams=, and a transaction that is not closed has records "
                "of it; give it back until that transaction is committed"
            )
        return found

    def with_tombstones(self, stream: str) -> Streams:
        """The same streams, where the rows of this one say last whether the record is a tombstone.
        These streams themselves where nothing changes: its rows say so, or lack the record's
        key."""

        def changed(its: StreamFormat) -> StreamFormat:
            records = its.records
            has_key = records.key is not None or "key" in records.metadata
            if its.stream != stream or not has_key or TOMBSTONE in its.fields:
                return its
            told = replace(records, metadata=(*records.metadata, TOMBSTONE))
            return replace(its, records=told, fields=told.fields())

        made = replace(
            self,
            one=changed(self.one) if self.one is not None else None,
            by_topic={topic: changed(its) for topic, its in self.by_topic.items()},
        )
        return made if made != self else self

    def where(self, filters: Mapping[str, RecordFilter]) -> Streams:
        """The same streams, of which some decode the values of some records only."""

        def changed(its: StreamFormat) -> StreamFormat:
            found = filters.get(its.stream)
            return its if found is None else replace(its, records=replace(its.records, where=found))

        return replace(
            self,
            one=changed(self.one) if self.one is not None else None,
            by_topic={topic: changed(its) for topic, its in self.by_topic.items()},
        )

    def declare(self, declarer: OutputFieldsDeclarer, *, dead_letters: bool) -> None:
        for each in self:
            declarer.declare(each.fields, each.stream)
        if dead_letters:
            declarer.declare(DEAD_LETTER_FIELDS, DEAD_LETTER_STREAM)

    def fields(self) -> Fields:
        """The fields of the only stream. Raises ``ConfigError`` where there are several."""
        only, *others = self
        if others:
            raise ConfigError(f"the spout has several streams: {', '.join(each.stream for each in self)}; name one")
        return only.fields


def checked_streams(
    streams: Mapping[str, Codec | TopicStream] | None,
    *,
    codec: Codec | None,
    key_codec: Codec | None,
    header_codecs: Mapping[str, Codec] | None,
    metadata: Sequence[str],
    on_bad_record: str,
    record_bytes_max: int = RECORD_BYTES_MAX,
) -> Streams:
    """The streams that a spout's arguments say. Raises ``ConfigError`` naming what is wrong."""
    general = OnBadRecord.of(on_bad_record)
    at_least_1("record_bytes_max", record_bytes_max)
    if streams is None:
        records = checked_format(codec, key_codec, header_codecs, metadata)
        return Streams(StreamFormat(DEFAULT_STREAM, records, fields_of(records), general, record_bytes_max), {})
    if codec is not None:
        raise ConfigError("a Kafka spout with streams={...} has a codec for each topic: leave codec= out")
    made: dict[str, StreamFormat] = {}
    for stream, given in streams.items():
        if stream == DEAD_LETTER_STREAM:
            raise ConfigError(
                f"a stream cannot be called {DEAD_LETTER_STREAM!r}, which is that of the dead letters: call it otherwise, "
                f"and say TopicStream(..., topic={DEAD_LETTER_STREAM!r})"
            )
        its = given if isinstance(given, TopicStream) else TopicStream(given)
        topic = _topic(stream, given)
        if topic in made:
            raise ConfigError(f"streams {made[topic].stream!r} and {stream!r} are both of topic {topic!r}: keep one")
        try:
            records = checked_format(
                _codec(its.codec),
                its.key_codec if its.key_codec is not None else key_codec,
                its.header_codecs if its.header_codecs is not None else header_codecs,
                its.metadata if its.metadata is not None else metadata,
            )
            fields = fields_of(records)
            on_bad = OnBadRecord.of(its.on_bad_record) if its.on_bad_record is not None else general
        except ConfigError as error:
            raise ConfigError(f"streams[{stream!r}]: {error}") from None
        made[topic] = StreamFormat(stream, records, fields, on_bad, record_bytes_max)
    return Streams(None, made)


def checked_source(
    topics: Sequence[str], pattern: str | None, streams: Mapping[str, Codec | TopicStream] | None
) -> tuple[str, ...]:
    """The topics to read; none, if a pattern says which. Raises ``ConfigError``."""
    if streams is None:
        return checked_topics(topics, pattern)
    if topics or pattern is not None:
        raise ConfigError("streams={...} names the topics: leave topics= and pattern= out")
    if not isinstance(streams, Mapping) or not streams:
        raise ConfigError(f"streams must be a mapping of streams to codecs, and not empty; it is {streams!r}")
    checked_topics(list(streams), None)  # streams are named as topics are
    return checked_topics([_topic(stream, given) for stream, given in streams.items()], None)


def checked_read_first(read_first: Sequence[str], topics: Sequence[str]) -> tuple[str, ...]:
    """The topics to read first. ``topics``: all; none, if a pattern says which. Raises
    ``ConfigError``."""
    if isinstance(read_first, str):
        raise ConfigError(f"read_first is {read_first!r}: give a list of topics")
    if read_first and not topics:
        raise ConfigError("read_first needs all topics by name: give topics= or streams= instead of pattern=")
    for each in read_first:
        if each not in topics:
            raise ConfigError(f"read_first names topic {each!r}, and the spout reads {', '.join(sorted(topics))}")
    if read_first and set(topics) == set(read_first):
        raise ConfigError("read_first names every topic: name only those that the others wait for")
    return tuple(read_first)


def _topic(stream: str, given: Codec | TopicStream) -> str:
    return given.topic if isinstance(given, TopicStream) and given.topic is not None else stream


def _codec(given: object) -> Codec:
    if not isinstance(given, Codec):
        raise ConfigError(f"give a Codec or a TopicStream, such as TextCodec(), not {given!r}")
    return given
