"""Orders that get the names of their customers, who come by a topic that is read first."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from framework import (
    BaseTransactionalBolt,
    Committer,
    Fields,
    Topology,
    TransactionalTopologyBuilder,
)
from framework.topology import FencedState
from sinks import MapState, OpaqueMapState, SqliteBackend, TransactionalMapState
from spouts import JsonCodec, KafkaTransactionalSpout, OpaqueKafkaTransactionalSpout, TopicStream
from tests.kit.topics import Topics

CUSTOMER, ORDER = Fields(customer=str, name=str), Fields(order=str, customer=str)
UNKNOWN = "unknown"
#: The txid whose batch fails for good; None: none. Global, because bolts are copied.
dies_at: dict[str, int | None] = {"txid": None}


class Enrich(BaseTransactionalBolt, Committer):
    """Writes each order with the name that its customer has then."""

    deterministic = True

    def __init__(self, customers: MapState, orders: MapState) -> None:
        self.customers, self.orders = customers, orders

    def states(self) -> Sequence[FencedState]:
        return [self.customers, self.orders]

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.attempt = batch_id
        self.new_customers: dict[str, str] = {}
        self.new_orders: dict[str, str] = {}

    def execute(self, tup: Any) -> None:
        if self.attempt.txid == dies_at["txid"]:
            raise ValueError("dies in the middle")
        if tup.source_stream == "customers":
            self.new_customers[tup["customer"]] = tup["name"]
        else:
            self.new_orders[tup["order"]] = tup["customer"]

    def finish_batch(self) -> None:
        for state in self.states():
            state.begin_commit(self.attempt)
        self.customers.multi_put(list(self.new_customers), list(self.new_customers.values()))
        names = self.customers.multi_get(list(self.new_orders.values()))
        self.orders.multi_put(list(self.new_orders), [name or UNKNOWN for name in names])
        for state in self.states():
            state.commit(self.attempt)


def topology(app: Mapping[str, Any]) -> Topology:
    """The settings are ``app.kafka``, ``app.name`` (the topics are NAME-orders and NAME-customers),
    ``app.database``, and those with a default below."""
    name, opaque = app["app.name"], app.get("app.opaque", True)

    def state(table: str, key: str, value: str) -> MapState:
        backend = SqliteBackend(Path(app["app.database"]), table, Fields(**{key: str}), Fields(**{value: str}))
        return OpaqueMapState(backend) if opaque else TransactionalMapState(backend)

    spout = (OpaqueKafkaTransactionalSpout if opaque else KafkaTransactionalSpout)(
        streams={
            "orders": TopicStream(JsonCodec(ORDER), topic=f"{name}-orders"),
            "customers": TopicStream(JsonCodec(CUSTOMER), topic=f"{name}-customers"),
        },
        bootstrap_servers=app["app.kafka"],
        start=app.get("app.start", "earliest"),
        read_first=[f"{name}-customers"] if app.get("app.read_first", True) else [],
        batch_records_max=int(app.get("app.records", 40)),
    )
    builder = TransactionalTopologyBuilder(name, "spout", spout, 2)
    enrich = Enrich(state("customers", "customer", "name"), state("orders", "order", "name"))
    builder.set_bolt("enrich", enrich).global_grouping("spout", "orders").global_grouping("spout", "customers")
    return builder.build()


class Enriched:
    """The topics of ``topology``, and what it wrote."""

    def __init__(self, topics: Topics, name: str, folder: Path, **settings: Any) -> None:
        self.topics, self.name = topics, name
        self.orders, self.customers = topics.create(f"{name}-orders", 2), topics.create(f"{name}-customers", 3)
        self.database = folder / "enriched.db"
        self.app = {
            "app.kafka": topics.bootstrap_servers,
            "app.name": name,
            "app.database": str(self.database),
            **{f"app.{key}": value for key, value in settings.items()},
        }
        self.topology = topology(self.app)

    def add_customers(self, numbers: range) -> None:
        """Customer ``n`` is called ``name n``."""
        for partition in range(3):
            rows = [{"customer": f"{n}", "name": f"name {n}"} for n in numbers if n % 3 == partition]
            self.topics.send(self.customers, [json.dumps(row).encode() for row in rows], partition)

    def add_orders(self, numbers: range) -> None:
        """Order ``n`` is of customer ``n``."""
        for partition in range(2):
            rows = [{"order": f"{n}", "customer": f"{n}"} for n in numbers if n % 2 == partition]
            self.topics.send(self.orders, [json.dumps(row).encode() for row in rows], partition)

    def read(self, table: str = "orders") -> dict[int, str]:
        """What a table holds: number -> name."""
        with sqlite3.connect(self.database) as connection:
            return {int(number): name for number, name in connection.execute(f"SELECT * FROM {table}_live")}
