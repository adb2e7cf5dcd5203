"""The contract of a backend: a map of stamped rows under one header. Each write is conditional
(C1, C4).

To write a backend, implement ``MapBackend`` and run the contract suite of
``framework.testing.conformance`` against it. Two optional bases add operations for tools:
``sinks.read_as_of`` for readers, ``sinks.rebuild_exchange`` for ``rebuild``.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from framework.topology import Fields, Header, Reach, Stamp, ValueType
from sinks.aggregates import Aggregate
from sinks.store_identity import StoreIdentity

Key = tuple[Any, ...]
Value = tuple[Any, ...]

#: The writers of restored rows: a sweep, which keeps their txid, and a roll-back, which gives them
#: the txid before.
SWEPT = "sweep"
ROLLED_BACK = "roll back"


class Row(NamedTuple):
    """One stored row.

    ``value`` None: the row is deleted (a tombstone that keeps ``prev``). ``prev`` None: the key had
    no value before. ``writer``: the task that wrote the row, as ``component:task``.
    """

    value: Value | None
    stamp: Stamp
    prev: Value | None = None
    writer: str = ""

    def restored(self, stamp: Stamp) -> Row:
        """The row with which a sweep under a header with this stamp replaces this one: as it was
        before the transaction that wrote it."""
        return Row(self.prev, stamp, self.prev, SWEPT)

    def rolled_back(self, stamp: Stamp) -> Row:
        """The row with which a roll-back under a header with this stamp replaces this one: as it
        was before the transaction, and with the txid before."""
        return Row(self.prev, stamp._replace(txid=stamp.txid - 1), self.prev, ROLLED_BACK)

    def as_of(self, txid: int) -> tuple[bool, Value | None]:
        """Whether the row still contains its value as of transaction ``txid``, and that value. A
        row that was rolled back has the txid before, and no earlier value."""
        if self.stamp.txid <= txid:
            return True, self.value
        return self.stamp.txid == txid + 1 and self.writer != ROLLED_BACK, self.prev


class MapBackend(StoreIdentity):
    """A store of one state's rows. The driver and each task have a copy, which opens its own
    connections.

    Keys and values arrive in the form of ``framework.topology.canonical_form``, and must be
    returned in that form: decimals of the declared scale, timestamps in UTC, no -0.0, and
    ``canonical_form.NAN`` as the only NaN object.

    Every method may raise:

    * ``RetryableError``: no answer, nothing was done. Retries have no limit, so raise it only for
      errors that are known to pass.
    * ``CommitOutcomeUnknown``: the answer to a write was lost.
    * ``CorruptStateError``: names the row.
    * ``BadRecordError``: the store does not accept a value.
    * ``ConfigError``: anything else.
    """

    #: Where processes that write the rows can run.
    reach: Reach = Reach.NETWORK
    #: Whether a scan may return a row twice, for example when the store rearranges itself
    #: meanwhile.
    scan_may_repeat: bool = False
    #: Whether ``for_one_step`` may be called.
    commits_in_one_step: bool = False
    #: Set in a backend returned by ``for_one_step``.
    _opens_from: Header | None = None

    @property
    @abstractmethod
    def location(self) -> str:
        """The place of the rows: for messages, and as the identity of the state. Contains no
        secrets.
        """

    @abstractmethod
    def bind(self, key: Fields, value: Fields) -> None:
        """Fix the names and types of the columns. Called on the driver, before anything is sent to
        tasks. Raises ``TopologyError`` when the columns contradict those given before, or cannot be
        stored."""

    @property
    @abstractmethod
    def fields(self) -> tuple[Fields, Fields]:
        """Names and types of the key columns and of the value columns. Raises ``TopologyError``
        when they were not given."""

    @property
    def value_columns(self) -> int:
        """How many value columns a row has. With 1, states take and return bare values."""
        return len(self.fields[1])

    @abstractmethod
    def prepare(self, topology_id: str) -> Header:
        """Create missing parts and return the header. Raises ``ConfigError`` if the state has
        another owner or other columns."""

    def check(self, topology_id: str) -> Header | None:
        """Check as ``prepare`` does, but change nothing. Returns the header, or None if there is
        none yet. Raises as ``prepare``."""
        return None

    @abstractmethod
    def read_header(self) -> Header: ...

    @abstractmethod
    def raise_header(self, expected: Header, new: Header) -> None:
        """Set the header to ``new`` if it is ``expected``. Raises ``StaleWriterError`` with the
        epoch found.

        A store may lose writes, for example when it is restored or when a replica is promoted. It
        may then hold the header of the open attempt without all the rows of that attempt. So note
        the identity of the store when an attempt is opened. When ``new`` says that this attempt is
        done or rolled back, compare the identity in the same atomic step. Raise ``_another_store``
        if it differs (C27)."""

    @abstractmethod
    def multi_get(self, keys: Sequence[Key]) -> list[Row | None]:
        """The rows in the order of the keys; None for a key without a row."""

    @abstractmethod
    def scan(self) -> Iterator[tuple[Key, Row]]:
        """Every row, tombstones included, page by page, in any order. A row that is written during
        the scan may appear in its old or its new form."""

    def order_by(self, column: str) -> None:
        """Called after ``bind``, by committers that will call ``due`` with this column, which holds
        integers. A store may keep an index."""

    def due(self, column: str, after: int, upto: int, *, txid: int | None) -> Iterator[tuple[Key, Row]]:
        """The rows that have a value and whose ``column`` is above ``after`` and at most ``upto``,
        in any order, perhaps repeatedly; with ``txid``, also every row of this transaction. Other
        tasks may write their own rows meanwhile; all other due rows must be returned. There may be
        many: return them as they are read, page by page. The default scans all rows; a store with
        an index reads only the due rows."""
        held = self.column(column)
        for key, row in self.scan():
            if row.stamp.txid == txid or (row.value is not None and after < held(key, row.value) <= upto):
                yield key, row

    def column(self, name: str) -> Callable[[Key, Value], Any]:
        """Returns a function that extracts a column of the key or of the value from a row."""
        keys, values = self.fields
        if name in keys:
            return lambda key, value: key[keys.position(name)]
        return lambda key, value: value[values.position(name)]

    @abstractmethod
    def multi_put(
        self, header: Header, keys: Sequence[Key], expected_stamps: Sequence[Stamp | None], rows: Sequence[Row]
    ) -> None:
        """Write all rows in one atomic step, if the header is ``header`` and each key has the
        expected stamp (None: no row). Raises ``StaleWriterError`` otherwise, with nothing written.
        Keys are distinct.

        A store that limits the rows of one step may use several steps, each atomic and under the
        header. If only some of the steps are done, their rows carry the stamp, and the replay
        continues from them."""

    def for_one_step(self, opens_from: Header) -> MapBackend:
        """A backend of the same rows with which one ``multi_put`` or ``apply`` is a whole commit.
        It compares the header with ``opens_from`` instead of ``header``, and leaves
        ``header.done_as_open()``, even without rows. After an error, it has no effect, or that of
        unfinished single steps, which is rows under ``header``."""
        if not self.commits_in_one_step:
            raise NotImplementedError(f"{self.location} cannot raise its header in the step that writes rows")
        other = copy.copy(self)
        other._opens_from = opens_from
        return other

    @abstractmethod
    def sweep(self, header: Header) -> int:
        """Under ``header``: each row of its open txid with a lower (epoch, attempt) gets
        value = prev and the header's stamp. A row created in that txid becomes a tombstone. Returns
        the number of rows changed."""

    @abstractmethod
    def roll_back(self, header: Header) -> int:
        """Under ``header``: each row of its open txid gets value = prev, the txid below, the
        header's epoch and attempt, and ``ROLLED_BACK`` as its writer, as ``Row.rolled_back`` says.
        A row created in that txid becomes a tombstone. Returns the number of rows changed.

        Afterwards the state is as if the txid had never been opened: a later attempt at it, with
        another plan, is not skipped and does not add to the values that were undone."""

    @abstractmethod
    def purge(self, header: Header, before_txid: int) -> int:
        """Under ``header``: remove tombstones whose txid is below ``before_txid``. Returns the
        number of rows removed."""

    @abstractmethod
    def clear(self, topology_id: str) -> Header:
        """Remove every row and begin a new incarnation, in one atomic step. The new header has
        nothing open, nothing done, and the old epoch. Returns it. Raises ``ConfigError`` if the
        state has another owner."""

    def check_rows(self, deltas: pa.Table) -> None:
        """Raise ``BadRecordError`` for a row that ``apply`` would certainly refuse. ``deltas``: as
        in ``apply``. Called before the commit is opened, when a record can still be left out,
        whatever the other sinks are. Optional."""

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
        """Merge deltas into the rows in one atomic step in the store, by the rules of
        ``value_type``. ``deltas`` has the key columns, each key once, then one column per
        aggregate. With ``want_values``, returns the keys and the new values; otherwise None.

        Optional: if it raises ``NotImplementedError``, the state reads, merges and puts instead."""
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None:
        """Release connections. Safe to call twice; the next use opens them again."""
