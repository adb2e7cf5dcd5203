"""The examples of Flink and Beam give what these engines say, or the difference has a name."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from framework import CLOCK_STREAM, Fields, Topology, TransactionalTopologyBuilder, hopping, tumbling
from framework.testing import run_on
from sinks import (
    AsOfJoiningCommitter,
    JoiningCommitter,
    MemoryBackend,
    OpaqueMapState,
    SessionCommitter,
    Sum,
    WatermarkCommitter,
    WindowedCommitter,
)
from spouts import OpaqueMemoryTransactionalSpout
from tests.sinks.event_time.test_interval_join import ROW, Part

pytestmark = pytest.mark.rule("C44")

SCENARIOS: list[dict[str, Any]] = tomllib.loads((Path(__file__).parent / "scenarios.toml").read_text())["scenario"]
#: A record of another key that ends everything.
END = 10**6


def topology(kind: str, options: dict[str, Any]) -> Topology:
    builder = TransactionalTopologyBuilder("scenario", "records", OpaqueMemoryTransactionalSpout({0: []}, ROW, 10))
    watermark = WatermarkCommitter(
        OpaqueMapState(MemoryBackend()), "at", out_of_orderness="1 day", max_ahead="1000000 days"
    )
    builder.set_bolt("watermark", watermark).global_grouping("records").global_grouping("records", CLOCK_STREAM)
    for side in ("left", "right"):
        builder.set_bolt(side, Part(side)).shuffle_grouping("records")
    state, one = OpaqueMapState(MemoryBackend()), {"on": "at", "key": ["id"], "aggregates": {"total": Sum("number")}}
    both: dict[str, Any] = {"key": ["id"], "left": "left_at", "right": "right_at"}
    made: Any
    if kind == "windows":
        length = options["length"]
        window = hopping(length, options["step"]) if "step" in options else tumbling(length)
        made = WindowedCommitter(state, window, **one)  # type: ignore[arg-type]
    elif kind == "sessions":
        made = SessionCommitter(state, options["gap"], **one)  # type: ignore[arg-type]
    elif kind == "pairs":
        made = JoiningCommitter(state, within=options["within"], **both)
    else:
        made = AsOfJoiningCommitter(state, how="inner", **both)
    subscribed = builder.set_bolt("sent", made, 2).all_grouping("watermark")
    for source in ("left", "right") if kind in ("pairs", "valued") else ("records",):
        subscribed.fields_grouping(source, Fields("id"))
    return builder.build()


def seconds(at: Any) -> int:
    if isinstance(at, int):
        return at
    hours, minutes = map(int, at.split(":"))
    return (hours * 60 + minutes) * 60


@pytest.mark.each_value_once
@pytest.mark.parametrize("take", [1, 100])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each["name"])
def test_an_example_of_another_engine(scenario: dict[str, Any], take: int) -> None:
    kind, joined = scenario["kind"], scenario["kind"] in ("pairs", "valued")
    rows = [
        [*((side, key) if joined else ("any", key)), 0, seconds(at), number]
        for *its, key, number in scenario["records"]
        for side, at in [its if joined else ("any", its[0])]
    ]
    rows.append(["left", "the end", 0, END, 0])
    sent = run_on(topology(kind, scenario["options"]), rows, take=take).rows("sent")
    if joined:
        found = [[row["id"], row["left_number"], row["right_number"]] for row in sent]
    else:
        found = [
            [row["id"], *(int(each.timestamp()) for each in list(row.values())[1:3]), row["total"]] for row in sent
        ]
    its = scenario.get("ours", scenario["expected"])
    expected = its if joined else [[key, seconds(start), seconds(end), total] for key, start, end, total in its]
    assert sorted(found) == sorted(expected)


def test_each_difference_has_a_name() -> None:
    for scenario in SCENARIOS:
        differs = "ours" in scenario and scenario["ours"] != scenario["expected"]
        assert differs == bool(scenario.get("why")), scenario["name"]
