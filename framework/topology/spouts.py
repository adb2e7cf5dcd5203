"""Transactional spouts: plan a batch on the driver, read it in tasks.

``plan`` decides what each partition contributes, quickly and in order; ``read`` then delivers exactly that, in Spark
tasks, as often as it is asked. A plan is persisted before it is read, so that a replay reads the same.

Three kinds, told apart by type because their guarantees differ:

* ``TransactionalSpout``, the general one: a coordinator on the driver makes up any metadata for a batch; emitters, in as
  many tasks as one likes, all get it and emit the same tuples for it every time.
* ``PartitionedTransactionalSpout``: a plan never changes. A partition that is away holds its transaction up.
* ``OpaquePartitionedTransactionalSpout``: until its commit opens, a failed batch is planned afresh from where the
  preceding one ends; a partition that is away contributes nothing meanwhile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Union

import pyarrow as pa

from framework.errors import TopologyError
from framework.topology.attempt import TransactionAttempt
from framework.topology.bolts import Bolt, OutputCollector, OutputFieldsDeclarer
from framework.topology.context import TopologyContext
from framework.topology.fields import Fields

#: What a plan says about one partition: a JSON-able mapping, persisted as it is.
Meta = Mapping[str, Any]

#: The hidden stream on which a spout sends what it cannot decode, when the user asked for dead letters.
DEAD_LETTER_STREAM = "dead_letters"

#: A dead letter: where the record stood (``topic_id`` tells a topic from one of the same name before it), what was wrong
#: with it, and its raw bytes. ``key``, ``value`` and the values of ``headers`` are as the source holds them.
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
    }
)


@dataclass(slots=True)
class ReadCounts:
    """What was read for a batch: records (those that could not be decoded included), their bytes as the source holds
    them (keys and values), and how many could not be decoded."""

    records: int = 0
    bytes: int = 0
    bad_records: int = 0

    def add(self, other: ReadCounts) -> None:
        self.records += other.records
        self.bytes += other.bytes
        self.bad_records += other.bad_records


@dataclass(frozen=True, slots=True)
class PartitionProgress:
    """Where one partition stands. Offsets are of the next record: ``end_offset`` as the source last said (None: it has
    not), ``committed_offset`` of the last committed transaction. ``in_flight``: offsets planned and not committed.
    ``lost_records``: offsets that were gone before they were read and were skipped, since the positions began."""

    end_offset: int | None
    committed_offset: int
    in_flight: int = 0
    lost_records: int = 0

    @property
    def lag(self) -> int | None:
        """Offsets between what is committed and the end; None when the end is unknown."""
        return None if self.end_offset is None else max(self.end_offset - self.committed_offset, 0)


class Spout(ABC):
    """What every spout of a transactional topology has."""

    #: True says that a replay delivers the same rows in the same order per partition.
    deterministic: bool

    def output_fields(self) -> Fields:
        """The fields of the default stream."""
        raise TopologyError(
            f"{type(self).__name__} declares no fields: write output_fields() or declare_output_fields()"
        )

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        """Called once, on the driver, by the builder. The default declares ``output_fields()`` on the default stream."""
        declarer.declare(self.output_fields())

    def check_before_start(self, conf: Mapping[str, Any]) -> None:
        """Called by ``submit`` before anything starts. Raises ``ConfigError`` for a configuration that this spout cannot
        run with."""

    def dead_letters(self) -> Bolt | None:
        """The committer of what this spout cannot decode, or None. The builder adds it to the topology as
        ``<spout id>-dead-letters``, subscribed globally to the stream ``DEAD_LETTER_STREAM``, which the spout then must
        declare with ``DEAD_LETTER_FIELDS``."""
        return None

    def release(self) -> None:
        """Called in the driver's process when a run has ended: close what readers in this process have kept open."""


class TransactionalSpoutCoordinator(ABC):
    """Decides what a batch is. Lives on the driver, one per leader, used from one thread."""

    @abstractmethod
    def initialize_transaction(self, txid: int, previous_metadata: Any) -> Any:
        """The metadata of batch ``txid``: anything JSON-able, persisted before the batch is first emitted and the same for
        every replay. ``previous_metadata`` is that of ``txid - 1``, None for the first. Called once per txid, unless
        the driver ends before the metadata is persisted. Raises ``RetryableError`` when the source does not answer."""

    def is_ready(self) -> bool:
        """False holds the next batch back; asked again soon. When it is False and nothing is in flight, a run counts as
        caught up."""
        return True

    def record_count(self, metadata: Any) -> int | None:
        """An upper bound of the records in a batch, or None when it is not known. Small batches run in one task."""
        return None

    def close(self) -> None:
        """Release connections. Safe to call twice."""


class TransactionalSpoutEmitter(ABC):
    """Emits its task's part of a batch. Lives in a task; one per attempt and task, on an unpickled copy of the spout."""

    @abstractmethod
    def emit_batch(self, attempt: TransactionAttempt, metadata: Any, collector: OutputCollector) -> None:
        """Emit this task's part of the batch: the same tuples in the same order for the same ``metadata``, whatever the
        attempt. Which part that is, the context given to ``emitter`` tells: ``task_index`` of ``task_count``."""

    def cleanup_before(self, txid: int) -> None:
        """Batches below ``txid`` are committed and will not be asked for again: forget what was kept for them outside of
        this object. Called once per attempt and task, before ``emit_batch``; best effort."""

    def close(self) -> None:
        """Called at the end of the attempt's emission."""


class TransactionalSpout(Spout):
    """The general idempotent spout: a coordinator with metadata of its own, emitters with a parallelism.

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

    Source: ``org.apache.storm.transactional.ITransactionalSpout``. There emitters live as long as their task; here one
    is made for each attempt, because a task on Spark ends with its batch.
    """

    deterministic = True

    @abstractmethod
    def coordinator(self, conf: Mapping[str, Any], context: TopologyContext) -> TransactionalSpoutCoordinator:
        """Called on the driver, once per leader."""

    @abstractmethod
    def emitter(self, conf: Mapping[str, Any], context: TopologyContext) -> TransactionalSpoutEmitter:
        """Called in tasks, on an unpickled copy of the spout."""


class PartitionPlanner(ABC):
    """Plans batches. Lives on the driver, one at a time, used from one thread."""

    @abstractmethod
    def partitions(self) -> list[str]:
        """The ids of all partitions known now. May grow."""

    def is_ready(self) -> bool:
        """False holds the next batch back."""
        return True

    @abstractmethod
    def plan(self, previous: Mapping[str, Meta | None]) -> Mapping[str, Meta] | None:
        """What each partition contributes to the batch after ``previous``.

        ``previous`` has an entry per partition ever planned; it is empty for the first batch of a topology. The answer
        must have an entry for each of those too, with an empty range where nothing is contributed, and may have new
        ones. None says that there is nothing new; the framework asks again. Raises ``RetryableError`` when the source
        does not answer, ``DataLossError`` when it is no longer what ``previous`` was planned from.
        """

    def plan_smaller(self, previous: Mapping[str, Meta | None], divisor: int) -> Mapping[str, Meta] | None:
        """As ``plan``, for a batch that has timed out: about ``divisor`` times smaller than usual, where the source can
        (C18). Never called for a spout that is not opaque."""
        return self.plan(previous)

    def empty_plan(self, previous: Mapping[str, Meta | None]) -> Mapping[str, Meta] | None:
        """The batch after ``previous`` that contributes nothing, for topologies that want a batch also when the source
        is idle; None when this source has no such thing."""
        return None

    @property
    def skips_lost_data(self) -> bool:
        """Whether ``plan`` goes on after what the source has lost, instead of raising ``DataLossError``: the user said
        ``on_data_loss="skip"``."""
        return False

    def mutable(self, partitions: Collection[str]) -> Mapping[str, str]:
        """Of these partitions, those whose planned ranges may hold fewer records when they are read again, each with what is
        so about it, such as "topic 'x' is compacted". Asked at the start and before the first batch of a new partition, when
        the topology has sinks that skip what they have seen of a replayed batch (C5). Raises ``RetryableError`` when the
        source does not answer."""
        return {}

    def confirm(self, plan: Mapping[str, Meta]) -> None:
        """Called after a batch was read and before it may commit, in a thread of its own: make sure that what was read is
        what was planned, when the reader cannot tell. Raises ``DataLossError`` when it is not."""

    def lost(self, plan: Mapping[str, Meta]) -> None:
        """Called when reading ``plan`` has failed with a ``DataLossError``, before it is planned afresh: what the planner
        knows of the source may be old. No I/O."""

    def processed(self, plan: Mapping[str, Meta], read: ReadCounts, elapsed_s: float) -> None:
        """Called after a processing phase has succeeded, before its commit: learn from it. No I/O. Raises
        ``BadRecordError`` to stop the topology."""

    def committed(self, plan: Mapping[str, Meta]) -> None:
        """Called after a batch is closed, durably, in the planner's thread. When batches follow each other quickly only
        the last one may be told, and after a crash none: for what informs others, never for what must be right."""

    def record_count(self, plan: Mapping[str, Meta]) -> int | None:
        """An upper bound of the records in a plan, or None when it is not known. Small batches run in one task."""
        return None

    def progress(
        self, committed: Mapping[str, Meta], in_flight: Sequence[Mapping[str, Meta]]
    ) -> Mapping[str, PartitionProgress]:
        """Where each partition stands, by what the source last said; empty when this source has no such thing. No I/O;
        called from any thread."""
        return {}

    def split(self, partition: str, meta: Meta) -> tuple[Meta, Meta] | None:
        """A range as two halves, in order; None when it is a single record, or cannot be split."""
        return None

    def joined(self, first: Meta, last: Meta, *, after: bool) -> Meta | None:
        """The range from the beginning of ``first``, or from its end when ``after``, to the end of ``last``, of one partition;
        None when this source has no such thing. For ``verify``."""
        return None

    def lag(self, previous: Mapping[str, Meta | None]) -> int | None:
        """Records after ``previous`` that the source held when last asked, or None when unknown. No I/O."""
        return None

    def for_reading(self, partition: str, meta: Meta) -> Meta:
        """What the reader gets for ``meta``: the default is ``meta`` itself. An in-memory source adds its rows."""
        return meta

    def check(self) -> None:
        """Find out whether the source is there and may be read. Raises ``ConfigError`` naming what is missing, and
        ``RetryableError`` when nobody answers. Called before a topology starts, by ``ratchet check`` and ``ratchet run``."""

    def source_identity(self) -> Mapping[str, Any]:
        """What must stay the same over the life of a topology's state, JSON-able; compared at every start."""
        return {}

    def end(self) -> Mapping[str, Meta] | None:
        """A plan that would contain everything the source holds now, for "caught up"; None when it cannot be said."""
        return None

    def covers(self, plan: Mapping[str, Meta], goal: Mapping[str, Meta]) -> bool:
        """Whether a topology that committed ``plan`` has seen everything in ``goal`` (an answer of ``end``)."""
        return False

    def close(self) -> None:
        """Release connections. Safe to call twice."""


class OnStream(NamedTuple):
    """Rows for another stream than the default one."""

    stream: str
    batch: pa.RecordBatch


#: What a reader yields: rows for the default stream, or for another.
Rows = Union[pa.RecordBatch, OnStream]


class PartitionReader(ABC):
    """Reads planned ranges. Lives in a task; one per attempt and task."""

    @abstractmethod
    def read(self, attempt: TransactionAttempt, partition: str, meta: Meta) -> Iterator[Rows]:
        """Exactly the planned range of one partition, in order, or an error: a short read is never a short batch."""

    @property
    def counts(self) -> ReadCounts:
        """What was read so far. The default counts nothing; then the rows emitted are taken for the records read."""
        return ReadCounts()

    def read_all(self, attempt: TransactionAttempt, ranges: Mapping[str, Meta]) -> Iterator[Rows]:
        """All ranges of this task. The default reads one partition after the other, in the order given."""
        for partition, meta in ranges.items():
            yield from self.read(attempt, partition, meta)

    def warm_up(self) -> None:
        """Called in workers before the first batch: connect, load what decoding needs. May fail without consequence."""

    def close(self) -> None:
        """Called at the end of the attempt's read."""


class PartitionedSpout(Spout):
    """What both partitioned kinds have in common. Subclass one of the two below, not this."""

    @abstractmethod
    def planner(self, conf: Mapping[str, Any], context: TopologyContext) -> PartitionPlanner:
        """Called on the driver, once per leader."""

    @abstractmethod
    def reader(self, conf: Mapping[str, Any], context: TopologyContext) -> PartitionReader:
        """Called in tasks, on an unpickled copy of the spout."""


class PartitionedTransactionalSpout(PartitionedSpout):
    """An idempotent spout: the batch of a txid is always the same batch.

    Source: ``org.apache.storm.transactional.partitioned.IPartitionedTransactionalSpout``; that plans while it emits.
    """

    deterministic = True


class OpaquePartitionedTransactionalSpout(PartitionedSpout):
    """A spout whose batch of a txid may differ from attempt to attempt.

    Source: ``org.apache.storm.transactional.partitioned.IOpaquePartitionedTransactionalSpout``.
    """

    deterministic = False
