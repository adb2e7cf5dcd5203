"""Plans batches of Kafka offsets, on the driver.

``spouts.kafka.partitions`` describes the entry of a partition in a plan.

Invariants:

1. A range ends at or before the last stable offset, so it contains no undecided kafka_txn.
2. Every partition ever planned is in every later plan (C15), with an empty range if it contributes
   nothing.
3. A partition that appears while the topology runs starts at its beginning. ``start`` applies only
   to the very first batch.
4. Shares are fair: a partition with few records gives all it has, the others share the rest evenly.
5. If a range does not begin at the end of the previous one, there is a ``gap``, and the user has
   chosen ``on_data_loss="skip"``.
6. Where topics are read first, nothing of the others is read until each partition of the first is
   read to where it ended at the first start. The plans carry that offset, so it holds after a
   restart.
7. A bounded spout reads no partition past its end, and no partition that had no end when the ends
   were fixed. The plans carry the ends, so they hold after a restart. Where the very first plan is
   planned afresh, its start and its ends are those of the plan that it replaces.
8. A partition at rest keeps its entry of the previous plan, the same object: it would get an equal
   one. So the cost of a plan is in the partitions that move; of the others, only the end of the log
   is looked at.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from framework.clients.kafka import KafkaSettings
from framework.errors import READ_ANEW, ConfigError, DataLossError, RetryableError
from framework.observe.logs import get_logger
from framework.topology import PartitionPlanner, PartitionProgress, ReadCounts, WrittenTopic
from framework.topology.spouts import END_OFFSET, Backlog, Meta
from spouts.codecs.absent_fields import AbsentFields
from spouts.codecs.bad_records import BadRecordShares
from spouts.kafka.consumer.damaged_batches import Damage, find_damage
from spouts.kafka.consumer.truncation import truncated
from spouts.kafka.group_offsets import GroupOffsets, committed_positions
from spouts.kafka.metadata import METADATA_AGE_MAX_S, NARROW_PARTITIONS, KafkaMetadata, KafkaTopics, Offset
from spouts.kafka.partitions import (
    READ_FIRST_UNTIL,
    SAME_LOG,
    Position,
    begun_again,
    end_in,
    position_after,
    reaches,
    topic_and_number,
)
from spouts.kafka.planning.arrival_watcher import KafkaWatch
from spouts.kafka.planning.batch_limits import BatchSizer, KafkaLimits, fair_shares
from spouts.kafka.planning.bound_offsets import named_bound, offsets_at
from spouts.kafka.planning.end_offsets import ReadingEnd
from spouts.kafka.planning.offset_ranges import KafkaRanges
from spouts.kafka.planning.open_transactions import OpenTransactions
from spouts.kafka.planning.topic_loops import OwnTopics
from spouts.kafka.read_bounds import EARLIEST, Bound, Bounds
from spouts.kafka.record_viewer import RecordViewer
from spouts.kafka.streams import Streams

_log = get_logger()

#: A broker that comes back may report less than it has for a moment, or miss a topic. A report that
#: persists for this long is believed.
BELIEVED_AFTER_S = 10.0
#: How long the start waits for the offsets of a consumer group.
_GROUP_S = 5.0
_DECIDE = f"{READ_ANEW}; to go on after the gap, give the spout on_data_loss='skip'"


@dataclass(frozen=True, slots=True)
class KafkaSource:
    """The topics, and where the first batch of a new topology starts. ``skips_lost_data``: the user
    chose ``on_data_loss="skip"``. ``waits_for_leaders``: a batch of an idempotent spout waits for
    every partition; an opaque one leaves out those without a leader. ``read_first``: topics that a
    new topology reads to their ends, as they are then, before the others. ``start_group``: the
    consumer group whose committed offsets a new topology begins at; partitions without one begin at
    ``start``. ``end``: where reading ends; None: it does not. ``waits_for_open``: the end of a log
    includes what is behind an open kafka_txn."""

    topics: tuple[str, ...]
    pattern: str | None
    start: Bounds
    skips_lost_data: bool
    waits_for_leaders: bool
    _: KW_ONLY
    read_first: tuple[str, ...] = ()
    start_group: str | None = None
    end: Bounds | None = None
    waits_for_open: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether a new topology begins at the beginnings."""
        return self.start == EARLIEST and self.start_group is None


@dataclass(slots=True)
class _Seen:
    """What the planner knows of the logs, for ``lag`` and ``progress``, and remembers between
    plans. ``ends`` is replaced, never changed: other threads read it."""

    ends: Mapping[str, Offset] = field(default_factory=dict)
    beginnings: dict[str, int] = field(default_factory=dict)
    beginnings_at: float = -math.inf
    _: KW_ONLY
    amiss_since: dict[str, float] = field(default_factory=dict)  # partitions that are too short, or gone
    reader_lost: bool = False  # whether the reader has found a loss since the last plan
    lost_plan: Mapping[str, Meta] = field(default_factory=dict)  # what it was reading
    damage: dict[str, tuple[Damage, ...]] = field(default_factory=dict)  # in the way of these partitions
    found_nothing: bool = False
    first_plan: Mapping[str, Meta] = field(default_factory=dict)  # the last one after nothing
    known_ends: Mapping[str, Meta] = field(default_factory=dict)  # the last plan, also if it is to be replaced
    latest: Mapping[str, Meta | None] = field(default_factory=dict)  # the last plan, or what the next one comes after
    is_released: bool = False  # whether no entry has an end, in a spout without one


class KafkaPlanner(PartitionPlanner):
    """Plans the batches of one spout. ``bad_records``: the limit on the share of bad records.
    ``streams``: what is done with bad records of which topic; None: they end the run.
    ``group``: where committed offsets are published, or None. ``reader_group``: the group id of the
    readers."""

    shares_entries = True  # invariant 8

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
    ) -> None:
        self._source = source
        self._settings = settings
        self._reader_group = reader_group
        self._metadata = KafkaMetadata(settings, source.topics, source.pattern)
        self._watch = KafkaWatch(settings, reader_group)
        self._viewer = RecordViewer(settings, reader_group)
        self._ranges = KafkaRanges(self._viewer, streams)
        self._where = settings.bootstrap_servers
        self._sizer = BatchSizer(limits)
        self._bad_records = bad_records if bad_records is not None else BadRecordShares(None)
        self._absent = AbsentFields()
        self._group = group
        self._seen = _Seen()
        self._lag: tuple[object, object, object, int] | None = None
        self._progress: tuple[tuple[object, ...], Mapping[str, PartitionProgress]] | None = None
        self._gaps_told: dict[str, int] = {}
        self._open_transactions = OpenTransactions()
        self._adopted = False  # whether what the group has of former runs is renewed
        self._end = ReadingEnd(source.end, self._open_transactions, waits_for_open=source.waits_for_open)
        self._own_topics: OwnTopics | None = None
        self._checked: KafkaTopics | None = None  # the topics in which none is of its own

    # --- PartitionPlanner -------------------------------------------------------------------------

    @property
    def skips_lost_data(self) -> bool:
        return self._source.skips_lost_data

    def partitions(self) -> list[str]:
        return sorted(self._metadata.topics().leaders)

    def resume(self, plan: Mapping[str, Meta]) -> None:
        self._seen.first_plan = self._seen.known_ends = plan

    def finished(self, plan: Mapping[str, Meta]) -> bool:
        return self._end.is_over(plan)

    def plan(self, previous: Mapping[str, Meta | None]) -> Mapping[str, Meta] | None:
        return self._plan(previous, self._limits())

    def plan_smaller(self, previous: Mapping[str, Meta | None], divisor: int) -> Mapping[str, Meta] | None:
        limits = self._limits()
        return self._plan(previous, replace(limits, batch_records_max=max(limits.batch_records_max // divisor, 1)))

    def empty_plan(self, previous: Mapping[str, Meta | None]) -> Mapping[str, Meta] | None:
        known = {each: meta for each, meta in sorted(previous.items()) if meta is not None}
        return {each: position_after(meta).meta(0, None) for each, meta in known.items()} or None

    def backlog(self, previous: Mapping[str, Meta | None]) -> Backlog:
        self._see(self._metadata.ends(patient=False))
        records = 0
        for partition, end in self._seen.ends.items():
            meta = previous.get(partition)
            if self._is_ignored(partition, previous):
                continue
            begin = int(meta["next_offset"]) if meta is not None else self._seen.beginnings.get(partition, 0)
            records += max(self._end.limit(meta, end.offset) - begin, 0)
        return Backlog(records, self._sizer.bytes_of(records))

    def watch(self, arrived: Callable[[], None]) -> bool:
        ends = self._seen.ends
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
        self._seen.reader_lost = True
        self._seen.lost_plan = plan

    def processed(self, plan: Mapping[str, Meta], read: ReadCounts, elapsed_s: float) -> None:
        self._sizer.learn(self.record_count(plan), read.records, read.bytes, elapsed_s)
        self._bad_records.check(read)
        self._absent.check(read.absent, {stream: records for stream, (records, _) in read.streams.items()})

    def committed(self, plan: Mapping[str, Meta]) -> None:
        for partition in plan.keys() & self._seen.damage.keys():
            left = [each for each in self._seen.damage.pop(partition) if each.next > plan[partition]["next_offset"]]
            self._seen.damage.update({partition: tuple(left)} if left else {})
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
        ends, open_ends, known = self._seen.ends, self._open_transactions.ends, self._lag
        if not ends:
            return None
        if known is not None and known[0] is ends and known[1] is open_ends and known[2] is previous:
            return known[3]
        lag = 0
        for partition, end in ends.items():
            if (meta := previous.get(partition)) is None and self._is_ignored(partition, previous):
                continue
            readable, hidden = self._readable(partition, meta, end)
            lag += (max(readable - int(meta["next_offset"]), 0) if meta is not None else readable) + hidden
        self._lag = ends, open_ends, previous, lag
        return lag

    def progress(
        self, committed: Mapping[str, Meta], in_flight: Sequence[Mapping[str, Meta]]
    ) -> Mapping[str, PartitionProgress]:
        ends, known = self._seen.ends, self._progress
        of = (ends, self._open_transactions.ends, self._seen.beginnings, committed, *in_flight)
        if known is not None and len(known[0]) == len(of) and all(map(operator.is_, known[0], of)):
            return known[1]
        found: dict[str, PartitionProgress] = {}
        first_known = committed or (in_flight[0] if in_flight else {})
        for partition in sorted({*ends, *committed, *(each for plan in in_flight for each in plan)}):
            done, end = committed.get(partition), ends.get(partition)
            ranges = [plan[partition] for plan in in_flight if partition in plan]
            if not ranges and self._is_ignored(partition, first_known):
                continue
            entry = done if done is not None else ranges[0] if ranges else None
            readable, hidden = self._readable(partition, entry, end) if end is not None else (None, 0)
            first = ranges[0]["first_offset"] if ranges else self._seen.beginnings.get(partition, 0)
            found[partition] = PartitionProgress(
                readable,
                int(done["next_offset"] if done is not None else first),
                sum(int(meta["next_offset"]) - int(meta["first_offset"]) for meta in ranges),
                int(done.get("lost_records", 0)) if done is not None else 0,
                hidden,
            )
        self._progress = of, found
        return found

    @property
    def ranges(self) -> KafkaRanges:
        return self._ranges

    def check(self) -> None:
        self._metadata.check_topics()
        self._metadata.ends(patient=False)

    def source_identity(self) -> Mapping[str, Any]:
        topics = self._metadata.topics()
        return {"cluster": topics.cluster_id, "topics": dict(topics.topic_ids)}

    def end(self) -> Mapping[str, Meta]:
        self._metadata.check_topics()
        ends = self._metadata.ends(patient=self._source.waits_for_leaders)
        begins = self._metadata.beginnings(ends, patient=self._source.waits_for_leaders) if ends else {}
        self._see(ends)
        self._open_transactions.look(self._metadata, ends, now=True)
        topic_ids, latest = self._metadata.topics().topic_ids, self._seen.latest
        if not self._end.is_fixed(latest):
            raise RetryableError("the end of reading is not fixed yet")
        goal = {}
        for each, (log_end, _) in self._seen.ends.items():
            if self._is_ignored(each, latest):
                continue
            end = self._end.limit(latest.get(each), log_end)
            first = min(begins[each].offset, end) if each in begins else 0
            goal[each] = Position(first, topic_ids.get(topic_and_number(each)[0])).meta(end - first, None)
        return goal

    def hidden(self) -> Mapping[str, Meta]:
        topic_ids, latest, found = self._metadata.topics().topic_ids, self._seen.latest, {}
        for each, end in self._seen.ends.items():
            readable, records = self._readable(each, latest.get(each), end)
            if records and not self._is_ignored(each, latest):
                found[each] = Position(readable, topic_ids.get(topic_and_number(each)[0])).meta(records, None)
        return found

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
        self._metadata.close()
        if self._group is not None:
            self._group.close()

    # --- inside -----------------------------------------------------------------------------------

    def _limits(self) -> KafkaLimits:
        limits = self._sizer.limits()
        if self.records_max is None:
            return limits
        return replace(limits, batch_records_max=min(limits.batch_records_max, self.records_max))

    def _plan(self, previous: Mapping[str, Meta | None], limits: KafkaLimits) -> Mapping[str, Meta] | None:
        if self._group is not None:
            if not self._adopted and previous:
                self._adopted = True
                self._group.adopt(previous, _GROUP_S)
            self._group.advance()
        # A start other than the beginning, topics that are read first, and ends apply to every
        # existing partition: wait for all.
        self._seen.latest = previous
        fixing = not self._end.is_fixed(previous)
        needs_all = not self._source.is_plain or bool(self._source.read_first)
        patient = self._source.waits_for_leaders or (not previous and needs_all) or fixing
        topics = self._available_topics(previous, patient=patient)
        ends = self._metadata.ends(patient=patient)
        self._see(ends)
        self._open_transactions.look(self._metadata, ends)
        if self._seen.reader_lost:
            self._metadata.refresh()
            topics = self._metadata.topics()
        unended = self._end.unreached(previous)
        released = self._is_to_release(previous)
        looks_at_all = self._seen.reader_lost or fixing or released
        moving = unended if looks_at_all else self._moving(unended, topics, ends)
        new = [each for each in ends if previous.get(each) is None and not self._is_ignored(each, previous)]
        positions = self._positions(moving, new, topics, ends, first=not previous)
        if fixing and not positions.keys() >= set(new):
            raise self._leader_moved()
        if self._end.is_bounded:
            self._end.note_log_changes(positions, topics, ends, self._seen.known_ends)
        else:
            for position in positions.values():
                position.end = None
        if fixing:
            self._end.fix(positions, ends, self._seen.known_ends, self._metadata)
        unread = self._note_tables(positions, ends, first=not previous)
        available = {}
        for partition, position in positions.items():
            end = ends.get(partition)
            if unread and not self._is_table(partition):
                continue
            if end is not None and not self._is_short(partition, position, end):
                readable = self._readable_end(partition, position, end)
                if position.end is not None:
                    readable = max(min(readable, position.end[0]), position.offset)
                available[partition] = readable - position.offset
        turn = 0
        if len(available) > limits.batch_records_max:  # it says who comes first
            turn = sum(int(meta["next_offset"]) for meta in previous.values() if meta is not None)
        shares = fair_shares(available, limits, turn=turn)
        skipped = any(position.gap is not None for position in positions.values())
        begins = not previous and positions and not self._source.is_plain  # record the start itself
        if not (any(shares.values()) or skipped or begins or (positions and fixing) or released):
            if leaderless := [each for each in unread if each not in ends]:
                self._metadata.refresh()
                raise RetryableError(
                    f"partition {leaderless[0]} is read first, and has no leader; the batch waits for it"
                )
            return None
        plan = {each: meta for each, meta in previous.items() if meta is not None}
        for each in previous.keys() - unended.keys() if unended is not previous else ():
            if (ended := plan[each])["first_offset"] != ended["next_offset"] or "gap" in ended:
                plan[each] = position_after(ended).meta(0, None)
        for each, position in positions.items():
            end = ends.get(each)
            plan[each] = position.meta(shares.get(each, 0), end.leader_epoch if end is not None else None)
        made = plan if len(plan) == len(previous) else dict(sorted(plan.items()))
        self._seen.latest = self._seen.known_ends = made
        if not previous:
            self._seen.first_plan = made
        return made

    # --- the end of reading -----------------------------------------------------------------------

    def _is_ignored(self, partition: str, plan: Mapping[str, Meta | None]) -> bool:
        """Whether a partition came after the ends were fixed (invariant 7)."""
        if not self._end.is_bounded or partition in plan:
            return False
        if not plan and self._end.is_fixed(self._seen.first_plan):
            return partition not in self._seen.first_plan
        return bool(plan) and (self._end.is_fixed(plan) or not self._end.says(partition))

    def _readable(self, partition: str, meta: Meta | None, end: Offset) -> tuple[int, int]:
        """How far the partition may be read now, and how many records behind an open kafka_txn are
        to be read later."""
        hidden = self._open_transactions.records(partition, end.offset)
        readable = self._end.limit(meta, end.offset)
        return readable, self._end.limit(meta, end.offset + hidden) - readable

    def _leader_moved(self) -> RetryableError:
        self._metadata.refresh()
        return RetryableError("a partition's leader has moved; looking it up again")

    def _is_to_release(self, previous: Mapping[str, Meta | None]) -> bool:
        """Whether entries have an end that the spout has no more."""
        if self._end.is_bounded or self._seen.is_released:
            return False
        found = any(meta is not None and END_OFFSET in meta for meta in previous.values())
        self._seen.is_released = bool(previous) and not found
        return found

    # --- topics that are read first ---------------------------------------------------------------

    def _is_table(self, partition: str) -> bool:
        """Whether the partition is of a topic that is read first."""
        return topic_and_number(partition)[0] in self._source.read_first

    def _note_tables(self, positions: Mapping[str, Position], ends: Mapping[str, Offset], *, first: bool) -> list[str]:
        """Note up to where tables are read first: to their ends at the first start, or, where the
        log is another one since then, to its end. Returns the partitions that are not read up to
        there: the other topics wait for them."""
        if not self._source.read_first:
            return []
        unread = []
        for partition, position in positions.items():
            if not self._is_table(partition):
                continue
            end = ends.get(partition)
            is_other_log = position.gap is not None and position.gap["reason"] not in SAME_LOG
            if end is not None and (first or (is_other_log and position.until is not None)):
                position.until = end.offset
            if position.until is None or position.offset >= position.until:
                continue
            if end is not None and end.offset <= position.offset and self._believed(partition):
                position.until = None  # the log was truncated, and has nothing more to read first
            else:
                unread.append(partition)
        return unread

    def _see(self, ends: Mapping[str, Offset]) -> None:
        known = self._seen.ends
        if ends.items() <= known.items():
            return
        self._seen.ends = {**known, **ends}

    def _moving(
        self, previous: Mapping[str, Meta | None], topics: KafkaTopics, ends: Mapping[str, Offset]
    ) -> Mapping[str, Meta | None]:
        """The partitions of ``previous`` that are not at rest. One at rest has read its log to the
        end, contributed nothing last time, has no gap to forget, and its leader epochs and topic
        are still those of its entry."""
        current, amiss = set(topics.topic_ids.values()), self._seen.amiss_since
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
                and partition not in amiss
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
            self._seen.found_nothing = True
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
        after_loss = self._seen.reader_lost
        # Of a log that was read to its end, retention can take nothing.
        behind = [
            each for each, at in positions.items() if (end := ends.get(each)) is not None and end.offset > at.offset
        ]
        self._look_for_beginnings(topics.led if after_loss else [*behind, *new], now=after_loss)
        for partition, position in positions.items():
            self._check(partition, position, topics)
        if after_loss:
            self._check_epochs(positions, topics, ends)
        if new:
            positions.update(self._begin(new, topics, ends, first=first))
        if after_loss:
            self._look_for_damage(positions, topics)
            self._seen.reader_lost = False  # only now: if a step before fails, all are repeated
        return positions

    def _check(self, partition: str, position: Position, topics: KafkaTopics) -> None:
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
            self._seen.beginnings[partition] = position.offset
        position.topic_id = topic_id
        beginning_at = self._seen.beginnings.get(partition, 0)
        if position.end is not None:
            beginning_at = min(beginning_at, position.end[0])
        if position.offset < beginning_at and position.gap is None:
            self._lost(
                f"partition {partition} no longer holds offsets {position.offset} to {beginning_at}, which were not read "
                "yet: retention removed them"
            )
            position.skip("retention", beginning_at)

    def _check_epochs(self, positions: Mapping[str, Position], topics: KafkaTopics, ends: Mapping[str, Offset]) -> None:
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

    def _look_for_damage(self, positions: Mapping[str, Position], topics: KafkaTopics) -> None:
        """Find the batches that the reader could not read, where the user has chosen to go on after
        them."""
        if not self._source.skips_lost_data:
            return
        ranges = {
            partition: (positions[partition].offset, int(meta["next_offset"]))
            for partition, meta in self._seen.lost_plan.items()
            if partition in positions
            and topics.leaders.get(partition) is not None
            and positions[partition].gap is None
            and positions[partition].offset < int(meta["next_offset"])
        }
        self._seen.damage.update(find_damage(self._settings, self._reader_group, ranges))

    def _readable_end(self, partition: str, position: Position, end: Offset) -> int:
        """Where the next range of a partition has to end at the latest: before a damaged batch. At
        such a batch, skips it."""
        damage = [each for each in self._seen.damage.get(partition, ()) if each.next > position.offset]
        if damage and damage[0].first <= position.offset:
            position.skip("damaged", damage.pop(0).next)
        return max(min(damage[0].first if damage else end.offset, end.offset), position.offset)

    def _check_gone(self, partition: str, position: Position) -> None:
        """The topic is gone or not visible. When this has lasted long enough to be believed, the
        unread records are lost."""
        known = self._seen.ends.get(partition)
        end = max(known.offset if known is not None else 0, position.until or 0)
        if position.end is not None:
            end = position.end[0]
        if end <= position.offset or not self._believed(partition):
            return
        self._lost(f"partition {partition} was deleted, and offsets {position.offset} to {end} were not read yet")
        position.skip("deleted", end)

    def _believed(self, partition: str) -> bool:
        """Whether a partition has been short or gone for at least ``BELIEVED_AFTER_S`` seconds, so
        that its broker is not just coming back."""
        now = time.monotonic()
        return now - self._seen.amiss_since.setdefault(partition, now) >= BELIEVED_AFTER_S

    def _is_short(self, partition: str, position: Position, end: Offset) -> bool:
        """Whether a log ends before the position. When this is believed, the log was truncated:
        skip back to its end, or raise ``DataLossError``."""
        if end.offset >= position.offset:
            is_cut = self._end.is_cut(position.end, end.offset)
            waits = is_cut or (position.until is not None and position.until > position.offset)
            if end.offset > position.offset or not waits:
                self._seen.amiss_since.pop(partition, None)
            elif is_cut and position.end is not None and self._believed(partition):
                self._lost(
                    f"partition {partition} ends at offset {end.offset}, and reading was to end at offset {position.end[0]}, which "
                    "it had: the log was truncated"
                )
                position.skip("truncated", end.offset)
                position.end = (end.offset, position.end[1])
            return False
        if self._believed(partition):
            self._lost(
                f"partition {partition} ends at offset {end.offset}, and offsets up to {position.offset} were read before: "
                "the log was truncated"
            )
            position.skip("truncated", end.offset)
            if position.end is not None:
                position.end = (end.offset, position.end[1])
            del self._seen.amiss_since[partition]
        return True

    def _lost(self, what: str) -> None:
        if not self._source.skips_lost_data:
            raise DataLossError(f"{what}; {_DECIDE}")

    def _look_for_beginnings(self, partitions: Sequence[str], *, now: bool) -> None:
        """Look up where these logs begin. Retention moves this forward, so an older answer is a
        lower bound."""
        seen = self._seen
        if partitions and (now or time.monotonic() - seen.beginnings_at > METADATA_AGE_MAX_S):
            found = self._metadata.beginnings(partitions, patient=False)
            seen.beginnings = {**seen.beginnings, **{each: at.offset for each, at in found.items()}}
            seen.beginnings_at = time.monotonic()

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
        found_late = self._seen.found_nothing and self._source.start.everywhere is not None
        as_asked = first and not self._source.is_plain and not found_late
        asked = [each for each in new if as_asked and not self._is_table(each)]
        pinned = self._seen.first_plan if first else {}
        positions = {each: begun_again(pinned[each]) for each in asked if each in pinned}
        if (group := self._source.start_group) is not None and (unknown := [e for e in asked if e not in positions]):
            positions.update(committed_positions(self._settings, group, unknown))
        bounds: dict[str, Bound] = {
            each: named_bound("start", self._source.start, each) if each in asked else "earliest"
            for each in new
            if each not in positions
        }
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
            self._look_for_beginnings(asked, now=True)
            for partition in asked:
                self._check(partition, positions[partition], topics)
        return positions
