"""The long run of random pipelines against plain Python.

``python -m tests.streams --only topics --first-seed 1 --programs 100000`` draws so many programs,
``PER_SEED`` from each seed. It ends at the first program that gives something else than plain
Python, with that program in its shortest form and the seed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, seed, settings

from tests.streams import programs, topic_programs

PER_SEED = 500
#: Name -> what is drawn, and what checks it.
KINDS: dict[str, tuple[dict[str, Any], Callable[..., None]]] = {
    "topics": (topic_programs.PROGRAMS, topic_programs.check),
    "steps": (programs.PROGRAMS, programs.checked),
}


def run(kind: str, number: int, count: int) -> None:
    """Check so many programs of one seed."""
    drawn, check = KINDS[kind]

    @seed(number)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(**drawn)
    def checked(**values: Any) -> None:
        check(**values)

    checked()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=KINDS, default="topics")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--programs", type=int, default=PER_SEED)
    chosen = parser.parse_args()
    gc.freeze()
    gc.set_threshold(50_000)
    began = time.monotonic()
    for done in range(0, chosen.programs, PER_SEED):
        number = chosen.first_seed + done // PER_SEED
        try:
            run(chosen.only, number, min(PER_SEED, chosen.programs - done))
        except BaseException:
            print(f"{chosen.only}, seed {number}", flush=True)
            raise
        ran = min(done + PER_SEED, chosen.programs)
        print(f"{chosen.only}: {ran:,} programs, up to seed {number}, {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
