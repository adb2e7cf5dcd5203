"""Stateful bolts, their states and state providers, and spouts that can go back to a position.

Life of a stateful bolt, in one task::

    prepare ── init_state ── execute* ──┬── pre_prepare(txid), the state is prepared
                                        ├── pre_commit(txid), the state is committed
                                        └── pre_rollback(), all changes since the last commit are
                                        forgotten; a new instance begins

Source: *Storm State Management*; ``org.apache.storm.topology.base.BaseStatefulBolt``,
``org.apache.storm.state``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Generic, TypeVar

from framework.errors import TopologyError
from framework.operators.watermarks import Reading, Source
from framework.topology.bolts import Input
from framework.topology.context import TopologyContext
from framework.topology.groupings import FieldsGrouping
from framework.topology.rich_components import BaseRichBolt, BaseRichSpout

K = TypeVar("K")
V = TypeVar("V")

#: The result of ``grouping_key`` for a key that every task has. Its value must be comparable, such
#: as a number or a time: when the number of tasks changes, each new task gets the greatest of the
#: values.
EVERY_TASK: Sequence[Any] = ("every task",)


@dataclass(frozen=True, slots=True)
class StateSize:
    """The size of a state. ``keys``: in total. ``changed``, ``changed_bytes``: number of keys that
    the last checkpoint changed, and bytes of these keys and their values in stored form."""

    keys: int = 0
    changed: int = 0
    changed_bytes: int = 0

    def __add__(self, other: StateSize) -> StateSize:
        return StateSize(self.keys + other.keys, self.changed + other.changed, self.changed_bytes + other.changed_bytes)


class State(ABC):
    """The durable data of a bolt. One object serves one task, from one thread.

    Invariant: prepared and committed changes survive a crash; other changes do not.
    """

    @property
    def txid(self) -> int | None:
        """The last committed checkpoint, 0 for none, or None when the state does not know. An id is
        checked against the topology's record."""
        return None

    @property
    def size(self) -> StateSize | None:
        """The size as of the last commit; None when the state does not know. Called after each
        checkpoint, so it must be cheap; an error is ignored."""
        return None

    @abstractmethod
    def prepare_commit(self, txid: int) -> None:
        """Save the changes, so that ``commit`` can no longer fail for missing data. Checkpoint ids
        rise."""

    @abstractmethod
    def commit(self, txid: int | None = None) -> None:
        """Make the changes prepared under ``txid`` the committed state, in one step. Does nothing
        when that has been done before. Without an id: commit all changes immediately, for callers
        that manage a state on their own."""

    @abstractmethod
    def rollback(self) -> None:
        """Discard everything that is not committed, whether prepared or not."""

    def recover(self, txid: int, *, prepared: bool, upto: int) -> None:
        """Called on a new state before ``init_state``. Go to the state of checkpoint ``txid``.

        ``prepared``: every task has prepared this checkpoint, and perhaps not committed it; commit
        it. Discard changes prepared under later ids, up to ``upto``. Changes prepared under higher
        ids belong to a later driver.
        """
        if prepared:
            self.commit(txid)
        else:
            self.rollback()

    def close(self) -> None:
        """Release resources. Commit nothing."""


class KeyValueState(State, Generic[K, V]):
    """A mapping. ``put`` stores a copy of the value; later changes to the object have no effect."""

    @abstractmethod
    def get(self, key: K, default: V | None = None) -> V | None:
        """Return a copy of the value last put, or ``default`` when the key does not exist."""

    @abstractmethod
    def put(self, key: K, value: V) -> None:
        """Set the value of a key. Raises ``BadRecordError`` when the serializer does not support
        the key or the value."""

    @abstractmethod
    def delete(self, key: K) -> None:
        """Remove a key. Does nothing when it does not exist."""

    @abstractmethod
    def items(self) -> Iterator[tuple[K, V]]:
        """Iterate over all keys with their values, in no particular order. The state may be written
        to meanwhile; the iteration may or may not show changes made after the call."""

    def multi_get(self, keys: Sequence[K]) -> list[V | None]:
        """Return several values in one call, with None for keys that do not exist."""
        return [self.get(key) for key in keys]

    #: Whether ``read_ahead`` saves time, as for remote states.
    reads_ahead: bool = False

    def read_ahead(self, keys: Iterable[K]) -> None:
        """Called before tuples are executed, with the keys that their bolt will probably read, when
        ``reads_ahead`` is True. A remote state reads them in one request."""

    def __contains__(self, key: K) -> bool:
        missing: Any = _MISSING
        return self.get(key, missing) is not missing

    #: Whether ``committed_items`` stay unchanged while they are read.
    frozen: ClassVar[bool] = False

    def committed_items(self) -> tuple[int, Iterator[tuple[K, V]]]:
        """For readers outside the topology. Return the last committed checkpoint and an iterator
        over all its entries. When the state is not ``frozen``, the items may include later changes.
        """
        return self.txid or 0, self.items()

    def sweep(self, unwanted: Callable[[V], bool], most: int) -> None:
        """Delete keys whose values are ``unwanted``. Check up to ``most`` committed keys, starting
        where the last call ended. The default checks all keys."""
        for key in [key for key, value in self.items() if unwanted(value)]:
            self.delete(key)

    def load(self, items: Iterable[tuple[K, V]], txid: int) -> None:
        """Fill an empty state and commit it as checkpoint ``txid``."""
        for key, value in items:
            self.put(key, value)
        self.prepare_commit(txid)
        self.commit(txid)


_MISSING = object()


class StateProvider(ABC):
    """Makes states. ``topology.state.provider`` names the class, as ``module.Class``. It is created
    without arguments, once per process that runs stateful bolts.

    Source: ``org.apache.storm.state.StateProvider``.
    """

    #: Whether the states survive their process. If not, a topology starts over when one of its
    #: processes is lost.
    durable: ClassVar[bool] = True

    @abstractmethod
    def new_state(self, namespace: str, conf: Mapping[str, Any], context: TopologyContext | None) -> State:
        """Return the last committed state of a namespace. ``namespace``:
        ``topology/component/layout/task``, made of letters, digits and ``._-``. It has no other
        writer. ``context``: None when the caller is not a task."""

    def check_before_start(self, conf: Mapping[str, Any]) -> None:
        """Called by ``submit`` before anything starts. Raise ``ConfigError`` for any problem that
        would fail immediately."""

    def serializers(self, conf: Mapping[str, Any]) -> tuple[Any, Any] | None:
        """Return the serializers of keys and of values, for snapshots; each has ``dumps`` and
        ``loads``. None: use MessagePack."""
        return None

    def exists(self, namespace: str, conf: Mapping[str, Any]) -> bool:
        """Whether anything has been committed in a namespace. Must not create the namespace."""
        return True

    def drop(self, namespace: str, conf: Mapping[str, Any]) -> None:
        """Remove a namespace that is no longer used."""

    def close(self) -> None:
        """Release resources that the states share."""


class BaseStatefulBolt(BaseRichBolt):
    """A bolt whose state the framework keeps and restores.

    >>> from framework.topology import Fields
    >>> class WordCount(BaseStatefulBolt):
    ...     def prepare(self, conf, context, collector):
    ...         self.collector = collector
    ...     def init_state(self, state):
    ...         self.counts = state
    ...     def execute(self, tup):
    ...         count = self.counts.get(tup["word"], 0) + 1
    ...         self.counts.put(tup["word"], count)
    ...         self.collector.emit([tup["word"], count], anchors=tup)
    ...         self.collector.ack(tup)
    ...     def declare_output_fields(self, declarer):
    ...         declarer.declare(Fields(word=str, count=int))

    Source: ``org.apache.storm.topology.base.BaseStatefulBolt``.
    """

    @abstractmethod
    def init_state(self, state: Any) -> None:
        """Called after ``prepare`` and before the first tuple, with the last committed state."""

    def bind(self, component_id: str, inputs: Sequence[Input], parallelism: int) -> None:
        super().bind(component_id, inputs, parallelism)
        grouped = {
            each.component_id: each.grouping.fields for each in inputs if isinstance(each.grouping, FieldsGrouping)
        }
        if parallelism > 1 and len({len(fields) for fields in grouped.values()}) > 1:
            ways = ", ".join(f"{source!r} by {', '.join(fields)}" for source, fields in grouped.items())
            raise TopologyError(
                f"stateful bolt {component_id!r} takes {ways}: what has the same key comes to different tasks; group all "
                "of them by as many fields, in the same order"
            )

    #: Seconds after which a key expires unless it is put again, when the state is a
    #: ``KeyValueState``. None: keys stay.
    state_ttl_s: float | None = None

    #: Set while ``execute`` works for more than its tuple: then a failure is not the fault of the
    #: tuple's source record.
    serves_several = False

    #: Whether its output combines many tuples that it has collected, and has a time of its own.
    gathers = False

    #: For bolts that follow the sources: the inputs that ``hear_reading`` reports, each with
    #: whether its rows keep the order of their source partition. Set before ``init_state``.
    follows: Mapping[Source, bool] = MappingProxyType({})

    #: Identifies the source partition of the present tuple; None if there is none.
    origin: int | None = None

    @property
    def follows_sources(self) -> bool:
        """Whether the framework must tell this bolt which source partitions have unread rows. A
        bolt that uses event time needs that."""
        return False

    def hear_reading(self, reading: Reading) -> None:
        """Called before the rows of each round, if this bolt follows the sources."""

    def take_seen(self) -> Mapping[Source, Mapping[int | None, int]]:
        """Return the newest time of each origin, by input, since the last call."""
        return {}

    #: Tuples that have come too late for a window or session of this bolt. The framework shows the
    #: number in the status and in the metrics, logs it, and resets it to 0.
    late_tuples = 0

    def tick_in_s(self) -> float | None:
        """Seconds until this task wants a tick, in addition to those of ``tick_s``. 0 or less:
        immediately. None: no such tick for now. Called again in each round.

        Under exactly-once, a tick is the root of a tree: when a tuple anchored to the tick fails,
        the whole topology goes back to a checkpoint before the tick.
        """
        return None

    def pre_prepare(self, txid: int) -> None:
        """Called before the state is prepared for a checkpoint. Put the remaining values that the
        checkpoint must contain.

        Under exactly-once, every tuple emitted here must be acked in the same round, so the
        receiving bolts must not hold it. Otherwise the checkpoint is not prepared.
        """

    def pre_commit(self, txid: int) -> None:
        """Called before the state is committed. Anything put or emitted here belongs to the next
        checkpoint."""

    def pre_rollback(self) -> None:
        """Called before the state is rolled back, on the instance that is then discarded."""

    def grouping_key(self, key: Any) -> Sequence[Any] | None:
        """Return, for a key of the state, the values of the input's grouping fields. When the
        number of tasks changes, the key moves to the task that gets its tuples.

        The default returns the key itself, or its parts when it is a tuple. An empty sequence: the
        key belongs to the task as a whole; then the number of tasks cannot change. None: the key
        concerns the old task only, and is deleted when the number of tasks changes. ``EVERY_TASK``:
        every task has the key.
        """
        return key if isinstance(key, tuple) else (key,)

    def expires(self, key: Any) -> bool:
        """Whether the value of a key expires after ``state_ttl_s``."""
        return True


class ReplayableSpout(BaseRichSpout):
    """A spout that can go back to a position. State is exactly-once only if all spouts are of this
    kind.

    Checkpoints hold the positions. After a failure, all states go back to the last checkpoint, and
    new instances of the spouts to its positions; ``fail`` is not called. A record that fails
    repeatedly ends the topology, unless the spout implements ``retries_max`` and ``give_up``.

    Life, before the first ``next_tuple``::

        open ── follow_checkpoints, where the state is exactly-once
                  ├── then seek, to the positions of a checkpoint
                  ├── or begin_anew, when the positions were forgotten
                  └── or nothing, when this spout begins for the first time
    """

    def follow_checkpoints(self) -> None:
        """Called when only checkpoints hold the positions. The framework calls ``position`` before
        the first ``next_tuple`` and records where this spout begins. Positions that the spout
        stores elsewhere serve other readers only, and must never be ahead of the last call of
        ``committed``."""

    def begin_anew(self) -> None:
        """Called when the user has had the positions of this topology forgotten. Begin where a new
        spout would begin, whatever positions are stored elsewhere. Under at-least-once, new
        instances get this call until ``position`` has returned in every task: it must raise
        ``RetryableError`` as long as old positions are stored anywhere."""

    def committed(self, position: Any) -> None:
        """A checkpoint with this task's ``position`` is committed, and will survive this
        process."""

    @property
    def retries_max(self) -> int | None:
        """How often a record is retried before it is given up. None: no record is given up, and one
        that fails ``topology.max.attempts`` times ends the topology. Otherwise a record's message
        id must be JSON-able, in 500 characters, the same whenever and in whichever task the record
        is read, and unique in the spout. Also called on the driver."""
        return None

    def give_up(self, message_id: Any) -> None:
        """Called instead of sending a record's tuple when the record has failed too often, from
        within the spout's emit. Emit the record on another stream, without a message id, or report
        that it is dropped. Called again for the same record whenever it is read again."""
        raise NotImplementedError(f"{type(self).__name__} has retries_max, and no give_up")

    @abstractmethod
    def position(self) -> Any:
        """Return the position after the tuples that this task has emitted so far, and not beyond;
        JSON-able. Called between two calls of ``next_tuple``."""

    @abstractmethod
    def seek(self, positions: Sequence[Any]) -> None:
        """Continue from the positions of a checkpoint. Called after ``open`` and before the first
        ``next_tuple``. ``positions`` holds the earlier results of ``position``, one entry per task
        at that time. Raises ``DataLossError`` when that input no longer exists."""
