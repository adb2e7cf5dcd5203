"""What the drivers of both engines share: where documents are kept, who leads, and what a leader may write."""

from framework.coordination.configured import store_of
from framework.coordination.store import Change, CoordinationStore, Delete, Leadership, MemoryStore, Put
from framework.coordination.transactional_state import RotatingTransactionalState, TransactionalState
from framework.coordination.zookeeper import ZooKeeperStore

__all__ = [
    "Change",
    "CoordinationStore",
    "Delete",
    "Leadership",
    "MemoryStore",
    "Put",
    "RotatingTransactionalState",
    "TransactionalState",
    "ZooKeeperStore",
    "store_of",
]
