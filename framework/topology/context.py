"""What a component learns about itself when a task prepares it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TopologyContext:
    """Where a component runs: which one it is, which of its tasks, and with which configuration.

    On the driver (planners) ``task_index`` is 0 and ``task_count`` is 1.

    Source: ``org.apache.storm.task.TopologyContext``, the part that a task on Spark can have.
    """

    topology_id: str
    component_id: str
    task_index: int
    task_count: int
    conf: Mapping[str, Any] = field(default_factory=dict)
