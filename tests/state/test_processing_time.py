"""Windows that fire though no tuple comes: once, when their end has passed, whatever fails.

Those by processing time do so whatever the host's clock does; those by the tuples' own time when
their inputs are idle.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from framework import (
    BaseBasicBolt,
    BaseStatefulBolt,
    CoreTopology,
    FailedException,
    Fields,
    ReplayableSpout,
    TopologyBuilder,
    Tuple,
    submit,
)
from framework.core.acker_task import AckerTask
from framework.core.checkpoint_record import CheckpointRecord, Layout
from framework.core.rescaling import Namespaces, namespace_of, rescaled
from framework.errors import ConfigError
from framework.state import BaseWindowedBolt, LmdbKeyValueStateProvider, TimeWindow, Window
from framework.transactions import MemoryStore
from integration.server import wait_until
from tests.kit.state_parts import Holding, SteppedState, checkpointed, committed, journal, lmdb, once
from tests.kit.waiting import PATIENCE_S

RESULT = Fields(user=str, start=float, end=float, numbers=pa.list_(pa.int64()))


class Feed(ReplayableSpout):
    """Emits what the test has put into the journal, a letter per user, with its number.

    It can seek.
    """

    def __init__(self, key: str) -> None:
        self.key = key

    def open(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:
        self.collector, self.next = collector, 0

    def next_tuple(self) -> None:
        users = journal(self.key).emitted
        if self.next < len(users):
            self.next += 1
            self.collector.emit([users[self.next - 1], self.next - 1], message_id=self.next)

    def caught_up(self) -> bool:
        return self.next == len(journal(self.key).emitted)

    def position(self) -> int:
        return self.next

    def seek(self, positions: Sequence[int]) -> None:
        (self.next,) = positions

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(user=str, n=int))


class Gather(BaseWindowedBolt):
    """Emits the content of each window. Its clock is in the journal."""

    def __init__(self, journal_key: str, windows: TimeWindow, **more: Any) -> None:
        super().__init__(windows, key=["user"], **more)
        self.journal = journal_key

    def now(self) -> float:
        return float(journal(self.journal).results.get("now", 0.0))

    def elapsed(self) -> float:
        return self.now()

    def execute_window(self, window: Window, collector: Any) -> None:
        journal(self.journal).happens("window", window)
        collector.emit([*window.key, window.start, window.end, [each["n"] for each in window.tuples]])

    def declare_output_fields(self, declarer: Any) -> None:
        super().declare_output_fields(declarer)
        declarer.declare(RESULT)


class Pass(BaseBasicBolt):
    """Passes results on."""

    def __init__(self, key: str) -> None:
        self.key = key

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        journal(self.key).happens("pass starts", None)

    def execute(self, tup: Tuple, collector: Any) -> None:
        journal(self.key).happens("pass", tup)
        collector.emit(list(tup.values))

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(RESULT)


class Holds(Holding):
    """Holds each result until the test lets it go."""

    fields = RESULT


class Keep(BaseStatefulBolt):
    """Keeps every result in its state, also repeated ones."""

    def prepare(self, conf: Any, context: Any, collector: Any) -> None:  # type: ignore[override]
        self.collector = collector

    def init_state(self, state: Any) -> None:
        self.state = state

    def execute(self, tup: Tuple) -> None:
        key = (tup["user"], tup["start"], tup["end"])
        self.state.put(key, [*(self.state.get(key) or []), list(tup["numbers"])])
        self.collector.ack(tup)

    def grouping_key(self, key: Any) -> Sequence[Any]:
        return [key[0]]


class World:
    """A topology that gathers tuples, passes the results on and keeps them;
    with its hosts' clock and its record.
    """

    def __init__(self, folder: Path, windows: TimeWindow, *, between: Any = None) -> None:
        self.key = f"p{uuid.uuid4().hex[:8]}"
        self.folder, self.windows, self.between = folder, windows, between or Pass(self.key)
        if isinstance(self.between, type):
            self.between = self.between(self.key)
        self.record: CheckpointRecord | None = None
        self.stepped: SteppedState | None = None

    def topology(self, tasks: int = 1) -> CoreTopology:
        builder = TopologyBuilder(self.key)
        builder.set_spout("feed", Feed(self.key))
        builder.set_bolt("gather", Gather(self.key, self.windows), tasks).fields_grouping("feed", Fields("user"))
        builder.set_bolt("pass", self.between).shuffle_grouping("gather")
        builder.set_bolt("keep", Keep()).fields_grouping("pass", Fields("user"))
        return builder.build()

    def start(self, tasks: int = 1, *, exact: bool = True) -> SteppedState:
        """Start the topology; an instance that was started before dies."""
        if self.stepped is not None:
            self.record = self.stepped.record
            self.stepped.close()
        self.stepped = SteppedState(
            self.topology(tasks),
            self.folder,
            self.record,
            exact=exact,
            now=self.stepped.clock.now if self.stepped else 0.0,
        )
        return self.stepped

    def comes(self, users: str, at: float) -> None:
        """Let a tuple come for each user, set the hosts' clock to ``at``, and settle."""
        assert self.stepped is not None
        journal(self.key).emitted.extend(users)
        self.passes(at)

    def passes(self, at: float) -> None:
        """Set the hosts' clock to ``at``, and settle."""
        assert self.stepped is not None
        journal(self.key).results["now"] = at
        self.stepped.settle()

    def kept(self) -> dict[Any, Any]:
        """The committed results: (user, start, end) -> their numbers, once per firing."""
        assert self.stepped is not None
        return self._committed("keep")

    def open(self) -> dict[Any, Any]:
        """How many tuples the open windows hold, in the committed state, by key and pane."""
        return {(key[0], key[2]): value for key, value in self._committed("gather").items() if key[1] == "p"}

    def _committed(self, component_id: str) -> dict[Any, Any]:
        assert self.stepped is not None
        return committed(str(self.folder), self.stepped.record, self.key, component_id)


@pytest.mark.behaviour("5.5")
def test_a_window_fires_when_its_end_has_passed_without_new_tuples(tmp_path: Path) -> None:
    world = World(tmp_path, TimeWindow(10))
    world.start()
    world.comes("ab", 3)
    world.comes("a", 9.9)
    world.passes(9.999)
    assert world.kept() == {}
    world.passes(10)
    assert world.kept() == {("a", 0.0, 10.0): [[0, 2]], ("b", 0.0, 10.0): [[1]]}
    world.comes("a", 10)  # a window includes its start, and excludes its end
    world.passes(40)
    assert world.kept()[("a", 10.0, 20.0)] == [[3]]
    assert world.open() == {}


def test_sliding_windows_by_processing_time_hold_each_tuple_in_each_of_its_windows(tmp_path: Path) -> None:
    world = World(tmp_path, TimeWindow(10, step_s=5))
    world.start()
    for at, users in ((1, "a"), (6, "a"), (11, "a"), (12, "")):
        world.comes(users, at)
    world.start()  # windows that have fired do not fire again
    world.passes(100)
    assert world.kept() == {
        ("a", -5.0, 5.0): [[0]],
        ("a", 0.0, 10.0): [[0, 1]],
        ("a", 5.0, 15.0): [[1, 2]],
        ("a", 10.0, 20.0): [[2]],
    }


def test_a_topology_whose_windows_hold_nothing_takes_no_checkpoint(tmp_path: Path) -> None:
    world = World(tmp_path, TimeWindow(10))
    stepped = world.start()
    world.comes("a", 1)
    world.passes(10)
    before = stepped.record.last
    journal(world.key).results["now"] = 1_000.0
    stepped.step(20, seconds=10)
    assert stepped.record.last == before
    assert stepped.driver.status().components["gather"].executed == 2  # the tuple, and one tick


@pytest.mark.slow
def test_a_round_waits_for_spouts_no_longer_than_until_the_next_window_ends(tmp_path: Path) -> None:
    world = World(tmp_path, TimeWindow(10))
    stepped = world.start()
    world.comes("a", 6)
    driver = stepped.driver
    driver._spout_wait_s = 5.0
    round_ = driver.begin()
    assert round_.spout_wait_s == pytest.approx(4.0)
    journal(world.key).results["now"] = 10.0
    assert driver.end(round_, lambda: driver._executor.run(round_))
    world.stepped = stepped.settle()
    assert world.kept() == {("a", 0.0, 10.0): [[0]]}


# --- restarts, and clocks that go back ------------------------------------------------------------


@pytest.mark.behaviour("5.5")
def test_windows_that_ended_during_a_downtime_fire_unchanged_at_the_first_tick(tmp_path: Path) -> None:
    world = World(tmp_path, TimeWindow(10))
    world.start()
    world.comes("ab", 3)
    world.comes("a", 14)
    assert world.open() == {(("a",), 10_000_000): 1}
    world.comes("b", 25)
    world.comes("a", 25)
    world.start()
    world.passes(1_000)
    assert world.kept() == {
        ("a", 0.0, 10.0): [[0]],
        ("b", 0.0, 10.0): [[1]],
        ("a", 10.0, 20.0): [[2]],
        ("a", 20.0, 30.0): [[4]],
        ("b", 20.0, 30.0): [[3]],
    }


@pytest.mark.parametrize("restarted", [False, True], ids=["in one run", "over a restart"])
def test_a_clock_that_goes_back_fires_no_window_again(tmp_path: Path, restarted: bool) -> None:
    world = World(tmp_path, TimeWindow(10))
    world.start()
    world.comes("a", 3)
    world.passes(12)
    if restarted:
        world.start()
    world.comes("a", 5)  # time stands still at 12
    assert world.kept() == {("a", 0.0, 10.0): [[0]]}
    world.passes(11)
    world.passes(20)
    assert world.kept() == {("a", 0.0, 10.0): [[0]], ("a", 10.0, 20.0): [[1]]}


def test_after_the_clock_goes_back_a_tuple_joins_the_window_of_the_latest_tuple(tmp_path: Path) -> None:
    world = World(tmp_path, TimeWindow(10))
    world.start()
    world.comes("a", 35)
    world.start()
    world.comes("a", 5)
    assert world.open() == {(("a",), 30_000_000): 2}


@pytest.mark.rule("C39")
@pytest.mark.parametrize("tasks", [(2, 1, 3), (1, 3, 2)])
def test_time_does_not_go_back_in_any_task_when_the_number_of_tasks_changes(
    tmp_path: Path, tasks: Sequence[int]
) -> None:
    """All windows of a key have fired, so nothing of it is in the state.

    They do not fire again in another task whose host's clock is behind.
    """
    first, second, third = tasks
    world = World(tmp_path, TimeWindow(10))
    world.start(first)
    world.comes("abcdef", 3)
    world.comes("abc", 12)
    world.start(second)
    world.comes("abcdef", 7)
    world.passes(21)
    world.start(third)
    world.comes("abcdef", 9)
    world.passes(30)
    users = "abcdef"
    assert world.kept() == {
        **{(user, 0.0, 10.0): [[number]] for number, user in enumerate(users)},
        **{
            (user, 10.0, 20.0): [[6 + number, 9 + number] if user in "abc" else [9 + number]]
            for number, user in enumerate(users)
        },
        **{(user, 20.0, 30.0): [[15 + number]] for number, user in enumerate(users)},
    }


@pytest.mark.rule("C39")
def test_a_window_that_moves_to_a_task_which_is_ahead_fires_there(tmp_path: Path) -> None:
    """One task has already fired windows up to a time after the end of the
    window that the other task brings.
    """
    world = World(tmp_path, TimeWindow(10))
    stepped = world.start(2)
    world.comes("abcdef", 3)
    for living in _gathering(stepped)[:1]:  # the clock of one task's host has stopped
        living._instance._buffer._now = lambda: 3.0
    world.comes("", 12)
    fired = len(world.kept())
    assert 0 < fired < 6
    world.start(1)
    world.passes(12)
    assert world.kept() == {(user, 0.0, 10.0): [[number]] for number, user in enumerate("abcdef")}


def _gathering(stepped: SteppedState) -> list[Any]:
    tasks = [each for each in stepped.rounds._worker._tasks.values() if hasattr(each, "_component_tasks")]
    return [each._component_tasks["gather"] for each in tasks if "gather" in each._component_tasks]


# --- what fails after a window has fired ----------------------------------------------------------


@pytest.mark.rule("C34")
@pytest.mark.behaviour("5.5")
@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("window", RuntimeError("died")),
        ("pass", FailedException("failed")),
        ("pass", RuntimeError("died")),
        ("pass starts", ConnectionRefusedError("not yet")),
    ],
)
def test_a_result_that_fails_takes_everything_back_to_before_its_window_fired(
    tmp_path: Path, what: str, error: Exception
) -> None:
    world = World(tmp_path, TimeWindow(10))
    stepped = world.start()
    journal(world.key).on[what] = once(error)
    world.comes("ab", 3)
    world.passes(10)
    world.passes(20)  # by now at the latest, it has fired again
    assert world.kept() == {("a", 0.0, 10.0): [[0]], ("b", 0.0, 10.0): [[1]]}
    assert stepped.recoveries == (what != "pass starts")


class Odd(Pass):
    """Emits, once, a result that does not fit its fields."""

    def execute(self, tup: Tuple, collector: Any) -> None:
        try:
            journal(self.key).happens("pass", tup)
        except RuntimeError:
            collector.emit([1, *tup.values[1:]])
        else:
            super().execute(tup, collector)


def test_a_result_that_does_not_fit_takes_everything_back(tmp_path: Path) -> None:
    world = World(tmp_path, TimeWindow(10), between=Odd)
    stepped = world.start()
    journal(world.key).on["pass"] = once(RuntimeError("odd"))
    world.comes("ab", 3)
    world.passes(10)
    assert world.kept() == {("a", 0.0, 10.0): [[0]], ("b", 0.0, 10.0): [[1]]}
    assert stepped.recoveries == 1


@pytest.mark.rule("C34")
@pytest.mark.behaviour("5.5")
@pytest.mark.parametrize("fails", [False, True], ids=["is let go", "fails"])
def test_a_checkpoint_waits_for_a_result_that_a_bolt_holds(tmp_path: Path, fails: bool) -> None:
    """Its window is no longer in the state.

    If that were committed, a failure would lose the result.
    """
    world = World(tmp_path, TimeWindow(10), between=Holds)
    stepped = world.start()
    world.comes("a", 3)
    committed_before = stepped.record.txid
    journal(world.key).results["now"] = 10.0
    stepped.step(10, seconds=1.5)
    ((bolt, tup),) = journal(world.key).results.pop("held")
    assert stepped.record.txid == committed_before
    assert world.open() == {(("a",), 0): 1}
    if fails:
        bolt.collector.fail(tup)
        stepped.step(10, seconds=1.5)
        ((bolt, tup),) = journal(world.key).results.pop("held")
    bolt.let_go(tup)
    stepped.settle()
    assert world.kept() == {("a", 0.0, 10.0): [[0]]}
    assert world.open() == {}
    assert stepped.recoveries == fails


def the_last_result_counts_once(world: World, stepped: SteppedState) -> None:
    """Let the last result go: after one recovery, which has voided the result before it,
    it counts once.
    """
    assert stepped.recoveries == 1
    bolt, result = journal(world.key).results["held"][-1]
    bolt.let_go(result)
    stepped.settle()
    assert world.kept() == {("a", 0.0, 10.0): [[0]]}


@pytest.mark.rule("C34")
@pytest.mark.behaviour("4.6", "5.5")
def test_no_checkpoint_is_taken_while_a_result_is_held_whose_acker_died(tmp_path: Path) -> None:
    """No acker tracks its tree any more; only the bolt that got the
    tick knows that the tree is open.
    """
    world = World(tmp_path, TimeWindow(10), between=Holds)
    stepped = world.start()
    world.comes("a", 3)
    committed_before = stepped.record.txid
    journal(world.key).results["now"] = 10.0
    stepped.step(2)
    tasks = stepped.rounds._worker._tasks
    del tasks[next(place for place, task in tasks.items() if isinstance(task, AckerTask))]
    held = journal(world.key).results["held"]
    while len(held) < 2:  # the result times out, and the window fires again
        assert stepped.record.txid == committed_before
        stepped.step(seconds=1.5)
        assert stepped.clock.now < 100
    the_last_result_counts_once(world, stepped)


def test_a_result_that_nobody_acks_times_out_and_takes_everything_back(tmp_path: Path) -> None:
    world = World(tmp_path, TimeWindow(10), between=Holds)
    stepped = world.start()
    world.comes("a", 3)
    journal(world.key).results["now"] = 10.0
    held = journal(world.key).results["held"] = []
    while len(held) < 2:
        stepped.step(seconds=1.5)
        assert stepped.clock.now < 100
    the_last_result_counts_once(world, stepped)


def test_a_crash_between_firing_and_the_checkpoint_fires_the_window_again(tmp_path: Path) -> None:
    world = World(tmp_path, TimeWindow(10))
    stepped = world.start()
    world.comes("a", 3)
    told: list[float] = []
    journal(world.key).on["window"] = lambda window: told.append(window.start)
    journal(world.key).results["now"] = 10.0
    stepped.step(1)
    assert told == [0.0]
    world.start().settle()
    assert told == [0.0, 0.0]
    assert world.kept() == {("a", 0.0, 10.0): [[0]]}


@pytest.mark.behaviour("5.4")
def test_at_least_once_a_failed_result_is_lost_and_nothing_goes_back(tmp_path: Path) -> None:
    world = World(tmp_path, TimeWindow(10))
    stepped = world.start(exact=False)
    journal(world.key).on["pass"] = once(FailedException("failed"))
    world.comes("ab", 3)
    world.passes(10)
    assert len(world.kept()) == 1
    assert stepped.recoveries == 0
    assert world.open() == {}


# --- by the tuples' own time, when inputs are idle ------------------------------------------------


def idle(length_s: float = 3, **more: float) -> TimeWindow:
    """The time of a tuple of ``Feed`` is its number."""
    return TimeWindow(length_s, "n", idle_s=5, **more)


@pytest.mark.behaviour("5.5")
def test_time_goes_on_when_nothing_has_come_for_idle_s(tmp_path: Path) -> None:
    world = World(tmp_path, idle(20, lag_s=1))
    world.start()
    world.comes("aab", 0)
    world.passes(4.9)
    world.passes(18.9)  # 2 + 18.9 - 1 is before the end of the window
    assert world.kept() == {}
    world.passes(19)
    assert world.kept() == {("a", 0.0, 20.0): [[0, 1]], ("b", 0.0, 20.0): [[2]]}
    assert world.open() == {}


@pytest.mark.behaviour("5.5")
def test_windows_that_were_due_earlier_fire_when_all_inputs_become_idle(tmp_path: Path) -> None:
    world = World(tmp_path, idle())
    stepped = world.start()
    world.comes("aab", 0)
    world.passes(4.9)
    assert world.kept() == {}
    world.passes(5)
    assert world.kept() == {("a", 0.0, 3.0): [[0, 1]], ("b", 0.0, 3.0): [[2]]}
    before = stepped.record.last
    journal(world.key).results["now"] = 1_000.0
    stepped.step(20, seconds=10)
    assert stepped.record.last == before  # windows that hold nothing cost nothing


def test_time_stands_still_while_nothing_comes_unless_asked_for(tmp_path: Path) -> None:
    world = World(tmp_path, TimeWindow(3, "n"))
    world.start()
    world.comes("aab", 0)
    world.passes(1_000)
    assert world.kept() == {}
    assert world.open() == {(("a",), 0): 2, (("b",), 0): 1}


@pytest.mark.behaviour("5.5")
def test_time_does_not_go_on_while_nothing_runs(tmp_path: Path) -> None:
    """What comes meanwhile is read after the start, and is not late."""
    world = World(tmp_path, idle())
    world.start()
    world.comes("aa", 0)
    journal(world.key).results["now"] = 1_000.0
    world.start().settle()
    world.comes("a", 1_004.9)
    assert world.kept() == {}
    world.passes(1_009.9)
    assert world.kept() == {("a", 0.0, 3.0): [[0, 1, 2]]}


@pytest.mark.rule("C34")
@pytest.mark.behaviour("5.5")
@pytest.mark.parametrize("what", ["window", "pass", "driver"])
def test_a_window_that_fired_while_idle_fires_once_for_what_is_committed(tmp_path: Path, what: str) -> None:
    world = World(tmp_path, idle())
    stepped = world.start()
    told: list[Window] = []
    journal(world.key).on["window"] = told.append
    world.comes("aab", 0)
    if what == "driver":
        journal(world.key).results["now"] = 5.0
        stepped.step(1)
        assert len(told) == 2
        world.start()
    else:
        journal(world.key).on[what] = once(RuntimeError("died"))
    world.passes(5)
    world.passes(10)
    world.passes(15)
    assert world.kept() == {("a", 0.0, 3.0): [[0, 1]], ("b", 0.0, 3.0): [[2]]}


@pytest.mark.rule("C39")
@pytest.mark.parametrize("tasks", [(2, 1, 3), (1, 3, 2)])
def test_windows_of_idle_inputs_fire_once_when_the_number_of_tasks_changes(
    tmp_path: Path, tasks: Sequence[int]
) -> None:
    first, second, third = tasks
    world = World(tmp_path, idle(100))
    world.start(first)
    world.comes("abcdef", 0)
    world.passes(50)
    world.start(second).settle()
    assert world.kept() == {}
    world.passes(150)
    expected = {(user, 0.0, 100.0): [[number]] for number, user in enumerate("abcdef")}
    assert world.kept() == expected
    world.start(third)
    world.comes("abcdef", 151)  # late
    world.passes(1_000)
    assert (world.kept(), world.open()) == (expected, {})


# --- by the real clock ----------------------------------------------------------------------------


class Real(Gather):
    """Gathers by the real clock. ``stands``: the time at which its clock has stopped, if it has."""

    stands: float | None = None

    def now(self) -> float:
        return time.time() if self.stands is None else self.stands


class Ticks(Gather):
    """Gathers by the host's own clock."""

    def elapsed(self) -> float:
        return time.monotonic()


@pytest.mark.behaviour("5.5")
def test_windows_fire_while_a_run_is_idle_and_stay_open_when_it_is_stopped(tmp_path: Path) -> None:
    key, store, conf = f"p{uuid.uuid4().hex[:8]}", MemoryStore(), lmdb(tmp_path)

    def topology(stands: float | None = None) -> CoreTopology:
        builder = TopologyBuilder(key)
        builder.set_spout("feed", Feed(key))
        gather = Real(key, TimeWindow(0.5))
        gather.stands = stands
        builder.set_bolt("gather", gather, 2).fields_grouping("feed", Fields("user"))
        builder.set_bolt("keep", Keep()).fields_grouping("gather", Fields("user"))
        return builder.build()

    fired: list[Window] = []
    journal(key).on["window"] = fired.append
    journal(key).emitted.extend("abc")
    with submit(topology(time.time()), conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)  # open windows do not keep a run from being idle
        assert fired == []
    assert sum(value for each, value in checkpointed(conf, store, key, "gather").items() if each[1] == "p") == 3
    with submit(topology(), conf, store=store, executor="local") as run:
        wait_until(lambda: len(fired) == 3, PATIENCE_S, "windows that ended a while ago")
        journal(key).emitted.extend("d")
        wait_until(lambda: len(fired) == 4, PATIENCE_S, "a window that ends while nothing comes")
        run.wait_until_idle(PATIENCE_S)
    results = checkpointed(conf, store, key, "keep")
    assert sorted(user for user, _, _ in results) == ["a", "b", "c", "d"]
    assert all(len(each) == 1 for each in results.values())


@pytest.mark.slow
@pytest.mark.behaviour("5.5")
def test_windows_by_the_tuples_own_time_fire_while_a_run_is_idle(tmp_path: Path) -> None:
    key = f"p{uuid.uuid4().hex[:8]}"
    builder = TopologyBuilder(key)
    builder.set_spout("feed", Feed(key))
    builder.set_bolt("gather", Ticks(key, TimeWindow(2, "n", idle_s=0.2)), 2).fields_grouping("feed", Fields("user"))
    builder.set_bolt("keep", Keep()).fields_grouping("gather", Fields("user"))
    fired: list[Window] = []
    journal(key).on["window"] = fired.append
    journal(key).emitted.extend("abc")
    store, conf = MemoryStore(), lmdb(tmp_path)
    with submit(builder.build(), conf, store=store, executor="local") as run:
        wait_until(lambda: len(fired) == 3, PATIENCE_S, "windows that end while nothing comes")
        run.wait_until_idle(PATIENCE_S)
    assert checkpointed(conf, store, key, "keep") == {
        ("a", 0.0, 2.0): [[0]],
        ("b", 0.0, 2.0): [[1]],
        ("c", 2.0, 4.0): [[2]],
    }


def test_windows_by_processing_time_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="are of tuples with a time of their own"):
        TimeWindow(10, lag_s=1)
    with pytest.raises(ConfigError, match="are of tuples with a time of their own"):
        TimeWindow(10, lateness_s=1)
    with pytest.raises(ConfigError, match="are of tuples with a time of their own"):
        TimeWindow(10, idle_s=1)
    for wrong in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="idle_s is .*: give seconds above 0"):
            TimeWindow(10, "at", idle_s=wrong)
    with pytest.raises(ConfigError, match="no tuple is late by processing time"):
        Gather("w", TimeWindow(10), late=Fields(n=int))


@pytest.mark.rule("C39")
@pytest.mark.parametrize("times", [(7, 5), (5, 7)])
def test_after_rescaling_every_task_has_the_latest_time_of_all_tasks(tmp_path: Path, times: tuple[int, int]) -> None:
    world = World(tmp_path, TimeWindow(10))
    key, provider = ((), "c"), LmdbKeyValueStateProvider()
    conf = {"topology.state.provider.config": {"path": str(tmp_path)}}
    for task, at in enumerate(times):
        state = provider.new_state(namespace_of(world.key, "gather", 0, task), conf, None)
        state.put(key, at)
        state.prepare_commit(1)
        state.commit(1)
        state.close()
    layouts = {"gather": Layout(0, 2)}
    record = CheckpointRecord(txid=1, positions={}, layouts=layouts, assigned=layouts, last=1)
    components = {"gather": next(each for each in world.topology(3).components if each.id == "gather")}
    moved = rescaled(Namespaces(world.key, provider, conf), components, record, lambda _: None)
    for task in range(3):
        state = provider.new_state(namespace_of(world.key, "gather", moved.layouts["gather"].number, task), conf, None)
        assert state.get(key) == 7
        state.close()
    provider.close()
