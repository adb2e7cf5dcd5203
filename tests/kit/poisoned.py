"""A topology with a bolt that cannot stomach one value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from framework import BaseBasicBolt, Topology, TransactionalTopologyBuilder
from spouts import OpaqueKafkaTransactionalSpout, TextCodec


class Touchy(BaseBasicBolt):
    def __init__(self, poison: str) -> None:
        self._poison = poison

    def execute(self, tup: Any, collector: Any) -> None:
        if tup["value"] == self._poison:
            raise ZeroDivisionError("cannot stomach this")


def topology(app: Mapping[str, Any]) -> Topology:
    """``app.topic``, ``app.poison``; the brokers come from ``kafka.bootstrap.servers``."""
    spout = OpaqueKafkaTransactionalSpout([app["app.topic"]], codec=TextCodec())
    builder = TransactionalTopologyBuilder(app["app.topic"], "spout", spout)
    builder.set_bolt("touchy", Touchy(app["app.poison"])).shuffle_grouping("spout")
    return builder.build()
