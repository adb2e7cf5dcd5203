"""The Kafka spouts of transactional topologies: their parameters, and the two kinds, idempotent and
opaque."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Literal, Self, Union

from framework.clients.kafka_settings import KafkaSettings
from framework.errors import ConfigError
from framework.topology import (
    Bolt,
    Fields,
    OpaquePartitionedTransactionalSpout,
    OutputFieldsDeclarer,
    PartitionedTransactionalSpout,
    PartitionPlanner,
    PartitionReader,
    ReadTopics,
    TopologyContext,
    WrittenTopic,
)
from spouts.codecs.bad_records import BadRecordShare, BadRecordShares, OnBadRecord
from spouts.codecs.codec import Codec
from spouts.kafka.cluster_metadata import check_settings
from spouts.kafka.consumer.consumer_pool import reader_of, say_fallback, say_reader, sessions
from spouts.kafka.consumer.native_range_consumer import why_not_native
from spouts.kafka.group_offsets import GroupOffsets
from spouts.kafka.planning.batch_limits import KafkaLimits
from spouts.kafka.planning.planner import KafkaPlanner
from spouts.kafka.planning.source_settings import KafkaSource
from spouts.kafka.planning.source_transactions import TRANSACTIONS
from spouts.kafka.planning.topic_loops import OwnTopics
from spouts.kafka.reader import KafkaReader
from spouts.kafka.record_deserialization import RecordFilter
from spouts.kafka.spout_argument_checks import above_0, at_least_1, checked_group
from spouts.kafka.start_end_options import check_order, checked_bounds
from spouts.kafka.topic_streams import (
    RECORD_BYTES_MAX,
    TopicStream,
    checked_read_first,
    checked_source,
    checked_streams,
)

#: Records per batch while there is a backlog. At this size the cost of a job hardly matters, and a
#: replay repeats only seconds.
BATCH_RECORDS_MAX = 500_000
#: The topology stops if more than this share of the latest records is bad.
BAD_RECORD_SHARE_MAX = 0.1
#: Processing one batch should take at most this share of ``topology.message.timeout.secs``.
_TIMEOUT_SHARE = 1 / 3


#: Where reading begins or ends. In a mapping, keys are topics, or partitions as ``"topic/0"``, and
#: the int of a partition is an offset.
Start = Union[str, int, datetime.datetime, Mapping[Any, Any]]


class _KafkaSpout:
    """The parameters of both kinds.

    **Which records.** ``topics``: names. ``pattern``: a regular expression that whole names must
    match. Give one of the two. Topics and partitions that appear later are read from their
    beginning. ``start``: where a new topology begins: "earliest", "latest", milliseconds since
    1970, or a ``datetime`` with a zone; or a mapping of topics to these, or of partitions to
    offsets, such as ``{"orders/0": 500, "orders/1": "latest"}``. A resumed topology ignores it.
    ``start_group``: a new topology begins where this consumer group has committed; partitions of
    which it has no offset begin at ``start``. ``read_first``: topics that are tables, such as
    customers. A new topology reads them from their beginning, whatever ``start`` says, to their
    present end, before the first record of the other topics.

    **The end.** ``end``: where reading ends: "latest" (what is there at the first start), a past
    time (the records before the first one of this time or later), or a mapping as for ``start``.
    The ends are fixed at the first start and stored; partitions that appear later are not read. A
    topology that has committed everything up to the ends is finished, and ends. With another
    ``end``, a later start continues to that end; without ``end``, it continues indefinitely.

    **Transactions of the source.** ``keep_transactions``: the records are changes that Debezium
    writes with ``provide.transaction.metadata=true``, and a batch has all changes of a transaction
    of the source, or none, whatever its size. The topic ``<topic.prefix>.transaction`` must be
    among those that are read. Each record is read twice, once by the driver.

    **Rows.** ``codec`` decodes values (by default: the bytes as they are); its fields come first.
    Then come the fields of ``key_codec`` and of ``header_codecs`` (header name -> codec; the last
    header of a name counts, a missing header is null). ``metadata`` comes last: any of ``topic``,
    ``partition``, ``offset``, ``timestamp_ms``, ``headers``, ``tombstone`` (whether the value is
    null), and ``key`` and ``value`` as they are.

    **Several topics with a codec each.** ``streams``, in place of ``topics`` and ``codec``: stream
    -> the codec of the topic of this name, or a ``TopicStream`` with more options. There is no
    default stream then: bolts subscribe with ``stream="orders"``. A batch holds records of all
    topics, and the limits and the dead letters are those of the whole spout.

    **How much at a time.** ``batch_records_max`` and ``partition_records_max`` limit a batch
    exactly, in offsets. ``batch_bytes_max`` (bytes of values) and ``batch_time_max_s`` (seconds of
    processing; by default a third of ``topology.message.timeout.secs``) are targets: the spout
    estimates them from the size and time of earlier records. A batch of which a task reads a third
    more bytes than that, or more than 128 MiB of rows, is planned again in halves.

    **What goes wrong.** ``on_data_loss``: offsets that are gone before they were read (retention, a
    truncated log, a topic that was created again, another cluster) stop the topology ("fail"), or
    are skipped and counted ("skip"). ``on_bad_record``: a record that cannot be decoded stops the
    topology ("fail"), is counted and left out ("skip"), or goes to ``dead_letters`` under the same
    txid ("dead_letter"). The same applies to a record whose value a bolt or a sink refuses by a
    ``BadRecordError``, unless that bolt has its own ``on_bad_record``. ``dead_letters``: a
    committer such as ``sinks.DeadLetterTable`` or ``sinks.DeadLetterTopic``. A share of bad records
    of a stream above ``bad_record_share_max`` always stops the topology (None: never). A value of
    more than ``record_bytes_max`` bytes is a bad record; compressed, it may have had only a few
    bytes on the broker.

    **Clients.** ``bootstrap_servers``, and ``settings`` of librdkafka, such as security. Both may
    also come from the configuration's ``kafka.*`` keys; the values given here win. Settings that
    would break a guarantee are refused. ``consumer_group``: publish the committed offsets to this
    group, for tools that show lag. Ratchet does not read them back.
    """

    _waits_for_leaders: bool

    def __init__(
        self,
        topics: Sequence[str] = (),
        *,
        bootstrap_servers: str | None = None,
        pattern: str | None = None,
        streams: Mapping[str, Codec | TopicStream] | None = None,
        codec: Codec | None = None,
        key_codec: Codec | None = None,
        header_codecs: Mapping[str, Codec] | None = None,
        metadata: Sequence[str] = (),
        start: Start = "earliest",
        end: Start | None = None,
        start_group: str | None = None,
        read_first: Sequence[str] = (),
        keep_transactions: bool = False,
        batch_records_max: int = BATCH_RECORDS_MAX,
        partition_records_max: int | None = None,
        batch_bytes_max: int | None = None,
        batch_time_max_s: float | None = None,
        on_data_loss: Literal["fail", "skip"] = "fail",
        on_bad_record: Literal["fail", "skip", "dead_letter"] = "fail",
        dead_letters: Bolt | None = None,
        bad_record_share_max: float | None = BAD_RECORD_SHARE_MAX,
        record_bytes_max: int = RECORD_BYTES_MAX,
        consumer_group: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if on_data_loss not in ("fail", "skip"):
            raise ConfigError(f"on_data_loss must be 'fail' or 'skip', not {on_data_loss!r}")
        names = checked_source(topics, pattern, streams)
        tables = checked_read_first(read_first, names)
        self._source = KafkaSource(
            names,
            pattern,
            checked_bounds("start", start, names, without=tables, words=("earliest", "latest")),
            on_data_loss == "skip",
            waits_for_leaders=self._waits_for_leaders,
            read_first=tables,
            start_group=checked_group("start_group", start_group) if start_group is not None else None,
            end=checked_bounds("end", end, names, words=("latest",)) if end is not None else None,
            keeps_transactions=keep_transactions,
        )
        if keep_transactions:
            others = {"end": end, "read_first": read_first, "partition_records_max": partition_records_max}
            _check_transactions(names, others)
        if self._source.end is not None:
            check_order(self._source.start, self._source.end)
        self._settings = KafkaSettings(bootstrap_servers, settings)
        checked = checked_streams(
            streams,
            codec=codec,
            key_codec=key_codec,
            header_codecs=header_codecs,
            metadata=metadata,
            on_bad_record=on_bad_record,
            record_bytes_max=record_bytes_max,
        )
        self._streams = replace(checked, bolts_letters=dead_letters is not None)
        self._limits = KafkaLimits(
            at_least_1("batch_records_max", batch_records_max),
            at_least_1("partition_records_max", partition_records_max) if partition_records_max is not None else None,
            at_least_1("batch_bytes_max", batch_bytes_max) if batch_bytes_max is not None else None,
            above_0("batch_time_max_s", batch_time_max_s) if batch_time_max_s is not None else None,
        )
        self._dead_letters = dead_letters
        if dead_letters is None and self._streams.have_dead_letters:
            raise ConfigError(
                "on_bad_record='dead_letter' needs dead_letters=: name the committer that takes the records, such as "
                "sinks.DeadLetterTable or sinks.DeadLetterTopic"
            )
        BadRecordShare(bad_record_share_max)  # checks the value; each leader creates its own
        self._bad_record_share_max = bad_record_share_max
        self._consumer_group = checked_group("consumer_group", consumer_group) if consumer_group is not None else None
        self._native_on_driver = False  # known to the copies that are sent to tasks

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_native_on_driver": self._native_on_driver or why_not_native() is None}

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        self._streams.declare(declarer, dead_letters=self._dead_letters is not None)

    def output_fields(self) -> Fields:
        """The fields of the only stream. Raises ``ConfigError`` if there are several."""
        return self._streams.fields()

    def with_tombstones(self, stream: str) -> Self:
        streams = self._streams.with_tombstones(stream)
        if streams is self._streams:
            return self
        changed = copy(self)
        changed._streams = streams
        return changed

    def where(self, filters: Mapping[str, RecordFilter]) -> Self:
        """This spout, which gives only those records of a stream that its filter keeps, and does
        not decode the values of the others."""
        changed = copy(self)
        changed._streams = self._streams.where(filters)
        return changed

    def leaves_out_bad_records(self, stream: str) -> bool:
        return any(each.stream == stream and each.on_bad_record is not OnBadRecord.FAIL for each in self._streams)

    def dead_letters(self) -> Bolt | None:
        return self._dead_letters

    @property
    def has_dead_letters(self) -> bool:
        return self._streams.have_dead_letters

    def check_before_start(self, conf: Mapping[str, Any]) -> None:
        settings = self._settings.with_conf(conf)
        reader_of(settings)
        check_settings(settings)

    def check_written_topics(self, conf: Mapping[str, Any], written: Sequence[WrittenTopic]) -> None:
        if written:
            settings = self._settings.with_conf(conf)
            OwnTopics(settings, self._source.topics, self._source.pattern, written, conf).check_names()

    def read_topics(self) -> ReadTopics:
        return ReadTopics(tuple(self._source.topics), self._source.pattern, self._settings)

    def planner(self, conf: Mapping[str, Any], context: TopologyContext) -> PartitionPlanner:
        settings = self._settings.with_conf(conf)
        say_reader(settings)
        waits_for_open = conf.get("topology.open.transactions") == "wait"
        return KafkaPlanner(
            replace(self._source, waits_for_open=waits_for_open),
            settings,
            self._limits.with_time(float(conf.get("topology.message.timeout.secs", 30.0)) * _TIMEOUT_SHARE),
            bad_records=BadRecordShares(self._bad_record_share_max),
            streams=self._streams,
            group=GroupOffsets(settings, self._consumer_group) if self._consumer_group is not None else None,
            reader_group=_reader_group(context),
        )

    def reader(self, conf: Mapping[str, Any], context: TopologyContext) -> PartitionReader:
        settings = self._settings.with_conf(conf)
        if self._native_on_driver:
            say_fallback(settings)
        return KafkaReader(
            settings,
            _reader_group(context),
            self._streams,
            context.task_index,
            batch_bytes_max=self._limits.batch_bytes_max,
            divides=not self._source.keeps_transactions,
        )

    @property
    def is_shared(self) -> bool:
        """Readers change nothing but what codecs remember, such as schemas of a registry."""
        return type(self).reader is _KafkaSpout.reader  # another one may hold more

    @property
    def replays_letters(self) -> bool:
        return type(self).reader is _KafkaSpout.reader  # another one may not read them

    def release(self) -> None:
        sessions.close()


def _check_transactions(topics: Sequence[str], others: Mapping[str, Any]) -> None:
    """Refuse options that cannot be combined with ``keep_transactions``."""
    given = next((name for name, each in others.items() if each), None)
    if given is not None:
        raise ConfigError(f"keep_transactions and {given} cannot be had together: {given} would divide transactions")
    if topics and not any(each.endswith(TRANSACTIONS) for each in topics):
        raise ConfigError(
            f"keep_transactions needs the topic <topic.prefix>{TRANSACTIONS} among the topics, which Debezium writes with "
            "provide.transaction.metadata=true"
        )


def _reader_group(context: TopologyContext) -> str:
    """The group id of the readers. Nothing is committed to this group."""
    return f"ratchet-{context.topology_id}"


class KafkaTransactionalSpout(_KafkaSpout, PartitionedTransactionalSpout):
    """Idempotent: a replayed batch has the same records, in the same order per partition.

    While a partition has no leader, the topology waits for it. If a planned range is lost before it
    is committed, the topology ends, whatever ``on_data_loss`` says, because an idempotent batch can
    only be replayed unchanged.

    Source: ``org.apache.storm.kafka.spout.trident.KafkaTridentSpoutTransactional``.
    """

    _waits_for_leaders = True


class OpaqueKafkaTransactionalSpout(_KafkaSpout, OpaquePartitionedTransactionalSpout):
    """Opaque: a batch that failed before its commit was opened is planned again, without partitions
    that are unavailable. Needs opaque states.

    Source: ``org.apache.storm.kafka.spout.trident.KafkaTridentSpoutOpaque``.
    """

    _waits_for_leaders = False
