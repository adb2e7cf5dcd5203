"""Joins of two sides within a bound of event time. Pure arithmetic, in microseconds.

Time is divided into *buckets* slightly longer than twice the bound. So the partners of a record are
in two buckets at most.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Protocol, TypeVar


class Timed(Protocol):
    """A record with its event time."""

    at: int


T = TypeVar("T", bound=Timed)


def bucket_of(at: int, within: int) -> int:
    return at // (2 * within + 1)


def bucket_end(bucket: int, within: int) -> int:
    """The last time in a bucket."""
    return (bucket + 1) * (2 * within + 1) - 1


def buckets_around(at: int, within: int) -> range:
    """The buckets that hold the partners of a record.

    >>> list(buckets_around(7, 3)), list(buckets_around(10, 3)), list(buckets_around(-1, 0))
    ([0, 1], [1], [-1])
    """
    return range(bucket_of(at - within, within), bucket_of(at + within, within) + 1)


def pairs(lefts: Sequence[T], rights: Sequence[T], within: int) -> Iterator[tuple[T, T]]:
    """Each left record with each right record within ``within``, in the order of the left ones, and
    of the times of the right ones."""
    ordered = sorted(rights, key=attrgetter("at"))
    times = [each.at for each in ordered]
    for left in lefts:
        for place in range(bisect_left(times, left.at - within), bisect_right(times, left.at + within)):
            yield left, ordered[place]
