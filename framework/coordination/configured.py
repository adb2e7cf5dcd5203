"""Opens the store that a configuration names."""

from __future__ import annotations

from framework.config import Config
from framework.coordination.security import ZooKeeperSecurity
from framework.coordination.store import CoordinationStore, MemoryStore
from framework.coordination.zookeeper import ZooKeeperStore
from framework.observe.allowed_hosts import host_of, is_loopback
from framework.observe.logs import get_logger

_log = get_logger()


def store_of(config: Config, *, observes: bool = False) -> CoordinationStore:
    """Open the store that a configuration names: ZooKeeper, or memory when it names no servers.
    ``observes``: the caller only reads."""
    hosts = config.zookeeper_hosts()
    if hosts is None:
        _log.warning(
            "store.memory",
            reason="transactional.zookeeper.servers is not set: transactional state ends with this process",
        )
        return MemoryStore()
    security = ZooKeeperSecurity.of(config)
    if (
        not observes
        and not security.has_credentials
        and not all(is_loopback(host_of(each)) for each in hosts.split(","))
    ):
        _log.warning(
            "zookeeper.open_to_all",
            reason=f"whoever reaches ZooKeeper at {hosts} can change the state of every topology: give credentials "
            "(transactional.zookeeper.sasl.*, .auth or .tls.certificate)",
        )
    return ZooKeeperStore(
        hosts,
        config.zookeeper_root,
        session_timeout_s=config.zookeeper_session_timeout_secs,
        connect_timeout_s=config.zookeeper_connection_timeout_secs,
        security=security,
        observes=observes,
    )
