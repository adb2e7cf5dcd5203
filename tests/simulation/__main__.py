"""The long run of all simulators, and the replay of one schedule.

``make simulate SCHEDULES=1000000`` is the long run; ``python -m tests.simulation --only trees
--seed 42`` runs one schedule again.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field

import structlog

from tests.simulation.caught import write_table
from tests.simulation.schedule import Coverage
from tests.simulation.simulators import SIMULATORS, Verdict, shares

#: Pairs of a fault and a step that come in a smaller share of schedules than this are named.
RARE = 1 / 1_000
PROGRAM = "python -m tests.simulation"


@dataclass
class Tally:
    """How many of its ``wanted`` schedules one simulator has run, and what they showed."""

    wanted: int
    done: int = 0
    bad: list[Verdict] = field(default_factory=list)
    coverage: Coverage = field(default_factory=Counter)


def _quiet() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the process that hands out the seeds handles Ctrl-C
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    gc.freeze()
    gc.set_threshold(50_000)  # a world is full of cycles, and is dropped as a whole


def _chunk(name: str, first: int, count: int) -> tuple[str, int, Coverage, list[Verdict]]:
    coverage: Coverage = Counter()
    verdicts = [SIMULATORS[name].run(seed, coverage, False) for seed in range(first, first + count)]
    return name, count, coverage, [each for each in verdicts if each.violation is not None]


def _chunks(tallies: dict[str, Tally], first_seed: int) -> Iterator[tuple[str, int, int]]:
    """Chunks (name, first seed, count), in an order in which all simulators progress evenly."""
    found = [
        (first / tally.wanted, name, first_seed + first, min(SIMULATORS[name].chunk, tally.wanted - first))
        for name, tally in tallies.items()
        for first in range(0, tally.wanted, SIMULATORS[name].chunk)
    ]
    return ((name, first, count) for _, name, first, count in sorted(found))


def main() -> int:
    parser = argparse.ArgumentParser(prog=PROGRAM)
    parser.add_argument(
        "--schedules",
        type=int,
        default=20_000,
        help="in all; of a hundred, 48 are of the protocol, 2 of letters, 27 of trees, 11 of states, 8 of event time, 4 of rows",
    )
    parser.add_argument("--only", choices=SIMULATORS, help="give all schedules to this simulator")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seed", type=int, help="run this schedule alone, and print what happens in it")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--mutations",
        type=int,
        metavar="RUNS",
        help="how soon each is noticed, into mutations.md; with --only, those of protocol, letters or event_time",
    )
    arguments = parser.parse_args()
    if arguments.schedules < 1 or arguments.processes < 1:
        parser.error("--schedules and --processes must be 1 or more")
    names = [arguments.only] if arguments.only else list(SIMULATORS)
    _quiet()
    if arguments.mutations:
        return 1 if write_table(arguments.mutations, arguments.first_seed, arguments.only) else 0
    if arguments.seed is not None:
        return max(_replay(name, arguments.seed) for name in names)
    tallies = {name: Tally(wanted) for name, wanted in shares(arguments.schedules, names).items()}
    started = time.monotonic()
    stopped = _run_all(tallies, arguments.first_seed, arguments.processes)
    elapsed = time.monotonic() - started
    for name, tally in tallies.items():
        _report(name, tally, elapsed, arguments.first_seed, stopped)
    return 1 if any(each.bad for each in tallies.values()) else 0


def _run_all(tallies: dict[str, Tally], first_seed: int, processes: int) -> bool:
    """Run until all schedules are done or one has a violation.

    Returns True when Ctrl-C stopped it.
    """
    started, shown = time.monotonic(), 0.0
    stopped: list[int] = []
    todo = _chunks(tallies, first_seed)
    running: set[Future[tuple[str, int, Coverage, list[Verdict]]]] = set()
    with ProcessPoolExecutor(processes, initializer=_quiet) as pool:
        signal.signal(signal.SIGINT, lambda number, frame: stopped.append(number))
        while not any(each.bad for each in tallies.values()):
            while not stopped and len(running) < 2 * processes and (chunk := next(todo, None)) is not None:
                running.add(pool.submit(_chunk, *chunk))
            if not running:
                break
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                name, count, seen, bad = future.result()
                tally = tallies[name]
                tally.done += count
                tally.coverage.update(seen)
                tally.bad += bad
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                parts = ", ".join(f"{each.done:,} of {each.wanted:,} {name}" for name, each in tallies.items())
                print(f"{parts}, after {shown - started:.0f} s", file=sys.stderr, flush=True)
        pool.shutdown(cancel_futures=True)
    return bool(stopped)


def _report(name: str, tally: Tally, elapsed: float, first_seed: int, stopped: bool) -> None:
    last = first_seed + tally.done - 1
    print(
        f"{name}: {tally.done:,} schedules, seeds {first_seed} to {last}, in {elapsed:.0f} s, {len(tally.bad)} with a violation"
    )
    _show(tally.coverage, tally.done)
    for each in tally.bad[:3]:
        print(f"seed {each.seed}: {each.violation}\n  again: {PROGRAM} --only {name} --seed {each.seed}")
    left = tally.wanted - tally.done
    if stopped and left:
        print(f"stopped; go on with {PROGRAM} --only {name} --first-seed {last + 1} --schedules {left}")
    print()


def _replay(name: str, seed: int) -> int:
    coverage: Coverage = Counter()
    verdict = SIMULATORS[name].run(seed, coverage, True)
    print("\n".join(verdict.trace))
    if name != "protocol":
        _show(coverage, 1)
    print(f"{name}, seed {seed}: {verdict.shape}\n{verdict.violation or 'every invariant held'}")
    return 1 if verdict.violation else 0


def _show(coverage: Coverage, schedules: int) -> None:
    """Print how often each fault met each step; steps with the same faults share a table."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for step in sorted({step for _, step in coverage}):
        alike.setdefault(tuple(sorted(fault for fault, other in coverage if other == step)), []).append(step)
    for faults, steps in alike.items():
        if len(steps) > 1:
            print(f"{'':30s}" + "".join(f"{fault:>14s}" for fault in faults))
            for step in steps:
                print(f"{step:30s}" + "".join(f"{coverage[fault, step]:14,}" for fault in faults))
    for faults, (step, *others) in alike.items():
        if not others:
            print(f"{step:30s} " + ", ".join(f"{fault}: {coverage[fault, step]:,}" for fault in faults))
    rare = [f"{fault} at {step}" for (fault, step), times in sorted(coverage.items()) if times < schedules * RARE]
    print(f"less than once in {1 / RARE:,.0f} schedules: {', '.join(rare) or 'none'}")


if __name__ == "__main__":
    raise SystemExit(main())
