"""Wrappers of a partitioned spout that add a pseudo-partition to its plans. All else is the inner
spout's, which never sees the pseudo-partition."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from typing import Any, Self

from framework.topology.bolts import Bolt, OutputFieldsDeclarer
from framework.topology.context import TopologyContext
from framework.topology.fields import Fields
from framework.topology.range_operations import SourceRanges, SourceRecord
from framework.topology.spouts import (
    Backlog,
    Meta,
    PartitionedSpout,
    PartitionPlanner,
    PartitionProgress,
    PartitionReader,
    ReadCounts,
)
from framework.topology.written_topics import ReadTopics, WrittenTopic

Plan = Mapping[str, Meta]


class SpoutWrapper(PartitionedSpout):
    """A spout with the planner and the reader of another one; wrap them in ``planner`` and
    ``reader``."""

    def __init__(self, spout: PartitionedSpout) -> None:
        self.spout = spout

    @property
    def is_shared(self) -> bool:
        return self.spout.is_shared

    @property
    def replays_letters(self) -> bool:
        return self.spout.replays_letters

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        self.spout.declare_output_fields(declarer)

    def output_fields(self) -> Fields:
        return self.spout.output_fields()

    def check_before_start(self, conf: Mapping[str, Any]) -> None:
        self.spout.check_before_start(conf)

    def check_written_topics(self, conf: Mapping[str, Any], written: Sequence[WrittenTopic]) -> None:
        self.spout.check_written_topics(conf, written)

    def read_topics(self) -> ReadTopics | None:
        return self.spout.read_topics()

    def with_tombstones(self, stream: str) -> Self:
        inner = self.spout.with_tombstones(stream)
        if inner is self.spout:
            return self
        changed = copy(self)
        changed.spout = inner
        return changed

    def leaves_out_bad_records(self, stream: str) -> bool:
        return self.spout.leaves_out_bad_records(stream)

    def dead_letters(self) -> Bolt | None:
        return self.spout.dead_letters()

    @property
    def has_dead_letters(self) -> bool:
        return self.spout.has_dead_letters

    def planner(self, conf: Mapping[str, Any], context: TopologyContext) -> PartitionPlanner:
        return self.spout.planner(conf, context)

    def reader(self, conf: Mapping[str, Any], context: TopologyContext) -> PartitionReader:
        return self.spout.reader(conf, context)

    def release(self) -> None:
        self.spout.release()


class RangesWrapper(SourceRanges):
    """``partition``: the pseudo-partition; its entry is one record that nobody takes out.
    ``mark``: a field that its entries have, and no others."""

    def __init__(self, ranges: SourceRanges, partition: str, mark: str) -> None:
        self._ranges, self._partition, self._mark = ranges, partition, mark

    def split(self, partition: str, meta: Meta) -> tuple[Meta, Meta] | None:
        return self._ranges.split(partition, meta) if partition != self._partition else None

    def stages(self, ranges: Plan) -> Sequence[Plan]:
        *first, last = self._ranges.stages(without(ranges, self._partition))
        return [*first, {**last, self._partition: ranges[self._partition]} if self._partition in ranges else last]

    def offsets(self, meta: Meta) -> range | None:
        return self._ranges.offsets(meta) if self._mark not in meta else range(0)

    def takes_out(self, partition: str) -> bool:
        return partition != self._partition and self._ranges.takes_out(partition)

    def peek(self, partition: str, meta: Meta) -> SourceRecord | None:
        return self._ranges.peek(partition, meta) if partition != self._partition else None

    def joined(self, first: Meta, last: Meta, *, after: bool) -> Meta | None:
        return self._ranges.joined(first, last, after=after) if self._mark not in last else None

    def narrowed(self, whole: Plan, part: Plan) -> Plan:
        return self._ranges.narrowed(whole, part)

    def beginning(self, meta: Meta) -> Meta | None:
        return self._ranges.beginning(meta) if self._mark not in meta else meta


class PlannerWrapper(PartitionPlanner):
    """Hides the pseudo-partition from another planner. Add it in ``plan``, ``plan_smaller`` and
    ``empty_plan``."""

    def __init__(self, planner: PartitionPlanner, partition: str) -> None:
        self._planner, self._partition = planner, partition
        self.shares_entries = planner.shares_entries

    def _rest(self, plan: Mapping[str, Any]) -> Mapping[str, Any]:
        return without(plan, self._partition)

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
        return self._planner.backlog(self._rest(previous))

    def resume(self, plan: Plan) -> None:
        self._planner.resume(self._rest(plan))

    def finished(self, plan: Plan) -> bool:
        return self._planner.finished(self._rest(plan))

    def hidden(self) -> Plan:
        return self._planner.hidden()

    def plan(self, previous: Mapping[str, Meta | None]) -> Plan | None:
        return self._planner.plan(self._rest(previous))

    def plan_smaller(self, previous: Mapping[str, Meta | None], divisor: int) -> Plan | None:
        return self._planner.plan_smaller(self._rest(previous), divisor)

    def empty_plan(self, previous: Mapping[str, Meta | None]) -> Plan | None:
        return self._planner.empty_plan(self._rest(previous))

    def watch(self, arrived: Callable[[], None]) -> bool:
        return self._planner.watch(arrived)

    @property
    def skips_lost_data(self) -> bool:
        return self._planner.skips_lost_data

    def avoid(self, written: Sequence[WrittenTopic], conf: Mapping[str, Any]) -> None:
        self._planner.avoid(written, conf)

    def mutable(self, partitions: Collection[str]) -> Mapping[str, str]:
        return self._planner.mutable([each for each in partitions if each != self._partition])

    def confirm(self, plan: Plan) -> None:
        self._planner.confirm(self._rest(plan))

    def lost(self, plan: Plan) -> None:
        self._planner.lost(self._rest(plan))

    def processed(self, plan: Plan, read: ReadCounts, elapsed_s: float) -> None:
        self._planner.processed(self._rest(plan), read, elapsed_s)

    def committed(self, plan: Plan) -> None:
        self._planner.committed(self._rest(plan))

    def record_count(self, plan: Plan) -> int | None:
        return self._planner.record_count(self._rest(plan))

    def record_counts(self, plan: Plan) -> Mapping[str, int | None]:
        return self._planner.record_counts(self._rest(plan))

    def progress(self, committed: Plan, in_flight: Sequence[Plan]) -> Mapping[str, PartitionProgress]:
        return self._planner.progress(self._rest(committed), [self._rest(each) for each in in_flight])

    @property
    def ranges(self) -> SourceRanges:
        return self._planner.ranges

    def lag(self, previous: Mapping[str, Meta | None]) -> int | None:
        return self._planner.lag(self._rest(previous))

    def for_reading(self, partition: str, meta: Meta) -> Meta:
        return self._planner.for_reading(partition, meta) if partition != self._partition else meta

    def for_transaction(self, txid: int, partition: str, meta: Meta) -> Meta:
        return self._planner.for_transaction(txid, partition, meta) if partition != self._partition else meta

    def check(self) -> None:
        self._planner.check()

    def check_first_plan(self, has_run: Callable[[], bool]) -> None:
        self._planner.check_first_plan(has_run)

    def source_identity(self) -> Mapping[str, Any]:
        return self._planner.source_identity()

    def end(self) -> Plan | None:
        return self._planner.end()

    def covers(self, plan: Plan, goal: Plan) -> bool:
        return self._planner.covers(self._rest(plan), self._rest(goal))

    def close(self) -> None:
        self._planner.close()


class ReaderWrapper(PartitionReader):
    """A reader with the counts and connections of another one; add what is read in ``read_all``."""

    def __init__(self, reader: PartitionReader) -> None:
        self._reader = reader

    @property
    def counts(self) -> ReadCounts:
        return self._reader.counts

    def warm_up(self) -> None:
        self._reader.warm_up()

    def close(self) -> None:
        self._reader.close()


def unwrapped(instance: Any) -> Any:
    """The component as its user has given it."""
    while isinstance(instance, SpoutWrapper):
        instance = instance.spout
    return instance


def without(plan: Mapping[str, Any], partition: str) -> Mapping[str, Any]:
    """The plan without a partition; the same object where it has none."""
    return plan if partition not in plan else {each: meta for each, meta in plan.items() if each != partition}
