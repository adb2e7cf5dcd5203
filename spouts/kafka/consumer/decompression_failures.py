"""Passes over batches that their producers made so that librdkafka cannot decompress them.

ADR 136. Invariant: each attempt passes over the same offsets. The broker keeps such a batch as it
is, and its checksum is right.
"""

from __future__ import annotations

import pyarrow as pa

from framework.clients.kafka_settings import KafkaSettings
from framework.topology.dead_letters import CUT_HEADER
from spouts.kafka.consumer.damaged_batches import BatchProber, DamagedBatch
from spouts.kafka.consumer.record_chunk import ColumnChunk, Run
from spouts.kafka.partition_plan_entries import TopicPartition
from spouts.kafka.record_deserialization import METADATA_TYPES


class UnreadableBatches:
    """Finds where such batches end. The first search opens a consumer, which is kept until
    ``close``; a later search opens another one. Used by one thread at a time."""

    def __init__(self, settings: KafkaSettings, group: str) -> None:
        self._settings, self._group = settings, group
        self._prober: BatchProber | None = None

    def at(self, tp: TopicPartition, offset: int) -> DamagedBatch | None:
        """The batch at this offset, from there on; None if it can be read now, or does not match
        its checksum. Raises ``RetryableError`` when the broker does not answer."""
        if self._prober is None:
            self._prober = BatchProber(self._settings, self._group)
        found = self._prober.damaged_batch(tp, offset, offset + 1)
        return found if found is not None and found.is_unreadable else None

    def close(self) -> None:
        prober, self._prober = self._prober, None
        if prober is not None:
            prober.close()


def unreadable_chunk(tp: TopicPartition, first: int, end: int) -> ColumnChunk:
    """One record without key and value in place of the offsets from ``first`` up to ``end`` of such
    a batch, at the last of them. Its dead letter cannot be replayed."""
    size = f"batch of {end - first} offsets".encode()
    return ColumnChunk(
        [Run(*tp, 1)],
        pa.array([None], pa.binary()),
        pa.array([end - 1], pa.int64()),
        value_bytes=0,
        keys=pa.array([None], pa.binary()),
        headers=pa.array([[{"key": CUT_HEADER, "value": size}]], METADATA_TYPES["headers"]),
        timestamps=pa.array([None], pa.int64()),
        epochs=pa.array([-1], pa.int32()),
        unreadable=f"the batch with offsets {first} to {end - 1} cannot be decompressed: its producer made it so",
    )
