"""The flights run as a process of its own, for tests that kill it."""

from __future__ import annotations

import itertools
import sqlite3
from pathlib import Path

import pytest

from framework.transactions import TransactionalState, ZooKeeperStore
from ratchet.demo import flights_data
from tests.kit.processes import RunProcess


def take_first(count: int, patch: pytest.MonkeyPatch) -> None:
    """Make the first flights all there are, where they are sent and where they are counted."""
    every = flights_data.flights
    patch.setattr(flights_data, "flights", lambda: itertools.islice(every(), count))
    patch.setattr(flights_data, "FLIGHTS", count)


class FlightsRun(RunProcess):
    """Runs the flights against given servers until all are committed; on Spark,
    unless ``spark`` is false.
    """

    def __init__(
        self, folder: Path, kafka: str, zookeeper: str, spout: str, batch: int, root: str, *, spark: bool = True
    ) -> None:
        self.database = folder / "flights.db"
        self.zookeeper = zookeeper
        self.root = root
        self.topology_id = f"flights-{spout}"
        settings = {
            "app.kafka": kafka,
            "app.database": self.database,
            "app.spout": spout,
            "app.batch": batch,
            "transactional.zookeeper.servers": zookeeper,
            "transactional.zookeeper.session.timeout.secs": 2,
            "transactional.zookeeper.root": root,
            "topology.max.spout.pending": 2,
            "spark.master": "local[2]",
        }
        executor = "spark" if spark else "local"
        super().__init__(folder / "run.log", "ratchet.demo.flights:topology", settings, executor=executor)

    def start(self, *options: str) -> None:
        super().start("--until-caught-up", *options)

    def committed_txid(self) -> int:
        """The last finished txid, as the database has it; 0 before there is one."""
        if not self.database.exists():
            return 0
        try:
            with sqlite3.connect(self.database) as connection:
                row = connection.execute("SELECT min(done) FROM _ratchet_headers").fetchone()
        except sqlite3.OperationalError:
            return 0
        return row[0] or 0

    def check_exact(self) -> None:
        """Compare the figures with the file, and check the invariants
        that are visible from outside.
        """
        carriers, routes = flights_data.committed(self.database)
        wanted_carriers, wanted_routes = flights_data.expected()
        assert carriers == wanted_carriers
        assert routes == wanted_routes
        store = ZooKeeperStore(self.zookeeper, self.root)
        state = TransactionalState(store, self.topology_id)
        currtx = state.get_data("coordinator/currtx")
        documents = state.children("user/flights")
        store.close()
        with sqlite3.connect(self.database) as connection:
            done = [row[0] for row in connection.execute("SELECT done FROM _ratchet_headers")]
            newest = connection.execute("SELECT max(_txid) FROM carriers").fetchone()[0]
        assert done == [currtx - 1, currtx - 1]  # invariant 6
        assert newest <= currtx - 1
        assert str(currtx - 1) in documents  # C15: never the last committed one itself
        assert all(int(document) >= currtx - 1 for document in documents)
