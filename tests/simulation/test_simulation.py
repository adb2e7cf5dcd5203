"""The simulator holds every invariant on the code as it is, and loses one as soon as a rule is
taken out.

The long run is ``make simulate SCHEDULES=1000000``.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import re
from collections import Counter
from collections.abc import Iterator

import pytest
import structlog

from sinks import dead_letter_committers
from sinks.kafka.writer import writers
from tests.kit.searching import first_seed
from tests.kit.targets import Often
from tests.simulation.letter_mutations import LETTER_MUTATIONS
from tests.simulation.mutations import MUTATIONS, Mutation
from tests.simulation.schedule import Coverage, run_schedule

#: The rarest step comes once in 1,000 schedules; forty times as many practically never miss it.
SCHEDULES_MAX = 40_000
#: The mutation that shows least (C21) shows once in 500 to 1,000 schedules of its worlds.
SCHEDULES_PER_MUTATION = 20_000
#: Each of these steps must meet at least one fault.
STEPS = {
    "start: take_over",
    "commit: raise",
    "commit: sweep",
    "commit: purge",
    "commit: finish",
    "commit: let_open",
    "commit: note_done",
    "roll back: undo",
    "roll back: mark_rolled_back",
    "close fence: close_fence",
    "task: begin_commit",
    "task: commit",
    "write rows",
    "zookeeper multi",
    "read",
}


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """Silence the drivers: schedules consist of what they warn of."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


@pytest.mark.slow
def test_every_schedule_holds_every_invariant_and_reaches_every_step(seed: int, often: Often) -> None:
    coverage: Coverage = Counter()
    schedules = often(500, 4_000)
    for number in range(SCHEDULES_MAX):
        if number >= schedules and met(coverage) >= STEPS:
            break
        outcome = run_schedule(seed + number, coverage)
        again = f"python -m tests.simulation --only protocol --seed {seed + number}"
        assert outcome.violation is None, f"{again}: {outcome.violation}"
    assert met(coverage) >= STEPS
    assert {fault for (fault, step), times in coverage.items() if times and step == "zookeeper multi"} == {
        "reply lost",
        "request lost",
        "crash before",
        "crash after",
    }
    assert dead_letter_committers.writers is writers  # those of tests in this process with a real Kafka


def met(coverage: Coverage) -> set[str]:
    """The steps that a fault has met."""
    return {step for (_, step), times in coverage.items() if times}


def test_a_seed_gives_the_same_schedule_again(seed: int) -> None:
    for each in range(seed, seed + 3):
        assert run_schedule(each, keep_trace=True) == run_schedule(each, keep_trace=True)


def marks(mutation: Mutation) -> list[pytest.MarkDecorator]:
    """The name of a mutation of a rule begins with the rule: ``C5: no sweep``."""
    rule = re.match(r"(C\d+): ", mutation.name)
    return [pytest.mark.rule(rule[1])] if rule else []


@pytest.mark.slow_for(
    "C27: done does not check the identity of the store",
    "the rows of a rebuild have epochs above those of drivers",
    "a cancelled step that has opened nothing yet keeps its fence open",
)
@pytest.mark.parametrize("mutation", [pytest.param(each, id=each.name, marks=marks(each)) for each in MUTATIONS])
def test_the_simulator_notices_each_rule_that_is_taken_out(mutation: Mutation, seed: int) -> None:
    with mutation.applied():
        first_seed(mutation.seeds(seed, SCHEDULES_PER_MUTATION), mutation.is_noticed)


@pytest.mark.parametrize("mutation", [pytest.param(each, id=each.name) for each in (*MUTATIONS, *LETTER_MUTATIONS)])
def test_each_replacement_in_a_mutation_has_the_signature_of_the_original(mutation: Mutation) -> None:
    """Otherwise the mutation would be noticed for its signature, not for the rule."""
    for target, name, replacement in mutation.patches:
        original = target.__dict__[name]
        if inspect.isfunction(original):
            taken = inspect.signature(original).parameters
            inspect.signature(replacement).bind(
                *(each for each in taken if taken[each].kind is not inspect.Parameter.KEYWORD_ONLY),
                **{each: None for each in taken if taken[each].kind is inspect.Parameter.KEYWORD_ONLY},
            )


def test_mutations_leave_no_trace(seed: int) -> None:
    for mutation, each in itertools.product(MUTATIONS[:3], (seed, seed + 1)):
        with mutation.applied():
            run_schedule(each)
        assert run_schedule(each).violation is None
