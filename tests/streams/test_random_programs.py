"""Pipelines that chance has drawn, of steps that keep state, with failures in between, against
plain Python."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.streams.programs import CHAINS, ROWS, check

DRAWN: dict[str, Any] = {
    "rows": ROWS,
    "chains": CHAINS,
    "take": st.integers(1, 5),
    "faults": st.lists(st.integers(0, 3), max_size=4),
    "tasks": st.integers(1, 2),
}


def checked(**drawn: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check(Path(folder), **drawn)


@settings(max_examples=20, deadline=None)
@given(**DRAWN)
def test_a_program_gives_what_plain_python_gives(**drawn: Any) -> None:
    checked(**drawn)


@pytest.mark.slow
@settings(max_examples=5_000, deadline=None)
@given(**DRAWN)
def test_thousands_of_programs_give_what_plain_python_gives(**drawn: Any) -> None:
    checked(**drawn)
