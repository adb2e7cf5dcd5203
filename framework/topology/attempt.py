"""Which transaction, and which try at it."""

from __future__ import annotations

from dataclasses import dataclass, field

from framework.topology.fencing import CommitFence


@dataclass(frozen=True, order=True, slots=True)
class TransactionAttempt:
    """One attempt at one transaction; printed as ``7:2``.

    ``txid`` numbers the batch: the first is 1, each following one is greater by 1, and a replay keeps it.
    ``attempt_id`` tells the tries at a batch apart; it rises with every try and is unique across restarts.
    ``fence`` is what a state needs to prove that its writer is the current one. The framework fills it in; it takes
    no part in comparisons.

    >>> str(TransactionAttempt(7, 2))
    '7:2'
    >>> TransactionAttempt(7, 2) < TransactionAttempt(7, 3) < TransactionAttempt(8, 1)
    True

    Source: ``org.apache.storm.transactional.TransactionAttempt``.
    """

    txid: int
    attempt_id: int
    fence: CommitFence | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.txid}:{self.attempt_id}"
