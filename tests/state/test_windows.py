"""Windows by count and by event time: firing, lateness, recovery, purging;
and state that expires.
"""

from __future__ import annotations

import datetime
import random
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import structlog

from framework import (
    BaseBasicBolt,
    Config,
    CoreTopology,
    CoreTopologyFailed,
    Fields,
    ReplayableSpout,
    TopologyBuilder,
    Tuple,
    submit,
)
from framework.core.checkpoint_record import CheckpointRecord, Layout
from framework.core.committed_state_reader import TopologyState
from framework.core.leader_loop import stateful_components
from framework.core.rescaling import Namespaces, rescaled
from framework.durations import MICROS
from framework.errors import BadRecordError, ConfigError, TopologyError
from framework.operators.timestamps import time_of
from framework.state import (
    LATE_STREAM,
    BaseWindowedBolt,
    CountWindow,
    InMemoryKeyValueStateProvider,
    LmdbKeyValueStateProvider,
    TimeWindow,
    Window,
    provider_settings,
)
from framework.state.expiry import FOR_EVER, ExpiringState
from framework.topology import FieldsGrouping, TopologyContext
from framework.topology.bolts import Input
from framework.transactions import MemoryStore
from tests.kit.state_parts import Count, Log, SteppedState, checkpointed, committed, journal, lmdb
from tests.kit.waiting import PATIENCE_S

EVENT = Fields(user=str, at=float, n=int)


class Events(ReplayableSpout):
    """Emits the events of a list. It can seek."""

    def __init__(self, key: str, events: Sequence[tuple[str, float, int]]) -> None:
        self.key, self.events = key, list(events)

    def open(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:
        self.collector, self.next = collector, 0

    def next_tuple(self) -> None:
        if self.next < len(self.events):
            self.next += 1
            self.collector.emit(self.events[self.next - 1], message_id=self.next)

    def position(self) -> int:
        return self.next

    def seek(self, positions: Sequence[int]) -> None:
        (self.next,) = positions

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(EVENT)


class Gather(BaseWindowedBolt):
    """Emits the content of each window."""

    def __init__(self, name: str, windows: Any, **more: Any) -> None:
        super().__init__(windows, **more)
        self.journal = name

    def execute_window(self, window: Window, collector: Any) -> None:
        journal(self.journal).happens("window", window)
        numbers = [each["n"] for each in window.tuples]
        collector.emit([",".join(map(str, window.key)), window.start, window.end, numbers, window.firing])

    def declare_output_fields(self, declarer: Any) -> None:
        super().declare_output_fields(declarer)
        declarer.declare(Fields(key=str, start=float, end=float, numbers=pa.list_(pa.int64()), firing=int))


class Collect(BaseBasicBolt):
    """Journals the results by window and firing; of equal ones, the last result stays."""

    def __init__(self, key: str) -> None:
        self.key = key

    def execute(self, tup: Tuple, collector: Any) -> None:
        if tup.source_stream == LATE_STREAM:
            journal(self.key).results.setdefault("late", []).append(tup["n"])
        else:
            journal(self.key).results[(tup["key"], tup["start"], tup["firing"])] = (tup["end"], list(tup["numbers"]))


def windowed(
    key: str, events: Sequence[tuple[str, float, int]], bolt: BaseWindowedBolt, tasks: int = 1
) -> CoreTopology:
    builder = TopologyBuilder(key)
    builder.set_spout("events", Events(key, events))
    declared = builder.set_bolt("gather", bolt, tasks)
    if bolt.key_fields:
        declared.fields_grouping("events", Fields(*bolt.key_fields))
    else:
        declared.global_grouping("events")
    collect = builder.set_bolt("collect", Collect(key)).global_grouping("gather")
    if bolt.late is not None:
        collect.global_grouping("gather", LATE_STREAM)
    return builder.build()


def joined(
    key: str, inputs: Mapping[str, Sequence[tuple[str, float, int]]], windows: TimeWindow, tasks: int = 1
) -> CoreTopology:
    """The same windows, by user, over several inputs."""
    builder = TopologyBuilder(key)
    for each, events in inputs.items():
        builder.set_spout(each, Events(key, events))
    gather = builder.set_bolt("gather", Gather(key, windows, key=["user"]), tasks)
    for each in inputs:
        gather.fields_grouping(each, Fields("user"))
    builder.set_bolt("collect", Collect(key)).global_grouping("gather")
    return builder.build()


def results(events: Sequence[tuple[str, float, int]], windows: Any, *, tasks: int = 1, **more: Any) -> dict[Any, Any]:
    key = f"w{uuid.uuid4().hex[:8]}"
    topology = windowed(key, events, Gather(key, windows, **more), tasks)
    with submit(topology, {"topology.state.checkpoint.interval.ms": 30}, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
    return journal(key).results


def by_user(users: str) -> list[tuple[str, float, int]]:
    return [(user, float(number), number) for number, user in enumerate(users)]


def test_tumbling_windows_by_count_fire_when_full() -> None:
    assert results(by_user("abaabbaab"), CountWindow(2), key=["user"], tasks=2) == {
        ("a", 0.0, 0): (2.0, [0, 2]),
        ("a", 2.0, 0): (4.0, [3, 6]),
        ("b", 0.0, 0): (2.0, [1, 4]),
        ("b", 2.0, 0): (4.0, [5, 8]),
    }


def test_sliding_windows_by_count_without_a_key_slide_over_all_tuples() -> None:
    assert results(by_user("abcabcab"), CountWindow(4, step=2)) == {
        ("", 0.0, 0): (4.0, [0, 1, 2, 3]),
        ("", 2.0, 0): (6.0, [2, 3, 4, 5]),
        ("", 4.0, 0): (8.0, [4, 5, 6, 7]),
    }


def test_sliding_windows_by_count_that_fire_early_do_so_from_the_first_step_on() -> None:
    """As in Storm."""
    assert results(by_user("a" * 9), CountWindow(5, step=2, early=True), key=["user"]) == {
        ("a", 0.0, 0): (4.0, [0, 1, 2, 3]),  # the last of the firings with this start
        ("a", 1.0, 0): (6.0, [1, 2, 3, 4, 5]),
        ("a", 3.0, 0): (8.0, [3, 4, 5, 6, 7]),
    }


def test_tuples_of_a_sliding_window_by_time_are_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    """Not in the order of their times; also after a restart."""
    events = [("a", 7.0, 1), ("a", 2.0, 2), ("a", 8.0, 3), ("a", 1.0, 4), ("a", 20.0, 5)]
    key, store, conf = f"w{uuid.uuid4().hex[:8]}", MemoryStore(), lmdb(tmp_path)
    for end in (2, 5):
        topology = windowed(key, events[:end], Gather(key, TimeWindow(10, "at", step_s=5, lag_s=8), key=["user"]))
        with submit(topology, conf, store=store, executor="local") as run:
            run.wait_until_idle(PATIENCE_S)
    assert journal(key).results[("a", 0.0, 0)] == (10.0, [1, 2, 3, 4])


def test_tumbling_windows_by_time_fire_when_the_watermark_has_passed() -> None:
    events = [("a", 1.0, 1), ("a", 11.0, 2), ("a", 9.0, 3), ("a", 13.0, 4), ("a", 26.0, 5)]
    assert results(events, TimeWindow(10, "at", lag_s=3), key=["user"]) == {
        ("a", 0.0, 0): (10.0, [1, 3]),
        ("a", 10.0, 0): (20.0, [2, 4]),
    }


def test_late_tuples_go_to_a_stream_of_their_own() -> None:
    events = [("a", 5.0, 1), ("a", 12.0, 2), ("a", 6.0, 3), ("a", 25.0, 4)]
    assert results(events, TimeWindow(10, "at"), key=["user"], late=Fields(n=int)) == {
        ("a", 0.0, 0): (10.0, [1]),
        ("a", 10.0, 0): (20.0, [2]),
        "late": [3],
    }


WRONG_UNIT = 1_700_000_000_000.0


@pytest.mark.parametrize("lateness_s", [0.0, 5.0])
def test_a_time_far_ahead_of_the_clock_moves_no_watermark(lateness_s: float) -> None:
    """Milliseconds that are taken for seconds end no window: the tuple is late."""
    events = [("a", 5.0, 1), ("a", WRONG_UNIT, 2), ("a", 6.0, 3), ("a", 25.0, 4), ("a", 26.0, 5)]
    windows = TimeWindow(10, "at", lateness_s=lateness_s)
    assert results(events, windows, key=["user"], late=Fields(n=int)) == {
        ("a", 0.0, 0): (10.0, [1, 3]),
        "late": [2],
    }


@pytest.mark.parametrize(("max_ahead_s", "late"), [(60.0, [2]), (86_400.0, []), (float("inf"), [])])
def test_how_far_ahead_a_time_may_be_is_a_choice(max_ahead_s: float, late: list[int]) -> None:
    events = [("a", time.time() - 10, 1), ("a", time.time() + 3_600, 2)]
    found = results(events, TimeWindow(10, "at", max_ahead_s=max_ahead_s), key=["user"], late=Fields(n=int))
    assert found.get("late", []) == late


@pytest.mark.parametrize("max_ahead_s", [-1.0, float("nan")])
def test_a_bound_that_is_none_is_refused(max_ahead_s: float) -> None:
    with pytest.raises(ConfigError, match="max_ahead_s"):
        TimeWindow(10, "at", max_ahead_s=max_ahead_s)


@pytest.mark.parametrize("late", [None, Fields(n=int)], ids=["left out", "on a stream"])
def test_late_tuples_are_counted_and_a_line_of_the_log_tells_of_them(late: Fields | None) -> None:
    key = f"w{uuid.uuid4().hex[:8]}"
    events = [("a", 5.0, 1), ("a", 12.0, 2), ("a", 6.0, 3), ("a", 7.0, 4), ("a", WRONG_UNIT, 5)]
    topology = windowed(key, events, Gather(key, TimeWindow(10, "at"), key=["user"], late=late))
    with structlog.testing.capture_logs() as logs, submit(topology, {}, executor="local") as run:
        run.wait_until_idle(60)
        status = run.status()
    assert {name: each.late for name, each in status.components.items()} == {"events": 0, "gather": 3, "collect": 0}
    assert "3 late" in status.progress_line(0.0)
    told = [each for each in logs if each["event"] == "tuples.late"]
    assert [(each["component"], each["log_level"]) for each in told] == [("gather", "warning")]  # one a minute at most


def test_a_window_that_is_kept_for_lateness_fires_again() -> None:
    events = [
        ("a", 5.0, 1),
        ("a", 12.0, 2),
        ("a", 6.0, 3),
        ("a", 14.9, 4),
        ("a", 7.0, 5),
        ("a", 15.0, 6),
        ("a", 8.0, 7),
    ]
    assert results(events, TimeWindow(10, "at", lateness_s=5), key=["user"], late=Fields(n=int)) == {
        ("a", 0.0, 0): (10.0, [1]),
        ("a", 0.0, 1): (10.0, [1, 3]),
        ("a", 0.0, 2): (10.0, [1, 3, 5]),
        "late": [7],
    }


def expected(events: Sequence[tuple[str, float, int]], windows: TimeWindow) -> dict[Any, Any]:
    """Computed directly, for events ordered by time: all windows that end by the last watermark."""
    found: dict[Any, list[int]] = defaultdict(list)
    for user, at, number in events:
        start = int(at // (windows.step_s or windows.length_s)) * (windows.step_s or windows.length_s)
        while start + windows.length_s > at:
            found[(user, float(start), 0)].append(number)
            start -= windows.step_s or windows.length_s
    watermark = max(at for _, at, _ in events) - windows.lag_s
    return {
        key: (key[1] + windows.length_s, numbers)
        for key, numbers in found.items()
        if key[1] + windows.length_s <= watermark
    }


@pytest.mark.parametrize(("length", "step"), [(10, None), (10, 5), (10, 4), (9, 2), (3, 1)])
def test_sliding_windows_by_time_match_a_direct_computation(length: float, step: float | None) -> None:
    chance = random.Random(length * 100 + (step or 0))
    times = sorted(chance.uniform(0, 60) for _ in range(150))
    events = [("a", at, number) for number, at in enumerate(times)]
    windows = TimeWindow(length, "at", step_s=step, lag_s=1)
    found = results(events, windows, key=["user"])
    assert found == expected(events, windows)
    assert len(found) > 4


@pytest.mark.behaviour("5.5")
def test_windows_survive_whatever_dies_and_restarts(tmp_path: Path) -> None:
    """Exactly-once: gathered tuples are neither lost nor doubled, and each window holds its own."""
    key = f"w{uuid.uuid4().hex[:8]}"
    chance = random.Random(5)
    events = [("ab"[number % 2], number * 0.5 + chance.uniform(0, 3), number) for number in range(400)]
    windows = TimeWindow(12, "at", step_s=6, lag_s=3)
    store, conf = MemoryStore(), lmdb(tmp_path, **{"topology.max.spout.pending": 9})
    conf["topology.state.checkpoint.interval.ms"] = 10
    fired = 0

    def sometimes(window: Window) -> None:
        nonlocal fired
        fired += 1
        if fired in (2, 17, 18, 40):
            raise RuntimeError("died")

    journal(key).on["window"] = sometimes
    for end in (90, 220, 400):
        topology = windowed(key, events[:end], Gather(key, windows, key=["user"]), 2)
        with submit(topology, conf, store=store, executor="local") as run:
            run.wait_until_idle(PATIENCE_S)
    found = journal(key).results
    ended = {each: value for each, value in expected(events, windows).items() if value[0] < 185}
    assert {each: sorted(numbers) for each, (end, numbers) in found.items() if end < 185} == {
        each: sorted(numbers) for each, (_, numbers) in ended.items()
    }
    assert len(ended) > 50
    # Tuples that no window needs any more are gone.
    kept = checkpointed(conf, store, key, "gather")
    assert len(kept) < 150


def in_phases(
    name: str, folder: Path, windows: TimeWindow, phases: Sequence[tuple[int, Sequence[tuple[str, float, int]]]]
) -> dict[Any, Any]:
    """Start the same topology several times.

    ``phases``: (tasks, events). Each window must fire once.
    """
    store, conf = MemoryStore(), lmdb(folder)
    told: list[tuple[Any, ...]] = []
    journal(name).on["window"] = lambda window: told.append((window.key, window.start, window.firing))
    for tasks, events in phases:
        topology = windowed(name, events, Gather(name, windows, key=["user"], late=Fields(n=int)), tasks)
        with submit(topology, conf, store=store, executor="local") as run:
            run.wait_until_idle(PATIENCE_S)
    assert sorted(told) == sorted(set(told))
    return journal(name).results


@pytest.mark.rule("C39")
@pytest.mark.behaviour("5.2")
@pytest.mark.parametrize("first", [0, 1])
def test_windows_that_move_to_another_task_keep_their_own_time(tmp_path: Path, first: int) -> None:
    """One task is far ahead of the other.

    When one task takes over both, the tuples of the other are neither late nor lost.
    """
    ahead, behind = (
        next(user for user in "abcdefgh" if FieldsGrouping.task_of([user], 2) == task) for task in (first, 1 - first)
    )
    events = [(ahead, 1.0, 1), (behind, 2.0, 2), (ahead, 95.0, 3), (behind, 12.0, 4)]
    more = [(behind, 15.0, 5), (behind, 23.0, 6), (behind, 3.0, 7)]
    name = f"w{uuid.uuid4().hex[:8]}"
    found = in_phases(name, tmp_path, TimeWindow(10, "at"), [(2, events), (1, events + more)])
    assert found == {
        (ahead, 0.0, 0): (10.0, [1]),
        (behind, 0.0, 0): (10.0, [2]),
        (behind, 10.0, 0): (20.0, [4, 5]),
        "late": [7],
    }


@pytest.mark.each_value_once
@pytest.mark.rule("C39")
@pytest.mark.behaviour("5.2")
@pytest.mark.parametrize("lateness", [0.0, 2.0])
@pytest.mark.parametrize("tasks", [(1, 2, 3, 1), (2, 1, 2, 1), (3, 2, 3, 2)])
def test_a_window_of_which_nothing_is_kept_does_not_open_again_in_another_task(
    tmp_path: Path, tasks: Sequence[int], lateness: float
) -> None:
    """It fired, and its tuples are gone. What comes for it after that is late, in any task."""
    name = f"w{uuid.uuid4().hex[:8]}"
    events = [*[(user, 1.0, 0) for user in "abcdef"], *[(user, 32.0, 1) for user in "bcdef"]]
    phases = [(tasks[0], events)]
    for number, count in enumerate(tasks[1:], 10):
        events = [*events, ("a", 3.0, number)]
        phases.append((count, events))
    phases.append((tasks[-1], [*events, *[(user, 45.0, 20) for user in "bcdef"]]))
    found = in_phases(name, tmp_path, TimeWindow(10, "at", lateness_s=lateness), phases)
    assert found.pop("late") == [10, 11, 12]
    assert found == {
        **{(user, 0.0, 0): (10.0, [0]) for user in "abcdef"},
        **{(user, 30.0, 0): (40.0, [1]) for user in "bcdef"},
    }


@pytest.mark.rule("C39")
@pytest.mark.behaviour("5.2")
@pytest.mark.parametrize("tasks", [(1, 2), (2, 1), (2, 3, 2)])
def test_an_input_that_is_quiet_after_a_change_of_the_tasks_is_as_far_as_it_was(
    tmp_path: Path, tasks: Sequence[int]
) -> None:
    """Otherwise the watermark would begin anew, and wait for that input in every task."""
    name = f"w{uuid.uuid4().hex[:8]}"
    one, other = [(user, at, 1) for at in (41.0, 49.0) for user in "ab"], [(user, 50.0, 2) for user in "ab"]
    store, conf = MemoryStore(), lmdb(tmp_path)
    for number, count in enumerate(tasks):
        assert journal(name).results == {}
        last = [(user, 61.0, 3) for user in "ab"] if number == len(tasks) - 1 else []
        topology = joined(name, {"one": [*one, *last], "other": other}, TimeWindow(10, "at"), count)
        with submit(topology, conf, store=store, executor="local") as started:
            started.wait_until_idle(PATIENCE_S)
    assert journal(name).results == {(user, 40.0, 0): (50.0, [1, 1]) for user in "ab"}


@pytest.mark.rule("C39")
@pytest.mark.behaviour("5.2")
def test_a_window_that_was_opened_late_does_not_fire_anew_in_another_task(tmp_path: Path) -> None:
    """Its only tuple came after its end, within the lateness. The new task has seen nothing yet."""
    events = [("a", 1.0, 1), ("b", 12.0, 2), ("a", 3.0, 3), ("b", 4.0, 4)]
    name = f"w{uuid.uuid4().hex[:8]}"
    windows = TimeWindow(5, "at", lateness_s=20)
    found = in_phases(
        name, tmp_path, windows, [(1, events), (2, events), (3, [*events, ("a", 13.0, 5), ("b", 13.0, 6)])]
    )
    assert found == {("a", 0.0, 0): (5.0, [1]), ("a", 0.0, 1): (5.0, [1, 3]), ("b", 0.0, 0): (5.0, [4])}


@pytest.mark.each_value_once
@pytest.mark.rule("C39")
@pytest.mark.behaviour("5.2")
@pytest.mark.parametrize("tasks", [(2, 1, 3), (1, 3, 2)])
@pytest.mark.parametrize("lateness", [0.0, 4.0])
def test_windows_fire_once_whatever_the_number_of_tasks_is(
    tmp_path: Path, tasks: Sequence[int], lateness: float
) -> None:
    chance = random.Random(7)
    events = [("abcde"[number % 5], number * 0.5 + chance.uniform(0, 2), number) for number in range(300)]
    windows = TimeWindow(12, "at", step_s=4, lag_s=5, lateness_s=lateness)
    name = f"w{uuid.uuid4().hex[:8]}"
    phases = [(count, events[:end]) for count, end in zip(tasks, (101, 202, 300), strict=True)]
    found = in_phases(name, tmp_path, windows, phases)
    ended = {each: value for each, value in expected(events, windows).items() if value[0] < 140}
    assert {each: sorted(numbers) for each, (end, numbers) in found.items() if end < 140} == {
        each: sorted(numbers) for each, (_, numbers) in ended.items()
    }
    assert len(ended) > 150


@pytest.mark.behaviour("5.2")
@pytest.mark.parametrize("lag_s", [0.0, 20.0])
@pytest.mark.parametrize("behind", [[("ann", 2.0, 3)], [("bob", 2.0, 3)], []])
def test_windows_follow_changed_inputs_and_a_changed_lag(
    tmp_path: Path, lag_s: float, behind: Sequence[tuple[str, float, int]]
) -> None:
    """The input that held the windows up is removed, and the lag is shorter:
    all windows that are due now fire.
    """
    name = f"w{uuid.uuid4().hex[:8]}"
    store, conf = MemoryStore(), lmdb(tmp_path)

    def run(inputs: Mapping[str, Sequence[tuple[str, float, int]]], windows: TimeWindow) -> dict[Any, Any]:
        with submit(joined(name, inputs, windows), conf, store=store, executor="local") as started:
            started.wait_until_idle(PATIENCE_S)
        return journal(name).results

    events = [("ann", 1.0, 1), ("ann", 11.0, 2)]
    assert run({"one": events, "other": behind}, TimeWindow(10, "at", lag_s=lag_s)) == {}
    expected = {
        ("ann", 0.0, 0): (10.0, [1, *(n for user, _, n in behind if user == "ann")]),
        ("ann", 10.0, 0): (20.0, [2]),
    }
    expected |= {("bob", 0.0, 0): (10.0, [3])} if ("bob", 2.0, 3) in behind else {}
    assert run({"one": [*events, ("ann", 25.0, 4)]}, TimeWindow(10, "at")) == expected


class Told:
    """The collector of a bolt that is called without a topology: keeps what it emits."""

    def __init__(self) -> None:
        self.emitted: list[Any] = []

    def emit(self, values: Sequence[Any], anchors: Any = None, stream: str = "default") -> None:
        self.emitted.append(list(values))

    def ack(self, tup: Tuple) -> None:
        pass


def opened(windows: TimeWindow, state: Any, tasks: int = 1) -> tuple[Gather, Told]:
    """A windowed bolt on a state, as after a start, and what it emits."""
    bolt, told = Gather("opened", windows, key=["user"], late=Fields(n=int)), Told()
    bolt.bind("gather", [Input("events", "default", EVENT, FieldsGrouping(Fields("user")))], tasks)
    bolt.prepare({}, TopologyContext("opened", "gather", 0, tasks), told)
    bolt.init_state(state)
    return bolt, told


def fed(bolt: Gather, told: Told, *events: tuple[str, float, int]) -> list[Any]:
    """What a bolt emits for these events."""
    del told.emitted[:]
    for each in events:
        bolt.execute(Tuple(None, EVENT, each, "events", "default"))
    return list(told.emitted)


def in_memory() -> Any:
    return InMemoryKeyValueStateProvider().new_state("t/b/1/0", {}, None)


@pytest.mark.behaviour("5.2")
@pytest.mark.parametrize("moved", [False, True], ids=["same task", "another task"])
def test_a_window_that_is_over_does_not_fire_anew_when_the_lateness_is_raised(moved: bool) -> None:
    """Its tuples are gone: it would fire with the late ones alone, as if for the first time."""
    state = in_memory()
    windows = TimeWindow(10, "at", step_s=5)
    assert fed(*opened(windows, state), ("ann", 1.0, 1), ("ann", 7.0, 2), ("ann", 12.0, 3)) == [
        ["ann", -5.0, 5.0, [1], 0],
        ["ann", 0.0, 10.0, [1, 2], 0],
    ]
    for _ in range(2):  # also after another start
        bolt, told = opened(replace(windows, lateness_s=20), state, 2 if moved else 1)
        assert fed(bolt, told, ("ann", 3.0, 4)) == [[4]]  # late
        assert fed(bolt, told, ("ann", 8.0, 5)) == []  # it is for the window that begins at 5
    assert fed(bolt, told, ("ann", 15.0, 6)) == [["ann", 5.0, 15.0, [2, 3, 5, 5], 0]]
    assert fed(bolt, told, ("ann", 9.0, 7)) == [["ann", 5.0, 15.0, [2, 3, 5, 5, 7], 1]]


@pytest.mark.behaviour("5.2")
def test_a_window_that_may_still_be_late_fires_again_when_the_lateness_is_raised() -> None:
    state = in_memory()
    windows = TimeWindow(10, "at", lateness_s=5)
    events = [("ann", 1.0, 1), ("ann", 11.0, 2), ("ann", 23.0, 3)]
    assert fed(*opened(windows, state), *events) == [["ann", 0.0, 10.0, [1], 0], ["ann", 10.0, 20.0, [2], 0]]
    bolt, told = opened(replace(windows, lateness_s=50), state)
    assert fed(bolt, told, ("ann", 12.0, 4), ("ann", 2.0, 5)) == [["ann", 10.0, 20.0, [2, 4], 1], [5]]


class Quiet(Gather):
    """Two inputs; ``passed``: seconds that have passed."""

    passed = 0.0

    def elapsed(self) -> float:
        return self.passed


def quiet(windows: TimeWindow, state: Any) -> tuple[Quiet, Callable[[str, float], list[Any]], Callable[[], list[Any]]]:
    """A windowed bolt; what it emits for a tuple of an input; and what at a tick."""
    bolt, told = Quiet("quiet", windows, key=["user"], late=Fields(n=int)), Told()
    grouping = FieldsGrouping(Fields("user"))
    bolt.bind("gather", [Input(each, "default", EVENT, grouping) for each in ("one", "other")], 1)
    bolt.prepare({}, TopologyContext("quiet", "gather", 0, 1), told)
    bolt.init_state(state)

    def emitted(tup: Tuple) -> list[Any]:
        del told.emitted[:]
        bolt.execute(tup)
        return [each[1:4] if len(each) > 1 else each for each in told.emitted]

    return (
        bolt,
        lambda source, at: emitted(Tuple(None, EVENT, ("ann", at, int(at)), source, "default")),
        lambda: emitted(Tuple(None, Fields(), (), "__system", "__tick")),
    )


@pytest.mark.behaviour("5.2")
def test_an_idle_input_does_not_hold_up_the_windows_of_the_others() -> None:
    state = in_memory()
    bolt, come, tick = quiet(TimeWindow(10, "at", lag_s=1, idle_s=5), state)
    assert come("one", 1.0) == come("one", 30.0) == []  # nothing has come of the other yet
    assert bolt.tick_in_s() == 5.0
    bolt.passed = 4.0
    assert come("one", 32.0) == tick() == []
    assert bolt.tick_in_s() == 1.0
    bolt.passed = 5.0
    assert tick() == [[0.0, 10.0, [1]]]
    assert come("one", 42.0) == [[30.0, 40.0, [30, 32]]]  # at once
    assert come("other", 12.0) == [[12]]  # it is late
    assert come("one", 71.0) == []  # from now on the other one counts again
    assert come("other", 51.5) == [[40.0, 50.0, [42]]]
    assert bolt.tick_in_s() == 5.0
    bolt.passed = 9.0
    assert come("one", 72.0) == []
    bolt.passed = 14.0  # both are idle; two seconds after the latest, in which time went on
    assert tick() == [[50.0, 60.0, [51]]]
    assert bolt.tick_in_s() == 80 + 1 - (72 + 5)
    bolt.passed = 18.0
    assert tick() == [[70.0, 80.0, [71, 72]]]
    assert bolt.tick_in_s() is None
    again, _, tick = quiet(TimeWindow(10, "at", lag_s=1, idle_s=5), state)
    again.passed = 100.0
    assert (again.tick_in_s(), tick()) == (None, [])


@pytest.mark.behaviour("5.2")
def test_windows_go_on_from_a_state_of_an_earlier_version() -> None:
    """What is known of the task had no place there, and a key had its watermark with it."""
    state = in_memory()
    fed(*opened(TimeWindow(10, "at"), state), ("ann", 1.0, 1), ("ann", 12.0, 2))
    for key, value in [(key, value) for key, value in state.items() if key[-2:] == (1, 0)]:
        state.delete(key)
        state.put(key[:-2], value)
    state.put((("bob",), "p", 20 * MICROS), 1)
    state.put((("bob",), "t", (20 * MICROS, 0)), ["events", "default", list(EVENT.names), ["bob", 20.0, 3], 1])
    state.put((("bob",), "w"), 25 * MICROS)  # that of the task from which it came
    bolt, told = opened(TimeWindow(10, "at"), state)
    assert fed(bolt, told, ("ann", 5.0, 4), ("bob", 15.0, 5)) == [[4], [5]]  # late
    assert fed(bolt, told, ("ann", 20.0, 6)) == [["ann", 10.0, 20.0, [2], 0]]
    assert fed(bolt, told, ("ann", 30.0, 7)) == [["ann", 20.0, 30.0, [6], 0], ["bob", 20.0, 30.0, [3], 0]]
    kept = {key for key, _ in state.items() if len(key) == 2 or key[0] == ()}
    assert kept == {((), "d"), ((), "l"), ((), "r", 1, 0), ((), "m", ("events", "default"), 1, 0)}


@pytest.mark.each_value_once
@pytest.mark.behaviour("5.2")
@pytest.mark.parametrize("tasks", [1, 2])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (TimeWindow(60, "at"), TimeWindow(90, "at")),
        (TimeWindow(60, "at"), TimeWindow(60, "at", step_s=20)),
        (TimeWindow(60, "at"), TimeWindow(60)),
        (CountWindow(4), CountWindow(3)),
        (CountWindow(4), TimeWindow(60, "at")),
    ],
    ids=str,
)
def test_changing_the_windows_of_gathered_tuples_is_refused(
    tmp_path: Path, before: Any, after: Any, tasks: int
) -> None:
    """Otherwise those tuples would be in no window, or in a wrong one."""
    name = f"w{uuid.uuid4().hex[:8]}"
    store, conf = MemoryStore(), lmdb(tmp_path)
    events = [("ann", 61.0, 1), ("bob", 62.0, 2)]

    def run(windows: Any, tasks: int, events: Sequence[tuple[str, float, int]]) -> None:
        topology = windowed(name, events, Gather(name, windows, key=["user"]), tasks)
        with submit(topology, conf, store=store, executor="local") as started:
            started.wait_until_idle(PATIENCE_S)

    run(before, 1, events)
    with pytest.raises(
        CoreTopologyFailed, match="holds tuples that were gathered in .*: let it have those windows again"
    ):
        run(after, tasks, events)
    run(before, tasks, [*events, ("ann", 125.0, 3), ("bob", 126.0, 4), *[("ann", 130.0, n) for n in (5, 6)]])
    assert journal(name).results[("ann", 60.0 if isinstance(before, TimeWindow) else 0.0, 0)]


@pytest.mark.parametrize("key", [17, "ann", (), None])
def test_reading_a_key_that_no_window_has_gives_the_default(tmp_path: Path, key: Any) -> None:
    name = f"w{uuid.uuid4().hex[:8]}"
    store, conf = MemoryStore(), lmdb(tmp_path)
    topology = windowed(name, [("ann", 1.0, 1)], Gather(name, CountWindow(2), key=["user"]), 2)
    with submit(topology, conf, store=store, executor="local") as started:
        started.wait_until_idle(PATIENCE_S)
    with TopologyState(topology, Config.of(conf), store) as state:
        assert state.get("gather", key, "not there") == "not there"
        assert state.get("gather", (("ann",), "n")) == 1


@pytest.mark.behaviour("5.2")
def test_windows_without_tuples_may_change_their_kind(tmp_path: Path) -> None:
    name = f"w{uuid.uuid4().hex[:8]}"
    store, conf = MemoryStore(), lmdb(tmp_path)
    events = [("ann", float(number), number) for number in range(6)]
    for windows, upto in ((CountWindow(2), 4), (CountWindow(1), 6)):
        topology = windowed(name, events[:upto], Gather(name, windows, key=["user"]))
        with submit(topology, conf, store=store, executor="local") as started:
            started.wait_until_idle(PATIENCE_S)
    found = journal(name).results
    assert [found[("ann", float(start), 0)][1] for start in (0, 2, 4, 5)] == [[0, 1], [2, 3], [4], [5]]


def test_impossible_windows_are_refused() -> None:
    with pytest.raises(ConfigError, match="makes no windows"):
        CountWindow(2, step=3)
    with pytest.raises(ConfigError, match="makes no windows"):
        TimeWindow(10, "at", step_s=11)
    with pytest.raises(TopologyError, match="needs field 'when', which 'events' does not emit"):
        windowed("w", [], Gather("w", TimeWindow(1, "when")))
    builder = TopologyBuilder("w")
    builder.set_spout("events", Events("w", []))
    builder.set_bolt("gather", Gather("w", CountWindow(1), key=["user"]), 2).shuffle_grouping("events")
    with pytest.raises(TopologyError, match="group the stream of 'events' by fields among them"):
        builder.build()


def test_times_are_microseconds_and_anything_else_is_a_bad_record() -> None:
    assert time_of(1.5, "at") == 1_500_000
    assert time_of(datetime.datetime(1970, 1, 2, tzinfo=datetime.UTC), "at") == 86_400 * MICROS
    for wrong in ("1", None, True, float("nan"), datetime.datetime(2024, 1, 1)):
        with pytest.raises(BadRecordError, match="field 'at' holds"):
            time_of(wrong, "at")


# --- state that expires ---------------------------------------------------------------------------


@pytest.mark.parametrize("provider", ["memory", "lmdb"])
def test_a_value_that_was_not_put_within_its_ttl_is_gone(provider: str, tmp_path: Path) -> None:
    now = [1_000.0]
    conf = {"topology.state.provider.config": {"path": str(tmp_path)} if provider == "lmdb" else {}}
    made = LmdbKeyValueStateProvider() if provider == "lmdb" else InMemoryKeyValueStateProvider()
    inner = made.new_state("t/b/1/0", conf, None)
    state = ExpiringState(inner, 10, clock=lambda: now[0])
    for number in range(100):
        state.put(number, number)
    state.prepare_commit(1)
    state.commit(1)
    now[0] += 6
    for number in range(0, 100, 2):
        state.put(number, -number)
    now[0] += 6
    assert state.get(1) is None
    assert state.get(1, 7) == 7
    assert state.multi_get([1, 2]) == [None, -2]
    assert len(dict(state.items())) == 50
    state.prepare_commit(2)
    state.commit(2)
    assert len(dict(inner.items())) == 50  # and gone from the store
    now[0] += 20
    state.prepare_commit(3)
    state.commit(3)
    assert dict(inner.items()) == {}


class Forgetful(Count):
    state_ttl_s = 10


def test_a_bolt_declares_the_ttl_of_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_000.0]
    monkeypatch.setattr(provider_settings, "ExpiringState", partial(ExpiringState, clock=lambda: now[0]))
    key = f"w{uuid.uuid4().hex[:8]}"
    store, conf = MemoryStore(), lmdb(tmp_path)
    builder = TopologyBuilder(key)
    builder.set_spout("words", Log(key, [["a", "b"]]))
    builder.set_bolt("count", Forgetful(key)).fields_grouping("words", Fields("word"))
    with submit(builder.build(), conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
    now[0] += 11
    assert len(checkpointed(conf, store, key)) == 2  # nobody has read it since
    builder = TopologyBuilder(key)
    builder.set_spout("words", Log(key, [["a", "b", "b"]]))
    builder.set_bolt("count", Forgetful(key)).fields_grouping("words", Fields("word"))
    with submit(builder.build(), conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
    assert {word: kept[1] for word, kept in checkpointed(conf, store, key).items()} == {"b": 1}


def test_what_windows_are_held_is_known_after_the_ttl_of_the_state() -> None:
    """Otherwise tuples that were gathered in some windows would go on in others."""
    now = [1_000.0]
    inner = in_memory()

    def state() -> ExpiringState:
        return ExpiringState(inner, 10, clock=lambda: now[0], expires=Gather("any", CountWindow(2)).expires)

    bolt, told = opened(TimeWindow(60, "at"), state())
    for number in range(4):
        now[0] += 6
        assert fed(bolt, told, ("ann", 1.0, number)) == []
        inner.prepare_commit(number + 1)
        inner.commit(number + 1)
    with pytest.raises(ConfigError, match="holds tuples that were gathered in windows by time"):
        opened(TimeWindow(90, "at"), state())
    now[0] += 11
    of_the_task = {((), "m", ("events", "default"), 1, 0), ((), "r", 1, 0)}
    assert {key for key, _ in state().items()} == {((), each) for each in "dl"} | of_the_task


class Lasting(Count):
    """The same component; its values never expire."""


class Soon(Count):
    """The same component; its values expire after an hour."""

    state_ttl_s = 3600.0


@pytest.mark.parametrize("tasks_after", [1, 2])
@pytest.mark.parametrize(("before", "after"), [(Lasting, Soon), (Soon, Lasting)])
def test_a_ttl_can_be_added_to_existing_state_and_removed_from_it(
    before: type[Count], after: type[Count], tasks_after: int, tmp_path: Path
) -> None:
    key = f"w{uuid.uuid4().hex[:8]}"
    store, conf = MemoryStore(), lmdb(tmp_path)

    def counted(bolt: type[Count], words: list[str], tasks: int) -> dict[Any, Any]:
        builder = TopologyBuilder(key)
        builder.set_spout("words", Log(key, [words]))
        builder.set_bolt("count", bolt(key), tasks).fields_grouping("words", Fields("word"))
        topology = builder.build()
        with submit(topology, conf, store=store, executor="local") as run:
            run.wait_until_idle(PATIENCE_S)
        with TopologyState(topology, Config.of(conf), store) as state:
            return dict(state.items("count"))

    words = ["a", "b", "a"]
    assert counted(before, words, 1) == {"a": 2, "b": 1}
    assert counted(after, [*words, "a", "c"], tasks_after) == {"a": 3, "b": 1, "c": 1}
    assert counted(before, [*words, "a", "c", "c"], 1) == {"a": 3, "b": 1, "c": 2}


class SoonButNotA(Soon):
    def expires(self, key: Any) -> bool:
        return bool(key != "a")


@pytest.mark.parametrize("tasks_after", [1, 2])
def test_what_never_expires_does_not_begin_to_when_a_ttl_is_added(tasks_after: int, tmp_path: Path) -> None:
    key = f"w{uuid.uuid4().hex[:8]}"

    def topology(bolt: type[Count], tasks: int) -> CoreTopology:
        builder = TopologyBuilder(key)
        builder.set_spout("words", Log(key, [["a", "b"]]))
        builder.set_bolt("count", bolt(key), tasks).fields_grouping("words", Fields("word"))
        return builder.build()

    record = SteppedState(topology(Lasting, 1), tmp_path).settle().record
    record = SteppedState(topology(SoonButNotA, tasks_after), tmp_path, record).settle().record
    kept = committed(str(tmp_path), record, key, "count")
    assert kept["a"] == (FOR_EVER, 1)
    assert kept["b"][0] < FOR_EVER


@pytest.mark.parametrize("after", [Lasting, Soon], ids=["cease to expire", "live longer"])
def test_expired_values_do_not_come_back_when_the_ttl_grows(tmp_path: Path, after: type[Count]) -> None:
    key = f"w{uuid.uuid4().hex[:8]}"
    topologies = {}
    for bolt in (Soon, Lasting):
        builder = TopologyBuilder(key)
        builder.set_spout("words", Log(key, [["a", "b"]]))
        builder.set_bolt("count", bolt(key)).fields_grouping("words", Fields("word"))
        topologies[bolt] = builder.build()
    record = SteppedState(topologies[Soon], tmp_path).settle().record
    layout = record.layouts["count"]
    assert layout.ttl_s == 3600.0
    gone = replace(record, layouts={"count": layout._replace(ttl_s=1e-6)})  # so all values have expired
    namespaces = Namespaces(key, LmdbKeyValueStateProvider(), Config.of(lmdb(tmp_path)).for_components())
    moved = rescaled(namespaces, stateful_components(topologies[after]), gone, lambda _: None)
    namespaces.provider.close()
    assert moved.layouts["count"][:3] == (moved.last, 1, after.state_ttl_s or 0.0)
    assert committed(str(tmp_path), moved, key, "count") == {}


@pytest.mark.parametrize("ttl_s", [0, -1.0, float("nan")])
def test_a_ttl_that_is_not_above_zero_is_refused(ttl_s: float) -> None:
    bolt = Count("ttl")
    bolt.state_ttl_s = ttl_s
    builder = TopologyBuilder("ttl")
    builder.set_spout("words", Log("ttl", []))
    builder.set_bolt("count", bolt).fields_grouping("words", Fields("word"))
    with pytest.raises(ConfigError, match="bolt 'count': state_ttl_s is .*: give seconds above 0"):
        submit(builder.build(), {}, executor="local").stop()


def test_a_record_of_an_earlier_release_fits_any_ttl(tmp_path: Path) -> None:
    document = CheckpointRecord(txid=3, layouts={"count": Layout(1, 2)}, assigned={"count": Layout(1, 2)}).document()
    document["layouts"] = document["assigned"] = {"count": [1, 2]}
    found = CheckpointRecord.of(document, "here").layouts["count"]
    assert (found.ttl_of(Soon("x")), found.ttl_of(Lasting("x"))) == (3600.0, 0.0)
    assert found.fits(Layout(9, 2, 3600.0)) and found.fits(Layout(9, 2, 0.0)) and not found.fits(Layout(9, 1, 0.0))


@pytest.mark.rule("C39")
@pytest.mark.parametrize("how", ["by different fields", "in different orders", "by a part of the key each"])
def test_windows_whose_inputs_go_to_different_tasks_are_refused(how: str) -> None:
    first, second = {
        "by different fields": (["user"], ["n"]),
        "in different orders": (["user", "n"], ["n", "user"]),
        "by a part of the key each": (["user", "n"], ["user"]),
    }[how]
    builder = TopologyBuilder("refused")
    builder.set_spout("one", Events("refused", []))
    builder.set_spout("two", Events("refused", []))
    bolt = builder.set_bolt("gather", Gather("refused", CountWindow(2), key=["user", "n"]), 2)
    bolt.fields_grouping("one", Fields(*first)).fields_grouping("two", Fields(*second))
    with pytest.raises(
        TopologyError, match="'gather' (has windows per user, n: .* all streams by the same|takes 'one' by)"
    ):
        builder.build()


def test_windows_whose_key_goes_to_two_tasks_are_refused() -> None:
    builder = TopologyBuilder("refused")
    builder.set_spout("one", Events("refused", []))
    bolt = builder.set_bolt("gather", Gather("refused", CountWindow(2), key=["user"]), 2)
    bolt.partial_key_grouping("one", Fields("user"))
    with pytest.raises(TopologyError, match="has windows per user: group"):
        builder.build()


def test_windows_without_a_key_refuse_another_number_of_tasks(tmp_path: Path) -> None:
    key = f"w{uuid.uuid4().hex[:8]}"
    store, conf = MemoryStore(), lmdb(tmp_path)
    builder = TopologyBuilder(key)
    builder.set_spout("words", Events(key, by_user("abc")))
    builder.set_bolt("gather", Gather(key, CountWindow(2)), 2).fields_grouping("words", Fields("user"))
    with submit(builder.build(), conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
    builder = TopologyBuilder(key)
    builder.set_spout("words", Events(key, by_user("abc")))
    builder.set_bolt("gather", Gather(key, CountWindow(2)), 3).fields_grouping("words", Fields("user"))
    with (
        pytest.raises(TopologyError, match="keys belong to no task"),
        submit(builder.build(), conf, store=store, executor="local") as run,
    ):
        run.wait_until_idle(PATIENCE_S)
