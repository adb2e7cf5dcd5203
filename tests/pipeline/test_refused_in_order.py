"""Values that a store refuses because of the records before them, in the commit: the next attempt
tries its writes in the order of the records, and finds all of them (C51, ADR 135)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from framework.errors import BadRecordError
from framework.operators.event_window_assigner import hopping, tumbling
from sinks import (
    CountWindowCommitter,
    ExpiringCommitter,
    OpaqueMapState,
    Reduce,
    SessionCommitter,
    SqliteBackend,
    StateCommitter,
    WindowedCommitter,
)
from tests.kit.paying import KEYED, MOST, TIMED, add_sums, paying, payments, state
from tests.kit.refusing import attempts, ran, refused

pytestmark = pytest.mark.rule("C51")


def capped(a: int, b: int) -> int:
    if a + b > 1_000:
        raise BadRecordError(f"{a} and {b} are too much")
    return a + b


#: The committer, and the most that a value may be.
COMMITTERS: dict[str, tuple[Callable[[], Any], int]] = {
    "windows": (lambda: WindowedCommitter(state(), tumbling(1_000), **TIMED), MOST),
    "kept-for-late": (lambda: WindowedCommitter(state(), tumbling(1_000), allowed_lateness=50, **TIMED), MOST),
    "sessions": (lambda: SessionCommitter(state(), 50, **TIMED), MOST),
    "expiring": (lambda: ExpiringCommitter(state(), ttl=50, **TIMED), MOST),
    "counted": (lambda: CountWindowCommitter(state(), 1_000, **KEYED), MOST),
    "reduced": (lambda: StateCommitter(state(), ["user"], {"paid": Reduce("paid", capped)}), 1_000),
}


@pytest.mark.parametrize("tasks", [1, 2])
@pytest.mark.parametrize("name", COMMITTERS)
def test_records_by_which_a_value_leaves_its_type_are_found_before_the_next_commit(name: str, tasks: int) -> None:
    make, most = COMMITTERS[name]
    rows: list[list[Any]] = [["abc"[at % 3], at, 0] for at in range(300)]
    rows[0] = ["a", 0, most - 200]
    for number, at in enumerate(range(105, 300, 10)):
        rows[at] = ["a", at, (150, 60, 30)[number % 3]]
    total, wrong = 0, []
    for user, at, paid in rows:
        if user == "a" and total + paid > most:
            wrong.append(at)
        elif user == "a":
            total += paid
    built = paying(rows, 100, make(), tasks)
    store = ran(built)
    assert sorted(offset for _, offset in refused(store, built.id)) == wrong
    assert len(wrong) > 10
    assert attempts(store, built) == [1, 4, 4]


def test_windows_are_tried_by_every_executor(tmp_path: Path, runner: tuple[str, dict[str, Any]]) -> None:
    """With two tasks for the records and two for the windows."""
    executor, config = runner
    rows = [["ab"[at % 2], at, 0] for at in range(200)]
    rows[0][2] = rows[1][2] = MOST - 200
    wrong = set()
    for at in range(100, 200, 9):
        rows[at][2] = 150
        if at > 110:
            wrong.add(at)
    halves = {0: [row for row in rows if row[0] == "a"], 1: [row for row in rows if row[0] == "b"]}
    sums, clock = (OpaqueMapState(SqliteBackend(tmp_path / "x.db", name)) for name in ("sums", "clock"))
    windows = WindowedCommitter(sums, tumbling(1_000), **TIMED)
    built = add_sums(payments(halves, 50, readers=2), windows, 2, clock=clock).build()
    store = ran(built, executor, config)
    found = {halves[int(partition)][offset][1] for partition, offset in refused(store, built.id)}
    assert found == wrong
    assert attempts(store, built) == [1, 4]


def test_windows_that_overlap_are_tried_too() -> None:
    """A record is refused if one of its windows does not take it."""
    paid = {20: MOST - 10, 120: 11, 150: 5, 199: MOST - 20}
    rows = [["a", at, paid.get(at, 0)] for at in range(200)]
    built = paying(rows, 100, WindowedCommitter(state(), hopping(200, 100), **TIMED))
    assert {offset for _, offset in refused(ran(built), built.id)} == {120, 199}
