"""The base of committers that keep rows per key in an opaque state of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    ValueType,
)
from framework.topology.canonical_form import python_values
from framework.topology.groupings import FieldsGrouping, Grouping
from sinks.backend import Key
from sinks.state_committer import check_key_types, check_no_null_key, check_one_writer, finish_without_writes
from sinks.states import MapState, checked_state


class KeyedCommitter(ArrowBolt, Committer):
    """``key``: the fields that each stream of records has, and that its rows come by."""

    deterministic = True
    commits_on_driver = True
    takes_batches_whole = True
    tries_in_order = True

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
        self._attempt: TransactionAttempt | None = None
        self._collector: Any = None

    def _bind_keyed(self, component_id: str, records: Sequence[Input], parallelism: int) -> None:
        """Check the keys of the streams of records, and how they are grouped."""
        self._component_id = component_id
        for source in records:
            check_one_writer(component_id, source, self.key, parallelism)
            check_key_types(component_id, source, self.key)
        self._fields, self._grouping = records[0].fields, records[0].grouping

    def prepare(
        self,
        conf: Mapping[str, Any],
        context: TopologyContext,
        collector: OutputCollector,
        batch_id: TransactionAttempt,
    ) -> None:
        self._collector, self._attempt = collector, batch_id
        self._tasks = context.task_index, context.task_count
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        """Drop what an earlier attempt left in this copy. Called by ``prepare``."""

    def try_writes(self, *, alone: bool) -> None:
        if self._attempt is not None:
            finish_without_writes(self, self._attempt)

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


def one_stream(component_id: str, inputs: Sequence[Input], needed: Iterable[str] | None = None) -> Input:
    """A single input in place of these, whose records form one stream, as after a merge.
    ``needed``: the fields that the committer takes; None: all. Raises ``TopologyError`` if an input
    lacks such a field, or if the inputs differ in these fields or in their groupings."""
    names = list(dict.fromkeys(needed)) if needed is not None else None
    first = inputs[0]
    for each in inputs:
        each.require(component_id, names or ())
        if each.grouping != first.grouping:
            raise TopologyError(
                f"committer {component_id!r}: group its streams by the same fields, in the same order ({first.component_id!r} "
                f"and {each.component_id!r} differ)"
            )
        its, others = (one.fields if names is None else one.fields.select(names) for one in (first, each))
        if its != others:
            raise TopologyError(
                f"committer {component_id!r} takes {first.component_id!r} and {each.component_id!r} as one stream, and they differ "
                f"({its}; {others}): give them the same fields, in the same order"
            )
    return first


def opaque(committer: str, state: MapState) -> MapState:
    """Check that a replay with this state starts from its previous values, and return it. Raises
    ``TopologyError``.
    """
    checked = checked_state(committer, state)
    if checked.value_type is not ValueType.OPAQUE:
        raise TopologyError(f"{committer} needs an OpaqueMapState: a replay must start from the time before it")
    return checked
