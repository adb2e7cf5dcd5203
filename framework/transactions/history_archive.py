"""Keeps the record of each closed transaction permanently in a table, exactly once.

The coordination store has the records of the last thousand transactions: each is written in the
step that closes its transaction. A keeper copies closed records to a *target*, in a thread of its
own.

Invariants:

1. The target holds each closed transaction of an incarnation once, in txid order, or a gap that
   names transactions whose records were removed from the store before they could be copied.
2. The keeper copies only records from the store, so only closed transactions.
3. After each error, and at the start of each leader, the keeper reads from the target where to
   continue. So a crash between a close and its copy neither loses nor doubles a record.
4. A target that does not answer does not delay transactions. The keeper tries again, and reports
   the delay.
"""

from __future__ import annotations

import copy
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import cast

from framework.config import Config
from framework.coordination.store import CoordinationStore
from framework.errors import CorruptStateError, RatchetError, StaleWriterError
from framework.extensions import HISTORIES, added
from framework.observe.journal import RECORDS_MAX, TransactionRecord
from framework.observe.logs import get_logger
from framework.observe.wait_log import Waits
from framework.transactions.documents import committed_txid, read_incarnation, read_transaction, read_undone

#: Records per write.
PAGE = 50
#: Pause before a failed target is tried again.
RETRY_S = 1.0
#: How long the end of a term waits for the last records to be copied. The next leader copies the
#: rest.
END_S = 5.0

#: The entry point of the table that Ratchet itself has, and the schemes of its addresses. It is
#: named here because a checkout that is not installed declares no entry points.
_OWN = EntryPoint("table", "sinks.transaction_history_table:history_table", HISTORIES)
_OWN_SCHEMES = ("sqlite", "postgresql", "postgres")

_log = get_logger()


@dataclass(frozen=True, slots=True)
class KeptRecord:
    """A record as a target holds it. If ``record`` is None, it is a gap from ``txid`` to
    ``until_txid``.
    """

    txid: int
    until_txid: int
    record: TransactionRecord | None


class HistoryTarget(ABC):
    """A place for records. Used by one thread at a time. Every method raises ``RetryableError``
    when the place does not answer, and ``ConfigError`` when it cannot be used."""

    @property
    @abstractmethod
    def location(self) -> str:
        """The place, for messages. Contains no secrets."""

    @abstractmethod
    def check(self, topology_id: str) -> None:
        """Raise ``ConfigError`` when the place belongs to another topology, or has other columns.
        Changes nothing."""

    @abstractmethod
    def begin(self, topology_id: str, incarnation: str, epoch: int) -> int:
        """Create missing parts, and refuse later writes of leaders with a lower epoch. Returns the
        last txid of this incarnation that is held, or in a gap; 0: none. Raises
        ``StaleWriterError`` when a later leader of this incarnation has written."""

    @abstractmethod
    def write(self, kept: Sequence[KeptRecord]) -> None:
        """Write records one after the other, in txid order; existing records are replaced. Raises
        ``StaleWriterError`` when another leader has written since ``begin``. After an error, call
        ``begin`` again."""

    @abstractmethod
    def read(self, incarnation: str, txid: int) -> KeptRecord | None:
        """The record of this txid, or the gap that begins with it. Creates nothing."""

    @abstractmethod
    def close(self) -> None:
        """Release connections. Safe to call twice; the next use opens them again."""


def history_target(config: Config, topology_id: str) -> HistoryTarget | None:
    """The target that the configuration names, not connected yet; None if it names none. Raises
    ``ConfigError`` for an invalid address."""
    if config.history_table is None:
        return None
    scheme, _, _ = config.history_table.partition(":")
    open_target = added(HISTORIES, scheme) if scheme not in _OWN_SCHEMES else None
    open_target = open_target if open_target is not None else _OWN.load()
    return cast(HistoryTarget, open_target(config.history_table, topology_id))


class HistoryKeeper:
    """Copies the records of one topology, during the terms of one driver. ``update``: called with
    ``history_waiting``, the reason why the target lags, or None."""

    def __init__(
        self, store: CoordinationStore, topology_id: str, target: HistoryTarget, update: Callable[..., None]
    ) -> None:
        self._store = store
        self._topology_id = topology_id
        self._target = target
        self._update = update
        self._term: _Term | None = None

    def begin(self, incarnation: str, epoch: int) -> None:
        """Begin a term."""
        target = copy.copy(self._target)  # a thread of an earlier term may hang in its own copy
        self._term = _Term(Copying(self._store, self._topology_id, target, incarnation, epoch), self._update)

    def closed(self) -> None:
        """Note that a transaction is closed in the store."""
        if self._term is not None:
            self._term.wake()

    def end(self) -> None:
        """End the term. Waits a moment until all closed records are copied."""
        term, self._term = self._term, None
        if term is not None:
            term.end()


class Copying:
    """The copying of one term, without its thread."""

    def __init__(
        self, store: CoordinationStore, topology_id: str, target: HistoryTarget, incarnation: str, epoch: int
    ) -> None:
        self.topology_id = topology_id
        self.target = target
        self.epoch = epoch
        self._store = store
        self._incarnation = incarnation
        self._newest: int | None = None

    def catch_up(self) -> None:
        """Copy all closed records that are not copied yet. Raises the errors of store and target,
        and ``StaleWriterError`` with an epoch above this term's when another leader copies now."""
        try:
            newest = self._newest if self._newest is not None else self._begin()
            committed = committed_txid(self._store, self.topology_id)
            while newest < committed:
                page = self._page(newest, committed)
                self.target.write(page)
                newest = page[-1].until_txid
        except BaseException:
            self._newest = None  # it is unknown how much was written
            raise
        self._newest = newest

    def _begin(self) -> int:
        """The txid after which copying continues."""
        if read_incarnation(self._store, self.topology_id) != self._incarnation:
            raise StaleWriterError(f"topology {self.topology_id!r} was begun anew", self.epoch + 1)
        newest = self.target.begin(self.topology_id, self._incarnation, self.epoch)
        while (there := self.target.read(self._incarnation, newest + 1)) is not None:
            newest = there.until_txid  # of a page whose end was not recorded
        if newest == 0:
            return 0
        committed = committed_txid(self._store, self.topology_id)
        held = self.target.read(self._incarnation, newest)
        now, _ = self._record(newest)
        if newest > committed:  # the transaction was taken back, and will be closed again
            if now is not None and (held is None or held.record != now):
                self.target.write([KeptRecord(newest, newest, now)])
            return committed
        return newest - 1 if held is not None and self._was_closed_again(held, now) else newest

    def _was_closed_again(self, held: KeptRecord, now: TransactionRecord | None) -> bool:
        """Whether a transaction was taken back, and closed again, since it was copied. That is
        possible only for the newest copied one."""
        if held.record is None or now == held.record:
            return False
        undone = read_undone(self._store, self.topology_id)
        return now is not None or (undone is not None and undone.txid == held.txid)

    def _page(self, newest: int, committed: int) -> list[KeptRecord]:
        oldest = committed - RECORDS_MAX + 1
        if newest + 1 < oldest:
            return [self._gap(newest + 1, oldest - 1, "the store keeps no more of them")]
        page: list[KeptRecord] = []
        for txid in range(newest + 1, min(newest + PAGE, committed) + 1):
            record, why = self._record(txid)
            page.append(KeptRecord(txid, txid, record) if record is not None else self._gap(txid, txid, why))
        return page

    def _record(self, txid: int) -> tuple[TransactionRecord | None, str]:
        try:
            return read_transaction(self._store, self.topology_id, txid), "the store has no record of it"
        except CorruptStateError as error:
            return None, str(error)

    def _gap(self, txid: int, until_txid: int, reason: str) -> KeptRecord:
        _log.warning(
            "history.gap",
            topology=self.topology_id,
            txid=txid,
            until_txid=until_txid,
            target=self.target.location,
            reason=reason,
        )
        return KeptRecord(txid, until_txid, None)


class _Term:
    """The thread of one term."""

    def __init__(self, copying: Copying, update: Callable[..., None]) -> None:
        self._copying = copying
        self._update = update
        self._changed = threading.Condition()
        self._to_do, self._ended = True, False
        self._waits = Waits(topology=copying.topology_id, target=copying.target.location)
        self._thread = threading.Thread(target=self._run, name="ratchet-history", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        with self._changed:
            self._to_do = True
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join(END_S)

    def _run(self) -> None:
        try:
            for _ in self._wakings():
                if not self._copied():
                    return
        except Exception:  # noqa: BLE001 - a bug in here must be reported, and must not end the topology
            _log.error("history.crashed", topology=self._copying.topology_id, exc_info=True)
            self._update(history_waiting="the record for good has stopped: see history.crashed in the log")

    def _wakings(self) -> Iterator[None]:
        """Yields each time that there may be work, and once more at the end."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._to_do or self._ended)
                ended, self._to_do = self._ended, False
            yield
            if ended:
                return

    def _copied(self) -> bool:
        """Copy. Returns whether this term may continue."""
        try:
            self._copying.catch_up()
        except StaleWriterError as error:
            if error.epoch is not None and error.epoch > self._copying.epoch:
                _log.info("history.stale", topology=self._copying.topology_id, reason=str(error))
                return False
            self._again(error)
        except RatchetError as error:
            self._again(error)
        else:
            self._waits.over()
            self._update(history_waiting=None)
        return True

    def _again(self, error: RatchetError) -> None:
        self._waits.again("history.waiting", str(error))
        self._update(history_waiting=str(error))
        with self._changed:
            if not self._ended:
                self._changed.wait_for(lambda: self._ended, RETRY_S)
            self._to_do = True
