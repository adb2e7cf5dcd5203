"""A topology over Kafka whose bolt refuses some values; they become dead letters in a table. And
what plans say of refused records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

from framework import BaseBasicBolt, Fields, Topology, TransactionalTopologyBuilder, submit
from framework.errors import BadRecordError
from framework.transactions import MemoryStore, term_loop
from framework.transactions.documents import read_history
from sinks import Count, DeadLetterTable, OpaqueMapState, SqliteBackend, StateCommitter, TransactionalMapState
from spouts import KafkaTransactionalSpout, OpaqueKafkaTransactionalSpout, TextCodec
from tests.kit.waiting import PATIENCE_S


class Picky(BaseBasicBolt):
    deterministic = True

    def execute(self, tup: Any, collector: Any) -> None:
        if tup["value"].startswith("bad"):
            raise BadRecordError(f"{tup['value']!r} is refused")
        collector.emit([tup["value"]])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(value=str))


def topology(app: Mapping[str, Any]) -> Topology:
    """``app.topic``, ``app.file``, ``app.kind``; the brokers come from
    ``kafka.bootstrap.servers``.
    """
    opaque = app["app.kind"] == "opaque"
    state = OpaqueMapState if opaque else TransactionalMapState
    spout = (OpaqueKafkaTransactionalSpout if opaque else KafkaTransactionalSpout)(
        [app["app.topic"]],
        codec=TextCodec(),
        on_bad_record="dead_letter",
        dead_letters=DeadLetterTable(state(SqliteBackend(app["app.file"], "letters"))),
    )
    builder = TransactionalTopologyBuilder(app["app.topic"], "spout", spout)
    builder.set_bolt("picky", Picky(), 2).shuffle_grouping("spout")
    counts = StateCommitter(state(SqliteBackend(app["app.file"], "counts")), ["value"], {"n": Count()})
    builder.set_bolt("counts", counts).global_grouping("picky")
    return builder.build()


def refused(store: MemoryStore, topology_id: str = "refusing") -> dict[tuple[str, int], str]:
    """Partition and offset of the records that plans say were refused, with the reasons."""
    return {
        (partition, int(offset)): reason
        for record in read_history(store, topology_id)
        for partition, meta in record.plan.items()
        for offset, reason in meta.get("refused", {}).items()
    }


def ran(topology: Topology, executor: str = "local", config: Mapping[str, Any] | None = None) -> MemoryStore:
    """Run a topology until it has caught up; its searches may take as long as they need."""
    store = MemoryStore()
    patient = {"topology.message.timeout.secs": 10_000, **(config or {})}
    with mock.patch.object(term_loop, "SEARCH_MAX_MS", 10**9), submit(topology, patient, store, executor) as run:
        run.wait_until_caught_up(PATIENCE_S)
    return store


def attempts(store: MemoryStore, topology: Topology) -> list[int]:
    """The number of attempts of each transaction."""
    return [len(each.attempts) for each in read_history(store, topology.id)]
