"""The clock of a spout changes nothing else of it."""

from __future__ import annotations

from typing import Any

import pytest

from framework import Topology
from framework.errors import TopologyError
from framework.topology import (
    Fields,
    PartitionedSpout,
    PartitionPlanner,
    Spout,
    TransactionalSpout,
    TransactionalTopologyBuilder,
    TransactionAttempt,
)
from framework.topology.context import TopologyContext
from framework.topology.extra_partition_spout_wrapper import PlannerWrapper, SpoutWrapper
from framework.topology.planning_time_stream import CLOCK_PARTITION, CLOCK_STREAM, ClockPlanner, with_clock
from framework.topology.spouts import OnStream
from sinks import Count, MemoryBackend, OpaqueMapState, StateCommitter, WatermarkCommitter
from spouts import OpaqueMemoryTransactionalSpout


def test_every_call_of_a_planner_reaches_the_planner_below() -> None:
    """A method that is added to the port is added here."""
    asked = {name for name in vars(PartitionPlanner) if not name.startswith("_")}
    assert asked - {"shares_entries"} <= set(vars(PlannerWrapper))
    of_spouts = {name for name in (*vars(Spout), *vars(PartitionedSpout)) if not name.startswith("_")}
    assert of_spouts <= set(vars(SpoutWrapper))
    inner = OpaqueMemoryTransactionalSpout({0: [["a"]]}, Fields(word=str), 1)
    context = TopologyContext("t", "spout", 0, 1, {}, parallelisms={})
    planner = with_clock("spout", inner).planner({}, context)
    planner.records_max = 5
    assert isinstance(planner, ClockPlanner) and planner._planner.records_max == 5


def test_a_topology_without_event_time_has_no_clock() -> None:
    """So neither its plans nor its transactions cost more."""

    def built(*, timed: bool) -> Topology:
        spout = OpaqueMemoryTransactionalSpout({0: []}, Fields(word=str, at=int), 1)
        builder = TransactionalTopologyBuilder("words", "spout", spout)
        counts = StateCommitter(OpaqueMapState(MemoryBackend()), ["word"], {"n": Count()})
        builder.set_bolt("counts", counts).global_grouping("spout")
        if timed:
            watermark = WatermarkCommitter(OpaqueMapState(MemoryBackend()), "at")
            builder.set_bolt("watermark", watermark).global_grouping("spout").global_grouping("spout", CLOCK_STREAM)
        return builder.build()

    spout, timed = (built(timed=each).spout for each in (False, True))
    assert (type(spout.instance), set(spout.streams)) == (OpaqueMemoryTransactionalSpout, {"default"})
    assert (type(timed.instance), set(timed.streams)) != (OpaqueMemoryTransactionalSpout, {"default"})


def test_the_planning_time_is_a_part_of_the_plan() -> None:
    spout = OpaqueMemoryTransactionalSpout({0: [["a"]], 1: []}, Fields(word=str), 1)
    planner = with_clock("spout", spout).planner({}, TopologyContext("t", "spout", 0, 1, {}, parallelisms={}))
    spout.append(1, ["b"])
    empty = planner.empty_plan({})
    assert empty is not None and empty[CLOCK_PARTITION]["planned_at"] > 0
    assert empty[CLOCK_PARTITION]["new"] == ["0", "1"] and empty[CLOCK_PARTITION]["unread"]
    assert planner.record_count({CLOCK_PARTITION: empty[CLOCK_PARTITION]}) == 1
    assert planner.partitions() == ["0", "1"]
    plan = planner.plan(empty)
    assert plan is not None and plan[CLOCK_PARTITION]["new"] == [] and plan["1"]["next"] == 1
    assert not plan[CLOCK_PARTITION]["unread"] and not plan[CLOCK_PARTITION]["behind"]
    assert planner.plan(plan) is None


def test_the_clock_says_whether_records_were_left() -> None:
    spout = OpaqueMemoryTransactionalSpout({0: [["a"]] * 3, 1: []}, Fields(word=str), 5)
    planner = with_clock("spout", spout).planner({}, TopologyContext("t", "spout", 0, 1, {}, parallelisms={}))
    first = planner.plan({})
    assert first is not None
    assert first[CLOCK_PARTITION] | {"planned_at": 0} == {
        "planned_at": 0,
        "new": ["1"],
        "first": ["0"],
        "unread": False,
        "behind": False,
        "begun": [],
        "ended": ["0"],
    }
    spout.append(1, ["b"])
    spout.make_unavailable(1)
    spout.append(0, ["a"])
    second = planner.plan(first)
    assert second is not None
    clock = second[CLOCK_PARTITION]
    assert (clock["new"], clock["unread"], clock["behind"]) == (["1"], True, True)


def test_a_half_of_a_batch_says_which_partitions_it_leaves_unread() -> None:
    spout = OpaqueMemoryTransactionalSpout({0: [["a"]] * 2, 1: [["b"]] * 2, 2: [["c"]]}, Fields(word=str), 5)
    planner = with_clock("spout", spout).planner({}, TopologyContext("t", "spout", 0, 1, {}, parallelisms={}))
    whole = planner.plan({})
    assert whole is not None and whole[CLOCK_PARTITION]["first"] == ["0", "1", "2"]
    ranges, plan = planner.ranges, dict(whole)
    for emptied, read in (("2", ["0", "1"]), ("1", ["0"])):
        beginning = ranges.beginning(plan[emptied])
        assert beginning is not None
        plan = dict(ranges.narrowed(plan, {**plan, emptied: beginning}))
        clock = plan[CLOCK_PARTITION]
        assert (clock["unread"], clock["behind"], clock["first"]) == (True, True, read)
        assert clock["new"] == [each for each in ("0", "1", "2") if each not in read]
    rest = planner.plan(plan)
    assert rest is not None
    clock = rest[CLOCK_PARTITION]
    assert (clock["unread"], clock["behind"], clock["new"]) == (False, False, [])
    beginning = ranges.beginning(rest["1"])
    assert beginning is not None
    known = {**rest, CLOCK_PARTITION: {**clock, "first": []}}
    later = ranges.narrowed(known, {**known, "1": beginning})[CLOCK_PARTITION]
    assert (later["unread"], later["behind"], later["new"]) == (False, True, [])


def test_the_clock_names_partitions_until_they_are_read_to_their_end_once() -> None:
    spout = OpaqueMemoryTransactionalSpout({0: [["a"]] * 5, 1: [["b"]] * 3}, Fields(word=str), 2)
    planner = with_clock("spout", spout).planner({}, TopologyContext("t", "spout", 0, 1, {}, parallelisms={}))
    plans: list[Any] = [{}]
    found = []
    for _ in range(3):
        plans.append(planner.plan(plans[-1]))
        found.append((plans[-1][CLOCK_PARTITION]["begun"], plans[-1][CLOCK_PARTITION]["ended"]))
    assert found == [(["0", "1"], []), (["0"], ["1"]), ([], ["0"])]
    for _ in range(5):
        spout.append(0, ["a"])
    later = planner.plan(plans[-1])
    assert later is not None and (later[CLOCK_PARTITION]["begun"], later[CLOCK_PARTITION]["ended"]) == ([], [])
    for part, begun in ((planner.ranges.beginning(plans[2]["1"]), ["0", "1"]), (plans[2]["1"], ["0"])):
        assert part is not None
        clock = planner.ranges.narrowed(plans[2], {**plans[2], "1": part})[CLOCK_PARTITION]
        assert (clock["begun"], clock["ended"]) == (begun, [] if "1" in begun else ["1"])
    half = planner.ranges.split("0", plans[1]["0"])
    assert half is not None
    assert planner.ranges.narrowed(plans[1], {**plans[1], "0": half[0]})[CLOCK_PARTITION]["begun"] == ["0", "1"]
    unread = planner.ranges.beginning(plans[1]["1"])
    assert unread is not None
    clock = planner.ranges.narrowed(plans[1], {**plans[1], "1": unread})[CLOCK_PARTITION]
    assert (clock["begun"], clock["new"], clock["unread"]) == (["0"], ["1"], True)


def test_plans_and_outlines_of_older_versions_stay_readable() -> None:
    """Plans had no ``begun`` and no ``ended``, and the clock stream no column ``begun``."""
    spout = OpaqueMemoryTransactionalSpout({0: [["a"]] * 5}, Fields(word=str), 2)
    clocked, context = with_clock("spout", spout), TopologyContext("t", "spout", 0, 1, {}, parallelisms={})
    planner = clocked.planner({}, context)
    plan = dict(planner.plan({}) or {})
    plan[CLOCK_PARTITION] = {name: plan[CLOCK_PARTITION][name] for name in ("planned_at", "new", "unread", "behind")}
    later = planner.plan(plan)
    assert later is not None and later[CLOCK_PARTITION]["begun"] == []
    read = clocked.reader({}, context).read_all(TransactionAttempt(1, 1), {CLOCK_PARTITION: plan[CLOCK_PARTITION]})
    (rows,) = (each for each in read if isinstance(each, OnStream))
    assert rows.batch.to_pylist()[0]["begun"] == []
    builder = TransactionalTopologyBuilder("t", "spout", OpaqueMemoryTransactionalSpout({0: []}, Fields(at=int), 2))
    watermark = builder.set_bolt("watermark", WatermarkCommitter(OpaqueMapState(MemoryBackend()), "at"))
    watermark.global_grouping("spout").global_grouping("spout", CLOCK_STREAM)
    outlined: Any = builder.build().outline()["components"]
    assert outlined["spout"]["streams"]["clock"] == "Fields(planned_at: int64, unread: bool, behind: bool)"


class General(TransactionalSpout):
    def coordinator(self, conf: Any, context: Any) -> Any:
        raise NotImplementedError

    def emitter(self, conf: Any, context: Any) -> Any:
        raise NotImplementedError


def test_a_spout_without_partitions_has_no_clock() -> None:
    with pytest.raises(TopologyError, match="has no clock stream"):
        with_clock("spout", General())
    assert CLOCK_STREAM == "clock"
