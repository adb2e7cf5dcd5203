"""Recomputes what the sinks should hold, and names every key that differs.

The source is read again through the topology's own bolts, into empty scratch states: from the
offsets where the topology first read each partition to those of the last committed transaction.
Nothing is written anywhere else. No leadership is needed, and the topology may run meanwhile: rows
are compared as of one transaction, by their previous values; rows that have moved on further are
compared as of a later one.

If the records of closed transactions reach back to the first transaction, their batches are
repeated. Otherwise larger batches over the same offsets are used. Results that depend on where a
batch ends, or on a clock, then differ. If the source has removed input, the answer is
*unverifiable*, never right.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from framework.errors import ConfigError, DataLossError, RatchetError, RetryableError
from framework.execution import AttemptHeader, FailureKind, LocalExecutor, plan_execution
from framework.observe.logs import get_logger
from framework.topology import Bolt, Difference, FencedState, Topology
from framework.topology.spouts import Meta, PartitionPlanner
from framework.transactions import CoordinationStore
from framework.transactions.commit import CommitPhase
from framework.transactions.documents import Origin, committed_txid, read_history, read_joined, read_origin, read_plan
from framework.transactions.plans import Plan, plan_digest
from framework.transactions.shadow import SHADOW_ATTEMPT, shadow_of
from framework.transactions.sources import planner_of, processing_job

#: Records of a batch, where the recorded batches are no longer kept.
RECORDS_PER_BATCH = 500_000
#: How many differences of one state are shown. All are counted.
DIFFERENCES_SHOWN = 100
#: How long to wait for the close of a transaction that a sink already holds.
COMMIT_TIMEOUT_S = 60.0

_log = get_logger()


class Unverifiable(RatchetError):
    """The answer cannot be known: what the sinks hold came from input that is gone, or from before
    the records begin."""


@dataclass(slots=True)
class StateReport:
    """One state: how many keys (rows, for a table of files) were compared, and what differs."""

    location: str
    compared: int = 0
    difference_count: int = 0
    differences: list[Difference] = field(default_factory=list)

    def add(self, difference: Difference) -> None:
        self.difference_count += 1
        if len(self.differences) < DIFFERENCES_SHOWN:
            self.differences.append(difference)


@dataclass(slots=True)
class VerifyReport:
    """``txid``: the last transaction that was recomputed. ``recorded_batches``: whether all batches
    were the recorded ones. ``not_verified``: components that were left out, and why."""

    topology_id: str
    txid: int
    recorded_batches: bool
    states: list[StateReport]
    not_verified: list[str]

    @property
    def right(self) -> bool:
        return not any(each.difference_count for each in self.states)

    def lines(self) -> list[str]:
        """Lines for a person."""
        batches = "its recorded batches" if self.recorded_batches else "batches over the recorded offsets"
        shown = [f"topology {self.topology_id!r}, recomputed to transaction {self.txid} in {batches}"]
        for each in self.states:
            verdict = f"{each.difference_count} differ" if each.difference_count else "all agree"
            shown.append(f"{each.location}: {each.compared} compared, {verdict}")
            shown += [f"  {difference}" for difference in each.differences]
            if each.difference_count > len(each.differences):
                shown.append(f"  and {each.difference_count - len(each.differences)} more")
        return [*shown, *(f"not verified: {each}" for each in self.not_verified)]


def verify(topology: Topology, store: CoordinationStore, conf: Mapping[str, Any] | None = None) -> VerifyReport:
    """Recompute and compare. Raises ``Unverifiable``; ``RetryableError`` when source, store or a
    sink does not answer, or when the topology moves on too fast; ``ConfigError`` for a state that
    cannot be compared, or when nothing is committed yet."""
    folder = Path(tempfile.mkdtemp(prefix="ratchet-verify-"))
    try:
        return _Audit(topology, store, conf or {}, folder).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Audit:
    def __init__(self, topology: Topology, store: CoordinationStore, conf: Mapping[str, Any], folder: Path) -> None:
        self._topology, self._store = topology, store
        self._shadow, left_out = shadow_of(topology, folder, _recounting, joined=read_joined(store, topology.id))
        self._not_verified = [str(each) for each in left_out]
        if not self._shadow.states:
            raise ConfigError(
                f"topology {topology.id!r} has no state that could be compared: {'; '.join(self._not_verified)}"
            )
        self._planner: PartitionPlanner = planner_of(topology, conf)
        self._executor = LocalExecutor(plan_execution(self._shadow), conf)
        self._commit = CommitPhase(self._shadow.id, self._shadow.states, self._executor, 1)
        self._txid = 0  # of the topology: up to where the shadow is recomputed
        self._plan: Plan = {}
        self._batches = 0  # of the shadow
        self._recorded = True

    def run(self) -> VerifyReport:
        reports = [StateReport(state.location) for state in self._watched]
        committed = committed_txid(self._store, self._topology.id)
        if committed == 0:
            raise ConfigError(
                f"topology {self._topology.id!r} has committed no transaction yet: there is nothing to verify"
            )
        self._executor.start()
        try:
            self._commit.open(1, {})
            self._advance(committed)
            moved: list[tuple[int, list[Any]]] = []
            for number, (state, shadow) in enumerate(zip(self._watched, self._shadow.states, strict=True)):
                later: list[Any] = []
                reports[number].compared += state.compare(shadow, self._txid, reports[number].add, later.append)
                if later:
                    moved.append((number, later))
            self._follow(reports, moved)
        finally:
            self._executor.close()
            self._planner.close()
            for state in self._shadow.states:
                state.close()
        return VerifyReport(self._topology.id, self._txid, self._recorded, reports, self._not_verified)

    @property
    def _watched(self) -> list[FencedState]:
        """The states that are compared, in the order of their shadows."""
        return [state for each in self._shadow.components for state in self._topology[each.id].states]

    def _follow(self, reports: Sequence[StateReport], moved: Sequence[tuple[int, list[Any]]]) -> None:
        """Compare the rows that a running topology has changed meanwhile: read them as they are
        now, recompute up to there, and compare."""
        held = sorted(
            ((number, *self._watched[number].hold(keys)) for number, keys in moved), key=lambda each: (each[1], each[0])
        )
        for number, txid, values in held:
            self._await_commit(txid)
            self._advance(txid)
            state, shadow = self._watched[number], self._shadow.states[number]
            reports[number].compared += state.compare_held(shadow, values, reports[number].add)

    def _await_commit(self, txid: int) -> None:
        """Wait until a transaction is closed: a sink holds it for a moment before that."""
        deadline = time.monotonic() + COMMIT_TIMEOUT_S
        while committed_txid(self._store, self._topology.id) < txid:
            if time.monotonic() > deadline:
                raise RetryableError(
                    f"a sink holds transaction {txid}, and the topology has not closed it: let it run, and verify then"
                )
            time.sleep(0.05)

    # --- recomputing ------------------------------------------------------------------------------

    def _advance(self, txid: int) -> None:
        if txid <= self._txid:
            return
        history = {each.txid: each.plan for each in read_history(self._store, self._topology.id)}
        wanted = range(self._txid + 1, txid + 1)
        if all(history.get(each) for each in wanted):
            for each in wanted:
                self._recompute(history[each])
            plan = history[txid]
        else:
            self._recorded = False
            plan = history.get(txid) or self._plan_of(txid)
            for batch in self._batches_to(plan):
                self._recompute(batch)
        self._txid, self._plan = txid, plan

    def _plan_of(self, txid: int) -> Plan:
        try:
            return read_plan(self._store, self._topology.id, self._topology.spout.id, txid)[1]
        except ConfigError as error:  # it was the last one a moment ago, and its plan is gone now
            raise RetryableError(
                f"{error}: the topology has moved on; verify it again, or when it has less to do"
            ) from error

    def _batches_to(self, plan: Plan) -> Iterator[Plan]:
        """Batches over all offsets from where the shadow is to ``plan``."""
        origin = read_origin(self._store, self._topology.id)
        if self._txid == 0:
            self._check_origin(origin)
        ranges: dict[str, Meta] = {}
        for partition, last in plan.items():
            known = self._plan.get(partition)
            first = known if known is not None else origin.positions.get(partition)
            if first is None:
                raise Unverifiable(f"partition {partition}: where it was first read is not recorded")
            joined = self._planner.joined(first, last, after=known is not None)
            if joined is None:
                raise Unverifiable(
                    f"topology {self._topology.id!r}: the plans of its first transactions are no longer kept, and spout "
                    f"{self._topology.spout.id!r} cannot say what lies between two of them, in "
                    f"partition {partition}: no spout can where lost records were skipped"
                )
            ranges[partition] = joined
        pieces = {partition: self._pieces(partition, meta) for partition, meta in ranges.items()}
        for turn in range(max(map(len, pieces.values()), default=0)):
            yield {partition: each[turn] for partition, each in pieces.items() if turn < len(each)}

    def _check_origin(self, origin: Origin) -> None:
        if origin.txid != 1:
            raise Unverifiable(
                f"topology {self._topology.id!r}: its positions were reset, or first recorded, at transaction {origin.txid}; "
                "what its sinks hold from before cannot be recomputed"
            )

    def _pieces(self, partition: str, meta: Meta) -> list[Meta]:
        count = self._planner.record_count({partition: meta})
        if count is None or count * max(self._topology.spout.parallelism, 1) <= RECORDS_PER_BATCH:
            return [meta]
        halves = self._planner.split(partition, meta)
        return [meta] if halves is None else [piece for half in halves for piece in self._pieces(partition, half)]

    def _recompute(self, plan: Plan) -> None:
        self._batches += 1
        header = AttemptHeader(
            self._shadow.id, txid=self._batches, attempt_id=SHADOW_ATTEMPT, epoch=1, plan_digest=plan_digest(plan)
        )
        try:
            result = self._executor.process(processing_job(header, self._planner, plan))
            if result.failure is None:
                self._planner.confirm(plan)
                result = self._commit.run(header, replay=False)
        except DataLossError as error:
            raise Unverifiable(f"the source has lost what the sinks were made of: {error}") from error
        finally:
            self._executor.release(header)
        if result.failure is not None and result.failure.kind is FailureKind.DATA_LOSS:
            raise Unverifiable(f"the source has lost what the sinks were made of: {result.failure}")
        if result.failure is not None:
            raise RetryableError(f"the batch could not be recomputed: {result.failure}")


def _recounting(bolt: Bolt, folder: Path) -> Bolt:
    return bolt.recounting(folder)
