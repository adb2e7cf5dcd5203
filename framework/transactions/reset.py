"""Going back on purpose: forget where the source was read, or everything.

Both need the topology's leadership, so no driver may be running. Both are safe to repeat after a crash.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from framework.errors import RetryableError
from framework.execution.records import AttemptHeader
from framework.transactions.commit import CommitPhase, Step
from framework.transactions.coordinator import Persist
from framework.transactions.documents import TopologyDocuments


def resetting_positions(
    documents: TopologyDocuments, commit: CommitPhase, topology_id: str, epoch: int
) -> Generator[Step, Any, int]:
    """Steps that let the next batch start where the source's policy for a first start says (C17). Txids, attempts and the
    epoch go on rising, because rows are stamped with them; what is in the sinks stays, so records that are read again
    count again. A commit that was opened is rolled back first. Returns the txid that will be next."""
    recovered, digests = documents.recover()
    currtx = recovered.currtx
    if (yield from commit.opening(currtx, digests)):
        attempts = {**recovered.attempts, currtx: recovered.attempts.get(currtx, 0) + 1}
        yield lambda: documents.save(Persist(attempts))
        header = AttemptHeader(topology_id, currtx, attempts[currtx], epoch, digests[currtx])
        result = yield from commit.rolling_back(header)
        if result.failure is not None:
            raise RetryableError(f"txid {currtx} could not be rolled back: {result.failure}; try again")
    yield documents.forget_positions
    return currtx
