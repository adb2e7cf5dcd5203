"""Where committers write: value types, backends, ready committers.

The backends of databases are loaded when they are asked for: each needs the extra of its name.
"""

from typing import TYPE_CHECKING, Any

from sinks.aggregates import Aggregate, ApproxDistinct, Count, First, Last, Max, Mean, Min, Reduce, Sum
from sinks.append import AppendCommitter
from sinks.backend import MapBackend, Row
from sinks.committer import StateCommitter
from sinks.dead_letters import DeadLetterTable, DeadLetterTopic
from sinks.kafka import KafkaSink
from sinks.memory import MemoryBackend
from sinks.parquet import ParquetTable
from sinks.reading import Together, common_txid, read_together
from sinks.sqlite import SqliteBackend
from sinks.states import MapState, NonTransactionalMapState, OpaqueMapState, TransactionalMapState
from sinks.values import OpaqueValue, TransactionalValue

if TYPE_CHECKING:
    from sinks.delta import DeltaLakeTable
    from sinks.postgres import PostgresBackend
    from sinks.redis import RedisBackend

_LAZY = {"DeltaLakeTable": "sinks.delta", "PostgresBackend": "sinks.postgres", "RedisBackend": "sinks.redis"}


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
