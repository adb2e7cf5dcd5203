"""Undo and verify on every part that goes by event time."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from framework import CLOCK_STREAM, Fields, Topology, TransactionalTopologyBuilder, submit, tumbling
from framework.execution.local import LocalExecutor
from framework.execution.plan import plan_execution
from framework.inspect.verify import verify
from framework.transactions import MemoryStore
from framework.transactions.undo import undo
from sinks import (
    AsOfJoiningCommitter,
    Count,
    CountWindowCommitter,
    DeduplicatingCommitter,
    Entry,
    JoiningCommitter,
    OpaqueMapState,
    SessionCommitter,
    SqliteBackend,
    StateCommitter,
    TableJoiningCommitter,
    TimerCommitter,
    WatermarkCommitter,
    WindowedCommitter,
)
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.waiting import PATIENCE_S
from tests.sinks.event_time.test_interval_join import ROW, Part

pytestmark = pytest.mark.rule("C44")


class Reminding(TimerCommitter):
    def on_record(self, entry: Entry, record: Mapping[str, Any], at: datetime.datetime) -> None:
        entry.value = record["number"]
        entry.set_timer(at + datetime.timedelta(seconds=30))

    def on_timer(self, entry: Entry, at: datetime.datetime) -> None:
        entry.emit(id=entry.key[0], number=entry.value)


def topology(folder: Path, spout: OpaqueMemoryTransactionalSpout, part: str) -> Topology:
    def state(name: str) -> OpaqueMapState:
        return OpaqueMapState(SqliteBackend(folder / "timed.db", name))

    builder = TransactionalTopologyBuilder("timed", "records", spout, 2)
    watermark = WatermarkCommitter(state("clock"), "at", partition=["source"], max_ahead="1000000 days")
    builder.set_bolt("watermark", watermark).global_grouping("records").global_grouping("records", CLOCK_STREAM)
    for kind in ("order", "payment"):
        builder.set_bolt(f"{kind}s", Part(kind)).shuffle_grouping("records")
    one: dict[str, Any] = {"on": "at", "key": ["id"]}
    both: dict[str, Any] = {"key": ["id"], "left": "order_at", "right": "payment_at"}
    count = {"n": Count()}
    parts: dict[str, Any] = {
        "windows": lambda: WindowedCommitter(state("part"), tumbling("1 min"), aggregates=count, **one),
        "sessions": lambda: SessionCommitter(state("part"), 20, aggregates=count, **one),
        "first": lambda: DeduplicatingCommitter(state("part"), within=60, **one),
        "pairs": lambda: JoiningCommitter(state("part"), within=30, how="outer", **both),
        "valued": lambda: AsOfJoiningCommitter(state("part"), **both),
        "current": lambda: TableJoiningCommitter(state("part"), key=["id"], table="payment_at"),
        "timers": lambda: Reminding(state("part"), output=Fields(id=str, number=int), **one),
        "counted": lambda: CountWindowCommitter(state("part"), 5, step=2, key=["id"], aggregates=count),
    }
    subscribed = builder.set_bolt("part", parts[part](), 2)
    for source in ("orders", "payments") if part in ("pairs", "valued", "current") else ("records",):
        subscribed.fields_grouping(source, Fields("id"))
    if part not in ("counted", "current"):
        subscribed.all_grouping("watermark")
    builder.set_bolt("sent", StateCommitter(state("sent"), ["id"], count), 2).fields_grouping("part", Fields("id"))
    return builder.build()


def run(built: Topology, store: MemoryStore) -> None:
    with submit(built, {}, store=store, executor=LocalExecutor(plan_execution(built), {})) as running:
        running.wait_until_caught_up(PATIENCE_S)


def held(built: Topology) -> dict[str, dict[Any, Any]]:
    return {
        state.location: {key: row.value for key, row in state.backend.scan() if row.value is not None}  # type: ignore[attr-defined]
        for state in built.states
        if "clock" not in state.location
    }


@pytest.mark.parametrize("part", ["windows", "sessions", "first", "pairs", "valued", "current", "timers", "counted"])
def test_a_transaction_is_taken_back_and_made_again(part: str, tmp_path: Path) -> None:
    rows = {
        source: [[("order", "payment")[at % 3 == 0], f"k{at % 4}", source, at * 7, at] for at in range(50)]
        for source in range(2)
    }
    store, spout = MemoryStore(), OpaqueMemoryTransactionalSpout(rows, ROW, 6)
    built = topology(tmp_path, spout, part)
    run(built, store)
    after = held(built)
    assert all(after.values()) and verify(built, store).right
    undo(built, store)
    assert held(built) != after and verify(built, store).right
    run(built, store)
    assert held(built) == after
    for source in range(2):
        for at in range(50, 60):
            spout.append(source, ["order", f"k{at % 4}", source, at * 7, at])
    run(built, store)
    assert verify(built, store).right
