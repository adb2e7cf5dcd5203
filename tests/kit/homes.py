"""The homes of a run, and waiting for what they do."""

from __future__ import annotations

import time
from collections.abc import Callable

from framework import CoreRun
from framework.acking.spark import SparkRounds


def homes_of(run: CoreRun) -> list[int]:
    executor = run._executor
    assert isinstance(executor, SparkRounds)
    return [each.pid for each in executor._addresses]


def until(condition: Callable[[], bool], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
