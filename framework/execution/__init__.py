"""Execution of a topology: phases and levels of tasks, the data that crosses between tasks, and the
executors."""

from framework.execution.failures import FailureKind, TaskFailure
from framework.execution.local import LocalExecutor
from framework.execution.messages import AttemptHeader
from framework.execution.plan import ExecutionPlan, Phase, plan_execution
from framework.execution.ports import BatchExecutor, PhaseResult, ProcessingJob

__all__ = [
    "AttemptHeader",
    "BatchExecutor",
    "ExecutionPlan",
    "FailureKind",
    "LocalExecutor",
    "Phase",
    "PhaseResult",
    "ProcessingJob",
    "TaskFailure",
    "plan_execution",
]
