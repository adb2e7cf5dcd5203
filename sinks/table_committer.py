"""The base of committers of tables: the fields of their inputs, and the rows of a batch."""

from __future__ import annotations

import pickle
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

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
from framework.topology.bolts import OnBadRecord
from sinks.appendable_table import Table

T = TypeVar("T", bound=Table)
#: A committer's rows of a batch.
Rows = TypeVar("Rows")


class TableCommitter(ArrowBolt, Committer, Generic[T, Rows]):
    """The base of committers of tables. ``columns``: the fields to write; None: those that
    ``_chosen`` returns. ``on_bad_record``: as in ``Bolt``."""

    deterministic = True
    commits_on_driver = True
    takes_batches_whole = True

    def __init__(self, table: T, columns: Sequence[str] | None, on_bad_record: OnBadRecord = "fail") -> None:
        self.table = table
        self.on_bad_record = on_bad_record
        self._columns = tuple(columns) if columns is not None else None
        self._batches = self._no_rows()
        self._attempt: TransactionAttempt | None = None

    def keep_for_commit(self) -> bytes:
        """Only the rows: a new copy has the attempt of the commit, which may be one step."""
        return pickle.dumps(self._batches, protocol=pickle.HIGHEST_PROTOCOL)

    def take_for_commit(self, kept: bytes) -> None:
        self._batches = pickle.loads(kept)

    def commits_in_one_step(self) -> bool:
        return self.table.commits_in_one_step

    @abstractmethod
    def _no_rows(self) -> Rows:
        """An empty buffer for the rows of a batch."""

    @abstractmethod
    def _chosen(self, component_id: str, source: Input) -> tuple[str, ...]:
        """The fields of an input that are written. Raises ``TopologyError`` for one that it
        lacks."""

    def _common_fields(self, component_id: str, inputs: Sequence[Input]) -> Fields:
        """The fields that every input has. Raises ``TopologyError`` if they differ."""
        shapes = {each.fields.select(self._chosen(component_id, each)) for each in inputs}
        if len(shapes) != 1:
            raise TopologyError(
                f"committer {component_id!r}: its inputs give other fields, or the same with other types; make them equal"
            )
        return shapes.pop()

    def prepare(
        self,
        conf: Mapping[str, Any],
        context: TopologyContext,
        collector: OutputCollector,
        batch_id: TransactionAttempt,
    ) -> None:
        self._attempt = batch_id
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        """Drop what an earlier attempt left in this copy. Called by ``prepare``."""
        self._batches = self._no_rows()
