"""Finds records that are lost: removed by retention, truncated, damaged, or of a topic that was
deleted. The planner skips them, or ends the run."""

from __future__ import annotations

import time
from collections.abc import Mapping

from framework.clients.kafka_settings import KafkaSettings
from framework.errors import READ_ANEW, DataLossError
from framework.topology.spouts import Meta
from spouts.kafka.cluster_metadata import KafkaMetadata, KafkaTopics, Offset
from spouts.kafka.consumer.damaged_batches import Damage, find_damage
from spouts.kafka.consumer.truncation import truncated
from spouts.kafka.partition_plan_entries import Position, topic_and_number
from spouts.kafka.planning.bounded_end import ReadingEnd
from spouts.kafka.planning.log_offsets_cache import LogOffsets

#: A broker that comes back may report less than it has for a moment, or miss a topic. A report that
#: persists for this long is believed.
BELIEVED_AFTER_S = 10.0
_DECIDE = f"{READ_ANEW}; to go on after the gap, give the spout on_data_loss='skip'"


class LostRecords:
    """What a source has lost since it was planned last. Each check skips in the given positions
    what is lost. ``skips``: whether the user chose that; otherwise a check raises
    ``DataLossError``."""

    def __init__(
        self,
        settings: KafkaSettings,
        reader_group: str,
        metadata: KafkaMetadata,
        logs: LogOffsets,
        end: ReadingEnd,
        *,
        skips: bool,
    ) -> None:
        self._settings, self._reader_group, self._metadata = settings, reader_group, metadata
        self._logs, self._end, self._skips = logs, end, skips
        self._amiss_since: dict[str, float] = {}  # partitions that are too short, or gone
        self._damage: dict[str, tuple[Damage, ...]] = {}  # in the way of these partitions
        self._lost_plan: Mapping[str, Meta] = {}  # what the reader was reading
        #: Whether the reader has found a loss that is not looked at yet.
        self.reported = False

    def report(self, plan: Mapping[str, Meta]) -> None:
        """The reader has found a loss in this plan."""
        self.reported, self._lost_plan = True, plan

    def is_amiss(self, partition: str) -> bool:
        """Whether the log is too short, or gone, and it is not known yet whether that lasts."""
        return partition in self._amiss_since

    def forget(self, plan: Mapping[str, Meta]) -> None:
        """Forget damage before the end of a plan that is committed."""
        for partition in plan.keys() & self._damage.keys():
            left = [each for each in self._damage.pop(partition) if each.next > plan[partition]["next_offset"]]
            self._damage.update({partition: tuple(left)} if left else {})

    def check(self, partition: str, position: Position, topics: KafkaTopics) -> None:
        """Check that the topic is still the one that was read, and that the log still has the next
        offset. Skips what is lost, or raises ``DataLossError``."""
        topic, _ = topic_and_number(partition)
        topic_id = topics.topic_ids.get(topic)
        if topic_id is None:
            self._check_gone(partition, position)
            return  # it contributes nothing until it comes back
        if position.topic_id is not None and position.topic_id != topic_id:
            self._lost(
                f"topic {topic!r} was deleted and created again (its id was {position.topic_id}, is {topic_id}) after "
                f"partition {partition} had been read up to offset {position.offset}"
            )
            beginning = self._metadata.beginnings([partition], patient=False).get(partition)
            position.skip("recreated", beginning.offset if beginning is not None else 0)
            self._logs.see_beginning(partition, position.offset)
        position.topic_id = topic_id
        beginning_at = self._logs.beginnings.get(partition, 0)
        if position.end is not None:
            beginning_at = min(beginning_at, position.end[0])
        if position.offset < beginning_at and position.gap is None:
            self._lost(
                f"partition {partition} no longer holds offsets {position.offset} to {beginning_at}, which were not read "
                "yet: retention removed them"
            )
            position.skip("retention", beginning_at)

    def check_epochs(self, positions: Mapping[str, Position], topics: KafkaTopics, ends: Mapping[str, Offset]) -> None:
        """Find truncated logs after the reader has found a loss.

        A partition with a new leader, and without a loss that is visible here, may have been
        truncated and have grown again. Only its broker knows. Such a partition continues at the
        same offset, in the new log."""
        doubtful = {
            partition: position
            for partition, position in positions.items()
            if topics.leaders.get(partition) is not None
            and (end := ends.get(partition)) is not None
            and end.offset >= position.offset
            and position.leader_epoch not in (None, end.leader_epoch)
        }
        for partition in truncated(self._settings, self._reader_group, doubtful):
            positions[partition].skip("truncated", positions[partition].offset)

    def look_for_damage(self, positions: Mapping[str, Position], topics: KafkaTopics) -> None:
        """Find the batches that the reader could not read, where the user has chosen to go on after
        them."""
        if not self._skips:
            return
        ranges = {
            partition: (positions[partition].offset, int(meta["next_offset"]))
            for partition, meta in self._lost_plan.items()
            if partition in positions
            and topics.leaders.get(partition) is not None
            and positions[partition].gap is None
            and positions[partition].offset < int(meta["next_offset"])
        }
        self._damage.update(find_damage(self._settings, self._reader_group, ranges))

    def readable_end(self, partition: str, position: Position, end: Offset) -> int:
        """Where the next range of a partition has to end at the latest: before a damaged batch. At
        such a batch, skips it."""
        damage = [each for each in self._damage.get(partition, ()) if each.next > position.offset]
        if damage and damage[0].first <= position.offset:
            position.skip("damaged", damage.pop(0).next)
        return max(min(damage[0].first if damage else end.offset, end.offset), position.offset)

    def _check_gone(self, partition: str, position: Position) -> None:
        """The topic is gone or not visible. When this has lasted long enough to be believed, the
        unread records are lost."""
        known = self._logs.ends.get(partition)
        end = max(known.offset if known is not None else 0, position.until or 0)
        if position.end is not None:
            end = position.end[0]
        if end <= position.offset or not self.believed(partition):
            return
        self._lost(f"partition {partition} was deleted, and offsets {position.offset} to {end} were not read yet")
        position.skip("deleted", end)

    def believed(self, partition: str) -> bool:
        """Whether a partition has been short or gone for at least ``BELIEVED_AFTER_S`` seconds, so
        that its broker is not just coming back."""
        now = time.monotonic()
        return now - self._amiss_since.setdefault(partition, now) >= BELIEVED_AFTER_S

    def is_short(self, partition: str, position: Position, end: Offset) -> bool:
        """Whether a log ends before the position. When this is believed, the log was truncated:
        skip back to its end, or raise ``DataLossError``."""
        if end.offset >= position.offset:
            is_cut = self._end.is_cut(position.end, end.offset)
            waits = is_cut or (position.until is not None and position.until > position.offset)
            if end.offset > position.offset or not waits:
                self._amiss_since.pop(partition, None)
            elif is_cut and position.end is not None and self.believed(partition):
                self._lost(
                    f"partition {partition} ends at offset {end.offset}, and reading was to end at offset {position.end[0]}, which "
                    "it had: the log was truncated"
                )
                position.skip("truncated", end.offset)
                position.end = (end.offset, position.end[1])
            return False
        if self.believed(partition):
            self._lost(
                f"partition {partition} ends at offset {end.offset}, and offsets up to {position.offset} were read before: "
                "the log was truncated"
            )
            position.skip("truncated", end.offset)
            if position.end is not None:
                position.end = (end.offset, position.end[1])
            del self._amiss_since[partition]
        return True

    def _lost(self, what: str) -> None:
        if not self._skips:
            raise DataLossError(f"{what}; {_DECIDE}")
