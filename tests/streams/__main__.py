"""The long run of random pipelines against plain Python.

``python -m tests.streams --only topics --first-seed 1 --programs 100000`` draws one program from
each seed. Hypothesis draws for the tests of this folder; it prefers short programs and repeats what
it has drawn, which reaches few of the rarer steps in a long run. The run ends at the first program
that gives something else than plain Python, with the smallest part of it that still does.
"""

from __future__ import annotations

import argparse
import gc
import pprint
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from framework.topology import TOMBSTONE
from tests.streams import programs, topic_programs

Program = dict[str, Any]
_TELL_S = 10
#: Programs between two collections of garbage, of which each walks through all modules' objects.
_COLLECTED_EVERY = 50


def _topics(chance: random.Random) -> Program:
    def record() -> dict[str, Any]:
        form = chance.randrange(4)
        key = chance.choice(topic_programs.KEYS) if form else None
        n = chance.choice([None, *range(-5, 9)])
        return {"id": key, "n": n if form != 1 else None, TOMBSTONE: form == 1}

    def steps(most: int) -> list[Any]:
        return chance.sample(topic_programs.STEPS, chance.randint(0, most))

    sinks = sorted(topic_programs.SINKS)
    return {
        "records": [record() for _ in range(chance.randint(1, 16))],
        "shared": steps(2),
        "branches": [(steps(3), chance.sample(sinks, chance.randint(1, 2))) for _ in range(chance.randint(1, 2))],
        "takes": [chance.randint(1, 6) for _ in range(chance.randint(1, 4))],
        "policy": chance.choice(["skip", "skip", "dead_letter", "fail"]),
        "faults": [chance.randrange(4) for _ in range(chance.randint(0, 3))],
        "tasks": chance.randint(1, 2),
    }


def _steps(chance: random.Random) -> Program:
    def operator() -> programs.Drawn:
        return programs.Drawn(
            kind=chance.choice(programs.KINDS),
            short=chance.choice(programs.SHORT),
            long=chance.choice(programs.LONG),
            late=chance.choice(programs.LATE),
            parallelism=chance.randint(1, 2),
        )

    def chain(least: int) -> list[programs.Drawn]:
        return [operator() for _ in range(chance.randint(least, 2))]

    shared = chain(0)
    rows = [
        (chance.choice("ab"), chance.randint(-4, 9), chance.choice(programs.STEPS))
        for _ in range(chance.randint(1, 20))
    ]
    return {
        "rows": programs.in_time(rows),
        "chains": (shared, [chain(0 if shared else 1) for _ in range(chance.randint(1, 2))]),
        "take": chance.randint(1, 5),
        "faults": [chance.randrange(4) for _ in range(chance.randint(0, 4))],
        "tasks": chance.randint(1, 2),
    }


#: Name -> what draws a program, what checks it, and its records.
KINDS: dict[str, tuple[Callable[[random.Random], Program], Callable[..., None], str]] = {
    "topics": (_topics, topic_programs.check, "records"),
    "steps": (_steps, programs.checked, "rows"),
}


def drawn(kind: str, seed: int) -> Program:
    """The program of a seed."""
    return KINDS[kind][0](random.Random(f"{kind} {seed}"))


def error_of(kind: str, program: Program) -> BaseException | None:
    """What a program gives instead of what plain Python gives; None: the same."""
    try:
        KINDS[kind][1](**program)
    except Exception as error:  # noqa: BLE001 - any error of a correct program is a finding
        return error
    return None


def shortened(kind: str, program: Program) -> Program:
    """A part of a wrong program that is as wrong, with records and faults left out."""
    is_shorter = True
    while is_shorter:
        smaller = (each for each in _without_one(kind, program) if error_of(kind, each) is not None)
        found = next(smaller, None)
        is_shorter, program = found is not None, found or program
    return program


def _without_one(kind: str, program: Program) -> Iterator[Program]:
    for name in (KINDS[kind][2], "faults"):
        its = program[name]
        for number in range(len(its)):
            if len(its) > (name != "faults"):
                yield {**program, name: [*its[:number], *its[number + 1 :]]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=KINDS, default="topics")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--programs", type=int, default=1)
    chosen = parser.parse_args()
    gc.freeze()
    gc.disable()
    began = told = time.monotonic()
    for done in range(chosen.programs):
        seed = chosen.first_seed + done
        if done % _COLLECTED_EVERY == 0:
            gc.collect()
        program = drawn(chosen.only, seed)
        if (error := error_of(chosen.only, program)) is not None:
            print(f"{chosen.only}, seed {seed}:")
            pprint.pprint(shortened(chosen.only, program), width=120)
            raise error
        if time.monotonic() - told > _TELL_S or done + 1 == chosen.programs:
            told = time.monotonic()
            print(f"{chosen.only}: {done + 1:,} programs, up to seed {seed}, {told - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
