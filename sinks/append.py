"""The committer that appends: every row of a batch becomes a row of a table, exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from framework.arrow_spill import RowBuffer
from framework.errors import BatchTooLargeError, TopologyError
from framework.topology import (
    Bolt,
    Input,
)
from framework.topology.bolts import OnBadRecord
from framework.topology.inspectable import inspectable, with_scratch_states
from framework.topology.refused_row_bisection import OnRefused
from sinks.appendable_table import Table
from sinks.rows.inspectable_table import InspectableTable
from sinks.rows.sqlite_standin_table import ScratchTable
from sinks.rows.transactional_table import RowTable
from sinks.table_committer import TableCommitter

#: The most partitions of a table to which the records of one batch and task may belong, because
#: producers may choose them.
PARTITIONS_MAX = 5_000


class AppendCommitter(TableCommitter[Table, RowBuffer]):
    """Appends its input to a table, exactly once: a ``SqliteTable``, ``PostgresTable`` or
    ``MySqlTable``, or a ``ParquetTable`` or ``DeltaLakeTable``.

    Takes any grouping and any parallelism. In a table of a database, the rows of a task become
    visible when that task commits; in a table of files, all rows of a transaction become visible
    together. An empty batch appends nothing.

    ``columns``: the fields to write, in this order; by default all fields. The rows of one task
    keep their order. ``on_bad_record``: what becomes of a record that the table refuses. "skip": it
    is left out and counted. "dead_letter": it goes to the ``dead_letters`` of the spout. "fail":
    the ``on_bad_record`` of the spout decides.
    """

    def __init__(
        self, table: Table, columns: Sequence[str] | None = None, *, on_bad_record: OnBadRecord = "fail"
    ) -> None:
        super().__init__(table, columns, on_bad_record)
        self._partitions: set[tuple[str | None, ...]] = set()

    def bind(self, component_id: str, inputs: Sequence[Input], parallelism: int) -> None:
        self._fields = self._common_fields(component_id, inputs)
        self.table.bind(self._fields)
        if parallelism > 1 and self.table.needs_one_task:
            raise TopologyError(
                f"committer {component_id!r}: {self.table.location} has no stamp column, so that a replay must find out which "
                "rows are written: use parallelism 1, or a stamp"
            )

    def _chosen(self, component_id: str, source: Input) -> tuple[str, ...]:
        source.require(component_id, self._columns or ())
        return self._columns if self._columns is not None else source.fields.names

    def substitute(self, folder: Path) -> Bolt:
        if isinstance(self.table, RowTable):
            self.table = ScratchTable.of(self.table, folder)
            return self
        return with_scratch_states(self, folder)

    def replaying(self, folder: Path, txid: int, topology_id: str) -> Bolt:
        for number, state in enumerate(self.states()):
            if isinstance(state, InspectableTable):
                state.check_replayed(topology_id)
                self.table = ScratchTable.of(state, folder / str(number), as_held=True)
            else:
                inspectable(state, purpose="be replayed").become_replay(folder / str(number), txid, topology_id)
        return self

    def recounting(self, folder: Path) -> Bolt:
        if isinstance(self.table, RowTable):
            self.table = ScratchTable.of(self.table, folder, as_held=True)
            return self
        return self.substitute(folder)

    def _no_rows(self) -> RowBuffer:
        return RowBuffer(f"{self.table.location}: more rows come")

    def _begin_attempt(self) -> None:
        super()._begin_attempt()
        self._partitions = set()
        # Rows that fall due by time, and the function to call for each of them that is left out.
        self._due: RowBuffer | None = None
        self._leave_out_due: OnRefused | None = None

    def execute_arrow(self, batch: pa.RecordBatch) -> None:
        rows = batch.select(list(self._fields.names)).cast(self.table.schema)
        self.table.check_rows(rows)
        if len(self._partitions) <= PARTITIONS_MAX:
            self._partitions |= self.table.partitions_of(rows)
        if self._on_refused is None and self._on_refused_due is not None and isinstance(self.table, RowTable):
            self._due, self._leave_out_due = self._due or self._no_rows(), self._on_refused_due
            self._due.append(rows)
        else:
            self._batches.append(rows)

    def keep_for_commit(self) -> bytes:
        """Raises ``BatchTooLargeError``. Rows that another committer emits in the commit phase are
        not kept, and may belong to any number of partitions: half a batch can close as many
        windows."""
        if len(self._partitions) > PARTITIONS_MAX:
            raise BatchTooLargeError(
                f"{self.table.location}: the rows of a batch belong to more than {PARTITIONS_MAX:,} partitions, and each takes a "
                "file: partition by a column with fewer values"
            )
        return super().keep_for_commit()

    def refuses_whole(self) -> bool:
        return type(self) is AppendCommitter and self.table.refuses_whole

    def may_try_writes(self) -> bool:
        return isinstance(self.table, RowTable)

    def try_writes(self, *, alone: bool) -> None:
        if self._attempt is not None and self._batches and isinstance(self.table, RowTable):
            self.table.try_write(self._attempt, self._batches, alone=alone)

    def finish_batch(self) -> None:
        if self._attempt is None:
            return
        if self._due is not None and isinstance(self.table, RowTable):
            self.table.write(self._attempt, self._batches, self._leave_out_due, due=self._due)
        elif self._batches or self._attempt.is_one_step:
            self.table.write(self._attempt, self._batches, self._on_refused)
