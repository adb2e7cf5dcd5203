"""How a partition of a topic is named in plans, ``orders/3``, and what a plan says of it::

first_offset, next_offset   the range, half-open
topic_id                    which topic that is; one of the same name created later has another id
first_leader_epoch          the leader epoch in which first_offset was known to be in the log (absent: unknown)
next_leader_epoch           the same for next_offset; it becomes the first one of the plan after this
gap                         only where offsets were skipped: {"reason", "from_offset", "to_offset"}
lost_records, gaps          running totals of such skips, carried from plan to plan (absent: none)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from framework.topology.spouts import Meta

#: A topic and the number of a partition.
Where = tuple[str, int]


def partition_id(topic: str, number: int) -> str:
    """
    >>> partition_id("orders", 3)
    'orders/3'
    """
    return f"{topic}/{number}"


def topic_and_number(partition: str) -> tuple[str, int]:
    """The reverse: a topic's name holds no slash.

    >>> topic_and_number("orders/3")
    ('orders', 3)
    """
    topic, _, number = partition.rpartition("/")
    return topic, int(number)


@dataclass(slots=True)
class Position:
    """Where a partition goes on in a plan that is being made. ``leader_epoch``: in which ``offset`` was in the log."""

    offset: int
    topic_id: str | None
    leader_epoch: int | None = None
    gap: dict[str, Any] | None = None
    lost_records: int = 0
    gaps: int = 0

    def skip(self, reason: str, to_offset: int) -> None:
        """Go on at ``to_offset``, and say so in the plan."""
        lost = max(to_offset - self.offset, 0)
        self.gap = {"reason": reason, "from_offset": self.offset, "to_offset": to_offset}
        self.lost_records += lost
        self.gaps += 1
        self.offset, self.leader_epoch = to_offset, None

    def after(self) -> Meta:
        """The part of a plan's entry that says where the next one goes on: ``position_after`` of it is this position."""
        known = {"next_offset": self.offset, "topic_id": self.topic_id, "next_leader_epoch": self.leader_epoch}
        return {key: value for key, value in known.items() if value is not None}

    def meta(self, taken: int, end_epoch: int | None) -> Meta:
        """The plan's entry for the next ``taken`` offsets. ``end_epoch``: of the leader that has just said where the log
        ends; None when it was not asked."""
        # Where nothing is read the broker has checked nothing: the older epoch stays, for the next reader to check.
        # Where something is, the older epoch says nothing of the end: without a word of the leader it is unknown.
        epoch = end_epoch if taken > 0 or self.leader_epoch is None else self.leader_epoch
        optional = {
            "topic_id": self.topic_id,
            "first_leader_epoch": self.leader_epoch,
            "next_leader_epoch": epoch,
            "gap": self.gap,
            "lost_records": self.lost_records or None,
            "gaps": self.gaps or None,
        }
        present = {key: value for key, value in optional.items() if value is not None}
        return {"first_offset": self.offset, "next_offset": self.offset + taken, **present}


def reaches(meta: Meta, goal: Meta) -> bool:
    """Whether a position is at or behind another, in the same topic: offsets of another one mean nothing."""
    ids = (meta.get("topic_id"), goal.get("topic_id"))
    return (None in ids or ids[0] == ids[1]) and int(meta["next_offset"]) >= int(goal["next_offset"])


def position_of(meta: Meta) -> Position:
    """Where ``meta`` begins."""
    return _position(meta, "first")


def position_after(meta: Meta) -> Position:
    """Where the plan after ``meta`` goes on."""
    position = _position(meta, "next")
    position.lost_records = int(meta.get("lost_records", 0))
    position.gaps = int(meta.get("gaps", 0))
    return position


def _position(meta: Meta, edge: str) -> Position:
    topic_id, epoch = meta.get("topic_id"), meta.get(f"{edge}_leader_epoch")
    return Position(
        int(meta[f"{edge}_offset"]),
        str(topic_id) if topic_id is not None else None,
        int(epoch) if epoch is not None else None,
    )
