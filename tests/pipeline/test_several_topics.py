"""Several topics with a codec each in one topology: two schemas meet, exactly once, and every tool
that looks at a topology knows the streams."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from examples import enriched_orders
from framework import (
    BaseBasicBolt,
    Config,
    FailedException,
    Fields,
    Topology,
    TopologyFailed,
    TransactionalTopologyBuilder,
    submit,
)
from framework.errors import BadRecordError, ConfigError
from framework.inspect.explain import explain
from framework.inspect.find_poison import find_poison
from framework.inspect.rebuild import rebuild
from framework.inspect.replay import plan_to_replay, replay
from framework.inspect.verify import verify
from framework.preflight import preflight
from framework.testing import SimulationFailed, simulate
from framework.testing.simulation.sample_records import read_sample, sample_from_source
from framework.transactions import MemoryStore
from framework.transactions.documents import read_transaction
from framework.transactions.undo import undo
from sinks import Count, DeadLetterTable, OpaqueMapState, SqliteBackend, StateCommitter, Sum, TransactionalMapState
from spouts import AvroCodec, JsonCodec, KafkaTransactionalSpout, OpaqueKafkaTransactionalSpout, TopicStream
from tests.kit.avro import encoded
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.integration


def send(topics: Topics, topic: str, key: str, value: bytes) -> None:
    producer = topics.producer()
    producer.produce(topic, value, key=key)
    producer.arrived()


class Shop:
    """The topics of ``examples.enriched_orders``, and what they should lead to."""

    def __init__(self, topics: Topics, name: str, folder: Path) -> None:
        self.topics = topics
        self.orders, self.payments = topics.create(f"{name}-orders", 3), topics.create(f"{name}-payments", 2)
        self.database = folder / "orders.db"
        self.app = {
            "app.kafka": topics.bootstrap_servers,
            "app.orders": self.orders,
            "app.payments": self.payments,
            "app.database": str(self.database),
        }
        self.sent_orders: dict[str, tuple[str, int]] = {}
        self.sent_payments: dict[str, int] = {}

    def order(self, number: str, customer: str, cents: int) -> None:
        self.sent_orders[number] = (customer, cents)
        row = {"order": number, "customer": customer, "cents": cents}
        send(self.topics, self.orders, number, json.dumps(row).encode())

    def pay(self, number: str, paid: int) -> None:
        self.sent_payments[number] = paid
        (value,) = encoded(enriched_orders.PAYMENT_SCHEMA, {"order": number, "paid": paid})
        send(self.topics, self.payments, number, value)

    def joined(self) -> dict[str, tuple[str, int, int]]:
        """What should be in the table: each order with its latest payment."""
        return {number: (*order, self.sent_payments.get(number, 0)) for number, order in self.sent_orders.items()}

    def rows(self) -> dict[str, tuple[Any, ...]]:
        with sqlite3.connect(self.database) as connection:
            found = connection.execute('SELECT "order", customer, cents, paid FROM joined_live').fetchall()
        return {number: (customer, cents, paid) for number, customer, cents, paid in found}


@pytest.fixture
def shop(topics: Topics, name: str, tmp_path: Path) -> Shop:
    return Shop(topics, name, tmp_path)


#: How many more commits of the join fail after all was written. Global, because bolts are copied.
failures = {"left": 0}


class FailsSometimes(enriched_orders.LatestPayment):
    def finish_batch(self) -> None:
        super().finish_batch()
        if failures["left"]:
            failures["left"] -= 1
            raise FailedException("after everything was written")


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize("executor", ["local", "spark"])
def test_an_order_meets_its_latest_payment_whichever_comes_first_and_later_or_at_once(
    shop: Shop, executor: str, spark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enriched_orders, "LatestPayment", FailsSometimes)
    store = MemoryStore()
    built = enriched_orders.topology(shop.app)

    def catch_up() -> None:
        failures["left"] = 1 if executor == "local" else 0  # tasks on Spark are other processes
        with submit(built, {"spark.master": spark}, store, executor) as run:
            run.wait_until_caught_up(PATIENCE_S)
        assert failures["left"] == 0

    shop.order("o1", "ann", 100)
    shop.order("o2", "bob", 200)
    shop.pay("o1", 40)
    shop.pay("o3", 300)  # before its order
    send(shop.topics, shop.payments, "o9", b"\xff")  # is left out, as the stream says
    catch_up()
    assert shop.rows() == shop.joined() == {"o1": ("ann", 100, 40), "o2": ("bob", 200, 0)}

    shop.pay("o1", 100)  # takes the place of the first
    shop.pay("o2", 200)  # long after its order
    shop.order("o3", "eve", 300)
    catch_up()
    assert shop.rows() == shop.joined() == {"o1": ("ann", 100, 100), "o2": ("bob", 200, 200), "o3": ("eve", 300, 300)}

    at_once = built["at-once"].states[0]
    assert isinstance(at_once, OpaqueMapState)
    assert at_once.get("ann") == (1, 40)  # only o1 and its first payment were in one batch
    assert at_once.get("bob") is None and at_once.get("eve") is None
    report = verify(built, store)
    assert report.right, report.lines()
    assert {each.difference_count for each in report.states} == {0}


@pytest.mark.slow
def test_an_order_that_cannot_be_decoded_stops_the_topology_and_names_its_topic(shop: Shop) -> None:
    send(shop.topics, shop.orders, "o1", b"no order")
    with (
        pytest.raises(BadRecordError, match=f"topic '{shop.orders}', partition ., offset 0"),
        submit(enriched_orders.topology(shop.app), {}, MemoryStore(), "local") as run,
    ):
        run.wait_until_caught_up(PATIENCE_S)


# --- the tools ------------------------------------------------------------------------------------


class Touchy(BaseBasicBolt):
    """Passes orders on, and cannot stomach one customer."""

    deterministic = True

    def __init__(self, poison: str | None = None) -> None:
        self.poison = poison

    def execute(self, tup: Any, collector: Any) -> None:
        if tup["customer"] == self.poison:
            raise ZeroDivisionError("cannot stomach this")
        collector.emit([tup["customer"], tup["cents"]])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(customer=str, cents=int))


def figures(shop: Shop, *, opaque: bool, poison: str | None = None) -> Topology:
    """Totals of each topic in a table of its own, and dead letters of the payments."""
    state = OpaqueMapState if opaque else TransactionalMapState
    spout = (OpaqueKafkaTransactionalSpout if opaque else KafkaTransactionalSpout)(
        streams={
            "orders": TopicStream(JsonCodec(enriched_orders.ORDER), topic=shop.orders),
            "payments": TopicStream(
                AvroCodec(enriched_orders.PAYMENT_SCHEMA), topic=shop.payments, on_bad_record="dead_letter"
            ),
        },
        bootstrap_servers=shop.topics.bootstrap_servers,
        dead_letters=DeadLetterTable(state(SqliteBackend(shop.database, "bad"))),
        batch_records_max=3,
    )
    builder = TransactionalTopologyBuilder(shop.orders, "spout", spout, 2)
    builder.set_bolt("touchy", Touchy(poison), 2).shuffle_grouping("spout", "orders")
    builder.set_bolt(
        "customers",
        StateCommitter(
            state(SqliteBackend(shop.database, "customers")), ["customer"], {"n": Count(), "cents": Sum("cents")}
        ),
    ).fields_grouping("touchy", Fields("customer"))
    builder.set_bolt(
        "paid", StateCommitter(state(SqliteBackend(shop.database, "paid")), ["order"], {"paid": Sum("paid")})
    ).fields_grouping("spout", Fields("order"), "payments")
    return builder.build()


def fill(shop: Shop) -> None:
    for number in range(6):
        shop.order(f"o{number}", "ann" if number % 2 else "bob", number)
        shop.pay(f"o{number}", number * 10)
    send(shop.topics, shop.payments, "o9", b"\xff")


def run(built: Topology, store: MemoryStore) -> None:
    with submit(built, {}, store, "local") as running:
        running.wait_until_caught_up(PATIENCE_S)


def held(built: Topology, component: str, key: str) -> Any:
    state = built[component].states[0]
    assert isinstance(state, (OpaqueMapState, TransactionalMapState))
    return state.get(key)


@pytest.mark.slow
@pytest.mark.parametrize("opaque", [True, False], ids=["opaque", "idempotent"])
def test_totals_of_both_topics_are_right_and_every_tool_knows_the_streams(shop: Shop, opaque: bool) -> None:
    store = MemoryStore()
    fill(shop)
    built = figures(shop, opaque=opaque)
    run(built, store)
    assert (held(built, "customers", "ann"), held(built, "customers", "bob")) == ((3, 9), (3, 6))
    assert [held(built, "paid", f"o{number}") for number in range(6)] == [0, 10, 20, 30, 40, 50]
    with sqlite3.connect(shop.database) as connection:
        letters = connection.execute("SELECT topic, record_value FROM bad_live").fetchall()
    assert letters == [(shop.payments, b"\xff")]

    assert verify(built, store).right
    txid = 2
    plan = plan_to_replay(store, built, txid)
    assert {partition.rpartition("/")[0] for partition in plan[1]} == {shop.orders, shop.payments}
    assert replay(built, store, planned=plan).agrees in (True, None)
    shown = explain(built, store, state="customers", key="ann")
    assert shown.agrees
    causes = [cause for step in shown.steps for cause in step.causes]
    assert len(causes) == 3 and {cause.partition.rpartition("/")[0] for cause in causes} == {shop.orders}
    assert all(cause.record is not None and b'"ann"' in (cause.record.value or b"") for cause in causes)

    report = rebuild(built, store, state="paid", take_over=True)
    assert report.difference is not None and report.difference.difference_count == 0
    assert held(built, "paid", "o5") == 50

    edges = [(each["source"], each["stream"], each["target"]) for each in built.shape()["edges"]]
    assert ("spout", "orders", "touchy") in edges and ("spout", "payments", "paid") in edges
    findings = [each for each in preflight(built, Config.of({}), "local") if each.error is not None]
    assert [each.subject for each in findings] == ["zookeeper"] or all("ookeeper" in each.text for each in findings)


@pytest.mark.slow
def test_a_record_of_one_stream_is_left_out_by_undo_and_becomes_a_dead_letter_where_its_stream_has_them(
    shop: Shop,
) -> None:
    store = MemoryStore()
    fill(shop)
    built = figures(shop, opaque=True)
    run(built, store)
    shop.order("o6", "ann", 1_000)
    shop.pay("o6", 1_000)
    run(built, store)
    last = max(txid for txid in range(1, 50) if read_transaction(store, built.id, txid) is not None)
    record = read_transaction(store, built.id, last)
    assert record is not None
    newest = {
        partition: [int(meta["next_offset"]) - 1]
        for partition, meta in record.plan.items()
        if int(meta["next_offset"]) > int(meta["first_offset"])
    }
    assert undo(built, store, leave_out=newest) == last
    run(built, store)
    by_topic = {partition.rpartition("/")[0] for partition in newest}
    assert held(built, "customers", "ann") == ((3, 9) if shop.orders in by_topic else (4, 1009))
    assert held(built, "paid", "o6") == (None if shop.payments in by_topic else 1_000)
    with sqlite3.connect(shop.database) as connection:
        letters = connection.execute("SELECT topic, error FROM bad_live WHERE error LIKE 'left out%'").fetchall()
    assert letters == [(shop.payments, "left out by ratchet undo --skip-records")] * (shop.payments in by_topic)
    assert verify(built, store).right


@pytest.mark.slow
def test_the_record_that_a_bolt_cannot_stomach_is_found_among_the_streams(shop: Shop) -> None:
    store = MemoryStore()
    fill(shop)
    shop.order("o7", "eve", 7)
    built = figures(shop, opaque=True, poison="eve")
    with pytest.raises(TopologyFailed, match="cannot stomach this"):
        run(built, store)
    found = find_poison(built, store)
    assert found is not None
    assert [partition.rpartition("/")[0] for partition in found.ranges] == [shop.orders]
    assert [dict(row) for row in found.rows] == [{"order": "o7", "customer": "eve", "cents": 7}]


# --- the simulator --------------------------------------------------------------------------------


class Adds(enriched_orders.LatestPayment):
    """Adds the payment to the one before, which a replay of an opaque batch would do twice, if it
    did not begin by what the state held before."""

    def finish_batch(self) -> None:
        self.seen.update(self.new_payments)
        self.new_payments = {key: len(self.seen) for key in self.new_payments}
        super().finish_batch()

    seen: dict[str, int] = {}


ORDERS = [{"order": f"o{number}", "customer": "ann", "cents": number} for number in range(4)]
PAYMENTS = [[f"o{number}", number * 10] for number in range(3, -1, -1)]


def offline(folder: Path, join: type[enriched_orders.LatestPayment], patch: pytest.MonkeyPatch) -> Topology:
    patch.setattr(enriched_orders, "LatestPayment", join)
    return enriched_orders.topology({"app.kafka": "127.0.0.1:1", "app.database": str(folder / "x.db")})


@pytest.mark.slow
def test_a_join_is_simulated_over_records_by_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = offline(tmp_path, enriched_orders.LatestPayment, monkeypatch)
    report = simulate(built, {"orders": ORDERS, "payments": PAYMENTS}, schedules=40)
    assert "join" not in report.left_out
    with pytest.raises(SimulationFailed, match="'join'"):
        simulate(offline(tmp_path, Adds, monkeypatch), {"orders": ORDERS, "payments": PAYMENTS}, schedules=40)


def test_a_sample_names_the_stream_of_each_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = offline(tmp_path, enriched_orders.LatestPayment, monkeypatch)
    file = tmp_path / "sample.jsonl"
    lines: list[Mapping[str, Any]] = [{"orders": ORDERS[0]}, {"payments": {"order": "o0", "paid": 5}}]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    sample = read_sample(built, file)
    assert sorted((stream, row.to_pylist()[0]["order"]) for its in sample.values() for stream, row in its) == [
        ("orders", "o0"),
        ("payments", "o0"),
    ]
    file.write_text(json.dumps(ORDERS[0]), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"line 1: write a JSON object that names the stream.*orders, payments"):
        read_sample(built, file)
    with pytest.raises(ConfigError, match=r"no default stream: give records by stream.*orders, payments"):
        simulate(built, ORDERS, schedules=1)


@pytest.mark.slow
def test_a_sample_of_the_source_has_records_of_both_streams(shop: Shop) -> None:
    fill(shop)
    sample = sample_from_source(enriched_orders.topology(shop.app), {}, 100)
    streams = [stream for its in sample.values() for stream, _ in its]
    assert (streams.count("orders"), streams.count("payments")) == (6, 6)
