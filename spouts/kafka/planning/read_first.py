"""Topics that are read first: a new topology reads them to their ends, as they are then, before the
others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from spouts.kafka.cluster_metadata import Offset
from spouts.kafka.partition_plan_entries import SAME_LOG, Position, topic_and_number


class ReadFirst:
    """The offset up to which a partition is read first is in each plan (``Position.until``), so it
    holds after a restart."""

    def __init__(self, topics: Collection[str]) -> None:
        self._topics = topics

    def includes(self, partition: str) -> bool:
        return topic_and_number(partition)[0] in self._topics

    def note(
        self,
        positions: Mapping[str, Position],
        ends: Mapping[str, Offset],
        *,
        first: bool,
        believed: Callable[[str], bool],
    ) -> list[str]:
        """Note up to where these topics are read first: to their ends at the first start, or, where
        the log is another one since then, to its end. Returns the partitions that are not read up
        to there: the other topics wait for them. ``first``: nothing was ever planned. ``believed``:
        whether a log that is too short has been so for long enough."""
        if not self._topics:
            return []
        unread = []
        for partition, position in positions.items():
            if not self.includes(partition):
                continue
            end = ends.get(partition)
            is_other_log = position.gap is not None and position.gap["reason"] not in SAME_LOG
            if end is not None and (first or (is_other_log and position.until is not None)):
                position.until = end.offset
            if position.until is None or position.offset >= position.until:
                continue
            if end is not None and end.offset <= position.offset and believed(partition):
                position.until = None  # the log was truncated, and has nothing more to read first
            else:
                unread.append(partition)
        return unread
