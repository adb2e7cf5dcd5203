"""Finds the record that makes a batch fail: re-reads smaller and smaller parts of the batch, and
shows the smallest part that still fails.

Only the processing phase runs, in this process, so nothing is written anywhere. No leadership is
needed, and a driver may run meanwhile. Code that ends the process instead of raising ends the
search too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from framework.errors import ConfigError, DataLossError, RetryableError
from framework.execution import AttemptHeader, FailureKind, LocalExecutor, TaskFailure, plan_execution
from framework.inspect.narrowing import narrow, with_records
from framework.topology import PartitionedSpout, Topology
from framework.topology.spouts import Meta, PartitionPlanner
from framework.transactions import CoordinationStore
from framework.transactions.documents import read_plan
from framework.transactions.plans import plan_digest
from framework.transactions.spout_planners import planner_of, processing_job, rows_in

#: How many rows of the smallest part are shown.
ROWS_SHOWN = 5

Ranges = Mapping[str, Meta]


@dataclass(frozen=True, slots=True)
class Poison:
    """The smallest ranges that still fail, and their failure. ``rows``: the first rows in them, as
    the spout emits them; empty when they cannot be decoded. ``probes``: how many parts were
    tried."""

    txid: int
    ranges: Ranges
    failure: TaskFailure
    rows: tuple[Mapping[str, Any], ...] = ()
    probes: int = 0

    def lines(self) -> list[str]:
        """Lines for a person."""
        shown = [f"  {partition}: {_shown(meta)}" for partition, meta in sorted(self.ranges.items())]
        return [
            f"transaction {self.txid} fails on this much of it ({self.probes} parts tried):",
            *shown,
            f"  error: {self.failure}",
            *(f"  row: {_shortened(dict(row))}" for row in self.rows),
        ]


def find_poison(
    topology: Topology, store: CoordinationStore, conf: Mapping[str, Any] | None = None, txid: int | None = None
) -> Poison | None:
    """Narrow a batch down. ``txid``: which batch; by default the one that is next to commit.
    Returns None when its processing phase succeeds here: the batch then fails in its commit phase,
    by chance, or because of where it runs.

    Raises ``ConfigError`` when there is no plan, or when the spout has no partitions, and
    ``RetryableError`` when the batch cannot be read again.
    """
    spout = topology.spout.instance
    if not isinstance(spout, PartitionedSpout):
        raise ConfigError(f"spout {topology.spout.id!r} has no partitions, so its batches cannot be narrowed down")
    txid, plan = read_plan(store, topology.id, topology.spout.id, txid)
    planner = planner_of(topology, conf or {})
    executor = LocalExecutor(plan_execution(topology), conf or {})
    executor.start()
    try:
        found = _Search(topology.id, txid, planner, executor).run(
            plan, lambda ranges: rows_in(topology, conf or {}, planner, ranges, ROWS_SHOWN)
        )
        planner.confirm(plan)
        return found
    except DataLossError as error:
        raise RetryableError(f"transaction {txid} cannot be read again: {error}") from error
    finally:
        executor.close()
        planner.close()


@dataclass(slots=True)
class _Search:
    topology_id: str
    txid: int
    planner: PartitionPlanner
    executor: LocalExecutor
    probes: int = field(default=0)

    def run(self, plan: Ranges, rows: Callable[[Ranges], tuple[Mapping[str, Any], ...]]) -> Poison | None:
        ranges: Ranges = with_records(self.planner, plan)
        failure = self._failure(ranges) if ranges else None
        if failure is None:
            return None
        ranges, failure = self._fewest_partitions(ranges, failure)
        ranges, failure = self._smallest(ranges, failure)
        return Poison(self.txid, ranges, failure, rows(ranges), self.probes)

    def _fewest_partitions(self, ranges: Ranges, failure: TaskFailure) -> tuple[Ranges, TaskFailure]:
        """One partition that fails alone, if there is one; otherwise partitions that fail together,
        without those that the failure does not need."""
        for partition, meta in ranges.items():
            alone = self._failure({partition: meta}) if len(ranges) > 1 else failure
            if alone is not None:
                return {partition: meta}, alone
        for partition in list(ranges):
            without = {each: meta for each, meta in ranges.items() if each != partition}
            still = self._failure(without)
            if still is not None:
                ranges, failure = without, still
        return ranges, failure

    def _smallest(self, ranges: Ranges, failure: TaskFailure) -> tuple[Ranges, TaskFailure]:
        """Halve every range for as long as one of its halves still fails."""

        def fails(partition: str, half: Meta) -> bool:
            nonlocal failure
            still = self._failure({**ranges, partition: half})
            failure = still or failure
            return still is not None

        for partition, meta in list(ranges.items()):
            smallest = next(narrow(self.planner, partition, meta, partial(fails, partition)))
            ranges = {**ranges, partition: smallest}
        return ranges, failure

    def _failure(self, ranges: Ranges) -> TaskFailure | None:
        """How a part of the batch fails; None when it does not. Raises ``RetryableError`` for a
        failure that says nothing about the records."""
        self.probes += 1
        header = AttemptHeader(
            self.topology_id, txid=self.txid, attempt_id=self.probes, epoch=0, plan_digest=plan_digest(ranges)
        )
        try:
            result = self.executor.process(processing_job(header, self.planner, ranges))
        finally:
            self.executor.release(header)
        failure = result.failure
        if failure is not None and failure.kind in (FailureKind.RETRYABLE, FailureKind.STALE, FailureKind.DATA_LOSS):
            raise RetryableError(f"transaction {self.txid} cannot be read again: {failure}")
        return failure


def _shown(meta: Meta) -> str:
    if "first_offset" in meta:
        first, end = int(meta["first_offset"]), int(meta["next_offset"])
        return f"offset {first}" if end - first == 1 else f"offsets {first} to {end - 1}"
    return ", ".join(f"{key} {value}" for key, value in meta.items() if key != "rows")


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 500 else f"{text[:500]}..."
