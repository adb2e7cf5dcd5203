"""Random pipelines that join two topics by event time, below windows, sessions and deduplications:
batches, tasks and faults change no result, and no row is late."""

from __future__ import annotations

import datetime
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from framework.testing import Fault, crash, replay
from ratchet import Json, Pipeline, Stream, count, parquet, session, sliding, sqlite, sum_, tumbling

pytestmark = pytest.mark.rule("C44")

WORLDS = 20
START = datetime.datetime(2026, 1, 1, 10, tzinfo=datetime.UTC)
TOPICS = {"orders": "n", "payments": "m"}
#: What a side of the join may be: how its rows are put into windows.
SIDES = ("rows", "tumbling", "sliding", "sessions", "windows of windows")


@dataclass(frozen=True)
class Side:
    """A topic, and the steps over it. ``lag``: how far its rows may be out of order, in seconds."""

    topic: str
    lag: int
    is_deduplicated: bool
    kind: str
    length: int

    @property
    def time(self) -> str:
        return {"rows": "at", "sessions": "session_end"}.get(self.kind, "window_end")


class World:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        chance = random.Random(f"chained pipelines {seed}")
        self.sides = [
            Side(
                topic,
                chance.choice([0, 3, 8]),
                chance.random() < 0.5,
                chance.choice(SIDES),
                2 * chance.randint(1, 6),
            )
            for topic in TOPICS
        ]
        self.rows = {side.topic: rows_of(chance, side) for side in self.sides}
        self.has_table = chance.random() < 0.5
        self.how = chance.choice(["inner", "left"] if self.has_table else ["inner", "left", "right", "outer"])
        self.within = chance.randint(0, 9)
        self.late: list[str] = []

    def result(self, number: int, folder: Path) -> dict[str, Counter[Any]]:
        """The rows of the sinks, with other tasks, batches and faults for each number."""
        chance = random.Random(f"{self.seed} {number}")
        pipeline = Pipeline("shop", state=lambda name: sqlite(folder / "state.db", name))
        streams = [
            pipeline.read_kafka(
                topic,
                value=Json(k=str, u=str, at=datetime.datetime, **{column: int}),
                **({"bootstrap_servers": "127.0.0.1:1"} if topic == "orders" else {}),
            )
            for topic, column in TOPICS.items()
        ]
        self.late = []
        made = [self.steps(rows, side, chance, folder) for rows, side in zip(streams, self.sides, strict=True)]
        lags = [side.lag for side in self.sides if side.kind == "rows"]
        options: dict[str, Any] = {"late": f"{max(lags)} s"} if lags else {}
        times = (self.sides[0].time, self.sides[1].time)
        joined = made[0].join(
            made[1].latest_by("k") if self.has_table else made[1],
            on="k",
            times=times,
            within=f"{self.within} s",
            how=self.how,  # type: ignore[arg-type]
            name="joined",
            parallelism=chance.randint(1, 3),
            **options,
        )
        joined.append_into(parquet(folder / "joined-rows"), name="joined-rows")
        for which in ("left", "right"):
            self.sink(joined.late(which), f"joined-late-{which}", folder)  # type: ignore[arg-type]
        take: Any = [1_000, 1, [chance.randint(1, 6) for _ in range(4)]][number]
        faults: list[Fault] = [[], [crash()], [replay()]][number]
        tables = pipeline.test(self.rows, take=take, faults=faults)
        late = {name: rows for name in self.late if (rows := list(tables[name]))}
        assert not late, f"take={take}: {late}"
        return {
            name: Counter(tuple(sorted((column, str(value)) for column, value in row.items())) for row in tables[name])
            for name in tables
            if name.endswith("-rows")
        }

    def steps(self, rows: Stream, side: Side, chance: random.Random, folder: Path) -> Stream:
        name, column, late = side.topic, TOPICS[side.topic], f"{side.lag} s"
        totals = {column: sum_(column), f"{column}s": count()}
        if side.is_deduplicated:
            rows = rows.deduplicate(
                "u", within="5 s", on="at", late=late, name=f"{name}-first", parallelism=chance.randint(1, 3)
            )
            self.sink(rows.late(), f"{name}-first-late", folder)
        if side.kind != "rows":
            windows: Any = {
                "sliding": sliding(f"{side.length} s", f"{side.length // 2} s"),
                "sessions": session(f"{side.length} s"),
            }.get(side.kind, tumbling(f"{side.length} s"))
            table = rows.window(windows, on="at", late=late).group_by("k").agg(**totals)
            rows = table.when_closed(name=f"{name}-closed", parallelism=chance.randint(1, 3))
            self.sink(rows.late(), f"{name}-closed-late", folder)
        if side.kind == "windows of windows":
            table = rows.window(tumbling(f"{3 * side.length} s")).group_by("k").agg(**totals)
            rows = table.when_closed(name=f"{name}-again", parallelism=chance.randint(1, 3))
            self.sink(rows.late(), f"{name}-again-late", folder)
        rows.append_into(parquet(folder / f"{name}-rows"), name=f"{name}-rows")
        return rows

    def sink(self, stream: Stream, name: str, folder: Path) -> None:
        stream.append_into(parquet(folder / name), name=name)
        self.late.append(name)


def rows_of(chance: random.Random, side: Side) -> list[dict[str, Any]]:
    """Rows of one partition. No key has two rows of one time."""
    made, moments, at = [], set(), chance.randint(0, 5)
    for number in range(chance.randint(5, 40)):
        at += chance.choice([0, 1, 1, 2, 3, 8])
        key, moment = chance.choice("abc"), at - chance.randint(0, side.lag)
        while (key, moment) in moments:
            moment += 1
        moments.add((key, moment))
        at = max(at, moment)
        again = number - 1 if chance.random() < 0.1 else number
        when = START + datetime.timedelta(seconds=moment)
        made.append({"k": key, "u": f"{side.topic} {again}", "at": when, TOPICS[side.topic]: number})
    return made


@pytest.mark.slow
def test_results_depend_neither_on_batches_nor_on_tasks_nor_on_faults(seed: int, tmp_path: Path) -> None:
    joined = 0
    for number in range(seed, seed + WORLDS):
        world, results = World(number), []
        for run in range(3):
            folder = tmp_path / f"{number}-{run}"
            folder.mkdir()
            results.append(world.result(run, folder))
        whole, *others = results
        for other in others:
            for name, rows in whole.items():
                assert rows == other[name], f"World({number}), {vars(world)}: {name}: {rows} or {other[name]}"
        joined += whole["joined-rows"].total()
    assert joined
