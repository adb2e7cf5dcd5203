"""Groupings decide which task of the receiving bolt gets which row.

A grouping splits a record batch into pieces, one per target task, with vectorised code. Rows keep
their order within a piece. Source: Storm's stream groupings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from framework.errors import InvariantViolation
from framework.topology.fields import Fields
from framework.topology.hashing import hash_rows, hash_values


class Grouping(ABC):
    """Divides the rows of a stream among tasks. Called in tasks of the sending component."""

    #: True says that rows may stay in their task when both sides have the same number of tasks.
    keeps_rows_local: bool = False

    @abstractmethod
    def split(self, batch: pa.RecordBatch, task_count: int, turn: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield (target task, rows). ``turn`` starts at the sending task's own index and rises with
        every batch that the task splits. It balances the shares without randomness, so that a
        replay is identical."""

    def key_fields(self) -> Fields | None:
        """The fields that decide the target, or None when no fields do."""
        return None

    def outline(self) -> str:
        """A description of the grouping, the same in every process. It must not change while the
        topology's state exists."""
        fields = self.key_fields()
        return f"{type(self).__name__}({', '.join(fields.names) if fields is not None else ''})"


@dataclass(frozen=True)
class ShuffleGrouping(Grouping):
    """Every task gets an equal share of each batch, give or take a row. Also Storm's ``none``
    grouping."""

    def split(self, batch: pa.RecordBatch, task_count: int, turn: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        base, extra = divmod(batch.num_rows, task_count)
        offset = 0
        for position in range(task_count):
            length = base + (1 if position < extra else 0)
            if length:
                yield (position + turn) % task_count, batch.slice(offset, length)
                offset += length


@dataclass(frozen=True)
class LocalOrShuffleGrouping(ShuffleGrouping):
    """Rows stay in their task when both sides have the same number of tasks; otherwise as
    ``ShuffleGrouping``."""

    keeps_rows_local = True

    def outline(self) -> str:
        return ShuffleGrouping().outline()  # no state depends on the difference


@dataclass(frozen=True)
class FieldsGrouping(Grouping):
    """Rows with equal values in ``fields`` go to the same task."""

    fields: Fields

    def split(self, batch: pa.RecordBatch, task_count: int, turn: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        if task_count == 1:
            yield 0, batch
            return
        hashes = hash_rows([batch.column(name) for name in self.fields])
        yield from split_by_target(batch, (hashes % np.uint64(task_count)).astype(np.int64), task_count)

    @staticmethod
    def task_of(values: Sequence[Any], task_count: int) -> int:
        """The task to which rows with these values of the grouping fields go."""
        return 0 if task_count == 1 else hash_values(values) % task_count

    def key_fields(self) -> Fields | None:
        return self.fields


@dataclass(frozen=True)
class PartialKeyGrouping(Grouping):
    """Rows with equal values go to one of two tasks, alternately. For keys so frequent that one
    task could not keep up."""

    fields: Fields

    def split(self, batch: pa.RecordBatch, task_count: int, turn: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        hashes = hash_rows([batch.column(name) for name in self.fields])
        tasks = np.uint64(task_count)
        first = hashes % tasks
        second = (hashes >> np.uint64(32)) % tasks
        alternate = (np.arange(turn, turn + batch.num_rows) & 1).astype(bool)
        yield from split_by_target(batch, np.where(alternate, second, first).astype(np.int64), task_count)

    def key_fields(self) -> Fields | None:
        return self.fields


@dataclass(frozen=True)
class GlobalGrouping(Grouping):
    """All rows go to task 0."""

    def split(self, batch: pa.RecordBatch, task_count: int, turn: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        yield 0, batch


@dataclass(frozen=True)
class DirectGrouping(Grouping):
    """The sender names the task of each row: the stream is declared with ``direct=True`` and
    written with ``emit_direct``."""

    def split(self, batch: pa.RecordBatch, task_count: int, turn: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        raise InvariantViolation("rows of a direct stream carry their task; there is nothing to split")


@dataclass(frozen=True)
class AllGrouping(Grouping):
    """Every task gets every row."""

    def split(self, batch: pa.RecordBatch, task_count: int, turn: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        for task in range(task_count):
            yield task, batch


def split_by_target(
    batch: pa.RecordBatch, targets: np.ndarray[Any, np.dtype[np.int64]], task_count: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Cut a batch into pieces. ``targets`` names the task of each row. Rows of one task keep their
    order."""
    counts = np.bincount(targets, minlength=task_count)
    if int(counts.max(initial=0)) == batch.num_rows:
        if batch.num_rows:
            yield int(counts.argmax()), batch
        return
    ordered = batch.take(pa.array(np.argsort(targets, kind="stable")))
    offset = 0
    for task, count in enumerate(counts.tolist()):
        if count:
            yield task, ordered.slice(offset, count)
            offset += count
