"""Faults of Spark's processes, on a standalone cluster: rows 5 to 8;
and the flights on three servers of each kind.
"""

from __future__ import annotations

import contextlib
import glob
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from integration import EmbeddedServers, PostgresServer, Shape, SparkCluster
from integration.spark_cluster import descendants
from ratchet.demo import flights_data
from ratchet.demo.flights import TOPIC
from tests.kit.fault_plugin import Faults
from tests.kit.jobs import Job
from tests.kit.processes import RunProcess
from tests.kit.stores import Feed
from tests.kit.topics import Topics
from tests.kit.waiting import WATCH_S, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.kills, pytest.mark.spark]


@pytest.fixture(scope="module")
def spark_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    with SparkCluster(tmp_path_factory.mktemp("spark"), 2) as cluster:
        yield cluster


@pytest.fixture
def on_cluster(
    make_job: Callable[..., Job], own_postgres: PostgresServer, spark_cluster: SparkCluster
) -> Callable[..., Job]:
    """Makes a job for the cluster.

    Its figures are in PostgreSQL, since SQLite works on one host only.
    """

    def make(**settings: Any) -> Job:
        return make_job(
            "postgres",
            address=own_postgres.dsn,
            **{
                **spark_cluster.settings,
                "spark.executor.memory": "512m",
                "topology.message.timeout.secs": 15,
                "app.shared": True,  # both workers are on this host
                **settings,
            },
        )

    return make


def started(job: Job) -> RunProcess:
    run = job.process(executor="spark")
    run.start()
    assert run.wait_for(lambda: job.committed() >= 3), run.tail()
    return run


@pytest.mark.fault(5)
@pytest.mark.slow
@pytest.mark.parametrize("collapse", [0, 20_000])
def test_a_killed_executor_costs_attempts_and_no_record(
    on_cluster: Callable[..., Job], spark_cluster: SparkCluster, faults: Faults, seed: int, collapse: int
) -> None:
    chance = random.Random(seed)
    job = on_cluster(**{"topology.collapse.records.max": collapse})
    with Feed(job.topics.bootstrap_servers, job.name):
        run = started(job)
        for _ in range(5):
            victim = chance.choice(spark_cluster.await_executors(2))
            time.sleep(chance.uniform(0, 0.5))
            faults.recovery("executor killed", job.committed, lambda victim=victim: os.kill(victim, signal.SIGKILL))  # type: ignore[misc]
        run.kill()
    finish(job, spark_cluster)


@pytest.mark.fault(6)
@pytest.mark.slow
@pytest.mark.parametrize("collapse", [0, 20_000])
def test_a_killed_python_worker_costs_attempts_and_no_record(
    on_cluster: Callable[..., Job], spark_cluster: SparkCluster, faults: Faults, seed: int, collapse: int
) -> None:
    """Workers of jobs, and the worker of the task that stays for small batches."""
    chance = random.Random(seed)
    job = on_cluster(**{"topology.collapse.records.max": collapse})
    with Feed(job.topics.bootstrap_servers, job.name):
        run = started(job)
        for _ in range(5):
            wait_for(lambda: bool(spark_cluster.python_workers()))
            victim = chance.choice(spark_cluster.python_workers())

            def kill(victim: int = victim) -> None:
                try:
                    os.kill(victim, signal.SIGKILL)
                except ProcessLookupError:
                    os.kill(spark_cluster.python_workers()[0], signal.SIGKILL)

            faults.recovery("Python worker killed", job.committed, kill)
        run.kill()
    finish(job, spark_cluster)


@pytest.mark.fault(6)
@pytest.mark.slow
def test_a_worker_that_runs_out_of_memory_stops_the_topology_after_max_attempts(
    topics: Topics,
    name: str,
    spark_cluster: SparkCluster,
    servers: EmbeddedServers,
    own_postgres: PostgresServer,
    tmp_path: Path,
    faults: Faults,
) -> None:
    """``spark.executor.pyspark.memory`` sets RLIMIT_AS;
    the bolt asks for more than that at every try.
    """
    topics.send(topics.create(name), [b"x"] * 10)
    settings = {
        "app.topic": name,
        "app.kafka": servers.bootstrap_servers,
        "app.database": own_postgres.dsn,
        **spark_cluster.settings,
        "spark.executor.memory": "512m",
        "spark.executor.pyspark.memory": "2g",
        "topology.max.attempts": 3,
        "transactional.zookeeper.servers": servers.zookeeper,
    }
    run = RunProcess(tmp_path / "run.log", "tests.kit.greedy:topology", settings)
    run.start()
    faults.injected(3)
    try:
        assert run.finish() == 1, run.tail()
        assert "MemoryError" in run.tail()
        assert "3 attempts failed" in run.tail()
    finally:
        run.end()


@pytest.mark.fault(7)
@pytest.mark.slow
def test_a_paused_executor_that_wakes_after_its_attempt_writes_nothing(
    on_cluster: Callable[..., Job], spark_cluster: SparkCluster, faults: Faults, seed: int
) -> None:
    """The SIGSTOP lasts longer than Spark and the batch wait.

    Others do its work; then it goes on where it was.
    """
    chance = random.Random(seed)
    job = on_cluster(
        **{
            "topology.collapse.records.max": 0,
            "topology.message.timeout.secs": 12,
            "spark.network.timeout": "8s",
            "spark.network.timeoutInterval": "2s",
            "spark.executor.heartbeatInterval": "1s",
        }
    )
    with Feed(job.topics.bootstrap_servers, job.name):
        run = started(job)
        for _ in range(2):
            victim = chance.choice(spark_cluster.await_executors(2))
            frozen = [victim, *descendants(victim)]
            before = job.committed()
            for pid in frozen:
                os.kill(pid, signal.SIGSTOP)
            try:
                wait_for(lambda before=before: job.committed() >= before + 6)  # type: ignore[misc]
            finally:
                for pid in frozen:
                    wake(pid)
            faults.injected()
            held = job.committed()
            wait_for(lambda held=held: job.committed() >= held + 4)  # type: ignore[misc]
        run.kill()
    finish(job, spark_cluster)


def wake(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # Spark may have ended it
        os.kill(pid, signal.SIGCONT)


@pytest.mark.fault(8)
@pytest.mark.slow
def test_deleted_shuffle_files_and_blocks_fail_attempts_and_lose_no_record(
    on_cluster: Callable[..., Job], spark_cluster: SparkCluster, faults: Faults
) -> None:
    job = on_cluster(**{"topology.collapse.records.max": 0})

    def delete() -> None:
        """For 2 s, delete every file that appears in the executors' folders."""
        until = time.monotonic() + 2 * WATCH_S
        deleted = 0
        while time.monotonic() < until:
            for worker in spark_cluster.workers:
                # folders may vanish meanwhile
                for file in glob.glob(f"{worker.folder}/java/spark-*/executor-*/blockmgr-*/*/*"):
                    Path(file).unlink(missing_ok=True)
                    deleted += 1
        assert deleted

    with Feed(job.topics.bootstrap_servers, job.name):
        run = started(job)
        for _ in range(3):
            faults.recovery("shuffle files deleted for 2 s", job.committed, delete)
        run.kill()
    finish(job, spark_cluster)


def finish(job: Job, spark_cluster: SparkCluster) -> None:
    """Catch up without the cluster: the figures do not depend on
    the executor that computed them.
    """
    wait_for(lambda: not spark_cluster.executors())
    job.finish(job.process())


@pytest.mark.fault(5, 9, 14)
@pytest.mark.slow
def test_the_flights_on_a_cluster_are_exact_after_one_server_of_each_kind_is_killed(
    tmp_path: Path, own_postgres: PostgresServer, faults: Faults, seed: int
) -> None:
    """The topology and the figures of the demo; an executor,
    a broker and a ZooKeeper server are killed in the run.
    """
    chance = random.Random(seed)
    with (
        EmbeddedServers(tmp_path / "servers", shape=Shape(3, 3)) as servers,
        SparkCluster(tmp_path / "spark", 2) as spark,
    ):
        flights_data.load(servers.bootstrap_servers, TOPIC)
        settings = {
            "app.kafka": servers.bootstrap_servers,
            "app.database": own_postgres.dsn,
            "app.batch": 4_000,
            **spark.settings,
            "spark.executor.memory": "512m",
            "topology.max.spout.pending": 2,
            "transactional.zookeeper.servers": servers.zookeeper,
            "transactional.zookeeper.session.timeout.secs": 4,
        }
        run = RunProcess(tmp_path / "run.log", "ratchet.demo.flights:topology", settings)

        def committed() -> int:
            with psycopg.connect(own_postgres.dsn) as database:
                try:
                    row = database.execute(
                        "SELECT min(done) FROM _ratchet_headers WHERE state IN ('carriers', 'routes')"
                    ).fetchone()
                except psycopg.errors.UndefinedTable:
                    return 0
            return int(row[0] or 0) if row is not None else 0

        try:
            run.start("--until-caught-up")
            run.wait_for(lambda: committed() >= 5)
            executor = chance.choice(spark.await_executors(2))
            os.kill(executor, signal.SIGKILL)
            run.wait_for(lambda: committed() >= 20)
            chance.choice(servers.brokers).kill()
            run.wait_for(lambda: committed() >= 35)
            chance.choice(servers.zookeepers).kill()
            faults.injected(3)
            assert run.finish(300) == 0, run.tail()
        finally:
            run.end()
    with psycopg.connect(own_postgres.dsn) as database:
        carriers = database.execute(
            "SELECT carrier, flights, total_arr_delay, max_arr_delay, cancelled FROM carriers"
        ).fetchall()
        routes = database.execute("SELECT route, flights FROM routes").fetchall()
    wanted_carriers, wanted_routes = flights_data.expected()
    assert {carrier: tuple(figures) for carrier, *figures in carriers} == wanted_carriers
    assert dict(routes) == wanted_routes
    shutil.rmtree(tmp_path / "servers", ignore_errors=True)
