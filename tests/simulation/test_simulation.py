"""The simulator holds every invariant on the code as it is, and loses one as soon as a rule is taken out.

The long run is ``make simulate SCHEDULES=1000000``.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections import Counter
from collections.abc import Iterator

import pytest
import structlog

from tests.simulation.mutations import MUTATIONS, Mutation
from tests.simulation.schedule import Coverage, run_schedule

SCHEDULES = 4_000
#: Every mutation shows within a few hundred schedules; ten times as many leave room for changed seeds.
SCHEDULES_PER_MUTATION = 3_000


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """What drivers would warn of is what schedules are made of."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


def test_every_schedule_holds_every_invariant_and_reaches_every_step() -> None:
    coverage: Coverage = Counter()
    for seed in range(SCHEDULES):
        outcome = run_schedule(seed, coverage)
        assert outcome.violation is None, f"python -m tests.simulation --seed {seed}: {outcome.violation}"
    steps = {step for _, step in coverage}
    assert {
        "start: take_over",
        "commit: raise",
        "commit: sweep",
        "commit: purge",
        "commit: finish",
        "roll back: undo",
        "roll back: mark_rolled_back",
        "close fence: close_fence",
        "task: begin_commit",
        "task: commit",
        "write rows",
        "zookeeper multi",
        "read",
    } <= steps
    assert {fault for fault, step in coverage if step == "zookeeper multi"} == {
        "reply lost",
        "request lost",
        "crash before",
        "crash after",
    }


def test_a_seed_gives_the_same_schedule_again() -> None:
    for seed in (3, 77, 1848):
        assert run_schedule(seed, keep_trace=True) == run_schedule(seed, keep_trace=True)


def marks(mutation: Mutation) -> list[pytest.MarkDecorator]:
    """A mutation of one of the protocol's rules bears its name in front: ``C5: no sweep``."""
    rule = re.match(r"(C\d+): ", mutation.name)
    return [pytest.mark.rule(rule[1])] if rule else []


@pytest.mark.parametrize("mutation", [pytest.param(each, id=each.name, marks=marks(each)) for each in MUTATIONS])
def test_the_simulator_notices_each_rule_that_is_taken_out(mutation: Mutation) -> None:
    with mutation.applied():
        caught = next(
            (seed for seed in range(SCHEDULES_PER_MUTATION) if run_schedule(seed).violation is not None), None
        )
    assert caught is not None, f"{SCHEDULES_PER_MUTATION} schedules do not notice: {mutation.name}"
    print(f"caught after {caught + 1} schedules")


def test_mutations_leave_no_trace() -> None:
    for mutation, seed in itertools.product(MUTATIONS[:3], (1, 2)):
        with mutation.applied():
            run_schedule(seed)
        assert run_schedule(seed).violation is None
