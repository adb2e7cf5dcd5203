"""Rows that expire by event time: each once, whatever the batches, tasks and failures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import CLOCK_STREAM, Fields, Topology, TransactionalTopologyBuilder, submit
from framework.errors import ConfigError, TopologyError
from framework.execution.local import LocalExecutor
from framework.execution.plan import plan_execution
from framework.operators.watermarks import EXPIRED_STREAM, LATE_STREAM
from framework.testing import run_on
from framework.transactions import MemoryStore
from sinks import Count, ExpiringCommitter, MemoryBackend, OpaqueMapState, StateCommitter, Sum, WatermarkCommitter
from spouts import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from tests.kit.targets import examples
from tests.kit.waiting import PATIENCE_S
from tests.sinks.event_time.test_windows import FAULTS

pytestmark = pytest.mark.rule("C44")

ROW = Fields(id=str, at=int, n=int)
TTL = 10
Row = tuple[str, int, int]


def topology(*, opaque: bool = True, lag: int = 0, spout: Any = None, tasks: int = 2, states: Any = None) -> Topology:
    spout = spout or (OpaqueMemoryTransactionalSpout if opaque else MemoryTransactionalSpout)({0: []}, ROW, 10)
    states = states or {each: OpaqueMapState(MemoryBackend()) for each in ("clock", "kept", "expired")}
    builder = TransactionalTopologyBuilder("expiring", "records", spout)
    watermark = WatermarkCommitter(states["clock"], "at", out_of_orderness=lag, max_ahead="1000000 days")
    builder.set_bolt("watermark", watermark).global_grouping("records").global_grouping("records", CLOCK_STREAM)
    totals = {"times": Count(), "n": Sum("n")}
    kept = ExpiringCommitter(states["kept"], key=["id"], aggregates=totals, on="at", ttl=TTL)
    builder.set_bolt("kept", kept, tasks).fields_grouping("records", Fields("id")).all_grouping("watermark")
    key = ["id", "expires_at", "times", "n"]
    expired = StateCommitter(states["expired"], key, {"sent": Count()})
    builder.set_bolt("expired", expired, tasks).fields_grouping("kept", Fields("id"), EXPIRED_STREAM)
    return builder.build()


def run(rows: Iterable[Row], take: int, faults: Sequence[Any] = (), **options: Any) -> tuple[Any, ...]:
    """The expired rows, those that are kept, and the late records."""
    done = run_on(topology(**options), [list(each) for each in rows], take=take, faults=list(faults))
    ended = [(row["id"], int(row["expires_at"].timestamp()), row["times"], row["n"]) for row in done.table("expired")]
    assert all(row["sent"] == 1 for row in done.table("expired"))
    kept = [(row["id"], row["expires_at"] // 1_000_000, row["times"], row["n"]) for row in done.table("kept")]
    late = [(row["id"], row["at"], row["n"]) for row in done.rows("kept", LATE_STREAM)]
    return sorted(ended), sorted(kept), sorted(late)


def expected(rows: Iterable[Row], take: int, lag: int) -> tuple[Any, ...]:
    """The same, row by row."""
    kept: dict[str, list[int]] = {}
    ended, late, newest, before = [], [], -1_000_000, -1_000_000
    rows = list(rows)
    for first in range(0, len(rows), take):
        batch = rows[first : first + take]
        newest = max(newest, *(at for _, at, _ in batch))
        after = newest - lag
        late += [each for each in batch if each[1] + TTL <= before]
        for key, at, n in sorted((each for each in batch if each[1] + TTL > before), key=lambda each: each[1]):
            if key in kept and kept[key][0] <= min(at, after):
                ended.append((key, *kept.pop(key)))
            end, times, total = kept.get(key, [0, 0, 0])
            kept[key] = [max(end, at + TTL), times + 1, total + n]
        for key in [key for key, value in kept.items() if value[0] <= after]:
            ended.append((key, *kept.pop(key)))
        before = after
    return sorted(ended), sorted((key, *value) for key, value in kept.items()), sorted(late)


IN_ORDER = [("a", 0, 1), ("b", 3, 2), ("a", 9, 3), ("b", 13, 4), ("c", 40, 5), ("a", 41, 6)]


@pytest.mark.parametrize("take", [1, 2, 4, 100])
def test_a_row_expires_once_and_its_key_starts_anew(take: int) -> None:
    assert run(IN_ORDER, take) == (
        [("a", 19, 2, 4), ("b", 13, 1, 2), ("b", 23, 1, 4)],
        [("a", 51, 1, 6), ("c", 50, 1, 5)],
        [],
    )


def test_a_record_of_the_transaction_that_passes_the_end_prolongs_its_row() -> None:
    ended, kept, _ = run([("a", 0, 1), ("a", 1, 1), ("a", 9, 2), ("b", 12, 3)], 2)
    assert (ended, kept) == ([], [("a", 19, 3, 4), ("b", 22, 1, 3)])


def test_a_record_behind_the_watermark_counts_until_its_row_would_have_expired() -> None:
    rows = [("a", 0, 1), ("b", 20, 2), ("b", 11, 4), ("a", 10, 8), ("a", 11, 16)]
    # The record of 10 would have expired at 20; that of 11 begins a row.
    assert run(rows, 1) == ([("a", 10, 1, 1)], [("a", 21, 1, 16), ("b", 30, 2, 6)], [("a", 10, 8)])


@settings(max_examples=examples(60))
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 60), st.integers(-3, 3)), min_size=1, max_size=40),
    st.integers(1, 9),
    FAULTS,
    st.booleans(),
    st.integers(0, 12),
)
def test_failures_change_nothing(drawn: list[Row], take: int, faults: Any, opaque: bool, lag: int) -> None:
    struck = [each for each in faults if each.txid <= -(-len(drawn) // take)]
    assert run(drawn, take, struck, opaque=opaque, lag=lag) == expected(drawn, take, lag)


@settings(max_examples=examples(20))
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 60), st.integers(-3, 3)), min_size=1, max_size=40),
    st.integers(1, 9),
)
def test_batches_change_nothing_for_records_in_order(drawn: list[Row], take: int) -> None:
    rows = sorted(drawn, key=lambda each: each[1])
    assert run(rows, take) == expected(rows, 1, 0)


def test_rows_expire_once_with_another_number_of_tasks() -> None:
    spout = OpaqueMemoryTransactionalSpout({0: []}, ROW, 3)
    store, states = MemoryStore(), {each: OpaqueMapState(MemoryBackend()) for each in ("clock", "kept", "expired")}
    rows = [("abcd"[number % 4], number, 1) for number in range(24)]
    ended, *_ = expected([*rows, ("z", 100, 1)], 1, 0)
    for tasks, its in ((1, rows[:9]), (3, rows[9:18]), (2, [*rows[18:], ("z", 100, 1)])):
        for each in its:
            spout.append(0, list(each))
        built = topology(spout=spout, tasks=tasks, states=states)
        executor = LocalExecutor(plan_execution(built), {})
        with submit(built, {}, store=store, executor=executor, accept_changed_topology=True) as running:
            running.wait_until_caught_up(PATIENCE_S)
    held = {key for key, row in states["expired"].backend.scan() if row.value == (1,)}
    assert {(key, int(at.timestamp()), *more) for key, at, *more in held} == set(ended)


@pytest.mark.parametrize("take", [1, 3, 1000])
def test_a_sum_beyond_its_type_leaves_out_its_records_and_no_others(take: int) -> None:
    spout = OpaqueMemoryTransactionalSpout({0: []}, ROW, 10, on_bad_record="skip")
    rows = [["a", 1, 1], ["b", 1, 2**63 - 1], ["b", 2, 2**63 - 1], ["a", 3, 2], ["c", 30, 1]]
    done = run_on(topology(spout=spout), rows, take=take)
    assert ("a", 3) in [(row["id"], row["n"]) for row in done.table("expired")]
    assert [row["id"] for row in done.table("kept")] == ["c"]


def test_what_expires_never_is_refused() -> None:
    options: dict[str, Any] = {"key": ["id"], "aggregates": {"n": Count()}, "on": "at"}
    state = OpaqueMapState(MemoryBackend())
    with pytest.raises(ConfigError, match="ttl is"):
        ExpiringCommitter(state, ttl=0, **options)
    with pytest.raises(TopologyError, match="expires_at"):
        ExpiringCommitter(state, ttl=5, **options | {"aggregates": {"expires_at": Count()}})
