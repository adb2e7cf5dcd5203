"""The Kafka spout of core topologies: records one by one, each acked or failed by its tuple tree.

Source: storm-kafka-client's ``KafkaSpout``.
"""

from __future__ import annotations

import datetime
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from framework.errors import ConfigError, RetryableError
from framework.kafka_clients import KafkaSettings
from framework.topology import (
    DEAD_LETTER_FIELDS,
    DEAD_LETTER_STREAM,
    DEFAULT_STREAM,
    Fields,
    OutputFieldsDeclarer,
    ReplayableSpout,
    TopologyContext,
)
from framework.topology.tuples import rows_of
from spouts.acked_offsets import AckedOffsets
from spouts.bad_records import OnBadRecord
from spouts.codecs import Codec
from spouts.kafka_checks import (
    above_0,
    at_least_1,
    checked_format,
    checked_group,
    checked_start,
    checked_topics,
    fields_of,
)
from spouts.kafka_decoding import RecordDecoder, dead_letters
from spouts.kafka_partitions import partition_id, topic_and_number
from spouts.kafka_session import Where
from spouts.kafka_tail import KafkaTail
from spouts.retries import Retries, RetryPolicy

COMMIT_EVERY_S = 5.0
#: Offsets of a partition that may lie between what is done and what is next.
UNCOMMITTED_MAX = 10_000
#: Records per partition that are decoded and wait for their turn.
_BUFFERED_MAX = 4_000
_GUARANTEES = ("at_least_once", "at_most_once", "none")

Key = tuple[str, int, int]


class _Row(NamedTuple):
    """A record that waits or is under way. ``message``: kept while it may become a dead letter."""

    values: Sequence[Any]
    stream: str
    message: Any


class KafkaSpout(ReplayableSpout):
    """Reads topics in the tasks of a core topology; what is read passes no driver.

    **Which records, which rows.** ``topics`` or ``pattern``, ``codec``, ``key_codec``, ``header_codecs`` and ``metadata`` are as
    for ``KafkaTransactionalSpout``. Each partition is read by one task, the same one as long as the parallelism stays.

    **Where it goes on.** The positions are those of the consumer group ``group``, by default the topology's id. ``start``: where
    a partition begins that the group has no position for: "earliest", "latest", milliseconds since 1970 or a ``datetime`` with a
    zone.

    **Guarantee.** ``"at_least_once"``: a record's offset is committed once it and all before it in its partition are acked,
    every ``commit_every_s`` seconds and at the end; what fails is emitted again, at once the first time, then after 2 ms and
    twice as long each time, up to 10 s (``retry``). When that has been tried ``retry.retries_max`` times, ``on_exhausted`` says
    what becomes of the record: "dead_letter" emits it on the stream ``dead_letters``, with ``DEAD_LETTER_FIELDS``, "drop" reports
    it and lets it go. ``"at_most_once"``: offsets are committed before their records are emitted; nothing is emitted twice, and
    what fails is lost. ``"none"``: not tracked; offsets are committed now and then, records may be lost or come twice.

    **With stateful bolts.** Checkpoints hold the offsets, and the spout goes back to them: the state is exactly-once, ``retry`` and
    ``on_exhausted`` have no part in it, and the offsets of the group only tell others how far things are. A partition that appears
    after the first checkpoint is read from its earliest offset.

    **How far ahead.** ``topology.max.spout.pending`` bounds the tuples of a task whose fate is open. ``uncommitted_max`` bounds the
    offsets of each partition between what is done and what is next, so that one record that fails for ever does not let the others
    run arbitrarily far ahead; what was read beyond it is emitted again after a restart.

    ``on_bad_record``: a record that cannot be decoded fails the topology ("fail"), is left out ("skip"), or is emitted on the
    stream ``dead_letters`` ("dead_letter"). ``on_data_loss``: an offset that is gone before it was read fails the topology
    ("fail") or is skipped ("skip"). ``bootstrap_servers`` and ``settings`` as for the transactional spouts.
    """

    def __init__(
        self,
        topics: Sequence[str] = (),
        *,
        bootstrap_servers: str | None = None,
        pattern: str | None = None,
        codec: Codec | None = None,
        key_codec: Codec | None = None,
        header_codecs: Mapping[str, Codec] | None = None,
        metadata: Sequence[str] = (),
        group: str | None = None,
        start: str | int | datetime.datetime = "earliest",
        guarantee: Literal["at_least_once", "at_most_once", "none"] = "at_least_once",
        retry: RetryPolicy | None = None,
        on_exhausted: Literal["dead_letter", "drop"] = "drop",
        uncommitted_max: int = UNCOMMITTED_MAX,
        commit_every_s: float = COMMIT_EVERY_S,
        on_bad_record: Literal["fail", "skip", "dead_letter"] = "fail",
        on_data_loss: Literal["fail", "skip"] = "fail",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if guarantee not in _GUARANTEES:
            raise ConfigError(f"guarantee must be one of {', '.join(map(repr, _GUARANTEES))}, not {guarantee!r}")
        if on_exhausted not in ("dead_letter", "drop"):
            raise ConfigError(f"on_exhausted must be 'dead_letter' or 'drop', not {on_exhausted!r}")
        if on_data_loss not in ("fail", "skip"):
            raise ConfigError(f"on_data_loss must be 'fail' or 'skip', not {on_data_loss!r}")
        if retry is not None and guarantee != "at_least_once":
            raise ConfigError(f"retry= needs guarantee='at_least_once': with {guarantee!r} nothing is emitted again")
        self._topics = checked_topics(topics, pattern)
        self._pattern = pattern
        self._start = checked_start(start)
        self._group = checked_group("group", group) if group is not None else None
        self._settings = KafkaSettings(bootstrap_servers, settings)
        self._format = checked_format(codec, key_codec, header_codecs, metadata)
        self._fields = fields_of(self._format)
        self._guarantee = guarantee
        self._retry = retry if retry is not None else RetryPolicy()
        self._on_exhausted = on_exhausted
        self._uncommitted_max = at_least_1("uncommitted_max", uncommitted_max)
        self._commit_every_s = above_0("commit_every_s", commit_every_s)
        self._on_bad_record = OnBadRecord.of(on_bad_record)
        self._skip_lost = on_data_loss == "skip"

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(self._fields)
        if self._on_bad_record is OnBadRecord.DEAD_LETTER or self._on_exhausted == "dead_letter":
            declarer.declare(DEAD_LETTER_FIELDS, DEAD_LETTER_STREAM)

    def output_fields(self) -> Fields:
        """The fields of the default stream."""
        return self._fields

    def check_before_start(self, conf: Mapping[str, Any]) -> None:
        self._settings.with_conf(conf)

    def open(self, conf: Mapping[str, Any], context: TopologyContext, collector: Any) -> None:
        self._task = _Task(
            KafkaTail(
                self._settings.with_conf(conf),
                self._group if self._group is not None else f"ratchet-{context.topology_id}",
                topics=self._topics,
                pattern=self._pattern,
                start=self._start,
                skip_lost=self._skip_lost,
                task=context.task_index,
                tasks=context.task_count,
            ),
            RecordDecoder(self._format, self._on_bad_record),
            collector,
            guarantee=self._guarantee,
            retry=self._retry,
            keeps_messages=self._on_exhausted == "dead_letter",
            uncommitted_max=self._uncommitted_max,
            commit_every_s=self._commit_every_s,
        )

    def next_tuple(self) -> None:
        self._task.next_tuple()

    def caught_up(self) -> bool:
        """Whether every partition has been read to its end."""
        return self._task.caught_up()

    def position(self) -> dict[str, int]:
        """Partition -> next offset."""
        return self._task.position()

    def seek(self, positions: Sequence[Any]) -> None:
        self._task.seek({topic_and_number(name): offset for each in positions for name, offset in each.items()})

    def ack(self, message_id: Key) -> None:
        self._task.acked(message_id)

    def fail(self, message_id: Key) -> None:
        self._task.failed(message_id)

    def close(self) -> None:
        self._task.close()


class _Task:
    """One spout task: a consumer, what it has read, and what became of it."""

    def __init__(
        self,
        tail: KafkaTail,
        decoder: RecordDecoder,
        collector: Any,
        *,
        guarantee: str,
        retry: RetryPolicy,
        keeps_messages: bool,
        uncommitted_max: int,
        commit_every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tail = tail
        self._decoder = decoder
        self._collector = collector
        self._tracked = guarantee == "at_least_once"
        self._commits_first = guarantee == "at_most_once"
        self._keeps_messages = keeps_messages
        self._uncommitted_max = uncommitted_max
        self._commit_every_s = commit_every_s
        self._clock = clock
        self._offsets: dict[Where, AckedOffsets] = {}
        self._buffers: dict[Where, deque[tuple[int, _Row | None]]] = {}
        self._turn: deque[Where] = deque()
        self._under_way: dict[Key, _Row] = {}
        self._retries: Retries[Key] = Retries(retry)
        self._committed: dict[Where, int] = {}
        self._committed_at = clock()
        self._unsure: list[Any] = []  # read, and to be committed before they may be emitted
        self._trouble: str | None = None

    def next_tuple(self) -> None:
        """Emit one record: one that is due again, else the next one of some partition."""
        try:
            self._begin()
            if self._clock() - self._committed_at >= self._commit_every_s:
                self._commit()
            again = self._retries.due(self._clock())
            if again is not None:
                self._emit(again, self._under_way[again])
            elif not self._emit_next():
                self._read()
                self._emit_next()
            self._trouble = None
        except RetryableError as error:  # the cluster is away: what is under way stays as it is
            if self._trouble is None:
                self._collector.report_error(error)
            self._trouble = str(error)

    def acked(self, key: Key) -> None:
        row = self._under_way.pop(key, None)
        if row is not None:
            self._offsets[key[:2]].acked(key[2])
            self._retries.done(key)

    def failed(self, key: Key) -> None:
        row = self._under_way.get(key)
        if row is None:
            return  # it has been acked, or is of another life of this task
        is_letter = row.stream == DEAD_LETTER_STREAM  # there is no place left to put it: it must arrive
        if self._retries.failed(key, self._clock(), for_ever=is_letter):
            return
        if self._keeps_messages:
            letter = dead_letters("value", [row.message], ["its tuple tree failed too often"], {})
            self._under_way[key] = _Row(next(rows_of(letter)), DEAD_LETTER_STREAM, None)
            self._retries.failed(key, self._clock(), for_ever=True)
            return
        self._collector.report_error(
            RuntimeError(f"{key[0]}/{key[1]}, offset {key[2]}: given up after its retries; the record is dropped")
        )
        self.acked(key)

    def caught_up(self) -> bool:
        return self._tail.at_ends and not self._unsure and not any(self._buffers.values())

    def position(self) -> dict[str, int]:
        """Raises ``RetryableError`` when the cluster has not told yet where partitions begin."""
        if not self._tail.settled:
            self._begin()
            self._tail.settle()
        begun = {where: offsets.position for where, offsets in self._offsets.items()}
        return {partition_id(*where): offset for where, offset in {**self._tail.sought, **begun}.items()}

    def seek(self, positions: Mapping[Where, int]) -> None:
        self._tail.seek(positions)

    def close(self) -> None:
        try:
            self._commit()
        except RetryableError as error:  # what is not committed comes again
            self._collector.report_error(error)
        finally:
            self._tail.close()

    # --- inside ------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        for where, offset in self._tail.look_up().items():
            self._offsets[where] = AckedOffsets(offset)
            self._buffers[where] = deque()
            self._committed[where] = offset
            self._turn.append(where)

    def _emit_next(self) -> bool:
        """The next record of the partition whose turn it is. False when none has one that may be emitted."""
        for _ in range(len(self._turn)):
            where = self._turn[0]
            self._turn.rotate(-1)
            offsets, buffer = self._offsets[where], self._buffers[where]
            while buffer and buffer[0][1] is None:
                offsets.passed(buffer.popleft()[0])
            if buffer and not (self._tracked and offsets.span >= self._uncommitted_max):
                offset, row = buffer.popleft()
                assert row is not None
                if self._tracked:
                    offsets.emitted(offset)
                    self._under_way[(*where, offset)] = row
                else:
                    offsets.passed(offset)
                self._emit((*where, offset), row)
                return True
        return False

    def _emit(self, key: Key, row: _Row) -> None:
        self._collector.emit(row.values, message_id=key if self._tracked else None, stream=row.stream)

    def _read(self) -> None:
        """Take in what has come."""
        if not self._unsure:
            self._tail.pause(where for where, buffer in self._buffers.items() if len(buffer) >= _BUFFERED_MAX)
            self._unsure = self._tail.poll()
        if not self._unsure:
            return
        if self._commits_first:
            after = {(each.topic(), each.partition()): each.offset() + 1 for each in self._unsure}
            self._tail.commit(after)
            self._committed.update(after)
        messages, self._unsure = self._unsure, []
        rows: list[tuple[Where, int, _Row | None]] = []
        for decoded in self._decoder.decode(messages, {}):
            stream = DEAD_LETTER_STREAM if decoded.letters else DEFAULT_STREAM
            values = rows_of(decoded.rows) if decoded.rows is not None else [None] * len(decoded.messages)
            for message, row in zip(decoded.messages, values, strict=True):
                where = message.topic(), message.partition()
                kept = _Row(row, stream, message if self._keeps_messages else None) if row is not None else None
                rows.append((where, message.offset(), kept))
        for where, offset, each in sorted(rows, key=lambda read: (read[0], read[1])):
            self._buffers[where].append((offset, each))

    def _commit(self) -> None:
        """Commit how far each partition is done, where that has changed."""
        self._committed_at = self._clock()
        if self._commits_first:
            return
        done = {where: each.committable for where, each in self._offsets.items()}
        new = {where: offset for where, offset in done.items() if offset != self._committed[where]}
        self._tail.commit(new)
        self._committed.update(new)
