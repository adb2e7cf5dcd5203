"""Reads the first records that a new topology would get from its source, without a transaction."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pyarrow as pa

from framework.execution.collector import TaskCollector
from framework.topology import PartitionReader, ReadCounts, Topology, TopologyContext, TransactionAttempt
from framework.topology.spouts import (
    Meta,
    PartitionedSpout,
    TransactionalSpout,
    TransactionalSpoutEmitter,
    on_stream,
)
from framework.transactions.spout_planners import planner_of

#: How long an empty source is asked again.
_WAIT_S = 10.0
#: The attempt under which the records are read.
_ATTEMPT = TransactionAttempt(1, 0)


class FirstRows(NamedTuple):
    """Rows of one stream, of a partition of a source, or of a task of a general spout."""

    partition: str
    stream: str
    rows: pa.RecordBatch


def first_rows(topology: Topology, conf: Mapping[str, Any], count: int, counts: ReadCounts) -> Iterator[FirstRows]:
    """Read at least ``count`` records, if the source has as many, and not many more from each
    partition. ``counts``: records read are added. Raises ``RetryableError`` when the source does
    not answer, and ``BadRecordError`` for a bad record of a spout that does not accept bad records.
    """
    planner = planner_of(topology, conf)
    previous: Mapping[str, Meta] = {}
    found = 0
    deadline = time.monotonic() + _WAIT_S
    try:
        while found < count:
            plan = planner.plan(previous) if planner.is_ready() else None
            if plan is not None:
                previous = plan
                ranges = {each: planner.for_reading(each, meta) for each, meta in plan.items()}
                for rows in _read(topology, conf, ranges, count, counts):
                    found += rows.rows.num_rows
                    yield rows
            elif found or counts.records or time.monotonic() > deadline:
                break
            else:
                time.sleep(0.1)
    finally:
        planner.close()


def _read(
    topology: Topology, conf: Mapping[str, Any], ranges: Mapping[str, Meta], count: int, counts: ReadCounts
) -> Iterator[FirstRows]:
    spout = topology.spout
    if isinstance(spout.instance, PartitionedSpout):
        for partition, meta in ranges.items():
            reader = spout.instance.reader(conf, _context(topology, conf, 0, 1))
            emitted = 0
            try:
                for rows in _read_partition(reader, partition, meta, count):
                    emitted += rows.rows.num_rows
                    yield rows
            finally:
                counts.add(reader.counts if reader.counts.records else ReadCounts(emitted))
                reader.close()
    elif isinstance(spout.instance, TransactionalSpout):
        for task in range(spout.parallelism):
            emitter = spout.instance.emitter(conf, _context(topology, conf, task, spout.parallelism))
            try:
                batches = _emitted(emitter, topology, ranges)
            finally:
                emitter.close()
            for stream, batch in batches:
                counts.add(ReadCounts(batch.num_rows))
                yield FirstRows(str(task), stream, batch)


def _read_partition(reader: PartitionReader, partition: str, meta: Meta, count: int) -> Iterator[FirstRows]:
    found = 0
    for rows in reader.read_all(_ATTEMPT, {partition: meta}):
        stream, batch = on_stream(rows)
        yield FirstRows(partition, stream, batch)
        found += batch.num_rows
        if found >= count:
            return


def _emitted(
    emitter: TransactionalSpoutEmitter, topology: Topology, ranges: Mapping[str, Meta]
) -> list[tuple[str, pa.RecordBatch]]:
    """The rows that a task of a general spout emits."""
    spout = topology.spout
    emitted: list[tuple[str, pa.RecordBatch]] = []
    collector = TaskCollector(spout.id, spout.streams, spout.direct_streams)
    collector.subscribers = frozenset(spout.streams)
    collector.sink = lambda stream, batch, task: emitted.append((stream, batch))
    for meta in ranges.values():
        emitter.emit_batch(_ATTEMPT, meta["metadata"], collector)
    collector.flush()
    return emitted


def _context(topology: Topology, conf: Mapping[str, Any], task: int, tasks: int) -> TopologyContext:
    return TopologyContext(topology.id, topology.spout.id, task, tasks, conf, parallelisms=topology.parallelisms())
