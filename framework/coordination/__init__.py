"""Shared by the drivers of both kinds of topology: the store of their documents, the election of a
leader, and the fence on a leader's writes."""

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
