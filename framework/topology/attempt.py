"""Identifies a transaction, and the attempt at it."""

from __future__ import annotations

from dataclasses import dataclass, field

from framework.errors import InvariantViolation, StaleWriterError
from framework.topology.fencing import CommitFence, Header, OpenCommit


@dataclass(frozen=True, order=True, slots=True)
class TransactionAttempt:
    """One attempt at one transaction; printed as ``7:2``.

    ``txid`` numbers the batch: the first is 1, each following one is greater by 1, and a replay
    keeps it. ``attempt_id`` tells the attempts at a batch apart; it rises with every attempt and is
    unique across restarts. ``fence`` is what a state needs to prove that its writer is the current
    one. The framework fills it in; it takes no part in comparisons.

    >>> str(TransactionAttempt(7, 2))
    '7:2'
    >>> TransactionAttempt(7, 2) < TransactionAttempt(7, 3) < TransactionAttempt(8, 1)
    True

    Source: ``org.apache.storm.transactional.TransactionAttempt``.
    """

    txid: int
    attempt_id: int
    fence: CommitFence | None = field(default=None, compare=False, repr=False)

    @property
    def is_one_step(self) -> bool:
        """Whether the commit is one step of the store, which updates the header even without
        rows."""
        return self.fence is not None and self.fence.opens_from is not None

    def __str__(self) -> str:
        return f"{self.txid}:{self.attempt_id}"


def check_granted(header: Header, attempt: TransactionAttempt, location: str) -> None:
    """Raise ``StaleWriterError`` unless the header is open for this attempt, under the epoch of its
    fence. Raise ``InvariantViolation`` when the attempt has no fence."""
    fence = attempt.fence
    if fence is None:
        raise InvariantViolation(f"{location}: attempt {attempt} has no fence")
    wanted = header.opened(fence.epoch, OpenCommit(attempt.txid, attempt.attempt_id, fence.plan_digest))
    if header != wanted or header.topology_id != fence.topology_id:
        raise StaleWriterError(
            f"{location} is open for {header.open} of epoch {header.epoch}, not for attempt {attempt} of epoch {fence.epoch}",
            header.epoch,
        )
