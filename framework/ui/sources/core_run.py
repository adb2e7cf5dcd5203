"""The page's view of a run of a core topology."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from framework.config import Config
from framework.coordination.store import CoordinationStore
from framework.core.driver import RoundDriver
from framework.core.status import CoreStatus
from framework.observe.status_document import run_document
from framework.topology import CoreTopology
from framework.ui import documents
from framework.ui.sources.topology_drivers import Drivers


class CoreSource:
    """The data of a run in its own process. Read by the page's threads. ``store``: None for a run
    without a coordination store."""

    every_s = 1.0

    def __init__(
        self,
        topology: CoreTopology,
        driver: RoundDriver,
        store: CoordinationStore | None,
        config: Config,
        status: Callable[[], CoreStatus],
    ) -> None:
        self._topology = topology
        self._driver = driver
        self._status = status
        self._drivers = None if store is None else Drivers(store, topology.id)
        self._flow = documents.Flow()
        self._about = {"graph": topology.shape(), "configuration": documents.configuration(config)}

    @property
    def title(self) -> str:
        return self._topology.id

    def topologies(self) -> list[documents.Document]:
        return [self._document()]

    def topology(self, topology_id: str) -> documents.View | None:
        if topology_id != self._topology.id:
            return None
        failures = [
            {
                "component": error.component_id,
                "task": error.task,
                "at": round(at, 3),
                "outcome": error.kind.value,
                "reason": documents.shortened(error.message, documents.REASON_MAX),
                "trace": error.trace[-documents.REASON_MAX * 4 :],
            }
            for at, error in reversed(list(self._driver.recent_errors))
        ]
        live = {**self._document(), "at": documents.now(), "in_flight": []}
        live["edges"] = self._flow.look(live["status"])
        return documents.View({"about": self._about, "live": live, "failures": failures})

    def transaction(self, topology_id: str, txid: int) -> documents.Document | None:
        return None

    def _document(self) -> dict[str, Any]:
        status = self._status()
        checkpoint = status.checkpoint
        return run_document(
            self._topology.id,
            "core",
            phase=status.phase,
            txid=checkpoint.txid or None if checkpoint is not None else None,
            committed_at=None,
            drivers=[] if self._drivers is None else self._drivers.documents(status.phase),
            summary=status.summary(),
        )
