"""The base classes for bolts of a transactional topology.

Life of a bolt, per batch and task (all of it in a Spark task)::

    copy of the instance given to the builder
      └─ prepare ── execute* ── finish_batch
                        │            │
                        │            └─ committers: in the commit phase, possibly in another
                        │               process; the bolt is pickled after its last execute
                        └─ BaseBasicBolt: once per tuple
                           ArrowBolt: execute_arrow, once per record batch

A replay of the batch starts from a new copy. Batches share no data through a bolt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

import pyarrow as pa

from framework.errors import TopologyError
from framework.topology.attempt import TransactionAttempt
from framework.topology.context import TopologyContext
from framework.topology.fencing import FencedState, Standing
from framework.topology.fields import Fields
from framework.topology.groupings import Grouping
from framework.topology.refused_row_bisection import OnRefused
from framework.topology.tuples import Tuple
from framework.topology.written_topics import ReadTopics, WrittenTopic

DEFAULT_STREAM = "default"
#: The treatment of a refused record.
OnBadRecord = Literal["fail", "skip", "dead_letter"]


class OutputCollector(Protocol):
    """Receives a bolt's output. The framework stamps the attempt."""

    def emit(self, values: Sequence[Any], stream: str = DEFAULT_STREAM) -> None:
        """Emit the declared values, in their order."""

    def emit_arrow(self, batch: pa.RecordBatch, stream: str = DEFAULT_STREAM) -> None:
        """Emit every row of a record batch whose columns are the declared fields."""

    def emit_direct(self, task: int, values: Sequence[Any], stream: str = DEFAULT_STREAM) -> None:
        """Emit on a direct stream, to one task of each subscribing bolt. ``task`` is 0 to
        ``context.tasks_of(bolt) - 1``."""

    def emit_arrow_direct(self, task: int, batch: pa.RecordBatch, stream: str = DEFAULT_STREAM) -> None:
        """Emit every row of a record batch on a direct stream, to one task of each subscribing
        bolt."""


#: The columns of rows in core topologies in addition to the declared fields: the edge of the row,
#: and the roots of the trees that it is part of.
OWN_COLUMNS = ("__edge", "__roots")


class OutputFieldsDeclarer:
    """Collects the streams that a component declares. ``attempts``: its tuples carry the
    transaction attempt."""

    def __init__(self, component_id: str, *, attempts: bool = True) -> None:
        self._component_id = component_id
        self._attempts = attempts
        self.streams: dict[str, Fields] = {}
        self.direct: set[str] = set()

    def declare(self, fields: Fields, stream: str = DEFAULT_STREAM, *, direct: bool = False) -> None:
        """Declare a stream. ``direct``: the sender names the receiving task, with ``emit_direct``.

        Raises ``TopologyError`` when ``fields`` is not a ``Fields``, or names none, when the stream
        was declared before, and, in core topologies, when a field has the name of one of
        ``OWN_COLUMNS``.
        """
        if not isinstance(fields, Fields):
            raise TopologyError(
                f"component {self._component_id!r} declares {fields!r} on stream {stream!r}: give Fields(...)"
            )
        if not len(fields):
            raise TopologyError(
                f"component {self._component_id!r} declares stream {stream!r} without fields: give at least one"
            )
        if stream in self.streams:
            raise TopologyError(f"component {self._component_id!r} declares stream {stream!r} twice")
        own = None if self._attempts else next((name for name in OWN_COLUMNS if name in fields), None)
        if own is not None:
            raise TopologyError(
                f"component {self._component_id!r}, stream {stream!r}: field {own!r} is a column of the framework's own; use "
                "another name"
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
        """Raise ``TopologyError`` naming the first field that the committer ``component_id`` needs
        and this stream lacks."""
        for name in names:
            if name not in self.fields:
                raise TopologyError(
                    f"committer {component_id!r} needs field {name!r}, which {self.component_id!r} does not emit (it "
                    f"emits: {', '.join(self.fields.names)})"
                )


class Combiner(ABC):
    """Folds tuples before they are sent to the combiner's bolt, like a combiner in MapReduce.

    Called in the tasks of the upstream component, for one edge. Must be pure: the rows that
    ``finish`` returns replace all the batches added. One instance per batch and task.
    """

    @abstractmethod
    def add(self, batch: pa.RecordBatch) -> None: ...

    @abstractmethod
    def finish(self) -> pa.RecordBatch | None:
        """Return the folded rows, in the schema that the bolt's ``execute_arrow`` takes, or None
        when nothing was added."""

    _on_refused: OnRefused | None = None

    def leave_out_refused(self, on_refused: OnRefused | None) -> None:
        """Called before the first ``add`` if all tuples fall due by time, and may be left out. A
        ready-made combiner then leaves out the tuples that it refuses, and calls ``on_refused`` for
        each; other combiners raise ``BadRecordError``."""
        self._on_refused = on_refused

    def finish_parts(self) -> Iterable[pa.RecordBatch]:
        """Return the rows of ``finish``. A combiner of many rows may return them in parts."""
        folded = self.finish()
        return [folded] if folded is not None else []


class LookupCounts(NamedTuple):
    """The lookups of one function in a task and transaction.

    * ``asked``, ``cached``: keys that the function answered, and keys that a cache answered.
    * ``missing``: keys for which the function had no answer.
    * ``failed``: calls that failed and were repeated.
    * ``seconds``: how long the task waited for the function."""

    asked: int = 0
    cached: int = 0
    missing: int = 0
    failed: int = 0
    seconds: float = 0.0

    def plus(self, other: LookupCounts) -> LookupCounts:
        return LookupCounts(
            self.asked + other.asked,
            self.cached + other.cached,
            self.missing + other.missing,
            self.failed + other.failed,
            self.seconds + other.seconds,
        )


class Bolt(ABC):
    """The base of all bolts."""

    #: True promises that equal input in equal order always gives equal output: no clock, no
    #: look-ups, no randomness. A transactional state skips replays, so the bolt that holds it and
    #: every component above must make this promise.
    deterministic: bool = False

    #: True promises that the bolt keeps nothing and only passes rows on, so that it may be added,
    #: changed and removed while the states below it exist.
    may_come_and_go: bool = False

    #: True allows the commit of a small batch to run on the driver, which saves a Spark job. It
    #: takes effect only when every component of the commit phase says True. The code must be
    #: bounded in time and memory: a driver's thread cannot be cancelled.
    commits_on_driver: bool = False

    #: For a committer that does not write to states. True promises that a later attempt at a txid
    #: replaces everything that earlier attempts at it wrote, including rows that the later one does
    #: not write again. Without this promise, a batch whose commit was opened cannot be planned
    #: again when its source data is permanently lost (C8).
    can_undo: bool = False

    #: For a committer that does not write to states. False says that a replay of a batch may write
    #: its rows again. The builder accepts such a committer only with ``at_least_once=True``.
    exactly_once: bool = True

    #: True says that the tasks of this committer commit one by one, and that a replay skips the
    #: tasks that have committed. This bolt and every bolt above must then be ``deterministic``, so
    #: that each task sees the same rows again (C11).
    needs_deterministic_input: bool = False

    #: In a transactional topology: the treatment of a record whose value this bolt refuses by a
    #: ``BadRecordError``. "skip": leave the record out and count it. "dead_letter": send it to the
    #: ``dead_letters`` of the spout. "fail": the ``on_bad_record`` of the spout decides.
    on_bad_record: OnBadRecord = "fail"

    #: In a core topology: seconds from one tick to the next. Each task gets ticks among its other
    #: tuples, even if no other tuple arrives; ``tup.is_tick`` tells them apart. None: use
    #: ``topology.tick.tuple.freq.secs``.
    tick_s: float | None = None

    def prepare(self, conf: Mapping[str, Any], context: TopologyContext, collector: Any, batch_id: Any) -> None:
        """Called in the task, once per batch, before the first tuple."""

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        """Called on the driver, by the builder. A bolt that emits nothing declares nothing."""

    def bind(self, component_id: str, inputs: Sequence[Input], parallelism: int) -> None:
        """Called once, on the driver, by the builder, with every stream that this bolt subscribes
        to.

        Ready-made bolts learn their types here. Raise ``TopologyError`` when something does not
        fit. Call ``super().bind()`` when overriding.
        """

    def check_before_start(self, conf: Mapping[str, Any]) -> None:
        """Called by ``submit``, on the driver, before anything starts.

        Raise ``ConfigError`` for any problem that would fail the first batch, such as a missing
        topic.
        """

    def check_servers(self, conf: Mapping[str, Any]) -> None:
        """Called before a topology starts, by ``ratchet check`` and ``ratchet run``. Check that the
        targets exist, and change nothing. Raise ``ConfigError`` naming a missing target, and
        ``RetryableError`` when a server does not answer."""

    def check_written(self, conf: Mapping[str, Any], context: TopologyContext, standing: Standing) -> None:
        """For a committer that does not write to states, and remembers at its target which
        transactions it has written. Called by every new leader, on the driver, before its first
        batch. ``context.task_count`` is the number of the committer's tasks.

        Raise ``ConfigError`` when the remembered transactions do not fit ``standing`` (C25).
        """

    def renew_written(self, conf: Mapping[str, Any], context: TopologyContext, standing: Standing) -> None:
        """Called by ``reset --everything``, on the driver, for the same committers as
        ``check_written``.

        Keep the written data. Reset the memory of transactions, under the incarnation of
        ``standing``.
        """

    def written_topics(self, topology_id: str) -> Sequence[WrittenTopic]:
        """Return the topics that this bolt writes, including those for its own use. Called on the
        driver. The spout of the topology refuses to read them."""
        return ()

    @property
    def tombstone_keys(self) -> Sequence[str]:
        """The fields that a tombstone must have, where the bolt deletes a row for each tombstone of
        a stream of the spout; else none. The field ``tombstone`` of its input says which rows
        are."""
        return ()

    def bind_read_topics(self, read: ReadTopics | None) -> None:
        """Called once, on the driver, by the builder, with the topics that the spout of the
        topology reads. A bolt whose rows name the topics to write must refuse these."""

    def bind_written_topics(self, written: Sequence[WrittenTopic]) -> None:
        """Called once, on the driver, by the builder, with the topics that the bolts of the
        topology write. A bolt whose rows name topics must refuse the topics that do not hold
        records."""

    def _lookup_counts(self) -> Mapping[str, LookupCounts]:
        """The lookups since ``prepare``, by the name of their function, for the metrics. Called in
        the task, after ``finish_batch``. Not for bolts of the user's."""
        return {}

    def combiner(self) -> Combiner | None:
        """Return a combiner for the edges into this bolt, or None. Called in tasks."""
        return None

    def states(self) -> Sequence[FencedState]:
        """Return the states that this bolt writes to when it commits. Each call must return the
        same objects, and a copy of the bolt must have copies of them. ``verify`` and ``replay``,
        which redirect the states of a copy, refuse other bolts.

        The default is every ``FencedState`` among its attributes.
        """
        return [value for value in vars(self).values() if isinstance(value, FencedState)]


class ForwardsRows:
    """A bolt that emits rows of its input unchanged. A pipeline sets ``forwarded``: the hidden
    columns that bolts below take. It emits no other hidden columns."""

    forwarded: frozenset[str] = frozenset()


class BaseBasicBolt(Bolt):
    """One tuple in, any number out. For both kinds of topology.

    In a core topology, ``prepare`` is called once per task, with None as ``batch_id``. Emitted
    tuples are anchored to the input tuple, which is acked when ``execute`` returns.

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
        """Called for each tuple. Raise ``FailedException`` to have the batch replayed, or, in a
        core topology, to fail the tuple."""

    def cleanup(self) -> None:
        """Called when a core topology stops. Never called in a transactional topology, where a bolt
        lives for one batch."""


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
        """Called once, after the last tuple of the batch for this task, even if there was no
        tuple."""


class BaseTransactionalBolt(BaseBatchBolt):
    """A batch bolt whose ``batch_id`` is the ``TransactionAttempt``.

    Source: ``org.apache.storm.topology.base.BaseTransactionalBolt``.
    """

    def prepare(
        self, conf: Mapping[str, Any], context: TopologyContext, collector: Any, batch_id: TransactionAttempt
    ) -> None:
        """Called in the task, once per batch, before the first tuple."""


class Committer:
    """Marks a batch bolt whose ``finish_batch`` belongs to the commit phase: strictly in txid
    order, one at a time.

    Between its last ``execute`` and its ``finish_batch`` it is pickled with all its attributes. If
    ``finish_batch`` needs only a part of them, implement ``keep_for_commit``, which costs less.

    Source: ``org.apache.storm.transactional.ICommitter``.
    """

    #: The number of records of the transaction that came too late, as counted by
    #: ``ratchet_late_records``.
    late_records = 0

    #: The streams whose rows fall due by time, such as closing windows: no record of the
    #: transaction causes such a row. If a bolt below refuses such a row, only this row is left out
    #: (ADR 126).
    due_streams: frozenset[str] = frozenset()

    def sends_rows_of(self, fields: Fields) -> bool:
        """Whether rows of an input with these fields become emitted rows. False for an input that
        is only a table for a join."""
        return True

    _on_refused: OnRefused | None = None

    def leave_out_refused(self, on_refused: OnRefused) -> None:
        """Called in the commit phase, after ``prepare``, if all rows fall due by time, and may be
        left out. ``finish_batch`` of a ready-made committer then writes the rows that its store
        accepts, and calls ``on_refused`` for each other row; other committers raise
        ``BadRecordError``.
        """
        self._on_refused = on_refused

    #: Whether ``try_writes`` always needs the rows before a row in the batch.
    tries_in_order: bool = False
    #: Whether this committer subscribes to watermarks, and tries its writes with those of
    #: ``watermark_before``.
    tries_at_watermarks: bool = False

    def watermark_before(self) -> Mapping[str, Any] | None:
        """The row that this committer, if it sends only watermarks, would send in a transaction
        that does not advance the watermark. Called on the driver when all earlier transactions are
        committed. None: it sends other rows."""
        return None

    #: Whether other committers get only watermarks from this one.
    sends_only_watermarks: bool = False

    def may_try_writes(self) -> bool:
        """Whether ``try_writes`` does something. Called on the driver."""
        return False

    def refuses_whole(self) -> bool:
        """Whether a ``finish_batch`` of the only task that raises ``BadRecordError`` has written
        nothing of the transaction."""
        return False

    def try_writes(self, *, alone: bool) -> None:
        """Called in the task after the last call of the processing phase, if the store has refused
        a value of the batch in the commit, and all earlier transactions are committed. Write what
        ``finish_batch`` would write, and undo the writes. The task drops emitted rows. Raises
        ``BadRecordError`` if the store refuses a value; then probes find all records with such
        values (ADR 128).

        ``alone``: the rows that decide whether a row is accepted may be missing, so raise only for
        values that are refused whatever the other rows are. Otherwise all accepted records before
        those in question precede them, and no other committer writes such rows (ADR 135)."""

    #: Set before each ``execute`` of a component that takes both rows that fall due by time and
    #: other rows: called for each row of this batch that is left out. None: no row of the batch may
    #: be left out.
    _on_refused_due: OnRefused | None = None

    def keep_for_commit(self) -> bytes | None:
        """Called in the task after the last ``execute``. Return everything that ``finish_batch``
        needs besides the attributes that a new copy of the component has after ``prepare``. None,
        the default: pickle the whole committer."""
        return None

    def take_for_commit(self, kept: bytes) -> None:
        """Called in the commit phase on a new copy, after its ``prepare`` and before its
        ``finish_batch``, with the result of ``keep_for_commit``."""
        raise NotImplementedError(f"{type(self).__name__} says what is kept of it, and does not take it back")

    #: As of ``state_settings``, of the steps above that make the rows. Set on the driver.
    settings_above: Mapping[str, Any] = MappingProxyType({})

    def state_settings(self) -> Mapping[str, Any]:
        """Options on which the stored rows depend, by name; JSON-able. A topology that starts with
        other options is refused, like one of another shape. Called on the driver."""
        return {}

    def commits_in_one_step(self) -> bool:
        """Whether ``finish_batch`` can commit in one atomic step. If so, and the fence of its
        attempt has ``opens_from``, it raises the header, writes all rows, and sets ``done`` in one
        step, even for a batch without rows. Called on the driver."""
        return False


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

    #: True promises that ``execute_arrow`` keeps no row of a batch for which it raises
    #: ``BadRecordError``, and emits only record batches. Then it may get parts of such a batch.
    takes_batches_whole: bool = False
    #: True promises that the bolt treats each row by itself, so that its tasks only share the work.
    #: Then one task may do all of it in a small batch.
    rows_are_independent: bool = False

    @abstractmethod
    def execute_arrow(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch] | None:
        """Called for each record batch. Its columns are the fields of its stream.

        Batches that it yields go to the default stream. For other streams, use the collector given
        to ``prepare``.
        """

    def finish_batch(self) -> Iterable[pa.RecordBatch] | None:
        """Called once, after the last record batch of the transaction for this task."""
        return None


class DataFrameBolt(Bolt):
    """Processes a whole batch in Spark SQL: a ``pyspark.sql.DataFrame`` in, one out.

    >>> class PerWord(DataFrameBolt):
    ...     def execute_dataframe(self, frame):
    ...         return frame.groupBy("word").count()
    ...     def declare_output_fields(self, declarer):
    ...         declarer.declare(Fields(word=str, count=int))

    Input and output fields must be typed. The bolt is called on the driver, once per attempt, on a
    fresh copy, after ``prepare``. It only builds the query plan there; the rows stay on the
    executors. The parallelism is the number of partitions that Spark SQL shuffles into, and the
    number of tasks that emit. The query must have no side effects. It costs two Spark jobs, so it
    pays off for work that SQL does better than a bolt: joins, windows, grouping by many keys.
    """

    def execute_dataframe(self, frame: Any) -> Any:
        """Return the result for a batch: a DataFrame with at least the declared columns.

        Raise ``FailedException`` to have the batch replayed.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither execute_dataframe nor execute_dataframes")

    def execute_dataframes(self, frames: Mapping[str, Any]) -> Any:
        """Override this for inputs of different shapes. ``frames`` holds one DataFrame per input,
        named ``component`` or ``component/stream``.

        The default unites all rows by column name and calls ``execute_dataframe``.
        """
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
