"""Rows in columns do what tuples one by one do, on random topologies: the same is executed,
emitted, acked and failed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from framework import BaseBasicBolt, BaseRichSpout, FailedException, Fields, TopologyBuilder, Tuple
from framework.acking.ack_reports import NO_TREE, Ledger
from framework.core import basic_collector, component_task
from framework.core.bolt_task import Inbox
from framework.core.component_task import EDGE, ROOTS
from framework.core.outcome import Outcome
from framework.core.round_protocol import Counts
from framework.execution import collector
from tests.kit.core_parts import Rich, Stepped, ack, seen
from tests.kit.values import KINDS, Breaks, Lies

ITEMS = 120
TRACKED = {item for item in range(ITEMS) if item % 5}  # the others have no message id
WORLDS = 12
MADE = list(KINDS.values())


class Source(BaseRichSpout):
    """Emits numbers, one by one or many at once; those that have ids and fail come again."""

    def __init__(self, key: str, *, at_once: bool) -> None:
        self.key, self.at_once = key, at_once

    def open(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:
        self.collector = collector
        self.waiting = list(range(ITEMS))[context.task_index :: context.task_count]

    def next_tuple(self) -> None:
        if self.waiting:
            item = self.waiting.pop(0)
            self.collector.emit([item], message_id=item if item in TRACKED else None)

    def next_tuples(self, most: int) -> None:
        if not self.at_once:
            self.next_tuple()
            return
        items, self.waiting = self.waiting[:most], self.waiting[most:]
        seen(self.key).executed.append(len(items))
        with_ids = [item for item in items if item in TRACKED]
        without = [item for item in items if item not in TRACKED]
        self.collector.emit_arrow(pa.record_batch([pa.array(with_ids, pa.int64())], ["n"]), message_ids=with_ids)
        self.collector.emit_arrow(pa.record_batch([pa.array(without, pa.int64())], ["n"]))

    def ack(self, message_id: int) -> None:
        seen(self.key).acked.append(message_id)

    def fail(self, message_id: int) -> None:
        seen(self.key).failed.append(message_id)
        self.waiting.append(message_id)

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(n=int))


class Fan(BaseBasicBolt):
    """What it does with a number follows from the number and from how often it has come. It emits
    with the collector, or with the method as it was when it began, or when it first executed.
    """

    def __init__(self, key: str, seed: int, clock: list[Any], *, trouble: bool) -> None:
        self.key, self.seed, self.clock, self.trouble = key, seed, clock, trouble

    def prepare(self, conf: Mapping[str, Any], context: Any, collector: Any, batch_id: Any) -> None:
        self.kept = [collector.emit]

    def execute(self, tup: Tuple, collector: Any) -> None:
        if len(self.kept) == 1:
            self.kept.append(collector.emit)
        number = tup["n"]
        seen(self.key).executed.append((tup.values, tup.source_component))
        times = sum(values == tup.values for values, _ in seen(self.key).executed)
        chance = random.Random(f"{self.seed} {number} {times}")
        first = self.trouble and times == 1
        for _ in range(chance.randrange(4)):
            values = chance.choice(MADE)(number * 10 + chance.randrange(5), f"text {number}")
            chance.choice([collector.emit, *self.kept])(values)
            if isinstance(values, list):
                values.clear()  # the collector has taken them
        if chance.random() < 0.3:
            collector.emit_arrow(pa.record_batch([pa.array([number] * 2), pa.array(["a", "b"])], ["n", "text"]))
        if chance.random() < 0.3:
            wrong = first and chance.random() < 0.1
            collector.emit(["no number" if wrong else number], "aside")
        if first and chance.random() < 0.1:
            self.clock[0].now += 0.4  # of the second that a round has
        if first and chance.random() < 0.08:
            raise FailedException("the first time")
        if first and chance.random() < 0.05:
            collector.emit(chance.choice([[number], Breaks([number, "b"]), Lies([number, "b", "c"])]))
        if first and chance.random() < 0.05:
            raise ValueError("the instance ends")

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(n=int, text=str))
        declarer.declare(Fields(n=int), "aside")


class End(BaseBasicBolt):
    """Fails some rows the first time: a row that is anchored to another tuple fails another one."""

    def __init__(self, key: str, seed: int, *, trouble: bool) -> None:
        self.key, self.seed, self.trouble = key, seed, trouble

    def execute(self, tup: Tuple, collector: Any) -> None:
        first = self.trouble and tup.values not in seen(self.key).executed
        seen(self.key).executed.append(tup.values)
        if first and random.Random(f"{self.seed} {tup.values}").random() < 0.05:
            raise FailedException("the first time")


def in_pairs(bolt: Any, tup: Tuple, collector: Any) -> None:
    """Emits one row for two tuples: it is part of both trees, or now and then of none."""
    bolt.kept.append(tup)
    if len(bolt.kept) == 2 or tup["n"] % 3 == 0:
        total = sum(each["n"] for each in bolt.kept)
        collector.emit([total], anchors=bolt.kept if total % 4 else None)
        for each in bolt.kept:
            collector.ack(each)
        bolt.kept = []


def run(key: str, seed: int, *, at_once: bool, trouble: bool = True) -> tuple[list[Any], dict[str, Counts]]:
    """Run one topology to its end. Returns what was seen after each round, and the counts."""
    chance = random.Random(seed)
    clock: list[Any] = []
    builder = TopologyBuilder("rows")
    builder.set_spout("source", Source(f"{key} source", at_once=at_once), 2)
    builder.set_bolt("pairs", Rich(f"{key} pairs", in_pairs, Fields(n=int))).global_grouping("source")
    fan = Fan(f"{key} fan", seed, clock, trouble=trouble)
    builder.set_bolt("fan", fan, chance.choice([1, 2])).shuffle_grouping("source").fields_grouping("pairs", Fields("n"))
    builder.set_bolt("end", End(f"{key} end", seed, trouble=trouble), 2).fields_grouping("fan", Fields("text"))
    builder.set_bolt("aside", Rich(f"{key} aside", ack), 1).all_grouping("fan", "aside")
    stepped = Stepped(builder.build(), ackers=chance.choice([1, 3]), pending=chance.choice([7, 40, 1_000]))
    clock.append(stepped.clock)
    story: list[Any] = []
    for _ in range(400):
        stepped.step(1, seconds=chance.choice([0.0, 1.0]))
        parts = [seen(f"{key} {name}") for name in ("source", "pairs", "fan", "end", "aside")]
        story.append([(len(each.executed), Counter(each.acked), Counter(each.failed)) for each in parts])
        if set(parts[0].acked) == TRACKED and not stepped.driver.status().pending:
            break
    assert stepped.driver.failure is None
    assert set(parts[0].acked) == TRACKED
    story.append([each.executed for each in parts[1:]])
    counts = stepped.driver.status().components
    return story, {name: replace(each, latency_s=0.0) for name, each in counts.items()}


@pytest.fixture
def few_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows leave after a few, as otherwise after thousands."""
    monkeypatch.setattr(component_task, "BUFFERED_ROWS_MAX", 5)
    monkeypatch.setattr(basic_collector, "BUFFERED_ROWS_MAX", 5)
    monkeypatch.setattr(collector, "BATCH_BYTES_MAX", 24)  # three numbers


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """What is said of trees, to the ackers and to the driver."""
    found: set[int] = set()
    parts, blame = Ledger.parts, Outcome.blame

    def noted(self: Ledger, *arguments: Any) -> Any:
        made = parts(self, *arguments)
        for part in made:
            found.update(*(each.tolist() for each in (part.roots, part.born, part.failed, part.reset)))
        return made

    def noted_blame(self: Outcome, roots: Any) -> None:
        found.update(roots)
        blame(self, roots)

    monkeypatch.setattr(Ledger, "parts", noted)
    monkeypatch.setattr(Outcome, "blame", noted_blame)
    return found


@pytest.mark.slow
@pytest.mark.rule("C34")
@pytest.mark.behaviour("4.3", "4.6")
@pytest.mark.usefixtures("few_rows_at_once")
@pytest.mark.parametrize("at_once", [False, True])
def test_basic_bolts_do_the_same_with_rows_as_with_single_tuples(
    monkeypatch: pytest.MonkeyPatch, seed: int, at_once: bool, told: set[int]
) -> None:
    failed = died = 0
    taken: Counter[bool] = Counter()
    rows = Inbox.rows

    def counted(self: Inbox) -> Any:
        found = rows(self)
        taken[found is not None] += 1
        return found

    for number in range(seed, seed + WORLDS):
        with monkeypatch.context() as patch:
            patch.setattr(Inbox, "rows", counted)
            in_columns = run(f"columns {number} {at_once}", number, at_once=at_once)
        with monkeypatch.context() as patch:
            patch.setattr(Inbox, "rows", lambda self: None)
            one_by_one = run(f"tuples {number} {at_once}", number, at_once=at_once)
        assert in_columns == one_by_one
        failed += in_columns[1]["fan"].failed
        died += in_columns[1]["fan"].died
    assert told
    assert NO_TREE not in told
    assert taken[True] > WORLDS  # and batches of pairs go the other way
    assert taken[False] > WORLDS
    assert failed > WORLDS
    assert died > WORLDS // 2


@pytest.mark.parametrize("taken", [0, 2])
def test_rows_that_wait_keep_their_trees_and_those_of_no_tree_keep_none(taken: int) -> None:
    inbox, fields = Inbox(lambda edge, batch: None), Fields("n")
    edge: Any = SimpleNamespace(source="source", stream="default")
    for roots in ([5, NO_TREE, NO_TREE, 6], [NO_TREE, 7]):
        ids = pa.array(range(1, len(roots) + 1), pa.uint64())
        inbox.put(edge, fields, pa.record_batch([ids, ids, pa.array(roots, pa.uint64())], ["n", EDGE, ROOTS]))
    for _ in range(taken):
        rows = inbox.rows()
        assert rows is not None
        next(rows.untaken)
        rows.take()
    assert (len(inbox), list(inbox.roots())) == (6 - taken, [5, 6, 7] if not taken else [6, 7])


@pytest.mark.slow
@pytest.mark.behaviour("4.3")
@pytest.mark.usefixtures("few_rows_at_once")
def test_a_spout_that_gives_many_at_once_is_told_what_one_is_told_that_gives_one_by_one(seed: int) -> None:
    """Each number is acked once. (One that the bolt of pairs holds until its time is over fails
    first.)
    """
    for number in range(seed, seed + 5):
        found = []
        for at_once in (False, True):
            key = f"spouts {number} {at_once}"
            story, counts = run(key, number, at_once=at_once, trouble=False)
            assert Counter(seen(f"{key} source").acked) == Counter(TRACKED)
            from_source = {values for values, source in story[-1][1] if source == "source"}
            found.append((from_source, counts["source"].completed))
            assert max(seen(f"{key} source").executed, default=0) > 1 or not at_once
        assert found[0] == found[1]
