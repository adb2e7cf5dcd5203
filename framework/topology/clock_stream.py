"""The clock stream of a partitioned spout: when each batch was planned, as a tuple of the batch.

A topology that goes by event time needs a clock that a replay does not change. So the planning time
is a part of the plan: an entry of a pseudo-partition, which the reader turns into one tuple on the
stream ``CLOCK_STREAM``. The builder adds the stream to its spout where a bolt subscribes to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from framework.errors import TopologyError
from framework.topology.attempt import TransactionAttempt
from framework.topology.bolts import Bolt, OutputFieldsDeclarer
from framework.topology.context import TopologyContext
from framework.topology.fields import Fields
from framework.topology.ranges import SourceRanges, SourceRecord
from framework.topology.spouts import (
    DEAD_LETTER_STREAM,
    Backlog,
    Meta,
    OnStream,
    OpaquePartitionedTransactionalSpout,
    PartitionedSpout,
    PartitionedTransactionalSpout,
    PartitionPlanner,
    PartitionProgress,
    PartitionReader,
    ReadCounts,
    Rows,
    Spout,
)
from framework.topology.written_topics import ReadTopics, WrittenTopic

#: The hidden stream of planning times.
CLOCK_STREAM = "clock"
#: ``planned_at``: microseconds since 1970, by the clock of the driver that made the plan.
#: ``unread``: whether a partition has records, and none of it was planned so far. ``behind``:
#: whether the plan reads nothing of a partition that has records.
CLOCK_FIELDS = Fields.of({"planned_at": pa.int64(), "unread": pa.bool_(), "behind": pa.bool_()})
#: The streams of a spout that hold no records.
HIDDEN_STREAMS = frozenset({CLOCK_STREAM, DEAD_LETTER_STREAM})
#: The pseudo-partition in plans. Its entry has ``CLOCK_FIELDS``, and ``new``: the partitions of
#: which nothing was planned so far.
CLOCK_PARTITION = "@clock"

Plan = Mapping[str, Meta]


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


class _Clocked(PartitionedSpout):
    """Everything but the clock is the inner spout's."""

    def __init__(self, spout: PartitionedSpout) -> None:
        self.spout = spout

    @property
    def is_shared(self) -> bool:
        return self.spout.is_shared

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        self.spout.declare_output_fields(declarer)
        declarer.declare(CLOCK_FIELDS, CLOCK_STREAM)

    def output_fields(self) -> Fields:
        return self.spout.output_fields()

    def check_before_start(self, conf: Mapping[str, Any]) -> None:
        self.spout.check_before_start(conf)

    def check_written_topics(self, conf: Mapping[str, Any], written: Sequence[WrittenTopic]) -> None:
        self.spout.check_written_topics(conf, written)

    def read_topics(self) -> ReadTopics | None:
        return self.spout.read_topics()

    def dead_letters(self) -> Bolt | None:
        return self.spout.dead_letters()

    def planner(self, conf: Mapping[str, Any], context: TopologyContext) -> PartitionPlanner:
        return ClockPlanner(self.spout.planner(conf, context))

    def reader(self, conf: Mapping[str, Any], context: TopologyContext) -> PartitionReader:
        return _ClockReader(self.spout.reader(conf, context))

    def release(self) -> None:
        self.spout.release()


class _ClockedSpout(_Clocked, PartitionedTransactionalSpout):
    pass


class _OpaqueClockedSpout(_Clocked, OpaquePartitionedTransactionalSpout):
    pass


class _ClockRanges(SourceRanges):
    """Those of another planner, and the clock's entry, which is one record."""

    def __init__(self, ranges: SourceRanges) -> None:
        self._ranges = ranges

    def split(self, partition: str, meta: Meta) -> tuple[Meta, Meta] | None:
        return self._ranges.split(partition, meta) if partition != CLOCK_PARTITION else None

    def stages(self, ranges: Plan) -> Sequence[Plan]:
        *first, last = self._ranges.stages(_without(ranges))
        return [*first, {**last, CLOCK_PARTITION: ranges[CLOCK_PARTITION]} if CLOCK_PARTITION in ranges else last]

    def offsets(self, meta: Meta) -> range | None:
        return self._ranges.offsets(meta) if "planned_at" not in meta else range(0)

    def takes_out(self, partition: str) -> bool:
        return partition != CLOCK_PARTITION and self._ranges.takes_out(partition)

    def peek(self, partition: str, meta: Meta) -> SourceRecord | None:
        return self._ranges.peek(partition, meta) if partition != CLOCK_PARTITION else None

    def joined(self, first: Meta, last: Meta, *, after: bool) -> Meta | None:
        return self._ranges.joined(first, last, after=after) if "planned_at" not in last else None

    def beginning(self, meta: Meta) -> Meta | None:
        return self._ranges.beginning(meta) if "planned_at" not in meta else meta


class ClockPlanner(PartitionPlanner):
    """Adds the clock to the plans of another planner, and hides it from that one."""

    def __init__(self, planner: PartitionPlanner) -> None:
        self._planner = planner
        self.shares_entries = planner.shares_entries

    def partitions(self) -> list[str]:
        return self._planner.partitions()

    def is_ready(self) -> bool:
        return self._planner.is_ready()

    @property
    def records_max(self) -> int | None:
        return self._planner.records_max

    @records_max.setter
    def records_max(self, value: int | None) -> None:
        self._planner.records_max = value

    def backlog(self, previous: Mapping[str, Meta | None]) -> Backlog | None:
        return self._planner.backlog(_without(previous))

    def resume(self, plan: Plan) -> None:
        self._planner.resume(_without(plan))

    def finished(self, plan: Plan) -> bool:
        return self._planner.finished(_without(plan))

    def plan(self, previous: Mapping[str, Meta | None]) -> Plan | None:
        return self._timed(previous, self._planner.plan(_without(previous)))

    def plan_smaller(self, previous: Mapping[str, Meta | None], divisor: int) -> Plan | None:
        return self._timed(previous, self._planner.plan_smaller(_without(previous), divisor))

    def empty_plan(self, previous: Mapping[str, Meta | None]) -> Plan | None:
        return self._timed(previous, self._planner.empty_plan(_without(previous)))

    def _timed(self, previous: Mapping[str, Meta | None], plan: Plan | None) -> Plan | None:
        if plan is None:
            return None
        before = previous.get(CLOCK_PARTITION)
        counts = self._planner.record_counts(plan)
        new = (set(before["new"]) if before is not None else set()) | (plan.keys() - previous.keys())
        new = {each for each in new if each in plan and counts.get(each) == 0}
        left = self._left(plan, counts)
        clock = {
            "planned_at": time.time_ns() // 1_000,
            "new": sorted(new),
            "unread": any(each in new or each not in plan for each in left),
            "behind": bool(left),
        }
        return {**plan, CLOCK_PARTITION: clock}

    def _left(self, plan: Plan, counts: Mapping[str, int | None]) -> set[str]:
        """The partitions of which the plan reads nothing though they have records that may be
        read."""
        if self._planner.lag(plan) == 0:
            return set()
        progress = self._planner.progress(plan, [])
        unread = (each for each, its in progress.items() if (its.lag or 0) > its.open_records)
        return {each for each in unread if counts.get(each, 0) == 0}

    def watch(self, arrived: Callable[[], None]) -> bool:
        return self._planner.watch(arrived)

    @property
    def skips_lost_data(self) -> bool:
        return self._planner.skips_lost_data

    def avoid(self, written: Sequence[WrittenTopic], conf: Mapping[str, Any]) -> None:
        self._planner.avoid(written, conf)

    def mutable(self, partitions: Collection[str]) -> Mapping[str, str]:
        return self._planner.mutable([each for each in partitions if each != CLOCK_PARTITION])

    def confirm(self, plan: Plan) -> None:
        self._planner.confirm(_without(plan))

    def lost(self, plan: Plan) -> None:
        self._planner.lost(_without(plan))

    def processed(self, plan: Plan, read: ReadCounts, elapsed_s: float) -> None:
        self._planner.processed(_without(plan), read, elapsed_s)

    def committed(self, plan: Plan) -> None:
        self._planner.committed(_without(plan))

    def record_count(self, plan: Plan) -> int | None:
        rest = _without(plan)
        return self._planner.record_count(rest) if rest or not plan else 1  # the clock alone is read, too

    def record_counts(self, plan: Plan) -> Mapping[str, int | None]:
        counts = self._planner.record_counts(_without(plan))
        return {**counts, CLOCK_PARTITION: 1} if CLOCK_PARTITION in plan else counts

    def progress(self, committed: Plan, in_flight: Sequence[Plan]) -> Mapping[str, PartitionProgress]:
        return self._planner.progress(_without(committed), [_without(each) for each in in_flight])

    @property
    def ranges(self) -> SourceRanges:
        return _ClockRanges(self._planner.ranges)

    def lag(self, previous: Mapping[str, Meta | None]) -> int | None:
        return self._planner.lag(_without(previous))

    def for_reading(self, partition: str, meta: Meta) -> Meta:
        return self._planner.for_reading(partition, meta) if partition != CLOCK_PARTITION else meta

    def check(self) -> None:
        self._planner.check()

    def source_identity(self) -> Mapping[str, Any]:
        return self._planner.source_identity()

    def end(self) -> Plan | None:
        return self._planner.end()

    def hidden(self) -> Plan:
        return self._planner.hidden()

    def covers(self, plan: Plan, goal: Plan) -> bool:
        return self._planner.covers(_without(plan), _without(goal))

    def close(self) -> None:
        self._planner.close()


class _ClockReader(PartitionReader):
    """Reads the clock's entry as one tuple, and leaves the rest to another reader."""

    def __init__(self, reader: PartitionReader) -> None:
        self._reader = reader

    @property
    def counts(self) -> ReadCounts:
        return self._reader.counts

    def read(self, attempt: TransactionAttempt, partition: str, meta: Meta) -> Iterator[Rows]:
        yield from self.read_all(attempt, {partition: meta})

    def read_all(self, attempt: TransactionAttempt, ranges: Plan) -> Iterator[Rows]:
        clock = ranges.get(CLOCK_PARTITION)
        if clock is not None:
            row = {name: clock[name] for name in CLOCK_FIELDS}
            yield OnStream(CLOCK_STREAM, pa.RecordBatch.from_pylist([row], CLOCK_FIELDS.schema()))
        self._reader.check_alive = self.check_alive  # type: ignore[method-assign]
        yield from self._reader.read_all(attempt, _without(ranges))

    def warm_up(self) -> None:
        self._reader.warm_up()

    def close(self) -> None:
        self._reader.close()


def _without(plan: Mapping[str, Any]) -> Mapping[str, Any]:
    if CLOCK_PARTITION not in plan:
        return plan
    return {partition: meta for partition, meta in plan.items() if partition != CLOCK_PARTITION}
