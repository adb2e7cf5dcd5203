"""Fixtures of the fault tests: a topology with drivers as processes,
on servers that tests may kill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from integration import EmbeddedServers, ZooKeeperServer
from tests.kit.jobs import Job
from tests.kit.topics import Topics


@pytest.fixture
def zookeeper(tmp_path: Path) -> Iterator[ZooKeeperServer]:
    """A ZooKeeper server of the test's own, which it may kill."""
    with ZooKeeperServer(tmp_path / "zookeeper") as server:
        yield server


@pytest.fixture
def make_job(servers: EmbeddedServers, topics: Topics, name: str, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Makes a job: opaque values in SQLite, and the shared servers, unless told otherwise."""
    made: list[Job] = []

    def make(
        store: str = "sqlite",
        values: str = "opaque",
        *,
        zookeeper: str | None = None,
        address: str | None = None,
        of_topics: Topics | None = None,
        **settings: Any,
    ) -> Job:
        where = zookeeper or servers.zookeeper
        job = Job(
            of_topics or topics, name, store, values, tmp_path, where, address or str(tmp_path / "x.db"), **settings
        )
        made.append(job)
        return job

    yield make
    for job in made:
        job.close()
