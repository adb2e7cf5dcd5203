"""Strangers at a channel that is open to the network: nothing of theirs is unpickled, their bytes
are bounded, and who has the key gets in."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from framework.execution import process_channels
from framework.execution.process_channels import STRANGERS_MAX, Channel, ChannelServer, Credentials, connect
from framework.execution.spark.certificate import new_certificate
from tests.kit.fuzzing import memory_mb
from tests.kit.waiting import PATIENCE_S, wait_for

pytestmark = pytest.mark.behaviour("6.4")


class Listening:
    """A server of channels off this host."""

    def __init__(self, within_s: float) -> None:
        self.credentials = Credentials.new(new_certificate())
        self.arrived: Queue[Channel] = Queue()
        self.server = ChannelServer(("127.0.0.1", 0), self.credentials, self.arrived.put, within_s)
        self.server.start()

    @property
    def place(self) -> tuple[str, int]:
        found = self.server.place
        assert not isinstance(found, str)
        return found

    def admits(self) -> None:
        """Who has the key gets in, and is heard."""
        with (
            connect(self.place, self.credentials, PATIENCE_S) as mine,
            self.arrived.get(timeout=PATIENCE_S) as theirs,
        ):
            mine.send("hello", PATIENCE_S)
            assert theirs.receive(PATIENCE_S) == "hello"


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listening]:
    failed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    found = Listening(PATIENCE_S)
    yield found
    found.server.close()
    wait_for(lambda: not any("_let_in" in each.name for each in threading.enumerate()))
    assert not failed


class Bomb:
    """A pickle that makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def inside_tls(listening: Listening, *, at_once: bool = True) -> ssl.SSLSocket:
    """A stranger who takes any certificate. ``at_once`` False: the handshake is for who reads."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    client = socket.create_connection(listening.place, PATIENCE_S)
    return context.wrap_socket(client, do_handshake_on_connect=at_once)


def is_cut(client: socket.socket) -> bool:
    try:
        while client.recv(1 << 16):
            pass
    except OSError:
        pass
    return True


def test_bytes_of_strangers_are_not_unpickled_and_bounded(listening: Listening, tmp_path: Path) -> None:
    payload = pickle.dumps(Bomb(tmp_path / "ran"))
    frame = struct.pack(">Q", len(payload)) + payload
    chance = random.Random(1)
    before = memory_mb()
    for number in range(60):
        lies = [frame, b"\0" * 64 + frame, struct.pack(">Q", 1 << 62) * 12, chance.randbytes(chance.randrange(300))]
        sent = lies[number % len(lies)]
        with contextlib.suppress(OSError), inside_tls(listening) as client:
            client.sendall(sent + b"x" * 100)
            assert is_cut(client)
    for sent in (frame, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + b"\xff" * 200, b"\0" * 1_000):
        with contextlib.suppress(OSError), socket.create_connection(listening.place, PATIENCE_S) as client:
            client.sendall(sent)
            assert is_cut(client)
    assert not (tmp_path / "ran").exists()
    assert memory_mb() - before < 100
    listening.admits()


@pytest.mark.slow
def test_a_thousand_silent_connections_hold_few_threads_and_keep_nobody_out(listening: Listening) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(1_000):
            client = stack.enter_context(socket.create_connection(listening.place, PATIENCE_S))
            if number % 2:
                client.sendall(b"\x16\x03\x01\x02")  # half of a handshake
            if number % 100 == 99:
                listening.admits()
        wait_for(lambda: sum("_let_in" in each.name for each in threading.enumerate()) <= STRANGERS_MAX + 1)
        listening.admits()


def test_silent_handshakes_end_in_time() -> None:
    found = Listening(0.3)
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(socket.create_connection(found.place, PATIENCE_S))
        half = stack.enter_context(socket.create_connection(found.place, PATIENCE_S))
        half.sendall(b"\x16\x03\x01\x02")
        # A slow machine may be cut in the handshake.
        silent = stack.enter_context(inside_tls(found, at_once=False))
        assert all(map(is_cut, (plain, half, silent)))
    found.server.close()


def test_who_sends_byte_after_byte_has_no_more_time() -> None:
    """In the handshake too, where each byte begins another wait."""
    found = Listening(0.5)
    with socket.create_connection(found.place, PATIENCE_S) as client:
        hello = b"\x16\x03\x01\x40\x00" + b"\x01" * 0x4000
        with pytest.raises(OSError):
            for each in hello:
                client.sendall(bytes([each]))
                threading.Event().wait(0.05)
        assert is_cut(client)
    found.server.close()


def test_another_key_with_the_same_certificate_is_refused(listening: Listening) -> None:
    other = Credentials(os.urandom(32), listening.credentials.certificate)
    with pytest.raises((EOFError, OSError)):
        connect(listening.place, other, PATIENCE_S)
    assert listening.arrived.empty()
    listening.admits()


def test_a_proof_that_was_seen_opens_nothing(listening: Listening) -> None:
    with inside_tls(listening) as client:
        asked = process_channels._exactly(client, 32)
        mine = os.urandom(32)
        client.sendall(
            mine + process_channels._proof(listening.credentials, b"server", asked, mine)
        )  # of the wrong side
        assert is_cut(client)
    assert listening.arrived.empty()
