"""Reads the recorded transactions of a topology: the latest ones, for display, and single ones by
txid, for tools."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from framework.coordination.store import CoordinationStore
from framework.errors import CorruptStateError
from framework.observe.journal import RECORDS_MAX, TransactionRecord
from framework.transactions.documents import (
    INCARNATION,
    UNDONE,
    committed_txid,
    read_incarnation,
    read_transaction,
)
from framework.transactions.history_archive import HistoryTarget, KeptRecord


class TransactionRecords:
    """The records of closed transactions by txid: from the store, or, for older ones, from
    ``archive``, the table at ``topology.history.table``. Used by one thread at a time."""

    def __init__(self, store: CoordinationStore, topology_id: str, archive: HistoryTarget | None = None) -> None:
        self._store, self._topology_id, self._archive = store, topology_id, archive
        self._incarnation: str | None = None

    def read(self, txid: int) -> TransactionRecord | None:
        """The record; None if neither holds it. Raises ``CorruptStateError``, and
        ``RetryableError`` when the table does not answer."""
        found = read_transaction(self._store, self._topology_id, txid)
        if found is not None or self._archive is None:
            return found
        kept = self.archived(txid)
        return kept.record if kept is not None else None

    def archived(self, txid: int) -> KeptRecord | None:
        """The table's entry for a transaction: its record, or a gap that begins with it."""
        if self._archive is None:
            return None
        if self._incarnation is None:
            self._incarnation = read_incarnation(self._store, self._topology_id)
        return self._archive.read(self._incarnation, txid)


class HistoryReader:
    """Reads each record once: a call costs only the transactions closed since the previous call.
    Discards plans, which may have thousands of partitions. ``unreadable``: why a record is missing,
    else None. Used by one thread at a time."""

    def __init__(self, store: CoordinationStore, topology_id: str) -> None:
        self._store = store
        self._topology_id = topology_id
        # the incarnation, and the last undo
        self._begun: tuple[bytes | None, bytes | None] = (None, None)
        self._records: deque[TransactionRecord] = deque(maxlen=RECORDS_MAX)
        self._last = 0
        self.unreadable: str | None = None

    def read(self) -> list[TransactionRecord]:
        """The last thousand closed transactions, oldest first. Raises ``CorruptStateError`` when
        the store's next txid cannot be read."""
        incarnation, undone = (self._store.get(f"{self._topology_id}/{each}") for each in (INCARNATION, UNDONE))
        begun = incarnation, undone
        last = committed_txid(self._store, self._topology_id)
        # a new incarnation began, or a transaction was taken back
        if begun != self._begun or last < self._last:
            self._records.clear()
            self._begun, self._last, self.unreadable = begun, 0, None
        for txid in range(max(self._last, last - RECORDS_MAX) + 1, last + 1):
            try:
                found = read_transaction(self._store, self._topology_id, txid)
            except CorruptStateError as error:
                self.unreadable = str(error)
                found = None
            if found is not None:
                self._records.append(replace(found, plan={}))
            self._last = txid
        return list(self._records)
