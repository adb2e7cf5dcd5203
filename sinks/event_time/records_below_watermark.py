"""Records that the watermark has passed, key by key, for committers that keep waiting records, and
one more row for each key. A row is identified by its key, its kind, a txid and a number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any, NamedTuple

from sinks.backend import Key, Value

#: The kind of the single row of a key. Records have higher kinds.
OF_KEY = 0
#: The parts after the key that identify the single row of a key: kind, txid, number.
ONE_ROW = (OF_KEY, 0, 0)
#: The due time of a row that is never due.
NOT_DUE = (1 << 62) - 1


#: The topic and the partition of a record, or nothing where they are not known.
Place = tuple[Any, ...]


def numbered(came: Iterable[tuple[Key, int, Value, Place]]) -> Iterator[tuple[Key, int, int, Value]]:
    """The records of a transaction in the order of their times, for the same time in that of their
    places, and of arrival in each: key, number, time, values. Each key has numbers of its own,
    because a task has other keys when there are more tasks, and ``verify`` computes the same rows.

    >>> list(numbered([(("a",), 7, (), ()), (("b",), 6, (), ()), (("a",), 5, (), ())]))
    [(('a',), 0, 5, ()), (('b',), 0, 6, ()), (('a',), 1, 7, ())]
    """
    numbers: Counter[Key] = Counter()
    for key, at, values, _ in sorted(came, key=itemgetter(1, 3)):
        yield key, numbers[key], at, values
        numbers[key] += 1


class Passed(NamedTuple):
    """A record that the watermark has passed. ``place``: its row, or the row that it would have
    had. ``values`` None: the single row of a key, which itself is due."""

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
    """Key by key: the single row, then the records by time. Records of the same time are ordered by
    kind, the highest first, and then by arrival."""
    *key, kind, txid, number = place
    return (repr(tuple(key)), *((0,) if kind == OF_KEY else (1, at, -kind, txid, number)))
