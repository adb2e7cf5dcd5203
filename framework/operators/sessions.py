"""Sessions: a session contains the records of a key each of which is less than a gap after the one
before. Pure arithmetic, in microseconds.

Time is divided into *panes* as long as the gap. Two records in one pane belong to one session. Two
adjacent panes belong to one session if the last record of the first and the first record of the
second are less than a gap apart. Other panes do not touch. So a record changes its own pane only,
and a session is combined when it ends, from its last pane and the panes before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from framework.durations import Duration, length_of, micros_above_0
from framework.user_call_argument_checks import checks_call

Micros = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Sessions:
    """Sessions whose records are less than ``gap`` microseconds apart."""

    gap: int

    def __str__(self) -> str:
        return f"session({length_of(self.gap)!r})"


@checks_call
def session(gap: Duration) -> Sessions:
    """Windows that end when a key has had no record for ``gap``. Raises ``ConfigError``."""
    return Sessions(micros_above_0(gap, "the gap of a session"))


class Pane(NamedTuple):
    """A pane. ``first``: the time of its first record. ``due``: the time of its last record plus
    the gap.
    """

    first: int
    due: int
    values: tuple[Any, ...]

    def reaches(self, following: Pane) -> bool:
        """Whether the next pane belongs to the same session."""
        return following.first < self.due


def pane_starts(times: Micros, gap: int) -> Micros:
    """The start of the pane of each time.

    >>> pane_starts(np.array([-1, 0, 4, 5]), 5).tolist()
    [-5, 0, 0, 5]
    """
    return times // gap * gap


def ends(pane: Pane, following: Pane | None) -> bool:
    """Whether a session ends with this pane. ``following``: the next one, where there is one."""
    return following is None or not pane.reaches(following)


def runs(starts: Iterable[int], gap: int, panes: Mapping[int, Pane]) -> list[list[int]]:
    """The starts of the panes of each session that these panes alone form, in ascending order.

    >>> panes = {0: Pane(1, 6, ()), 5: Pane(5, 14, ()), 10: Pane(14, 19, ()), 20: Pane(20, 25, ())}
    >>> runs([20, 5, 0, 10], 5, panes)
    [[0, 5], [10], [20]]
    """
    found: list[list[int]] = []
    for start in sorted(starts):
        if found and start - found[-1][-1] == gap and panes[found[-1][-1]].reaches(panes[start]):
            found[-1].append(start)
        else:
            found.append([start])
    return found


def together(panes: Sequence[Pane], fold: Callable[[Sequence[Any]], Any]) -> Pane:
    """One session of one or more panes in the order of their times. ``fold``: merges the values of
    all panes."""
    return Pane(panes[0].first, panes[-1].due, fold([each.values for each in panes]))
