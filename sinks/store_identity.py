"""The identity of the store in which an attempt was opened, compared again before the attempt is
done (C27).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from framework.errors import RetryableError
from framework.observe.logs import get_logger
from framework.topology import Header

_log = get_logger()


class StoreIdentity(ABC):
    """Remembers the identity of a store, for states and backends."""

    @property
    @abstractmethod
    def location(self) -> str:
        """Where the store is, for messages. Contains no secrets."""

    #: The identity of the store when this process opened an attempt; empty before.
    _opened_in: str = ""

    def _may_lose_writes(self, reason: str, advice: str) -> None:
        """Log how the store can lose acknowledged writes. Called when a state is prepared (C27)."""
        _log.warning("store.may_lose_writes", state=self.location, reason=reason, advice=advice)

    def _must_be(self, expected: Header, new: Header) -> str:
        """The identity that the store must have for ``expected`` to become ``new``; empty if any
        store is accepted."""
        return self._opened_in if expected.same_attempt(new) else ""

    def _another_store(self, header: Header) -> RetryableError:
        opened = header.open
        attempt = f"{opened.txid}:{opened.attempt_id} of epoch {header.epoch}" if opened is not None else "nothing"
        return RetryableError(
            f"{self.location}: the store is not the one in which {attempt} was opened: it was restarted, restored, or another "
            "one took its place, and may have lost rows; the attempt is repeated"
        )
