"""Lets connections in, and not more than a driver can spare.

Invariants:

1. Connections take at most ``CONNECTIONS_MAX`` files, and a quarter of those that the process may
   have open, whether or not they have said anything yet; those of one address half of that.
2. Connections that come faster than ``PER_SECOND`` cost the processor no more than so many.
3. A connection that has asked nothing is closed within ``2 * SILENT_S``.

The sockets are counted where they are accepted: before TLS, and before the server knows them.
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
#: New connections of all addresses: so many at once, and so many per second on and on.
BURST = 300
PER_SECOND = 100
#: How long a connection may be open without a request, in seconds.
SILENT_S = 10.0
#: How long the listener stays shut after a connection that was one too many.
_SHUT_S = 0.01


class BoundedListener(socket.socket):
    """A listening socket. ``most``: connections at once. Used from one event loop."""

    def __init__(self, listener: socket.socket, most: int) -> None:
        super().__init__(listener.family, listener.type, listener.proto, fileno=listener.detach())
        self._most = most
        self._inside: Counter[str] = Counter()
        self._coming = Buckets(BURST, PER_SECOND)
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY)

    def accept(self) -> tuple[socket.socket, Any]:
        """As of a socket. Raises ``ConnectionAbortedError`` for a connection that is not let in, as
        the system does for one that has gone again."""
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
            time.sleep(_SHUT_S)  # or a flood would have the processor
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
        """Take the next connection by the file that was kept for this, and close it: otherwise the
        loop would be told of it again and again."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        try:
            super().accept()[0].close()
            self._spare = os.open(os.devnull, os.O_RDONLY)
        except OSError:
            pass  # somebody else was faster: there is none to keep
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
    """HTTP for clients that say what they want."""

    _seen: object = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._seen = self
        self._look()

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except LocalProtocolError:  # the answer to bytes that are no request cannot follow another answer
            self.transport.abort()

    def _look(self) -> None:
        """Close the connection unless a request has been completed, or is, since the last look."""
        if self.transport.is_closing():
            return
        answering = self.cycle is not None and not self.cycle.response_complete
        if not answering and self.cycle is self._seen:
            self.transport.abort()
            return
        self._seen = self.cycle
        self.loop.call_later(SILENT_S, self._look)
