"""The embedded servers: clear messages when something is missing, and no process is left behind."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import psycopg
import pymysql
import pytest
import redis
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from integration import (
    EmbeddedServers,
    MariaDbServer,
    PgBouncerServer,
    PostgresServer,
    RedisServer,
    ServerError,
    ZooKeeperServer,
    folder_permissions,
    jars,
)
from integration.connect import ConnectWorker
from integration.detached_servers import down, up
from integration.folder_permissions import open_folder
from integration.jars import connect_jars, kafka_jars
from integration.java import find_java
from integration.kafka import KafkaBroker
from integration.kafka_and_zookeeper import is_ours, read_state
from integration.processes import ChildProcess
from integration.server import (
    _PORTS,
    _SHARE,
    Server,
    _take_share,
    free_port,
    port_taken,
    start_together,
    stop_all,
)
from integration.server_launcher import Launch, ending_signal
from tests.kit import mysql
from tests.kit.other_users import made_by, needs_root
from tests.kit.secrets_on_disk import exposed, holding
from tests.kit.waiting import PATIENCE_S

ROOT = Path(__file__).parent.parent.parent


def script(folder: Path, text: str) -> str:
    """An executable that stands in for java."""
    file = folder / "bin" / "java"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(folder)


# --- Java -----------------------------------------------------------------------------------------


def test_a_missing_java_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerError, match="Java 17 or newer is needed, and there is no java on the PATH"):
        find_java()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ServerError, match=f"JAVA_HOME is {tmp_path}, and there is no bin/java"):
        find_java()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("echo 'openjdk version \"11.0.2\" 2019' >&2", "is Java 11, and Java 17 or newer is needed"),
        ("echo 'java version \"1.8.0_292\"' >&2", "is Java 8, and Java 17"),
        ("echo nothing", "says nothing about its version"),
    ],
)
def test_a_java_that_is_too_old_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: str, message: str
) -> None:
    monkeypatch.setenv("JAVA_HOME", script(tmp_path, answer))
    with pytest.raises(ServerError, match=message):
        find_java()


# --- jars -----------------------------------------------------------------------------------------


@pytest.fixture
def small_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A lock file of one jar, and a cache of the test's own."""
    lock = tmp_path / "kafka-jars.sha256"
    lock.write_text(f"{hashlib.sha256(b'right').hexdigest()}  one-1.0.jar\n")
    monkeypatch.setattr(jars, "LOCK_FILE", lock)
    monkeypatch.setenv("RATCHET_CACHE", str(tmp_path / "cache"))
    return tmp_path


def fake_ivy(folder: Path, content: str) -> str:
    """A stand-in for java that retrieves one jar with the given content."""
    return script(
        folder,
        textwrap.dedent(f"""
        if [ "$1" = -version ]; then echo 'openjdk version "17.0.1"' >&2; exit 0; fi
        for word in "$@"; do case "$word" in */jars/*) target=$(dirname "$word");; esac; done
        echo "[SUCCESSFUL ] one#one;1.0!one.jar (1ms)"
        {content}
        """),
    )


def test_jars_are_fetched_once_with_progress(small_lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = fake_ivy(small_lock / "java", 'mkdir -p "$target"; printf right > "$target/one-1.0.jar"')
    monkeypatch.setenv("JAVA_HOME", home)
    lines: list[str] = []
    folder = kafka_jars(lines.append)
    assert [path.name for path in folder.iterdir()] == ["one-1.0.jar"]
    assert lines[-1] == "fetched 1 of 1 jars"
    assert kafka_jars(lines.append) == folder
    assert len(lines) == 2


def test_a_corrupt_download_is_refused_and_leaves_nothing(small_lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = fake_ivy(small_lock / "java", 'mkdir -p "$target"; printf wrong > "$target/one-1.0.jar"')
    monkeypatch.setenv("JAVA_HOME", home)
    with pytest.raises(ServerError, match=r"one-1\.0\.jar does not match its SHA-256"):
        kafka_jars(lambda line: None)
    assert [path.name for path in (small_lock / "cache").iterdir()] == ["kafka-4.3.0.lock"]


def test_a_damaged_cache_is_fetched_again(small_lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = fake_ivy(small_lock / "java", 'mkdir -p "$target"; printf right > "$target/one-1.0.jar"')
    monkeypatch.setenv("JAVA_HOME", home)
    folder = kafka_jars(lambda line: None)
    (folder / "one-1.0.jar").write_bytes(b"rotten")
    lines: list[str] = []
    kafka_jars(lines.append)
    assert "damaged" in lines[0]
    assert (folder / "one-1.0.jar").read_bytes() == b"right"


def test_a_first_run_without_network_is_reported_in_one_line(small_lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", fake_ivy(small_lock / "java", "echo 'Server access error at url x'; exit 1"))
    with pytest.raises(ServerError, match=r"nothing arrived. Ivy says: Server access error.*Check the network"):
        kafka_jars(lambda line: None)


def test_a_port_that_was_lost_in_one_start_is_not_the_reason_of_the_next(tmp_path: Path) -> None:
    class Unlucky(Server):
        starts = 0

        def prepare(self) -> list[str]:
            self.starts += 1
            return ["sh", "-c", f"echo {'Address already in use' if self.starts == 1 else 'ERROR no licence'}; exit 1"]

        def is_ready(self) -> bool:
            return False

    unlucky = Unlucky(tmp_path / "u", where="embedded")
    with pytest.raises(ServerError, match="ended while starting: ERROR no licence"):
        unlucky.start()
    assert unlucky.starts == 2


def test_who_could_open_a_file_before_cannot_read_the_secret_that_is_written(tmp_path: Path) -> None:
    server = Crashing(tmp_path)
    (tmp_path / "s.conf").touch(mode=0o644)
    with open(tmp_path / "s.conf") as opened:
        file = server.write("s.conf", "secret", secret=True)
        assert opened.read() == ""
    assert file.read_text() == "secret"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.integration
@pytest.mark.parametrize("kind", [PostgresServer, MariaDbServer])
def test_a_database_knows_its_administrator_by_a_secret_that_nobody_else_can_read(
    kind: type[PostgresServer] | type[MariaDbServer],
) -> None:
    with open_folder() as folder, kind(folder / "a") as server, kind(folder / "b") as other:
        assert _signs_in(server.dsn)
        for guess in ("", "let me in", "ratchet", other.password):
            for user in ("ratchet", "root", "postgres", ""):
                assert not _signs_in(server.dsn.replace(f"ratchet:{server.password}@", f"{user}:{guess}@"))
        assert not exposed(folder, server.password)
        lines = [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
        assert not [line for line in lines if server.password in line]
        server.stop()
        server.start()
        assert _signs_in(server.dsn)


@pytest.mark.integration
def test_a_password_in_a_setting_is_on_no_command_line_and_in_no_file_that_others_can_read() -> None:
    """Of Redis, Kafka, ZooKeeper and Connect: their settings may be passwords."""
    secret, hard = "pass word", 'pass word\\"d #'
    with open_folder() as folder, RedisServer(folder / "redis", settings={"requirepass": hard}) as server:
        with redis.Redis(port=server.port, password=hard) as client:
            assert client.ping()
        servers = [
            server,
            KafkaBroker(folder / "kafka", settings={"ssl.key.password": secret}),
            ZooKeeperServer(folder / "zookeeper", settings={"ssl.keyStore.password": secret}),
            ConnectWorker(folder / "connect", bootstrap_servers="127.0.0.1:1", settings={"ssl.key.password": secret}),
        ]
        for each in servers:
            each.folder.mkdir(exist_ok=True)
            assert not [part for part in each.prepare() if "pass word" in part]
        names = {each.name for each in holding(folder, "pass word")}
        assert names >= {"redis.conf", "server.properties", "zoo.cfg", "worker.properties"}
        assert not exposed(folder, "pass word")


@pytest.mark.integration
def test_no_other_user_reads_the_files_that_servers_write() -> None:
    before = os.umask(0)
    try:
        with (
            open_folder() as folder,
            RedisServer(folder / "redis", where="embedded") as server,
            ZooKeeperServer(folder / "zookeeper", where="embedded") as other,
        ):
            with redis.Redis(port=server.port) as client:
                client.set("key", "value")
            written = [each for made in (server, other) for each in (made.folder / "data").rglob("*") if each.is_file()]
            assert {each.name for each in written} >= {"appendonly.aof.1.incr.aof", "snapshot.0"}
            for each in (*written, server.log_file, other.log_file):
                assert not stat.S_IMODE(each.stat().st_mode) & 0o077, each
    finally:
        os.umask(before)


def test_servers_do_not_start_in_a_folder_that_another_user_has_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as ``.ratchet`` in ``/tmp``: its owner could write their settings, and run code."""
    monkeypatch.chdir("/")
    made_by(12_345, tmp_path / ".ratchet", monkeypatch)
    folder = tmp_path / ".ratchet" / "servers"
    starts: list[Callable[[], object]] = [
        RedisServer(folder / "redis", where="embedded").start,
        EmbeddedServers(folder, where="embedded").start,
        lambda: up(folder),
        lambda: down(folder),
    ]
    for start in starts:
        with pytest.raises(ServerError, match="another user may replace what is in"):
            start()
    assert not folder.exists()


def test_a_current_folder_and_a_cache_of_another_user_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(folder_permissions._log, "warning", lambda event, **_: said.append(event))
    made_by(12_345, tmp_path / "theirs", monkeypatch)
    monkeypatch.chdir(tmp_path / "theirs")
    assert read_state(tmp_path / "theirs" / ".ratchet") is None
    monkeypatch.setenv("RATCHET_CACHE", str(tmp_path / "theirs"))
    assert jars.no_config_providers().is_file()
    assert said == ["servers.folder_of_others"] * 2


def test_a_client_cannot_make_a_broker_read_files_and_variables_of_its_user(
    servers: EmbeddedServers, tmp_path: Path
) -> None:
    """Everybody on the host may change the settings of a plain broker. A setting that refers to a
    file or a variable would come back in the error about it."""
    (tmp_path / "file").write_text("canary")
    providers = {"d": "Directory", "f": "File", "e": "EnvVar"}
    classes = {
        f"config.providers.{name}.class": f"org.apache.kafka.common.config.provider.{each}ConfigProvider"
        for name, each in providers.items()
    }
    admin = AdminClient({"bootstrap.servers": servers.bootstrap_servers})
    for reference, content in ((f"${{d:{tmp_path}:file}}", "canary"), ("${e:PATH}", os.environ["PATH"])):
        settings = {"config.providers": ",".join(providers), **classes, "num.io.threads": reference}
        changes = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in settings.items()
        ]
        resource = ConfigResource(ConfigResource.Type.BROKER, "1", incremental_configs=changes)
        (answer,) = admin.incremental_alter_configs([resource]).values()
        with pytest.raises(KafkaException) as refused:
            answer.result(PATIENCE_S)
        assert content not in str(refused.value)


def test_another_user_cannot_hold_the_lock_of_a_folder_of_servers(tmp_path: Path) -> None:
    """A user who may read a file may lock it."""
    servers = EmbeddedServers(tmp_path / "servers")
    servers._take_folder()
    assert not stat.S_IMODE((tmp_path / "servers" / "lock").stat().st_mode) & 0o007
    servers.stop()


def _signs_in(dsn: str) -> bool:
    try:
        if dsn.startswith("mysql"):
            with mysql.client(dsn):
                return True
        with psycopg.connect(dsn):
            return True
    except (psycopg.Error, pymysql.Error):
        return False


@pytest.mark.integration
def test_a_pooler_asks_for_the_secret_too(postgres: PostgresServer) -> None:
    with (
        open_folder() as folder,
        PgBouncerServer(folder, postgres.dsn.rpartition("@")[2].partition("/")[0], postgres.password) as pooler,
    ):
        assert _signs_in(pooler.dsn)
        assert not _signs_in(pooler.dsn.replace(f":{pooler.password}@", ":x@"))
        assert not _signs_in(pooler.dsn.replace(f":{pooler.password}@", "@"))


class Member(Server):
    """Serves when all members have started with the number of the port that the group agreed on."""

    def __init__(self, folder: Path, group: list[int], *, taken: int = 0, endures: bool = False) -> None:
        super().__init__(folder, where="embedded")
        self._group, self._taken, self._endures = group, taken, endures
        self.ports: list[int] = []

    def prepare(self) -> list[str]:
        self.ports.append(self._group[0])
        lost = self._group[0] == self._taken
        words = "echo Address already in use; " if lost else ""
        return ["sh", "-c", words + ("exit 1" if lost and not self._endures else "exec sleep 600")]

    def is_ready(self) -> bool:
        return self._group[0] != self._taken and self._group[0] > 0


@pytest.mark.parametrize("endures", [False, True], ids=["the server ends", "the server tries again for ever"])
def test_servers_that_lose_a_port_of_their_group_start_again_with_another(tmp_path: Path, endures: bool) -> None:
    group = [0]
    first = Member(tmp_path / "first", group, taken=1, endures=endures)
    second = Member(tmp_path / "second", group)
    second.is_ready = lambda: group[0] == 2  # type: ignore[method-assign] # it waits for the first

    def renew() -> None:
        group[0] += 1

    start_together([first, second], renew)
    stop_all([first, second])
    assert second.ports == [1, 2]
    assert set(first.ports) == {1, 2}


def test_a_server_of_a_group_that_fails_ends_the_wait_of_the_others(tmp_path: Path) -> None:
    class Failing(Member):
        def prepare(self) -> list[str]:
            raise ServerError("no licence")

    waiting = Member(tmp_path / "waiting", [0], taken=9)
    with pytest.raises(ServerError, match="no licence"):
        start_together([waiting, Failing(tmp_path / "failing", [0])])
    assert waiting.pid is None


def test_the_pid_of_a_server_that_is_ending_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = ChildProcess(Launch("x", ["true"], folder=tmp_path, log_file=tmp_path / "x.log"))
    looks: list[int] = []

    def ended(pid: int) -> list[psutil.Process]:
        looks.append(pid)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return []

    monkeypatch.setattr("integration.processes._children_of", ended)
    assert process.pid is None
    assert len(looks) <= 1
    process.kill()


@pytest.mark.parametrize("act", [ChildProcess.kill, ChildProcess.pause, ChildProcess.resume])
def test_a_server_that_ends_before_its_signal_arrives_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[ChildProcess], None]
) -> None:
    """Its guardian waits for it, so its pid is nobody's at once."""
    ended = subprocess.Popen(["true"])
    ended.wait(PATIENCE_S)
    process = ChildProcess(Launch("x", ["true"], folder=tmp_path, log_file=tmp_path / "x.log"))
    monkeypatch.setattr(ChildProcess, "pid", ended.pid)
    act(process)
    process.kill()
    assert not process.alive


def test_a_paused_server_has_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its threads have, it answers."""

    def late(pid: int, which: signal.Signals) -> None:
        if which is signal.SIGSTOP:
            threading.Timer(0.2, real, (pid, which)).start()
        else:
            real(pid, which)

    real = os.kill
    process = ChildProcess(Launch("x", ["sleep", "600"], folder=tmp_path, log_file=tmp_path / "x.log"))
    server = process.pid
    assert server is not None
    monkeypatch.setattr(os, "kill", late)
    process.pause()
    assert psutil.Process(server).status() == psutil.STATUS_STOPPED
    monkeypatch.undo()
    process.kill()


class Crashing(Server):
    """A server whose tool or whose start a signal ends so many times."""

    def __init__(self, folder: Path, *, tools: int = 0, starts: int = 0) -> None:
        super().__init__(folder, where="embedded")
        self._left = {"tool": tools, "start": starts}
        self.found: list[list[str]] = []

    def _crash_or(self, what: str, otherwise: str) -> list[str]:
        self._left[what] -= 1
        return ["sh", "-c", f"echo before the end of the {what}; kill -SEGV $$" if self._left[what] >= 0 else otherwise]

    def fill(self, data: Path) -> None:
        self.found.append([each.name for each in data.iterdir()] if data.exists() else [])
        data.mkdir()
        (data / "half").touch()
        self.run_tool(self._crash_or("tool", "true"), "its data folder cannot be made")

    def prepare(self) -> list[str]:
        if not (self.folder / "data").exists():
            self.initialise(self.folder / "data", self.fill)
        return self._crash_or("start", "echo serves; exec sleep 600")

    def is_ready(self) -> bool:
        return "serves" in self.log_file.read_text()


def test_a_signal_that_ends_a_tool_makes_it_start_again_in_an_empty_folder(tmp_path: Path) -> None:
    with Crashing(tmp_path / "c", tools=2) as server:
        assert server.found == [[], [], []]
        assert [each.name for each in (server.folder / "data").iterdir()] == ["half"]
        assert not (server.folder / "data.incomplete").exists()


def test_a_tool_that_a_signal_ends_each_time_is_reported_with_signal_and_output(tmp_path: Path) -> None:
    server = Crashing(tmp_path / "c", tools=9)
    with pytest.raises(ServerError, match="cannot be made: SIGSEGV ended its tool: before the end of the tool"):
        server.start()
    assert len(server.found) == 3
    assert not (server.folder / "data").exists()


def test_a_signal_that_ends_a_server_while_it_starts_makes_it_start_again(tmp_path: Path) -> None:
    with Crashing(tmp_path / "c", starts=2) as server:
        assert server.found == [[]]  # on the same data
    server = Crashing(tmp_path / "d", starts=9)
    with pytest.raises(
        ServerError, match="SIGSEGV ended server while it started: before the end of the start; its log"
    ):
        server.start()
    assert server._left["start"] == 6


def test_a_server_that_fails_is_not_started_again(tmp_path: Path) -> None:
    class Failing(Crashing):
        def _crash_or(self, what: str, otherwise: str) -> list[str]:
            return ["sh", "-c", "echo ERROR no licence; exit 3"]

    server = Failing(tmp_path / "c")
    with pytest.raises(ServerError, match="^its data folder cannot be made: ERROR no licence$"):
        server.start()
    assert len(server.found) == 1


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (None, None),
        (0, None),
        (1, None),
        (128, None),
        (255, None),
        (-11, "SIGSEGV"),
        (139, "SIGSEGV"),
        (137, "SIGKILL"),
    ],
)
def test_an_exit_code_names_the_signal(code: int | None, name: str | None) -> None:
    assert ending_signal(code) == name


@pytest.mark.integration
def test_a_mariadb_that_starts_leaves_the_temporary_tables_of_others_alone() -> None:
    with open_folder() as folder, MariaDbServer(folder / "a") as first, mysql.client(first.dsn) as client:
        client.execute("CREATE TEMPORARY TABLE kept (a int) ENGINE=Aria")
        client.execute("INSERT INTO kept VALUES (7)")
        client.execute("FLUSH TABLES")
        with MariaDbServer(folder / "b"):
            assert client.execute("SELECT a FROM kept") == [(7,)]
            client.execute("DROP TEMPORARY TABLE kept")


def test_a_full_disk_is_reported_in_one_line(small_lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = fake_ivy(small_lock / "java", "echo 'java.io.IOException: No space left on device'; exit 1")
    monkeypatch.setenv("JAVA_HOME", home)
    with pytest.raises(ServerError, match="No space left on device"):
        kafka_jars(lambda line: None)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        (jars.LOCK_FILE, f"kafka_2.13-{jars.KAFKA_VERSION}.jar"),
        (jars.CONNECT_LOCK_FILE, f"io.debezium:debezium-connector-postgres:{jars.DEBEZIUM_VERSION}"),
    ],
)
def test_a_lock_file_names_its_program_and_nothing_twice(file: Path, name: str) -> None:
    names = [line.split()[1] for line in file.read_text().splitlines()]
    assert name in names
    assert len(names) == len(set(names))


def test_jars_with_coordinates_are_fetched_one_by_one(small_lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = small_lock / "connect-jars.sha256"
    lock.write_text(f"{hashlib.sha256(b'right').hexdigest()}  org.some:one:1.0\n")
    monkeypatch.setattr(jars, "CONNECT_LOCK_FILE", lock)
    home = fake_ivy(
        small_lock / "java",
        'mkdir -p "$target"; while [ "$1" != -ivy ]; do shift; done\n'
        """grep -q 'org="org.some" name="one" rev="1.0" transitive="false"' "$2" && printf right > "$target/one-1.0.jar\"""",
    )
    monkeypatch.setenv("JAVA_HOME", home)
    assert [path.name for path in connect_jars(lambda line: None).iterdir()] == ["one-1.0.jar"]


def test_a_free_port_is_below_the_ports_of_outgoing_connections() -> None:
    """Otherwise such a connection could take the port between its choice and its use."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [free_port() for _ in range(200)]
    assert all(1_024 <= port < lowest for port in ports)
    assert len(set(ports)) == 200  # servers that have not started yet do not share one


def test_no_two_processes_choose_from_the_same_ports(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Otherwise one could take the port of a server of the other that is about to start again."""
    monkeypatch.setattr("integration.server._SHARES", f"\0{name}")
    shares = [_take_share() for _ in _PORTS[::_SHARE]]
    assert sorted(port for each in shares for port in each.ports) == list(_PORTS)
    assert _take_share().ports == _PORTS  # each share has its owner
    ended = shares[-1]
    assert ended.held is not None
    os.close(ended.held)
    shares[-1] = _take_share()
    assert shares[-1].ports == ended.ports
    for each in shares:
        assert each.held is not None
        os.close(each.held)


# --- servers --------------------------------------------------------------------------------------


@pytest.mark.integration
def test_a_taken_port_is_reported_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port} is taken"):
            ZooKeeperServer(tmp_path, port).start()


@pytest.mark.integration
def test_a_server_that_cannot_write_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ServerError, match="file"):
        ZooKeeperServer(tmp_path / "file" / "zookeeper").start()


@pytest.mark.integration
def test_a_server_that_ends_while_starting_names_its_log(tmp_path: Path) -> None:
    server = ZooKeeperServer(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "myid").write_text("not a number")
    (tmp_path / "data" / "version-2").write_text("a file where a folder should be")
    with pytest.raises(ServerError, match=r"zookeeper ended while starting: .*its log is .*zookeeper\.log"):
        server.start()


def test_a_server_that_meets_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """if [ "$1" = -version ]; then echo 'openjdk version "17.0.1"' >&2; exit 0; fi
        echo 'ERROR java.io.IOException: No space left on device'; exit 1"""
    monkeypatch.setenv("JAVA_HOME", script(tmp_path / "java", text))
    with pytest.raises(ServerError, match=r"zookeeper ended while starting: .*No space left on device; its log is"):
        ZooKeeperServer(tmp_path / "zookeeper", where="embedded").start()


@pytest.mark.integration
def test_two_instances_side_by_side_and_data_that_stays(tmp_path: Path) -> None:
    first = EmbeddedServers(tmp_path / "a")
    with first:
        with pytest.raises(ServerError, match="servers already run in"):
            EmbeddedServers(tmp_path / "a").start()
        with EmbeddedServers(tmp_path / "b") as second:
            assert second.bootstrap_servers != first.bootstrap_servers
            assert second.zookeeper != first.zookeeper
        cluster_id = _cluster_id(first)
    with EmbeddedServers(tmp_path / "a") as again:
        assert _cluster_id(again) == cluster_id


def _cluster_id(servers: EmbeddedServers) -> str:
    from confluent_kafka.admin import AdminClient

    return str(AdminClient({"bootstrap.servers": servers.bootstrap_servers}).list_topics(timeout=PATIENCE_S).cluster_id)


@pytest.mark.integration
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_no_orphans_when_the_parent_is_killed(tmp_path: Path, how: signal.Signals) -> None:
    code = (
        "import sys, time; from pathlib import Path; from integration import ZooKeeperServer\n"
        "server = ZooKeeperServer(Path(sys.argv[1])); server.start(); print(server.pid, server.port, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    pid, port = map(int, parent.stdout.readline().split())
    assert port_taken(port)
    parent.send_signal(how)
    parent.wait(PATIENCE_S)
    _wait_for(lambda: not _runs(pid))
    _wait_for(lambda: not port_taken(port))  # the kernel closes a dead JVM's sockets after its first thread has gone


@pytest.mark.integration
def test_a_second_run_right_after_a_kill_waits_for_the_first_ones_servers(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from integration import EmbeddedServers\n"
        "servers = EmbeddedServers(Path(sys.argv[1])); servers.start(); print('up', flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "up\n"
    with pytest.raises(ServerError, match="servers already run in"):
        EmbeddedServers(tmp_path).start()
    guardians = psutil.Process(parent.pid).children()  # or the reaper of the containers
    assert guardians
    for each in guardians:
        each.suspend()
    parent.kill()
    parent.wait(PATIENCE_S)
    late = threading.Timer(8, lambda: [each.resume() for each in guardians])
    late.start()
    with EmbeddedServers(tmp_path) as again:
        assert _cluster_id(again)
    late.join()


@pytest.mark.parametrize("guarded", [True, False])
def test_a_kill_waits_for_the_processes_that_the_server_had_started(tmp_path: Path, *, guarded: bool) -> None:
    """A busy backend of PostgreSQL outlives its server for a moment. Until it has ended, the server
    does not start again on the same data."""
    shell = ["sh", "-c", "setsid sleep 2 & exec sleep 60"]
    launch = Launch("it", shell, folder=tmp_path, log_file=tmp_path / "log", guarded=guarded)
    server = ChildProcess(launch)
    _wait_for(lambda: server.pid is not None and psutil.Process(server.pid).children())
    pid = server.pid
    assert pid is not None
    (started,) = psutil.Process(pid).children()
    server.kill()
    assert not _runs(pid) and not _runs(started.pid)


@pytest.mark.integration
def test_no_orphan_when_the_guardian_is_killed(tmp_path: Path) -> None:
    server = ZooKeeperServer(tmp_path, where="embedded")
    server.start()
    pid = server.pid
    assert pid is not None and isinstance(server._running, ChildProcess)
    os.kill(server._running.guardian_pid, signal.SIGKILL)
    _wait_for(lambda: not _runs(pid))


@pytest.mark.integration
def test_up_status_down_on_the_command_line(tmp_path: Path) -> None:
    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ratchet", "servers", *words, "--dir", str(tmp_path / "w")]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=PATIENCE_S)

    assert call("status").returncode == 1
    up = call("up", "--json")
    assert up.returncode == 0, up.stderr
    state = json.loads(up.stdout)
    try:
        assert (state["type"], state["running"]) == ("servers", True)
        assert json.loads(call("up", "--json").stdout) == state
        assert json.loads(call("status", "--json").stdout) == state
        assert all(port_taken(int(state[name].split(":")[1])) for name in ("kafka", "zookeeper"))
        taken = call("up", "--kafka-port", str(free_port()))
        assert taken.returncode == 0
    finally:
        assert call("down").stdout.strip() == "stopped"
    assert not any(_runs(pid) for pid in state["pids"].values())
    assert call("down").stdout.startswith("nothing runs in")
    assert call("status").returncode == 1
    assert json.loads(call("status", "--json").stdout) == {"type": "servers", "running": False}


def _runs(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:  # while it is read, a process that ends is another error than one that has ended
        return False


def _wait_for(condition: object, timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_a_server_that_is_ending_counts_as_running_until_its_ports_are_free(tmp_path: Path) -> None:
    """A process frees its memory first: the more it has,
    the longer its ports outlive its command line.
    """
    code = """
import socket, sys
held, server = b"x" * (1 << 30), socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        process.kill()
        while is_ours(process.pid, tmp_path):
            pass
        assert not port_taken(port)


@needs_root
def test_a_process_of_another_user_is_no_server_of_this_one(tmp_path: Path) -> None:
    """Its command may contain any folder, and it may wait for a pid that ``servers.json`` names."""
    for user, ours in ((0, True), (12_345, False)):
        command = ["sh", "-c", "read line", "sh", str(tmp_path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, user=user, cwd="/") as process:
            try:
                _wait_for(lambda pid=process.pid: str(tmp_path) in Path(f"/proc/{pid}/cmdline").read_text())
                assert is_ours(process.pid, tmp_path) == ours
            finally:
                process.kill()
