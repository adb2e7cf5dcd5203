"""Spouts over rows in memory, for tests, examples and scripts.

The source may change while a topology runs, as a real one does: it may grow, gain partitions, lose
a partition for a while, give shorter batches, or forget old rows. Offsets count the rows of a
partition from 0. Ranges are half-open.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa

from framework.errors import DataLossError, RetryableError, TopologyError
from framework.topology import (
    Fields,
    OpaquePartitionedTransactionalSpout,
    PartitionedTransactionalSpout,
    PartitionPlanner,
    PartitionProgress,
    PartitionReader,
    SourceRanges,
    TopologyContext,
    TransactionAttempt,
)
from framework.topology.arrow_columns import column_of
from framework.topology.plain_offset_ranges import OffsetRanges
from framework.topology.spouts import LEFT_OUT, Backlog, Meta, leaving_out_too

Values = Sequence[Any]
OnDataLoss = Literal["fail", "skip"]
OnBadRow = Literal["fail", "skip"]


class _Source:
    """The partitions. They exist only in the process that created the spout. Tasks get their rows
    with the plan."""

    def __init__(self, data: Mapping[int, Sequence[Values]], take: int) -> None:
        self.lock = threading.Lock()
        self.partitions: dict[str, list[Values]] = {str(each): list(rows) for each, rows in data.items()}
        self.take = take
        self.takes: dict[str, int] = {}
        self.unavailable: set[str] = set()
        self.earliest: dict[str, int] = {}


class _MemorySpout:
    """The common part of both kinds: the data, and the methods that change it."""

    def __init__(
        self, data: Mapping[int, Sequence[Values]], fields: Fields, take: int, *, on_bad_record: OnBadRow = "fail"
    ) -> None:
        if on_bad_record not in ("fail", "skip"):
            raise TopologyError(f"on_bad_record must be 'fail' or 'skip', not {on_bad_record!r}")
        if not isinstance(take, int) or take < 1:
            raise TopologyError(f"take per partition must be 1 or more, not {take!r}")
        self._fields = fields
        self._skips_bad_rows = on_bad_record == "skip"
        self._source: _Source | None = _Source(data, take)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_source": None}

    def append(self, partition: int, rows: Sequence[Any]) -> None:
        """Add one row (its values), or several rows (a list of rows), to the end of a partition."""
        added = [list(row) for row in rows] if rows and isinstance(rows[0], (list, tuple)) else [list(rows)]
        source = self._here()
        with source.lock:
            source.partitions[self._known(source, partition)].extend(added)

    def add_partition(self, partition: int, rows: Sequence[Values]) -> None:
        """Add a partition with its first rows."""
        source = self._here()
        with source.lock:
            if str(partition) in source.partitions:
                raise TopologyError(f"partition {partition} exists already")
            source.partitions[str(partition)] = [list(row) for row in rows]

    def set_take(self, take: int, partition: int | None = None) -> None:
        """From now on, take at most ``take`` rows of every partition, or of one (then 0 is
        allowed). An opaque batch that is replayed before its commit was opened changes its size
        accordingly."""
        if not isinstance(take, int) or take < (1 if partition is None else 0):
            raise TopologyError(f"take per partition must be {1 if partition is None else 0} or more, not {take!r}")
        source = self._here()
        with source.lock:
            if partition is None:
                source.take = take
                source.takes.clear()
            else:
                source.takes[self._known(source, partition)] = take

    def make_unavailable(self, partition: int) -> None:
        """Make a partition unavailable, like one without a leader. An opaque spout continues
        without it, a transactional one waits for it. A replay that needs a range of it waits,
        too."""
        source = self._here()
        with source.lock:
            source.unavailable.add(self._known(source, partition))

    def make_available(self, partition: int) -> None:
        """Make a partition available again."""
        source = self._here()
        with source.lock:
            source.unavailable.discard(self._known(source, partition))

    def expire(self, partition: int, before: int) -> None:
        """Forget the rows of a partition below offset ``before``, as retention does."""
        source = self._here()
        with source.lock:
            name = self._known(source, partition)
            if not 0 <= before <= len(source.partitions[name]):
                raise TopologyError(
                    f"partition {partition} has offsets up to {len(source.partitions[name])}, not {before}"
                )
            source.earliest[name] = max(before, source.earliest.get(name, 0))

    def output_fields(self) -> Fields:
        return self._fields

    def leaves_out_bad_records(self, stream: str) -> bool:
        return self._skips_bad_rows

    def planner(self, conf: Mapping[str, Any], context: TopologyContext) -> PartitionPlanner:
        return _MemoryPlanner(self._here(), opaque=False, skips_lost_data=False, skips_bad_rows=self._skips_bad_rows)

    def reader(self, conf: Mapping[str, Any], context: TopologyContext) -> PartitionReader:
        return _MemoryReader(self._fields)

    @staticmethod
    def _known(source: _Source, partition: int) -> str:
        if str(partition) not in source.partitions:
            raise TopologyError(f"no partition {partition}: add_partition({partition}, rows) makes one")
        return str(partition)

    def _here(self) -> _Source:
        if self._source is None:
            raise TopologyError("a memory spout's rows live in the process that made it; use it there")
        return self._source


class MemoryTransactionalSpout(_MemorySpout, PartitionedTransactionalSpout):
    """An idempotent spout. ``data`` maps partitions to rows. Each batch takes up to ``take`` rows
    of each partition. A row whose value is refused by a ``BadRecordError`` ends the run, or with
    ``on_bad_record="skip"`` is left out.

    >>> spout = MemoryTransactionalSpout({0: [["dog"], ["cat"]], 1: [["apple"]]}, Fields(word=str), 2)
    >>> spout.append(1, ["mango"])

    Source: ``org.apache.storm.testing.MemoryTransactionalSpout``.
    """  # noqa: W505 - doctest lines are not wrapped


class OpaqueMemoryTransactionalSpout(_MemorySpout, OpaquePartitionedTransactionalSpout):
    """As ``MemoryTransactionalSpout``, but batches may differ between attempts. With
    ``on_data_loss="skip"`` it skips rows that were forgotten before they were read, and counts them
    in the plan as ``skipped``.

    Source: ``org.apache.storm.testing.OpaqueMemoryTransactionalSpout``.
    """

    def __init__(
        self,
        data: Mapping[int, Sequence[Values]],
        fields: Fields,
        take: int,
        *,
        on_data_loss: OnDataLoss = "fail",
        on_bad_record: OnBadRow = "fail",
    ) -> None:
        super().__init__(data, fields, take, on_bad_record=on_bad_record)
        if on_data_loss not in ("fail", "skip"):
            raise TopologyError(f"on_data_loss must be 'fail' or 'skip', not {on_data_loss!r}")
        self._on_data_loss = on_data_loss

    def planner(self, conf: Mapping[str, Any], context: TopologyContext) -> PartitionPlanner:
        return _MemoryPlanner(
            self._here(), opaque=True, skips_lost_data=self._on_data_loss == "skip", skips_bad_rows=self._skips_bad_rows
        )


class _MemoryPlanner(PartitionPlanner):
    def __init__(self, source: _Source, *, opaque: bool, skips_lost_data: bool, skips_bad_rows: bool = False) -> None:
        self._source = source
        self._skips_bad_rows = skips_bad_rows
        self._opaque = opaque
        self._skips_lost_data = skips_lost_data

    @property
    def skips_lost_data(self) -> bool:
        return self._skips_lost_data

    def partitions(self) -> list[str]:
        with self._source.lock:
            return sorted(self._source.partitions)

    def plan(self, previous: Mapping[str, Meta | None]) -> Mapping[str, Meta] | None:
        return self.plan_smaller(previous, 1)

    def plan_smaller(self, previous: Mapping[str, Meta | None], divisor: int) -> Mapping[str, Meta] | None:
        plan: dict[str, Meta] = {}
        source = self._source
        with source.lock:
            left = self.records_max
            for partition in self._in_turn(previous):
                before = previous.get(partition)
                meta = self._range(partition, _next(before), divisor)
                if left is not None:
                    meta = {**meta, "next": min(meta["next"], meta["first"] + left)}
                    left -= int(meta["next"]) - int(meta["first"])
                plan[partition] = leaving_out_too(meta, before)
        skipped = any("skipped" in meta for meta in plan.values())
        return plan if self.record_count(plan) or skipped else None

    def _in_turn(self, previous: Mapping[str, Meta | None]) -> list[str]:
        """The partitions; with a limit, the least read comes first. Call it with the lock held."""
        names = sorted({*self._source.partitions, *previous})
        return names if self.records_max is None else sorted(names, key=lambda each: _next(previous.get(each)))

    def backlog(self, previous: Mapping[str, Meta | None]) -> Backlog:
        return Backlog(self.lag(previous))

    def empty_plan(self, previous: Mapping[str, Meta | None]) -> Mapping[str, Meta]:
        with self._source.lock:
            known = sorted({*self._source.partitions, *previous})
        nothing = {each: {"first": _next(previous.get(each)), "next": _next(previous.get(each))} for each in known}
        return {each: leaving_out_too(meta, previous.get(each)) for each, meta in nothing.items()}

    def _range(self, partition: str, first: int, divisor: int) -> Meta:
        """The contribution of one partition after offset ``first``. Call it with the lock held."""
        source = self._source
        held, earliest = len(source.partitions.get(partition, ())), source.earliest.get(partition, 0)
        if partition in source.unavailable:
            if not self._opaque:
                raise RetryableError(f"memory partition {partition} is unavailable")
            return {"first": first, "next": first}
        if held < first:
            raise DataLossError(f"memory partition {partition} holds {held} rows, and {first} were read before")
        if first < earliest and not self._skips_lost_data:
            raise DataLossError(f"memory partition {partition} has forgotten offsets {first} to {earliest} unread")
        take = source.takes.get(partition, source.take)
        begin = max(first, earliest)
        meta = {"first": begin, "next": min(begin + (max(take // divisor, 1) if take else 0), held)}
        return meta if begin == first else {**meta, "skipped": begin - first}

    def record_count(self, plan: Mapping[str, Meta]) -> int:
        return sum(int(meta["next"]) - int(meta["first"]) for meta in plan.values())

    def progress(
        self, committed: Mapping[str, Meta], in_flight: Sequence[Mapping[str, Meta]]
    ) -> Mapping[str, PartitionProgress]:
        with self._source.lock:
            ends = {each: len(rows) for each, rows in self._source.partitions.items()}
        return {
            each: PartitionProgress(
                end,
                _next(committed.get(each)),
                sum(int(plan[each]["next"]) - int(plan[each]["first"]) for plan in in_flight if each in plan),
            )
            for each, end in sorted(ends.items())
        }

    @property
    def ranges(self) -> SourceRanges:
        return OffsetRanges(takes_out=self._skips_bad_rows)

    def lag(self, previous: Mapping[str, Meta | None]) -> int:
        with self._source.lock:
            return sum(len(rows) - _next(previous.get(each)) for each, rows in self._source.partitions.items())

    def for_reading(self, partition: str, meta: Meta) -> Meta:
        first, end = int(meta["first"]), int(meta["next"])
        with self._source.lock:
            if first < end and partition in self._source.unavailable:
                raise RetryableError(f"memory partition {partition} is unavailable")
            if first < end and first < self._source.earliest.get(partition, 0):
                raise DataLossError(
                    f"memory partition {partition} has forgotten offsets {first} to {end}, which were planned"
                )
            rows = self._source.partitions.get(partition, [])
            if len(rows) < end:
                raise DataLossError(f"memory partition {partition} holds {len(rows)} rows, and {end} were planned")
            return {**meta, "rows": rows[first:end]}

    def end(self) -> Mapping[str, Meta]:
        with self._source.lock:
            return {each: {"first": 0, "next": len(rows)} for each, rows in self._source.partitions.items()}

    def covers(self, plan: Mapping[str, Meta], goal: Mapping[str, Meta]) -> bool:
        return all(_next(plan.get(each)) >= int(meta["next"]) for each, meta in goal.items())


class _MemoryReader(PartitionReader):
    def __init__(self, fields: Fields) -> None:
        self._fields = fields

    def read(self, attempt: TransactionAttempt, partition: str, meta: Meta) -> Iterator[pa.RecordBatch]:
        left_out = {offset - int(meta["first"]) for offset in meta.get(LEFT_OUT, ())}
        rows = [row for number, row in enumerate(complete(partition, meta)) if number not in left_out]
        if rows:
            columns = zip(*rows, strict=True)
            arrays = [
                column_of(column, self._fields.type_of(name))
                for name, column in zip(self._fields, columns, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(arrays, names=list(self._fields))


def complete(partition: str, meta: Meta) -> Sequence[Values]:
    """The rows that came with a range. Raises ``RetryableError`` if rows are missing: a short read
    must not become a short batch."""
    rows: Sequence[Values] = meta["rows"]
    planned = int(meta["next"]) - int(meta["first"])
    if len(rows) != planned:
        raise RetryableError(
            f"memory partition {partition}: {len(rows)} rows came of {planned} planned from {meta['first']}"
        )
    return rows


def _next(meta: Meta | None) -> int:
    return int(meta["next"]) if meta is not None else 0
