"""Stops a writer that is no longer current, by stamps on rows and one header per state.

Invariants (rules C1 to C4 of the protocol):

1. A state's header is raised, by compare-and-set, before any commit task of an attempt starts; or
   in the same atomic step as all that the only task of the attempt writes, and as ``done``
   (``CommitFence.opens_from``).
2. Every write checks, in the same atomic step, that the header is the one of its own attempt, or
   the one from which its attempt is opened in that step.
3. Stamps compare as (txid, epoch, attempt). The txid and the epoch of a header never go back.
   ``done`` goes back by one only when a transaction that was done is opened again, for a replay or
   a roll-back: its transaction is not done while an attempt writes. So a store that is restored to
   that moment is recognised as lacking the transaction.
4. ``done`` is set only after every write of that txid, and before ZooKeeper says that the
   transaction is over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

from framework.document_type_checks import check_fields
from framework.errors import ConfigError, CorruptStateError, InvariantViolation, StaleWriterError, escaped, reason_of

FORMAT = 1
#: Stands in place of a plan digest: the txid was opened and then undone. Nothing of it is left, and
#: any plan may follow (C7).
ROLLED_BACK = ""
#: Tombstones are removed once in this many transactions, because the removal may cost a scan.
PURGE_EVERY = 1_000


class ValueType(Enum):
    """How a row remembers the transactions that changed it. This decides what a replay may do."""

    NON_TRANSACTIONAL = "non-transactional"
    TRANSACTIONAL = "transactional"
    OPAQUE = "opaque"


class Reach(Enum):
    """The processes that can write to a state: this one only, those of this host, or any (C23)."""

    PROCESS = "process"
    HOST = "host"
    NETWORK = "network"


class Stamp(NamedTuple):
    """Which attempt wrote a row last. Ordered by txid, then by the leader's epoch, then by the
    attempt."""

    txid: int
    epoch: int
    attempt_id: int


@dataclass(frozen=True, slots=True)
class CommitFence:
    """What the driver hands to the tasks of one attempt, so that they can prove that they may
    write. ``opens_from``: the header that the state has before this attempt is open in it; given
    where the only task of the commit raises it, writes, and sets ``done``, in one atomic step."""

    topology_id: str
    epoch: int
    plan_digest: str
    writer: str = ""
    incarnation: str = ""
    _: KW_ONLY
    opens_from: Header | None = None


@dataclass(frozen=True, slots=True)
class OpenCommit:
    """The attempt that may write now, and the digest of the plan it carries."""

    txid: int
    attempt_id: int
    plan_digest: str


@dataclass(frozen=True, slots=True)
class Standing:
    """What a new leader knows of its topology. Committers that remember transactions outside of
    states check it (C25).

    ``incarnation``: drawn when the topology's state was created, and drawn again only by ``reset
    --everything``. Empty for state that a version without incarnations created. ``currtx``: the
    next txid to commit. ``opened``: the digest of the plan that the commit of ``currtx`` was opened
    with; None when it was not opened.
    """

    incarnation: str
    epoch: int
    currtx: int
    opened: str | None = None


#: No text of a header is longer. So much of one that is damaged is shown.
_TEXT_MAX, _SHOWN = 1_000, 60


def check_format(found: object, location: str) -> None:
    """Raise ``CorruptStateError`` for a header that another version wrote."""
    if found != FORMAT:
        raise CorruptStateError(
            f"{location}: header format {found}, and this Ratchet knows {FORMAT}; run the newer version"
        )


@dataclass(frozen=True, slots=True)
class Header:
    """The one header of a state: its owner, the leader and the attempt that may write, and the last
    finished txid.

    ``incarnation`` is that of the topology that first used the state. It distinguishes a table that
    was dropped and created again, or a topology that was started from nothing, from the former one.
    ``open`` is None until the first commit. ``done`` is the last finished txid, 0 at first.
    """

    topology_id: str
    incarnation: str
    _: KW_ONLY
    epoch: int = 0
    open: OpenCommit | None = None
    done: int = 0
    format: int = FORMAT

    @property
    def stamp(self) -> Stamp:
        """The stamp on every row that the open attempt writes. Raises ``InvariantViolation`` when
        no attempt is open."""
        if self.open is None:
            raise InvariantViolation("a write needs an open transaction")
        return Stamp(self.open.txid, self.epoch, self.open.attempt_id)

    def refused(self, expected: Header, location: str) -> StaleWriterError:
        """Return the error for a writer that holds ``expected`` and finds this header."""
        return StaleWriterError(
            f"{location}: open for {self.open} of epoch {self.epoch}, this writer holds {expected.open} of epoch "
            f"{expected.epoch}",
            self.epoch,
        )

    @staticmethod
    def of_document(document: Mapping[str, Any], location: str) -> Header:
        """Read a header from its ``dataclasses.asdict`` dictionary. Raises ``CorruptStateError``
        for an unknown format, and ``KeyError``, ``TypeError`` or ``AttributeError`` when the
        document is not a header."""
        check_format(document["format"], location)
        opened = document["open"]
        if opened is not None:
            check_fields(OpenCommit, opened)
        known = {**document, "open": OpenCommit(**opened) if opened is not None else None}
        check_fields(Header, known)
        texts = (known["topology_id"], known["incarnation"], opened["plan_digest"] if opened is not None else "")
        for text in texts:
            if len(text) > _TEXT_MAX or escaped(text) != text:
                raise CorruptStateError(
                    f"{location}: its header has the text {reason_of(text[:_SHOWN])!r}, of {len(text):,} characters, which no "
                    "topology writes: restore the header"
                )
        return Header(**known)

    def same_attempt(self, other: Header) -> bool:
        """Whether the same attempt may write under both headers. False when one of them is not
        open."""
        if self.open is None or other.open is None:
            return False
        return (self.epoch, self.open.txid, self.open.attempt_id) == (
            other.epoch,
            other.open.txid,
            other.open.attempt_id,
        )

    def opened(self, epoch: int, open_commit: OpenCommit) -> Header:
        """The header under which that attempt writes. It says that the transaction is not done,
        even when an earlier attempt had finished it."""
        return replace(self, epoch=epoch, open=open_commit, done=min(self.done, open_commit.txid - 1))

    def finished(self, txid: int) -> Header:
        """The header that says that every write of ``txid`` has been made."""
        return replace(self, done=txid)

    def done_as_open(self) -> Header:
        """The header that says that every write of the open attempt has been made."""
        return self.finished(self.stamp.txid)

    def tells_absence(self, txid: int) -> bool:
        """Whether a key without a row had no value as of ``txid``. If tombstones were purged after
        that, its own may be among them."""
        newest = max(self.done, self.open.txid if self.open is not None else 0)
        purged_at = newest - newest % PURGE_EVERY  # of transactions below this one
        return txid >= purged_at - 1


class FencedState(ABC):
    """A place that committers write to, as the driver sees it. Implemented by the states in
    ``sinks``.

    All methods are called on the driver, one at a time. What the tasks call is up to the state. The
    tools, such as ``verify``, look for more: see ``framework.topology.inspectable``.
    Every method raises ``RetryableError`` when the store does not answer, and ``CorruptStateError``
    when a header cannot be parsed.
    """

    value_type: ValueType
    #: Whether what tasks write becomes visible only when the driver calls ``publish``.
    publishes: bool = False
    #: Whether rows of other tables may refer to its rows, as by a foreign key.
    may_be_referenced: bool = True
    #: Whether each transaction leaves files: many small transactions leave many small files.
    leaves_files: bool = False

    @property
    def can_undo(self) -> bool:
        """Whether ``sweep`` can restore what an opened transaction overwrote (C8). This needs the
        previous values."""
        return self.value_type is not ValueType.NON_TRANSACTIONAL

    @property
    @abstractmethod
    def reach(self) -> Reach:
        """The processes that can write to the state."""

    @property
    @abstractmethod
    def location(self) -> str:
        """Where the state is, for messages. Contains no secrets."""

    @abstractmethod
    def prepare(self, topology_id: str) -> Header:
        """Create what is missing, check what exists, and return the header. Called once per leader,
        before the first batch. Raises ``ConfigError`` when the place belongs to another topology or
        has the wrong shape."""

    def check(self, topology_id: str) -> Header | None:
        """Check as ``prepare`` does, but change nothing. Returns the header, or None where there is
        none yet. For ``ratchet check``, and before a run starts. Raises as ``prepare``."""
        return None

    @abstractmethod
    def read_header(self) -> Header:
        """The header as it is now."""

    @abstractmethod
    def raise_header(self, expected: Header, new: Header) -> None:
        """Replace ``expected`` by ``new`` atomically. Raises ``StaleWriterError`` when it finds
        another header, and ``RetryableError`` when both are of the same attempt and the store is
        not the one in which it was opened (C27)."""

    @abstractmethod
    def sweep(self, header: Header) -> int:
        """Undo what earlier attempts of ``header.open.txid`` wrote and the current one did not
        write again (C5). Called under ``header``, after the commit tasks of a replay. Returns the
        number of rows restored."""

    def publish(self, header: Header) -> None:
        """Make what the tasks of ``header.open`` wrote the content of that txid, in one atomic
        step.

        Called when ``publishes`` is True, after all those tasks have ended and before ``done`` is
        set. Called for the same txid again when it is replayed. Raises ``StaleWriterError`` under
        another header.
        """

    def roll_back(self, header: Header) -> int:
        """Undo everything that any attempt of ``header.open.txid`` wrote. Each row is then as the
        transaction before left it, under the txid of that transaction.

        Called under ``header``, when ``can_undo`` is True, before another plan follows (C7).
        Returns the number of rows restored.
        """
        raise ConfigError(f"{self.location} cannot undo a transaction")

    def purge(self, header: Header, before_txid: int) -> int:
        """Remove, under ``header``, the tombstones of rows that transactions below ``before_txid``
        deleted. Called now and then. Returns the number of rows removed. A state without tombstones
        has nothing to do."""
        return 0

    def clear(self, topology_id: str) -> Header:
        """Remove every row and start a new incarnation. Its header keeps the epoch. Called by
        ``reset`` only, under the topology's leadership. Raises ``ConfigError`` when the state
        cannot be cleared, or belongs to another topology."""
        raise ConfigError(f"{self.location} cannot be cleared by Ratchet: remove what it holds by its own means")

    @abstractmethod
    def close(self) -> None:
        """Release connections. Safe to call twice."""
