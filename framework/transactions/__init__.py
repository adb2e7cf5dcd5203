"""The exactly-once protocol on the driver: coordinator, documents, terms, commits, and the driver's
loop."""

from framework.coordination import (
    CoordinationStore,
    Delete,
    Leadership,
    MemoryStore,
    Put,
    RotatingTransactionalState,
    TransactionalState,
    ZooKeeperStore,
)
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
