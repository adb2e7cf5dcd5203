"""A topology on real servers, its drivers processes of their own, and what tests do with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from framework.inspect.verify import verify
from framework.topology import Topology
from framework.transactions import ZooKeeperStore, committed_txid
from tests.kit.processes import RunProcess
from tests.kit.stores import PARTITIONS, expected, found, topology
from tests.kit.topics import Topics

SESSION_S = 2


class Job:
    """The topology of ``tests.kit.stores`` on one store, its drivers processes of their own.

    ``zookeeper`` and ``address``: where the drivers reach ZooKeeper and the store, perhaps through
    a proxy. ``watched``: where the test itself reaches ZooKeeper; ``zookeeper`` by default.
    """

    def __init__(
        self,
        topics: Topics,
        name: str,
        store: str,
        values: str,
        folder: Path,
        zookeeper: str,
        address: str,
        *,
        watched: str | None = None,
        replication: int = 1,
        **settings: Any,
    ) -> None:
        topics.create(name, PARTITIONS, replication=replication)
        self.topics, self.name, self.folder = topics, name, folder
        self._watched = watched or zookeeper
        self._coordination: ZooKeeperStore | None = None
        self.settings: dict[str, Any] = {
            "app.topic": name,
            "app.kafka": topics.bootstrap_servers,
            "app.store": store,
            "app.address": address,
            "app.values": values,
            "app.folder": str(folder / "files"),
            "transactional.zookeeper.servers": zookeeper,
            "transactional.zookeeper.session.timeout.secs": SESSION_S,
            "topology.max.spout.pending": 3,
            "topology.max.attempts": 1_000,
            **settings,
        }
        self.topology: Topology = topology(self.settings)
        self.runs: list[RunProcess] = []

    def process(self, *, module: str = "framework.run", executor: str = "local", **settings: Any) -> RunProcess:
        """Another driver of the topology, not started."""
        log = self.folder / f"run-{len(self.runs)}.log"
        made = RunProcess(
            log, "tests.kit.stores:topology", {**self.settings, **settings}, module=module, executor=executor
        )
        self.runs.append(made)
        return made

    @property
    def coordination(self) -> ZooKeeperStore:
        """The test's own connection to ZooKeeper; a request waits while no server is there."""
        if self._coordination is None:
            self._coordination = ZooKeeperStore(self._watched, "/ratchet")
        return self._coordination

    def committed(self) -> int:
        """The last committed txid."""
        return committed_txid(self.coordination, self.name)

    def check(self) -> None:
        """Compare all sinks with the oracle, which shares no code with the framework,
        and ``verify``.
        """
        words, numbers, rows = expected(self.topics.bootstrap_servers, self.name)
        assert found(self.topology) == (words, numbers, rows)
        report = verify(self.topology, self.coordination, {})
        assert report.right, report.lines()
        assert report.states[2].compared == rows.total()

    def finish(self, run: RunProcess | None = None) -> None:
        """Kill every driver that still runs, let ``run`` or a new driver catch up,
        and ``check``.
        """
        for each in self.runs:
            if each.process is not None and each.process.poll() is None:
                each.kill()
        last = run or self.process()
        last.start("--until-caught-up")
        assert last.finish() == 0, last.tail()
        self.check()

    def close(self) -> None:
        """Kill all processes that are left, and close what the test opened."""
        for each in self.runs:
            each.end()
        for state in self.topology.states:
            state.close()
        if self._coordination is not None:
            self._coordination.close()
