"""Clicks from a Kafka topic, counted per page and minute; each minute is sent once, to a topic, a
table and a folder of files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from framework import CLOCK_STREAM, Fields, Topology, TransactionalTopologyBuilder, tumbling
from sinks import (
    AppendCommitter,
    Count,
    KafkaSink,
    OpaqueMapState,
    ParquetTable,
    SqliteBackend,
    StateCommitter,
    Sum,
    WatermarkCommitter,
    WindowedCommitter,
)
from spouts import JsonCodec, OpaqueKafkaTransactionalSpout

MINUTE = 60
Minutes = Counter[tuple[str, int]]


def topology(app: Mapping[str, Any]) -> Topology:
    """The settings are ``app.kafka``, ``app.name`` (the topics are NAME and NAME-closed),
    ``app.folder``, ``app.records``."""
    name, folder = app["app.name"], Path(app["app.folder"])

    def state(table: str) -> OpaqueMapState:
        return OpaqueMapState(SqliteBackend(folder / "windows.db", table))

    spout = OpaqueKafkaTransactionalSpout(
        [name],
        bootstrap_servers=app["app.kafka"],
        codec=JsonCodec(Fields(page=str, at=int)),
        metadata=["topic", "partition"],
        batch_records_max=int(app["app.records"]),
    )
    builder = TransactionalTopologyBuilder(name, "clicks", spout, 2)
    watermark = WatermarkCommitter(state("clock"), "at", partition=["topic", "partition"], max_ahead="100000 days")
    builder.set_bolt("watermark", watermark).global_grouping("clicks").global_grouping("clicks", CLOCK_STREAM)
    windows = WindowedCommitter(
        state("open_windows"), tumbling(MINUTE), on="at", key=["page"], aggregates={"clicks": Count()}
    )
    builder.set_bolt("windows", windows, 2).fields_grouping("clicks", Fields("page")).all_grouping("watermark")
    topic = KafkaSink(f"{name}-closed", key="page", bootstrap_servers=app["app.kafka"])
    builder.set_bolt("topic", topic).global_grouping("windows")
    table = StateCommitter(state("sent"), ["page", "window_end"], {"times": Count(), "clicks": Sum("clicks")})
    builder.set_bolt("table", table, 2).fields_grouping("windows", Fields("page"))
    builder.set_bolt("files", AppendCommitter(ParquetTable(folder / "files"))).global_grouping("windows")
    return builder.build()


def clicks(partition: int, count: int) -> list[bytes]:
    """In the order of their times; partitions are of different speed."""
    return [json.dumps({"page": f"p{number % 7}", "at": number * (partition + 2)}).encode() for number in range(count)]


def closed(partitions: Iterable[list[bytes]]) -> Minutes:
    """What must be sent: (page, end) -> clicks, of the minutes that all partitions have passed."""
    its = [[json.loads(value) for value in values] for values in partitions]
    watermark = min(values[-1]["at"] for values in its)
    counted: Minutes = Counter()
    for values in its:
        for value in values:
            end = (value["at"] // MINUTE + 1) * MINUTE
            if end <= watermark:
                counted[value["page"], end] += 1
    return counted
