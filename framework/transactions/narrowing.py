"""Removes the record whose value is refused from the plans, found by bisecting the batch (C51).

A component reports that a value is refused, but usually not of which record. So the batch is
planned again with the first half of its records. If that half is refused too, it is halved; if it
is committed, the next batch is a half of the rest. A refused batch of a single record identifies
the record: in the plan of the next attempt, its entry leaves the record out and has the reason, and
the reader makes it a dead letter, or skips it. A batch that is too large for a task is halved in
the same way until its parts are not. The halves are ordinary batches, whichever component
refused the value, so a leader that dies in between costs only a few more attempts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from framework.errors import BatchTooLargeError, reason_of
from framework.execution.failures import TaskFailure
from framework.topology.spouts import (
    LEFT_OUT,
    LEFT_OUT_FROM,
    ON_REFUSED,
    REFUSED,
    Meta,
    PartitionPlanner,
    leaving_out_too,
)
from framework.transactions.plans import Plan

#: The most records that the entries of a plan list as left out, so that a plan fits into a znode,
#: and into the record of its transaction. Beyond that, each entry forgets the older half of those
#: before its range. No batch reads them again; only ``verify`` and ``rebuild``, if they no longer
#: have the record of their transaction, would, and refuse it.
LEFT_OUT_MAX = 5_000


class Narrowing:
    """Makes narrower plans, without I/O.

    * ``on_refused``: called with partition, offset and reason of each removed record.
    * ``policies``: component -> its ``on_bad_record``; a component that is missing, or says "fail",
      leaves the decision to the spout."""

    def __init__(
        self,
        planner: PartitionPlanner,
        spout_id: str,
        on_refused: Callable[[str, int, str], None] = lambda partition, offset, reason: None,
        policies: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._planner = planner
        self._spout_id = spout_id
        self._on_refused = on_refused
        self._policies = {each: policy for each, policy in policies.items() if policy != "fail"}

    def applies(self, plan: Plan, failure: TaskFailure) -> bool:
        """Whether a record of this plan may be removed because of a failure, or the batch is to be
        halved. The spout decides itself about values that it refuses."""
        if failure.error == BatchTooLargeError.__name__ and self._half(plan) is not None:
            return True
        takes_out = partial(self._takes_out, failure)
        return failure.component_id != self._spout_id and any(map(takes_out, self._suspects(plan)))

    def narrowed(self, plan: Plan, failure: TaskFailure) -> tuple[Plan, bool] | TaskFailure:
        """The plan of the next attempt, and whether it is a half; or the failure that ends the run,
        if no record can be removed."""
        half = self._half(plan)
        if half is not None:
            return half, True
        suspects = self._suspects(plan)
        if len(suspects) != 1 or len(self._offsets(next(iter(suspects.values())))) != 1:
            return failure
        ((partition, meta),) = suspects.items()
        offset = self._offsets(meta)[0]
        named = replace(failure, message=f"partition {partition}, offset {offset}: {failure.message}")
        if failure.component_id == self._spout_id or not self._takes_out(failure, partition):
            return named
        reason = reason_of(f"{failure.component_id}: {failure.message}")
        self._on_refused(partition, offset, reason)
        entry = _refusing(meta, offset, reason)
        policy = self._policies.get(failure.component_id)
        without = {**plan, partition: entry if policy is None else {**entry, ON_REFUSED: policy}}
        if sum(len(each.get(LEFT_OUT, ())) for each in without.values()) > LEFT_OUT_MAX:
            without = {each: self._forgetting(meta) for each, meta in without.items()}
        return without, False

    def rest(self, suspects: Plan, committed: Plan | None) -> Plan | None:
        """The next batch within ``suspects``, a part of which is committed: half of the rest. None
        when nothing is left, or the source cannot divide its ranges."""
        left: dict[str, Meta] = {}
        for partition, meta in suspects.items():
            before = committed.get(partition) if committed is not None else None
            joined = meta if before is None else self._planner.ranges.joined(before, meta, after=True)
            if joined is None:
                return None
            left[partition] = leaving_out_too(joined, before)
        if not any(map(self._offsets, left.values())):
            return None
        return self._half(left) or left

    def _takes_out(self, failure: TaskFailure, partition: str) -> bool:
        return failure.component_id in self._policies or self._planner.ranges.takes_out(partition)

    def _half(self, plan: Plan) -> Plan | None:
        """The batch with the first half of the records; None for one record, or when the source
        cannot divide its ranges."""
        suspects = self._suspects(plan)
        kept: dict[str, Meta] = {}
        if len(suspects) > 1:
            kept = {each: suspects[each] for each in sorted(suspects)[: len(suspects) // 2]}
        else:
            for partition, meta in suspects.items():
                halves = self._planner.ranges.split(partition, meta)
                if halves is None:
                    return None
                kept[partition] = halves[0]
        if not kept:
            return None
        half: dict[str, Meta] = {}
        for each, meta in plan.items():
            entry = kept.get(each) or self._empty(meta)
            if entry is None:
                return None
            half[each] = entry
        return self._planner.ranges.narrowed(plan, half)

    def _empty(self, meta: Meta) -> Meta | None:
        return self._planner.ranges.beginning(meta) if self._offsets(meta) else meta

    def _suspects(self, plan: Plan) -> Plan:
        """The partitions with records that are not left out yet."""
        return {each: meta for each, meta in plan.items() if len(self._offsets(meta)) > self._left_out(meta)}

    def _left_out(self, meta: Meta) -> int:
        offsets = self._offsets(meta)
        return sum(offset in offsets for offset in meta.get(LEFT_OUT, ()))

    def _forgetting(self, meta: Meta) -> Meta:
        """The entry without the older half of the left-out records before its range."""
        left_out, offsets = meta.get(LEFT_OUT, ()), self._planner.ranges.offsets(meta)
        behind = sum(offset < offsets.start for offset in left_out) if offsets is not None else 0
        gone = (behind + 1) // 2
        return {**meta, LEFT_OUT: left_out[gone:], LEFT_OUT_FROM: left_out[gone - 1] + 1} if gone else meta

    def _offsets(self, meta: Meta) -> range:
        return self._planner.ranges.offsets(meta) or range(0)


def _refusing(meta: Meta, offset: int, reason: str) -> Meta:
    """An entry without this record. Later entries repeat which records are left out; only this one
    has the reason."""
    return {**meta, LEFT_OUT: sorted({*meta.get(LEFT_OUT, ()), offset}), REFUSED: {str(offset): reason}}
