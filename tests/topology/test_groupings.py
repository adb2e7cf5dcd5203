"""Groupings: every row goes to the right task, and none is lost."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework import Fields
from framework.topology.groupings import (
    AllGrouping,
    FieldsGrouping,
    GlobalGrouping,
    Grouping,
    PartialKeyGrouping,
    ShuffleGrouping,
)

BY_WORD = Fields("word")


def batch(words: list[str | None]) -> pa.RecordBatch:
    return pa.record_batch({"word": pa.array(words, pa.string()), "n": pa.array(range(len(words)), pa.int64())})


def pieces(grouping: Grouping, rows: pa.RecordBatch, tasks: int, turn: int = 0) -> dict[int, list[int]]:
    return {task: piece.column("n").to_pylist() for task, piece in grouping.split(rows, tasks, turn)}


words = st.lists(st.one_of(st.none(), st.text(max_size=3)), max_size=50)


@given(words, st.integers(1, 7), st.integers(0, 9))
@pytest.mark.parametrize(
    "grouping", [ShuffleGrouping(), FieldsGrouping(BY_WORD), GlobalGrouping(), PartialKeyGrouping(BY_WORD)]
)
def test_grouping_every_row_reaches_exactly_one_task_in_order(
    grouping: Grouping, words: list[str | None], tasks: int, turn: int
) -> None:
    found = pieces(grouping, batch(words), tasks, turn)
    assert sorted(n for rows in found.values() for n in rows) == list(range(len(words)))
    assert all(0 <= task < tasks for task in found)
    assert all(rows == sorted(rows) for task, rows in found.items()) or isinstance(grouping, ShuffleGrouping)


@given(words, st.integers(1, 7))
@pytest.mark.behaviour("1.10")
@pytest.mark.rule("C22")
def test_fields_grouping_equal_values_meet_in_one_task(words: list[str | None], tasks: int) -> None:
    homes: dict[str | None, set[int]] = {}
    for task, piece in FieldsGrouping(BY_WORD).split(batch(words), tasks, 0):
        for word in piece.column("word").to_pylist():
            homes.setdefault(word, set()).add(task)
    assert all(len(tasks_of) == 1 for tasks_of in homes.values())


@pytest.mark.behaviour("1.10")
def test_shuffle_grouping_balances_to_within_a_row() -> None:
    sizes = [len(rows) for rows in pieces(ShuffleGrouping(), batch(["x"] * 11), 4).values()]
    assert max(sizes) - min(sizes) <= 1


def test_shuffle_grouping_turns_decide_who_gets_the_extra_row() -> None:
    assert pieces(ShuffleGrouping(), batch(["x"]), 3, turn=0) == {0: [0]}
    assert pieces(ShuffleGrouping(), batch(["x"]), 3, turn=2) == {2: [0]}


@pytest.mark.behaviour("1.10")
def test_all_grouping_reaches_every_task_with_every_row() -> None:
    assert pieces(AllGrouping(), batch(["a", "b"]), 3) == {0: [0, 1], 1: [0, 1], 2: [0, 1]}


@pytest.mark.behaviour("1.10")
def test_global_grouping_goes_to_task_zero() -> None:
    assert pieces(GlobalGrouping(), batch(["a", "b"]), 3) == {0: [0, 1]}


@pytest.mark.behaviour("1.10")
def test_partial_key_grouping_uses_two_tasks_of_a_frequent_key() -> None:
    found = pieces(PartialKeyGrouping(BY_WORD), batch(["x"] * 100), 16)
    assert len(found) == 2
    assert [len(rows) for rows in found.values()] == [50, 50]
    assert int(np.array(list(found)).max()) < 16
