"""Each bad record has one effect or one letter, whatever happens to drivers and commands (C48)."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator

import pytest
import structlog

from framework.topology import dead_letter_replay
from tests.kit.searching import first_seed
from tests.kit.targets import Often
from tests.simulation.letter_mutations import LETTER_MUTATIONS
from tests.simulation.letters import BATCH_LETTERS_MAX, run_letters_schedule
from tests.simulation.mutations import Mutation
from tests.simulation.schedule import Coverage

pytestmark = pytest.mark.rule("C48")

#: The rarest end of a letter comes once in ten schedules.
SCHEDULES_MAX = 2_000
#: The mutation that shows least shows once in a hundred schedules.
SCHEDULES_PER_MUTATION = 3_000


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """Silence the drivers: schedules consist of what they warn of."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


def test_each_record_is_in_the_sinks_or_has_one_letter_or_was_dropped(seed: int, often: Often) -> None:
    coverage: Coverage = Counter()
    ends = {("replayed", "letter"), ("came back", "letter"), ("dropped", "letter")}
    schedules = often(8, 600)
    for number in range(SCHEDULES_MAX):
        if number >= schedules and all(coverage[each] for each in ends):
            break
        outcome = run_letters_schedule(seed + number, coverage)
        again = f"python -m tests.simulation --only letters --seed {seed + number}"
        assert outcome.violation is None, f"{again}: {outcome.violation}"
    assert all(coverage[each] for each in ends)
    assert BATCH_LETTERS_MAX < dead_letter_replay.BATCH_LETTERS_MAX  # it was put back


def test_a_seed_gives_the_same_schedule_again(seed: int) -> None:
    for each in range(seed, seed + 3):
        assert run_letters_schedule(each, keep_trace=True) == run_letters_schedule(each, keep_trace=True)


def rule_of(mutation: Mutation) -> list[pytest.MarkDecorator]:
    rule = re.match(r"(C\d+): ", mutation.name)
    return [pytest.mark.rule(rule[1])] if rule else []


@pytest.mark.parametrize(
    "mutation", [pytest.param(each, id=each.name, marks=rule_of(each)) for each in LETTER_MUTATIONS]
)
def test_the_simulator_notices_each_rule_of_letters_that_is_taken_out(mutation: Mutation, seed: int) -> None:
    with mutation.applied():
        first_seed(mutation.seeds(seed, SCHEDULES_PER_MUTATION), mutation.is_noticed)
