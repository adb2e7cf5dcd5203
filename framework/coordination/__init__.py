"""Coordination for the drivers of both kinds of topologies: the document store, leader election,
and the fence on a leader's writes."""

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
