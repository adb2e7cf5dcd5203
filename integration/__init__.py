"""Real servers for development and tests: Kafka, ZooKeeper, PostgreSQL, PgBouncer, HAProxy,
MariaDB, Redis, Kafka Connect with Debezium, Apicurio Registry, a substitute for a Schema Registry,
and a standalone Spark cluster. They run as child processes or in containers, or are external
servers."""

from integration.apicurio import ApicurioServer
from integration.connect import ConnectWorker
from integration.errors import NotOursError, ServerError
from integration.haproxy import HaproxyServer
from integration.kafka import KafkaBroker, KafkaCluster, SecureListener
from integration.kafka_and_zookeeper import EmbeddedServers, Shape
from integration.mariadb import MariaDbServer
from integration.pgbouncer import PgBouncerServer
from integration.postgres import PostgresServer, PostgresStandby
from integration.proxy import TcpProxy
from integration.redis import RedisServer
from integration.registry_standin_server import RegistryServer
from integration.spark_cluster import SparkCluster
from integration.zookeeper import SecurePort, ZooKeeperEnsemble, ZooKeeperServer

__all__ = [
    "ApicurioServer",
    "ConnectWorker",
    "EmbeddedServers",
    "HaproxyServer",
    "KafkaBroker",
    "KafkaCluster",
    "MariaDbServer",
    "NotOursError",
    "PgBouncerServer",
    "PostgresServer",
    "PostgresStandby",
    "RedisServer",
    "RegistryServer",
    "SecureListener",
    "SecurePort",
    "ServerError",
    "Shape",
    "SparkCluster",
    "TcpProxy",
    "ZooKeeperEnsemble",
    "ZooKeeperServer",
]
