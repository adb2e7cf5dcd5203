"""The bolts of a transactional topology: what a user subclasses.

Life of a bolt, per batch and task (all of it in a Spark task)::

    copy of the instance given to the builder
      └─ prepare ── execute* ── finish_batch
                        │            │
                        │            └─ committers: in the commit phase, possibly in another process; the bolt is
                        │               pickled after its last execute
                        └─ BaseBasicBolt: once per tuple; ArrowBolt: execute_arrow, once per record batch

A replay of the batch starts from a new copy. Nothing of one batch is seen by another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from framework.errors import TopologyError
from framework.topology.attempt import TransactionAttempt
from framework.topology.context import TopologyContext
from framework.topology.fencing import FencedState, Standing
from framework.topology.fields import Fields
from framework.topology.groupings import Grouping
from framework.topology.tuples import Tuple

DEFAULT_STREAM = "default"


class OutputCollector(Protocol):
    """Where a bolt puts what it emits. The framework stamps the attempt."""

    def emit(self, values: Sequence[Any], stream: str = DEFAULT_STREAM) -> None:
        """Emit the declared values, in their order."""

    def emit_arrow(self, batch: pa.RecordBatch, stream: str = DEFAULT_STREAM) -> None:
        """Emit every row of a record batch whose columns are the declared fields."""

    def emit_direct(self, task: int, values: Sequence[Any], stream: str = DEFAULT_STREAM) -> None:
        """Emit on a direct stream, to one task of each bolt that subscribes: 0 to ``context.tasks_of(bolt) - 1``."""

    def emit_arrow_direct(self, task: int, batch: pa.RecordBatch, stream: str = DEFAULT_STREAM) -> None:
        """Every row of a record batch, on a direct stream, to one task."""


class OutputFieldsDeclarer:
    """Collects the streams that a component declares. ``attempts``: tuples carry the transaction attempt, as field ``id``."""

    def __init__(self, component_id: str, *, attempts: bool = True) -> None:
        self._component_id = component_id
        self._attempts = attempts
        self.streams: dict[str, Fields] = {}
        self.direct: set[str] = set()

    def declare(self, fields: Fields, stream: str = DEFAULT_STREAM, *, direct: bool = False) -> None:
        """Declare a stream. ``direct``: whoever emits on it says to which task, with ``emit_direct``."""
        if not isinstance(fields, Fields):
            raise TopologyError(
                f"component {self._component_id!r} declares {fields!r} on stream {stream!r}: give Fields(...)"
            )
        if stream in self.streams:
            raise TopologyError(f"component {self._component_id!r} declares stream {stream!r} twice")
        if self._attempts and "id" in fields:
            raise TopologyError(
                f"component {self._component_id!r}, stream {stream!r}: field 'id' is the transaction attempt, which the "
                "framework adds; use another name"
            )
        self.streams[stream] = fields
        if direct:
            self.direct.add(stream)


@dataclass(frozen=True, slots=True)
class Input:
    """A stream that a bolt subscribes to, as the builder sees it."""

    component_id: str
    stream: str
    fields: Fields
    grouping: Grouping

    def require(self, component_id: str, names: Iterable[str]) -> None:
        """Raise ``TopologyError`` naming the first field that the committer ``component_id`` needs and this stream lacks."""
        for name in names:
            if name not in self.fields:
                raise TopologyError(
                    f"committer {component_id!r} needs field {name!r}, which {self.component_id!r} does not emit (it "
                    f"emits: {', '.join(self.fields.names)})"
                )


class Combiner(ABC):
    """Folds tuples together before they travel to the bolt that owns it, as a combiner does in MapReduce.

    Called in the tasks of the upstream component, for one edge. Must be pure: what ``finish`` returns stands for all
    the batches added. One instance per batch and task.
    """

    @abstractmethod
    def add(self, batch: pa.RecordBatch) -> None: ...

    @abstractmethod
    def finish(self) -> pa.RecordBatch | None:
        """The folded rows, in the schema that the bolt's ``execute_arrow`` takes; None when nothing was added."""


class Bolt(ABC):
    """What all bolts have in common."""

    #: True says: equal input in equal order gives equal output, always. No clock, no look-ups, no randomness. A
    #: transactional state (which skips on replay) demands it of every component above it.
    deterministic: bool = False

    #: True lets the commit of a small batch run on the driver, which saves a Spark job, when it is true of every component
    #: of the commit phase. For code that is bounded in time and memory: a driver's thread cannot be cancelled.
    commits_on_driver: bool = False

    #: Of a committer that writes elsewhere than to states: True says that a later attempt at a txid replaces whatever
    #: earlier attempts at it wrote, also what the later one does not write again. Only then may a batch whose source
    #: data is lost for good be planned anew after its commit was opened (C8).
    can_undo: bool = False

    #: Of a committer that writes elsewhere than to states: False says that a replay of a batch may write it again. The builder
    #: takes such a committer only with ``at_least_once=True``.
    exactly_once: bool = True

    #: True says that the tasks of this committer are committed one by one, and a replay skips those that are: it demands
    #: ``deterministic`` of every component above, so that each task sees the same rows again (C11).
    needs_deterministic_input: bool = False

    #: In a core topology: seconds from one tick to the next. Each task is given ticks among its other tuples, also when no other
    #: comes; ``tup.is_tick`` tells them apart. None: as ``topology.tick.tuple.freq.secs`` says.
    tick_s: float | None = None

    def prepare(self, conf: Mapping[str, Any], context: TopologyContext, collector: Any, batch_id: Any) -> None:
        """Called in the task, once per batch, before the first tuple."""

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        """Called once, on the driver, by the builder. A bolt that emits nothing declares nothing."""

    def bind(self, component_id: str, inputs: Sequence[Input], parallelism: int) -> None:
        """Called once, on the driver, by the builder, with every stream subscribed to. Ready-made bolts learn their
        types here; raise ``TopologyError`` when something does not fit. Call ``super().bind()`` when overriding."""

    def check_before_start(self, conf: Mapping[str, Any]) -> None:
        """Called by ``submit``, on the driver, before anything starts: raise ``ConfigError`` for what would fail in the first
        batch, such as a topic that is not there."""

    def check_written(self, conf: Mapping[str, Any], context: TopologyContext, standing: Standing) -> None:
        """Of a committer that writes elsewhere than to states and remembers there which transactions it has written. Called by
        every new leader, on the driver, before its first batch; ``context.task_count`` is the number of its tasks. Raise
        ``ConfigError`` when what is remembered does not fit ``standing`` (C25)."""

    def renew_written(self, conf: Mapping[str, Any], context: TopologyContext, standing: Standing) -> None:
        """Of such a committer, called by ``reset --everything``, on the driver: what was written stays; what is remembered
        of it begins anew, under the incarnation of ``standing``."""

    def combiner(self) -> Combiner | None:
        """A combiner for the edges into this bolt, or None. Called in tasks."""
        return None

    def recounting(self, folder: Path) -> Bolt:
        """Called by ``verify``, on the driver, on a copy of this bolt: the bolt that makes once more, in an empty ``folder``,
        what this one keeps in its states. One that shares less code with it can contradict it; the default is the copy
        itself, with scratch states. Raises ``ConfigError`` when it cannot."""
        for number, state in enumerate(self.states()):
            state.become_scratch(folder / str(number))
        return self

    def states(self) -> Sequence[FencedState]:
        """The states that this bolt writes to when it commits: by default every ``FencedState`` among its attributes."""
        return [value for value in vars(self).values() if isinstance(value, FencedState)]


class BaseBasicBolt(Bolt):
    """One tuple in, any number out. For both kinds of topology: in a core topology ``batch_id`` is None in ``prepare``, which is
    called once per task, what is emitted is anchored to the tuple, and the tuple is acked when ``execute`` returns.

    >>> class Split(BaseBasicBolt):
    ...     deterministic = True
    ...     def execute(self, tup, collector):
    ...         for word in tup["sentence"].split():
    ...             collector.emit([word])
    ...     def declare_output_fields(self, declarer):
    ...         declarer.declare(Fields(word=str))

    Source: ``org.apache.storm.topology.base.BaseBasicBolt``.
    """

    @abstractmethod
    def execute(self, tup: Tuple, collector: OutputCollector) -> None:
        """Called for each tuple. Raise ``FailedException`` to have the batch replayed; in a core topology, to fail the tuple."""

    def cleanup(self) -> None:
        """Called when a core topology stops. In a transactional one, where a bolt lives for one batch, it is not."""


class BaseBatchBolt(Bolt):
    """Sees a batch from its first tuple to its end.

    >>> class PartialCount(BaseBatchBolt):
    ...     def prepare(self, conf, context, collector, batch_id):
    ...         self.collector, self.count = collector, 0
    ...     def execute(self, tup):
    ...         self.count += 1
    ...     def finish_batch(self):
    ...         self.collector.emit([self.count])
    ...     def declare_output_fields(self, declarer):
    ...         declarer.declare(Fields(count=int))

    Source: ``org.apache.storm.topology.base.BaseBatchBolt``.
    """

    @abstractmethod
    def execute(self, tup: Tuple) -> None:
        """Called for each tuple of the batch that belongs to this task."""

    @abstractmethod
    def finish_batch(self) -> None:
        """Called once, after the last tuple of the batch for this task, also when there was none."""


class BaseTransactionalBolt(BaseBatchBolt):
    """A batch bolt whose ``batch_id`` is the ``TransactionAttempt``.

    Source: ``org.apache.storm.topology.base.BaseTransactionalBolt``.
    """

    def prepare(
        self, conf: Mapping[str, Any], context: TopologyContext, collector: Any, batch_id: TransactionAttempt
    ) -> None:
        """Called in the task, once per batch, before the first tuple."""


class Committer:
    """Marks a batch bolt whose ``finish_batch`` belongs to the commit phase: strictly in txid order, one at a time.

    Source: ``org.apache.storm.transactional.ICommitter``.
    """


class ArrowBolt(Bolt):
    """Vectorised: a record batch in, any number out.

    >>> import pyarrow.compute as pc
    >>> class Upper(ArrowBolt):
    ...     deterministic = True
    ...     def execute_arrow(self, batch):
    ...         yield batch.set_column(0, "word", pc.utf8_upper(batch.column(0)))
    ...     def declare_output_fields(self, declarer):
    ...         declarer.declare(Fields(word=str))
    >>> [out.to_pydict() for out in Upper().execute_arrow(pa.record_batch({"word": ["a"]}))]
    [{'word': ['A']}]
    """

    @abstractmethod
    def execute_arrow(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch] | None:
        """Called for each record batch; its columns are the fields of the stream it came from. What is yielded goes to
        the default stream; use the collector given to ``prepare`` for others."""

    def finish_batch(self) -> Iterable[pa.RecordBatch] | None:
        """Called once, after the last record batch of the transaction for this task."""
        return None


class DataFrameBolt(Bolt):
    """Hands a whole batch to Spark SQL: a ``pyspark.sql.DataFrame`` in, one out.

    >>> class PerWord(DataFrameBolt):
    ...     def execute_dataframe(self, frame):
    ...         return frame.groupBy("word").count()
    ...     def declare_output_fields(self, declarer):
    ...         declarer.declare(Fields(word=str, count=int))

    Input and output fields must be typed. Called on the driver, once per attempt, on a fresh copy after ``prepare``; only
    the plan of the query is made there, the rows stay on the executors. The parallelism is the number of partitions that
    Spark SQL shuffles into, and of tasks that emit. The query must not have effects of its own, and it costs two Spark
    jobs, so it pays for work that SQL is better at than a bolt: joins, windows, grouping by many keys.
    """

    def execute_dataframe(self, frame: Any) -> Any:
        """The result for a batch: a DataFrame with (at least) the declared columns. Raise ``FailedException`` to have the
        batch replayed."""
        raise NotImplementedError(f"{type(self).__name__} has neither execute_dataframe nor execute_dataframes")

    def execute_dataframes(self, frames: Mapping[str, Any]) -> Any:
        """For several inputs of different shape: a DataFrame per input, named ``component`` or ``component/stream``. The
        default puts all rows into one and calls ``execute_dataframe``."""
        first, *rest = frames.values()
        for frame in rest:
            first = first.unionByName(frame)
        return self.execute_dataframe(first)

    def bind(self, component_id: str, inputs: Sequence[Input], parallelism: int) -> None:
        for source in inputs:
            for name in source.fields:
                if source.fields.type_of(name) is None:
                    raise TopologyError(
                        f"bolt {component_id!r} hands its input to Spark SQL, which needs types: field {name!r} of "
                        f"{source.component_id!r} has none; declare it, as in Fields({name}=str)"
                    )
