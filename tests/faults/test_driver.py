"""Faults of the driver: rows 1 to 4, 26, 30."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from framework.transactions import ZooKeeperStore
from tests.kit.fault_plugin import Faults
from tests.kit.jobs import Job
from tests.kit.stores import Feed, server_of
from tests.kit.targets import Often
from tests.kit.waiting import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.kills]


def die_at_each(job: Job, faults: Faults, boundaries: range) -> set[str]:
    """Run a driver for each boundary, and let it die there. Returns the names of the boundaries."""
    died: set[str] = set()
    with Feed(job.topics.bootstrap_servers, job.name):
        for number in boundaries:
            run = job.process(module="tests.kit.failing_run", **{"app.die.at": number})
            run.start()
            assert run.finish() == 9, run.tail()
            died.add(run.log.read_text().rpartition("dies at ")[2].strip())
            faults.injected()
    return died


@pytest.mark.slow
@pytest.mark.fault(1)
@pytest.mark.parametrize("values", ["opaque", "transactional"])
def test_a_driver_that_dies_at_some_step_boundaries_ends_exact(
    make_job: Callable[..., Job], faults: Faults, values: str
) -> None:
    """Each driver dies some boundaries further from its start than the one before."""
    job = make_job(values=values)
    boundaries = range(1, 28, 3)
    died = die_at_each(job, faults, boundaries)
    assert len(died) > len(boundaries) // 2, died
    job.finish()


@pytest.mark.fault(1)
@pytest.mark.slow
@pytest.mark.parametrize("store", ["postgres", "redis", "mysql"])
def test_a_driver_that_dies_at_every_step_boundary_ends_exact(
    make_job: Callable[..., Job], faults: Faults, store: str, tmp_path: Path
) -> None:
    with server_of(store, tmp_path) as (address, _):
        job = make_job(store, address=address)
        died = die_at_each(job, faults, range(1, 41))
        assert {"before ZooKeeper", "after ZooKeeper", "before the sink", "after the sink"} <= {
            " ".join(each.split()[:-1]) for each in died
        }
        job.finish()


def kill_often(job: Job, faults: Faults, times: int, chance: random.Random) -> None:
    run = job.process()
    with Feed(job.topics.bootstrap_servers, job.name):
        run.start()
        wait_for(lambda: job.committed() >= 2)

        def kill() -> None:
            assert run.kill(), run.tail()
            run.start()

        for _ in range(times):
            time.sleep(chance.uniform(0.0, 1.0))
            faults.recovery("driver killed and restarted", job.committed, kill)
    job.finish(run)


@pytest.mark.fault(2)
def test_a_driver_killed_again_ends_exact(
    make_job: Callable[..., Job], faults: Faults, seed: int, often: Often
) -> None:
    kill_often(make_job(), faults, often(1, 3), random.Random(seed))


@pytest.mark.fault(2)
@pytest.mark.slow
@pytest.mark.parametrize("values", ["opaque", "transactional"])
def test_a_driver_killed_fifty_times_ends_exact(
    make_job: Callable[..., Job], faults: Faults, seed: int, values: str
) -> None:
    kill_often(make_job(values=values), faults, 50, random.Random(seed))


@pytest.mark.fault(4)
def test_of_two_drivers_started_together_one_leads_and_the_other_takes_over(
    make_job: Callable[..., Job], faults: Faults
) -> None:
    job = make_job()
    both = [job.process(), job.process()]
    with Feed(job.topics.bootstrap_servers, job.name):
        for each in both:
            each.start()
        wait_for(lambda: job.committed() >= 5)
        leaders = [each for each in both if each.said("driver.leads")]
        assert len(leaders) == 1
        other = next(each for each in both if each not in leaders)
        other.wait_for(lambda: other.said("driver.standby"))
        faults.recovery("driver killed, standby takes over", job.committed, leaders[0].kill)
        assert other.said("driver.leads")
    job.finish()


@pytest.mark.fault(26)
def test_a_process_that_dies_after_two_of_four_commit_tasks_ends_exact(
    make_job: Callable[..., Job], faults: Faults, tmp_path: Path
) -> None:
    job = make_job(**{"app.parallelism": 4, "app.die.folder": str(tmp_path)})
    run = job.process(module="tests.kit.failing_run", **{"app.die.in.commit.task": 2})
    with Feed(job.topics.bootstrap_servers, job.name):
        run.start()
        assert run.finish() == 9, run.tail()
        faults.injected()
        assert "dies in commit task 2" in run.log.read_text()
        run.start()  # it does not die again: a file in the folder says that it has died
        before = job.committed()
        wait_for(lambda: job.committed() > before + 3)
    job.finish()


@pytest.mark.fault(30)
def test_a_clock_that_jumps_by_an_hour_changes_nothing(make_job: Callable[..., Job], faults: Faults) -> None:
    """The clock jumps forward and back, every 50 ms, as long as the driver lives."""
    job = make_job()
    run = job.process(module="tests.kit.jumping_run")
    with Feed(job.topics.bootstrap_servers, job.name):
        run.start()
        wait_for(lambda: job.committed() >= 20)
        assert run.said("the clock has jumped")
        faults.injected(20)
    assert isinstance(job.coordination, ZooKeeperStore)
    job.finish()
