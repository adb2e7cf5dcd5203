"""The random worlds of ``rescaled_event_time`` on Spark: workers are killed before and after the
steps that write, and drivers between phases and at the steps of their own.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from framework.execution.plan import ExecutionPlan
from framework.execution.ports import BatchExecutor
from framework.execution.spark.batch_executor import SparkExecutor
from framework.topology import Topology
from sinks import MapBackend, SqliteBackend
from tests.kit.dying_backends import Deadline, dying
from tests.kit.event_time_chains import Shape, chains
from tests.kit.rescaled_event_time import World
from tests.kit.waiting import PATIENCE_S


class SparkWorld(World):
    """A Spark context must be active. ``backend``: as of ``World``, whose class is a key of
    ``dying_backends.KINDS``."""

    runs_max = 3
    lives = 4

    def __init__(
        self,
        seed: int,
        folder: Path,
        backend: Callable[[str], MapBackend] | None = None,
        shape: Callable[[random.Random], Shape] = chains,
    ) -> None:
        made = backend or (lambda name: SqliteBackend(folder / "states.db", name))
        super().__init__(seed, folder, lambda name: dying(made(name), self.deadline), shape)
        self.deadline = Deadline(folder / "deadline", self.limits)
        self.deadline.set(None)
        self.left: list[threading.Thread] = []

    def committing(self, commit: Any) -> Any:
        def committed(header: Any) -> Any:
            if self.dies_in is None or self.chance.random() > 0.3:
                return commit(header)
            thread = threading.Thread(target=commit, args=(header,), daemon=True)
            thread.start()
            thread.join(self.chance.uniform(0, 0.5))
            self.left.append(thread)
            raise self.died_during_commit()

        return committed

    def await_stragglers(self) -> None:
        for each in self.left:
            each.join(PATIENCE_S)
            assert not each.is_alive(), "a commit does not end"

    def executor(self, plan: ExecutionPlan) -> BatchExecutor:
        return SparkExecutor(
            plan, {}, {}, collapse_records_max=self.chance.choice([0, 1_000]), resident=self.chance.random() < 0.5
        )

    def lead(self, built: Topology, upto: int | None) -> bool:
        self.deadline.set(self.chance.randint(1, 30) if self.chance.random() < 0.8 else None)
        try:
            return super().lead(built, upto)
        finally:
            self.struck["worker killed"] += self.deadline.is_passed()
            self.deadline.set(None)
