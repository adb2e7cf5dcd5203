"""How the watermark of a step follows the times of the rows."""

from __future__ import annotations

from dataclasses import dataclass

from framework.call_site import Call
from framework.durations import Duration, micros_of
from framework.errors import ConfigError
from framework.operators.watermarks import MAX_AHEAD, check_advance


@dataclass(frozen=True, slots=True)
class WatermarkBounds:
    """``late``: how far a row may be behind the newest row of its partition. ``max_ahead``: a row
    that is further ahead of the planning time is bad. ``idle_after``: a partition without rows for
    this long does not delay the watermark; None: it always does. ``advance_when_idle``: while all
    partitions are idle, the watermark advances with the planning times."""

    late: Duration = 0
    max_ahead: Duration = MAX_AHEAD
    idle_after: Duration | None = None
    advance_when_idle: bool = False

    def checked(self, call: Call) -> WatermarkBounds:
        """These bounds. Raises ``TopologyError`` as ``micros``."""
        try:
            self.micros()
        except ConfigError as error:
            raise call.mistake(error) from None
        return self

    def micros(self) -> tuple[int, int, int | None, bool]:
        """The bounds, with times in microseconds. Raises ``ConfigError`` for a bound that is not a
        length of time, and for an ``advance_when_idle`` without effect."""
        check_advance(self.advance_when_idle, self.idle_after)
        idle_after = micros_of(self.idle_after, "idle_after") if self.idle_after is not None else None
        late, max_ahead = micros_of(self.late, "late"), micros_of(self.max_ahead, "max_ahead")
        return late, max_ahead, idle_after, self.advance_when_idle
