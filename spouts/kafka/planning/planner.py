"""Plans batches of Kafka offsets, on the driver.

``spouts.kafka.partition_plan_entries`` describes the entry of a partition in a plan.
``LostRecords`` checks the logs, ``ReadingEnd`` bounds them, ``KafkaProgress`` measures plans.

Invariants:

1. A range ends at or before the last stable offset, so it contains no undecided kafka_txn.
2. Every partition ever planned is in every later plan (C15), with an empty range if it contributes
   nothing.
3. A partition that appears while the topology runs starts at its beginning. ``start`` applies only
   to the very first batch.
4. Shares are fair: a partition with few records gives all it has, the others share the rest evenly.
5. If a range does not begin at the end of the previous one, there is a ``gap``, and the user has
   chosen ``on_data_loss="skip"``.
6. With ``read_first``, the other topics are not read until each partition of these topics is read
   to its end at the first start. The plans carry that offset, so it holds after a restart.
7. A bounded spout reads no partition past its end, and no partition that had no end when the ends
   were fixed. The plans carry the ends, so they hold after a restart. If the very first plan is
   planned again, it keeps the start and the ends of the plan that it replaces.
8. With ``keep_transactions``, ``SourceTransactions`` shares a batch among the partitions, and no
   range ends within such a transaction. The halves of a batch in which a record is refused are the
   exception.
9. A partition without new records keeps its entry of the previous plan, as the same object. So the
   cost of a plan depends on the partitions with new records; for the others, only the end of the
   log is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from framework.clients.kafka_settings import KafkaSettings, is_topic_name
from framework.errors import ConfigError, RetryableError
from framework.observe.logs import get_logger
from framework.topology import PartitionPlanner, PartitionProgress, ReadCounts, WrittenTopic
from framework.topology.spouts import END_OFFSET, Backlog, Meta
from spouts.codecs.bad_records import BadRecordShares
from spouts.codecs.missing_field_warning import AbsentFields
from spouts.kafka.cluster_metadata import NARROW_PARTITIONS, KafkaMetadata, KafkaTopics, Offset
from spouts.kafka.consumer.lookahead_reader import LookaheadReader
from spouts.kafka.group_offsets import GroupOffsets, committed_positions
from spouts.kafka.partition_plan_entries import (
    READ_FIRST_UNTIL,
    Position,
    begun_again,
    end_in,
    position_after,
    reaches,
    topic_and_number,
)
from spouts.kafka.planning.arrival_watcher import KafkaWatch
from spouts.kafka.planning.batch_limits import BatchSizer, KafkaLimits, fair_shares
from spouts.kafka.planning.bound_offsets import check_exist, named_bound, offsets_at
from spouts.kafka.planning.bounded_end import ReadingEnd
from spouts.kafka.planning.log_offsets_cache import LogOffsets
from spouts.kafka.planning.lost_records import LostRecords
from spouts.kafka.planning.offset_range_operations import KafkaRanges
from spouts.kafka.planning.open_transactions import OpenTransactions
from spouts.kafka.planning.progress import KafkaProgress
from spouts.kafka.planning.read_first import ReadFirst
from spouts.kafka.planning.source_settings import KafkaSource
from spouts.kafka.planning.source_transactions import SourceTransactions
from spouts.kafka.planning.topic_loops import OwnTopics
from spouts.kafka.record_viewer import RecordViewer
from spouts.kafka.start_end_options import Bound
from spouts.kafka.topic_streams import Streams

_log = get_logger()

#: How long the start waits for the offsets of a consumer group.
_GROUP_S = 5.0


class KafkaPlanner(PartitionPlanner):
    """Plans the batches of one spout. ``bad_records``: the limit on the share of bad records.
    ``streams``: what is done with bad records of which topic; None: they end the run.
    ``group``: where committed offsets are published, or None. ``reader_group``: the group id of the
    readers. ``metadata``: what the cluster says of the topics; None: asks it."""

    shares_entries = True  # invariant 9

    def __init__(
        self,
        source: KafkaSource,
        settings: KafkaSettings,
        limits: KafkaLimits,
        *,
        bad_records: BadRecordShares | None = None,
        streams: Streams | None = None,
        group: GroupOffsets | None = None,
        reader_group: str = "ratchet",
        metadata: KafkaMetadata | None = None,
    ) -> None:
        self._source = source
        self._settings = settings
        self._reader_group = reader_group
        self._metadata = metadata or KafkaMetadata(settings, source.topics, source.pattern)
        self._watch = KafkaWatch(settings, reader_group)
        self._viewer = RecordViewer(settings, reader_group)
        self._ranges = KafkaRanges(self._viewer, streams)
        self._where = settings.bootstrap_servers
        self._sizer = BatchSizer(limits)
        self._bad_records = bad_records if bad_records is not None else BadRecordShares(None)
        self._absent = AbsentFields()
        self._group = group
        self._gaps_told: dict[str, int] = {}
        self._open_transactions = OpenTransactions()
        self._adopted = False  # whether what the group has of former runs is renewed
        self._end = ReadingEnd(source.end, self._open_transactions, waits_for_open=source.waits_for_open)
        self._logs = LogOffsets(self._metadata)
        self._lost = LostRecords(
            settings, reader_group, self._metadata, self._logs, self._end, skips=source.skips_lost_data
        )
        self._progress = KafkaProgress(self._logs, self._end, self._open_transactions)
        self._read_first = ReadFirst(source.read_first)
        self._transactions: SourceTransactions | None = None
        if source.keeps_transactions:
            self._transactions = SourceTransactions(
                LookaheadReader(settings, reader_group), lambda: self._metadata.topics().leaders, self._has_new_topic
            )
        self._found_nothing = False  # whether the source had no partition before
        self._latest: Mapping[str, Meta | None] = {}  # the last plan, or what the next one comes after
        self._is_released = False  # whether no entry has an end, in a spout without one
        self._own_topics: OwnTopics | None = None
        self._checked: KafkaTopics | None = None  # the topics in which none is of its own

    # --- PartitionPlanner -------------------------------------------------------------------------

    @property
    def skips_lost_data(self) -> bool:
        return self._source.skips_lost_data

    def partitions(self) -> list[str]:
        return sorted(self._metadata.topics().leaders)

    def resume(self, plan: Mapping[str, Meta]) -> None:
        self._end.resume(plan)

    def finished(self, plan: Mapping[str, Meta]) -> bool:
        return self._end.is_over(plan)

    def plan(self, previous: Mapping[str, Meta | None]) -> Mapping[str, Meta] | None:
        return self._plan(previous, self._limits())

    def plan_smaller(self, previous: Mapping[str, Meta | None], divisor: int) -> Mapping[str, Meta] | None:
        return self._plan(previous, self._limits(), divisor)

    def empty_plan(self, previous: Mapping[str, Meta | None]) -> Mapping[str, Meta] | None:
        known = {each: meta for each, meta in sorted(previous.items()) if meta is not None}
        return {each: position_after(meta).meta(0, None) for each, meta in known.items()} or None

    def backlog(self, previous: Mapping[str, Meta | None]) -> Backlog:
        self._logs.see_ends(self._metadata.ends(patient=False))
        records = self._progress.unplanned_records(previous)
        return Backlog(records, self._sizer.bytes_of(records))

    def watch(self, arrived: Callable[[], None]) -> bool:
        ends = self._logs.ends
        # A request names every partition: a wide source would cost more to watch than to ask.
        if not 0 < len(ends) <= NARROW_PARTITIONS:
            return False
        return self._watch.begin({partition: end.offset for partition, end in ends.items()}, arrived)

    def mutable(self, partitions: Collection[str]) -> Mapping[str, str]:
        topics = {topic_and_number(partition)[0] for partition in partitions}
        policies = self._metadata.cleanup_policies(sorted(topics))
        return {
            partition: f"topic {topic!r} is compacted (cleanup.policy={policies[topic]})"
            for partition in partitions
            if "compact" in policies.get(topic := topic_and_number(partition)[0], "")
        }

    def confirm(self, plan: Mapping[str, Meta]) -> None:
        """Check that the topics are still those of the plan. A consumer reads topics by name, and
        does not notice when one is deleted and created again."""
        wanted: dict[str, str] = {}
        for partition, meta in plan.items():
            if meta.get("topic_id") is not None and int(meta["first_offset"]) < int(meta["next_offset"]):
                wanted[topic_and_number(partition)[0]] = str(meta["topic_id"])
        self._metadata.confirm_topics(wanted)

    def avoid(self, written: Sequence[WrittenTopic], conf: Mapping[str, Any]) -> None:
        if written:
            self._own_topics = OwnTopics(self._settings, self._source.topics, self._source.pattern, written, conf)

    def lost(self, plan: Mapping[str, Meta]) -> None:
        self._lost.report(plan)

    def processed(self, plan: Mapping[str, Meta], read: ReadCounts, elapsed_s: float) -> None:
        self._sizer.learn(self.record_count(plan), read.records, read.bytes, elapsed_s, row_bytes=read.row_bytes)
        self._bad_records.check(read)
        self._absent.check(read.absent, {stream: records for stream, (records, _) in read.streams.items()})

    def committed(self, plan: Mapping[str, Meta]) -> None:
        self._lost.forget(plan)
        for partition, meta in plan.items():
            gap, gaps = meta.get("gap"), int(meta.get("gaps", 0))
            told = self._gaps_told.get(partition, gaps if gap is None else gaps - 1)
            self._gaps_told[partition] = gaps
            if gaps > told:  # if this plan has no gap, an earlier plan that was not reported here had it
                lost = int(meta.get("lost_records", 0))
                _log.warning("source.gap", partition=partition, **(gap or {}), gaps=gaps, lost_records=lost)
        if self._group is not None:
            self._group.publish({each: int(meta["next_offset"]) for each, meta in plan.items()})

    def record_count(self, plan: Mapping[str, Meta]) -> int:
        return sum(self.record_counts(plan).values())

    def record_counts(self, plan: Mapping[str, Meta]) -> Mapping[str, int]:
        return {each: int(meta["next_offset"]) - int(meta["first_offset"]) for each, meta in plan.items()}

    def lag(self, previous: Mapping[str, Meta | None]) -> int | None:
        return self._progress.lag(previous)

    def progress(
        self, committed: Mapping[str, Meta], in_flight: Sequence[Mapping[str, Meta]]
    ) -> Mapping[str, PartitionProgress]:
        return self._progress.partitions(committed, in_flight)

    def hidden(self) -> Mapping[str, Meta]:
        return self._progress.hidden(self._latest, self._metadata.topics().topic_ids)

    @property
    def ranges(self) -> KafkaRanges:
        return self._ranges

    def check(self) -> None:
        self._metadata.check_topics()
        self._metadata.ends(patient=False)

    def check_first_plan(self, has_run: Callable[[], bool]) -> None:
        if (not self._source.is_plain or self._end.is_bounded) and not has_run():
            self._open_transactions.is_silent = True  # the run tells what is hidden
            self.plan({})

    def source_identity(self) -> Mapping[str, Any]:
        topics = self._metadata.topics()
        return {"cluster": topics.cluster_id, "topics": dict(topics.topic_ids)}

    def end(self) -> Mapping[str, Meta]:
        self._metadata.check_topics()
        ends = self._metadata.ends(patient=self._source.waits_for_leaders)
        begins = self._metadata.beginnings(ends, patient=self._source.waits_for_leaders) if ends else {}
        self._logs.see_ends(ends)
        self._open_transactions.look(self._metadata, ends, now=True)
        topic_ids, latest = self._metadata.topics().topic_ids, self._latest
        if not self._end.is_fixed(latest):
            raise RetryableError("the end of reading is not fixed yet")
        goal = {}
        for each, (log_end, _) in self._logs.ends.items():
            if self._end.ignores(each, latest):
                continue
            end = self._end.limit(latest.get(each), log_end)
            first = min(begins[each].offset, end) if each in begins else 0
            goal[each] = Position(first, topic_ids.get(topic_and_number(each)[0])).meta(end - first, None)
        return goal

    def covers(self, plan: Mapping[str, Meta], goal: Mapping[str, Meta]) -> bool:
        """Whether ``plan`` reaches ``goal`` in every partition. A partition that was never planned
        is covered if its range in ``goal`` is empty."""
        return all(
            reaches(plan[partition], meta)
            if partition in plan
            else int(meta["first_offset"]) == int(meta["next_offset"])
            for partition, meta in goal.items()
        )

    def close(self) -> None:
        self._watch.close()
        self._viewer.close()
        if self._transactions is not None:
            self._transactions.close()
        self._metadata.close()
        if self._group is not None:
            self._group.close()

    # --- inside -----------------------------------------------------------------------------------

    def _limits(self) -> KafkaLimits:
        limits = self._sizer.limits()
        if self.records_max is None:
            return limits
        return replace(limits, batch_records_max=min(limits.batch_records_max, self.records_max))

    def _plan(
        self, previous: Mapping[str, Meta | None], limits: KafkaLimits, divisor: int = 1
    ) -> Mapping[str, Meta] | None:
        if self._group is not None:
            if not self._adopted and previous:
                self._adopted = True
                self._group.adopt(previous, _GROUP_S)
            self._group.advance()
        # A start other than the beginning, topics that are read first, and ends apply to every
        # existing partition: wait for all.
        self._latest = previous
        fixing = not self._end.is_fixed(previous)
        needs_all = not self._source.is_plain or bool(self._source.read_first)
        patient = self._source.waits_for_leaders or (not previous and needs_all) or fixing
        topics = self._available_topics(previous, patient=patient)
        ends = self._metadata.ends(patient=patient)
        self._logs.see_ends(ends)
        self._open_transactions.look(self._metadata, ends)
        if self._lost.reported:
            self._metadata.refresh()
            topics = self._metadata.topics()
        unended = self._end.unreached(previous)
        released = self._is_to_release(previous)
        looks_at_all = self._lost.reported or fixing or released or self._transactions is not None
        moving = unended if looks_at_all else self._moving(unended, topics, ends)
        new = [each for each in ends if previous.get(each) is None and not self._end.ignores(each, previous)]
        positions = self._positions(moving, new, topics, ends, first=not previous)
        if fixing and not positions.keys() >= set(new):
            raise self._leader_moved()
        if self._end.is_bounded:
            self._end.note_log_changes(positions, topics, ends)
        else:
            for position in positions.values():
                position.end = None
        if fixing:
            self._end.fix(positions, ends, self._metadata, first=not previous)
        unread = self._read_first.note(positions, ends, first=not previous, believed=self._lost.believed)
        available = self._available(positions, ends, unread)
        shares = self._shares(previous, positions, ends, available, self._divided(limits, available, divisor))
        skipped = any(position.gap is not None for position in positions.values())
        begins = not previous and positions and not self._source.is_plain  # record the start itself
        if not (any(shares.values()) or skipped or begins or (positions and fixing) or released):
            if leaderless := [each for each in unread if each not in ends]:
                self._metadata.refresh()
                raise RetryableError(
                    f"partition {leaderless[0]} is read first, and has no leader; the batch waits for it"
                )
            return None
        made = self._entries(previous, unended, positions, ends, shares)
        self._latest = made
        self._end.note_plan(made, first=not previous)
        return made

    def _available(
        self, positions: Mapping[str, Position], ends: Mapping[str, Offset], unread: Collection[str]
    ) -> dict[str, int]:
        """How many offsets the batch may take of each partition. ``unread``: the partitions that
        are read before all others and have not been read to their end."""
        available = {}
        for partition, position in positions.items():
            end = ends.get(partition)
            if unread and not self._read_first.includes(partition):
                continue
            if end is not None and not self._lost.is_short(partition, position, end):
                readable = self._lost.readable_end(partition, position, end)
                if position.end is not None:
                    readable = max(min(readable, position.end[0]), position.offset)
                available[partition] = readable - position.offset
        return available

    @staticmethod
    def _divided(limits: KafkaLimits, available: Mapping[str, int], divisor: int) -> KafkaLimits:
        """The limits of a batch that is planned again, smaller, because it timed out. It may have
        been far below the limits."""
        if divisor <= 1:
            return limits
        whole = sum(fair_shares(available, limits).values())
        return replace(limits, batch_records_max=max(whole // divisor, 1))

    def _shares(
        self,
        previous: Mapping[str, Meta | None],
        positions: Mapping[str, Position],
        ends: Mapping[str, Offset],
        available: Mapping[str, int],
        limits: KafkaLimits,
    ) -> Mapping[str, int]:
        """How many offsets the batch takes of each partition."""
        if self._transactions is not None:
            offsets = {each: position.offset for each, position in positions.items()}
            identities = {each: (positions[each].topic_id, ends[each].leader_epoch) for each in available}
            return self._transactions.shares(offsets, available, limits.batch_records_max, identities)
        turn = 0
        if len(available) > limits.batch_records_max:  # it says who comes first
            turn = sum(int(meta["next_offset"]) for meta in previous.values() if meta is not None)
        return fair_shares(available, limits, turn=turn)

    @staticmethod
    def _entries(
        previous: Mapping[str, Meta | None],
        unended: Mapping[str, Meta | None],
        positions: Mapping[str, Position],
        ends: Mapping[str, Offset],
        shares: Mapping[str, int],
    ) -> Mapping[str, Meta]:
        """The plan of the batch. ``unended``: the entries of ``previous`` that have not reached the
        end of the spout."""
        plan = {each: meta for each, meta in previous.items() if meta is not None}
        for each in previous.keys() - unended.keys() if unended is not previous else ():
            if (ended := plan[each])["first_offset"] != ended["next_offset"] or "gap" in ended:
                plan[each] = position_after(ended).meta(0, None)
        for each, position in positions.items():
            end = ends.get(each)
            plan[each] = position.meta(shares.get(each, 0), end.leader_epoch if end is not None else None)
        return plan if len(plan) == len(previous) else dict(sorted(plan.items()))

    def _has_new_topic(self, topic: str) -> bool:
        """Whether a topic of the source was created since the topics were looked up last."""
        pattern = self._source.pattern
        if pattern is None or not is_topic_name(topic) or re.fullmatch(pattern, topic) is None:
            return False
        self._metadata.refresh()
        return topic in self._metadata.topics().topic_ids

    def _leader_moved(self) -> RetryableError:
        self._metadata.refresh()
        return RetryableError("a partition's leader has moved; looking it up again")

    def _is_to_release(self, previous: Mapping[str, Meta | None]) -> bool:
        """Whether entries have an end that the spout has no more."""
        if self._end.is_bounded or self._is_released:
            return False
        found = any(meta is not None and END_OFFSET in meta for meta in previous.values())
        self._is_released = bool(previous) and not found
        return found

    def _moving(
        self, previous: Mapping[str, Meta | None], topics: KafkaTopics, ends: Mapping[str, Offset]
    ) -> Mapping[str, Meta | None]:
        """The partitions of ``previous`` that are not at rest. One at rest has read its log to the
        end, contributed nothing last time, has no gap to forget, and its leader epochs and topic
        are still those of its entry."""
        current = set(topics.topic_ids.values())
        moving = {}
        for partition, meta in previous.items():
            end = ends.get(partition)
            if (
                end is not None
                and meta is not None
                and end.offset == meta["next_offset"] == meta["first_offset"]
                and meta.get("topic_id") in current
                and (epoch := meta.get("next_leader_epoch")) == meta.get("first_leader_epoch")
                and (epoch is not None or end.leader_epoch is None)
                and "gap" not in meta
                and READ_FIRST_UNTIL not in meta
                and (
                    END_OFFSET not in meta or (self._end.is_bounded and not self._end.is_cut(end_in(meta), end.offset))
                )
                and not self._lost.is_amiss(partition)
            ):
                continue
            moving[partition] = meta
        return moving

    def _available_topics(self, previous: Mapping[str, Meta | None], *, patient: bool) -> KafkaTopics:
        """The topics, if this batch can be planned with them. Raises ``RetryableError`` to wait."""
        topics = self._metadata.topics()
        if self._own_topics is not None and topics is not self._checked:
            self._own_topics.check_found(topics.topic_ids.keys(), topics.cluster_id)
            self._checked = topics
        if topics.missing and not previous:
            self._metadata.refresh()
            raise RetryableError(
                f"topic {topics.missing[0]!r} does not exist at {self._where}: create it, or correct its name"
            )
        if not topics.leaders:
            self._found_nothing = True
        if patient:
            gone = [each for each in topics.missing if any(topic_and_number(name)[0] == each for name in previous)]
            if gone:
                self._metadata.refresh()
                raise RetryableError(f"topic {gone[0]!r} is gone from {self._where}; the batch waits for it")
            if topics.leaderless:
                self._metadata.refresh()
                raise RetryableError(f"partition {topics.leaderless[0]} has no leader; the batch waits for it")
        return topics

    def _positions(
        self,
        moving: Mapping[str, Meta | None],
        new: Sequence[str],
        topics: KafkaTopics,
        ends: Mapping[str, Offset],
        *,
        first: bool,
    ) -> dict[str, Position]:
        """The position at which each partition continues that is ``moving``, and each ``new`` one
        begins. ``first``: nothing was ever planned."""
        positions = {each: position_after(meta) for each, meta in moving.items() if meta is not None}
        after_loss = self._lost.reported
        # Of a log that was read to its end, retention can take nothing.
        behind = [
            each for each, at in positions.items() if (end := ends.get(each)) is not None and end.offset > at.offset
        ]
        self._logs.look_for_beginnings(topics.led if after_loss else [*behind, *new], now=after_loss)
        for partition, position in positions.items():
            self._lost.check(partition, position, topics)
        if after_loss:
            self._lost.check_epochs(positions, topics, ends)
        if new:
            positions.update(self._begin(new, topics, ends, first=first))
        if after_loss:
            self._lost.look_for_damage(positions, topics)
            self._lost.reported = False  # only now: if a step before fails, all are repeated
        return positions

    def _begin(
        self,
        new: Sequence[str],
        topics: KafkaTopics,
        ends: Mapping[str, Offset],
        *,
        first: bool,
    ) -> dict[str, Position]:
        """Where the partitions begin that were never planned before. Tables begin at their
        beginnings, whatever ``start`` says. A first plan that replaces another one begins where
        that one did."""
        found_late = self._found_nothing and self._source.start.everywhere is not None
        as_asked = first and not self._source.is_plain and not found_late
        asked = [each for each in new if as_asked and not self._read_first.includes(each)]
        pinned = self._end.first_plan if first else {}
        positions = {each: begun_again(pinned[each]) for each in asked if each in pinned}
        if (group := self._source.start_group) is not None and (unknown := [e for e in asked if e not in positions]):
            positions.update(committed_positions(self._settings, group, unknown))
        bounds: dict[str, Bound] = {
            each: named_bound("start", self._source.start, each) if each in asked else "earliest"
            for each in new
            if each not in positions
        }
        if as_asked:
            check_exist("start", self._source.start, ends)
        for partition, offset in offsets_at(
            self._metadata, bounds, ends, patient=self._source.waits_for_leaders or first
        ).items():
            if isinstance(bounds[partition], int) and offset > ends[partition].offset:
                raise ConfigError(
                    f"start is offset {offset} of partition {partition}, whose log ends at offset {ends[partition].offset}"
                )
            positions[partition] = Position(offset, topics.topic_ids.get(topic_and_number(partition)[0]))
        if len(positions) < len(new) and (self._source.waits_for_leaders or first):
            raise self._leader_moved()
        if as_asked:
            self._logs.look_for_beginnings(asked, now=True)
            for partition in asked:
                self._lost.check(partition, positions[partition], topics)
        return positions
