"""How soon each mutation is noticed, as a table in ``tests/simulation/mutations.md``:
``python -m tests.simulation --mutations 3``.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from tests.simulation.mutations import MUTATIONS, Mutation
from tests.simulation.schedule import run_schedule

PAGE = Path(__file__).with_name("mutations.md")
#: More than the ``SCHEDULES_PER_MUTATION`` of the test.
SCHEDULES_MAX = 20_000
#: The distance between the first seeds of two runs.
APART = 1_000_000


def write_table(runs: int, first_seed: int) -> int:
    """Measure every mutation ``runs`` times, and write the table of the page again.

    Returns the number of mutations that at least one run did not notice.
    """
    rows = [f"| Taken out | Median of {runs} | Most | Looked for in |", "|---|---|---|---|"]
    missed = 0
    for mutation in MUTATIONS:
        counts = [schedules_until_noticed(mutation, first_seed + run * APART) for run in range(runs)]
        missed += max(counts) > SCHEDULES_MAX
        rows.append(
            f"| {mutation.name} | {round(statistics.median(counts)):,} | {max(counts):,} | {_share(mutation):.0%} |"
        )
        print(rows[-1], file=sys.stderr, flush=True)
    explained = PAGE.read_text().partition("| Taken out")[0]
    PAGE.write_text(explained + "\n".join(rows) + "\n")
    return missed


def schedules_until_noticed(mutation: Mutation, first_seed: int) -> int:
    with mutation.applied():
        seeds = enumerate(mutation.seeds(first_seed, SCHEDULES_MAX), 1)
        return next((number for number, seed in seeds if run_schedule(seed).violation is not None), SCHEDULES_MAX + 1)


def _share(mutation: Mutation) -> float:
    """The share of worlds in which the mutation is looked for."""
    seeds = list(mutation.seeds(0, 200))
    return len(seeds) / (seeds[-1] + 1)
