"""What a user writes: fields, tuples, spouts, bolts, groupings, and the builder that makes a topology of them."""

from framework.topology.attempt import TransactionAttempt
from framework.topology.bolts import (
    DEFAULT_STREAM,
    ArrowBolt,
    BaseBasicBolt,
    BaseBatchBolt,
    BaseTransactionalBolt,
    Bolt,
    Combiner,
    Committer,
    DataFrameBolt,
    Input,
    OutputCollector,
    OutputFieldsDeclarer,
)
from framework.topology.builder import Component, Subscription, Topology, TransactionalTopologyBuilder
from framework.topology.context import TopologyContext
from framework.topology.fencing import CommitFence, FencedState, Header, OpenCommit, Reach, Stamp, ValueType
from framework.topology.fields import Fields
from framework.topology.groupings import Grouping
from framework.topology.spouts import (
    DEAD_LETTER_FIELDS,
    DEAD_LETTER_STREAM,
    OnStream,
    OpaquePartitionedTransactionalSpout,
    PartitionedSpout,
    PartitionedTransactionalSpout,
    PartitionPlanner,
    PartitionProgress,
    PartitionReader,
    ReadCounts,
    Spout,
    TransactionalSpout,
    TransactionalSpoutCoordinator,
    TransactionalSpoutEmitter,
)
from framework.topology.tuples import Tuple

__all__ = [
    "DEAD_LETTER_FIELDS",
    "DEAD_LETTER_STREAM",
    "DEFAULT_STREAM",
    "ArrowBolt",
    "BaseBasicBolt",
    "BaseBatchBolt",
    "BaseTransactionalBolt",
    "Bolt",
    "Combiner",
    "CommitFence",
    "Committer",
    "Component",
    "DataFrameBolt",
    "FencedState",
    "Fields",
    "Grouping",
    "Header",
    "Input",
    "OnStream",
    "OpaquePartitionedTransactionalSpout",
    "OpenCommit",
    "OutputCollector",
    "OutputFieldsDeclarer",
    "PartitionPlanner",
    "PartitionProgress",
    "PartitionReader",
    "PartitionedSpout",
    "PartitionedTransactionalSpout",
    "Reach",
    "ReadCounts",
    "Spout",
    "Stamp",
    "Subscription",
    "Topology",
    "TopologyContext",
    "TransactionAttempt",
    "TransactionalSpout",
    "TransactionalSpoutCoordinator",
    "TransactionalSpoutEmitter",
    "TransactionalTopologyBuilder",
    "Tuple",
    "ValueType",
]
