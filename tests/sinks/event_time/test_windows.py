"""Windows that are sent once, whatever the batches, the order and the failures."""

from __future__ import annotations

import datetime
from collections import defaultdict
from typing import Any

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import Fields, Topology, TransactionalTopologyBuilder, submit
from framework.execution.local import LocalExecutor
from framework.execution.plan import plan_execution
from framework.operators.event_window_assigner import hopping, tumbling
from framework.operators.watermarks import LATE_STREAM
from framework.testing import crash, fail_attempt, replay, run_on
from framework.topology.planning_time_stream import CLOCK_STREAM
from framework.transactions import MemoryStore
from sinks import Count, MemoryBackend, OpaqueMapState, StateCommitter, Sum
from sinks.event_time.watermark import WatermarkCommitter
from sinks.event_time.windowed_committer import WindowedCommitter
from sinks.sql.backend import SqlBackend
from spouts import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from tests.kit.targets import examples
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.rule("C44")

ROW = Fields(shop=str, source=int, at=int, cents=int)
MINUTE = 60


def topology(*, opaque: bool = True, tasks: int = 2, window: Any = None, lag: int = 0, **options: Any) -> Topology:
    spout = (OpaqueMemoryTransactionalSpout if opaque else MemoryTransactionalSpout)({0: [], 1: []}, ROW, 10)
    builder = TransactionalTopologyBuilder("closing", "orders", spout, 2)
    watermark = WatermarkCommitter(
        OpaqueMapState(MemoryBackend()), "at", partition=["source"], out_of_orderness=lag, max_ahead="1000000 days"
    )
    builder.set_bolt("watermark", watermark).global_grouping("orders").global_grouping("orders", CLOCK_STREAM)
    windows = WindowedCommitter(
        OpaqueMapState(MemoryBackend()),
        window or tumbling("1 min"),
        on="at",
        key=["shop"],
        aggregates={"orders": Count(), "cents": Sum("cents")},
        **options,
    )
    builder.set_bolt("windows", windows, tasks).fields_grouping("orders", Fields("shop")).all_grouping("watermark")
    sent = StateCommitter(
        OpaqueMapState(MemoryBackend()),
        ["shop", "window_end"],
        {"times": Count(), "total": Sum("orders"), "money": Sum("cents")},
    )
    builder.set_bolt("sent", sent, 2).fields_grouping("windows", Fields("shop"))
    late = StateCommitter(OpaqueMapState(MemoryBackend()), ["shop"], {"records": Sum("orders")})
    builder.set_bolt("late", late).global_grouping("windows", LATE_STREAM)
    return builder.build()


def end(at: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(at, datetime.UTC)


def test_a_window_is_sent_once_when_the_watermark_passes_its_end() -> None:
    rows = [["a", 0, 10, 1], ["a", 0, 59, 2], ["b", 0, 61, 3], ["a", 0, 119, 4], ["a", 0, 125, 5]]
    done = run_on(topology(), {0: rows}, take=2)
    assert done.table("sent") == [
        {"shop": "a", "window_end": end(60), "times": 1, "total": 2, "money": 3},
        {"shop": "a", "window_end": end(120), "times": 1, "total": 1, "money": 4},
        {"shop": "b", "window_end": end(120), "times": 1, "total": 1, "money": 3},
    ]
    assert [(row["shop"], row["window_end"]) for row in done.table("windows")] == [("a", 180_000_000)]


def test_the_slowest_partition_holds_windows_open() -> None:
    quick = [["a", 0, at, 1] for at in range(0, 600, 10)]
    slow = [["a", 1, at, 1] for at in range(0, 600, 60)]
    done = run_on(topology(), {0: quick, 1: slow}, take=3)
    assert all(row["times"] == 1 and row["total"] == 7 for row in done.table("sent"))
    assert done.table("late") == []


def test_what_comes_after_its_window_has_closed_is_late() -> None:
    rows = [["a", 0, 10, 1], ["a", 0, 130, 1], ["a", 0, 20, 1], ["a", 0, 131, 1]]
    done = run_on(topology(), {0: rows}, take=1)
    assert done.table("late") == [{"shop": "a", "records": 1}]
    assert [(row["total"], row["times"]) for row in done.table("sent")] == [(1, 1)]


def test_late_records_that_nothing_takes_are_counted_and_logged() -> None:
    rows = [["a", 0, 10], ["a", 0, 130], ["a", 0, 20], ["a", 0, 30]]
    builder = TransactionalTopologyBuilder(
        "timed", "orders", OpaqueMemoryTransactionalSpout({0: rows}, Fields(shop=str, source=int, at=int), 2)
    )
    watermark = WatermarkCommitter(OpaqueMapState(MemoryBackend()), "at", max_ahead="1000000 days")
    builder.set_bolt("watermark", watermark).global_grouping("orders").global_grouping("orders", CLOCK_STREAM)
    windows = WindowedCommitter(
        OpaqueMapState(MemoryBackend()), tumbling(60), on="at", key=["shop"], aggregates={"n": Count()}
    )
    builder.set_bolt("windows", windows).global_grouping("orders").all_grouping("watermark")
    built = builder.build()
    with structlog.testing.capture_logs() as logs:
        executor = LocalExecutor(plan_execution(built), {})
        with submit(built, {}, store=MemoryStore(), executor=executor) as run:
            run.wait_until_caught_up(PATIENCE_S)
            assert run.status().late_records == 2
    (late,) = [each for each in logs if each["event"] == "event_time.late"]
    assert (late["bolt"], late["stream"], late["records"], late["txid"]) == ("windows", "late", 2, 2)


def test_a_window_is_corrected_within_the_allowed_lateness() -> None:
    rows = [["a", 0, 10, 1], ["a", 0, 70, 1], ["a", 0, 20, 1], ["a", 0, 200, 1], ["a", 0, 30, 1]]
    done = run_on(topology(allowed_lateness="1 min"), {0: rows}, take=1)
    first = [row for row in done.rows("windows") if row["window_end"] == end(60)]
    assert [(row["orders"], row["correction"]) for row in first] == [(1, False), (2, True)]
    assert done.table("late") == [{"shop": "a", "records": 1}]


def test_a_store_that_merges_is_asked_for_windows_when_they_are_due_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    multi_get = SqlBackend.multi_get

    def noted(self: SqlBackend, keys: Any) -> Any:
        asked.extend(keys)
        return multi_get(self, keys)

    monkeypatch.setattr(SqlBackend, "multi_get", noted)
    rows = [["a", 0, 10, 1], ["a", 0, 30, 2], ["a", 0, 59, 3], ["b", 0, 61, 4], ["b", 0, 130, 5], ["a", 0, 200, 6]]
    done = run_on(topology(), {0: rows}, take=2)
    assert [(row["shop"], row["total"], row["money"]) for row in done.table("sent")] == [
        ("a", 3, 6),
        ("b", 1, 4),
        ("b", 1, 5),
    ]
    assert {len(key) for key in asked} == {1}  # the clock, and no window by its shop, start and end


def test_a_record_far_in_the_future_moves_no_watermark() -> None:
    spout = OpaqueMemoryTransactionalSpout({0: []}, ROW, 10)
    builder = TransactionalTopologyBuilder("far", "orders", spout)
    watermark = WatermarkCommitter(OpaqueMapState(MemoryBackend()), "at")
    builder.set_bolt("watermark", watermark).global_grouping("orders").global_grouping("orders", CLOCK_STREAM)
    with pytest.raises(Exception, match="field 'at' holds .*further ahead of .* than max_ahead allows"):
        run_on(builder.build(), {0: [["a", 0, 10**11, 1]]})


def expected(partitions: dict[int, list[tuple[str, int, int]]], window: Any, lag: int) -> dict[tuple[str, int], int]:
    """What in-order reading gives: every record is on time, whatever the batches."""
    totals: dict[tuple[str, int], int] = defaultdict(int)
    newest = min(max(at for _, at, _ in rows) for rows in partitions.values())
    for rows in partitions.values():
        for shop, at, _ in rows:
            starts = range(at // window.step * window.step // 1, at - window.length, -window.step)
            for start in starts:
                if start <= at < start + window.length and start + window.length <= newest - lag:
                    totals[(shop, start + window.length)] += 1
    return dict(totals)


records = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=25)
FAULTS = st.lists(
    st.one_of(
        st.builds(fail_attempt, st.integers(1, 6)),
        st.builds(replay, st.integers(1, 6)),
        st.builds(crash, st.integers(1, 6), st.sampled_from(["between_phases", "written"])),
    ),
    max_size=3,
    unique_by=lambda each: each.txid,
)


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(
    st.tuples(records, records),
    st.integers(1, 9),
    FAULTS,
    st.booleans(),
    st.integers(0, 3),
    st.sampled_from([tumbling(8), hopping(9, 4)]),
)
def test_batches_tasks_and_failures_change_no_window(
    drawn: Any, take: int, faults: Any, opaque: bool, lag: int, window: Any
) -> None:
    check(drawn, take, faults, opaque=opaque, lag=lag, window=window)


def check(drawn: Any, take: int, faults: Any, *, opaque: bool, lag: int, window: Any) -> None:
    """Run, and compare the windows that were sent with what reading in order gives."""
    partitions = {}
    for number, rows in enumerate(drawn):  # in order within ``lag``
        ordered = sorted(rows, key=lambda each: each[1])
        partitions[number] = [(shop, at + 1_000, cents) for shop, at, cents in ordered]
    built = topology(opaque=opaque, window=window, lag=lag)
    given_rows = {
        number: [[shop, number, at, cents] for shop, at, cents in rows] for number, rows in partitions.items()
    }
    transactions = max(-(-len(rows) // take) for rows in partitions.values())
    one = run_on(built, given_rows, take=take, faults=[each for each in faults if each.txid <= transactions])
    seconds = {
        (row["shop"], int(row["window_end"].timestamp())): (row["times"], row["total"]) for row in one.table("sent")
    }

    class Shape:
        length, step = window.length // 1_000_000, window.step // 1_000_000

    assert seconds == {each: (1, count) for each, count in expected(partitions, Shape, lag).items()}
    assert one.table("late") == []
