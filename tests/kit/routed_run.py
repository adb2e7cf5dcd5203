"""A driver that routes records to several topics, and dies by ``os._exit`` between a write and its
commit.

``app.die``: "before" the commit of the kafka_txn number ``app.die.at`` of its process, when all
records are with the broker; "after" it, when no answer has come back; "" for never.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from framework import Fields, Topology, TransactionalTopologyBuilder, submit
from sinks import Headers, KafkaSink
from sinks.kafka.writer import MarkedWriter
from spouts import JsonCodec, OpaqueKafkaTransactionalSpout

EXIT = 9
_WAIT_S = 120.0


def topology(app: dict[str, Any]) -> Topology:
    """Routes by the field ``to``. Headers, key, time and partition are those of the source."""
    spout = OpaqueKafkaTransactionalSpout(
        [app["app.source"]],
        bootstrap_servers=app["app.kafka"],
        codec=JsonCodec(Fields(to=str, n=int)),
        metadata=["key", "headers", "timestamp_ms", "partition"],
        batch_records_max=app["app.batch"],
    )
    builder = TransactionalTopologyBuilder(app["app.id"], "spout", spout, 2)
    sink = KafkaSink(
        topic_from="to",
        pattern=rf"{app['app.source']}-.*",
        key="key",
        value=["n"],
        headers=Headers("headers", remove=["secret"], add={"to": "to"}),
        timestamp="timestamp_ms",
        partition="partition",
        bootstrap_servers=app["app.kafka"],
    )
    builder.set_bolt("routes", sink, app["app.tasks"]).fields_grouping("spout", Fields("key"))
    return builder.build()


def die_at(moment: str, number: int) -> None:
    real, calls = MarkedWriter._commit, [0]

    def commit(self: MarkedWriter, producer: Any) -> None:
        calls[0] += 1
        if calls[0] == number and moment == "before":
            os._exit(EXIT)
        real(self, producer)
        if calls[0] == number and moment == "after":
            os._exit(EXIT)

    MarkedWriter._commit = commit  # type: ignore[method-assign]


if __name__ == "__main__":
    app = json.loads(sys.argv[1])
    if app["app.die"]:
        die_at(app["app.die"], app["app.die.at"])
    settings = {each: value for each, value in app.items() if not each.startswith("app.")}
    with submit(topology(app), settings, executor="local") as run:
        run.wait_until_caught_up(_WAIT_S)
