"""A topology that copies a topic, and takes all settings of Kafka from its configuration."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from framework import BaseBasicBolt, Fields, OutputFieldsDeclarer, Topology, TransactionalTopologyBuilder
from integration import KafkaBroker
from sinks import KafkaSink
from spouts import OpaqueKafkaTransactionalSpout, TextCodec
from tests.kit.kafka_runs import values_in
from tests.kit.topics import Topics

POISON = b"poison"


class Careful(BaseBasicBolt):
    """Hands everything on but the poison."""

    def execute(self, tup: Any, collector: Any) -> None:
        if tup["value"] == POISON.decode():
            raise ValueError(f"poison, with {tup!r}")
        collector.emit([tup["value"]])

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(Fields(value=str))


def topology(app: Mapping[str, Any]) -> Topology:
    spout = OpaqueKafkaTransactionalSpout(
        [app["app.topic"]], codec=TextCodec(), batch_records_max=40, consumer_group=app["app.topic"]
    )
    builder = TransactionalTopologyBuilder(app["app.topic"], "records", spout)
    builder.set_bolt("careful", Careful()).shuffle_grouping("records")
    builder.set_bolt("copies", KafkaSink(copies_of(app["app.topic"]), key="value")).shuffle_grouping("careful")
    return builder.build()


def copies_of(topic: str) -> str:
    return f"{topic}-copies"


class SecuredCopy:
    """The topics of one such topology, which are filled and read at the plain listener."""

    def __init__(self, broker: KafkaBroker, topic: str, security: Mapping[str, str]) -> None:
        self._broker, self._topic, self._security = broker, topic, security
        self._topics = Topics(broker.address)
        for each in (topic, copies_of(topic)):
            self._topics.create(each)
        self._sent = 0

    @property
    def address(self) -> str:
        return self._broker.secure_address

    def send(self, records: int) -> None:
        self._topics.send(self._topic, [b"%d" % number for number in range(self._sent, self._sent + records)])
        self._sent += records

    def send_poison(self) -> None:
        """Send a record that the topology cannot copy."""
        self._topics.send(self._topic, [POISON])

    def file(self, folder: Path, more: str = "", **changes: str) -> Path:
        """A file of settings. ``changes``: settings of Kafka. ``more``: other tables."""
        kafka = {
            "bootstrap.servers": self.address,
            **self._security,
            **changes,
        }
        lines = [f'{key} = "{value}"' for key, value in kafka.items()]
        path = folder / "kafka.toml"
        path.write_text("\n".join(["[kafka]", *lines, "[app]", f'topic = "{self._topic}"', more]))
        return path

    def copied(self) -> Counter[str]:
        written = values_in(self._broker.address, copies_of(self._topic))
        return Counter({json.loads(each)["value"]: times for each, times in written.items()})

    def sent(self) -> Counter[str]:
        return Counter(map(str, range(self._sent)))
