"""Looks up the offsets of bounds: where reading begins, and where it ends."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from framework.errors import ConfigError
from spouts.kafka.cluster_metadata import KafkaMetadata, Offset
from spouts.kafka.start_end_options import Bound, Bounds, Instant


def offsets_at(
    metadata: KafkaMetadata, bounds: Mapping[str, Bound], ends: Mapping[str, Offset], *, patient: bool
) -> dict[str, int]:
    """The offset of each bound. ``ends``: where the logs end. Leaves out partitions whose leader
    has moved."""
    found = {each: bound for each, bound in bounds.items() if isinstance(bound, int)}
    found.update({each: ends[each].offset for each, bound in bounds.items() if bound == "latest" and each in ends})
    if earliest := [each for each, bound in bounds.items() if bound == "earliest"]:
        beginnings = metadata.beginnings(earliest, patient=patient)
        found.update({each: at.offset for each, at in beginnings.items() if each in bounds})
    for instant in sorted({bound for bound in bounds.values() if isinstance(bound, Instant)}):
        asked = [each for each, bound in bounds.items() if bound == instant]
        for each, at in metadata.at_timestamp(asked, instant.time_ms).items():
            # No record at or after the time: the end of the log.
            found[each] = at.offset if at.offset >= 0 else ends[each].offset
    return found


def named_bound(name: str, bounds: Bounds | None, partition: str) -> Bound:
    """The bound of a partition. Raises ``ConfigError`` when the argument ``name`` says nothing of
    it."""
    bound = bounds.of(partition) if bounds is not None else None
    if bound is None:
        raise ConfigError(
            f"{name} says nothing of partition {partition}: give it an offset, 'latest'"
            + (", or 'earliest'" if name == "start" else "")
        )
    return bound


def check_exist(name: str, bounds: Bounds, partitions: Collection[str]) -> None:
    """Raise ``ConfigError`` if the argument ``name`` names an offset of a partition that is not
    among ``partitions``. The offset 0, and places without an offset, may be named ahead."""
    for partition, bound in sorted(bounds.partitions.items()):
        if isinstance(bound, int) and bound > 0 and partition not in partitions:
            raise ConfigError(f"{name} is offset {bound} of partition {partition}, which does not exist: correct it")


def check_is_past(bounds: Mapping[str, Bound]) -> None:
    """Raise ``ConfigError`` for an end that is a time to come: records before it may come yet."""
    now_ms = time.time() * 1000
    for partition, bound in bounds.items():
        if isinstance(bound, Instant) and bound.time_ms > now_ms:
            raise ConfigError(
                f"end is {(bound.time_ms - now_ms) / 1000:,.0f} s in the future for partition {partition}: the end is fixed at "
                "the first start, so start the topology after that time"
            )


def check_is_after_start(bounds: Mapping[str, Bound], starts: Mapping[str, int]) -> None:
    """Raise ``ConfigError`` for an end that is an offset before the start of its partition. A time
    may select such an offset: then nothing is to be read."""
    for partition, start in sorted(starts.items()):
        bound = bounds.get(partition)
        if isinstance(bound, int) and bound < start:
            raise ConfigError(
                f"end is offset {bound} of partition {partition}, before its start, offset {start}: "
                f"give an end of {start} or more, or an earlier start"
            )
