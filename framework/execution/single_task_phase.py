"""Runs a whole phase in one process: for small batches inside a single Spark task, and for the
in-process executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

import pyarrow as pa

from framework.arrow_spill import decode_batch
from framework.errors import InvariantViolation
from framework.execution.level_walk import walk
from framework.execution.messages import (
    AttemptHeader,
    Control,
    FrameOutput,
    FrameRows,
    Record,
    Seed,
    TaskReport,
)
from framework.execution.plan import Phase
from framework.execution.tasks import Addressed, PlannedTopology, run_level

Report = Callable[[TaskReport], None]
Cancelled = Callable[[], bool]
#: Runs a DataFrame bolt for an attempt. Arguments: the component id, the header, and the rows per
#: input name. Returns the result rows.
Frames = Callable[[str, AttemptHeader, Mapping[str, list[pa.RecordBatch]]], Sequence[pa.RecordBatch]]


def run_processing(
    topology: PlannedTopology,
    seeds: Sequence[Seed],
    report: Report,
    cancelled: Cancelled | None = None,
    frames: Frames | None = None,
) -> list[Record]:
    """Run all levels of the processing phase. Returns the records for the commit phase, in a form
    that can leave the process. ``cancelled`` is called before each record batch."""
    levels = _Levels(topology, Phase.PROCESSING, report, cancelled=cancelled, frames=frames)
    widths = [level.partitions for level in topology.plan.processing]
    if len(seeds) != widths[0]:
        raise InvariantViolation(f"{len(seeds)} seeds were made for another layout than that of {widths} tasks")
    return walk(widths, levels.run, {task: [seed] for task, seed in enumerate(seeds)})


def run_commit(
    topology: PlannedTopology,
    header: AttemptHeader,
    result: Sequence[Record],
    report: Report,
    *,
    cancelled: Cancelled | None = None,
    frames: Frames | None = None,
) -> None:
    """Run all levels of the commit phase over the result of ``run_processing``."""
    levels = _Levels(topology, Phase.COMMIT, report, header=header, cancelled=cancelled, frames=frames)
    widths = [level.partitions if number else 1 for number, level in enumerate(topology.plan.commit)]
    walk(widths, levels.run, {0: list(result)})


@dataclass(frozen=True, slots=True)
class _Levels:
    """The levels of one phase of one attempt. ``header``: for a commit phase, whose first records
    contain none."""

    topology: PlannedTopology
    phase: Phase
    report: Report
    _: KW_ONLY
    header: AttemptHeader | None = None
    cancelled: Cancelled | None = None
    frames: Frames | None = None

    def run(self, number: int, inboxes: Sequence[list[Record]]) -> list[Addressed]:
        """Run all tasks of a level, and the DataFrame bolts whose input is then complete."""
        plan = self.topology.plan
        leaves = self.phase is Phase.PROCESSING and number + 1 == len(plan.processing)
        addressed = [
            each
            for partition, records in enumerate(inboxes)
            for each in run_level(
                self.topology,
                self.phase,
                records,
                self.report,
                level=number,
                partition=partition,
                width=len(inboxes),
                encode=leaves,
                header=self.header,
                cancelled=self.cancelled,
            )
        ]
        for component_id in plan.frames_gathered_at(self.phase, number):
            addressed = self._through_frame(component_id, addressed)
        return addressed

    def _through_frame(self, component_id: str, addressed: list[Addressed]) -> list[Addressed]:
        """Replace a DataFrame bolt's input rows by the rows that Spark SQL made from them."""
        if self.frames is None:
            raise InvariantViolation(f"{component_id!r} needs Spark SQL, which a single task does not have")
        plan = self.topology.plan
        inputs: dict[str, list[pa.RecordBatch]] = {name: [] for name in plan.input_names(component_id)}
        header: AttemptHeader | None = None
        failed = False
        kept: list[Addressed] = []
        for partition, record in addressed:
            if isinstance(record, FrameRows) and record.component_id == component_id:
                inputs[plan.edges[record.edge].input_name].append(decode_batch(record.payload))
                continue
            kept.append((partition, record))
            if isinstance(record, Control):
                header, failed = record.header, failed or record.failure is not None
        if failed or header is None:
            return kept  # the controls carry the failure to the tasks that would emit
        segment = plan.frame_outputs[(self.phase, component_id)]
        level = plan.levels(self.phase)[segment.level]
        for number, batch in enumerate(self.frames(component_id, header, inputs)):
            partition = level.partition_of(segment, number % segment.parallelism)
            kept.append((partition, FrameOutput(component_id, (0, number), batch)))
        return kept


def expected_reports(topology: PlannedTopology, phase: Phase, *, spread: int | None = None) -> int:
    """How many tasks of a phase must report. ``spread``: the number of tasks of the first commit
    level; None means 1, for a phase that runs collapsed."""
    levels = topology.plan.levels(phase)
    tasks = sum(level.partitions for level in levels)
    if phase is Phase.COMMIT and levels:
        tasks += (spread if spread is not None else 1) - levels[0].partitions
    return tasks
