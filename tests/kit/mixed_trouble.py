"""The topology of the mixed trouble: counts and sums per key, and dead letters, in SQLite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from framework import Fields, Topology, TransactionalTopologyBuilder
from sinks import (
    Count,
    DeadLetterTable,
    MapState,
    OpaqueMapState,
    SqliteBackend,
    StateCommitter,
    Sum,
    TransactionalMapState,
)
from spouts import JsonCodec, KafkaTransactionalSpout, OpaqueKafkaTransactionalSpout


def topology(app: Mapping[str, Any]) -> Topology:
    """``app.kafka``, ``app.database``, ``app.pattern``, ``app.spout``:
    "opaque" or "transactional".
    """
    opaque = app["app.spout"] == "opaque"

    def state(table: str) -> MapState:
        backend = SqliteBackend(app["app.database"], table)
        return OpaqueMapState(backend) if opaque else TransactionalMapState(backend)

    spout_class = OpaqueKafkaTransactionalSpout if opaque else KafkaTransactionalSpout
    spout = spout_class(
        pattern=app["app.pattern"],
        bootstrap_servers=app["app.kafka"],
        codec=JsonCodec(Fields(key=str, n=int)),
        batch_records_max=700,
        on_bad_record="dead_letter",
        dead_letters=DeadLetterTable(state("letters")),
        consumer_group="trouble-watchers",
    )
    builder = TransactionalTopologyBuilder(f"trouble-{app['app.spout']}", "events", spout, 2)
    sums = StateCommitter(state("sums"), ["key"], {"records": Count(), "total": Sum("n")})
    builder.set_bolt("sums", sums, 2).fields_grouping("events", Fields("key"))
    return builder.build()
