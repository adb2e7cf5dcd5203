"""Real servers for development and tests: Apache Kafka and ZooKeeper as child processes."""

from integration.errors import ServerError
from integration.kafka import KafkaBroker, KafkaCluster, SecureListener
from integration.servers import EmbeddedServers
from integration.zookeeper import ZooKeeperServer

__all__ = ["EmbeddedServers", "KafkaBroker", "KafkaCluster", "SecureListener", "ServerError", "ZooKeeperServer"]
