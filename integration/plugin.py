"""A plugin of pytest: servers for the tests of a topology. In ``conftest.py`` of the root::

    pytest_plugins = ["framework.testing.plugin", "integration.plugin"]

Each server starts when the first test requests it, and ends with the test run. ``RATCHET_SERVERS``
selects where they run: as child processes (the default), in containers, or externally.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from integration.errors import ServerError
from integration.external import ExternalMariaDb, ExternalPostgres, ExternalRedis, ExternalServers
from integration.folder_permissions import open_folder
from integration.kafka import answer_of_live_brokers
from integration.kafka_and_zookeeper import EmbeddedServers
from integration.mariadb import MariaDbServer
from integration.postgres import PostgresServer
from integration.redis import RedisServer
from integration.registry_standin_server import RegistryServer
from integration.server_launcher import EXTERNAL, chosen

#: Creates a topic with this name, number of partitions, and records; returns its name.
MakeTopic = Callable[..., str]
_TIMEOUT_S = 240


@pytest.fixture(scope="session")
def ratchet_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServers | ExternalServers]:
    """Kafka and ZooKeeper: ``.bootstrap_servers``, ``.zookeeper``."""
    if chosen() == EXTERNAL:
        yield ExternalServers()
        return
    with EmbeddedServers(tmp_path_factory.mktemp("servers")) as running:
        yield running


@pytest.fixture(scope="session")
def ratchet_postgres() -> Iterator[PostgresServer | ExternalPostgres]:
    """PostgreSQL: ``.dsn``."""
    if chosen() == EXTERNAL:
        yield ExternalPostgres()
        return
    with open_folder() as folder, PostgresServer(folder) as server:
        yield server


@pytest.fixture(scope="session")
def ratchet_mariadb() -> Iterator[MariaDbServer | ExternalMariaDb]:
    """MariaDB: ``.dsn``."""
    if chosen() == EXTERNAL:
        yield ExternalMariaDb()
        return
    with open_folder() as folder, MariaDbServer(folder) as server:
        yield server


@pytest.fixture(scope="session")
def ratchet_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer | ExternalRedis]:
    """Redis: ``.url``."""
    if chosen() == EXTERNAL:
        yield ExternalRedis()
        return
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def ratchet_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    """A substitute for a Schema Registry: ``.url``, ``.register(subject, schema)``."""
    with RegistryServer(tmp_path_factory.mktemp("registry")) as server:
        yield server


@pytest.fixture
def ratchet_topic(ratchet_servers: EmbeddedServers | ExternalServers) -> MakeTopic:
    """Creates topics with records, for one test::

        def test_orders(ratchet_topic, ratchet_servers):
            topic = ratchet_topic([b'{"cents": 5}'], partitions=2)

    Records are bytes, or pairs of a key and a value. Each topic has a name of its own.
    """
    address = ratchet_servers.bootstrap_servers

    def make(records: Sequence[bytes | tuple[bytes | None, bytes | None]] = (), *, partitions: int = 1) -> str:
        name = f"topic-{uuid.uuid4().hex[:12]}"
        admin = AdminClient({"bootstrap.servers": address})
        new = NewTopic(name, num_partitions=partitions)
        answer_of_live_brokers(lambda: admin.create_topics([new], request_timeout=_TIMEOUT_S)[name], _TIMEOUT_S)
        failed: list[object] = []
        producer = Producer({"bootstrap.servers": address, "enable.idempotence": True})
        for record in records:
            key, value = record if isinstance(record, tuple) else (None, record)
            producer.produce(name, value, key, on_delivery=lambda error, _: failed.append(error) if error else None)
        left = producer.flush(_TIMEOUT_S)
        if left or failed:
            raise ServerError(f"{left + len(failed)} of {len(records)} records did not arrive in {name}: {failed[:1]}")
        return name

    return make
