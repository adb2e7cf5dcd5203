"""The watermark of a task over inputs and source partitions."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from framework.operators.watermarks import NEVER, Reading, Watermark

SPOUT = ("spout", "default")
OTHER = ("other", "default")


def following(*, in_order: bool = True, idle: int | None = None, lag: int = 0) -> Watermark:
    return Watermark({SPOUT: NEVER}, lag=lag, idle=idle, now=0, follows={SPOUT: in_order})


def hear(mark: Watermark, unread: Mapping[int, int] | None, *, round_: int = 2, upto: int = 1, now: int = 0) -> None:
    mark.hear(Reading(round_, upto, {SPOUT: unread}), now)


def test_without_anything_known_the_watermark_is_that_of_the_input_furthest_behind() -> None:
    mark = Watermark({SPOUT: NEVER, OTHER: NEVER}, lag=5, idle=None, now=0)
    assert mark.saw(SPOUT, None, 50, 0)
    assert mark.reached(0) == NEVER
    assert mark.saw(OTHER, 3, 40, 0)
    assert mark.reached(0) == 35
    assert not mark.saw(OTHER, 3, 39, 0)


def test_nothing_is_reached_until_it_is_known_which_partitions_there_are() -> None:
    mark = following()
    mark.saw(SPOUT, 1, 50, 0)
    assert mark.reached(0) == NEVER
    hear(mark, {})
    assert mark.reached(0) == 50
    hear(mark, None)  # it is unknown again
    assert mark.reached(0) == NEVER


def test_a_partition_of_which_more_is_to_be_read_holds_it_up_where_it_stands() -> None:
    mark = following()
    mark.saw(SPOUT, 1, 50, 0)
    hear(mark, {1: 50, 2: 20, 3: NEVER})
    assert mark.reached(0) == NEVER  # nothing of 3 has come anywhere
    hear(mark, {1: 50, 2: 20, 3: 30})
    assert mark.reached(0) == 20
    assert mark.saw(SPOUT, 2, 25, 0)  # here, before another round tells of it
    assert mark.reached(0) == 25
    hear(mark, {1: 50})
    assert mark.reached(0) == 50
    hear(mark, {2: 25})  # more has come
    assert mark.reached(0) == 25


def test_where_rows_overtake_each_other_a_row_counts_when_its_round_is_done() -> None:
    mark = following(in_order=False)
    hear(mark, {}, round_=4, upto=3)
    assert not mark.saw(SPOUT, 1, 50, 0)
    assert (mark.reached(0), mark.newest()) == (NEVER, {SPOUT: 50})
    hear(mark, {}, round_=5, upto=3)
    mark.saw(SPOUT, 1, 60, 0)
    hear(mark, {}, round_=6, upto=4)
    assert mark.reached(0) == 50
    hear(mark, {1: 55}, round_=7, upto=5)
    mark.saw(SPOUT, 1, 70, 0)
    assert mark.reached(0) == 55
    hear(mark, {}, round_=8, upto=7)
    assert mark.reached(0) == 70


def test_a_partition_of_which_nothing_comes_is_idle_after_a_while() -> None:
    mark = following(idle=10)
    hear(mark, {1: NEVER, 2: NEVER})
    mark.saw(SPOUT, 1, 50, 4)
    assert mark.reached(4) == NEVER
    assert mark.due_in(50, 4) == 6
    assert mark.reached(10) == 50  # 2 is idle
    hear(mark, {1: 50, 2: 30}, now=12)  # something of it has come to another task
    assert mark.reached(12) == 30
    hear(mark, {1: 50, 2: 30}, now=20)
    assert mark.reached(22) == 68  # all are idle: time goes on
    assert mark.due_in(70, 22) == 2


def test_sources_of_which_nothing_is_known_are_idle_after_a_while() -> None:
    mark = following(idle=10)
    mark.saw(SPOUT, 1, 50, 5)
    assert mark.reached(9) == NEVER
    assert mark.due_in(50, 9) == 1
    assert mark.reached(10) == 50


def test_what_was_seen_is_told_once() -> None:
    mark = following()
    mark.saw(SPOUT, 1, 50, 0)
    mark.saw(SPOUT, 1, 40, 0)
    mark.saw(SPOUT, None, 60, 0)
    assert mark.take_seen() == {SPOUT: {1: 50, None: 60}}
    assert mark.take_seen() == {}


def read(partitions: Sequence[Sequence[int]], chance: random.Random, *, holds: bool = True) -> list[int]:
    """Read partitions, each in its order, at any speed. Returns what was late."""
    mark = following()
    newest = dict.fromkeys(range(len(partitions)), NEVER)
    left = [list(each) for each in partitions]
    late, reached = [], NEVER
    for round_ in range(2, 10_000):
        hear(mark, {each: newest[each] for each, its in enumerate(left) if its and holds}, round_=round_)
        for _ in range(chance.randrange(5)):
            ready = [each for each, its in enumerate(left) if its]
            if not ready:
                return late
            origin = min(chance.choices(ready, k=2))  # some are read faster
            at = left[origin].pop(0)
            if at < reached:
                late.append(at)
            mark.saw(SPOUT, origin, at, 0)
            newest[origin] = max(newest[origin], at)
            reached = max(reached, mark.reached(0))
    raise AssertionError("it has not ended")


@pytest.mark.parametrize("seed", range(50))
def test_nothing_is_late_whatever_the_speeds(seed: int) -> None:
    chance = random.Random(seed)
    partitions = [sorted(chance.choices(range(1_000), k=chance.randrange(60))) for _ in range(chance.randrange(1, 6))]
    assert read(partitions, chance) == []


def test_partitions_that_hold_nothing_up_are_caught() -> None:
    chance = random.Random(3)
    partitions = [sorted(chance.choices(range(1_000), k=50)) for _ in range(4)]
    assert read(partitions, chance, holds=False)
