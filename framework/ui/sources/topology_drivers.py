"""The drivers of one topology, for the page of one of these drivers."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from framework.coordination.presence import EVERY_S, LiveDriver, read_drivers
from framework.coordination.store import CoordinationStore
from framework.ui.cached_reads import Kept
from framework.ui.documents import driver_document


class Drivers:
    """This driver and the others, from the store. A store that does not answer delays no viewer:
    its last answer is shown."""

    def __init__(self, store: CoordinationStore, topology_id: str) -> None:
        self._kept: Kept[list[LiveDriver]] = Kept("drivers", lambda: read_drivers(store, topology_id), EVERY_S)
        self._here = (socket.gethostname(), os.getpid())
        self._started_at = time.time()

    def documents(self, phase: str) -> list[dict[str, Any]]:
        """The documents of all drivers, this one first if it leads. ``phase``: of this
        driver, now."""
        others = [each for each in self._kept.look().value or () if (each.host, each.pid) != self._here]
        host, pid = self._here
        own = driver_document(host=host, pid=pid, phase=phase, started_at=self._started_at, said_at=time.time())
        own["here"] = True
        found = [*map(document_of, others)]
        return [*found, own] if phase == "standby" else [own, *found]


def document_of(driver: LiveDriver) -> dict[str, Any]:
    """A driver in the page's form."""
    page = driver.status.get("page")
    return driver_document(
        host=driver.host,
        pid=driver.pid,
        phase=driver.phase,
        started_at=driver.started_at,
        said_at=driver.said_at,
        page=page if isinstance(page, str) else None,
    )
