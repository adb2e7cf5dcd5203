"""A wait is logged when it begins and when it ends."""

from __future__ import annotations

from framework.observe.wait_log import Waits
from tests.kit.own_logs import own_logs


def test_a_cause_that_repeats_is_warned_of_once_and_its_end_once() -> None:
    with own_logs() as logs:
        waits = Waits(topology="words")
        for _ in range(50):
            waits.again("batch.failed", "the sink is away")
        waits.again("batch.failed", "the disk is full")
        for _ in range(2):
            waits.again("batch.failed", "the sink is away")
        waits.again("batch.failed", "the sink is away")
        waits.over()
        waits.over()
    warnings = [(each["event"], each["reason"]) for each in logs if each["log_level"] == "warning"]
    assert warnings == [
        ("batch.failed", "the sink is away"),
        ("batch.failed", "the disk is full"),
        ("batch.failed", "the sink is away"),
        ("wait.over", "the sink is away"),
    ]
    assert all(each["topology"] == "words" for each in logs)


def test_what_failed_once_and_works_again_is_no_wait() -> None:
    with own_logs() as logs:
        waits = Waits()
        waits.again("batch.failed", "a lost reply")
        waits.over()
    assert [each["event"] for each in logs] == ["batch.failed"]
