"""The flights end exact, though the driver, the broker and ZooKeeper are killed during the run."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration import EmbeddedServers
from ratchet.demo import flights_data
from ratchet.demo.flights import TOPIC
from tests.kit.flights import FlightsRun, take_first
from tests.kit.targets import Often

pytestmark = [pytest.mark.integration, pytest.mark.kills]


@pytest.fixture(scope="module")
def flights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServers]:
    """Servers of this module's own, since tests here kill them, with the flights in the topic: in
    ``make test-all`` all of them."""
    with pytest.MonkeyPatch.context() as patch, EmbeddedServers(tmp_path_factory.mktemp("flights")) as servers:
        if not request.config.getoption("--all"):
            take_first(30_000, patch)
        flights_data.load(servers.bootstrap_servers, TOPIC)
        yield servers


@pytest.mark.slow
@pytest.mark.parametrize("spout", ["opaque", "transactional"])
@pytest.mark.fault(2)
@pytest.mark.behaviour("6.2")
def test_driver_killed_again_and_again_ends_exact(
    flights: EmbeddedServers, tmp_path: Path, spout: str, seed: int
) -> None:
    chance = random.Random(seed)
    kills = 20
    run = FlightsRun(tmp_path, flights.bootstrap_servers, flights.zookeeper, spout, 1_000, "/driver")
    killed, moments = 0, []
    try:
        while killed < kills:
            before = run.committed_txid()
            run.start()
            if killed and chance.random() < 0.1:  # now and then, kill it while it starts
                _pause(run, chance.uniform(0.5, 4.0))
            else:
                run.wait_for(lambda: run.said("driver.leads"))
                if not killed:  # the first driver commits at least one transaction
                    run.wait_for(lambda before=before: run.committed_txid() > before)  # type: ignore[misc]
                _pause(run, chance.uniform(0.0, 1.6))
            if not run.kill():
                break
            killed += 1
            moments.append(run.committed_txid() - before)
        assert killed == kills, f"the run ended after {killed} kills: make batches smaller"
        run.start()
        assert run.finish() == 0, run.tail()
        print(f"{killed} kills; transactions committed in each life: {moments}")
        assert sum(moments) > 0
        run.check_exact()
    finally:
        run.end()


def _pause(run: FlightsRun, seconds: float) -> None:
    """Wait for time to pass, and for nothing else: the kill comes at a random moment."""
    assert run.process is not None
    with contextlib.suppress(subprocess.TimeoutExpired):
        run.process.wait(seconds)


@pytest.mark.parametrize(
    ("server", "spout"),
    [
        ("kafka", "opaque"),
        pytest.param("zookeeper", "transactional", marks=pytest.mark.slow),
        pytest.param("kafka", "transactional", marks=pytest.mark.slow),
        pytest.param("zookeeper", "opaque", marks=pytest.mark.slow),
    ],
)
@pytest.mark.fault(9, 15)
def test_server_killed_and_restarted_in_mid_run_goes_on_by_itself(
    flights: EmbeddedServers, tmp_path: Path, server: str, spout: str, in_all: bool, often: Often
) -> None:
    size = often(2_000, 4_000)
    run = FlightsRun(tmp_path, flights.bootstrap_servers, flights.zookeeper, spout, size, f"/{server}", spark=in_all)
    victim = flights.kafka if server == "kafka" else flights.zookeeper_server
    try:
        run.start()
        for txid in (5, 25)[: often(1, 2)]:
            assert run.wait_for(lambda txid=txid: run.committed_txid() >= txid), run.tail()  # type: ignore[misc]
            victim.kill()
            victim.start()
        assert run.finish() == 0, run.tail()
        run.check_exact()
    finally:
        run.end()


@pytest.mark.slow
@pytest.mark.behaviour("6.2")
def test_sigterm_stops_cleanly_and_a_second_run_resumes(flights: EmbeddedServers, tmp_path: Path, in_all: bool) -> None:
    run = FlightsRun(tmp_path, flights.bootstrap_servers, flights.zookeeper, "opaque", 4_000, "/sigterm", spark=in_all)
    try:
        run.start()
        assert run.wait_for(lambda: run.committed_txid() >= 3), run.tail()
        assert run.process is not None
        run.process.send_signal(signal.SIGTERM)
        assert run.finish(60) == 0, run.tail()
        stopped_at = run.committed_txid()
        assert 3 <= stopped_at < 85
        run.start()
        assert run.finish() == 0, run.tail()
        run.check_exact()
    finally:
        run.end()
