"""Capabilities of states and bolts for the tools, beyond the needs of a topology.

The central capability: a state returns its rows as of a transaction, and can become a scratch copy.
``verify``, ``explain``, ``replay``, ``rebuild`` and ``read`` depend on it. It is optional: the
tools report a state that lacks it in one line, and skip it. A topology runs without it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from framework.errors import ConfigError
from framework.topology.fencing import FencedState, Header
from framework.topology.state_snapshot_reader import StateReading

if TYPE_CHECKING:
    import pyarrow as pa

    from framework.topology.bolts import Bolt

#: The locations next to a state: for the rows that ``rebuild`` makes, and for the rows that they
#: replaced.
REBUILT, FORMER = "rebuilt", "former"


@dataclass(frozen=True, slots=True)
class Difference:
    """A key whose value differs from the value recomputed from the source. ``found`` None: the sink
    has no row. ``expected`` None: there should be no row."""

    key: Any
    found: Any
    expected: Any

    def __str__(self) -> str:
        found = "the sink has no row" if self.found is None else f"the sink has {self.found!r}"
        expected = "the source gives none" if self.expected is None else f"the source gives {self.expected!r}"
        return f"{self.key!r}: {found}, {expected}"


@dataclass(frozen=True, slots=True)
class Change:
    """The effect of a replayed transaction on a key, compared with the sink.

    * ``before``: the value before the transaction.
    * ``after``: the value that the replay gives.
    * ``held``: the value that the sink had after that transaction.

    None: no value. ``agrees``: whether ``held`` is right. ``agrees`` is None when the sink no
    longer knows, because a later transaction has changed the key, or another key on which this
    value depends; then ``before`` and ``held`` are None, too.
    """

    key: Any
    before: Any
    after: Any
    held: Any
    agrees: bool | None


@dataclass(frozen=True, slots=True)
class EventTime:
    """The event time of a topology. ``watermark``: microseconds since 1970; None: it has not begun.
    ``held_up_by``: the source partition that is furthest behind among those that count, by its
    fields; None: none counts. ``newest``: the newest event time of a record, in microseconds; None:
    it has not begun."""

    watermark: int | None
    held_up_by: str | None
    newest: int | None


@runtime_checkable
class TimedBolt(Protocol):
    """A committer that keeps the event time of its topology."""

    def event_time(self) -> EventTime | None:
        """The event time as of the last transaction; None before the first one."""


@runtime_checkable
class LateBolt(Protocol):
    """A committer that sends late records to separate streams. A row of such a stream may represent
    several records."""

    late_streams: frozenset[str]

    def late_for(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The columns of a late row that identify the result for which it was late."""

    def is_late_with(self, row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        """Whether the records of a late row are among those of another late row."""

    def make_all_late(self) -> None:
        """Called by ``explain``, on the driver, on a copy of the bolt: all records are late."""


class InspectableState(FencedState):
    """A state that returns its rows as of a transaction, and can become a scratch copy.

    All methods are called in the process of a tool, on a copy of the state.
    """

    @abstractmethod
    def reading(self, topology_id: str | None = None) -> AbstractContextManager[StateReading]:
        """Open the state for reading all rows as of one transaction; a driver may write meanwhile.
        ``topology_id``: of the required owner; None: any. Raises ``ConfigError`` with the reason
        when a state cannot be read in this way, or does not exist yet."""

    @abstractmethod
    def become_scratch(self, folder: Path) -> None:
        """Turn this copy of the state into an empty one of the same shape, kept in ``folder``,
        which does not exist yet, or in this process."""

    @abstractmethod
    def become_replay(self, folder: Path, txid: int, topology_id: str) -> None:
        """Turn this copy of the state into one in which transaction ``txid`` is committed again: it
        reads the values before that transaction, as far as the state still has them, and writes
        into ``folder``, which does not exist yet. A target that is still empty is accepted. Raises
        ``ConfigError`` when the target belongs to another topology or has other columns."""

    @abstractmethod
    def changes(self, replayed: FencedState, txid: int) -> Iterator[Change]:
        """The rows that transaction ``txid`` wrote into ``replayed``, a copy that has become a
        replay of it, compared with this state."""

    @abstractmethod
    def pages(self, scratch: FencedState) -> Iterator[Sequence[Any]]:
        """The keys of this state, and those that only ``scratch`` has, page by page."""

    @abstractmethod
    def held(self, keys: Sequence[Any], txid: int) -> Mapping[Any, Any]:
        """The values of these keys after ``txid``. Keys that later transactions have changed, so
        that the value is no longer known, are missing."""

    @abstractmethod
    def compare(self, held: Mapping[Any, Any], scratch: FencedState, differs: Callable[[Difference], None]) -> int:
        """Compare the result of ``held`` with ``scratch``, which has been brought to the same txid.
        Calls ``differs`` for each difference. Returns the number of keys compared."""

    def doubts(self, differences: Sequence[Difference]) -> str:
        """The reason, in a few words, why other code may have caused some of these differences by
        changing rows as they are written; empty if there is none."""
        return ""


class RebuildableState(InspectableState):
    """An inspectable state whose rows can be exchanged for others, for ``rebuild``."""

    @abstractmethod
    def become_beside(self, place: str) -> None:
        """Turn this copy of the state into the state of the same shape next to it, in the same
        store. ``place``: ``REBUILT`` or ``FORMER``. Raises ``ConfigError`` when the state cannot
        exchange its content."""

    @abstractmethod
    def check_exchange(self, topology_id: str) -> None:
        """Raise ``ConfigError``, which says what to do, when an exchange would be refused."""

    @abstractmethod
    def exchange(self, expected: Header, new: Header, rebuilt: Header) -> None:
        """Replace this state's rows by those in ``REBUILT``, in one atomic step. The replaced rows
        go to ``FORMER``, whose old content is removed; ``REBUILT`` becomes empty.

        The header ``expected`` becomes ``new``. The header in ``FORMER`` is ``expected`` with the
        incarnation of ``rebuilt``, which shows which rows replaced these. Raises
        ``StaleWriterError`` when the header is not ``expected``, or that in ``REBUILT`` is not
        ``rebuilt``, and ``ConfigError`` as ``check_exchange``; then nothing is changed."""

    @abstractmethod
    def remove(self, topology_id: str) -> bool:
        """Remove rows, header, and their containers. Called on a state next to the original.
        Returns whether there was anything to remove. Raises ``ConfigError`` when it belongs to
        another topology."""


class KeyedState(InspectableState):
    """A state that holds one value per key, as ``explain`` uses it. A key is a tuple, and so is a
    value."""

    @abstractmethod
    def key_of(self, text: str) -> tuple[Any, ...]:
        """Parse a key that a user has typed: plain text, or a JSON array if a key has several
        columns. Raises ``ConfigError`` with the problem."""

    def key_columns(self) -> Sequence[str]:
        """The columns of a key; empty if unknown."""
        return ()

    @abstractmethod
    def by_column(self, value: tuple[Any, ...] | None) -> Mapping[str, Any] | None:
        """A value with the names of its columns."""

    @abstractmethod
    def written(self, key: tuple[Any, ...], txid: int) -> bool:
        """Whether transaction ``txid``, the last one in this state, has written the key."""

    @abstractmethod
    def recomputed(self, key: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The value that a sink should hold, in a scratch copy; None: no value."""


def inspectable(state: FencedState, *, purpose: str) -> InspectableState:
    """The state, for a tool. ``purpose``: such as "be replayed". Raises ``ConfigError``."""
    if isinstance(state, InspectableState):
        return state
    raise ConfigError(
        f"{state.location} cannot {purpose}: it has no scratch copy, and no rows as of a transaction (InspectableState)"
    )


def rebuildable(state: FencedState) -> RebuildableState:
    """The state, for ``rebuild``. Raises ``ConfigError``."""
    if isinstance(state, RebuildableState):
        return state
    raise ConfigError(f"{state.location} cannot be rebuilt: it cannot exchange its content for another one")


@runtime_checkable
class RecountedBolt(Protocol):
    """A bolt that names another bolt to recompute it. The less code both share, the more faults are
    found."""

    def recounting(self, folder: Path) -> Bolt:
        """Called on the driver, on a copy of this bolt. Return the bolt that recomputes the content
        of this bolt's states, in an empty ``folder``. Raises ``ConfigError`` when it cannot."""


@runtime_checkable
class ReplayedBolt(Protocol):
    """A bolt that says which bolt commits a transaction again. By default, its states say."""

    def replaying(self, folder: Path, txid: int, topology_id: str) -> Bolt:
        """Called on the driver, on a copy of this bolt. Return the bolt that commits ``txid`` into
        ``folder``, which does not exist yet: its states are as after
        ``InspectableState.become_replay``. Raises as that."""


@runtime_checkable
class NarrowedBolt(Protocol):
    """A recomputing bolt that can leave out the rows of other keys."""

    def narrow(self, key: tuple[Any, ...]) -> None:
        """Called by ``explain``, on the driver: only this key of the state is needed."""


@runtime_checkable
class SubstitutedBolt(Protocol):
    """A committer whose target has no scratch copy, such as a table of a database or a topic. It
    provides a substitute for tests."""

    def substitute(self, folder: Path) -> Bolt:
        """Called on a copy of this bolt, which is bound to its inputs. Return a committer for the
        test, which writes only into ``folder``, which does not exist yet. Raises ``ConfigError``
        when there is no substitute for the target."""


@runtime_checkable
class WrittenRows(Protocol):
    """A state whose rows a test can read."""

    def rows_written(self) -> pa.Table:
        """The rows, in the order in which they were written."""


def with_scratch_states(bolt: Bolt, folder: Path) -> Bolt:
    """A copy of the bolt with states in ``folder`` that start empty. Raises ``ConfigError`` when a
    state has no scratch copy."""
    for number, state in enumerate(bolt.states()):
        inspectable(state, purpose="be recomputed").become_scratch(folder / str(number))
    return bolt
