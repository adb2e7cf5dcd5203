"""The spouts and bolts of a core topology: tuples one by one, each tracked until it is fully processed, or not at all.

Life of a component (all of it in one place, for as long as the topology runs)::

    spout:  open ── next_tuple*, and ack or fail for each message id that was emitted ── close
    bolt:   prepare ── execute* ── cleanup

An instance lives from round to round: what it keeps in its attributes stays. When the process that it lives in is lost, a new
copy starts afresh; what was pending there times out, and is emitted again: without its spout when a round was lost, too.

Source: *Guaranteed message processing*.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, Union

from framework.topology.bolts import DEFAULT_STREAM, Bolt, OutputFieldsDeclarer
from framework.topology.context import TopologyContext
from framework.topology.tuples import Tuple

Anchors = Union[Tuple, Iterable[Tuple], None]


class SpoutOutputCollector(Protocol):
    """Where a spout puts what it emits."""

    def emit(self, values: Sequence[Any], message_id: Any = None, stream: str = DEFAULT_STREAM) -> None:
        """Emit the declared values, in their order. With a message id, of any type, the tuple is tracked, and the spout is told
        by ``ack`` or ``fail`` with that id what became of it; without one it is not."""

    def emit_direct(
        self, task: int, values: Sequence[Any], message_id: Any = None, stream: str = DEFAULT_STREAM
    ) -> None:
        """Emit on a direct stream, to one task of each bolt that subscribes."""

    def report_error(self, error: BaseException) -> None:
        """Show an error in the status of the run, and go on."""


class RichOutputCollector(Protocol):
    """Where a rich bolt puts what it emits, and says what became of what it received."""

    def emit(self, values: Sequence[Any], anchors: Anchors = None, stream: str = DEFAULT_STREAM) -> None:
        """Emit the declared values, in their order. ``anchors``: the tuple, or the tuples, that it was made of; when it is not
        fully processed, they are not. Without anchors, nobody hears of its failure."""

    def emit_direct(
        self, task: int, values: Sequence[Any], anchors: Anchors = None, stream: str = DEFAULT_STREAM
    ) -> None:
        """Emit on a direct stream, to one task of each bolt that subscribes."""

    def ack(self, tup: Tuple) -> None:
        """This bolt is done with a tuple. Each tuple that it gets must be acked or failed, once; a second time is ignored."""

    def fail(self, tup: Tuple) -> None:
        """The trees that this tuple belongs to have failed: their spouts hear of it at once, not when they time out."""

    def reset_timeout(self, tup: Tuple) -> None:
        """Give the trees that this tuple belongs to the whole timeout again, from now on."""

    def report_error(self, error: BaseException) -> None:
        """Show an error in the status of the run, and go on."""


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
        """Called once, where the spout task lives, before anything else: connect here."""

    def close(self) -> None:
        """Called when the topology stops. When its process is killed, it is not."""

    @abstractmethod
    def next_tuple(self) -> None:
        """Emit what there is, usually one tuple, through the collector; return without having emitted when there is nothing. It
        is called again and again, and must not block: acks and fails wait meanwhile."""

    def ack(self, message_id: Any) -> None:
        """The tuple that was emitted with this id has been fully processed. Called once."""

    def fail(self, message_id: Any) -> None:
        """The tuple that was emitted with this id has failed, or has not been fully processed in time. Called once. To emit it
        again is the spout's decision."""

    def caught_up(self) -> bool:
        """Whether the spout has nothing more to give, as far as it knows; False while it only waits for what is on its way. Who
        waits for a topology to be idle waits for this."""
        return True

    @abstractmethod
    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        """Called once, on the driver, by the builder."""

    def check_before_start(self, conf: Mapping[str, Any]) -> None:
        """Called by ``submit``, on the driver, before anything starts: raise ``ConfigError`` for what would fail at once."""


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
        """Called once, where the bolt task lives, before the first tuple: connect here, and keep the collector."""

    @abstractmethod
    def execute(self, tup: Tuple) -> None:
        """Called for each tuple. Ack or fail it, now or when it has been used."""

    def cleanup(self) -> None:
        """Called when the topology stops. When its process is killed, it is not."""
