"""Bounds of reading: where a new topology begins, and the end of a bounded one, which is fixed
once."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.errors import ConfigError, DataLossError, RetryableError
from spouts import KafkaSpout, OpaqueKafkaTransactionalSpout, TextCodec
from spouts.kafka.planning import log_offsets_cache, lost_records
from spouts.kafka.planning.planner import KafkaPlanner
from spouts.kafka.start_end_options import Bounds, Instant, checked_bounds
from tests.kit.targets import examples
from tests.spouts.kafka.test_planner import PARTITIONS, WHAT, FakeLogs, change, planner_over

Plan = Mapping[str, Any]
LATEST = Bounds("latest")
BOTH = ("earliest", "latest")


def sure(plan: Plan | None) -> Plan:
    """A plan as the next leader reads it."""
    assert plan is not None
    return dict(json.loads(json.dumps(plan)))


def filled(partitions: list[str], records: int = 12) -> FakeLogs:
    logs = FakeLogs(partitions)
    for log in logs.logs.values():
        log[1] = records
    return logs


def read_to_end(logs: FakeLogs, previous: Plan, **options: Any) -> Plan:
    """By a new planner for each plan."""
    while (plan := planner_over(logs, **options).plan(previous)) is not None:
        previous = sure(plan)
    return previous


def spans(plan: Plan) -> dict[str, tuple[int, int]]:
    return {each: (meta["first_offset"], meta["next_offset"]) for each, meta in plan.items()}


def lag_of(made: KafkaPlanner, plan: Plan) -> int | None:
    made.plan(plan)
    return made.lag(plan)


# --- what may be said -----------------------------------------------------------------------------


NEW_YEAR = datetime.datetime(2025, 1, 1, tzinfo=datetime.UTC)
NEW_YEAR_MS = 1_735_689_600_000


@pytest.mark.parametrize(
    ("said", "bounds"),
    [
        ("latest", Bounds("latest")),
        (NEW_YEAR, Bounds(Instant(NEW_YEAR_MS))),
        (NEW_YEAR_MS, Bounds(Instant(NEW_YEAR_MS))),
        ("2025-01-01T01:00:00+01:00", Bounds(Instant(NEW_YEAR_MS))),
        ({"a": "latest", "b": NEW_YEAR}, Bounds(None, {"a": "latest", "b": Instant(NEW_YEAR_MS)})),
        ({"a/0": 7, "a/1": "latest", "b": "latest"}, Bounds(None, {"b": "latest"}, {"a/0": 7, "a/1": "latest"})),
        ({"a": {0: 7, "1": 8}, ("b", 0): 9}, Bounds(None, {}, {"a/0": 7, "a/1": 8, "b/0": 9})),
    ],
)
def test_what_bounds_may_say(said: Any, bounds: Bounds) -> None:
    assert checked_bounds("end", said, ["a", "b"], words=("latest",)) == bounds


def test_the_partitions_of_an_only_topic_need_no_name() -> None:
    assert checked_bounds("start", {0: 7, 1: "earliest"}, ["a"], words=BOTH) == Bounds(
        None, {}, {"a/0": 7, "a/1": "earliest"}
    )


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("earliest", "end must be 'latest', milliseconds since 1970, or a datetime with a zone, not 'earliest'"),
        ("2025-01-01", "a datetime with a zone"),
        (datetime.datetime(2025, 1, 1), "a datetime with a zone"),
        (-1, "milliseconds"),
        (True, "milliseconds"),
        ({}, "end is an empty mapping"),
        ({"a": "latest"}, "end says nothing of topic 'b'"),
        ({"a": "latest", "b": "latest", "c": "latest"}, "end names topic 'c', and the spout reads a, b"),
        ({"a/x": 1}, "end names partition 'x'"),
        ({0: 1}, "there are several topics: say 'topic/0'"),
        ({"a/0": -1}, "is offset -1"),
        ({"a/0": True}, "an offset, milliseconds"),
        ({None: 1}, "end names None"),
        ({("a", -1): 1}, "end names partition -1"),
    ],
)
def test_what_bounds_may_not_say(said: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        OpaqueKafkaTransactionalSpout(["a", "b"], bootstrap_servers="nowhere:9092", end=said)


def test_the_spout_of_core_topologies_reads_a_start_as_the_others_do() -> None:
    for said in (NEW_YEAR, NEW_YEAR_MS, "2025-01-01T01:00:00+01:00"):
        assert KafkaSpout(["a"], start=said)._start == Instant(NEW_YEAR_MS)
    with pytest.raises(ConfigError, match="start must be 'earliest', 'latest', milliseconds since 1970, or a datetime"):
        KafkaSpout(["a"], start="2025-01-01T01:00:00")


@pytest.mark.parametrize("bound", [{"end": "latest"}, {"start_group": "billing"}])
def test_the_spout_of_core_topologies_has_no_bounds(bound: Any) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(bound))}= is for the spouts of transactional topologies"):
        KafkaSpout(["a"], bootstrap_servers="nowhere:9092", **bound)


# --- the end --------------------------------------------------------------------------------------


def test_the_end_is_where_the_logs_ended_when_the_first_plan_was_made() -> None:
    logs = filled(["a/0", "a/1"])
    first = sure(planner_over(logs, 10, end=LATEST).plan({}))
    logs.logs["a/0"][1] = 40
    logs.logs["a/2"] = [0, 9, 0]
    made = planner_over(logs, end=LATEST)
    assert not made.finished(first)
    last = read_to_end(logs, first, end=LATEST)
    assert {each: meta["next_offset"] for each, meta in last.items()} == {"a/0": 12, "a/1": 12}
    assert made.finished(last) and lag_of(made, last) == 0
    assert set(made.progress(last, [])) == {"a/0", "a/1"}
    assert made.backlog(last).records == 0


def test_an_empty_source_is_finished_by_the_plan_that_says_so() -> None:
    logs = FakeLogs(["a/0"])
    made = planner_over(logs, end=LATEST)
    plan = sure(made.plan({}))
    assert spans(plan) == {"a/0": (0, 0)} and made.finished(plan)
    logs.logs["a/0"][1] = 5
    assert planner_over(logs, end=LATEST).plan(plan) is None


def test_nothing_is_lost_of_a_log_that_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever becomes of it, while another one is read."""
    monkeypatch.setattr(lost_records, "BELIEVED_AFTER_S", 0.0)
    monkeypatch.setattr(log_offsets_cache, "METADATA_AGE_MAX_S", -1.0)
    logs = filled(["a/0", "b/0"])
    logs.logs["a/0"][1] = 4
    options: Any = {"end": LATEST, "skips_lost_data": False}
    plan = sure(planner_over(logs, 10, **options).plan({}))
    assert spans(plan)["a/0"] == (0, 4)
    logs.ids["a"] = "another"
    logs.logs["a/0"] = [20, 30, 0]
    made = planner_over(logs, 1, **options)
    made.lost(plan)  # it looks at everything
    for _ in range(6):
        plan = sure(made.plan(plan))
        assert spans(plan)["a/0"] == (4, 4) and "gap" not in plan["a/0"]
    assert made.finished(plan)


def test_lost_records_up_to_the_end_are_lost_and_those_after_it_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_offsets_cache, "METADATA_AGE_MAX_S", -1.0)
    logs = filled(["a/0"])
    plan = sure(planner_over(logs, 5, end=LATEST).plan({}))
    logs.logs["a/0"] = [20, 30, 0]
    with pytest.raises(DataLossError, match="no longer holds offsets 5 to 12"):
        planner_over(logs, end=LATEST, skips_lost_data=False).plan(plan)
    last = sure(planner_over(logs, end=LATEST).plan(plan))
    assert last["a/0"]["lost_records"] == 7 and planner_over(logs, end=LATEST).finished(last)


def test_a_topic_that_was_made_again_is_read_to_where_it_ends_then() -> None:
    logs = filled(["a/0"])
    plan = sure(planner_over(logs, 5, end=LATEST).plan({}))
    logs.ids["a"], logs.logs["a/0"] = "another", [0, 30, 0]
    plan = sure(planner_over(logs, 5, end=LATEST).plan(plan))
    assert plan["a/0"]["end_offset"] == 30
    logs.logs["a/0"][1] = 50
    assert read_to_end(logs, plan, end=LATEST)["a/0"]["next_offset"] == 30


def test_a_log_that_is_cut_before_the_end_ends_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_records, "BELIEVED_AFTER_S", 0.0)
    logs = filled(["a/0"])
    plan = sure(planner_over(logs, 8, end=LATEST).plan({}))
    logs.logs["a/0"][1] = 6
    plan = sure(planner_over(logs, end=LATEST).plan(plan))
    assert planner_over(logs, end=LATEST).finished(plan)
    logs.logs["a/0"][1] = 20
    assert planner_over(logs, end=LATEST).plan(plan) is None


def test_a_topic_that_is_gone_is_a_loss_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    logs = filled(["a/0", "b/0"])
    plan = sure(planner_over(logs, 8, end=LATEST).plan({}))
    del logs.ids["a"], logs.logs["a/0"]
    monkeypatch.setattr(lost_records, "BELIEVED_AFTER_S", 0.0)
    last = read_to_end(logs, plan, end=LATEST)
    assert last["a/0"]["lost_records"] == 8
    assert planner_over(logs, end=LATEST).finished(last)


def test_offsets_may_be_ahead_of_the_log_and_are_waited_for() -> None:
    logs = filled(["a/0", "a/1"], 5)
    bounds = Bounds(None, {}, {"a/0": 8, "a/1": 3})
    plan = read_to_end(logs, {}, end=bounds)
    assert spans(plan) == {"a/0": (0, 5), "a/1": (0, 3)}
    made = planner_over(logs, end=bounds)
    assert not made.finished(plan)
    logs.logs["a/0"][1] = 20
    plan = read_to_end(logs, plan, end=bounds)
    assert spans(plan)["a/0"] == (5, 8) and made.finished(plan)


def test_an_end_that_says_nothing_of_a_partition_is_refused() -> None:
    with pytest.raises(ConfigError, match="end says nothing of partition a/1: give it an offset, 'latest'"):
        planner_over(filled(["a/0", "a/1"]), end=Bounds(None, {}, {"a/0": 8})).plan({})


def test_a_time_to_come_is_refused() -> None:
    soon = Bounds(Instant(int(time.time() * 1000) + 3_600_000))
    with pytest.raises(ConfigError, match="s in the future for partition a/0"):
        planner_over(filled(["a/0"]), end=soon).plan({})


def test_topics_that_are_read_first_are_waited_for_to_their_end_only() -> None:
    logs = filled(["a/0", "b/0"])
    options: Any = {"end": Bounds(None, {}, {"a/0": 7, "b/0": 5}), "read_first": ("b",)}
    first = sure(planner_over(logs, 3, **options).plan({}))
    assert spans(first) == {"a/0": (0, 0), "b/0": (0, 3)}
    last = read_to_end(logs, first, **options)
    assert {each: meta["next_offset"] for each, meta in last.items()} == {"a/0": 7, "b/0": 5}
    later: Any = {"end": LATEST, "read_first": ("b",)}
    plan = sure(planner_over(logs, 3, **later).plan(last))
    assert spans(plan) == {"a/0": (7, 7), "b/0": (5, 8)}  # another end: the table goes first again
    assert planner_over(logs, **later).finished(read_to_end(logs, plan, **later))


def test_a_new_partition_that_does_not_answer_is_waited_for_when_the_end_is_fixed_again() -> None:
    logs = filled(["a/0"])
    plan = read_to_end(logs, {}, end=Bounds(None, {}, {"a/0": 5}))
    logs.logs["a/1"] = [0, 7, 0]
    made = planner_over(logs, end=LATEST)
    answers, logs.beginnings = logs.beginnings, lambda partitions, patient: {}  # type: ignore[method-assign]
    with pytest.raises(RetryableError, match="a partition's leader has moved"):
        made.plan(plan)
    logs.beginnings = answers  # type: ignore[method-assign]
    assert spans(sure(made.plan(plan))) == {"a/0": (5, 12), "a/1": (0, 7)}


def test_the_first_plan_waits_for_every_partition() -> None:
    logs = filled(["a/0", "a/1"])
    logs.leaderless.add("a/1")
    with pytest.raises(RetryableError, match="partition a/1 has no leader"):
        planner_over(logs, end=LATEST).plan({})


def test_another_end_is_gone_on_to_and_new_partitions_with_it() -> None:
    logs = filled(["a/0"])
    at = {number: Bounds(None, {"a": Instant(number)}) for number in (1, 2)}
    logs.times = {1: {"a/0": 5}, 2: {"a/0": 9, "a/1": 3}}
    plan = read_to_end(logs, {}, end=at[1])
    assert planner_over(logs, end=at[1]).finished(plan)
    logs.logs["a/1"] = [0, 7, 0]
    assert planner_over(logs, end=at[1]).plan(plan) is None
    assert not planner_over(logs, end=at[2]).finished(plan)
    later = read_to_end(logs, plan, end=at[2])
    assert {each: meta["next_offset"] for each, meta in later.items()} == {"a/0": 9, "a/1": 3}
    assert planner_over(logs, end=at[2]).finished(later)


def test_without_an_end_it_goes_on_and_forgets_the_one_it_had() -> None:
    logs = filled(["a/0"])
    plan = read_to_end(logs, {}, end=LATEST)
    free = sure(planner_over(logs).plan(plan))
    assert spans(free) == {"a/0": (12, 12)} and "end_offset" not in free["a/0"]
    logs.logs["a/0"][1], logs.logs["a/1"] = 20, [0, 5, 0]
    assert spans(read_to_end(logs, free))["a/1"] == (0, 5)
    assert spans(read_to_end(logs, free, end=LATEST)) == {"a/0": (12, 20), "a/1": (0, 5)}


def test_ranges_that_are_cut_and_joined_keep_the_end() -> None:
    logs = filled(["a/0"], 30)
    made = planner_over(logs, 10, end=LATEST)
    first = sure(made.plan({}))
    second = sure(made.plan(first))
    halves = made.ranges.split("a/0", second["a/0"])
    assert halves is not None
    joined = made.ranges.joined(first["a/0"], second["a/0"], after=False)
    for meta in (*halves, joined, made.ranges.beginning(second["a/0"])):
        assert meta is not None and meta["end_offset"] == 30
        assert read_to_end(logs, {"a/0": meta}, end=LATEST)["a/0"]["next_offset"] == 30


# --- a first plan that is planned afresh ----------------------------------------------------------


@pytest.mark.parametrize("knows", ["the same planner", "a new leader"])
def test_a_first_plan_that_is_planned_afresh_has_the_same_start_and_end(knows: str) -> None:
    """An opaque spout plans it afresh, after nothing."""
    logs = filled(["a/0", "a/1"])
    options: Any = {"start": LATEST, "end": Bounds(None, {}, {"a/0": "latest", "a/1": 20})}
    made = planner_over(logs, **options)
    first = sure(made.plan({}))
    for log in logs.logs.values():
        log[1] = 40
    logs.logs["a/2"] = [0, 7, 0]
    if knows == "a new leader":
        made = planner_over(logs, **options)
        made.resume(first)
    again = sure(made.plan({}))
    assert spans(again) == {"a/0": (12, 12), "a/1": (12, 20)}
    assert {each: meta["end_offset"] for each, meta in again.items()} == {"a/0": 12, "a/1": 20}


def test_a_first_plan_that_is_planned_afresh_after_a_loss_says_what_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_offsets_cache, "METADATA_AGE_MAX_S", -1.0)
    logs = filled(["a/0"])
    options: Any = {"start": Bounds(None, {}, {"a/0": 3}), "end": LATEST}
    first = sure(planner_over(logs, 2, **options).plan({}))
    logs.logs["a/0"] = [5, 40, 0]
    made = planner_over(logs, skips_lost_data=False, **options)
    made.resume(first)
    with pytest.raises(DataLossError, match="no longer holds offsets 3 to 5"):
        made.plan({})
    made = planner_over(logs, **options)
    made.resume(first)
    again = sure(made.plan({}))
    assert (spans(again), again["a/0"]["lost_records"]) == ({"a/0": (5, 12)}, 2)
    made = planner_over(logs, **options)
    made.resume(again)
    assert sure(made.plan({})) == again


# --- the start ------------------------------------------------------------------------------------


def test_a_start_by_offsets_and_by_topic() -> None:
    logs = filled(["a/0", "a/1", "b/0"])
    logs.times = {5: {"b/0": 7}}
    start = Bounds(None, {"b": Instant(5)}, {"a/0": 4, "a/1": "latest"})
    assert spans(sure(planner_over(logs, start=start).plan({}))) == {"a/0": (4, 12), "a/1": (12, 12), "b/0": (7, 12)}


def test_a_start_that_the_log_does_not_have() -> None:
    logs = filled(["a/0"])
    logs.logs["a/0"][0] = 3
    with pytest.raises(ConfigError, match="start is offset 13 of partition a/0, whose log ends at offset 12"):
        planner_over(logs, start=Bounds(None, {}, {"a/0": 13})).plan({})
    before = Bounds(None, {}, {"a/0": 1})
    with pytest.raises(DataLossError, match="no longer holds offsets 1 to 3"):
        planner_over(logs, start=before, skips_lost_data=False).plan({})
    plan = sure(planner_over(logs, start=before).plan({}))
    assert (spans(plan), plan["a/0"]["lost_records"]) == ({"a/0": (3, 12)}, 2)
    with pytest.raises(ConfigError, match="start says nothing of partition a/0"):
        planner_over(logs, start=Bounds(None, {}, {"a/1": 1})).plan({})


def test_a_check_makes_the_first_plan_only_where_reading_has_bounds() -> None:
    logs = filled(["a/0"])
    logs.beginnings = None  # type: ignore[assignment] # a plan would look them up
    planner_over(logs).check_first_plan(lambda: False)
    for bounds in ({"start": Bounds(None, {}, {"a/0": 13})}, {"end": Bounds(None, {}, {"a/1": 5})}):
        with pytest.raises(ConfigError):
            planner_over(filled(["a/0"]), **bounds).check_first_plan(lambda: False)
        planner_over(filled(["a/0"]), **bounds).check_first_plan(lambda: True)


@pytest.mark.parametrize("name", ["start", "end"])
def test_an_offset_of_a_partition_that_does_not_exist_is_refused(name: str) -> None:
    ahead = Bounds(None, {}, {"a/0": 1, "a/1": 1, "a/7": 0})
    assert planner_over(filled(["a/0", "a/1"]), **{name: ahead}).plan({})
    wrong = Bounds(None, {}, {"a/0": 1, "a/1": 1, "a/7": 2})
    with pytest.raises(ConfigError, match=f"{name} is offset 2 of partition a/7, which does not exist: correct it"):
        planner_over(filled(["a/0", "a/1"]), **{name: wrong}).plan({})


def test_a_bound_may_name_a_partition_that_is_gone() -> None:
    """A later start has the same mapping."""
    logs = filled(["a/0", "a/1"])
    ends = Bounds(None, {}, {"a/0": 3, "a/1": 3})
    first = sure(planner_over(logs, end=ends).plan({}))
    del logs.logs["a/1"]
    later = Bounds(None, {}, {"a/0": 4, "a/1": 4})
    assert spans(sure(planner_over(logs, end=later).plan(first)))["a/0"] == (3, 4)


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (NEW_YEAR, NEW_YEAR - datetime.timedelta(days=1)),
        ({"a": NEW_YEAR}, {"a": NEW_YEAR_MS - 1}),
        ({"a/0": 7, "a/1": 2}, {"a/0": 6, "a/1": 9}),
    ],
)
def test_an_end_before_the_start_is_refused(start: Any, end: Any) -> None:
    with pytest.raises(ConfigError, match=r"end.* is before start"):
        OpaqueKafkaTransactionalSpout(["a"], bootstrap_servers="nowhere:9092", start=start, end=end)
    OpaqueKafkaTransactionalSpout(["a"], bootstrap_servers="nowhere:9092", start=start, end=start)


@pytest.mark.parametrize("start", [LATEST, Bounds(None, {}, {"a/0": 7, "a/1": 0}), Bounds("earliest")])
def test_an_end_before_the_offset_that_a_start_selects_is_refused(start: Bounds) -> None:
    logs = filled(["a/0", "a/1"])
    logs.logs["a/0"][0] = 6
    with pytest.raises(ConfigError, match=r"end is offset 5 of partition a/0, before its start, offset \d+: "):
        planner_over(logs, start=start, end=Bounds(None, {}, {"a/0": 5, "a/1": 12})).check_first_plan(lambda: False)
    plan = sure(planner_over(logs, start=start, end=Bounds(None, {}, {"a/0": 12, "a/1": 12})).plan({}))
    planner_over(logs, start=start, end=Bounds(None, {}, {"a/0": 5, "a/1": 5})).plan(plan)  # another end, later


def test_a_time_that_selects_an_offset_before_the_start_leaves_nothing_to_read() -> None:
    logs = filled(["a/0"])
    logs.times = {5: {"a/0": 3}}
    plan = sure(planner_over(logs, start=LATEST, end=Bounds(Instant(5))).plan({}))
    assert spans(plan) == {"a/0": (12, 12)} and planner_over(logs, start=LATEST, end=Bounds(Instant(5))).finished(plan)


def test_tables_need_no_start() -> None:
    OpaqueKafkaTransactionalSpout(
        streams={"a": TextCodec(), "b": TextCodec()},
        bootstrap_servers="nowhere:9092",
        read_first=["b"],
        start={"a/0": 3},
    )
    plan = sure(planner_over(filled(["a/0", "b/0"]), start=Bounds(None, {}, {"a/0": 3}), read_first=("b",)).plan({}))
    assert spans(plan) == {"a/0": (3, 3), "b/0": (0, 12)}


# --- whatever happens -----------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.sampled_from([*WHAT, "new leader"]), st.integers(0, 7), st.integers(1, 40)), max_size=30),
    st.sampled_from([3, 20, 1_000]),
    st.sampled_from([(), ("b",)]),
)
@settings(max_examples=examples(300), deadline=None)
def test_whatever_happens_to_the_logs_nothing_after_the_end_is_read_and_it_is_reached(
    changes: list[tuple[str, int, int]], records_max: int, read_first: tuple[str, ...]
) -> None:
    """Also if every plan is dropped once and made again, as an opaque one is, by another leader."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lost_records, "BELIEVED_AFTER_S", 0.0)
        patch.setattr(log_offsets_cache, "METADATA_AGE_MAX_S", -1.0)
        logs = filled(PARTITIONS)
        options: Any = {"end": LATEST, "read_first": read_first}
        ends = {each: (12, logs.ids[each[0]]) for each in PARTITIONS}  # where each ends, and of which topic
        previous: Plan = {}
        stored = sure(planner_over(logs, records_max, **options).plan(previous))
        for what, which, number in changes:
            if what != "new leader":
                change(logs, what, sorted(logs.logs)[which % len(logs.logs)], number)
            made = planner_over(logs, records_max, **options)
            made.resume(stored)
            try:
                plan = made.plan(previous)
            except RetryableError:
                continue
            if plan is None:
                continue
            stored = sure(plan)
            assert set(stored) == set(PARTITIONS)
            for each, meta in stored.items():
                end, topic_id = ends[each]
                if meta.get("topic_id") != topic_id:  # made again: it ends where it ended when that was seen
                    ends[each] = meta["end_offset"], str(meta["topic_id"])
                else:
                    assert meta["end_offset"] <= end
                    assert meta["next_offset"] <= max(end, meta["first_offset"])
            if which % 2:
                previous = stored
        logs.leaderless.clear()
        last = read_to_end(logs, previous or stored, records_max=records_max, **options)
        assert planner_over(logs, end=LATEST).finished(last)
        assert planner_over(logs, end=LATEST).lag(last) is None  # it has asked nobody yet
