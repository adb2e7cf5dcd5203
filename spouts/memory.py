"""Spouts over rows in memory, for tests, examples and scripts. The source may grow while a topology runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from framework.errors import DataLossError, TopologyError
from framework.topology import (
    Fields,
    OpaquePartitionedTransactionalSpout,
    PartitionedTransactionalSpout,
    PartitionPlanner,
    PartitionReader,
    TopologyContext,
    TransactionAttempt,
)
from framework.topology.spouts import Meta

Row = Sequence[Any]


class _Source:
    """The partitions. Lives where the spout was made; copies in tasks get their rows with the plan."""

    def __init__(self, data: Mapping[int, Sequence[Row]]) -> None:
        self.lock = threading.Lock()
        self.partitions: dict[str, list[Row]] = {str(each): list(rows) for each, rows in data.items()}


class _MemorySpout:
    """What both kinds share: the data, and how to add to it."""

    def __init__(self, data: Mapping[int, Sequence[Row]], fields: Fields, take: int) -> None:
        if not isinstance(take, int) or take < 1:
            raise TopologyError(f"take per partition must be 1 or more, not {take!r}")
        self._fields = fields
        self._take = take
        self._source: _Source | None = _Source(data)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_source": None}

    def append(self, partition: int, rows: Sequence[Any]) -> None:
        """Add one row (its values), or several (a list of rows), at the end of a partition."""
        added = [list(row) for row in rows] if rows and isinstance(rows[0], (list, tuple)) else [list(rows)]
        source = self._here()
        with source.lock:
            if str(partition) not in source.partitions:
                raise TopologyError(f"no partition {partition}: add_partition({partition}, rows) makes one")
            source.partitions[str(partition)].extend(added)

    def add_partition(self, partition: int, rows: Sequence[Row]) -> None:
        """Add a partition with its first rows."""
        source = self._here()
        with source.lock:
            if str(partition) in source.partitions:
                raise TopologyError(f"partition {partition} exists already")
            source.partitions[str(partition)] = [list(row) for row in rows]

    def output_fields(self) -> Fields:
        return self._fields

    def planner(self, conf: Mapping[str, Any], context: TopologyContext) -> PartitionPlanner:
        return _MemoryPlanner(self._here(), self._take)

    def reader(self, conf: Mapping[str, Any], context: TopologyContext) -> PartitionReader:
        return _MemoryReader(self._fields)

    def _here(self) -> _Source:
        if self._source is None:
            raise TopologyError("a memory spout's rows live in the process that made it; use it there")
        return self._source


class MemoryTransactionalSpout(_MemorySpout, PartitionedTransactionalSpout):
    """An idempotent spout: ``data`` maps partitions to rows, each batch takes up to ``take`` rows of each partition.

    >>> spout = MemoryTransactionalSpout({0: [["dog"], ["cat"]], 1: [["apple"]]}, Fields(word=str), 2)
    >>> spout.append(1, ["mango"])

    Source: ``org.apache.storm.testing.MemoryTransactionalSpout``.
    """


class OpaqueMemoryTransactionalSpout(_MemorySpout, OpaquePartitionedTransactionalSpout):
    """As ``MemoryTransactionalSpout``, with batches that may differ between attempts.

    Source: ``org.apache.storm.testing.OpaqueMemoryTransactionalSpout``.
    """


class _MemoryPlanner(PartitionPlanner):
    def __init__(self, source: _Source, take: int) -> None:
        self._source = source
        self._take = take

    def partitions(self) -> list[str]:
        with self._source.lock:
            return sorted(self._source.partitions)

    def plan(self, previous: Mapping[str, Meta | None]) -> Mapping[str, Meta] | None:
        plan: dict[str, Meta] = {}
        with self._source.lock:
            for partition in {*self._source.partitions, *previous}:
                first = _next(previous.get(partition))
                held = len(self._source.partitions.get(partition, ()))
                if held < first:
                    raise DataLossError(f"memory partition {partition} holds {held} rows, and {first} were read before")
                plan[partition] = {"first": first, "next": min(first + self._take, held)}
        return plan if self.record_count(plan) else None

    def record_count(self, plan: Mapping[str, Meta]) -> int:
        return sum(int(meta["next"]) - int(meta["first"]) for meta in plan.values())

    def lag(self, previous: Mapping[str, Meta | None]) -> int:
        with self._source.lock:
            return sum(len(rows) - _next(previous.get(each)) for each, rows in self._source.partitions.items())

    def for_reading(self, partition: str, meta: Meta) -> Meta:
        with self._source.lock:
            rows = self._source.partitions.get(partition, [])
            return {**meta, "rows": rows[int(meta["first"]) : int(meta["next"])]}

    def end(self) -> Mapping[str, Meta]:
        with self._source.lock:
            return {each: {"first": 0, "next": len(rows)} for each, rows in self._source.partitions.items()}

    def covers(self, plan: Mapping[str, Meta], goal: Mapping[str, Meta]) -> bool:
        return all(_next(plan.get(each)) >= int(meta["next"]) for each, meta in goal.items())


class _MemoryReader(PartitionReader):
    def __init__(self, fields: Fields) -> None:
        self._fields = fields

    def read(self, attempt: TransactionAttempt, partition: str, meta: Meta) -> Iterator[pa.RecordBatch]:
        rows = meta["rows"]
        if len(rows) != int(meta["next"]) - int(meta["first"]):
            raise DataLossError(f"memory partition {partition} no longer holds rows {meta['first']} to {meta['next']}")
        if rows:
            columns = zip(*rows, strict=True)
            arrays = [
                pa.array(list(column), type=self._fields.type_of(name))
                for name, column in zip(self._fields, columns, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(arrays, names=list(self._fields))


def _next(meta: Meta | None) -> int:
    return int(meta["next"]) if meta is not None else 0
