"""The page's view of a run of a transactional topology."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from framework.config import Config
from framework.coordination.presence import EVERY_S
from framework.coordination.store import CoordinationStore
from framework.observe.journal import RECORDS_MAX, TransactionRecord
from framework.observe.status_document import run_document
from framework.topology.builder import Topology
from framework.transactions.documents import read_transaction
from framework.transactions.driver import Driver
from framework.transactions.history_reader import HistoryReader
from framework.transactions.run_status import RunStatus
from framework.ui import documents
from framework.ui.cached_reads import Kept
from framework.ui.sources.topology_drivers import Drivers


class RunSource:
    """The data of a run in its own process, and the store's records of earlier runs. Read by the
    page's threads."""

    every_s = 1.0

    def __init__(
        self,
        topology: Topology,
        driver: Driver,
        store: CoordinationStore,
        config: Config,
        status: Callable[[], RunStatus],
    ) -> None:
        self._topology = topology
        self._driver = driver
        self._store = store
        self._status = status
        self._drivers = Drivers(store, topology.id)
        self._about = {"graph": topology.shape(), "configuration": documents.configuration(config)}
        self._history = HistoryReader(store, topology.id)
        self._read: list[TransactionRecord] | None = None
        self._others: Kept[list[TransactionRecord]] = Kept("history", self._read_others, EVERY_S)

    @property
    def title(self) -> str:
        return self._topology.id

    def topologies(self) -> list[documents.Document]:
        status, closed = self._status(), self._closed()
        return [self._document(status, closed)]

    def topology(self, topology_id: str) -> documents.View | None:
        if topology_id != self._topology.id:
            return None
        journal, status = self._driver.journal, self._status()
        closed, running = self._closed(), [each for each in journal.records() if each.closed_at is None]
        elapsed = {
            each.txid: journal.elapsed_s(each.txid, each.attempts[-1].attempt_id) for each in running if each.attempts
        }
        lags = {
            name: (each.lag, each.committed_offset, each.in_flight, each.lost_records)
            for name, each in status.partitions.items()
        }
        live = {
            **self._document(status, closed),
            "at": documents.now(),
            "in_flight": documents.in_flight(status.in_flight, elapsed),
            "edges": documents.edges(closed),
        }
        headers = [
            {
                "location": location,
                "done": header.done,
                "open": None if header.open is None else header.open.txid,
                "epoch": header.epoch,
            }
            for location, header in self._driver.headers()
        ]
        parts = {
            "about": self._about,
            "live": live,
            "partitions": documents.partitions(lags),
            "failures": documents.failures(closed, running),
            "headers": headers,
        }
        return documents.View(parts, closed)

    def transaction(self, topology_id: str, txid: int) -> documents.Document | None:
        if topology_id != self._topology.id:
            return None
        journal = self._driver.journal
        found = next((each for each in reversed(journal.records()) if each.txid == txid), None)
        found = found or read_transaction(self._store, topology_id, txid)
        return None if found is None else documents.transaction_document(found, journal.traces(txid))

    def _closed(self) -> list[TransactionRecord]:
        """The transactions that this process closed, and those of other leaders from the store."""
        found = {each.txid: each for each in self._others.look().value or ()}
        found |= {each.txid: each for each in self._driver.journal.records() if each.closed_at is not None}
        return [found[txid] for txid in sorted(found)][-RECORDS_MAX:]

    def _read_others(self) -> list[TransactionRecord]:
        """Read the records of other leaders: once, and again while another driver leads."""
        if self._read is None or self._status().phase == "standby":
            self._read = self._history.read()
        return self._read

    def _document(self, status: RunStatus, closed: list[TransactionRecord]) -> dict[str, Any]:
        summary = {**status.summary(), "failures_last_hour": self._driver.journal.failures_within(3600)}
        return run_document(
            self._topology.id,
            "transactional",
            phase=status.phase,
            txid=status.committed_txid or None,
            committed_at=closed[-1].closed_at if closed else None,
            drivers=self._drivers.documents(status.phase),
            summary=summary,
        )
