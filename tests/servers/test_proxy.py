"""The proxy that makes links bad, over an echo server."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

from integration import TcpProxy
from tests.kit.waiting import PATIENCE_S


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while data := self.request.recv(65_536):
            self.server.received += data  # type: ignore[attr-defined]
            self.request.sendall(data)


@pytest.fixture
def echo() -> Iterator[socketserver.ThreadingTCPServer]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        server.received = b""  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def link(echo: socketserver.ThreadingTCPServer) -> Iterator[TcpProxy]:
    with TcpProxy(f"127.0.0.1:{echo.server_address[1]}") as proxy:
        yield proxy


def connected(link: TcpProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", link.port), timeout=PATIENCE_S)


def ask(connection: socket.socket, words: bytes) -> bytes:
    connection.sendall(words)
    answer = b""
    while len(answer) < len(words):
        piece = connection.recv(65_536)
        if not piece:
            raise ConnectionResetError
        answer += piece
    return answer


def test_bytes_pass_whole_through_a_sliced_and_a_slow_link(link: TcpProxy) -> None:
    with connected(link) as connection:
        words = bytes(range(256)) * 1000
        assert ask(connection, words) == words
        link.slice(7)
        assert ask(connection, words[:5000]) == words[:5000]
        link.heal()
        link.delay(0.2)
        start = time.monotonic()
        assert ask(connection, b"slow") == b"slow"
        assert time.monotonic() - start >= 0.4  # both ways


def test_a_black_hole_passes_nothing_until_it_is_healed(link: TcpProxy) -> None:
    with connected(link) as connection:
        assert ask(connection, b"a") == b"a"
        link.black_hole()
        connection.sendall(b"b")
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        link.heal()
        connection.settimeout(PATIENCE_S)
        assert connection.recv(1) == b"b"


def test_lose_replies_delivers_the_request_and_drops_the_reply(
    link: TcpProxy, echo: socketserver.ThreadingTCPServer
) -> None:
    with connected(link) as connection:
        assert ask(connection, b"a") == b"a"
        link.lose_replies()
        with pytest.raises(OSError):
            ask(connection, b"b")
        assert echo.received == b"ab"  # type: ignore[attr-defined]
        assert link.dropped == 1
    link.heal()
    with connected(link) as connection:
        assert ask(connection, b"c") == b"c"


def test_a_cut_ends_connections_and_refuses_new_ones_and_a_reset_only_ends_them(link: TcpProxy) -> None:
    with connected(link) as connection:
        assert ask(connection, b"a") == b"a"
        link.reset()
        with pytest.raises(OSError):
            ask(connection, b"b")
    with connected(link) as connection:
        assert ask(connection, b"c") == b"c"
        link.cut()
        with pytest.raises(OSError):
            ask(connection, b"d")
    with pytest.raises(OSError), connected(link) as connection:
        ask(connection, b"e")
    link.heal()
    with connected(link) as connection:
        assert ask(connection, b"f") == b"f"


@pytest.mark.parametrize("act", ["reset", "cut", "close"])
def test_a_connection_that_is_being_made_is_reset_too(
    link: TcpProxy, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    def slow(*where: object, **options: object) -> socket.socket:
        made = real(*where, **options)  # type: ignore[arg-type]
        if where == (link._target,):
            getattr(link, act)()
        return made

    real = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", slow)
    with pytest.raises(OSError), connected(link) as connection:
        ask(connection, b"a")


def test_a_connection_to_a_dead_server_is_reset(link: TcpProxy, echo: socketserver.ThreadingTCPServer) -> None:
    echo.shutdown()
    echo.server_close()
    with pytest.raises(OSError), connected(link) as connection:
        ask(connection, b"a")
