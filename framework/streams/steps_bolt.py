"""The bolt that runs the stateless steps between two components, in one pass over Arrow batches.

Steps that several streams share run once. So a step that is not deterministic gives each of them
the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

import polars as pl
import pyarrow as pa

from framework.errors import TopologyError
from framework.streams.function_calls import check_alive
from framework.streams.function_checks import unsent
from framework.streams.function_steps import PartitionMap
from framework.streams.hidden_columns import MARK
from framework.streams.lookups import Lookup
from framework.streams.polars_frames import batches_of, frame_of, refusing
from framework.streams.stateless_steps import Columns, Step
from framework.streams.tombstones import chosen, for_table, marked
from framework.topology import (
    DEFAULT_STREAM,
    ArrowBolt,
    Fields,
    OutputCollector,
    OutputFieldsDeclarer,
    TopologyContext,
)
from framework.topology.bolts import LookupCounts


@dataclass(frozen=True, slots=True)
class Branch:
    """A step and what follows it. ``streams``: where its rows are emitted. ``step`` is None at the
    root. ``to_tables``, ``to_others``: whether it leads to tables that tombstones delete rows of,
    and to other streams. ``known``, ``checked``: as of ``Step.carry``."""

    step: Step | None
    streams: Sequence[str]
    below: Sequence[Branch]
    _: KW_ONLY
    to_tables: bool = False
    to_others: bool = True
    known: Columns = frozenset()
    checked: Columns = frozenset()

    def steps(self) -> Iterable[Step]:
        """All steps, each once."""
        if self.step is not None:
            yield self.step
        for each in self.below:
            yield from each.steps()


class StepsBolt(ArrowBolt):
    """Runs a tree of steps over each batch. ``outputs``: stream -> its columns. ``tables``: the
    streams to tables that tombstones delete rows of."""

    may_come_and_go = True

    def __init__(self, root: Branch, outputs: Mapping[str, pa.Schema], tables: Iterable[str] = ()) -> None:
        self._root = root
        self._outputs = dict(outputs)
        self._tables = frozenset(tables)
        self.deterministic = all(step.deterministic for step in root.steps())
        self.commits_on_driver = self.deterministic
        #: Those of the user, whose files tell in the history which code made a transaction.
        self.functions = list(dict.fromkeys(each for step in root.steps() for each in step.functions))
        self._collector: OutputCollector | None = None
        #: The rows before each step that takes all rows together.
        self._gathered: dict[int, list[pl.DataFrame]] = {}

    @property
    def takes_batches_whole(self) -> bool:  # type: ignore[override]
        return not any(isinstance(step, PartitionMap) for step in self._root.steps())

    @property
    def rows_are_independent(self) -> bool:  # type: ignore[override]
        return self.takes_batches_whole

    @property
    def looks_up(self) -> bool:
        """Whether answers of a ``lookup`` that may change are in the rows."""
        return any(isinstance(step, Lookup) and not step.deterministic for step in self._root.steps())

    @property
    def calls(self) -> list[str]:
        """The steps, as the user wrote them."""
        return list(dict.fromkeys(step.call.text for step in self._root.steps()))

    def unsent(self) -> TopologyError | None:
        """The mistake of the step whose function cannot be sent to a task; None if all can be
        sent."""
        found = (
            mistake for step in self._root.steps() for each in step.functions if (mistake := unsent(step.call, each))
        )
        return next(found, None)

    def _lookup_counts(self) -> Mapping[str, LookupCounts]:
        found: dict[str, LookupCounts] = {}
        for step in self._root.steps():
            if isinstance(step, Lookup):
                found[step.name] = found.get(step.name, LookupCounts()).plus(step.counts())
        return found

    def prepare(
        self, conf: Mapping[str, Any], context: TopologyContext, collector: OutputCollector, batch_id: Any
    ) -> None:
        self._collector = collector

    def execute_arrow(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch] | None:
        if batch.num_rows:
            with self._alive():
                root = self._root
                with refusing():
                    frame = frame_of(batch)
                    if self._tables:
                        frame = marked(frame, tables=True, others=root.to_others)
                self._run(root, frame)
        return None

    def finish_batch(self) -> Iterable[pa.RecordBatch] | None:
        with self._alive():
            self._finish(self._root)
        return None

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Functions of the user end where the attempt is cancelled."""
        outer = check_alive.set(getattr(self._collector, "check_alive", check_alive.get()))
        try:
            yield
        finally:
            check_alive.reset(outer)

    def _finish(self, branch: Branch) -> None:
        """Run the steps that take all rows together, the first one first."""
        step = branch.step
        if isinstance(step, PartitionMap) and (frames := self._gathered.pop(id(branch), None)):
            for made in step.partition(frames):
                self._pass_on(branch, made.with_columns(pl.lit(None, pl.Boolean).alias(MARK)) if self._tables else made)
        for each in branch.below:
            self._finish(each)

    def _run(self, branch: Branch, frame: pl.DataFrame) -> None:
        step = branch.step
        if step is None:
            self._pass_on(branch, frame)
            return
        if self._tables:
            with refusing(step.call):
                frame = chosen(frame, tables=branch.to_tables, others=branch.to_others)
        if isinstance(step, PartitionMap):
            if frame.height:
                self._gathered.setdefault(id(branch), []).append(frame)
            return
        for made in step.carried(frame, branch.known, branch.checked) if self._tables else step.applied(frame):
            self._pass_on(branch, made)

    def _pass_on(self, branch: Branch, frame: pl.DataFrame) -> None:
        """Emit the rows after a step, and run the steps below it."""
        if not frame.height or self._collector is None:
            return
        for stream in branch.streams:
            with refusing(branch.step.call if branch.step is not None else None):
                batches = batches_of(self._rows_of(stream, frame), self._outputs[stream])
            for batch in batches:
                self._collector.emit_arrow(batch, stream)
        for each in branch.below:
            self._run(each, frame)

    def _rows_of(self, stream: str, frame: pl.DataFrame) -> pl.DataFrame:
        if stream in self._tables:
            return for_table(frame)
        return chosen(frame, tables=False, others=True) if self._tables else frame

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        for stream, schema in self._outputs.items():
            declarer.declare(Fields.of_schema(schema), stream)


__all__ = ["DEFAULT_STREAM", "Branch", "StepsBolt"]
