"""The event time of a transactional topology: how its watermark goes on from one transaction to the
next. Pure arithmetic, in microseconds.

The watermark after a transaction depends on the clock before it, on what the transaction read, and
on when it was planned: the planning time is part of the plan. So a replay gives the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from framework.operators.watermarks import NEVER


class PartitionTime(NamedTuple):
    """Of a source partition: the newest event time, and when the last transaction with a record of
    it was planned."""

    newest: int
    seen_at: int


@dataclass(frozen=True, slots=True)
class EventClock:
    """``watermark``: no record that is on time is older. ``planned_at``: when the transaction was
    planned."""

    watermark: int = NEVER
    planned_at: int = NEVER
    partitions: Mapping[str, PartitionTime] = field(default_factory=dict)

    def after(
        self,
        newest: Mapping[str, int],
        planned_at: int,
        *,
        out_of_orderness: int,
        idle_after: int | None,
        unread: bool = False,
    ) -> EventClock:
        """The clock after a transaction. ``newest``: partition -> the newest event time that was
        read of it. ``out_of_orderness``: how far behind the newest time of its partition a record
        may be. ``idle_after``: how long without a record until a partition holds nothing up; None:
        never. ``unread``: a partition has records, and none of it was ever read.

        >>> clock = EventClock().after({"a": 50, "b": 20}, 0, out_of_orderness=5, idle_after=60)
        >>> clock.watermark, clock.after({"a": 90}, 60, out_of_orderness=5, idle_after=60).watermark
        (15, 85)
        """
        planned_at = max(planned_at, self.planned_at)  # a leader's clock may be behind the last one's
        known = dict(self.partitions)
        for partition, at in newest.items():
            before = known.get(partition)
            known[partition] = PartitionTime(max(at, before.newest) if before is not None else at, planned_at)
        awake = [each.newest for each in known.values() if idle_after is None or planned_at - each.seen_at < idle_after]
        watermark = self.watermark
        if awake and not unread:
            watermark = max(watermark, min(awake) - out_of_orderness)
        return EventClock(watermark, planned_at, known)

    def document(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "watermark": self.watermark,
            "planned_at": self.planned_at,
            "partitions": {name: list(each) for name, each in sorted(self.partitions.items())},
        }

    @staticmethod
    def of_document(document: Mapping[str, Any]) -> EventClock:
        partitions = {name: PartitionTime(*each) for name, each in document["partitions"].items()}
        return EventClock(document["watermark"], document["planned_at"], partitions)
