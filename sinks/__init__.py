"""Where committers write: value types, backends, ready committers."""

from sinks.aggregates import Aggregate, Count, Max, Min, Sum
from sinks.backend import MapBackend, Row
from sinks.committer import StateCommitter
from sinks.dead_letters import DeadLetterTable, DeadLetterTopic
from sinks.memory import MemoryBackend
from sinks.sqlite import SqliteBackend
from sinks.states import MapState, NonTransactionalMapState, OpaqueMapState, TransactionalMapState
from sinks.values import OpaqueValue, TransactionalValue

__all__ = [
    "Aggregate",
    "Count",
    "DeadLetterTable",
    "DeadLetterTopic",
    "MapBackend",
    "MapState",
    "Max",
    "MemoryBackend",
    "Min",
    "NonTransactionalMapState",
    "OpaqueMapState",
    "OpaqueValue",
    "Row",
    "SqliteBackend",
    "StateCommitter",
    "Sum",
    "TransactionalMapState",
    "TransactionalValue",
]
