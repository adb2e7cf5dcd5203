"""Going back on purpose: forget where the source was read, or everything.

Both need the topology's leadership, so no driver may be running. Both are safe to repeat after a crash.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from framework.coordination.store import CoordinationStore, Leadership
from framework.errors import ConfigError, RetryableError
from framework.execution import LocalExecutor, plan_execution
from framework.execution.records import AttemptHeader
from framework.topology.builder import Topology
from framework.topology.graph import Graph
from framework.transactions.commit import CommitPhase
from framework.transactions.coordinator import Persist
from framework.transactions.documents import TopologyDocuments
from framework.transactions.steps import Steps, perform

#: How long a command waits for the leadership: longer than the session of a leader that has just died lasts.
#: ``transactional.zookeeper.election.timeout.secs`` sets it.
ELECTION_TIMEOUT_S = 15.0


def resetting_positions(
    documents: TopologyDocuments, commit: CommitPhase, topology_id: str, epoch: int, irreversible: Sequence[str] = ()
) -> Steps[int]:
    """Steps that let the next batch start where the source's policy for a first start says (C17). Txids, attempts and the
    epoch go on rising, because rows are stamped with them; what is in the sinks stays, so records that are read again
    count again. A commit that was opened is rolled back first. Returns the txid that will be next. Raises ``ConfigError`` when
    committers without a state have begun with it that cannot undo, as ``irreversible`` says: another plan of that txid would
    never be taken."""
    recovered, digests = documents.recover()
    currtx = recovered.currtx
    opened = yield from commit.opening(currtx, digests)
    if recovered.opened and irreversible:
        raise ConfigError(
            f"the commit of txid {currtx} was opened, and cannot be undone ({', '.join(irreversible)}): run topology "
            f"{topology_id!r} until it is committed, then forget its positions"
        )
    if opened or recovered.opened:
        attempts = {**recovered.attempts, currtx: recovered.attempts.get(currtx, 0) + 1}
        yield lambda: documents.save(Persist(attempts))
        header = AttemptHeader(topology_id, currtx, attempts[currtx], epoch, digests[currtx])
        result = yield from commit.rolling_back(header)
        if result.failure is not None:
            raise RetryableError(f"txid {currtx} could not be rolled back: {result.failure}; try again")
    yield documents.forget_positions
    return currtx


def reset_positions(topology: Topology, store: CoordinationStore, timeout_s: float = ELECTION_TIMEOUT_S) -> int:
    """Forget where the source was read; see ``resetting_positions``. Returns the txid that will be next. Raises
    ``ConfigError`` when a driver still leads after ``timeout_s``."""
    with leadership_of(topology, store, timeout_s) as leadership:
        executor = LocalExecutor(plan_execution(topology), {})
        documents = TopologyDocuments(store, leadership, topology)
        incarnation = documents.incarnation()
        commit = CommitPhase(topology.id, topology.states, executor, leadership.epoch, incarnation=incarnation)
        cannot_undo = topology.irreversible()
        return perform(resetting_positions(documents, commit, topology.id, leadership.epoch, cannot_undo))


@contextmanager
def leadership_of(
    topology: Graph, store: CoordinationStore, timeout_s: float = ELECTION_TIMEOUT_S
) -> Iterator[Leadership]:
    """The topology's leadership, for as long as it takes. Raises ``ConfigError`` when a driver still leads after
    ``timeout_s``."""
    identity = f"reset on {socket.gethostname()}:{os.getpid()}"
    leadership = store.lead(topology.id, identity, timeout_s=timeout_s)
    if leadership is None:
        raise ConfigError(f"a driver runs topology {topology.id!r}: stop it first, and its standby drivers too")
    try:
        yield leadership
    finally:
        leadership.resign()
