"""The exactly-once protocol on the driver: coordinator, durable state, leadership, and the loop that joins them."""

from framework.coordination.store import CoordinationStore, Delete, Leadership, MemoryStore, Put
from framework.coordination.transactional_state import RotatingTransactionalState, TransactionalState
from framework.coordination.zookeeper import ZooKeeperStore
from framework.transactions.coordinator import Coordinator, SpoutKind
from framework.transactions.documents import committed_txid, read_history
from framework.transactions.driver import Driver

__all__ = [
    "CoordinationStore",
    "Coordinator",
    "Delete",
    "Driver",
    "Leadership",
    "MemoryStore",
    "Put",
    "RotatingTransactionalState",
    "SpoutKind",
    "TransactionalState",
    "ZooKeeperStore",
    "committed_txid",
    "read_history",
]
