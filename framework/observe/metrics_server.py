"""The HTTP server of metrics and health checks. It listens on the loopback interface by default, is
read-only, and takes a bounded share of the process.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from framework.errors import ConfigError
from framework.observe.allowed_hosts import AllowedHosts
from framework.observe.logs import get_logger
from framework.observe.topology_health import is_ready

#: A client that sends nothing for this long is disconnected.
_CLIENT_S = 10.0
#: The most open connections, and the least number of seconds between two accepted ones.
_CLIENTS_MAX = 32
_ACCEPT_S = 0.002
#: The share of a core that scrapes may take.
_SHARE = 0.2

_log = get_logger()


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_S  # otherwise clients that send nothing hold threads

    def log_message(self, format: str, *arguments: Any) -> None:
        """Scrapes are not logged."""


class _Server(ThreadingWSGIServer):
    """Keeps at most ``_CLIENTS_MAX`` connections, each with a thread; a new connection replaces the
    oldest. Accepts at most one per ``_ACCEPT_S``."""

    request_queue_size = 64

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._clients: dict[socket.socket, None] = {}
        self._changing = threading.Lock()
        super().__init__(*arguments, **options)

    def process_request(self, request: Any, client_address: Any) -> None:
        time.sleep(_ACCEPT_S)
        with self._changing:
            if len(self._clients) >= _CLIENTS_MAX:
                oldest = next(iter(self._clients))
                del self._clients[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
            self._clients[request] = None
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that is broken off by the client or by the limit is not an error of
        the run."""
        _log.debug("metrics.client_failed", reason=str(sys.exc_info()[1]))

    def shutdown_request(self, request: Any) -> None:
        with self._changing:
            self._clients.pop(request, None)
        super().shutdown_request(request)


def _server_for(host: str, port: int) -> type[_Server]:
    """A server for IPv4 or IPv6, as the address requires."""

    class Server(_Server):
        address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]

    return Server


class _Scraped:
    """An application that uses at most ``_SHARE`` of a core, however often it is scraped."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self._app = app
        self._one_at_a_time = threading.Lock()
        self._free_at_s = 0.0

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        with self._one_at_a_time:
            time.sleep(max(self._free_at_s - time.monotonic(), 0.0))
            began_s = time.thread_time()
            answer = list(self._app(environ, start_response))
            self._free_at_s = time.monotonic() + (time.thread_time() - began_s) * (1 / _SHARE - 1)
        return answer


def health_of(topology_id: str, phase: str) -> tuple[bool, bool, dict[str, str]]:
    """Whether a run in this phase is alive, whether it is ready (it leads, or stands by to take
    over), and a line of text about it."""
    alive = phase not in ("failed", "stopped", "finished")
    return alive, is_ready(phase), {"topology": topology_id, "phase": phase}


def serve_metrics(
    collector: Collector,
    host: str,
    port: int,
    health: Callable[[], tuple[bool, bool, dict[str, str]]],
    allowed_hosts: Collection[str] = (),
) -> Callable[[], None]:
    """Serve from a thread: ``/metrics``; ``/healthz``, status 200 while the run is alive; and
    ``/readyz``, status 200 while it leads or stands by; 503 otherwise.

    * ``health``: as in ``health_of``.
    * ``allowed_hosts``: host names that requests may use, besides the host's own. Any other name
      gets status 421, because another site's DNS may point here.

    Returns a function that ends the server. Raises ``ConfigError`` when the server cannot listen on
    the port, for instance because it is taken."""
    registry = CollectorRegistry()
    registry.register(collector)
    metrics = _Scraped(make_wsgi_app(registry))
    hosts = AllowedHosts(["localhost", host, socket.gethostname(), *allowed_hosts])

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if not hosts.allow(environ.get("HTTP_HOST", host), None):
            start_response("421 Misdirected Request", [("Content-Length", "0")])
            return []
        if environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            start_response("405 Method Not Allowed", [("Content-Length", "0")])
            return []
        if path in ("/", "/metrics"):
            return metrics(environ, start_response)
        if path not in ("/healthz", "/readyz"):
            start_response("404 Not Found", [("Content-Length", "0")])
            return []
        alive, ready, said = health()
        body = json.dumps(said).encode() + b"\n"
        good = alive if path == "/healthz" else ready
        start_response(
            "200 OK" if good else "503 Service Unavailable",
            [("Content-Type", "application/json"), ("Content-Length", str(len(body)))],
        )
        return [body]

    try:
        server = make_server(host, port, app, _server_for(host, port), _Handler)
    except OSError as error:
        raise ConfigError(
            f"metrics.prometheus.port {port} on {host}: {error.strerror or error}; take another"
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="ratchet-metrics", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
