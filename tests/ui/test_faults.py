"""The page while ZooKeeper is away."""

from __future__ import annotations

from pathlib import Path

import pytest

from framework import submit
from framework.config import Config
from framework.coordination import store_of
from framework.ui.server import serve_page
from framework.ui.sources.root import RootSource
from integration import ZooKeeperServer
from integration.server import free_port
from tests.kit.waiting import PATIENCE_S, wait_for
from tests.ui.sources import Events
from tests.ui.test_runs import read, topology

pytestmark = [pytest.mark.behaviour("6.4"), pytest.mark.integration, pytest.mark.slow]


def test_pages_stay_while_zookeeper_is_away_and_say_how_old_they_are(tmp_path: Path) -> None:
    port, root = free_port(), free_port()
    with ZooKeeperServer(tmp_path) as zookeeper:
        settings = {
            "transactional.zookeeper.servers": zookeeper.address,
            "transactional.zookeeper.session.timeout.secs": 4,
            "ui.port": port,
        }
        config = Config.of(settings)
        store = store_of(config, observes=True)
        stop = serve_page(RootSource(store, config.zookeeper_root), config, root)
        try:
            with submit(topology(), settings, executor="local") as run:
                run.wait_until_caught_up(PATIENCE_S)
                with Events(root, "/api/topologies/events") as viewer:
                    while viewer.next("topologies")["topologies"][0]["state"] != "running":
                        pass
                    zookeeper.kill()
                    while (said := viewer.next("trouble"))["reason"] is None or said["age_s"] < 5:
                        pass
                    assert read(root, "/api/topologies")["topologies"][0]["topology"] == "words"
                    for _ in range(5):  # the driver knows itself
                        found = read(port, "/api/topology?id=words")
                        assert [row[0] for row in found["transactions"]["rows"]] == [1, 2, 3]
                    wait_for(lambda: read(port, "/api/topology?id=words")["live"]["state"] != "running")
                    zookeeper.start()
                    while viewer.next("trouble")["reason"] is not None:
                        pass
                wait_for(lambda: read(port, "/api/topology?id=words")["live"]["state"] == "running")
        finally:
            stop()
            store.close()
