"""Joins within a bound: each pair once, each record without a partner once."""

from __future__ import annotations

import datetime
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import CLOCK_STREAM, Fields, Topology, TransactionalTopologyBuilder
from framework.errors import TopologyError
from framework.testing import run_on
from framework.topology import ArrowBolt
from framework.transactions import MemoryStore
from ratchet import Pipeline, sqlite
from sinks import MemoryBackend, OpaqueMapState, WatermarkCommitter
from sinks.event_time import join_buffer
from sinks.event_time.interval_join import LATE_LEFT_STREAM, LATE_RIGHT_STREAM, JoiningCommitter
from sinks.event_time.join_buffer import ROW_RECORDS
from spouts import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from tests.kit.targets import examples
from tests.kit.waiting import PATIENCE_S
from tests.sinks.event_time.test_windows import FAULTS

pytestmark = pytest.mark.rule("C44")

ROW = Fields(kind=str, id=str, source=int, at=int, number=int)


class Part(ArrowBolt):
    """The records of one kind, under names of their own."""

    deterministic = True

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def execute_arrow(self, batch: Any) -> Any:
        import pyarrow as pa
        import pyarrow.compute as pc

        rows = batch.filter(pc.equal(batch.column("kind"), self.kind))
        names = ["id", f"{self.kind}_at", f"{self.kind}_number"]
        yield pa.RecordBatch.from_arrays([rows.column(name) for name in ("id", "at", "number")], names=names)

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields.of({"id": str, f"{self.kind}_at": int, f"{self.kind}_number": int}))


def topology(how: Any = "inner", *, opaque: bool = True, within: Any = 5) -> Topology:
    spout = (OpaqueMemoryTransactionalSpout if opaque else MemoryTransactionalSpout)({0: [], 1: []}, ROW, 10)
    builder = TransactionalTopologyBuilder("matched", "records", spout, 2)
    watermark = WatermarkCommitter(
        OpaqueMapState(MemoryBackend()), "at", partition=["source"], max_ahead="1000000 days"
    )
    builder.set_bolt("watermark", watermark).global_grouping("records").global_grouping("records", CLOCK_STREAM)
    for kind in ("order", "payment"):
        builder.set_bolt(f"{kind}s", Part(kind), 2).shuffle_grouping("records")
    join = JoiningCommitter(
        OpaqueMapState(MemoryBackend()), key=["id"], left="order_at", right="payment_at", within=within, how=how
    )
    matched = builder.set_bolt("matched", join, 2).all_grouping("watermark")
    for kind in ("order", "payment"):
        matched.fields_grouping(f"{kind}s", Fields("id"))
    return builder.build()


def sent(done: Any) -> list[tuple[Any, ...]]:
    return sorted(
        [(row["id"], row["order_number"], row["payment_number"]) for row in done.rows("matched")],
        key=lambda row: tuple((each is None, each) for each in row),
    )


ROWS = [
    ["order", "a", 0, 10, 1],
    ["payment", "a", 0, 14, 2],
    ["order", "b", 0, 20, 3],
    ["payment", "c", 0, 25, 4],
    ["order", "a", 0, 26, 5],
    ["payment", "a", 0, 31, 6],
    ["order", "d", 0, 60, 7],
]


@pytest.mark.each_value_once
@pytest.mark.parametrize("take", [1, 3, 9])
@pytest.mark.parametrize(
    ("how", "alone"),
    [
        ("inner", []),
        ("left", [("b", 3, None)]),
        ("right", [("c", None, 4)]),
        ("outer", [("b", 3, None), ("c", None, 4)]),
    ],
)
def test_pairs_and_records_without_a_partner(how: str, alone: list[Any], take: int) -> None:
    done = run_on(topology(how), {0: ROWS}, take=take)
    assert sent(done) == sorted([("a", 1, 2), ("a", 5, 6), *alone], key=lambda row: tuple((x is None, x) for x in row))
    assert [row["id"] for row in done.table("matched")] == ["d"]


def test_what_is_behind_the_watermark_is_late() -> None:
    done = run_on(topology(), {0: [ROWS[0], ROWS[6], ROWS[1]]}, take=1)
    assert sent(done) == []
    assert [row["payment_number"] for row in done.rows("matched", LATE_RIGHT_STREAM)] == [2]
    assert done.rows("matched", LATE_LEFT_STREAM) == []


@pytest.mark.parametrize(
    ("left", "right", "said"),
    [
        (
            "order_at",
            "payment_at",
            "one of its streams ('one', 'other') must have the field 'payment_at' and not 'order_at'; rename fields upstream",
        ),
        (
            "order_at",
            "order_at",
            "left and right are both 'order_at', and these fields tell its streams apart: rename the field of one stream in a "
            "bolt upstream, and give the new name",
        ),
    ],
)
def test_streams_that_cannot_be_told_apart_are_refused(left: str, right: str, said: str) -> None:
    builder = TransactionalTopologyBuilder("matched", "records", OpaqueMemoryTransactionalSpout({0: []}, ROW, 10))
    watermark = WatermarkCommitter(OpaqueMapState(MemoryBackend()), "at")
    builder.set_bolt("watermark", watermark).global_grouping("records").global_grouping("records", CLOCK_STREAM)
    for name in ("one", "other"):
        builder.set_bolt(name, Part("order")).shuffle_grouping("records")
    join = JoiningCommitter(OpaqueMapState(MemoryBackend()), key=["id"], left=left, right=right, within=1)
    joined = builder.set_bolt("joined", join).all_grouping("watermark").global_grouping("one").global_grouping("other")
    assert joined
    with pytest.raises(TopologyError, match=f"^committer 'joined': {re.escape(said)}$"):
        builder.build()


def counting(patch: pytest.MonkeyPatch, column: str) -> list[int]:
    """How many rows each call to a state with this column reads or writes."""
    counted: list[int] = []
    get, put = OpaqueMapState.multi_get, OpaqueMapState.multi_put

    def reading(self: OpaqueMapState, keys: Any) -> Any:
        counted.append(len(keys) if column in {*self.backend.fields[0], *self.backend.fields[1]} else 0)
        return get(self, keys)

    def writing(self: OpaqueMapState, keys: Any, values: Any) -> None:
        counted.append(len(keys) if column in {*self.backend.fields[0], *self.backend.fields[1]} else 0)
        put(self, keys, values)

    patch.setattr(OpaqueMapState, "multi_get", reading)
    patch.setattr(OpaqueMapState, "multi_put", writing)
    return counted


@pytest.mark.slow
def test_a_record_of_a_hot_key_reads_and_writes_a_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = counting(monkeypatch, "waiting")
    orders = [["order", "a", 0, 100, number] for number in range(ROW_RECORDS * 4)]
    done = run_on(topology("left"), {0: orders}, take=1)
    assert 1 <= max(counted) <= 4 and len(done.table("matched")) == 4
    done = run_on(topology("left"), {0: [*orders, ["payment", "a", 0, 103, 7], ["order", "z", 0, 200, 0]]}, take=50)
    assert sorted(row["order_number"] for row in done.rows("matched")) == list(range(len(orders)))
    assert {row["payment_number"] for row in done.rows("matched")} == {7}
    assert [row["id"] for row in done.table("matched")] == ["z"]


def test_large_records_of_a_hot_key_make_no_large_row(tmp_path: Path) -> None:
    """MariaDB takes 16 MB at a time, so later records of the key, also of others, were bad."""
    fields = Fields(k=str, v=int, at=datetime.datetime, text=str)
    at = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    rows = [["a", int(number % 3 == 0), at, "x" * 100_000] for number in range(60)]
    shop = Pipeline("p", state=lambda step: sqlite(tmp_path / "p.db", step))
    records = shop.spout(OpaqueMemoryTransactionalSpout({0: rows}, fields, 7))
    lefts, rights = records.filter("v = 0"), records.filter("v = 1").select("k", "at", w="v")
    pairs = lefts.join(rights, on="k", times="at", within="1 h", late="1 d", name="pairs")
    pairs.select("v", "w").append_into(sqlite(tmp_path / "p.db", "out"), name="out")
    shop.run({"topology.max.attempts": 1}, MemoryStore(), "local", timeout_s=PATIENCE_S)
    with closing(sqlite3.connect(tmp_path / "p.db")) as connection:
        ((table,),) = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND sql LIKE '%waiting%'"
        ).fetchall()
        (largest,) = connection.execute(f'SELECT max(length(waiting)) FROM "{table}"').fetchone()
        (found,) = connection.execute("SELECT count(*) FROM out").fetchone()
    assert 0 < largest < 1_000_000 and found == 40 * 20


@settings(max_examples=examples(60))
@given(
    st.tuples(
        *[
            st.lists(
                st.tuples(st.sampled_from(["order", "payment"]), st.sampled_from("ab"), st.integers(1, 40)),
                min_size=1,
                max_size=12,
            )
        ]
        * 2
    ),
    st.integers(1, 9),
    FAULTS,
    st.sampled_from(["inner", "left", "right", "outer"]),
    st.booleans(),
    st.sampled_from([1, 2, ROW_RECORDS]),
)
def test_batches_tasks_and_failures_change_no_pair(
    drawn: Any, take: int, faults: Any, how: str, opaque: bool, row_records: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(join_buffer, "ROW_RECORDS", row_records)
        check(drawn, take, faults, how=how, opaque=opaque)


def check(drawn: Any, take: int, faults: Any, *, how: str, opaque: bool) -> None:
    """Run, and compare what was sent with what all pairs of all records give."""
    number = iter(range(1_000))
    partitions = {
        source: [[kind, key, source, at, next(number)] for kind, key, at in sorted(rows, key=lambda each: each[2])]
        for source, rows in enumerate(drawn)
    }
    transactions = max(-(-len(rows) // take) for rows in partitions.values())
    chosen = [each for each in faults if each.txid <= transactions]
    done = run_on(topology(how, opaque=opaque), partitions, take=take, faults=chosen)
    watermark = min(rows[-1][3] for rows in partitions.values())
    rows = [row for its in partitions.values() for row in its]
    orders, payments = ([row for row in rows if row[0] == kind] for kind in ("order", "payment"))
    pairs = [(o[1], o[4], p[4]) for o in orders for p in payments if o[1] == p[1] and abs(o[3] - p[3]) <= 5]
    for side, its in ((1, orders), (2, payments)):
        if how == "outer" or how == ("left", "right")[side - 1]:
            found = {pair[side] for pair in pairs}
            pairs += [
                (row[1], row[4], None) if side == 1 else (row[1], None, row[4])
                for row in its
                if row[4] not in found and row[3] + 5 < watermark
            ]
    assert sent(done) == sorted(pairs, key=lambda row: tuple((each is None, each) for each in row))
