"""Bolts whose state is kept for them, the state, and who keeps it; and spouts that can go back.

Life of a stateful bolt, in one task::

    prepare ── init_state ── execute* ──┬── pre_prepare(txid), the state is prepared
                                        ├── pre_commit(txid), the state is committed
                                        └── pre_rollback(), all since the last commit is forgotten; a new instance begins

Source: *Storm State Management*; ``org.apache.storm.topology.base.BaseStatefulBolt``, ``org.apache.storm.state``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from framework.errors import TopologyError
from framework.topology.bolts import Input
from framework.topology.context import TopologyContext
from framework.topology.core import BaseRichBolt, BaseRichSpout
from framework.topology.groupings import FieldsGrouping

K = TypeVar("K")
V = TypeVar("V")

#: What ``grouping_key`` returns for a key of which every task has one: a number, such as a time. When the number of tasks changes,
#: each has the greatest that there was.
EVERY_TASK: Sequence[Any] = ("every task",)


class State(ABC):
    """What a bolt keeps, from checkpoint to checkpoint. One object serves one task, from one thread.

    Invariant: what has been prepared and not been committed survives a crash, and so does what has been committed; the rest does
    not.
    """

    @property
    def txid(self) -> int | None:
        """The last checkpoint that was committed, 0 for none; None when the state does not know. A state that says so is checked
        against the record of the topology."""
        return None

    @abstractmethod
    def prepare_commit(self, txid: int) -> None:
        """Save what has changed, so that ``commit`` cannot fail for lack of it. Checkpoint ids rise."""

    @abstractmethod
    def commit(self, txid: int | None = None) -> None:
        """Make what was prepared under ``txid`` the committed state, in one step; nothing when that has been done before. Without
        an id: commit all that has changed at once, for who manages a state on its own."""

    @abstractmethod
    def rollback(self) -> None:
        """Forget all that is not committed, prepared or not."""

    def recover(self, txid: int, *, prepared: bool, upto: int) -> None:
        """Called on a new state before ``init_state``: have the state of checkpoint ``txid``, which every task had ``prepared`` and
        perhaps not committed. What is prepared beyond it is to be forgotten, up to the id ``upto``: what is prepared under higher
        ones belongs to a driver that came later."""
        if prepared:
            self.commit(txid)
        else:
            self.rollback()

    def close(self) -> None:
        """Release what was opened. Commits nothing."""


class KeyValueState(State, Generic[K, V]):
    """A mapping. Values are taken as they are when they are put: what is done to an object after that is not seen."""

    @abstractmethod
    def get(self, key: K, default: V | None = None) -> V | None:
        """The value, as last put; a copy."""

    @abstractmethod
    def put(self, key: K, value: V) -> None:
        """Raises ``BadRecordError`` for what the serializer cannot take."""

    @abstractmethod
    def delete(self, key: K) -> None:
        """Nothing when the key is not there."""

    @abstractmethod
    def items(self) -> Iterator[tuple[K, V]]:
        """All keys with their values, in no order. May be written to meanwhile: what changes after the call may be seen or not."""

    def multi_get(self, keys: Sequence[K]) -> list[V | None]:
        """Several values at once; None for those that are not there."""
        return [self.get(key) for key in keys]

    def __contains__(self, key: K) -> bool:
        missing: Any = _MISSING
        return self.get(key, missing) is not missing

    #: Whether ``committed_items`` stay as they are while they are read.
    frozen: ClassVar[bool] = False

    def committed_items(self) -> tuple[int, Iterator[tuple[K, V]]]:
        """For who reads from outside: the last committed checkpoint and everything that it holds. Where the state is not
        ``frozen``, later ones may be seen as well."""
        return self.txid or 0, self.items()

    def sweep(self, unwanted: Callable[[V], bool], most: int) -> None:
        """Delete some of the keys whose values are ``unwanted``: look at ``most`` of the committed ones, going on where the last
        call has ended. By default: look at all."""
        for key in [key for key, value in self.items() if unwanted(value)]:
            self.delete(key)

    def load(self, items: Iterable[tuple[K, V]], txid: int) -> None:
        """Fill an empty state, and commit it as checkpoint ``txid``."""
        for key, value in items:
            self.put(key, value)
        self.prepare_commit(txid)
        self.commit(txid)


_MISSING = object()


class StateProvider(ABC):
    """Makes states; named by ``topology.state.provider`` as ``module.Class``. Made without arguments, once per process that runs
    stateful bolts.

    Source: ``org.apache.storm.state.StateProvider``.
    """

    #: Whether what it keeps survives the process. Otherwise a topology begins anew when a process of it is lost.
    durable: ClassVar[bool] = True

    @abstractmethod
    def new_state(self, namespace: str, conf: Mapping[str, Any], context: TopologyContext | None) -> State:
        """The state of a namespace as last committed. ``namespace``: ``topology/component/layout/task``, of letters, digits and
        ``._-``; nobody else writes to it. ``context``: None where no task asks."""

    def check_before_start(self, conf: Mapping[str, Any]) -> None:
        """Called by ``submit`` before anything starts: raise ``ConfigError`` for what would fail at once."""

    def serializers(self, conf: Mapping[str, Any]) -> tuple[Any, Any] | None:
        """What makes bytes of keys and of values, with ``dumps`` and ``loads``, for snapshots; None: MessagePack does."""
        return None

    def exists(self, namespace: str, conf: Mapping[str, Any]) -> bool:
        """Whether something has been committed in a namespace. It is not made by asking."""
        return True

    def drop(self, namespace: str, conf: Mapping[str, Any]) -> None:
        """Remove a namespace, which nobody uses any more."""

    def close(self) -> None:
        """Release what is shared by the states."""


class BaseStatefulBolt(BaseRichBolt):
    """A bolt whose state the framework keeps.

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
        """Called after ``prepare`` and before the first tuple, with the state as last committed."""

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

    #: Seconds after which a key that has not been put again is gone, where the state is a ``KeyValueState``; None: it stays.
    state_ttl_s: float | None = None

    def tick_in_s(self) -> float | None:
        """Seconds until this task wants a tick, beside those of ``tick_s``; 0 or less: at once. None: when something has come.
        Asked after each round. Where state is exactly-once, a tick is the root of a tree: when what was anchored to it fails,
        everything goes back to a checkpoint before it."""
        return None

    def pre_prepare(self, txid: int) -> None:
        """Called before the state is prepared for a checkpoint: put what is still to be in it. Where state is exactly-once, all
        that is emitted here must be acked in the same round, by bolts that do not hold it, or the checkpoint is not prepared."""

    def pre_commit(self, txid: int) -> None:
        """Called before the state is committed. What is put or emitted now belongs to the next checkpoint."""

    def pre_rollback(self) -> None:
        """Called before the state is rolled back, on the instance that ends with it."""

    def grouping_key(self, key: Any) -> Sequence[Any] | None:
        """Of a key of the state: the values of the fields that the input is grouped by, so that the key goes where its tuples go
        when the number of tasks changes. By default the key itself, or its parts when it is a tuple. An empty one: it belongs to
        the task as a whole, and the number of tasks cannot change. None: it is of the task as it is, and is forgotten then.
        ``EVERY_TASK``: see there."""
        return key if isinstance(key, tuple) else (key,)


class ReplayableSpout(BaseRichSpout):
    """A spout that can go back to a position: with such spouts alone, state is exactly-once.

    Checkpoints hold the positions. When anything fails, all states go back to the last checkpoint, and new instances of the spouts
    to its positions; ``fail`` is not called then.

    Life, before the first ``next_tuple``::

        open ── follow_checkpoints, where the state is exactly-once ──┬── seek, to the positions of a checkpoint
                                                                      ├── begin_anew, when the positions were forgotten
                                                                      └── nothing: this spout begins for the first time
    """

    def follow_checkpoints(self) -> None:
        """Checkpoints hold the positions, and nobody else does: where this spout begins is asked by ``position`` before its first
        ``next_tuple``, and recorded. What it keeps of its positions elsewhere is for others to read, and never ahead of what
        ``committed`` was told."""

    def begin_anew(self) -> None:
        """The positions of this topology were forgotten by explicit wish: begin where a spout begins that nobody knows anything of,
        whatever is kept elsewhere."""

    def committed(self, position: Any) -> None:
        """A checkpoint is committed in which this task said ``position``, and it survives this process."""

    @abstractmethod
    def position(self) -> Any:
        """What this task has emitted so far, and nothing beyond; JSON-able. Called between two calls of ``next_tuple``."""

    @abstractmethod
    def seek(self, positions: Sequence[Any]) -> None:
        """Go on from where a checkpoint was. Called after ``open``, before the first ``next_tuple``, with what each task of this
        spout said then: as many as there were tasks. Raises ``DataLossError`` for input that is no longer there."""
