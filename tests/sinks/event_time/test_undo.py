"""Undo, other numbers of tasks, and verify, on every part that goes by event time."""

from __future__ import annotations

from pathlib import Path

import pytest

from framework.inspect.verify import verify
from framework.transactions import MemoryStore
from framework.transactions.undo import undo
from tests.kit.timed_parts import PARTS, append, held, run, source, topology

pytestmark = pytest.mark.rule("C44")


@pytest.mark.quick_for("sessions")
@pytest.mark.parametrize("part", PARTS)
def test_a_transaction_is_taken_back_and_made_again(part: str, tmp_path: Path) -> None:
    store, spout = MemoryStore(), source()
    built = topology(tmp_path, spout, part)
    run(built, store)
    after = held(built)
    assert all(after.values()) and verify(built, store).right
    undo(built, store)
    assert held(built) != after and verify(built, store).right
    run(built, store)
    assert held(built) == after
    append(spout)
    run(built, store)
    assert verify(built, store).right


@pytest.mark.quick_for("valued", "timers")
@pytest.mark.parametrize("part", PARTS)
def test_verify_agrees_with_what_other_numbers_of_tasks_have_written(part: str, tmp_path: Path) -> None:
    store, spout = MemoryStore(), source()
    for tasks in (2, 3, 1):
        built = topology(tmp_path, spout, part, tasks=tasks)
        run(built, store)
        report = verify(built, store)
        assert report.right, report
        append(spout)
