"""The long run: ``make simulate SCHEDULES=1000000``, or one schedule again: ``python -m tests.simulation --seed 42``."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait

import structlog

from tests.simulation.schedule import Coverage, Outcome, run_schedule

CHUNK = 500


def _quiet() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that hands out the seeds
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    gc.freeze()


def _chunk(first: int, count: int) -> tuple[int, Coverage, list[Outcome]]:
    coverage: Coverage = Counter()
    outcomes = [run_schedule(seed, coverage) for seed in range(first, first + count)]
    return count, coverage, [each for each in outcomes if each.violation is not None]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--schedules", type=int, default=20_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seed", type=int, help="run this schedule alone, and print what happens in it")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    if arguments.schedules < 1 or arguments.processes < 1:
        parser.error("--schedules and --processes must be 1 or more")
    _quiet()
    if arguments.seed is not None:
        return _replay(arguments.seed)
    coverage: Coverage = Counter()
    bad: list[Outcome] = []
    done, started, shown = 0, time.monotonic(), 0.0
    stopped: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: stopped.append(number))
    with ProcessPoolExecutor(arguments.processes, initializer=_quiet) as pool:
        end = arguments.first_seed + arguments.schedules
        todo = iter(range(arguments.first_seed, end, CHUNK))
        running = {
            pool.submit(_chunk, first, min(CHUNK, end - first))
            for _, first in zip(range(2 * arguments.processes), todo, strict=False)
        }
        while running and not bad:
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                count, seen, violations = future.result()
                done += count
                coverage.update(seen)
                bad += violations
                first = next(todo, None) if not stopped else None
                if first is not None:
                    running.add(pool.submit(_chunk, first, min(CHUNK, end - first)))
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                rate = done / (shown - started) * 60
                print(f"{done:,} of {arguments.schedules:,} schedules, {rate:,.0f} a minute", file=sys.stderr)
        pool.shutdown(cancel_futures=True)
    elapsed = time.monotonic() - started
    print(f"{done:,} schedules in {elapsed:.0f} s ({done / elapsed * 60:,.0f} a minute), {len(bad)} with a violation")
    if stopped and not bad:
        print(f"stopped; go on with --first-seed {arguments.first_seed + done}")
    _show(coverage)
    for outcome in bad[:3]:
        print(f"seed {outcome.seed}: {outcome.violation}\n  again: python -m tests.simulation --seed {outcome.seed}")
    return 1 if bad else 0


def _replay(seed: int) -> int:
    from tests.simulation import world

    world.TRACE_MAX = 100_000
    outcome = run_schedule(seed, keep_trace=True)
    print("\n".join(outcome.trace))
    print(f"seed {seed}: {outcome.shape}\n{outcome.violation or 'every invariant held'}, {outcome.steps} steps")
    return 1 if outcome.violation else 0


def _show(coverage: Coverage) -> None:
    """How often each fault met each step."""
    faults = sorted({fault for fault, _ in coverage})
    print(f"\n{'step':38s} fault: times")
    for step in sorted({step for _, step in coverage}):
        counts = ", ".join(f"{fault}: {coverage[(fault, step)]:,}" for fault in faults if coverage[(fault, step)])
        print(f"{step:38s} {counts}")


if __name__ == "__main__":
    raise SystemExit(main())
