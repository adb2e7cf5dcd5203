"""The committer that appends: every row of a batch becomes a row of a table, exactly once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from framework.errors import TopologyError
from framework.topology import (
    ArrowBolt,
    Committer,
    Fields,
    Input,
    OutputCollector,
    TopologyContext,
    TransactionAttempt,
)
from sinks.lake.table import FileTable


class AppendCommitter(ArrowBolt, Committer):
    """Appends its input to a ``ParquetTable`` or a ``DeltaLakeTable``, in one commit per
    transaction. Takes any grouping and any parallelism: each task writes its own files, and all of
    them become visible together. An empty batch appends nothing.

    ``columns``: the fields to write, in this order; by default all fields. The rows of one task
    keep their order.
    """

    deterministic = True

    def __init__(self, table: FileTable, columns: Sequence[str] | None = None) -> None:
        self.table = table
        self._columns = tuple(columns) if columns is not None else None
        self._batches: list[pa.RecordBatch] = []
        self._attempt: TransactionAttempt | None = None

    def bind(self, component_id: str, inputs: Sequence[Input], parallelism: int) -> None:
        shapes = {each.fields.select(self._chosen(component_id, each)) for each in inputs}
        if len(shapes) != 1:
            raise TopologyError(
                f"committer {component_id!r}: its inputs give other fields, or the same with other types; make them equal"
            )
        self._fields: Fields = shapes.pop()
        self.table.bind(self._fields)

    def _chosen(self, component_id: str, source: Input) -> tuple[str, ...]:
        source.require(component_id, self._columns or ())
        return self._columns if self._columns is not None else source.fields.names

    def prepare(
        self,
        conf: Mapping[str, Any],
        context: TopologyContext,
        collector: OutputCollector,
        batch_id: TransactionAttempt,
    ) -> None:
        self._attempt = batch_id
        self._batches = []

    def execute_arrow(self, batch: pa.RecordBatch) -> None:
        rows = batch.select(list(self._fields.names)).cast(self.table.schema)
        self.table.check_rows(rows)
        self._batches.append(rows)

    def finish_batch(self) -> None:
        if self._attempt is not None and self._batches:
            self.table.write(self._attempt, self._batches)
