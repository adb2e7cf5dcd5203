"""Runs a whole phase in one process: for small batches inside a single Spark task, and for the
in-process executor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa

from framework.errors import InvariantViolation
from framework.execution.plan import Phase
from framework.execution.records import (
    AttemptHeader,
    Control,
    FrameOutput,
    FrameRows,
    Record,
    Seed,
    TaskReport,
    decode_batch,
)
from framework.execution.tasks import PlannedTopology, run_level

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
    """Run all levels of the processing phase. Returns the records for the commit phase, ready to
    leave the process. ``cancelled`` is called before each record batch."""
    inboxes: dict[int, list[Record]] = {task: [seed] for task, seed in enumerate(seeds)}
    levels = topology.plan.processing
    for number, level in enumerate(levels):
        last = number + 1 == len(levels)
        inboxes = _run(topology, Phase.PROCESSING, number, level.partitions, inboxes, report, last, cancelled, frames)
    return [record for partition in sorted(inboxes) for record in inboxes[partition]]


def run_commit(
    topology: PlannedTopology,
    header: AttemptHeader,
    result: Sequence[Record],
    report: Report,
    cancelled: Cancelled | None = None,
    frames: Frames | None = None,
) -> None:
    """Run all levels of the commit phase over the result of ``run_processing``."""
    inboxes: dict[int, list[Record]] = {0: list(result)}
    for number, level in enumerate(topology.plan.commit):
        width = 1 if number == 0 else level.partitions
        inboxes = _run(topology, Phase.COMMIT, number, width, inboxes, report, False, cancelled, frames, header)


def _run(
    topology: PlannedTopology,
    phase: Phase,
    number: int,
    width: int,
    inboxes: dict[int, list[Record]],
    report: Report,
    encode: bool,
    cancelled: Cancelled | None = None,
    frames: Frames | None = None,
    header: AttemptHeader | None = None,
) -> dict[int, list[Record]]:
    outboxes: dict[int, list[Record]] = defaultdict(list)
    for partition in range(width):
        records = inboxes.get(partition, [])
        for target, record in run_level(
            topology,
            phase,
            number,
            partition,
            width,
            records,
            report,
            encode=encode,
            header=header,
            cancelled=cancelled,
        ):
            outboxes[target].append(record)
    for component_id in topology.plan.frames_gathered_at(phase, number):
        if frames is None:
            raise InvariantViolation(f"{component_id!r} needs Spark SQL, which a single task does not have")
        _through_frame(topology, phase, component_id, outboxes, frames)
    return outboxes


def _through_frame(
    topology: PlannedTopology, phase: Phase, component_id: str, boxes: dict[int, list[Record]], frames: Frames
) -> None:
    """Take a DataFrame bolt's rows out of the boxes, and put in the rows that Spark SQL made of
    them."""
    plan = topology.plan
    inputs: dict[str, list[pa.RecordBatch]] = {name: [] for name in plan.input_names(component_id)}
    header: AttemptHeader | None = None
    failed = False
    for records in boxes.values():
        for record in records:
            if isinstance(record, FrameRows) and record.component_id == component_id:
                inputs[plan.edges[record.edge].input_name].append(decode_batch(record.payload))
            elif isinstance(record, Control):
                header, failed = record.header, failed or record.failure is not None
        records[:] = [
            each for each in records if not (isinstance(each, FrameRows) and each.component_id == component_id)
        ]
    if failed or header is None:
        return  # the controls bring the failure to the tasks that would emit
    segment = plan.frame_outputs[(phase, component_id)]
    level = plan.levels(phase)[segment.level]
    for number, batch in enumerate(frames(component_id, header, inputs)):
        partition = level.partition_of(segment, number % segment.parallelism)
        boxes[partition].append(FrameOutput(component_id, (0, number), batch))


def expected_reports(topology: PlannedTopology, phase: Phase, *, spread: int | None = None) -> int:
    """How many tasks of a phase must report. ``spread``: the number of tasks of the first commit
    level; None means 1, for a phase that runs collapsed."""
    levels = topology.plan.levels(phase)
    tasks = sum(level.partitions for level in levels)
    if phase is Phase.COMMIT and levels:
        tasks += (spread if spread is not None else 1) - levels[0].partitions
    return tasks
