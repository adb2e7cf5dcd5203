"""The input of a simulation: a few records in memory, in the form in which the topology's spout
would emit them."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from framework.errors import BadRecordError, ConfigError
from framework.local_paths import local_path
from framework.topology import (
    Fields,
    OpaquePartitionedTransactionalSpout,
    PartitionedTransactionalSpout,
    PartitionPlanner,
    PartitionReader,
    ReadCounts,
    Topology,
    TopologyContext,
    TransactionAttempt,
)
from framework.topology.bolts import DEFAULT_STREAM
from framework.topology.plain_offset_ranges import OffsetRanges
from framework.topology.planning_time_stream import CLOCK_STREAM, HIDDEN_STREAMS, with_clock
from framework.topology.range_operations import SourceRanges
from framework.topology.spouts import (
    LEFT_OUT,
    ON_REFUSED,
    REFUSED,
    Meta,
    OnStream,
    PartitionedSpout,
    Rows,
    leaving_out_too,
)
from framework.transactions.source_preview import first_rows
from framework.transactions.spout_planners import shown_row

#: One row and its stream.
SampleRecord = tuple[str, pa.RecordBatch]
#: Partition -> its records.
Sample = Mapping[str, Sequence[SampleRecord]]


def shown(record: SampleRecord) -> str:
    """A record as text for display."""
    stream, row = record
    text = json.dumps(shown_row(row, 0), default=str, ensure_ascii=False)
    return text if stream == DEFAULT_STREAM else f"{text} on stream {stream!r}"


def sample_of(topology: Topology, records: Iterable[Any] | Mapping[Any, Iterable[Any]]) -> Sample:
    """Convert records to the fields of the spout's stream. Each is a mapping by field names, or a
    sequence of values in their order. They are dealt to as many partitions as the spout has tasks,
    or given by partition. For a spout with several streams they are given by stream, and the
    streams take turns. Raises ``ConfigError`` naming the record that does not fit."""
    streams = topology.spout.streams
    named = [each for each in streams if each not in HIDDEN_STREAMS]
    if isinstance(records, Mapping) and records and set(map(str, records)) <= set(streams):
        made = {
            str(stream): [
                _record(topology, str(stream), record, f"record {place} of stream {stream!r}")
                for place, record in enumerate(its)
            ]
            for stream, its in records.items()
        }
        turns = itertools.zip_longest(*made.values())
        return _checked(_dealt(topology, [each for turn in turns for each in turn if each is not None]), _NOTHING)
    stream = DEFAULT_STREAM if DEFAULT_STREAM in streams else named[0] if len(named) == 1 else None
    if stream is None:
        known = ", ".join(named) or "none"
        raise ConfigError(
            f"spout {topology.spout.id!r} has no default stream: give records by stream, as in {{stream: [...]}} "
            f"(its streams: {known})"
        )
    if not isinstance(records, Mapping):
        every = [_record(topology, stream, record, f"record {place}") for place, record in enumerate(records)]
        return _checked(_dealt(topology, every), _NOTHING)
    found = {
        str(partition): [
            _record(topology, stream, record, f"record {place} of partition {partition}")
            for place, record in enumerate(its)
        ]
        for partition, its in records.items()
    }
    return _checked(found, _NOTHING)


_NOTHING = "no record was given"


def _dealt(topology: Topology, every: Sequence[SampleRecord]) -> dict[str, list[SampleRecord]]:
    width = min(topology.spout.parallelism, max(len(every), 1))
    return {str(partition): list(every[partition::width]) for partition in range(width)}


def _record(topology: Topology, stream: str, record: Any, where: str) -> SampleRecord:
    return stream, row_of(topology.spout.streams[stream], record, where)


def _checked(found: Sample, why: str) -> Sample:
    kept = {partition: records for partition, records in found.items() if records}
    if not kept:
        raise ConfigError(f"there is no sample of input: {why}")
    return kept


def row_of(fields: Fields, record: Any, where: str) -> pa.RecordBatch:
    """Convert one record to these fields. ``where``: the beginning of the ``ConfigError`` for a
    record that does not fit."""
    if isinstance(record, Mapping):
        missing = [name for name in fields if name not in record]
        if missing:
            raise ConfigError(f"{where} has no field {missing[0]!r}; the spout emits {', '.join(fields)}")
        values = [record[name] for name in fields]
    elif isinstance(record, Sequence) and not isinstance(record, str | bytes):
        values = list(record)
    else:
        values = [record]
    if len(values) != len(fields):
        raise ConfigError(f"{where} has {len(values)} values, and the spout emits {', '.join(fields)}")
    columns = []
    for name, value in zip(fields, values, strict=True):
        kind = fields.type_of(name)
        try:
            columns.append(_column(value, kind))
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{where}: {value!r} does not fit into field {name!r}, which is {kind}: {error}"
            ) from error
    return pa.RecordBatch.from_arrays(columns, names=list(fields))


def _column(value: Any, kind: pa.DataType | None) -> pa.Array:
    if kind is None:
        return pa.array([value])
    try:
        return pa.array([value], type=kind)
    except (pa.ArrowException, TypeError):
        return pa.array([value]).cast(kind)  # the text of a value, as in JSON and CSV


def read_sample(topology: Topology, path: Path) -> Sample:
    """Read a file of records: JSON, one object or array per line, or CSV with a first line of field
    names. For a spout without a default stream: JSON lines such as ``{"orders": {...}}``, which
    name the stream. Raises ``ConfigError`` naming the line that does not fit."""
    local_path(path, "sample")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"the file {path} does not exist") from None
    if path.suffix == ".csv":
        return sample_of(topology, list(csv.DictReader(io.StringIO(text))))
    records = []
    for number, line in enumerate(text.split("\n"), 1):  # text in JSON may contain other line ends
        if line.strip():
            try:
                records.append((number, json.loads(line)))
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}: {error}; write one JSON object per line") from error
    if DEFAULT_STREAM not in topology.spout.streams:
        return _checked(_dealt(topology, [_on_a_stream(topology, path, *each) for each in records]), _NOTHING)
    return sample_of(topology, [record for _, record in records])


def _on_a_stream(topology: Topology, path: Path, number: int, record: Any) -> SampleRecord:
    if not isinstance(record, Mapping) or len(record) != 1 or not set(record) <= set(topology.spout.streams):
        streams = ", ".join(topology.spout.streams)
        raise ConfigError(
            f"{path}, line {number}: write a JSON object that names the stream, as in {{STREAM: {{...}}}}; the streams "
            f"of spout {topology.spout.id!r}: {streams}"
        )
    ((stream, its),) = record.items()
    return _record(topology, stream, its, f"{path}, line {number}")


def sample_from_source(topology: Topology, conf: Mapping[str, Any], count: int) -> Sample:
    """The first ``count`` records that the topology's own source gives to a new topology. Raises
    ``ConfigError`` when it gives none, and ``RetryableError`` when it does not answer."""
    found: dict[str, list[SampleRecord]] = {}
    for partition, stream, rows in first_rows(topology, conf, count, ReadCounts()):
        if stream != CLOCK_STREAM:
            found.setdefault(partition, []).extend((stream, rows.slice(place, 1)) for place in range(rows.num_rows))
    return _checked(
        _first(found, count), f"the source of spout {topology.spout.id!r} gave no record; give --input FILE"
    )


def _first(found: Mapping[str, list[SampleRecord]], count: int) -> Sample:
    """At most ``count`` records, evenly from all partitions."""
    taken: dict[str, list[SampleRecord]] = {partition: [] for partition in found}
    for turn in itertools.zip_longest(*([(partition, each) for each in its] for partition, its in found.items())):
        for each in turn:
            if each is not None and sum(map(len, taken.values())) < count:
                taken[each[0]].append(each[1])
    return taken


# --- the spout ------------------------------------------------------------------------------------


class Source:
    """The partitions, and how many records of each a batch takes. ``first_takes``: of the first
    batches, if these take other numbers. The driver's side of the spout."""

    def __init__(self, partitions: Sample, take: int, first_takes: Sequence[int] = ()) -> None:
        self.partitions, self.take, self.first_takes = partitions, take, first_takes

    def __reduce__(self) -> Any:
        return Source, ({}, self.take)  # tasks get their records with the plan

    def end_of_batch(self, first: int) -> int:
        """The offset at which the batch ends that begins at ``first``."""
        ends = itertools.accumulate(self.first_takes)
        return next((end for end in ends if end > first), first + self.take)


class _SampleSpout(PartitionedSpout):
    def __init__(self, source: Source, leaves_out: frozenset[str] = frozenset()) -> None:
        self._source = source
        #: The streams of which a record is left out if a bolt refuses its value.
        self._leaves_out = leaves_out

    def planner(self, conf: Mapping[str, Any], context: TopologyContext) -> PartitionPlanner:
        return _SamplePlanner(self._source, self._leaves_out)

    def reader(self, conf: Mapping[str, Any], context: TopologyContext) -> PartitionReader:
        return _SampleReader(self._leaves_out)

    def leaves_out_bad_records(self, stream: str) -> bool:
        return stream in self._leaves_out


class SampleSpout(_SampleSpout, PartitionedTransactionalSpout):
    """Emits a sample in batches that never change."""


class OpaqueSampleSpout(_SampleSpout, OpaquePartitionedTransactionalSpout):
    """Emits a sample in batches that may be planned again."""


def spout_over(topology: Topology, source: Source) -> PartitionedSpout:
    """A spout of the same kind as the topology's."""
    given = topology.spout.instance
    streams = topology.spout.streams
    leaves_out = (
        each for each in streams if isinstance(given, PartitionedSpout) and given.leaves_out_bad_records(each)
    )
    kind = OpaqueSampleSpout if isinstance(given, OpaquePartitionedTransactionalSpout) else SampleSpout
    spout = kind(source, frozenset(leaves_out))
    return with_clock(topology.spout.id, spout) if CLOCK_STREAM in topology.spout.streams else spout


class _SamplePlanner(PartitionPlanner):
    def __init__(self, source: Source, leaves_out: frozenset[str]) -> None:
        self._source = source
        self._leaves_out = leaves_out

    @property
    def ranges(self) -> SourceRanges:
        return OffsetRanges(takes_out=bool(self._leaves_out))

    def partitions(self) -> list[str]:
        return sorted(self._source.partitions)

    def plan(self, previous: Mapping[str, Meta | None]) -> Mapping[str, Meta] | None:
        plan = {}
        for partition in self.partitions():
            meta = previous.get(partition)
            first = meta["next"] if meta is not None else 0
            end = min(self._source.end_of_batch(first), len(self._source.partitions[partition]))
            plan[partition] = leaving_out_too({"first": first, "next": end}, meta)
        return plan if self.record_count(plan) else None

    def record_count(self, plan: Mapping[str, Meta]) -> int:
        return sum(int(meta["next"]) - int(meta["first"]) for meta in plan.values())

    def lag(self, previous: Mapping[str, Meta | None]) -> int:
        return sum(
            len(records) - (meta["next"] if (meta := previous.get(partition)) is not None else 0)
            for partition, records in self._source.partitions.items()
        )

    def for_reading(self, partition: str, meta: Meta) -> Meta:
        return {**meta, "records": self._source.partitions[partition][meta["first"] : meta["next"]]}

    def covers(self, plan: Mapping[str, Meta], goal: Mapping[str, Meta]) -> bool:
        return bool(plan) and self.lag(plan) == 0


class _SampleReader(PartitionReader):
    def __init__(self, leaves_out: frozenset[str]) -> None:
        self._leaves_out = leaves_out

    def read(self, attempt: TransactionAttempt, partition: str, meta: Meta) -> Iterator[Rows]:
        left_out = {offset - int(meta["first"]) for offset in meta.get(LEFT_OUT, ())}
        for offset, reason in meta.get(REFUSED, {}).items():
            stream = meta["records"][int(offset) - int(meta["first"])][0]
            if ON_REFUSED not in meta and stream not in self._leaves_out:
                raise BadRecordError(reason)
        kept = (each for place, each in enumerate(meta["records"]) if place not in left_out)
        for stream, group in itertools.groupby(kept, lambda each: each[0]):
            tables = [pa.Table.from_batches([batch]) for _, batch in group]
            # for a field without a type
            table = pa.concat_tables(tables, promote_options="permissive")
            for batch in table.combine_chunks().to_batches():
                yield batch if stream == DEFAULT_STREAM else OnStream(stream, batch)
