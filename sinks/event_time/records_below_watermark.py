"""Records that the watermark has passed, key by key, for committers that keep one row of each key
beside the records that wait. A row is identified by its key, its kind, a txid and a number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any, NamedTuple

from sinks.backend import Key, Value

#: The kind of the one row of a key. Records have kinds above it.
OF_KEY = 0
#: The parts after the key that identify the one row of a key: kind, txid, number.
ONE_ROW = (OF_KEY, 0, 0)
#: The due time of a row that is never due.
NOT_DUE = (1 << 62) - 1


def numbered(came: Iterable[tuple[Key, int, Value]]) -> Iterator[tuple[Key, int, int, Value]]:
    """The records of a transaction in the order of their times, or of arrival for the same time:
    key, number, time, values. Each key has numbers of its own, because a task has other keys when
    there are more tasks, and ``verify`` computes the same rows.

    >>> list(numbered([(("a",), 7, ()), (("b",), 6, ()), (("a",), 5, ())]))
    [(('a',), 0, 5, ()), (('b',), 0, 6, ()), (('a',), 1, 7, ())]
    """
    numbers: Counter[Key] = Counter()
    for key, at, values in sorted(came, key=itemgetter(1)):
        yield key, numbers[key], at, values
        numbers[key] += 1


class Passed(NamedTuple):
    """A record that the watermark has passed. ``place``: its row, or the one that it would have
    had. ``values`` None: the one row of a key, which is due itself."""

    place: Key
    at: int
    values: Value | None

    @property
    def key(self) -> Key:
        return self.place[: -len(ONE_ROW)]

    @property
    def kind(self) -> int:
        kind: int = self.place[-len(ONE_ROW)]
        return kind


def in_order(at: int, place: Key) -> tuple[Any, ...]:
    """Key by key: its one row, then its records by time; of the same time, those of the higher kind
    first, in the order of arrival."""
    *key, kind, txid, number = place
    return (repr(tuple(key)), *((0,) if kind == OF_KEY else (1, at, -kind, txid, number)))
