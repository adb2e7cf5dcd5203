"""A TCP proxy that disturbs a connection: slow, sliced, silent, cut, or with lost answers."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

_CHUNK = 65_536
_POLL_S = 0.02


class TcpProxy:
    """Listens on the loopback interface and forwards bytes between clients and ``host:port``.

    Each disturbance applies to open and to new connections, until ``heal``. ``dropped``: the number
    of answers that were lost.

    ::

        with TcpProxy("127.0.0.1:5432") as link:
            link.lose_replies()
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._resets = 0
        self._closed = False
        self._refusing = False
        self._silent = False
        self._losing = False
        self._delay_s = 0.0
        self._slice = 0
        self.dropped = 0
        threading.Thread(target=self._accept, daemon=True, name="proxy").start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def delay(self, seconds: float) -> None:
        """Delay every piece of data by ``seconds``."""
        self._delay_s = seconds

    def slice(self, size: int) -> None:
        """Deliver data in pieces of at most ``size`` bytes."""
        self._slice = size

    def black_hole(self) -> None:
        """Deliver nothing in either direction. Connections stay open, and new ones are accepted."""
        self._silent = True

    def lose_replies(self) -> None:
        """Deliver requests, but lose answers: instead of delivering an answer, reset the
        connection."""
        self._losing = True

    def cut(self) -> None:
        """Reset all connections, and refuse new ones until ``heal``."""
        self._refusing = True
        self.reset()

    def retarget(self, target: str, *, resets: bool = True) -> None:
        """Reset all connections, or keep them. New ones go to another ``host:port``, as if a name
        moved to another server."""
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        if resets:
            self.reset()

    def reset(self) -> None:
        """Reset all connections (RST), also those that are being made. New ones work."""
        with self._lock:
            self._resets += 1
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for each in pair:
                _reset(each)

    def heal(self) -> None:
        """Forward everything again. Data held back by a black hole arrives late."""
        self._refusing = self._silent = self._losing = False
        self._delay_s, self._slice = 0.0, 0

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()

    def __enter__(self) -> TcpProxy:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- inside -----------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            resets = self._resets
            if self._refusing:
                _reset(client)
                continue
            try:
                server = socket.create_connection(self._target, timeout=60)
            except OSError:
                _reset(client)
                continue
            server.settimeout(None)
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                kept = resets == self._resets
                if kept:
                    self._pairs.append((client, server))
            if not kept:
                _reset(client)
                _reset(server)
                continue
            for source, sink, answers in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._pump, args=(source, sink, answers), daemon=True, name="proxy").start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        try:
            while data := source.recv(_CHUNK):
                if answers and self._losing:
                    self.dropped += 1
                    _reset(sink)
                    _reset(source)
                    return
                while self._silent and not self._closed:
                    time.sleep(_POLL_S)
                if self._delay_s:
                    time.sleep(self._delay_s)
                size = self._slice or len(data)
                for start in range(0, len(data), size):
                    sink.sendall(data[start : start + size])
                    if self._slice:
                        time.sleep(0)  # usually makes the piece a separate segment
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            _reset(sink)
            _reset(source)


def _reset(connection: socket.socket) -> None:
    """Close with RST, and wake the thread that reads from it."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RD)
    with contextlib.suppress(OSError):
        connection.close()
