"""A run as a service: what it tells systemd, and the unit of ``deploy/systemd``."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.commands import systemd_notify
from framework.commands.foreground_run import supervise
from framework.commands.systemd_notify import ServiceManager
from framework.transactions import MemoryStore
from sinks import Count, MemoryBackend, OpaqueMapState, StateCommitter
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.processes import ROOT
from tests.kit.waiting import PATIENCE_S


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Callable[[], list[str]]]:
    """A service manager's socket: a function that returns what came since it was called last."""
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.bind(str(tmp_path / "notify"))
    receiver.setblocking(False)

    def received() -> list[str]:
        found = []
        while True:
            try:
                found.append(receiver.recv(4096).decode())
            except BlockingIOError:
                return found

    yield received
    receiver.close()


def test_a_run_says_when_it_leads_that_it_works_and_that_it_stops(
    tmp_path: Path, told: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    builder = TransactionalTopologyBuilder(
        "served", "spout", OpaqueMemoryTransactionalSpout({0: [["a"]]}, Fields(word=str), 1)
    )
    state = OpaqueMapState(MemoryBackend())
    builder.set_bolt("count", StateCommitter(state, ["word"], {"n": Count()})).global_grouping("spout")
    run = submit(builder.build(), store=MemoryStore(), executor="local")
    run.wait_until_caught_up(PATIENCE_S)
    assert supervise(run, threading.Event(), until_caught_up=True)
    first, *_, last = told()
    assert first == "READY=1\nWATCHDOG=1\nSTATUS=running" and last == "STOPPING=1"


def test_it_is_ready_once_and_tells_as_often_as_the_watchdog_asks(
    tmp_path: Path, told: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(systemd_notify.time, "monotonic", lambda: now[0])
    manager = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "500000"})
    manager.tell("starting", ready=False)
    manager.tell("running", ready=True)  # at once
    now[0] += 0.2
    manager.tell("running", ready=True)
    now[0] += 0.06
    manager.tell("running", ready=True)
    assert told() == [
        "WATCHDOG=1\nSTATUS=starting",
        "READY=1\nWATCHDOG=1\nSTATUS=running",
        "WATCHDOG=1\nSTATUS=running",
    ]


@pytest.mark.parametrize("address", ["", "/there/is/nothing"])
def test_without_a_manager_nothing_happens(address: str) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "soon"})
    manager.tell("running", ready=True)
    manager.stopping()


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed: the unit is not checked")
    text, unit = (ROOT / "deploy/systemd/ratchet@.service").read_text(), tmp_path / "ratchet@orders.service"

    def verified(changed: str) -> tuple[int, str]:
        unit.write_text(changed)
        done = subprocess.run([analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    assert verified(text.replace("User=ratchet", "User=root")) == (0, "")
    assert "notified" in verified(text.replace("Type=notify", "Type=notified"))[1]  # it does look at the file


def test_the_unit_forbids_what_a_topology_does_not_need() -> None:
    """By systemd's own figure, from 0 to 10. ``tests/deploy/test_service.py`` runs such a unit."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed: the unit is not checked")
    unit = ROOT / "deploy/systemd/ratchet@.service"
    command = [analyze, "security", "--no-pager", "--offline=true", "--threshold=20", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Overall exposure level" in done.stdout, done.stdout + done.stderr
