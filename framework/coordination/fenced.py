"""Writes under an epoch: fences a leader's changes, and determines the outcome of a write whose
reply was lost. Independent of any client library.

Invariants:

1. Every write replaces the fence in the same atomic step as its changes. The fence is a document
   (epoch, write sequence); it is replaced only under the version that this leader last saw. So a
   deposed leader's write fails as a whole, whatever it contains.
2. After a lost reply the fence is read. Its sequence says whether the write was applied; neither
   outcome is assumed (C3).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from framework.coordination.store import Change, Leadership
from framework.coordination.transactional_state import decode_document, encode_document
from framework.errors import CorruptStateError, InvariantViolation, LeadershipLostError, StaleWriterError


class ReplyLost(Exception):
    """A request was sent, and its outcome is unknown."""


class FenceMoved(Exception):
    """The fence was not at the expected version. Nothing was written."""


class FencedLeadership(Leadership):
    """A leadership over a store that can compare a version and write several nodes in one atomic
    step."""

    def __init__(self, base: str, epoch: int, version: int) -> None:
        self.epoch = epoch
        self._base = base
        self._version = version
        self._sequence = 0

    def apply(self, changes: Sequence[Change]) -> None:
        node = f"{self._base}/epoch"
        fence = encode_document({"epoch": self.epoch, "sequence": self._sequence + 1}, node)
        while True:
            if self.lost:
                raise LeadershipLostError(f"{self._base}: the session of epoch {self.epoch} has ended")
            try:
                self._send(changes, fence, self._version)
                break
            except ReplyLost:
                if self._was_applied():
                    break
            except FenceMoved:
                epoch, _ = self._read_fence_surely()
                raise self._stale(epoch) from None
        self._version += 1
        self._sequence += 1

    @abstractmethod
    def _send(self, changes: Sequence[Change], fence: bytes, version: int) -> None:
        """Apply the changes and write ``fence`` to its node, atomically, if that node's version is
        ``version``. Raises ``FenceMoved`` or ``ReplyLost``."""

    @abstractmethod
    def _read_fence(self) -> bytes | None:
        """Return the present fence, or None when the node does not exist. Raises ``ReplyLost``,
        after a short wait."""

    def _was_applied(self) -> bool:
        epoch, sequence = self._read_fence_surely()
        if epoch != self.epoch:
            raise self._stale(epoch)
        if sequence < self._sequence:
            raise CorruptStateError(
                f"{self._base}/epoch: sequence {sequence}, and {self._sequence} was acknowledged to this leader: the state went "
                "back, as by a backup that was restored under a running topology; restore what is newer, and start again"
            )
        if sequence > self._sequence + 1:
            raise InvariantViolation(f"{self._base}/epoch: sequence {sequence}, this leader is at {self._sequence}")
        return sequence == self._sequence + 1

    def _read_fence_surely(self) -> tuple[int, int]:
        while True:
            if self.lost:
                raise LeadershipLostError(f"{self._base}: the session of epoch {self.epoch} has ended")
            try:
                data = self._read_fence()
            except ReplyLost:
                continue
            if data is None:
                raise CorruptStateError(f"{self._base}/epoch is gone: the state was removed while a topology ran on it")
            return fence_of(data, f"{self._base}/epoch")

    def _stale(self, epoch: int) -> StaleWriterError:
        return StaleWriterError(f"{self._base}: epoch {epoch} leads, this is epoch {self.epoch}", epoch)


def fence_of(data: bytes, node: str) -> tuple[int, int]:
    """Return (epoch, sequence). Raises ``CorruptStateError`` when the document is not a fence."""
    value = decode_document(data, node)
    if not isinstance(value, dict) or not all(isinstance(value.get(key), int) for key in ("epoch", "sequence")):
        raise CorruptStateError(f"{node}: not an epoch document; restore the node from a backup")
    return value["epoch"], value["sequence"]
