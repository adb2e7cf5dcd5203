"""Runs batches in this process, for tests: Spark must change nothing but the speed."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from framework.execution.failures import FailureKind, FrameFailed, TaskFailure
from framework.execution.messages import AttemptHeader, Record, TaskReport
from framework.execution.plan import ExecutionPlan, Layout, Phase
from framework.execution.ports import (
    DeadAttempts,
    PhaseResult,
    ProcessingJob,
    TaskWatcher,
    held_rows,
    layout_of,
    seeds,
    summarise,
)
from framework.execution.single_task_phase import Frames, expected_reports, run_commit, run_processing
from framework.execution.tasks import PlannedTopology
from framework.topology.spouts import Spout

if TYPE_CHECKING:
    from framework.execution.spark.dataframes import SqlFrames


class LocalExecutor:
    """The ``BatchExecutor`` of one process. Phases run in the calling thread."""

    def __init__(self, plan: ExecutionPlan, conf: Mapping[str, Any], watcher: TaskWatcher | None = None) -> None:
        self._topology = PlannedTopology(plan, conf, watcher)
        self._committing = self._topology.for_batch(Layout.EVEN, collapsed=True)
        self._results: dict[AttemptHeader, tuple[list[Record], dict[int, int]]] = {}
        self._dead = DeadAttempts()
        self._lock = threading.Lock()
        self._sql: SqlFrames | None = None
        self._frames: Frames | None = None

    def start(self) -> None:
        """Start Spark SQL if there are DataFrame bolts, which need it even here. Otherwise do
        nothing."""
        if self._topology.plan.frame_outputs:
            # imported here because only runs that need Spark load it
            from framework.execution.spark.dataframes import SqlFrames

            self._sql = SqlFrames.in_this_process(self._topology)
            self._frames = self._sql.of_rows

    def process(self, job: ProcessingJob) -> PhaseResult:
        reports: list[TaskReport] = []
        if job.header in self._dead:
            return PhaseResult(DeadAttempts.failure(job.header, Phase.PROCESSING))
        topology = self._topology.for_batch(layout_of(self._topology.plan, job), collapsed=True)
        plan = topology.plan
        try:
            records = run_processing(
                topology, seeds(plan, job), reports.append, lambda: job.header in self._dead, self._frames
            )
        except FrameFailed as error:
            return self._failed_frame(error)
        result = summarise(plan, Phase.PROCESSING, reports, expected_reports(topology, Phase.PROCESSING))
        with self._lock:
            if result.failure is None and job.header not in self._dead:
                self._results[job.header] = records, held_rows(plan, reports)
        return result

    def commits_in_one_step(self, header: AttemptHeader) -> bool:
        return self._committing.plan.commits_in_one_step

    def commit(self, header: AttemptHeader) -> PhaseResult:
        with self._lock:
            kept = self._results.get(header)
        if kept is None:
            return PhaseResult(TaskFailure(FailureKind.RETRYABLE, "executor", 0, f"the result of {header} is gone"))
        records, held = kept
        reports: list[TaskReport] = []
        try:
            run_commit(
                self._committing,
                header,
                records,
                reports.append,
                cancelled=lambda: header in self._dead,
                frames=self._frames,
            )
        except FrameFailed as error:
            return self._failed_frame(error)
        expected = expected_reports(self._committing, Phase.COMMIT)
        return summarise(self._committing.plan, Phase.COMMIT, reports, expected, held)

    def _failed_frame(self, error: FrameFailed) -> PhaseResult:
        if self._topology.watcher is not None and error.__cause__ is not None:
            self._topology.watcher.failed(error.failure, error.__cause__)
        return PhaseResult(error.failure)

    def cancel(self, header: AttemptHeader) -> None:
        """A running phase notices this before its next record batch."""
        self._dead.add(header)
        self.release(header)

    def release(self, header: AttemptHeader) -> None:
        with self._lock:
            self._results.pop(header, None)

    def close(self) -> None:
        with self._lock:
            self._results.clear()
        if self._sql is not None:
            self._sql.close()
        spout = self._topology.plan.components[self._topology.plan.spout_id].template
        if isinstance(spout, Spout):
            spout.release()
