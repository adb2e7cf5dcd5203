"""Spark as strangers meet it: another user of this host, or anybody on the network of a cluster."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import pickle
import re
import shlex
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import cloudpickle
import pytest
from pyspark import SparkConf, accumulators

from framework import BaseBatchBolt, Fields, OutputFieldsDeclarer, TransactionalTopologyBuilder
from framework.core.plan import CorePlan
from framework.core.worker_client import WorkerSettings
from framework.errors import ConfigError, InvariantViolation
from framework.execution.messages import AttemptHeader, CommitterState, Seed, TaskReport
from framework.execution.payload_encryption import KEY_VARIABLE, decrypt, encrypt, shared_key
from framework.execution.plan import ExecutionPlan, plan_execution
from framework.execution.process_channels import Credentials
from framework.execution.single_task_phase import run_processing
from framework.execution.spark import batch_executor, spark_context
from framework.execution.spark.batch_executor import SparkExecutor
from framework.execution.spark.certificate import new_certificate
from framework.execution.spark.resident_task import StayingTask
from framework.execution.tasks import PlannedTopology
from framework.local_paths import held_temporary_folder
from integration import SparkCluster
from integration.spark_cluster import SparkMaster, descendants
from spouts import MemoryTransactionalSpout
from tests.kit.waiting import PATIENCE_S, wait_for

CANARY = "canary-component-5eed"
ROOT = Path(__file__).parents[2]


def test_what_was_encrypted_with_the_key_of_the_run_is_decrypted() -> None:
    assert decrypt(encrypt(b"payload")) == b"payload"
    assert encrypt(b"payload") != encrypt(b"payload")


@pytest.mark.parametrize("place", [0, 11, 12, -1])
def test_changed_bytes_are_refused_before_they_are_unpickled(place: int) -> None:
    changed = bytearray(encrypt(b"payload"))
    changed[place] ^= 1
    with pytest.raises(InvariantViolation, match="not encrypted with the key of this run"):
        decrypt(bytes(changed))


def test_bytes_of_another_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = encrypt(b"payload")
    monkeypatch.setenv(KEY_VARIABLE, "ab" * 32)
    with pytest.raises(InvariantViolation, match="not encrypted with the key of this run"):
        decrypt(foreign)


def test_an_executor_without_the_key_says_how_to_give_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shared_key()
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(ConfigError, match=f"{KEY_VARIABLE} is not in the environment of this Spark executor"):
        decrypt(b"anything")


@pytest.mark.parametrize("key", ["", "abc", "xy" * 32, "ab" * 31])
def test_a_variable_that_is_no_key_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, key)
    with pytest.raises(ConfigError, match=f"{KEY_VARIABLE} is not a key"):
        encrypt(b"payload")


def test_credentials_travel_encrypted() -> None:
    credentials = Credentials.new(new_certificate())
    travelling = pickle.dumps(credentials)
    assert credentials.key not in travelling and b"PRIVATE KEY" not in travelling
    assert pickle.loads(travelling) == credentials
    assert credentials.key not in cloudpickle.dumps(lambda: credentials)


class Secretive(BaseBatchBolt):
    """Keeps a secret in each object: in the one that is built, and in the one that executes."""

    def prepare(self, conf: Mapping[str, Any], context: Any, collector: Any, batch_id: Any) -> None:
        self.secret = CANARY

    def execute(self, tup: Any) -> None: ...

    def finish_batch(self) -> None: ...

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None: ...


def secretive() -> ExecutionPlan:
    spout = MemoryTransactionalSpout({0: [["here"]]}, Fields(word=str), 1)
    builder = TransactionalTopologyBuilder("secretive", "spout", spout)
    bolt = Secretive()
    bolt.given = CANARY  # type: ignore[attr-defined]
    builder.set_committer_bolt("bolt", bolt).global_grouping("spout")
    return plan_execution(builder.build())


def test_nothing_that_spark_is_given_contains_a_secret_of_a_component() -> None:
    plan = secretive()
    assert CANARY.encode() in cloudpickle.dumps(plan)
    executor = SparkExecutor(plan, {"app.password": CANARY}, {})
    begins = batch_executor._BeginToStay(executor._payload)
    task = StayingTask(1, "place", Credentials.new(None), begins, batch_executor._RunCollapsed(executor._payload))
    workers = WorkerSettings.of(cast(CorePlan, plan), 60.0, None)  # of any plan alike
    for given in (executor._payload, begins, task, workers):
        assert CANARY.encode() not in cloudpickle.dumps(given)


def test_a_committer_waits_for_its_commit_phase_encrypted() -> None:
    topology = PlannedTopology(secretive(), {})
    header = AttemptHeader("secretive", txid=1, attempt_id=1, epoch=1, plan_digest="d")
    reports: list[TaskReport] = []
    records = run_processing(topology, [Seed(header, {})], reports.append)
    assert [each.failure for each in reports] == [None] * len(reports)
    (kept,) = [each for each in records if isinstance(each, CommitterState)]
    assert kept.whole and CANARY.encode() in decrypt(kept.kept)
    assert CANARY.encode() not in kept.kept


def settings(master: str, **given: str) -> dict[str, str]:
    return spark_context._authentication({"spark.master": master, **given})


def test_masters_that_ratchet_starts_authenticate() -> None:
    assert settings("local[*]") == settings("local") == {"spark.authenticate": "true"}
    chosen = settings("local-cluster[2,1,1024]")
    assert chosen["spark.authenticate"] == "true" and len(chosen["spark.authenticate.secret"]) == 64


@pytest.mark.parametrize("master", ["yarn", "k8s://https://host:6443"])
def test_masters_that_hand_out_secrets_authenticate_and_encrypt(master: str) -> None:
    assert settings(master) == {"spark.authenticate": "true", "spark.network.crypto.enabled": "true"}


def test_a_cluster_whose_secret_is_given_is_authenticated_and_encrypted() -> None:
    chosen = settings("spark://host:7077", **{"spark.authenticate.secret": "s"})
    assert chosen == {"spark.authenticate": "true", "spark.network.crypto.enabled": "true"}


@pytest.mark.parametrize("master", ["spark://host:7077", "spark://127.0.0.1:7077"])
def test_a_driver_that_a_worker_starts_gets_the_secret_from_it(master: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_SPARK_AUTH_SECRET", "s")
    assert settings(master)["spark.authenticate.secret"] == "s"
    assert "spark.authenticate.secret" not in settings(master, **{"spark.authenticate.secret": "t"})


@pytest.mark.parametrize("master", ["spark://host:7077", "spark://127.0.0.1:7077,host:7077", "spark://10.0.0.1:7077"])
def test_a_cluster_that_others_reach_is_refused_without_a_secret(master: str) -> None:
    with pytest.raises(ConfigError, match=r"spark\.authenticate\.secret .* or set spark\.authenticate = false here"):
        settings(master)
    assert settings(master, **{"spark.authenticate": "false"}) == {}


NEAR = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}


@pytest.mark.parametrize("master", ["spark://127.0.0.1:7077", "spark://localhost:1,[::1]:2"])
def test_with_a_cluster_on_the_loopback_address_and_no_secret_the_driver_listens_there(master: str) -> None:
    assert settings(master) == {"spark.authenticate": "false", **NEAR}
    assert settings(master, **{"spark.authenticate": "false"}) == NEAR
    conf = spark_context._conf("x", {"spark.master": master})
    assert NEAR.items() <= dict(conf.getAll()).items()


@pytest.mark.parametrize("address", ["0.0.0.0", "10.0.0.1", "::", "a.example"])
@pytest.mark.parametrize("key", sorted(NEAR))
def test_a_driver_that_others_reach_is_refused_without_a_secret(key: str, address: str) -> None:
    master = "spark://127.0.0.1:7077"
    with pytest.raises(ConfigError, match=rf"{key} = {address} is used without authentication"):
        settings(master, **{key: address})
    assert settings(master, **{key: "::1"})["spark.authenticate"] == "false"
    assert settings(master, **{key: address, "spark.authenticate.secret": "s"})["spark.authenticate"] == "true"


@pytest.mark.slow
@pytest.mark.integration
def test_the_ports_of_a_driver_without_a_secret_are_on_the_loopback_address(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import sys
        from framework.execution.spark.spark_context import start_context
        context = start_context("x", {"spark.master": sys.argv[1]})
        print(context.getConf().get("spark.driver.port"), flush=True)
        sys.stdin.read()
        """)
    master = SparkMaster(tmp_path, secret="")
    master.start()
    command = [sys.executable, "-c", code, f"spark://{master.address}"]
    environment = {name: value for name, value in os.environ.items() if name != "SPARK_LOCAL_IP"}
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        listening = _listening(process.pid)
        assert f"127.0.0.1:{port}" in listening
        assert [each for each in listening if not each.startswith("127.0.0.1:")] == []
    finally:
        process.communicate(timeout=120)
        master.stop()


def _listening(pid: int) -> list[str]:
    """The addresses on which the processes below this one listen."""
    inodes = set()
    for each in descendants(pid):
        for entry in Path(f"/proc/{each}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(entry)))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in inodes:
                host, port = columns[1].split(":")
                found.append(f"{_host(host)}:{int(port, 16)}")
    return found


def _host(digits: str) -> str:
    """An address as the kernel writes it: words in the order of this machine."""
    words = [bytes.fromhex(digits[start : start + 8])[::-1] for start in range(0, len(digits), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return str(getattr(address, "ipv4_mapped", None) or address)


@pytest.mark.slow
def test_secrets_are_not_on_the_command_line_of_the_jvm(tmp_path: Path) -> None:
    """Nor is the key of the run, which executors of a cluster get as a setting."""
    code = textwrap.dedent("""
        import sys
        from framework.execution.spark.spark_context import start_context
        with_secret = {"spark.master": "local-cluster[1,1,512]", "spark.executor.memory": "512m",
                       "spark.hadoop.fs.s3a.secret.key": "canary-s3", "spark.executorEnv.DB_PASS": "canary-env",
                       "spark.hadoop.fs.s3a.encryption.key": "canary-key", "spark.redis.auth": "canary-redis",
                       "spark.jars.repositories": "https://u:canary-repository@127.0.0.1:1/maven",
                       "spark.mongodb.read.connection.uri": "mongodb://u:canary-mongo@host/x",
                       "spark.sql.catalog.c.uri": "jdbc:postgresql://host/x?user=u&password=canary-catalog",
                       "spark.hadoop.fs.gs.auth.service.account.json": "canary-account",
                       "spark.x y": "a=b: #!\\é\\n\U0001f600 z"}
        context = start_context("x", with_secret)
        for key in ("spark.x y", "spark.sql.catalog.c.uri"):
            assert context._jvm.java.lang.System.getProperty(key) == with_secret[key], key
        assert context._jsc.sc().conf().get("spark.hadoop.fs.s3a.secret.key") == "canary-s3"
        assert context.parallelize([1, 2], 1).sum() == 3
        print(context.getConf().get("spark.authenticate.secret"), flush=True)
        sys.stdin.read()
        """)
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        secret = process.stdout.readline().strip()
        assert len(secret) == 64
        lines = [_command_line(pid) for pid in descendants(process.pid)]
        assert len(lines) > 2 and any("CoarseGrainedExecutorBackend" in line for line in lines)
        for each in ("canary", secret, KEY_VARIABLE):
            assert not any(each in line for line in lines), each
    finally:
        process.communicate(timeout=120)


def test_the_properties_file_is_for_this_user_alone_and_short_lived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--verbose pyspark-shell")
    with spark_context._submitted_from_file({"spark.a": "canary"}):
        *_, name, verbose, shell = shlex.split(os.environ["PYSPARK_SUBMIT_ARGS"])
        assert (verbose, shell) == ("--verbose", "pyspark-shell")
        assert "canary" in Path(name).read_text() and stat.S_IMODE(Path(name).stat().st_mode) == 0o600
    assert not Path(name).exists() and os.environ["PYSPARK_SUBMIT_ARGS"] == "--verbose pyspark-shell"
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--properties-file mine pyspark-shell")
    with spark_context._submitted_from_file({"spark.a": "canary"}):
        assert os.environ["PYSPARK_SUBMIT_ARGS"] == "--properties-file mine pyspark-shell"


@pytest.mark.parametrize(
    "options, warned",
    [("-Xss4m -XX:+UseSerialGC -Dx=y", 0), ("-Djavax.net.ssl.keyStorePassword=canary", 1), ("-Dx=y://a:canary@z", 1)],
)
def test_a_secret_in_java_options_is_warned_of(options: str, warned: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(spark_context._log, "warning", lambda event, **fields: said.append({"event": event, **fields}))
    for key in ("spark.driver.extraJavaOptions", "spark.executor.extraJavaOptions"):
        spark_context._warn_of_java_options(
            SparkConf(loadDefaults=False).set(key, options).set("spark.redis.auth", options)
        )
        assert [each["setting"] for each in said] == [key] * warned
        assert "canary" not in repr(said)
        said.clear()


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


@pytest.mark.spark
def test_files_of_spark_are_for_this_user_alone(spark: str) -> None:
    from pyspark import SparkContext, StorageLevel

    context = SparkContext._active_spark_context
    assert context is not None
    kept = context.parallelize(range(1000), 2).persist(StorageLevel.DISK_ONLY)
    assert kept.count() == 1000
    folders = context.getConf().get("spark.local.dir").split(",")
    assert any(each.name.startswith("blockmgr-") for folder in folders for each in Path(folder).iterdir())
    for folder in folders:
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    sockets = Path(context._accumulatorServer.server_address).parent  # type: ignore[attr-defined]
    assert stat.S_IMODE(os.stat(sockets).st_mode) == 0o700
    unpacked = context._jvm.java.lang.System.getProperty("java.io.tmpdir")  # native libraries, before they are loaded
    assert stat.S_IMODE(os.stat(unpacked).st_mode) == 0o700
    kept.unpersist(blocking=True)


@pytest.mark.parametrize(
    "given",
    [
        {"spark.driver.defaultJavaOptions": "-Dx=y"},
        {"spark.driver.extraJavaOptions": "-XX:+UseSerialGC"},
        {"spark.master": "spark://127.0.0.1:1"},
    ],
)
def test_the_jvm_unpacks_libraries_in_a_folder_of_this_user_alone(given: dict[str, str]) -> None:
    conf = spark_context._conf("x", given)
    options = shlex.split(conf.get("spark.driver.defaultJavaOptions") or "")
    (folder,) = [each.partition("=")[2] for each in options if each.startswith("-Djava.io.tmpdir=")]
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert set(given.get("spark.driver.defaultJavaOptions", "").split()) <= set(options)


@pytest.mark.parametrize(
    ("master", "options"),
    [
        ("spark://127.0.0.1:1", ["-Dx=y", "-Djava.io.tmpdir=."]),  # the folder of the executor, on its host
        ("yarn", ["-Dx=y"]),  # Spark itself names the folder of the container
        ("local[*]", ["-Dx=y"]),  # there is no other JVM than the driver's
    ],
)
def test_executors_unpack_libraries_in_a_folder_of_their_own(master: str, options: list[str]) -> None:
    conf = spark_context._conf("x", {"spark.master": master, "spark.executor.defaultJavaOptions": "-Dx=y"})
    assert shlex.split(conf.get("spark.executor.defaultJavaOptions") or "") == options


def test_executors_of_this_process_unpack_libraries_in_its_folder() -> None:
    conf = spark_context._conf("x", {"spark.master": "local-cluster[1,1,512]"})
    (option,) = shlex.split(conf.get("spark.executor.defaultJavaOptions") or "")
    assert option in shlex.split(conf.get("spark.driver.defaultJavaOptions") or "")


def test_sockets_are_in_a_folder_of_this_user_also_if_the_temporary_folder_has_a_long_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise Spark would use ports, to which every user of the host can connect."""
    long = tmp_path / ("x" * 64)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    conf = spark_context._conf("x", {})
    assert conf.get("spark.python.unix.domain.socket.enabled") == "true"
    folder = Path(conf.get("spark.python.unix.domain.socket.dir") or "")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and len(str(folder)) <= spark_context._SOCKET_FOLDER_MAX


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("spark.hadoop.fs.azure.account.key.shop.dfs.core.windows.net", "canary"),
        ("spark.hadoop.fs.azure.sas.orders.shop", "canary"),
        ("spark.executorEnv.DB_PASS", "canary"),
        ("spark.shop.address", "postgresql://ann:canary@host/shop"),
        ("spark.ssl.keyPassword", "canary"),
    ],
)
def test_event_logs_and_pages_of_spark_hide_what_may_be_a_secret(key: str, value: str) -> None:
    hidden = re.compile(spark_context._conf("x", {}).get("spark.redaction.regex") or "")
    assert hidden.search(key) or hidden.search(value)
    assert not any(map(hidden.search, ("spark.master", "local[*]", "spark.executor.memory", "spark://127.0.0.1:7077")))


@pytest.mark.parametrize("mode", [None, 0o755, 0o700])
def test_a_folder_with_the_name_of_a_private_one_is_used_only_if_it_is_private(
    tmp_path: Path, mode: int | None
) -> None:
    """``SPARK_LOCAL_DIRS`` may name the folder of a driver that has ended, and that another user
    has made again."""
    named = tmp_path / f"{spark_context._PRIVATE}x"
    if mode is not None:
        named.mkdir()
        named.chmod(mode)
    folder = spark_context._private_folder(str(named))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (folder == named) == (mode == 0o700)


def test_a_silent_connection_does_not_keep_the_jvm_from_reporting_accumulators(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the driver of a cluster, where another user of the host may connect first: Spark waits for
    the answer to each report."""
    starting = Mock(_active_spark_context=None, _gateway=object(), side_effect=OSError)
    monkeypatch.setattr(spark_context, "SparkContext", starting)
    with pytest.raises(ConfigError):
        spark_context.start_context("x", {})
    server = accumulators._start_update_server("token", False)
    try:
        address = cast(tuple[str, int], server.server_address)
        with socket.create_connection(address), socket.create_connection(address, PATIENCE_S) as jvm:
            jvm.sendall(b"token" + (0).to_bytes(4, "big"))
            assert jvm.recv(1) == b"\1"
    finally:
        server.shutdown()


def test_the_pages_of_spark_end_no_jobs_unless_the_user_wants_that() -> None:
    """Every user of the host can open them."""
    shown = {"spark.ui.enabled": "true"}
    assert spark_context._conf("x", shown).get("spark.ui.killEnabled") == "false"
    assert spark_context._conf("x", {**shown, "spark.ui.killEnabled": "true"}).get("spark.ui.killEnabled") == "true"


class Shipped:
    """Stands in for a ``SparkContext``."""

    archive = Path()

    def addPyFile(self, path: str) -> None:
        self.archive = Path(path)


def is_held(folder: Path) -> bool:
    """Whether programs that remove old files leave the folder: they leave locked ones."""
    other = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(other)
    return False


def test_programs_that_remove_old_files_leave_the_folders_of_a_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user could make a folder of the same name, and own the libraries and sockets in it,
    or the code that later executors fetch."""
    assert is_held(spark_context._private_folder(str(tmp_path)))
    shipped = Shipped()
    monkeypatch.setattr(shipped, "master", "spark://host:1", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spark_context._with_code(cast(Any, shipped))
    assert any(is_held(each) for each in shipped.archive.parents if each.is_relative_to(tmp_path))
    with held_temporary_folder("x") as folder:
        assert is_held(folder)
    assert not folder.exists()


def test_a_folder_for_temporary_files_that_the_user_gives_stays() -> None:
    conf = spark_context._conf("x", {"spark.driver.extraJavaOptions": "-Djava.io.tmpdir=/mine"})
    assert "tmpdir" not in (conf.get("spark.driver.defaultJavaOptions") or "")
    given = {"spark.master": "spark://127.0.0.1:1", "spark.executor.extraJavaOptions": "-Djava.io.tmpdir=/mine"}
    assert "tmpdir" not in (spark_context._conf("x", given).get("spark.executor.defaultJavaOptions") or "")


def test_workers_import_from_the_current_folder_only_if_this_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    beside_python = f"{sys.base_prefix}-app"
    monkeypatch.setattr(Path, "is_dir", lambda path: True)
    stdlib = sysconfig.get_path("stdlib")
    for path, expected in (
        (["/"], ["/"]),
        (["", "/"], [str(tmp_path), "/"]),
        ([str(tmp_path)], [str(tmp_path)]),
        ([stdlib, f"{stdlib}/lib-dynload", f"{stdlib}/site-packages", "/usr/lib/python3/dist-packages"], []),
        ([beside_python, f"{sys.base_prefix}/src/app", "/my-packages"],) * 2,
    ):
        monkeypatch.setattr(sys, "path", path)
        assert spark_context._import_path() == expected


@pytest.mark.parametrize("what", ["spark", "task worker", "simulation"])
def test_no_process_imports_from_the_folder_in_which_the_driver_was_started(tmp_path: Path, what: str) -> None:
    """The folder is another user's, such as ``/tmp``, and the program is elsewhere."""
    started, program, caught = tmp_path / "started", tmp_path / "program" / "main.py", tmp_path / "caught"
    for each in (started / "framework", program.parent):
        each.mkdir(parents=True)
    for hijacked in ("framework/__init__.py", "pickle.py", "socket.py"):
        (started / hijacked).write_text(f"open({str(caught)!r}, 'w').close()\n")
    program.with_name("beside.py").write_text("def add(number):\n    return number + 1\n")
    program.write_text(_STARTING[what])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(program)], cwd=started, env=environment, capture_output=True, text=True, timeout=600
    )
    assert not caught.exists()
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["done"]), done.stderr[-2000:]


_STARTING = {
    "spark": """
import os
import beside
from framework.execution.spark.spark_context import start_context
context = start_context("x", {"spark.master": "local[1]"})
assert context.parallelize([1], 1).map(beside.add).collect() == [2]
assert context.parallelize([1], 1).map(lambda _: os.environ.get("PYTHONSAFEPATH")).collect() == [None]
context.stop()
print("done")
""",
    "task worker": """
import os
import pathlib
import signal
from framework.core.plan import CorePlan
from framework.core.worker_client import WorkerSettings
from framework.core.worker_process import start_worker
from framework.execution.plan import plan_execution
from tests.kit.journaled import word_count
plan = CorePlan(plan_execution(word_count(pathlib.Path(__file__).parent, 10, spouts=1)), {}, ackers=1, pending_max=100)
os.kill(start_worker(WorkerSettings.of(plan, 60.0, None), 0).pid, signal.SIGKILL)
print("done")
""",
    "simulation": """
import pathlib
from framework.testing.simulation.hash_seed_worker import SecondWorker
from tests.kit.journaled import word_count
folder = pathlib.Path(__file__).parent
worker = SecondWorker(word_count(folder, 10, spouts=1), {}, folder, connect=False)
worker._start()
worker.close()
print("done")
""",
}


@pytest.mark.spark
def test_tasks_hold_no_key(spark: str) -> None:
    """The key is in the environment of workers, and in no closure."""
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    assert context is not None
    assert KEY_VARIABLE not in context.environment
    found = context.parallelize([0], 1).map(lambda _: os.environ.get("RATCHET_SECRET_KEY")).collect()
    assert found == [shared_key()]


@pytest.mark.slow
@pytest.mark.integration
def test_a_stranger_cannot_use_an_authenticated_cluster(tmp_path: Path) -> None:
    """A program without the secret gets no executor; one with it does."""
    code = textwrap.dedent("""
        import sys
        from framework.execution.spark.spark_context import start_context
        settings = dict(each.split("=", 1) for each in sys.argv[1:])
        context = start_context("x", {"spark.executor.memory": "512m", **settings})
        print("sum", context.parallelize([1, 2], 1).sum())
        from pathlib import Path
        print("unpacked", context.parallelize([1], 1).map(lambda _: len(list(Path().glob("liblz4-*.so")))).collect())
        import urllib.request
        page = urllib.request.urlopen(settings["spark.x.page"], timeout=60).read().decode()
        print("running", page.count("RUNNING"), "kill", page.count("app/kill"))
        """)

    def start(**given: Any) -> subprocess.Popen[str]:
        arguments = [f"{key}={value}" for key, value in {"spark.master": cluster.address, **given}.items()]
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    with SparkCluster(tmp_path, 1) as cluster:
        stranger = start(**{"spark.authenticate": "false"})
        try:
            friend = start(**cluster.settings, **{"spark.x.page": f"http://127.0.0.1:{cluster.master.page_port}/"})
            said = friend.communicate(timeout=300)[0]
            assert "sum 3" in said, said[-2000:]
            # Anybody on this host can open the master's page, and could press its buttons.
            assert "running 1 kill 0" in said, said[-2000:]
            assert "unpacked [1]" in said  # in the executor's own folder, where nobody can replace it
            # The friend came later and has ended, while the stranger has not begun to run anything.
            apps = (cluster.master.page() or {}).get("activeapps", [])
            assert apps == [], apps
            wait_for(lambda: cluster.executors() == [])
        finally:
            stranger.kill()
            stranger.communicate()
