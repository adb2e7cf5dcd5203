"""Pipelines that chance has drawn, of steps that keep state, with failures in between, against
plain Python."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from tests.streams.programs import PROGRAMS, checked


@settings(max_examples=20, deadline=None)
@given(**PROGRAMS)
def test_a_program_gives_what_plain_python_gives(**drawn: Any) -> None:
    checked(**drawn)


@pytest.mark.slow
@settings(max_examples=5_000, deadline=None)
@given(**PROGRAMS)
def test_thousands_of_programs_give_what_plain_python_gives(**drawn: Any) -> None:
    checked(**drawn)
