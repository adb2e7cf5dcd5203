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

#: What ``grouping_key`` returns for a key that every task has. Its value must be comparable, such
#: as a number or a time: when the number of tasks changes, each new task gets the greatest of the
#: values.
EVERY_TASK: Sequence[Any] = ("every task",)


@dataclass(frozen=True, slots=True)
class StateSize:
    """How large a state is. ``keys``: in all. ``changed`` and ``changed_bytes``: keys that the last
    checkpoint changed, and bytes of these keys and their values as they are stored."""

    keys: int = 0
    changed: int = 0
    changed_bytes: int = 0

    def __add__(self, other: StateSize) -> StateSize:
        return StateSize(self.keys + other.keys, self.changed + other.changed, self.changed_bytes + other.changed_bytes)


class State(ABC):
    """What a bolt keeps from checkpoint to checkpoint. One object serves one task, from one thread.

    Invariant: what was prepared or committed survives a crash; the rest does not.
    """

    @property
    def txid(self) -> int | None:
        """The last committed checkpoint, 0 for none, or None when the state does not know. An id is
        checked against the topology's record."""
        return None

    @property
    def size(self) -> StateSize | None:
        """As of the last commit; None when the state does not know. Asked after each checkpoint, so
        it must be cheap; an error says nothing."""
        return None

    @abstractmethod
    def prepare_commit(self, txid: int) -> None:
        """Save what has changed, so that ``commit`` can no longer fail for missing data. Checkpoint
        ids rise."""

    @abstractmethod
    def commit(self, txid: int | None = None) -> None:
        """Make what was prepared under ``txid`` the committed state, in one step. Does nothing when
        that has been done before. Without an id: commit all changes at once, for callers that
        manage a state on their own."""

    @abstractmethod
    def rollback(self) -> None:
        """Forget everything that is not committed, whether prepared or not."""

    def recover(self, txid: int, *, prepared: bool, upto: int) -> None:
        """Called on a new state before ``init_state``. Go to the state of checkpoint ``txid``.

        ``prepared``: every task has prepared this checkpoint, and perhaps not committed it; commit
        it. Forget what was prepared beyond it, up to the id ``upto``. Anything prepared under a
        higher id belongs to a later driver.
        """
        if prepared:
            self.commit(txid)
        else:
            self.rollback()

    def close(self) -> None:
        """Release what was opened. Commit nothing."""


class KeyValueState(State, Generic[K, V]):
    """A mapping. ``put`` takes a value as it is at that moment; later changes to the object have no
    effect."""

    @abstractmethod
    def get(self, key: K, default: V | None = None) -> V | None:
        """Return a copy of the value last put, or ``default`` when the key does not exist."""

    @abstractmethod
    def put(self, key: K, value: V) -> None:
        """Set the value of a key. Raises ``BadRecordError`` when the serializer cannot take the key
        or the value."""

    @abstractmethod
    def delete(self, key: K) -> None:
        """Remove a key. Does nothing when it does not exist."""

    @abstractmethod
    def items(self) -> Iterator[tuple[K, V]]:
        """Iterate over all keys with their values, in no particular order. The state may be written
        to meanwhile; the iteration may or may not show changes made after the call."""

    def multi_get(self, keys: Sequence[K]) -> list[V | None]:
        """Return several values at once, with None for keys that do not exist."""
        return [self.get(key) for key in keys]

    #: Whether ``read_ahead`` saves anything: for states that are far away.
    reads_ahead: bool = False

    def read_ahead(self, keys: Iterable[K]) -> None:
        """Called before tuples are executed, with the keys that their bolt will probably ask for,
        when ``reads_ahead`` is True. A state that is far away reads them all at once."""

    def __contains__(self, key: K) -> bool:
        missing: Any = _MISSING
        return self.get(key, missing) is not missing

    #: Whether ``committed_items`` stay unchanged while they are read.
    frozen: ClassVar[bool] = False

    def committed_items(self) -> tuple[int, Iterator[tuple[K, V]]]:
        """For readers outside the topology. Return the last committed checkpoint and an iterator
        over everything that it holds. When the state is not ``frozen``, the items may include later
        changes."""
        return self.txid or 0, self.items()

    def sweep(self, unwanted: Callable[[V], bool], most: int) -> None:
        """Delete keys whose values are ``unwanted``. Look at up to ``most`` committed keys,
        starting where the last call ended. The default looks at all keys."""
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

    #: Whether the states survive their process. If not, a topology begins anew when one of its
    #: processes is lost.
    durable: ClassVar[bool] = True

    @abstractmethod
    def new_state(self, namespace: str, conf: Mapping[str, Any], context: TopologyContext | None) -> State:
        """Return the state of a namespace as last committed. ``namespace``:
        ``topology/component/layout/task``, made of letters, digits and ``._-``. Nobody else writes
        to it. ``context``: None when the caller is not a task."""

    def check_before_start(self, conf: Mapping[str, Any]) -> None:
        """Called by ``submit`` before anything starts. Raise ``ConfigError`` for anything that
        would fail at once."""

    def serializers(self, conf: Mapping[str, Any]) -> tuple[Any, Any] | None:
        """Return the serializers of keys and of values, for snapshots; each has ``dumps`` and
        ``loads``. None: use MessagePack."""
        return None

    def exists(self, namespace: str, conf: Mapping[str, Any]) -> bool:
        """Whether anything has been committed in a namespace. Must not create the namespace."""
        return True

    def drop(self, namespace: str, conf: Mapping[str, Any]) -> None:
        """Remove a namespace that nobody uses any more."""

    def close(self) -> None:
        """Release what the states share."""


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

    #: Set while ``execute`` works for more than its tuple: what fails then is not the fault of the
    #: record that the tuple was made of.
    serves_several = False

    #: Whether what it emits is made of many tuples that it has gathered, and has a time of its own.
    gathers = False

    #: For bolts that follow the sources: the inputs of which ``hear_reading`` tells, each with
    #: whether its rows keep the order of their source partition. Set before ``init_state``.
    follows: Mapping[Source, bool] = MappingProxyType({})

    #: Stands for the source partition of the tuple that is executed; None where there is none.
    origin: int | None = None

    @property
    def follows_sources(self) -> bool:
        """Whether this bolt needs to know what of the source partitions is still to be read,
        because it goes by the time of its tuples."""
        return False

    def hear_reading(self, reading: Reading) -> None:
        """Called before the rows of each round, where this bolt follows the sources."""

    def take_seen(self) -> Mapping[Source, Mapping[int | None, int]]:
        """Return the newest time of each origin, by input, that was seen since the last call."""
        return {}

    #: Tuples that have come too late for what this bolt gathers. The framework shows them in the
    #: status and in the metrics, writes a line to the log, and sets this to 0.
    late_tuples = 0

    def tick_in_s(self) -> float | None:
        """Seconds until this task wants a tick, in addition to those of ``tick_s``. 0 or less: at
        once. None: no such tick for now. Asked again in each round.

        Where state is exactly-once, a tick is the root of a tree: when a tuple anchored to the tick
        fails, everything goes back to a checkpoint before the tick.
        """
        return None

    def pre_prepare(self, txid: int) -> None:
        """Called before the state is prepared for a checkpoint. Put whatever the checkpoint must
        still contain.

        Where state is exactly-once, every tuple emitted here must be acked in the same round, so
        the bolts that receive it must not hold it. Otherwise the checkpoint is not prepared.
        """

    def pre_commit(self, txid: int) -> None:
        """Called before the state is committed. Anything put or emitted here belongs to the next
        checkpoint."""

    def pre_rollback(self) -> None:
        """Called before the state is rolled back, on the instance that is then discarded."""

    def grouping_key(self, key: Any) -> Sequence[Any] | None:
        """Return, for a key of the state, the values of the fields that the input is grouped by.
        When the number of tasks changes, the key moves to the task that gets its tuples.

        The default returns the key itself, or its parts when it is a tuple. An empty sequence says
        that the key belongs to the task as a whole; the number of tasks then cannot change. None
        says that the key concerns the old task only; it is forgotten when the number of tasks
        changes. ``EVERY_TASK`` says that every task has the key.
        """
        return key if isinstance(key, tuple) else (key,)

    def expires(self, key: Any) -> bool:
        """Whether the value of a key expires after ``state_ttl_s``."""
        return True


class ReplayableSpout(BaseRichSpout):
    """A spout that can go back to a position. State is exactly-once only when all spouts are of
    this kind.

    Checkpoints hold the positions. When anything fails, all states go back to the last checkpoint,
    and new instances of the spouts to its positions; ``fail`` is not called. A record that fails
    again and again ends the topology, unless the spout says what becomes of it: ``retries_max`` and
    ``give_up``.

    Life, before the first ``next_tuple``::

        open ── follow_checkpoints, where the state is exactly-once
                  ├── then seek, to the positions of a checkpoint
                  ├── or begin_anew, when the positions were forgotten
                  └── or nothing, when this spout begins for the first time
    """

    def follow_checkpoints(self) -> None:
        """Called when only checkpoints hold the positions. The framework asks ``position`` before
        the first ``next_tuple`` and records where this spout begins. Positions that the spout
        stores elsewhere are for others to read, and must never be ahead of the last call of
        ``committed``."""

    def begin_anew(self) -> None:
        """Called when the user has had the positions of this topology forgotten. Begin where an
        unknown spout would begin, whatever is stored elsewhere. Where the state is at-least-once,
        new instances are called so until ``position`` has returned in every task: it must raise
        ``RetryableError`` as long as positions from before are stored anywhere."""

    def committed(self, position: Any) -> None:
        """A checkpoint with this task's ``position`` is committed, and will survive this
        process."""

    @property
    def retries_max(self) -> int | None:
        """How often a record is tried again before it is given up. None: no record is given up, and
        one that fails ``topology.max.attempts`` times ends the topology. The message id of a record
        must be JSON-able then, in 500 characters, the same whenever the record is read, and of no
        other record of the spout, whichever task reads it. Asked on the driver too."""
        return None

    def give_up(self, message_id: Any) -> None:
        """Called while the spout emits a record that has failed too often: in the place of its
        tuple, which goes nowhere. Emit the record on another stream, without a message id, or
        report that it is dropped. Called again for the same record whenever it is read again."""
        raise NotImplementedError(f"{type(self).__name__} has retries_max, and no give_up")

    @abstractmethod
    def position(self) -> Any:
        """Return the position after what this task has emitted so far, and nothing beyond;
        JSON-able. Called between two calls of ``next_tuple``."""

    @abstractmethod
    def seek(self, positions: Sequence[Any]) -> None:
        """Continue from the positions of a checkpoint. Called after ``open`` and before the first
        ``next_tuple``. ``positions`` holds what each task of this spout returned then, one entry
        per task at that time. Raises ``DataLossError`` when that input no longer exists."""
