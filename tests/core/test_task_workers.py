"""Task workers as processes, without Spark: who may connect, what they answer, when they end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from framework import Config
from framework.core import worker_client
from framework.core.plan import CorePlan
from framework.core.round_protocol import Round, RoundReport, WorkerLostError
from framework.core.run import _round_executor
from framework.core.worker_client import Address, Channels, WorkerClient, WorkerSettings, close_worker, unreachable
from framework.core.worker_process import ensure_worker, start_worker
from framework.execution.plan import plan_execution
from framework.execution.process_channels import STRANGERS_MAX, Channel, Credentials, connect
from integration.processes import freeze
from tests.kit.certificates import new_pem
from tests.kit.journaled import alive, noted, word_count
from tests.kit.task_workers import Overhearing
from tests.kit.waiting import PATIENCE_S, WATCH_S


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task worker that stands still for a while is lost to a driver, which repeats a round; not
    to these tests, unless they say so."""
    for each in ("CONNECT_S", "REACH_S"):
        monkeypatch.setattr(worker_client, each, PATIENCE_S)


def settings_of(folder: Path) -> WorkerSettings:
    plan = CorePlan(plan_execution(word_count(folder, 10, spouts=1)), {}, ackers=1, pending_max=100)
    return WorkerSettings.of(plan, 60.0, None)


@contextlib.contextmanager
def started(settings: WorkerSettings) -> Iterator[Address]:
    address = start_worker(settings, 0)
    yield address
    if alive(address.pid):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(address.pid, signal.SIGKILL)


@pytest.fixture
def settings(tmp_path: Path) -> WorkerSettings:
    return settings_of(tmp_path)


@pytest.fixture
def worker(settings: WorkerSettings) -> Iterator[Address]:
    with started(settings) as address:
        yield address


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WorkerSettings, Address]]:
    """A task worker that no test kills, or lets work."""
    settings = settings_of(tmp_path_factory.mktemp("idle"))
    with started(settings) as address:
        yield settings, address


def gone(pid: int, seconds: float = PATIENCE_S) -> bool:
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


def courier(settings: WorkerSettings, worker: Address, answer_s: float = PATIENCE_S) -> WorkerClient:
    return WorkerClient(
        [worker],
        settings.credentials,
        {(level, partition): 0 for level in range(4) for partition in range(4)},
        answer_s,
    )


def test_a_round_goes_through_a_worker_and_tasks_stay_there(
    settings: WorkerSettings, worker: Address, tmp_path: Path
) -> None:
    carrier = courier(settings, worker)
    for number in (1, 2):
        records = carrier.walk(Round(number), [1, 2, 3, 1])
        assert any(isinstance(each, RoundReport) for each in records)
    assert len(noted(tmp_path, "opened")) == 1
    assert len(noted(tmp_path, "seen")) > 10
    close_worker(worker, settings.credentials)
    assert noted(tmp_path, "closed") == ["0"]
    assert gone(worker.pid)


def test_a_worker_collects_garbage_rarely_and_not_among_what_it_has_imported(
    settings: WorkerSettings, worker: Address, tmp_path: Path
) -> None:
    courier(settings, worker).walk(Round(1), [1, 2, 3, 1])
    threshold, frozen = map(int, noted(tmp_path, "collector")[0].split())
    assert threshold >= 10_000
    assert frozen > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("from_outside", [True, False])
def test_a_round_stops_waiting_when_one_spout_emits_or_the_driver_wakes_it(
    settings: WorkerSettings, tmp_path: Path, from_outside: bool
) -> None:
    """Two task workers with a spout task each; one of the two spout tasks never has a tuple."""
    plan = CorePlan(plan_execution(word_count(tmp_path, 1, spouts=2)), {}, ackers=1, pending_max=100)
    settings = WorkerSettings.of(plan, 60.0, None)
    workers_ = [start_worker(settings, number) for number in (0, 1)]
    try:
        carrier = WorkerClient(
            workers_, settings.credentials, {(level, each): each % 2 for level in range(4) for each in range(4)}, 90.0
        )
        ended = threading.Event()

        def walk(number: int) -> None:
            with contextlib.suppress(WorkerLostError):  # in the end
                carrier.walk(Round(number, spout_wait_s=80.0), plan.widths)
                ended.set()

        threading.Thread(target=walk, args=(1,), daemon=True).start()
        assert ended.wait(PATIENCE_S)  # there is one sentence
        ended.clear()
        threading.Thread(target=walk, args=(2,), daemon=True).start()
        assert not ended.wait(WATCH_S)  # there is no other
        if from_outside:
            WorkerClient(workers_, settings.credentials, {}, 60.0).wake(0)
            assert ended.wait(PATIENCE_S)
    finally:
        for each in workers_:
            os.kill(each.pid, signal.SIGKILL)


def test_a_connection_without_the_key_is_refused(idle: tuple[WorkerSettings, Address]) -> None:
    settings, worker = idle
    with pytest.raises(EOFError):
        connect(worker.place, Credentials.new(None), PATIENCE_S)
    assert courier(settings, worker).ask(0, "ping") is None


@pytest.fixture(scope="module")
def listening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WorkerSettings, Address]]:
    """A task worker that listens on the network, as on a cluster; no test kills it."""
    settings = replace(
        settings_of(tmp_path_factory.mktemp("listening")),
        credentials=Credentials.new(new_pem()),
        driver_host="127.0.0.1",
    )
    with started(settings) as address:
        yield settings, address


@pytest.mark.slow
@pytest.mark.rule("C40")
def test_silent_connections_do_not_block_a_worker(
    listening: tuple[WorkerSettings, Address], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, worker = listening
    monkeypatch.setattr(worker_client, "CONNECT_S", 5.0)
    with contextlib.ExitStack() as silent:
        for _ in range(STRANGERS_MAX + 5):
            silent.enter_context(socket.create_connection(worker.place))
        assert ensure_worker(settings, 0, worker) == worker


@pytest.mark.rule("C40")
def test_traffic_to_a_worker_on_another_host_is_encrypted(listening: tuple[WorkerSettings, Address]) -> None:
    settings, worker = listening
    assert isinstance(worker.place, tuple)
    with Overhearing(worker.place) as wire:
        courier(settings, worker._replace(place=wire.place)).ask(0, "no such thing: an open secret")
    assert len(wire.heard) > 200
    assert b"open secret" not in wire.heard


@pytest.mark.rule("C40")
def test_a_client_refuses_a_worker_with_another_certificate(listening: tuple[WorkerSettings, Address]) -> None:
    settings, worker = listening
    other = replace(settings.credentials, certificate=new_pem())
    with pytest.raises(ssl.SSLCertVerificationError):
        connect(worker.place, other, PATIENCE_S)


def test_a_late_answer_of_a_worker_is_not_taken_for_the_next_one(settings: WorkerSettings, worker: Address) -> None:
    carrier = courier(settings, worker)
    carrier._send(0, ("run", Round(1), 0, [(0, [])]))  # a task that was killed before the answer came
    assert carrier.ask(0, "ping") is None


def test_a_worker_answers_two_rounds_that_overlap_on_channels_of_their_own(
    settings: WorkerSettings, worker: Address
) -> None:
    """A worker answers a channel's messages in turn: the later round must not be behind the earlier
    one in its channel.
    """
    first, second = Channels(), Channels()
    clients = [WorkerClient([worker], settings.credentials, {}, PATIENCE_S, channels=each) for each in (first, second)]
    clients[0]._send(0, ("run", Round(2, follows=1), 0, [(0, [])]))  # waits for round 1
    clients[1]._send(0, ("run", Round(1), 0, [(0, [])]))
    for client in reversed(clients):
        assert any(isinstance(record, RoundReport) for _, record in client._answer(0, PATIENCE_S))
    first.close()
    second.close()
    assert first.known(worker) is None


def test_the_reason_why_a_worker_cannot_be_reached_is_told(
    idle: tuple[WorkerSettings, Address], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, worker = idle
    assert unreachable(worker, settings.credentials) is None
    assert "does not reach task worker 0" in (unreachable(worker, Credentials.new(None)) or "")
    monkeypatch.setattr(worker_client, "REACH_S", 0.5)
    freeze(worker.pid)
    try:
        assert "did not let anybody in for 0.5 s" in (unreachable(worker, settings.credentials) or "")
    finally:
        os.kill(worker.pid, signal.SIGCONT)


def test_a_channel_that_breaks_once_leaves_a_worker_in_reach(
    idle: tuple[WorkerSettings, Address], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker has closed it, because this process stood still before it showed its key."""
    settings, worker = idle
    errors = [BrokenPipeError()]

    def connected(*arguments: Any) -> Channel:
        if errors:
            raise errors.pop()
        return connect(*arguments)

    monkeypatch.setattr(worker_client, "connect", connected)
    assert unreachable(worker, settings.credentials) is None
    assert not errors


def test_a_lost_worker_is_named_and_replaced(settings: WorkerSettings, worker: Address) -> None:
    assert ensure_worker(settings, 0, worker) == worker
    os.kill(worker.pid, signal.SIGKILL)
    assert gone(worker.pid)
    with pytest.raises(WorkerLostError, match=rf"task worker 0 \(pid {worker.pid}\) is gone"):
        courier(settings, worker).ask(0, "ping")
    other = ensure_worker(settings, 0, worker)
    assert other.pid != worker.pid
    assert courier(settings, other).ask(0, "ping") is None
    close_worker(other, settings.credentials)


@pytest.mark.dies("core 4")
@pytest.mark.parametrize(("timeout_s", "given_up_s"), [(5, 60), (15, 60), (16, 64), (30, 120)])
def test_a_round_is_given_up_after_four_message_timeouts_and_a_minute_at_least(
    tmp_path: Path, timeout_s: float, given_up_s: float
) -> None:
    plan = CorePlan(plan_execution(word_count(tmp_path, 1)), {}, ackers=1, pending_max=100)
    rounds = _round_executor("spark", plan, Config.of({"topology.message.timeout.secs": timeout_s}))
    assert WorkerSettings.of(plan, rounds._answer_s, None).answer_s == given_up_s


def test_a_worker_that_hangs_counts_as_lost(
    settings: WorkerSettings, worker: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_client, "CONNECT_S", 0.5)
    freeze(worker.pid)
    with pytest.raises(WorkerLostError, match=r"did not let anybody in for 0\.5 s"):
        courier(settings, worker).ask(0, "ping")
    os.kill(worker.pid, signal.SIGCONT)


@pytest.mark.dies("core 5", "core 6")
def test_a_worker_ends_with_the_process_that_it_belongs_to(settings: WorkerSettings) -> None:
    """Here that is the parent of the process that starts it: there is no JVM above."""
    code = (
        "import pickle, sys; from framework.core.worker_process import start_worker;"
        "print(start_worker(pickle.load(sys.stdin.buffer), 0).pid, flush=True)"
    )
    command = [
        sys.executable,
        "-c",
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}]); input()",
    ]
    import pickle

    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        pickle.dump(settings, parent.stdin)
        parent.stdin.flush()
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    assert gone(pid)
