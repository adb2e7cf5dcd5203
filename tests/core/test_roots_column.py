"""The column of roots says of rows what was said of them one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.acking.ack_reports import NO_TREE
from framework.core.roots_column import (
    RowRoots,
    at_most_one,
    edges_of,
    flat_roots,
    no_roots,
    roots_of,
    trees_among,
    untracked,
)

_ROOT = st.integers(1, 2**64 - 1)
_ONE_OR_NONE = st.lists(_ROOT, max_size=1)
_ROWS = st.lists(st.one_of(_ONE_OR_NONE, st.lists(_ROOT, max_size=3)), max_size=8)


def _column(parts: list[list[list[int]]]) -> tuple[RowRoots, list[list[int]]]:
    """Roots gathered part by part. Every second part is given as many rows at once, where it
    can be."""
    gathered = RowRoots()
    for number, part in enumerate(parts):
        if number % 2 and all(len(row) <= 1 for row in part):
            gathered.extend(np.array([row[0] if row else NO_TREE for row in part], np.uint64))
        else:
            for row in part:
                gathered.append(row)
    return gathered, [row for part in parts for row in part]


@pytest.mark.rule("C34")
@given(st.lists(st.one_of(_ROWS, st.lists(_ONE_OR_NONE, max_size=8)), max_size=4))
def test_it_says_which_trees_each_row_is_part_of(parts: list[list[list[int]]]) -> None:
    gathered, rows = _column(parts)
    column = gathered.column()
    assert [list(each) for each in roots_of(column)] == rows
    assert trees_among(flat_roots(column)).tolist() == [root for row in rows for root in row]
    assert untracked(column) == sum(not row for row in rows)
    assert at_most_one(column) == all(len(row) <= 1 for row in rows)
    ids = np.arange(100, 100 + len(rows), dtype=np.uint64)
    roots, edges = edges_of(column, ids)
    assert list(zip(roots.tolist(), edges.tolist(), strict=True)) == [
        (root, edge) for row, edge in zip(rows, ids.tolist(), strict=True) for root in row
    ]


@given(st.lists(_ROWS, min_size=1, max_size=3), st.integers(0, 5), st.integers(0, 5))
def test_a_part_of_it_says_the_same_of_its_rows(parts: list[list[list[int]]], start: int, count: int) -> None:
    gathered, rows = _column(parts)
    part = gathered.column().slice(start, count)
    of_part = rows[start : start + count]
    assert [list(each) for each in roots_of(part)] == of_part
    assert untracked(part) == sum(not row for row in of_part)
    assert trees_among(flat_roots(part)).tolist() == [root for row in of_part for root in row]


def test_rows_of_no_tree_have_no_roots_and_no_edges() -> None:
    column = no_roots(3)
    assert at_most_one(column)
    assert [list(each) for each in roots_of(column)] == [[], [], []]
    assert [each.tolist() for each in edges_of(column, np.arange(3, dtype=np.uint64))] == [[], []]
