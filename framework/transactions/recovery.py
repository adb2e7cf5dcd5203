"""The start of a term: reads the documents and takes over the states of the former leader."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from framework.coordination.step_generators import Steps
from framework.coordination.store import Leadership
from framework.errors import ConfigError, CorruptStateError, DataLossError, RetryableError
from framework.execution.messages import AttemptHeader
from framework.observe.logs import get_logger
from framework.topology.bolts import Bolt
from framework.topology.builder import Topology
from framework.topology.context import TopologyContext
from framework.topology.dead_letter_replay import LettersPlanner
from framework.topology.fencing import Standing
from framework.topology.spouts import PartitionPlanner
from framework.transactions.commit import CommitPhase
from framework.transactions.coordinator import Persist, Recovered
from framework.transactions.document_writer import TopologyDocuments
from framework.transactions.documents import read_letter_request, read_transaction
from framework.transactions.driver_context import DriverContext
from framework.transactions.plans import plan_digest
from framework.transactions.spout_planners import CoordinatorPlanner, ImmutableSource, planner_of

_log = get_logger()

WAITING_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The objects with which a term works. The receiver closes ``planner`` and ``commit``.
    ``planned_ms_ago``: how long ago the last closed transaction was planned, by the clocks of two
    hosts; for the pace only."""

    planner: PartitionPlanner
    source: ImmutableSource
    documents: TopologyDocuments
    commit: CommitPhase
    incarnation: str
    recovered: Recovered
    planned_ms_ago: int = 0


def recovering(context: DriverContext, leadership: Leadership) -> Steps[Recovery]:
    """Read the documents, take the states over, and compare the two. Raises ``StaleWriterError`` or
    ``LeadershipLostError`` if this leader no longer leads; otherwise the error that says why the
    topology cannot continue."""
    topology = context.topology
    planner: PartitionPlanner | None = None
    commit: CommitPhase | None = None
    try:
        planner = yield partial(planner_of, topology, context.conf)
        if isinstance(planner, LettersPlanner):
            planner.request = partial(read_letter_request, context.store, topology.id)
            yield planner.look
        source = ImmutableSource(planner, topology.skips_replays())
        documents = TopologyDocuments(context.store, leadership, topology)
        identity = yield from _source_identity(context, leadership, planner, source)
        joining = yield partial(
            documents.claim,
            identity,
            accept_changed=context.accept_changed_topology,
            accept_lost_data=planner.skips_lost_data,
        )
        incarnation = yield documents.incarnation
        recovered, digests = yield documents.recover
        commit = CommitPhase(
            topology.id,
            topology.states,
            context.executor,
            leadership.epoch,
            incarnation=incarnation,
            purge_every=context.purge_every,
        )
        opened = yield from commit.opening(
            recovered.currtx,
            digests,
            joining=joining,
            note_joined=documents.note_joined,
            committed_by=recovered.committed_by,
        )
        opened = opened or recovered.opened
        undone = documents.pending_undo(recovered.currtx)
        if undone is not None:
            _log.warning("undo.goes_on", topology=topology.id, txid=undone.txid)
            if opened:
                yield from rolling_back_opened(documents, commit, topology.id, leadership.epoch, recovered)
                recovered, digests = yield documents.recover
            yield partial(documents.finish_undo, undone)
            opened = False
        standing = Standing(
            incarnation, leadership.epoch, recovered.currtx, digests[recovered.currtx] if opened else None
        )
        yield partial(_check_written, context, standing)
        planned_ms_ago = yield partial(_planned_ms_ago, context, recovered.currtx - 1)
    except BaseException as error:
        if planner is not None:
            planner.close()
        if commit is not None:
            commit.close()
        if isinstance(error, (ConfigError, CorruptStateError, DataLossError)):
            # a leader that was deposed while reading may have read halves of two states
            yield leadership.confirm
        raise
    if (known := recovered.plans.get(recovered.currtx)) is not None:
        planner.resume(known)
    if isinstance(planner, CoordinatorPlanner):
        planner.planned = max(recovered.plans, default=0)
    return Recovery(
        planner=planner,
        source=source,
        documents=documents,
        commit=commit,
        incarnation=incarnation,
        recovered=replace(recovered, opened=opened),
        planned_ms_ago=planned_ms_ago,
    )


def _source_identity(
    context: DriverContext, leadership: Leadership, planner: PartitionPlanner, source: ImmutableSource
) -> Steps[Mapping[str, Any]]:
    """Ask the source for its identity, and check that it fits this topology. Repeat until it
    answers, as a running topology does; raise ``RetryableError`` when the run has to stop or the
    leadership is lost."""
    warned = False
    while True:
        try:
            identity: Mapping[str, Any] = yield partial(_ask, planner, source)
            return identity
        except RetryableError as error:
            if not warned:
                _log.warning("source.waiting", topology=context.topology.id, reason=str(error))
                context.update(waiting_for=str(error))
                warned = True
            stopped = yield partial(context.stop_requested.wait, WAITING_POLL_S)
            if stopped or leadership.lost:
                raise


def _ask(planner: PartitionPlanner, source: ImmutableSource) -> Mapping[str, Any]:
    identity = planner.source_identity()
    source.check(planner.partitions())
    return identity


def _planned_ms_ago(context: DriverContext, txid: int) -> int:
    """How long ago the transaction was planned; 0 if that is not recorded: then the interval begins
    now.
    """
    try:
        record = read_transaction(context.store, context.topology.id, txid) if txid else None
    except CorruptStateError:
        record = None  # only the pace depends on it
    begun = record.attempts[0].started_at if record is not None and record.attempts else None
    return max(int((time.time() - begun) * 1000), 0) if begun is not None else 0


def _check_written(context: DriverContext, standing: Standing) -> None:
    """Let committers without a state compare their own records with ``standing`` (C25)."""
    for bolt, bolt_context in committers_elsewhere(context.topology, context.conf):
        bolt.check_written(context.conf, bolt_context, standing)


def committers_elsewhere(topology: Topology, conf: Mapping[str, Any]) -> Iterator[tuple[Bolt, TopologyContext]]:
    """The committers without a state, each with the number of its tasks."""
    for each in topology.headerless():
        if isinstance(each.instance, Bolt):
            yield (
                each.instance,
                TopologyContext(topology.id, each.id, 0, each.parallelism, conf, parallelisms=topology.parallelisms()),
            )


def rolling_back_opened(
    documents: TopologyDocuments, commit: CommitPhase, topology_id: str, epoch: int, recovered: Recovered
) -> Steps[None]:
    """Undo the writes of the next txid, whose commit was opened. Raises ``RetryableError`` when
    that fails."""
    currtx = recovered.currtx
    attempts = {**recovered.attempts, currtx: recovered.attempts.get(currtx, 0) + 1}
    yield lambda: documents.save(Persist(attempts))
    digest = plan_digest(recovered.plans[currtx])
    header = AttemptHeader(topology_id, txid=currtx, attempt_id=attempts[currtx], epoch=epoch, plan_digest=digest)
    result = yield from commit.rolling_back(header)
    if result.failure is not None:
        raise RetryableError(f"txid {currtx} could not be rolled back: {result.failure}; try again")
