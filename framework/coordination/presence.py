"""What each driver says of itself in the coordination store, for ``ratchet list`` and whoever else
looks.

Nothing of the protocol depends on it. The node of a driver ends with its session, so a driver that
died is gone from here as soon as another may lead.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from framework.coordination.store import CoordinationStore
from framework.coordination.transactional_state import TransactionalState, encode_document
from framework.errors import RatchetError

#: How often a driver says where it stands.
EVERY_S = 2.0
#: How long the end of a run waits for a store that does not answer.
_CLOSING_S = 1.0
_FOLDER = "drivers"


@dataclass(frozen=True, slots=True)
class LiveDriver:
    """A process that runs a topology, or stands by.

    ``kind``: transactional or core. ``started_at`` and ``said_at``: seconds since the epoch, by the
    clock of its host. ``status``: the ``summary()`` of its run.
    """

    kind: str
    host: str
    pid: int
    started_at: float
    said_at: float
    status: Mapping[str, Any]

    @property
    def phase(self) -> str:
        return str(self.status.get("phase"))


class Presence:
    """Announces this process as a driver of a topology, and where its run stands, until it is
    closed. A store that does not answer delays nobody: it is told again at the next turn."""

    def __init__(
        self,
        store: CoordinationStore,
        topology_id: str,
        kind: str,
        summary: Callable[[], Mapping[str, Any]],
        every_s: float = EVERY_S,
    ) -> None:
        self._store = store
        self._path = f"{topology_id}/{_FOLDER}/{uuid.uuid4().hex[:12]}"
        self._kind = kind
        self._summary = summary
        self._every_s = every_s
        self._started_at = time.time()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"ratchet-presence-{topology_id}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take the announcement back. Safe to call twice."""
        self._closed.set()
        self._thread.join(_CLOSING_S)

    def _run(self) -> None:
        self._announce(self._document())
        while not self._closed.wait(self._every_s):
            self._announce(self._document())
        self._announce(None)

    def _announce(self, document: bytes | None) -> None:
        # A node that cannot be written now is written at the next turn, and ends with the session
        # anyway.
        with suppress(RatchetError):
            self._store.announce(self._path, document)

    def _document(self) -> bytes:
        driver = LiveDriver(
            self._kind, socket.gethostname(), os.getpid(), self._started_at, time.time(), dict(self._summary())
        )
        return encode_document(asdict(driver), self._path)


def read_drivers(store: CoordinationStore, topology_id: str) -> list[LiveDriver]:
    """The drivers of a topology that live now, the one that leads first. Raises
    ``CorruptStateError``."""
    state = TransactionalState(store, topology_id)
    documents = [state.get_data(f"{_FOLDER}/{name}") for name in state.children(_FOLDER)]
    drivers = [LiveDriver(**each) for each in documents if each is not None]  # None: it has gone in between
    return sorted(drivers, key=lambda each: (each.phase == "standby", -each.status.get("epoch", 0), each.started_at))
