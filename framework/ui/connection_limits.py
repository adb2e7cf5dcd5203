"""Limits connections, so that they cost no more than a driver can spare.

Invariants:

1. Connections take at most ``CONNECTIONS_MAX`` files, and a quarter of those that the process may
   have open, whether or not they have sent a request yet; those of one address half of that.
2. Connections above ``PER_SECOND`` cost no additional processor time.
3. A connection without a request is closed within ``2 * SILENT_S``.

The sockets are counted when they are accepted: before TLS, and before the server knows them.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections import Counter
from typing import Any

from h11 import LocalProtocolError
from uvicorn.protocols.http.h11_impl import H11Protocol

from framework.ui.guard import Buckets

CONNECTIONS_MAX = 250
#: New connections of all addresses: the burst, and the permanent rate per second.
BURST = 300
PER_SECOND = 100
#: How long a connection may be open without a request, in seconds.
SILENT_S = 10.0
#: How long the listener pauses after a refused connection.
_SHUT_S = 0.01


class BoundedListener(socket.socket):
    """A listening socket with a limit. ``most``: open connections. Used from one event loop."""

    def __init__(self, listener: socket.socket, most: int) -> None:
        super().__init__(listener.family, listener.type, listener.proto, fileno=listener.detach())
        self._most = most
        self._inside: Counter[str] = Counter()
        self._coming = Buckets(BURST, PER_SECOND)
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY)

    def accept(self) -> tuple[socket.socket, Any]:
        """As ``socket.accept``. Raises ``ConnectionAbortedError`` for a refused connection, as the
        system does for one that the client has closed."""
        try:
            accepted, address = super().accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._turn_away()
            raise ConnectionAbortedError("no file is left for it") from error
        host = str(address[0])
        full = self._inside.total() >= self._most or self._inside[host] >= max(self._most // 2, 1)
        if full or not self._coming.take("all"):
            accepted.close()
            time.sleep(_SHUT_S)  # otherwise a flood would use the whole processor
            raise ConnectionAbortedError("there are too many")
        self._inside[host] += 1
        return _Connection(accepted, self, host), address

    def left(self, host: str) -> None:
        """A connection is closed."""
        self._inside[host] -= 1
        if not self._inside[host]:
            del self._inside[host]

    def close(self) -> None:
        super().close()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _turn_away(self) -> None:
        """Accept the next connection with a reserved file descriptor, and close it: otherwise the
        event loop would report it again and again."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        try:
            super().accept()[0].close()
            self._spare = os.open(os.devnull, os.O_RDONLY)
        except OSError:
            pass  # another thread took the descriptor: there is none to reserve
        time.sleep(_SHUT_S)


class _Connection(socket.socket):
    def __init__(self, accepted: socket.socket, listener: BoundedListener, host: str) -> None:
        super().__init__(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        self._listener: BoundedListener | None = listener
        self._host = host

    def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.left(self._host)
        super().close()


class PromptProtocol(H11Protocol):
    """HTTP that closes connections without a timely request."""

    _seen: object = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._seen = self
        self._look()

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        # an invalid request can only be answered if no other answer has begun
        except LocalProtocolError:
            self.transport.abort()

    def _look(self) -> None:
        """Close the connection unless a request was completed since the last check, or is under
        way.
        """
        if self.transport.is_closing():
            return
        answering = self.cycle is not None and not self.cycle.response_complete
        if not answering and self.cycle is self._seen:
            self.transport.abort()
            return
        self._seen = self.cycle
        self.loop.call_later(SILENT_S, self._look)
