"""The clock stream of a partitioned spout: the planning time of each batch, as a tuple of the
batch.

A topology that uses event time needs a clock that a replay does not change. So the planning time is
a part of the plan: an entry of a pseudo-partition, which the reader turns into one tuple on the
stream ``CLOCK_STREAM``. The builder adds the stream to its spout if a bolt subscribes to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from framework.errors import TopologyError
from framework.topology.attempt import TransactionAttempt
from framework.topology.bolts import OutputFieldsDeclarer
from framework.topology.context import TopologyContext
from framework.topology.extra_partition_spout_wrapper import (
    Plan,
    PlannerWrapper,
    RangesWrapper,
    ReaderWrapper,
    SpoutWrapper,
    without,
)
from framework.topology.fields import Fields
from framework.topology.range_operations import SourceRanges
from framework.topology.spouts import (
    DEAD_LETTER_STREAM,
    Meta,
    OnStream,
    OpaquePartitionedTransactionalSpout,
    PartitionedSpout,
    PartitionedTransactionalSpout,
    PartitionPlanner,
    PartitionReader,
    Rows,
    Spout,
)

#: The hidden stream of planning times.
CLOCK_STREAM = "clock"
#: ``planned_at``: microseconds since 1970, by the clock of the driver that made the plan.
#: ``unread``: whether a partition has records, none of which was planned so far. ``behind``:
#: whether the plan reads nothing from a partition that has records. ``begun``: the partitions with
#: planned records, none of which was read to its end so far, by this plan or an earlier one.
CLOCK_FIELDS = Fields.of(
    {"planned_at": pa.int64(), "unread": pa.bool_(), "behind": pa.bool_(), "begun": pa.list_(pa.string())}
)
#: The fields that outlines of topologies show. The columns of the clock are not part of the shape
#: of a topology, so stored outlines stay equal when the clock gets more columns.
OUTLINED_CLOCK = Fields.of({"planned_at": pa.int64(), "unread": pa.bool_(), "behind": pa.bool_()})
#: The streams of a spout that hold no records.
HIDDEN_STREAMS = frozenset({CLOCK_STREAM, DEAD_LETTER_STREAM})
#: The pseudo-partition in plans. Its entry has ``CLOCK_FIELDS``, ``new``: the partitions without
#: planned records so far, ``first``: those with their first records in this plan, and ``ended``:
#: those that this plan is the first to read to their end. Older plans lack the last two, and
#: ``begun``.
CLOCK_PARTITION = "@clock"


def with_clock(spout_id: str, spout: Spout) -> PartitionedSpout:
    """The spout with a clock stream. Raises ``TopologyError`` for a spout without partitions."""
    if isinstance(spout, OpaquePartitionedTransactionalSpout):
        return _OpaqueClockedSpout(spout)
    if isinstance(spout, PartitionedTransactionalSpout):
        return _ClockedSpout(spout)
    raise TopologyError(
        f"spout {spout_id!r} is a {type(spout).__name__}, which has no clock stream: event time needs a "
        "PartitionedTransactionalSpout or an OpaquePartitionedTransactionalSpout"
    )


class _Clocked(SpoutWrapper):
    """Adds the clock; everything else is delegated to the inner spout."""

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        super().declare_output_fields(declarer)
        declarer.declare(CLOCK_FIELDS, CLOCK_STREAM)

    def planner(self, conf: Mapping[str, Any], context: TopologyContext) -> PartitionPlanner:
        return ClockPlanner(self.spout.planner(conf, context))

    def reader(self, conf: Mapping[str, Any], context: TopologyContext) -> PartitionReader:
        return _ClockReader(self.spout.reader(conf, context))


class _ClockedSpout(_Clocked, PartitionedTransactionalSpout):
    pass


class _OpaqueClockedSpout(_Clocked, OpaquePartitionedTransactionalSpout):
    pass


class ClockPlanner(PlannerWrapper):
    """Adds the clock to the plans of another planner, and hides it from that one."""

    def __init__(self, planner: PartitionPlanner) -> None:
        super().__init__(planner, CLOCK_PARTITION)

    def plan(self, previous: Mapping[str, Meta | None]) -> Plan | None:
        return self._timed(previous, self._planner.plan(self._rest(previous)))

    def plan_smaller(self, previous: Mapping[str, Meta | None], divisor: int) -> Plan | None:
        return self._timed(previous, self._planner.plan_smaller(self._rest(previous), divisor))

    def empty_plan(self, previous: Mapping[str, Meta | None]) -> Plan | None:
        return self._timed(previous, self._planner.empty_plan(self._rest(previous)))

    def _timed(self, previous: Mapping[str, Meta | None], plan: Plan | None) -> Plan | None:
        if plan is None:
            return None
        before = previous.get(CLOCK_PARTITION)
        counts = self._planner.record_counts(plan)
        new = (set(before["new"]) if before is not None else set()) | (plan.keys() - previous.keys())
        first = {each for each in new if each in plan and counts.get(each) != 0}
        new = {each for each in new if each in plan and each not in first}
        behind = self._behind(plan)
        left = {each for each in behind if counts.get(each, 0) == 0}
        begun = ({*before.get("begun", ())} if before is not None else set()) & plan.keys() | first
        clock = {
            "planned_at": time.time_ns() // 1_000,
            "new": sorted(new),
            "first": sorted(first),
            "unread": any(each in new or each not in plan for each in left),
            "behind": bool(left),
            "begun": sorted(begun & behind),
            "ended": sorted(begun - behind),
        }
        return {**plan, CLOCK_PARTITION: clock}

    def _behind(self, plan: Plan) -> set[str]:
        """The partitions that have readable records after those of the plan."""
        if self._planner.lag(plan) == 0:
            return set()
        progress = self._planner.progress(plan, [])
        return {each for each, its in progress.items() if (its.lag or 0) > its.open_records}

    def record_count(self, plan: Plan) -> int | None:
        rest = self._rest(plan)
        # a plan with the clock alone is read, too
        return self._planner.record_count(rest) if rest or not plan else 1

    def record_counts(self, plan: Plan) -> Mapping[str, int | None]:
        counts = super().record_counts(plan)
        return {**counts, CLOCK_PARTITION: 1} if CLOCK_PARTITION in plan else counts

    @property
    def ranges(self) -> SourceRanges:
        return _ClockRanges(self._planner.ranges, CLOCK_PARTITION, mark="planned_at")


class _ClockRanges(RangesWrapper):
    """A part of a plan leaves the other partitions unread, so that the watermark waits for them."""

    def narrowed(self, whole: Plan, part: Plan) -> Plan:
        part = super().narrowed(whole, part)
        clock = part.get(CLOCK_PARTITION)
        shorter = {each for each, meta in part.items() if self.offsets(whole[each]) != self.offsets(meta)}
        if clock is None or not shorter:
            return part
        left = {each for each in shorter if not self.offsets(part[each])}
        first, ended = set(clock.get("first", ())), set(clock.get("ended", ()))  # older plans lack them
        unread = first & left
        new = {*clock["new"], *unread}
        changed = {
            "unread": clock["unread"] or bool(new & left),
            "behind": clock["behind"] or bool(left),
            "new": sorted(new),
            "first": sorted(first - left),
            "begun": sorted({*clock.get("begun", ()), *(ended & shorter)} - unread),
            "ended": sorted(ended - shorter),
        }
        return {**part, CLOCK_PARTITION: {**clock, **changed}}


class _ClockReader(ReaderWrapper):
    """Reads the clock's entry as one tuple, and passes the rest to another reader."""

    def read(self, attempt: TransactionAttempt, partition: str, meta: Meta) -> Iterator[Rows]:
        yield from self.read_all(attempt, {partition: meta})

    def read_all(self, attempt: TransactionAttempt, ranges: Plan) -> Iterator[Rows]:
        clock = ranges.get(CLOCK_PARTITION)
        if clock is not None:
            row = {"begun": [], **{name: clock[name] for name in CLOCK_FIELDS if name in clock}}
            yield OnStream(CLOCK_STREAM, pa.RecordBatch.from_pylist([row], CLOCK_FIELDS.schema()))
        self._reader.check_alive = self.check_alive  # type: ignore[method-assign]
        yield from self._reader.read_all(attempt, without(ranges, CLOCK_PARTITION))
