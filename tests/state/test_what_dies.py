"""The table of docs/state.md, line by line: states and spouts when something dies or fails."""

from __future__ import annotations

import itertools
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from framework import BaseRichBolt, BaseRichSpout, CoreTopology, Fields, TopologyBuilder, Tuple
from framework.core.checkpoint_record import CheckpointRecord
from framework.core.round_protocol import Round, WorkerLostError
from framework.core.segment_task import SegmentTask
from framework.errors import RetryableError
from framework.state.checkpointed_key_value_state import LayeredState
from tests.kit.state_parts import (
    Count,
    Holding,
    Log,
    Source,
    SteppedState,
    committed,
    counting,
    journal,
    once,
    steps_of,
)

WORDS = ["the", "cow", "jumped", "over", "the", "moon"]
MORE = [*WORDS, "and", "the", "cow"]


@pytest.fixture
def key() -> str:
    return f"d{uuid.uuid4().hex[:8]}"


def until(stepped: SteppedState, condition: Callable[[], bool], apart_s: float = 2.0) -> None:
    """Run rounds, ``apart_s`` apart by their own clock, until the condition holds."""
    for _ in range(100):
        if condition():
            return
        stepped.step(seconds=apart_s)
    raise AssertionError(stepped.driver.status())


def begun_at(key: str, tasks: int = 2) -> list[str]:
    """The last ``init_state`` of each task of the counting bolt."""
    return [[each for each in steps_of(key, task=n) if each.startswith("init_state")][-1] for n in range(tasks)]


def counted(folder: Path, stepped: SteppedState, key: str) -> Counter[str]:
    """The committed counts."""
    return Counter(committed(str(folder), stepped.record, key, "count"))


# --- lines 1 and 2: before and after the record says that a checkpoint is prepared ----------------


class Gone(BaseException):
    """The driver's process dies, and all tasks with it."""


class Mortal(SteppedState):
    """``dies``: "before" or "after" it records that a checkpoint is prepared."""

    dies: str | None = None

    def _save(self, record: CheckpointRecord) -> None:
        if self.dies == "before" and record.prepared:
            raise Gone
        super()._save(record)
        if self.dies == "after" and record.prepared:
            raise Gone


@pytest.mark.dies("state 1")
@pytest.mark.behaviour("5.4")
def test_prepared_state_is_discarded_when_the_driver_dies_before_it_is_recorded(key: str, tmp_path: Path) -> None:
    stepped = Mortal(counting(key, Log(key, [WORDS])), tmp_path).settle()
    before = stepped.record.txid
    stepped = Mortal(counting(key, Log(key, [MORE])), tmp_path, stepped.record)
    stepped.dies = "before"
    with pytest.raises(Gone):
        stepped.settle()
    assert stepped.record.phase == "PREPARING"
    stepped = Mortal(counting(key, Log(key, [MORE])), tmp_path, stepped.record)
    stepped.step()
    assert begun_at(key) == [f"init_state {before}"] * 2
    assert counted(tmp_path, stepped, key) == Counter(WORDS)
    stepped.settle()
    assert counted(tmp_path, stepped, key) == Counter(MORE)


@pytest.mark.dies("state 1")
@pytest.mark.behaviour("5.4")
def test_prepared_state_of_one_task_is_discarded_when_another_task_dies_preparing(key: str, tmp_path: Path) -> None:
    stepped = SteppedState(counting(key, Log(key, [WORDS])), tmp_path).settle()
    before = stepped.record.txid
    stepped = SteppedState(counting(key, Log(key, [MORE])), tmp_path, stepped.record)
    asked: list[int] = []

    def dies(txid: int) -> None:
        asked.append(txid)
        if len(asked) == 2:
            raise RuntimeError("the second task")

    journal(key).on["pre_prepare"] = dies
    until(stepped, lambda: stepped.recoveries == 1)
    stepped.step()
    assert begun_at(key) == [f"init_state {before}"] * 2
    assert counted(tmp_path, stepped, key) == Counter(WORDS)
    stepped.settle()
    assert counted(tmp_path, stepped, key) == Counter(MORE)
    assert asked[0] == asked[1] < min(asked[2:])  # no id is used again


@pytest.mark.dies("state 2")
@pytest.mark.behaviour("5.4")
@pytest.mark.parametrize("what", ["the driver", "a task"])
def test_a_checkpoint_recorded_as_prepared_is_committed_and_its_input_is_not_read_again(
    key: str, tmp_path: Path, what: str
) -> None:
    stepped = Mortal(counting(key, Log(key, [WORDS])), tmp_path).settle()
    stepped = Mortal(counting(key, Log(key, [MORE])), tmp_path, stepped.record)
    prepared = stepped.record.last + 1
    if what == "the driver":
        stepped.dies = "after"
        with pytest.raises(Gone):
            stepped.settle()
        assert stepped.record.phase == "COMMITTING"
        stepped = Mortal(counting(key, Log(key, [MORE])), tmp_path, stepped.record)
    else:
        journal(key).on["pre_commit"] = once(RuntimeError("died"))
        until(stepped, lambda: stepped.recoveries == 1)
    stepped.step()
    assert begun_at(key) == [f"init_state {prepared}"] * 2
    assert (stepped.record.txid, stepped.record.phase) == (prepared, "COMMITTED")
    assert counted(tmp_path, stepped, key) == Counter(MORE)
    stepped.settle()
    assert len(journal(key).emitted) == len(MORE)


# --- lines 3 and 4: troubles of tuples, bolts, processes and rounds -------------------------------


class Splitting(BaseRichBolt):
    """Passes words on; with one of them, it does what the journal says instead."""

    def __init__(self, key: str) -> None:
        self.key = key

    def prepare(self, conf: Any, context: Any, collector: Any) -> None:
        self.collector = collector

    def execute(self, tup: Tuple) -> None:
        action = journal(self.key).on.pop("split", None)
        if action is not None:
            action((self.collector, tup))
            return
        self.collector.emit([tup["word"]], anchors=tup)
        self.collector.ack(tup)

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


def two_of_each(key: str, spout: BaseRichSpout) -> CoreTopology:
    """Words of two spout tasks, counted by two tasks."""
    builder = TopologyBuilder(key)
    builder.set_spout("words", spout, 2)
    builder.set_bolt("split", Splitting(key)).shuffle_grouping("words")
    builder.set_bolt("count", Count(key), 2).fields_grouping("split", Fields("word"))
    return builder.build()


def fail(found: Any) -> None:
    collector, tup = found
    collector.fail(tup)


def hold(found: Any) -> None:
    """Hold the tuple for ever."""


def die(found: Any) -> None:
    raise ZeroDivisionError("died")


def lose_a_round(stepped: SteppedState, error: RetryableError | None = None) -> None:
    """Run a round whose reports do not reach the driver."""
    run = stepped.rounds.run
    lost_by = error or RetryableError("the executor is gone")

    def lost(round_: Round) -> Any:
        stepped.rounds.run = run  # type: ignore[method-assign]
        run(round_)
        raise lost_by

    stepped.rounds.run = lost  # type: ignore[method-assign]
    assert not stepped.driver.step()


def lose_a_process(stepped: SteppedState) -> None:
    """Run a round; then lose a process that has a task of the counting bolt."""
    stepped.step()
    tasks = stepped.rounds._worker._tasks
    del tasks[max(place for place, task in tasks.items() if isinstance(task, SegmentTask))]


class Fed(Log):
    """A log that the test adds words to."""

    def open(self, conf: Any, context: Any, collector: Any) -> None:
        super().open(conf, context, collector)
        self.words = [journal(self.key).results["words"]]


TUPLES = {"a tuple fails": fail, "a tuple times out": hold, "a bolt raises": die}
LOSSES = {"a process is lost": lose_a_process, "a round is lost": lose_a_round}


@pytest.mark.dies("state 3")
@pytest.mark.behaviour("5.5")
@pytest.mark.parametrize("trouble", [*TUPLES, *LOSSES])
def test_exactly_once_all_states_and_spouts_go_back_together_whatever_happens(
    key: str, tmp_path: Path, trouble: str
) -> None:
    stepped = SteppedState(two_of_each(key, Log(key, [WORDS, WORDS])), tmp_path).settle()
    before, positions = stepped.record.txid, (stepped.record.positions or {})["words"]
    stepped = SteppedState(two_of_each(key, Log(key, [MORE, MORE])), tmp_path, stepped.record).step()
    journal(key).seeks.clear()
    journal(key).steps.clear()
    if trouble in TUPLES:
        journal(key).on["split"] = TUPLES[trouble]
    else:
        LOSSES[trouble](stepped)
    until(stepped, lambda: stepped.recoveries == 1)
    stepped.step()
    for task in range(2):  # new instances
        assert steps_of(key, task=task)[-2:] == ["prepare", f"init_state {before}"]
    assert journal(key).seeks == [positions, positions]
    stepped.settle()
    assert counted(tmp_path, stepped, key) == Counter(MORE * 2)
    assert journal(key).failed == []


@pytest.mark.dies("state 3")
@pytest.mark.behaviour("5.4")
@pytest.mark.parametrize(
    ("act", "named"),
    [
        (fail, "split[0] failed a tuple"),
        (die, "split[0]: ZeroDivisionError: died"),
        (hold, "a tuple of words[0] was not processed in time; split had some"),
    ],
    ids=["a tuple fails", "a bolt raises", "a tuple times out"],
)
def test_repeated_failures_without_a_checkpoint_in_between_end_the_topology_and_are_named(
    key: str, tmp_path: Path, act: Callable[[Any], None], named: str
) -> None:
    words = journal(key).results["words"] = list(WORDS)
    left = 0

    def fails(found: Any) -> None:
        nonlocal left
        left -= 1
        if left:
            journal(key).on["split"] = fails
        act(found)

    stepped = SteppedState(two_of_each(key, Fed(key, [[]])), tmp_path).settle()
    for often, recoveries in ((4, 4), (4, 8), (5, 13)):  # failures in a row; then a checkpoint, unless it ended
        assert stepped.driver.failure is None
        words.append("cow")
        left = often
        journal(key).on["split"] = fails
        until(stepped, lambda: stepped.recoveries == recoveries, 8)  # noqa: B023 - called at once
        if often == 4:
            stepped.settle()
    assert named in str(stepped.driver.failure)


@pytest.mark.dies("state 3")
@pytest.mark.rule("C36")
@pytest.mark.behaviour("5.4")
@pytest.mark.parametrize(
    ("error", "exact", "checkpoints", "ends"),
    [
        (WorkerLostError("task worker 1 is gone while it ran split[0]"), True, False, True),
        (WorkerLostError("task worker 1 is gone while it ran split[0]"), True, True, False),
        (WorkerLostError("task worker 1 is gone while it ran split[0]"), False, False, False),
        (RetryableError("the executor is gone"), True, False, False),
    ],
    ids=["a process ends", "with checkpoints in between", "at-least-once", "an executor is lost"],
)
def test_a_process_that_ends_again_and_again_before_the_next_checkpoint_ends_the_topology(
    key: str, tmp_path: Path, error: RetryableError, exact: bool, checkpoints: bool, ends: bool
) -> None:
    """At-least-once, the spouts count this for their tuples. Losing an executor says nothing about
    a tuple.
    """
    words = journal(key).results["words"] = list(WORDS)
    stepped = SteppedState(two_of_each(key, Fed(key, [[]])), tmp_path, exact=exact).settle()
    for times in range(1, 8):
        assert stepped.driver.failure is None
        words.append("cow")
        lose_a_round(stepped, error)
        lose_a_round(stepped, error)  # in the recovery: it has begun nothing that could end the process
        stepped.step()
        if checkpoints:
            stepped.settle()
        if ends and times == 5:
            break
    assert (stepped.driver.failure is not None) == ends
    if ends:
        assert "5 times in a row" in str(stepped.driver.failure)
        assert "split[0]" in str(stepped.driver.failure)


@pytest.mark.rule("C36")
def test_processes_that_end_while_there_is_nothing_to_do_do_not_end_the_topology(key: str, tmp_path: Path) -> None:
    """No checkpoint comes in between, and none is due."""
    stepped = SteppedState(two_of_each(key, Log(key, [WORDS, WORDS])), tmp_path).settle()
    before = stepped.record.txid
    for _ in range(8):
        lose_a_round(stepped, WorkerLostError("task worker 1 is gone"))
        stepped.step(3)
    assert (stepped.record.txid, stepped.recoveries, stepped.driver.failure) == (before, 8, None)


@pytest.mark.dies("state 4")
@pytest.mark.behaviour("5.5")
@pytest.mark.parametrize("how", ["a tuple fails", "a tuple times out"])
def test_at_least_once_a_failed_tuple_is_emitted_again_by_its_spout_and_nothing_goes_back(
    key: str, tmp_path: Path, how: str
) -> None:
    stepped = SteppedState(two_of_each(key, Source(key, WORDS)), tmp_path, exact=False).step()
    journal(key).on["split"] = TUPLES[how]
    until(stepped, lambda: len(journal(key).failed) == 1)
    stepped.settle()
    assert counted(tmp_path, stepped, key) == Counter(WORDS)
    assert (len(journal(key).failed), len(journal(key).emitted), stepped.recoveries) == (1, len(WORDS) + 1, 0)
    assert sorted(journal(key).acked) == list(range(len(WORDS)))


@pytest.mark.dies("state 4")
@pytest.mark.rule("C36")
@pytest.mark.behaviour("5.5")
@pytest.mark.parametrize("trouble", [*LOSSES, "a stateful bolt raises"])
def test_at_least_once_states_go_back_and_tuples_under_way_come_again_without_the_spout(
    key: str, tmp_path: Path, trouble: str
) -> None:
    stepped = SteppedState(two_of_each(key, Source(key, WORDS)), tmp_path, exact=False).settle()
    before = stepped.record.txid
    stepped = SteppedState(two_of_each(key, Source(key, MORE)), tmp_path, stepped.record, exact=False).step()
    executed: list[str] = []
    journal(key).emitted.clear()

    def dies(word: str) -> None:
        executed.append(word)
        if len(executed) == 2:
            raise RuntimeError("died")

    journal(key).on["execute"] = executed.append if trouble in LOSSES else dies
    if trouble in LOSSES:
        LOSSES[trouble](stepped)
    until(stepped, lambda: stepped.recoveries == 1, 0.1)
    stepped.step()
    assert begun_at(key) == [f"init_state {before}"] * 2
    assert counted(tmp_path, stepped, key) == Counter(WORDS)
    stepped.settle()
    assert counted(tmp_path, stepped, key) == Counter(MORE)
    failed = 0 if trouble in LOSSES else 1  # the tuple that failed itself
    new = len(MORE) - len(WORDS)
    assert (len(journal(key).failed), len(journal(key).emitted)) == (failed, new + failed)
    assert len(executed) > new


@pytest.mark.dies("state 4")
@pytest.mark.behaviour("5.5")
def test_at_least_once_a_spout_whose_process_is_lost_goes_on_from_the_checkpoint(key: str, tmp_path: Path) -> None:
    """The record has a position, because the state was exactly-once before."""
    stepped = SteppedState(two_of_each(key, Log(key, [WORDS, WORDS])), tmp_path).settle()
    positions = (stepped.record.positions or {})["words"]
    stepped = SteppedState(two_of_each(key, Log(key, [MORE, MORE])), tmp_path, stepped.record, exact=False).step()
    journal(key).seeks.clear()
    tasks = stepped.rounds._worker._tasks
    del tasks[min(place for place, task in tasks.items() if isinstance(task, SegmentTask))]
    until(stepped, lambda: stepped.recoveries == 1, 0.1)
    stepped.step()
    assert journal(key).seeks == [positions]


# --- what is away for a while ---------------------------------------------------------------------


class Away(Log):
    """May raise in ``seek``, as if its source did not answer."""

    def seek(self, positions: Sequence[Any]) -> None:
        journal(self.key).happens("seek", positions)
        super().seek(positions)


class Ticking(Count):
    """Gets ticks, and journals them and the calls of ``tick_in_s``."""

    tick_s = 5.0

    def tick_in_s(self) -> float | None:
        journal(self.key).happens("tick_in_s", None)
        return None

    def execute(self, tup: Tuple) -> None:
        if tup.is_tick:
            journal(self.key).happens("tick", None)
        else:
            super().execute(tup)


def ticking(key: str) -> CoreTopology:
    builder = TopologyBuilder(key)
    builder.set_spout("words", Log(key, [WORDS]))
    builder.set_bolt("count", Ticking(key)).fields_grouping("words", Fields("word"))
    return builder.build()


@pytest.mark.parametrize("where", ["execute", "tick", "tick_in_s"])
def test_a_retryable_error_of_a_stateful_bolt_takes_everything_back_like_any_error(
    key: str, tmp_path: Path, where: str
) -> None:
    stepped = SteppedState(ticking(key), tmp_path).step()  # all tasks have begun
    journal(key).on[where] = once(RetryableError("its own database is away"))
    stepped.step(10, seconds=2)
    stepped.settle()
    assert stepped.recoveries == 1
    assert committed(str(tmp_path), stepped.record, key, "count") == Counter(WORDS)


def test_a_spout_whose_source_is_away_at_a_recovery_goes_back_when_it_answers(key: str, tmp_path: Path) -> None:
    stepped = SteppedState(counting(key, Away(key, [WORDS])), tmp_path).settle()
    journal(key).on["seek"] = once(RetryableError("the broker is away"))
    again = SteppedState(counting(key, Away(key, [[*WORDS, "more"]])), tmp_path, stepped.record)
    again.settle()
    assert committed(str(tmp_path), again.record, key, "count") == Counter([*WORDS, "more"])


def test_a_store_that_is_away_during_a_recovery_is_waited_for(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = SteppedState(counting(key, Log(key, [WORDS])), tmp_path).settle()
    again = SteppedState(counting(key, Log(key, [[*WORDS, "more"]])), tmp_path, first.record)
    tries = itertools.count(1)
    whole = LayeredState.recover

    def away(self: LayeredState, txid: int, **more: Any) -> None:
        if next(tries) <= 20:
            raise RetryableError("the store is away")
        whole(self, txid, **more)

    monkeypatch.setattr(LayeredState, "recover", away)
    again.step(3)
    assert "the store is away" in str(again.driver.status().last_error)
    again.settle()
    assert next(tries) > 20
    assert again.driver.failure is None
    assert committed(str(tmp_path), again.record, key, "count") == Counter([*WORDS, "more"])


class Handing(Count):
    """Keeps words until a checkpoint is prepared or committed, and emits them then,
    without anchors.
    """

    def __init__(self, key: str, when: str) -> None:
        super().__init__(key)
        self.when = when

    def execute(self, tup: Tuple) -> None:
        self.counts.put("kept", [*(self.counts.get("kept") or []), tup["word"]])
        self.collector.ack(tup)

    def pre_prepare(self, txid: int) -> None:
        self.hand("pre_prepare")

    def pre_commit(self, txid: int) -> None:
        self.hand("pre_commit")

    def hand(self, when: str) -> None:
        kept = self.counts.get("kept")
        if kept and when == self.when:
            for word in kept:
                self.collector.emit([word, 1])
            self.counts.put("kept", [])


def handing(key: str, folder: Path, when: str) -> SteppedState:
    """Words that a hook emits, that are held, and that are counted."""
    builder = TopologyBuilder(key)
    builder.set_spout("words", Log(key, [WORDS], per_call=10))
    builder.set_bolt("handing", Handing(f"{key} handing", when)).global_grouping("words")
    builder.set_bolt("holding", Holding(f"{key} held")).shuffle_grouping("handing")
    builder.set_bolt("count", Count(key)).fields_grouping("holding", Fields("word"))
    return SteppedState(builder.build(), folder)


def held(key: str) -> list[Any]:
    return journal(f"{key} held").results.pop("held", [])  # type: ignore[no-any-return]


@pytest.mark.rule("C34")
@pytest.mark.behaviour("5.5")
def test_holding_a_tuple_emitted_in_pre_prepare_ends_the_topology_and_loses_nothing(key: str, tmp_path: Path) -> None:
    """Otherwise the state of the first bolt would say that the word was emitted,
    and no other state would have it.
    """
    stepped = handing(key, tmp_path, "pre_prepare")
    for _ in range(20):
        stepped.step(seconds=1)
        if stepped.driver.failure is not None:
            break
    assert "holding holds what was emitted in pre_prepare" in str(stepped.driver.failure)
    kept = committed(str(tmp_path), stepped.record, key, "handing").get("kept") or []
    counted = committed(str(tmp_path), stepped.record, key, "count")
    offset = stepped.record.positions["words"][0]["0"]  # type: ignore[index]
    assert Counter(kept) + Counter(counted) == Counter(WORDS[:offset])


@pytest.mark.rule("C34")
@pytest.mark.behaviour("5.5")
@pytest.mark.parametrize("fails", [False, True], ids=["is let go", "fails"])
def test_a_checkpoint_waits_for_tuples_emitted_in_pre_commit_of_the_previous_one(
    key: str, tmp_path: Path, fails: bool
) -> None:
    stepped = handing(key, tmp_path, "pre_commit")
    stepped.step(10, seconds=1)
    assert committed(str(tmp_path), stepped.record, key, "handing") == {"kept": WORDS}
    if fails:
        bolt, tup = held(key)[0]
        bolt.collector.fail(tup)
        stepped.step(10, seconds=1)
    for bolt, tup in held(key):
        bolt.let_go(tup)
    stepped.settle()
    kept = committed(str(tmp_path), stepped.record, key, "handing")["kept"]
    assert Counter(kept) + Counter(committed(str(tmp_path), stepped.record, key, "count")) == Counter(WORDS)
    assert kept == (WORDS if fails else [])  # then they are emitted with the next checkpoint
    assert stepped.recoveries == fails
