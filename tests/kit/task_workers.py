"""Task workers of a run: their pids, a worker without Spark, and a recorded connection to one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from framework import CoreRun
from framework.core.plan import CorePlan
from framework.core.round_protocol import Round, RoundRecord
from framework.core.spark import SparkRounds
from framework.core.worker_client import Address, WorkerClient, WorkerSettings


def workers_of(run: CoreRun) -> list[int]:
    """The pids of the task workers."""
    executor = run._executor
    assert isinstance(executor, SparkRounds)
    return [each.pid for each in executor._addresses]


@dataclass
class InATaskWorker:
    """A ``RoundExecutor`` with one task worker, in a process of its own, without Spark."""

    plan: CorePlan
    settings: WorkerSettings
    worker: Address
    rounds_max: int = 1

    def run(self, round_: Round) -> Sequence[RoundRecord]:
        placed = {(level, task): 0 for level, width in enumerate(self.plan.widths) for task in range(width)}
        courier = WorkerClient([self.worker], self.settings.credentials, placed, self.settings.answer_s)
        return courier.walk(round_, self.plan.widths)

    def start(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class Overhearing:
    """A relay to a server that records the traffic: connect to ``place`` instead.

    ``heard``: the bytes of both directions.
    """

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
