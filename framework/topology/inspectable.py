"""What the tools look for in states and bolts, beside what a topology needs of them.

The capability is one: a state gives its rows as of a transaction, and becomes a scratch copy.
``verify``, ``explain``, ``replay``, ``rebuild`` and ``read`` stand on it. It is optional: the tools
name a state that lacks it in one line, and leave it alone. A topology runs without it.
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
from framework.topology.snapshots import StateReading

if TYPE_CHECKING:
    import pyarrow as pa

    from framework.topology.bolts import Bolt

#: The places next to a state: of the rows that ``rebuild`` makes, and of those from before it.
REBUILT, FORMER = "rebuilt", "former"


@dataclass(frozen=True, slots=True)
class Difference:
    """A key whose value differs from what the source gives. ``found`` None: the sink has no row.
    ``expected`` None: there should be no row."""

    key: Any
    found: Any
    expected: Any

    def __str__(self) -> str:
        found = "the sink has no row" if self.found is None else f"the sink has {self.found!r}"
        expected = "the source gives none" if self.expected is None else f"the source gives {self.expected!r}"
        return f"{self.key!r}: {found}, {expected}"


@dataclass(frozen=True, slots=True)
class Change:
    """What a replayed transaction makes of a key, and what the sink holds.

    ``before``: the value that it started from. ``after``: the value that it gives. ``held``: the
    value that the sink had after that transaction. None: no value. ``agrees``: whether ``held`` is
    right; None where the sink does not tell any more, because a later transaction has changed the
    key, or another one that this value depends on: ``before`` and ``held`` are None then, too.
    """

    key: Any
    before: Any
    after: Any
    held: Any
    agrees: bool | None


@dataclass(frozen=True, slots=True)
class EventTime:
    """How far the event time of a topology has come. ``watermark``: microseconds since 1970; None:
    it has not begun. ``held_up_by``: the source partition that is the furthest behind of those that
    count, by its fields; None: none counts."""

    watermark: int | None
    held_up_by: str | None


@runtime_checkable
class TimedBolt(Protocol):
    """A committer that keeps the event time of its topology."""

    def event_time(self) -> EventTime | None:
        """As of the last transaction; None before the first one."""


class InspectableState(FencedState):
    """A state that gives its rows as of a transaction, and can become a scratch copy.

    All methods are called in the process of a tool, on a copy of the state.
    """

    @abstractmethod
    def reading(self, topology_id: str | None = None) -> AbstractContextManager[StateReading]:
        """The state, opened to be read whole as of one transaction; a driver may write meanwhile.
        ``topology_id``: of the owner that it must have; None: any. Raises ``ConfigError``, which
        says why, where a state cannot be read so, and where there is nothing yet."""

    @abstractmethod
    def become_scratch(self, folder: Path) -> None:
        """Turn this copy of the state into an empty one of the same shape, kept in ``folder``,
        which does not exist yet, or in this process."""

    @abstractmethod
    def become_replay(self, folder: Path, txid: int, topology_id: str) -> None:
        """Turn this copy of the state into one in which transaction ``txid`` is committed again: it
        reads what the state held before that transaction, as far as the state still tells, and
        writes into ``folder``, which does not exist yet. A place with nothing in it yet counts as
        empty. Raises ``ConfigError`` when the place belongs to another topology or has other
        columns."""

    @abstractmethod
    def changes(self, replayed: FencedState, txid: int) -> Iterator[Change]:
        """What transaction ``txid`` wrote into ``replayed``, a copy that has become a replay of it,
        and what this state holds of it."""

    @abstractmethod
    def pages(self, scratch: FencedState) -> Iterator[Sequence[Any]]:
        """The keys of this state, and those that only ``scratch`` has, page by page."""

    @abstractmethod
    def held(self, keys: Sequence[Any], txid: int) -> Mapping[Any, Any]:
        """What the state held of these keys after ``txid``. Without the keys of which that is no
        longer known, because later transactions have changed them."""

    @abstractmethod
    def compare(self, held: Mapping[Any, Any], scratch: FencedState, differs: Callable[[Difference], None]) -> int:
        """Compare what ``held`` returned with ``scratch``, which has been brought to the same txid.
        Calls ``differs`` for each difference. Returns the number of keys compared."""


class RebuildableState(InspectableState):
    """An inspectable state whose rows can be exchanged for others, for ``rebuild``."""

    @abstractmethod
    def become_beside(self, place: str) -> None:
        """Turn this copy of the state into the one of the same shape next to it, in the same store.
        ``place``: ``REBUILT`` or ``FORMER``. Raises ``ConfigError`` when the state cannot exchange
        its content with another one."""

    @abstractmethod
    def check_exchange(self, topology_id: str) -> None:
        """Raise ``ConfigError``, which says what to do, when an exchange would be refused."""

    @abstractmethod
    def exchange(self, expected: Header, new: Header, rebuilt: Header) -> None:
        """Give the rows in ``REBUILT`` the place of this state's own, in one atomic step. Its own
        go to ``FORMER``; what was there is removed, and nothing stays in ``REBUILT``. The header
        ``expected`` becomes ``new``. The header in ``FORMER`` is ``expected`` with the incarnation
        of ``rebuilt``, so that everybody can see which rows have taken the place. Raises
        ``StaleWriterError`` when the header is not ``expected``, or that in ``REBUILT`` is not
        ``rebuilt``, and ``ConfigError`` as ``check_exchange``; nothing is changed then."""

    @abstractmethod
    def remove(self, topology_id: str) -> bool:
        """Remove rows, header, and what holds them. Called on what stands next to a state. Returns
        whether there was anything. Raises ``ConfigError`` when it is somebody else's."""


class KeyedState(InspectableState):
    """A state that holds one value per key, as ``explain`` sees it. A key is a tuple, and so is a
    value."""

    @abstractmethod
    def key_of(self, text: str) -> tuple[Any, ...]:
        """The key that a person has written: the text of it, or a JSON array where a key has
        several columns. Raises ``ConfigError``, which says what is wrong with it."""

    @abstractmethod
    def by_column(self, value: tuple[Any, ...] | None) -> Mapping[str, Any] | None:
        """A value with the names of its columns."""

    @abstractmethod
    def written(self, key: tuple[Any, ...], txid: int) -> bool:
        """Whether transaction ``txid``, the last one in this state, has written the key."""

    @abstractmethod
    def recomputed(self, key: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """As a scratch copy: the value that a sink should hold; None: no value."""


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
    """A bolt that says which bolt recomputes it. One that shares less code with the original finds
    more of its faults."""

    def recounting(self, folder: Path) -> Bolt:
        """Called on the driver, on a copy of this bolt. Return the bolt that computes the content
        of this bolt's states once more, in an empty ``folder``. Raises ``ConfigError`` when it
        cannot."""


@runtime_checkable
class NarrowedBolt(Protocol):
    """A recomputing bolt that can leave out the rows of other keys."""

    def narrow(self, key: tuple[Any, ...]) -> None:
        """Called by ``explain``, on the driver: only this key of the state is of interest."""


@runtime_checkable
class SubstitutedBolt(Protocol):
    """A committer that writes to a place without a scratch copy, such as a table of a database or a
    topic. It says what stands for it in a test."""

    def substitute(self, folder: Path) -> Bolt:
        """Called on a copy of this bolt, which is bound to its inputs. Return the committer of the
        test, which writes into ``folder``, which does not exist yet, and nowhere else. Raises
        ``ConfigError`` where nothing can stand for the place."""


@runtime_checkable
class WrittenRows(Protocol):
    """A state that a test reads whole."""

    def rows_written(self) -> pa.Table:
        """The rows, in the order in which they were written."""


def with_scratch_states(bolt: Bolt, folder: Path) -> Bolt:
    """The bolt, a copy, with states in ``folder`` that start empty. Raises ``ConfigError`` where a
    state has no scratch copy."""
    for number, state in enumerate(bolt.states()):
        inspectable(state, purpose="be recomputed").become_scratch(folder / str(number))
    return bolt
