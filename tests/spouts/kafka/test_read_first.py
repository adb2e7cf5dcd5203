"""Topics that are read first: nothing of the others is planned until they are read to where they
ended at the first start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.errors import ConfigError, RetryableError
from spouts import KafkaTransactionalSpout
from spouts.kafka.partition_plan_entries import topic_and_number
from spouts.kafka.planning import log_offsets_cache, lost_records
from spouts.kafka.planning.planner import KafkaPlanner
from spouts.kafka.start_end_options import Bound, Bounds
from tests.kit.targets import examples
from tests.kit.waiting import wait_for
from tests.spouts.kafka.test_planner import PARTITIONS, WHAT, FakeLogs, change, planned, planner_over

Plan = Mapping[str, Any]


def with_tables(logs: FakeLogs, records_max: int = 10, start: Bound = "earliest") -> KafkaPlanner:
    return planner_over(logs, records_max, read_first=("b",), start=Bounds(start))


def taken(plan: Plan | None, topic: str) -> int:
    return sum(
        meta["next_offset"] - meta["first_offset"]
        for partition, meta in (plan or {}).items()
        if topic_and_number(partition)[0] == topic
    )


def logs_of(a: int, b: int) -> FakeLogs:
    """One partition each of a stream, ``a``, and a table, ``b``, with so many records."""
    logs = FakeLogs(["a/0", "b/0"])
    logs.logs["a/0"][1], logs.logs["b/0"][1] = a, b
    return logs


def sure(plan: Plan | None) -> Plan:
    """A plan as the next leader reads it."""
    assert plan is not None
    return dict(json.loads(json.dumps(plan)))


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_tables_are_read_to_their_ends_before_the_others(start: Bound) -> None:
    """Also by another planner, which only knows the plans; also while more is written."""
    logs = FakeLogs(PARTITIONS)
    for partition in PARTITIONS:
        logs.logs[partition][:2] = [1, 8]
    previous: Plan = {}
    read = {"a": 0, "b": 0}
    for number in range(20):
        plan = with_tables(logs, start=start).plan(previous)
        if plan is None:
            break
        before = dict(read)
        for topic in read:
            read[topic] += taken(plan, topic)
        if read["a"] > before["a"]:
            assert before["b"] >= 28  # all that the tables held at first
        logs.logs["b/1"][1] += 1 if number < 8 else 0
        logs.logs["a/1"][1] += 1 if number < 8 else 0
        previous = sure(plan)
        if number == 1:
            previous = with_tables(logs).empty_plan(previous) or {}
    written = logs.logs["b/1"][1] - 8
    assert read == {"a": (28 if start == "earliest" else 0) + written, "b": 28 + written}
    assert not any(meta["next_offset"] < meta.get("read_first_until", 0) for meta in previous.values())


@given(
    st.lists(st.tuples(st.sampled_from(WHAT), st.integers(0, 7), st.integers(1, 40)), max_size=30),
    st.sampled_from([3, 20, 1_000]),
)
@settings(max_examples=examples(300), deadline=None)
def test_whatever_happens_to_the_logs_the_others_wait_and_do_not_wait_for_ever(
    changes: list[tuple[str, int, int]], records_max: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lost_records, "BELIEVED_AFTER_S", 0.0)
        patch.setattr(log_offsets_cache, "METADATA_AGE_MAX_S", -1.0)
        logs = FakeLogs(PARTITIONS)
        for partition in PARTITIONS:
            logs.logs[partition][1] = 12
        previous: Plan = sure(with_tables(logs, records_max).plan({}))
        for what, which, number in changes:
            change(logs, what, sorted(logs.logs)[which % len(logs.logs)], number)
            plan = planned(with_tables(logs, records_max), previous)
            if taken(plan, "a"):
                for partition, meta in previous.items():
                    begin, end = logs.logs[partition][:2]  # what is before ``begin`` is lost
                    reached = max(meta["next_offset"], begin)
                    assert reached >= min(meta.get("read_first_until", 0), end), partition
            previous = sure(plan) if plan is not None else previous
        logs.leaderless.clear()
        made = with_tables(logs, records_max)
        while (plan := made.plan(previous)) is not None:
            previous = sure(plan)
        read = {each: meta["next_offset"] for each, meta in previous.items()}
        assert {each: read.get(each, 0) for each in logs.logs} == {each: log[1] for each, log in logs.logs.items()}


def test_tables_that_are_empty_or_were_made_again_hold_nothing_up() -> None:
    logs = FakeLogs(PARTITIONS)
    logs.logs["a/0"][1] = 5
    assert taken(with_tables(logs).plan({}), "a") == 5
    logs.logs["b/0"][:2] = [7, 7]  # retention took all
    assert taken(with_tables(logs).plan({}), "a") == 5
    logs.logs["b/0"][1] = 50
    plan = with_tables(logs).plan({})
    assert (taken(plan, "a"), taken(plan, "b")) == (0, 10)
    logs.ids["b"], logs.logs["b/0"][:2] = "another", [0, 0]
    assert taken(with_tables(logs).plan(sure(plan)), "a") == 5


def test_a_table_that_was_made_again_and_filled_is_read_to_its_new_end() -> None:
    logs = logs_of(5, 12)
    plan = with_tables(logs).plan({})
    logs.ids["b"], logs.logs["b/0"][1] = "another", 25
    read = []
    for _ in range(4):
        plan = with_tables(logs).plan(sure(plan))
        read.append((taken(plan, "a"), taken(plan, "b")))
    assert read[:3] == [(0, 10), (0, 10), (0, 5)] and read[3] == (5, 0)


def test_a_table_that_was_made_again_and_has_no_leader_is_waited_for() -> None:
    logs = FakeLogs(["a/0", "b/0", "b/1"])
    for log in logs.logs.values():
        log[1] = 12
    plan = sure(with_tables(logs).plan({}))
    logs.ids["b"] = "another"
    logs.leaderless.add("b/0")
    plan = sure(with_tables(logs, 100).plan(plan))
    assert (taken(plan, "a"), taken(plan, "b")) == (0, 12)  # of b/1
    logs.leaderless.clear()
    plan = sure(with_tables(logs, 100).plan(plan))
    assert (taken(plan, "a"), taken(plan, "b")) == (0, 12)
    assert taken(with_tables(logs, 100).plan(plan), "a") == 12


def test_what_comes_later_is_not_waited_for() -> None:
    """Records and partitions of a table that came after the first start are read with the
    others."""
    logs = logs_of(30, 12)
    plan = with_tables(logs).plan({})
    logs.logs["b/0"][1], logs.logs["b/1"] = 13, [0, 40, 0]
    while plan is not None and plan["b/0"]["next_offset"] < 12:
        plan = with_tables(logs).plan(sure(plan))
        assert taken(plan, "a") == 0
    plan = with_tables(logs).plan(sure(plan))
    assert taken(plan, "a") > 0 and taken(plan, "b") > 0


def test_a_broker_that_reports_less_for_a_moment_does_not_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    logs = logs_of(5, 12)
    plan = with_tables(logs).plan({})
    made = with_tables(logs)
    logs.logs["b/0"][1] = 10  # all of it is read
    for _ in range(3):
        assert made.plan(sure(plan)) is None
    monkeypatch.setattr(lost_records, "BELIEVED_AFTER_S", 0.0)  # it was not for a moment
    last = made.plan(sure(plan))
    assert taken(last, "a") == 5
    assert "read_first_until" not in sure(last)["b/0"]


def test_a_table_that_rests_before_its_end_is_waited_for() -> None:
    """Its log is short for a moment, while another partition of the table is read."""
    logs = FakeLogs(["a/0", "b/0", "b/1"])
    for log in logs.logs.values():
        log[1] = 12
    made = with_tables(logs)
    first = sure(made.plan({}))
    logs.logs["b/0"][1] = 5
    second = sure(made.plan(first))
    assert second["b/0"]["first_offset"] == second["b/0"]["next_offset"] == 5
    assert second["b/1"]["next_offset"] == 12
    assert with_tables(logs).plan(second) is None  # nor does a new leader forget
    logs.logs["b/0"][1] = 12
    third = sure(made.plan(second))
    assert (taken(third, "a"), taken(third, "b")) == (0, 7)


def test_a_table_that_stays_short_is_believed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    logs = logs_of(5, 12)
    plan = sure(with_tables(logs).plan({}))
    logs.logs["b/0"][1] = 10
    monkeypatch.setattr(lost_records, "BELIEVED_AFTER_S", 0.1)
    made = with_tables(logs)
    assert made.plan(plan) is None
    wait_for(lambda: taken(made.plan(plan), "a") == 5)


def test_a_table_without_a_leader_is_waited_for_and_named() -> None:
    logs = logs_of(5, 12)
    plan = sure(with_tables(logs).plan({}))
    logs.leaderless.add("b/0")
    with pytest.raises(RetryableError, match="partition b/0 is read first, and has no leader"):
        with_tables(logs).plan(plan)
    logs.leaderless.clear()
    assert taken(with_tables(logs).plan(plan), "b") == 2


def test_a_table_that_is_gone_is_a_loss_also_to_a_new_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    logs = logs_of(5, 12)
    plan = sure(with_tables(logs).plan({}))
    del logs.ids["b"], logs.logs["b/0"]
    monkeypatch.setattr(lost_records, "BELIEVED_AFTER_S", 0.0)
    made = planner_over(logs, read_first=("b",))
    last = sure(made.plan(plan))
    assert last["b/0"]["gap"] == {"reason": "deleted", "from_offset": 10, "to_offset": 12}
    assert taken(last, "a") == 5 or taken(made.plan(last), "a") == 5


def test_without_the_option_nothing_waits_any_more() -> None:
    logs = logs_of(5, 12)
    plan = sure(with_tables(logs).plan({}))
    last = planner_over(logs).plan(plan)
    assert (taken(last, "a"), taken(last, "b")) == (5, 2)


def test_a_topology_that_has_begun_without_tables_does_not_wait_for_them() -> None:
    logs = logs_of(5, 0)
    plan = planner_over(logs).plan({}) or {}
    logs.logs["a/0"][1], logs.logs["b/0"][1] = 9, 50
    assert taken(with_tables(logs).plan(plan), "a") == 4


def test_ranges_that_are_cut_and_joined_keep_the_wait() -> None:
    """As undo, and the search for a record that is refused, cut and join them."""
    logs = logs_of(5, 30)
    made = with_tables(logs)
    first = sure(made.plan({}))
    second = sure(made.plan(first))

    def holds(meta: Any) -> bool:
        assert meta is not None
        return taken(with_tables(logs).plan(sure({**second, "b/0": meta})), "a") == 0

    halves = made.ranges.split("b/0", second["b/0"])
    assert halves is not None
    assert all(map(holds, [made.ranges.beginning(second["b/0"]), *halves]))
    assert holds(made.ranges.joined(halves[0], second["b/0"], after=True))
    assert holds(made.ranges.joined(first["b/0"], second["b/0"], after=False))


def test_what_was_read_first_is_the_first_stage_of_a_joined_range() -> None:
    logs = logs_of(5, 30)
    made = with_tables(logs)
    plans = [sure(made.plan({}))]
    logs.logs["b/0"][1] = 40
    while (plan := made.plan(plans[-1])) is not None:
        plans.append(sure(plan))
    whole = {each: made.ranges.joined(plans[0][each], plans[-1][each], after=False) or {} for each in plans[0]}
    tables, rest = made.ranges.stages(whole)
    spans = [{each: (meta["first_offset"], meta["next_offset"]) for each, meta in of.items()} for of in (tables, rest)]
    assert spans == [{"b/0": (0, 30)}, {"a/0": (0, 5), "b/0": (30, 40)}]
    assert made.ranges.stages({"a/0": whole["a/0"]}) == [{"a/0": whole["a/0"]}]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"read_first": ["c"]}, "names topic 'c', and the spout reads a, b"),
        ({"read_first": ["a", "b"]}, "names every topic"),
        ({"read_first": "a"}, "give a list of topics"),
        ({"read_first": ["b"], "topics": (), "pattern": "a|b"}, "needs all topics by name"),
        ({"read_first": ["b"]}, None),
    ],
)
def test_which_topics_may_be_read_first(options: Mapping[str, Any], problem: str | None) -> None:
    def made() -> Any:
        return KafkaTransactionalSpout(**{"topics": ["a", "b"], "bootstrap_servers": "nowhere:9092", **options})

    if problem is None:
        made()
    else:
        with pytest.raises(ConfigError, match=problem):
            made()
