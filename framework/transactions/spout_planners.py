"""The driver's side of any spout: its kind, and a planner for it.

The coordinator of a general spout becomes a planner of one pseudo-partition, ``batch``. The entry
of that partition contains the user's metadata and the txid. So planning, persisting, replay and
recovery work in one way for all spouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from framework.errors import ConfigError, CorruptStateError, InvariantViolation, RatchetError, RetryableError
from framework.execution.messages import AttemptHeader
from framework.execution.ports import GENERAL_PARTITION, ProcessingJob
from framework.topology.attempt import TransactionAttempt
from framework.topology.builder import Topology
from framework.topology.context import TopologyContext
from framework.topology.dead_letter_replay import LettersPlanner
from framework.topology.planning_time_stream import HIDDEN_STREAMS
from framework.topology.spouts import (
    Meta,
    OpaquePartitionedTransactionalSpout,
    PartitionedSpout,
    PartitionPlanner,
    TransactionalSpout,
    TransactionalSpoutCoordinator,
    on_stream,
)
from framework.transactions.coordinator import SpoutKind
from framework.transactions.plans import Plan
from framework.transactions.spout_dead_letter_reader import letter_reader_of


class ImmutableSource:
    """Refuses partitions that may lose records between a batch and its replay, when sinks of the
    topology skip transactions that they have already applied (C5). ``skipping``: those sinks, as
    error messages name them; without any, nothing is checked."""

    def __init__(self, planner: PartitionPlanner, skipping: Sequence[str]) -> None:
        self._planner = planner
        self._skipping = skipping
        self._checked: set[str] = set()

    def check(self, partitions: Iterable[str]) -> None:
        """Check each partition once. Raises ``ConfigError``, and ``RetryableError`` when the source
        does not answer."""
        new = set(partitions) - self._checked
        if not self._skipping or not new:
            return
        mutable = self._planner.mutable(new)
        if mutable:
            raise ConfigError(
                f"{mutable[min(mutable)]}, so a batch that is replayed may have lost records, and {self._skipping[0]}, skips what "
                "it has seen of it: use an opaque state or a single task, another topic, or say at_least_once=True to the "
                "builder if counting a replayed batch twice is acceptable"
            )
        self._checked |= new


def spout_kind_of(spout: object) -> SpoutKind:
    return SpoutKind.OPAQUE if isinstance(spout, OpaquePartitionedTransactionalSpout) else SpoutKind.TRANSACTIONAL


def planner_of(topology: Topology, conf: Mapping[str, Any], letters_of: Topology | None = None) -> PartitionPlanner:
    """The planner of a topology's spout, of any kind. Called on the driver, once per leader.
    ``letters_of``: the copy of the topology that keeps the letters to replay; None: the topology
    itself."""
    spout = topology.spout.instance
    context = _context(topology, conf)
    if isinstance(spout, PartitionedSpout):
        planner = spout.planner(conf, context)
        planner.avoid(topology.written_topics(), conf)
        if isinstance(planner, LettersPlanner):
            planner.keeper = letter_reader_of(letters_of or topology, conf)
        return planner
    if isinstance(spout, TransactionalSpout):
        return CoordinatorPlanner(spout.coordinator(conf, context))
    raise InvariantViolation(f"{context.component_id} is a {type(spout).__name__}, which is no transactional spout")


def processing_job(
    header: AttemptHeader, planner: PartitionPlanner, plan: Plan, committed_txid: int = 0
) -> ProcessingJob:
    """The processing phase of an attempt at a plan. The number of records decides its layout, so
    every repetition of a batch makes the same job."""
    ranges = {partition: planner.for_transaction(header.txid, partition, meta) for partition, meta in plan.items()}
    return ProcessingJob(header, ranges, planner.record_count(plan), committed_txid, planner.record_counts(plan))


def rows_in(
    topology: Topology, conf: Mapping[str, Any], planner: PartitionPlanner, ranges: Plan, limit: int
) -> tuple[Mapping[str, Any], ...]:
    """The first rows that the spout emits for these ranges, on any stream, for display; no dead
    letters. Empty if they cannot be read or decoded, and for a spout without partitions."""
    spout = topology.spout.instance
    if not isinstance(spout, PartitionedSpout):
        return ()
    found: list[Mapping[str, Any]] = []
    reader = spout.reader(conf, _context(topology, conf))
    try:
        read = {partition: planner.for_reading(partition, meta) for partition, meta in ranges.items()}
        for rows in reader.read_all(TransactionAttempt(0, 0), read):
            stream, batch = on_stream(rows)
            if stream not in HIDDEN_STREAMS:
                found += [shown_row(batch, number) for number in range(min(limit, batch.num_rows))]
            if len(found) >= limit:
                break
    except RatchetError:
        return ()
    finally:
        reader.close()
    return tuple(found[:limit])


def shown_row(rows: pa.RecordBatch, number: int) -> Mapping[str, Any]:
    """A row as Python values, for display; the name of a value's type if Python has no such value,
    such as a date in the year 75,000."""
    found: dict[str, Any] = {}
    for name in rows.schema.names:
        value = rows.column(name)[number]
        try:
            found[name] = value.as_py()
        except (ValueError, OverflowError, ImportError):
            found[name] = f"<{value.type}>"
    return found


def _context(topology: Topology, conf: Mapping[str, Any]) -> TopologyContext:
    return TopologyContext(topology.id, topology.spout.id, 0, 1, conf, parallelisms=topology.parallelisms())


class CoordinatorPlanner(PartitionPlanner):
    """Plans with a user's ``TransactionalSpoutCoordinator``.

    * ``next_txid``: the txid to plan; the caller of ``plan`` sets it.
    * ``planned``: the last txid with a binding plan; a new leader sets it to the last one that it
      found."""

    def __init__(self, coordinator: TransactionalSpoutCoordinator) -> None:
        self._coordinator = coordinator
        self.planned = 0
        self.next_txid = 1

    def partitions(self) -> list[str]:
        return [GENERAL_PARTITION]

    def is_ready(self) -> bool:
        return self._coordinator.is_ready()

    def plan(self, previous: Mapping[str, Meta | None]) -> Mapping[str, Meta]:
        last = previous.get(GENERAL_PARTITION)
        if previous and (last is None or not isinstance(last.get("txid"), int)):
            raise CorruptStateError(
                f"the stored plan is not one of a general TransactionalSpout (it has {', '.join(previous)}): the spout of "
                "this topology was another one; reset the topology, or give it another id"
            )
        txid = self.next_txid
        metadata = self._coordinator.initialize_transaction(txid, last.get("metadata") if last is not None else None)
        meta = {"txid": txid, "metadata": metadata}
        records = self._coordinator.record_count(metadata)
        self.planned = txid
        return {GENERAL_PARTITION: meta if records is None else {**meta, "records": records}}

    def record_count(self, plan: Mapping[str, Meta]) -> int | None:
        records = plan.get(GENERAL_PARTITION, {}).get("records")
        return None if records is None else int(records)

    def end(self) -> Mapping[str, Meta]:
        """The last planned txid. Raises ``RetryableError`` while the coordinator has another
        batch."""
        if self._coordinator.is_ready():
            raise RetryableError("the spout's coordinator is ready for another batch")
        return {GENERAL_PARTITION: {"txid": self.planned}}

    def covers(self, plan: Mapping[str, Meta], goal: Mapping[str, Meta]) -> bool:
        committed = plan.get(GENERAL_PARTITION)
        return int(committed["txid"] if committed is not None else 0) >= int(goal[GENERAL_PARTITION]["txid"])

    def close(self) -> None:
        self._coordinator.close()
