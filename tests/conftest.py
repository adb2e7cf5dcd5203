"""Fixtures: one pair of real servers and one Spark context for the whole test run,
fresh names for each test.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from integration import (
    EmbeddedServers,
    KafkaBroker,
    MariaDbServer,
    NotOursError,
    PostgresServer,
    RedisServer,
    ServerError,
)
from integration.external import ExternalMariaDb, ExternalPostgres, ExternalRedis, ExternalServers
from integration.folder_permissions import open_folder
from integration.server_launcher import CHOICES, CONTAINERS, VARIABLE, chosen
from tests.kit import class_archives
from tests.kit.searching import usual_seed
from tests.kit.spark import CLUSTER, SparkMasters
from tests.kit.targets import USUAL
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

#: A broker that waits for the next test uses a quarter of the processor time: fewer threads look
#: for work, and no record is written twice a second to say that there is nothing to write.
QUIET_BROKER = {
    "background.threads": "2",
    "metadata.max.idle.interval.ms": "0",
    "num.io.threads": "2",
    "num.network.threads": "1",
}
MEMORY_FOLDER, MEMORY_MIN = "/dev/shm", 8 * 2**30

# A shared machine may be slow at any moment: a slow test has not failed.
# Fixtures are for all examples of a test. What a test suppresses itself replaces this list.
UNCHECKED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("all", deadline=None, suppress_health_check=UNCHECKED)
# The same code has the same result: new schedules are found by make test-all and the simulator.
settings.register_profile(
    USUAL, settings.get_profile("all"), derandomize=True, max_examples=settings.get_profile("all").max_examples // 10
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--servers",
        choices=CHOICES,
        default=chosen(),
        help="where servers run: child processes, containers, or somewhere else already (RATCHET_EXTERNAL_KAFKA, ...)",
    )


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("all" if config.getoption("--all") else USUAL)
    class_archives.use()
    KafkaBroker.common_settings = QUIET_BROKER
    if hasattr(config, "workerinput"):
        return
    if not config.option.collectonly:
        class_archives.make_beside("kafka", "zookeeper")
    os.environ[VARIABLE] = config.getoption("--servers")  # for the processes that tests start, too
    if chosen() == CONTAINERS:
        _make_containers_possible()
    elif "TMPDIR" not in os.environ and has_room(MEMORY_FOLDER):
        os.environ["TMPDIR"], tempfile.tempdir = MEMORY_FOLDER, None


def _make_containers_possible() -> None:
    """Find an engine, and an image of every kind; once, in the process that outlives all others."""
    try:
        from integration.images import IMAGES, find_image

        for kind in IMAGES:
            find_image(kind, lambda line: print(line, file=sys.stderr, flush=True))
    except ServerError as error:
        raise pytest.UsageError(f"the container suite cannot run: {error}") from None


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Remove the files in memory, unless there is a failure to look into. Make the archive for
    Spark, which takes more CPU time than it saves in the run that makes it."""
    if hasattr(session.config, "workerinput"):
        return
    if not session.config.option.collectonly:
        class_archives.make_beside("spark")
    factory: pytest.TempPathFactory = session.config._tmp_path_factory  # type: ignore[attr-defined]
    if exitstatus == 0 and os.environ.get("TMPDIR") == MEMORY_FOLDER:
        shutil.rmtree(factory.getbasetemp(), ignore_errors=True)


def has_room(folder: str) -> bool:
    """Whether servers can write to a file system in memory: it has room, is writable, and lets
    programs run.

    Servers sync all that they write, and no test cuts the power.
    """
    try:
        with open("/proc/meminfo") as lines:
            available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024
        runs = not os.statvfs(folder).f_flag & os.ST_NOEXEC  # some tests write programs
        return min(shutil.disk_usage(folder).free, available) > MEMORY_MIN and os.access(folder, os.W_OK) and runs
    except (OSError, StopIteration):
        return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    yield from _skipped_without_own_servers()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    yield from _skipped_without_own_servers()


def _skipped_without_own_servers() -> Iterator[None]:
    """Skip a test that wants servers of its own when servers are external:
    those cannot be killed.
    """
    try:
        yield
    except NotOursError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def quiet_logs() -> Iterator[None]:
    """Log warnings only: a failing test shows them, a passing one is quiet."""
    import logging

    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session", autouse=True)
def patient_databases() -> None:
    """Let the transactions of this process outlast a machine that stands still. A driver repeats an
    attempt whose transaction a database has ended; a test that writes without a driver cannot."""
    from sinks.sql import mysql_connections, postgres_table_base, sqlite_table_base

    mysql_connections.IDLE_TIMEOUT_S = int(PATIENCE_S)
    postgres_table_base.IDLE_TIMEOUT_MS = postgres_table_base.LOCK_TIMEOUT_MS = int(PATIENCE_S * 1_000)
    sqlite_table_base.BUSY_TIMEOUT_MS = int(PATIENCE_S * 1_000)


@pytest.fixture(scope="session", autouse=True)
def patient_searches() -> None:
    """Let a search for refused records in this process outlast a machine that stands still: one
    that ends early leaves out other records."""
    from framework.transactions import term_loop

    term_loop.SEARCH_MAX_MS = int(PATIENCE_S * 1_000)  # or half of the time that an attempt may take


@pytest.fixture(scope="session")
def servers(ratchet_servers: EmbeddedServers | ExternalServers) -> EmbeddedServers | ExternalServers:
    """Kafka and ZooKeeper that no test stops or kills."""
    return ratchet_servers


@pytest.fixture(scope="session")
def cleaning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topics]:
    """A broker that compacts and deletes as fast as it can."""
    fast = {
        "log.cleaner.backoff.ms": "100",
        "log.cleaner.min.cleanable.ratio": "0.01",
        "log.retention.check.interval.ms": "300",
        "log.segment.delete.delay.ms": "100",
        "log.initial.task.delay.ms": "100",
    }
    with KafkaBroker(tmp_path_factory.mktemp("cleaning"), settings=fast) as server:
        yield Topics(server.address)


@pytest.fixture(scope="session")
def postgres(ratchet_postgres: PostgresServer | ExternalPostgres) -> PostgresServer | ExternalPostgres:
    """A database server that no test stops or kills."""
    return ratchet_postgres


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """A database server of the test's own."""
    with open_folder() as folder, PostgresServer(folder / "postgres") as server:
        yield server


@pytest.fixture(scope="session")
def mariadb(ratchet_mariadb: MariaDbServer | ExternalMariaDb) -> MariaDbServer | ExternalMariaDb:
    """A database server that no test stops or kills."""
    return ratchet_mariadb


@pytest.fixture
def own_mariadb() -> Iterator[MariaDbServer]:
    """A database server of the test's own."""
    with open_folder() as folder, MariaDbServer(folder / "mariadb") as server:
        yield server


@pytest.fixture(scope="session")
def redis_server(ratchet_redis: RedisServer | ExternalRedis) -> RedisServer | ExternalRedis:
    """A Redis server that no test stops or kills."""
    return ratchet_redis


@pytest.fixture
def seed(request: pytest.FixtureRequest, in_all: bool) -> int:
    """The seed of everything random in the test; a failure shows it. In ``make test`` it is always
    the same: that of ``tests/kit/seeds.json``, for a test that looks for what few seeds show, or
    one that follows from the name of the test.
    """
    usual = random.SystemRandom().randrange(10**6) if in_all else usual_seed(request.node.name)
    chosen_seed = int(os.environ.get("RATCHET_SEED", usual))
    print(f"seed {chosen_seed} (repeat with RATCHET_SEED={chosen_seed})")
    return chosen_seed


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return f"t-{uuid.uuid4().hex[:10]}"


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


@pytest.fixture
def topics(servers: EmbeddedServers | ExternalServers) -> Topics:
    return Topics(servers.bootstrap_servers)


@pytest.fixture(params=["local", "collapsed", "spread", pytest.param("cluster", marks=pytest.mark.slow)])
def runner(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """An executor and its configuration: in this process; Spark with two threads, each batch in one
    task or spread over several; Spark with two executors.
    """
    if request.param == "local":
        return "local", {}
    request.getfixturevalue("cluster" if request.param == "cluster" else "spark")
    return "spark", {"topology.collapse.records.max": 10_000 if request.param == "collapsed" else 0}
