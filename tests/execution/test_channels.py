"""Channels between processes of a run."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from pathlib import Path
from queue import Queue

import pytest

from framework.errors import ConfigError
from framework.execution import process_channels
from framework.execution.process_channels import MESSAGE_BYTES_MAX, Channel, ChannelServer, Credentials, connect
from tests.kit.waiting import PATIENCE_S


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "s")


def crowd(place: str) -> contextlib.ExitStack:
    """As many connections as the server can hold without accepting one."""
    held = contextlib.ExitStack()
    with pytest.raises(BlockingIOError):
        while True:
            each = held.enter_context(socket.socket(socket.AF_UNIX))
            each.setblocking(False)
            each.connect(place)
    return held


def test_a_server_that_has_many_to_accept_is_waited_for(place: str) -> None:
    credentials = Credentials.new(None)
    arrived: Queue[Channel] = Queue()
    server = ChannelServer(place, credentials, arrived.put, PATIENCE_S)
    made: Queue[Channel] = Queue()
    with crowd(place):
        thread = threading.Thread(target=lambda: made.put(connect(place, credentials, PATIENCE_S)))
        thread.start()
        server.start()
        with made.get(timeout=PATIENCE_S) as mine, arrived.get(timeout=PATIENCE_S) as theirs:
            mine.send("hello", PATIENCE_S)
            assert theirs.receive(PATIENCE_S) == "hello"
        thread.join()
    server.close()


def test_a_server_that_accepts_nobody_is_given_up(place: str) -> None:
    credentials = Credentials.new(None)
    server = ChannelServer(place, credentials, lambda channel: None, PATIENCE_S)
    with crowd(place), pytest.raises(TimeoutError, match="did not let anybody in"):
        connect(place, credentials, 0.05)
    server.close()


def test_a_message_of_any_length_is_neither_expected_nor_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of those who have the key: nothing is made room for."""
    for length in (2**64 - 1, MESSAGE_BYTES_MAX + 1):
        mine, theirs = socket.socketpair()
        with mine, Channel(theirs) as channel:
            mine.sendall(struct.pack(">Q", length))
            with pytest.raises(OSError, match=f"announced a message of {length:,} bytes"):
                channel.receive(PATIENCE_S)
    monkeypatch.setattr(process_channels, "MESSAGE_BYTES_MAX", 10)
    mine, theirs = socket.socketpair()
    with theirs, Channel(mine) as channel, pytest.raises(ConfigError, match="too many for one message"):
        channel.send("x" * 100, PATIENCE_S)
