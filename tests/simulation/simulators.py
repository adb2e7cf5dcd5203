"""The simulators: of the transaction protocol, of dead letters, of the trees of tuples, of states
and their checkpoints, of event time, of tables of rows, of copies of other databases.

Each makes a world from a seed and runs it to its end under an oracle of its own. The same seed
gives the same world on any machine.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.kit import state_world, tree_world
from tests.simulation.event_time import run_event_time
from tests.simulation.letters import run_letters_schedule
from tests.simulation.mirror import run_mirror
from tests.simulation.rows import run_rows
from tests.simulation.schedule import Coverage, run_schedule

#: Messages of a world of trees, how many may be pending, and how many of a hundred worlds are such.
#: What goes wrong concerns a few trees and a few rounds, so most worlds are small; many messages at
#: once are seldom.
TREES = {(2, 2): 35.0, (4, 4): 40.0, (8, 4): 18.0, (16, 8): 5.0, (40, 8): 1.5, (150, 60): 0.5}

#: Words of a world of states, how many of its rounds have trouble, and how many of a hundred worlds
#: are such.
STATES = {(4, 8): 40.0, (8, 12): 30.0, (12, 15): 18.0, (24, 30): 9.0, (40, 60): 2.0, (80, 120): 1.0}


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a schedule ended.

    ``violation`` None: everything held. ``trace``: what happened, if it was asked for.
    """

    seed: int
    shape: str
    violation: str | None
    trace: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Simulator:
    """``parts``: its share of a hundred schedules, such that each simulator takes about as much
    time.

    ``chunk``: schedules that a process gets at once; about a second of work or less.
    """

    name: str
    parts: int
    chunk: int
    run: Callable[[int, Coverage, bool], Verdict]


def run_protocol(seed: int, coverage: Coverage, tell: bool = False) -> Verdict:
    """Drivers, commit tasks, ZooKeeper and sinks (``schedule.py``)."""
    outcome = run_schedule(seed, coverage, keep_trace=tell)
    return Verdict(seed, f"{outcome.shape}, {outcome.steps} steps", outcome.violation, outcome.trace)


def run_letters(seed: int, coverage: Coverage, tell: bool = False) -> Verdict:
    """Dead letters that commands replay, drop and withdraw (``letters.py``)."""
    outcome = run_letters_schedule(seed, coverage, keep_trace=tell)
    return Verdict(seed, f"{outcome.shape}, {outcome.steps} steps", outcome.violation, outcome.trace)


def run_trees(seed: int, coverage: Coverage, tell: bool = False) -> Verdict:
    """Trees of tuples and their ackers (``tests/kit/tree_world.py``): few messages or many,
    under some troubles or all.
    """
    chance = random.Random(f"trees {seed}")
    messages, pending = _one_of(chance, TREES)
    troubles = _some(chance, tree_world.TROUBLES)
    tasks = _tasks(chance)
    shape = f"{messages} messages, {pending} pending, {tasks} tasks, {', '.join(troubles)}"

    def run() -> str | None:
        found = tree_world.simulate(seed, messages, troubles, pending, tasks)
        _cover(coverage, found, "trees")
        return "; ".join(found.wrong) or None

    return _judged(seed, shape, run, tell)


def run_states(seed: int, coverage: Coverage, tell: bool = False) -> Verdict:
    """States and checkpoints (``tests/kit/state_world.py``): exactly-once or at-least-once, under
    some troubles or all, with some changes, all or none, with windows or without, and with words
    that cannot be processed or without. Where there are some, nothing is lost unnoticed: other
    words would time out as often.
    """
    chance = random.Random(f"states {seed}")
    exact = chance.random() < 0.5
    troubles = _some(chance, state_world.ALL_TROUBLES)
    changes = _some(chance, state_world.CHANGES) if exact and chance.random() < 0.5 else ()
    windows = chance.random() < 0.3
    if windows:
        troubles = (*troubles, state_world.CLOCK_JUMPS)
    how = "exactly-once" if exact else "at-least-once"
    words, rounds = _one_of(chance, STATES)
    tasks = chance.choice([1, 1, 2])
    poison = 0.1 if exact and chance.random() < 0.3 else 0.0
    if poison:
        troubles = tuple(each for each in troubles if each not in state_world.LOSSES)
    shape = f"{words} words, {tasks} tasks, {how}{', windows' if windows else ''}{', poison' if poison else ''}, "
    shape += ", ".join((*troubles, *changes))

    def run() -> str | None:
        found = state_world.simulate(
            seed,
            exact=exact,
            words=words,
            troubles=troubles,
            changes=changes,
            windows=windows,
            rounds=rounds,
            tasks=tasks,
            poison=poison,
        )
        _cover(coverage, found, f"states, {how}")
        return None

    return _judged(seed, shape, run, tell)


def run_timed(seed: int, coverage: Coverage, tell: bool = False) -> Verdict:
    """Transactions of event time (``event_time.py``)."""
    return _judged_world(seed, coverage, tell, "event time", run_event_time)


def run_tables(seed: int, coverage: Coverage, tell: bool = False) -> Verdict:
    """Transactions that write tables of rows (``rows.py``)."""
    return _judged_world(seed, coverage, tell, "rows", run_rows)


def run_copies(seed: int, coverage: Coverage, tell: bool = False) -> Verdict:
    """Transactions that copy the tables of another database (``mirror.py``)."""
    return _judged_world(seed, coverage, tell, "mirror", run_mirror)


def _some(chance: random.Random, troubles: tuple[str, ...]) -> tuple[str, ...]:
    """All troubles, one time in two; else each of them, one time in two."""
    return troubles if chance.random() < 0.5 else tuple(each for each in troubles if chance.random() < 0.5)


def _one_of(chance: random.Random, shares: Mapping[tuple[int, int], float]) -> tuple[int, int]:
    (chosen,) = chance.choices(list(shares), list(shares.values()))
    return chosen


def _tasks(chance: random.Random) -> tuple[int, ...]:
    """How many tasks each component and the acker have: half of the time one, so that components
    are fused."""
    most = chance.choice([1, 1, 2, 3])
    return tuple(chance.randint(1, most) for _ in tree_world.TASKS)


def _cover(coverage: Coverage, found: Any, where: str) -> None:
    for trouble, times in found.struck.items():
        coverage[(trouble, where)] += times


def _judged_world(
    seed: int, coverage: Coverage, tell: bool, where: str, simulate: Callable[[int], tuple[str | None, Any]]
) -> Verdict:
    """``simulate``: takes a seed, and returns what was wrong, and its world."""
    lines: list[str] = []

    def run() -> str | None:
        wrong, world = simulate(seed)
        lines.extend(world.trace if tell else [])
        _cover(coverage, world, where)
        return wrong

    verdict = _judged(seed, "", run, tell)
    return replace(verdict, trace=(*lines, *verdict.trace))


def _judged(seed: int, shape: str, run: Callable[[], str | None], tell: bool) -> Verdict:
    """Turn what ``run`` raises into a violation, be it from the
    oracle or from the code under test.
    """
    try:
        return Verdict(seed, shape, run())
    except Exception as error:  # noqa: BLE001 - any exception is a violation
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = (
            f"{type(error).__name__}: {error} ({last.name}, line {last.lineno} of {last.filename.rsplit('/', 1)[-1]})"
        )
        return Verdict(seed, shape, text, tuple(traceback.format_exc().splitlines()) if tell else ())


SIMULATORS = {
    each.name: each
    for each in (
        Simulator("protocol", 48, 200, run_protocol),
        Simulator("letters", 2, 10, run_letters),
        Simulator("trees", 27, 80, run_trees),
        Simulator("states", 11, 30, run_states),
        Simulator("event_time", 8, 30, run_timed),
        Simulator("rows", 3, 20, run_tables),
        Simulator("mirror", 1, 10, run_copies),
    )
}


def shares(schedules: int, names: list[str]) -> dict[str, int]:
    """How many of ``schedules`` each simulator gets.

    >>> list(shares(1_000, list(SIMULATORS)).values())
    [480, 20, 270, 110, 80, 30, 10]
    >>> shares(20, list(SIMULATORS))
    {'protocol': 9, 'letters': 1, 'trees': 5, 'states': 2, 'event_time': 1, 'rows': 1, 'mirror': 1}
    >>> shares(100, ["states"])
    {'states': 100}
    """
    whole = sum(SIMULATORS[name].parts for name in names)
    return {name: max(1, schedules * SIMULATORS[name].parts // whole) for name in names}
