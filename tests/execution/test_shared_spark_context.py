"""Runs of one process that use the same Spark context."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark import SparkContext

from framework.execution.spark import spark_context
from framework.execution.spark.spark_context import Spark


class Context:
    stopped = 0

    def stop(self) -> None:
        self.stopped += 1


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Context:
    """The context that every run starts or finds."""
    made = Context()

    def start(name: str, settings: Any) -> Any:
        monkeypatch.setattr(SparkContext, "_active_spark_context", made)
        return made

    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    monkeypatch.setattr(spark_context, "start_context", start)
    return made


def test_the_last_run_that_uses_a_context_stops_it(context: Context) -> None:
    runs = [Spark(f"run {number}", {}) for number in range(3)]
    for each in runs:
        each.start()
    for each in (runs[0], runs[2], runs[0]):
        each.stop()
        assert context.stopped == 0
    runs[1].stop()
    runs[1].stop()
    assert context.stopped == 1


def test_a_context_that_was_active_before_is_left_running(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparkContext, "_active_spark_context", context)
    run = Spark("run", {})
    run.start()
    run.stop()
    assert context.stopped == 0
