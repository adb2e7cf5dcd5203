"""Records that cannot be processed where state is exactly-once: given up after their retries."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from framework import (
    BaseBasicBolt,
    BaseRichBolt,
    CoreTopology,
    CoreTopologyFailed,
    FailedException,
    Fields,
    TopologyBuilder,
    Tuple,
    submit,
)
from framework.core import checkpoints
from framework.core.leader_loop import read_record
from framework.errors import BadRecordError, RetryableError
from framework.state import BaseWindowedBolt, TimeWindow, Window
from framework.topology import DEAD_LETTER_STREAM
from framework.transactions import MemoryStore
from tests.kit.state_parts import Count, Log, SteppedState, checkpointed, committed, journal, lmdb
from tests.kit.waiting import PATIENCE_S

WORDS = ["the", "cow", "jumped", "poison", "over", "the", "moon"]
GOOD = Counter(each for each in WORDS if each != "poison")
RETRIES = 2


@pytest.fixture
def key() -> str:
    return f"g{uuid.uuid4().hex[:8]}"


class GivesUp(Log):
    """Emits words with their offsets, and emits those that it gives up as dead letters."""

    def __init__(self, key: str, words: Sequence[Sequence[str]], *, retries: int | None = RETRIES, **more: Any) -> None:
        super().__init__(key, words, **more)
        self.retries = retries

    def open(self, conf: Any, context: Any, collector: Any) -> None:
        journal(self.key).happens("open", context.task_index)
        super().open(conf, context, collector)

    @property
    def retries_max(self) -> int | None:
        return self.retries

    def give_up(self, message_id: Any) -> None:
        partition, offset = message_id
        journal(self.key).happens("give up", message_id)
        self.collector.emit([self.words[partition][offset]], stream=DEAD_LETTER_STREAM)

    def declare_output_fields(self, declarer: Any) -> None:
        super().declare_output_fields(declarer)
        declarer.declare(Fields(word=str), DEAD_LETTER_STREAM)


class Drops(GivesUp):
    """Drops those that it gives up."""

    def give_up(self, message_id: Any) -> None:
        journal(self.key).happens("give up", message_id)


class Acts(BaseRichBolt):
    """Does with each word what ``act`` says, with the word, the tuple and the collector; then
    passes it on."""

    def __init__(self, act: Callable[[str, Tuple, Any], bool | None], fields: Fields | None = None) -> None:
        self.act, self.fields = act, fields or Fields(word=str)

    def prepare(self, conf: Any, context: Any, collector: Any) -> None:
        self.collector = collector

    def execute(self, tup: Tuple) -> None:
        if self.act(tup["word"], tup, self.collector):
            return
        self.collector.emit([tup["word"]], anchors=tup)
        self.collector.ack(tup)

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(self.fields)


class ActsBasic(BaseBasicBolt):
    """As ``Acts``, as a basic bolt."""

    def __init__(self, act: Callable[[str], Any]) -> None:
        self.act = act

    def execute(self, tup: Tuple, collector: Any) -> None:
        made = self.act(tup["word"])
        collector.emit([tup["word"] if made is None else made])

    def cleanup(self) -> None:
        """Nothing to clean up."""

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


def gives_up(key: str, act: Any, spout: Log, *, tasks: int = 2) -> CoreTopology:
    """Words that a bolt acts on, and that are counted; and their dead letters, counted as well."""
    builder = TopologyBuilder(key)
    builder.set_spout("words", spout, tasks)
    builder.set_bolt("acts", act, tasks).shuffle_grouping("words")
    builder.set_bolt("count", Count(key), tasks).fields_grouping("acts", Fields("word"))
    builder.set_bolt("letters", Count(key + "letters"), 1).fields_grouping("words", Fields("word"), DEAD_LETTER_STREAM)
    return builder.build()


def poison(key: str, made: Any) -> Callable[[str], Any]:
    """For the poison, writes the try down, and raises ``made``, or returns it."""

    def act(word: str) -> Any:
        if word != "poison":
            return None
        journal(key).failed.append(word)
        if isinstance(made, Exception):
            raise made
        return made

    return act


def tries(key: str) -> int:
    """How often the poison was tried."""
    return len(journal(key).failed)


@pytest.mark.each_value_once
@pytest.mark.rule("C36")
@pytest.mark.behaviour("5.4")
@pytest.mark.parametrize("tasks", [1, 2], ids=["fused", "two tasks"])
@pytest.mark.parametrize(
    "how", ["raises", "fails", "is bad", "does not fit", "rich raises", "rich fails", "acked before", "state"]
)
def test_a_record_that_fails_too_often_is_a_dead_letter_and_the_others_are_counted_once(
    key: str, tmp_path: Path, how: str, tasks: int
) -> None:
    """It is tried once and ``RETRIES`` times again; its neighbours, which go back with it, count
    once, and the topology goes on for as long as its spout lets it."""

    def rich(word: str, tup: Tuple, collector: Any) -> bool | None:
        if word == "poison" and how == "acked before":
            collector.ack(tup)
        if word == "poison" and how in ("rich raises", "acked before"):
            journal(key).failed.append(word)
            raise ValueError(word)
        if word == "poison" and how == "rich fails":
            journal(key).failed.append(word)
            collector.fail(tup)
            return True
        return None

    acts: dict[str, Any] = {
        "raises": ActsBasic(poison(key, ValueError("poison"))),
        "fails": ActsBasic(poison(key, FailedException("poison"))),
        "is bad": ActsBasic(poison(key, BadRecordError("poison"))),
        "does not fit": ActsBasic(poison(key, 1.5j)),
        "state": ActsBasic(lambda word: None),
    }
    if how == "state":
        journal(key).on["execute"] = poison(key, ValueError("poison"))
    topology = gives_up(key, acts.get(how, Acts(rich)), GivesUp(key, [WORDS, WORDS[:3]]), tasks=tasks)
    stepped = SteppedState(topology, tmp_path).settle()
    assert tries(key) == RETRIES + 1
    assert committed(str(tmp_path), stepped.record, key, "count") == GOOD + Counter(WORDS[:3])
    assert committed(str(tmp_path), stepped.record, key, "letters") == {"poison": 1}
    assert stepped.driver.failure is None
    assert not any(stepped.record.suspects.values())


@pytest.mark.rule("C36")
def test_a_record_that_nobody_acks_is_given_up_after_its_retries(key: str, tmp_path: Path) -> None:
    def keeps(word: str, tup: Tuple, collector: Any) -> bool:
        if word == "poison":
            journal(key).failed.append(word)
        return word == "poison"

    stepped = SteppedState(gives_up(key, Acts(keeps), GivesUp(key, [WORDS])), tmp_path)
    for _ in range(100):
        stepped.step(seconds=10)
    stepped.settle()
    assert tries(key) == RETRIES + 1
    assert committed(str(tmp_path), stepped.record, key, "count") == GOOD
    assert committed(str(tmp_path), stepped.record, key, "letters") == {"poison": 1}


@pytest.mark.rule("C36")
def test_a_record_that_is_dropped_is_past_and_reported_by_its_spout(key: str, tmp_path: Path) -> None:
    """Its position is in a checkpoint, though nothing comes after it."""
    dropped: list[Any] = []
    journal(key).on["give up"] = dropped.append
    topology = gives_up(key, ActsBasic(poison(key, ValueError("poison"))), Drops(key, [["the", "poison"]]))
    stepped = SteppedState(topology, tmp_path).settle()
    assert committed(str(tmp_path), stepped.record, key, "count") == {"the": 1}
    assert set(dropped) == {(0, 1)}
    assert stepped.record.positions == {"words": [{"0": 2}, {}]}
    assert not any(stepped.record.suspects.values())


@pytest.mark.rule("C36")
def test_of_the_rows_that_are_sent_together_only_those_that_do_not_fit_are_to_blame(key: str, tmp_path: Path) -> None:
    """So many that the bolt's rows are sent while it still executes others."""
    words = [f"w{number}" for number in range(9_000)]
    words[5_000] = "poison"
    topology = gives_up(key, ActsBasic(poison(key, 1.5j)), GivesUp(key, [words], per_call=9_000, retries=0), tasks=1)
    stepped = SteppedState(topology, tmp_path).settle()
    assert committed(str(tmp_path), stepped.record, key, "letters") == {"poison": 1}
    assert len(committed(str(tmp_path), stepped.record, key, "count")) == len(words) - 1


@pytest.mark.rule("C36")
def test_what_was_counted_and_given_up_outlives_the_driver(key: str, tmp_path: Path) -> None:
    """A driver dies after each recovery: the record fails as often as with one driver."""

    def topology() -> CoreTopology:
        return gives_up(key, ActsBasic(poison(key, ValueError("poison"))), GivesUp(key, [WORDS]))

    stepped = SteppedState(topology(), tmp_path)
    for number in range(1, RETRIES + 2):
        while tries(key) < number or stepped.driver._checkpoints.recovering:  # type: ignore[union-attr]
            stepped.step()
        assert list(stepped.record.suspects["words"].values()) == [number]
        stepped = SteppedState(topology(), tmp_path, type(stepped.record).of(stepped.record.document(), "the record"))
    stepped.settle()
    assert tries(key) == RETRIES + 1
    assert committed(str(tmp_path), stepped.record, key, "count") == GOOD
    assert committed(str(tmp_path), stepped.record, key, "letters") == {"poison": 1}


@pytest.mark.rule("C36")
def test_a_failure_counts_once_though_the_recovery_is_repeated(key: str, tmp_path: Path) -> None:
    """Here the source does not answer when the spouts begin again."""
    opened: list[int] = []

    def away(task: int) -> None:
        opened.append(task)
        if tries(key) and len(opened) % 3:
            raise RetryableError("the source does not answer")

    journal(key).on["open"] = away
    topology = gives_up(key, ActsBasic(poison(key, ValueError("poison"))), GivesUp(key, [WORDS]), tasks=1)
    stepped = SteppedState(topology, tmp_path).settle()
    assert tries(key) == RETRIES + 1
    assert committed(str(tmp_path), stepped.record, key, "letters") == {"poison": 1}


@pytest.mark.rule("C36")
@pytest.mark.parametrize("message_id", [object(), "x" * 1_000, None])
def test_a_record_without_an_id_that_lasts_ends_the_topology(key: str, message_id: Any) -> None:
    class Nameless(GivesUp):
        def next_tuple(self) -> None:
            if self.offsets.get(0) == 0:
                self.offsets[0] += 1
                self.collector.emit(["poison"], message_id=message_id if message_id is None else [message_id])

    topology = gives_up(key, ActsBasic(poison(key, ValueError("poison"))), Nameless(key, [WORDS]))
    conf = {"topology.state.checkpoint.interval.ms": 20}
    with submit(topology, conf, executor="local") as run, pytest.raises(CoreTopologyFailed, match="is not known"):
        run.wait_until_idle(PATIENCE_S)
    assert tries(key) == 5


class Pairs(BaseRichBolt):
    """Passes words on two by two, anchored to both."""

    def prepare(self, conf: Any, context: Any, collector: Any) -> None:
        self.collector = collector
        self.first: Tuple | None = None

    def execute(self, tup: Tuple) -> None:
        first, self.first = self.first, None
        if first is None:
            self.first = tup
            return
        self.collector.emit([f"{first['word']} {tup['word']}"], anchors=[first, tup])
        self.collector.ack(first)
        self.collector.ack(tup)

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


class Letters(BaseWindowedBolt):
    """Windows of four offsets, by word."""

    def __init__(self, act: Callable[[Window], None]) -> None:
        super().__init__(TimeWindow(4, "number"))
        self.act = act

    def execute_window(self, window: Window, collector: Any) -> None:
        self.act(window)
        collector.emit([",".join(each["word"] for each in window.tuples)])

    def declare_output_fields(self, declarer: Any) -> None:
        super().declare_output_fields(declarer)
        declarer.declare(Fields(word=str))


class Numbered(GivesUp):
    def next_tuple(self) -> None:
        for partition, offset in self.offsets.items():
            if offset < len(self.words[partition]):
                self.offsets[partition] += 1
                self.collector.emit([self.words[partition][offset], offset], message_id=(partition, offset))

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str, number=int))
        declarer.declare(Fields(word=str), DEAD_LETTER_STREAM)


def fails(word: str) -> None:
    if "poison" in word:
        raise ValueError(word)


def of_window(window: Window) -> None:
    fails(",".join(each["word"] for each in window.tuples))


def of_several(key: str, how: str, then: Any = None, words: Sequence[str] = WORDS) -> CoreTopology:
    """A topology in which something fails that is made of several records."""
    builder = TopologyBuilder(key)
    builder.set_spout("words", Numbered(key, [words]))
    made: Any = {"pair": Pairs(), "window": Letters(of_window), "made of a window": Letters(lambda _: None)}[how]
    builder.set_bolt("several", made).shuffle_grouping("words")
    builder.set_bolt("fails", then or ActsBasic(lambda word: fails(word))).shuffle_grouping("several")
    builder.set_bolt("count", Count(key)).fields_grouping("fails", Fields("word"))
    builder.set_bolt("letters", Count(key + "letters")).fields_grouping("words", Fields("word"), DEAD_LETTER_STREAM)
    return builder.build()


@pytest.mark.rule("C36")
@pytest.mark.parametrize("how", ["pair", "window", "made of a window"])
def test_no_record_is_given_up_for_a_tuple_that_is_made_of_several(key: str, how: str) -> None:
    """The topology ends as without retries, and says that it does not know the record."""
    given_up: list[Any] = []
    journal(key).on["give up"] = given_up.append
    with (
        submit(of_several(key, how), {"topology.state.checkpoint.interval.ms": 20}, executor="local") as run,
        pytest.raises(CoreTopologyFailed, match="which record is at fault is not known|failed a tuple|poison"),
    ):
        run.wait_until_idle(PATIENCE_S)
    assert given_up == []


@pytest.mark.rule("C36")
def test_no_record_is_given_up_for_a_window_whose_result_nobody_acks(key: str, tmp_path: Path) -> None:
    """The record that made the window due is not at fault: else the next one would be given up
    after it, then the one after that, until none is left."""

    def keeps(word: str, tup: Tuple, collector: Any) -> bool:
        journal(key).failed += ["poison"] * ("poison" in word)
        return "poison" in word

    stepped = SteppedState(of_several(key, "made of a window", Acts(keeps)), tmp_path)
    while stepped.driver.failure is None:
        stepped.step(seconds=10)
    assert "not processed in time" in stepped.driver.failure.message
    assert tries(key) == 5
    assert committed(str(tmp_path), stepped.record, key, "letters") == {}


@pytest.mark.rule("C36")
def test_no_record_is_given_up_for_a_tuple_of_a_join_that_nobody_acks(key: str, tmp_path: Path) -> None:
    """The tuple is part of the trees of both records, and neither is known to be at fault."""

    def keeps(word: str, tup: Tuple, collector: Any) -> bool:
        journal(key).failed += ["poison"] * ("poison" in word)
        return "poison" in word

    stepped = SteppedState(of_several(key, "pair", Acts(keeps), WORDS[:6]), tmp_path)
    for _ in range(300):
        if stepped.driver.failure is not None:
            break
        stepped.step(seconds=10)
    assert stepped.driver.failure is not None
    assert "not processed in time" in stepped.driver.failure.message
    assert "which record is at fault" not in stepped.driver.failure.message
    assert tries(key) == 5
    assert committed(str(tmp_path), stepped.record, key, "letters") == {}


@pytest.mark.rule("C36")
def test_a_record_of_a_join_is_given_up_for_a_tuple_of_its_own_that_nobody_acks(key: str, tmp_path: Path) -> None:
    """Its joined tuple was acked: what is open is of this record alone."""

    def keeps(word: str, tup: Tuple, collector: Any) -> bool:
        journal(key).failed += ["poison"] * (word == "poison")
        return word == "poison"

    builder = TopologyBuilder(key)
    builder.set_spout("words", GivesUp(key, [WORDS[:6]]))
    builder.set_bolt("pairs", Pairs()).global_grouping("words")
    builder.set_bolt("aside", Acts(keeps), 1).global_grouping("words")
    builder.set_bolt("count", Count(key)).fields_grouping("pairs", Fields("word"))
    builder.set_bolt("letters", Count(key + "letters")).fields_grouping("words", Fields("word"), DEAD_LETTER_STREAM)
    stepped = SteppedState(builder.build(), tmp_path)
    for _ in range(200):
        stepped.step(seconds=10)
        letters = committed(str(tmp_path), stepped.record, key, "letters")
        if letters:
            break
    assert tries(key) == RETRIES + 1
    assert letters["poison"] == 1  # without it, another record waits for its other half


@pytest.mark.rule("C36")
@pytest.mark.parametrize("retries", [None, 100])
def test_a_spout_without_a_limit_or_an_error_that_is_not_the_record_s_ends_the_topology(
    key: str, retries: int | None
) -> None:
    error: Exception = ValueError("poison") if retries is None else RetryableError("the database does not answer")
    topology = gives_up(key, ActsBasic(poison(key, error)), GivesUp(key, [WORDS], retries=retries))
    conf = {"topology.state.checkpoint.interval.ms": 20}
    with submit(topology, conf, executor="local") as run, pytest.raises(CoreTopologyFailed):
        run.wait_until_idle(PATIENCE_S)
    assert tries(key) == 5


@pytest.mark.slow
@pytest.mark.rule("C36")
def test_retries_beyond_max_attempts_do_not_end_the_topology(key: str, tmp_path: Path) -> None:
    store, conf = MemoryStore(), {**lmdb(tmp_path), "topology.max.attempts": 1}
    topology = gives_up(key, ActsBasic(poison(key, ValueError("poison"))), GivesUp(key, [WORDS], retries=6))
    with submit(topology, conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
    assert tries(key) == 7
    assert checkpointed(conf, store, key) == GOOD
    assert checkpointed(conf, store, key, "letters") == {"poison": 1}
    record = read_record(store, key)
    assert record is not None and not any(record.suspects.values())


@pytest.mark.slow
@pytest.mark.rule("C36")
def test_a_dead_letter_that_cannot_be_processed_ends_the_topology(key: str) -> None:
    topology = gives_up(key, ActsBasic(poison(key, ValueError("poison"))), GivesUp(key, [WORDS]))
    journal(key + "letters").on["execute"] = raising_for_any
    conf = {"topology.state.checkpoint.interval.ms": 20}
    with submit(topology, conf, executor="local") as run, pytest.raises(CoreTopologyFailed, match="letters"):
        run.wait_until_idle(PATIENCE_S)


def raising_for_any(word: str) -> None:
    raise ValueError(f"no place for {word}")


class Unlike(GivesUp):
    """Its ids are not the same when a record is read again."""

    def next_tuple(self) -> None:
        for partition, offset in self.offsets.items():
            if offset < len(self.words[partition]):
                self.offsets[partition] += 1
                self.collector.emit([self.words[partition][offset]], message_id=uuid.uuid4().hex)


@pytest.mark.rule("C36")
def test_ids_that_change_end_the_topology_and_the_record_of_checkpoints_stays_small(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "SUSPECTS_MAX", 10)
    topology = gives_up(key, ActsBasic(poison(key, ValueError("poison"))), Unlike(key, [WORDS]))
    store, conf = MemoryStore(), {"topology.state.checkpoint.interval.ms": 20}
    with submit(topology, conf, store=store, executor="local") as run, pytest.raises(CoreTopologyFailed):
        run.wait_until_idle(PATIENCE_S)
    assert 10 < tries(key) < 20


def test_a_topology_in_which_every_record_fails_goes_on(key: str, tmp_path: Path) -> None:
    """Each is tried with few others; the record of checkpoints names few at a time."""
    words = [f"poison {number}" for number in range(700)]

    def refuses(word: str) -> None:
        raise FailedException(word)

    topology = gives_up(key, ActsBasic(refuses), GivesUp(key, [words, words], retries=1))
    stepped = SteppedState(topology, tmp_path)
    for _ in range(500):
        stepped.step(seconds=0.2)
        assert sum(map(len, stepped.record.suspects.values())) <= checkpoints.SUSPECTS_MAX
        if stepped.driver._idle is not None and stepped.driver._checkpoints.settled:  # type: ignore[union-attr]
            break
    assert stepped.driver.failure is None
    assert committed(str(tmp_path), stepped.record, key, "letters") == dict.fromkeys(words, 2)
    assert committed(str(tmp_path), stepped.record, key, "count") == {}
