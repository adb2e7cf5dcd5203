"""Servers of every kind, on every host: writes outlive SIGKILL,
and a paused server answers later.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import redis
from kazoo.client import KazooClient

from integration import (
    EmbeddedServers,
    NotOursError,
    PostgresServer,
    RedisServer,
    RegistryServer,
    ServerError,
    ZooKeeperServer,
)
from integration.external import VARIABLES, ExternalPostgres, ExternalServers
from integration.folder_permissions import open_folder
from integration.process_or_container import find_host
from integration.server import Server, port_taken
from integration.server_launcher import VARIABLE
from tests.kit.waiting import PATIENCE_S, WATCH_S, wait_for

ROOT = Path(__file__).parent.parent.parent
KINDS: dict[str, type[Server]] = {"zookeeper": ZooKeeperServer, "postgres": PostgresServer, "redis": RedisServer}


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with open_folder() as folder, KINDS[request.param](folder / "x") as running:
        yield running


def write(server: Server, value: str) -> None:
    """Store a value with a client of that kind, and wait for the acknowledgement."""
    if isinstance(server, PostgresServer):
        with psycopg.connect(server.dsn) as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS x (v text)")
            connection.execute("INSERT INTO x VALUES (%s)", (value,))
    elif isinstance(server, RedisServer):
        with redis.Redis.from_url(server.url) as client:
            client.rpush("x", value)
    else:
        with zookeeper(server) as client:
            client.create(f"/x/{value}", makepath=True)


def values(server: Server) -> list[str]:
    if isinstance(server, PostgresServer):
        with psycopg.connect(server.dsn) as connection:
            return [row[0] for row in connection.execute("SELECT v FROM x ORDER BY v")]
    if isinstance(server, RedisServer):
        with redis.Redis.from_url(server.url) as client:
            return sorted(each.decode() for each in client.lrange("x", 0, -1))
    with zookeeper(server) as client:
        return sorted(client.get_children("/x"))


class zookeeper:
    def __init__(self, server: Server) -> None:
        self.client = KazooClient(server.address, timeout=60)

    def __enter__(self) -> KazooClient:
        self.client.start(PATIENCE_S)
        return self.client

    def __exit__(self, *_: object) -> None:
        self.client.stop()
        self.client.close()


@pytest.mark.integration
def test_acknowledged_writes_outlive_a_kill_and_the_port_stays(server: Server) -> None:
    port, pid = server.port, server.pid
    write(server, "a")
    server.kill()
    assert server.pid is None
    server.start()
    assert (server.port, server.pid == pid) == (port, False)
    assert values(server) == ["a"]
    write(server, "b")
    server.stop()
    assert not port_taken(port)
    server.start()
    assert values(server) == ["a", "b"]


@pytest.mark.integration
def test_a_paused_server_answers_once_it_goes_on(server: Server) -> None:
    write(server, "a")
    server.pause()
    assert port_taken(server.port)  # it listens, but does not answer
    done = threading.Event()
    thread = threading.Thread(target=lambda: (write(server, "b"), done.set()), daemon=True)
    thread.start()
    assert not done.wait(WATCH_S)
    server.resume()
    assert done.wait(PATIENCE_S)
    assert values(server) == ["a", "b"]


@pytest.mark.parametrize(("answers", "succeeds"), [(["unable to freeze"] * 3, True), (["no such container"], False)])
def test_a_container_that_cannot_be_frozen_at_once_is_asked_again(answers: list[str], succeeds: bool) -> None:
    from docker.errors import APIError

    from integration.containers import _Container

    class Engine:
        def pause(self) -> None:
            if answers:
                raise APIError(f"Cannot pause container: {answers.pop()}")

    container = object.__new__(_Container)
    container._container = Engine()
    with contextlib.nullcontext() if succeeds else pytest.raises(APIError):
        container.pause()


@pytest.mark.integration
def test_a_registry_stand_in_registers_counts_and_fails_on_request(tmp_path: Path) -> None:
    from urllib.error import HTTPError

    with RegistryServer(tmp_path / "r") as registry:
        assert registry.register("s", {"type": "string"}) == 100
        assert registry.requests == {"/subjects/s/versions": 1}
        registry.fail_next(1)
        with pytest.raises(HTTPError, match="503"):
            registry.register("s", {"type": "int"})
        assert registry.register("s", {"type": "int"}) == 101


def test_an_unknown_kind_of_servers_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, "cloud")
    with pytest.raises(
        ServerError, match="RATCHET_SERVERS is 'cloud': it must be one of embedded, containers, external"
    ):
        RedisServer(tmp_path)


def test_external_servers_are_named_by_the_environment_and_never_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(VARIABLE, "external")
    with pytest.raises(NotOursError, match="wants a redis server of its own"):
        RedisServer(tmp_path)
    with pytest.raises(NotOursError):
        find_host("kafka")
    monkeypatch.delenv(VARIABLES["kafka"], raising=False)
    with pytest.raises(
        ServerError, match="RATCHET_EXTERNAL_KAFKA is not set: say where kafka is, such as broker1:9092"
    ):
        _ = ExternalServers().bootstrap_servers
    monkeypatch.setenv(VARIABLES["postgres"], "postgresql://a@b/c")
    assert ExternalPostgres().dsn == "postgresql://a@b/c"


@pytest.mark.integration
def test_the_suite_runs_on_external_servers_and_says_what_it_skips(servers: EmbeddedServers, tmp_path: Path) -> None:
    """Two tests: one uses a ZooKeeper server that this run did not start,
    one wants a server to kill.
    """
    environment = {
        **os.environ,
        VARIABLES["kafka"]: servers.bootstrap_servers,
        VARIABLES["zookeeper"]: servers.zookeeper,
    }
    environment.pop(VARIABLE, None)
    tests = ["tests/coordination/test_stores.py::TestZooKeeperStore", "tests/servers/test_hosts.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--servers=external", *tests]
    command += ["-k", "lost_session or paused", f"--basetemp={tmp_path / 'inner'}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout
    assert "1 passed, 3 skipped" in done.stdout
    assert "wants a zookeeper server of its own to start and stop" in done.stdout


@pytest.mark.integration
def test_no_server_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    """With a Redis server, which starts and ends quickly, in a container too."""
    code = (
        "import sys, time; from pathlib import Path; from integration import RedisServer\n"
        "server = RedisServer(Path(sys.argv[1])); server.start(); print(server.port, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "redis")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    port = int(parent.stdout.readline())
    assert port_taken(port)
    parent.send_signal(signal.SIGKILL)
    parent.wait(PATIENCE_S)
    wait_for(lambda: not port_taken(port))
