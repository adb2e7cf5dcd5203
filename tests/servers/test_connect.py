"""A worker of Kafka Connect with Debezium: real jars, a real broker, a real database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from integration import ConnectWorker, EmbeddedServers, PostgresServer, ServerError
from integration.external import ExternalServers
from integration.folder_permissions import open_folder
from tests.kit.debezium import change_source, read_values
from tests.kit.waiting import PATIENCE_S, wait_for

pytestmark = pytest.mark.integration


@pytest.fixture
def worker(servers: EmbeddedServers | ExternalServers, name: str, tmp_path: Path) -> Iterator[ConnectWorker]:
    with ConnectWorker(tmp_path, bootstrap_servers=servers.bootstrap_servers, group=name) as running:
        yield running


@pytest.mark.slow
def test_changes_arrive_over_a_crash_of_the_worker(
    worker: ConnectWorker, servers: EmbeddedServers | ExternalServers, name: str
) -> None:
    with (
        open_folder() as folder,
        PostgresServer(folder / "postgres", settings={"wal_level": "logical"}) as database,
        psycopg.connect(database.dsn, autocommit=True) as source,
    ):
        source.execute("create table stock (id int primary key, pieces int)")
        source.execute("insert into stock values (1, 5)")
        worker.put(name, change_source(database, name))
        topic = f"{name}.public.stock"
        read_values(servers.bootstrap_servers, topic, 1, PATIENCE_S)
        source.execute("update stock set pieces = 6")
        found = read_values(servers.bootstrap_servers, topic, 2, PATIENCE_S)
        assert [(each["op"], each["after"]) for each in found] == [
            ("r", {"id": 1, "pieces": 5}),
            ("u", {"id": 1, "pieces": 6}),
        ]
        wait_for(lambda: any("messageType" in each for each in worker.offsets(name)), what="stored offsets")
        worker.kill()
        source.execute("delete from stock")
        worker.start()
        found = read_values(servers.bootstrap_servers, topic, lambda values: values[-1] is None, PATIENCE_S)
        assert found[-2]["op"] == "d"
        assert found[-2]["before"]["id"] == 1
        worker.delete(name)


@pytest.mark.slow
def test_a_connector_that_cannot_start_says_why(worker: ConnectWorker, name: str) -> None:
    with pytest.raises(ServerError, match=r"database\.hostname"):
        worker.put(name, {"connector.class": "io.debezium.connector.postgresql.PostgresConnector"})
