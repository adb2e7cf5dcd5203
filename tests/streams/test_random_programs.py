"""Pipelines that chance has drawn, of steps that keep state, with failures in between, against
plain Python."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from tests.kit.targets import Often
from tests.streams import __main__ as long_run
from tests.streams.programs import PROGRAMS, checked


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(**PROGRAMS)
def test_a_program_gives_what_plain_python_gives(**drawn: Any) -> None:
    checked(**drawn)


@pytest.mark.slow
@settings(max_examples=2_000, deadline=None)
@given(**PROGRAMS)
def test_thousands_of_programs_give_what_plain_python_gives(**drawn: Any) -> None:
    checked(**drawn)


@pytest.mark.parametrize("kind", sorted(long_run.KINDS))
def test_a_program_of_the_long_run_gives_what_plain_python_gives(kind: str, often: Often) -> None:
    assert long_run.drawn(kind, 1) == long_run.drawn(kind, 1)
    assert long_run.drawn(kind, 1) != long_run.drawn(kind, 2)
    assert [
        each for each in range(1, often(3, 6)) if long_run.error_of(kind, long_run.drawn(kind, each)) is not None
    ] == []


def test_a_wrong_program_of_the_long_run_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_with_two_odd_numbers(*, rows: list[Any], faults: list[int], **others: Any) -> None:
        assert sum(row["n"] % 2 for row in rows) < 2

    draw, _, records = long_run.KINDS["steps"]
    monkeypatch.setitem(long_run.KINDS, "steps", (draw, wrong_with_two_odd_numbers, records))
    program = next(
        each for each in (long_run.drawn("steps", seed) for seed in range(50)) if long_run.error_of("steps", each)
    )
    found = long_run.shortened("steps", program)
    assert [row["n"] % 2 for row in found["rows"]] == [1, 1]
    assert found["faults"] == [] and found["chains"] == program["chains"]
