"""The spouts and bolts of a core topology. Tuples are processed one by one, and are either tracked
until they are fully processed or not tracked at all.

Life of a component (all of it in one place, for as long as the topology runs)::

    spout:  open ── next_tuple*, and ack or fail for each message id that was emitted ── close
    bolt:   prepare ── execute* ── cleanup

An instance lives across rounds, and keeps its attributes. When its process is lost, a new copy is
made from the original. The tuples that were pending there time out, and their spouts may emit them
again. If a round was lost with the process, the framework itself emits them again, without a call
of ``fail``.

Source: *Guaranteed message processing*.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, Union

import pyarrow as pa

from framework.topology.bolts import DEFAULT_STREAM, Bolt, OutputFieldsDeclarer
from framework.topology.context import TopologyContext
from framework.topology.tuples import Tuple

Anchors = Union[Tuple, Iterable[Tuple], None]


class SpoutOutputCollector(Protocol):
    """Receives a spout's output. Call it only from within the spout's own methods, not from another
    thread.
    """

    def emit(
        self, values: Sequence[Any], message_id: Any = None, stream: str = DEFAULT_STREAM, *, partition: str = ""
    ) -> None:
        """Emit the declared values, in their order.

        With a message id, of any type, the tuple is tracked: the framework calls ``ack`` or
        ``fail`` with that id. Without one, the tuple is not tracked. ``partition``: the partition
        in ``unread`` from which it was read.
        """

    def emit_direct(
        self,
        task: int,
        values: Sequence[Any],
        message_id: Any = None,
        stream: str = DEFAULT_STREAM,
        *,
        partition: str = "",
    ) -> None:
        """Emit on a direct stream, to one task of each bolt that subscribes."""

    def emit_arrow(
        self,
        batch: pa.RecordBatch,
        message_ids: Sequence[Any] | None = None,
        stream: str = DEFAULT_STREAM,
        *,
        partition: str = "",
    ) -> None:
        """Emit each row of a batch, as ``emit`` does: ``message_ids`` has the id of each. Costs far
        less than a call per row. Emit no more rows than ``next_tuples`` was asked for."""

    def report_error(self, error: BaseException) -> None:
        """Show an error in the status of the run, and continue."""


class RichOutputCollector(Protocol):
    """Receives a rich bolt's output, its acks and its failures. Threads of the bolt may call it."""

    def emit(self, values: Sequence[Any], anchors: Anchors = None, stream: str = DEFAULT_STREAM) -> None:
        """Emit the declared values, in their order.

        ``anchors``: the input tuple, or the tuples, from which the new tuple was made. They are
        fully processed only when the new one is, too. Without anchors, no spout is informed when
        the new tuple fails.
        """

    def emit_direct(
        self, task: int, values: Sequence[Any], anchors: Anchors = None, stream: str = DEFAULT_STREAM
    ) -> None:
        """Emit on a direct stream, to one task of each bolt that subscribes."""

    def ack(self, tup: Tuple) -> None:
        """Report that this bolt has finished with a tuple. Ack or fail each tuple, once; a second
        call is ignored."""

    def fail(self, tup: Tuple) -> None:
        """Fail the trees of this tuple. Their spouts are informed immediately, not at the
        timeout."""

    def reset_timeout(self, tup: Tuple) -> None:
        """Restart the timeout of the trees that this tuple belongs to."""

    def report_error(self, error: BaseException) -> None:
        """Show an error in the status of the run, and continue."""


class BaseRichSpout(ABC):
    """A source of tuples.

    >>> from framework.topology import Fields
    >>> class Sentences(BaseRichSpout):
    ...     def open(self, conf, context, collector):
    ...         self.collector, self.waiting = collector, {1: "the cow", 2: "the moon"}
    ...     def next_tuple(self):
    ...         for number, sentence in list(self.waiting.items())[:1]:
    ...             self.collector.emit([sentence], message_id=number)
    ...     def ack(self, message_id):
    ...         self.waiting.pop(message_id, None)
    ...     def declare_output_fields(self, declarer):
    ...         declarer.declare(Fields(sentence=str))

    Source: ``org.apache.storm.topology.base.BaseRichSpout``.
    """

    def open(self, conf: Mapping[str, Any], context: TopologyContext, collector: SpoutOutputCollector) -> None:
        """Called once, in the process of the spout task, before anything else. Connect here."""

    def close(self) -> None:
        """Called when the topology stops. Not called when the process is killed."""

    @abstractmethod
    def next_tuple(self) -> None:
        """Called repeatedly. Emit pending input, usually one tuple, through the collector. Return
        without emitting when there is none. Must not block: acks and fails wait meanwhile."""

    def next_tuples(self, most: int) -> None:
        """Called repeatedly, in place of ``next_tuple``, which it calls by default. Emit up to
        ``most`` tuples: there is no room for more. For spouts that can emit many in one call, with
        ``emit_arrow``."""
        self.next_tuple()

    def ack(self, message_id: Any) -> None:
        """The tuple that was emitted with this id has been fully processed. Called once."""

    def ack_all(self, message_ids: Sequence[Any]) -> None:
        """The tuples that were emitted with these ids have been fully processed. By default, calls
        ``ack`` for each. If they were emitted by ``emit_arrow``, ``message_ids`` is a slice of its
        argument."""
        for each in message_ids:
            self.ack(each)

    def fail(self, message_id: Any) -> None:
        """The tuple that was emitted with this id has failed, or was not fully processed in time.
        Called once. The spout decides whether to emit it again."""

    def caught_up(self) -> bool:
        """Return whether the spout, as far as it knows, has no more input. Return False while it
        waits for data that is on its way. A caller that waits for a topology to be idle waits until
        this is True."""
        return True

    def unread(self) -> Mapping[str, str | None] | None:
        """Return the partitions of its source that this task has not read to their ends, each with
        the stream on which it is emitted (None: any); None while the task does not know them. Each
        partition is read in its order; ``emit`` names the partition of a tuple. Bolts that use
        event time wait for these partitions. By default, the whole input of the task is one
        partition, and is read to its end when the task has ``caught_up``."""
        return {} if self.caught_up() else {"": None}

    @abstractmethod
    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        """Called once, on the driver, by the builder."""

    def check_before_start(self, conf: Mapping[str, Any]) -> None:
        """Called by ``submit``, on the driver, before anything starts. Raise ``ConfigError`` for
        any problem that would fail immediately."""

    def check_servers(self, conf: Mapping[str, Any]) -> None:
        """Called before a topology starts, by ``ratchet check`` and ``ratchet run``. Check that the
        source exists, and change nothing. Raise ``ConfigError`` naming a missing part, and
        ``RetryableError`` when a server does not answer."""


class BaseRichBolt(Bolt):
    """A bolt that anchors, acks and fails by itself.

    >>> from framework.topology import Fields
    >>> class SplitSentence(BaseRichBolt):
    ...     def prepare(self, conf, context, collector):
    ...         self.collector = collector
    ...     def execute(self, tup):
    ...         for word in tup["sentence"].split():
    ...             self.collector.emit([word], anchors=tup)
    ...         self.collector.ack(tup)
    ...     def declare_output_fields(self, declarer):
    ...         declarer.declare(Fields(word=str))

    Source: ``org.apache.storm.topology.base.BaseRichBolt``.
    """

    def prepare(  # type: ignore[override]
        self, conf: Mapping[str, Any], context: TopologyContext, collector: RichOutputCollector
    ) -> None:
        """Called once, in the process of the bolt task, before the first tuple. Connect here, and
        keep the collector."""

    @abstractmethod
    def execute(self, tup: Tuple) -> None:
        """Called for each tuple. Ack or fail the tuple, now or once it has been used."""

    def cleanup(self) -> None:
        """Called when the topology stops. Not called when the process is killed."""
