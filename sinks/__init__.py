"""The targets of committers: value types, backends, ready-made committers.

Database backends are imported on first use, because each needs the extra of its name.
"""

from typing import TYPE_CHECKING, Any

from sinks.aggregates import Aggregate, ApproxDistinct, Count, First, Last, Max, Mean, Min, Reduce, Sum
from sinks.append import AppendCommitter
from sinks.backend import MapBackend, Row
from sinks.collect_aggregate import Collect, Top
from sinks.consistent_read import Together, common_txid, read_together
from sinks.count_windows import CountWindowCommitter
from sinks.dead_letter_committers import DeadLetterTable, DeadLetterTopic
from sinks.event_time.as_of_join import AsOfJoiningCommitter
from sinks.event_time.deduplication import DeduplicatingCommitter
from sinks.event_time.expiry import ExpiringCommitter
from sinks.event_time.interval_join import JoiningCommitter
from sinks.event_time.sessions import SessionCommitter
from sinks.event_time.timers import Entry, TimerCommitter
from sinks.event_time.watermark import WatermarkCommitter
from sinks.event_time.windowed_committer import WindowedCommitter
from sinks.kafka.header_forwarding import Headers
from sinks.kafka.sink import KafkaSink
from sinks.lake.parquet_table import ParquetTable
from sinks.memory import MemoryBackend
from sinks.quantile import Quantile
from sinks.rows.mirror import Mirror
from sinks.rows.sqlite import SqliteTable
from sinks.rows.upsert import UpsertCommitter
from sinks.sql.sqlite_backend import SqliteBackend
from sinks.state_committer import StateCommitter
from sinks.states import MapState, NonTransactionalMapState, OpaqueMapState, TransactionalMapState
from sinks.table_join import TableJoiningCommitter
from sinks.values import OpaqueValue, TransactionalValue

if TYPE_CHECKING:
    from sinks.lake.delta import DeltaLakeTable
    from sinks.redis import RedisBackend
    from sinks.rows.mysql import MySqlTable
    from sinks.rows.postgres import PostgresTable
    from sinks.sql.mysql_backend import MySqlBackend
    from sinks.sql.postgres_backend import PostgresBackend

_LAZY = {
    "DeltaLakeTable": "sinks.lake.delta",
    "MySqlBackend": "sinks.sql.mysql_backend",
    "MySqlTable": "sinks.rows.mysql",
    "PostgresBackend": "sinks.sql.postgres_backend",
    "PostgresTable": "sinks.rows.postgres",
    "RedisBackend": "sinks.redis",
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
    "AsOfJoiningCommitter",
    "Collect",
    "Count",
    "CountWindowCommitter",
    "DeadLetterTable",
    "DeadLetterTopic",
    "DeduplicatingCommitter",
    "DeltaLakeTable",
    "Entry",
    "ExpiringCommitter",
    "First",
    "Headers",
    "JoiningCommitter",
    "KafkaSink",
    "Last",
    "MapBackend",
    "MapState",
    "Max",
    "Mean",
    "MemoryBackend",
    "Min",
    "Mirror",
    "MySqlBackend",
    "MySqlTable",
    "NonTransactionalMapState",
    "OpaqueMapState",
    "OpaqueValue",
    "ParquetTable",
    "PostgresBackend",
    "PostgresTable",
    "Quantile",
    "RedisBackend",
    "Reduce",
    "Row",
    "SessionCommitter",
    "SqliteBackend",
    "SqliteTable",
    "StateCommitter",
    "Sum",
    "TableJoiningCommitter",
    "TimerCommitter",
    "Together",
    "Top",
    "TransactionalMapState",
    "TransactionalValue",
    "UpsertCommitter",
    "WatermarkCommitter",
    "WindowedCommitter",
    "common_txid",
    "read_together",
]
