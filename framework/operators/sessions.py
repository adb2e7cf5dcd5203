"""Sessions: records of a key of which each is less than a gap after the one before. Pure
arithmetic, in microseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

Values = tuple[Any, ...]
Micros = np.ndarray[Any, np.dtype[np.int64]]


class Session(NamedTuple):
    """``first`` and ``last``: the times of its first and last record. ``is_new``: no part of it was
    there before the transaction."""

    first: int
    last: int
    values: Values
    is_new: bool = False


def merged(sessions: Iterable[Session], gap: int, merge: Callable[[Values, Values], Values]) -> list[Session]:
    """Sessions of one key, in the order of their times, after those that a record connects are made
    one.

    >>> add = lambda one, other: (one[0] + other[0],)
    >>> merged([Session(20, 25, (1,)), Session(0, 4, (1,)), Session(10, 16, (5,), is_new=True)], 5, add)
    [Session(first=0, last=4, values=(1,), is_new=False), Session(first=10, last=25, values=(6,), is_new=False)]
    """  # noqa: W505 - doctest lines are not wrapped
    found: list[Session] = []
    for each in sorted(sessions, key=lambda session: session.first):
        before = found[-1] if found else None
        if before is not None and each.first - before.last < gap:
            found[-1] = Session(
                before.first,
                max(before.last, each.last),
                merge(before.values, each.values),
                before.is_new and each.is_new,
            )
        else:
            found.append(each)
    return found


def starts_of(times: Micros, same_key: np.ndarray[Any, np.dtype[np.bool_]], gap: int) -> Micros:
    """The start of each record's session, among these records. They are in the order of their keys,
    and of their times within a key. ``same_key``: whether each record but the first has the key of
    the one before it."""
    begins = np.ones(len(times), bool)
    begins[1:] = ~(same_key & (np.diff(times) < gap))
    return times[np.maximum.accumulate(np.where(begins, np.arange(len(times)), 0))]
