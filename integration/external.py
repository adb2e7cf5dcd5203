"""External servers. With ``RATCHET_SERVERS=external``, their addresses come from the
environment."""

from __future__ import annotations

import os

from integration.errors import ServerError

VARIABLES = {
    "kafka": "RATCHET_EXTERNAL_KAFKA",
    "zookeeper": "RATCHET_EXTERNAL_ZOOKEEPER",
    "postgres": "RATCHET_EXTERNAL_POSTGRES",
    "mariadb": "RATCHET_EXTERNAL_MARIADB",
    "redis": "RATCHET_EXTERNAL_REDIS",
}
_EXAMPLES = {
    "kafka": "broker1:9092,broker2:9092",
    "zookeeper": "zk1:2181,zk2:2181",
    "postgres": "postgresql://user@host/database",
    "mariadb": "mysql://user:password@host/database",
    "redis": "redis://host:6379/0",
}


class ExternalServers:
    """External brokers and ZooKeeper servers, with the attributes of ``EmbeddedServers``."""

    @property
    def bootstrap_servers(self) -> str:
        return address_of("kafka")

    @property
    def zookeeper(self) -> str:
        return address_of("zookeeper")


class ExternalPostgres:
    """An external database, in which Ratchet may create tables."""

    @property
    def dsn(self) -> str:
        return address_of("postgres")


class ExternalMariaDb:
    """An external database, in which Ratchet may create tables."""

    @property
    def dsn(self) -> str:
        return address_of("mariadb")


class ExternalRedis:
    """An external Redis server, to whose database Ratchet may write keys."""

    @property
    def url(self) -> str:
        return address_of("redis")


def address_of(kind: str) -> str:
    """The address of an external server. Raises ``ServerError``, which names the environment
    variable, if that is not set."""
    variable = VARIABLES[kind]
    value = os.environ.get(variable, "").strip()
    if not value:
        raise ServerError(f"{variable} is not set: say where {kind} is, such as {_EXAMPLES[kind]}")
    return value
