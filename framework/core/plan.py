"""The plan of a core topology that all its processes share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from framework.core.event_times import Paths
from framework.execution.plan import ExecutionPlan, TaskComponent


@dataclass(frozen=True, slots=True)
class CorePlan:
    """An execution plan, extended for a core topology.

    * ``pending_max``: the most pending tuples per spout task.
    * ``ackers``: number of acker tasks, 0 for none.
    * ``conf``: the configuration that components see.
    * ``stateful``: the components whose state is kept.
    * ``ticks``: bolt -> seconds between its ticks.
    * ``paths``: of the bolts that use event time."""

    plan: ExecutionPlan
    conf: Mapping[str, Any]
    _: KW_ONLY
    ackers: int
    pending_max: int
    stateful: frozenset[str] = frozenset()
    ticks: Mapping[str, float] = field(default_factory=dict)
    paths: Paths = field(default_factory=dict)

    @property
    def widths(self) -> list[int]:
        """Tasks per level; the ackers are the last one."""
        return [level.partitions for level in self.plan.processing] + ([self.ackers] if self.ackers else [])

    def names(self) -> dict[tuple[int, int], str]:
        """(level, partition) -> the component tasks that live there. Without ackers."""
        found = {}
        for number, level in enumerate(self.plan.processing):
            for partition in range(level.partitions):
                segment, task = level.slot(partition)
                found[(number, partition)] = ", ".join(f"{each}[{task}]" for each in segment.components)
        return found

    def spout_tasks(self) -> list[tuple[str, int]]:
        """Component id and task of every spout task."""
        return self._tasks_of(each for each in self.plan.components.values() if not each.inputs)

    def rooted_tasks(self) -> list[tuple[str, int]]:
        """Component id and task of every task at which trees may begin. A task's number is its
        index in this list."""
        stateful = (each for each in self.plan.components.values() if each.id in self.stateful)
        return self.spout_tasks() + self._tasks_of(stateful)

    def rooted_task_of(self, origin: int) -> int:
        """The number of the task to which an origin belongs."""
        return origin % len(self.rooted_tasks())

    @staticmethod
    def _tasks_of(components: Iterable[TaskComponent]) -> list[tuple[str, int]]:
        return [(each.id, task) for each in components for task in range(each.parallelism)]
