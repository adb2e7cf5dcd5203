"""A topology over lists, as a user's test runs it: what it emits, what its sinks hold, and what
goes wrong when the test says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from framework import (
    ArrowBolt,
    BaseBasicBolt,
    BaseBatchBolt,
    BaseRichBolt,
    BaseRichSpout,
    BaseTransactionalBolt,
    Committer,
    CoreRun,
    CoreTopologyFailed,
    DataFrameBolt,
    Fields,
    Topology,
    TopologyBuilder,
    TopologyFailed,
    TransactionalTopologyBuilder,
)
from framework.errors import ConfigError
from framework.testing import Fault, Outside, crash, fail_attempt, replay, run_core_on, run_on
from sinks import (
    AppendCommitter,
    Count,
    KafkaSink,
    NonTransactionalMapState,
    OpaqueMapState,
    ParquetTable,
    SqliteBackend,
    StateCommitter,
    Sum,
    TransactionalMapState,
)
from spouts import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from tests.kit.waiting import wait_for

ORDER = Fields(customer=str, cents=int)
ORDERS = [{"customer": "ann", "cents": 5}, ["bob", 7], ("ann", 11), ["eve", 13]]
TOTALS = [
    {"customer": "ann", "orders": 2, "cents": 16},
    {"customer": "bob", "orders": 1, "cents": 7},
    {"customer": "eve", "orders": 1, "cents": 13},
]


class Large(BaseBasicBolt):
    """Passes on orders of 6 cents and more, and the others on a stream of their own."""

    deterministic = True

    def execute(self, tup: Any, collector: Any) -> None:
        collector.emit([tup["customer"], tup["cents"]], "default" if tup["cents"] >= 6 else "small")

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(ORDER)
        declarer.declare(ORDER, "small")


class Invoices(BaseTransactionalBolt, Committer):
    """Writes the sum of each batch outside: under its txid, or, wrongly, at the end."""

    def __init__(self, outside: Outside, *, appends: bool = False) -> None:
        self.outside, self.appends = outside, appends

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.attempt, self.cents = batch_id, 0

    def execute(self, tup: Any) -> None:
        self.cents += tup["cents"]

    def finish_batch(self) -> None:
        if self.appends:
            self.outside.append(self.cents)
        else:
            self.outside.put(self.attempt.txid, self.cents)


def shop(folder: Path, *, opaque: bool = True, outside: Outside | None = None, appends: bool = False) -> Topology:
    kind = OpaqueMemoryTransactionalSpout if opaque else MemoryTransactionalSpout
    state = OpaqueMapState if opaque else TransactionalMapState
    builder = TransactionalTopologyBuilder("shop", "spout", kind({0: []}, ORDER, 1))
    builder.set_bolt("large", Large(), 2).shuffle_grouping("spout")
    builder.set_bolt(
        "totals",
        StateCommitter(
            state(SqliteBackend(folder / "shop.db", "totals")), ["customer"], {"orders": Count(), "cents": Sum("cents")}
        ),
        2,
    ).fields_grouping("spout", Fields("customer"))
    builder.set_bolt("rows", AppendCommitter(ParquetTable(folder / "rows"))).global_grouping("large")
    if outside is not None:
        builder.set_bolt("invoices", Invoices(outside, appends=appends)).global_grouping("spout")
    return builder.build()


@pytest.mark.parametrize("opaque", [True, False])
def test_a_topology_over_a_list_is_one_line_and_its_sinks_are_copies(tmp_path: Path, opaque: bool) -> None:
    done = run_on(shop(tmp_path, opaque=opaque), ORDERS)
    assert done.table("totals") == TOTALS
    assert done.table("rows") == [
        {"customer": "ann", "cents": 11},
        {"customer": "bob", "cents": 7},
        {"customer": "eve", "cents": 13},
    ]
    assert done.rows("large", "small") == [{"customer": "ann", "cents": 5}]
    assert [row["customer"] for row in done.rows("spout")] == ["ann", "bob", "ann", "eve"]
    assert (done.transactions, done.attempts, done.left_out, done.story) == (1, {1: 1}, {}, [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.each_value_once
@pytest.mark.parametrize(
    ("faults", "attempts"),
    [
        ([], {1: 1, 2: 1, 3: 1, 4: 1}),
        ([fail_attempt()], {1: 2, 2: 1, 3: 1, 4: 1}),
        ([fail_attempt(2), fail_attempt(2)], {1: 1, 2: 3, 3: 1, 4: 1}),
        ([replay(4)], {1: 1, 2: 1, 3: 1, 4: 2}),
        ([crash(3)], {1: 1, 2: 1, 3: 2, 4: 1}),
        ([crash(1, "written"), replay(1), crash(2, "between_phases")], {1: 3, 2: 2, 3: 1, 4: 1}),
    ],
    ids=["calm", "fails", "fails-twice", "replay", "crash", "all"],
)
@pytest.mark.parametrize("opaque", [True, False])
def test_whatever_goes_wrong_every_sink_and_every_committed_row_is_the_same(
    tmp_path: Path, opaque: bool, faults: list[Fault], attempts: dict[int, int]
) -> None:
    outside = Outside("invoices")
    done = run_on(shop(tmp_path, opaque=opaque, outside=outside), ORDERS, take=1, faults=faults)
    assert done.table("totals") == TOTALS
    assert len(done.table("rows")) == 3
    assert [row["cents"] for row in done.rows("spout")] == [5, 7, 11, 13]
    assert outside.values == {1: 5, 2: 7, 3: 11, 4: 13}
    assert (done.transactions, done.attempts) == (4, attempts)
    assert len([line for line in done.story if line.startswith("transaction")]) == len(faults)


def test_a_committer_that_is_wrong_is_seen_to_be(tmp_path: Path) -> None:
    outside = Outside()
    run_on(shop(tmp_path, outside=outside, appends=True), ORDERS, take=2)
    assert outside.items == [12, 24]
    for fault in (replay(2), crash(2, "written")):
        run_on(shop(tmp_path, outside=outside, appends=True), ORDERS, take=2, faults=[fault])
        assert outside.items == [12, 24, 24]
    run_on(shop(tmp_path, outside=outside, appends=True), ORDERS, take=2, faults=[crash(2), fail_attempt(1)])
    assert outside.items == [12, 24]  # nothing was committed twice


def test_a_trouble_that_never_comes_fails_the_test(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="transaction 3: the driver dies between the phases; there were 2"):
        run_on(shop(tmp_path), ORDERS, take=2, faults=[crash(3)])
    with pytest.raises(ConfigError, match="crash.when=.*must be 'between_phases' or 'written', not 'later'"):
        crash(1, "later")  # type: ignore[arg-type]


class Refuses(BaseBasicBolt):
    def execute(self, tup: Any, collector: Any) -> None:
        raise ZeroDivisionError(f"cannot stomach {tup['cents']}")

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(ORDER)


def test_what_a_bolt_raises_comes_out_with_its_component(tmp_path: Path) -> None:
    builder = TransactionalTopologyBuilder("t", "spout", MemoryTransactionalSpout({0: []}, ORDER, 1))
    builder.set_bolt("refuses", Refuses()).shuffle_grouping("spout")
    with pytest.raises(TopologyFailed, match=r"refuses\[0\]: ZeroDivisionError: cannot stomach 5"):
        run_on(builder.build(), ORDERS)


class Mails(ArrowBolt, Committer):
    def execute_arrow(self, batch: Any) -> None:
        raise AssertionError("it is left out")

    def finish_batch(self) -> None:
        raise AssertionError("it is left out")


def test_what_writes_outside_is_left_out_and_named_and_what_is_asked_for_wrongly_too(tmp_path: Path) -> None:
    builder = TransactionalTopologyBuilder(
        "t", "spout", MemoryTransactionalSpout({0: []}, ORDER, 1), at_least_once=True
    )
    plain = KafkaSink("out", key="customer", value=["cents"], at_least_once=True)
    builder.set_bolt("kafka", plain).global_grouping("spout")
    builder.set_bolt("mail", Mails()).global_grouping("spout")
    state = NonTransactionalMapState(SqliteBackend(tmp_path / "x.db", "n"))
    builder.set_bolt("twice", StateCommitter(state, ["customer"], {"n": Count()})).global_grouping("spout")
    done = run_on(builder.build(), ORDERS)
    assert list(done.left_out) == ["kafka", "mail"] and "Outside of framework.testing" in done.left_out["mail"]
    with pytest.raises(ConfigError, match="'kafka' has no state 0; it was left out: it writes at least once.*'twice'"):
        done.table("kafka")
    with pytest.raises(ConfigError, match="may add a batch twice"):
        done.table("twice")
    with pytest.raises(
        ConfigError, match="nothing called 'spout' emits on stream 'other'; there are: spout on 'default', twice on"
    ):
        done.rows("spout", "other")
    with pytest.raises(ConfigError, match="record 1 has 1 values, and the spout emits customer, cents"):
        run_on(builder.build(), [["ann", 1], ["bob"]])
    with pytest.raises(ConfigError, match="take must be 1 or more, not 0"):
        run_on(builder.build(), ORDERS, take=0)


class PerCustomer(DataFrameBolt):
    deterministic = True

    def execute_dataframe(self, frame: Any) -> Any:
        return frame.groupBy("customer").count().withColumnRenamed("count", "orders")

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(customer=str, orders=int))


@pytest.mark.spark
def test_a_dataframe_bolt_runs_by_spark_in_this_process(spark: str) -> None:
    builder = TransactionalTopologyBuilder("t", "spout", MemoryTransactionalSpout({0: []}, ORDER, 1))
    builder.set_bolt("per-customer", PerCustomer()).shuffle_grouping("spout")
    done = run_on(builder.build(), ORDERS, faults=[fail_attempt()])
    assert sorted(row["orders"] for row in done.rows("per-customer")) == [1, 1, 2]


class PartialSum(BaseBatchBolt):
    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.collector, self.cents = collector, 0

    def execute(self, tup: Any) -> None:
        self.cents += tup["cents"]

    def finish_batch(self) -> None:
        self.collector.emit([self.cents])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(cents=int))


def test_records_are_given_by_partition_too() -> None:
    builder = TransactionalTopologyBuilder("t", "spout", MemoryTransactionalSpout({0: []}, ORDER, 1), 2)
    builder.set_bolt("sum", PartialSum()).global_grouping("spout")
    done = run_on(builder.build(), {0: ORDERS[:3], 1: ORDERS[3:]}, take=1)
    assert [row["cents"] for row in done.rows("sum")] == [18, 7, 11]


# --- core topologies ------------------------------------------------------------------------------


class Sentences(BaseRichSpout):
    """A source that a test must not reach."""

    def next_tuple(self) -> None:
        raise AssertionError("the real source was asked")

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(sentence=str))


class Split(BaseBasicBolt):
    def execute(self, tup: Any, collector: Any) -> None:
        for word in tup["sentence"].split():
            collector.emit([word])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


class NeverAcks(BaseRichBolt):
    def execute(self, tup: Any) -> None:
        return None


def words(*spouts: str, bolt: Any = None) -> Any:
    builder = TopologyBuilder("words")
    for spout in spouts or ("spout",):
        builder.set_spout(spout, Sentences(), 2)
    declarer = builder.set_bolt("split", bolt or Split(), 2)
    for spout in spouts or ("spout",):
        declarer.shuffle_grouping(spout)
    return builder.build()


def test_a_core_topology_runs_over_a_list_and_records_may_come_again() -> None:
    done = run_core_on(words(), [["the cow"], {"sentence": "a dog"}])
    assert [row["word"] for row in done.rows("split")] == ["the", "cow", "a", "dog"]
    assert sorted(done.acked["spout"]) == [0, 1]
    again = run_core_on(words(), [["the cow"], ["a dog"]], again=[0])
    assert sorted(row["word"] for row in again.rows("split")) == ["a", "cow", "cow", "dog", "the", "the"]
    assert sorted(again.acked["spout"]) == [0, 1]


def test_a_core_topology_with_several_spouts_gets_records_for_each() -> None:
    done = run_core_on(words("a", "b"), {"a": [["x"]], "b": [["y"], ["z"]]})
    assert sorted(row["word"] for row in done.rows("split")) == ["x", "y", "z"]
    with pytest.raises(ConfigError, match=r"has several spouts: give records by spout \(a, b\)"):
        run_core_on(words("a", "b"), [["x"]])
    with pytest.raises(ConfigError, match="there is no spout 'c'; there are: a, b"):
        run_core_on(words("a", "b"), {"c": [["x"]]})
    with pytest.raises(ConfigError, match="record 1 of spout 'spout' has 2 values"):
        run_core_on(words(), [["x"], ["y", "z"]])
    with pytest.raises(ConfigError, match="has 1 records, so there is no record 3"):
        run_core_on(words(), [["x"]], again=[3])


def test_a_core_topology_that_fails_or_never_acks_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def idle(run: CoreRun, timeout_s: float | None = None) -> None:
        wait_for(lambda: run.status().pending == 1)  # a run may be slow to begin
        wait(run, timeout_s)

    wait = CoreRun.wait_until_idle
    with monkeypatch.context() as patch, pytest.raises(TimeoutError, match="1 tuples pending"):
        patch.setattr(CoreRun, "wait_until_idle", idle)
        run_core_on(words(bolt=NeverAcks()), [["x"]], timeout_s=0.5)

    class Fails(Split):
        def execute(self, tup: Any, collector: Any) -> None:
            raise ZeroDivisionError("no")

    with pytest.raises(CoreTopologyFailed, match="ZeroDivisionError: no"):
        run_core_on(words(bolt=Fails()), [["x"]])
