"""Records whose values are refused are found by halving plans, and left out of them (C51)."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from framework import Fields
from framework.errors import BatchTooLargeError
from framework.execution import FailureKind, TaskFailure
from framework.topology.spouts import LEFT_OUT, LEFT_OUT_FROM, REFUSED
from framework.transactions import narrowing as module
from framework.transactions.coordinator import (
    AskPlan,
    Cancel,
    Commit,
    Committed,
    Persist,
    Planned,
    Process,
    Processed,
    Recovered,
    RollBack,
    RolledBack,
    SpoutKind,
    Stop,
    StopRequested,
    Tick,
)
from framework.transactions.narrowing import LEFT_OUT_MAX, Narrowing
from framework.transactions.plans import Plan
from spouts import OpaqueMemoryTransactionalSpout
from tests.transactions.test_coordinator import ERROR, FAILED, Script

pytestmark = pytest.mark.rule("C51")

REFUSES = TaskFailure(FailureKind.BAD_RECORD, "bolt", 0, "it is refused", nothing_after=True)
KINDS = (SpoutKind.OPAQUE, SpoutKind.TRANSACTIONAL)


def narrowing(policy: Any = "skip") -> Narrowing:
    rows = {each: [[number] for number in range(20)] for each in range(3)}
    spout = OpaqueMemoryTransactionalSpout(rows, Fields(n=int), 8, on_bad_record=policy)
    return Narrowing(spout.planner({}, None), "spout")  # type: ignore[arg-type]


def ranges(**of: tuple[int, int]) -> Plan:
    return {name[1:]: {"first": first, "next": end} for name, (first, end) in of.items()}


def held(plan: Plan | None) -> dict[str, range]:
    assert plan is not None
    return {each: range(meta["first"], meta["next"]) for each, meta in plan.items() if meta["first"] < meta["next"]}


def test_a_batch_is_halved_to_partitions_first_and_then_to_one_record() -> None:
    found: Any = ranges(p0=(0, 8), p1=(0, 8), p2=(4, 4))
    seen = []
    while True:
        found, is_half = narrowing().narrowed(found, REFUSES)
        if not is_half:
            break
        seen.append(held(found))
        assert found.keys() == {"0", "1", "2"}  # C15
    assert seen == [{"0": range(8)}, {"0": range(4)}, {"0": range(2)}, {"0": range(1)}]
    assert found["0"] == {"first": 0, "next": 1, LEFT_OUT: [0], REFUSED: {"0": "bolt: it is refused"}}


def test_the_rest_of_a_batch_follows_the_half_that_was_committed() -> None:
    suspects = ranges(p0=(0, 8), p1=(0, 8))
    committed = ranges(p0=(0, 8), p1=(0, 0))
    assert held(narrowing().rest(suspects, committed)) == {"1": range(4)}
    assert held(narrowing().rest(suspects, ranges(p0=(8, 8), p1=(0, 7)))) == {"1": range(7, 8)}
    assert narrowing().rest(suspects, ranges(p0=(8, 8), p1=(7, 8))) is None


def test_what_was_left_out_before_stays_so_and_is_no_suspect() -> None:
    known = {"0": {"first": 3, "next": 4, LEFT_OUT: [3]}}
    assert not narrowing().applies(known, REFUSES)
    after = narrowing().rest(ranges(p0=(0, 8)), {"0": {"first": 3, "next": 4, LEFT_OUT: [3], REFUSED: {"3": "no"}}})
    assert after == {"0": {"first": 4, "next": 6, LEFT_OUT: [3]}}


def test_under_fail_and_for_the_spouts_own_refusals_nothing_is_left_out() -> None:
    plan = ranges(p0=(0, 8))
    assert not narrowing("fail").applies(plan, REFUSES)
    assert not narrowing().applies(plan, TaskFailure(FailureKind.BAD_RECORD, "spout", 0, "too many"))
    assert narrowing().applies(plan, REFUSES)


@pytest.mark.rule("C18")
@pytest.mark.parametrize("component", ["bolt", "spout"])
@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_a_batch_that_is_too_large_is_halved_whatever_the_policy(component: str, policy: str) -> None:
    too_large = TaskFailure.of(BatchTooLargeError("many partitions"), component, 0)
    assert too_large.kind is FailureKind.BAD_RECORD
    made, plan = narrowing(policy), ranges(p0=(0, 8))
    assert made.applies(plan, too_large)
    half: Any = made.narrowed(plan, too_large)
    assert (held(half[0]), half[1]) == ({"0": range(4)}, True)
    one = ranges(p0=(3, 4))
    assert made.applies(one, too_large) == (policy == "skip" and component == "bolt")
    alone: Any = made.narrowed(one, too_large)
    if policy == "skip" and component == "bolt":
        assert alone[0]["0"][REFUSED] == {"3": "bolt: many partitions"}
    else:
        assert alone.message == "partition 0, offset 3: many partitions"


def test_plans_forget_the_oldest_left_out_records_of_each_partition_and_the_topology_goes_on() -> None:
    full = {
        "0": {"first": 15_000, "next": 15_001, LEFT_OUT: list(range(LEFT_OUT_MAX - 7))},
        "1": {"first": 7, "next": 7, LEFT_OUT: [1, 2, 5, 6, 7, 8, 9]},  # of an undo, in part
        "2": {"first": 4, "next": 4},
    }
    found: Any = narrowing().narrowed(full, REFUSES)
    (plan, is_half), half = found, (LEFT_OUT_MAX - 6) // 2
    assert not is_half and plan["2"] == full["2"]
    assert plan["1"] == {"first": 7, "next": 7, LEFT_OUT: [5, 6, 7, 8, 9], LEFT_OUT_FROM: 3}
    assert plan["0"][LEFT_OUT] == [*range(half, LEFT_OUT_MAX - 7), 15_000]
    assert (plan["0"][LEFT_OUT_FROM], plan["0"][REFUSED]) == (half, {"15000": "bolt: it is refused"})
    after = narrowing().rest({"0": {**full["0"], "next": 15_009}}, plan)
    assert after is not None and after["0"][LEFT_OUT_FROM] == half and after["0"][LEFT_OUT] == plan["0"][LEFT_OUT]


# --- the search by probes -------------------------------------------------------------------------


class Probes:
    """Probes of batches whose records ``bad`` a bolt refuses. ``after``: how many end well."""

    def __init__(self, bad: set[tuple[str, int]], after: int = 10_000) -> None:
        self.bad, self.after, self.parts = bad, after, list[Plan]()

    def __call__(self, part: Plan) -> TaskFailure | None:
        self.parts.append(part)
        if len(self.parts) > self.after:
            return FAILED
        for partition, meta in part.items():
            for offset in range(meta["first"], meta["next"]):
                if (partition, offset) in self.bad and offset not in meta.get(LEFT_OUT, ()):
                    return replace(REFUSES, component_id="other" if offset % 7 == 6 else "bolt")
        return None


@pytest.mark.parametrize("seed", range(30))
def test_a_search_finds_exactly_the_refused_records_with_few_probes(seed: int) -> None:
    chance = random.Random(seed)
    plan = ranges(p0=(3, 300), p1=(0, chance.randrange(200)), p2=(5, 5))
    records = [(each, offset) for each, meta in plan.items() for offset in range(meta["first"], meta["next"])]
    bad = set(chance.sample(records, chance.choice([1, 2, 5, 30])))
    probes = Probes(bad)
    found = narrowing().searched(plan, probes)
    assert found is not None and not found.is_part
    assert {(partition, offset) for partition, offset, _ in found.refused} == bad
    for each, meta in plan.items():
        its = sorted(offset for partition, offset in bad if partition == each)
        assert found.plan[each].get(LEFT_OUT, []) == its
        assert sorted(map(int, found.plan[each].get(REFUSED, {}))) == its
        assert {**meta, **found.plan[each]} == {**found.plan[each], **meta}
    assert len(probes.parts) <= len(bad) * (math.log2(len(records) / len(bad)) + 5) + 2 * math.log2(len(records))
    assert all("2" in part for part in probes.parts)  # an entry without records is in every part


class Sums:
    """Probes of sums of one key. ``values``: of some records; the others have 0. The store, whose
    sum is 0, refuses one above 50, but only in a batch whose own sum is at most ``fold``."""

    def __init__(self, values: dict[tuple[str, int], int], fold: int = 10_000) -> None:
        self.values, self.fold = values, fold

    def __call__(self, part: Plan) -> TaskFailure | None:
        records = [(each, n) for each, its in held(part).items() for n in its if n not in part[each].get(LEFT_OUT, ())]
        total = sum(self.values.get(each, 0) for each in records)
        return replace(REFUSES, is_of_try=total <= self.fold) if total > 50 else None


@pytest.mark.parametrize("seed", range(30))
def test_a_search_in_order_leaves_out_a_record_only_if_it_does_not_fit_after_those_before_it(seed: int) -> None:
    chance = random.Random(seed)
    plan = ranges(p0=(3, 100), p1=(0, 60))
    records = [(each, offset) for each, meta in plan.items() for offset in range(meta["first"], meta["next"])]
    # each later one makes up for an earlier one, or does not fit
    values = {each: chance.choice([-30, 30, 60, 90]) for each in sorted(chance.sample(records, 12))}
    found = narrowing().searched(plan, Sums(values), in_order=True)
    refused, total = {(each, offset) for each, offset, _ in found.refused} if found is not None else set(), 0
    for each in records:
        if each in refused:
            assert total + values[each] > 50
        else:
            total += values.get(each, 0)
    assert total <= 50


def test_a_search_in_order_ends_before_a_record_that_does_not_fit_into_the_batch() -> None:
    values = {("0", 3): 60, ("0", 9): 40, ("0", 12): 70, ("0", 13): 1}
    found = narrowing().searched(ranges(p0=(0, 20)), Sums(values, fold=100), in_order=True)
    assert found is not None and found.is_part and found.is_cut
    assert found.plan == {"0": {"first": 0, "next": 12, LEFT_OUT: [3], REFUSED: {"3": "bolt: it is refused"}}}


def test_what_a_search_has_not_reached_is_a_later_batch() -> None:
    plan, bad = ranges(p0=(0, 64), p1=(0, 64)), {("0", 3), ("0", 40), ("1", 5)}
    for after in range(60):
        made = narrowing()
        found = made.searched(plan, Probes(bad, after))
        if found is None:
            continue
        read = {(each, offset) for each, its in held(found.plan).items() for offset in its}
        assert {(each, offset) for each, offset, _ in found.refused} == read & bad
        assert found.is_part == (len(read) < 128)
        if found.is_part:
            rest = made.rest(plan, found.plan)
            assert rest is not None and not read & {
                (each, offset) for each, its in held(rest).items() for offset in its
            }
    assert found is not None and not found.is_part


def test_a_search_ends_when_its_plan_could_become_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFUSED_MAX", 3)
    found = narrowing().searched(ranges(p0=(0, 20)), Probes({("0", offset) for offset in range(2, 20, 3)}))
    assert found is not None and found.is_part
    assert found.plan == {
        "0": {"first": 0, "next": 11, LEFT_OUT: [2, 5, 8], REFUSED: dict.fromkeys("258", "bolt: it is refused")}
    }


def test_a_search_leaves_nothing_out_that_is_not_refused_by_itself() -> None:
    def both(part: Plan) -> TaskFailure | None:
        return REFUSES if part["0"]["first"] <= 3 and part["0"]["next"] > 9 else None

    assert narrowing().searched(ranges(p0=(0, 16)), both) is None


def test_a_second_search_keeps_what_the_first_has_found_and_a_half_searches_again() -> None:
    made, plan = narrowing(), ranges(p0=(0, 16))
    first = made.searched(plan, Probes({("0", 9)}))
    assert first is not None
    second = made.searched(first.plan, Probes({("0", 9), ("0", 3)}))
    assert second is not None and second.plan["0"][LEFT_OUT] == [3, 9]
    assert [offset for _, offset, _ in second.refused] == [3]
    assert made.narrowed(second.plan, REFUSES) == (ranges(p0=(0, 8)), True)
    assert made.rest(second.plan, ranges(p0=(0, 8))) == ranges(p0=(8, 12))  # 9 has no letter yet


def test_only_a_refusal_in_the_processing_of_several_records_is_searched_for() -> None:
    plan = ranges(p0=(0, 8))
    assert narrowing().may_search(plan, REFUSES)
    assert not narrowing().may_search(ranges(p0=(0, 1)), REFUSES)
    assert not narrowing().may_search(plan, ERROR)
    assert not narrowing("fail").may_search(plan, REFUSES)
    assert not narrowing().may_search(plan, TaskFailure.of(BatchTooLargeError("many"), "bolt", 0))
    assert not narrowing().may_search(ranges(p0=(0, module.SEARCHED_MAX + 1)), REFUSES)


# --- in the coordinator ---------------------------------------------------------------------------


def script(kind: SpoutKind, **options: Any) -> Script:
    return Script(kind, narrowing=narrowing(), can_undo=options.pop("can_undo", True), **options)


@pytest.mark.rule("C18")
@pytest.mark.parametrize("kind", KINDS)
def test_after_a_batch_that_was_too_large_the_source_plans_again(kind: SpoutKind) -> None:
    """It has learned from the half what fits. The rest of the batch is as large as before."""
    made = script(kind)
    planned(made, 16)
    made.do(Processed(1, 1, TaskFailure.of(BatchTooLargeError("900 bytes each"), "spout", 0)))
    asked = len(made.of(AskPlan))
    (half,) = [each for each in made.of(Process) if (each.txid, each.attempt_id) == (1, 2)]
    assert held(half.plan) == {"0": range(8)} and asked == len(made.of(AskPlan))
    made.do(Processed(1, 2))
    made.do(Committed(1, 2))
    assert len(made.of(AskPlan)) == asked + 1 and made.asked is not None
    assert made.asked.previous == half.plan


def planned(to: Script, end: int) -> list[Any]:
    assert to.asked is not None
    first = to.asked.previous["0"]["next"] if to.asked.previous else 0
    return to.do(Planned(to.asked.generation, to.asked.txid, ranges(p0=(first, end))))


@pytest.mark.parametrize("kind", KINDS)
def test_the_narrower_plan_is_written_before_its_attempt_begins_and_later_plans_go_with_that_write(
    kind: SpoutKind,
) -> None:
    running = script(kind, max_pending=2)
    planned(running, 4)
    planned(running, 8)
    commands = running.do(Processed(1, 1, REFUSES))
    assert [type(each) for each in commands] == [Cancel, Cancel, Persist, Process]
    (written,) = running.of(Persist, commands)
    assert written.plans == {1: (2, ranges(p0=(0, 2)))} and written.dropped == {2}
    assert running.of(AskPlan, commands) == []


@pytest.mark.parametrize("kind", KINDS)
def test_one_record_of_a_batch_is_left_out_and_the_source_goes_on_after_it(kind: SpoutKind) -> None:
    running = script(kind)
    planned(running, 8)
    committed: list[int] = []
    refused: list[int] = []
    for _ in range(40):
        if running.of(AskPlan) and running.log[-1] is running.asked:
            break
        now = [each for each in running.log if isinstance(each, Process)][-1]
        meta = now.plan["0"]
        offsets = [each for each in range(meta["first"], meta["next"]) if each not in meta.get(LEFT_OUT, ())]
        if 5 in offsets:
            running.do(Processed(now.txid, now.attempt_id, REFUSES))
            continue
        refused += map(int, meta.get(REFUSED, {}))
        running.do(Processed(now.txid, now.attempt_id))
        running.do(Committed(now.txid, now.attempt_id))
        committed += offsets
    assert (committed, refused) == ([0, 1, 2, 3, 4], [5])
    assert running.asked is not None
    assert running.asked.previous == {
        "0": {"first": 5, "next": 6, LEFT_OUT: [5], REFUSED: {"5": "bolt: it is refused"}}
    }


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_of_a_search_is_written_before_its_attempt_begins(kind: SpoutKind) -> None:
    running = script(kind)
    planned(running, 8)
    searched = narrowing().searched(ranges(p0=(0, 8)), Probes({("0", 2), ("0", 5)}))
    assert searched is not None
    commands = running.do(Processed(1, 1, REFUSES, searched=searched))
    assert [type(each) for each in commands] == [Cancel, Persist, Process]
    assert commands[1].plans == {1: (2, searched.plan)} and commands[2] == Process(1, 2, searched.plan)
    running.do(Processed(1, 2))
    assert running.of(AskPlan, running.do(Committed(1, 2)))[0].previous == searched.plan


@pytest.mark.parametrize("kind", KINDS)
def test_after_the_opening_all_states_are_rolled_back_under_the_old_plan_first(kind: SpoutKind) -> None:
    running = script(kind)
    planned(running, 4)
    running.do(Processed(1, 1))
    commands = running.do(Committed(1, 1, REFUSES))
    whole = ranges(p0=(0, 4))
    assert [type(each) for each in commands] == [Cancel, Persist, RollBack]
    assert commands[0].committing and commands[2] == RollBack(1, 2, whole)
    assert commands[1].plans == {1: (2, whole)}
    again = running.do(RolledBack(1, 2, FAILED))
    assert running.of(RollBack, again) == [RollBack(1, 3, whole)]
    after = running.do(RolledBack(1, 3))
    assert [type(each) for each in after] == [Persist, Process]
    assert after[1] == Process(1, 4, ranges(p0=(0, 2)))
    assert running.of(Commit, running.do(Processed(1, 4))) == [Commit(1, 4, ranges(p0=(0, 2)), False)]


@pytest.mark.parametrize("kind", KINDS)
def test_after_the_roll_back_the_writes_of_the_same_plan_are_tried_once(kind: SpoutKind) -> None:
    tries = frozenset({"bolt", "table"})
    running = script(kind, tries_writes=tries, tries_in_order=frozenset({"sums"}))
    planned(running, 8)
    running.do(Processed(1, 1))
    whole = ranges(p0=(0, 8))
    assert running.of(RollBack, running.do(Committed(1, 1, REFUSES))) == [RollBack(1, 2, whole)]
    (trying,) = running.of(Process, running.do(RolledBack(1, 2)))
    assert trying == Process(1, 3, whole, tries_writes=tries)
    searched = narrowing().searched(whole, Probes({("0", 2), ("0", 5)}))
    assert searched is not None
    (again,) = running.of(Process, running.do(Processed(1, 3, REFUSES, searched=searched)))
    assert again == Process(1, 4, searched.plan, tries_writes=tries)
    running.do(Processed(1, 4))
    running.do(Committed(1, 4, replace(REFUSES, component_id="sums")))
    (others,) = running.of(Process, running.do(RolledBack(1, 5)))
    assert others == Process(1, 6, searched.plan, tries_writes=tries | {"sums"}, tries_in_order=True)
    running.do(Processed(1, 6))
    assert running.of(RollBack, running.do(Committed(1, 6, REFUSES))) == [RollBack(1, 7, searched.plan)]
    (half,) = running.of(Process, running.do(RolledBack(1, 7)))
    assert half.plan["0"]["next"] < 8, "the tries have not found it: the batch is halved"


@pytest.mark.parametrize("kind", KINDS)
def test_writes_are_tried_in_order_where_those_of_each_row_alone_tell_nothing(kind: SpoutKind) -> None:
    both = frozenset({"bolt"})
    running = script(kind, tries_writes=both, tries_in_order=both)
    planned(running, 8)
    whole = ranges(p0=(0, 8))
    for attempt, in_order in ((1, False), (4, True)):
        running.do(Processed(1, attempt))
        assert running.of(RollBack, running.do(Committed(1, attempt, REFUSES))) == [RollBack(1, attempt + 1, whole)]
        (again,) = running.of(Process, running.do(RolledBack(1, attempt + 1)))
        assert again == Process(1, attempt + 2, whole, tries_writes=both, tries_in_order=in_order)
        running.do(Processed(1, attempt + 2))
        running.do(Committed(1, attempt + 2, FAILED))
    running.do(Committed(1, 7, REFUSES))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sum_that_no_single_record_makes_too_large_is_tried_when_the_earlier_batches_are_committed(
    kind: SpoutKind,
) -> None:
    sums = frozenset({"bolt"})
    running = script(kind, tries_in_order=sums, max_pending=2)
    planned(running, 8)
    planned(running, 16)
    (half,) = running.of(Process, running.do(Processed(2, 1, REFUSES)))
    assert half.plan == ranges(p0=(8, 12)) and not half.tries_writes
    (tries,) = running.of(Process, running.do(Processed(1, 1, REFUSES)))
    assert tries == Process(1, 2, ranges(p0=(0, 8)), tries_writes=sums, tries_in_order=True)
    (half,) = running.of(Process, running.do(Processed(1, 2, REFUSES)))
    assert half.plan == ranges(p0=(0, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_cut_the_source_plans_from_the_record_that_did_not_fit(kind: SpoutKind) -> None:
    running = script(kind)
    planned(running, 8)
    searched = narrowing().searched(ranges(p0=(0, 8)), Sums({("0", 3): 40, ("0", 5): 90}, fold=100), in_order=True)
    assert searched is not None and searched.is_cut
    (part,) = running.of(Process, running.do(Processed(1, 1, REFUSES, searched=searched)))
    assert part.plan == ranges(p0=(0, 5))
    running.do(Processed(1, 2))
    (asked,) = running.of(AskPlan, running.do(Committed(1, 2)))
    assert asked.previous == ranges(p0=(0, 5))


def test_one_record_needs_no_tries() -> None:
    running = script(SpoutKind.OPAQUE, tries_writes=frozenset({"bolt"}))
    planned(running, 1)
    running.do(Processed(1, 1))
    running.do(Committed(1, 1, REFUSES))
    (after,) = running.of(Process, running.do(RolledBack(1, 2)))
    assert after.plan["0"][REFUSED] == {"0": "bolt: it is refused"} and not after.tries_writes


def test_a_sink_that_cannot_undo_ends_the_run_once_the_commit_is_open() -> None:
    running = script(SpoutKind.OPAQUE, can_undo=False)
    planned(running, 4)
    running.do(Processed(1, 1))
    (stop,) = running.of(Stop, running.do(Committed(1, 1, REFUSES)))
    assert stop.failure.message.startswith("it is refused; the commit of txid 1 was opened with this record")


LOST = TaskFailure(FailureKind.RETRYABLE, "bolt", 0, "the answer is lost", nothing_after=True)
DIED = TaskFailure(FailureKind.RETRYABLE, "executor", 0, "a worker died")


@pytest.mark.parametrize(
    ("first", "before", "continues"),
    [
        ("bolt", (), True),
        ("bolt", (LOST,), True),  # nobody has written for good then
        ("bolt", (DIED,), False),
        ("bolt", (DIED, LOST), False),
        ("other", (), False),
        ("whole", (), True),
        ("whole", (LOST,), False),  # a sql_txn may be committed though its answer is lost
    ],
)
def test_a_record_is_left_out_as_long_as_nothing_is_written_for_good(
    first: str, before: tuple[TaskFailure, ...], continues: bool
) -> None:
    names = frozenset({"bolt"})
    running = script(
        SpoutKind.OPAQUE,
        can_undo=False,
        commits_first=names if first == "bolt" else (),
        refuses_whole=names if first == "whole" else (),
    )
    planned(running, 4)
    for attempt, failure in enumerate(before, 1):
        running.do(Processed(1, attempt))
        running.do(Committed(1, attempt, failure))
        running.do(Tick(), after_ms=10_000)
    attempt = len(before) + 1
    running.do(Processed(1, attempt))
    commands = running.do(Committed(1, attempt, REFUSES))
    assert bool(running.of(RollBack, commands)) is continues
    assert bool(running.of(Stop, commands)) is not continues


def test_a_new_leader_leaves_no_record_out_of_a_commit_that_another_one_opened() -> None:
    """It may have written for good."""
    recovered = Recovered(attempts={1: 1}, plans={1: ranges(p0=(0, 4))}, opened=True)
    running = script(SpoutKind.OPAQUE, can_undo=False, commits_first={"bolt"}, recovered=recovered)
    running.do(Processed(1, 2))
    (stop,) = running.of(Stop, running.do(Committed(1, 2, REFUSES)))
    assert "may have written to a sink that cannot undo" in stop.failure.message


def test_any_other_failure_ends_the_search_and_the_source_plans_again() -> None:
    running = script(SpoutKind.OPAQUE)
    planned(running, 8)
    running.do(Processed(1, 1, REFUSES))
    commands = running.do(Processed(1, 2, FAILED))
    assert running.of(AskPlan, commands) == [AskPlan(running.coordinator._generation, 1, None)]


def test_without_narrowing_a_refused_value_ends_the_run() -> None:
    running = Script(SpoutKind.OPAQUE)
    running.planned(8)
    assert running.of(Stop, running.do(Processed(1, 1, REFUSES))) == [Stop(REFUSES)]


@pytest.mark.parametrize("where", ["", "pipeline.py:3: 1 / 0"])
def test_an_error_of_the_users_code_is_pinned_to_a_record_after_its_attempts_if_asked(where: str) -> None:
    error = TaskFailure(ERROR.kind, "bolt", 0, "boom", where=where)
    running = script(SpoutKind.TRANSACTIONAL, pins_errors=True, max_attempts=2)
    planned(running, 8)
    running.do(Processed(1, 1, error))
    commands = running.do(Processed(1, 2, error), after_ms=10_000)
    if where:
        assert [each.plan for each in running.of(Process, commands)] == [ranges(p0=(0, 4))]
    else:
        assert running.of(Stop, commands) == [Stop(error)]


def test_a_run_that_stops_rolls_a_refused_batch_back_if_the_next_leader_could_not() -> None:
    running = script(SpoutKind.TRANSACTIONAL, can_undo=False, commits_first={"bolt"}, max_pending=2)
    planned(running, 4)
    planned(running, 8)
    running.do(Processed(1, 1))
    running.do(StopRequested())
    commands = running.do(Committed(1, 1, REFUSES))
    assert running.of(RollBack, commands) == [RollBack(1, 2, ranges(p0=(0, 4)))] and not running.of(Process, commands)
    assert isinstance(running.do(RolledBack(1, 2))[-1], Stop)


def test_a_roll_back_that_fails_does_not_keep_a_run_that_stops() -> None:
    running = script(SpoutKind.OPAQUE, can_undo=False, commits_first={"bolt"})
    planned(running, 4)
    running.do(Processed(1, 1))
    running.do(StopRequested())
    running.do(Committed(1, 1, REFUSES))
    assert isinstance(running.do(RolledBack(1, 2, DIED))[-1], Stop)
