"""Rules that a test takes out of the code for a while, and the simulator that must notice it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.kit.searching import first_seed

Patch = Callable[[pytest.MonkeyPatch], None]


def check_noticed(mutation: Patch, run: Callable[[int], tuple[Any, Any]], seeds: Iterable[int]) -> None:
    """Fail unless the schedule of one of these seeds is wrong, or refused, without the rule.
    ``run``: takes a seed, and returns what was wrong, and its world."""

    def is_noticed(seed: int) -> bool:
        try:
            return run(seed)[0] is not None
        except Exception:  # noqa: BLE001 - the code under test noticed it itself
            return True

    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        first_seed(seeds, is_noticed)
