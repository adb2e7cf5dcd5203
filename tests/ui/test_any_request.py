"""The page and the port of the metrics answer, or close, whatever bytes come.

``python -m tests.kit.http_fuzz`` does it for longer, in a process of its own: it lifts the
limits of the servers, which ``test_connection_limits.py`` and ``test_guard.py`` hold.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys

import pytest

from tests.kit.processes import ROOT
from tests.kit.waiting import PATIENCE_S
from tests.ui.sources import Told, get, served

pytestmark = pytest.mark.behaviour("6.4")


@pytest.mark.slow
def test_any_requests_show_no_trace_and_nothing_without_the_token() -> None:
    command = [sys.executable, "-m", "tests.kit.http_fuzz", "--minutes", "0.25"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=4 * PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    for status in ("200", "400", "401", "405", "421", "shown"):
        assert f"'{status}'" in done.stdout


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("header", ["Transfer-Encoding: chunked", "Content-Length: 100000000000"])
def test_a_body_without_end_is_not_read(method: str, header: str) -> None:
    with served(Told()) as port, socket.create_connection(("127.0.0.1", port), PATIENCE_S) as client:
        client.sendall(f"{method} /api/topologies/events HTTP/1.1\r\nHost: localhost\r\n{header}\r\n\r\n".encode())
        piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        with contextlib.suppress(ConnectionError):
            while True:  # until the page closes the connection
                client.sendall(piece)
        assert get(port, "/api/topologies")[0] == 200


def test_a_body_that_is_none_is_no_error_of_the_page(caplog: pytest.LogCaptureFixture) -> None:
    sent = b"HEAD / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + b"x" * 60_000
    with served(Told()) as port, socket.create_connection(("127.0.0.1", port), PATIENCE_S) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(sent)
            while client.recv(1 << 16):
                pass
        assert get(port, "/api/topologies")[0] == 200
    assert not [each for each in caplog.records if each.name.startswith(("asyncio", "uvicorn"))]


def test_the_page_of_one_topology_knows_no_other() -> None:
    """So its token shows none."""
    with served(Told("words"), token="token-of-this-one") as port:
        for path in ("/api/topology?id=", "/api/topology/events?id=", "/api/topology/transaction?txid=2&id="):
            assert get(port, f"{path}words", Authorization="Bearer other")[0] == 401
            for other in ("payments", "", "words/../payments", "%2e%2e"):
                status, _, body = get(port, f"{path}{other}", Authorization="Bearer token-of-this-one")
                assert (status, body) == (404, b'{"error":"there is no such thing"}')
