"""The contract of a backend: a map of rows with stamps under one header, each write conditional (C1, C4).

To write a backend, implement ``MapBackend`` and run the contract suite of ``sinks.contract`` against it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import structlog

from framework.errors import RetryableError
from framework.topology import Fields, Header, Reach, Stamp, ValueType
from sinks.aggregates import Aggregate

Key = tuple[Any, ...]
Value = tuple[Any, ...]

_log = structlog.get_logger()


class Row(NamedTuple):
    """One stored row. ``value`` None: deleted (a tombstone that keeps ``prev``). ``prev`` None: there was none before.

    ``writer`` is the task that wrote it, as ``component:task``.
    """

    value: Value | None
    stamp: Stamp
    prev: Value | None = None
    writer: str = ""

    def restored(self, stamp: Stamp) -> Row:
        """The row as it was before the transaction that wrote it, under another stamp."""
        return Row(self.prev, stamp, self.prev, "sweep")


class MapBackend(ABC):
    """A store of one state's rows. Driver and tasks each have a copy; connections are opened where they are used.

    Keys and values come in the form of ``framework.topology.canonical``, and must be given back in it: decimals of the
    declared scale, moments in UTC, no -0.0, and of NaN the one object.

    Every method may raise ``RetryableError`` (no answer, nothing done), ``CommitOutcomeUnknown`` (the answer to a write
    was lost), ``CorruptStateError`` (names the row), ``BadRecordError`` (a value that the store does not take) and ``ConfigError``
    for anything else. What is retried is retried without limit: raise ``RetryableError`` for what is known to pass, only.
    """

    #: From where the rows can be written.
    reach: Reach = Reach.NETWORK

    @property
    @abstractmethod
    def location(self) -> str:
        """Where the rows are, for messages and as the identity of the state. No secrets."""

    @abstractmethod
    def bind(self, key: Fields, value: Fields) -> None:
        """Fix names and types of the columns, on the driver, before anything is sent to tasks. Raises
        ``TopologyError`` when they contradict those given before, or cannot be stored."""

    @property
    @abstractmethod
    def fields(self) -> tuple[Fields, Fields]:
        """Names and types of the key and of the value columns. Raises ``TopologyError`` when they were not given."""

    @property
    def value_columns(self) -> int:
        """How many value columns a row has; 1 means that states deal in bare values."""
        return len(self.fields[1])

    @abstractmethod
    def prepare(self, topology_id: str) -> Header:
        """Create what is missing; return the header. Raises ``ConfigError`` for another owner or a wrong shape."""

    def check(self, topology_id: str) -> None:
        """As ``prepare``, but change nothing. Raises as it does."""

    @abstractmethod
    def read_header(self) -> Header: ...

    @abstractmethod
    def raise_header(self, expected: Header, new: Header) -> None:
        """Compare and set. Raises ``StaleWriterError`` with the epoch found.

        A store that may come back as it was before (restored, or a replica of it promoted) may have lost rows of the open
        attempt under the very header that it was opened with. So what tells such a store from the one before is noted when
        an attempt is opened, and compared, in the same atomic step, when ``new`` says more about that attempt: that it is
        done, or rolled back. Raises ``_another_store`` when they differ (C27)."""

    @abstractmethod
    def multi_get(self, keys: Sequence[Key]) -> list[Row | None]:
        """The rows, in the order of the keys; None where there is none."""

    @abstractmethod
    def scan(self) -> Iterator[tuple[Key, Row]]:
        """Every row, tombstones included, page by page, in any order. Rows that are written meanwhile may be seen as they
        were or as they are."""

    @abstractmethod
    def multi_put(
        self, header: Header, keys: Sequence[Key], expected_stamps: Sequence[Stamp | None], rows: Sequence[Row]
    ) -> None:
        """Write all rows in one atomic step if the header is ``header`` and each key's stamp is the expected one
        (None: no row). Raises ``StaleWriterError`` otherwise, with nothing written. Keys are distinct. A store that can
        do only so many rows in one step takes several, each of them atomic and under the header: what a batch that was
        cut leaves is stamped, and its replay starts from there."""

    @abstractmethod
    def sweep(self, header: Header) -> int:
        """Under ``header``: each row of its open txid with a lower (epoch, attempt) gets value = prev and the header's
        stamp; a row born in that txid becomes a tombstone. Returns how many."""

    @abstractmethod
    def roll_back(self, header: Header) -> int:
        """Under ``header``: each row of its open txid gets value = prev and the txid below, with the header's epoch and
        attempt; a row born in that txid becomes a tombstone. Returns how many. Afterwards it is as if the txid had
        never been opened: a later attempt at it, with another plan, is neither skipped nor added to what was."""

    @abstractmethod
    def purge(self, header: Header, before_txid: int) -> int:
        """Under ``header``: remove tombstones whose txid is below ``before_txid``. Returns how many."""

    @abstractmethod
    def clear(self, topology_id: str) -> Header:
        """Remove every row and begin a new incarnation in the same atomic step: nothing open, nothing done, the epoch as
        it was. Returns the new header. Raises ``ConfigError`` for another owner."""

    def apply(
        self,
        header: Header,
        writer: str,
        value_type: ValueType,
        deltas: pa.Table,
        aggregates: Mapping[str, Aggregate],
        *,
        want_values: bool,
    ) -> pa.Table | None:
        """Merge deltas into the rows as one atomic step in the store, by the rules of ``value_type``. ``deltas`` has the
        key columns, each key once, then one column per aggregate. Returns keys and new values if they are wanted.

        Optional: raise ``NotImplementedError`` and the state reads, merges and puts instead."""
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None:
        """Release connections. Safe to call twice; the next use opens them again."""

    # --- for subclasses --------------------------------------------------------------------------------------

    #: What told the store from others when this process opened an attempt; empty before.
    _opened_in: str = ""

    def _may_lose_writes(self, reason: str, advice: str) -> None:
        """Say, when a state is prepared, how the store can forget what it has acknowledged (C27)."""
        _log.warning("store.may_lose_writes", state=self.location, reason=reason, advice=advice)

    def _must_be(self, expected: Header, new: Header) -> str:
        """What must tell the store in which ``expected`` becomes ``new``; empty when any will do."""
        return self._opened_in if expected.same_attempt(new) else ""

    def _another_store(self, header: Header) -> RetryableError:
        opened = header.open
        attempt = f"{opened.txid}:{opened.attempt_id} of epoch {header.epoch}" if opened is not None else "nothing"
        return RetryableError(
            f"{self.location}: the store is not the one in which {attempt} was opened: it was restarted, restored, or another "
            "one took its place, and may have lost rows; the attempt is repeated"
        )
