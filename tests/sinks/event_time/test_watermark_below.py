"""A watermark of rows that another committer sends: it refuses times that are too far ahead, as one
of records does."""

from __future__ import annotations

import time
from typing import Any

import pytest

from framework import CLOCK_STREAM, Fields, Topology, TopologyFailed, TransactionalTopologyBuilder, submit, tumbling
from framework.inspect.verify import verify
from framework.operators.event_window_assigner import EventWindows
from framework.transactions import MemoryStore
from sinks import (
    Count,
    DeduplicatingCommitter,
    Max,
    MemoryBackend,
    OpaqueMapState,
    StateCommitter,
    WatermarkCommitter,
    WindowedCommitter,
)
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.rule("C43")

ROW = Fields(id=str, at=int, due=int)
NOW = int(time.time()) // 60 * 60
YEAR = 365 * 86_400
#: A record per minute. One is due in ten years.
ROWS = [[f"{each}", NOW + 60 * (each - 60), NOW + 60 * (each - 60) + 30] for each in range(10)]
FAR = 3
ROWS[FAR][2] += 10 * YEAR


def state() -> OpaqueMapState:
    return OpaqueMapState(MemoryBackend())


def topology(above: str, policy: Any) -> Topology:
    """Counts by minute of ``due`` below a committer that goes by ``at``."""
    spout = OpaqueMemoryTransactionalSpout({0: ROWS}, ROW, 1, on_bad_record=policy)
    builder = TransactionalTopologyBuilder("below", "records", spout)
    first = WatermarkCommitter(state(), "at")
    builder.set_bolt("first-clock", first).global_grouping("records").global_grouping("records", CLOCK_STREAM)
    minute: EventWindows = tumbling("1 min")
    committers = {
        "first": DeduplicatingCommitter(state(), key=["id"], on="at", within="1 h"),
        "windows": WindowedCommitter(state(), minute, on="at", key=["id"], aggregates={"due": Max("due")}),
    }
    builder.set_bolt(above, committers[above]).global_grouping("records").all_grouping("first-clock")
    clock = WatermarkCommitter(state(), "due")
    builder.set_bolt("clock", clock).global_grouping(above).global_grouping("records", CLOCK_STREAM)
    counts = WindowedCommitter(state(), minute, on="due", key=["id"], aggregates={"n": Count()})
    builder.set_bolt("counts", counts).fields_grouping(above, Fields("id")).all_grouping("clock")
    for name, stream in (("sent", "default"), ("late", "late")):
        sink = StateCommitter(state(), ["id"], {"n": Count()})
        builder.set_bolt(name, sink).fields_grouping("counts", Fields("id"), stream=stream)
    return builder.build()


def ids(built: Topology, name: str) -> set[str]:
    (its,) = built[name].states
    return {key[0] for key, row in its.backend.scan() if row.value is not None}  # type: ignore[attr-defined]


@pytest.mark.parametrize("above", ["first", "windows"])
def test_a_time_far_ahead_closes_no_window(above: str) -> None:
    store, built = MemoryStore(), topology(above, "skip")
    with submit(built, store=store, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    # The newest minutes are open; nothing is late.
    assert ids(built, "late") == set()
    open_ids = {"9"} if above == "first" else {"8", "9"}
    assert ids(built, "sent") == {str(each) for each in range(10)} - {str(FAR)} - open_ids
    assert verify(built, store).right


@pytest.mark.parametrize("above", ["first", "windows"])
def test_a_time_far_ahead_stops_a_topology_that_leaves_nothing_out(above: str) -> None:
    built = topology(above, "fail")
    with pytest.raises(TopologyFailed, match="'clock'.* is further ahead .* than max_ahead allows"):  # noqa: SIM117
        with submit(built, store=MemoryStore(), executor="local") as run:
            run.wait_until_caught_up(PATIENCE_S)
