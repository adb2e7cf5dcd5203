"""Homes as processes, without Spark: who may connect, what they answer, when they end."""

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

import pytest

from framework import Config
from framework.core import worker_client
from framework.core.plan import CorePlan
from framework.core.rounds import HomeLostError, Round, RoundReport
from framework.core.run import _round_executor
from framework.core.worker_client import Address, Channels, HomeClient, HomeSettings, close_home, unreachable
from framework.core.worker_process import ensure_home, start_home
from framework.execution.channels import STRANGERS_MAX, Credentials, connect
from framework.execution.plan import plan_execution
from tests.kit.certificates import new_pem
from tests.kit.homes import Overhearing
from tests.kit.journaled import alive, noted, word_count
from tests.kit.waiting import PATIENCE_S, WATCH_S


@pytest.fixture
def settings(tmp_path: Path) -> HomeSettings:
    plan = CorePlan(plan_execution(word_count(tmp_path, 10, spouts=1)), {}, ackers=1, pending_max=100)
    return HomeSettings.of(plan, 60.0, None)


@pytest.fixture
def home(settings: HomeSettings) -> Iterator[Address]:
    address = start_home(settings, 0)
    yield address
    if alive(address.pid):
        os.kill(address.pid, signal.SIGKILL)


def gone(pid: int, seconds: float = PATIENCE_S) -> bool:
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


def courier(settings: HomeSettings, home: Address, answer_s: float = 30.0) -> HomeClient:
    return HomeClient(
        [home], settings.credentials, {(level, partition): 0 for level in range(4) for partition in range(4)}, answer_s
    )


def test_a_round_goes_through_a_home_and_tasks_stay_there(
    settings: HomeSettings, home: Address, tmp_path: Path
) -> None:
    carrier = courier(settings, home)
    for number in (1, 2):
        records = carrier.walk(Round(number), [1, 2, 3, 1])
        assert any(isinstance(each, RoundReport) for each in records)
    assert len(noted(tmp_path, "opened")) == 1
    assert len(noted(tmp_path, "seen")) > 10
    close_home(home, settings.credentials)
    assert noted(tmp_path, "closed") == ["0"]
    assert gone(home.pid)


def test_a_home_collects_garbage_rarely_and_not_among_what_it_has_imported(
    settings: HomeSettings, home: Address, tmp_path: Path
) -> None:
    courier(settings, home).walk(Round(1), [1, 2, 3, 1])
    threshold, frozen = map(int, noted(tmp_path, "collector")[0].split())
    assert threshold >= 10_000
    assert frozen > 10_000


@pytest.mark.parametrize("from_outside", [True, False])
def test_a_round_stops_waiting_when_one_spout_emits_or_the_driver_wakes_it(
    settings: HomeSettings, tmp_path: Path, from_outside: bool
) -> None:
    """Two homes with a spout task each; one of the two spout tasks never has a tuple."""
    plan = CorePlan(plan_execution(word_count(tmp_path, 1, spouts=2)), {}, ackers=1, pending_max=100)
    settings = HomeSettings.of(plan, 60.0, None)
    homes_ = [start_home(settings, number) for number in (0, 1)]
    try:
        carrier = HomeClient(
            homes_, settings.credentials, {(level, each): each % 2 for level in range(4) for each in range(4)}, 90.0
        )
        ended = threading.Event()

        def walk(number: int) -> None:
            with contextlib.suppress(HomeLostError):  # in the end
                carrier.walk(Round(number, spout_wait_s=80.0), plan.widths)
                ended.set()

        threading.Thread(target=walk, args=(1,), daemon=True).start()
        assert ended.wait(PATIENCE_S)  # there is one sentence
        ended.clear()
        threading.Thread(target=walk, args=(2,), daemon=True).start()
        assert not ended.wait(WATCH_S)  # there is no other
        if from_outside:
            HomeClient(homes_, settings.credentials, {}, 60.0).wake(0)
            assert ended.wait(PATIENCE_S)
    finally:
        for each in homes_:
            os.kill(each.pid, signal.SIGKILL)


def test_a_connection_without_the_key_is_refused(settings: HomeSettings, home: Address) -> None:
    with pytest.raises(EOFError):
        connect(home.place, Credentials.new(None), 10.0)
    assert courier(settings, home).ask(0, "ping") is None


@pytest.fixture
def listening(settings: HomeSettings) -> Iterator[tuple[HomeSettings, Address]]:
    """A home that listens on the network, as on a cluster."""
    settings = replace(settings, credentials=Credentials.new(new_pem()), driver_host="127.0.0.1")
    address = start_home(settings, 0)
    yield settings, address
    if alive(address.pid):
        os.kill(address.pid, signal.SIGKILL)


@pytest.mark.rule("C40")
def test_silent_connections_do_not_block_a_home(
    listening: tuple[HomeSettings, Address], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, home = listening
    monkeypatch.setattr(worker_client, "CONNECT_S", 5.0)
    with contextlib.ExitStack() as silent:
        for _ in range(STRANGERS_MAX + 5):
            silent.enter_context(socket.create_connection(home.place))
        assert ensure_home(settings, 0, home) == home


@pytest.mark.rule("C40")
def test_traffic_to_a_home_on_another_host_is_encrypted(listening: tuple[HomeSettings, Address]) -> None:
    settings, home = listening
    assert isinstance(home.place, tuple)
    with Overhearing(home.place) as wire:
        courier(settings, home._replace(place=wire.place)).ask(0, "no such thing: an open secret")
    assert len(wire.heard) > 200
    assert b"open secret" not in wire.heard


@pytest.mark.rule("C40")
def test_a_client_refuses_a_home_with_another_certificate(listening: tuple[HomeSettings, Address]) -> None:
    settings, home = listening
    other = replace(settings.credentials, certificate=new_pem())
    with pytest.raises(ssl.SSLCertVerificationError):
        connect(home.place, other, 10.0)


def test_a_late_answer_of_a_home_is_not_taken_for_the_next_one(settings: HomeSettings, home: Address) -> None:
    carrier = courier(settings, home)
    carrier._send(0, ("run", Round(1), 0, [(0, [])]))  # a task that was killed before the answer came
    assert carrier.ask(0, "ping") is None


def test_a_home_answers_two_rounds_that_overlap_on_channels_of_their_own(settings: HomeSettings, home: Address) -> None:
    """A home answers a channel's messages in turn: the later round must not be behind the earlier
    one in its channel.
    """
    first, second = Channels(), Channels()
    clients = [HomeClient([home], settings.credentials, {}, 30.0, channels=each) for each in (first, second)]
    clients[0]._send(0, ("run", Round(2, follows=1), 0, [(0, [])]))  # waits for round 1
    clients[1]._send(0, ("run", Round(1), 0, [(0, [])]))
    for client in reversed(clients):
        assert any(isinstance(record, RoundReport) for _, record in client._answer(0, 30.0))
    first.close()
    second.close()
    assert first.known(home) is None


def test_the_reason_why_a_home_cannot_be_reached_is_told(
    settings: HomeSettings, home: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert unreachable(home, settings.credentials) is None
    assert "does not reach home 0" in (unreachable(home, Credentials.new(None)) or "")
    monkeypatch.setattr(worker_client, "REACH_S", 0.5)
    os.kill(home.pid, signal.SIGSTOP)
    try:
        assert "did not let anybody in for 0.5 s" in (unreachable(home, settings.credentials) or "")
    finally:
        os.kill(home.pid, signal.SIGCONT)


def test_a_lost_home_is_named_and_replaced(settings: HomeSettings, home: Address) -> None:
    assert ensure_home(settings, 0, home) == home
    os.kill(home.pid, signal.SIGKILL)
    assert gone(home.pid)
    with pytest.raises(HomeLostError, match=rf"home 0 \(pid {home.pid}\) is gone"):
        courier(settings, home).ask(0, "ping")
    other = ensure_home(settings, 0, home)
    assert other.pid != home.pid
    assert courier(settings, other).ask(0, "ping") is None
    close_home(other, settings.credentials)


@pytest.mark.dies("core 4")
@pytest.mark.parametrize(("timeout_s", "given_up_s"), [(5, 60), (15, 60), (16, 64), (30, 120)])
def test_a_round_is_given_up_after_four_message_timeouts_and_a_minute_at_least(
    tmp_path: Path, timeout_s: float, given_up_s: float
) -> None:
    plan = CorePlan(plan_execution(word_count(tmp_path, 1)), {}, ackers=1, pending_max=100)
    rounds = _round_executor("spark", plan, Config.of({"topology.message.timeout.secs": timeout_s}))
    assert HomeSettings.of(plan, rounds._answer_s, None).answer_s == given_up_s


def test_a_home_that_hangs_counts_as_lost(
    settings: HomeSettings, home: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_client, "CONNECT_S", 0.5)
    os.kill(home.pid, signal.SIGSTOP)
    with pytest.raises(HomeLostError, match=r"did not let anybody in for 0\.5 s"):
        courier(settings, home).ask(0, "ping")
    os.kill(home.pid, signal.SIGCONT)


@pytest.mark.dies("core 5", "core 6")
def test_a_home_ends_with_the_process_that_it_belongs_to(settings: HomeSettings) -> None:
    """Here that is the parent of the process that starts it: there is no JVM above."""
    code = (
        "import pickle, sys; from framework.core.worker_process import start_home;"
        "print(start_home(pickle.load(sys.stdin.buffer), 0).pid, flush=True)"
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
