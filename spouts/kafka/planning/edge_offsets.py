"""Looks up the offsets of edges: where reading begins, and where it ends."""

from __future__ import annotations

import time
from collections.abc import Mapping

from framework.errors import ConfigError
from spouts.kafka.edges import Edge, Edges, Instant
from spouts.kafka.metadata import KafkaMetadata, Offset


def offsets_at(
    metadata: KafkaMetadata, edges: Mapping[str, Edge], ends: Mapping[str, Offset], *, patient: bool
) -> dict[str, int]:
    """The offset of each edge. ``ends``: where the logs end. Leaves out partitions whose leader has
    moved."""
    found = {each: edge for each, edge in edges.items() if isinstance(edge, int)}
    found.update({each: ends[each].offset for each, edge in edges.items() if edge == "latest" and each in ends})
    if earliest := [each for each, edge in edges.items() if edge == "earliest"]:
        beginnings = metadata.beginnings(earliest, patient=patient)
        found.update({each: at.offset for each, at in beginnings.items() if each in edges})
    for instant in sorted({edge for edge in edges.values() if isinstance(edge, Instant)}):
        asked = [each for each, edge in edges.items() if edge == instant]
        for each, at in metadata.at_timestamp(asked, instant.time_ms).items():
            # No record at or after the time: the end of the log.
            found[each] = at.offset if at.offset >= 0 else ends[each].offset
    return found


def named_edge(name: str, edges: Edges | None, partition: str) -> Edge:
    """The edge of a partition. Raises ``ConfigError`` when the argument ``name`` says nothing of
    it."""
    edge = edges.of(partition) if edges is not None else None
    if edge is None:
        raise ConfigError(
            f"{name} says nothing of partition {partition}: give it an offset, 'latest'"
            + (", or 'earliest'" if name == "start" else "")
        )
    return edge


def check_is_past(edges: Mapping[str, Edge]) -> None:
    """Raise ``ConfigError`` for an end that is a time to come: records before it may come yet."""
    now_ms = time.time() * 1000
    for partition, edge in edges.items():
        if isinstance(edge, Instant) and edge.time_ms > now_ms:
            raise ConfigError(
                f"end is {(edge.time_ms - now_ms) / 1000:,.0f} s in the future for partition {partition}: the end is fixed at "
                "the first start, so start the topology after that time"
            )
