"""Timers that a stateful bolt keeps in its state: each fires once for what is committed.

They fire by the ticks that the bolt wishes for (``tick_in_s``), or that come at fixed times
(``tick_s``), also when no tuple comes, after any crash and in any number of tasks.
"""

from __future__ import annotations

import heapq
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from framework import (
    BaseStatefulBolt,
    CoreTopology,
    FailedException,
    Fields,
    KeyValueState,
    TopologyBuilder,
    Tuple,
    submit,
)
from framework.config import Config
from framework.core.checkpoint_record import CheckpointRecord
from framework.core.checkpoints import Checkpoints
from framework.core.driver import RoundDriver
from framework.core.leader_loop import stateful_components
from framework.core.plan import CorePlan
from framework.core.rescaling import layout_of
from framework.core.worker_client import WorkerSettings, close_worker
from framework.core.worker_process import start_worker
from framework.execution.plan import plan_execution
from framework.transactions import MemoryStore
from integration.server import wait_until
from tests.kit.core_parts import Clock
from tests.kit.journaled import note, noted
from tests.kit.pages import DOCS, snippets
from tests.kit.state_parts import Count, Holding, Log, Split, SteppedState, checkpointed, committed, journal, lmdb, once
from tests.kit.task_workers import InATaskWorker
from tests.kit.waiting import PATIENCE_S

USERS = "abcdef"


class Timers(BaseStatefulBolt):
    """Emits a word when its timer fires, ten seconds after the word has come last. Its clock is in
    the journal."""

    after_s = 10.0

    def __init__(self, key: str) -> None:
        self.key = key

    def prepare(self, conf: Any, context: Any, collector: Any) -> None:  # type: ignore[override]
        self.collector = collector

    def init_state(self, state: KeyValueState[str, float]) -> None:
        self.due = state
        self.soonest = [(at, word) for word, at in state.items()]
        heapq.heapify(self.soonest)

    def now(self) -> float:
        return float(journal(self.key).results.get("now", 0.0))

    def execute(self, tup: Tuple) -> None:
        if not tup.is_tick:
            at = self.now() + self.after_s
            self.due.put(tup["word"], at)
            heapq.heappush(self.soonest, (at, tup["word"]))
            self.collector.ack(tup)
            return
        while self.soonest and self.soonest[0][0] <= self.now():
            at, word = heapq.heappop(self.soonest)
            if self.due.get(word) == at:  # else it has been set anew
                self.due.delete(word)
                self.fires(word)
                self.collector.emit([word], anchors=tup)

    def fires(self, word: str) -> None:
        journal(self.key).emitted.append(word)
        journal(self.key).happens("fires", word)

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


class Wishing(Timers):
    """Says when it wants its next tick."""

    def tick_in_s(self) -> float | None:
        return self.soonest[0][0] - self.now() if self.soonest else None


class Regular(Timers):
    """Gets its ticks at fixed times."""

    tick_s = 1.0


class World:
    """A topology whose timers are set by words, and count when they fire; with its record."""

    def __init__(self, folder: Path, kind: type[Timers], words: Sequence[str] = USERS, *, between: Any = Split) -> None:
        self.key, self.folder, self.kind, self.words = f"t{uuid.uuid4().hex[:8]}", folder, kind, list(words)
        self.between = between
        self.spout_key = f"{self.key} words"
        self.record: CheckpointRecord | None = None
        self.stepped: SteppedState | None = None

    def topology(self, tasks: int) -> CoreTopology:
        builder = TopologyBuilder(self.key)
        builder.set_spout("words", Log(self.spout_key, [self.words], per_call=10))
        builder.set_bolt("timers", self.kind(self.key), tasks).fields_grouping("words", Fields("word"))
        builder.set_bolt("between", self.between(self.key)).shuffle_grouping("timers")
        builder.set_bolt("count", Count(self.key)).fields_grouping("between", Fields("word"))
        return builder.build()

    def start(self, tasks: int = 1, *, exact: bool = True) -> SteppedState:
        """Start the topology; an instance that was started before dies."""
        now = 0.0
        if self.stepped is not None:
            self.record, now = self.stepped.record, self.stepped.clock.now
            self.stepped.close()
        self.stepped = SteppedState(self.topology(tasks), self.folder, self.record, exact=exact, now=now)
        return self.stepped

    def passes(self, at: float) -> None:
        """Set the bolt's clock, and settle. No tuple comes."""
        assert self.stepped is not None
        journal(self.key).results["now"] = at
        self.stepped.step()  # from its start on a task counts the time to its first tick
        self.stepped.step(seconds=1.0)
        self.stepped.settle()

    def fired(self) -> dict[str, int]:
        """How often each timer has fired, as committed."""
        return self._committed("count")

    def set(self) -> dict[str, float]:
        """The timers that are set, as committed."""
        return self._committed("timers")

    def told(self) -> list[str]:
        """Each firing, also those that were taken back."""
        return journal(self.key).emitted

    def _committed(self, component_id: str) -> dict[str, Any]:
        assert self.stepped is not None
        return committed(str(self.folder), self.stepped.record, self.key, component_id)


ONCE = dict.fromkeys(USERS, 1)
kinds = pytest.mark.parametrize("kind", [Wishing, Regular])


@kinds
@pytest.mark.behaviour("5.5")
def test_a_timer_fires_once_when_its_time_has_come_though_no_tuple_comes(tmp_path: Path, kind: type[Timers]) -> None:
    world = World(tmp_path, kind)
    world.start().settle()
    world.passes(9.9)
    assert (world.fired(), world.set()) == ({}, dict.fromkeys(USERS, 10.0))
    world.passes(10.0)
    world.passes(100.0)
    assert (world.fired(), world.set()) == (ONCE, {})
    assert sorted(world.told()) == list(USERS)


@kinds
@pytest.mark.behaviour("5.5")
def test_a_timer_that_came_due_while_nothing_ran_fires_after_the_start(tmp_path: Path, kind: type[Timers]) -> None:
    """Nothing else comes."""
    world = World(tmp_path, kind)
    world.start().settle()
    world.start()
    world.passes(1_000.0)
    assert (world.fired(), world.set()) == (ONCE, {})


@kinds
@pytest.mark.behaviour("5.5")
@pytest.mark.parametrize("tasks", [(1, 1), (2, 3)])
def test_a_timer_fires_once_whenever_everything_dies(
    tmp_path: Path, kind: type[Timers], tasks: tuple[int, int]
) -> None:
    """Everything dies after each number of rounds from the firing on, until a run has committed
    it before."""
    before, after = tasks
    taken_back = 0
    for rounds in range(1, 20):
        world = World(tmp_path, kind)
        stepped = world.start(before).settle()
        journal(world.key).results["now"] = 10.0
        stepped.step(rounds, seconds=1.1)
        died_with = world.fired()
        world.start(after)
        world.passes(20.0)
        world.passes(30.0)
        assert (world.fired(), world.set()) == (ONCE, {}), f"it died after {rounds} rounds"
        if died_with:
            assert died_with == ONCE
            break
        if sorted(world.told()) == sorted(USERS * 2):
            taken_back = rounds
    assert died_with
    assert taken_back  # at least once, it had fired in the run that died, and nothing of that counts


@kinds
@pytest.mark.rule("C34")
@pytest.mark.behaviour("5.5")
@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("fires", RuntimeError("died")),
        ("split", FailedException("failed")),
        ("split", RuntimeError("died")),
        ("execute", RuntimeError("died")),
        ("pre_prepare", RuntimeError("died")),
        ("pre_commit", RuntimeError("died")),
    ],
)
def test_a_timer_whose_firing_fails_is_set_again_and_fires_once_for_what_is_committed(
    tmp_path: Path, kind: type[Timers], what: str, error: Exception
) -> None:
    world = World(tmp_path, kind)
    stepped = world.start().settle()
    journal(world.key).on[what] = once(error)
    world.passes(10.0)
    world.passes(20.0)
    assert (world.fired(), world.set()) == (ONCE, {})
    assert stepped.recoveries == 1


@kinds
@pytest.mark.rule("C34")
@pytest.mark.behaviour("5.5")
@pytest.mark.parametrize("fails", [False, True], ids=["is let go", "fails"])
def test_a_checkpoint_waits_for_a_firing_that_a_bolt_holds(tmp_path: Path, kind: type[Timers], fails: bool) -> None:
    """Its timer is no longer in the state. If that were committed, a failure would lose it."""
    world = World(tmp_path, kind, "a", between=Holding)
    stepped = world.start().settle()
    committed_before = stepped.record.txid
    journal(world.key).results["now"] = 10.0
    stepped.step(10, seconds=1.5)
    ((bolt, tup),) = journal(world.key).results.pop("held")
    assert stepped.record.txid == committed_before
    if fails:
        bolt.collector.fail(tup)
        stepped.step(10, seconds=1.5)
        ((bolt, tup),) = journal(world.key).results.pop("held")
    bolt.let_go(tup)
    stepped.settle()
    assert (world.fired(), world.set()) == ({"a": 1}, {})
    assert stepped.recoveries == fails


@kinds
@pytest.mark.rule("C39")
@pytest.mark.parametrize("tasks", [(2, 1, 3), (1, 3, 2)])
def test_timers_move_with_their_keys_and_fire_once(
    tmp_path: Path, kind: type[Timers], tasks: tuple[int, int, int]
) -> None:
    """Some have fired before the first change of the number of tasks, and some fire between the
    changes."""
    first, second, third = tasks
    world = World(tmp_path, kind, "ab")
    world.start(first).settle()
    world.words += "cd"
    journal(world.key).results["now"] = 5.0
    world.start(first).settle()
    world.passes(10.0)
    assert world.fired() == {"a": 1, "b": 1}
    world.words += "ef"
    journal(world.key).results["now"] = 11.0
    world.start(second).settle()
    world.passes(15.0)
    assert world.fired() == {"a": 1, "b": 1, "c": 1, "d": 1}
    world.start(third)
    world.passes(100.0)
    assert (world.fired(), world.set()) == (ONCE, {})
    assert sorted(world.told()) == list(USERS)


@kinds
def test_a_timer_that_is_set_anew_fires_at_its_new_time_alone(tmp_path: Path, kind: type[Timers]) -> None:
    world = World(tmp_path, kind, "a")
    world.start().settle()
    world.words += "a"
    journal(world.key).results["now"] = 8.0
    world.start().settle()
    world.passes(10.0)
    assert (world.fired(), world.set()) == ({}, {"a": 18.0})
    world.passes(18.0)
    assert world.fired() == {"a": 1}


@kinds
@pytest.mark.behaviour("5.4")
def test_at_least_once_a_timer_fires_at_least_once(tmp_path: Path, kind: type[Timers]) -> None:
    for rounds in range(1, 6):
        world = World(tmp_path, kind)
        stepped = world.start(exact=False).settle()
        journal(world.key).results["now"] = 10.0
        stepped.step(rounds, seconds=1.1)
        world.start(exact=False)
        world.passes(20.0)
        world.passes(30.0)
        assert world.set() == {}
        assert set(world.told()) == set(USERS)


def test_a_run_gives_stateful_bolts_the_ticks_that_are_configured(tmp_path: Path) -> None:
    world = World(tmp_path, Timers)
    conf = {**lmdb(tmp_path), "topology.tick.tuple.freq.secs": 0.05}
    store, topology = MemoryStore(), world.topology(2)
    for each in topology.components:
        if each.id in ("between", "count"):
            each.instance.tick_s = 3_600.0  # they take words alone
    with submit(topology, conf, executor="local", store=store) as run:
        run.wait_until_idle(PATIENCE_S)
        assert world.told() == []
        journal(world.key).results["now"] = 10.0
        wait_until(lambda: len(world.told()) == len(USERS), PATIENCE_S, "timers")
        run.wait_until_idle(PATIENCE_S)
    assert checkpointed(conf, store, world.key) == ONCE
    assert checkpointed(conf, store, world.key, "timers") == {}


# --- on the page of the documentation -------------------------------------------------------------


class Devices(Log):
    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(device=str))


class Renames(Split):
    """Passes the name of a device on as a word."""

    def execute(self, tup: Tuple, collector: Any) -> None:
        collector.emit([tup["device"]])


def test_the_timers_of_the_documentation_fire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, page = Clock(), ModuleType("page_state")
    monkeypatch.setitem(sys.modules, page.__name__, page)  # so that tasks have this clock, and no copy
    for each in snippets(DOCS / "state.md"):
        exec(each.code, page.__dict__)
    monkeypatch.setattr(page, "time", SimpleNamespace(time=clock))

    class Silence(World):
        def topology(self, tasks: int) -> CoreTopology:
            builder = TopologyBuilder(self.key)
            builder.set_spout("words", Devices(self.spout_key, [self.words], per_call=10))
            builder.set_bolt("timers", page.Silent(), tasks).fields_grouping("words", Fields("device"))
            builder.set_bolt("renames", Renames(self.key)).shuffle_grouping("timers")
            builder.set_bolt("count", Count(self.key)).fields_grouping("renames", Fields("word"))
            return builder.build()

    world = Silence(tmp_path, Timers, "ab")
    world.start().settle()
    clock.now = 50.0
    world.words += "a"
    world.start(2).settle()
    clock.now = 60.0
    world.passes(0.0)
    assert (world.fired(), world.set()) == ({"b": 1}, {"a": 110.0})
    clock.now = 110.0
    world.passes(0.0)
    assert (world.fired(), world.set()) == ({"a": 1, "b": 1}, {})


# --- in a process, by the real clock --------------------------------------------------------------


class Real(Wishing):
    """By the real clock. Notes in a file what fires."""

    after_s = 0.3

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def now(self) -> float:
        return time.time()

    def fires(self, word: str) -> None:
        note(str(self.folder), "fired", word)


@pytest.mark.slow
@pytest.mark.kills
@pytest.mark.behaviour("5.5")
def test_a_timer_fires_once_when_its_process_is_killed(tmp_path: Path) -> None:
    """The first process is killed when a timer has fired. The second one fires what is left of what
    is committed."""
    key = f"t{uuid.uuid4().hex[:8]}"
    builder = TopologyBuilder(key)
    builder.set_spout("words", Log(key, [list(USERS)], per_call=2))
    builder.set_bolt("timers", Real(tmp_path)).fields_grouping("words", Fields("word"))
    builder.set_bolt("count", Count(key)).fields_grouping("timers", Fields("word"))
    topology = builder.build()
    conf = Config.of(lmdb(tmp_path / "state")).for_components()
    stateful = stateful_components(topology)
    plan = CorePlan(plan_execution(topology), conf, ackers=1, pending_max=100, stateful=frozenset(stateful))
    settings = WorkerSettings.of(plan, 60.0, None)
    records = [CheckpointRecord()]

    def found(component_id: str) -> dict[Any, Any]:
        return committed(str(tmp_path / "state"), records[-1], key, component_id)

    def run(until: Callable[[], bool], what: str, *, killed: bool) -> None:
        worker = start_worker(settings, 0)
        driver = RoundDriver(plan, InATaskWorker(plan, settings, worker), timeout_s=PATIENCE_S, attempts_max=5)
        checkpoints = Checkpoints(
            records[-1],
            dict.fromkeys(stateful, 1),
            {"words": 1},
            exact=True,
            durable=True,
            interval_s=0.05,
            attempts_max=5,
            save=records.append,
            layouts={name: layout_of(each, 0) for name, each in stateful.items()},
        )
        running = threading.Thread(target=driver.run, kwargs={"checkpoints": lambda: checkpoints}, daemon=True)
        try:
            running.start()
            wait_until(until, PATIENCE_S, what)
            if killed:
                os.kill(worker.pid, signal.SIGKILL)
            driver.request_stop()
            running.join(PATIENCE_S)
            assert not running.is_alive()
        finally:
            close_worker(worker, settings.credentials)

    run(lambda: bool(noted(tmp_path, "fired")), "a timer that fires", killed=True)
    run(lambda: (found("count"), found("timers")) == (ONCE, {}), "all timers", killed=False)
    assert set(noted(tmp_path, "fired")) == set(USERS)
