"""Serves the page from a thread and an event loop of its own.

A driver never waits for it: blocking reads run in other threads, and a page that fails is logged
and ends without affecting the run.
"""

from __future__ import annotations

import logging
import resource
import socket
import ssl
import threading
from collections.abc import Callable

from framework.config import Config
from framework.errors import ConfigError
from framework.observe.allowed_hosts import is_loopback
from framework.observe.logs import get_logger
from framework.ui.documents import Source

try:
    import uvicorn

    from framework.ui.app import Page
    from framework.ui.connection_limits import CONNECTIONS_MAX, BoundedListener, PromptProtocol
    from framework.ui.guard import Guard, Token
except ImportError as error:  # an optional extra
    raise ConfigError(
        f"the page needs the package {error.name}: pip install 'ratchet-pipelines[ui]', or leave ui.port out"
    ) from error

#: The most connections in the listener's queue.
_WAITING_MAX = 64
#: A connection whose peer accepts no data for this many milliseconds is closed.
_TAKES_NOTHING_MS = 30_000
#: How long the end of a run waits for the page.
_CLOSING_S = 2.0

_log = get_logger()


def serve_page(source: Source, config: Config, port: int | None = None) -> Callable[[], None]:
    """Serve the page at ``ui.host`` and ``ui.port``, or at ``port``. Returns a function that ends
    it. Raises ``ConfigError`` when it cannot listen there, or may not: except on the loopback
    interface, viewers must show a token or a certificate."""
    host, wanted = config.ui_host, port or config.ui_port
    if wanted is None:
        raise ConfigError("ui.port is not set")
    token = Token(config.ui_token.get_secret_value(), wanted) if config.ui_token is not None else None
    if not is_loopback(host) and token is None and config.ui_tls_client_ca is None:
        raise ConfigError(
            f"ui.host is {host}, which others can reach: set ui.token (give it as ${{NAME}} from the environment) or "
            "ui.tls.client.ca, or leave ui.host out"
        )
    context = _tls(config)
    page = Page(source, token)
    names = {"localhost", "127.0.0.1", "::1", host, *config.ui_allowed_hosts}
    if not is_loopback(host):
        names.add(socket.gethostname())
    settings = uvicorn.Config(
        Guard(page.app, names=names, token=token),
        loop="asyncio",
        http=PromptProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_WAITING_MAX,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=1,
    )
    settings.load()
    settings.ssl = context
    server = uvicorn.Server(settings)
    listener = _listen(host, wanted)
    thread = threading.Thread(target=_run, args=(server, listener), name="ratchet-page", daemon=True)
    thread.start()

    def stop() -> None:
        server.should_exit = server.force_exit = True
        thread.join(_CLOSING_S)

    return stop


def _run(server: uvicorn.Server, listener: socket.socket) -> None:
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # a viewer that disconnects is no error
    try:
        with listener:
            server.run(sockets=[listener])
    except Exception:  # noqa: BLE001 - the run goes on without its page
        _log.error("page.ended", exc_info=True)


def _listen(host: str, port: int) -> BoundedListener:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_WAITING_MAX)
    except OSError as error:
        raise ConfigError(f"ui.port {port} on {host}: {error.strerror or error}; take another") from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections inherit it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _TAKES_NOTHING_MS)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return BoundedListener(
        listener, CONNECTIONS_MAX if files == resource.RLIM_INFINITY else min(CONNECTIONS_MAX, max(files // 4, 8))
    )


def _tls(config: Config) -> ssl.SSLContext | None:
    """Raises ``ConfigError`` for files that do not match."""
    if config.ui_tls_certificate is None:
        if config.ui_tls_key is not None or config.ui_tls_client_ca is not None:
            raise ConfigError("ui.tls.certificate is not set, and other keys of ui.tls are")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.ui_tls_certificate, config.ui_tls_key)
        if config.ui_tls_client_ca is not None:
            context.load_verify_locations(config.ui_tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:  # includes ssl.SSLError
        raise ConfigError(f"ui.tls: {error.strerror or error}: check certificate, key and client.ca") from error
    return context
