"""The clock and the random numbers of user code in a simulation.

Each turn (a phase of an attempt, or a late task) has a day and random numbers of its own. They
follow from the seed and the number of the turn, so a turn can be repeated exactly. Within a turn,
each read of the clock advances it by a millisecond.

During a turn, these are replaced: the clocks of the module ``time``, ``datetime`` in the user's
modules, and the random numbers of Python and of NumPy's global generator. A ``datetime`` that a
function imports locally, and the clocks of NumPy and Arrow, stay real.
"""

from __future__ import annotations

import datetime
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

#: The time from one turn to the next: every unit of a clock that user code may read changes.
_TURN_S = 86_400 + 3_600 + 60 + 1
#: 2026-01-05, a Monday, 06:07:08 UTC.
_BEGINS_S = 1_767_593_228.0

_real_time, _real_localtime, _real_gmtime, _real_strftime = time.time, time.localtime, time.gmtime, time.strftime
_now_s: float | None = None  # of the present turn


def _now() -> float:
    global _now_s
    if _now_s is None:
        return _real_time()
    _now_s += 0.001
    return _now_s


def _now_ns() -> int:
    return int(_now() * 1_000_000_000)


def _localtime(seconds: float | None = None) -> time.struct_time:
    return _real_localtime(_now() if seconds is None else seconds)


def _gmtime(seconds: float | None = None) -> time.struct_time:
    return _real_gmtime(_now() if seconds is None else seconds)


def _strftime(form: str, at: Any = None) -> str:
    return _real_strftime(form, _localtime() if at is None else at)


class _Stand(type):
    """Makes a replacement class pass type tests for the original."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__mro__[1])

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.__mro__[1]

    def __hash__(cls) -> int:
        return hash(cls.__mro__[1])

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.__mro__[1])


class TurnDatetime(datetime.datetime, metaclass=_Stand):
    """``datetime.datetime`` by the clock of the turn. It creates plain datetimes."""

    def __new__(cls, *args: Any, **named: Any) -> Any:
        return datetime.datetime(*args, **named)

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return datetime.datetime.fromtimestamp(_now(), tz)

    @classmethod
    def today(cls) -> Any:
        return datetime.datetime.fromtimestamp(_now())

    @classmethod
    def utcnow(cls) -> Any:
        return datetime.datetime.fromtimestamp(_now(), datetime.UTC).replace(tzinfo=None)


class TurnDate(datetime.date, metaclass=_Stand):
    """``datetime.date`` by the clock of the turn. It creates plain dates."""

    def __new__(cls, *args: Any, **named: Any) -> Any:
        return datetime.date(*args, **named)

    @classmethod
    def today(cls) -> Any:
        return datetime.date.fromtimestamp(_now())


class _TurnModule(ModuleType):
    """The module ``datetime`` as the user's modules see it."""

    def __init__(self) -> None:
        super().__init__("datetime")
        vars(self).update({**vars(datetime), "datetime": TurnDatetime, "date": TurnDate})

    def __reduce__(self) -> Any:
        return _TurnModule, ()


#: Replaced in the module ``time``, for all code; and the same objects under any name in the user's
#: modules.
_CLOCKS = {"time": _now, "time_ns": _now_ns, "localtime": _localtime, "gmtime": _gmtime, "strftime": _strftime}


class TurnCounter:
    """Counts the turns of a schedule. ``namespaces``: of the user's modules."""

    def __init__(self, seed: int, namespaces: Sequence[MutableMapping[str, Any]]) -> None:
        self._seed = seed
        self.number = 0
        stands: dict[int, Any] = {id(getattr(time, name)): by for name, by in _CLOCKS.items()}
        stands |= {id(datetime): _TurnModule(), id(datetime.datetime): TurnDatetime, id(datetime.date): TurnDate}
        self._places = [
            (namespace, name, value, stands[id(value)])
            for namespace in namespaces
            for name, value in namespace.items()
            if id(value) in stands
        ]

    def next(self) -> int:
        self.number += 1
        return self.number

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """Show user code the clock and the random numbers of a turn."""
        global _now_s
        chance = random.Random(f"turn {self._seed} {number}")
        undo = _seed_all(chance)
        before = [(module, name, getattr(module, name)) for module, name in _names()]
        _now_s = _BEGINS_S + number * _TURN_S
        try:
            for name, by in _CLOCKS.items():
                setattr(time, name, by)
            os.urandom = chance.randbytes
            setattr(random, "_urandom", chance.randbytes)  # noqa: B010 - of SystemRandom, and so of ``secrets``
            for namespace, name, _, by in self._places:
                namespace[name] = by
            yield
        finally:
            for namespace, name, value, _ in self._places:
                namespace[name] = value
            for module, name, value in before:
                setattr(module, name, value)
            undo()
            _now_s = None


def _names() -> Iterator[tuple[ModuleType, str]]:
    yield from ((time, name) for name in _CLOCKS)
    yield os, "urandom"
    yield random, "_urandom"


def _seed_all(chance: random.Random) -> Callable[[], None]:
    """Seed the generators that all code shares. Returns a function that restores them."""
    state = random.getstate()
    random.seed(chance.random())
    numpy = sys.modules.get("numpy.random")
    of_numpy = numpy.get_state() if numpy is not None else None
    if numpy is not None:
        numpy.seed(chance.randrange(2**32))

    def put_back() -> None:
        random.setstate(state)
        if numpy is not None:
            numpy.set_state(of_numpy)

    return put_back
