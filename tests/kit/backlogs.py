"""Source partitions with a backlog, windows over it, and what in-order reading would give."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from framework import BaseBasicBolt, CoreTopology, Fields, TopologyBuilder, Tuple
from framework.state import LATE_STREAM, BaseWindowedBolt, TimeWindow, Window
from tests.kit.state_parts import journal

EVENT = Fields(user=str, at=float, n=int)
Event = tuple[str, float, int]


def backlog(seed: int = 1, count: int = 400, partitions: int = 4) -> list[list[Event]]:
    """Events in the order of their times in each partition. One has few of them, and ends early."""
    chance = random.Random(seed)
    found: list[list[Event]] = [[] for _ in range(partitions)]
    for n in range(count):
        its = found[chance.choices(range(partitions), [8, 4, 2, 1][:partitions])[0]]
        if its is not found[-1] or n < count // 2:
            its.append((f"u{chance.randrange(5)}", n * 0.5, n))
    return found


class Pass(BaseBasicBolt):
    def execute(self, tup: Tuple, collector: Any) -> None:
        collector.emit(list(tup.values))

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(EVENT)


class Gather(BaseWindowedBolt):
    """Journals each window that fires, and what is late."""

    def __init__(self, name: str, windows: TimeWindow) -> None:
        super().__init__(windows, key=["user"], late=Fields(n=int))
        self.name = name

    def execute_window(self, window: Window, collector: Any) -> None:
        journal(self.name).happens("window", window)
        collector.emit([window.key[0], window.start, sorted(each["n"] for each in window.tuples)])

    def declare_output_fields(self, declarer: Any) -> None:
        super().declare_output_fields(declarer)
        declarer.declare(Fields(user=str, start=float, numbers=pa.list_(pa.int64())))


class Collect(BaseBasicBolt):
    def __init__(self, name: str) -> None:
        self.name = name

    def execute(self, tup: Tuple, collector: Any) -> None:
        results = journal(self.name).results
        if tup.source_stream == LATE_STREAM:
            results.setdefault("late", []).append(tup["n"])
        else:
            results.setdefault((tup["user"], tup["start"]), []).append(tup["numbers"])


def topology(name: str, spout: Any, windows: TimeWindow, *, spouts: int, between: int, tasks: int) -> CoreTopology:
    """``between``: how many bolts of three tasks stand between the spout and the windows."""
    builder = TopologyBuilder(name)
    builder.set_spout("events", spout, spouts)
    last = "events"
    for number in range(between):
        builder.set_bolt(f"pass{number}", Pass(), 3).shuffle_grouping(last)
        last = f"pass{number}"
    builder.set_bolt("gather", Gather(name, windows), tasks).fields_grouping(last, Fields("user"))
    collect = builder.set_bolt("collect", Collect(name)).global_grouping("gather")
    collect.global_grouping("gather", LATE_STREAM)
    return builder.build()


def expected(partitions: Sequence[Sequence[Event]], length: float) -> dict[tuple[str, float], list[int]]:
    """All windows of in-order reading, whether or not they have ended."""
    found: dict[tuple[str, float], list[int]] = defaultdict(list)
    for user, at, n in sorted((each for its in partitions for each in its), key=lambda each: each[1]):
        found[(user, at // length * length)].append(n)
    return dict(found)


def check(results: dict[Any, Any], partitions: Sequence[Sequence[Event]], length: float) -> None:
    """Every window that has fired is that of in-order reading, nothing was late, and only the last
    ones of each user are open."""
    assert "late" not in results
    wanted = expected(partitions, length)
    assert {each: numbers for each, (numbers,) in results.items()} == {each: wanted[each] for each in results}
    newest = {user: max(at for its in partitions for who, at, _ in its if who == user) for user, _ in wanted}
    closed = {(user, start) for user, start in wanted if start + length <= min(newest.values())}
    assert closed <= results.keys()
    assert len(closed) > 20
