"""Which windows a tuple belongs to, when each is due, and when its tuples can go. Pure arithmetic,
in whole microseconds.

A sliding window is made of *panes*. The length of a pane divides both the window's length and its
step. So a tuple is kept only once, in its pane.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, Union

from framework.errors import BadRecordError, ConfigError

MICROS = 1_000_000
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class CountWindow:
    """The last ``length`` tuples, every ``step`` tuples; without a step, one window after the
    other. ``early``: fire from the first step on, as in Storm, with as many tuples as there are;
    otherwise the first window is a full one.

    >>> [count for count in range(12) if CountWindow(5, 2).due(count)]
    [5, 7, 9, 11]
    >>> [count for count in range(1, 12) if CountWindow(5, 2, early=True).due(count)]
    [2, 4, 6, 8, 10]
    """

    length: int
    step: int | None = None
    early: bool = False

    def __post_init__(self) -> None:
        if self.length < 1 or (self.step is not None and not 1 <= self.step <= self.length):
            raise ConfigError(f"{self} makes no windows: a length of 1 or more, and a step from 1 to the length")

    def kind(self) -> list[Any]:
        """What must not change while tuples are kept."""
        return ["early count" if self.early else "count", self.length, self.every]

    @property
    def every(self) -> int:
        return self.step if self.step is not None else self.length

    def due(self, count: int) -> bool:
        """Whether a window ends with the tuple number ``count``, counted from 1."""
        if self.early:
            return count % self.every == 0
        return count >= self.length and (count - self.length) % self.every == 0

    def start(self, count: int) -> int:
        """The number, from 0, of the first tuple of the window that ends with tuple ``count``."""
        return max(count - self.length, 0)

    def gone(self, count: int) -> range:
        """The numbers, from 0, of the tuples that no window needs after the one that ends with
        tuple ``count``."""
        return range(self.start(count), self.start(count + self.every))


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """The tuples of ``length_s`` seconds, every ``step_s`` seconds; without a step, one window
    after the other. Windows begin at whole steps since 1970.

    ``timestamp``: the field with a tuple's time: a ``datetime`` with a zone, or a number of seconds
    since 1970. ``lag_s``: how much out of order tuples may come; the *watermark* is that far behind
    the latest one. A window fires when the watermark reaches its end. ``lateness_s``: how long the
    window is kept after that; it fires again with each tuple that comes for it. A tuple that comes
    still later is *late*. When ``lateness_s`` is raised, windows that are over stay so.

    ``idle_s``: an input of which nothing has come to a task for so many seconds holds up none of
    its windows any more. When nothing has come of any input, time goes on as fast as the clock
    does, so windows fire though nothing comes. What comes later with an earlier time may be late.
    None: time stands still while nothing comes.

    ``max_ahead_s``: how far a tuple's time may be ahead of the clock, one day by default. A time
    beyond that is wrong, such as milliseconds that are taken for seconds: its tuple is late, and
    moves no watermark. ``math.inf``: any time is right.

    Without a ``timestamp``, windows go by *processing time*: a tuple's time is when the bolt
    executes it, and a window fires when its end has passed, even if nothing comes.
    """

    length_s: float
    timestamp: str | None = None
    step_s: float | None = None
    lag_s: float = 0.0
    lateness_s: float = 0.0
    _: KW_ONLY
    idle_s: float | None = None
    max_ahead_s: float = DAY_S

    def __post_init__(self) -> None:
        step_s = self.step_s if self.step_s is not None else self.length_s
        if not (self.length_s >= step_s > 0) or min(self.lag_s, self.lateness_s) < 0:
            raise ConfigError(
                f"{self} makes no windows: a step above 0 and up to the length, and neither lag nor lateness below 0"
            )
        if self.idle_s is not None and not 0 < self.idle_s < math.inf:
            raise ConfigError(f"{self}: idle_s is {self.idle_s}: give seconds above 0, or leave it out")
        if not self.max_ahead_s >= 0:
            raise ConfigError(f"{self}: max_ahead_s is {self.max_ahead_s}: give seconds, 0 or more, or math.inf")
        if self.timestamp is None and (self.lag_s or self.lateness_s or self.idle_s):
            raise ConfigError(
                f"{self}: lag, lateness and idle_s are of tuples with a time of their own: name its field, timestamp="
            )

    def kind(self) -> list[Any]:
        """What must not change while tuples are kept."""
        return ["processing time" if self.timestamp is None else "time", self.length / MICROS, self.every / MICROS]

    @property
    def length(self) -> int:
        return micros(self.length_s)

    @property
    def every(self) -> int:
        return micros(self.step_s) if self.step_s is not None else self.length

    @property
    def pane(self) -> int:
        return math.gcd(self.length, self.every)

    @property
    def lag(self) -> int:
        return micros(self.lag_s)

    @property
    def lateness(self) -> int:
        return micros(self.lateness_s)

    @property
    def idle(self) -> int | None:
        return micros(self.idle_s) if self.idle_s is not None else None

    def is_ahead(self, time: int, now: int) -> bool:
        """Whether a time is further ahead of ``now`` than any can be."""
        return (time - now) / MICROS > self.max_ahead_s

    def pane_of(self, time: int) -> int:
        """The start of the pane that a time is in."""
        return time // self.pane * self.pane

    def windows_of(self, pane: int) -> Iterator[int]:
        """The starts of the windows that a pane is part of, the earliest first.

        >>> list(TimeWindow(10, "at", step_s=5).windows_of(20 * MICROS))
        [15000000, 20000000]
        """
        last = pane // self.every * self.every
        first = -((self.length - self.pane - pane) // self.every) * self.every
        return iter(range(first, last + 1, self.every))

    def panes_of(self, start: int) -> range:
        """The starts of the panes of a window."""
        return range(start, start + self.length, self.pane)

    def expires(self, pane: int) -> int:
        """The watermark from which on no window needs a pane."""
        return pane // self.every * self.every + self.length + self.lateness


Windows = Union[CountWindow, TimeWindow]


def micros(seconds: float) -> int:
    return round(seconds * MICROS)


def time_of(value: Any, field: str) -> int:
    """A tuple's time, in microseconds since 1970. Raises ``BadRecordError`` for a value that is not
    a time."""
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        since = value - datetime.datetime.fromtimestamp(0, datetime.UTC)
        return (since.days * 86_400 + since.seconds) * MICROS + since.microseconds
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return micros(value)
    raise BadRecordError(
        f"field {field!r} holds {value!r}: a window needs a datetime with a zone, or seconds since 1970 as a number"
    )
