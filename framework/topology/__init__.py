"""What a user writes: fields, tuples, spouts, bolts, groupings, and the builder that makes a topology of them."""

from framework.topology.attempt import TransactionAttempt, check_granted
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
from framework.topology.builder import Topology, TransactionalTopologyBuilder
from framework.topology.context import TopologyContext
from framework.topology.core import BaseRichBolt, BaseRichSpout, RichOutputCollector, SpoutOutputCollector
from framework.topology.core_builder import CoreTopology, TopologyBuilder
from framework.topology.fencing import CommitFence, Difference, FencedState, Header, OpenCommit, Reach, Stamp, ValueType
from framework.topology.fields import Fields
from framework.topology.graph import Component, Graph, Subscription
from framework.topology.groupings import FieldsGrouping, GlobalGrouping, Grouping
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
from framework.topology.stateful import BaseStatefulBolt, KeyValueState, ReplayableSpout, State, StateProvider
from framework.topology.tuples import Tuple

__all__ = [
    "DEAD_LETTER_FIELDS",
    "DEAD_LETTER_STREAM",
    "DEFAULT_STREAM",
    "ArrowBolt",
    "BaseBasicBolt",
    "BaseBatchBolt",
    "BaseRichBolt",
    "BaseRichSpout",
    "BaseStatefulBolt",
    "BaseTransactionalBolt",
    "Bolt",
    "Combiner",
    "CommitFence",
    "Committer",
    "Component",
    "CoreTopology",
    "DataFrameBolt",
    "Difference",
    "FencedState",
    "Fields",
    "FieldsGrouping",
    "GlobalGrouping",
    "Graph",
    "Grouping",
    "Header",
    "Input",
    "KeyValueState",
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
    "ReplayableSpout",
    "RichOutputCollector",
    "Spout",
    "SpoutOutputCollector",
    "Stamp",
    "State",
    "StateProvider",
    "Subscription",
    "Topology",
    "TopologyBuilder",
    "TopologyContext",
    "TransactionAttempt",
    "TransactionalSpout",
    "TransactionalSpoutCoordinator",
    "TransactionalSpoutEmitter",
    "TransactionalTopologyBuilder",
    "Tuple",
    "ValueType",
    "check_granted",
]
