"""What keeps a writer that is no longer current from writing: stamps on rows, one header per state.

Invariants (rules C1 to C4 of the protocol):

1. A state's header is raised, by compare-and-set, before any commit task of an attempt starts.
2. Every write checks, in the same atomic step, that the header is the one of its own attempt.
3. Stamps compare as (txid, epoch, attempt); neither txid nor epoch of a header ever goes back. ``done`` goes back by one
   when a transaction that was done is opened again, for a replay or a roll-back, and only then: while an attempt writes,
   its transaction is not done, so that a store which goes back to that moment is seen to lack it.
4. ``done`` is set only after every write of that txid, and before ZooKeeper says that the transaction is over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from framework.errors import ConfigError, CorruptStateError, InvariantViolation, StaleWriterError

FORMAT = 1
#: In place of a plan digest: the txid was opened, then undone; nothing of it is left, and any plan may follow (C7).
ROLLED_BACK = ""


class ValueType(Enum):
    """How a row remembers the transactions that changed it, which decides what a replay may do."""

    NON_TRANSACTIONAL = "non-transactional"
    TRANSACTIONAL = "transactional"
    OPAQUE = "opaque"


class Reach(Enum):
    """From where a state can be written (C23)."""

    PROCESS = "process"
    HOST = "host"
    NETWORK = "network"


class Stamp(NamedTuple):
    """Who wrote a row last. Ordered first by txid, then by the leader's epoch, then by the attempt."""

    txid: int
    epoch: int
    attempt_id: int


@dataclass(frozen=True, slots=True)
class CommitFence:
    """What the driver hands to the tasks of one attempt: in whose name, and from where, they write."""

    topology_id: str
    epoch: int
    plan_digest: str
    writer: str = ""
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class OpenCommit:
    """The attempt that may write now, and the digest of the plan it carries."""

    txid: int
    attempt_id: int
    plan_digest: str


@dataclass(frozen=True, slots=True)
class Standing:
    """What a new leader knows of its topology, for those that remember transactions elsewhere (C25).

    ``incarnation``: drawn when the topology's state was created, and again by ``reset --everything`` alone; empty for state
    that a version without incarnations made. ``currtx``: the next txid to commit. ``opened``: the digest of the plan that the
    commit of ``currtx`` was opened with, None when it was not.
    """

    incarnation: str
    epoch: int
    currtx: int
    opened: str | None = None


def check_format(found: object, location: str) -> None:
    """Raise ``CorruptStateError`` for a header that another version has written."""
    if found != FORMAT:
        raise CorruptStateError(f"{location}: header format {found}, and this Ratchet knows {FORMAT}")


@dataclass(frozen=True, slots=True)
class Header:
    """The one header of a state: whose it is, which leader and attempt may write, what is finished.

    ``incarnation`` is that of the topology which took the state first, so that neither a table dropped and created again
    nor a topology begun anew is mistaken for the one before. ``open`` is None until the first commit. ``done`` is the last
    finished txid, 0 at first.
    """

    topology_id: str
    incarnation: str
    epoch: int = 0
    open: OpenCommit | None = None
    done: int = 0
    format: int = FORMAT

    @property
    def stamp(self) -> Stamp:
        """The stamp of what the open attempt writes. Raises ``InvariantViolation`` when there is none."""
        if self.open is None:
            raise InvariantViolation("a write needs an open transaction")
        return Stamp(self.open.txid, self.epoch, self.open.attempt_id)

    def refused(self, expected: Header, location: str) -> StaleWriterError:
        """The error of a writer that holds ``expected`` and finds this header."""
        return StaleWriterError(
            f"{location}: open for {self.open} of epoch {self.epoch}, this writer holds {expected.open} of epoch "
            f"{expected.epoch}",
            self.epoch,
        )

    @staticmethod
    def of_document(document: Mapping[str, Any], location: str) -> Header:
        """From what ``dataclasses.asdict`` made of one. Raises ``CorruptStateError`` for a format that is not known, and
        ``KeyError``, ``TypeError`` or ``AttributeError`` for what is none."""
        check_format(document["format"], location)
        opened = document["open"]
        return Header(**{**document, "open": OpenCommit(**opened) if opened is not None else None})

    def same_attempt(self, other: Header) -> bool:
        """Whether the same attempt may write under both: one of them says more about it, and opens none."""
        if self.open is None or other.open is None:
            return False
        return (self.epoch, self.open.txid, self.open.attempt_id) == (
            other.epoch,
            other.open.txid,
            other.open.attempt_id,
        )

    def opened(self, epoch: int, open_commit: OpenCommit) -> Header:
        """The header under which that attempt writes. Its transaction is not done, also when an earlier attempt was."""
        return replace(self, epoch=epoch, open=open_commit, done=min(self.done, open_commit.txid - 1))

    def finished(self, txid: int) -> Header:
        """The header that says that every write of ``txid`` is there."""
        return replace(self, done=txid)


@dataclass(frozen=True, slots=True)
class Difference:
    """A key that holds something else than it should. ``found`` or ``expected`` None: there is, or should be, no row."""

    key: Any
    found: Any
    expected: Any

    def __str__(self) -> str:
        found = "the sink has no row" if self.found is None else f"the sink has {self.found!r}"
        expected = "the source gives none" if self.expected is None else f"the source gives {self.expected!r}"
        return f"{self.key!r}: {found}, {expected}"


class FencedState(ABC):
    """A place that committers write to, as the driver sees it. Implemented by the states in ``sinks``.

    All methods are called on the driver, one at a time; what the tasks call is the state's own business.
    Raises, any of them: ``RetryableError`` when the store does not answer, ``CorruptStateError`` when a header does
    not parse.
    """

    value_type: ValueType
    #: Whether what tasks write appears only when the driver says so: ``publish``.
    publishes: bool = False

    @property
    def can_undo(self) -> bool:
        """Whether ``sweep`` puts back what an opened transaction wrote (C8): it needs the previous values."""
        return self.value_type is not ValueType.NON_TRANSACTIONAL

    @property
    @abstractmethod
    def reach(self) -> Reach:
        """From where the state can be written."""

    @property
    @abstractmethod
    def location(self) -> str:
        """Where the state is, for messages: no secrets in it."""

    @abstractmethod
    def prepare(self, topology_id: str) -> Header:
        """Create what is missing, check what is there, and return the header. Called once per leader, before the
        first batch. Raises ``ConfigError`` when the place belongs to another topology or has the wrong shape."""

    def check(self, topology_id: str) -> None:
        """As ``prepare``, but change nothing: for ``ratchet check``, and before a run starts. Raises as ``prepare``."""

    @abstractmethod
    def read_header(self) -> Header:
        """The header as it is now."""

    @abstractmethod
    def raise_header(self, expected: Header, new: Header) -> None:
        """Replace ``expected`` by ``new`` atomically. Raises ``StaleWriterError`` when another header is found, and
        ``RetryableError`` when both are of the same attempt and the store is not the one in which it was opened (C27)."""

    @abstractmethod
    def sweep(self, header: Header) -> int:
        """Undo what earlier attempts of ``header.open.txid`` wrote and the current one did not write again (C5).
        Returns the number of rows put back. Called under ``header``, after the commit tasks of a replay."""

    def publish(self, header: Header) -> None:
        """Make what the tasks of ``header.open`` wrote the content of that txid, in one atomic step. Called after all of
        them have ended, before ``done``, of states that ``publishes``; of the same txid again when it is replayed. Raises
        ``StaleWriterError`` under another header."""

    def roll_back(self, header: Header) -> int:
        """Undo everything that any attempt of ``header.open.txid`` wrote: each row is again what the transaction before
        left, under that one's txid. Called under ``header`` when another plan is to follow (C7), of states that
        ``can_undo``. Returns the number of rows put back."""
        raise ConfigError(f"{self.location} cannot undo a transaction")

    def purge(self, header: Header, before_txid: int) -> int:
        """Remove, under ``header``, what was deleted by transactions below ``before_txid``. Returns how many rows. Called
        now and then; a state without tombstones has nothing to do."""
        return 0

    def become_scratch(self, folder: Path) -> None:
        """Turn this copy of the state into an empty one of the same shape, in ``folder``, which is not there yet, or in this
        process. Called by ``verify``. Raises ``ConfigError`` when the state cannot."""
        raise ConfigError(f"{self.location} cannot be recomputed: it has no scratch copy")

    def compare(
        self,
        scratch: FencedState,
        txid: int,
        differs: Callable[[Difference], None],
        moved: Callable[[Any], None],
    ) -> int:
        """Compare what this state had after ``txid`` with ``scratch``. Calls ``differs`` for each difference, and ``moved`` with
        each key of which that can no longer be said, because later transactions have changed it. Returns how many keys
        were compared."""
        raise ConfigError(f"{self.location} cannot be compared")

    def hold(self, keys: Sequence[Any]) -> tuple[int, Any]:
        """What these keys, which had ``moved``, hold now: a txid, and what ``compare_held`` takes. Raises ``RetryableError``
        when they change faster than they can be read."""
        raise ConfigError(f"{self.location} cannot be compared")

    def compare_held(self, scratch: FencedState, held: Any, differs: Callable[[Difference], None]) -> int:
        """Compare what was held with ``scratch``, which is where ``hold`` said. Returns how many keys were compared."""
        raise ConfigError(f"{self.location} cannot be compared")

    def clear(self, topology_id: str) -> Header:
        """Remove every row and start a new incarnation, whose header keeps the epoch. Called by ``reset`` only, under the
        topology's leadership. Raises ``ConfigError`` when the state cannot, or belongs to another topology."""
        raise ConfigError(f"{self.location} cannot be cleared by Ratchet: remove what it holds by its own means")

    @abstractmethod
    def close(self) -> None:
        """Release connections. Safe to call twice."""
