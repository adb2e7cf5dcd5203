"""A topology over Kafka that is mended after it has made dead letters, and the commands about
them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import pyarrow as pa

from framework import BaseBasicBolt, Fields, Topology, TransactionalTopologyBuilder
from framework.errors import BadRecordError
from sinks import (
    Count,
    DeadLetterTable,
    DeadLetterTopic,
    OpaqueMapState,
    StateCommitter,
    TransactionalMapState,
)
from spouts import Codec, KafkaTransactionalSpout, OpaqueKafkaTransactionalSpout, TextCodec
from tests.kit.command import Answer, call
from tests.kit.stores import backend


class Latin(Codec):
    """Any bytes are text."""

    def __init__(self) -> None:
        self.fields = Fields.of({"value": pa.string()})

    def decode(self, values: Any) -> pa.RecordBatch:
        return pa.record_batch(
            [pa.array([None if each is None else each.decode("latin-1") for each in values], pa.string())],
            names=["value"],
        )


class Picky(BaseBasicBolt):
    """Refuses what begins with a prefix."""

    deterministic = True

    def __init__(self, prefixes: tuple[str, ...]) -> None:
        self._prefixes = prefixes

    def execute(self, tup: Any, collector: Any) -> None:
        if tup["value"].startswith(self._prefixes):
            raise BadRecordError(f"{tup['value']!r} is refused")
        collector.emit([tup["value"]])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(value=str))


def topology(app: Mapping[str, Any]) -> Topology:
    """``app.topic``, ``app.kind``, ``app.store`` and ``app.address`` of the tables, and
    ``app.letters``: "table", or a topic. With ``app.mended``, texts that are not UTF-8 are
    decoded, and those that begin with "bad" are taken; those that begin with "never" never are."""
    prefix = app["app.topic"].replace("-", "_")
    opaque, mended = app["app.kind"] == "opaque", app.get("app.mended", False)
    state = OpaqueMapState if opaque else TransactionalMapState
    keeper: Any
    if app["app.letters"] == "table":
        keeper = DeadLetterTable(state(backend(app, f"{prefix}_letters")))
    else:
        keeper = DeadLetterTopic(app["app.letters"])
    spout = (OpaqueKafkaTransactionalSpout if opaque else KafkaTransactionalSpout)(
        [app["app.topic"]],
        codec=Latin() if mended else TextCodec(),
        metadata=["topic", "partition", "offset", "timestamp_ms"],
        on_bad_record="dead_letter",
        dead_letters=keeper,
        bad_record_share_max=None,
    )
    builder = TransactionalTopologyBuilder(app["app.topic"], "spout", spout)
    builder.set_bolt("picky", Picky(("never",) if mended else ("bad", "never")), 2).shuffle_grouping("spout")
    counts = StateCommitter(state(backend(app, f"{prefix}_counts")), ["value"], {"n": Count()})
    builder.set_bolt("counts", counts).global_grouping("picky")
    return builder.build()


class Commands:
    """``ratchet`` about the topology, before and after it is mended."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = dict(settings)

    def mend(self) -> None:
        self.settings["app.mended"] = True

    def ask(self, *words: str, what: str = "dead-letters") -> Answer:
        options = [part for key, value in self.settings.items() for part in ("--set", f"{key}={_text(value)}")]
        name = "tests.kit.mended:topology"
        command = [what, words[0], name, *words[1:]] if what == "dead-letters" else [what, name, *words]
        return call("ratchet", *command, *options)

    def documents(self, *words: str) -> list[dict[str, Any]]:
        answer = self.ask(*words, "--json")
        assert answer.returncode == 0, answer.stderr
        return [json.loads(line) for line in answer.stdout.splitlines()]

    def counted(self) -> dict[str, int]:
        """The values and their counts, by the rows of the store."""
        (state,) = topology(self.settings)["counts"].states
        assert isinstance(state, (OpaqueMapState, TransactionalMapState))
        with closing(state):
            return {key[0]: row.value[0] for key, row in state.backend.scan() if row.value is not None}

    def run(self) -> None:
        """Run until caught up."""
        answer = self.ask("--until-caught-up", "--executor", "local", what="run")
        assert answer.returncode == 0, answer.stderr


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def settings_of(servers: Any, name: str, kind: str, letters: str, store: tuple[str, str]) -> dict[str, Any]:
    """``store``: the kind of the tables' store, and its address."""
    return {
        "app.topic": name,
        "app.store": store[0],
        "app.address": store[1],
        "app.kind": kind,
        "app.letters": letters,
        "kafka.bootstrap.servers": servers.bootstrap_servers,
        "transactional.zookeeper.servers": servers.zookeeper,
    }
