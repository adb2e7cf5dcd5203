"""Rules that a test takes out of the code for a while, and the simulator that must notice it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Patch = Callable[[pytest.MonkeyPatch], None]


def check_noticed(mutation: Patch, run: Callable[[int], tuple[Any, Any]], schedules: int) -> None:
    """Fail unless one of these schedules is wrong, or refused, without the rule. ``run``: takes the
    number of a schedule, and returns what was wrong, and its world."""
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        for number in range(schedules):
            try:
                wrong, _ = run(number)
            except Exception:  # noqa: BLE001 - the code under test noticed it itself
                return
            if wrong is not None:
                return
    pytest.fail(f"{schedules} schedules were right without it")
