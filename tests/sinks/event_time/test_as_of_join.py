"""Joins with the row of another stream that was valid at the time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import CLOCK_STREAM, Fields, Topology, TransactionalTopologyBuilder
from framework.testing import run_on
from sinks import AsOfJoiningCommitter, MemoryBackend, OpaqueMapState, WatermarkCommitter
from sinks.event_time.two_stream_committer import LATE_LEFT_STREAM, LATE_RIGHT_STREAM
from spouts import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from tests.kit.targets import examples
from tests.sinks.event_time.test_interval_join import ROW, Part
from tests.sinks.event_time.test_windows import FAULTS

pytestmark = pytest.mark.rule("C44")


def topology(how: Any = "left", *, opaque: bool = True, within: Any = None) -> Topology:
    spout = (OpaqueMemoryTransactionalSpout if opaque else MemoryTransactionalSpout)({0: [], 1: []}, ROW, 10)
    builder = TransactionalTopologyBuilder("valued", "records", spout, 2)
    watermark = WatermarkCommitter(
        OpaqueMapState(MemoryBackend()), "at", partition=["source"], max_ahead="1000000 days"
    )
    builder.set_bolt("watermark", watermark).global_grouping("records").global_grouping("records", CLOCK_STREAM)
    for kind in ("order", "price"):
        builder.set_bolt(f"{kind}s", Part(kind), 2).shuffle_grouping("records")
    join = AsOfJoiningCommitter(
        OpaqueMapState(MemoryBackend()), key=["id"], left="order_at", right="price_at", within=within, how=how
    )
    valued = builder.set_bolt("valued", join, 2).all_grouping("watermark")
    for kind in ("order", "price"):
        valued.fields_grouping(f"{kind}s", Fields("id"))
    return builder.build()


def sent(done: Any) -> list[tuple[Any, ...]]:
    return sorted((row["order_number"], row["price_number"]) for row in done.rows("valued"))


ROWS = [
    ["price", "a", 0, 10, 100],
    ["order", "a", 0, 12, 1],
    ["order", "b", 0, 13, 2],
    ["price", "a", 0, 20, 101],
    ["order", "a", 0, 20, 3],
    ["order", "a", 0, 19, 4],
    ["price", "a", 0, 40, 102],
    ["price", "b", 0, 41, 103],
    ["order", "a", 0, 60, 5],
    ["order", "b", 0, 61, 6],
]


@pytest.mark.parametrize("take", [1, 3, 10])
def test_a_record_gets_the_row_that_was_valid_at_its_time(take: int) -> None:
    ordered = sorted(ROWS, key=lambda row: row[3])
    done = run_on(topology(), {0: [*ordered, ["order", "z", 0, 62, 7]]}, take=take)
    pairs: list[tuple[Any, ...]] = [(1, 100), (2, None), (3, 101), (4, 100), (5, 102), (6, 103)]
    assert sent(done) == pairs
    assert sorted((row["id"], row["join_kind"]) for row in done.table("valued")) == [("a", 0), ("b", 0), ("z", 1)]


def test_a_row_is_valid_for_as_long_as_it_may_be() -> None:
    ordered = sorted(ROWS, key=lambda row: row[3])
    done = run_on(topology("inner", within=5), {0: [*ordered, ["order", "z", 0, 99, 7]]}, take=2)
    assert sent(done) == [(1, 100), (3, 101)]
    assert [row["id"] for row in done.table("valued")] == ["z"]


def test_a_late_row_counts_from_then_on_and_a_late_record_is_not_joined() -> None:
    rows = [ROWS[0], ["order", "z", 0, 30, 9], ["price", "a", 0, 25, 200], ROWS[1], ["order", "a", 0, 31, 8]]
    done = run_on(topology(), {0: [*rows, ["order", "z", 0, 50, 7]]}, take=1)
    assert sent(done) == [(8, 200), (9, None)]
    assert [row["price_number"] for row in done.rows("valued", LATE_RIGHT_STREAM)] == [200]
    assert [row["order_number"] for row in done.rows("valued", LATE_LEFT_STREAM)] == [1]


@settings(max_examples=examples(40))
@given(
    st.tuples(
        *[
            st.lists(
                st.tuples(st.sampled_from(["order", "price"]), st.sampled_from("ab"), st.integers(1, 40)),
                min_size=1,
                max_size=12,
            )
        ]
        * 2
    ),
    st.integers(1, 9),
    FAULTS,
    st.sampled_from(["inner", "left"]),
    st.sampled_from([None, 4]),
    st.booleans(),
)
def test_batches_tasks_and_failures_change_no_row(
    drawn: Any, take: int, faults: Any, how: str, within: int | None, opaque: bool
) -> None:
    number = iter(range(1_000))
    partitions = {
        source: [[kind, key, source, at, next(number)] for kind, key, at in sorted(rows, key=lambda each: each[2])]
        for source, rows in enumerate(drawn)
    }
    transactions = max(-(-len(rows) // take) for rows in partitions.values())
    chosen = [each for each in faults if each.txid <= transactions]
    done = run_on(topology(how, opaque=opaque, within=within), partitions, take=take, faults=chosen)
    watermark = min(rows[-1][3] for rows in partitions.values())
    rows = [row for its in partitions.values() for row in its]
    wanted = []
    for kind, key, _, at, which in rows:
        if kind == "order" and at < watermark:
            earlier = [row[3] for row in rows if row[0] == "price" and row[1] == key and row[3] <= at]
            newest = max(earlier, default=None)
            if newest is not None and (within is None or at - newest <= within):
                wanted.append((which, newest))
            elif how == "left":
                wanted.append((which, None))
    times = {row[4]: row[3] for row in rows}
    found = [(order, times[price] if price is not None else None) for order, price in sent(done)]
    assert sorted(found) == sorted(wanted)
    assert not done.rows("valued", LATE_LEFT_STREAM) and not done.rows("valued", LATE_RIGHT_STREAM)
