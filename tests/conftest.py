"""Fixtures: one pair of real servers and one Spark context for the whole test run, fresh names for each test."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType
from hypothesis import HealthCheck, settings

from integration import EmbeddedServers, NotOursError, PostgresServer, RedisServer, ServerError
from integration.external import ExternalPostgres, ExternalRedis, ExternalServers
from integration.hosts import CHOICES, CONTAINERS, EXTERNAL, VARIABLE, chosen

# A shared machine may be slow at any moment; what is slow is not wrong.
settings.register_profile("ratchet", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ratchet")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--servers",
        choices=CHOICES,
        default=chosen(),
        help="where servers run: child processes, containers, or somewhere else already (RATCHET_EXTERNAL_KAFKA, ...)",
    )


def pytest_configure(config: pytest.Config) -> None:
    os.environ[VARIABLE] = config.getoption("--servers")  # for the processes that tests start, too
    if chosen() == CONTAINERS and not hasattr(config, "workerinput"):
        _make_containers_possible()


def _make_containers_possible() -> None:
    """Once, by the process that outlives all others: an engine, and an image of every kind."""
    try:
        from integration.images import IMAGES, find_image

        for kind in IMAGES:
            find_image(kind, lambda line: print(line, file=sys.stderr, flush=True))
    except ServerError as error:
        raise pytest.UsageError(f"the container suite cannot run: {error}") from None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    yield from _skipped_without_own_servers()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    yield from _skipped_without_own_servers()


def _skipped_without_own_servers() -> Iterator[None]:
    """External servers cannot be killed: tests that want servers of their own are skipped, each with its reason."""
    try:
        yield
    except NotOursError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def quiet_logs() -> Iterator[None]:
    """Warnings only: what fails shows them, what passes is quiet."""
    import logging

    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServers | ExternalServers]:
    """Kafka and ZooKeeper that no test stops or kills."""
    if chosen() == EXTERNAL:
        yield ExternalServers()
        return
    with EmbeddedServers(tmp_path_factory.mktemp("servers")) as running:
        yield running


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer | ExternalPostgres]:
    """A database server that no test stops or kills."""
    if chosen() == EXTERNAL:
        yield ExternalPostgres()
        return
    with open_folder() as folder, PostgresServer(folder) as server:
        yield server


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer | ExternalRedis]:
    """A Redis server that no test stops or kills."""
    if chosen() == EXTERNAL:
        yield ExternalRedis()
        return
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that the user whom PostgreSQL runs as can reach, which those of pytest are not."""
    with tempfile.TemporaryDirectory(prefix="ratchet-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def seed() -> int:
    """Of whatever the test leaves to chance; a failure shows it."""
    chosen_seed = int(os.environ.get("RATCHET_SEED", random.SystemRandom().randrange(10**6)))
    print(f"seed {chosen_seed} (repeat with RATCHET_SEED={chosen_seed})")
    return chosen_seed


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return f"t-{uuid.uuid4().hex[:10]}"


CLUSTER = "local-cluster[2,1,1024]"


class SparkMasters:
    """The one Spark context that a process can have, on the master that is asked for. It lasts until another is."""

    def __init__(self) -> None:
        self._master = ""
        self._context: Any = None

    def use(self, master: str) -> str:
        from framework.execution.spark_session import start_context

        if self._master != master:
            self.stop()
            self._context = start_context("ratchet tests", {"spark.master": master})
            self._master = master
        return master

    def stop(self) -> None:
        if self._context is not None:
            self._context.stop()
        self._context, self._master = None, ""


@pytest.fixture(scope="session")
def spark_masters() -> Iterator[SparkMasters]:
    masters = SparkMasters()
    yield masters
    masters.stop()


@pytest.fixture
def spark(spark_masters: SparkMasters) -> str:
    """Spark in this process, shared by every run of the test session; the value is its master."""
    return spark_masters.use("local[2]")


@pytest.fixture
def cluster(spark_masters: SparkMasters) -> str:
    """Spark with two executors, each a process of its own."""
    return spark_masters.use(CLUSTER)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that want the cluster come last: changing over costs a start of Spark each time."""

    def wants_cluster(item: pytest.Item) -> bool:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        return "cluster" in parameters.values() or "cluster" in getattr(item, "fixturenames", ())

    items.sort(key=wants_cluster)


class Topics:
    """Creates and fills topics."""

    def __init__(self, bootstrap_servers: str) -> None:
        self.bootstrap_servers = bootstrap_servers
        self.admin = AdminClient({"bootstrap.servers": bootstrap_servers})

    def create(self, topic: str, partitions: int = 1, *, replication: int = 1, **config: str) -> str:
        settings = {key.replace("_", "."): value for key, value in config.items()}
        self.admin.create_topics([NewTopic(topic, partitions, replication, config=settings)])[topic].result(30)
        return topic

    def alter(self, topic: str, **config: str) -> None:
        """Change settings of a topic, and wait until the broker says that they hold."""
        changes = [
            ConfigEntry(key.replace("_", "."), value, incremental_operation=AlterConfigOpType.SET)
            for key, value in config.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=changes)
        self.admin.incremental_alter_configs([resource])[resource].result(30)
        while True:
            found = self.admin.describe_configs([ConfigResource(ResourceType.TOPIC, topic)])
            entries = next(iter(found.values())).result(30)
            if all(entries[each.name].value == each.value for each in changes):
                return

    def producer(self, **settings: Any) -> Producer:
        """Idempotent, so that a request sent again neither doubles records nor changes their order."""
        return Producer(
            {
                "bootstrap.servers": self.bootstrap_servers,
                "enable.idempotence": True,
                **{key.replace("_", "."): each for key, each in settings.items()},
            }
        )

    def send(self, topic: str, values: Sequence[bytes | None], partition: int = 0) -> None:
        producer = self.producer()
        for value in values:
            producer.produce(topic, value, partition=partition)
            producer.poll(0)
        assert producer.flush(30) == 0

    def send_in_kafka_txn(
        self, topic: str, values: Sequence[bytes], partition: int = 0, *, end: Callable[[Producer], None] | None
    ) -> Producer:
        """Values inside a kafka_txn; ``end`` None leaves it open."""
        producer = self.producer(transactional_id=f"x-{uuid.uuid4().hex}")
        producer.init_transactions(30)
        producer.begin_transaction()
        for value in values:
            producer.produce(topic, value, partition=partition)
        producer.flush(30)
        if end is not None:
            end(producer)
        return producer


@pytest.fixture
def topics(servers: EmbeddedServers | ExternalServers) -> Topics:
    return Topics(servers.bootstrap_servers)
