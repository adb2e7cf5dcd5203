"""The Kafka spout of core topologies: records one by one, each acked or failed by its tuple tree.

Source: storm-kafka-client's ``KafkaSpout``.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from framework.clients.kafka_settings import KafkaSettings
from framework.errors import ConfigError
from framework.topology import (
    Fields,
    OutputFieldsDeclarer,
    ReplayableSpout,
    TopologyContext,
)
from spouts.codecs.codec import Codec
from spouts.failed_tuple_retries import RetryPolicy
from spouts.kafka.cluster_metadata import KafkaMetadata, check_settings
from spouts.kafka.consumer.consumer_pool import reader_of, say_reader
from spouts.kafka.consumer.core_spout_consumer import KafkaTail
from spouts.kafka.core_partition import (
    AckedIds,
    MessageId,
    RecordIds,
)
from spouts.kafka.core_task import CoreTask
from spouts.kafka.decoding import RecordDecoder
from spouts.kafka.partition_plan_entries import Position, TopicPartition, partition_id, position_after, topic_and_number
from spouts.kafka.record_deserialization import EVERYTHING
from spouts.kafka.spout_argument_checks import above_0, at_least_1, checked_group
from spouts.kafka.start_end_options import checked_bound
from spouts.kafka.topic_streams import RECORD_BYTES_MAX, TopicStream, checked_source, checked_streams

COMMIT_EVERY_S = 5.0
#: How far a partition may read ahead of its committable offset, in offsets.
UNCOMMITTED_MAX = 10_000
_GUARANTEES = ("at_least_once", "at_most_once", "none")


class KafkaSpout(ReplayableSpout):
    """Reads topics in the tasks of a core topology. Records do not pass through the driver.

    **Input and output.** ``topics`` or ``pattern``, ``codec``, ``key_codec``, ``header_codecs`` and
    ``metadata``, or ``streams``: as for ``KafkaTransactionalSpout``. One task reads each partition:
    the same task as long as the parallelism stays the same.

    **Positions.** The positions are those of the consumer group ``group``, by default
    ``ratchet-<topology id>``. They contain the ids of the topics. ``start``: where to begin a
    partition for which the group has no position: "earliest", "latest", milliseconds since 1970, a
    ``datetime`` with a zone, or an ISO text with one.

    **Guarantee.**

    * ``"at_least_once"``: an offset is committed when it and all offsets before it in its partition
      are acked. Commits happen every ``commit_every_s`` seconds, changed or not, and at the end. A
      record that fails is emitted again by ``retry``: by default immediately the first time, then
      after 2 ms, and then after twice the previous delay, up to 10 s. After ``retry.retries_max``
      retries, ``on_exhausted`` decides: "dead_letter" emits the record on the stream
      ``dead_letters``, with ``DEAD_LETTER_FIELDS``; "drop" reports and drops it.
    * ``"at_most_once"``: offsets are committed before their records are emitted. No record is
      emitted twice, and records that fail are lost.
    * ``"none"``: no tracking. Offsets are committed every ``commit_every_s`` seconds and at the
      end. Records may be lost or emitted twice.

    **With stateful bolts.** Checkpoints hold the positions, and the spout goes back to them. The
    state is exactly-once; ``guarantee`` has no effect. After a failure the whole topology goes back
    to the last checkpoint, and reads its input again. When a record's own tuple has failed, or
    timed out, more than ``retry.retries_max`` times, ``on_exhausted`` applies to the record, and
    its tuple is not emitted. The delays of ``retry`` have no effect: the topology pauses. Without
    ``retries_max``, a record that fails ``topology.max.attempts`` times in a row ends the topology.
    The group only decides where the spout begins when it starts for the first time. After that, its
    offsets show the position of the last committed checkpoint to other tools, and the spout does
    not read them. A partition that appears after the first checkpoint is read from its earliest
    offset.

    **Reading ahead.** ``topology.max.spout.pending`` bounds the pending tuples of a task.
    ``uncommitted_max`` bounds, for each partition, the offsets between the committable offset and
    the next one. So the others cannot run arbitrarily far ahead of one record that always fails.
    After a restart, all records from the committed offset on are emitted again.

    **Errors.** ``on_bad_record``: a record that cannot be decoded fails the topology ("fail"), is
    left out ("skip"), or is emitted on the stream ``dead_letters`` ("dead_letter"). A value of more
    than ``record_bytes_max`` bytes counts as such a record. ``on_data_loss``: an offset that was
    lost before it was read (by retention, a truncated log, or a topic that was deleted and created
    again) fails the topology ("fail") or is skipped ("skip"). With "skip", a topic that was created
    again is read from its beginning.

    ``bootstrap_servers`` and ``settings``: as for the transactional spouts.
    """

    def __init__(
        self,
        topics: Sequence[str] = (),
        *,
        bootstrap_servers: str | None = None,
        pattern: str | None = None,
        streams: Mapping[str, Codec | TopicStream] | None = None,
        codec: Codec | None = None,
        key_codec: Codec | None = None,
        header_codecs: Mapping[str, Codec] | None = None,
        metadata: Sequence[str] = (),
        group: str | None = None,
        start: str | int | datetime.datetime = "earliest",
        end: None = None,
        start_group: None = None,
        guarantee: Literal["at_least_once", "at_most_once", "none"] = "at_least_once",
        retry: RetryPolicy | None = None,
        on_exhausted: Literal["dead_letter", "drop"] = "drop",
        uncommitted_max: int = UNCOMMITTED_MAX,
        commit_every_s: float = COMMIT_EVERY_S,
        on_bad_record: Literal["fail", "skip", "dead_letter"] = "fail",
        on_data_loss: Literal["fail", "skip"] = "fail",
        record_bytes_max: int = RECORD_BYTES_MAX,
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
        if end is not None or start_group is not None:
            raise ConfigError(
                f"{'end' if end is not None else 'start_group'}= is for the spouts of transactional topologies, such as "
                "OpaqueKafkaTransactionalSpout; a core topology goes on until it is stopped, from the offsets of its own group="
            )
        self._topics = checked_source(topics, pattern, streams)
        self._pattern = pattern
        self._start = checked_bound("start", start, ("earliest", "latest"))
        self._group = checked_group("group", group) if group is not None else None
        self._settings = KafkaSettings(bootstrap_servers, settings)
        self._streams = checked_streams(
            streams,
            codec=codec,
            key_codec=key_codec,
            header_codecs=header_codecs,
            metadata=metadata,
            on_bad_record=on_bad_record,
            record_bytes_max=record_bytes_max,
        )
        self._guarantee = guarantee
        self._retry = retry if retry is not None else RetryPolicy()
        self._on_exhausted = on_exhausted
        self._uncommitted_max = at_least_1("uncommitted_max", uncommitted_max)
        self._commit_every_s = above_0("commit_every_s", commit_every_s)
        self._skip_lost = on_data_loss == "skip"

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        exhausted = self._on_exhausted == "dead_letter"
        self._streams.declare(declarer, dead_letters=exhausted or self._streams.want_dead_letters)

    def output_fields(self) -> Fields:
        """The fields of the only stream. Raises ``ConfigError`` if there are several."""
        return self._streams.fields()

    def check_before_start(self, conf: Mapping[str, Any]) -> None:
        settings = self._settings.with_conf(conf)
        reader_of(settings)
        check_settings(settings)

    def check_servers(self, conf: Mapping[str, Any]) -> None:
        metadata = KafkaMetadata(self._settings.with_conf(conf), self._topics, self._pattern)
        try:
            metadata.check_topics()
        finally:
            metadata.close()

    def open(self, conf: Mapping[str, Any], context: TopologyContext, collector: Any) -> None:
        settings = self._settings.with_conf(conf)
        say_reader(settings)
        decoder = RecordDecoder(self._streams)
        # a dead letter contains the whole record
        keeps_records = self._on_exhausted == "dead_letter"
        self._task = CoreTask(
            KafkaTail(
                settings,
                self._group if self._group is not None else f"ratchet-{context.topology_id}",
                topics=self._topics,
                pattern=self._pattern,
                start=self._start,
                skip_lost=self._skip_lost,
                task=context.task_index,
                tasks=context.task_count,
                parts=EVERYTHING if keeps_records else decoder.parts,
                takes_out=self._streams.takes_out,
            ),
            decoder,
            collector,
            guarantee=self._guarantee,
            retry=self._retry,
            keeps_records=keeps_records,
            uncommitted_max=self._uncommitted_max,
            commit_every_s=self._commit_every_s,
        )

    def next_tuple(self) -> None:
        self._task.next_tuples(1)

    def next_tuples(self, most: int) -> None:
        if type(self).next_tuple is KafkaSpout.next_tuple:
            self._task.next_tuples(most)
        else:
            self.next_tuple()

    def caught_up(self) -> bool:
        """Whether every partition has been read to its end."""
        return self._task.caught_up()

    def unread(self) -> dict[str, str | None] | None:
        """The partitions that have not been read to their ends."""
        found = self._task.unread()
        if found is None:
            return None
        letters = self._on_exhausted == "dead_letter" or self._streams.want_dead_letters
        return {partition_id(*tp): None if letters else self._streams.of(tp[0]).stream for tp in found}

    def follow_checkpoints(self) -> None:
        self._task.follow_checkpoints()

    def begin_anew(self) -> None:
        self._task.begin_anew()

    def position(self) -> dict[str, Any]:
        """Partition -> its next offset, in the form of plans
        (``spouts.kafka.partition_plan_entries``)."""
        return {partition_id(*tp): at.after() for tp, at in self._task.position().items()}

    def seek(self, positions: Sequence[Any]) -> None:
        self._task.seek(recorded_positions(*positions))

    def committed(self, position: Any) -> None:
        self._task.committed(recorded_positions(position))

    @property
    def retries_max(self) -> int | None:
        return self._retry.retries_max

    def give_up(self, message_id: MessageId) -> None:
        self._task.give_up(message_id)

    def ack(self, message_id: MessageId) -> None:
        self._task.acked(message_id)

    def ack_all(self, message_ids: Sequence[MessageId]) -> None:
        if type(self).ack is not KafkaSpout.ack or not isinstance(message_ids, RecordIds):
            super().ack_all(message_ids)
        elif isinstance(message_ids, AckedIds):
            self._task.acked_rows(message_ids)

    def fail(self, message_id: MessageId) -> None:
        self._task.failed(message_id)

    def close(self) -> None:
        self._task.close()


def recorded_positions(*positions: Mapping[str, Any]) -> dict[TopicPartition, Position]:
    """The positions in checkpoints. Older checkpoints have bare offsets."""
    return {
        topic_and_number(name): Position(at, None) if isinstance(at, int) else position_after(at)
        for each in positions
        for name, at in each.items()
    }
