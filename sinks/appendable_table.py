"""The contract of a table to which rows are appended."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

import pyarrow as pa

from framework.topology import FencedState, Fields, TransactionAttempt
from framework.topology.refused_row_bisection import OnRefused


class Table(FencedState):
    """A state of rows, as ``AppendCommitter`` uses it: a table of files or of a database."""

    @abstractmethod
    def bind(self, fields: Fields) -> None:
        """Fix names and types of the columns. Called on the driver. Raises ``TopologyError`` for
        columns that the table cannot hold."""

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The Arrow schema of the rows."""

    @property
    def needs_one_task(self) -> bool:
        """Whether only one task may write, because a replay skips the tasks that have written."""
        return False

    @property
    def refuses_whole(self) -> bool:
        """Whether a ``write`` that raises ``BadRecordError`` has written nothing."""
        return False

    @property
    def commits_in_one_step(self) -> bool:
        """Whether one ``write`` can be the whole commit of an attempt."""
        return False

    def check_rows(self, rows: pa.RecordBatch) -> None:
        """Raise ``BadRecordError`` for rows that are certainly refused. A committer also calls it
        in the processing phase, because writes of the commit cannot always be undone."""

    def partitions_of(self, rows: pa.RecordBatch) -> set[tuple[str | None, ...]]:
        """The partitions that these rows belong to; empty if the table has none. Each partition
        takes a file per task and batch."""
        return set()

    @abstractmethod
    def write(
        self, attempt: TransactionAttempt, batches: Iterable[pa.RecordBatch], on_refused: OnRefused | None = None
    ) -> None:
        """Write the rows of one task. Called in the task, in the commit phase, once per attempt.
        The batches may be read several times. ``on_refused``: called for each row that only the
        store refuses, and that is therefore left out; None: such a row raises
        ``BadRecordError``."""
