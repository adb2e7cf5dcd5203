"""Windows of a number of records: each once, whatever the batches and the failures."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import BaseBasicBolt, Fields, OutputFieldsDeclarer, Topology, TransactionalTopologyBuilder
from framework.errors import ConfigError, TopologyError
from framework.testing import run_on
from framework.topology import TopologyContext, TransactionAttempt
from ratchet import Pipeline
from sinks import Collect, Count, CountWindowCommitter, First, MemoryBackend, OpaqueMapState, Sum, TransactionalMapState
from sinks.external_row_sorter import PAGE_BYTES
from spouts import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from tests.kit.targets import examples
from tests.sinks.event_time.test_windows import FAULTS

pytestmark = pytest.mark.rule("C44")

ROW = Fields(shop=str, cents=int)


def topology(count: int, step: int | None = None, *, opaque: bool = True) -> Topology:
    spout = (OpaqueMemoryTransactionalSpout if opaque else MemoryTransactionalSpout)({0: []}, ROW, 10)
    builder = TransactionalTopologyBuilder("counted", "orders", spout)
    aggregates = {"orders": Count(), "cents": Sum("cents"), "first": First("cents")}
    windows = CountWindowCommitter(
        OpaqueMapState(MemoryBackend()), count, step=step, key=["shop"], aggregates=aggregates
    )
    builder.set_bolt("windows", windows, 2).fields_grouping("orders", Fields("shop"))
    return builder.build()


def sent(done: Any) -> list[tuple[Any, ...]]:
    return sorted(tuple(row.values()) for row in done.rows("windows"))


@pytest.mark.parametrize("take", [1, 2, 100])
def test_a_window_is_sent_with_its_last_record(take: int) -> None:
    rows = [["a", cents] for cents in range(7)] + [["b", 9]]
    done = run_on(topology(3), rows, take=take)
    assert sent(done) == [("a", 0, 3, 3, 3, 0), ("a", 3, 6, 3, 12, 3)]
    assert [(row["shop"], row["window_part"], row["records"]) for row in done.table("windows")] == [
        ("a", -1, 7),
        ("a", 2, 0),
        ("b", -1, 1),
        ("b", 0, 0),
    ]


class Same(BaseBasicBolt):
    deterministic = True

    def __init__(self, fields: Fields) -> None:
        self.fields = fields

    def execute(self, tup: Any, collector: Any) -> None:
        collector.emit([tup[name] if name in ("shop", "cents") else "more" for name in self.fields])

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(self.fields)


def of_two_streams(one: Fields, other: Fields, grouping: str = "shop") -> Topology:
    builder = TransactionalTopologyBuilder("counted", "orders", OpaqueMemoryTransactionalSpout({0: []}, ROW, 10))
    windows = CountWindowCommitter(OpaqueMapState(MemoryBackend()), 2, key=["shop"], aggregates={"n": Sum("cents")})
    declarer = builder.set_bolt("windows", windows)
    for name, fields, by in (("one", one, "shop"), ("other", other, grouping)):
        builder.set_bolt(name, Same(fields)).shuffle_grouping("orders")
        declarer.fields_grouping(name, Fields(by))
    return builder.build()


def test_several_streams_are_one_if_they_have_the_fields_that_it_takes() -> None:
    done = run_on(of_two_streams(ROW, Fields(cents=int, more=str, shop=str)), [["a", 1], ["a", 5]], take=1)
    assert sent(done) == [("a", 0, 2, 2), ("a", 2, 4, 10)]
    for other, grouping, told in (
        (Fields(shop=str, cents=float), "shop", "takes 'one' and 'other' as one stream, and they differ"),
        (Fields(shop=str), "shop", "needs field 'cents', which 'other' does not emit"),
        (ROW, "cents", "group its streams by the same fields, in the same order"),
    ):
        with pytest.raises(TopologyError, match=told):
            of_two_streams(ROW, other, grouping)


def test_windows_that_cannot_be_are_refused() -> None:
    for count, step in ((0, None), (3, 4), (3, 0)):
        with pytest.raises(ConfigError, match="makes no windows"):
            topology(count, step)
    with pytest.raises(TopologyError, match="needs an OpaqueMapState"):
        CountWindowCommitter(TransactionalMapState(MemoryBackend()), 3, key=["shop"], aggregates={"n": Count()})


@settings(max_examples=examples(40))
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9)), min_size=1, max_size=40),
    st.integers(1, 9),
    FAULTS,
    st.booleans(),
    st.integers(1, 8),
    st.integers(1, 8),
)
def test_batches_tasks_and_failures_change_no_window(
    drawn: Any, take: int, faults: Any, opaque: bool, count: int, step: int
) -> None:
    step = min(step, count)
    transactions = -(-len(drawn) // take)
    chosen = [each for each in faults if each.txid <= transactions]
    done = run_on(topology(count, step, opaque=opaque), [list(row) for row in drawn], take=take, faults=chosen)
    by_shop: dict[str, list[int]] = defaultdict(list)
    for shop, cents in drawn:
        by_shop[shop].append(cents)
    assert sent(done) == sorted(
        (shop, end - count, end, count, sum(its[end - count : end]), its[end - count])
        for shop, its in by_shop.items()
        for end in range(count, len(its) + 1, step)
    )
    assert len(done.table("windows")) <= 2 * (1 + count + step)


@pytest.mark.rule("C51")
@pytest.mark.parametrize("take", [1, 3, 1000])
def test_a_sum_beyond_its_type_leaves_out_its_records_and_no_others(take: int) -> None:
    pipeline = Pipeline("counted", state=lambda name: OpaqueMapState(MemoryBackend()))
    spout = OpaqueMemoryTransactionalSpout({0: []}, ROW, 10, on_bad_record="skip")
    windows = CountWindowCommitter(OpaqueMapState(MemoryBackend()), 2, key=["shop"], aggregates={"cents": Sum("cents")})
    pipeline.spout(spout).into(windows, name="windows")
    good = [["a", cents] for cents in range(4)]
    done = run_on(pipeline.build(), [*good, *[["b", 2**63 - 1]] * 3, *good], take=take)
    found = [(row["shop"], row["cents"]) for row in done.rows("windows")]
    assert [each for each in found if each[0] == "a"] == [("a", 1), ("a", 5)] * 2


def test_large_windows_are_sent_in_parts() -> None:
    windows = CountWindowCommitter(
        OpaqueMapState(MemoryBackend()), 100, step=1, key=["shop"], aggregates={"texts": Collect("text")}
    )
    spout = MemoryTransactionalSpout({0: []}, Fields(shop=str, text=str), 10)
    builder = TransactionalTopologyBuilder("counted", "orders", spout)
    builder.set_bolt("windows", windows).fields_grouping("orders", Fields("shop"))
    builder.build()
    context = TopologyContext("counted", "windows", 0, 1, {})
    windows.prepare({}, context, None, TransactionAttempt(1, 1))  # type: ignore[arg-type]
    windows.execute_arrow(pa.RecordBatch.from_pydict({"shop": ["a"] * 200, "text": ["x" * 5_000] * 200}))
    sent = list(windows.finish_batch())
    assert sum(each.num_rows for each in sent) == 101
    assert len(sent) > 3
    assert max(each.nbytes for each in sent) < 1.5 * PAGE_BYTES
