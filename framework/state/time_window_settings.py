"""The settings of windows by time in a core topology."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

from framework.durations import MICROS, seconds_to_micros
from framework.errors import ConfigError
from framework.operators.event_window_assigner import EventWindows

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """The tuples of ``length_s`` seconds, every ``step_s`` seconds; without a step, one window
    after the other. Windows begin at whole steps since 1970.

    * ``timestamp``: the field with a tuple's time: a ``datetime`` with a zone, or a number of
      seconds since 1970.
    * ``lag_s``: how much out of order tuples may arrive; the *watermark* is that far behind the
      latest tuple. A window fires when the watermark reaches its end.
    * ``lateness_s``: how long a window is kept after its end; it fires again with each tuple that
      arrives for it. A tuple that arrives still later is *late*. When ``lateness_s`` is raised,
      windows that are over stay over.

    * ``idle_s``: an input without tuples in a task for this many seconds no longer delays the
      task's windows. When all inputs are idle, time advances with the clock, so windows fire
      without input. Tuples that arrive later with an earlier time may be late. None: time stands
      still without input.

    * ``max_ahead_s``: how far a tuple's time may be ahead of the clock, one day by default. A time
      beyond that is wrong, such as milliseconds that are taken for seconds: its tuple is late, and
      moves no watermark. ``math.inf``: any time is accepted.

    Without a ``timestamp``, windows use *processing time*: a tuple's time is when the bolt executes
    it, and a window fires when its end has passed, even without input.
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
        """The settings that must not change while tuples are kept."""
        return ["processing time" if self.timestamp is None else "time", self.length / MICROS, self.every / MICROS]

    @property
    def length(self) -> int:
        return seconds_to_micros(self.length_s)

    @property
    def every(self) -> int:
        return seconds_to_micros(self.step_s) if self.step_s is not None else self.length

    @property
    def assigner(self) -> EventWindows:
        """Assigns windows to a time."""
        return EventWindows(self.length, self.every)

    @property
    def lag(self) -> int:
        return seconds_to_micros(self.lag_s)

    @property
    def lateness(self) -> int:
        return seconds_to_micros(self.lateness_s)

    @property
    def idle(self) -> int | None:
        return seconds_to_micros(self.idle_s) if self.idle_s is not None else None

    def is_ahead(self, time: int, now: int) -> bool:
        """Whether a time is further ahead of ``now`` than allowed."""
        return (time - now) / MICROS > self.max_ahead_s
