"""A consumer that follows partitions to their ends and commits positions to its consumer group, for
spouts whose tuples are acked one by one.

Partitions are assigned manually: only their names and numbers decide which spout task reads which.
So tasks need no coordination, and a task does not lose its partitions when another task is slow.

Invariants:

1. A position belongs to a topic id (C37). A position of a topic that was deleted and created again
   is lost data: reading never continues from it.
2. A partition without a known position delivers no records before the group has a start position
   for it. If checkpoints hold the positions, the checkpoint has it first.
3. No record that the consumer has returned is dropped because of an error that came with it.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Set

from confluent_kafka import KafkaException

from framework.clients.kafka_errors import kafka_error
from framework.clients.kafka_settings import ConnectionErrors, KafkaSettings
from framework.errors import DataLossError, FailedException, RetryableError
from framework.observe.logs import get_logger
from spouts.kafka.cluster_metadata import KafkaMetadata, KafkaTopics
from spouts.kafka.consumer.consumer_pool import reader_of
from spouts.kafka.consumer.continuous_consumers import ColumnFeed, Event, Feed, MessageFeed
from spouts.kafka.consumer.damaged_batches import DAMAGED, NOT_IN_LOG, BatchProber, damage_from
from spouts.kafka.consumer.decompression_failures import unreadable_chunk
from spouts.kafka.consumer.range_consumer_base import damage, fails
from spouts.kafka.consumer.record_chunk import RecordChunk
from spouts.kafka.group_offsets import GroupOffsets
from spouts.kafka.partition_plan_entries import Position, TopicPartition, partition_id, topic_and_number
from spouts.kafka.record_deserialization import EVERYTHING, Parts
from spouts.kafka.start_end_options import CommonBound

_log = get_logger()

#: How often topics are looked up again: the longest delay until new topics and partitions are
#: found.
LOOK_UP_EVERY_S = 5.0
#: The same after a failed or incomplete look-up.
AGAIN_AFTER_S = 0.25
_REQUEST_S = 5.0
#: No consumer has fetched so many records that nobody has taken yet.
_AHEAD_MAX = 1 << 32
_DECIDE = "say on_data_loss='skip' to go on with what is there"


def task_of(topic: str, partition: int, tasks: int) -> int:
    """The spout task that reads a partition. Independent of other topics and partitions."""
    return (zlib.crc32(topic.encode()) + partition) % tasks


class KafkaTail:
    """A consumer, and the offsets that it commits to its group. ``kafka.reader`` selects the
    reader.

    * ``parts``: the parts of a record to read, in addition to value, offset and leader epoch.
    * ``start``: where to begin a partition without a position in the group.
    * ``skip_lost``: if a position is no longer in the log, continue at the nearest offset that
      exists; otherwise raise ``DataLossError``.
    * ``takes_out``: whether bad records of a topic are left out. If so, an ``unreadable`` chunk
      takes the place of a batch that cannot be decompressed.

    Every method may raise ``RetryableError``, after which it may be called again, and
    ``ConfigError``."""

    def __init__(
        self,
        settings: KafkaSettings,
        group: str,
        *,
        topics: tuple[str, ...],
        pattern: str | None,
        start: CommonBound,
        skip_lost: bool,
        task: int,
        tasks: int,
        parts: Parts = EVERYTHING,
        takes_out: Callable[[str], bool] = fails,
    ) -> None:
        self._settings, self._group_id = settings, group
        self._where = settings.bootstrap_servers
        self._start = start
        self._skip_lost, self._takes_out = skip_lost, takes_out
        self._task, self._tasks = task, tasks
        self._errors = ConnectionErrors(self._where)
        self._metadata = KafkaMetadata(settings, topics, pattern)
        self._group = GroupOffsets(settings, group, self._errors)
        self._feed: Feed
        if reader_of(settings)[0] == "native":
            self._feed = ColumnFeed(settings, group, self._errors, parts)
        else:  # one consumer both reads and commits
            consumer = self._group.consumer()
            self._group.use(consumer)
            self._feed = MessageFeed(consumer)
        self._assigned: dict[TopicPartition, Position] = {}  # start position of each
        # begin when the group has these positions
        self._starting: dict[TopicPartition, Position] = {}
        self._lost: dict[
            TopicPartition, tuple[int, str]
        ] = {}  # (offset that is not in the log, the text of the consumer's error)
        self._damaged: dict[TopicPartition, str] = {}  # at a damaged batch, or misplaced after one
        # in place of batches that cannot be decompressed; not polled yet
        self._unreadable: list[RecordChunk] = []
        self._prober: BatchProber | None = None  # while there are damaged batches
        # the consumer may continue at an offset inside a damaged batch
        self._garbled: set[TopicPartition] = set()
        self._problem: Exception | None = None
        self._looked_up: float | None = None
        self._missing: frozenset[str] = frozenset()
        self._complete = False  # whether every known partition has begun, or is about to
        self._unconfirmed = False
        self._follows = False
        self._anew = False
        #: Whether partitions that appear later begin at their earliest offsets.
        self.settled = False
        #: Positions from a checkpoint, for partitions that have not begun yet.
        self.sought: dict[TopicPartition, Position] = {}

    # --- before the first look_up -----------------------------------------------------------------

    def follow_checkpoints(self) -> None:
        """Note that checkpoints hold the positions: those of the group are not used."""
        self._follows = True

    def begin_anew(self) -> None:
        """Begin where ``start`` says, ignoring the group's positions."""
        self._anew = True

    def seek(self, positions: Mapping[TopicPartition, Position]) -> None:
        """Begin this task's partitions at these positions, and its other partitions at their
        earliest offsets."""
        mine = {tp: at for tp, at in positions.items() if task_of(*tp, self._tasks) == self._task}
        self.sought, self.settled = mine, True

    # --- while it runs ----------------------------------------------------------------------------

    def settle(self) -> None:
        """From now on, begin new partitions at their earliest offsets, ignoring the group's
        positions. Raises ``RetryableError`` while it is unknown which partitions exist or where
        they begin."""
        if not self._complete or self._starting:
            raise RetryableError(f"Kafka at {self._where} has not told yet where all partitions begin")
        self.settled = True

    def confirm(self) -> None:
        """Check that all records came from the expected topics. If not, records since the last
        check may be of another topic: raises ``FailedException`` with ``skip_lost``, otherwise
        ``DataLossError``, and the next look-up is due immediately."""
        if not self._unconfirmed:
            return
        try:
            self._metadata.confirm_topics({tp[0]: at.topic_id for tp, at in self._assigned.items() if at.topic_id})
        except DataLossError as error:
            self._looked_up = None
            raise (FailedException(str(error)) if self._skip_lost else error) from None
        self._unconfirmed = False

    def look_up(self) -> dict[TopicPartition, Position]:
        """Assign partitions that are new, or that must begin again because their next records are
        lost. Returns the start position of each. Cheap if it was called recently."""
        now = time.monotonic()
        begins = {}
        if self._looked_up is None or now - self._looked_up >= LOOK_UP_EVERY_S:
            # After a failure, retry soon, but not in every round, and do not delay assigned
            # partitions.
            self._looked_up = now if self._assigned else _soon(now)
            try:
                begins = self._found()
            except KafkaException as error:
                raise self._errors.explain(error) from error
            if self._complete:
                self._looked_up = time.monotonic()
        for tp, position in list(self._starting.items()):
            if self._group.has(partition_id(*tp), position):
                begins[tp] = self._starting.pop(tp)
        self._assign(begins)
        return begins

    @property
    def at_ends(self) -> bool:
        """Whether every known partition has been read to its end."""
        return self.complete and self._assigned.keys() <= self.ended

    @property
    def complete(self) -> bool:
        """Whether every known partition has begun, and none must begin again."""
        amiss = self._starting or self._lost or self._damaged or self._unreadable
        return self._complete and not amiss

    @property
    def ended(self) -> Set[TopicPartition]:
        """The partitions that have been read to their ends."""
        return self._feed.ended

    def poll(self) -> RecordChunk | None:
        """The records that have arrived, by partition; None if there are none."""
        if self._unreadable:
            self._unconfirmed = True
            chunk = self._unreadable.pop(0)
            if self._damaged and not self._unreadable:
                self._looked_up = None  # continue the search
            return chunk
        if self._problem is None:
            try:
                records, events = self._feed.take()
            except KafkaException as error:
                raise kafka_error(error, f"Kafka at {self._where}") from error
            self._process(events)
            if records is not None:
                self._unconfirmed = True
                return records
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem
        return None

    def hear(self) -> None:
        """Process arrived events and records; keep the records for the next ``poll``."""
        try:
            self._process(self._feed.hear())
        except KafkaException as error:
            raise kafka_error(error, f"Kafka at {self._where}") from error

    def pause(self, wanted: Iterable[TopicPartition]) -> None:
        """Pause these partitions, and resume all others."""
        try:
            self._feed.pause(self._assigned.keys() & set(wanted))
        except KafkaException as error:
            raise kafka_error(error, f"Kafka at {self._where}") from error

    def topic_id(self, tp: TopicPartition) -> str | None:
        """The id of the topic from which an assigned partition is read."""
        return self._assigned[tp].topic_id

    def publish(self, positions: Mapping[TopicPartition, Position]) -> None:
        """Commit these positions to the group, without waiting. Commits all of them, changed or
        not, because Kafka deletes offsets that have not been committed for long."""
        offsets = {partition_id(*tp): at for tp, at in positions.items() if tp in self._assigned}
        self._group.publish(offsets, again=True)

    def published(self, positions: Mapping[TopicPartition, Position]) -> bool:
        """Whether the group has confirmed these positions."""
        return all(self._group.has(partition_id(*tp), at) for tp, at in positions.items())

    def advance(self) -> None:
        """Continue to publish. When publishing begins to fail, raises the error once, unless
        checkpoints hold the positions."""
        self._group.advance()
        problem = self._group.problem()
        if problem is not None and not self._follows:
            raise self._errors.explain(problem) from problem

    def close(self, *, publish: bool = True) -> None:
        """Publish pending positions, within a few seconds, if the cluster answers. Close the
        clients.
        """
        self._group.close(publish=publish)
        self._end_search()
        self._feed.close()
        self._metadata.close()

    # --- inside -----------------------------------------------------------------------------------

    def _found(self) -> dict[TopicPartition, Position]:
        """Look topics up. Returns the start positions of partitions, except for those that must
        first be committed to the group."""
        self._metadata.refresh()
        topics = self._metadata.topics()
        self._errors.connected = True
        self._tell_missing(frozenset(topics.missing))
        begins = self._placed_again(topics)
        placed, unreadable = self._after_damage(topics)
        self._assign(placed)
        self._unreadable += unreadable
        mine = [topic_and_number(each) for each in topics.leaders]
        new = [
            tp
            for tp in mine
            if tp not in self._assigned and tp not in self._starting and task_of(*tp, self._tasks) == self._task
        ]
        begins.update(self._begins(new, topics) if new else {})
        self._complete = (
            not self._lost and not self._damaged and all(tp in begins or tp in self._starting for tp in new)
        )
        return begins

    def _tell_missing(self, missing: frozenset[str]) -> None:
        if missing - self._missing:
            _log.warning("source.topics_missing", topics=sorted(missing), reason="waiting for them to be created")
        self._missing = missing

    def _begins(self, new: list[TopicPartition], topics: KafkaTopics) -> dict[TopicPartition, Position]:
        """Where partitions begin: at the position in a checkpoint; else at the group's committed
        position; else where ``start`` says."""
        known = {tp: self.sought[tp] for tp in new if tp in self.sought}
        if not self.settled and not self._anew:
            known.update(self._group.stored([tp for tp in new if tp not in known], _REQUEST_S))
        begins, replaced = {}, []
        for tp, position in known.items():
            current = topics.topic_ids[tp[0]]
            if position.topic_id in (None, current):
                begins[tp] = Position(position.offset, current, position.leader_epoch)
            else:
                self._data_lost(_made_again(tp, position, current))
                replaced.append(tp)
        begins.update(self._starts(replaced, "earliest", topics))
        start = "earliest" if self.settled else self._start
        begins.update(self._starts([tp for tp in new if tp not in known], start, topics))
        if self._follows:
            return begins
        # First commit positions that the group lacks: if this process dies, the next one starts at
        # the same positions.
        said = {tp for tp in known if tp not in self.sought and tp not in replaced}
        unsaid = {tp: at for tp, at in begins.items() if tp not in said}
        self._group.publish({partition_id(*tp): at for tp, at in unsaid.items()}, again=True)
        self._starting.update(unsaid)
        return {tp: at for tp, at in begins.items() if tp in said}

    def _starts(
        self, wanted: list[TopicPartition], start: CommonBound, topics: KafkaTopics
    ) -> dict[TopicPartition, Position]:
        """Where the logs begin, where they end, or the first offset at a time. Leaves out
        partitions whose leader does not answer."""
        names = [partition_id(*tp) for tp in wanted]
        if not names:
            return {}
        if start == "earliest":
            found = self._metadata.beginnings(names, patient=False)
        elif start == "latest":
            found = self._metadata.ends(names, patient=False)
        else:
            found = self._metadata.at_timestamp(names, start.time_ms, patient=False)
            # no later record: start at the end
            late = [name for name, each in found.items() if each.offset < 0]
            ends = self._metadata.ends(late, patient=False) if late else {}
            found = {**{name: each for name, each in found.items() if each.offset >= 0}, **ends}
        return {
            tp: Position(each.offset, topics.topic_ids[tp[0]], each.leader_epoch)
            for tp, each in ((topic_and_number(name), each) for name, each in found.items())
        }

    def _placed_again(self, topics: KafkaTopics) -> dict[TopicPartition, Position]:
        """Start positions of partitions that begin again, because their topic was replaced or their
        log was truncated. Partitions that only continue at a later offset, because retention
        removed the next records, are repositioned directly."""
        replaced = []
        for tp, position in self._assigned.items():
            current = topics.topic_ids.get(tp[0])
            if current is not None and position.topic_id not in (None, current):
                lost = _made_again(tp, position, current)
                self._data_lost(lost)
                if self._follows:
                    raise FailedException(f"{lost}; states and spouts go back to the last checkpoint")
                replaced.append(tp)
        begins = self._starts(replaced, "earliest", topics)
        cut = {tp: asked for tp, (asked, _) in self._lost.items() if tp not in replaced}
        lows, ends = self._starts(list(cut), "earliest", topics), self._starts(list(cut), "latest", topics)
        further: dict[TopicPartition, Position] = {}
        for tp, asked in cut.items():
            if tp not in lows or tp not in ends:
                continue
            here = self._feed.position(tp)
            if here is not None and here != asked and lows[tp].offset <= here <= ends[tp].offset:
                # The answer to a request from before the position was set, or for a later position.
                further[tp] = Position(here, lows[tp].topic_id)
                continue
            self._data_lost(
                f"partition {partition_id(*tp)} no longer holds offset {asked}: {self._lost[tp][1]}. Retention "
                "removed it, or the log was truncated"
            )
            at = min(max(asked, lows[tp].offset), ends[tp].offset)
            placed = Position(at, lows[tp].topic_id)  # its leader epoch is unknown
            (begins if at < asked else further)[tp] = placed
        self._assign(further)
        return begins

    def _after_damage(self, topics: KafkaTopics) -> tuple[dict[TopicPartition, Position], list[RecordChunk]]:
        """Where partitions with a damaged batch continue, and chunks in place of batches that
        cannot be decompressed. A batch that was damaged only in transit is read again. The search
        ends before the next partition, and waits for chunks to be polled, so that rounds go on and
        few chunks are in memory."""
        placed: dict[TopicPartition, Position] = {}
        unreadable: list[RecordChunk] = []
        if not self._damaged:
            self._end_search()
        for tp, text in self._damaged.items():
            offset = self._feed.position(tp)
            if self._unreadable or unreadable or offset is None or topics.leaders.get(partition_id(*tp)) is None:
                self._looked_up = _soon(time.monotonic())
                continue
            if self._prober is None:
                self._prober = BatchProber(self._settings, self._group_id)
            for batch in damage_from(self._prober, tp, offset):
                if batch.is_unreadable and self._takes_out(tp[0]):
                    unreadable.append(unreadable_chunk(tp, batch.first, batch.next))
                else:
                    self._data_lost(damage(tp, batch.first, text, made_so=batch.is_unreadable))
                offset = batch.next
            placed[tp] = Position(offset, self._assigned[tp].topic_id)
        return placed, unreadable

    def _end_search(self) -> None:
        prober, self._prober = self._prober, None
        if prober is not None:
            prober.close()

    def _assign(self, begins: Mapping[TopicPartition, Position]) -> None:
        """Read partitions starting at these positions."""
        if not begins:
            return
        try:
            self._feed.begin(begins)
        except KafkaException as error:
            self._complete, self._looked_up = False, _soon(time.monotonic())  # retry at the next look-up
            raise kafka_error(error, f"Kafka at {self._where}") from error
        for tp, position in begins.items():
            self._assigned[tp] = position
            self.sought.pop(tp, None)
            self._lost.pop(tp, None)
            self._damaged.pop(tp, None)

    def _process(self, events: Iterable[Event]) -> None:
        """Process all events, and the group's answers. Keeps the first error for ``poll``."""
        self._group.advance()
        for tp, error, offset in events:
            if tp in self._damaged:
                continue  # meaningless after a damaged batch
            if error.code() in DAMAGED and tp in self._assigned:
                self._damaged[tp] = error.str()
                self._garbled.add(tp)
                self._looked_up = None
            elif error.code() in NOT_IN_LOG and tp in self._assigned and self._is_elsewhere(tp, offset):
                # The consumer has another position than assigned: assign it again; a loss is then
                # reported for that offset.
                self._damaged[tp] = error.str()
                self._looked_up = None
            elif error.code() in NOT_IN_LOG and tp in self._assigned:
                self._lost[tp] = offset if offset is not None else self._assigned[tp].offset, error.str()
                self._looked_up = None  # look up immediately why
            elif error.fatal() or not error.retriable():
                self._problem = self._problem or kafka_error(error, f"Kafka at {self._where}")

    def _is_elsewhere(self, tp: TopicPartition, offset: int | None) -> bool:
        """Whether the consumer has asked for another offset than it should. Behind a damaged batch
        librdkafka may ask for any, and may say so before it reports the damage, or never."""
        position = self._feed.position(tp)
        if tp in self._garbled or position is None or offset is None:
            return tp in self._garbled and offset != position
        return not position <= offset <= position + _AHEAD_MAX

    def _data_lost(self, what: str) -> None:
        if not self._skip_lost:
            raise DataLossError(f"{what}; {_DECIDE}")
        _log.warning("source.offsets_lost", reason=what)


def _soon(now: float) -> float:
    """A time of the last look-up such that the next is due in ``AGAIN_AFTER_S``."""
    return now - LOOK_UP_EVERY_S + AGAIN_AFTER_S


def _made_again(tp: TopicPartition, position: Position, current: str) -> str:
    return (
        f"topic {tp[0]!r} was deleted and created again (its id was {position.topic_id}, is {current}): "
        f"what had not been read of partition {partition_id(*tp)} is lost"
    )
