"""Transactional spouts: plan a batch on the driver, read it in tasks.

On the driver, ``plan`` decides what each partition contributes, quickly and in txid order. In Spark
tasks, ``read`` then delivers exactly the planned records, however often it is called. A plan is
persisted before it is read, so that a replay reads the same records.

There are three kinds. They are separate types because their guarantees differ:

* ``TransactionalSpout``, the general one: a coordinator on the driver chooses any metadata for a
  batch. All emitters, in any number of tasks, get that metadata, and emit the same tuples for it
  every time.
* ``PartitionedTransactionalSpout``: a plan never changes. An unavailable partition delays its
  transaction.
* ``OpaquePartitionedTransactionalSpout``: a failed batch whose commit was not opened is planned
  again, from the end of the preceding batch. An unavailable partition contributes nothing
  meanwhile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple, Self, Union

import pyarrow as pa

from framework.errors import TopologyError
from framework.topology.attempt import TransactionAttempt
from framework.topology.bolts import DEFAULT_STREAM, Bolt, OutputCollector, OutputFieldsDeclarer
from framework.topology.context import TopologyContext
from framework.topology.dead_letters import Letter
from framework.topology.fields import Fields
from framework.topology.range_operations import Meta as Meta
from framework.topology.range_operations import SourceRanges
from framework.topology.written_topics import ReadTopics, WrittenTopic

#: The hidden stream for records that a spout cannot decode, when the user asked for dead letters.
DEAD_LETTER_STREAM = "dead_letters"

#: A dead letter: the record's coordinates, the error, and its raw bytes.
#:
#: ``topic_id`` tells a topic from an earlier one of the same name. ``key``, ``value`` and the
#: values of ``headers`` are unchanged from the source. ``attempts``: how often the letter was
#: replayed and refused again. ``settled``: null for a letter; otherwise the row ends the letter
#: with these coordinates, and says how. ``kept_in``: the partition of a topic of letters that has
#: the letter already; null for a new one.
DEAD_LETTER_FIELDS = Fields.of(
    {
        "topic_id": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "topic": pa.string(),
        "timestamp_ms": pa.int64(),
        "error": pa.string(),
        "key": pa.binary(),
        "value": pa.binary(),
        "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
        "attempts": pa.int32(),
        "settled": pa.string(),
        "kept_in": pa.int32(),
    }
)
#: The ways in which a letter ends.
REPLAYED, DROPPED = "replayed", "dropped"


@dataclass(slots=True)
class ReadCounts:
    """The counts of the records read for a batch.

    * ``records``: includes those that could not be decoded.
    * ``bytes``: of keys and values, in the source's form.
    * ``row_bytes``: of the rows of the task that made the most, in Arrow, if the reader counts
      them.
    * ``bad_records``: those that could not be decoded.
    * ``oldest_ms``, ``newest_ms``: the times of the oldest and the newest record, in milliseconds
      since the Unix epoch, as far as the reader checked them; None when it did not.
    * ``streams``: stream -> its records and those of them that could not be decoded, if the reader
      counts them.
    * ``absent``: stream -> the declared fields that none of its records has, if the reader checked.
    * ``schemas``: the schemas of registries that the records name, each with the digest of its
      content; "" where the registry does not have it.
    """

    records: int = 0
    bytes: int = 0
    bad_records: int = 0
    oldest_ms: int | None = None
    newest_ms: int | None = None
    _: KW_ONLY
    row_bytes: int = 0
    streams: dict[str, tuple[int, int]] = field(default_factory=dict)
    absent: dict[str, frozenset[str]] = field(default_factory=dict)
    schemas: set[tuple[str, str]] = field(default_factory=set)

    def add(self, other: ReadCounts) -> None:
        self.records += other.records
        self.bytes += other.bytes
        self.row_bytes = max(self.row_bytes, other.row_bytes)
        self.bad_records += other.bad_records
        if other.oldest_ms is not None and other.newest_ms is not None:
            self.sampled(other.oldest_ms, other.newest_ms)
        for stream, (records, bad_records) in other.streams.items():
            self.on_stream(stream, records, bad_records)
        for stream, fields in other.absent.items():
            self.without(stream, fields)
        self.schemas |= other.schemas

    def without(self, stream: str, fields: frozenset[str]) -> None:
        """Note that some records of a stream lack these fields, and have all others."""
        self.absent[stream] = self.absent.get(stream, fields) & fields

    def on_stream(self, stream: str, records: int, bad_records: int) -> None:
        """Count records of one stream, which ``records`` and ``bad_records`` already include."""
        known = self.streams.get(stream, (0, 0))
        self.streams[stream] = known[0] + records, known[1] + bad_records

    def sampled(self, oldest_ms: int, newest_ms: int) -> None:
        """Add the times of some of the records."""
        self.oldest_ms = oldest_ms if self.oldest_ms is None else min(self.oldest_ms, oldest_ms)
        self.newest_ms = newest_ms if self.newest_ms is None else max(self.newest_ms, newest_ms)


@dataclass(frozen=True, slots=True)
class PartitionProgress:
    """The progress of one partition. An offset is that of the next record.

    * ``end_offset``: the end that the source last reported, or None when it has not reported one.
    * ``committed_offset``: the end of the last committed transaction.
    * ``in_flight``: number of offsets that are planned and not committed.
    * ``lost_records``: number of offsets, since the positions began, that the source lost before
      they were read, and that were skipped.
    * ``open_records``: number of offsets after ``end_offset`` that no consumer may read yet,
      because a kafka_txn of their producer is open.
    """

    end_offset: int | None
    committed_offset: int
    in_flight: int = 0
    lost_records: int = 0
    open_records: int = 0

    @property
    def lag(self) -> int | None:
        """The number of offsets between the committed one and the end, including those that no
        consumer may read yet; None when the end is unknown."""
        return None if self.end_offset is None else max(self.end_offset - self.committed_offset, 0) + self.open_records


#: The field of rows that says whether their record has no value.
TOMBSTONE = "tombstone"
#: The names of the columns that a pipeline adds for itself begin with this.
HIDDEN = "ratchet:"
#: Fields with topic, partition and time of the record of a row, for event time.
RECORD_FIELDS: Mapping[str, pa.DataType] = {
    f"{HIDDEN}topic": pa.string(),
    f"{HIDDEN}partition": pa.int32(),
    f"{HIDDEN}timestamp_ms": pa.timestamp("ms", "UTC"),
}


class Spout(ABC):
    """The base of all spouts of a transactional topology."""

    #: True promises that a replay delivers the same rows, in the same order within each partition.
    deterministic: bool

    def output_fields(self) -> Fields:
        """The fields of the default stream."""
        raise TopologyError(
            f"{type(self).__name__} declares no fields: write output_fields() or declare_output_fields()"
        )

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        """Called once, on the driver, by the builder. The default declares ``output_fields()`` on
        the default stream."""
        declarer.declare(self.output_fields())

    def check_before_start(self, conf: Mapping[str, Any]) -> None:
        """Called by ``submit`` before anything starts. Raises ``ConfigError`` for a configuration
        with which this spout cannot run."""

    def check_written_topics(self, conf: Mapping[str, Any], written: Sequence[WrittenTopic]) -> None:
        """Called by ``submit`` before anything starts, with the topics that the topology writes.
        Raises ``ConfigError`` if this spout reads one of them."""

    def read_topics(self) -> ReadTopics | None:
        """Return the topics that this spout reads, or None. Called once, on the driver, by the
        builder. A sink that routes rows by their fields refuses to write there."""
        return None

    def with_tombstones(self, stream: str) -> Self:
        """Return a copy whose rows of the stream have a last field ``tombstone``, a truth value:
        whether the record has a key and no value. Called once, on the driver, by the builder, where
        a bolt of the stream has ``tombstone_keys``. The default returns the spout itself, because
        its source has no tombstones; so does one whose rows have the field, or not the record's
        key."""
        return self

    def dead_letters(self) -> Bolt | None:
        """Return the committer of the records that this spout cannot decode, or None.

        The builder adds it to the topology as ``<spout id>-dead-letters``, with a global grouping
        on the stream ``DEAD_LETTER_STREAM``. The spout must then declare that stream with
        ``DEAD_LETTER_FIELDS``.
        """
        return None

    @property
    def has_dead_letters(self) -> bool:
        """Whether records that this spout cannot decode become dead letters. False if only bolts
        use ``dead_letters()``, by their ``on_bad_record``."""
        return self.dead_letters() is not None

    def leaves_out_bad_records(self, stream: str) -> bool:
        """Whether a record of this stream is left out if a bolt refuses its value: the user set
        ``on_bad_record="skip"`` or ``"dead_letter"``. Tests over lists ask for it."""
        return False

    def release(self) -> None:
        """Called in the driver's process when a run has ended. Close resources that readers in this
        process have kept open."""


class TransactionalSpoutCoordinator(ABC):
    """Chooses the metadata of batches. Lives on the driver, one per leader, used from one
    thread."""

    @abstractmethod
    def initialize_transaction(self, txid: int, previous_metadata: Any) -> Any:
        """Return the metadata of batch ``txid``: anything JSON-able. It is persisted before the
        batch is first emitted, and every replay gets the same metadata.

        ``previous_metadata`` is that of ``txid - 1``, or None for the first. Called once per txid,
        unless the driver ends before the metadata is persisted. Raises ``RetryableError`` when the
        source does not answer.
        """

    def is_ready(self) -> bool:
        """Return False to delay the next batch; the framework asks again soon. A run counts as
        caught up when this is False and no batch is in flight."""
        return True

    def record_count(self, metadata: Any) -> int | None:
        """An upper bound of the records in a batch, or None when unknown. Small batches run in one
        task."""
        return None

    def close(self) -> None:
        """Release connections. Safe to call twice."""


class TransactionalSpoutEmitter(ABC):
    """Emits its task's part of a batch. Lives in a task. A copy of the spout makes one per attempt
    and task."""

    @abstractmethod
    def emit_batch(self, attempt: TransactionAttempt, metadata: Any, collector: OutputCollector) -> None:
        """Emit this task's part of the batch: for the same ``metadata``, the same tuples in the
        same order, whatever the attempt. The context given to ``emitter`` identifies the part:
        ``task_index`` of ``task_count``."""

    def cleanup_before(self, txid: int) -> None:
        """Delete data that was stored outside of this object for batches below ``txid``: they are
        committed and will not be emitted again. Called once per attempt and task, before
        ``emit_batch``; best effort."""

    def close(self) -> None:
        """Called at the end of the attempt's emission."""


class TransactionalSpout(Spout):
    """The general idempotent spout: one coordinator with its own metadata, and any number of
    emitters.

    >>> class Numbers(TransactionalSpout):
    ...     def coordinator(self, conf, context): return HundredAtATime()
    ...     def emitter(self, conf, context): return Share(context)
    ...     def output_fields(self): return Fields(number=int)
    >>> class HundredAtATime(TransactionalSpoutCoordinator):
    ...     def initialize_transaction(self, txid, previous_metadata):
    ...         first = previous_metadata["next"] if previous_metadata else 0
    ...         return {"first": first, "next": first + 100}
    >>> class Share(TransactionalSpoutEmitter):
    ...     def __init__(self, context): self.context = context
    ...     def emit_batch(self, attempt, metadata, collector):
    ...         first = metadata["first"] + self.context.task_index
    ...         for number in range(first, metadata["next"], self.context.task_count):
    ...             collector.emit([number])
    >>> HundredAtATime().initialize_transaction(2, {"first": 0, "next": 100})
    {'first': 100, 'next': 200}

    Source: ``org.apache.storm.transactional.ITransactionalSpout``. There, emitters live as long as
    their task. Here, one is made for each attempt, because a task on Spark ends with its batch.
    """

    deterministic = True

    @abstractmethod
    def coordinator(self, conf: Mapping[str, Any], context: TopologyContext) -> TransactionalSpoutCoordinator:
        """Called on the driver, once per leader."""

    @abstractmethod
    def emitter(self, conf: Mapping[str, Any], context: TopologyContext) -> TransactionalSpoutEmitter:
        """Called in tasks, on an unpickled copy of the spout."""


#: In an entry of a plan: the offsets of records that are left out, ascending, because of an
#: ``undo``, or because their values were refused.
LEFT_OUT = "left_out"
#: In an entry of a plan: the offset before which ``LEFT_OUT`` no longer lists all left-out records
#: (absent: it lists all), because the lists are bounded.
LEFT_OUT_FROM = "left_out_from"
#: In an entry of a plan: offset, as text, -> reason, for those records of its own range whose
#: values were refused. Not copied to the next plan.
REFUSED = "refused"
#: In an entry of a plan with ``REFUSED``: the ``on_bad_record`` of the bolt that refused them, if
#: that is not "fail". Without it, that of the spout applies.
ON_REFUSED = "on_refused"
#: In an entry that a probe reads: the entry of the whole batch, whose other parts are read next, so
#: that a reader may keep what it fetches. Stored plans never have it.
PART_OF = "part_of"
#: In an entry of a plan of a bounded source, in addition to ``next_offset``: where reading ends.
END_OFFSET = "end_offset"


def is_read_to_end(meta: Meta) -> bool:
    """Whether an entry of a plan is the last one of its partition."""
    return END_OFFSET in meta and int(meta["next_offset"]) >= int(meta[END_OFFSET])


def leaving_out_too(meta: Meta, other: Meta | None) -> Meta:
    """``meta``, extended by the records that ``other``, an entry of the same partition before or
    after it, leaves out. The records that ``meta`` leaves out must be among them, or forgotten."""
    known = other if other is not None else {}
    carried = {each: known[each] for each in (LEFT_OUT, LEFT_OUT_FROM) if known.get(each)}
    return {**meta, **carried} if carried else meta


def without_refused(meta: Meta) -> Meta:
    """The entry as before any value in its range was refused."""
    if REFUSED not in meta:
        return meta
    left_out = [offset for offset in meta[LEFT_OUT] if str(offset) not in meta[REFUSED]]
    bare = {key: value for key, value in meta.items() if key not in (LEFT_OUT, REFUSED, ON_REFUSED)}
    return {**bare, LEFT_OUT: left_out} if left_out else bare


class Backlog(NamedTuple):
    """The unread records of a source. ``size_bytes``: an estimate; None when unknown."""

    records: int
    size_bytes: int | None = None


class PartitionPlanner(ABC):
    """Plans batches. Lives on the driver, one at a time, used from one thread."""

    #: Whether plans share entries with earlier plans. Then neither a plan nor an entry may be
    #: changed after it was returned. Otherwise, the framework copies plans in both directions.
    shares_entries = False
    #: The most records that the next plan may have; None: no limit. The framework sets it before
    #: each ``plan``. If a planner exceeds it, later plans are delayed.
    records_max: int | None = None

    @abstractmethod
    def partitions(self) -> list[str]:
        """The ids of all partitions known now. The list may grow."""

    def is_ready(self) -> bool:
        """Return False to delay the next batch."""
        return True

    def resume(self, plan: Mapping[str, Meta]) -> None:
        """Called before the first ``plan`` when a former leader has made a plan of the next
        transaction to commit. That plan may be replayed, or be planned again: a planner that fixes
        settings in the first plan of a topology takes them from it. No I/O."""

    def finished(self, plan: Mapping[str, Meta]) -> bool:
        """Return True when no plan follows ``plan``: the source is bounded, and is read to its end.
        The topology ends when such a plan is committed. No I/O. Called from any thread."""
        return False

    @abstractmethod
    def plan(self, previous: Mapping[str, Meta | None]) -> Mapping[str, Meta] | None:
        """Decide what each partition contributes to the batch after ``previous``.

        ``previous`` has an entry for each partition ever planned; it is empty for the first batch
        of a topology. The plan must have an entry for each of those partitions too, with an empty
        range if a partition contributes nothing, and may have new ones. Return None when there are
        no new records; the framework asks again. Raises ``RetryableError`` when the source does not
        answer, and ``DataLossError`` when it is no longer the source of ``previous``.
        """

    def plan_smaller(self, previous: Mapping[str, Meta | None], divisor: int) -> Mapping[str, Meta] | None:
        """As ``plan``, for a batch that has timed out: plan about ``divisor`` times fewer records
        than usual, if the source can (C18). Called only for opaque spouts."""
        return self.plan(previous)

    def empty_plan(self, previous: Mapping[str, Meta | None]) -> Mapping[str, Meta] | None:
        """Return the batch after ``previous`` in which no partition contributes any records, or
        None when this source cannot make one. For topologies that need a batch even when the source
        is idle."""
        return None

    def backlog(self, previous: Mapping[str, Meta | None]) -> Backlog | None:
        """Estimate how much a plan after ``previous`` could contain. None, the default, when this
        source cannot tell. Raises ``RetryableError`` when the source does not answer. Called while
        a plan waits for ``topology.commit.records.min`` or ``bytes.min``."""
        return None

    def watch(self, arrived: Callable[[], None]) -> bool:
        """Called repeatedly while ``plan`` returns None. Arrange that ``arrived`` is called once,
        from any thread, soon after there may be more than ``plan`` has seen, and return True
        immediately: the framework then asks less often. While a call is already arranged, do
        nothing more. A needless call of ``arrived`` only costs a ``plan``. The default returns
        False: not supported."""
        return False

    @property
    def skips_lost_data(self) -> bool:
        """Whether ``plan`` continues after the records that the source has lost, instead of raising
        ``DataLossError``: the user said ``on_data_loss="skip"``."""
        return False

    def avoid(self, written: Sequence[WrittenTopic], conf: Mapping[str, Any]) -> None:
        """Called once, before the first plan, with the topics that the topology writes. From then
        on, raise ``ConfigError`` instead of planning one of them, even one that appears later. No
        I/O."""

    def mutable(self, partitions: Collection[str]) -> Mapping[str, str]:
        """Return those of ``partitions`` whose planned ranges may hold fewer records when they are
        read again, each with the reason, such as "topic 'x' is compacted".

        Called at the start and before the first batch of a new partition, when the topology has
        sinks that skip replays (C5). Raises ``RetryableError`` when the source does not answer.
        """
        return {}

    def confirm(self, plan: Mapping[str, Meta]) -> None:
        """Called after a batch was read and before it may commit, in a thread of its own. Check
        that the records read are those of the plan, if the reader cannot tell. Raises
        ``DataLossError`` when they are not."""

    def lost(self, plan: Mapping[str, Meta]) -> None:
        """Called when reading ``plan`` has failed with a ``DataLossError``, before it is planned
        again. Cached data about the source may be outdated. No I/O."""

    def processed(self, plan: Mapping[str, Meta], read: ReadCounts, elapsed_s: float) -> None:
        """Called after a processing phase has succeeded, before its commit, so that the planner can
        learn from it. No I/O. Raises ``BadRecordError`` to stop the topology."""

    def committed(self, plan: Mapping[str, Meta]) -> None:
        """Called in the planner's thread after a batch has been durably closed. When batches follow
        quickly, only the last one may be reported; after a crash, none. Use it to inform others,
        never for correctness."""

    def record_count(self, plan: Mapping[str, Meta]) -> int | None:
        """An upper bound of the records in a plan, or None when unknown. Small batches run in one
        task."""
        return None

    def record_counts(self, plan: Mapping[str, Meta]) -> Mapping[str, int | None]:
        """``record_count`` of each partition's part. A part of 0 records is not read."""
        return {partition: self.record_count({partition: meta}) for partition, meta in plan.items()}

    def progress(
        self, committed: Mapping[str, Meta], in_flight: Sequence[Mapping[str, Meta]]
    ) -> Mapping[str, PartitionProgress]:
        """The progress of each partition, by the source's last report. Empty when this source
        cannot tell. No I/O. Called from any thread."""
        return {}

    @property
    def ranges(self) -> SourceRanges:
        """This source's knowledge about its ranges. The default has none: then single records of a
        batch cannot be left out, and tools handle whole batches."""
        return SourceRanges()

    def lag(self, previous: Mapping[str, Meta | None]) -> int | None:
        """The number of records after ``previous`` that the source held when last asked, or None
        when unknown. No I/O."""
        return None

    def for_reading(self, partition: str, meta: Meta) -> Meta:
        """Return the reader's input for ``meta``. The default is ``meta`` itself. An in-memory
        source adds its rows."""
        return meta

    def for_transaction(self, txid: int, partition: str, meta: Meta) -> Meta:
        """As ``for_reading``, for an attempt at a txid, if the input depends on the txid. The
        default is ``for_reading``."""
        return self.for_reading(partition, meta)

    def check(self) -> None:
        """Check that the source exists and may be read. Raises ``ConfigError`` naming a missing
        part, and ``RetryableError`` when a server does not answer. Called before a topology starts,
        by ``ratchet check`` and ``ratchet run``."""

    def check_first_plan(self, has_run: Callable[[], bool]) -> None:
        """As ``check``, for settings that only the first plan of a topology needs, such as the
        offsets where reading begins. ``has_run``: whether something was committed before; it asks
        ZooKeeper, so call it only if needed."""

    def source_identity(self) -> Mapping[str, Any]:
        """Return the properties of the source that must not change while a topology's state exists;
        JSON-able. Compared at every start."""
        return {}

    def end(self) -> Mapping[str, Meta] | None:
        """A plan that would contain all records that the source holds now, to decide when a run has
        caught up. None when this source cannot tell."""
        return None

    def hidden(self) -> Mapping[str, Meta]:
        """The ranges in the source that no consumer may read yet, as of the last call of ``end``:
        partition -> a range, such as the records behind an open kafka_txn. No I/O."""
        return {}

    def covers(self, plan: Mapping[str, Meta], goal: Mapping[str, Meta]) -> bool:
        """Whether a topology that committed ``plan`` has processed everything in ``goal`` (a result
        of ``end``)."""
        return False

    def close(self) -> None:
        """Release connections. Safe to call twice."""


class OnStream(NamedTuple):
    """Rows for a stream other than the default one."""

    stream: str
    batch: pa.RecordBatch


#: A reader's output: rows for the default stream, or for another.
Rows = Union[pa.RecordBatch, OnStream]


def on_stream(rows: Rows) -> OnStream:
    """A reader's output, with the name of its stream."""
    return rows if isinstance(rows, OnStream) else OnStream(DEFAULT_STREAM, rows)


class PartitionReader(ABC):
    """Reads planned ranges. Lives in a task; one per attempt and task."""

    def check_alive(self) -> None:
        """Call this regularly while no data arrives: it raises when the attempt was cancelled; let
        that error pass. The framework replaces this method; on Spark, a cancelled task is killed.
        """

    @abstractmethod
    def read(self, attempt: TransactionAttempt, partition: str, meta: Meta) -> Iterator[Rows]:
        """Yield exactly the planned range of one partition, in order, or raise. A short read must
        never become a short batch."""

    @property
    def counts(self) -> ReadCounts:
        """The counts so far. The default counts nothing; then the emitted rows count as the records
        read."""
        return ReadCounts()

    def read_all(self, attempt: TransactionAttempt, ranges: Mapping[str, Meta]) -> Iterator[Rows]:
        """Read all ranges of this task. The default reads one partition after the other, in the
        order given."""
        for partition, meta in ranges.items():
            yield from self.read(attempt, partition, meta)

    def read_letters(self, letters: Sequence[Letter]) -> Iterator[Rows]:
        """Yield the rows of dead letters, as ``read_all`` does for records of the source. Records
        that cannot be decoded go to ``DEAD_LETTER_STREAM``, whatever the policy for bad records.
        Called if the spout's ``replays_letters`` is True."""
        raise NotImplementedError(f"{type(self).__name__} reads no dead letters")

    def warm_up(self) -> None:
        """Called in workers before the first batch. Connect, and load the code and data for
        decoding. A failure has no consequence."""

    def close(self) -> None:
        """Called at the end of the attempt's read."""


class PartitionedSpout(Spout):
    """The base of both partitioned kinds. Subclass one of the two below, not this class."""

    @property
    def is_shared(self) -> bool:
        """True promises that ``reader`` changes nothing in the spout, and that readers leave no
        data that affects later ones. Then one copy serves all batches of a thread. By default each
        batch and task has a copy of its own."""
        return False

    @property
    def replays_letters(self) -> bool:
        """Whether the readers can read dead letters, and the planner supports ``empty_plan``."""
        return False

    @abstractmethod
    def planner(self, conf: Mapping[str, Any], context: TopologyContext) -> PartitionPlanner:
        """Called on the driver, once per leader."""

    @abstractmethod
    def reader(self, conf: Mapping[str, Any], context: TopologyContext) -> PartitionReader:
        """Called in tasks, on an unpickled copy of the spout."""


class PartitionedTransactionalSpout(PartitionedSpout):
    """An idempotent spout: every attempt at a txid has the same batch.

    Source: ``org.apache.storm.transactional.partitioned.IPartitionedTransactionalSpout``, which
    plans while it emits.
    """

    deterministic = True


class OpaquePartitionedTransactionalSpout(PartitionedSpout):
    """A spout whose batch of a txid may differ from attempt to attempt.

    Source: ``org.apache.storm.transactional.partitioned.IOpaquePartitionedTransactionalSpout``.
    """

    deterministic = False
