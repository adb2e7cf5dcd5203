"""The unit of ``deploy/systemd``, started by a real systemd: a topology runs in it on Spark.

That systemd is the first process of a namespace, with its own ``/run``, ``/srv`` and ``/etc``. It
shares the network of this machine. Needs root."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from framework import Config
from framework.coordination import store_of
from framework.coordination.presence import read_drivers
from integration import EmbeddedServers, PostgresServer
from integration.server_programs import find_program
from tests.kit.processes import ROOT
from tests.kit.waiting import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.spark, pytest.mark.slow]

WAIT_S = 300.0
UNIT = "ratchet@orders.service"
#: What the unit's dependencies name, and this systemd needs no content of.
TARGETS = ("sysinit", "basic", "shutdown", "network-online")
PIPELINE = """
import json
import os
import pathlib

from framework import Fields, TransactionalTopologyBuilder
from sinks import Count, OpaqueMapState, PostgresBackend, StateCommitter
from spouts import OpaqueMemoryTransactionalSpout


def refused(path):
    try:
        pathlib.Path(path).write_text("")
    except OSError:
        return True
    return False


def topology(app):
    status = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    found = {key: status[key].strip() for key in ("Seccomp", "CapBnd", "NoNewPrivs")}
    found["refused"] = [refused(path) for path in ("/etc/x", "/usr/x", "/srv/ratchet/orders/.venv/x")]
    found["homes"] = os.access("/home", os.R_OK) or os.access("/root", os.R_OK)
    pathlib.Path("/srv/ratchet/orders/found.json").write_text(json.dumps(found))
    spout = OpaqueMemoryTransactionalSpout({0: [["a"]]}, Fields(word=str), 1)
    builder = TransactionalTopologyBuilder(app["app.name"], "spout", spout)
    state = OpaqueMapState(PostgresBackend(app["app.database"], app["app.table"]))
    builder.set_bolt("counts", StateCommitter(state, ["word"], {"n": Count()})).fields_grouping("spout", Fields("word"))
    return builder.build()
"""
#: The folder of the test becomes /mnt: systemd removes files of the service's user from /dev/shm.
BOOT = """
set -e
mount --make-rprivate /
mount --bind {folder} /mnt
mount -t overlay overlay -o lowerdir=/etc,upperdir=/mnt/etc,workdir=/mnt/work /etc
mount --bind /mnt/srv /srv
mount --bind {root} /srv/ratchet/source
mount --bind {packages} /srv/ratchet/packages
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /dev/shm
export container=other SYSTEMD_UNIT_PATH=/mnt/units
exec /lib/systemd/systemd --system --unit=test.target --log-target=console --show-status=0
"""


class Systemd:
    """A running systemd, and ``systemctl`` for it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def __call__(self, *arguments: str) -> str:
        children = psutil.Process(self.process.pid).children()
        if not children:
            return ""  # it has not begun
        command = ["nsenter", f"--target={children[0].pid}", "--mount", "--pid", "systemctl", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S).stdout.strip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the documentation says to install: code, environment and unit."""
    orders = tmp_path / "srv/ratchet/orders"
    for each in ("srv/ratchet/source", "srv/ratchet/packages", "etc/ratchet", "work", "units"):
        (tmp_path / each).mkdir(parents=True)
    orders.mkdir()
    (orders / "pipeline.py").write_text(PIPELINE)
    python = find_program("python3.11", "python3", ("usr/bin",))  # one outside of /root: homes are not to be seen
    subprocess.run([python, "-m", "venv", "--without-pip", str(orders / ".venv")], check=True)
    (site,) = (orders / ".venv/lib").glob("python*/site-packages")
    (site / "packages.pth").write_text("/srv/ratchet/source\n/srv/ratchet/packages\n")
    program = orders / ".venv/bin/ratchet"
    program.write_text("#!/srv/ratchet/orders/.venv/bin/python\nimport ratchet\n\nratchet.main()\n")
    program.chmod(0o755)
    for name, line in (
        ("passwd", "ratchet:x:10001:10001::/nonexistent:/usr/sbin/nologin"),
        ("group", "ratchet:x:10001:"),
    ):
        (tmp_path / "etc" / name).write_text(Path("/etc", name).read_text() + line + "\n")
    units = tmp_path / "units"
    (units / "ratchet@.service").write_text((ROOT / "deploy/systemd/ratchet@.service").read_text())
    (units / "ratchet@.service.d").mkdir()
    (units / "ratchet@.service.d/log.conf").write_text(
        "[Service]\nStandardOutput=append:/mnt/run.log\nStandardError=append:/mnt/run.log\n"
    )
    for name in TARGETS:
        (units / f"{name}.target").write_text("[Unit]\nDefaultDependencies=no\n")
    (units / "test.target").write_text(f"[Unit]\nWants={UNIT}\n")
    subprocess.run(["chown", "--recursive", "10001:10001", str(orders)], check=True)
    return tmp_path


@contextlib.contextmanager
def booted(folder: Path) -> Iterator[Systemd]:
    script = BOOT.format(
        folder=shlex.quote(str(folder)),
        root=shlex.quote(str(ROOT)),
        packages=shlex.quote(sysconfig.get_path("purelib")),
    )
    find_program("systemctl", "systemd")
    unshare = ["unshare", "--pid", "--mount", "--uts", "--ipc", "--cgroup", "--fork", "--kill-child", "--mount-proc"]
    with open(folder / "systemd.log", "wb") as log:
        process = subprocess.Popen([*unshare, "bash", "-c", script], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield Systemd(process)
    finally:
        process.kill()  # and with its first process, all of the namespace
        process.wait()


def test_a_topology_runs_and_stops_with_all_that_the_unit_forbids(
    servers: EmbeddedServers, postgres: PostgresServer, name: str, folder: Path
) -> None:
    settings = {
        "transactional.zookeeper.servers": servers.zookeeper,
        "spark.master": "local[1]",
        "app.database": postgres.dsn,
        "app.name": name,
        "app.table": name.replace("-", "_"),
    }
    (folder / "etc/ratchet/orders.toml").write_text(
        "".join(f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in settings.items())
    )
    (folder / "etc/ratchet/orders.env").write_text("TOPOLOGY=pipeline:topology\n")
    store = store_of(Config.of({"transactional.zookeeper.servers": [servers.zookeeper]}))
    began = time.monotonic()
    with booted(folder) as systemctl:

        def said() -> str:
            return "".join(path.read_text()[-3_000:] for path in folder.glob("*.log"))

        def committed() -> bool:
            assert systemctl.process.poll() is None, said()
            assert systemctl("show", "--property=NRestarts", UNIT) in ("NRestarts=0", ""), said()
            return any(each.status.get("committed_txid") for each in read_drivers(store, name))

        wait_for(committed, WAIT_S)
        print(f"first commit after {time.monotonic() - began:.1f} s on {sys.platform}")
        wait_for(lambda: systemctl("is-active", UNIT) == "active", WAIT_S)  # it has said that it leads
        systemctl("stop", UNIT)
        assert systemctl("show", "--property=ActiveState,Result", UNIT).split() == [
            "Result=success",
            "ActiveState=inactive",
        ], said()
    store.close()
    found = json.loads((folder / "srv/ratchet/orders/found.json").read_text())
    assert found == {
        "Seccomp": "2",
        "CapBnd": "0000000000000000",
        "NoNewPrivs": "1",
        "refused": [True, True, True],
        "homes": False,
    }
