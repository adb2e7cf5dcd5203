"""What user code keeps in the memory of a process is found, and put back."""

from __future__ import annotations

import datetime
import os
import random
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar

from framework import BaseBasicBolt
from framework.testing import Outside
from framework.testing.simulation.clock import TurnCounter
from framework.testing.simulation.worker_globals import WorkerMemory
from tests.testing.mistakes import FIELDS, counting

counter = 0
numbers: list[int] = [1]
nested = {"a": {"b": [1]}}
dice = random.Random(1)
mailbox = Outside("mailbox")


class Client:
    def __init__(self) -> None:
        self.calls = 0


client = Client()


@lru_cache
def square(n: int) -> int:
    return n * n


class Keeps(BaseBasicBolt):
    deterministic = True
    seen: ClassVar[set[str]] = set()
    last = 0

    def execute(self, tup: Any, collector: Any) -> None: ...

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(FIELDS)


def bump() -> None:
    global counter
    counter += 1


def made_with(kept: dict[str, int]) -> Callable[[], Keeps]:
    def make() -> Keeps:
        assert kept is not None
        return Keeps()

    return make


CHANGES: dict[str, Callable[[], Any]] = {
    "tests.testing.test_memory.counter": bump,
    "tests.testing.test_memory.numbers": lambda: numbers.append(2),
    "tests.testing.test_memory.nested": lambda: nested["a"]["b"].append(2),
    "tests.testing.test_memory.dice": dice.random,
    "tests.testing.test_memory.client.calls": lambda: setattr(client, "calls", 1),
    "tests.testing.test_memory.square": lambda: square(3),
    "Keeps.seen": lambda: Keeps.seen.add("x"),
    "Keeps": lambda: setattr(Keeps, "last", 1),
}


def test_each_kind_of_memory_is_noticed_and_put_back() -> None:
    memory = WorkerMemory(counting(Keeps()))
    assert memory.changed() == []
    for name, change in CHANGES.items():
        change()
        assert memory.changed() == [name], name
        memory.restore()
        assert memory.changed() == [], name
    assert (counter, numbers, nested, Keeps.seen, Keeps.last, client.calls) == (0, [1], {"a": {"b": [1]}}, set(), 0, 0)
    assert square.cache_info().currsize == 0


def test_the_variables_of_a_factory_are_memory_too() -> None:
    kept = {"a": 1}
    memory = WorkerMemory(counting(made_with(kept)))
    kept["b"] = 2
    assert memory.changed() == ["make.kept"]
    memory.restore()
    assert kept == {"a": 1}


def test_what_stands_for_the_outside_is_no_memory() -> None:
    memory = WorkerMemory(counting(Keeps()))
    assert [each.name for each in memory.outside] == ["mailbox"]
    mailbox.append(1)
    memory.restore()
    assert mailbox.items == [1]
    mailbox.clear()


def seen() -> tuple[Any, ...]:
    return (
        time.time(),
        time.strftime("%Y-%m-%d"),
        datetime.datetime.now(datetime.UTC),
        datetime.date.today(),
        random.random(),
        os.urandom(4),
    )


def test_a_turn_has_a_day_and_random_numbers_of_its_own_and_can_be_repeated() -> None:
    turns = TurnCounter(3, [globals()])
    real, state = time.time, random.getstate()
    found = []
    for number in (1, 2, 1):
        with turns.turn(number):
            found.append(seen())
    assert found[0] == found[2]
    assert all(one != other for one, other in zip(found[0], found[1], strict=True))
    assert (time.time, random.getstate(), datetime.datetime.__name__) == (real, state, "datetime")
    assert abs(datetime.datetime.now().timestamp() - real()) < 60


def test_values_are_plain_within_a_turn() -> None:
    with TurnCounter(3, [globals()]).turn(1):
        at, day = datetime.datetime(2020, 1, 2, 3), datetime.date(2020, 1, 2)
        assert isinstance(at, datetime.datetime) and isinstance(day, datetime.date)
        assert isinstance(datetime.datetime.now(), datetime.datetime)
    assert type(at) is datetime.datetime
    assert type(day) is datetime.date
