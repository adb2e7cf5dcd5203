"""The event time of a transactional topology: how its watermark advances from one transaction to
the next. Pure arithmetic, in microseconds.

The watermark after a transaction depends on the clock before it, on the transaction's records, and
on its planning time, which is part of the plan. So a replay gives the same watermark.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from framework.operators.watermarks import NEVER, is_idle, slowest


class PartitionTime(NamedTuple):
    """The time of a source partition: its newest event time, and the elapsed time at the planning
    of the last transaction with a record of it."""

    newest: int
    seen_at: int


@dataclass(frozen=True, slots=True)
class EventClock:
    """The clock of a transaction.

    * ``watermark``: no record that is on time is older.
    * ``planned_at``: when the transaction was planned.
    * ``elapsed``: the sum of the times between plans. It never goes back, even if the clock of
      another leader is behind, and does not advance while a partition has unplanned records, so
      that no partition becomes idle then.
    * ``timeless``: partition -> the elapsed time at which its first record was planned, if no
      record of it had an event time so far."""

    watermark: int = NEVER
    planned_at: int = NEVER
    elapsed: int = 0
    partitions: Mapping[str, PartitionTime] = field(default_factory=dict)
    timeless: Mapping[str, int] = field(default_factory=dict)

    def after(
        self,
        newest: Mapping[str, int],
        planned_at: int,
        *,
        out_of_orderness: int,
        idle_after: int | None,
        unread: bool = False,
        behind: bool = False,
        begun: Iterable[str] = (),
        advance_when_idle: bool = False,
    ) -> EventClock:
        """The clock after a transaction.

        * ``newest``: partition -> the newest event time read from it.
        * ``out_of_orderness``: how far behind the newest time of its partition a record may be.
        * ``idle_after``: the time without a record after which a partition no longer delays the
          watermark; None: it always does.
        * ``unread``: a partition has records, none of which was ever read.
        * ``behind``: the transaction reads nothing from a partition that has records.
        * ``begun``: the partitions that have been read, but not to their end so far. Until such a
          partition has had an event time, its next record may have any time. So the partition
          delays the watermark, until it is idle: ``idle_after`` counts from its first records.
        * ``advance_when_idle``: while all partitions are idle, event time advances with the elapsed
          time.

        >>> clock = EventClock().after({"a": 50, "b": 20}, 0, out_of_orderness=5, idle_after=60)
        >>> clock.watermark, clock.after({"a": 90}, 60, out_of_orderness=5, idle_after=60).watermark
        (15, 85)
        """
        elapsed = self.elapsed
        if planned_at == NEVER:
            planned_at = self.planned_at
        elif self.planned_at != NEVER and not behind:
            elapsed += max(planned_at - self.planned_at, 0)
        known = dict(self.partitions)
        for partition, at in newest.items():
            before = known.get(partition)
            known[partition] = PartitionTime(max(at, before.newest) if before is not None else at, elapsed)
        timeless = {each: self.timeless.get(each, elapsed) for each in begun if each not in known}
        waits = any(not is_idle(since, elapsed, idle_after) for since in timeless.values())
        reached = slowest(known.values(), elapsed, idle_after, advance_when_idle=advance_when_idle)
        watermark = self.watermark
        if reached != NEVER and not unread and not waits:
            watermark = max(watermark, reached - out_of_orderness)
        return EventClock(watermark, planned_at, elapsed, known, timeless)

    def held_up_by(self, idle_after: int | None) -> str | None:
        """The partition that is furthest behind among those that are not idle."""
        read = [(NEVER, name, since) for name, since in self.timeless.items()]
        read += [(each.newest, name, each.seen_at) for name, each in self.partitions.items()]
        awake = [(at, name) for at, name, since in read if not is_idle(since, self.elapsed, idle_after)]
        return min(awake)[1] if awake else None

    def document(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "watermark": self.watermark,
            "planned_at": self.planned_at,
            "elapsed": self.elapsed,
            "partitions": {name: list(each) for name, each in sorted(self.partitions.items())},
            "timeless": dict(sorted(self.timeless.items())),
        }

    @staticmethod
    def of_document(document: Mapping[str, Any]) -> EventClock:
        """Raises an error, such as ``ValueError``, for what ``document`` does not make."""
        partitions = {name: PartitionTime(*each) for name, each in document["partitions"].items()}
        timeless = document.get("timeless", {})  # older rows lack it
        own = [document[each] for each in ("watermark", "planned_at", "elapsed")]
        for each in (*own, *itertools.chain(*partitions.values()), *timeless.values()):
            if type(each) is not int or not -(2**63) <= each < 2**63:
                raise ValueError(f"{str(each)[:60]!r} is no time")
        return EventClock(document["watermark"], document["planned_at"], document["elapsed"], partitions, timeless)
