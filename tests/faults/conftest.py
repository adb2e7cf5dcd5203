"""Fixtures of the fault tests: a topology with drivers as processes,
on servers that tests may kill.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from integration import EmbeddedServers, ZooKeeperServer
from integration.folder_permissions import open_folder
from tests.kit.jobs import Job
from tests.kit.topics import Topics


class Disk:
    """A small file system that can be filled. ``path``: where it is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def fill(self) -> None:
        """Leave no room."""
        with open(self._ballast, "wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))

    def empty(self) -> None:
        """Make room again."""
        self._ballast.unlink()


@pytest.fixture
def small_disk() -> Iterator[Disk]:
    """A file system of 8 MB that every user can reach."""
    with open_folder() as parent:
        folder = parent / "disk"
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8m", "ratchet", str(folder)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"this fault needs a small file system, which root can mount: {done.stderr}"
        yield Disk(folder)
        subprocess.run(["umount", "-l", str(folder)], check=True)


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
