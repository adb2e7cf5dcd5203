"""Transactional spouts: plan a batch on the driver, read it in tasks.

``plan`` decides what each partition contributes, quickly and in order; ``read`` then delivers exactly that, in Spark
tasks, as often as it is asked. A plan is persisted before it is read, so that a replay reads the same.

Two kinds, told apart by type because their guarantees differ:

* ``PartitionedTransactionalSpout``: a plan never changes. A partition that is away holds its transaction up.
* ``OpaquePartitionedTransactionalSpout``: until its commit opens, a failed batch is planned afresh from where the
  preceding one ends; a partition that is away contributes nothing meanwhile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from framework.topology.attempt import TransactionAttempt
from framework.topology.context import TopologyContext
from framework.topology.fields import Fields

#: What a plan says about one partition: a JSON-able mapping, persisted as it is.
Meta = Mapping[str, Any]


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

    def record_count(self, plan: Mapping[str, Meta]) -> int | None:
        """An upper bound of the records in a plan, or None when it is not known. Small batches run in one task."""
        return None

    def lag(self, previous: Mapping[str, Meta | None]) -> int | None:
        """Records after ``previous`` that the source held when last asked, or None when unknown. No I/O."""
        return None

    def for_reading(self, partition: str, meta: Meta) -> Meta:
        """What the reader gets for ``meta``: the default is ``meta`` itself. An in-memory source adds its rows."""
        return meta

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


class PartitionReader(ABC):
    """Reads planned ranges. Lives in a task; one per attempt and task."""

    @abstractmethod
    def read(self, attempt: TransactionAttempt, partition: str, meta: Meta) -> Iterator[pa.RecordBatch]:
        """Exactly the planned range of one partition, in order, or an error: a short read is never a short batch."""

    def read_all(self, attempt: TransactionAttempt, ranges: Mapping[str, Meta]) -> Iterator[pa.RecordBatch]:
        """All ranges of this task. The default reads one partition after the other, in the order given."""
        for partition, meta in ranges.items():
            yield from self.read(attempt, partition, meta)

    def warm_up(self) -> None:
        """Called in workers before the first batch: connect, load what decoding needs. May fail without consequence."""

    def close(self) -> None:
        """Called at the end of the attempt's read."""


class PartitionedSpout(ABC):
    """What both kinds have in common. Subclass one of the two below, not this."""

    #: True says that a replay delivers the same rows in the same order per partition.
    deterministic: bool

    @abstractmethod
    def output_fields(self) -> Fields:
        """The fields of the default stream."""

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
