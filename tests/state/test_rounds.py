"""A task's round is all or nothing: what it made before a recovery never arrives after it."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from framework import BaseBasicBolt, BaseRichBolt, FailedException, Fields, TopologyBuilder, Tuple, submit
from framework.core import component_task as living
from framework.core.failure_policy import PAUSE_MAX_S
from framework.core.outcome import ERRORS_MAX
from framework.errors import RetryableError
from framework.state.checkpointed_key_value_state import LayeredState
from framework.state.lmdb import LmdbStore
from framework.transactions import MemoryStore
from tests.kit.state_parts import (
    Count,
    Log,
    Source,
    Split,
    SteppedState,
    checkpointed,
    counting,
    journal,
    lmdb,
    steps_of,
)
from tests.kit.waiting import PATIENCE_S

WORDS = [f"word{number % 17}" for number in range(200)]
CONF = {"topology.state.checkpoint.interval.ms": 1, "topology.max.spout.pending": 25}


@pytest.fixture
def key() -> str:
    return f"r{uuid.uuid4().hex[:8]}"


class First(Count):
    """The first of two stateful bolts in a chain; it journals its commits."""

    def pre_commit(self, txid: int) -> None:
        journal(self.key).happens("first commits", txid)


class CountAgain(Count):
    """The second of two stateful bolts in a chain; its results have the prefix "again"."""

    def execute(self, tup: Tuple) -> None:
        again = f"again {tup['word']}"
        count = (self.counts.get(again) or 0) + 1
        self.counts.put(again, count)
        journal(self.key).results[again] = count
        self.collector.ack(tup)


def counts(key: str, prefix: str = "") -> Counter[str]:
    found = journal(key).results
    return Counter({word.removeprefix(prefix): n for word, n in found.items() if word.startswith(prefix)})


def run_to_its_end(topology: Any, conf: Mapping[str, Any] = CONF) -> int:
    """Run a topology until it is idle. Returns the number of recoveries."""
    with submit(topology, conf, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
        status = run.status().checkpoint
        assert status is not None and status.guarantee == "exactly-once"
        return status.recoveries


def test_a_status_says_how_large_the_states_are_and_what_went_over_each_edge(key: str, tmp_path: Path) -> None:
    words = ["a", "b", "a", "c"]
    builder = TopologyBuilder(key)
    builder.set_spout("words", Log(key, [words]))
    builder.set_bolt("split", Split(key)).shuffle_grouping("words")
    builder.set_bolt("count", Count(key), 2).fields_grouping("split", Fields("word"))
    stepped = SteppedState(builder.build(), tmp_path)
    stepped.settle()
    status = stepped.driver.status()
    assert status.edges == {"words->split": 4, "split->count": 4}
    assert status.checkpoint is not None
    assert status.checkpoint.states.keys() == {"count"}
    assert status.checkpoint.states["count"].keys == 3
    assert all(each.busy_s > 0 for each in status.components.values())
    assert json.loads(json.dumps(status.document()))["checkpoint"]["states"]["count"]["keys"] == 3


@pytest.mark.rule("C34")
@pytest.mark.behaviour("5.5")
def test_a_store_that_is_silent_in_a_commit_round_doubles_no_count_of_the_next_bolt(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first bolt has executed words in the round; then its store does
    not answer which checkpoint it has.
    """
    silent: list[int] = []
    real = LayeredState.txid.fget
    assert real is not None

    def txid(self: LayeredState) -> int:
        if silent and silent[-1] in (2, 4):  # the first question after the first bolt has committed
            silent.append(0)
            raise RetryableError("the store is silent")
        return real(self)  # type: ignore[no-any-return]

    journal(key).on["first commits"] = silent.append
    monkeypatch.setattr(LayeredState, "txid", property(txid))
    builder = TopologyBuilder(key)
    builder.set_spout("words", Log(key, [WORDS]))
    builder.set_bolt("first", First(key)).fields_grouping("words", Fields("word"))
    builder.set_bolt("second", CountAgain(key), 2).fields_grouping("first", Fields("word"))
    assert run_to_its_end(builder.build()) == 2
    assert counts(key, "again ") == Counter(WORDS)


class Doubled(BaseBasicBolt):
    """Emits on two streams for each word; once, a value that does not fit the first stream."""

    def __init__(self, key: str) -> None:
        self.key = key

    def execute(self, tup: Tuple, collector: Any) -> None:
        journal(self.key).steps.append(("doubled", 0, tup["word"]))
        wrong = len(journal(self.key).steps) == 30
        collector.emit([len(tup["word"]) if not wrong else "six"], stream="lengths")
        collector.emit([tup["word"]], stream="words")

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(length=int), "lengths")
        declarer.declare(Fields(word=str), "words")


class Ignore(BaseBasicBolt):
    def execute(self, tup: Tuple, collector: Any) -> None:
        """Nothing."""


@pytest.mark.rule("C34")
@pytest.mark.behaviour("5.5")
def test_after_a_value_that_does_not_fit_one_stream_no_row_of_another_outlives_the_recovery(key: str) -> None:
    builder = TopologyBuilder(key)
    builder.set_spout("words", Log(key, [WORDS]))
    builder.set_bolt("doubled", Doubled(key)).shuffle_grouping("words")
    builder.set_bolt("lengths", Ignore(), 2).shuffle_grouping("doubled", "lengths")
    builder.set_bolt("count", Count(key), 2).fields_grouping("doubled", Fields("word"), "words")
    assert run_to_its_end(builder.build()) == 1
    assert counts(key) == Counter(WORDS)


class Gathering(Split):
    """Passes words on; in ``cleanup`` it emits the last few once more."""

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.collector = collector

    def cleanup(self) -> None:
        self.collector.emit(["left over"])


def fails_once(key: str, what: str, word_number: int, error: Exception) -> None:
    """Have a bolt fail, once, at its word number ``word_number``."""

    def once(word: str) -> None:
        journal(key).steps.append(("split", 0, word))
        if len(journal(key).steps) == word_number:
            raise error

    journal(key).on[what] = once


@pytest.mark.rule("C34")
@pytest.mark.behaviour("5.5")
def test_tuples_that_cleanup_emits_during_a_recovery_are_dropped(key: str) -> None:
    fails_once(key, "execute", 40, RuntimeError("died"))
    builder = TopologyBuilder(key)
    builder.set_spout("words", Log(key, [WORDS]))
    builder.set_bolt("split", Gathering(key)).shuffle_grouping("words")
    builder.set_bolt("count", Count(key), 2).fields_grouping("split", Fields("word"))
    assert run_to_its_end(builder.build()) == 1
    assert counts(key) == Counter(WORDS)


class Unanchored(BaseBasicBolt):
    """Emits each word without an anchor, so that it is not tracked."""

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.collector = collector

    def execute(self, tup: Tuple, collector: Any) -> None:
        roots, collector.roots = collector.roots, ()
        collector.emit([tup["word"]])
        collector.roots = roots

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


class Late(Split):
    """Fails to start at first."""

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        journal(f"{self.key} late").steps.append(("late", 0, "prepare"))
        if len(journal(f"{self.key} late").steps) < 3:
            raise ConnectionRefusedError("nobody there yet")


@pytest.mark.rule("C38")
@pytest.mark.behaviour("5.5")
def test_a_bolt_that_cannot_start_at_first_drops_no_untracked_tuple(key: str) -> None:
    builder = TopologyBuilder(key)
    builder.set_spout("words", Log(key, [WORDS]))
    builder.set_bolt("plain", Unanchored()).shuffle_grouping("words")
    builder.set_bolt("late", Late(key)).shuffle_grouping("plain")
    builder.set_bolt("count", Count(key), 2).fields_grouping("late", Fields("word"))
    run_to_its_end(builder.build())
    assert counts(key) == Counter(WORDS)


class Retrying(Source):
    """Gives a word up when it fails after ``retries_max`` retries."""

    def __init__(self, key: str, words: Sequence[str], retries_max: int) -> None:
        super().__init__(key, words)
        self.retries_max = retries_max

    def fail(self, message_id: Any) -> None:
        if journal(self.key).failed.count(message_id) < self.retries_max:
            super().fail(message_id)
        else:
            journal(self.key).steps.append(("words", 0, f"gave up {message_id}"))
            self.ack(message_id)


def poison(word: str) -> None:
    if word == "poison":
        raise RuntimeError("cannot do that")


@pytest.mark.dies("state 4")
@pytest.mark.rule("C36")
@pytest.mark.behaviour("5.5")
def test_a_record_that_always_fails_fails_no_other_record(key: str, tmp_path: Path) -> None:
    """At-least-once: each time, all states go back, but only the record itself counts a failure."""
    journal(key).on["execute"] = poison
    words = [f"word{number}" for number in range(500)]
    words[123] = "poison"
    store, conf = MemoryStore(), lmdb(tmp_path)
    with submit(counting(key, Retrying(key, words, 3)), conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
        status = run.status().checkpoint
        assert status is not None and status.guarantee == "at-least-once"
    assert steps_of(key, "words") == ["gave up 123"]
    assert set(journal(key).failed) == {123}
    assert set(checkpointed(conf, store, key)) == set(words) - {"poison"}
    assert sorted(journal(key).acked) == list(range(500))


class Noisy(Count):
    """Reports more errors than a task passes on, and then dies of one more."""

    def execute(self, tup: Tuple) -> None:
        if tup["word"] == "poison":
            for number in range(ERRORS_MAX + 2):
                self.collector.report_error(ValueError(f"number {number}"))
        super().execute(tup)


@pytest.mark.behaviour("5.4")
def test_a_stateful_bolt_that_dies_after_many_reported_errors_is_recovered(key: str, tmp_path: Path) -> None:
    """At-least-once: the last error decides, however many came before it."""
    journal(key).on["execute"] = poison
    builder = TopologyBuilder(key)
    builder.set_spout("words", Retrying(key, ["one", "poison", "two"], 1))
    builder.set_bolt("count", Noisy(key)).fields_grouping("words", Fields("word"))
    store, conf = MemoryStore(), lmdb(tmp_path)
    with submit(builder.build(), conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
    assert set(checkpointed(conf, store, key)) == {"one", "two"}


class Handing(Count):
    """Keeps words until a checkpoint is prepared, and emits them then, without anchors."""

    def execute(self, tup: Tuple) -> None:
        self.counts.put("kept", [*(self.counts.get("kept") or []), tup["word"]])
        self.collector.ack(tup)

    def pre_prepare(self, txid: int) -> None:
        for word in self.counts.get("kept") or []:
            self.collector.emit([word, 1])
        self.counts.put("kept", [])


@pytest.mark.rule("C34")
@pytest.mark.behaviour("5.5")
@pytest.mark.parametrize("how", [FailedException, RuntimeError])
def test_a_tuple_that_fails_in_the_round_that_prepares_a_checkpoint_is_not_lost(key: str, how: type[Exception]) -> None:
    fails_once(key, "split", 60, how("not this time"))
    builder = TopologyBuilder(key)
    builder.set_spout("words", Log(key, [WORDS]))
    builder.set_bolt("handing", Handing(f"{key} handing")).global_grouping("words")
    builder.set_bolt("split", Split(key)).shuffle_grouping("handing")
    builder.set_bolt("count", Count(key), 2).fields_grouping("split", Fields("word"))
    assert run_to_its_end(builder.build()) == 1
    assert counts(key) == Counter(WORDS)


class Careless(BaseRichBolt):
    """Emits without anchors, catches the error of a value that does not fit, and goes on."""

    def __init__(self, key: str) -> None:
        self.key = key

    def prepare(self, conf: Any, context: Any, collector: Any) -> None:
        self.collector = collector

    def execute(self, tup: Tuple) -> None:
        steps = journal(self.key).steps
        steps.append(("split", 0, tup["word"]))
        try:
            self.collector.emit([tup["word"] if len(steps) != 30 else 6])
        except Exception:  # noqa: BLE001 - whatever it says
            steps.append(("split", 0, "went on"))
        self.collector.ack(tup)

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


@pytest.mark.rule("C34")
@pytest.mark.behaviour("5.5")
def test_untracked_rows_that_do_not_fit_take_everything_back_also_when_the_bolt_catches_the_error(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(living, "BUFFERED_ROWS_MAX", 5)
    builder = TopologyBuilder(key)
    builder.set_spout("words", Log(key, [WORDS]))
    builder.set_bolt("split", Careless(key)).shuffle_grouping("words")
    builder.set_bolt("count", Count(key), 2).fields_grouping("split", Fields("word"))
    assert run_to_its_end(builder.build()) == 1
    assert ("split", 0, "went on") in journal(key).steps
    assert counts(key) == Counter(WORDS)


class Uncertain(Log):
    """May raise in ``caught_up``, as the journal says."""

    def caught_up(self) -> bool:
        journal(self.key).happens("caught_up", None)
        return super().caught_up()


class Silent(Log):
    """May raise in ``position``, as the journal says."""

    def position(self) -> Any:
        journal(self.key).happens("position", None)
        return super().position()


@pytest.mark.behaviour("5.5")
def test_a_source_that_does_not_say_where_it_stands_costs_one_recovery_and_doubles_nothing(
    key: str, tmp_path: Path
) -> None:
    builder = TopologyBuilder(key)
    builder.set_spout("words", Silent(key, [WORDS]))
    builder.set_bolt("count", Count(key)).fields_grouping("words", Fields("word"))
    stepped = SteppedState(builder.build(), tmp_path).step(3, seconds=1)

    def once(_: Any) -> None:
        del journal(key).on["position"]
        raise RetryableError("the broker does not answer")

    journal(key).on["position"] = once
    stepped.settle()
    assert "position" not in journal(key).on
    assert stepped.recoveries == 1
    assert counts(key) == Counter(WORDS)


class Untimely(Count):
    def tick_in_s(self) -> float | None:
        journal(self.key).happens("tick_in_s", None)
        return None


@pytest.mark.rule("C34")
@pytest.mark.behaviour("5.5")
@pytest.mark.parametrize("what", ["caught_up", "tick_in_s"])
def test_a_component_that_dies_in_a_recovery_round_is_recovered_again(key: str, tmp_path: Path, what: str) -> None:
    """Otherwise the spout would begin without its position, and emit everything again."""

    def once(_: Any) -> None:
        del journal(key).on[what]
        raise RuntimeError("not yet")

    def topology(words: Sequence[str]) -> Any:
        builder = TopologyBuilder(key)
        builder.set_spout("words", Uncertain(key, [words]))
        builder.set_bolt("count", Untimely(key)).fields_grouping("words", Fields("word"))
        return builder.build()

    stepped = SteppedState(topology(WORDS[:100]), tmp_path).settle()
    journal(key).on[what] = once
    again = SteppedState(topology(WORDS), tmp_path, stepped.record)
    again.settle()
    assert counts(key) == Counter(WORDS)


@pytest.mark.behaviour("5.5")
def test_a_component_that_dies_in_every_recovery_round_ends_the_topology(key: str, tmp_path: Path) -> None:
    def always(_: Any) -> None:
        raise RuntimeError("never")

    journal(key).on["tick_in_s"] = always
    builder = TopologyBuilder(key)
    builder.set_spout("words", Log(key, [WORDS]))
    builder.set_bolt("count", Untimely(key)).fields_grouping("words", Fields("word"))
    stepped = SteppedState(builder.build(), tmp_path)
    for _ in range(20):
        stepped.step(seconds=1)
        if stepped.driver.failure is not None:
            break
    assert "RuntimeError: never" in str(stepped.driver.failure)


class Paced(Log):
    """Gives as many words as the journal says."""

    def next_tuple(self) -> None:
        if len(journal(self.key).emitted) < journal(self.key).results.get("free", 0):
            super().next_tuple()


class Lost(Paced):
    """Dies when the journal says so, and notes when it is opened, placed and read."""

    def open(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:
        super().open(conf, context, collector)
        journal(self.key).steps.append(("words", 0, "open"))

    def seek(self, positions: Sequence[Any]) -> None:
        super().seek(positions)
        journal(self.key).steps.append(("words", 0, "seek"))

    def next_tuple(self) -> None:
        before = len(journal(self.key).emitted)
        journal(self.key).happens("next_tuple", None)
        super().next_tuple()
        if len(journal(self.key).emitted) > before:
            journal(self.key).steps.append(("words", 0, "gives"))


@pytest.mark.rule("C35")
@pytest.mark.behaviour("5.5")
def test_a_spout_that_died_gives_nothing_before_a_recovery_says_where_to_begin(key: str, tmp_path: Path) -> None:
    def die(_: Any) -> None:
        del journal(key).on["next_tuple"]
        raise OSError("the connection is gone")

    builder = TopologyBuilder(key)
    builder.set_spout("words", Lost(key, [WORDS]))
    builder.set_bolt("count", Count(key)).fields_grouping("words", Fields("word"))
    journal(key).results["free"] = 4
    stepped = SteppedState(builder.build(), tmp_path).step(5, seconds=1)
    journal(key).results["free"] = 100_000
    journal(key).on["next_tuple"] = die
    stepped.driver._spout_wait_s = 0.2  # in one round the spout is asked, dies, and is asked again
    stepped.step()
    stepped.settle()
    del journal(key).results["free"]
    steps = steps_of(key, "words")
    assert [steps[number + 1] for number, what in enumerate(steps) if what == "open"] == ["gives", "seek"]
    assert counts(key) == Counter(WORDS)


class Previous(BaseRichBolt):
    """Emits each tuple when the next one comes, anchored to it though it is acked."""

    def prepare(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:  # type: ignore[override]
        self.collector, self.previous = collector, None

    def execute(self, tup: Tuple) -> None:
        if self.previous is not None:
            self.collector.emit([self.previous[0]], anchors=self.previous)
        self.collector.ack(tup)
        self.previous = tup

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


@pytest.mark.behaviour("5.5")
def test_an_anchor_that_was_acked_in_an_earlier_round_holds_up_no_checkpoint(key: str, tmp_path: Path) -> None:
    builder = TopologyBuilder(key)
    builder.set_spout("words", Paced(key, [WORDS]))
    builder.set_bolt("previous", Previous()).shuffle_grouping("words")
    builder.set_bolt("count", Count(key), 2).fields_grouping("previous", Fields("word"))
    stepped = SteppedState(builder.build(), tmp_path).step(6, seconds=0.5)
    for _ in range(2):
        journal(key).results["free"] = journal(key).results.get("free", 0) + 1
        stepped.step(1, seconds=0.5)
        before = stepped.record.txid
        stepped.step(8, seconds=0.5)
        assert stepped.record.txid > before
    assert (stepped.recoveries, stepped.driver.status().trees) == (0, 0)


@pytest.mark.behaviour("5.5")
def test_a_store_that_refuses_checkpoints_is_asked_ever_less_often(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk filled the log, too: hundreds of tries a second, with two lines each."""
    stepped = SteppedState(counting(key, Log(key, [WORDS])), tmp_path)
    pauses: list[float] = []
    monkeypatch.setattr(stepped.driver._stopping, "wait", pauses.append)
    prepare = LmdbStore.prepare

    def refuse(*_: object) -> None:
        raise RetryableError("No space left on device")

    monkeypatch.setattr(LmdbStore, "prepare", refuse)
    for _ in range(40):
        stepped.step(seconds=1)
    assert len(pauses) >= 10
    assert pauses == sorted(pauses)
    assert pauses[-1] == PAUSE_MAX_S
    assert stepped.driver.failure is None
    monkeypatch.setattr(LmdbStore, "prepare", prepare)
    stepped.settle()
    assert counts(key) == Counter(WORDS)
    del pauses[:]
    stepped.step(5, seconds=1)
    assert pauses == []
