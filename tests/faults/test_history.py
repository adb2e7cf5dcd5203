"""The record for good, of drivers that die and are killed: each closed transaction once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from framework.transactions.documents import read_history, read_incarnation
from sinks.transaction_history_table import history_table
from tests.kit.fault_plugin import Faults
from tests.kit.jobs import Job
from tests.kit.stores import Feed
from tests.kit.waiting import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.kills]


def check_records(job: Job, address: str) -> None:
    """The table has the records of ZooKeeper, which has all of them, and nothing else."""
    recorded = read_history(job.coordination, job.name)
    assert [each.txid for each in recorded] == list(range(1, job.committed() + 1))
    target = history_table(address, job.name)
    incarnation = read_incarnation(job.coordination, job.name)
    held = [target.read(incarnation, txid) for txid in range(1, job.committed() + 10)]
    target.close()
    assert [each.record for each in held if each is not None] == recorded


@pytest.mark.slow
@pytest.mark.fault(1)
def test_drivers_that_die_around_each_step_leave_each_record_once(
    make_job: Callable[..., Job], faults: Faults, tmp_path: Path
) -> None:
    """The steps of the copying are among those of the sinks: its table is a backend, too."""
    address = f"sqlite:{tmp_path / 'history.db'}"
    job = make_job(**{"topology.history.table": address})
    with Feed(job.topics.bootstrap_servers, job.name):
        for number in range(1, 40, 3):
            run = job.process(module="tests.kit.failing_run", **{"app.die.at": number})
            run.start()
            assert run.finish() == 9, run.tail()
            faults.injected()
    job.finish()
    check_records(job, address)


@pytest.mark.slow
@pytest.mark.fault(2)
def test_a_driver_that_is_killed_a_few_times_leaves_each_record_once(
    make_job: Callable[..., Job], faults: Faults, tmp_path: Path
) -> None:
    address = f"sqlite:{tmp_path / 'history.db'}"
    job = make_job(**{"topology.history.table": address})
    run = job.process()
    with Feed(job.topics.bootstrap_servers, job.name):
        for number in range(4):
            run.start()
            wait_for(lambda least=3 * number + 3: job.committed() >= least)
            assert run.kill(), run.tail()
            faults.injected()
    job.finish(run)
    check_records(job, address)
