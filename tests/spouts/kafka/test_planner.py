"""Plans over many partitions cost what moves, and say what they would say if all were looked at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.clients.kafka_settings import ConnectionErrors, KafkaSettings
from framework.errors import RetryableError
from spouts.kafka import cluster_metadata
from spouts.kafka.cluster_metadata import KafkaTopics, Offset, age_max_s
from spouts.kafka.consumer import truncation
from spouts.kafka.partition_plan_entries import topic_and_number
from spouts.kafka.planning import log_offsets_cache, lost_records
from spouts.kafka.planning.batch_limits import KafkaLimits
from spouts.kafka.planning.planner import KafkaPlanner
from spouts.kafka.planning.source_settings import KafkaSource
from spouts.kafka.start_end_options import EARLIEST
from tests.kit.targets import examples


class FakeLogs:
    """Stands in for ``KafkaMetadata``: logs with a beginning, an end and a leader epoch."""

    def __init__(self, partitions: Iterable[str]) -> None:
        # Beginning, end, leader epoch; an old broker does not say the epoch.
        self.logs: dict[str, list[Any]] = {each: [0, 0, None if each.startswith("b") else 0] for each in partitions}
        self.leaderless: set[str] = set()
        self.ids = {topic_and_number(each)[0]: f"id-{topic_and_number(each)[0]}" for each in self.logs}
        self.asked_for_beginnings: list[str] = []
        self.times: dict[int, dict[str, int]] = {}  # ms -> partition -> the first offset of this time or later

    def topics(self) -> KafkaTopics:
        return KafkaTopics("c", self.ids, {each: None if each in self.leaderless else 1 for each in self.logs})

    def ends(self, *, patient: bool) -> dict[str, Offset]:
        return {each: Offset(self.logs[each][1], self.logs[each][2]) for each in self.topics().led}

    def open_ends(self) -> dict[str, Offset]:
        return self.ends(patient=False)

    def beginnings(self, partitions: Iterable[str], *, patient: bool) -> dict[str, Offset]:
        wanted = list(partitions)
        self.asked_for_beginnings += wanted
        return {each: Offset(self.logs[each][0], None) for each in wanted if each not in self.leaderless}

    def at_timestamp(self, partitions: Iterable[str], timestamp_ms: int, *, patient: bool = True) -> dict[str, Offset]:
        return {each: Offset(self.times[timestamp_ms].get(each, -1), None) for each in partitions}

    def refresh(self) -> None:
        pass

    def close(self) -> None:
        pass


def planner_over(logs: FakeLogs, records_max: int = 1_000, **source_options: Any) -> KafkaPlanner:
    source = replace(KafkaSource(tuple(logs.ids), None, EARLIEST, True, False), **source_options)
    metadata: Any = logs
    return KafkaPlanner(source, KafkaSettings("nowhere:9092", {}), KafkaLimits(records_max), metadata=metadata)


def looking_at_all(logs: FakeLogs, records_max: int = 1_000, **source_options: Any) -> KafkaPlanner:
    """A planner to which no partition is at rest."""
    made = planner_over(logs, records_max, **source_options)
    made._moving = lambda previous, topics, ends: previous  # type: ignore[method-assign]
    return made


PARTITIONS = [f"{topic}/{number}" for topic in ("a", "b") for number in range(4)]
WHAT = ["grow", "grow", "grow", "elect", "lose leader", "retain", "truncate", "recreate", "add"]


@given(
    st.lists(st.tuples(st.sampled_from(WHAT), st.integers(0, 7), st.integers(1, 40)), max_size=30),
    st.sampled_from([3, 20, 1_000]),
    st.sampled_from([(), ("b",)]),
)
@settings(max_examples=examples(300), deadline=None)
def test_a_plan_of_what_moves_is_the_plan_of_all(
    changes: list[tuple[str, int, int]], records_max: int, read_first: tuple[str, ...]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lost_records, "BELIEVED_AFTER_S", 0.0)
        patch.setattr(log_offsets_cache, "METADATA_AGE_MAX_S", -1.0)  # retention is seen by both at once
        logs = FakeLogs(PARTITIONS)
        made = planner_over(logs, records_max, read_first=read_first)
        wanted = looking_at_all(logs, records_max, read_first=read_first)
        previous: Mapping[str, Any] = {}
        for what, which, number in changes:
            change(logs, what, sorted(logs.logs)[which % len(logs.logs)], number)
            if read_first and not previous and logs.leaderless:
                continue  # the first plan waits for all, as ``KafkaMetadata`` does
            plan = planned(made, previous)
            assert plan == planned(wanted, previous)
            if plan is not None:
                assert list(plan) == sorted(plan)
                previous = plan


def planned(made: KafkaPlanner, previous: Mapping[str, Any]) -> Mapping[str, Any] | None:
    try:
        return made.plan(previous)
    except RetryableError as error:
        assert "is read first, and has no leader" in str(error)
        return None


def change(logs: FakeLogs, what: str, partition: str, number: int) -> None:
    log, topic = logs.logs[partition], topic_and_number(partition)[0]
    if what == "grow":
        log[1] += number
    elif what == "elect":
        logs.leaderless.discard(partition)
        log[2] = (log[2] or 0) + 1
    elif what == "lose leader":
        logs.leaderless.add(partition)
    elif what == "retain":
        log[0] = min(log[0] + number, log[1])
    elif what == "truncate":
        log[1] = max(log[1] - number, log[0])
    elif what == "recreate":
        logs.ids[topic] += "'"
        for each in [each for each in logs.logs if topic_and_number(each)[0] == topic]:
            logs.logs[each] = [0, logs.logs[each][1] if number < 20 else number, 0]
    else:
        logs.logs.setdefault(f"{topic}/{4 + number % 3}", [0, 0, 0])


def test_entries_of_partitions_at_rest_are_shared_and_only_logs_with_more_are_asked_where_they_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_offsets_cache, "METADATA_AGE_MAX_S", -1.0)
    logs = FakeLogs(f"t/{each}" for each in range(1_000))
    made = planner_over(logs)
    logs.logs["t/3"][1] = 5
    first = made.plan({})
    assert first is not None
    second = _next(made, logs, first, "t/4")
    logs.asked_for_beginnings.clear()
    third = _next(made, logs, second, "t/5")
    assert logs.asked_for_beginnings == ["t/5"]
    assert sorted(each for each in third if third[each] is not second[each]) == ["t/4", "t/5"]


def _next(made: KafkaPlanner, logs: FakeLogs, previous: Mapping[str, Any], partition: str) -> Mapping[str, Any]:
    logs.logs[partition][1] += 5
    plan = made.plan(previous)
    assert plan is not None
    return plan


def test_what_others_see_is_counted_again_only_when_it_has_changed() -> None:
    logs = FakeLogs(f"t/{each}" for each in range(10))
    made = planner_over(logs)
    logs.logs["t/3"][1] = 5
    plan = made.plan({})
    assert plan is not None
    progress = made.progress(plan, [])
    assert made.lag(plan) == 0
    assert made.plan(plan) is None
    assert made.progress(plan, []) is progress
    logs.logs["t/3"][1] = 8
    later = made.plan(plan)
    assert later is not None
    assert made.progress(plan, [later])["t/3"].in_flight == 3
    assert made.lag(plan) == 3
    assert made.lag(later) == 0


def test_where_an_empty_log_begins_is_seen_as_soon_as_it_is_known() -> None:
    """Retention has emptied it; a status was asked for between its end and its beginning."""
    logs = FakeLogs(["t/0"])
    logs.logs["t/0"][:2] = [500, 500]
    made = planner_over(logs)
    made._logs.see_ends(logs.ends(patient=False))
    assert made.progress({}, [])["t/0"].lag == 500
    assert made.plan({}) is None
    assert made.progress({}, [])["t/0"].lag == 0


def test_what_is_known_of_a_wide_source_may_be_older_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_metadata, "METADATA_AGE_MAX_S", 5.0)
    assert [age_max_s(each) for each in (1, 2_000, 10_000)] == [5.0, 5.0, 25.0]


# --- what lies between two plans ------------------------------------------------------------------


@pytest.mark.parametrize("what", ["recreate", "truncate", "retain"])
def test_plans_with_a_gap_between_them_are_not_joined(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Their offsets name other records now, or none: what was made of them cannot be recomputed."""
    monkeypatch.setattr(lost_records, "BELIEVED_AFTER_S", 0.0)
    monkeypatch.setattr(log_offsets_cache, "METADATA_AGE_MAX_S", -1.0)
    logs = FakeLogs(["a/0"])
    made = planner_over(logs, records_max=20)
    logs.logs["a/0"][1] = 30
    first = made.plan({})
    assert first is not None
    second = made.plan(first)
    assert second is not None
    assert made.ranges.joined(first["a/0"], second["a/0"], after=False) == {
        "first_offset": 0,
        "next_offset": 30,
        "next_leader_epoch": 0,
        "topic_id": "id-a",
    }
    change(logs, "grow", "a/0", 10)
    change(logs, what, "a/0", 35)
    third = _next(made, logs, second, "a/0")
    assert third["a/0"]["gaps"] == 1
    assert made.ranges.joined(first["a/0"], third["a/0"], after=False) is None
    assert made.ranges.joined(second["a/0"], third["a/0"], after=True) is None
    fourth = _next(made, logs, third, "a/0")
    assert made.ranges.joined(third["a/0"], fourth["a/0"], after=True) is not None


# --- whether logs were truncated ------------------------------------------------------------------


class SlowBroker:
    """A consumer whose broker says of one partition at a time that its log has ended, in two
    seconds each; ``silent_after``: so many, and nothing any more."""

    def __init__(self, partitions: int, silent_after: int) -> None:
        self.partitions = iter(range(min(partitions, silent_after)))
        self.now_s = 0.0

    def consume(self, most: int, timeout_s: float) -> list[Any]:
        self.now_s += 2.0
        number = next(self.partitions, None)
        if number is None:
            return []
        error = SimpleNamespace(code=lambda: KafkaError._PARTITION_EOF)
        return [SimpleNamespace(error=lambda: error, topic=lambda: "t", partition=lambda: number)]


def test_many_logs_may_be_asked_whether_they_were_truncated_as_long_as_there_are_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for silent_after in (100, 50):
        broker = SlowBroker(100, silent_after)
        monkeypatch.setattr(truncation, "time", SimpleNamespace(monotonic=lambda broker=broker: broker.now_s))
        waiting = {f"t/{number}" for number in range(100)}
        if silent_after == 100:
            assert truncation._lost(broker, waiting, ConnectionErrors("nowhere")) == set()
        else:
            with pytest.raises(RetryableError, match="t/50: no word for 10 s"):
                truncation._lost(broker, waiting, ConnectionErrors("nowhere"))
            assert broker.now_s == 50 * 2.0 + 12.0
