"""The information that a component gets about itself when a task prepares it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from framework.errors import TopologyError


@dataclass(frozen=True, slots=True)
class TopologyContext:
    """Where a component runs: its id, the index of its task, and its configuration.

    On the driver (planners) ``task_index`` is 0 and ``task_count`` is 1.

    Source: ``org.apache.storm.task.TopologyContext``, the part that is available on Spark.
    """

    topology_id: str
    component_id: str
    task_index: int
    task_count: int
    conf: Mapping[str, Any] = field(default_factory=dict)
    _: KW_ONLY
    parallelisms: Mapping[str, int] = field(default_factory=dict)

    def tasks_of(self, component_id: str) -> int:
        """How many tasks another component of the topology has. Direct emits go to ``0 .. tasks -
        1``. Raises ``TopologyError`` for an unknown component."""
        if component_id not in self.parallelisms:
            known = ", ".join(self.parallelisms)
            raise TopologyError(
                f"component {self.component_id!r} asks for {component_id!r}, which does not exist ({known})"
            )
        return self.parallelisms[component_id]
