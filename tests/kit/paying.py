"""Topologies that sum per user what records pay, in a state that refuses sums beyond its type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from framework import CLOCK_STREAM, Fields, Topology, TransactionalTopologyBuilder
from sinks import MemoryBackend, OpaqueMapState, Sum, WatermarkCommitter
from sinks.event_time.event_time_committer_base import WatermarkedCommitter
from spouts import OpaqueMemoryTransactionalSpout

MOST = 2**63 - 1
PAID = Fields(user=str, at=int, paid=int)
KEYED: dict[str, Any] = {"key": ["user"], "aggregates": {"paid": Sum("paid")}}
TIMED: dict[str, Any] = {"on": "at", **KEYED}
Rows = list[list[Any]]


def state() -> OpaqueMapState:
    return OpaqueMapState(MemoryBackend())


def payments(rows: Rows | Mapping[int, Rows], batch: int, readers: int = 1) -> TransactionalTopologyBuilder:
    """A topology with these records, of one partition or of several, which leaves out bad ones."""
    partitions = dict(rows) if isinstance(rows, Mapping) else {0: rows}
    spout = OpaqueMemoryTransactionalSpout(partitions, PAID, batch, on_bad_record="skip")
    return TransactionalTopologyBuilder("paying", "orders", spout, readers)


def add_sums(
    builder: TransactionalTopologyBuilder,
    committer: Any,
    tasks: int = 1,
    *,
    clock: OpaqueMapState | None = None,
    out_of_orderness: int = 0,
) -> TransactionalTopologyBuilder:
    """Add a committer of the records, and a watermark if it takes one. ``clock``: the state of the
    watermark. Returns the builder."""
    declared = builder.set_bolt("sums", committer, tasks).fields_grouping("orders", Fields("user"))
    if isinstance(committer, WatermarkedCommitter):
        watermark = WatermarkCommitter(
            clock or state(), "at", max_ahead="1000000 days", out_of_orderness=out_of_orderness
        )
        builder.set_bolt("watermark", watermark).global_grouping("orders").global_grouping("orders", CLOCK_STREAM)
        declared.all_grouping("watermark")
    return builder


def paying(rows: Rows | Mapping[int, Rows], batch: int, committer: Any, tasks: int = 1, **options: Any) -> Topology:
    """A topology of one committer. ``options``: as of ``add_sums``."""
    return add_sums(payments(rows, batch), committer, tasks, **options).build()
