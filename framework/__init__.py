"""Ratchet: exactly-once Kafka pipelines in Python, executed by Spark."""

from typing import Any

from framework.config import Config
from framework.core.committed_state_reader import TopologyState
from framework.core.run import CoreRun, CoreTopologyFailed
from framework.errors import FailedException
from framework.inspect.find_poison import Poison, find_poison
from framework.inspect.state_snapshots import Snapshot, StateSnapshot, read
from framework.operators.count_windows import by_count
from framework.operators.event_window_assigner import hopping, sliding, tumbling
from framework.operators.sessions import session
from framework.submission import submit
from framework.topology import (
    ArrowBolt,
    BaseBasicBolt,
    BaseBatchBolt,
    BaseRichBolt,
    BaseRichSpout,
    BaseStatefulBolt,
    BaseTransactionalBolt,
    Bolt,
    Combiner,
    Committer,
    CoreTopology,
    DataFrameBolt,
    Fields,
    Grouping,
    KeyValueState,
    OpaquePartitionedTransactionalSpout,
    OutputCollector,
    OutputFieldsDeclarer,
    PartitionedTransactionalSpout,
    PartitionPlanner,
    PartitionProgress,
    PartitionReader,
    ReplayableSpout,
    RichOutputCollector,
    SourceRanges,
    SpoutOutputCollector,
    State,
    StateProvider,
    Topology,
    TopologyBuilder,
    TopologyContext,
    TransactionalSpout,
    TransactionalSpoutCoordinator,
    TransactionalSpoutEmitter,
    TransactionalTopologyBuilder,
    TransactionAttempt,
    Tuple,
)
from framework.topology.planning_time_stream import CLOCK_STREAM
from framework.transactions.run import Run, TopologyFailed
from framework.transactions.run_status import RunStatus

#: Committers of ``sinks`` that users look for among the operators.
_IN_SINKS = (
    "AsOfJoiningCommitter",
    "CountWindowCommitter",
    "DeduplicatingCommitter",
    "ExpiringCommitter",
    "JoiningCommitter",
    "SessionCommitter",
    "TableJoiningCommitter",
    "TimerCommitter",
    "WatermarkCommitter",
    "WindowedCommitter",
)


def __getattr__(name: str) -> Any:
    if name not in _IN_SINKS:
        raise AttributeError(f"module 'framework' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("sinks"), name)


__all__ = [
    "CLOCK_STREAM",
    "ArrowBolt",
    "AsOfJoiningCommitter",
    "BaseBasicBolt",
    "BaseBatchBolt",
    "BaseRichBolt",
    "BaseRichSpout",
    "BaseStatefulBolt",
    "BaseTransactionalBolt",
    "Bolt",
    "Combiner",
    "Committer",
    "Config",
    "CoreRun",
    "CoreTopology",
    "CoreTopologyFailed",
    "CountWindowCommitter",
    "DataFrameBolt",
    "DeduplicatingCommitter",
    "ExpiringCommitter",
    "FailedException",
    "Fields",
    "Grouping",
    "JoiningCommitter",
    "KeyValueState",
    "OpaquePartitionedTransactionalSpout",
    "OutputCollector",
    "OutputFieldsDeclarer",
    "PartitionPlanner",
    "PartitionProgress",
    "PartitionReader",
    "PartitionedTransactionalSpout",
    "Poison",
    "ReplayableSpout",
    "RichOutputCollector",
    "Run",
    "RunStatus",
    "SessionCommitter",
    "Snapshot",
    "SourceRanges",
    "SpoutOutputCollector",
    "State",
    "StateProvider",
    "StateSnapshot",
    "TableJoiningCommitter",
    "TimerCommitter",
    "Topology",
    "TopologyBuilder",
    "TopologyContext",
    "TopologyFailed",
    "TopologyState",
    "TransactionAttempt",
    "TransactionalSpout",
    "TransactionalSpoutCoordinator",
    "TransactionalSpoutEmitter",
    "TransactionalTopologyBuilder",
    "Tuple",
    "WatermarkCommitter",
    "WindowedCommitter",
    "by_count",
    "find_poison",
    "hopping",
    "read",
    "session",
    "sliding",
    "submit",
    "tumbling",
]
