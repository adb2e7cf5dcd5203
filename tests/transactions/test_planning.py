"""The planner's thread makes one plan at a time,
and delivers only the last one that was asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from queue import Queue
from typing import Any

import pytest

from framework.coordination.step_generators import Threads
from framework.execution.failures import TaskFailure
from framework.topology import PartitionPlanner
from framework.transactions.coordinator import AskPlan
from framework.transactions.planner_thread import BESIDE_S, PlanningThread
from framework.transactions.plans import WIDE_PARTITIONS, Plan, plan_digest, plan_of, stored_plan
from tests.kit.panics import PanicException
from tests.kit.waiting import PATIENCE_S


class Slow(PartitionPlanner):
    """Plans the next ten offsets, as soon as the test lets it."""

    def __init__(self) -> None:
        self.asked: Queue[Mapping[str, Any]] = Queue()
        self.may_go = threading.Semaphore(0)

    def partitions(self) -> list[str]:
        return ["p"]

    def plan(self, previous: Mapping[str, Any]) -> Plan:
        self.asked.put(previous)
        assert self.may_go.acquire(timeout=PATIENCE_S)
        first = previous["p"]["next"] if previous else 0
        return {"p": {"first": first, "next": first + 10}}


def test_a_plan_under_way_is_discarded_when_another_one_is_asked_for() -> None:
    planner = Slow()
    made: Queue[tuple[AskPlan, Plan]] = Queue()
    thread = PlanningThread(
        planner,
        Threads(),
        on_plan=lambda asked, plan: made.put((asked, plan)),
        on_failure=lambda failure: None,
        idle_poll_max_s=0.1,
    )
    thread.start()
    try:
        thread.ask(AskPlan(0, 3, {"p": {"first": 10, "next": 20}}))
        planner.asked.get(timeout=PATIENCE_S)
        again = AskPlan(1, 2, {"p": {"first": 0, "next": 10}})
        thread.ask(again)  # a batch failed meanwhile
        planner.may_go.release()
        planner.may_go.release()
        assert made.get(timeout=PATIENCE_S) == (again, {"p": {"first": 10, "next": 20}})
        assert made.empty()
    finally:
        planner.may_go.release()
        thread.close()


class Exits(Slow):
    error: type[BaseException] = SystemExit

    def plan(self, previous: Mapping[str, Any]) -> Plan:
        raise self.error("enough")


class Panics(Exits):
    error = PanicException


class Interrupts(Exits):
    error = KeyboardInterrupt


@pytest.mark.parametrize("planner", [Exits, Panics, Interrupts])
def test_a_planner_that_calls_exit_or_panics_fails_like_any_other(planner: type[Exits]) -> None:
    failures: Queue[TaskFailure] = Queue()
    thread = PlanningThread(
        planner(), Threads(), on_plan=lambda asked, plan: None, on_failure=failures.put, idle_poll_max_s=0.1
    )
    thread.start()
    try:
        thread.ask(AskPlan(0, 1, None))
        assert failures.get(timeout=PATIENCE_S).message == f"{planner.error.__name__}: enough"
    finally:
        thread.close()


class Reuses(PartitionPlanner):
    """Returns one plan again and again, with entries that it changes; also those of the plan
    before."""

    def __init__(self) -> None:
        self.mine = {f"p{number}": {"first": 0, "next": 0} for number in range(WIDE_PARTITIONS)}

    def partitions(self) -> list[str]:
        return list(self.mine)

    def plan(self, previous: Any) -> Plan:
        for entry in (*self.mine.values(), *previous.values()):
            entry.update(first=entry["next"], next=entry["next"] + 10)
        return self.mine


@pytest.mark.rule("C7")
def test_a_planner_may_change_what_it_returned_and_plans_stay_as_they_were() -> None:
    made: Queue[Plan] = Queue()
    thread = PlanningThread(
        Reuses(),
        Threads(),
        on_plan=lambda asked, plan: made.put(plan),
        on_failure=lambda failure: None,
        idle_poll_max_s=0.1,
    )
    thread.start()
    plans: list[Plan] = []
    digests: list[str] = []
    try:
        for txid in (1, 2, 3):
            thread.ask(AskPlan(0, txid, plans[-1] if plans else None))
            plans.append(made.get(timeout=PATIENCE_S))
            digests.append(plan_digest(plans[-1]))
    finally:
        thread.close()
    assert [each["p7"] for each in plans] == [{"first": first, "next": first + 10} for first in (0, 10, 20)]
    assert len(set(digests)) == 3
    assert [plan_of(stored_plan(each)) for each in plans] == plans


class Keeps(Reuses):
    """Plans what no document can hold."""

    def plan(self, previous: Any) -> Plan:
        return {"p0": {"made by": self}}


def test_a_plan_that_cannot_be_stored_fails_when_it_is_made() -> None:
    failures: Queue[TaskFailure] = Queue()
    thread = PlanningThread(
        Keeps(), Threads(), on_plan=lambda asked, plan: None, on_failure=failures.put, idle_poll_max_s=0.1
    )
    thread.start()
    try:
        thread.ask(AskPlan(0, 1, None))
        assert "Keeps is not JSON serializable" in failures.get(timeout=PATIENCE_S).message
    finally:
        thread.close()


class Counts(PartitionPlanner):
    """Plans the next ten offsets at once, and leaves ``behind`` records."""

    def __init__(self, behind: int | None) -> None:
        self.behind = behind

    def partitions(self) -> list[str]:
        return ["p"]

    def plan(self, previous: Mapping[str, Any]) -> Plan:
        first = previous["p"]["next"] if previous else 0
        return {"p": {"first": first, "next": first + 10}}

    def lag(self, previous: Mapping[str, Any]) -> int | None:
        return self.behind


class LosesCount(Counts):
    def lag(self, previous: Mapping[str, Any]) -> int | None:
        raise KeyError("p8")


def test_a_planner_that_cannot_say_its_lag_fails_like_any_other() -> None:
    """Otherwise its thread would be gone, and the run would wait for a plan for ever."""
    failures: Queue[TaskFailure] = Queue()
    made: Queue[Plan] = Queue()
    thread = PlanningThread(
        LosesCount(None),
        Threads(),
        on_plan=lambda asked, plan: made.put(plan),
        on_failure=failures.put,
        idle_poll_max_s=0.1,
    )
    thread.start()
    try:
        thread.ask(AskPlan(0, 1, None))
        thread.ask(AskPlan(0, 2, made.get(timeout=PATIENCE_S)))
        assert failures.get(timeout=PATIENCE_S).message == "KeyError: 'p8'"
    finally:
        thread.close()


class Clock(Threads):
    """Time passes when the test says so."""

    def __init__(self) -> None:
        self.ms = 0

    def now_ms(self) -> int:
        return self.ms


def planned_beside(behind: int | None) -> tuple[PlanningThread, Clock, Queue[Plan], Plan]:
    """A thread that has planned one batch, and was asked for the next one while that is in
    flight."""
    made: Queue[Plan] = Queue()
    clock = Clock()
    thread = PlanningThread(
        Counts(behind),
        clock,
        on_plan=lambda asked, plan: made.put(plan),
        on_failure=lambda failure: None,
        idle_poll_max_s=0.1,
    )
    thread.start()
    thread.ask(AskPlan(0, 1, None))
    first = made.get(timeout=PATIENCE_S)
    thread.ask(AskPlan(0, 2, first))
    thread.call(lambda planner: None).result(PATIENCE_S)  # it has seen the question
    return thread, clock, made, first


@pytest.mark.parametrize("behind", [5, None])
def test_a_batch_is_planned_beside_one_that_left_records_behind(behind: int | None) -> None:
    thread, _, made, _ = planned_beside(behind)
    try:
        assert made.get(timeout=PATIENCE_S)["p"]["first"] == 10
    finally:
        thread.close()


def test_a_batch_waits_for_one_that_took_everything_to_be_committed() -> None:
    thread, _, made, first = planned_beside(0)
    try:
        thread.call(lambda planner: None).result(PATIENCE_S)
        assert made.empty()
        thread.through(first)
        assert made.get(timeout=PATIENCE_S)["p"]["first"] == 10
    finally:
        thread.close()


def test_a_batch_does_not_wait_long_for_one_that_takes_long() -> None:
    thread, clock, made, _ = planned_beside(0)
    try:
        clock.ms = int(BESIDE_S * 1000)
        assert made.get(timeout=PATIENCE_S)["p"]["first"] == 10
    finally:
        thread.close()


class Watched(PartitionPlanner):
    """Has nothing until the test gives it something, and can be watched."""

    def __init__(self) -> None:
        self.found: Plan | None = None
        self.looks: Queue[None] = Queue()
        self.watches: Queue[Callable[[], None]] = Queue()

    def partitions(self) -> list[str]:
        return ["p"]

    def plan(self, previous: Mapping[str, Any]) -> Plan | None:
        self.looks.put(None)
        return self.found

    def watch(self, arrived: Callable[[], None]) -> bool:
        self.watches.put(arrived)
        return True


IDLE_POLL_S = 0.002


class NoHurry(threading.Event):
    """A pause that is longer than an unwatched source allows never ends by itself."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(timeout if timeout is not None and timeout <= IDLE_POLL_S else None)


class Patient(Threads):
    def event(self) -> threading.Event:
        return NoHurry()

    def used_s(self) -> float:
        return 0.0


def watching(planner: PartitionPlanner, **wanted: Any) -> tuple[PlanningThread, Queue[Plan], Queue[TaskFailure]]:
    made: Queue[Plan] = Queue()
    failures: Queue[TaskFailure] = Queue()
    thread = PlanningThread(
        planner,
        Patient(),
        on_plan=lambda asked, plan: made.put(plan),
        on_failure=failures.put,
        idle_poll_max_s=IDLE_POLL_S,
        **wanted,
    )
    thread.start()
    thread.ask(AskPlan(0, 1, None))
    return thread, made, failures


def test_a_source_that_is_watched_is_asked_when_something_has_come() -> None:
    planner = Watched()
    thread, made, _ = watching(planner)
    try:
        arrived = planner.watches.get(timeout=PATIENCE_S)
        assert made.empty()
        planner.found = {"p": {"first": 0, "next": 10}}
        arrived()
        assert made.get(timeout=PATIENCE_S) == planner.found
    finally:
        thread.close()


def test_a_watch_that_ended_for_nothing_is_begun_again_after_a_pause() -> None:
    planner = Watched()
    thread, made, _ = watching(planner)
    try:
        arrived = planner.watches.get(timeout=PATIENCE_S)
        before = planner.looks.qsize()
        arrived()
        arrived = planner.watches.get(timeout=PATIENCE_S)
        assert planner.looks.qsize() == before + 2  # at once, and once more after the first pause
        planner.found = {"p": {"first": 0, "next": 10}}
        arrived()
        assert made.get(timeout=PATIENCE_S) == planner.found
    finally:
        thread.close()


def test_a_source_that_is_to_make_empty_batches_is_asked_as_often_as_before() -> None:
    planner = Watched()
    thread, _, _ = watching(planner, empty_batch_every_s=0.5)
    try:
        for _ in range(20):
            planner.looks.get(timeout=PATIENCE_S)
        assert planner.watches.empty()
    finally:
        thread.close()


class Costly(Threads):
    """Each look at the source takes 3 ms of processor time. Pauses below three seconds end at once,
    longer ones never.
    """

    def __init__(self, look_s: float = 0.003) -> None:
        self.used, self.look_s, self.pauses = 0.0, look_s, Queue[float]()

    def used_s(self) -> float:
        self.used += self.look_s
        return self.used

    def event(self) -> threading.Event:
        pauses = self.pauses

        class Noting(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                if timeout is not None:
                    pauses.put(timeout)
                return super().wait(0.0 if timeout is not None and timeout < 2.9 else None)

        return Noting()


def test_a_source_that_is_watched_is_asked_the_more_seldom_the_more_a_look_costs() -> None:
    threads = Costly()
    planner = Watched()
    thread = PlanningThread(
        planner, threads, on_plan=lambda asked, plan: None, on_failure=lambda failure: None, idle_poll_max_s=IDLE_POLL_S
    )
    thread.start()
    thread.ask(AskPlan(0, 1, None))
    try:
        planner.watches.get(timeout=PATIENCE_S)
        pauses = [threads.pauses.get(timeout=PATIENCE_S)]
        while pauses[-1] < 2.9:
            pauses.append(threads.pauses.get(timeout=PATIENCE_S))
        assert pauses[-1] == pytest.approx(3)  # 3 ms are 0.1 % of it
    finally:
        thread.close()


@pytest.mark.parametrize(("used_s", "watched_from_s"), [(0.0, 0.016), (0.003, 0.064)])
def test_a_source_is_watched_as_soon_as_that_costs_no_more_than_a_few_looks(
    used_s: float, watched_from_s: float
) -> None:
    """Otherwise a record that comes after a short silence would wait for a long pause to end."""
    threads, seen = Costly(used_s), list[float]()

    class Asked(Watched):
        def watch(self, arrived: Callable[[], None]) -> bool:
            if not seen:  # the first time
                while not threads.pauses.empty():
                    seen.append(threads.pauses.get())
            return super().watch(arrived)

    planner = Asked()
    thread = PlanningThread(
        planner, threads, on_plan=lambda asked, plan: None, on_failure=lambda failure: None, idle_poll_max_s=0.6
    )
    thread.start()
    thread.ask(AskPlan(0, 1, None))
    try:
        planner.watches.get(timeout=PATIENCE_S)
        assert seen[-1] == pytest.approx(watched_from_s)
    finally:
        thread.close()


class CannotBeWatched(Watched):
    def watch(self, arrived: Callable[[], None]) -> bool:
        raise ValueError("who goes there")


def test_an_error_of_a_watch_ends_the_run_as_any_error_of_a_planner() -> None:
    thread, _, failures = watching(CannotBeWatched())
    try:
        assert failures.get(timeout=PATIENCE_S).message == "ValueError: who goes there"
    finally:
        thread.close()
