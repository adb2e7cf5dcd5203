"""The table of docs/state.md, line by line: what happens to states and spouts when something dies, fails or goes away."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from framework import BaseRichBolt, CoreTopology, FailedException, Fields, TopologyBuilder, Tuple
from framework.acking.home import AckerTask
from framework.errors import RetryableError
from tests.kit.state_parts import Count, Log, SteppedState, committed, counting, journal, lmdb

WORDS = ["the", "cow", "jumped", "over", "the", "moon"]


@pytest.fixture
def key() -> str:
    return f"d{uuid.uuid4().hex[:8]}"


def once(error: Exception) -> Any:
    """An action that raises the first time."""
    left = [error]

    def act(_: Any) -> None:
        if left:
            raise left.pop()

    return act


class Away(Log):
    """Its source does not answer when it is asked to go back."""

    def seek(self, positions: Sequence[Any]) -> None:
        journal(self.key).happens("seek", positions)
        super().seek(positions)


class Ticking(Count):
    """Wants ticks, and tells when it is asked and given one."""

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
def test_a_store_that_a_bolt_cannot_reach_while_it_works_takes_everything_back_like_any_error(
    key: str, tmp_path: Path, where: str
) -> None:
    stepped = SteppedState(ticking(key), tmp_path).step()  # begins
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


class Handing(Count):
    """Keeps words until a checkpoint is prepared or committed, and hands them on then: there is nothing to anchor them to."""

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


class Holding(BaseRichBolt):
    """Keeps what comes until the test lets it go."""

    def __init__(self, key: str) -> None:
        self.key = key

    def prepare(self, conf: Any, context: Any, collector: Any) -> None:
        self.collector = collector

    def execute(self, tup: Tuple) -> None:
        journal(self.key).results.setdefault("held", []).append((self, tup))

    def let_go(self, tup: Tuple) -> None:
        self.collector.emit([tup["word"]], anchors=tup)
        self.collector.ack(tup)

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


def handing(key: str, folder: Path, when: str) -> SteppedState:
    """Words that are handed on in a hook, held, and counted."""
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
def test_what_is_emitted_in_pre_prepare_and_held_is_in_no_checkpoint_that_could_lose_it(
    key: str, tmp_path: Path
) -> None:
    """The state before it says that it was handed on; no state after it has it."""
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
def test_a_checkpoint_waits_for_what_was_emitted_in_pre_commit_of_the_one_before(
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
    assert kept == (WORDS if fails else [])  # they go with the next checkpoint
    assert stepped.recoveries == fails
