"""Topologies with tables that somebody else has made, for the tests of ``ratchet schema``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from framework import Fields, Topology, TransactionalTopologyBuilder
from sinks import (
    AppendCommitter,
    SqliteBackend,
    SqliteTable,
    StateCommitter,
    Sum,
    TransactionalMapState,
    UpsertCommitter,
)
from spouts import MemoryTransactionalSpout

_ROWS = MemoryTransactionalSpout({0: [[1, "Ann", "030"]]}, Fields(id=int, name=str, phone=str), 1)


def tables(app: Mapping[str, Any]) -> Topology:
    builder = TransactionalTopologyBuilder("shop", "rows", _ROWS)
    customers = UpsertCommitter(SqliteTable(app["app.db"], "customers"), ["id"])
    builder.set_bolt("customers", customers).global_grouping("rows")
    builder.set_bolt("log", AppendCommitter(SqliteTable(app["app.db"], "log", stamp=None))).global_grouping("rows")
    return builder.build()


def counts(app: Mapping[str, Any]) -> Topology:
    builder = TransactionalTopologyBuilder("counts", "rows", _ROWS)
    state = TransactionalMapState(SqliteBackend(app["app.db"], "counts"))
    builder.set_bolt("counts", StateCommitter(state, ["name"], {"total": Sum("id")})).fields_grouping(
        "rows", Fields("name")
    )
    return builder.build()
