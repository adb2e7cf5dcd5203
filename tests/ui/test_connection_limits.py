"""The door of the page: a driver has files and a processor left, whoever connects."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from framework.ui import connection_limits, server
from framework.ui.connection_limits import BoundedListener, PromptProtocol
from tests.kit.waiting import PATIENCE_S, wait_for
from tests.ui.sources import Told, get, served

pytestmark = pytest.mark.behaviour("6.4")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[BoundedListener]:
    monkeypatch.setattr(connection_limits, "_SHUT_S", 0.0)
    monkeypatch.setattr(connection_limits, "PER_SECOND", 0.001)  # clients on a busy machine come slowly
    with BoundedListener(socket.create_server(("127.0.0.1", 0)), most=4) as found:
        yield found


def come(at: BoundedListener, of: str = "127.0.0.1") -> socket.socket:
    """A client of this address of the loopback interface."""
    return socket.create_connection(at.getsockname(), timeout=PATIENCE_S, source_address=(of, 0))


def is_cut(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_one_address_gets_half_of_the_places_and_a_place_that_is_left_is_free(opened: BoundedListener) -> None:
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(come(opened))
        inside = [opened.accept()[0] for _ in range(2)]
        third = stack.enter_context(come(opened))
        with pytest.raises(ConnectionAbortedError, match="too many"):
            opened.accept()
        assert is_cut(third)
        inside.pop().close()
        stack.enter_context(come(opened))
        inside.append(opened.accept()[0])
        for _ in range(2):
            stack.enter_context(come(opened, "127.0.0.2"))
            inside.append(opened.accept()[0])
        late = stack.enter_context(come(opened, "127.0.0.3"))
        with pytest.raises(ConnectionAbortedError, match="too many"):
            opened.accept()
        assert is_cut(late)
        for each in inside:
            each.close()
        assert not opened._inside


def test_connections_that_come_too_fast_are_closed(opened: BoundedListener) -> None:
    refused = 0
    for _ in range(2 * connection_limits.BURST):
        with come(opened):
            try:
                opened.accept()[0].close()
            except ConnectionAbortedError:
                refused += 1
    assert refused > 0


def test_without_a_free_file_the_next_connection_is_turned_away_and_waits_no_longer(
    opened: BoundedListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.socket.accept
    files_left = [False, True]  # none at first; then the one that the door gave up

    def accept(self: socket.socket) -> object:
        if not files_left.pop(0):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(self)

    with come(opened) as client:
        monkeypatch.setattr(socket.socket, "accept", accept)
        with pytest.raises(ConnectionAbortedError, match="no file"):
            opened.accept()
        assert is_cut(client)
        assert opened._spare is not None


def test_a_page_takes_a_quarter_of_the_files_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.resource, "getrlimit", lambda _: (100, 100))
    with server._listen("127.0.0.1", 0) as found:
        assert found._most == 25
    monkeypatch.setattr(server.resource, "getrlimit", lambda _: (1_000_000, 1_000_000))
    with server._listen("127.0.0.1", 0) as found:
        assert found._most == connection_limits.CONNECTIONS_MAX


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"], ids=["nothing", "half a request"])
def test_those_who_ask_nothing_make_room_and_the_page_is_there_again(
    monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 8)
    monkeypatch.setattr(connection_limits, "SILENT_S", 0.3)
    with served(Told()) as port, ExitStack() as stack:
        before = len(os.listdir("/proc/self/fd"))
        silent = []
        for _ in range(40):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
            client.sendall(said)
            silent.append(client)
        assert len(os.listdir("/proc/self/fd")) - before <= 40 + 8
        for client in silent:
            assert is_cut(client)

        def answers() -> bool:
            try:
                return get(port, "/api/topologies")[0] == 200
            except OSError:
                return False

        wait_for(answers)


def test_an_answer_that_is_long_in_coming_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time without a request is over again and again while the source is asked."""
    monkeypatch.setattr(connection_limits, "SILENT_S", 10.0**6)
    opened: list[PromptProtocol] = []
    real = PromptProtocol.connection_made

    def noted(self: PromptProtocol, transport: Any) -> None:
        opened.append(self)
        real(self, transport)

    class Slow(Told):
        def _answer(self) -> None:
            (connection,) = opened
            for _ in range(3):
                looked = threading.Event()
                connection.loop.call_soon_threadsafe(connection._look)
                connection.loop.call_soon_threadsafe(looked.set)
                assert looked.wait(PATIENCE_S)

    monkeypatch.setattr(PromptProtocol, "connection_made", noted)
    with served(Slow()) as port:
        assert get(port, "/api/topologies")[0] == 200
