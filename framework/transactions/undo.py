"""Takes back the newest committed transaction: restores each state, and the positions, to the
transaction before.

First one atomic step in ZooKeeper marks the transaction as opened and not closed. A driver that
dies in its commit phase leaves the same state, so the protocol can handle it. Then every state is
rolled back, as for a batch whose records are lost (C7). After a crash in between, the next leader
continues with the roll-back: a repeated command, or a driver.

Afterwards an opaque spout plans the batch again. A batch of an idempotent spout never changes, and
is processed again unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from framework.coordination.election import ELECTION_TIMEOUT_S, leadership_of
from framework.coordination.step_generators import Steps, perform
from framework.coordination.store import CoordinationStore
from framework.errors import ConfigError
from framework.execution import LocalExecutor, plan_execution
from framework.observe.journal import TransactionRecord
from framework.topology import Header, PartitionedSpout, Topology
from framework.topology.fencing import ROLLED_BACK
from framework.topology.spouts import LEFT_OUT, Meta, PartitionPlanner, leaving_out_too, without_refused
from framework.transactions.commit import CommitPhase
from framework.transactions.coordinator import Recovered, SpoutKind
from framework.transactions.document_writer import TopologyDocuments
from framework.transactions.documents import Undone, differences_to_state, read_origin, read_transaction
from framework.transactions.plans import Plan, plan_digest
from framework.transactions.recovery import rolling_back_opened
from framework.transactions.spout_planners import planner_of, spout_kind_of

#: Partition -> the offsets of records that must not be processed again.
LeftOut = Mapping[str, Collection[int]]


def undo(
    topology: Topology,
    store: CoordinationStore,
    timeout_s: float = ELECTION_TIMEOUT_S,
    *,
    leave_out: LeftOut = MappingProxyType({}),
    conf: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    """Take back the newest committed transaction, or continue an interrupted ``undo``. Returns its
    txid. ``leave_out``: its records that no later batch gets; they go to the dead letters, if the
    spout has any. Not allowed for an interrupted ``undo``.

    Raises ``ConfigError`` when a driver still leads after ``timeout_s``, when a sink cannot undo,
    and when the transaction cannot be taken back any more; ``RetryableError`` when a service does
    not answer: then repeat the call."""
    with leadership_of(topology.id, store, timeout_s) as leadership:
        documents = TopologyDocuments(store, leadership, topology)
        executor = LocalExecutor(plan_execution(topology), {})
        incarnation = documents.incarnation()
        commit = CommitPhase(topology.id, topology.states, executor, leadership.epoch, incarnation=incarnation)
        without = Without(topology, leave_out, conf)
        return perform(undoing(topology, store, documents, commit, epoch=leadership.epoch, without=without))


class Without:
    """Leaves records out of the batch that follows a plan. Raises ``ConfigError`` if that is
    impossible."""

    def __init__(self, topology: Topology, leave_out: LeftOut, conf: Mapping[str, Any]) -> None:
        self._topology, self._leave_out, self._conf = topology, leave_out, conf

    def __bool__(self) -> bool:
        return bool(self._leave_out)

    def __str__(self) -> str:
        shown = ", ".join(f"{each}/{offset}" for each, offsets in self._leave_out.items() for offset in sorted(offsets))
        return f", to be made again without {shown}" if shown else ""

    def plan(self, before: Plan, batch: Plan) -> Plan:
        """Return ``before``, changed so that later plans leave out the records, which are in
        ``batch``."""
        if not self._leave_out:
            return before
        if spout_kind_of(self._topology.spout.instance) is not SpoutKind.OPAQUE:
            raise ConfigError(
                f"no record can be left out: spout {self._topology.spout.id!r} is idempotent, and its batches never change"
            )
        planner = planner_of(self._topology, self._conf)
        try:
            return {**before, **{each: self._entry(planner, each, before, batch) for each in self._leave_out}}
        finally:
            planner.close()

    def _entry(self, planner: PartitionPlanner, partition: str, before: Plan, batch: Plan) -> Meta:
        if partition not in batch:
            raise ConfigError(f"the transaction has no partition {partition!r}: it has {', '.join(sorted(batch))}")
        held = planner.ranges.offsets(batch[partition])
        if held is None:
            raise ConfigError(f"spout {self._topology.spout.id!r} cannot leave single records out of this batch")
        if partition not in before:
            raise ConfigError(f"no record of {partition!r} can be left out: the partition begins with this transaction")
        for offset in self._leave_out[partition]:
            if offset not in held:
                shown = f"offsets {held.start} to {held.stop - 1}" if held else "no record"
                raise ConfigError(
                    f"{partition}/{offset} is not in the transaction, which has {shown} of that partition"
                )
        known = before[partition].get(LEFT_OUT, ())
        return {**before[partition], LEFT_OUT: sorted({*known, *self._leave_out[partition]})}


def undoing(
    topology: Topology,
    store: CoordinationStore,
    documents: TopologyDocuments,
    commit: CommitPhase,
    *,
    epoch: int,
    without: Without | None = None,
) -> Steps[int]:
    """The steps of ``undo``."""
    _check_can_undo(topology, store)
    recovered, digests = documents.recover()
    undone = documents.pending_undo(recovered.currtx)
    if undone is None:  # refuse before any change
        record, before = _to_take_back(topology, store, recovered, _headers(topology))
        before = _leaving_out_too(before, record.plan)
        before = without.plan(before, record.plan) if without is not None else before
    elif without:
        raise ConfigError(
            f"transaction {undone.txid} was being taken back: go on with it first, without leaving out records, then run the "
            "topology until it is closed, and undo it again"
        )
    opened = yield from commit.opening(recovered.currtx, digests, committed_by=recovered.committed_by)
    if undone is None:
        record, _ = _to_take_back(topology, store, recovered, commit.headers())
        shown = _shown(record, without)
        undone, opened = Undone(shown.txid, False, shown.attempts), True
        yield partial(documents.take_back, shown, before, recovered.attempts)
        recovered, _ = documents.recover()
    if opened:
        yield from rolling_back_opened(documents, commit, topology.id, epoch, recovered)
    yield partial(documents.finish_undo, undone)
    return undone.txid


def describe_undo(
    topology: Topology,
    store: CoordinationStore,
    timeout_s: float = ELECTION_TIMEOUT_S,
    *,
    leave_out: LeftOut = MappingProxyType({}),
    conf: Mapping[str, Any] = MappingProxyType({}),
) -> list[str]:
    """Lines for display: the transaction that ``undo`` would take back. Raises as ``undo``."""
    without = Without(topology, leave_out, conf)
    with leadership_of(topology.id, store, timeout_s) as leadership:
        _check_can_undo(topology, store)
        documents = TopologyDocuments(store, leadership, topology)
        recovered, _ = documents.recover()
        undone = documents.pending_undo(recovered.currtx)
        if undone is not None:
            return [f"topology {topology.id!r}: transaction {undone.txid} was being taken back; this goes on with it"]
        record, before = _to_take_back(topology, store, recovered, _headers(topology))
        without.plan(before, record.plan)
    rows = f", {record.attempts[-1].source_rows:,} records" if record.attempts else ""
    return [
        f"topology {topology.id!r}: transaction {record.txid} would be taken back{rows}{without}",
        *(f"  {partition}: {dict(meta)}" for partition, meta in sorted(record.plan.items())),
        *(f"  sink: {state.location}" for state in topology.states),
    ]


def _headers(topology: Topology) -> list[tuple[str, Header]]:
    """The header of each state that can be checked without creating anything."""
    return [(state.location, header) for state in topology.states if (header := state.check(topology.id))]


def _check_can_undo(topology: Topology, store: CoordinationStore) -> None:
    different = differences_to_state(store, topology)
    if different:
        raise ConfigError(
            f"the topology {topology.id!r} is not the one its state was written by: {'; '.join(different)}. Name that one, so that "
            "every sink is taken back; or run this one first, with --accept-changed-topology"
        )
    found = [state.location for state in topology.states if not state.can_undo]
    found += [f"bolt {each.id!r}, which writes where nothing can be taken back" for each in topology.headerless()]
    if not isinstance(topology.spout.instance, PartitionedSpout):
        found.append(f"spout {topology.spout.id!r}, which was told that its committed batches are not asked for again")
    if not topology.states:
        found.append("it has no state")
    if found:
        raise ConfigError(f"topology {topology.id!r} cannot undo a transaction: {'; '.join(found)}")


def _to_take_back(
    topology: Topology,
    store: CoordinationStore,
    recovered: Recovered,
    headers: Sequence[tuple[str, Header]],
) -> tuple[TransactionRecord, Plan]:
    """The newest committed transaction, and the plan of the previous one. Raises ``ConfigError``
    when it cannot be taken back."""
    txid = recovered.currtx - 1
    if txid < 1:
        raise ConfigError(f"topology {topology.id!r} has committed no transaction: there is nothing to take back")
    opens = [header.open for _, header in headers if header.open is not None]
    if any(each.txid == recovered.currtx and each.plan_digest != ROLLED_BACK for each in opens):
        raise ConfigError(
            f"transaction {recovered.currtx} was being committed when the last driver ended: run topology {topology.id!r} until "
            "it is closed, then undo that one"
        )
    for location, header in headers:
        if header.open is None or header.open.txid < txid:
            raise ConfigError(f"{location} joined after transaction {txid}, which cannot be taken back any more")
        if header.open.txid > txid:
            raise ConfigError(
                f"{location} has rolled transaction {header.open.txid} back, and knows no values from before {txid} any more: "
                "only the newest transaction can be taken back, and only once"
            )
    record = read_transaction(store, topology.id, txid)
    if record is None or not recovered.plans.get(txid):
        raise ConfigError(
            f"transaction {txid} is not recorded, or its positions were forgotten: it cannot be taken back"
        )
    return record, _plan_before(topology, store, txid)


def _plan_before(topology: Topology, store: CoordinationStore, txid: int) -> Plan:
    if read_origin(store, topology.id).txid == txid:
        raise ConfigError(
            f"transaction {txid} is the first one that is known of these positions, so they cannot be put back"
            + (": ratchet reset --everything begins anew" if txid == 1 else "")
        )
    before = read_transaction(store, topology.id, txid - 1)
    if before is None or not before.plan or plan_digest(before.plan) != before.plan_digest:
        raise ConfigError(
            f"the plan of transaction {txid - 1} is not recorded (it was too long, or is long over), so the positions cannot be "
            "put back"
        )
    return before.plan


def _leaving_out_too(before: Plan, batch: Plan) -> Plan:
    """``before``, extended by the records that an earlier undo had left out of ``batch``. Records
    whose values were refused are read again, because the component may have been changed since."""
    return {each: leaving_out_too(meta, without_refused(batch.get(each, {}))) for each, meta in before.items()}


def _shown(record: TransactionRecord, without: Without | None) -> TransactionRecord:
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return record.undone(f"taken back by ratchet undo at {at}{without or ''}")
