"""The pace of transactions: the arithmetic, and the planner's thread that keeps to it, on a clock
of the test's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from framework import Config
from framework.coordination import Put
from framework.coordination.step_generators import Steps, Threads
from framework.errors import ConfigError, CorruptStateError, RatchetError
from framework.execution.failures import TaskFailure
from framework.topology import Fields, TopologyContext
from framework.transactions import MemoryStore
from framework.transactions.commit_pace import PACE_KEYS, CommitPace, Pacer
from framework.transactions.coordinator import AskPlan
from framework.transactions.documents import PACE, read_pace, write_pace
from framework.transactions.planner_thread import PlanningThread
from framework.transactions.plans import Plan
from spouts import OpaqueMemoryTransactionalSpout

INTERVAL, RECORDS, BYTES, RATE = PACE_KEYS


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "seconds"), [("5 min", 300.0), ("90", 90.0), (2, 2.0), ("500ms", 0.5), ("1.5 h", 5400.0)]
)
def test_an_interval_is_seconds_or_a_text(given: Any, seconds: float) -> None:
    assert Config.of({INTERVAL: given}).commit_interval_s == seconds


@pytest.mark.parametrize("given", ["5 fortnights", "", "-1 s", 0, "0 s", "8 d", float("nan")])
def test_an_interval_that_is_none_is_refused_by_its_key(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"topology\.commit\.interval: "):
        Config.of({INTERVAL: given})


@pytest.mark.parametrize("key", [RECORDS, BYTES])
def test_a_least_amount_without_an_interval_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="no interval is set"):
        Config.of({key: 10}).check_transactional()
    Config.of({key: 10, INTERVAL: 1}).check_transactional()


def test_what_was_set_wins_over_the_configuration_and_off_lifts_a_limit() -> None:
    config = Config.of({INTERVAL: 60, RATE: 10})
    assert CommitPace.of(config) == CommitPace(interval_s=60, records_per_second=10)
    assert CommitPace.of(config, {INTERVAL: 5.0, RATE: None}) == CommitPace(interval_s=5)
    store = MemoryStore()
    write_pace(store, "words", {INTERVAL: 5.0, RATE: None})
    assert read_pace(store, "words") == {INTERVAL: 5.0, RATE: None}
    write_pace(store, "words", {})
    assert read_pace(store, "words") == {}


@pytest.mark.parametrize(
    "document", [b'{"format": 1, "value": 3}', b'{"format": 1, "value": {"topology.max.attempts": 3}}']
)
def test_a_document_that_holds_no_pace_is_named(document: bytes) -> None:
    store = MemoryStore()
    store.apply([Put(f"words/{PACE}", document)])
    with pytest.raises(CorruptStateError, match="words/pace"):
        read_pace(store, "words")


# --- arithmetic -----------------------------------------------------------------------------------


@pytest.mark.rule("C45")
def test_an_interval_that_was_missed_is_not_made_up_for() -> None:
    pacer = Pacer(CommitPace(interval_s=10), 0)
    pacer.planned(1, 5, 0)
    pacer.asked(2, 35_000)  # the transaction took three and a half intervals
    assert pacer.interval_held_s(35_000) == 0
    pacer.planned(2, 5, 35_000)
    pacer.asked(3, 35_001)
    assert pacer.interval_held_s(36_000) == 9.0


def test_a_txid_that_was_planned_before_does_not_wait_for_another_interval() -> None:
    pacer = Pacer(CommitPace(interval_s=10), 0)
    pacer.planned(1, 5, 0)
    pacer.asked(1, 100)  # it failed, and is planned afresh
    assert pacer.interval_held_s(100) == 0


def test_a_new_leader_goes_on_with_the_interval_of_the_one_before() -> None:
    pacer = Pacer(CommitPace(interval_s=10), 1_000, planned_ms_ago=4_000)
    pacer.asked(7, 1_000)
    assert pacer.interval_held_s(1_000) == 6.0


@pytest.mark.rule("C45")
def test_a_restart_and_an_idle_hour_cause_no_burst() -> None:
    pacer = Pacer(CommitPace(records_per_second=100), 0)
    assert pacer.rate_held_s(0) == pytest.approx(0.1)
    pacer.asked(1, 0)
    assert pacer.records_max(3_600_000) == 100


def test_a_planner_that_takes_more_pays_it_back() -> None:
    pacer = Pacer(CommitPace(records_per_second=100), 0)
    pacer.planned(1, 500, 1_000)
    assert pacer.rate_held_s(1_000) == pytest.approx(4.1)


@pytest.mark.rule("C45")
@pytest.mark.parametrize("seed", range(20))
def test_a_bucket_never_gives_more_than_its_rate(seed: int) -> None:
    chance = random.Random(seed)
    rate = chance.choice((0.5, 3.0, 100.0, 5_000.0))
    pacer, now_ms, given = Pacer(CommitPace(records_per_second=rate), 0), 0, 0
    for txid in range(1, 300):
        now_ms += chance.choice((0, 1, 20, 900, 4_000))
        pacer.asked(txid, now_ms)
        now_ms += round(pacer.rate_held_s(now_ms) * 1000) + 1
        most = pacer.records_max(now_ms)
        assert most is not None
        given += most
        pacer.planned(txid, most, now_ms)
        assert given <= rate * now_ms / 1000 + 1


@pytest.mark.parametrize("rate", [3.0, 100.0, 5_000.0])
def test_a_bucket_gives_its_rate_to_a_topology_whose_transactions_take_long(rate: float) -> None:
    pacer, given = Pacer(CommitPace(records_per_second=rate), 0), 0
    for txid in range(1, 31):
        pacer.asked(txid, txid * 7_000)
        most = pacer.records_max(txid * 7_000) or 0
        given += most
        pacer.planned(txid, most, txid * 7_000)
    assert given >= rate * 210 * 0.9


# --- the planner's thread, on a clock of the test's -----------------------------------------------


class Clock(Threads):
    def __init__(self) -> None:
        self.ms = 0

    def now_ms(self) -> int:
        return self.ms

    def used_s(self) -> float:
        return 0.0


class Planning:
    """The thread's steps, performed one by one: a wait takes its time at once."""

    def __init__(self, config: Mapping[str, Any], rows: int, take: int = 1_000_000) -> None:
        self.store, self.clock, self.plans = MemoryStore(), Clock(), list[tuple[int, int]]()
        self.failures: list[TaskFailure] = []
        self.spout = OpaqueMemoryTransactionalSpout({0: [[n] for n in range(rows)]}, Fields(n=int), take)
        self.awaited = False
        self._last: Plan = {}
        self.thread = PlanningThread(
            self.spout.planner({}, TopologyContext("words", "spout", 0, 1, {})),
            self.clock,
            on_plan=self._planned,
            on_failure=self.failures.append,
            idle_poll_max_s=0.1,
            pace=lambda: CommitPace.of(Config.of(config), read_pace(self.store, "words")),
            is_awaited=lambda previous: self.awaited,
        )
        self._steps: Steps[None] = self.thread._running()
        self._step = next(self._steps)

    def _planned(self, asked: AskPlan, plan: Plan) -> None:
        self._last = plan
        self.plans.append((self.clock.ms, sum(each["next"] - each["first"] for each in plan.values())))

    def run(self, until_ms: int) -> list[tuple[int, int]]:
        """Plan one transaction after the other until this moment. Returns the moments of the plans
        and their records."""
        begun = len(self.plans)
        while self.clock.ms < until_ms and not self.failures:
            if self.thread._asked is None:
                self.thread.through(self._last)
                self.thread.ask(AskPlan(0, len(self.plans) + 1, self._last))
            args = getattr(self._step, "args", ())
            if getattr(getattr(self._step, "func", None), "__name__", "") == "wait":
                if not self.thread._wake.is_set():
                    self.clock.ms += max(round((args[0] or 0) * 1000), 1)
                self._step = self._steps.send(True)
            else:
                try:
                    answer = self._step()
                except RatchetError as error:
                    self._step = self._steps.throw(error)
                else:
                    self._step = self._steps.send(answer)
        return self.plans[begun:]


def test_the_first_plan_waits_for_nothing_and_the_next_ones_for_the_interval() -> None:
    planning = Planning({INTERVAL: 60}, rows=10, take=2)
    assert [at // 1000 for at, _ in planning.run(200_000)] == [0, 60, 120, 180]


def test_enough_records_end_the_interval_early() -> None:
    planning = Planning({INTERVAL: 600, RECORDS: 100}, rows=1)
    assert len(planning.run(50_000)) == 1
    planning.spout.append(0, [[n] for n in range(99)])
    assert planning.run(100_000) == []
    planning.spout.append(0, [[1]])
    ((at, records),) = planning.run(200_000)
    assert records == 100
    assert at < 103_000


def test_what_a_bounded_run_waits_for_is_not_delayed_by_the_interval() -> None:
    planning = Planning({INTERVAL: 3600}, rows=6, take=2)
    assert len(planning.run(10_000)) == 1
    planning.awaited = True
    planning.thread.look()
    assert [records for _, records in planning.run(20_000)] == [2, 2]


def test_a_change_is_seen_while_a_plan_waits() -> None:
    planning = Planning({INTERVAL: 3600}, rows=6, take=2)
    assert len(planning.run(10_000)) == 1
    write_pace(planning.store, "words", {INTERVAL: 20.0})
    assert [at // 1000 for at, _ in planning.run(70_000)][:2] == [20, 40]
    assert planning.thread.pace == CommitPace(interval_s=20)
    write_pace(planning.store, "words", {INTERVAL: None})
    planning.spout.append(0, [[1], [2], [3], [4]])
    assert [records for _, records in planning.run(80_000)] == [2, 2]


def test_a_rate_holds_over_a_backlog_and_empties_nothing_at_once() -> None:
    planning = Planning({RATE: 1000}, rows=50_000)
    plans = planning.run(10_000)
    assert plans[0][1] <= 110
    assert 9_500 <= sum(records for _, records in plans) <= 10_001


@pytest.mark.slow
def test_a_rate_and_an_interval_make_one_large_batch_per_interval() -> None:
    planning = Planning({RATE: 100, INTERVAL: 60}, rows=1_000_000)
    later = planning.run(301_000)[1:]
    assert len(later) == 5
    assert all(5_900 <= records <= 6_001 for _, records in later)


def test_a_pace_that_cannot_be_read_changes_nothing() -> None:
    planning = Planning({INTERVAL: 60}, rows=10, take=2)
    planning.run(10_000)
    planning.store.apply([Put(f"words/{PACE}", b"no document")])
    assert [at // 1000 for at, _ in planning.run(130_000)] == [60, 120]


def test_a_rate_for_a_spout_that_counts_nothing_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    planning = Planning({RATE: 5}, rows=10)
    monkeypatch.setattr(planning.thread._planner, "record_count", lambda plan: None)
    monkeypatch.setattr(planning.thread._planner, "plan", lambda previous: {"0": {"first": 0, "next": 1}})
    planning.run(1_000)
    assert "this spout does not count them" in planning.failures[0].message
