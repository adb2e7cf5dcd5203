"""The homes of a run."""

from __future__ import annotations

import socket
import threading

from framework import CoreRun
from framework.acking.spark import SparkRounds


def homes_of(run: CoreRun) -> list[int]:
    """Their pids."""
    executor = run._executor
    assert isinstance(executor, SparkRounds)
    return [each.pid for each in executor._addresses]


class Overhearing:
    """A wire to a server, with somebody who listens: connect to ``place`` instead. ``heard``: what went either way."""

    def __init__(self, server: tuple[str, int]) -> None:
        self._server = server
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.place: tuple[str, int] = self._listening.getsockname()
        self.heard = bytearray()

    def __enter__(self) -> Overhearing:
        threading.Thread(target=self._pass_on, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()

    def _pass_on(self) -> None:
        near, _ = self._listening.accept()
        far = socket.create_connection(self._server)
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=self._copy, args=(source, target), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65_536):
                self.heard += data
                target.sendall(data)
        except OSError:
            pass
