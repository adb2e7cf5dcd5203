"""The announcements of live drivers in the coordination store, for ``ratchet list`` and other
observers.

The protocol does not depend on them. A driver's node ends with its session, so the announcement of
a dead driver disappears as soon as another driver may lead.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from framework.coordination.store import CoordinationStore
from framework.coordination.transactional_state import TransactionalState, encode_document
from framework.document_type_checks import check_fields, fits
from framework.errors import CorruptStateError
from framework.observe.logs import get_logger

#: How often a driver publishes its status.
EVERY_S = 2.0
#: How long the end of a run waits for a store that does not answer.
_CLOSING_S = 1.0
#: The most characters of a text in a published status.
TEXT_MAX = 2_000
_FOLDER = "drivers"

_log = get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveDriver:
    """A process that runs a topology, or stands by.

    * ``kind``: transactional or core.
    * ``started_at``, ``said_at``: seconds since the epoch, by the clock of its host.
    * ``status``: the ``summary()`` of its run.
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
    """Announces this process as a driver of a topology, and publishes the status of its run, until
    it is closed. A store that does not answer delays nothing: the next interval tries again."""

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
        """Remove the announcement. Safe to call twice."""
        self._closed.set()
        self._thread.join(_CLOSING_S)

    def _run(self) -> None:
        self._announce(self._document)
        while not self._closed.wait(self._every_s):
            self._announce(self._document)
        self._announce(lambda: None)

    def _announce(self, document: Callable[[], bytes | None]) -> None:
        try:
            self._store.announce(self._path, document())
        except Exception as error:  # noqa: BLE001 - nothing depends on it
            # A failed write is repeated at the next interval, and the node ends with the session
            # anyway.
            _log.debug("presence.untold", node=self._path, reason=str(error)[:TEXT_MAX])

    def _document(self) -> bytes:
        summary = _shortened(dict(self._summary()))
        driver = LiveDriver(
            kind=self._kind,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_at=self._started_at,
            said_at=time.time(),
            status=summary,
        )
        return encode_document(asdict(driver), self._path)


def _shortened(value: Any) -> Any:
    """A status with texts shortened for the store: the message of a user's error may have
    megabytes."""
    if isinstance(value, dict):
        return {key: _shortened(each) for key, each in value.items()}
    return f"{value[:TEXT_MAX]}…" if isinstance(value, str) and len(value) > TEXT_MAX else value


def read_drivers(store: CoordinationStore, topology_id: str) -> list[LiveDriver]:
    """The live drivers of a topology, the leader first. Raises ``CorruptStateError``."""
    state = TransactionalState(store, topology_id)
    found = {name: state.get_data(f"{_FOLDER}/{name}") for name in state.children(_FOLDER)}
    # None: the node was removed in between
    drivers = [_driver_in(each, f"{topology_id}/{_FOLDER}/{name}") for name, each in found.items() if each is not None]
    return sorted(drivers, key=lambda each: (each.phase == "standby", -each.status.get("epoch", 0), each.started_at))


def _driver_in(document: Any, node: str) -> LiveDriver:
    """Parse a driver's document. Unknown fields of a later version are ignored."""
    try:
        known = {each.name: document[each.name] for each in fields(LiveDriver)}
        check_fields(LiveDriver, known)
        if not fits(known["status"].get("epoch", 0), int):
            raise TypeError("epoch is no number")
    except (KeyError, TypeError) as error:
        raise CorruptStateError(f"{node}: not what a driver says of itself ({error}); delete the node") from error
    return LiveDriver(**known)
