"""Windows over several source partitions that are read at different speeds: as when all is read in
the order of time, whatever stands between the spout and the windows."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from framework import Fields, ReplayableSpout, TopologyBuilder, Tuple, submit
from framework.core.event_times import EventTimes, paths_of
from framework.core.event_times import Path as Way
from framework.core.spout_task import Origins
from framework.execution.plan import plan_execution
from framework.state import LATE_STREAM, TimeWindow, Window
from framework.transactions import MemoryStore
from tests.kit.backlogs import EVENT, Collect, Event, Gather, Pass, backlog, check, expected, topology
from tests.kit.state_parts import SteppedState, journal, lmdb


class Partitions(ReplayableSpout):
    """Reads partitions, each in its order, ``speeds`` rows at a time: a fast one is read to its end
    before a slow one has begun. ``says``: whether it says of which partition a row is."""

    def __init__(self, partitions: Sequence[Sequence[Event]], speeds: Sequence[int], *, says: bool = True) -> None:
        self.partitions, self.speeds, self.says = partitions, speeds, says

    def open(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:
        self.collector = collector
        self.mine = range(context.task_index, len(self.partitions), context.task_count)
        self.next = dict.fromkeys(self.mine, 0)
        self.turn = 0

    def next_tuples(self, most: int) -> None:
        for _ in self.mine:
            its = self.mine[self.turn % len(self.mine)]
            self.turn += 1
            rows = self.partitions[its][self.next[its] :][: min(most, self.speeds[its])]
            if rows:
                self.next[its] += len(rows)
                columns = [pa.array(column) for column in zip(*rows, strict=True)]
                batch = pa.record_batch(columns, list(EVENT.names))
                self.collector.emit_arrow(batch, partition=str(its) if self.says else "")
                return

    def next_tuple(self) -> None:
        self.next_tuples(1)

    def caught_up(self) -> bool:
        return not self.unread()

    def unread(self) -> dict[str, str | None] | None:
        if not self.says:
            return {}
        return {str(each): None for each, at in self.next.items() if at < len(self.partitions[each])}

    def position(self) -> dict[str, int]:
        return {str(each): at for each, at in self.next.items()}

    def seek(self, positions: Sequence[Mapping[str, int]]) -> None:
        known = {int(name): at for each in positions for name, at in each.items()}
        self.next = {each: known.get(each, 0) for each in self.mine}

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(EVENT)


SPEEDS = ([400, 5, 40, 3], [1, 400, 1, 1], [7, 7, 7, 7])


@pytest.mark.quick_for("1-3-0", "2-1-3", "2-3-1", "4-3-0")
@pytest.mark.behaviour("5.2")
@pytest.mark.parametrize("between", [0, 1, 3])
@pytest.mark.parametrize("tasks", [1, 3])
@pytest.mark.parametrize("spouts", [1, 2, 4])
def test_a_backlog_gives_the_windows_of_in_order_reading(spouts: int, tasks: int, between: int) -> None:
    partitions = backlog()
    for speeds, pending in zip(SPEEDS, (400, 30, 30), strict=True):
        name = f"e{uuid.uuid4().hex[:8]}"
        spout = Partitions(partitions, speeds)
        built = topology(name, spout, TimeWindow(10, "at"), spouts=spouts, between=between, tasks=tasks)
        conf = {"topology.state.checkpoint.interval.ms": 30, "topology.max.spout.pending": pending}
        with submit(built, conf, executor="local") as run:
            run.wait_until_idle(60)
            assert run.status().components["gather"].late == 0
        check(journal(name).results, partitions, 10)


@pytest.mark.parametrize("between", [0, 1])
def test_a_spout_that_says_nothing_of_its_partitions_is_caught(between: int) -> None:
    """The test above sees what is late where nothing holds windows up."""
    partitions, name = backlog(), f"e{uuid.uuid4().hex[:8]}"
    spout = Partitions(partitions, SPEEDS[0], says=False)
    built = topology(name, spout, TimeWindow(10, "at"), spouts=2, between=between, tasks=2)
    with submit(built, {"topology.max.spout.pending": 30}, executor="local") as run:
        run.wait_until_idle(60)
        assert run.status().components["gather"].late > 0
    with pytest.raises(AssertionError):
        check(journal(name).results, partitions, 10)


@pytest.mark.behaviour("5.5")
@pytest.mark.parametrize("between", [0, 1])
def test_restarts_in_the_middle_of_a_backlog_with_other_numbers_of_tasks(tmp_path: Path, between: int) -> None:
    """Also when windows die: spouts go back, and what was seen of the partitions is forgotten."""
    partitions, name = backlog(), f"e{uuid.uuid4().hex[:8]}"
    store, conf = MemoryStore(), lmdb(tmp_path, **{"topology.max.spout.pending": 20})
    conf["topology.state.checkpoint.interval.ms"] = 10
    fired = 0

    def sometimes(window: Window) -> None:
        nonlocal fired
        fired += 1
        if fired in (3, 17, 40, 41):
            raise RuntimeError("died")

    journal(name).on["window"] = sometimes
    for part, (spouts, tasks) in ((0.3, (2, 1)), (0.6, (4, 3)), (1.0, (1, 2))):
        # A restart in the middle: what lies beyond is not written yet, but known to be there.
        spout = Paused(partitions, SPEEDS[0], part)
        built = topology(name, spout, TimeWindow(10, "at"), spouts=spouts, between=between, tasks=tasks)
        with submit(built, conf, store=store, executor="local") as run:
            run.wait_until_idle(60)
            assert run.status().components["gather"].late == 0
    results = {each: [numbers[-1]] for each, numbers in journal(name).results.items()}
    check(results, partitions, 10)


class Paused(Partitions):
    """Gives a part of each partition; the rest is unread."""

    def __init__(self, partitions: Sequence[Sequence[Event]], speeds: Sequence[int], part: float) -> None:
        super().__init__([its[: int(len(its) * part)] for its in partitions], speeds)
        self.whole = partitions

    def caught_up(self) -> bool:
        return not super().unread()

    def unread(self) -> dict[str, str | None] | None:
        return {str(each): None for each, at in self.next.items() if at < len(self.whole[each])}


def test_how_rows_come_to_windows_is_known() -> None:
    builder = TopologyBuilder("ways")
    builder.set_spout("events", Partitions([], []), 2)
    builder.set_bolt("alone", Pass(), 1).global_grouping("events")
    builder.set_bolt("spread", Pass(), 2).shuffle_grouping("alone")
    builder.set_bolt("both", Pass(), 1).global_grouping("events").global_grouping("alone")
    gather = builder.set_bolt("gather", Gather("x", TimeWindow(10, "at")), 2)
    for each in ("events", "alone", "spread", "both"):
        gather.fields_grouping(each, Fields("user"))
    built = builder.build()
    spout = frozenset({("events", "default")})
    assert paths_of(built, plan_execution(built)) == {
        "gather": {
            ("events", "default"): Way(spout, in_order=True),
            ("alone", "default"): Way(spout, in_order=True),
            ("spread", "default"): Way(spout, in_order=False),
            ("both", "default"): Way(spout, in_order=False),
        }
    }


def test_partitions_without_an_origin_of_their_own_share_one() -> None:
    origins = Origins(2, 1_500)
    assert [origins.of(each) for each in "abacdef"] == [2, 1502, 2, 3002, 3002, 3002, 3002]


def test_nothing_that_was_seen_before_a_recovery_counts_after_it() -> None:
    times = EventTimes([("events", 0)])
    times.hear_unread("events", 0, {0: None})
    times.hear_newest("gather", {("events", "default"): {0: 50}})
    times.settle(3)
    assert times.marks is not None and times.marks.newest == {("gather", ("events", "default")): {0: 50}}
    times.begin_anew()
    times.settle(5)
    assert times.marks is not None and (times.marks.unread, times.marks.newest) == ({}, {})


_clocks: dict[str, Any] = {}


class Slow(Pass):
    """Takes long for some tuples, so that others wait for the next rounds."""

    def __init__(self, name: str) -> None:
        self.name = name

    def execute(self, tup: Tuple, collector: Any) -> None:
        if self.name in _clocks and tup["n"] % 3 == 0:
            _clocks[self.name].now += 0.8
        super().execute(tup, collector)


def test_rows_that_wait_in_a_bolt_are_not_passed_by_the_watermark(tmp_path: Path) -> None:
    name, partitions = f"e{uuid.uuid4().hex[:8]}", backlog(count=400, partitions=1)
    builder = TopologyBuilder(name)
    builder.set_spout("events", Partitions(partitions, [60]))
    builder.set_bolt("slow", Slow(name), 3).shuffle_grouping("events")
    builder.set_bolt("gather", Gather(name, TimeWindow(10, "at")), 2).fields_grouping("slow", Fields("user"))
    collect = builder.set_bolt("collect", Collect(name)).global_grouping("gather")
    collect.global_grouping("gather", LATE_STREAM)
    stepped = SteppedState(builder.build(), tmp_path)
    _clocks[name] = stepped.clock
    assert stepped.driver._checkpoints is not None
    stepped.driver._checkpoints._interval_s = 1_000.0  # no windows fire while a checkpoint is awaited
    waited = 0
    try:
        for _ in range(400):
            stepped.step()
            waited += stepped.driver.status().components["slow"].waiting > 0
            if stepped.driver._idle is not None:
                break
        assert stepped.driver.status().components["gather"].late == 0
    finally:
        stepped.close()
    assert waited > 5
    results = journal(name).results
    wanted = expected(partitions, 10)
    assert "late" not in results and len(results) > 20
    assert {each: numbers for each, (numbers,) in results.items()} == {each: wanted[each] for each in results}
