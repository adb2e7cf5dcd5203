"""The homes of a run."""

from __future__ import annotations

from framework import CoreRun
from framework.acking.spark import SparkRounds


def homes_of(run: CoreRun) -> list[int]:
    """Their pids."""
    executor = run._executor
    assert isinstance(executor, SparkRounds)
    return [each.pid for each in executor._addresses]
