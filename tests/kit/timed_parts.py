"""A topology around each committer that goes by event time, or by a count of records."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from framework import CLOCK_STREAM, ArrowBolt, Fields, Topology, TransactionalTopologyBuilder, submit, tumbling
from framework.execution.local import LocalExecutor
from framework.execution.plan import plan_execution
from framework.transactions import CoordinationStore
from sinks import (
    AsOfJoiningCommitter,
    Count,
    CountWindowCommitter,
    DeduplicatingCommitter,
    Entry,
    ExpiringCommitter,
    JoiningCommitter,
    MapBackend,
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

PARTS = ["windows", "sessions", "first", "pairs", "valued", "current", "timers", "expiring", "counted"]
#: Of these, the parts with two streams of records.
JOINS = ("pairs", "valued", "current")


class Reminding(TimerCommitter):
    def on_record(self, entry: Entry, record: Mapping[str, Any], at: datetime.datetime) -> None:
        entry.value = record["number"]
        entry.set_timer(at + datetime.timedelta(seconds=30))

    def on_timer(self, entry: Entry, at: datetime.datetime) -> None:
        entry.emit(id=entry.key[0], number=entry.value)


class Summing(TimerCommitter):
    """Sends the sum of the records of a key, ``remind`` seconds after the first of them."""

    def __init__(self, state: OpaqueMapState, remind: int, **options: Any) -> None:
        super().__init__(state, output=Fields(id=str, at=datetime.datetime, total=int), **options)
        self.remind = remind

    def on_record(self, entry: Entry, record: Mapping[str, Any], at: datetime.datetime) -> None:
        entry.value = (entry.value or 0) + record["number"]
        entry.set_timer(at + datetime.timedelta(seconds=self.remind))

    def on_timer(self, entry: Entry, at: datetime.datetime) -> None:
        if entry.value is not None:
            entry.emit(id=entry.key[0], at=at, total=entry.value)
        entry.value = None


class Cleaning(ArrowBolt):
    """Drops the records whose number is divisible by ``dropped``; 0: none."""

    deterministic = True

    def __init__(self, dropped: int = 0) -> None:
        self.dropped = dropped

    def execute_arrow(self, batch: Any) -> Any:
        numbers = batch.column("number").to_pylist()
        yield batch.filter([not self.dropped or number % self.dropped != 0 for number in numbers])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(ROW)


def source() -> OpaqueMemoryTransactionalSpout:
    """Two partitions of 50 records each, six per transaction."""
    rows = {
        partition: [[("order", "payment")[at % 3 == 0], f"k{at % 4}", partition, at * 7, at] for at in range(50)]
        for partition in range(2)
    }
    return OpaqueMemoryTransactionalSpout(rows, ROW, 6)


def append(spout: OpaqueMemoryTransactionalSpout) -> None:
    """Ten more records in each partition."""
    for partition in range(2):
        for at in range(50, 60):
            spout.append(partition, ["order", f"k{at % 4}", partition, at * 7, at])


def topology(
    folder: Path,
    spout: OpaqueMemoryTransactionalSpout,
    part: str,
    *,
    dropped: int = 0,
    tasks: int = 2,
    backend: Callable[[str], MapBackend] | None = None,
) -> Topology:
    """``tasks``: of the part. ``backend``: makes the backend of a table; by default one of SQLite,
    in ``folder``."""

    def state(name: str) -> OpaqueMapState:
        return OpaqueMapState(backend(name) if backend is not None else SqliteBackend(folder / "timed.db", name))

    builder = TransactionalTopologyBuilder("timed", "records", spout, 2)
    watermark = WatermarkCommitter(state("clock"), "at", partition=["source"], max_ahead="1000000 days")
    builder.set_bolt("watermark", watermark).global_grouping("records").global_grouping("records", CLOCK_STREAM)
    builder.set_bolt("cleaned", Cleaning(dropped)).shuffle_grouping("records")
    for kind in ("order", "payment"):
        builder.set_bolt(f"{kind}s", Part(kind)).shuffle_grouping("cleaned")
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
        "expiring": lambda: ExpiringCommitter(state("part"), ttl=20, aggregates=count, **one),
        "counted": lambda: CountWindowCommitter(state("part"), 5, step=2, key=["id"], aggregates=count),
    }
    subscribed = builder.set_bolt("part", parts[part](), tasks)
    for name in ("orders", "payments") if part in JOINS else ("cleaned",):
        subscribed.fields_grouping(name, Fields("id"))
    if part not in ("counted", "current"):
        subscribed.all_grouping("watermark")
    builder.set_bolt("sent", StateCommitter(state("sent"), ["id"], count), 2).fields_grouping("part", Fields("id"))
    return builder.build()


def run(built: Topology, store: CoordinationStore) -> None:
    executor = LocalExecutor(plan_execution(built), {})
    with submit(built, {}, store=store, executor=executor, accept_changed_topology=True) as running:
        running.wait_until_caught_up(PATIENCE_S)


def held(built: Topology) -> dict[str, dict[Any, Any]]:
    """Component -> key -> value, of all states except the watermark's."""
    return {
        each.id: {key: row.value for key, row in state.backend.scan() if row.value is not None}  # type: ignore[attr-defined]
        for each in built.components
        for state in each.states
        if each.id != "watermark"
    }
