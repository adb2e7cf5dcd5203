"""A fuzzer of requests to the page and to the port of the metrics.

``python -m tests.kit.http_fuzz --minutes 60 --seed 1``: whatever bytes come, a client is shown no
trace, the log has none, nothing of a topology is shown without the token or to another host's name,
and the next good request is answered.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import logging
import random
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import structlog
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from framework.observe import metrics
from framework.observe.metrics_server import serve_metrics
from framework.ui import app, connection_limits, guard
from integration.server import free_port
from tests.kit.fuzzing import Counts, go_on
from tests.kit.waiting import PATIENCE_S
from tests.ui.sources import Told, served

TOKEN = "correct-horse-battery"
#: What is shown to those who may see it.
CANARY = "canary-of-a-topology"
REQUESTS = 40
_QUIET_S = 0.02
_PATHS = [
    *("/", "/topology", "/enter", "/static/page.css", "/static/page.js", "/metrics", "/healthz", "/readyz"),
    *("/api/topologies", f"/api/topology?id={CANARY}", f"/api/topology/transaction?id={CANARY}&txid=2"),
    *(f"/api/topology/events?id={CANARY}", "/api/topologies/events"),
    *("/static/../app.py", "/static/%2e%2e/app.py", "/static//etc/passwd", "/static/..%5capp.py", "//api/topologies"),
    *("/enter/../api/topologies", "/static/page.css/../../api/topologies", "http://a/api/topologies", "*", "/\x00"),
    *("/api/topology?id=" + "%00" * 50, f"/api/topology/transaction?id={CANARY}&txid=²", "/?" + "a=b&" * 3_000),
]
#: Hosts by which nobody may ask.
_OTHERS = ["evil.example", "", "127.0.0.1@evil", "²", "a" * 5_000, "["]
_HOSTS = ["127.0.0.1", "localhost", "[::1", "127.0.0.1:x", *_OTHERS]
_METHODS = ["GET", "GET", "GET", "HEAD", "POST", "PUT", "CONNECT", "OPTIONS", "TRACE", "get", "G\x00T", "PRI"]
_BODIES = [
    b"",
    b"token=x",
    b"token=" + b"x" * 20_000,
    b"5\r\ntoken\r\n0\r\n\r\n",
    b"ffffffffffffffff\r\nx",
    b"-1\r\nx\r\n",
    b"5;" + b"a" * 3_000 + b"\r\ntoken\r\n",
    b"token=%ff%00%" * 100,
]
_PARTS = [b"", b"\r\n", b"\n", b"\r", b"\0", b":", b" ", b"\t", b"\xff", b"%", b"a" * 20_000, b"HTTP/9.9", b";", b","]
_TRACE = re.compile(rb'Traceback \(most|File "|line \d+, in|the page failed|A server error occurred|Error:')


class Figures(Collector):
    def collect(self) -> Iterator[Any]:
        yield GaugeMetricFamily("ratchet_x", CANARY, 1.0)


class Servers:
    """The page, with a token, and the metrics. ``trouble``: what a server's log would have had."""

    def __init__(self) -> None:
        self.trouble: list[str] = []
        stack = contextlib.ExitStack()
        for module, name, value in (
            (guard, "BURST", 10**9),
            (guard, "_TOO_OFTEN_S", 0.0),
            (guard, "WRONG_BURST", 10**9),
            (connection_limits, "BURST", 10**9),
            (app, "VIEWERS_MAX", 10**9),
            (metrics, "_ACCEPT_S", 0.0),
            (metrics, "_SHARE", 1.0),
        ):
            setattr(module, name, value)
        self.page = stack.enter_context(served(Told(CANARY), token=TOKEN))
        self.metrics = free_port()
        serve_metrics(Figures(), "127.0.0.1", self.metrics, lambda: (True, True, {"topology": CANARY}))
        threading.excepthook = lambda found: self.trouble.append(f"{found.exc_type}: {found.exc_value}")
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self.trouble.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("asyncio").addHandler(handler)
        #: The level of a run by default: a client that goes away is a line of debugging only.
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
        self._stack = stack


@functools.cache
def servers() -> Servers:
    return Servers()


def fuzz(seed: int) -> Counts:
    """A few requests, each on a connection of its own."""
    counts: Counts = collections.Counter()
    chance = random.Random(seed)
    its = servers()
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        _fuzz_requests(seed, chance, counts)
    assert not its.trouble and not printed.getvalue(), (seed, its.trouble, printed.getvalue())
    return counts


def _fuzz_requests(seed: int, chance: random.Random, counts: Counts) -> None:
    its = servers()
    for _ in range(REQUESTS):
        port = its.page if chance.random() < 0.7 else its.metrics
        with_token = port == its.page and chance.random() < 0.3
        sent, host = request(chance, TOKEN if with_token else None)
        answer = answered(port, sent, chance)
        seen = f"{seed}: {sent[:300]!r} -> {answer[:300]!r}"
        assert not _TRACE.search(answer), seen
        status = re.match(rb"HTTP/1\.[01] (\d{3}) ", answer)
        assert status or port == its.metrics or not answer, seen
        if CANARY.encode() in answer:
            assert with_token or port == its.metrics, seen
            assert host not in _OTHERS, seen
            counts["shown"] += 1
        counts[status[1].decode() if status else "no answer"] += 1
    good = b"GET /%s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer %s\r\n\r\n"
    for port, path in ((its.page, b"api/topologies"), (its.metrics, b"metrics")):
        answer = answered(port, good % (path, TOKEN.encode()), None)
        assert answer.startswith(b"HTTP/1") and b" 200 " in answer[:20] and CANARY.encode() in answer, (seed, answer)


def request(chance: random.Random, token: str | None) -> tuple[bytes, str | None]:
    """A request, and its host if nothing but the host is changed: then it decides what is shown."""
    host = chance.choice(_HOSTS) if chance.random() < 0.3 else "127.0.0.1"
    fields = [f"{chance.choice(_METHODS)} {chance.choice(_PATHS)} HTTP/1.{chance.choice('0111')}", f"Host: {host}"]
    wrong = chance.choice(["", TOKEN[:-1], f"{TOKEN}x", TOKEN.upper(), "\x00", "²" * 9, "a" * 9_000])
    if token is not None or chance.random() < 0.5:
        shown = token or wrong
        fields.append(chance.choice([f"Authorization: Bearer {shown}", f"Cookie: ratchet-viewer-1={shown}; \x01;="]))
    for _ in range(chance.randrange(3)):
        fields.append(
            chance.choice(
                [
                    "Transfer-Encoding: chunked",
                    "Transfer-Encoding: chunked, gzip",
                    f"Content-Length: {chance.choice([0, 7, -1, 10**30, '²', '7, 7', ''])}",
                    "Expect: 100-continue",
                    "Upgrade: h2c\r\nConnection: Upgrade",
                    "Origin: null",
                    "Sec-Fetch-Site: cross-site",
                    "X-Forwarded-For: 127.0.0.1",
                    f"Range: bytes=0-,{'1-2,' * 500}",
                    "If-Modified-Since: never",
                    "Accept-Encoding: gzip" + ",a" * 2_000,
                    "a" * 70_000 + ": b",
                    "\r\n".join(["a: b"] * 200),
                ]
            )
        )
    whole = "\r\n".join(fields).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + chance.choice(_BODIES)
    if chance.random() < 0.5:
        return whole, host
    changed = bytearray(whole if chance.random() < 0.9 else chance.randbytes(500))
    for _ in range(chance.randrange(4)):
        at = chance.randrange(len(changed) + 1)
        changed[at : at + chance.randrange(4)] = chance.choice(_PARTS)
    return bytes(changed[: chance.randrange(len(changed) + 1)] if chance.random() < 0.2 else changed), None


def answered(port: int, sent: bytes, chance: random.Random | None) -> bytes:
    """What comes back. ``chance``: the client may be rude; without it, it waits for the end."""
    got = b""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), PATIENCE_S) as client:
        if chance is not None:
            client.settimeout(_QUIET_S)
        client.sendall(sent)
        if chance is not None and chance.random() < 0.1:
            return got  # gone before the answer
        if chance is not None and chance.random() < 0.3:
            client.shutdown(socket.SHUT_WR)
        while len(got) < 1 << 20 and (part := client.recv(1 << 16)):
            got += part
    return got


if __name__ == "__main__":
    go_on(__doc__, fuzz)
