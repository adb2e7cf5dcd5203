"""The watermark of one task over its inputs, and over the source partitions of these inputs. Pure
arithmetic, in whole microseconds; the elapsed time is given.

An *origin* stands for a source partition. The records of a partition are read in order, except for
the lag. So the watermark never passes the newest time seen of a partition with unread records,
because its next record may be as old as that. A partition that was read to its end no longer delays
the watermark.

If rows may overtake each other on their way, the times seen in a round count only when all rows of
that round have arrived (``Reading.upto``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from framework.durations import Duration
from framework.errors import ConfigError

#: The stream of rows that have expired.
EXPIRED_STREAM = "expired"
#: The stream of tuples that arrive after their window has closed.
LATE_STREAM = "late"
#: The stream of changes in open windows.
CHANGED_STREAM = "changed"
#: How far the time of a record may be beyond the planning time of its transaction, where the user
#: gives no ``max_ahead``.
MAX_AHEAD: Duration = "1 day"
#: Before every time.
NEVER = -(1 << 62)
#: After every time.
_NO_BOUND = 1 << 62
#: A component and its stream.
Source = tuple[str, str]


def is_idle(seen_at: int, now: int, idle_after: int | None) -> bool:
    """Whether a source whose last row arrived at ``seen_at`` no longer delays the watermark.
    ``idle_after``: None: it always does."""
    return idle_after is not None and now - seen_at >= idle_after


def check_advance(advance_when_idle: object, idle_after: Duration | None) -> None:
    """Raise ``ConfigError`` for an ``advance_when_idle`` that can have no effect."""
    if not isinstance(advance_when_idle, bool):
        raise ConfigError(f"advance_when_idle is {advance_when_idle!r}: give True or False")
    if advance_when_idle and idle_after is None:
        raise ConfigError("advance_when_idle needs idle_after: without it, no partition is idle")


def slowest(sources: Iterable[tuple[int, int]], now: int, idle_after: int | None, *, advance_when_idle: bool) -> int:
    """The newest time of the source that is furthest behind and not idle; ``NEVER`` before any row.
    ``sources``: the newest time of each, and when its last row arrived. ``advance_when_idle``: when
    all are idle, time has advanced with ``now`` since the last row.

    >>> slowest([(50, 0), (20, 9)], 10, None, advance_when_idle=True)
    20
    >>> [slowest([(50, 0), (20, 9)], now, 10, advance_when_idle=True) for now in (10, 30)]
    [20, 80]
    """
    sources = list(sources)
    awake = [newest for newest, seen_at in sources if not is_idle(seen_at, now, idle_after)]
    if awake:
        return min(awake)
    gone_on = (newest + now - seen_at for newest, seen_at in sources if newest > NEVER)
    return max(gone_on, default=NEVER) if advance_when_idle else NEVER


class Reading(NamedTuple):
    """The progress of the sources in round ``round``.

    * ``upto``: all rows that were emitted in rounds up to this one have arrived.
    * ``unread``: for each input, the unread origins, with the newest time that any task has seen of
      each on that input; None while these are unknown."""

    round: int
    upto: int
    unread: Mapping[Source, Mapping[int, int] | None]


class _Input:
    """The times of an input. ``latest``: the newest time that counts. ``came``: when the last row
    arrived, or the task began. ``in_order``: rows of an origin do not overtake each other."""

    def __init__(self, latest: int, came: int, *, in_order: bool, known: bool) -> None:
        self.latest, self.came, self.in_order = latest, came, in_order
        self.unread: Mapping[int, int] | None = {} if known else None
        self.unknown_since = came
        # origin -> its newest time, and when that was noticed
        self.noticed: dict[int, tuple[int, int]] = {}
        self._own: dict[int, int] = {}  # origin -> the newest time seen in this task
        # (round, newest time) of rows that do not count yet
        self._later: list[tuple[int, int]] = []

    def saw(self, origin: int | None, at: int, round_: int, now: int) -> bool:
        """Returns whether a time counts that did not count before."""
        self.came = now
        rose = False
        if origin is not None:
            if at > self._own.get(origin, NEVER):
                self._own[origin] = at
                rose = self.in_order and origin in (self.unread or ())
            if origin in self.noticed:
                self.noticed[origin] = self.noticed[origin][0], now
        if at <= self.newest:
            return rose
        if self.in_order:
            self.latest, rose = at, True
        elif self._later and self._later[-1][0] == round_:
            self._later[-1] = round_, at
        else:
            self._later.append((round_, at))
        return rose

    @property
    def newest(self) -> int:
        """The newest time seen, whether or not it counts."""
        return self._later[-1][1] if self._later else self.latest

    def hear(self, unread: Mapping[int, int] | None, upto: int, now: int) -> None:
        while self._later and self._later[0][0] <= upto:
            self.latest = self._later.pop(0)[1]
        if unread is None and self.unread is not None:
            self.unknown_since = now
        self.unread = unread
        before, self.noticed = self.noticed, {}
        for origin, newest in (unread or {}).items():
            known = before.get(origin)
            self.noticed[origin] = known if known is not None and known[0] >= newest else (newest, now)

    def bound(self, idle: int | None, now: int) -> int:
        """The bound set by partitions that are unread and not idle."""
        if self.unread is None:
            return _NO_BOUND if is_idle(self.unknown_since, now, idle) else NEVER
        found = _NO_BOUND
        for origin, newest in self.unread.items():
            if not is_idle(self.noticed[origin][1], now, idle):
                own = self._own.get(origin, NEVER) if self.in_order else NEVER
                found = min(found, max(newest, own))
        return found

    def changes_at(self, idle: int) -> list[int]:
        """When partitions become idle, without further rows."""
        found = [self.came + idle, *(noticed + idle for _, noticed in self.noticed.values())]
        return found if self.unread is not None else [*found, self.unknown_since + idle]


class Watermark:
    """The watermark of one task.

    * ``latest``: the newest time of each input so far.
    * ``lag``: how far the watermark is behind.
    * ``idle``: the time without a row after which an input, or a partition, no longer delays the
      watermark; None: it always does.
    * ``now``: the elapsed time.
    * ``follows``: the inputs whose unread partitions ``hear`` will report, each with whether its
      rows keep their order. Partitions of other inputs are unknown, and delay nothing.

    >>> mark = Watermark({("spout", "default"): NEVER}, lag=0, idle=None, now=0)
    >>> mark.saw(("spout", "default"), None, 50, now=0), mark.reached(0)
    (True, 50)
    >>> mark.hear(Reading(2, 1, {("spout", "default"): {1: 20, 2: 60}}), now=0)
    >>> mark.reached(0)
    20
    """

    def __init__(
        self,
        latest: Mapping[Source, int],
        *,
        lag: int,
        idle: int | None,
        now: int,
        follows: Mapping[Source, bool] | None = None,
    ) -> None:
        follows = follows or {}
        self._lag, self._idle, self._round = lag, idle, 0
        self._inputs = {
            each: _Input(at, now, in_order=follows.get(each, True), known=each not in follows)
            for each, at in latest.items()
        }
        self._seen: dict[Source, dict[int | None, int]] = {}

    def latest_of(self, source: Source) -> int:
        return self._inputs[source].latest

    def latest(self) -> dict[Source, int]:
        """The newest time of each input that counts."""
        return {each: its.latest for each, its in self._inputs.items()}

    def newest(self) -> dict[Source, int]:
        """The newest time of each input that was seen."""
        return {each: its.newest for each, its in self._inputs.items()}

    def saw(self, source: Source, origin: int | None, at: int, now: int) -> bool:
        """A row has arrived. ``origin``: None if its partition is unknown. Returns whether
        ``reached`` may have changed."""
        seen = self._seen.setdefault(source, {})
        seen[origin] = max(at, seen.get(origin, NEVER))
        return self._inputs[source].saw(origin, at, self._round, now)

    def take_seen(self) -> Mapping[Source, Mapping[int | None, int]]:
        """The newest time of each origin since the last call."""
        seen, self._seen = self._seen, {}
        return seen

    def hear(self, reading: Reading, now: int) -> None:
        """Take in the progress of the sources, before the rows of a round arrive."""
        self._round = reading.round
        for source, unread in reading.unread.items():
            if source in self._inputs:
                self._inputs[source].hear(unread, reading.upto, now)

    def reached(self, now: int) -> int:
        """The watermark: ``lag`` behind the newest time of the input that is furthest behind and
        not idle, and of each partition that is not idle and not read to its end. When all inputs
        are idle, time advances since the last row."""
        inputs, idle = self._inputs.values(), self._idle
        latest = slowest([(each.latest, each.came) for each in inputs], now, idle, advance_when_idle=True)
        latest = min([latest, *(each.bound(idle, now) for each in inputs)])
        return latest - self._lag if latest > NEVER else NEVER

    def due_in(self, at: int, now: int) -> int | None:
        """Time until the watermark may have reached ``at`` without further rows: 0 or less when it
        has. None: never."""
        reached, idle = self.reached(now), self._idle
        if reached >= at:
            return 0
        if idle is None:
            return None
        inputs = self._inputs.values()
        changes = [each - now for its in inputs for each in its.changes_at(idle) if each > now]
        goes_on = all(is_idle(each.came, now, idle) for each in inputs) and reached > NEVER
        if goes_on and all(each.bound(idle, now) == _NO_BOUND for each in inputs):
            changes.append(at - reached)
        return min(changes, default=None)
