"""A whole phase in one process: for small batches inside a single Spark task, and for the in-process executor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from framework.execution.plan import Phase
from framework.execution.records import AttemptHeader, Record, Seed, TaskReport
from framework.execution.tasks import PlannedTopology, run_level

Report = Callable[[TaskReport], None]
Cancelled = Callable[[], bool]


def run_processing(
    topology: PlannedTopology, seeds: Sequence[Seed], report: Report, cancelled: Cancelled | None = None
) -> list[Record]:
    """All levels of the processing phase; returns what stays for the commit phase, ready to leave the process.
    ``cancelled`` is asked before each record batch."""
    inboxes: dict[int, list[Record]] = {task: [seed] for task, seed in enumerate(seeds)}
    levels = topology.plan.processing
    for number, level in enumerate(levels):
        last = number + 1 == len(levels)
        inboxes = _run(topology, Phase.PROCESSING, number, level.partitions, inboxes, report, last, cancelled)
    return [record for partition in sorted(inboxes) for record in inboxes[partition]]


def run_commit(
    topology: PlannedTopology,
    header: AttemptHeader,
    result: Sequence[Record],
    report: Report,
    cancelled: Cancelled | None = None,
) -> None:
    """All levels of the commit phase over the result of ``run_processing``."""
    inboxes: dict[int, list[Record]] = {0: list(result)}
    for number, level in enumerate(topology.plan.commit):
        width = 1 if number == 0 else level.partitions
        inboxes = _run(topology, Phase.COMMIT, number, width, inboxes, report, False, cancelled, header)


def _run(
    topology: PlannedTopology,
    phase: Phase,
    number: int,
    width: int,
    inboxes: dict[int, list[Record]],
    report: Report,
    encode: bool,
    cancelled: Cancelled | None = None,
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
    return outboxes


def expected_reports(topology: PlannedTopology, phase: Phase, *, spread: int | None = None) -> int:
    """How many tasks of a phase must report: ``spread`` is the number of tasks of the first commit level, 1 when the
    phase runs collapsed."""
    levels = topology.plan.levels(phase)
    tasks = sum(level.partitions for level in levels)
    if phase is Phase.COMMIT and levels:
        tasks += (spread if spread is not None else 1) - levels[0].partitions
    return tasks
