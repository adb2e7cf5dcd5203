"""Sessions that are sent once, whatever the batches, the order and the failures."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import CLOCK_STREAM, Fields, Topology, TransactionalTopologyBuilder
from framework.operators.watermarks import LATE_STREAM
from framework.testing import run_on
from sinks import (
    Collect,
    Count,
    CountWindowCommitter,
    First,
    Last,
    Mean,
    MemoryBackend,
    OpaqueMapState,
    Reduce,
    StateCommitter,
    Sum,
    Top,
    WatermarkCommitter,
    collect_aggregate,
)
from sinks.event_time.sessions import SessionCommitter
from spouts import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from tests.kit.targets import examples
from tests.sinks.event_time.test_interval_join import counting
from tests.sinks.event_time.test_windows import FAULTS

pytestmark = pytest.mark.rule("C44")

ROW = Fields(user=str, source=int, at=int, paid=pa.decimal128(10, 2))


def topology(*, opaque: bool = True, lag: int = 0) -> Topology:
    spout = (OpaqueMemoryTransactionalSpout if opaque else MemoryTransactionalSpout)({0: [], 1: []}, ROW, 10)
    builder = TransactionalTopologyBuilder("visits", "clicks", spout, 2)
    watermark = WatermarkCommitter(
        OpaqueMapState(MemoryBackend()), "at", partition=["source"], out_of_orderness=lag, max_ahead="1000000 days"
    )
    builder.set_bolt("watermark", watermark).global_grouping("clicks").global_grouping("clicks", CLOCK_STREAM)
    sessions = SessionCommitter(
        OpaqueMapState(MemoryBackend()),
        5,
        on="at",
        key=["user"],
        aggregates={"clicks": Count(), "paid": Sum("paid"), "first": First("at"), "last": Last("at")},
    )
    builder.set_bolt("visits", sessions, 2).fields_grouping("clicks", Fields("user")).all_grouping("watermark")
    for name, stream in (("sent", "default"), ("late", LATE_STREAM)):
        counted = StateCommitter(
            OpaqueMapState(MemoryBackend()),
            ["user", "session_start", "session_end"],
            {"times": Count(), "clicks": Sum("clicks"), "paid": Sum("paid")},
        )
        builder.set_bolt(name, counted).global_grouping("visits", stream)
    return builder.build()


def test_records_that_connect_two_sessions_make_them_one() -> None:
    rows = [["a", 0, at, Decimal("0.50")] for at in (10, 18, 14, 60, 99)]
    for take in (1, 2, 5):
        done = run_on(topology(lag=10), {0: rows}, take=take)
        (row, later) = done.table("sent")
        assert (row["clicks"], row["paid"], row["session_start"].second, row["session_end"].second) == (
            3,
            Decimal("1.50"),
            10,
            23,
        )
        assert later["clicks"] == 1
        assert len(done.table("visits")) == 1


def test_what_belongs_to_no_open_session_is_late() -> None:
    done = run_on(topology(), {0: [["a", 0, at, Decimal(1)] for at in (10, 50, 20, 46)]}, take=1)
    assert [row["session_start"].second for row in done.rows("visits", LATE_STREAM)] == [20]
    assert [(row["first_at"], row["due_at"]) for row in done.table("visits")] == [
        (46_000_000, 51_000_000),
        (50_000_000, 55_000_000),
    ]


@pytest.mark.parametrize("windows", ["sessions", "counted"])
def test_the_parts_of_a_window_are_merged_at_once(windows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work grows with the values of a window, not with the product of its values and parts."""
    written, joined = [], []
    encoder = collect_aggregate._JSON

    class Encoder:
        def encode(self, value: Any) -> str:
            written.append(value)
            return encoder.encode(value)

    def longer(one: str, other: str) -> str:
        joined.append(len(one) + len(other))
        return one + other

    monkeypatch.setattr(collect_aggregate, "_JSON", Encoder())
    aggregates = {"all": Collect("text"), "top": Top("text", 1_000), "long": Reduce("text", longer, str)}
    state, parts = OpaqueMapState(MemoryBackend()), 256
    committer = (
        SessionCommitter(state, 5, on="at", key=["user"], aggregates=aggregates)
        if windows == "sessions"
        else CountWindowCommitter(state, parts, step=parts - 1, key=["user"], aggregates=aggregates)
    )
    spout = OpaqueMemoryTransactionalSpout({0: []}, Fields(user=str, at=int, text=str), 100)
    builder = TransactionalTopologyBuilder("visits", "clicks", spout)
    declared = builder.set_bolt("windows", committer).fields_grouping("clicks", Fields("user"))
    if windows == "sessions":
        watermark = WatermarkCommitter(OpaqueMapState(MemoryBackend()), "at", max_ahead="1000000 days")
        builder.set_bolt("watermark", watermark).global_grouping("clicks").global_grouping("clicks", CLOCK_STREAM)
        declared.all_grouping("watermark")
    texts = [f"{number:03}" for number in range(parts)]
    rows = [["a", at * 4, text] for at, text in enumerate(texts)]
    done = run_on(builder.build(), {0: [*rows, ["b", 4 * parts + 50, ""]]}, take=100)
    (row,) = [each for each in done.rows("windows") if each["user"] == "a"]
    assert json.loads(row["all"]) == texts
    assert json.loads(row["top"]) == texts[::-1]
    assert row["long"] == "".join(texts)
    assert len(written) <= 2 * 3 * parts  # by two lists: in the fold, with the state, and at the end
    assert sum(joined) <= 3 * parts * (parts.bit_length() + 1)


@pytest.mark.slow
def test_a_record_of_a_long_session_changes_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = counting(monkeypatch, "session_pane")
    rows = [["a", 0, at, Decimal(1)] for at in (*range(0, 400, 3), 500)]
    done = run_on(topology(), {0: rows}, take=1)
    assert [(row["clicks"], row["session_end"]) for row in done.table("sent")] == [
        (134, datetime.datetime(1970, 1, 1, 0, 6, 44, tzinfo=datetime.UTC))
    ]
    assert len(done.table("visits")) == 1
    while_open = counted[: -len(counted) // 40]
    assert set(while_open) <= {0, 1, 2}


def expected(rows: list[tuple[str, int]], watermark: int) -> list[tuple[str, int, int, int]]:
    found: list[list[Any]] = []
    for user, at in sorted(rows):
        if found and found[-1][0] == user and at - found[-1][2] < 5:
            found[-1][2], found[-1][3] = at, found[-1][3] + 1
        else:
            found.append([user, at, at, 1])
    return [(user, first, last + 5, count) for user, first, last, count in found if last + 5 <= watermark]


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(
    st.tuples(*[st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 60)), min_size=1, max_size=20)] * 2),
    st.integers(1, 9),
    FAULTS,
    st.booleans(),
)
def test_batches_tasks_and_failures_change_no_session(drawn: Any, take: int, faults: Any, opaque: bool) -> None:
    partitions = {
        number: [[user, number, at, Decimal("0.10")] for user, at in sorted(rows, key=lambda each: each[1])]
        for number, rows in enumerate(drawn)
    }
    transactions = max(-(-len(rows) // take) for rows in partitions.values())
    chosen = [each for each in faults if each.txid <= transactions]
    done = run_on(topology(opaque=opaque), partitions, take=take, faults=chosen)
    watermark = min(rows[-1][2] for rows in partitions.values())

    def seconds(moment: datetime.datetime) -> int:
        return int(moment.timestamp())

    sent = [
        (row["user"], seconds(row["session_start"]), seconds(row["session_end"]), row["clicks"])
        for row in done.table("sent")
    ]
    assert sorted(sent) == sorted(expected([row for rows in drawn for row in rows], watermark))
    assert all(row["times"] == 1 and row["paid"] == Decimal("0.10") * row["clicks"] for row in done.table("sent"))
    assert done.table("late") == []


MOST = 2**63 - 1
PAID = Fields(user=str, at=int, paid=int)


def summing(lag: int) -> Topology:
    spout = OpaqueMemoryTransactionalSpout({0: []}, PAID, 10, on_bad_record="skip")
    builder = TransactionalTopologyBuilder("visits", "clicks", spout)
    watermark = WatermarkCommitter(
        OpaqueMapState(MemoryBackend()), "at", out_of_orderness=lag, max_ahead="1000000 days"
    )
    builder.set_bolt("watermark", watermark).global_grouping("clicks").global_grouping("clicks", CLOCK_STREAM)
    sums = {"paid": Sum("paid"), "clicks": Count(), "mean": Mean("paid")}
    sessions = SessionCommitter(OpaqueMapState(MemoryBackend()), 5, on="at", key=["user"], aggregates=sums)
    builder.set_bolt("visits", sessions, 2).fields_grouping("clicks", Fields("user")).all_grouping("watermark")
    return builder.build()


def sums_of(done: Any) -> list[tuple[str, int, int]]:
    return sorted((row["user"], row["session_start"].timestamp(), row["paid"]) for row in done.rows("visits"))


@pytest.mark.each_value_once
@pytest.mark.rule("C51")
@pytest.mark.parametrize("take", [1, 2, 1000])
@pytest.mark.parametrize(
    ("hostile", "sums"),
    [
        pytest.param([(12, MOST), (16, MOST)], [MOST], id="next-part"),
        pytest.param([(12, -MOST), (16, -MOST)], [-MOST], id="below"),
        pytest.param([(12, MOST), (20, MOST), (16, 0)], [MOST, MOST], id="connected"),
        pytest.param([(12, 2**62), (16, 2**62 - 1), (8, 1)], [MOST], id="small-and-earlier"),
        pytest.param([(12, MOST), (16, 0), (20, 0), (24, 0), (28, 1)], [MOST], id="small-and-later"),
        pytest.param([(12, MOST), (16, -5), (20, 5), (24, 1)], [MOST], id="balanced"),
    ],
)
def test_a_session_whose_sum_leaves_its_type_leaves_out_a_record(
    take: int, hostile: list[tuple[int, int]], sums: list[int]
) -> None:
    good = [["a", at, 1] for at in range(0, 40, 2)]
    rows = [*good, *(["b", at, paid] for at, paid in hostile), ["a", 99, 1], ["b", 99, 0], ["a", 200, 0]]
    done = run_on(summing(lag=60), {0: rows}, take=take)
    assert [each for each in sums_of(done) if each[0] == "a"] == [("a", 0, 20), ("a", 99, 1)]
    assert [paid for user, at, paid in sums_of(done) if user == "b" and at < 99] == sums
    assert [row["session_pane"] % 5_000_000 for row in done.table("visits")] == [0]


@pytest.mark.rule("C51")
@settings(max_examples=examples(40))
@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 40), st.sampled_from([MOST, -MOST, 2**62, 2**41, 1, -1, 0])),
        max_size=25,
    ),
    st.integers(1, 4),
)
def test_sums_of_sessions_are_those_of_the_records_that_fit(drawn: list[tuple[str, int, int]], take: int) -> None:
    fitting: list[tuple[str, int, int]] = []
    for record in drawn:
        if all(-MOST - 1 <= total <= MOST for *_, total in sessions_of([*fitting, record])):
            fitting.append(record)
    rows = [*map(list, drawn), *(["a", at, 0] for at in (2_000, 4_000))]
    done = run_on(summing(lag=100), {0: rows}, take=take)
    found = [each for each in sums_of(done) if each[1] < 2_000]
    if take == 1:
        assert found == sessions_of(fitting)
    assert all(-MOST - 1 <= total <= MOST for *_, total in found)
    assert [row["session_pane"] for row in done.table("visits")] == [4_000_000_000]


def sessions_of(rows: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    found: list[list[Any]] = []
    for user, at, paid in sorted(rows):
        if found and found[-1][0] == user and at - found[-1][2] < 5:
            found[-1][2], found[-1][3] = at, found[-1][3] + paid
        else:
            found.append([user, at, at, paid])
    return [(user, first, paid) for user, first, _, paid in found]
