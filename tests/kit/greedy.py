"""A topology whose bolt asks for more memory than it may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from framework import BaseBasicBolt, Fields, OutputFieldsDeclarer, Topology, TransactionalTopologyBuilder
from sinks import Count, OpaqueMapState, PostgresBackend, StateCommitter
from spouts import OpaqueKafkaTransactionalSpout, TextCodec


class Greedy(BaseBasicBolt):
    def execute(self, tup: Any, collector: Any) -> None:
        collector.emit([str(len(bytearray(8 << 30)))])

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(Fields(size=str))


def topology(app: Mapping[str, Any]) -> Topology:
    spout = OpaqueKafkaTransactionalSpout([app["app.topic"]], bootstrap_servers=app["app.kafka"], codec=TextCodec())
    builder = TransactionalTopologyBuilder(app["app.topic"], "spout", spout)
    builder.set_bolt("greedy", Greedy()).shuffle_grouping("spout")
    count = StateCommitter(OpaqueMapState(PostgresBackend(app["app.database"], "greedy")), ["size"], {"n": Count()})
    builder.set_bolt("count", count).global_grouping("greedy")
    return builder.build()
