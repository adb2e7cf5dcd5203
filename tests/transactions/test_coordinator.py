"""The coordinator, event by event. Test names quote the invariants of its module."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from framework.errors import InvariantViolation
from framework.execution import FailureKind, TaskFailure
from framework.topology.fencing import ROLLED_BACK, OpenCommit
from framework.transactions.coordinator import (
    CLOSE_AFTER_MS,
    READ,
    AskPlan,
    Cancel,
    Command,
    Commit,
    Committed,
    Coordinator,
    OpenedRows,
    Persist,
    Planned,
    Process,
    Processed,
    Recovered,
    Release,
    RollBack,
    RolledBack,
    SpoutKind,
    Started,
    Stop,
    StopRequested,
    Tick,
)
from framework.transactions.plans import Plan, plan_digest

FAILED = TaskFailure(FailureKind.FAILED, "bolt", 0, "as asked")
ERROR = TaskFailure(FailureKind.ERROR, "bolt", 0, "boom")


def plan(first: int, end: int) -> Plan:
    return {"p": {"first": first, "next": end}}


class Script:
    """Drives a coordinator by hand, and remembers its commands."""

    def __init__(self, kind: SpoutKind = SpoutKind.TRANSACTIONAL, recovered: Recovered | None = None, **options: Any):
        self.now = 0
        self.coordinator = Coordinator(kind, recovered or Recovered(), **options)
        self.asked: AskPlan | None = None
        self.log: list[Command] = []
        self.do(Started())

    def do(self, event: Any, after_ms: int = 0) -> list[Command]:
        self.now += after_ms
        commands = self.coordinator.handle(event, self.now)
        for command in commands:
            if isinstance(command, AskPlan):
                self.asked = command
        self.log += commands
        return commands

    def planned(self, end: int) -> list[Command]:
        assert self.asked is not None
        first = self.asked.previous["p"]["next"] if self.asked.previous else 0
        return self.do(Planned(self.asked.generation, self.asked.txid, plan(first, end)))

    def of(self, kind: type, commands: list[Command] | None = None) -> list[Any]:
        return [each for each in (self.log if commands is None else commands) if isinstance(each, kind)]


def test_first_transaction_is_1_and_each_follows_by_1() -> None:
    script = Script()
    for txid in (1, 2, 3):
        script.planned(txid * 10)
        script.do(Processed(txid, 1))
        script.do(Committed(txid, 1))
    assert [each.txid for each in script.of(Process)] == [1, 2, 3]
    assert script.coordinator.currtx == 4


def test_invariant_3_attempt_is_persisted_before_the_batch_is_emitted() -> None:
    script = Script()
    commands = script.planned(10)
    assert [type(each) for each in commands[:2]] == [Persist, Process]
    assert commands[0] == Persist({1: 1}, {1: (1, plan(0, 10))})


def test_max_pending_bounds_what_is_in_flight() -> None:
    script = Script(max_pending=2)
    script.planned(10)
    script.planned(20)
    assert script.of(AskPlan)[-1].txid == 2
    script.do(Processed(1, 1))
    assert script.of(AskPlan)[-1].txid == 2
    script.do(Committed(1, 1))
    assert script.of(AskPlan)[-1].txid == 3


@pytest.mark.behaviour("1.2")
def test_invariant_1_commits_wait_for_their_turn() -> None:
    script = Script(max_pending=3)
    for end in (10, 20, 30):
        script.planned(end)
    assert script.of(Commit, script.do(Processed(3, 1))) == []
    assert script.of(Commit, script.do(Processed(2, 1))) == []
    assert [each.txid for each in script.of(Commit, script.do(Processed(1, 1)))] == [1]
    assert [each.txid for each in script.of(Commit, script.do(Committed(1, 1)))] == [2]
    assert [each.txid for each in script.of(Commit, script.do(Committed(2, 1)))] == [3]


def committed_once(**options: Any) -> Script:
    """A coordinator whose first transaction has just committed, and is not closed yet."""
    script = Script(**options)
    script.planned(10)
    script.do(Processed(1, 1))
    assert not {Persist, Release} & {type(each) for each in script.do(Committed(1, 1))}
    return script


def test_invariant_9_the_write_that_emits_the_next_batch_closes_the_last_one() -> None:
    script = committed_once()
    assert script.coordinator.closed_plan is None
    commands = script.planned(20)
    written = Persist({1: 1, 2: 1}, {2: (1, plan(10, 20))}, currtx=2)  # who committed it stays known
    assert commands == [written, Release(1, 1), Process(2, 1, plan(10, 20))]
    assert script.coordinator.closed_plan == plan(0, 10)


def test_invariant_9_without_a_plan_a_commit_is_closed_by_a_write_of_its_own() -> None:
    script = committed_once()
    assert script.coordinator.next_tick_ms == CLOSE_AFTER_MS
    assert script.do(Tick(), CLOSE_AFTER_MS - 1) == []
    assert script.do(Tick(), 1) == [Persist({1: 1}, currtx=2), Release(1, 1)]
    assert script.coordinator.next_tick_ms is None
    assert script.planned(20)[0] == Persist({1: 1, 2: 1}, {2: (1, plan(10, 20))})


def test_invariant_9_a_commit_is_closed_before_the_next_one_opens() -> None:
    script = Script(max_pending=2)
    script.planned(10)
    script.planned(20)
    script.do(Processed(2, 1))
    script.do(Processed(1, 1))
    commands = script.do(Committed(1, 1))
    kinds = [type(each) for each in commands]
    assert commands[0] == Persist({1: 1, 2: 1}, currtx=2)
    assert kinds[:3] == [Persist, Release, Commit]


def test_invariant_9_a_run_that_stops_closes_what_is_committed() -> None:
    script = committed_once()
    assert script.do(StopRequested()) == [Persist({1: 1}, currtx=2), Release(1, 1), Stop(None)]


@pytest.mark.parametrize("which", ["committed", "next"])
def test_invariant_9_a_long_plan_has_a_write_of_its_own(which: str) -> None:
    """Two of them, and the record of one, could be more than one request of ZooKeeper takes."""
    long = {"p": {"first": 0, "next": 10}, **{f"{each}": {"first": 0, "next": 0} for each in range(5_000)}}
    script = Script()
    assert script.asked is not None
    script.do(Planned(script.asked.generation, 1, long if which == "committed" else plan(0, 10)))
    script.do(Processed(1, 1))
    commands = script.do(Committed(1, 1))
    commands += script.do(Planned(script.asked.generation, 2, plan(10, 20) if which == "committed" else long))
    writes = script.of(Persist, commands)
    assert [(each.currtx, [*each.plans]) for each in writes] == [(2, []), (None, [2])]


@pytest.mark.behaviour("1.4")
def test_invariant_2_a_failure_fails_every_later_transaction_too() -> None:
    script = Script(max_pending=3)
    for end in (10, 20, 30):
        script.planned(end)
    commands = script.do(Processed(2, 1, FAILED))
    assert [(each.txid, each.attempt_id) for each in script.of(Cancel, commands)] == [(2, 1), (3, 1)]
    assert [(each.txid, each.attempt_id) for each in script.of(Process, commands)] == [(2, 2), (3, 2)]
    script.do(Processed(1, 1))
    assert [each.txid for each in script.of(Commit)] == [1]


def test_invariant_4_an_idempotent_replay_has_the_same_plan() -> None:
    script = Script()
    script.planned(10)
    commands = script.do(Processed(1, 1, FAILED))
    assert script.of(Process, commands) == [Process(1, 2, plan(0, 10))]
    assert script.of(AskPlan, commands) == []


@pytest.mark.behaviour("1.4")
@pytest.mark.rule("C9")
def test_a_failed_opaque_batch_that_comes_back_shorter_skips_no_tuple() -> None:
    """A emits 1-50, B 51-100. A fails and comes back shorter; then B starts where A now ends."""
    script = Script(SpoutKind.OPAQUE, max_pending=2)
    script.planned(50)
    script.planned(100)
    script.do(Processed(1, 1, FAILED))
    script.planned(40)
    script.planned(90)
    assert [each.plan for each in script.of(Process)[-2:]] == [plan(0, 40), plan(40, 90)]
    for txid in (1, 2):
        script.do(Processed(txid, 2))
    script.do(Committed(1, 2))
    script.do(Committed(2, 2))
    assert script.of(AskPlan)[-1].previous == plan(40, 90)


@pytest.mark.rule("C7")
def test_invariant_4_an_opaque_plan_is_binding_once_its_commit_has_opened() -> None:
    script = Script(SpoutKind.OPAQUE)
    script.planned(50)
    assert script.of(Commit, script.do(Processed(1, 1)))[0].replay is False
    commands = script.do(Committed(1, 1, FAILED))
    assert script.of(Process, commands) == [Process(1, 2, plan(0, 50))]
    assert script.of(Commit, script.do(Processed(1, 2)))[0].replay is True


@pytest.mark.behaviour("1.4")
def test_invariant_7_late_answers_change_nothing() -> None:
    script = Script(max_pending=2)
    script.planned(10)
    script.planned(20)
    script.do(Processed(1, 1, FAILED))
    for late in (
        Processed(1, 1),
        Processed(2, 1),
        Processed(1, 1, FAILED),
        Committed(1, 1),
        Planned(0, 1, plan(0, 99)),
    ):
        assert script.do(late) == []
    assert script.coordinator.in_flight()[1][0] == 2


def test_invariant_5_a_planning_under_way_when_a_batch_fails_is_not_used() -> None:
    """It follows a plan that is gone.

    Its answer comes while the same txid is being planned after another plan.
    """
    script = Script(SpoutKind.OPAQUE, max_pending=3)
    script.planned(10)
    script.planned(20)
    late = script.asked
    assert late is not None and (late.txid, late.previous) == (3, plan(10, 20))
    script.do(Processed(2, 1, FAILED))
    assert script.asked is not None and (script.asked.txid, script.asked.previous) == (2, plan(0, 10))
    assert script.do(Planned(late.generation, 3, plan(20, 30))) == []
    script.planned(15)
    assert script.asked is not None and (script.asked.txid, script.asked.previous) == (3, plan(10, 15))
    assert script.do(Planned(late.generation, 3, plan(20, 30))) == []
    script.planned(25)
    assert {each.txid: each.plan for each in script.of(Process)} == {1: plan(0, 10), 2: plan(10, 15), 3: plan(15, 25)}


def test_a_planning_under_way_of_an_idempotent_spout_is_used_after_a_failure() -> None:
    """The plans before it do not change."""
    script = Script(SpoutKind.TRANSACTIONAL, max_pending=2)
    script.planned(10)
    script.do(Processed(1, 1, FAILED))
    script.planned(20)
    assert [(each.txid, each.plan) for each in script.of(Process)][-1] == (2, plan(10, 20))


def test_repeated_failures_wait_longer_each_time() -> None:
    script = Script()
    script.planned(10)
    assert script.of(Process, script.do(Processed(1, 1, FAILED))) != []
    assert script.of(Process, script.do(Processed(1, 2, FAILED))) == []
    assert script.of(Process, script.do(Tick(), after_ms=50)) == []
    assert script.of(Process, script.do(Tick(), after_ms=60)) == [Process(1, 3, plan(0, 10))]


def test_failed_exceptions_are_replayed_without_limit() -> None:
    script = Script(max_attempts=2)
    script.planned(10)
    for attempt in range(1, 50):
        script.do(Processed(1, attempt, FAILED))
        script.do(Tick(), after_ms=10_000)
    assert not script.coordinator.stopped


def test_other_errors_stop_the_topology_at_max_attempts() -> None:
    script = Script(max_attempts=3)
    script.planned(10)
    for attempt in (1, 2, 3):
        assert not script.coordinator.stopped
        commands = script.do(Processed(1, attempt, ERROR))
        script.do(Tick(), after_ms=10_000)
    assert script.of(Stop, commands) == [Stop(ERROR)]


def test_fatal_failures_stop_at_once() -> None:
    script = Script()
    script.planned(10)
    fatal = TaskFailure(FailureKind.FATAL, "bolt", 0, "lost")
    assert script.of(Stop, script.do(Processed(1, 1, fatal))) == [Stop(fatal)]


@pytest.mark.parametrize("phase", ["processing", "commit"])
@pytest.mark.behaviour("1.12")
def test_a_phase_that_lasts_too_long_fails_its_attempt(phase: str) -> None:
    script = Script(timeout_ms=1_000)
    script.planned(10)
    if phase == "commit":
        script.do(Processed(1, 1))
    assert script.do(Tick(), after_ms=1_000) == []
    commands = script.do(Tick(), after_ms=1)
    assert f"{phase} phase of 1:1" in script.of(Cancel, commands)[0].reason
    assert script.of(Process, commands) == [Process(1, 2, plan(0, 10))]


@pytest.mark.rule("C18")
def test_timeouts_count_as_attempts_and_an_opaque_batch_is_asked_for_in_quarters() -> None:
    script = Script(SpoutKind.OPAQUE, timeout_ms=1_000, max_attempts=3)
    script.planned(64)
    for divisor in (4, 16):
        commands = script.do(Tick(), after_ms=10_000) + script.do(Tick(), after_ms=10_000)
        asked = script.of(AskPlan, commands)
        assert [each.divisor for each in asked] == [divisor]
        script.planned(64 // divisor)
    (stop,) = script.of(Stop, script.do(Tick(), after_ms=10_000))
    assert "took longer than topology.message.timeout.secs" in stop.failure.message


@pytest.mark.parametrize("kind", [SpoutKind.TRANSACTIONAL, SpoutKind.OPAQUE])
@pytest.mark.rule("C18")
def test_an_attempt_that_repeats_a_plan_gets_twice_the_time(kind: SpoutKind) -> None:
    """An opaque batch repeats its plan once its commit was opened."""
    script = Script(kind, timeout_ms=1_000, max_attempts=7)
    script.planned(10)
    for attempt, times in enumerate((1, 2, 4, 8, 16, 16), 1):
        if kind is SpoutKind.OPAQUE:
            script.do(Processed(1, attempt))
        assert script.of(Cancel, script.do(Tick(), after_ms=1_000 * times)) == []
        commands = script.do(Tick(), after_ms=1)
        shown = f"{times} times " if times > 1 else ""
        assert f"took longer than {shown}topology.message.timeout.secs (1 s)" in script.of(Cancel, commands)[0].reason
        again = script.of(Process, commands) or script.of(Process, script.do(Tick(), after_ms=60_000))
        assert again == [Process(1, attempt + 1, plan(0, 10))]


def test_stop_finishes_the_commit_under_way_and_abandons_the_rest() -> None:
    script = Script(max_pending=2)
    script.planned(10)
    script.planned(20)
    script.do(Processed(1, 1))
    assert script.of(Stop, script.do(StopRequested())) == []
    commands = script.do(Committed(1, 1))
    assert [type(each) for each in commands] == [Persist, Release, Cancel, Stop]
    assert script.coordinator.stopped


def test_invariant_3_attempts_rise_across_restarts() -> None:
    recovered = Recovered(currtx=5, attempts={5: 3, 6: 1}, plans={4: plan(30, 40), 5: plan(40, 50), 6: plan(50, 60)})
    script = Script(SpoutKind.TRANSACTIONAL, recovered, max_pending=2)
    assert script.of(Process) == [Process(5, 4, plan(40, 50)), Process(6, 2, plan(50, 60))]


def test_recovery_of_an_opaque_batch_that_was_not_opened_plans_afresh() -> None:
    recovered = Recovered(currtx=5, attempts={5: 3}, plans={4: plan(30, 40), 5: plan(40, 50)})
    script = Script(SpoutKind.OPAQUE, recovered)
    assert script.of(AskPlan) == [AskPlan(0, 5, plan(30, 40))]
    script.planned(45)
    assert script.of(Process) == [Process(5, 4, plan(40, 45))]


def test_recovery_of_an_opaque_batch_that_was_opened_replays_its_plan_and_sweeps() -> None:
    recovered = Recovered(5, {5: 3}, {4: plan(30, 40), 5: plan(40, 50)}, opened=True)
    script = Script(SpoutKind.OPAQUE, recovered)
    assert script.of(Process) == [Process(5, 4, plan(40, 50))]
    assert script.of(Commit, script.do(Processed(5, 4))) == [Commit(5, 4, plan(40, 50), replay=True)]


def test_invariant_1_is_checked_not_assumed() -> None:
    script = Script()
    script.planned(10)
    script.do(Processed(1, 1))
    script.coordinator.currtx = 2
    with pytest.raises(InvariantViolation, match="invariant 1"):
        script.do(Committed(1, 1))


@pytest.mark.parametrize("kind", list(SpoutKind))
@pytest.mark.parametrize("seed", range(40))
def test_random_failures_commit_every_row_once_and_in_order(kind: SpoutKind, seed: int) -> None:
    """Random answers, failures, timeouts and restarts,
    with a store that keeps what was persisted.
    """
    chance = random.Random(seed)
    rows, durable = 200, {"currtx": 1, "attempts": {}, "plans": {}}
    committed: list[tuple[int, int]] = []
    used_attempts: set[tuple[int, int]] = set()
    opened: dict[int, Plan] = {}
    while not committed or committed[-1][1] < rows:
        recovered = Recovered(
            durable["currtx"], dict(durable["attempts"]), dict(durable["plans"]), durable["currtx"] in opened
        )
        coordinator = Coordinator(
            kind, recovered, max_pending=chance.randint(1, 4), timeout_ms=1_000, max_attempts=10**6
        )
        running: list[Any] = []
        now, pending = 0, [Started()]
        for _ in range(chance.randint(5, 120)):
            event = pending.pop(chance.randrange(len(pending))) if pending else Tick()
            now += chance.choice([0, 10, 300])
            for command in coordinator.handle(event, now):
                if isinstance(command, Persist):
                    durable["attempts"] = dict(command.attempts)
                    durable["plans"].update({txid: each[1] for txid, each in command.plans.items()})
                    if command.currtx is not None:
                        durable["currtx"] = command.currtx
                        done = durable["plans"][command.currtx - 1]["p"]
                        committed.append((done["first"], done["next"]))
                        durable["plans"] = {t: p for t, p in durable["plans"].items() if t >= command.currtx - 1}
                elif isinstance(command, AskPlan):
                    first = command.previous["p"]["next"] if command.previous else 0
                    end = min(first + chance.randint(1, 15), rows)
                    if end > first:
                        pending.append(Planned(command.generation, command.txid, plan(first, end)))
                elif isinstance(command, Process):
                    assert (command.txid, command.attempt_id) not in used_attempts
                    used_attempts.add((command.txid, command.attempt_id))
                    running.append((Processed, command))
                elif isinstance(command, Commit):
                    assert opened.setdefault(command.txid, command.plan) == command.plan
                    running.append((Committed, command))
            if running and chance.random() < 0.8:
                answer, command = running.pop(chance.randrange(len(running)))
                failure = FAILED if chance.random() < 0.15 else None
                pending.append(answer(command.txid, command.attempt_id, failure))
    assert committed[0][0] == 0
    assert all(before[1] == after[0] for before, after in itertools.pairwise(committed))


def test_invariant_4_a_commit_is_recorded_before_it_begins_where_a_committer_has_no_header() -> None:
    for records_open, expected in ((True, [Persist, Commit]), (False, [Commit])):
        script = Script(SpoutKind.OPAQUE, records_open=records_open)
        script.planned(10)
        commands = script.do(Processed(1, 1))
        assert [type(each) for each in commands if isinstance(each, (Persist, Commit))] == expected
        if records_open:
            assert commands[0].opens == OpenCommit(1, 1, plan_digest(plan(0, 10)))


def test_invariant_8_dropped_plans_are_removed_with_the_next_write() -> None:
    script = Script(SpoutKind.OPAQUE, max_pending=3)
    for end in (10, 20, 30):
        script.planned(end)
    script.do(Processed(1, 1, FAILED))
    script.planned(15)
    assert script.of(Persist)[-1] == Persist({1: 2, 2: 1, 3: 1}, {1: (2, plan(0, 15))}, dropped=frozenset({2, 3}))
    script.planned(20)
    assert script.of(Persist)[-1].dropped == frozenset()


def test_invariant_8_plans_that_a_new_leader_does_not_replay_are_removed_with_its_first_write() -> None:
    found = {1: plan(0, 10), 2: plan(10, 20), 3: plan(20, 30)}
    for opened, dropped in ((False, {2, 3}), (True, {2, 3})):
        script = Script(SpoutKind.OPAQUE, Recovered(1, {1: 1, 2: 1, 3: 1}, found, opened))
        if not opened:
            script.planned(15)
        assert script.of(Persist)[0].dropped == dropped


def test_invariant_4_a_roll_back_replaces_the_record_of_the_opened_commit() -> None:
    script = Script(SpoutKind.OPAQUE, can_undo=True, records_open=True)
    script.planned(10)
    script.do(Processed(1, 1))
    script.do(Committed(1, 1, TaskFailure(FailureKind.DATA_LOSS, "spout", 0, "gone")))
    commands = script.do(RolledBack(1, 2))
    assert commands[0] == Persist({1: 2}, opens=OpenCommit(1, 2, ROLLED_BACK), dropped=frozenset({1}))


@pytest.mark.rule("C8")
@pytest.mark.parametrize(
    ("component_id", "nothing_after", "goes_on"),
    [("first", True, True), ("first", False, False), ("last", True, False)],
)
def test_a_batch_is_planned_again_if_its_commit_failed_before_anything_was_written_for_good(
    component_id: str, nothing_after: bool, goes_on: bool
) -> None:
    script = Script(SpoutKind.OPAQUE, commits_first={"first"})
    script.planned(10)
    script.do(Processed(1, 1))
    failure = TaskFailure(FailureKind.RETRYABLE, component_id, 0, "does not answer", nothing_after=nothing_after)
    script.do(Committed(1, 1, failure))
    script.do(Processed(1, 2, TaskFailure(FailureKind.DATA_LOSS, "spout", 0, "gone")))
    script.do(Tick(), after_ms=1_000)
    assert bool(script.of(RollBack)) is goes_on
    assert bool(script.of(Stop)) is not goes_on
    if goes_on:
        script.do(RolledBack(1, 3))
        assert script.asked is not None and (script.asked.txid, script.asked.previous) == (1, None)


def opened(rows: dict[str, int], fails_in: str = "bolt") -> Script:
    """A coordinator whose first commit was opened with these rows, and then failed."""
    script = Script(SpoutKind.OPAQUE, records_open=True, commits_first={"first"})
    script.planned(10)
    commands = script.do(Processed(1, 1, rows=rows))
    assert commands[0].opened_rows == OpenedRows(1, plan_digest(plan(0, 10)), rows)
    script.do(Committed(1, 1, replace(FAILED, component_id=fails_in, nothing_after=True)))
    return script


def test_an_opened_commit_is_repeated_with_the_same_rows_only() -> None:
    assert opened({"letters": 2}).of(Commit, opened({"letters": 2}).do(Processed(1, 2, rows={"letters": 2}))) != []
    script = opened({"letters": 2, "sink": 8})
    commands = script.do(Processed(1, 2, rows={"letters": 2, "sink": 9}))
    assert script.of(Commit, commands) == []
    (stop,) = script.of(Stop, commands)
    assert stop.failure.kind is FailureKind.FATAL
    assert "txid 1 was opened with 8 rows for 'sink', and a repetition has 9" in stop.failure.message


def test_other_rows_do_not_matter_before_anything_was_written_for_good() -> None:
    commands = opened({"letters": 2}, fails_in="first").do(Processed(1, 2, rows={"letters": 3}))
    (persist,) = [each for each in commands if isinstance(each, Persist)]
    assert persist.opened_rows == OpenedRows(1, plan_digest(plan(0, 10)), {"letters": 3})
    assert any(isinstance(each, Commit) for each in commands)


def test_fewer_records_of_the_source_are_no_change_of_the_code() -> None:
    """A compacted topic loses records that nobody has to read again."""
    for read, kind in ((10, Stop), (9, Commit)):
        commands = opened({READ: 10, "letters": 2}).do(Processed(1, 2, rows={READ: read, "letters": 1}))
        assert [type(each) for each in commands if isinstance(each, (Commit, Stop))] == [kind]


def test_rows_are_written_down_also_where_every_committer_has_a_header() -> None:
    script = Script(SpoutKind.OPAQUE)
    script.planned(10)
    persist, commit = script.do(Processed(1, 1, rows={"table": 2}))[:2]
    assert (persist.opens, persist.opened_rows.rows, type(commit)) == (None, {"table": 2}, Commit)


def test_a_new_leader_compares_the_rows_of_the_opened_commit() -> None:
    for rows, kind in ((2, Commit), (3, Stop)):
        recovered = Recovered(1, {1: 1}, {1: plan(0, 10)}, opened=True, opened_rows={"letters": 2, "removed": 1})
        script = Script(SpoutKind.OPAQUE, recovered, records_open=True)
        commands = script.do(Processed(1, 2, rows={"letters": rows, "added": 1}))
        assert [type(each) for each in commands if isinstance(each, (Commit, Stop))] == [kind]


def test_a_plan_that_replaces_one_that_was_rolled_back_may_have_other_rows() -> None:
    script = Script(SpoutKind.OPAQUE, can_undo=True, records_open=True)
    script.planned(10)
    script.do(Processed(1, 1, rows={"letters": 2}))
    script.do(Committed(1, 1, TaskFailure(FailureKind.DATA_LOSS, "spout", 0, "gone")))
    script.do(RolledBack(1, 2))
    script.planned(7)
    assert script.of(Commit, script.do(Processed(1, 3, rows={"letters": 1}))) != []
