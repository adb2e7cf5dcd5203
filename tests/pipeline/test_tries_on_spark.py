"""Writes of windows that Spark tasks try before the next commit (C51, ADR 135)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from framework import CLOCK_STREAM, DataFrameBolt, Fields, OutputFieldsDeclarer, submit
from framework.inspect.verify import verify
from framework.operators.event_window_assigner import tumbling
from framework.transactions import MemoryStore, term_loop
from framework.transactions.documents import read_history
from sinks import (
    ExpiringCommitter,
    OpaqueMapState,
    SessionCommitter,
    SqliteBackend,
    StateCommitter,
    WatermarkCommitter,
    WindowedCommitter,
)
from tests.kit.paying import KEYED, MOST, PAID, TIMED, payments
from tests.kit.refusing import refused
from tests.kit.waiting import PATIENCE_S

pytestmark = [pytest.mark.rule("C51"), pytest.mark.spark]


class Same(DataFrameBolt):
    """Passes rows on."""

    deterministic = True

    def execute_dataframe(self, frame: Any) -> Any:
        return frame.select("user", "at", "paid")

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(PAID)


@pytest.mark.parametrize(
    ("small", "framed"),
    [
        (False, True),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, False, marks=pytest.mark.slow),
    ],
)
def test_spark_tasks_try_the_writes_of_windows(
    tmp_path: Path, spark: str, small: bool, framed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above them may be a DataFrame bolt."""
    monkeypatch.setattr(term_loop, "SEARCH_MAX_MS", 10**9)
    rows: dict[int, list[list[Any]]] = {part: [[f"{part}{at % 3}", at, 1] for at in range(40)] for part in range(3)}
    rows[0][0][2] = rows[1][1][2] = MOST - 20
    wrong = {("0", 33): 21, ("1", 34): 30, ("1", 37): 40}
    for (part, at), paid in wrong.items():
        rows[int(part)][at][2] = paid
    builder = payments(rows, 20, readers=2)
    source = "orders"
    if framed:
        source = "same"
        builder.set_bolt("same", Same(), 2).shuffle_grouping("orders")
    watermark = WatermarkCommitter(state(tmp_path, "clock"), "at", max_ahead="1000000 days", out_of_orderness=5)
    builder.set_bolt("watermark", watermark).global_grouping(source).global_grouping("orders", CLOCK_STREAM)
    committers = {
        "windows": WindowedCommitter(state(tmp_path, "windows"), tumbling(1_000), **TIMED),
        "sessions": SessionCommitter(state(tmp_path, "sessions"), 500, **TIMED),
        "expiring": ExpiringCommitter(state(tmp_path, "expiring"), ttl=500, **TIMED),
    }
    for name, each in committers.items():
        builder.set_bolt(name, each, 2).fields_grouping(source, Fields("user")).all_grouping("watermark")
    builder.set_bolt("sums", StateCommitter(state(tmp_path, "sums"), **KEYED), 2).fields_grouping(
        source, Fields("user")
    )
    built, store = builder.build(), MemoryStore()
    config = {
        "spark.master": spark,
        "topology.message.timeout.secs": 10_000,
        "topology.collapse.records.max": 10_000 if small else 0,
    }
    with submit(built, config, store, "spark") as run:
        run.wait_until_caught_up(10 * PATIENCE_S)
    assert set(refused(store, built.id)) == set(wrong)
    assert max(len(each.attempts) for each in read_history(store, built.id)) <= 4
    assert verify(built, store).right


def state(folder: Path, name: str) -> OpaqueMapState:
    return OpaqueMapState(SqliteBackend(folder / f"{name}.db", name))
