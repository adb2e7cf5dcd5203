"""A topology that gets every address and secret from its configuration,
and cannot count the word ``poison``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from framework import BaseBasicBolt, Fields, OutputFieldsDeclarer, Topology, TransactionalTopologyBuilder
from sinks import Count, OpaqueMapState, PostgresBackend, StateCommitter
from spouts import OpaqueKafkaTransactionalSpout, TextCodec


class Careful(BaseBasicBolt):
    def execute(self, tup: Any, collector: Any) -> None:
        if tup["value"] == "poison":
            raise ValueError(f"poison, with {tup!r}")
        collector.emit([tup["value"]])

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(Fields(value=str))


def topology(app: Mapping[str, Any]) -> Topology:
    spout = OpaqueKafkaTransactionalSpout([app["app.topic"]], codec=TextCodec())
    builder = TransactionalTopologyBuilder(app["app.topic"], "spout", spout)
    builder.set_bolt("careful", Careful(), 2).shuffle_grouping("spout")
    state = OpaqueMapState(PostgresBackend(app["app.database"], app["app.table"]))
    builder.set_bolt("count", StateCommitter(state, ["value"], {"n": Count()}), 2).fields_grouping(
        "careful", Fields("value")
    )
    return builder.build()
