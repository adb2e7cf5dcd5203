"""Reduced changes have the effect of all changes, one after the other, whatever a table has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinks.rows.reduction import DELETED, UNCHANGED, reduced
from sinks.rows.table_definition import ACTION, DELETED_AT, KEPT, NEVER, ROW_NEEDED, Changes
from sinks.rows.transactional_table import DELETE, REPLACE
from tests.kit.targets import examples

pytestmark = pytest.mark.rule("C41")
COLUMNS = ["name", "n", "lsn"]
KINDS = {"id": pa.int64(), "name": pa.string(), "n": pa.int64(), "lsn": pa.int64()}
ROWS = pa.schema([*KINDS.items(), (DELETED, pa.bool_()), (UNCHANGED, pa.list_(pa.string()))])
Change = Mapping[str, Any]


class Held(NamedTuple):
    """What a table has of a key. ``newest``: the highest sequence, also of a deletion."""

    row: Mapping[str, Any] | None
    newest: int


def after(held: Held, changes: Sequence[Change], *, ignore_nulls: bool) -> Held | None:
    """What it has after changes, one after the other; None if one is bad."""
    for each in changes:
        if each["lsn"] < held.newest:
            continue
        if each[DELETED]:
            held = Held(None, each["lsn"])
            continue
        if each[UNCHANGED] and held.row is None:
            return None
        old = held.row or {}
        keeps = {*each[UNCHANGED], *(name for name in COLUMNS if ignore_nulls and each[name] is None)}
        held = Held({name: old.get(name) if name in keeps else each[name] for name in COLUMNS}, each["lsn"])
    return held


def after_rounds(held: Held, rounds: Sequence[pa.Table], *, ignore_nulls: bool) -> Held | None:
    """What it has after rounds, as a table applies their rows."""
    for row in (row for each in rounds for row in each.to_pylist()):
        if row["lsn"] < held.newest:
            continue
        action = row[ACTION]
        if action == DELETE:
            held = Held(None, row["lsn"])
            continue
        if action == REPLACE and row[DELETED_AT] >= held.newest:
            held = Held(None, row["lsn"])
        if row.get(ROW_NEEDED) and (held.row is None or row[ROW_NEEDED] == NEVER):
            return None
        old = held.row or {}
        numbers = {name: number for number, name in enumerate(KINDS)}
        keeps = {name for name in COLUMNS if row.get(f"{KEPT}{numbers[name]}") or (ignore_nulls and row[name] is None)}
        held = Held({name: old.get(name) if name in keeps else row[name] for name in COLUMNS}, row["lsn"])
    return held


def change(
    lsn: int, name: str | None = None, n: int | None = None, *, dead: bool = False, left_out: Sequence[str] = ()
) -> Change:
    values = {"name": name, "n": n} | dict.fromkeys(left_out)
    return {"id": 1, **values, "lsn": lsn, DELETED: dead, UNCHANGED: [] if dead else list(left_out)}


CHANGES = st.builds(
    change,
    st.integers(1, 6),
    st.sampled_from([None, "a", "b"]),
    st.sampled_from([None, 1, 2]),
    dead=st.sampled_from([False, False, False, True]),
    left_out=st.sampled_from([[], [], [], ["name"], ["n"], ["name", "n"]]),
)
WHOLE = CHANGES.map(lambda each: {**each, UNCHANGED: []})


@pytest.mark.parametrize("ignore_nulls", [False, True])
@settings(max_examples=examples(300), deadline=None)
@given(changes=st.lists(CHANGES, max_size=12) | st.lists(WHOLE, max_size=12), name=st.sampled_from([None, "held"]))
def test_rounds_have_the_effect_of_all_changes(changes: list[Change], name: str | None, ignore_nulls: bool) -> None:
    rows = pa.Table.from_pylist(changes, ROWS)
    rounds = reduced(rows, Changes(("id",), "lsn", ignore_nulls=ignore_nulls))
    for newest in range(8):
        held_row = {"name": name, "n": None, "lsn": newest}
        for held in (Held(held_row, newest), Held(None, newest)):
            expected = after(held, changes, ignore_nulls=ignore_nulls)
            found = after_rounds(held, rounds, ignore_nulls=ignore_nulls)
            assert found == expected, held


@pytest.mark.parametrize("dead", [False, True])
def test_thousands_of_changes_of_a_key_are_few_rounds(dead: bool) -> None:
    changes = [change(lsn, *[(None, 1), ("a", None)][lsn % 2], dead=dead and lsn % 3 == 0) for lsn in range(3_000)]
    rows = pa.Table.from_pylist([*changes, change(9_000, None, 7), change(8_000, "late")], ROWS)
    rounds = reduced(rows.drop_columns([UNCHANGED]), Changes(("id",), "lsn", ignore_nulls=True))
    assert len(rounds) <= len(COLUMNS) + 1
    assert sum(each.num_rows for each in rounds) == len(rounds)


def test_thousands_of_changes_that_leave_out_values_are_few_rounds() -> None:
    changes = [change(lsn, "a", left_out=["n"]) for lsn in range(1, 3_000)]
    rows = pa.Table.from_pylist([change(0, "a", 1), *changes], ROWS)
    assert len(reduced(rows, Changes(("id",), "lsn"))) <= len(COLUMNS) + 1


@pytest.mark.parametrize(
    "kind", [pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.timestamp("s"), pa.date32()], ids=str
)
def test_keys_outside_of_the_years_of_python_are_told_apart(kind: pa.DataType) -> None:
    """PostgreSQL's infinities arrive as such moments."""
    width = kind.bit_width
    numbers = [2 ** (width - 1) - 1, 5, -(2 ** (width - 1))]
    ids = pa.array([*numbers, 5], pa.int32() if width == 32 else pa.int64()).view(kind)
    for count in (3, 4):
        rows = pa.table({"id": ids[:count], DELETED: [False] * count})
        (found,) = reduced(rows, Changes(("id",)))
        assert found.column("id").combine_chunks().equals(ids[:3])
