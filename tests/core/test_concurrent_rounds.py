"""Rounds that overlap: each task still gets its records in order."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from framework import Fields, TopologyBuilder
from framework.core.driver import RoundDriver
from framework.core.local import LocalRounds
from framework.core.plan import CorePlan
from framework.core.round_protocol import Addressed, Round, RoundRecord, walk_round
from framework.core.round_sequencer import OvertakenError, RoundOrder
from framework.errors import RetryableError
from framework.execution.plan import plan_execution
from tests.kit.core_parts import ListSpout, Rich, ack, seen
from tests.kit.waiting import PATIENCE_S


def test_a_round_waits_for_its_predecessor() -> None:
    turns = RoundOrder(60.0)
    order: list[int] = []

    def later() -> None:
        with turns.of(2, 1):
            order.append(2)

    thread = threading.Thread(target=later)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    with turns.of(1, 0):
        thread.join(0.05)
        order.append(1)
    thread.join(PATIENCE_S)
    assert order == [1, 2]


def test_a_round_that_comes_after_its_successor_is_refused() -> None:
    turns = RoundOrder(0.01)
    with turns.of(3, 2):
        pass
    with pytest.raises(OvertakenError, match="round 2 comes too late: round 3 has been here"), turns.of(2, 1):
        raise AssertionError("it ran")
    with turns.of(4, 3):
        pass


def test_a_round_without_predecessor_runs_at_once() -> None:
    turns = RoundOrder(60.0)
    with turns.of(7, 0):
        pass
    with turns.of(8, 7):
        pass


class Jittery(LocalRounds):
    """Two rounds at once, whose tasks take random times.

    ``at_once``: the most rounds at the same time.
    """

    rounds_max = 2

    def __init__(self, plan: CorePlan, lose: Sequence[int] = ()) -> None:
        super().__init__(plan)
        self.lose, self.working, self.at_once, self.lock = lose, 0, 0, threading.Lock()
        self.chance = random.Random(1)

    def run(self, round_: Round) -> Sequence[RoundRecord]:
        with self.lock:
            self.working += 1
            self.at_once = max(self.at_once, self.working)
        try:
            return walk_round(round_, self._plan.widths, self.run_task)
        finally:
            with self.lock:
                self.working -= 1

    def run_task(
        self, round_: Round, level: int, partition: int, records: Sequence[RoundRecord]
    ) -> Sequence[Addressed]:
        time.sleep(self.chance.random() * 0.01)
        if level == 1 and round_.number in self.lose:
            raise RetryableError("lost")
        return self._worker.run_task(round_, level, partition, records)


def run_to_the_end(key: str, count: int, lose: Sequence[int] = ()) -> Jittery:
    builder = TopologyBuilder("in-order")
    builder.set_spout("list", ListSpout(key, list(range(count))))
    builder.set_bolt("first", Rich(key + "first", forward, Fields(n=int)), 2).fields_grouping("list", Fields("n"))
    builder.set_bolt("last", Rich(key, ack)).global_grouping("first")
    plan = CorePlan(plan_execution(builder.build()), {}, ackers=1, pending_max=7)
    rounds = Jittery(plan, lose)
    # Nothing is overtaken, or comes again, unless a round is lost: a thread may stand still.
    rounds._worker._overtake_s = 0.2 if lose else PATIENCE_S
    driver = RoundDriver(plan, rounds, timeout_s=4 if lose else PATIENCE_S, attempts_max=5)
    thread = threading.Thread(target=driver.run)
    thread.start()
    assert driver.wait_until_idle(PATIENCE_S)
    driver.request_stop()
    thread.join(PATIENCE_S)
    assert driver.error is None
    return rounds


def forward(bolt: Any, tup: Any, collector: Any) -> None:
    """Emits a number that also tells the task."""
    collector.emit([tup["n"] * 2 + bolt.context.task_index], anchors=tup)
    collector.ack(tup)


def test_tuples_between_two_tasks_keep_their_order_while_rounds_overlap() -> None:
    rounds = run_to_the_end("overlap", 300)
    assert rounds.at_once == 2
    came = [n for (n,) in seen("overlap").executed]
    assert len(came) == 300
    for task in (0, 1):
        from_task = [n // 2 for n in came if n % 2 == task]
        assert from_task == sorted(from_task)
        assert len(from_task) > 50


@pytest.mark.slow
@pytest.mark.behaviour("4.6")
def test_a_lost_round_that_another_overlaps_loses_nothing() -> None:
    run_to_the_end("overlap-lost", 200, lose=(3, 4, 8, 15))
    assert sorted(seen("overlap-lost").acked) == list(range(200))
    assert {n // 2 for (n,) in seen("overlap-lost").executed} == set(range(200))
