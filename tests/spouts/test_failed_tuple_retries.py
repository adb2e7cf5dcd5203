"""Retries and acked offsets; they are pure, so examples and properties test them."""

from __future__ import annotations

import sys
from random import Random
from types import FrameType
from weakref import ref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.errors import ConfigError
from spouts import RetryPolicy
from spouts.failed_tuple_retries import Retries
from spouts.kafka.acked_offsets import AckedOffsets


@pytest.mark.behaviour("4.9")
def test_the_first_retry_comes_at_once_and_the_others_after_twice_as_long_each() -> None:
    retries: Retries[str] = Retries(RetryPolicy())
    now, waited = 100.0, []
    for _ in range(15):
        assert retries.failed("a", now)
        start = now
        while retries.due(now) is None:
            now += 0.001
        waited.append(round(now - start, 3))
    assert waited[:6] == [0.0, 0.002, 0.004, 0.008, 0.016, 0.032]
    assert waited[-1] == 10.0
    retries.done("a")
    assert retries.failed("a", now)
    assert retries.due(now) == "a"  # it has succeeded meanwhile, so its retries begin anew


@pytest.mark.behaviour("4.9")
def test_after_the_last_retry_nothing_is_kept() -> None:
    retries: Retries[str] = Retries(RetryPolicy(retries_max=2))
    assert [retries.failed("a", 0.0) for _ in range(3)] == [True, True, False]
    assert retries.due(1e9) is None
    assert not Retries(RetryPolicy(retries_max=0)).failed("a", 0.0)
    assert Retries(RetryPolicy(retries_max=0)).failed("a", 0.0, for_ever=True)


def test_retries_are_due_in_the_order_of_their_failures_and_not_once_done() -> None:
    retries: Retries[str] = Retries(RetryPolicy())
    for key in ("a", "b", "c"):
        retries.failed(key, 0.0)
    retries.done("b")
    assert [retries.due(0.0), retries.due(0.0), retries.due(0.0)] == ["a", "c", None]


@pytest.mark.parametrize(
    "values", [{"retries_max": -1}, {"delay_s": 0.0}, {"delay_s": 2.0, "delay_max_s": 1.0}, {"retries_max": True}]
)
def test_impossible_retry_policies_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="not "):
        RetryPolicy(**values)  # type: ignore[arg-type]


@pytest.mark.behaviour("4.9")
@given(st.lists(st.integers(1, 3), max_size=30), st.randoms(use_true_random=False))
def test_the_committable_offset_never_passes_one_that_is_not_acked(gaps: list[int], random: object) -> None:
    offsets: AckedOffsets[None] = AckedOffsets(100)
    there, position = list[int](), 100
    for gap in gaps:
        offset = position + gap - 1
        offsets.emitted([offset], None)
        there.append(offset)
        position = offset + 1
    waiting = list(there)
    random.shuffle(waiting)  # type: ignore[attr-defined]
    while waiting:
        assert offsets.committable == min(waiting)
        assert offsets.open == len(waiting)
        offsets.acked(waiting.pop())
    assert offsets.committable == position
    assert offsets.span == 0


def test_a_slice_whose_offsets_are_done_keeps_no_records_behind_an_open_one() -> None:
    class Records:
        pass

    offsets: AckedOffsets[Records] = AckedOffsets(0)
    offsets.emitted([0], Records())
    later = offsets.emitted([1, 2], records := Records())
    kept = ref(records)
    del records
    offsets.settle(later, 0, 1)
    assert kept() is not None and offsets.find(2) is not None
    for _ in range(2):
        offsets.settle(later, 0, 2)
    assert kept() is None and offsets.find(2) is None
    assert offsets.committable == 0


@pytest.mark.behaviour("4.9")
def test_what_a_commit_costs_does_not_grow_with_what_is_pending() -> None:
    """As many calls of functions for each of many pending offsets as for each of few, but for a
    search by halves.
    """
    offsets: AckedOffsets[None] = AckedOffsets(0)
    count, calls = 1_000, 0
    for offset in range(count):
        offsets.emitted([offset], None)

    def counting(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(counting)
    try:
        for offset in reversed(range(count)):
            assert offsets.committable == 0
            offsets.acked(offset)
    finally:
        sys.setprofile(None)
    assert offsets.committable == count
    assert calls < 100 * count


@pytest.mark.behaviour("4.9")
@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=8), max_size=12), st.randoms(use_true_random=False))
def test_offsets_that_are_emitted_and_settled_at_once_count_as_single_ones(
    slices: list[list[int]], random: Random
) -> None:
    at_once: AckedOffsets[str] = AckedOffsets(100)
    singly: AckedOffsets[str] = AckedOffsets(100)
    emitted, position = [], 100
    for gaps in slices:
        offsets = []
        for gap in gaps:
            offsets.append(position + gap - 1)
            position = offsets[-1] + 1
        emitted.append((at_once.emitted(offsets, "kept"), offsets))
        for offset in offsets:
            singly.emitted([offset], "kept")
        for made, before in emitted:
            start, stop = sorted(random.randrange(len(before) + 1) for _ in range(2))
            at_once.settle(made, start, stop)
            for offset in before[start:stop]:
                singly.acked(offset)
            for offset in range(before[0] - 1, before[-1] + 2):
                found = at_once.find(offset)
                assert (found is None) == (singly.find(offset) is None)
                assert found is None or found.slice.offsets[found.at] == offset
        assert (at_once.committable, at_once.open, at_once.span) == (singly.committable, singly.open, singly.span)
