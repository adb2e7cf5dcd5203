r"""The flights that left New York's three airports in 2013: two sets of figures, kept exactly-once.

Per carrier: flights, total and maximum arrival delay, cancelled flights. Per route: flights. The
Kafka topic ``flights`` holds one JSON record per flight. The figures go to two tables, in SQLite or
PostgreSQL.

Fill the topic first, and then run it against your own servers. On a Spark cluster, use a database
that all its hosts reach::

    ratchet run ratchet.demo.flights:topology --set app.kafka=HOST:PORT \
        --set app.database=flights.db
    ratchet run ratchet.demo.flights:topology --set app.kafka=HOST:PORT \
        --set app.database=postgresql://USER@HOST/NAME --set spark.master=spark://HOST:PORT
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from framework import ArrowBolt, Fields, OutputFieldsDeclarer, Topology, TransactionalTopologyBuilder
from sinks import (
    Count,
    MapBackend,
    MapState,
    Max,
    OpaqueMapState,
    SqliteBackend,
    StateCommitter,
    Sum,
    TransactionalMapState,
)
from spouts import JsonCodec, KafkaTransactionalSpout, OpaqueKafkaTransactionalSpout

TOPIC = "flights"
FLIGHT = Fields(carrier=str, origin=str, dest=str, arr_delay=int, cancelled=int)


class Routes(ArrowBolt):
    """Emits one row per flight: its route, such as JFK-LAX."""

    deterministic = True

    def execute_arrow(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        route = pc.binary_join_element_wise(batch.column("origin"), batch.column("dest"), "-")
        yield pa.record_batch([route], names=["route"])

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(Fields(route=str))


def _backend(address: str, table: str) -> MapBackend:
    if not address.startswith("postgresql://"):
        return SqliteBackend(address, table)
    from sinks import PostgresBackend  # an optional extra, which the demo itself does not need

    return PostgresBackend(address, table)


def topology(app: Mapping[str, Any]) -> Topology:
    """``app.kafka``: brokers. ``app.database``: a SQLite file, or a ``postgresql://`` address.
    ``app.spout``: "opaque" (default) or "transactional".
    ``app.batch``: flights per batch."""
    opaque = app.get("app.spout", "opaque") == "opaque"
    spout_class = OpaqueKafkaTransactionalSpout if opaque else KafkaTransactionalSpout
    spout = spout_class(
        [TOPIC],
        bootstrap_servers=app["app.kafka"],
        codec=JsonCodec(FLIGHT),
        batch_records_max=int(app.get("app.batch", 50_000)),
    )

    def state(table: str) -> MapState:
        address = app["app.database"]
        return (OpaqueMapState if opaque else TransactionalMapState)(_backend(str(address), table))

    carriers = StateCommitter(
        state("carriers"),
        key=["carrier"],
        aggregates={
            "flights": Count(),
            "total_arr_delay": Sum("arr_delay"),
            "max_arr_delay": Max("arr_delay"),
            "cancelled": Sum("cancelled"),
        },
    )
    routes = StateCommitter(state("routes"), key=["route"], aggregates={"flights": Count()})
    builder = TransactionalTopologyBuilder(f"flights-{'opaque' if opaque else 'transactional'}", "flights", spout, 2)
    builder.set_bolt("carriers", carriers).global_grouping("flights")
    builder.set_bolt("route", Routes(), 2).shuffle_grouping("flights")
    builder.set_bolt("routes", routes, 2).fields_grouping("route", Fields("route"))
    return builder.build()
