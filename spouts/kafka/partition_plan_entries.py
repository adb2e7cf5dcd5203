"""Partitions in plans: their names, ``orders/3``, and what a plan says about each::

first_offset, next_offset   the range, half-open
topic_id                    the topic; one of the same name that is created later has another id
first_leader_epoch          leader epoch in which first_offset was in the log (absent: unknown)
next_leader_epoch           the same for next_offset; the next plan has it as first_leader_epoch
gap                         if offsets were skipped: {"reason", "from_offset", "to_offset"}
lost_records, gaps          totals of such skips, carried from plan to plan (absent: none)
left_out                    offsets of records that are left out, by ``undo`` or because their
                            values were refused, ascending, carried from plan to plan (absent:
                            none): readers give no row for them
left_out_from               before this offset, some were left out that left_out lists no more
                            (absent: none)
refused                     offset -> reason, of those of this range whose values were refused
read_first_until            in a topic that is read first: where it ended at the first start. Other
                            topics wait until it is read up to there (absent: they do not)
end_offset, end_asked       of a bounded spout: where reading ends in this partition, fixed when the
                            first plan was made, and what the spout's ``end`` said then
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from framework.topology.spouts import END_OFFSET, LEFT_OUT, LEFT_OUT_FROM, Meta

#: Reasons of gaps after which offsets still denote the same records.
SAME_LOG = frozenset({"retention", "damaged"})

#: A topic and the number of a partition.
TopicPartition = tuple[str, int]


def partition_id(topic: str, number: int) -> str:
    """
    >>> partition_id("orders", 3)
    'orders/3'
    """
    return f"{topic}/{number}"


def topic_and_number(partition: str) -> tuple[str, int]:
    """The reverse of ``partition_id``. A topic's name contains no slash.

    >>> topic_and_number("orders/3")
    ('orders', 3)
    """
    topic, _, number = partition.rpartition("/")
    return topic, int(number)


READ_FIRST_UNTIL = "read_first_until"
END_ASKED = "end_asked"


@dataclass(slots=True)
class Position:
    """Where a partition continues in the next plan.

    * ``leader_epoch``: the epoch in which ``offset`` was in the log.
    * ``until``: other topics wait until this one is read up to there; None: they do not.
    * ``end``: where reading ends, and the user's setting; None: it does not end."""

    offset: int
    topic_id: str | None
    leader_epoch: int | None = None
    _: KW_ONLY
    gap: dict[str, Any] | None = None
    lost_records: int = 0
    gaps: int = 0
    left_out: tuple[int, ...] = ()
    left_out_from: int | None = None
    until: int | None = None
    end: tuple[int, str] | None = None

    def skip(self, reason: str, to_offset: int) -> None:
        """Continue at ``to_offset``, and record the gap in the plan."""
        lost = max(to_offset - self.offset, 0)
        self.gap = {"reason": reason, "from_offset": self.offset, "to_offset": to_offset}
        self.lost_records += lost
        self.gaps += 1
        if reason not in SAME_LOG:
            self.left_out, self.left_out_from = (), None  # the log may hold other records at these offsets
        self.offset, self.leader_epoch = to_offset, None

    def after(self) -> Meta:
        """The part of a plan's entry that says where the next plan continues. ``position_after``
        turns it back into this position."""
        known = {"next_offset": self.offset, "topic_id": self.topic_id, "next_leader_epoch": self.leader_epoch}
        return {key: value for key, value in known.items() if value is not None}

    def meta(self, taken: int, end_epoch: int | None) -> Meta:
        """The plan's entry for the next ``taken`` offsets. ``end_epoch``: the epoch of the leader
        that has just reported the end of the log; None if it was not asked."""
        # If nothing is read, no broker checks the older epoch: keep it for the next reader to
        # check. If something is read, the older epoch does not apply to the end: use the leader's
        # answer.
        epoch = end_epoch if taken > 0 or self.leader_epoch is None else self.leader_epoch
        optional = {
            "topic_id": self.topic_id,
            "first_leader_epoch": self.leader_epoch,
            "next_leader_epoch": epoch,
            "gap": self.gap,
            "lost_records": self.lost_records or None,
            "gaps": self.gaps or None,
            LEFT_OUT: list(self.left_out) or None,
            LEFT_OUT_FROM: self.left_out_from,
            READ_FIRST_UNTIL: self.until if self.until is not None and self.offset < self.until else None,
            END_OFFSET: self.end[0] if self.end is not None else None,
            END_ASKED: self.end[1] if self.end is not None else None,
        }
        present = {key: value for key, value in optional.items() if value is not None}
        return {"first_offset": self.offset, "next_offset": self.offset + taken, **present}


def reaches(meta: Meta, goal: Meta) -> bool:
    """Whether the end of ``meta`` is at or after the end of ``goal``, in the same topic. Offsets of
    different topic ids cannot be compared."""
    ids = (meta.get("topic_id"), goal.get("topic_id"))
    return (None in ids or ids[0] == ids[1]) and int(meta["next_offset"]) >= int(goal["next_offset"])


def split_at(meta: Meta, offset: int) -> tuple[Meta, Meta]:
    """Divide a range at ``offset``, which must be inside."""
    bare = {key: value for key, value in meta.items() if key not in ("first_leader_epoch", "gap")}
    return {**meta, "next_offset": offset}, {**bare, "first_offset": offset}


def stages_of(ranges: Mapping[str, Meta]) -> list[Mapping[str, Meta]]:
    """The same ranges in reading order: topics that are read first, if any, and then the rest."""
    first: dict[str, Meta] = {}
    rest = dict(ranges)
    for partition, meta in ranges.items():
        until = int(meta.get(READ_FIRST_UNTIL, 0))
        if until <= int(meta["first_offset"]):
            continue
        if until < int(meta["next_offset"]):
            first[partition], rest[partition] = split_at(meta, until)
        else:
            first[partition] = rest.pop(partition)
    return [stage for stage in (first, rest) if stage]


def position_of(meta: Meta) -> Position:
    """The position at which ``meta`` begins."""
    return _position(meta, "first")


def begun_again(meta: Meta) -> Position:
    """The position at which ``meta`` begins, and why it begins there."""
    position = position_of(meta)
    position.gap = meta.get("gap")
    position.lost_records, position.gaps = int(meta.get("lost_records", 0)), int(meta.get("gaps", 0))
    return position


def position_after(meta: Meta) -> Position:
    """The position at which the plan after ``meta`` continues."""
    position = _position(meta, "next")
    position.lost_records = int(meta.get("lost_records", 0))
    position.gaps = int(meta.get("gaps", 0))
    position.until = int(meta[READ_FIRST_UNTIL]) if READ_FIRST_UNTIL in meta else None
    position.left_out = tuple(map(int, meta.get(LEFT_OUT, ())))
    position.left_out_from = int(meta[LEFT_OUT_FROM]) if LEFT_OUT_FROM in meta else None
    position.end = end_in(meta)
    return position


def end_in(meta: Meta) -> tuple[int, str] | None:
    """Where reading ends, and the user's setting."""
    return (int(meta[END_OFFSET]), str(meta.get(END_ASKED))) if END_OFFSET in meta else None


def _position(meta: Meta, bound: str) -> Position:
    topic_id, epoch = meta.get("topic_id"), meta.get(f"{bound}_leader_epoch")
    return Position(
        int(meta[f"{bound}_offset"]),
        str(topic_id) if topic_id is not None else None,
        int(epoch) if epoch is not None else None,
    )
