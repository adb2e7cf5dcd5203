"""What a term tells those who watch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from framework.errors import RetryableError, StaleWriterError
from framework.observe.journal import Journal
from framework.transactions.driver_context import DriverContext
from framework.transactions.driver_reporter import TermReport
from tests.kit.own_logs import own_logs


def report() -> TermReport:
    context: Any = SimpleNamespace(
        topology=SimpleNamespace(id="words"),
        journal=Journal(),
        traces=None,
        history=None,
        update=lambda **changes: None,
    )
    return TermReport(cast(DriverContext, context))


def test_fences_that_stay_open_for_one_cause_are_told_once() -> None:
    """While a sink is away, each attempt leaves one."""
    told = report()
    with own_logs() as lines:
        for attempt in range(4):
            told.fence_left(f"7:{attempt}", RetryableError("no sink"), stale=False)
        told.fence_left("7:4", RetryableError("no disk"), stale=False)
        told.fence_left("7:4", StaleWriterError("epoch 3", 3), stale=True)
        told.fence_closed()
        told.fence_left("7:5", RetryableError("no disk"), stale=False)
    seen = [(each["event"], each["reason"]) for each in lines if each["log_level"] == "warning"]
    assert seen == [("fence.open", "no sink"), ("fence.open", "no disk"), ("fence.open", "no disk")]
