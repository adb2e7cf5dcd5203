"""How soon each mutation is noticed, as a table in ``docs/simulation.md``: ``python -m
tests.simulation --mutations 3``.
"""

from __future__ import annotations

import statistics
import sys

from tests.kit.processes import ROOT
from tests.simulation.mutations import MUTATIONS, Mutation
from tests.simulation.schedule import run_schedule

PAGE = ROOT / "docs" / "simulation.md"
BEGIN, END = "<!-- mutations: begin -->", "<!-- mutations: end -->"
#: More than the ``SCHEDULES_PER_MUTATION`` of the test.
SCHEDULES_MAX = 20_000
#: The distance between the first seeds of two runs.
APART = 1_000_000


def write_table(runs: int, first_seed: int) -> int:
    """Measure every mutation ``runs`` times, and write the table into the page.

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
    table = "\n".join(rows)
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}")
    return missed


def schedules_until_noticed(mutation: Mutation, first_seed: int) -> int:
    with mutation.applied():
        seeds = enumerate(mutation.seeds(first_seed, SCHEDULES_MAX), 1)
        return next((number for number, seed in seeds if run_schedule(seed).violation is not None), SCHEDULES_MAX + 1)


def _share(mutation: Mutation) -> float:
    """The share of worlds in which the mutation is looked for."""
    seeds = list(mutation.seeds(0, 200))
    return len(seeds) / (seeds[-1] + 1)
