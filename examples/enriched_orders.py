"""Orders and payments, two topics with a schema each, meet in one topology.

The spout has a stream per topic: orders are JSON, payments are Avro. They meet in two ways:

* ``LatestPayment``, a committer, keeps the latest payment of each order in a state, and adds it to
  the order, whichever of the two comes first, and however much later the other one comes.
* ``PaidAtOnce`` hands both streams of a batch to Spark SQL, and joins what came together.

These are the two joins that no operator of a pipeline does. The others are in
``docs/howto/joins.md``.

    ratchet run examples.enriched_orders:topology --set app.kafka=127.0.0.1:9092
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from framework.topology import FencedState
from ratchet import (
    AvroCodec,
    BaseTransactionalBolt,
    Committer,
    Count,
    DataFrameBolt,
    Fields,
    JsonCodec,
    MapState,
    OpaqueKafkaTransactionalSpout,
    OpaqueMapState,
    OutputCollector,
    OutputFieldsDeclarer,
    SqliteBackend,
    StateCommitter,
    Sum,
    TopicStream,
    Topology,
    TopologyContext,
    TransactionalTopologyBuilder,
    TransactionAttempt,
    Tuple,
)

ORDER = Fields(order=str, customer=str, cents=int)
PAYMENT = Fields(order=str, paid=int)
PAYMENT_SCHEMA = {
    "type": "record",
    "name": "Payment",
    "fields": [{"name": "order", "type": "string"}, {"name": "paid", "type": "long"}],
}


class LatestPayment(BaseTransactionalBolt, Committer):
    """Keeps the latest row of each side by the number of the order, and writes the joined row when
    either of them changes."""

    def __init__(self, orders: MapState, payments: MapState, joined: MapState) -> None:
        self.orders, self.payments, self.joined = orders, payments, joined

    def states(self) -> Sequence[FencedState]:
        return [self.orders, self.payments, self.joined]

    def prepare(
        self,
        conf: Mapping[str, Any],
        context: TopologyContext,
        collector: OutputCollector,
        batch_id: TransactionAttempt,
    ) -> None:
        self.attempt = batch_id
        self.new_orders: dict[str, tuple[str, int]] = {}
        self.new_payments: dict[str, int] = {}

    def execute(self, tup: Tuple) -> None:
        if tup.source_stream == "orders":
            self.new_orders[tup["order"]] = (tup["customer"], tup["cents"])
        else:
            self.new_payments[tup["order"]] = tup["paid"]

    def finish_batch(self) -> None:
        changed = sorted({*self.new_orders, *self.new_payments})
        for state in (self.orders, self.payments, self.joined):
            state.begin_commit(self.attempt)
        self.orders.multi_put(list(self.new_orders), list(self.new_orders.values()))
        self.payments.multi_put(list(self.new_payments), list(self.new_payments.values()))
        orders, payments = self.orders.multi_get(changed), self.payments.multi_get(changed)
        for number, order, paid in zip(changed, orders, payments, strict=True):
            if order is not None:
                customer, cents = order
                self.joined.multi_put([number], [(customer, cents, paid or 0)])
        for state in (self.orders, self.payments, self.joined):
            state.commit(self.attempt)


class PaidAtOnce(DataFrameBolt):
    """The orders whose payment is in the same batch."""

    deterministic = True

    def execute_dataframes(self, frames: Mapping[str, Any]) -> Any:
        orders, payments = frames["spout/orders"], frames["spout/payments"]
        return orders.join(payments, "order").select("customer", "paid")

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(Fields(customer=str, paid=int))


def spout(app: Mapping[str, Any]) -> OpaqueKafkaTransactionalSpout:
    """One stream per topic. A payment that cannot be decoded is left out; an order that cannot be
    decoded stops the topology."""
    return OpaqueKafkaTransactionalSpout(
        streams={
            "orders": TopicStream(JsonCodec(ORDER), topic=app.get("app.orders")),
            "payments": TopicStream(AvroCodec(PAYMENT_SCHEMA), topic=app.get("app.payments"), on_bad_record="skip"),
        },
        bootstrap_servers=app["app.kafka"],
    )


def topology(app: Mapping[str, Any]) -> Topology:
    database = Path(str(app.get("app.database", "orders.db")))

    def state(table: str, value: Fields) -> MapState:
        return OpaqueMapState(SqliteBackend(database, table, Fields(order=str), value))

    join = LatestPayment(
        state("orders", Fields(customer=str, cents=int)),
        state("payments", Fields(paid=int)),
        state("joined", Fields(customer=str, cents=int, paid=int)),
    )
    at_once = StateCommitter(
        OpaqueMapState(SqliteBackend(database, "paid_at_once")), ["customer"], {"orders": Count(), "paid": Sum("paid")}
    )
    by_order = Fields("order")
    builder = TransactionalTopologyBuilder("enriched-orders", "spout", spout(app), 2)
    builder.set_bolt("join", join, 2).fields_grouping("spout", by_order, "orders").fields_grouping(
        "spout", by_order, "payments"
    )
    builder.set_bolt("paid-at-once", PaidAtOnce(), 2).shuffle_grouping("spout", "orders").shuffle_grouping(
        "spout", "payments"
    )
    builder.set_bolt("at-once", at_once).fields_grouping("paid-at-once", Fields("customer"))
    return builder.build()
