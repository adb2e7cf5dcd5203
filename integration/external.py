"""Servers that somebody else runs: where ``RATCHET_SERVERS`` is ``external``, their addresses come from the environment."""

from __future__ import annotations

import os

from integration.errors import ServerError

VARIABLES = {
    "kafka": "RATCHET_EXTERNAL_KAFKA",
    "zookeeper": "RATCHET_EXTERNAL_ZOOKEEPER",
    "postgres": "RATCHET_EXTERNAL_POSTGRES",
    "redis": "RATCHET_EXTERNAL_REDIS",
}
_EXAMPLES = {
    "kafka": "broker1:9092,broker2:9092",
    "zookeeper": "zk1:2181,zk2:2181",
    "postgres": "postgresql://user@host/database",
    "redis": "redis://host:6379/0",
}


class ExternalServers:
    """The brokers and the ZooKeeper servers of somebody else, by the names that ``EmbeddedServers`` has for its own."""

    @property
    def bootstrap_servers(self) -> str:
        return address_of("kafka")

    @property
    def zookeeper(self) -> str:
        return address_of("zookeeper")


class ExternalPostgres:
    """Somebody else's database, which Ratchet may create tables in."""

    @property
    def dsn(self) -> str:
        return address_of("postgres")


class ExternalRedis:
    """Somebody else's Redis, whose database Ratchet may write keys to."""

    @property
    def url(self) -> str:
        return address_of("redis")


def address_of(kind: str) -> str:
    """Where an external server is. Raises ``ServerError`` naming the variable that must say it."""
    variable = VARIABLES[kind]
    value = os.environ.get(variable, "").strip()
    if not value:
        raise ServerError(f"{variable} is not set: say where {kind} is, such as {_EXAMPLES[kind]}")
    return value
