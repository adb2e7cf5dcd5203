"""Verify, explain, replay, undo and read on windows that are sent once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from framework import CLOCK_STREAM, Fields, Topology, TransactionalTopologyBuilder, read, submit, tumbling
from framework.execution.local import LocalExecutor
from framework.execution.plan import plan_execution
from framework.inspect.explain import explain
from framework.inspect.replay import plan_to_replay, replay
from framework.inspect.verify import verify
from framework.transactions import MemoryStore
from sinks import Count, OpaqueMapState, SqliteBackend, StateCommitter, Sum, WatermarkCommitter, WindowedCommitter
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.rule("C43")

ROW = Fields(shop=str, source=int, at=int)


class Shop:
    def __init__(self, folder: Path) -> None:
        self.path, self.store = folder / "shop.db", MemoryStore()
        rows = {part: [[f"s{at % 3}", part, at * 7] for at in range(60)] for part in range(2)}
        self.spout = OpaqueMemoryTransactionalSpout(rows, ROW, 10)

    def topology(self) -> Topology:
        builder = TransactionalTopologyBuilder("shop", "orders", self.spout, 2)
        watermark = WatermarkCommitter(
            OpaqueMapState(SqliteBackend(self.path, "clock")), "at", partition=["source"], idle_after="1 h"
        )
        builder.set_bolt("watermark", watermark).global_grouping("orders").global_grouping("orders", CLOCK_STREAM)
        windows = WindowedCommitter(
            OpaqueMapState(SqliteBackend(self.path, "open_windows")),
            tumbling("1 min"),
            on="at",
            key=["shop"],
            aggregates={"orders": Count()},
        )
        builder.set_bolt("windows", windows, 2).fields_grouping("orders", Fields("shop")).all_grouping("watermark")
        sent = StateCommitter(
            OpaqueMapState(SqliteBackend(self.path, "sent")),
            ["shop", "window_end"],
            {"times": Count(), "orders": Sum("orders")},
        )
        builder.set_bolt("sent", sent, 2).fields_grouping("windows", Fields("shop"))
        return builder.build()

    def run(self) -> Topology:
        topology = self.topology()
        executor = LocalExecutor(plan_execution(topology), {})
        with submit(topology, {}, store=self.store, executor=executor) as run:
            run.wait_until_caught_up(PATIENCE_S)
        return topology


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def test_tools_work_on_windows_that_are_sent_once(shop: Shop) -> None:
    topology = shop.run()
    with read(topology, store=shop.store) as found:
        sent: Any = found["sent"].arrow().to_pylist()
    assert sum(row["orders"] for row in sent) == 104 and {row["times"] for row in sent} == {1}
    assert verify(topology, shop.store, {}).right
    again = replay(topology, shop.store, planned=plan_to_replay(shop.store, topology, 4))
    changes = [change for state in again.states for change in state.changes]
    assert changes and not any(change.agrees is False for change in changes)
    row = sent[-1]
    key = json.dumps([row["shop"], row["window_end"].isoformat()])
    found_causes = explain(topology, shop.store, state="sent", key=key)
    assert [step.txid for step in found_causes.steps] == [row["_txid"]] if "_txid" in row else found_causes.steps
