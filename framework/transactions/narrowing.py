"""Removes records whose values are refused from the plans, found by bisecting the batch (C51).

A component reports that a value is refused, but usually not of which record. If it says so in the
processing phase, probes find all refused records of the batch at once: they process parts of it,
smaller and smaller, and commit nothing (ADR 128). In the plan of the next attempt, the entries
leave these records out and have the reasons, and the reader makes them dead letters, or skips them.

Where probes find nothing, the batch is planned again with the first half of its records. If that
half is refused too, it is halved; if it is committed, the next batch is a half of the rest. A
refused batch of a single record identifies the record. A batch that is too large for a task is
halved in the same way until its parts are not. The halves are ordinary batches, whichever component
refused the value, so a leader that dies in between costs only a few more attempts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from framework.errors import BatchTooLargeError, reason_of
from framework.execution.failures import FailureKind, TaskFailure
from framework.topology.spouts import (
    LEFT_OUT,
    LEFT_OUT_FROM,
    ON_REFUSED,
    PART_OF,
    REFUSED,
    Meta,
    PartitionPlanner,
    leaving_out_too,
    without_refused,
)
from framework.transactions.plans import Plan

#: The most records that the entries of a plan list as left out, so that a plan fits into a znode,
#: and into the record of its transaction. Beyond that, each entry forgets the older half of the
#: records before its range. No batch reads these again. Without the stored record of their
#: transaction, ``verify`` and ``rebuild`` would read them, and refuse to.
LEFT_OUT_MAX = 5_000
#: A larger batch is halved first: a probe of it would take too long.
SEARCHED_MAX = 50_000
#: The most refused records of one batch, and the most characters of their reasons, so that they fit
#: into a znode. A search that finds more ends there, and the rest of the batch is a later batch.
REFUSED_MAX = 1_000
REASONS_MAX = 100_000

#: Partition, offset and reason of a record that is left out.
Refused = tuple[str, int, str]
#: Processes a part of a batch, and commits nothing. Returns its failure, or None.
Probe = Callable[[Plan], "TaskFailure | None"]


@dataclass(frozen=True, slots=True)
class Searched:
    """The result of a search.

    * ``plan``: of the next attempt; it leaves out all refused records in it.
    * ``is_part``: whether the search has ended early, so that the plan is only the first part of
      the batch.
    * ``refused``: partition, offset and reason of each record that was found.
    * ``is_cut``: whether the next record is refused only together with the records before it. It is
      then the first record of the next batch."""

    plan: Plan
    is_part: bool
    refused: Sequence[Refused]
    is_cut: bool = False


class Narrowing:
    """Makes narrower plans, without I/O.

    * ``on_refused``: called with the records that are removed together.
    * ``policies``: component -> its ``on_bad_record``; a component that is missing, or says "fail",
      leaves the decision to the spout."""

    def __init__(
        self,
        planner: PartitionPlanner,
        spout_id: str,
        on_refused: Callable[[Sequence[Refused]], None] = lambda refused: None,
        policies: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._planner = planner
        self._spout_id = spout_id
        self._on_refused = on_refused
        self._policies = {each: policy for each, policy in policies.items() if policy != "fail"}

    def applies(self, plan: Plan, failure: TaskFailure) -> bool:
        """Whether a failure lets a record of this plan be removed, or the batch be halved. The
        spout itself decides about values that it refuses."""
        if failure.error == BatchTooLargeError.__name__ and self._half(plan) is not None:
            return True
        takes_out = partial(self._takes_out, failure)
        return failure.component_id != self._spout_id and any(map(takes_out, self._suspects(plan)))

    def may_search(self, plan: Plan, failure: TaskFailure, *, pins_errors: bool = False) -> bool:
        """Whether probes may find the records that made a processing phase fail. ``pins_errors``:
        an error of the user's code also counts as the refusal of a record."""
        if not _refuses(failure, pins_errors=pins_errors) or not self.applies(plan, failure):
            return False
        records = sum(len(self._offsets(meta)) - self._left_out(meta) for meta in plan.values())
        return 1 < records <= SEARCHED_MAX

    def searched(
        self, plan: Plan, probe: Probe, *, pins_errors: bool = False, in_order: bool = False
    ) -> Searched | None:
        """Search a plan for all records whose values are refused. None: probes find nothing. A
        failure of ``probe`` that is not a refusal ends the search. ``pins_errors``: as of
        ``may_search``; then the search also ends as soon as more records fail than pass, because
        the cause may be a server that the user's code calls. ``in_order``: a value may be refused
        because of records before it. So each probe also processes the records that have passed, and
        a store that tries its writes tells which record is refused; at any other refusal the record
        is processed alone, and if it is not refused then, the search ends."""
        return _Search(self, plan, probe, pins_errors=pins_errors, in_order=in_order).run()

    def narrowed(
        self, plan: Plan, failure: TaskFailure, searched: Searched | None = None
    ) -> tuple[Plan, bool] | TaskFailure:
        """The plan of the next attempt, and whether it is a part of the batch; or the failure that
        ends the run, if no record can be removed. ``searched``: the result for this plan."""
        if searched is not None:
            if searched.refused:
                self._on_refused(searched.refused)
            return searched.plan, searched.is_part
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
        reason = _reason(failure)
        self._on_refused([(partition, offset, reason)])
        entry = _refusing(meta, {offset: reason}, self._policy(failure))
        return self._bounded({**plan, partition: entry}), False

    def rest(self, suspects: Plan, committed: Plan | None) -> Plan | None:
        """The next batch within ``suspects``, a part of which is committed: half of the rest. None
        when nothing is left, or the source cannot divide its ranges."""
        left: dict[str, Meta] = {}
        for partition, meta in suspects.items():
            before = committed.get(partition) if committed is not None else None
            meta = without_refused(meta)
            joined = meta if before is None else self._planner.ranges.joined(before, meta, after=True)
            if joined is None:
                return None
            left[partition] = leaving_out_too(joined, before)
        if not any(map(self._offsets, left.values())):
            return None
        return self._half(left) or left

    def _takes_out(self, failure: TaskFailure, partition: str) -> bool:
        return failure.component_id in self._policies or self._planner.ranges.takes_out(partition)

    def _policy(self, failure: TaskFailure) -> str | None:
        """The policy of the bolt that refuses a value; None: the policy of the spout applies."""
        return self._policies.get(failure.component_id)

    def _half(self, plan: Plan) -> Plan | None:
        """The batch with the first half of the records; None for one record, or when the source
        cannot divide its ranges."""
        suspects = self._suspects(plan)
        halves = self._halves(suspects)
        if halves is None:
            return None
        return self._only(plan, {each: without_refused(meta) for each, meta in halves[0].items()})

    def _halves(self, suspects: Plan) -> tuple[Plan, Plan] | None:
        """The first half of some ranges, and the second; None for one record, or when the source
        cannot divide its ranges."""
        if len(suspects) > 1:
            ordered = sorted(suspects)
            first, second = ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]
            return {each: suspects[each] for each in first}, {each: suspects[each] for each in second}
        for partition, meta in suspects.items():
            halves = self._planner.ranges.split(partition, meta)
            return ({partition: halves[0]}, {partition: halves[1]}) if halves is not None else None
        return None

    def _only(self, plan: Plan, kept: Plan) -> Plan | None:
        """A plan that reads nothing but ``kept``, and has entries for all partitions of ``plan``;
        None when the source cannot tell where a range begins."""
        only: dict[str, Meta] = {}
        for each, meta in plan.items():
            entry = kept.get(each)
            if entry is None:
                bare = without_refused(meta)
                entry = self._planner.ranges.beginning(bare) if self._offsets(bare) else bare
            if entry is None:
                return None
            only[each] = entry
        return self._planner.ranges.narrowed(plan, only)

    def _bounded(self, plan: Plan) -> Plan:
        """The plan, with at most ``LEFT_OUT_MAX`` left-out records before its ranges."""
        if sum(len(each.get(LEFT_OUT, ())) for each in plan.values()) <= LEFT_OUT_MAX:
            return plan
        return {each: self._forgetting(meta) for each, meta in plan.items()}

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


class _SearchEnded(Exception):
    """A search ends early. Records that it has not searched yet belong to a later batch."""


class _Cut(_SearchEnded):
    """The next record is refused only together with the records before it."""


#: Consecutive records of one partition.
_Range = tuple[str, Meta]


class _Search:
    """A search for refused records by generalised binary splitting, in the order of partitions and
    offsets. It tests groups that are expected to have one refused record each, and finds the first
    refused record of a group by halving. Each of ``k`` refused among ``n`` records takes ``log2(n /
    k) + 2`` probes. The searched records are always the beginning of the batch."""

    def __init__(self, narrowing: Narrowing, plan: Plan, probe: Probe, *, pins_errors: bool, in_order: bool) -> None:
        self._narrowing, self._plan, self._probe = narrowing, plan, probe
        self._pins_errors, self._in_order = pins_errors, in_order
        # entries without records, such as the planning time, belong to every part
        self._always = {each: meta for each, meta in plan.items() if not narrowing._offsets(meta)}
        self._todo: list[_Range] = []  # the last one first
        self._done: dict[str, list[Meta]] = defaultdict(list)
        self._passed = 0
        self._found: list[Refused] = []
        self._reasons: dict[str, dict[int, str]] = {}
        self._policies: dict[str, str | None] = {}
        for each, meta in plan.items():
            if REFUSED in meta:
                self._reasons[each] = {int(offset): reason for offset, reason in meta[REFUSED].items()}
                self._policies[each] = meta.get(ON_REFUSED)

    def run(self) -> Searched | None:
        suspects = self._narrowing._suspects(self._plan)
        self._todo = [(each, self._slim(suspects[each])) for each in sorted(suspects, reverse=True)]
        try:
            self._search()
        except _SearchEnded as end:
            with suppress(_SearchEnded):  # the source cannot join the ranges
                plan = self._searched_part()
                if plan is not None:
                    is_cut = isinstance(end, _Cut)
                    return Searched(self._narrowing._bounded(plan), True, self._found, is_cut)
            return None
        if not self._found:
            return None
        found = {partition for partition, _, _ in self._found}
        plan = {each: self._refusing(each, meta) if each in found else meta for each, meta in self._plan.items()}
        return Searched(self._narrowing._bounded(plan), False, self._found)

    def _search(self) -> None:
        whole, self._todo = self._todo[::-1], []
        self._find_first(whole, None)  # the attempt itself has failed
        size = max(self._passed // 2, 1)
        while self._todo:
            group = self._next(size)
            failure = self._failure(group)
            if failure is None:
                self._pass(group)
                size *= 2
            else:
                self._find_first(group, failure)
                size = max(self._passed // (len(self._found) + 1), 1)

    def _next(self, size: int) -> list[_Range]:
        """Take the next ``size`` records, or at least half as many."""
        group: list[_Range] = []
        while self._todo and 2 * self._count(group) < size:
            each = self._todo.pop()
            halves = self._halves([each]) if self._count([*group, each]) > size else None
            if halves is None:
                group.append(each)
            else:
                self._todo += [*halves[1], *halves[0]]
        return group

    def _find_first(self, group: list[_Range], failure: TaskFailure | None) -> None:
        """Find the first refused record of a refused group; the records after it remain to be
        searched. ``failure``: of the group."""
        while self._count(group) > 1:
            halves = self._halves(group)
            if halves is None:
                raise _SearchEnded
            first, rest = halves
            failure = self._failure(first)
            if failure is None:
                self._pass(first)
                group = rest
            else:
                self._todo += reversed(rest)
                group = first
        # a record is left out only if it is refused by itself
        failure = failure or self._failure(group)
        if failure is not None and self._in_order and not failure.is_of_try:
            failure = self._failure_alone(group)
        if failure is not None:
            self._take_out(*group[0], failure)
        self._pass(group)

    def _failure(self, group: list[_Range]) -> TaskFailure | None:
        part = self._joined(group)
        if not self._narrowing._suspects(part):
            return None
        if self._in_order:
            part = self._after_passed(group)
        return self._probed(part)

    def _probed(self, part: Plan) -> TaskFailure | None:
        failure = self._probe({**self._always, **part})
        if failure is not None and not _refuses(failure, pins_errors=self._pins_errors):
            raise _SearchEnded
        return failure

    def _failure_alone(self, group: list[_Range]) -> TaskFailure:
        """The failure of a record that does not depend on the records before it."""
        failure = self._probed(self._joined(group))
        if failure is None or failure.is_of_try:
            raise _Cut
        return failure

    def _pass(self, group: list[_Range]) -> None:
        self._passed += self._count(group)
        for partition, meta in group:
            self._done[partition].append(meta)

    def _take_out(self, partition: str, meta: Meta, failure: TaskFailure) -> None:
        offset, reason, policy = self._narrowing._offsets(meta)[0], _reason(failure), self._narrowing._policy(failure)
        known = [each for reasons in self._reasons.values() for each in reasons.values()]
        if (
            not self._narrowing._takes_out(failure, partition)
            or (self._pins_errors and 2 * len(self._found) > self._passed)  # including those that were found
            or self._policies.setdefault(partition, policy) != policy  # an entry has one policy
            or len(known) >= REFUSED_MAX
            or sum(map(len, known)) + len(reason) > REASONS_MAX
        ):
            raise _SearchEnded
        self._reasons.setdefault(partition, {})[offset] = reason
        self._found.append((partition, offset, reason))

    # --- ranges -----------------------------------------------------------------------------------

    def _count(self, group: Sequence[_Range]) -> int:
        return sum(len(self._narrowing._offsets(meta)) for _, meta in group)

    def _halves(self, group: Sequence[_Range]) -> tuple[list[_Range], list[_Range]] | None:
        """Two parts of a group, as equal as its ranges allow; None when the source cannot divide
        it."""
        if len(group) == 1:
            ((partition, meta),) = group
            halves = self._narrowing._planner.ranges.split(partition, meta)
            return ([(partition, halves[0])], [(partition, halves[1])]) if halves is not None else None
        whole, at = self._count(group), 1
        while at + 1 < len(group) and 2 * self._count(group[: at + 1]) <= whole:
            at += 1
        return list(group[:at]), list(group[at:])

    def _joined(self, group: Sequence[_Range]) -> Plan:
        """One entry per partition; the ranges of a partition are consecutive."""
        ranges: dict[str, list[Meta]] = defaultdict(list)
        for partition, meta in group:
            ranges[partition].append(meta)
        return {partition: self._one(parts) for partition, parts in ranges.items()}

    def _after_passed(self, group: Sequence[_Range]) -> Plan:
        """As ``_joined``, of a group and all searched records that are not refused."""
        searched = [(partition, meta) for partition, parts in self._done.items() for meta in parts]
        part = dict(self._joined([*searched, *group]))
        for partition, reasons in self._reasons.items():
            if partition in part:
                left_out = {*part[partition].get(LEFT_OUT, ()), *reasons}
                part[partition] = {**part[partition], LEFT_OUT: sorted(left_out)}
        return part

    def _one(self, parts: Sequence[Meta]) -> Meta:
        if len(parts) == 1:
            return parts[0]
        joined = self._narrowing._planner.ranges.joined(parts[0], parts[-1], after=False)
        if joined is None:
            raise _SearchEnded
        return {**parts[0], **joined}

    def _slim(self, meta: Meta) -> Meta:
        """The entry with only those left-out records that are in its range."""
        offsets = self._narrowing._offsets(meta)
        whole = {name: value for name, value in meta.items() if name not in (LEFT_OUT, REFUSED)}
        return {**meta, LEFT_OUT: [each for each in meta.get(LEFT_OUT, ()) if each in offsets], PART_OF: whole}

    def _searched_part(self) -> Plan | None:
        """The plan of the searched records; None if there are none."""
        kept: dict[str, Meta] = {}
        for each, parts in self._done.items():
            part = without_refused(self._one(parts))
            bounds = {name: value for name, value in part.items() if name not in (LEFT_OUT, PART_OF)}
            kept[each] = self._refusing(each, leaving_out_too(bounds, without_refused(self._plan[each])))
        return self._narrowing._only(self._plan, kept) if kept else None

    def _refusing(self, partition: str, meta: Meta) -> Meta:
        """The entry without the refused records in its range."""
        offsets, bare = self._narrowing._offsets(meta), without_refused(meta)
        reasons = {each: reason for each, reason in self._reasons.get(partition, {}).items() if each in offsets}
        return _refusing(bare, reasons, self._policies[partition]) if reasons else bare


def _refuses(failure: TaskFailure, *, pins_errors: bool = False) -> bool:
    if pins_errors and failure.kind is FailureKind.ERROR:
        return bool(failure.where)  # the user's own code
    return failure.kind is FailureKind.BAD_RECORD and failure.error != BatchTooLargeError.__name__


def _reason(failure: TaskFailure) -> str:
    return reason_of(f"{failure.component_id}: {failure.message}")


def _refusing(meta: Meta, reasons: Mapping[int, str], policy: str | None) -> Meta:
    """An entry without these records. Later entries repeat the left-out offsets; only this entry
    has the reasons and the policy."""
    left_out = sorted({*meta.get(LEFT_OUT, ()), *reasons})
    entry = {**meta, LEFT_OUT: left_out, REFUSED: {str(offset): reason for offset, reason in reasons.items()}}
    return entry if policy is None else {**entry, ON_REFUSED: policy}
