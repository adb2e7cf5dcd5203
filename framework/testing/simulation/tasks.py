"""Runs the tasks of a phase in this process one by one, in any order, and records the rows that
they emit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from framework.execution.failures import TaskFailure
from framework.execution.level_walk import walk
from framework.execution.messages import AttemptHeader, CommitterState, Piece, Record, TaskReport
from framework.execution.plan import Edge, ExecutionPlan, Phase
from framework.execution.ports import PhaseResult, ProcessingJob, layout_of, seeds, summarise
from framework.execution.single_task_phase import expected_reports
from framework.execution.tasks import Addressed, PlannedTopology, run_level

#: (edge, (level, task)) -> the rows that the task emitted there, in order, each as text.
RowsSeen = dict[tuple[int, tuple[int, int]], list[str]]


class RowsTaken:
    """A watcher of tasks. ``place``: the present task."""

    def __init__(self) -> None:
        self.place = (0, 0)
        self.rows: RowsSeen = {}

    def emitted(self, edge: Edge, rows: pa.RecordBatch) -> None:
        self.rows.setdefault((edge.index, self.place), []).extend(map(repr, rows.to_pylist()))

    def failed(self, failure: TaskFailure, error: BaseException) -> None:
        """The result contains the failure, too."""


@dataclass(slots=True)
class Processed:
    """The result of a processing phase."""

    result: PhaseResult
    records: list[Record]
    rows: RowsSeen
    reports: list[TaskReport]


def process(topology: PlannedTopology, job: ProcessingJob, *, backwards: bool = False) -> Processed:
    """Run a processing phase. ``topology``: watched by a ``RowsTaken``."""
    laid_out = topology.for_batch(layout_of(topology.plan, job))
    plan, taken = laid_out.plan, _taken(topology)
    taken.rows = {}
    reports: list[TaskReport] = []
    widths = [level.partitions for level in plan.processing]

    def run(number: int, inboxes: Sequence[list[Record]]) -> Iterable[Addressed]:
        def run_task(records: list[Record], partition: int) -> Iterable[Addressed]:
            taken.place = (0, partition)
            return run_level(
                laid_out,
                Phase.PROCESSING,
                records,
                reports.append,
                level=number,
                partition=partition,
                width=len(inboxes),
                encode=number + 1 == len(widths),
            )

        return _run_tasks(inboxes, run_task, backwards=backwards)

    inboxes: dict[int, list[Record]] = {task: [seed] for task, seed in enumerate(seeds(plan, job))}
    records = walk(widths, run, inboxes)
    result = summarise(plan, Phase.PROCESSING, reports, expected_reports(laid_out, Phase.PROCESSING))
    return Processed(result, records, taken.rows, reports)


@dataclass(frozen=True, slots=True)
class CommitTask:
    """A task of a commit phase. ``number``: within its level. ``records``: its input."""

    level: int
    number: int
    records: Sequence[Record]

    @property
    def place(self) -> tuple[int, int]:
        return self.level, self.number


class CommitTasks:
    """The tasks of one commit phase. ``collapsed``: the tasks of its first level run as one."""

    def __init__(
        self, topology: PlannedTopology, header: AttemptHeader, records: Sequence[Record], *, collapsed: bool
    ) -> None:
        self._topology = topology
        self.header = header
        self._parts = [list(records)] if collapsed else _by_committer(topology.plan, records)

    def __len__(self) -> int:
        return len(self._parts) + sum(level.partitions for level in self._topology.plan.commit[1:])

    def run(self, run_task: Callable[[CommitTask], Iterable[Addressed]], *, backwards: bool = False) -> None:
        """Run all tasks by ``run_task``, level by level. The records of a level are forwarded in
        the same order, whatever the order of the runs."""
        walk(
            [self._width(level) for level in range(len(self._topology.plan.commit))],
            lambda level, inboxes: _run_tasks(
                inboxes,
                lambda records, number: run_task(CommitTask(level, number, records)),
                backwards=backwards,
            ),
            dict(enumerate(self._parts)),
        )

    def _width(self, level: int) -> int:
        return self._topology.plan.commit[level].partitions if level else len(self._parts)

    def name(self, task: CommitTask) -> str:
        """The committers of a task, or its components, and its number if they have several
        tasks."""
        if task.level:
            segment, number = self._topology.plan.commit[task.level].slot(task.number)
            shown = " and ".join(map(repr, segment.components))
            return f"task {number} of {shown}" if segment.parallelism > 1 else shown
        states = _committing_first(self._topology.plan, task.records)
        names = dict.fromkeys(each.component_id for each in states)
        numbers = {each.task for each in states}
        shown = " and ".join(repr(each) for each in names)
        return f"task {numbers.pop()} of {shown}" if len(self._parts) > 1 and numbers else shown or "the commit"

    def run_task(self, task: CommitTask, reports: list[TaskReport]) -> list[Addressed]:
        """Run one task."""
        _taken(self._topology).place = task.place
        return list(
            run_level(
                self._topology,
                Phase.COMMIT,
                task.records,
                reports.append,
                level=task.level,
                partition=task.number,
                width=self._width(task.level),
                encode=False,
                header=self.header,
            )
        )

    def run_late(self, task: CommitTask) -> bool:
        """Run a task of an abandoned attempt. Its rows belong to no attempt. Returns whether it is
        refused."""
        taken, reports = _taken(self._topology), list[TaskReport]()
        before, taken.rows = taken.rows, {}
        try:
            self.run_task(task, reports)
        finally:
            taken.rows = before
        return any(report.failure is not None for report in reports)

    def summary(self, reports: Sequence[TaskReport], held: Mapping[int, int]) -> PhaseResult:
        expected = expected_reports(self._topology, Phase.COMMIT, spread=len(self._parts))
        return summarise(self._topology.plan, Phase.COMMIT, reports, expected, held)


def _taken(topology: PlannedTopology) -> RowsTaken:
    watcher: Any = topology.watcher
    taken: RowsTaken = watcher
    return taken


def _run_tasks(
    inboxes: Sequence[list[Record]],
    run: Callable[[list[Record], int], Iterable[Addressed]],
    *,
    backwards: bool,
) -> list[Addressed]:
    """Run the tasks of a level. Their records are forwarded in the same order, whatever the order
    of the runs.
    """
    sent: dict[int, list[Addressed]] = {}
    order = range(len(inboxes))
    for partition in reversed(order) if backwards else order:
        sent[partition] = list(run(inboxes[partition], partition))
    return [each for partition in order for each in sent[partition]]


def _committing_first(plan: ExecutionPlan, records: Sequence[Record]) -> list[CommitterState]:
    """The states of the committers of the first level."""
    return [each for each in records if isinstance(each, CommitterState) and plan.commits_at(each.component_id) == 0]


def _by_committer(plan: ExecutionPlan, records: Sequence[Record]) -> list[list[Record]]:
    """Make one task for each committer's task of the first level, with the rows that it emitted
    (C31). The first one also forwards records for later levels."""
    states = _committing_first(plan, records)
    place = {(each.component_id, each.task): number for number, each in enumerate(states)}
    parts: list[list[Record]] = [[] for _ in states] or [[]]
    for record in records:
        if isinstance(record, CommitterState):
            parts[place.get((record.component_id, record.task), 0)].append(record)
        elif isinstance(record, Piece):
            own = place.get((plan.edges[record.edge].source, record.target_task), 0)
            parts[own if plan.edges[record.edge].fused else 0].append(record)
        else:
            parts[0].append(record)
    return parts
