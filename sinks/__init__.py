"""Where committers write: value types, backends, ready-made committers.

Database backends are imported on first use, because each needs the extra of its name.
"""

from typing import TYPE_CHECKING, Any

from sinks.aggregates import Aggregate, ApproxDistinct, Count, First, Last, Max, Mean, Min, Reduce, Sum
from sinks.backends.backend import MapBackend, Row
from sinks.backends.memory import MemoryBackend
from sinks.backends.sqlite import SqliteBackend
from sinks.committer import StateCommitter
from sinks.consistent_read import Together, common_txid, read_together
from sinks.dead_letters import DeadLetterTable, DeadLetterTopic
from sinks.kafka.sink import KafkaSink
from sinks.states import MapState, NonTransactionalMapState, OpaqueMapState, TransactionalMapState
from sinks.tables.append import AppendCommitter
from sinks.tables.parquet import ParquetTable
from sinks.values import OpaqueValue, TransactionalValue

if TYPE_CHECKING:
    from sinks.backends.postgres import PostgresBackend
    from sinks.backends.redis import RedisBackend
    from sinks.tables.delta import DeltaLakeTable

_LAZY = {
    "DeltaLakeTable": "sinks.tables.delta",
    "PostgresBackend": "sinks.backends.postgres",
    "RedisBackend": "sinks.backends.redis",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'sinks' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)


__all__ = [
    "Aggregate",
    "AppendCommitter",
    "ApproxDistinct",
    "Count",
    "DeadLetterTable",
    "DeadLetterTopic",
    "DeltaLakeTable",
    "First",
    "KafkaSink",
    "Last",
    "MapBackend",
    "MapState",
    "Max",
    "Mean",
    "MemoryBackend",
    "Min",
    "NonTransactionalMapState",
    "OpaqueMapState",
    "OpaqueValue",
    "ParquetTable",
    "PostgresBackend",
    "RedisBackend",
    "Reduce",
    "Row",
    "SqliteBackend",
    "StateCommitter",
    "Sum",
    "Together",
    "TransactionalMapState",
    "TransactionalValue",
    "common_txid",
    "read_together",
]
