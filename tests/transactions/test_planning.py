"""The planner's thread makes one plan at a time,
and delivers only the last one that was asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from queue import Queue
from typing import Any

from framework.coordination.steps import Threads
from framework.execution.failures import TaskFailure
from framework.topology import PartitionPlanner
from framework.transactions.coordinator import AskPlan, Plan
from framework.transactions.planning import PlanningThread

TIMEOUT_S = 30


class Slow(PartitionPlanner):
    """Plans the next ten offsets, as soon as the test lets it."""

    def __init__(self) -> None:
        self.asked: Queue[Mapping[str, Any]] = Queue()
        self.may_go = threading.Semaphore(0)

    def partitions(self) -> list[str]:
        return ["p"]

    def plan(self, previous: Mapping[str, Any]) -> Plan:
        self.asked.put(previous)
        assert self.may_go.acquire(timeout=TIMEOUT_S)
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
        planner.asked.get(timeout=TIMEOUT_S)
        again = AskPlan(1, 2, {"p": {"first": 0, "next": 10}})
        thread.ask(again)  # a batch failed meanwhile
        planner.may_go.release()
        planner.may_go.release()
        assert made.get(timeout=TIMEOUT_S) == (again, {"p": {"first": 10, "next": 20}})
        assert made.empty()
    finally:
        planner.may_go.release()
        thread.close()


class Exits(Slow):
    def plan(self, previous: Mapping[str, Any]) -> Plan:
        raise SystemExit("enough")


def test_a_planner_that_calls_exit_fails_like_any_other() -> None:
    failures: Queue[TaskFailure] = Queue()
    thread = PlanningThread(
        Exits(), Threads(), on_plan=lambda asked, plan: None, on_failure=failures.put, idle_poll_max_s=0.1
    )
    thread.start()
    try:
        thread.ask(AskPlan(0, 1, None))
        assert failures.get(timeout=TIMEOUT_S).message == "SystemExit: enough"
    finally:
        thread.close()
