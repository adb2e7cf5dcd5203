"""The examples of Flink and Beam give what these engines say, or the difference has a name."""

from __future__ import annotations

import datetime
import tomllib
from pathlib import Path
from typing import Any

import pytest

from framework import CLOCK_STREAM, Fields, Topology, TransactionalTopologyBuilder, hopping, tumbling
from framework.testing import run_on
from ratchet import Pipeline, max_, parquet, sqlite
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

_READ: dict[str, list[dict[str, Any]]] = tomllib.loads((Path(__file__).parent / "scenarios.toml").read_text())
SCENARIOS, WINDOW_JOINS = _READ["scenario"], _READ["window_join"]
#: How far the watermark is behind the newest record, in seconds.
LAG = 86_400
#: The time of a record of another key that ends everything.
END = 10**6


def topology(kind: str, options: dict[str, Any]) -> Topology:
    builder = TransactionalTopologyBuilder("scenario", "records", OpaqueMemoryTransactionalSpout({0: []}, ROW, 10))
    watermark = WatermarkCommitter(
        OpaqueMapState(MemoryBackend()), "at", out_of_orderness=LAG, max_ahead="1000000 days"
    )
    builder.set_bolt("watermark", watermark).global_grouping("records").global_grouping("records", CLOCK_STREAM)
    for side in ("left", "right"):
        builder.set_bolt(side, Part(side)).shuffle_grouping("records")
    state, one = OpaqueMapState(MemoryBackend()), {"on": "at", "key": ["id"], "aggregates": {"total": Sum("number")}}
    both: dict[str, Any] = {"key": ["id"], "left": "left_at", "right": "right_at"}
    made: Any
    if kind == "windows":
        length, origin = options["length"], options.get("origin", 0)
        window = (
            hopping(length, options["step"], origin=origin) if "step" in options else tumbling(length, origin=origin)
        )
        made = WindowedCommitter(state, window, allowed_lateness=options.get("lateness", 0), **one)  # type: ignore[arg-type]
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


def rows_of(scenario: dict[str, Any], *, joined: bool) -> list[list[Any]]:
    """The rows of the spout. A record of another key makes each watermark of a transcript, and the
    last one."""
    records = [[each + LAG, "the end", 0] if isinstance(each, int) else each for each in scenario["records"]]
    rows = [
        [*((side, key) if joined else ("any", key)), 0, seconds(at), number]
        for *its, key, number in records
        for side, at in [its if joined else ("any", its[0])]
    ]
    return rows if scenario.get("transcript") else [*rows, ["left", "the end", 0, END, 0]]


@pytest.mark.each_value_once
@pytest.mark.parametrize("take", [1, 100])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each["name"])
def test_an_example_of_another_engine(scenario: dict[str, Any], take: int) -> None:
    kind, joined = scenario["kind"], scenario["kind"] in ("pairs", "valued")
    rows = rows_of(scenario, joined=joined)
    if scenario.get("transcript"):
        take = 1  # each of its lines comes after the one before
    sent = run_on(topology(kind, scenario["options"]), rows, take=take).rows("sent")
    if kind == "pairs":
        least, most = scenario["options"].get("kept", (-LAG, LAG))
        sent = [row for row in sent if least <= row["right_at"] - row["left_at"] <= most]
    if joined:
        found = [[row["id"], row["left_number"], row["right_number"]] for row in sent]
    else:
        found = [
            [row["id"], *(int(each.timestamp()) for each in list(row.values())[1:3]), row["total"]] for row in sent
        ]
    its = scenario.get("ours", scenario["expected"])
    expected = its if joined else [[key, seconds(start), seconds(end), total] for key, start, end, total in its]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("scenario", WINDOW_JOINS, ids=lambda each: each["name"])
def test_a_window_join_of_another_engine(scenario: dict[str, Any], tmp_path: Path) -> None:
    rows = [
        {"side": side, "num": num, "id": name, "at": datetime.datetime.fromtimestamp(seconds(at), datetime.UTC)}
        for side, at, num, name in [*scenario["records"], ["left", LAG, "the end", ""], ["right", LAG, "the end", ""]]
    ]
    joining, options = Pipeline("joining", state=lambda name: sqlite(tmp_path / "state.db", name)), scenario["options"]
    read = joining.read(rows)
    left, right = (
        read.filter(f"side = '{side}'")
        .window(tumbling("5 min"), on="at", late="1 h")
        .group_by("num")
        .agg(id=max_("id"))
        .when_closed(name=side)
        for side in ("left", "right")
    )
    both = left.join(right, on=["num", "window_start"], times="window_end", within=0, how=options["how"], name="both")
    both.filter(options.get("where", "true")).append_into(parquet(tmp_path / "out"), name="out")
    length = datetime.timedelta(minutes=5)
    found = [
        (row["num"], row["id"] or "", row["id_right"] or "", row["window_start"], row["window_start"] + length)
        for row in joining.test()["out"]
    ]
    expected = [
        (*names, *(datetime.datetime.fromtimestamp(seconds(at), datetime.UTC) for at in (start, end)))
        for *names, start, end in scenario["expected"]
    ]
    assert sorted(found) == sorted(expected)


def test_each_difference_has_a_name() -> None:
    for scenario in SCENARIOS:
        differs = "ours" in scenario and scenario["ours"] != scenario["expected"]
        assert differs == bool(scenario.get("why")), scenario["name"]
