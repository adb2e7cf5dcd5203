"""Runs a copy of a topology over the records that the topology has committed, from the first one
on.

The source is read again through the topology's own bolts, into the empty states of the copy.
Nothing is written anywhere else. No leadership is needed, and the topology may run meanwhile.

The recorded transactions are repeated one by one, as far as their records and plans reach back: in
the coordination store, and before that in the table of records, if the topology has one. Earlier
offsets are read in larger batches. Results that depend on the boundaries of batches, or on a clock,
then differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

from framework.coordination.store import CoordinationStore
from framework.errors import ConfigError, DataLossError, RatchetError, RetryableError
from framework.execution import FailureKind
from framework.execution.ports import TaskWatcher
from framework.inspect.narrowing import cut
from framework.inspect.sandbox import Sandbox
from framework.observe.journal import RECORDS_MAX
from framework.topology import Topology
from framework.topology.planning_time_stream import CLOCK_PARTITION
from framework.topology.spouts import LEFT_OUT_FROM, Meta
from framework.transactions.documents import Origin, committed_txid, read_origin, read_plan
from framework.transactions.history_archive import HistoryTarget
from framework.transactions.history_reader import TransactionRecords
from framework.transactions.plans import Plan

#: Records of a batch, where the recorded batches are no longer kept.
RECORDS_PER_BATCH = 500_000
#: How long to wait for the close of a transaction that a sink already holds.
COMMIT_TIMEOUT_S = 60.0


class Unverifiable(RatchetError):
    """The answer cannot be known: what the sinks hold came from input that is gone, or from before
    the records begin."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that was recomputed in one step. ``number``: its txid in the copy. ``first_txid`` to
    ``txid``: the topology's transactions in the batch; a single one if its plan is recorded."""

    number: int
    first_txid: int
    txid: int
    plan: Plan


class Recomputation:
    """``shadow``: the copy, of ``topology`` or of a part of it, made by ``shadow_of``. ``seen`` is
    called after each batch. ``archive``: the table of records, where the topology has one.
    ``watcher``: observes the tasks of the copy. Used by one thread, as a context manager, which
    closes the states of the copy. ``txid``: the last recomputed transaction. ``is_recorded``:
    whether all batches so far were the recorded ones. ``records``: the number of records read,
    without those of a spout that does not count."""

    def __init__(
        self,
        topology: Topology,
        store: CoordinationStore,
        conf: Mapping[str, Any],
        *,
        shadow: Topology,
        seen: Callable[[Batch], None] | None = None,
        archive: HistoryTarget | None = None,
        watcher: TaskWatcher | None = None,
        epoch: int = 1,
    ) -> None:
        self._topology, self._store, self._shadow, self._seen = topology, store, shadow, seen
        self._history = TransactionRecords(store, topology.id, archive)
        self._sandbox = Sandbox(topology, shadow, conf, watcher=watcher, epoch=epoch)
        self.planner = self._sandbox.planner
        self._epoch = epoch
        self._plan: Plan = {}
        self._number = 0
        self.txid = 0
        self.is_recorded = True
        self.batches = 0
        self.records = 0

    def __enter__(self) -> Self:
        self._sandbox.start()
        try:
            self._begin()
        except BaseException:
            self._sandbox.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sandbox.close()

    def await_commit(self, txid: int) -> None:
        """Wait until a transaction is closed: a sink holds it for a moment before that. Raises
        ``RetryableError``."""
        deadline = time.monotonic() + COMMIT_TIMEOUT_S
        while committed_txid(self._store, self._topology.id) < txid:
            if time.monotonic() > deadline:
                raise RetryableError(
                    f"a sink holds transaction {txid}, and the topology has not closed it: let it run, and ask again then"
                )
            time.sleep(0.05)

    def advance(self, txid: int) -> None:
        """Go on to the end of a closed transaction. Raises ``Unverifiable`` when the source or the
        records do not reach back; ``RetryableError`` when something does not answer, or the
        topology moves on too fast."""
        if txid <= self.txid:
            return
        first = self._recorded(txid) or self._plan_of(txid)
        plans = {txid: first}  # of those that the store may soon keep no more
        recorded = txid  # where the recorded ones begin
        while recorded > self.txid + 1 and (before := self._recorded(recorded - 1)):
            recorded, first = recorded - 1, before
            if len(plans) <= RECORDS_MAX:
                plans[recorded] = before
        if recorded > self.txid + 1:
            self.is_recorded = False
            self._read_over(*self._before(recorded, first))
        for each in range(self.txid + 1, txid + 1):
            plan = plans.get(each) or self._recorded(each)
            if not plan:
                raise RetryableError(f"the record of transaction {each} is no longer kept: ask again")
            self._step(each, plan, plan)
            self.txid, self._plan = each, plan

    def skip_to_records(self) -> int:
        """Begin with the oldest transaction that is recorded without a gap up to the last one, as
        if nothing had come before. Returns its txid."""
        first = committed_txid(self._store, self._topology.id) + 1
        while self._recorded(first - 1):
            first -= 1
        if not self._recorded(first):
            raise Unverifiable(f"topology {self._topology.id!r}: the plan of its last transaction is not recorded")
        self.txid = first - 1
        return first

    def recompute(self, plan: Plan, *, replay: bool = False) -> int:
        """Process and commit one batch of the copy. Returns its number. ``replay``: its commit was
        opened before."""
        self.batches += 1
        self._number += 1
        self.records += self.planner.record_count(plan) or 0
        try:
            failure = self._sandbox.run(self._number, plan, replay=replay)
        except DataLossError as error:
            raise Unverifiable(f"the source has lost what the sinks were made of: {error}") from error
        if failure is not None and failure.kind is FailureKind.DATA_LOSS:
            raise Unverifiable(f"the source has lost what the sinks were made of: {failure}")
        if failure is not None:
            raise RetryableError(f"the batch could not be recomputed: {failure}")
        return self._number

    def empty(self) -> None:
        """Start again with empty states. Raises ``ConfigError`` if a state cannot be emptied."""
        for state in self._shadow.states:
            state.clear(self._shadow.id)
        self._sandbox.forget()
        self._sandbox.commit.open(1, {})
        self._number = 0

    # --- inside -----------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Open the states, with nothing read yet."""
        self._sandbox.commit.open(1, {})

    def _step(self, txid: int, plan: Plan, target: Plan, left: int = 0) -> None:
        """Recompute a batch on the way from ``self.txid`` to ``txid``, whose plan is ``target``:
        ``left`` more of them lead there."""
        number = self.recompute(plan)
        self._told(Batch(number, self.txid + 1, txid, plan))

    def _told(self, batch: Batch) -> None:
        if self._seen is not None:
            self._seen(batch)

    def _read_over(self, txid: int, plan: Plan) -> None:
        """Read all up to the end of a transaction, whatever its batches were."""
        if self.txid and not self._plan:
            raise RetryableError(
                "the records that this began with are no longer kept: ask again, or when it has less to do"
            )
        batches = self._batches_to(txid, plan)
        for number, batch in enumerate(batches, 1):
            self._step(txid, batch, plan, len(batches) - number)
        self.txid, self._plan = txid, plan

    def _recorded(self, txid: int) -> Plan | None:
        """The plan in the record of a transaction; None or empty if there is no such plan."""
        record = self._history.read(txid) if txid > 0 else None
        return record.plan if record is not None else None

    def _before(self, txid: int, plan: Plan) -> tuple[int, Plan]:
        """The end of the transaction before ``txid``: its txid and plan, computed from ``plan``,
        the plan of ``txid``. If the source cannot compute it, ``txid`` and ``plan`` themselves."""
        before = {partition: self.planner.ranges.beginning(meta) for partition, meta in plan.items()}
        return (
            (txid, plan) if None in before.values() else (txid - 1, {each: meta or {} for each, meta in before.items()})
        )

    def _plan_of(self, txid: int) -> Plan:
        try:
            return read_plan(self._store, self._topology.id, self._topology.spout.id, txid)[1]
        except ConfigError as error:  # it was the last one a moment ago, and its plan is gone now
            raise RetryableError(f"{error}: the topology has moved on; ask again, or when it has less to do") from error

    def _batches_to(self, txid: int, plan: Plan) -> list[Plan]:
        """Batches over all offsets from where the copy is to ``plan``, which is of ``txid``."""
        stages = self.planner.ranges.stages(self._ranges_to(plan))
        return [batch for stage in stages for batch in self._cut(stage, RECORDS_PER_BATCH)]

    def _cut(self, ranges: Mapping[str, Meta], records_max: int) -> list[Plan]:
        """The ranges in batches of up to so many records, as far as the spout can split them."""

        def is_small(partition: str, meta: Meta) -> bool:
            count = self.planner.record_count({partition: meta})
            return count is None or count * max(self._topology.spout.parallelism, 1) <= records_max

        pieces = {each: list(cut(self.planner, each, meta, partial(is_small, each))) for each, meta in ranges.items()}
        turns = range(max(map(len, pieces.values()), default=0))
        return [{partition: each[turn] for partition, each in pieces.items() if turn < len(each)} for turn in turns]

    def _ranges_to(self, plan: Plan) -> dict[str, Meta]:
        """Of each partition, all from where the copy is to ``plan``."""
        origin = read_origin(self._store, self._topology.id)
        if self.txid == 0:
            self._check_origin(origin)
        ranges: dict[str, Meta] = {}
        if CLOCK_PARTITION in plan:
            raise Unverifiable(
                f"topology {self._topology.id!r}: it goes by event time, and when its first transactions were planned is no "
                "longer recorded: what was late then cannot be known; a table of records (topology.history.table) keeps it"
            )
        for partition, last in plan.items():
            known = self._plan.get(partition)
            first = known if known is not None else origin.positions.get(partition)
            if first is None:
                raise Unverifiable(f"partition {partition}: where it was first read is not recorded")
            joined = self.planner.ranges.joined(first, last, after=known is not None)
            if joined is None:
                raise Unverifiable(
                    f"topology {self._topology.id!r}: the plans of its first transactions are no longer kept, and spout "
                    f"{self._topology.spout.id!r} cannot say what lies between two of them, in "
                    f"partition {partition}: no spout can where lost records were skipped"
                )
            offsets = self.planner.ranges.offsets(joined)
            if offsets is not None and offsets.start < int(last.get(LEFT_OUT_FROM, 0)):
                raise Unverifiable(
                    f"topology {self._topology.id!r}: the plans of its first transactions are no longer kept, and so many "
                    f"records were left out that those before offset {last[LEFT_OUT_FROM]} of partition {partition} are no "
                    "longer known; a table of records (topology.history.table) keeps them"
                )
            ranges[partition] = joined
        return ranges

    def _check_origin(self, origin: Origin) -> None:
        if origin.txid != 1:
            raise Unverifiable(
                f"topology {self._topology.id!r}: its positions were reset, or first recorded, at transaction {origin.txid}; "
                "what its sinks hold from before cannot be recomputed"
            )
