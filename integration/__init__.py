"""Real servers for development and tests, as child processes: Kafka, ZooKeeper, PostgreSQL, Redis."""

from integration.errors import ServerError
from integration.kafka import KafkaBroker, KafkaCluster, SecureListener
from integration.postgres import PostgresServer
from integration.redis import RedisServer
from integration.servers import EmbeddedServers
from integration.zookeeper import ZooKeeperServer

__all__ = [
    "EmbeddedServers",
    "KafkaBroker",
    "KafkaCluster",
    "PostgresServer",
    "RedisServer",
    "SecureListener",
    "ServerError",
    "ZooKeeperServer",
]
