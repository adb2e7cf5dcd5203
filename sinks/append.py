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
from sinks.table import Table


class AppendCommitter(ArrowBolt, Committer):
    """Appends its input to a table, exactly once: a ``SqliteTable`` or ``PostgresTable``, or a
    ``ParquetTable`` or ``DeltaLakeTable``.

    Takes any grouping and any parallelism. In a table of a database, the rows of a task become
    visible when that task commits; in a table of files, all rows of a transaction become visible
    together. An empty batch appends nothing.

    ``columns``: the fields to write, in this order; by default all fields. The rows of one task
    keep their order.
    """

    deterministic = True
    commits_on_driver = True

    def __init__(self, table: Table, columns: Sequence[str] | None = None) -> None:
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
        if parallelism > 1 and self.table.needs_one_task:
            raise TopologyError(
                f"committer {component_id!r}: {self.table.location} has no stamp column, so that a replay must find out which "
                "rows are written: use parallelism 1, or a stamp"
            )

    def commits_in_one_step(self) -> bool:
        return self.table.commits_in_one_step

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
        if self._attempt is None:
            return
        fence = self._attempt.fence
        if self._batches or (fence is not None and fence.opens_from is not None):
            self.table.write(self._attempt, self._batches)
