"""The base of committers that use the watermark of a ``WatermarkCommitter``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any, NamedTuple

import pyarrow as pa

from framework.errors import TopologyError
from framework.observe.logs import get_logger
from framework.operators.timestamps import times_of
from framework.operators.watermarks import LATE_STREAM
from framework.topology import (
    DEFAULT_STREAM,
    HIDDEN,
    Input,
    OutputFieldsDeclarer,
)
from framework.topology.groupings import AllGrouping
from framework.topology.refused_row_bisection import OnRefused
from sinks.event_time.records_below_watermark import Place
from sinks.event_time.watermark import WATERMARK_FIELDS
from sinks.keyed_committer import KeyedCommitter
from sinks.state_committer import check_no_null_key
from sinks.states import MapState

_log = get_logger()
_WATERMARK_COLUMNS = list(WATERMARK_FIELDS)


class Watermarks(NamedTuple):
    """The watermark before the transaction and after it, in microseconds since 1970. Lateness is
    judged by the first, due times by the second."""

    before: int
    after: int


#: Watermarks after all records.
_PAST_ALL = Watermarks(1 << 61, 1 << 61)


class WatermarkedCommitter(KeyedCommitter):
    """Keeps rows per key in an opaque state, and gets the watermark in each transaction. It may
    subscribe to several ``WatermarkCommitter``, such as those of the two streams of a join: the
    lowest watermark counts."""

    due_streams = frozenset({DEFAULT_STREAM})
    #: The fields that name the partition of a record, by which some committers order records of the
    #: same time. Hidden ones are for nothing else.
    partition: tuple[str, ...] = ()
    late_streams = frozenset({LATE_STREAM})
    tries_at_watermarks = True

    def __init__(self, state: MapState, key: Sequence[str]) -> None:
        super().__init__(state, key)
        #: The number of subscribed watermarks, and the watermarks of this transaction.
        self._clocks = 1
        self._told: list[Watermarks] = []
        self._all_late = False
        # called for a row that falls due and is refused; None: such a row must not be left out
        self._leave_out_due: OnRefused | None = None

    # --- on the driver ----------------------------------------------------------------------------

    def bind(self, component_id: str, inputs: Sequence[Input], parallelism: int) -> None:
        records = [
            replace(each, fields=each.fields.select(self._seen(each.fields)))
            for each in inputs
            if list(each.fields) != _WATERMARK_COLUMNS
        ]
        watermarks = [each for each in inputs if list(each.fields) == _WATERMARK_COLUMNS]
        if not watermarks or not records:
            raise TopologyError(
                f"committer {component_id!r} needs records and a watermark: subscribe it to the records, and with "
                "all_grouping to a WatermarkCommitter"
            )
        for each in watermarks:
            if parallelism > 1 and not isinstance(each.grouping, AllGrouping):
                raise TopologyError(
                    f"committer {component_id!r} has {parallelism} tasks, and each needs the watermark: subscribe it to "
                    f"{each.component_id!r} with all_grouping"
                )
        self._clocks = len(watermarks)
        self._bind_keyed(component_id, records, parallelism)
        self._bind_records(*records)

    @abstractmethod
    def _bind_records(self, *records: Input) -> None:
        """Check the fields of the records, and bind the state. Several inputs may be one stream."""

    @abstractmethod
    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None: ...

    # --- for explain ------------------------------------------------------------------------------

    def late_for(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        return {name: row[name] for name in self.key}

    def is_late_with(self, row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        return all(row.get(name) == other.get(name) for name in self._seen({**row, **other}))

    def make_all_late(self) -> None:
        self._all_late = True

    # --- in tasks ---------------------------------------------------------------------------------

    def _begin_attempt(self) -> None:
        self._told = []
        self._leave_out_due = None
        self.late_records = 0

    def execute_arrow(self, batch: pa.RecordBatch) -> None:
        if batch.schema.names == _WATERMARK_COLUMNS:
            self._told += map(Watermarks, batch.column(0).to_pylist(), batch.column(1).to_pylist())
            self._leave_out_due = self._on_refused_due
        else:
            self._take(batch)

    @abstractmethod
    def _take(self, batch: pa.RecordBatch) -> None:
        """Keep records until ``finish_batch``, unless the batch has a bad record."""

    def _check_records(self, batch: pa.RecordBatch, on: str, unit: str) -> None:
        """Raise ``BadRecordError`` for a record without a key or an event time."""
        check_no_null_key(self._component_id, self.key, batch)
        times_of(batch.column(on), on, unit)

    def finish_batch(self) -> Iterator[pa.RecordBatch]:
        """Commits while its result is read: due rows are written page by page (ADR 113)."""
        if self._attempt is None:
            return
        if len(self._told) != self._clocks:
            raise TopologyError(
                f"committer {self._component_id!r} got {len(self._told)} of {self._clocks} watermarks of its transaction"
            )
        self.state.begin_commit(self._attempt)
        watermarks = Watermarks(*map(min, zip(*self._told, strict=True)))
        yield from self._commit(_PAST_ALL if self._all_late else watermarks)
        self.state.commit(self._attempt)

    @abstractmethod
    def _commit(self, watermarks: Watermarks) -> Iterator[pa.RecordBatch]:
        """Write into the state, between ``begin_commit`` and ``commit``, and return the rows of the
        default stream. Called once; between two pages of due rows it may ``write``."""

    def _emit_late(self, rows: pa.RecordBatch, stream: str = LATE_STREAM, records: int | None = None) -> None:
        """Emit late rows, count them, and log them if no bolt subscribes to their stream.
        ``records``: how many records these rows represent; None: one each."""
        if self.state.is_tried:
            return
        rows = rows.select(self._seen(rows.schema.names))
        records = rows.num_rows if records is None else records
        self.late_records += records
        if not self._is_subscribed(stream) and self._attempt is not None:
            _log.warning(
                "event_time.late", bolt=self._component_id, stream=stream, records=records, txid=self._attempt.txid
            )
        self._collector.emit_arrow(rows, stream)

    def _seen(self, names: Iterable[str]) -> list[str]:
        """The fields of records, without hidden ones that name their partition."""
        return [each for each in names if each not in self.partition or not each.startswith(HIDDEN)]

    def _places(self, batch: pa.RecordBatch) -> Iterator[Place]:
        """The partition of each record."""
        if not self.partition:
            return repeat((), batch.num_rows)
        return zip(*(batch.column(name).to_pylist() for name in self.partition), strict=True)

    def _is_subscribed(self, stream: str) -> bool:
        """Whether a bolt subscribes to the stream, as far as the collector knows."""
        subscribed = getattr(self._collector, "subscribed", None)
        return subscribed is None or bool(subscribed(stream))
