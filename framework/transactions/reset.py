"""Resets: forget the positions in the source, or forget everything.

Both need the topology's leadership, so no driver may be running. Both are safe to repeat after a
crash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from framework.coordination.election import ELECTION_TIMEOUT_S, leadership_of
from framework.coordination.step_generators import Steps, perform
from framework.coordination.store import CoordinationStore
from framework.errors import ConfigError, CorruptStateError
from framework.execution import LocalExecutor, plan_execution
from framework.topology import Standing, Topology
from framework.transactions.commit import CommitPhase
from framework.transactions.document_writer import TopologyDocuments
from framework.transactions.documents import forget_everything, new_incarnation
from framework.transactions.recovery import committers_elsewhere, rolling_back_opened


def resetting_positions(
    documents: TopologyDocuments, commit: CommitPhase, topology_id: str, epoch: int, irreversible: Sequence[str] = ()
) -> Steps[int]:
    """The steps of forgetting the positions: the next batch starts where the source's policy for a
    first start says (C17). Returns the next txid.

    Txids, attempts and the epoch continue to rise, because rows are stamped with them. The sinks
    keep their rows, so records that are read again count again. A commit that was opened is rolled
    back first.

    ``irreversible``: components that cannot undo a commit. Raises ``ConfigError`` if there are any,
    and committers without a state may have begun the opened commit, because such a committer would
    never accept another plan of that txid. Raises ``RetryableError`` when the roll-back fails."""
    recovered, digests = documents.recover()
    currtx = recovered.currtx
    opened = yield from commit.opening(currtx, digests, committed_by=recovered.committed_by)
    if recovered.opened and irreversible:
        raise ConfigError(
            f"the commit of txid {currtx} was opened, and cannot be undone ({', '.join(irreversible)}): run topology "
            f"{topology_id!r} until it is committed, then forget its positions"
        )
    if opened or recovered.opened:
        yield from rolling_back_opened(documents, commit, topology_id, epoch, recovered)
    yield documents.forget_positions
    return currtx


def reset_positions(topology: Topology, store: CoordinationStore, timeout_s: float = ELECTION_TIMEOUT_S) -> int:
    """Forget the positions in the source; see ``resetting_positions``. Returns the next txid.
    Raises ``ConfigError`` when a driver still leads after ``timeout_s``."""
    with leadership_of(topology.id, store, timeout_s) as leadership:
        executor = LocalExecutor(plan_execution(topology), {})
        documents = TopologyDocuments(store, leadership, topology)
        incarnation = documents.incarnation()
        commit = CommitPhase(topology.id, topology.states, executor, leadership.epoch, incarnation=incarnation)
        cannot_undo = topology.irreversible()
        return perform(resetting_positions(documents, commit, topology.id, leadership.epoch, cannot_undo))


def describe(topology: Topology, store: CoordinationStore, timeout_s: float = ELECTION_TIMEOUT_S) -> list[str]:
    """Lines for display: the next txid, the positions, the sinks."""
    try:
        with leadership_of(topology.id, store, timeout_s) as leadership:
            recovered, _ = TopologyDocuments(store, leadership, topology).recover()
    except CorruptStateError as error:
        return [f"topology {topology.id!r}: its state cannot be read: {error}"]
    last = recovered.plans.get(recovered.currtx - 1, {})
    return [
        f"topology {topology.id!r}: transaction {recovered.currtx} is next",
        *(f"  {partition}: {dict(meta)}" for partition, meta in sorted(last.items())),
        *(f"  sink: {state.location}" for state in topology.states),
    ]


def reset_everything(
    topology: Topology,
    store: CoordinationStore,
    timeout_s: float = ELECTION_TIMEOUT_S,
    conf: Mapping[str, Any] | None = None,
) -> str:
    """Empty every state, let the other committers start over, then remove all documents but the
    epoch and begin another incarnation. Raises ``ConfigError`` when a driver still leads after
    ``timeout_s``, or when a state cannot be emptied. After a crash in between, the sinks do not
    match ZooKeeper, and no driver starts on them: reset again."""
    with leadership_of(topology.id, store, timeout_s) as leadership:
        standing = Standing(new_incarnation(), leadership.epoch, 1)
        for state in topology.states:
            state.clear(topology.id)
        for bolt, context in committers_elsewhere(topology, conf or {}):
            bolt.renew_written(conf or {}, context, standing)
        forget_everything(store, leadership, topology.id, standing.incarnation)
    return f"everything forgotten, {len(topology.states)} sinks emptied; the next run starts with transaction 1"
