"""Ticks: a bolt gets them among its other tuples, and also when no other tuple comes."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from framework import BaseBasicBolt, BaseRichBolt, CoreTopology, Fields, TopologyBuilder, Tuple, submit
from framework.core.checkpoint_record import CheckpointRecord
from framework.core.checkpoints import Checkpoints
from framework.core.driver import RoundDriver
from framework.core.plan import CorePlan
from framework.core.run import ticks_of
from framework.core.worker_client import WorkerSettings, close_worker
from framework.core.worker_process import start_worker
from framework.errors import ConfigError
from framework.execution.plan import plan_execution
from framework.state import BaseWindowedBolt, TimeWindow, Window
from integration.server import wait_until
from tests.kit.core_parts import ListSpout, Rich, Stepped, ack, seen
from tests.kit.journaled import note, noted
from tests.kit.state_parts import Count, Log, SteppedState, journal
from tests.kit.task_workers import InATaskWorker
from tests.kit.waiting import PATIENCE_S


@pytest.fixture
def key() -> str:
    return f"t{uuid.uuid4().hex[:8]}"


class Ticking(Rich):
    """Notes ticks beside its tuples."""

    tick_s = 10.0

    def execute(self, tup: Tuple) -> None:
        if tup.is_tick:
            assert (len(tup), tup.fields.names, tup.source_component, tup.source_stream) == (
                0,
                (),
                "__system",
                "__tick",
            )
            seen(self.key).executed.append("tick")
        else:
            super().execute(tup)


class TickingBasic(BaseBasicBolt):
    tick_s = 10.0

    def __init__(self, key: str) -> None:
        self.key = key

    def execute(self, tup: Tuple, collector: Any) -> None:
        seen(self.key).executed.append("tick" if tup.is_tick else tup.values)
        if tup.is_tick:
            collector.emit([-1])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(n=int))


def built(key: str, items: list[Any], bolt: Any, tasks: int = 1) -> CoreTopology:
    builder = TopologyBuilder("ticks")
    builder.set_spout("spout", ListSpout(key, items))
    builder.set_bolt("bolt", bolt, tasks).shuffle_grouping("spout")
    if isinstance(bolt, TickingBasic):
        builder.set_bolt("after", Rich(f"{key} after", ack)).shuffle_grouping("bolt")
    return builder.build()


@pytest.mark.parametrize("kind", ["rich", "basic"])
def test_each_task_of_a_bolt_gets_a_tick_when_its_interval_has_passed_without_tuples(key: str, kind: str) -> None:
    bolt = Ticking(key, ack) if kind == "rich" else TickingBasic(key)
    stepped = Stepped(built(key, [], bolt, tasks=2)).step(1)
    stepped.step(3, seconds=3)
    assert seen(key).executed == []
    stepped.step(1, seconds=1)
    assert seen(key).executed == ["tick", "tick"]
    stepped.step(1, seconds=100)
    stepped.step(5, seconds=1)  # missed ticks are not made up for
    assert seen(key).executed == ["tick"] * 4
    status = stepped.driver.status()
    assert (status.trees, status.pending, status.held) == (0, 0, {})
    if kind == "basic":
        assert seen(f"{key} after").executed == [(-1,)] * 4


def test_a_tick_comes_after_the_tuples_that_have_come_before_it(key: str) -> None:
    stepped = Stepped(built(key, [1, 2, 3], Ticking(key, ack)))
    stepped.step(1, seconds=10)
    stepped.step(1, seconds=10)
    assert seen(key).executed == [(1,), (2,), (3,), "tick"]


def test_a_round_waits_for_spouts_no_longer_than_until_the_next_tick(key: str) -> None:
    stepped = Stepped(built(key, [], Ticking(key, ack))).step(1)
    stepped.clock.now += 7
    stepped.driver._spout_wait_s = 5.0
    round_ = stepped.driver.begin()
    assert round_.spout_wait_s == pytest.approx(3.0)


def test_acking_or_failing_a_tick_does_nothing_to_any_tree(key: str) -> None:
    class Fails(Ticking):
        def execute(self, tup: Tuple) -> None:
            super().execute(tup)
            if tup.is_tick:
                self.collector.fail(tup)
                self.collector.ack(tup)

    stepped = Stepped(built(key, [1, 2], Fails(key, ack))).step(1)
    stepped.step(3, seconds=10)
    assert seen(key).executed == [(1,), (2,), "tick", "tick", "tick"]
    assert (sorted(seen(key).acked), seen(key).failed) == ([1, 2], [])


def test_a_bolt_that_dies_of_a_tick_is_made_anew(key: str) -> None:
    class Dies(Ticking):
        def execute(self, tup: Tuple) -> None:
            super().execute(tup)
            if tup.is_tick and seen(key).executed.count("tick") == 1:
                raise RuntimeError("died")

    stepped = Stepped(built(key, [], Dies(key, ack))).step(1)
    stepped.step(2, seconds=10)
    assert seen(key).executed == ["tick", "tick"]
    assert stepped.driver.status().components["bolt"].died == 1


class UntilTicks:
    """Holds tuples until a tick comes, then calls ``at_tick`` with each,
    as bolts do that write many at once.
    """

    held: list[Tuple]

    def execute(self, tup: Tuple) -> None:
        if not tup.is_tick:
            self.held.append(tup)
            return
        held, self.held = self.held, []
        for each in held:
            self.at_tick(each)

    def at_tick(self, tup: Tuple) -> None:
        raise NotImplementedError


class Batches(UntilTicks, BaseRichBolt):
    """Passes words on."""

    def __init__(self, tick_s: float = 5.0) -> None:
        self.tick_s = tick_s

    def prepare(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:  # type: ignore[override]
        self.collector = collector
        self.held = []

    def at_tick(self, tup: Tuple) -> None:
        self.collector.emit([tup["word"]], anchors=tup)
        self.collector.ack(tup)

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


def test_a_bolt_that_lets_tuples_go_at_ticks_does_so_while_a_checkpoint_waits_for_them(
    key: str, tmp_path: Path
) -> None:
    builder = TopologyBuilder(key)
    builder.set_spout("words", Log(key, [["a", "b", "a"]]))
    builder.set_bolt("batches", Batches()).shuffle_grouping("words")
    builder.set_bolt("count", Count(key)).fields_grouping("batches", Fields("word"))
    stepped = SteppedState(builder.build(), tmp_path)
    stepped.step(20, seconds=1)
    stepped.settle()
    assert journal(key).results == {"a": 2, "b": 1}
    assert stepped.recoveries == 0


class Summary(Count):
    """Emits its sum at each tick, anchored to the tick."""

    tick_s = 1.0

    def execute(self, tup: Tuple) -> None:
        if tup.is_tick:
            self.collector.emit(["sum", 0], anchors=tup)
        else:
            super().execute(tup)


def test_bolts_whose_ticks_come_at_different_times_do_not_keep_a_checkpoint_waiting_for_ever(
    key: str, tmp_path: Path
) -> None:
    """While one bolt lets its tuples go, a tick of the count would start a
    new tree for the other bolt to hold.
    """
    builder = TopologyBuilder(key)
    builder.set_spout("words", Log(key, [["a"] * 1_000], per_call=1))
    builder.set_bolt("count", Summary(key)).fields_grouping("words", Fields("word"))
    for name, tick_s in (("one", 5.0), ("two", 7.0)):
        builder.set_bolt(name, Batches(tick_s)).shuffle_grouping("count")
    stepped = SteppedState(builder.build(), tmp_path)
    stepped.step(400, seconds=0.25)
    assert stepped.record.txid >= 10
    assert stepped.recoveries == 0


class CountsAtTicks(UntilTicks, Count):
    """Counts words."""

    tick_s = 3.0

    def prepare(self, conf: Any, context: Any, collector: Any) -> None:
        super().prepare(conf, context, collector)
        self.held = []

    def at_tick(self, tup: Tuple) -> None:
        Count.execute(self, tup)


def test_a_stateful_bolt_that_holds_tuples_is_given_its_ticks_while_a_checkpoint_waits_for_them(
    key: str, tmp_path: Path
) -> None:
    builder = TopologyBuilder(key)
    builder.set_spout("words", Log(key, [["a", "b", "a"]]))
    builder.set_bolt("batches", Batches()).shuffle_grouping("words")
    builder.set_bolt("first", CountsAtTicks(f"{key} first")).fields_grouping("batches", Fields("word"))
    builder.set_bolt("second", CountsAtTicks(key)).fields_grouping("first", Fields("word"))
    stepped = SteppedState(builder.build(), tmp_path)
    stepped.step(30, seconds=1)
    stepped.settle()
    assert journal(key).results == {"a": 2, "b": 1}
    assert stepped.recoveries == 0


def test_a_bolt_without_a_tick_interval_of_its_own_gets_that_of_the_topology(key: str) -> None:
    builder = TopologyBuilder("ticks")
    builder.set_spout("spout", ListSpout(key, []))
    builder.set_bolt("own", Ticking(key, ack)).shuffle_grouping("spout")
    builder.set_bolt("other", Rich(key, ack)).shuffle_grouping("spout")
    assert ticks_of(builder.build()) == {"own": 10.0}
    assert ticks_of(builder.build(), 3.0) == {"own": 10.0, "other": 3.0}
    wrong = Ticking(key, ack)
    wrong.tick_s = 0
    with pytest.raises(ConfigError, match="bolt 'bolt': tick_s is 0: give seconds above 0"):
        ticks_of(built(key, [], wrong))


def test_a_run_gives_ticks_as_configured(key: str) -> None:
    topology = built(key, [], TickingBasic(key))
    topology.components[1].instance.tick_s = None
    with submit(topology, {"topology.tick.tuple.freq.secs": 0.05}, executor="local"):
        wait_until(lambda: len(seen(key).executed) > 3, PATIENCE_S, "ticks")


class Windows(BaseWindowedBolt):
    """Short windows, by the real clock."""

    def __init__(self) -> None:
        super().__init__(TimeWindow(0.2), key=["word"])

    def execute_window(self, window: Window, collector: Any) -> None:
        collector.emit([window.key[0], len(window.tuples)])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str, count=int))


class Notes(BaseBasicBolt):
    """Writes its tuples into a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def execute(self, tup: Tuple, collector: Any) -> None:
        note(str(self.folder), "fired", f"{tup['word']} {tup['count']}")


@pytest.mark.slow
def test_windows_by_processing_time_fire_in_a_worker_while_nothing_comes(key: str, tmp_path: Path) -> None:
    builder = TopologyBuilder(key)
    builder.set_spout("words", Log(key, [["a", "b", "a"]], per_call=3))
    builder.set_bolt("windows", Windows()).fields_grouping("words", Fields("word"))
    builder.set_bolt("notes", Notes(tmp_path)).shuffle_grouping("windows")
    plan = CorePlan(plan_execution(builder.build()), {}, ackers=1, pending_max=100, stateful=frozenset({"windows"}))
    settings = WorkerSettings.of(plan, 60.0, None)
    worker = start_worker(settings, 0)
    try:
        driver = RoundDriver(plan, InATaskWorker(plan, settings, worker), timeout_s=PATIENCE_S, attempts_max=5)
        checkpoints = Checkpoints(
            CheckpointRecord(),
            {"windows": 1},
            {"words": 1},
            exact=True,
            durable=False,
            interval_s=0.05,
            attempts_max=5,
            save=lambda _: None,
        )
        running = threading.Thread(target=driver.run, kwargs={"checkpoints": lambda: checkpoints}, daemon=True)
        running.start()
        wait_until(
            lambda: sum(int(each.split()[1]) for each in noted(tmp_path, "fired")) == 3, PATIENCE_S, "all windows"
        )
        assert driver.wait_until_idle(PATIENCE_S)
        assert driver.status().components["windows"].failed == 0
        driver.request_stop()
        running.join(PATIENCE_S)
        assert (driver.status().phase, checkpoints.status().recoveries) == ("stopped", 0)
    finally:
        close_worker(worker, settings.credentials)
