"""How the watermark of a step follows the times of the rows."""

from __future__ import annotations

from dataclasses import dataclass

from framework.call_site import Call
from framework.durations import Duration, micros_of
from framework.errors import ConfigError
from framework.operators.watermarks import MAX_AHEAD


@dataclass(frozen=True, slots=True)
class WatermarkBounds:
    """``late``: how far a row may be behind the newest one of its partition. ``max_ahead``: a row
    that is further beyond the planning time is bad. ``idle_after``: a partition without rows for
    this long does not delay the watermark; None: it always does."""

    late: Duration = 0
    max_ahead: Duration = MAX_AHEAD
    idle_after: Duration | None = None

    def checked(self, call: Call) -> WatermarkBounds:
        """These bounds. Raises ``TopologyError`` for one that is no length of time."""
        try:
            self.micros()
        except ConfigError as error:
            raise call.mistake(error) from None
        return self

    def micros(self) -> tuple[int, int, int | None]:
        """The bounds in microseconds. Raises ``ConfigError`` for one that is no length of time."""
        idle_after = micros_of(self.idle_after, "idle_after") if self.idle_after is not None else None
        return micros_of(self.late, "late"), micros_of(self.max_ahead, "max_ahead"), idle_after
