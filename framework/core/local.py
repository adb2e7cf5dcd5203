"""Runs rounds in this process, for tests: Spark must change nothing but the speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from framework.core.plan import CorePlan
from framework.core.round_protocol import Round, RoundRecord, walk_round
from framework.core.task_worker import TaskWorker


class LocalRounds:
    """The ``RoundExecutor`` of one process."""

    def __init__(self, plan: CorePlan, clock: Callable[[], float] = time.monotonic) -> None:
        self._plan = plan
        self._worker = TaskWorker(plan, encode=False, clock=clock)

    rounds_max = 1

    def start(self) -> None:
        """Nothing to prepare."""

    def run(self, round_: Round) -> Sequence[RoundRecord]:
        return walk_round(round_, self._plan.widths, self._worker.run_task)

    def wake(self) -> None:
        self._worker.wake(0)

    def close(self) -> None:
        self._worker.close()
