"""Channels between processes of a run: messages both ways, over a socket on this host or,
encrypted, between hosts.

Invariants:

1. No message is unpickled before the peer has proved that it has the run's key.
2. An unproved connection delays no other: each is checked in a thread of its own, within a time
   limit. When too many are unchecked, the oldest is closed.
3. Messages between hosts are encrypted, and only the run's own certificate is accepted.
4. Every wait for the peer has a time limit, except the wait for the next message of a proved peer.
   ``sever`` ends that wait from another thread.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import pickle
import secrets
import selectors
import socket
import ssl
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Union

from framework.errors import ConfigError, InvariantViolation
from framework.execution.payload_encryption import decrypt, encrypt

#: A path on this host, or a host and a port.
Place = Union[str, tuple[str, int]]

#: How many connections may be unchecked at the same time.
STRANGERS_MAX = 64
_BACKLOG = 64
_AGAIN_AFTER_S = 0.01
_NONCE_BYTES = 32
_MAC_BYTES = 32
_LENGTH = struct.Struct(">Q")
#: The largest message. A batch is one message, and no batch comes near this size.
MESSAGE_BYTES_MAX = 4 << 30
_DIGEST = "sha256"


@dataclass(frozen=True, slots=True)
class Credentials:
    """The secrets that the processes of one run share. ``certificate``: PEM of a certificate and
    its key, made for this run; None when no channel leaves the host. A pickled copy is encrypted.
    """

    key: bytes = field(repr=False)
    certificate: bytes | None = field(repr=False)

    @classmethod
    def new(cls, certificate: bytes | None) -> Credentials:
        return cls(secrets.token_bytes(32), certificate)

    def __reduce__(self) -> tuple[Any, ...]:
        return _decrypted, (encrypt(pickle.dumps((self.key, self.certificate))),)

    def context(self, *, server: bool) -> ssl.SSLContext:
        """TLS settings that trust only the run's certificate. Raises ``InvariantViolation`` when
        there is none."""
        if self.certificate is None:
            raise InvariantViolation("a channel leaves the host, and the run has no certificate")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if not server:
            # the certificate names no host: only the run's own certificate is trusted
            context.check_hostname = False
            context.load_verify_locations(cadata=_public(self.certificate))
            return context
        context.num_tickets = 0  # a session ticket would arrive as bytes that are no message
        handle, path = tempfile.mkstemp()
        try:
            with os.fdopen(handle, "wb") as out:
                out.write(self.certificate)
            context.load_cert_chain(path)
        finally:
            os.unlink(path)
        return context


def _decrypted(credentials: bytes) -> Credentials:
    return Credentials(*pickle.loads(decrypt(credentials)))


class Channel:
    """One end of a channel. Every method raises ``OSError`` or ``EOFError`` when the peer is gone
    or announces more than ``MESSAGE_BYTES_MAX``, and ``TimeoutError`` when the peer is silent for
    too long."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def send(self, message: Any, within_s: float) -> None:
        payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        if len(payload) > MESSAGE_BYTES_MAX:
            raise ConfigError(
                f"{len(payload):,} bytes are too many for one message between processes ({MESSAGE_BYTES_MAX:,}): make batches "
                "smaller"
            )
        self._socket.settimeout(within_s)
        self._socket.sendall(_LENGTH.pack(len(payload)))
        self._socket.sendall(payload)

    def receive(self, within_s: float | None) -> Any:
        """Receive a message. ``within_s``: how long the peer may be silent; None for no limit."""
        self._socket.settimeout(within_s)
        (length,) = _LENGTH.unpack(_exactly(self._socket, _LENGTH.size))
        if length > MESSAGE_BYTES_MAX:
            raise ConnectionAbortedError(f"the other side announced a message of {length:,} bytes")
        return pickle.loads(_exactly(self._socket, length))

    def fileno(self) -> int:
        return self._socket.fileno()

    def has_ended(self) -> bool:
        """Whether the peer is gone. Only for a channel on which no message is expected."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            return bool(selector.select(0))

    def sever(self) -> None:
        """End the channel for both sides. This also ends a wait in another thread of this process,
        and works when a forked child still holds the socket. May be called more than once, and
        after ``close``."""
        with contextlib.suppress(OSError):
            # bypasses TLS, which is not safe from two threads
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(place: Place, credentials: Credentials, within_s: float) -> Channel:
    """Open a channel to a server of this run. Raises ``TimeoutError`` when the server exists but
    does not accept, ``OSError`` or ``EOFError`` when it does not exist or has another key."""
    until = time.monotonic() + within_s
    plain = socket.socket(socket.AF_UNIX if isinstance(place, str) else socket.AF_INET, socket.SOCK_STREAM)
    made = plain
    try:
        plain.settimeout(within_s)
        _reach(plain, place, until)
        if not isinstance(place, str):
            _tune(plain)
            made = credentials.context(server=False).wrap_socket(plain)
        asked = _exactly(made, _NONCE_BYTES, until)
        mine = secrets.token_bytes(_NONCE_BYTES)
        made.sendall(mine + _proof(credentials, b"client", asked, mine))
        if not hmac.compare_digest(_exactly(made, _MAC_BYTES, until), _proof(credentials, b"server", asked, mine)):
            raise ConnectionRefusedError("it has not the key of this run")
    except TimeoutError:
        made.close()
        raise TimeoutError(f"it did not let anybody in for {within_s:g} s") from None
    except BaseException:
        made.close()
        raise
    return Channel(made)


def _reach(plain: socket.socket, place: Place, until: float) -> None:
    """Connect. A server on this host whose queue of connections is full refuses immediately,
    whatever the time-out, so try again."""
    while True:
        try:
            plain.connect(place)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise TimeoutError from None
        time.sleep(_AGAIN_AFTER_S)


class ChannelServer:
    """Listens at a place, and passes each channel to ``serve`` in a thread of its own.
    ``within_s``: how long a connection may take to prove that it has the key."""

    def __init__(
        self, place: Place, credentials: Credentials, serve: Callable[[Channel], None], within_s: float
    ) -> None:
        self._credentials = credentials
        self._serve = serve
        self._within_s = within_s
        self._context = None if isinstance(place, str) else credentials.context(server=True)
        self._listening = socket.socket(socket.AF_UNIX if isinstance(place, str) else socket.AF_INET)
        self._listening.bind(place)
        self._listening.listen(_BACKLOG)
        self._strangers: list[socket.socket] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()

    @property
    def place(self) -> Place:
        bound = self._listening.getsockname()
        return bound if isinstance(bound, str) else (bound[0], bound[1])

    def start(self) -> None:
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections. Open channels stay open."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listening.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                stranger, _ = self._listening.accept()
                if self._context is not None:
                    _tune(stranger)
                    stranger = self._context.wrap_socket(stranger, server_side=True, do_handshake_on_connect=False)
            # the peer closed immediately, or too many files are open: continue with the next one
            except OSError:
                if self._closed.wait(0.05):
                    return
                continue
            with self._lock:
                self._strangers.append(stranger)
                too_many = self._strangers[:-STRANGERS_MAX]
            for each in too_many:
                with contextlib.suppress(OSError):
                    # ends the wait of its thread, which then closes it
                    each.shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._let_in, args=(stranger,), daemon=True).start()

    def _let_in(self, stranger: socket.socket) -> None:
        known = False
        try:
            known = self._shows_the_key(stranger)
        except (OSError, EOFError):
            pass
        finally:
            with self._lock:
                self._strangers.remove(stranger)
            if not known:
                stranger.close()
        if known:
            self._serve(Channel(stranger))

    def _shows_the_key(self, stranger: socket.socket) -> bool:
        until = time.monotonic() + self._within_s
        stranger.settimeout(self._within_s)
        if isinstance(stranger, ssl.SSLSocket):
            stranger.do_handshake()
        mine = secrets.token_bytes(_NONCE_BYTES)
        stranger.sendall(mine)
        theirs = _exactly(stranger, _NONCE_BYTES, until)
        if not hmac.compare_digest(
            _exactly(stranger, _MAC_BYTES, until), _proof(self._credentials, b"client", mine, theirs)
        ):
            return False
        stranger.sendall(_proof(self._credentials, b"server", mine, theirs))
        return True


def _proof(credentials: Credentials, side: bytes, servers: bytes | bytearray, clients: bytes | bytearray) -> bytes:
    return hmac.digest(credentials.key, side + servers + clients, _DIGEST)


def _exactly(source: socket.socket, count: int, until: float | None = None) -> bytearray:
    """Read ``count`` bytes, before the moment ``until`` if one is given."""
    found = bytearray(count)
    view = memoryview(found)
    while view:
        if until is not None:
            source.settimeout(max(until - time.monotonic(), 0.001))
        read = source.recv_into(view)
        if not read:
            raise EOFError("the other side is gone")
        view = view[read:]
    return found


def _tune(connection: socket.socket) -> None:
    """Disable delays of small messages, and detect when the other host is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _public(pem: bytes) -> str:
    text = pem.decode()
    return text[text.index("-----BEGIN CERTIFICATE-----") :]
