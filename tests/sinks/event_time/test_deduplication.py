"""The first record of each key, once within its horizon."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import Fields, Topology, TransactionalTopologyBuilder
from framework.operators.watermarks import LATE_STREAM
from framework.testing import run_on
from framework.topology.planning_time_stream import CLOCK_STREAM
from sinks import Count, MemoryBackend, OpaqueMapState, StateCommitter
from sinks.event_time.deduplication import DeduplicatingCommitter
from sinks.event_time.watermark import WatermarkCommitter
from spouts import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from tests.kit.targets import examples
from tests.sinks.event_time.test_windows import FAULTS

pytestmark = pytest.mark.rule("C44")

ROW = Fields(id=str, at=int)
PLACED = Fields(id=str, source=int, at=int)


def topology(
    *, opaque: bool = True, within: Any = 10, fields: Fields = ROW, readers: int = 2, partition: Sequence[str] = ()
) -> Topology:
    spout = (OpaqueMemoryTransactionalSpout if opaque else MemoryTransactionalSpout)({0: [], 1: []}, fields, 10)
    builder = TransactionalTopologyBuilder("once", "orders", spout, readers)
    watermark = WatermarkCommitter(OpaqueMapState(MemoryBackend()), "at", max_ahead="1000000 days")
    builder.set_bolt("watermark", watermark).global_grouping("orders").global_grouping("orders", CLOCK_STREAM)
    once = DeduplicatingCommitter(
        OpaqueMapState(MemoryBackend()), key=["id"], on="at", within=within, partition=partition
    )
    builder.set_bolt("once", once, 2).fields_grouping("orders", Fields("id")).all_grouping("watermark")
    for name, stream in (("sent", "default"), ("late", LATE_STREAM)):
        counted = StateCommitter(OpaqueMapState(MemoryBackend()), ["id", "at"], {"times": Count()})
        builder.set_bolt(name, counted).global_grouping("once", stream)
    return builder.build()


def test_the_first_of_each_id_is_emitted_and_the_horizon_is_forgotten() -> None:
    rows = [["a", 1], ["a", 2], ["b", 3], ["a", 10], ["a", 11], ["c", 30]]
    done = run_on(topology(), {0: rows}, take=2)
    assert sorted((row["id"], row["at"]) for row in done.rows("once")) == [("a", 1), ("a", 11), ("b", 3), ("c", 30)]
    assert [row["id"] for row in done.table("once")] == ["c"]
    assert done.table("late") == []


@pytest.mark.parametrize("take", [1, 20])
@pytest.mark.parametrize("readers", [1, 2, 3, 5])
def test_the_first_record_of_a_transaction_is_that_of_the_first_partition(readers: int, take: int) -> None:
    rows = {source: [["a", source, 20 - source], ["b", source, 20], ["a", source, 19]] for source in range(5)}
    made = topology(within=100, fields=PLACED, readers=readers, partition=["source"])
    done = run_on(made, rows, take=take)
    assert sorted((row["id"], row["source"], row["at"]) for row in done.rows("once")) == [("a", 0, 20), ("b", 0, 20)]


def test_a_record_whose_key_may_be_forgotten_is_late() -> None:
    done = run_on(topology(), {0: [["a", 1], ["b", 30], ["a", 2], ["c", 31]]}, take=1)
    assert [(row["id"], row["at"]) for row in done.rows("once", LATE_STREAM)] == [("a", 2)]


@settings(max_examples=examples(60))
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 60)), min_size=1, max_size=40),
    st.integers(1, 9),
    FAULTS,
    st.booleans(),
)
def test_batches_and_failures_change_nothing(drawn: Any, take: int, faults: Any, opaque: bool) -> None:
    rows = sorted(drawn, key=lambda each: each[1])
    transactions = -(-len(rows) // take)
    done = run_on(
        topology(opaque=opaque),
        {0: [list(row) for row in rows]},
        take=take,
        faults=[each for each in faults if each.txid <= transactions],
    )
    expected, last = [], {}
    for each, at in rows:
        if at - last.get(each, -100) >= 10:
            last[each] = at
            expected.append({"id": each, "at": at, "times": 1})
    assert done.table("sent") == sorted(expected, key=lambda row: (row["id"], row["at"]))
    assert done.table("late") == []
