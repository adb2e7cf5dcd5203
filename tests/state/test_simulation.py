"""Random worlds of topologies with state: exactly-once is exact, at-least-once loses nothing.

The long run is ``python -m tests.simulation --only states``.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from framework.acking.ack_reports import Roots
from framework.core import leader_loop, rescaling
from framework.core.bolt_task import BoltTask, Inbox
from framework.core.checkpoint_messages import CheckpointMarker
from framework.core.checkpoints import Checkpoints
from framework.core.component_task import ComponentTask
from framework.core.driver import RoundDriver
from framework.core.round_budget import Budget
from framework.core.segment_task import SegmentTask
from framework.core.spout_task import SpoutTask
from framework.core.stateful_bolt_task import StatefulBoltTask
from framework.durations import MICROS, seconds_to_micros
from framework.errors import CorruptStateError, InvariantViolation, RetryableError
from framework.operators.watermarks import NEVER
from framework.state.window_buffers import EventTimeBuffer, FormerWatermarks, ProcessingTimeBuffer
from framework.state.window_entries import Window
from tests.kit import state_world
from tests.kit.searching import first_seed, keep
from tests.kit.state_world import (
    ALL_TROUBLES,
    CHANGES,
    CLOCK_JUMPS,
    CRASHES,
    LENGTH_S,
    LOSSES,
    RETRIES,
    SIZES,
    NamedSpout,
    simulate,
)
from tests.kit.targets import Often

#: The rarest trouble comes in one world of five.
WORLDS_MAX = 300
#: The mutation that shows least (a position that is recorded late) shows in one of eighty.
WORLDS_PER_MUTATION = 3_000
#: Troubles in which no word times out again and again, as one that cannot be processed may.
NO_LOSSES = tuple(each for each in ALL_TROUBLES if each not in LOSSES)


@pytest.mark.each_value_once
@pytest.mark.slow_for("all", "late records")
@pytest.mark.behaviour("5.4", "5.5")
@pytest.mark.parametrize("exact", [True, False], ids=["exactly-once", "at-least-once"])
@pytest.mark.parametrize("trouble", [*ALL_TROUBLES, "all", "none"])
def test_the_committed_state_is_the_fold_of_the_input_under_each_trouble(
    trouble: str, exact: bool, seed: int, in_all: bool, often: Often
) -> None:
    troubles = ALL_TROUBLES if trouble == "all" else () if trouble == "none" else (trouble,)
    struck: Counter[str] = Counter()
    expected = set(troubles) - {"failed tuple"}  # no bolt here fails tuples of its own accord
    if not exact:
        expected -= {"source is away"}  # nobody asks for its position
    if trouble == "all" and not in_all:
        expected = set()  # each trouble has a test case of its own
    worlds = often(1, 8)
    for number in itertools.count():
        if number >= worlds and expected <= set(+struck):
            break
        assert number < WORLDS_MAX, f"{+struck} came, of {troubles}"
        struck.update(met := simulate(seed + number, exact=exact, troubles=troubles).struck)
        if expected <= set(+met):
            keep(seed + number)


def whole_checkpoint_met(met: Counter[str], every: int) -> None:
    """Check that crashes came at one of ``every`` steps of at least one checkpoint;
    two or three are usual.
    """
    assert met.total() >= 8 // every
    if every == 1:
        assert met["record"] >= 3
        assert met["store"] >= 5


@pytest.mark.each_value_once
@pytest.mark.behaviour("5.4", "5.5")
@pytest.mark.parametrize("exact", [True, False], ids=["exactly-once", "at-least-once"])
@pytest.mark.parametrize("how", CRASHES)
def test_a_crash_at_any_step_of_prepare_commit_and_recovery_ends_exact(
    how: str, exact: bool, seed: int, often: Often
) -> None:
    """A step is a write of the record, or a task's discard, prepare, commit or read.

    ``make test-all`` crashes at every step; ``make test`` at a part of them, which depends on the
    seed.
    """
    met: Counter[str] = Counter()
    every = often(24, 1)
    for step in itertools.count(1 + seed % every, every):
        world = simulate(seed, exact=exact, words=24, troubles=(), crash=(step, how))
        if world.crashed is None:
            break
        met[world.crashed] += 1
    whole_checkpoint_met(met, every)


@pytest.mark.slow
@pytest.mark.rule("C35", "C37", "C39")
@pytest.mark.parametrize("change", [*CHANGES, "all"])
def test_the_state_is_the_fold_of_what_is_recorded_when_the_topology_and_its_logs_change(
    change: str, seed: int, often: Often
) -> None:
    changes = CHANGES if change == "all" else (change,)
    struck: Counter[str] = Counter()
    worlds = often(2, 8)
    for number in itertools.count():
        if number >= worlds and set(changes) <= set(+struck):
            break
        assert number < WORLDS_MAX, f"{+struck} came, of {changes}"
        struck.update(simulate(seed + number, exact=True, changes=changes).struck)


@pytest.mark.slow
@pytest.mark.rule("C39")
@pytest.mark.parametrize("how", ["driver dies before", "driver dies after"])
def test_the_number_of_tasks_changes_after_a_crash_at_any_step_and_every_word_counts_once(
    how: str, seed: int, often: Often
) -> None:
    met: Counter[str] = Counter()
    every = often(6, 1)
    for step in itertools.count(1 + seed % every, every):
        world = simulate(seed, exact=True, words=24, troubles=(), changes=("tasks changed",), crash=(step, how))
        if world.crashed is None:
            break
        met[world.crashed] += 1
    whole_checkpoint_met(met, every)


@pytest.mark.behaviour("5.5")
@pytest.mark.parametrize("trouble", [CLOCK_JUMPS, "failed tuple", pytest.param("all", marks=pytest.mark.slow), "none"])
def test_windows_by_processing_time_hold_each_word_once_and_fire_once_under_each_trouble(
    trouble: str, seed: int, often: Often
) -> None:
    worlds = often(1, 8)
    troubles = (*ALL_TROUBLES, CLOCK_JUMPS) if trouble == "all" else () if trouble == "none" else (trouble,)
    struck: Counter[str] = Counter()
    for number in itertools.count():
        if number >= worlds and set(+struck) == set(troubles):
            break
        assert number < WORLDS_MAX, f"{+struck} came, of {troubles}"
        struck.update(met := simulate(seed + number, exact=True, troubles=troubles, windows=True).struck)
        if set(+met) == set(troubles):
            keep(seed + number)


@pytest.mark.slow_for("40")
@pytest.mark.behaviour("5.5")
@pytest.mark.parametrize("every", [40, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", CRASHES)
def test_windows_by_processing_time_fire_once_after_a_crash_at_any_step(how: str, every: int, seed: int) -> None:
    """So ticks meet every step of a checkpoint."""
    met: Counter[str] = Counter()
    for step in itertools.count(1 + seed % every, every):
        world = simulate(seed, exact=True, words=8, troubles=(CLOCK_JUMPS,), crash=(step, how), windows=True)
        if world.crashed is None:
            break
        met[world.crashed] += 1
    assert met["store"] >= (5 if every == 1 else 1)


@pytest.mark.slow
@pytest.mark.rule("C39")
def test_windows_by_processing_time_fire_once_when_the_topology_and_its_logs_change(seed: int, often: Often) -> None:
    worlds = often(1, 8)
    struck: Counter[str] = Counter()
    troubles = ("driver dies", "task dies", CLOCK_JUMPS)
    for number in itertools.count():
        if number >= worlds and {"tasks changed", CLOCK_JUMPS} <= set(+struck):
            break
        assert number < WORLDS_MAX, f"{+struck} came"
        struck.update(simulate(seed + number, exact=True, troubles=troubles, changes=CHANGES, windows=True).struck)


@pytest.mark.rule("C36")
@pytest.mark.behaviour("5.4")
@pytest.mark.parametrize("trouble", [*NO_LOSSES, "all", "none"])
def test_words_that_cannot_be_processed_are_dead_letters_once_and_no_other_word_is_under_each_trouble(
    trouble: str, seed: int, often: Often
) -> None:
    troubles = NO_LOSSES if trouble == "all" else () if trouble == "none" else (trouble,)
    struck: Counter[str] = Counter()
    letters = 0
    expected = set() if trouble == "all" else set(troubles) - {"failed tuple"}
    for number in itertools.count():
        if number >= often(1, 30) and letters and expected <= set(+struck):
            break
        assert number < WORLDS_MAX, f"{+struck} came, of {troubles}"
        world = simulate(
            seed + number, exact=True, words=24, rounds=60, troubles=troubles, poison=0.1, tasks=1 + number % 2
        )
        letters += world.poisoned().total()
        struck.update(world.struck)


@pytest.mark.slow
@pytest.mark.rule("C35", "C36", "C39")
@pytest.mark.parametrize("windows", [False, True])
def test_dead_letters_are_exact_when_the_topology_and_its_logs_change(windows: bool, seed: int, often: Often) -> None:
    struck: Counter[str] = Counter()
    letters = 0
    for number in itertools.count():
        if number >= often(2, 30) and letters and "tasks changed" in +struck:
            break
        assert number < WORLDS_MAX, f"{+struck} came"
        world = simulate(
            seed + number,
            exact=True,
            words=24,
            rounds=60,
            troubles=("driver dies", "task dies"),
            changes=CHANGES,
            windows=windows,
            poison=0.1,
        )
        letters += world.poisoned().total()
        struck.update(world.struck)


@pytest.mark.slow
@pytest.mark.rule("C36")
@pytest.mark.parametrize("how", CRASHES)
def test_dead_letters_are_exact_after_a_crash_at_any_step(how: str, seed: int, often: Often) -> None:
    met: Counter[str] = Counter()
    every = often(12, 1)
    for step in itertools.count(1 + seed % every, every):
        world = simulate(seed, exact=True, words=16, troubles=(), crash=(step, how), poison=0.2)
        if world.crashed is None:
            break
        met[world.crashed] += 1
    assert met["store"] >= 1


def _check_wrong(
    first: int,
    exact: bool,
    troubles: tuple[str, ...],
    changes: tuple[str, ...] = (),
    windows: bool = False,
    poison: float = 0.0,
) -> None:
    """Fail unless one of ``WORLDS_PER_MUTATION`` worlds comes out wrong."""
    options: dict[str, Any] = {"troubles": troubles, "changes": changes, "windows": windows, "poison": poison}

    def is_wrong(seed: int) -> bool:
        words, rounds = SIZES[seed % len(SIZES)]
        try:
            simulate(seed, exact=exact, words=words, rounds=rounds, **options)
        except (AssertionError, CorruptStateError, InvariantViolation):
            return True
        return False

    first_seed(range(first, first + WORLDS_PER_MUTATION), is_wrong)


def test_a_checkpoint_that_does_not_wait_for_the_trees_is_caught(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(RoundDriver, "_quiet", lambda self: not self._under_way)
    monkeypatch.setattr(Checkpoints, "lost", lambda self, why: None)
    _check_wrong(seed, True, ("lost output", "late records"))


def test_acks_that_do_not_wait_for_the_checkpoint_are_caught(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(StatefulBoltTask, "ack", BoltTask.ack)
    _check_wrong(seed, False, ("task dies", "round breaks off", "driver dies"))


def test_a_spout_that_does_not_go_back_with_the_state_is_caught(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(NamedSpout, "seek", lambda self, positions: None)
    _check_wrong(seed, True, ("driver dies", "task dies"))


@pytest.mark.slow
def test_a_spout_that_emits_before_its_position_is_recorded_is_caught(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Here the record has no position soon after, either:
    a driver that begins first waits for its interval.
    """
    due_in = Checkpoints.due_in

    def only_the_first(self: Checkpoints) -> bool:
        return self._exact and self.record.positions is None and self.record.pending is None

    def later(self: Checkpoints, now: float) -> float | None:
        self._taken_at = now if self._taken_at is None else self._taken_at
        return due_in(self, now)

    monkeypatch.setattr(Checkpoints, "_first", property(only_the_first))
    monkeypatch.setattr(Checkpoints, "due_in", later)
    _check_wrong(seed, True, ("driver dies", "task dies"), ("spout added",))


def test_a_forgotten_topology_that_begins_at_the_position_of_its_group_is_caught(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(NamedSpout, "begin_anew", lambda self: None)
    _check_wrong(seed, True, ("driver dies",), ("state forgotten",))


@pytest.mark.slow
def test_a_position_that_is_recorded_without_checking_its_log_is_caught(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(NamedSpout, "confirm", lambda self: None)
    _check_wrong(seed, True, ("driver dies", "task dies"), ("log made again",))


def test_a_prepared_checkpoint_that_is_not_finished_under_its_layout_is_caught(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(rescaling, "finished", lambda topology_id, components, record, *others: record)
    _check_wrong(seed, True, ("driver dies",), ("tasks changed",))


def test_a_move_of_keys_whose_store_failed_and_that_is_taken_for_done_is_caught(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    move = rescaling._move

    def careless(*arguments: Any, **more: Any) -> None:
        with contextlib.suppress(RetryableError):
            move(*arguments, **more)

    monkeypatch.setattr(rescaling, "_move", careless)
    _check_wrong(seed, True, ("store fails before", "driver dies"), ("tasks changed",))


def test_a_prepare_that_failed_and_is_taken_for_done_is_caught(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    prepare = StatefulBoltTask._prepare

    def careless(*arguments: Any) -> None:
        with contextlib.suppress(RetryableError):
            prepare(*arguments)

    monkeypatch.setattr(StatefulBoltTask, "_prepare", careless)
    _check_wrong(seed, True, ("store fails before", "driver dies"))


def test_a_bolt_that_was_added_and_is_taken_for_one_with_state_is_caught(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    recovery = Checkpoints._recovery

    def believing(self: Checkpoints) -> CheckpointMarker:
        return replace(recovery(self), known=frozenset(self._layouts))

    monkeypatch.setattr(Checkpoints, "_recovery", believing)
    _check_wrong(seed, True, ("driver dies",), ("bolt added",))


@pytest.mark.parametrize("what", ["positions stay", "keys stay"])
def test_a_snapshot_that_is_not_put_back_whole_is_caught(monkeypatch: pytest.MonkeyPatch, seed: int, what: str) -> None:
    restore, layout_of = leader_loop.restore_state, leader_loop.layout_of
    numbers: dict[str, int] = {}

    def careless(topology: Any, config: Any, store: Any, *, document: Any, **more: Any) -> Any:
        record = leader_loop.read_record(store, topology.id)
        assert record is not None
        numbers.update({each: layout.number for each, layout in record.layouts.items()})
        if what == "positions stay":
            document = {**document, "positions": record.document()["positions"]}
        return restore(topology, config, store, document=document, **more)

    monkeypatch.setattr(state_world, "restore_state", careless)
    if what == "keys stay":  # those that the snapshot does not have
        monkeypatch.setattr(
            leader_loop, "layout_of", lambda each, number: layout_of(each, numbers.get(each.id, number))
        )
        monkeypatch.setattr(leader_loop, "_drop", lambda namespaces, record: None)
    _check_wrong(seed, True, ("driver dies",), ("state restored",))


@pytest.mark.rule("C39")
def test_windows_that_forget_how_far_they_have_come_are_caught(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Here they fire anew in another task."""
    monkeypatch.setattr(FormerWatermarks, "of", lambda self, key: NEVER)
    _check_wrong(seed, True, ("driver dies",), ("tasks changed",), windows=True)


@pytest.mark.rule("C39")
def test_a_watermark_that_moves_to_other_tasks_is_caught(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Here windows that were due by the watermark of another task never fire."""
    monkeypatch.setattr(FormerWatermarks, "of", lambda self, key: self.most)
    _check_wrong(seed, True, ("driver dies",), ("tasks changed",), windows=True)


def test_time_that_went_on_while_nothing_came_and_is_forgotten_is_caught(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Here windows that fired then fire again after a restart."""

    def careless(self: EventTimeBuffer) -> list[Window]:
        self._watermark = max(self._watermark, self._times.reached(self._elapsed_now()))
        return self._advance()

    monkeypatch.setattr(EventTimeBuffer, "due", careless)
    _check_wrong(seed, True, ("driver dies",), windows=True)


@pytest.mark.rule("C34")
def test_a_round_that_is_not_thrown_away_with_its_task_is_caught(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Here the output of a task from before a recovery goes on to the next bolt after it."""
    recover = SegmentTask.recover

    def keeping(self: SegmentTask, marker: CheckpointMarker, before: SegmentTask | None) -> None:
        recover(self, marker, before)
        if before is not None:
            for component_id, made in before.outcome.of.items():
                self.outcome.of[component_id].rows = made.rows

    monkeypatch.setattr(SegmentTask, "recover", keeping)
    _check_wrong(seed, True, ("task dies", "value does not fit"))


@pytest.mark.rule("C34")
def test_a_recovery_that_keeps_the_state_of_the_last_bolt_is_caught(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    recover = StatefulBoltTask.recover

    def forgetful(self: StatefulBoltTask, marker: CheckpointMarker, before: ComponentTask | None) -> None:
        kept = before._state if isinstance(before, StatefulBoltTask) else None
        recover(self, marker, before)
        if self.component.id == "again" and kept is not None and self._state is not None:
            self._state._changes.update(kept._changes)  # type: ignore[attr-defined]

    monkeypatch.setattr(StatefulBoltTask, "end_for", lambda self, marker: None)
    monkeypatch.setattr(StatefulBoltTask, "recover", forgetful)
    _check_wrong(seed, True, ("value does not fit", "failed tuple"))


@pytest.mark.rule("C38")
def test_tuples_that_time_out_while_they_wait_are_caught(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(BoltTask, "kept", lambda self: ())
    _check_wrong(seed, True, ("slow bolt",))


@pytest.mark.rule("C38")
def test_tuples_that_are_dropped_when_there_is_no_time_are_caught(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    work = BoltTask.work

    def dropping(self: BoltTask, budget: Budget) -> None:
        work(self, budget)
        self._inbox = Inbox(self.expect)

    monkeypatch.setattr(BoltTask, "work", dropping)
    _check_wrong(seed, True, ("slow bolt",))


@pytest.mark.rule("C36")
def test_a_spout_task_that_does_not_emit_tuples_under_way_again_is_caught(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """At-least-once: a spout does not learn of a recovery,
    so a task that does not emit for it loses tuples.
    """

    def lost(self: SpoutTask) -> None:
        self._pending, self._stayed = self._new_pending(), False

    monkeypatch.setattr(SpoutTask, "_emit_again", lost)
    _check_wrong(seed, False, ("task dies", "store fails before"))


def test_windows_that_fire_before_their_end_are_caught(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    reached_now = ProcessingTimeBuffer._reached_now

    def ahead(self: ProcessingTimeBuffer) -> int:
        return reached_now(self) + seconds_to_micros(LENGTH_S) // 2

    def due(self: ProcessingTimeBuffer) -> list[Window]:
        self._watermark = ahead(self)
        return self._advance()

    monkeypatch.setattr(ProcessingTimeBuffer, "due", due)
    monkeypatch.setattr(
        ProcessingTimeBuffer, "due_in_s", lambda self: (self._due[0][0] - ahead(self)) / MICROS if self._due else None
    )
    _check_wrong(seed, True, (), windows=True)


@pytest.mark.slow
def test_time_that_goes_back_after_a_restart_is_caught(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    begin = ProcessingTimeBuffer.__init__

    def forgetful(self: ProcessingTimeBuffer, *arguments: Any) -> None:
        begin(self, *arguments)
        self._at = NEVER

    monkeypatch.setattr(ProcessingTimeBuffer, "__init__", forgetful)
    _check_wrong(seed, True, ("driver dies", CLOCK_JUMPS), windows=True)


@pytest.mark.slow
@pytest.mark.rule("C34")
def test_ticks_that_nobody_tracks_are_caught(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(StatefulBoltTask, "tick_roots", lambda self: ())
    _check_wrong(seed, True, ("failed tuple", "task dies"), windows=True)


@pytest.mark.rule("C34")
def test_ticks_in_the_round_that_prepares_a_checkpoint_are_caught(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Here, besides, the driver does not see that their trees are open."""
    monkeypatch.setattr(StatefulBoltTask, "tick", lambda self, *, settles: BoltTask.tick(self, settles=settles))
    monkeypatch.setattr(RoundDriver, "_left_open", lambda self: None)
    _check_wrong(seed, True, ("failed tuple",), windows=True)


@pytest.mark.rule("C36")
def test_words_that_are_blamed_for_being_under_way_are_caught(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    ids = SpoutTask.message_ids

    def all_of_them(self: SpoutTask, roots: Roots) -> dict[int, Any]:
        return ids(self, Roots.of([*roots.ids(), *self._pending.roots()]) if len(roots) else roots)

    monkeypatch.setattr(SpoutTask, "message_ids", all_of_them)
    _check_wrong(seed, True, (), poison=0.1)


def test_a_word_that_is_given_up_and_processed_too_is_caught(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Here some bolt fails a word only so often, as one that another system refuses for a while."""
    gives_up, execute = SpoutTask._gives_up, state_world.Splits.execute
    tries: Counter[Any] = Counter()

    def too(self: SpoutTask, message_id: Any) -> bool:
        gives_up(self, message_id)
        return False

    def mended(self: Any, tup: Any, collector: Any) -> None:
        tries[(id(self.world), tup["word"])] += 1
        if tries[(id(self.world), tup["word"])] <= RETRIES + 1:
            execute(self, tup, collector)

    monkeypatch.setattr(SpoutTask, "_gives_up", too)
    monkeypatch.setattr(state_world.Splits, "execute", mended)
    _check_wrong(seed, True, (), poison=0.1)
