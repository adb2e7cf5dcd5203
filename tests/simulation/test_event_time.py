"""What transactions of event time send, whatever happens to their attempts (C43, C44)."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.event_time import run_event_time
from tests.simulation.event_time_mutations import PATCHES
from tests.simulation.patches import Patch, check_noticed

pytestmark = pytest.mark.rule("C44")

SCHEDULES = 60
SCHEDULES_PER_MUTATION = 1_000


@pytest.mark.slow
def test_every_transaction_sends_what_its_records_say(seed: int) -> None:
    struck: Counter[str] = Counter()
    for number in range(seed, seed + SCHEDULES):
        wrong, world = run_event_time(number)
        assert wrong is None, f"run_event_time({number}): {wrong}"
        struck += world.struck
    assert {
        "attempt died",
        "died between pages",
        "another batch",
        "other tasks",
        "late record",
        "silent partition",
        "partition without event time",
    } <= set(struck)


@pytest.mark.parametrize("mutation", PATCHES, ids=lambda each: each.__name__)
def test_the_simulator_notices_each_rule_that_is_taken_out(mutation: Patch, seed: int) -> None:
    check_noticed(mutation, run_event_time, range(seed, seed + SCHEDULES_PER_MUTATION))
