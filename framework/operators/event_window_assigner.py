"""Event-time windows: the assignment of windows to times. Pure arithmetic, in microseconds since
1970. A window includes its start and excludes its end.

Transactional topologies fold records into windows: ``assign`` gives the windows of an array of
times. They identify a window by its end, because that is when it is due. Core topologies keep
tuples until their windows are due, each tuple once, in its *pane*: the length of a pane divides
both the length and the step of the windows.
"""

from __future__ import annotations

import datetime
import math
import zoneinfo
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from framework.durations import Duration, length_of, micros_above_0, micros_of
from framework.errors import ConfigError
from framework.operators.timestamps import micros_since_epoch
from framework.user_call_argument_checks import checks_call

_SECOND, _DAY = 1_000_000, 86_400_000_000
#: No clock was ever set forward by more, except over whole days.
_GAP_MAX = 3 * 3_600 * _SECOND
_EPOCH = datetime.date(1970, 1, 1)

Micros = np.ndarray[Any, np.dtype[np.int64]]


class Assigned(NamedTuple):
    """Windows assigned to times. ``rows``: indices of the given times, once per window. ``starts``,
    ``ends``: of the windows."""

    rows: Micros
    starts: Micros
    ends: Micros


@dataclass(frozen=True, slots=True)
class EventWindows:
    """Windows of ``length``, one every ``step``, from ``origin`` on (microseconds). With ``zone``,
    the name of a time zone, they begin at midnight there, and ``length`` is whole days: of 23, 24
    or 25 hours.

    >>> minutes = EventWindows(60_000_000, 60_000_000)
    >>> minutes.assign(np.array([0, 59_999_999, 60_000_000])).ends.tolist()
    [60000000, 60000000, 120000000]
    """

    length: int
    step: int
    origin: int = 0
    zone: str | None = None
    #: The function that has made them, for messages.
    made_by: str = field(default="hopping", compare=False)

    def __str__(self) -> str:
        zone = f", zone={self.zone!r}" if self.zone is not None else ""
        if self.step == self.length:
            return f"tumbling({length_of(self.length)!r}{zone})"
        return f"{self.made_by}({length_of(self.length)!r}, {length_of(self.step)!r})"

    def assign(self, at: Micros) -> Assigned:
        """The windows of each time, the last one first."""
        if self.zone is not None:
            return Assigned(np.arange(len(at)), *self._days(at))
        last = self.origin + (at - self.origin) // self.step * self.step
        rows, starts = [], []
        for before in range(-(-self.length // self.step)):
            start = last - before * self.step
            inside = at - start < self.length
            rows.append(np.flatnonzero(inside))
            starts.append(start[inside])
        first = np.concatenate(starts)
        return Assigned(np.concatenate(rows), first, first + self.length)

    def last_of(self, at: int) -> tuple[int, int]:
        """The start and the end of the last window of a time."""
        if self.zone is not None:
            return self._days_around(at)
        start = self.origin + (at - self.origin) // self.step * self.step
        return start, start + self.length

    def end_of(self, at: int) -> int:
        """The end of the last window of a time, of a pane, or of the window that starts there."""
        return self.last_of(at)[1]

    def pane_of(self, at: int) -> int:
        """The start of the pane that contains a time."""
        if self._tumble:
            return self.last_of(at)[0]
        return self.origin + (at - self.origin) // self._pane * self._pane

    def windows_of(self, pane: int) -> Sequence[int]:
        """The starts of the windows that a pane is part of, the earliest first.

        >>> list(hopping(10, 5).windows_of(20_000_000))
        [15000000, 20000000]
        """
        if self._tumble:
            return (pane,)
        last, _ = self.last_of(pane)
        return range(last - (last + self.length - self._pane - pane) // self.step * self.step, last + 1, self.step)

    def panes_of(self, start: int) -> Sequence[int]:
        """The starts of the panes of a window."""
        return (start,) if self._tumble else range(start, start + self.length, self._pane)

    @property
    def _tumble(self) -> bool:
        """A pane is a window."""
        return self.step == self.length

    @property
    def _pane(self) -> int:
        return math.gcd(self.length, self.step)

    def settings(self) -> dict[str, Any]:
        """The settings that define a window; JSON-able."""
        return {"length": self.length, "step": self.step, "origin": self.origin, "zone": self.zone}

    def _days(self, at: Micros) -> tuple[Micros, Micros]:
        """Computes each distinct quarter of an hour once: at most one day ends within one."""
        quarters, place = np.unique(at // 900_000_000, return_inverse=True)
        bounds = np.empty((len(quarters), 2), np.int64)
        for number, quarter in enumerate(quarters.tolist()):
            bounds[number] = self._days_around(quarter * 900_000_000)
        starts, ends = bounds[place, 0], bounds[place, 1]
        after = np.flatnonzero(at >= ends)
        for end in np.unique(ends[after]).tolist():
            here = after[ends[after] == end]
            starts[here], ends[here] = self._days_around(end)
        return starts, ends

    def _days_around(self, at: int) -> tuple[int, int]:
        zone, days = str(self.zone), self.length // _DAY
        day = _day_of(zone, at)
        first = day - (day - self.origin // _DAY) % days
        return _midnight(zone, first), _midnight(zone, first + days)


@checks_call
def tumbling(length: Duration, *, origin: Duration = 0, zone: str | None = None) -> EventWindows:
    """Windows one after the other. ``origin``: how long after midnight of 1970-01-01 in UTC (with
    ``zone``: after that day) the first one begins. ``zone``: for windows of whole days. Raises
    ``ConfigError``."""
    micros = micros_above_0(length, "the length of a window")
    shift = micros_of(origin, "the origin of a window")
    if zone is not None:
        try:
            zoneinfo.ZoneInfo(zone)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, TypeError) as error:
            raise ConfigError(f"zone {zone!r} is no name of a time zone: give one such as 'Europe/Berlin'") from error
        if micros % _DAY or shift % _DAY:
            raise ConfigError(f"a window of {length!r} with a zone: only windows of whole days take a zone")
    return EventWindows(micros, micros, shift % micros, zone)


@checks_call
def hopping(length: Duration, step: Duration, *, origin: Duration = 0) -> EventWindows:
    """Windows of ``length``, one every ``step``; each time belongs to several. Raises
    ``ConfigError``."""
    return _overlapping(length, step, origin)


def _overlapping(length: Duration, step: Duration, origin: Duration) -> EventWindows:
    micros, every = micros_above_0(length, "the length of a window"), micros_above_0(step, "the step of a window")
    if every > micros:
        raise ConfigError(f"windows of {length!r} every {step!r} leave gaps: the step is at most the length")
    return EventWindows(micros, every, micros_of(origin, "the origin of a window") % every)


@checks_call
def sliding(length: Duration, step: Duration | None = None, *, origin: Duration = 0) -> EventWindows:
    """The windows of ``hopping``, by the name that Storm, Spark, Flink's DataStream and Beam give
    them. A pipeline may replace one name by the other. Raises ``ConfigError``, also without a step,
    because windows that begin or end at records, as in Kafka Streams, do not exist (ADR 123)."""
    if step is None:
        raise ConfigError(
            f"sliding({length!r}) has no step: give one, as in sliding('10 min', '1 min'): windows begin at fixed times, not "
            "at records"
        )
    return replace(_overlapping(length, step, origin), made_by="sliding")


@lru_cache(maxsize=100_000)
def _midnight(zone: str, day: int) -> int:
    """The first moment of a day (counted from 1970-01-01) in a zone. If the clock skips midnight,
    the day begins after the gap; if midnight comes twice, with the first one."""
    where = zoneinfo.ZoneInfo(zone)
    date = _EPOCH + datetime.timedelta(days=day)
    first = micros_since_epoch(datetime.datetime(date.year, date.month, date.day, tzinfo=where))
    if _date_of(zone, first - 1) < day:
        return first
    # The clock skips midnight and more, so ``first`` is in the gap or after it.
    before, first = (first - _GAP_MAX) // _SECOND, -(-first // _SECOND)
    while before + 1 < first:
        middle = (before + first) // 2
        before, first = (before, middle) if _date_of(zone, middle * _SECOND) >= day else (middle, first)
    return first * _SECOND


def _day_of(zone: str, at: int) -> int:
    """The day of a moment in a zone: the last one that has begun. The clock may return from a day
    to the evening before, which then belongs to the day that has begun."""
    day = _date_of(zone, at)
    while _midnight(zone, day + 1) <= at:
        day += 1
    return day


def _date_of(zone: str, at: int) -> int:
    """The date that the clock of a zone shows, as a number of days."""
    moment = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(microseconds=at)
    return (moment.astimezone(zoneinfo.ZoneInfo(zone)).date() - _EPOCH).days
