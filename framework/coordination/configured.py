"""Opens the store that a configuration names."""

from __future__ import annotations

from framework.config import Config
from framework.coordination.security import ZooKeeperSecurity
from framework.coordination.store import CoordinationStore, MemoryStore
from framework.coordination.zookeeper import ZooKeeperStore
from framework.observe.logs import get_logger

_log = get_logger()


def store_of(config: Config, *, observes: bool = False) -> CoordinationStore:
    """Open the store that a configuration names: ZooKeeper, or memory when it names no servers.
    ``observes``: for one that changes nothing there."""
    hosts = config.zookeeper_hosts()
    if hosts is None:
        _log.warning(
            "store.memory",
            reason="transactional.zookeeper.servers is not set: transactional state ends with this process",
        )
        return MemoryStore()
    return ZooKeeperStore(
        hosts,
        config.zookeeper_root,
        session_timeout_s=config.zookeeper_session_timeout_secs,
        connect_timeout_s=config.zookeeper_connection_timeout_secs,
        security=ZooKeeperSecurity.of(config),
        observes=observes,
    )
