"""The search for a seed that shows a mistake.

In ``make test`` a search begins with the seed of ``tests/kit/seeds.json``, which ends it at once.
``python -m tests.kit.searching`` searches anew for the tests whose seed shows nothing any more.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

SEEDS_FILE = Path(__file__).with_name("seeds.json")
#: Name of a test -> the seed that it takes in ``make test``.
SEEDS: dict[str, int] = json.loads(SEEDS_FILE.read_text(encoding="utf-8"))
#: Where tests search, and their names.
NAMED = "notice or caught or under_each_trouble or acked_early"
WHERE = (
    "tests/acking",
    "tests/simulation",
    "tests/sinks/event_time/test_mutations.py",
    "tests/state/test_simulation.py",
)


def usual_seed(test: str) -> int:
    """The seed that a test of this name takes in ``make test``."""
    return SEEDS.get(test, zlib.crc32(test.encode()) % 10**6)


def first_seed(seeds: Iterable[int], shows: Callable[[int], object]) -> int:
    """The first seed that shows the mistake. Fails when none does."""
    found = next(filter(shows, seeds), None)
    assert found is not None, f"none of {seeds} shows it"
    keep(found)
    return found


def keep(seed: int) -> None:
    """Print the seed that ended a search, for ``write_seeds``."""
    print(f"seed {seed} shows it")


def write_seeds() -> int:
    """Run the tests that search, as ``make test`` does, and keep the seeds that they find. Returns
    the status of pytest."""
    command = [sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", "-rP", "-k", NAMED, *WHERE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    test, found = "", dict(SEEDS)
    for line in done.stdout.splitlines():
        if title := re.fullmatch(r"_+ (test_.*?) _+", line):
            test = title[1]
        elif (shown := re.fullmatch(r"seed (\d+) shows it", line)) and usual_seed(test) != int(shown[1]):
            found[test] = int(shown[1])
    SEEDS_FILE.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(done.stdout.splitlines()[-1])
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(write_seeds())
