"""The base of committers that go by the watermark of a ``WatermarkCommitter``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from framework.errors import TopologyError
from framework.observe.logs import get_logger
from framework.operators.watermarks import LATE_STREAM
from framework.topology import (
    ArrowBolt,
    Committer,
    Fields,
    Input,
    OutputCollector,
    OutputFieldsDeclarer,
    TopologyContext,
    TransactionAttempt,
)
from framework.topology.canonical_form import python_values
from framework.topology.groupings import AllGrouping, FieldsGrouping, Grouping
from sinks.backend import Key
from sinks.committer import check_key_types, check_no_null_key, check_one_writer
from sinks.event_time.watermark import WATERMARK_FIELDS, opaque
from sinks.states import MapState

_log = get_logger()
_WATERMARK_COLUMNS = list(WATERMARK_FIELDS)


class Watermarks(NamedTuple):
    """The watermark before the transaction and after it, in microseconds since 1970. Lateness is
    judged by the first, due times by the second."""

    before: int
    after: int


class WatermarkedCommitter(ArrowBolt, Committer):
    """Keeps rows per key in an opaque state, and gets the watermark in each transaction."""

    deterministic = True
    commits_on_driver = True
    #: The number of streams of records.
    _streams = 1

    def __init__(self, state: MapState, key: Sequence[str]) -> None:
        name = type(self).__name__
        if not key:
            raise TopologyError(f"{name} needs at least one key field")
        self.state = opaque(name, state)
        self.key = tuple(key)
        self._component_id = ""
        self._fields: Fields | None = None  # of the records
        self._grouping: Grouping | None = None
        self._tasks = (0, 1)  # this task, and the number of tasks
        self._watermarks: Watermarks | None = None
        self._attempt: TransactionAttempt | None = None
        self._collector: Any = None

    # --- on the driver ----------------------------------------------------------------------------

    def bind(self, component_id: str, inputs: Sequence[Input], parallelism: int) -> None:
        self._component_id = component_id
        records = [each for each in inputs if list(each.fields) != _WATERMARK_COLUMNS]
        if len(inputs) - len(records) != 1 or len(records) != self._streams:
            streams = "one stream" if self._streams == 1 else "two streams"
            raise TopologyError(
                f"committer {component_id!r} needs {streams} of records and one watermark: subscribe it to the records, and "
                "with all_grouping to a WatermarkCommitter"
            )
        (watermark,) = (each for each in inputs if list(each.fields) == _WATERMARK_COLUMNS)
        if parallelism > 1 and not isinstance(watermark.grouping, AllGrouping):
            raise TopologyError(
                f"committer {component_id!r} has {parallelism} tasks, and each needs the watermark: subscribe it to "
                f"{watermark.component_id!r} with all_grouping"
            )
        for source in records:
            check_one_writer(component_id, source, self.key, parallelism)
            check_key_types(component_id, source, self.key)
        self._fields, self._grouping = records[0].fields, records[0].grouping
        self._bind_records(*records)

    @abstractmethod
    def _bind_records(self, *records: Input) -> None:
        """Check the fields of the records, and bind the state."""

    @abstractmethod
    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None: ...

    # --- in tasks ---------------------------------------------------------------------------------

    def prepare(
        self,
        conf: Mapping[str, Any],
        context: TopologyContext,
        collector: OutputCollector,
        batch_id: TransactionAttempt,
    ) -> None:
        self._collector, self._attempt, self._watermarks = collector, batch_id, None
        self.late_records = 0
        self._tasks = context.task_index, context.task_count

    def execute_arrow(self, batch: pa.RecordBatch) -> None:
        if batch.schema.names == _WATERMARK_COLUMNS:
            self._watermarks = Watermarks(batch.column(0)[0].as_py(), batch.column(1)[0].as_py())
        else:
            self._take(batch)

    @abstractmethod
    def _take(self, batch: pa.RecordBatch) -> None:
        """Keep records until ``finish_batch``."""

    def finish_batch(self) -> Iterable[pa.RecordBatch]:
        if self._attempt is None:
            return []
        if self._watermarks is None:
            raise TopologyError(f"committer {self._component_id!r} got no watermark of its transaction")
        self.state.begin_commit(self._attempt)
        out = list(self._commit(self._watermarks))
        self.state.commit(self._attempt)
        return out

    @abstractmethod
    def _commit(self, watermarks: Watermarks) -> Iterable[pa.RecordBatch]:
        """Write into the state, between ``begin_commit`` and ``commit``, and return the rows of the
        default stream."""

    def _emit_late(self, rows: pa.RecordBatch, stream: str = LATE_STREAM, records: int | None = None) -> None:
        """Emit late rows, count them, and log them if no bolt subscribes to their stream.
        ``records``: how many records these rows represent; None: one each."""
        records = rows.num_rows if records is None else records
        self.late_records += records
        subscribed = getattr(self._collector, "subscribed", None)
        if subscribed is not None and not subscribed(stream) and self._attempt is not None:
            _log.warning(
                "event_time.late", bolt=self._component_id, stream=stream, records=records, txid=self._attempt.txid
            )
        self._collector.emit_arrow(rows, stream)

    def _keys(self, rows: pa.Table) -> list[Key]:
        """The keys of records. Raises ``BadRecordError`` for a null."""
        check_no_null_key(self._component_id, self.key, rows)
        return list(zip(*(python_values(rows.column(name), name) for name in self.key), strict=True))

    def _mine(self, keys: Sequence[Key]) -> Sequence[bool]:
        """Which of these keys of the state this task writes."""
        task, tasks = self._tasks
        if tasks == 1 or not isinstance(self._grouping, FieldsGrouping) or self._fields is None:
            return [task == 0 or tasks == 1] * len(keys)
        names = list(self._grouping.fields)
        columns = [pa.array([key[self.key.index(name)] for key in keys], self._fields.type_of(name)) for name in names]
        numbered = pa.RecordBatch.from_arrays([*columns, pa.array(range(len(keys)))], names=[*names, "#"])
        own: set[int] = set()
        for target, part in self._grouping.split(numbered, tasks, 0):
            if target == task:
                own.update(part.column("#").to_pylist())
        return [number in own for number in range(len(keys))]
