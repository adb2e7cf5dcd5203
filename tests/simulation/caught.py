"""How soon each mutation is noticed, as a table in ``tests/simulation/mutations.md``:
``python -m tests.simulation --mutations 3``.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.simulation.event_time_mutations import EVENT_TIME_MUTATIONS
from tests.simulation.letter_mutations import LETTER_MUTATIONS
from tests.simulation.mutations import MUTATIONS, Mutation
from tests.simulation.patches import PatchMutation

PAGE = Path(__file__).with_name("mutations.md")
#: More than the ``SCHEDULES_PER_MUTATION`` of the test.
SCHEDULES_MAX = 20_000
HEADING = "| Taken out | Median of the runs | Most | Looked for in |"
#: Simulator -> what it must catch.
OF: Mapping[str, Sequence[Mutation | PatchMutation]] = {
    "protocol": MUTATIONS,
    "letters": LETTER_MUTATIONS,
    "event_time": EVENT_TIME_MUTATIONS,
}
ALL = [each for its in OF.values() for each in its]
#: The distance between the first seeds of two runs.
APART = 1_000_000


def write_table(runs: int, first_seed: int, only: str | None = None) -> int:
    """Measure mutations ``runs`` times, and write their rows in the table of the page again.
    ``only``: a simulator of ``OF``; None for all.

    Returns the number of mutations that at least one run did not notice.
    """
    explained, heading, table = PAGE.read_text().partition(HEADING)
    known = {row.split(" | ")[0]: row for row in table.splitlines()[2:]}
    missed = 0
    for mutation in OF.get(only or "", ALL):
        counts = [schedules_until_noticed(mutation, first_seed + run * APART) for run in range(runs)]
        missed += max(counts) > SCHEDULES_MAX
        row = f"| {mutation.name} | {round(statistics.median(counts)):,} | {max(counts):,} | {_share(mutation):.0%} |"
        known[f"| {mutation.name}"] = row
        print(row, file=sys.stderr, flush=True)
    rows = [known[f"| {each.name}"] for each in ALL if f"| {each.name}" in known]
    PAGE.write_text("\n".join([explained + heading, "|---|---|---|---|", *rows]) + "\n")
    return missed


def schedules_until_noticed(mutation: Mutation | PatchMutation, first_seed: int) -> int:
    with mutation.applied():
        seeds = enumerate(mutation.seeds(first_seed, SCHEDULES_MAX), 1)
        return next((number for number, seed in seeds if mutation.is_noticed(seed)), SCHEDULES_MAX + 1)


def _share(mutation: Mutation | PatchMutation) -> float:
    """The share of worlds in which the mutation is looked for."""
    seeds = list(mutation.seeds(0, 200))
    return len(seeds) / (seeds[-1] + 1)
