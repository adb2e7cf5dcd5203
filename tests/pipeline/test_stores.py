"""The stores under real processes: a paused leader with a standby driver, and random kills."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from integration import EmbeddedServers, ZooKeeperServer
from integration.server import Server
from tests.kit.jobs import Job
from tests.kit.processes import RunProcess
from tests.kit.stores import Feed, server_of
from tests.kit.topics import Topics
from tests.kit.waiting import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.kills]
#: Kills per store and kind of values; by default, the target decides it.
KILLS = os.environ.get("RATCHET_SINK_KILLS")

#: ``make test`` runs one store; the others are slow.
SLOW = pytest.mark.slow


@pytest.fixture(params=["postgres", *(pytest.param(each, marks=SLOW) for each in ("sqlite", "redis", "mysql"))])
def store(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sink(store: str, tmp_path: Path) -> Iterator[tuple[str, Server | None]]:
    with server_of(store, tmp_path) as made:
        yield made


@pytest.fixture
def zookeeper(tmp_path: Path) -> Iterator[ZooKeeperServer]:
    server = ZooKeeperServer(tmp_path / "zookeeper")
    server.start()
    yield server
    server.stop()


@pytest.fixture(params=["opaque", pytest.param("transactional", marks=pytest.mark.slow)])
def job(
    request: pytest.FixtureRequest,
    servers: EmbeddedServers,
    topics: Topics,
    name: str,
    store: str,
    sink: tuple[str, Server | None],
    zookeeper: ZooKeeperServer,
    tmp_path: Path,
) -> Iterator[Job]:
    made = Job(topics, name, store, request.param, tmp_path, zookeeper.address, sink[0])
    yield made
    made.close()


def pause(run: RunProcess, job: Job) -> None:
    """SIGSTOP the driver, but not while it holds the lock of a SQLite file:
    no other process could take that. Each of its threads must have stopped before the lock is
    tried: one that is in the kernel, about to take the lock, takes it first.
    """
    while True:
        run.freeze()
        if job.settings["app.store"] != "sqlite":
            return
        with closing(sqlite3.connect(job.settings["app.address"], timeout=0.5, isolation_level=None)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("ROLLBACK")
                return
            except sqlite3.OperationalError:
                run.signal(signal.SIGCONT)
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.behaviour("3.3")
@pytest.mark.parametrize("job", ["opaque"], indirect=True)
@pytest.mark.parametrize("store", ["postgres", "sqlite", "redis", "mysql"], indirect=True)
@pytest.mark.fault(3)
@pytest.mark.rule("C14")
def test_a_paused_leader_that_wakes_changes_nothing_and_says_so(job: Job) -> None:
    """SIGSTOP for longer than its session, in mid-run; a standby driver takes over;
    then SIGCONT.
    """
    first, second = job.process(), job.process()
    second.start("--standby")
    second.wait_for(lambda: second.said("waits for another driver to lead"))
    with Feed(job.topics.bootstrap_servers, job.name, pause_s=0.01):
        first.start()
        wait_for(lambda: job.committed() >= 5)
        pause(first, job)
        held = job.committed()
        second.wait_for(lambda: second.said("driver.leads"))
        wait_for(lambda: job.committed() >= held + 5)
        before = [state.read_header().epoch for state in job.topology.states]
        first.signal(signal.SIGCONT)
        first.wait_for(lambda: first.said("driver.stepped_down"))
        wait_for(lambda: job.committed() >= held + 10)
        # the second leads as before; it may have waited for a lock of the first, and led again
        assert [state.read_header().epoch for state in job.topology.states] == before
    second.signal(signal.SIGTERM)
    assert second.finish() == 0
    last = job.process()
    first.kill()
    last.start("--until-caught-up")
    assert last.finish() == 0, last.tail()
    job.check()


@pytest.mark.slow
@pytest.mark.behaviour("3.1", "3.2")
@pytest.mark.fault(2, 9, 21)
def test_random_kills_of_driver_sink_and_zookeeper_end_exact(
    job: Job, sink: tuple[str, Server | None], zookeeper: ZooKeeperServer, seed: int
) -> None:
    kills = int(KILLS or 4)
    chance = random.Random(seed)
    servers: list[Server] = [zookeeper, *([sink[1]] if sink[1] is not None else [])]
    run = job.process()
    run.start()
    done = 0
    with Feed(job.topics.bootstrap_servers, job.name):
        wait_for(lambda: job.committed() >= 2)
        while done < kills:
            time.sleep(chance.uniform(0.1, 2.0))
            victim: RunProcess | Server = chance.choice([run, run, *servers])
            if isinstance(victim, RunProcess):
                assert victim.kill(), f"the driver had ended by itself:\n{victim.tail()}"
                victim.start()
                if chance.random() < 0.7:
                    job_committed = _committed(job)
                    wait_for(lambda before=job_committed: _committed(job) > before, 90)  # type: ignore[misc]
            else:
                victim.kill()
                time.sleep(chance.uniform(0, 1.0))
                victim.start()
            done += 1
    assert run.process is not None
    if run.process.poll() is None:
        run.kill()
    run.start("--until-caught-up")
    assert run.finish() == 0, run.tail()
    job.check()


def _committed(job: Job) -> int:
    return int(job.committed())
