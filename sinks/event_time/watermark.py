"""The watermark of a transactional topology, stored in the same transactions as the other
states."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from framework.durations import Duration, micros_of
from framework.errors import BadRecordError, TopologyError
from framework.operators.event_clock import EventClock
from framework.operators.timestamps import check_times, times_of
from framework.operators.watermarks import MAX_AHEAD, NEVER, check_advance
from framework.topology import (
    DEFAULT_STREAM,
    HIDDEN,
    ArrowBolt,
    Combiner,
    Committer,
    Fields,
    Input,
    OutputCollector,
    OutputFieldsDeclarer,
    TopologyContext,
    TransactionAttempt,
)
from framework.topology.groupings import GlobalGrouping
from framework.topology.inspectable import EventTime
from framework.topology.planning_time_stream import CLOCK_FIELDS, CLOCK_STREAM
from framework.topology.refused_row_bisection import OnRefused, accepted
from sinks.keyed_committer import opaque
from sinks.states import MapState

#: The rows for the other committers' tasks, one per transaction: the watermark before it, the
#: watermark after it, and its planning time, in microseconds since 1970.
WATERMARK_FIELDS = Fields.of({"watermark_before": pa.int64(), "watermark": pa.int64(), "planned_at": pa.int64()})
_NEWEST = pa.schema([("partition", pa.string()), ("newest", pa.int64())])
_ROW = "clock"


class _Clock(NamedTuple):
    """A row of ``CLOCK_FIELDS``."""

    planned_at: int = NEVER
    unread: bool = False
    behind: bool = False
    begun: Sequence[str] = ()


class WatermarkCommitter(ArrowBolt, Committer):
    """Keeps the event time of a topology in an opaque state.

    * ``on``: the field with a record's event time: a timestamp with a zone, or a number of ``unit``
      ("s", "ms", "us") since 1970.
    * ``partition``: the fields that name a record's source partition, such as ``["topic",
      "partition"]`` of a Kafka spout with that ``metadata``. Without them, the source counts as one
      partition, and records that are read in parallel may be late. If the fields have these two
      names, or the only field is called ``partition``, the watermark also waits for a partition
      whose records so far had no event time, until the partition has been read to its end once.
    * ``out_of_orderness``: how far a record may be behind the newest one of its partition.
    * ``idle_after``: a partition without records for this long, by the planning times of the
      transactions, no longer delays the watermark; None: it always does. A partition with unread
      records is not idle. Records without an event time, such as those that no codec could decode,
      do not count.
    * ``advance_when_idle``: while all partitions are idle, the watermark advances with the planning
      times.
    * ``max_ahead``: a record whose event time is further ahead of the planning time is a bad
      record. Such a row that falls due by time, such as a closed window, does not advance the
      watermark, if its source or this bolt may leave out bad records.

    Subscribe it to the records, and to the clock stream of the spout, each by a global grouping.
    The committers that use its watermark subscribe to it by ``all_grouping``::

        watermark = WatermarkCommitter(OpaqueMapState(backend), on="at", partition=["topic", "partition"])
        builder.set_bolt("watermark", watermark).global_grouping("orders").global_grouping("orders", CLOCK_STREAM)
        builder.set_bolt("per-5min", WindowedCommitter(...), 2).fields_grouping("orders", Fields("shop")).all_grouping("watermark")
    """  # noqa: W505 - the example is not wrapped

    deterministic = True
    commits_on_driver = True
    due_streams = frozenset({DEFAULT_STREAM})
    sends_only_watermarks = True

    def __init__(
        self,
        state: MapState,
        on: str,
        *,
        partition: Sequence[str] = (),
        out_of_orderness: Duration = 0,
        idle_after: Duration | None = None,
        advance_when_idle: bool = False,
        max_ahead: Duration = MAX_AHEAD,
        unit: str = "s",
    ) -> None:
        check_advance(advance_when_idle, idle_after)
        self._advance_when_idle = advance_when_idle
        self.state = opaque(type(self).__name__, state)
        self.on, self.unit, self.partition = on, unit, tuple(partition)
        named = tuple(each.removeprefix(HIDDEN) for each in self.partition)
        # the number of last parts of a plan's id that name a partition; None: ids do not name
        # partitions
        self._place = len(named) if named in (("topic", "partition"), ("partition",)) else None
        self._out_of_orderness = micros_of(out_of_orderness, "out_of_orderness")
        self._idle_after = micros_of(idle_after, "idle_after") if idle_after is not None else None
        self._max_ahead = micros_of(max_ahead, "max_ahead")
        self._component_id = ""
        self._newest: dict[str, int] = {}
        # As _newest, for rows that fall due by time, and the function to call for a time of them
        # that is left out.
        self._due: dict[str, int] = {}
        self._leave_out_due: OnRefused | None = None
        self._clock: _Clock | None = None
        self._attempt: TransactionAttempt | None = None

    # --- on the driver ----------------------------------------------------------------------------

    def bind(self, component_id: str, inputs: Sequence[Input], parallelism: int) -> None:
        self._component_id = component_id
        if parallelism != 1 and not all(isinstance(each.grouping, GlobalGrouping) for each in inputs):
            raise TopologyError(f"committer {component_id!r} keeps one clock: give it parallelism 1")
        records = [each for each in inputs if each.stream != CLOCK_STREAM]
        if len(inputs) - len(records) != 1 or not records:
            raise TopologyError(
                f"committer {component_id!r} needs the records and the planning times: subscribe it to the records, and with "
                f"global_grouping(SPOUT, {CLOCK_STREAM!r}) to the spout"
            )
        for source in records:
            source.require(component_id, (self.on, *self.partition))
            check_times(component_id, self.on, source.fields.type_of(self.on), self.unit)
        self.state.bind(Fields(name=str), Fields(watermark=int, clock=str))

    def state_settings(self) -> Mapping[str, Any]:
        return {"on": self.on, "unit": self.unit, "partition": list(self.partition)}

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(WATERMARK_FIELDS)

    def combiner(self) -> Combiner:
        return Passing(CLOCK_FIELDS, lambda: _NewestTimes(self.on, self.partition, self.unit))

    # --- for explain ------------------------------------------------------------------------------

    def event_time(self) -> EventTime | None:
        found = self.state.get(_ROW)
        if found is None:
            return None
        clock = self.state.restored((_ROW,), _restored, found)
        watermark = clock.watermark if clock.watermark != NEVER else None
        newest = max((each.newest for each in clock.partitions.values()), default=None)
        return EventTime(watermark, clock.held_up_by(self._idle_after), newest)

    def watermark_before(self) -> Mapping[str, Any]:
        found = self.state.get(_ROW)
        clock = self.state.restored((_ROW,), _restored, found) if found is not None else EventClock()
        return {"watermark_before": clock.watermark, "watermark": clock.watermark, "planned_at": clock.planned_at}

    # --- in tasks ---------------------------------------------------------------------------------

    def prepare(
        self,
        conf: Mapping[str, Any],
        context: TopologyContext,
        collector: OutputCollector,
        batch_id: TransactionAttempt,
    ) -> None:
        self._attempt, self._newest, self._clock = batch_id, {}, None
        self._due, self._leave_out_due = {}, None

    def execute_arrow(self, batch: pa.RecordBatch) -> None:
        if batch.schema.names == list(CLOCK_FIELDS):
            self._clock = _Clock(**batch.to_pylist()[0])
            return
        newest = self._newest
        if self._on_refused_due is not None:
            newest, self._leave_out_due = self._due, self._on_refused_due
        for partition, at in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
            newest[partition] = max(at, newest.get(partition, at))

    def keep_for_commit(self) -> bytes:
        self._check_ahead()
        return json.dumps([self._newest, self._told()]).encode()

    def take_for_commit(self, kept: bytes) -> None:
        self._newest, clock = json.loads(kept)
        self._clock = _Clock(*clock)

    def finish_batch(self) -> Iterable[pa.RecordBatch]:
        if self._attempt is None:
            return []
        clock = self._told()
        # Below another committer, only the commit phase has the records.
        self._check_ahead()
        for partition, at in self._due_in_time():
            self._newest[partition] = max(at, self._newest.get(partition, at))
        self.state.begin_commit(self._attempt)
        (found,) = self.state.multi_get([_ROW])
        before = self.state.restored((_ROW,), _restored, found) if found is not None else EventClock()
        after = before.after(
            self._newest,
            clock.planned_at,
            out_of_orderness=self._out_of_orderness,
            idle_after=self._idle_after,
            unread=clock.unread,
            behind=clock.behind,
            begun=self._named(clock.begun or ()),
            advance_when_idle=self._advance_when_idle,
        )
        self.state.multi_put([_ROW], [(after.watermark, json.dumps(after.document()))])
        self.state.commit(self._attempt)
        told = {"watermark_before": before.watermark, "watermark": after.watermark, "planned_at": after.planned_at}
        return [pa.RecordBatch.from_pylist([told], WATERMARK_FIELDS.schema())]

    def _check_ahead(self) -> None:
        """Raise ``BadRecordError`` for a record that is too far ahead of the planning time."""
        for partition, at in sorted(self._newest.items()):
            if self._is_ahead(at):
                raise self._ahead(partition, at)

    def _due_in_time(self) -> Iterator[tuple[str, int]]:
        """The newest times of rows that fall due. A row that is too far ahead does not advance the
        watermark: no record of the transaction is to blame for it (ADR 126)."""
        for partition, at in sorted(self._due.items()):
            if not self._is_ahead(at):
                yield partition, at
            elif self._leave_out_due is not None:
                self._leave_out_due(self._ahead(partition, at))

    def _is_ahead(self, at: int) -> bool:
        planned_at = self._told().planned_at
        return planned_at != NEVER and at - planned_at > self._max_ahead

    def _ahead(self, partition: str, at: int) -> BadRecordError:
        return BadRecordError(
            f"committer {self._component_id!r}: field {self.on!r} holds {_shown(at)}, which is further ahead of "
            f"{_shown(self._told().planned_at)} than max_ahead allows{f' (partition {partition})' if partition else ''}"
        )

    def _named(self, partitions: Iterable[str]) -> list[str]:
        """The names of these partitions in records, as far as they are known."""
        if self._place is None:
            return []
        ids = [each.split("/")[-self._place :] for each in partitions]
        return ["/".join(each) for each in ids if len(each) == self._place]

    def _told(self) -> _Clock:
        """The clock of the plan. When ``explain`` reads a part of a transaction, the clock may be
        missing, and stands still."""
        return self._clock if self._clock is not None else _Clock()


class Passing(Combiner):
    """Applies a combiner to records, and passes on the rows of a stream with other columns. The
    combiner keeps no row of a batch for which ``add`` raises ``BadRecordError``."""

    def __init__(self, columns: Fields, make: Callable[[], Combiner]) -> None:
        self._columns, self._make = list(columns), make
        self._records: Combiner | None = None
        self._passed: list[pa.RecordBatch] = []

    def add(self, batch: pa.RecordBatch) -> None:
        if batch.schema.names == self._columns:
            self._passed.append(batch)
            return
        if self._records is None:
            self._records = self._make()
            self._records.leave_out_refused(self._on_refused)
        for _ in accepted(batch, self._records.add, self._on_refused):
            pass

    def finish(self) -> pa.RecordBatch | None:
        if self._passed:
            return pa.Table.from_batches(self._passed).combine_chunks().to_batches()[0]
        return self._records.finish() if self._records is not None else None

    def finish_parts(self) -> Iterable[pa.RecordBatch]:
        return super().finish_parts() if self._passed or self._records is None else self._records.finish_parts()


class _NewestTimes(Combiner):
    """Reduces records to the newest event time of each source partition."""

    def __init__(self, on: str, partition: tuple[str, ...], unit: str) -> None:
        self._on, self._partition, self._unit = on, partition, unit
        self._newest: dict[str, int] = {}

    def add(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        at = pa.array(times_of(batch.column(self._on), self._on, self._unit))
        names = pa.array(np.full(batch.num_rows, ""), pa.string())
        if self._partition:
            parts = [pc.fill_null(batch.column(each).cast(pa.string()), "") for each in self._partition]
            if len(parts) > 1:
                escaped = [pc.replace_substring_regex(each, r"([/\\])", r"\\\1") for each in parts]
                names = pc.binary_join_element_wise(*escaped, "/")
            else:
                names = parts[0]
        grouped = (
            pa.table({"partition": names, "at": at}).group_by("partition", use_threads=False).aggregate([("at", "max")])
        )
        newest = zip(grouped.column("partition").to_pylist(), grouped.column("at_max").to_pylist(), strict=True)
        for partition, latest in newest:
            self._newest[partition] = max(latest, self._newest.get(partition, latest))

    def finish(self) -> pa.RecordBatch | None:
        if not self._newest:
            return None
        return pa.RecordBatch.from_arrays([list(self._newest), list(self._newest.values())], schema=_NEWEST)


def _restored(value: Any) -> EventClock:
    return EventClock.of_document(json.loads(value[1]))


def _shown(micros: int) -> str:
    try:
        return str(pa.scalar(micros, pa.timestamp("us", "UTC")).as_py())
    except (ValueError, OverflowError):
        return f"{micros} microseconds since 1970"
