"""Faults of ZooKeeper: rows 9 to 13, and 28 for its documents."""

from __future__ import annotations

import random
import re
import shutil
import time
from collections.abc import Callable

import pytest
from kazoo.client import KazooClient

from framework import submit
from framework.transactions import ZooKeeperStore
from integration import TcpProxy, ZooKeeperServer
from tests.kit.fault_plugin import Faults
from tests.kit.jobs import Job
from tests.kit.stores import Feed
from tests.kit.striking import lose_a_reply, strike
from tests.kit.targets import Often
from tests.kit.waiting import PATIENCE_S, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.kills]


@pytest.mark.slow
@pytest.mark.fault(9)
def test_zookeeper_killed_around_commits_loses_no_transaction(
    make_job: Callable[..., Job],
    zookeeper: ZooKeeperServer,
    faults: Faults,
    seed: int,
    often: Often,
) -> None:
    def bounce() -> None:
        zookeeper.kill()
        zookeeper.start()

    job = make_job(zookeeper=zookeeper.address)
    strike(job, faults, "ZooKeeper killed and restarted", bounce, times=often(2, 3), chance=random.Random(seed))


@pytest.mark.fault(10)
@pytest.mark.parametrize("silent_s", [1.0, pytest.param(8.0, marks=pytest.mark.slow)])
def test_nothing_is_committed_while_zookeeper_is_silent(
    make_job: Callable[..., Job], zookeeper: ZooKeeperServer, faults: Faults, silent_s: float
) -> None:
    """The silence is shorter, or longer, than the session, which lasts 2 s."""
    with TcpProxy(zookeeper.address) as link:
        job = make_job(zookeeper=link.address, watched=zookeeper.address)
        run = job.process()
        with Feed(job.topics.bootstrap_servers, job.name):
            run.start()
            wait_for(lambda: job.committed() >= 5)

            def fall_silent() -> None:
                link.black_hole()
                before = job.committed()
                time.sleep(silent_s)
                # ZooKeeper may still be writing what has reached it
                assert job.committed() <= before + job.settings["topology.max.spout.pending"]
                link.heal()

            faults.recovery(f"ZooKeeper silent for {silent_s:g} s", job.committed, fall_silent)
            assert run.process is not None and run.process.poll() is None
        job.finish(run)


@pytest.mark.fault(11)
@pytest.mark.slow
def test_a_session_that_expires_ends_a_term_and_another_begins(
    make_job: Callable[..., Job], zookeeper: ZooKeeperServer, faults: Faults
) -> None:
    """The test opens the same session on another connection, and closes it there:
    ZooKeeper ends it for both.
    """
    job = make_job(zookeeper=zookeeper.address)
    store = ZooKeeperStore(zookeeper.address, "/ratchet", session_timeout_s=4)
    with Feed(job.topics.bootstrap_servers, job.name), submit(job.topology, {}, store, "local") as run:
        wait_for(lambda: run.status().committed_txid >= 3)

        def expire() -> None:
            thief = KazooClient(zookeeper.address, client_id=store._client.client_id, timeout=4)
            thief.start(PATIENCE_S)
            thief.stop()
            thief.close()

        for expired in (1, 2, 3):
            faults.recovery("ZooKeeper session expired", lambda: run.status().committed_txid, expire)
            assert run.status().epoch == expired + 1
    store.close()
    job.finish()


@pytest.mark.fault(12)
@pytest.mark.slow
def test_a_write_whose_reply_is_lost_is_recognised_as_its_own(
    make_job: Callable[..., Job], zookeeper: ZooKeeperServer, faults: Faults, often: Often
) -> None:
    with TcpProxy(zookeeper.address) as link:
        job = make_job(zookeeper=link.address, watched=zookeeper.address)
        run = strike(job, faults, "ZooKeeper's reply lost", lose_a_reply(link), times=often(3, 5))
        assert run.said("zookeeper.reply_lost")
        assert not run.said("driver.stepped_down")


@pytest.mark.fault(13)
@pytest.mark.parametrize("how", [pytest.param("wiped", marks=pytest.mark.slow), "rolled back"])
def test_a_zookeeper_that_went_back_under_a_live_driver_stops_it(
    make_job: Callable[..., Job], zookeeper: ZooKeeperServer, faults: Faults, how: str
) -> None:
    """The server refuses a client that has seen newer data.

    The driver opens a new session, reads again, and stops.
    """
    job = make_job(zookeeper=zookeeper.address)
    run = job.process()
    data, kept = zookeeper.folder / "data", zookeeper.folder / "kept"
    with Feed(job.topics.bootstrap_servers, job.name):
        run.start()
        wait_for(lambda: job.committed() >= 5)
        if how == "rolled back":
            zookeeper.stop()
            shutil.copytree(data, kept)
            zookeeper.start()
            wait_for(lambda: job.committed() >= 15)
        before = job.committed()
        zookeeper.kill()
        shutil.rmtree(data)
        if how == "rolled back":
            kept.rename(data)
        zookeeper.start()
        faults.injected()
        assert run.finish(90) != 0, run.tail()
    assert re.search(
        "state was removed|state went back|nodes appeared or vanished|sink is ahead of the topology|state is older",
        run.tail(),
    )
    for state in job.topology.states[:2]:
        header = state.read_header()
        assert header.done >= before, "a sink went back to a transaction of the past"


@pytest.mark.fault(28)
@pytest.mark.slow
def test_a_flipped_bit_in_a_plan_stops_the_next_start_and_is_named(
    make_job: Callable[..., Job], zookeeper: ZooKeeperServer, faults: Faults, seed: int
) -> None:
    job = make_job(zookeeper=zookeeper.address)
    run = job.process()
    with Feed(job.topics.bootstrap_servers, job.name):
        run.start()
        wait_for(lambda: job.committed() >= 3)
        run.kill()
    client = KazooClient(zookeeper.address)
    client.start(PATIENCE_S)
    base = f"/ratchet/{job.name}/user/spout"
    plan = f"{base}/{max(client.get_children(base), key=int)}"
    data = bytearray(client.get(plan)[0])
    bit = random.Random(seed).randrange(len(data) * 8)
    data[bit // 8] ^= 1 << bit % 8
    client.set(plan, bytes(data))
    client.stop()
    client.close()
    faults.injected()
    run.start("--until-caught-up")
    assert run.finish() != 0, f"bit {bit} of {plan}"
    assert f"{job.name}/user/spout/{plan.rpartition('/')[2]}" in run.tail()
