"""Map states: a value type on a backend, as committers use them.

In a topology the driver raises the header, sweeps, and sets ``done``. A state in a task writes
under the header of its attempt's fence. A state used on its own, with attempts without a fence (in
scripts and tests), does all of that itself.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from framework.bounded_pages import PAGE_KEYS, pages_of, pages_within
from framework.errors import (
    BadRecordError,
    ConfigError,
    InvariantViolation,
    MovedOnError,
    StaleWriterError,
    TopologyError,
)
from framework.topology import (
    Change,
    Difference,
    FencedState,
    Fields,
    Header,
    KeyedState,
    OpenCommit,
    Reach,
    RebuildableState,
    TransactionAttempt,
    ValueType,
    check_granted,
)
from framework.topology.canonical_form import RowForm, python_values
from framework.value_size import fixed_size
from sinks.aggregates import Aggregate, results_column, row_merger
from sinks.backend import Key, MapBackend, Row, Value
from sinks.expected_values import Expected, Recomputed
from sinks.external_row_sorter import PAGE_BYTES, Due, DueRows, Order, by_time, due_size
from sinks.key_parser import key_values
from sinks.map_commit import STANDALONE, MapCommit, refuse_newer, row_after
from sinks.map_snapshot_reader import MapReading
from sinks.read_as_of import as_of, at_one_moment, check_held
from sinks.rebuild_exchange import exchangeable
from sinks.refused_rows import UNREADABLE, explained_in, strange_row
from sinks.scratch import InSink, ReplayBackend, TriedBackend, scratch_backend
from sinks.values import TransactionalValue, value_before

Updater = Callable[[Any], Any]
Restored = TypeVar("Restored")
#: The incarnation of each state that this process has written to: location -> incarnation.
_incarnations: dict[str, str] = {}


class MapState(KeyedState, RebuildableState):
    """Keys to values. A key is a scalar or a tuple. A value is a scalar, or a tuple if the backend
    has several value columns. Subclasses differ in what a replay does.

    Between ``begin_commit`` and ``commit`` nothing is written to the backend. ``commit`` writes
    every key once (C12).
    """

    may_be_referenced = False

    def __init__(self, backend: MapBackend) -> None:
        self.backend = backend
        self._commit: MapCommit | None = None
        self._forms: tuple[RowForm, ...] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_forms": None}

    # --- for committers, in tasks -----------------------------------------------------------------

    def begin_commit(self, attempt: TransactionAttempt) -> None:
        """Start the commit of an attempt. Discards an unfinished commit."""
        fence = attempt.fence
        if fence is None:
            self._commit = MapCommit(attempt, self._open_standalone(attempt), None, self.backend)
            return
        if fence.opens_from is not None:
            opened = OpenCommit(attempt.txid, attempt.attempt_id, fence.plan_digest)
            header, backend = fence.opens_from.opened(fence.epoch, opened), self.backend.for_one_step(fence.opens_from)
            self._commit = MapCommit(attempt, header, fence, backend)
            return
        header = self.backend.read_header()
        check_granted(header, attempt, self.location)
        _incarnations[self.location] = header.incarnation
        self._commit = MapCommit(attempt, header, fence, self.backend)

    def multi_get(self, keys: Sequence[Any]) -> list[Any]:
        """The values as seen by this commit: its own writes, else the value before its transaction.
        None for a key without a value."""
        commit = self._begun()
        wanted = [self._key(key) for key in keys]
        self._load(commit, wanted)
        return [self._bare(self._visible(commit, key)) for key in wanted]

    def multi_update(self, keys: Sequence[Any], updaters: Sequence[Updater]) -> list[Any]:
        """Replace the value of each key by ``updater(value or None)``. If a key occurs several
        times, each update sees the previous one. Returns the new values."""
        return [value for _, value in self.multi_update_with_previous(keys, updaters)]

    def multi_update_with_previous(self, keys: Sequence[Any], updaters: Sequence[Updater]) -> list[tuple[Any, Any]]:
        """As ``multi_update``, but returns (value before this transaction, new value), even for a
        key whose update is skipped because this transaction has already made it (C6)."""
        commit = self._begun()
        wanted = [self._key(key) for key in keys]
        self._load(commit, wanted)
        results = []
        for key, updater in zip(wanted, updaters, strict=True):
            if not self._skips(commit.found[key], commit):
                value = updater(self._bare(self._visible(commit, key)))
                self._write(commit, key, None if value is None else self._packed(value))
            row = commit.written.get(key) or commit.found[key]
            results.append((self._bare(row.prev), self._bare(row.value)) if row is not None else (None, None))
        return results

    def multi_put(self, keys: Sequence[Any], values: Sequence[Any]) -> None:
        """Set the value of each key, whatever it was."""
        commit = self._begun()
        wanted = [self._key(key) for key in keys]
        self._load(commit, wanted)
        for key, value in zip(wanted, values, strict=True):
            if not self._skips(commit.found[key], commit):
                self._write(commit, key, self._packed(value))

    def delete(self, keys: Sequence[Any]) -> None:
        """Delete keys. A tombstone keeps the previous value until a later transaction."""
        commit = self._begun()
        wanted = [self._key(key) for key in keys]
        self._load(commit, wanted)
        for key in wanted:
            if commit.found[key] is None:
                commit.written.pop(key, None)  # there is nothing in the store to delete
            elif not self._skips(commit.found[key], commit):
                self._write(commit, key, None)

    def due(
        self,
        column: str,
        after: int,
        upto: int,
        mine: Callable[[Sequence[Key]], Sequence[bool]],
        order: Order = by_time,
    ) -> Iterator[list[tuple[Key, Value]]]:
        """Pages of the keys and values whose value before this commit's transaction has a
        ``column`` (of integers, of the key or the value) above ``after`` and at most ``upto``. They
        are ordered by ``order``. ``mine``: says whether this task writes a key.

        All rows are read before the first page is returned, into a file if they are many. So a
        commit may ``write`` between two pages. A page must not change a key of a later page, whose
        stamp was read here."""
        commit = self._begun()
        txid = commit.stamp.txid
        held = self.backend.column(column)
        # A first attempt has no writes of its own to find. A copy numbers all attempts 0.
        found = self.backend.due(column, after, upto, txid=txid if commit.stamp.attempt_id != 1 else None)
        size_of_row = self._due_sizer()
        sized = ((key, row, size_of_row(key, row)) for key, row in found)
        rows = DueRows(self.location, self._restored)
        for part, _ in pages_within(sized, PAGE_KEYS, PAGE_BYTES, itemgetter(2)):
            for (key, row, size), own in zip(part, mine([key for key, *_ in part]), strict=True):
                value = self._base(row, txid) if own else None
                if value is not None and after < (at := held(key, value)) <= upto:
                    refuse_newer(key, row, commit)
                    rows.add(Due(order(at, key), key, row, size))
        for page in rows.pages():
            commit.found.update((each.key, each.row) for each in page)
            yield [(key, value) for _, key, row, _ in page if (value := self._base(row, txid)) is not None]

    @property
    def is_tried(self) -> bool:
        """Whether this is a copy of ``trying``."""
        return isinstance(self.backend, TriedBackend)

    def trying(self, attempt: TransactionAttempt) -> MapState:
        """A copy of the state, with which a commit of this attempt reads the rows, and drops what
        it writes. Its ``due`` finds nothing."""
        tried = copy.copy(self)
        tried.backend, tried._commit = TriedBackend(self.backend, attempt), None
        return tried

    def write(self) -> None:
        """Write the updates so far, by one step under the header, and forget what was read, so that
        a commit of many rows needs little memory. If the attempt ends before ``commit``, the next
        one starts from the previous values, as after any write.

        Afterwards, reading a key returns its value before this commit's transaction, whether or not
        this commit has written it."""
        commit = self._begun()
        if commit.backend is not self.backend:
            raise InvariantViolation(f"{self.location}: a commit in one step of the store cannot be divided")
        if commit.written:
            self._put(commit)
        commit.found.clear()
        commit.written.clear()

    def commit(self, attempt: TransactionAttempt) -> None:
        """Write all updates, since the last ``write``, by one ``multi_put`` of the backend. Raises
        ``StaleWriterError`` when this attempt is no longer current."""
        commit = self._begun()
        if commit.attempt != attempt:
            raise InvariantViolation(f"{self.location}: commit of {attempt}, and {commit.attempt} was begun")
        self._commit = None
        if commit.written or (commit.backend is not self.backend and not commit.merged):
            self._put(commit)
        if commit.standalone:
            self._finish_standalone(commit)

    def check_rows(self, deltas: pa.Table) -> None:
        """Raise ``BadRecordError`` for a row that the backend would refuse. ``deltas``: as in
        ``apply``. Called in processing."""
        self.backend.check_rows(deltas)

    def apply(
        self, attempt: TransactionAttempt, deltas: pa.Table, aggregates: Mapping[str, Aggregate], *, want_values: bool
    ) -> pa.Table | None:
        """Begin, merge deltas, and commit. ``deltas``: the key columns, each key once, then one
        column per aggregate. With ``want_values``, returns the keys and the new values."""
        guess = self._guessed_header(attempt)
        if guess is not None:
            self._commit = MapCommit(attempt, guess, attempt.fence, self.backend)
            with suppress(StaleWriterError):  # the guess was wrong: read the header
                return self._apply_begun(attempt, deltas, aggregates, want_values=want_values)
        self.begin_commit(attempt)
        return self._apply_begun(attempt, deltas, aggregates, want_values=want_values)

    def _apply_begun(
        self, attempt: TransactionAttempt, deltas: pa.Table, aggregates: Mapping[str, Aggregate], *, want_values: bool
    ) -> pa.Table | None:
        merged = self.merge(deltas, aggregates, want_values=want_values)
        self.commit(attempt)
        return merged

    def merge(self, deltas: pa.Table, aggregates: Mapping[str, Aggregate], *, want_values: bool) -> pa.Table | None:
        """Merge deltas, as ``apply`` does, within a commit that changes their keys in no other way.
        A store that can merge does so immediately, by a step under the header."""
        commit = self._begun()
        try:
            merged = commit.backend.apply(
                commit.header, commit.writer, self.value_type, deltas, aggregates, want_values=want_values
            )
        except NotImplementedError:
            return self._merge_here(deltas, aggregates)
        commit.merged = True
        return merged

    def commit_unchanged(self, attempt: TransactionAttempt) -> None:
        """Commit a transaction that changes nothing in this state. If the commit is one step of the
        store, the header must still be updated."""
        if attempt.is_one_step:
            self.begin_commit(attempt)
            self.commit(attempt)

    @property
    def commits_in_one_step(self) -> bool:
        """Whether the whole commit of an attempt can be one step of the store."""
        return self.backend.commits_in_one_step

    def _guessed_header(self, attempt: TransactionAttempt) -> Header | None:
        """The header of the state, provided that this attempt is current and the state was not
        cleared. Guessing saves a read; the write compares the header anyway. None: read it."""
        fence = attempt.fence
        known = _incarnations.get(self.location)
        if fence is None or known is None or fence.opens_from is not None:
            return None
        opened = OpenCommit(attempt.txid, attempt.attempt_id, fence.plan_digest)
        return Header(fence.topology_id, known, epoch=fence.epoch, open=opened, done=attempt.txid - 1)

    # --- for readers ------------------------------------------------------------------------------

    def get(self, key: Any) -> Any:
        """The present value, as any reader sees it outside of a commit."""
        row = self.backend.multi_get([self._key(key)])[0]
        return self._bare(row.value) if row is not None else None

    def read_as_of(self, keys: Sequence[Any], txid: int) -> list[Any]:
        """The values as transaction ``txid`` left them; None for a key that had no value.

        For a row that transaction ``txid + 1`` has changed, returns its previous value. Raises
        ``MovedOnError``, which names the key, for a row that a later transaction has changed, and
        for one that may have been deleted and purged since; ``ConfigError`` for a non-transactional
        state."""
        wanted = [self._key(key) for key in keys]
        rows = self.backend.multi_get(wanted)
        for key, row, (known, _) in zip(wanted, rows, answers := self._as_of(rows, txid), strict=True):
            if not known:
                moved = "changed after" if row is not None else "it has no row, and may have been deleted after"
                raise MovedOnError(f"{self.location}, key {key!r}: {moved} transaction {txid + 1}; ask for a later one")
        return [self._bare(value) for _, value in answers]

    def _as_of(self, rows: Sequence[Row | None], txid: int) -> list[tuple[bool, Value | None]]:
        """As ``sinks.read_as_of.as_of``."""
        if self.value_type is ValueType.NON_TRANSACTIONAL:
            raise ConfigError(f"{self.location} may add a batch twice, so nobody can say what it held after {txid}")
        return as_of(self.backend, rows, txid)

    @contextmanager
    def reading(self, topology_id: str | None = None) -> Iterator[MapReading]:
        if self.value_type is ValueType.NON_TRANSACTIONAL:
            raise ConfigError(
                f"{self.location} may add a batch twice, so nobody can say what it held after a transaction"
            )
        with at_one_moment(self.backend) as backend:
            if topology_id is not None and check_held(backend, topology_id) is None:
                raise ConfigError(f"{self.location}: there is nothing yet")
            yield MapReading(backend, self.key_of)

    # --- for the driver ---------------------------------------------------------------------------

    @property
    def location(self) -> str:
        return self.backend.location

    @property
    def reach(self) -> Reach:
        return self.backend.reach

    def bind(self, key: Fields, value: Fields) -> None:
        self.backend.bind(key, value)
        self._forms = None

    def prepare(self, topology_id: str) -> Header:
        return self.backend.prepare(topology_id)

    def check(self, topology_id: str) -> Header | None:
        return self.backend.check(topology_id)

    def read_header(self) -> Header:
        return self.backend.read_header()

    def raise_header(self, expected: Header, new: Header) -> None:
        self.backend.raise_header(expected, new)

    def sweep(self, header: Header) -> int:
        return self.backend.sweep(header)

    def roll_back(self, header: Header) -> int:
        return self.backend.roll_back(header)

    def purge(self, header: Header, before_txid: int) -> int:
        return self.backend.purge(header, before_txid)

    def clear(self, topology_id: str) -> Header:
        return self.backend.clear(topology_id)

    def become_scratch(self, folder: Path) -> None:
        self._commit, self._forms = None, None
        self.backend = scratch_backend(folder, *self.backend.fields)

    def become_replay(self, folder: Path, txid: int, topology_id: str) -> None:
        self._commit, self._forms = None, None
        knows_past = self.value_type is not ValueType.NON_TRANSACTIONAL
        self.backend = ReplayBackend(self.backend, txid, topology_id, knows_past=knows_past)

    def become_beside(self, place: str) -> None:
        self._commit, self._forms = None, None
        self.backend = exchangeable(self.backend).beside(place)

    def exchange(self, expected: Header, new: Header, rebuilt: Header) -> None:
        exchangeable(self.backend).exchange(expected, new, rebuilt)

    def check_exchange(self, topology_id: str) -> None:
        exchangeable(self.backend).check_exchange(topology_id)

    def remove(self, topology_id: str) -> bool:
        return exchangeable(self.backend).remove(topology_id)

    def changes(self, replayed: FencedState, txid: int) -> Iterator[Change]:
        copy = _scratch(replayed)
        backend = copy.backend
        if not isinstance(backend, ReplayBackend):
            raise InvariantViolation(f"{self.location} is compared with {replayed.location}")
        for page in pages_of((key for key, _ in backend.scan()), PAGE_KEYS):
            for key, told, expected in zip(page, backend.in_sink(page), copy.expected(page), strict=True):
                yield self._change(key, told, expected)

    def _change(self, key: Key, told: InSink, expected: Expected | None) -> Change:
        bare = key[0] if len(key) == 1 else key
        after = self._bare(expected.value) if expected is not None else None
        if not told.known:
            return Change(bare, None, after, None, agrees=None)
        held = told.held
        agrees = held is None if expected is None else held is not None and expected.agrees(held)
        return Change(bare, self._bare(told.before), after, self._bare(held), agrees=agrees)

    def pages(self, scratch: FencedState) -> Iterator[Sequence[Key]]:
        yield from pages_of((key for key, _ in self.backend.scan()), PAGE_KEYS)
        for page in pages_of(_scratch(scratch).expected_keys(), PAGE_KEYS):
            found = self.backend.multi_get(page)
            yield [key for key, row in zip(page, found, strict=True) if row is None]

    def held(self, keys: Sequence[Any], txid: int) -> Mapping[Any, Any]:
        rows = self.backend.multi_get(keys)
        if self.value_type is ValueType.NON_TRANSACTIONAL:
            return {key: row.value if row is not None else None for key, row in zip(keys, rows, strict=True)}
        answers = zip(keys, self._as_of(rows, txid), strict=True)
        return {key: value for key, (known, value) in answers if known}

    def compare(self, held: Mapping[Any, Any], scratch: FencedState, differs: Callable[[Difference], None]) -> int:
        compared = 0
        keys = list(held)
        for key, expected in zip(keys, _scratch(scratch).expected(keys), strict=True):
            found = held[key]
            compared += found is not None or expected is not None
            if found is None and expected is None:
                continue
            if found is None or expected is None or not expected.agrees(found):
                bare = key[0] if len(key) == 1 else key
                differs(Difference(bare, found, expected.value if expected is not None else None))
        return compared

    # --- for explain ------------------------------------------------------------------------------

    def key_of(self, text: str) -> Key:
        return self._key(key_values(text, self.backend.fields[0], self.location))

    def key_columns(self) -> Sequence[str]:
        return list(self.backend.fields[0])

    def by_column(self, value: Value | None) -> Mapping[str, Any] | None:
        return dict(zip(self.backend.fields[1], value, strict=True)) if value is not None else None

    def written(self, key: Key, txid: int) -> bool:
        row = self._row_of(key)
        return row is not None and row.stamp.txid == txid

    def recomputed(self, key: Key) -> Value | None:
        expected = self.expected([key])[0]
        return expected.value if expected is not None else None

    def _row_of(self, key: Key) -> Row | None:
        return self.backend.multi_get([key])[0]

    # --- as a scratch copy ------------------------------------------------------------------------

    def expected_keys(self) -> Iterator[Key]:
        """The keys that a sink should hold."""
        return (key for key, row in self.backend.scan() if row.value is not None)

    def expected(self, keys: Sequence[Key]) -> Sequence[Expected | None]:
        """The expected value of each of these keys in a sink; None: no value."""
        rows = self.backend.multi_get(keys)
        return [Recomputed(row.value) if row is not None and row.value is not None else None for row in rows]

    def close(self) -> None:
        self.backend.close()

    def restored(self, key: Key, restore: Callable[[Value], Restored], value: Value) -> Restored:
        """The content that a committer has put into the value of a key, by ``restore``. Its error
        becomes a ``CorruptStateError``, because only committers write values."""
        try:
            return restore(value)
        except UNREADABLE as error:
            raise strange_row(self.location, key, error) from error

    # --- decided by the value types ---------------------------------------------------------------

    @abstractmethod
    def _base(self, row: Row, txid: int) -> Value | None:
        """The value from which transaction ``txid`` starts, given the stored row."""

    @abstractmethod
    def _replaced(self, row: Row | None, commit: MapCommit, value: Value | None) -> Row:
        """The row that the commit's transaction writes over ``row``."""

    def _skips(self, row: Row | None, commit: MapCommit) -> bool:
        """Whether this transaction has updated the row before and must not do so again."""
        return False

    # --- inside -----------------------------------------------------------------------------------

    def _begun(self) -> MapCommit:
        if self._commit is None:
            raise InvariantViolation(f"{self.location}: call begin_commit(attempt) first")
        return self._commit

    def _load(self, commit: MapCommit, keys: Sequence[Key]) -> None:
        missing = list(dict.fromkeys(key for key in keys if key not in commit.found))
        for key, row in zip(missing, self.backend.multi_get(missing) if missing else [], strict=True):
            if row is not None:
                refuse_newer(key, row, commit)
            commit.found[key] = row

    def _visible(self, commit: MapCommit, key: Key) -> Value | None:
        own = commit.written.get(key)
        if own is not None:
            return own.value
        row = commit.found[key]
        return self._base(row, commit.stamp.txid) if row is not None else None

    def _write(self, commit: MapCommit, key: Key, value: Value | None) -> None:
        commit.written[key] = self._replaced(commit.found[key], commit, value)

    def _packed(self, value: Any) -> Value:
        packed = (value,) if self.backend.value_columns == 1 else tuple(value)
        return self._formed(packed, 1)

    def _key(self, key: Any) -> Key:
        return self._formed(key if isinstance(key, tuple) else (key,), 0)

    def _formed(self, values: tuple[Any, ...], which: int) -> tuple[Any, ...]:
        """A key (``which`` 0) or a value (1) in its canonical form (C29)."""
        if self._forms is None:
            try:
                self._forms = tuple(map(RowForm, self.backend.fields))
            except (TopologyError, ConfigError):  # a backend that needs no columns
                return RowForm(None)(values)
        try:
            return self._forms[which](values)
        except ValueError as error:
            raise BadRecordError(f"{self.location} cannot hold {values!r}: {error}") from error

    def _due_sizer(self) -> Callable[[Key, Row], int]:
        """``due_size``, or a constant if all rows have the same size."""
        try:
            key, value = (fixed_size(map(each.type_of, each)) for each in self.backend.fields)
        except (TopologyError, ConfigError):  # a backend that needs no columns
            return due_size
        if key is None or value is None:
            return due_size
        size = key + 2 * value
        return lambda *_: size

    def _restored(self, key: Key, row: Row) -> tuple[Key, Row]:
        """A row that was read from a file, in its canonical form again: with the one NaN object."""
        value, prev = (each if each is None else self._formed(each, 1) for each in (row.value, row.prev))
        return self._formed(key, 0), row._replace(value=value, prev=prev)

    def _put(self, commit: MapCommit) -> None:
        keys = list(commit.written)
        expected = [found.stamp if (found := commit.found[key]) is not None else None for key in keys]
        commit.backend.multi_put(commit.header, keys, expected, list(commit.written.values()))

    def _bare(self, value: Value | None) -> Any:
        if value is None:
            return None
        return value[0] if self.backend.value_columns == 1 else value

    def _merge_here(self, deltas: pa.Table, aggregates: Mapping[str, Aggregate]) -> pa.Table:
        """For backends without ``apply``: read, merge, put. Puts nothing if it raises
        ``BadRecordError``."""
        commit = self._begun()
        names = [name for name in deltas.schema.names if name not in aggregates]
        keys: list[Key] = list(zip(*(python_values(deltas.column(name), name) for name in names), strict=True))
        changes = list(zip(*(python_values(deltas.column(name), name) for name in aggregates), strict=True))
        self._load(commit, keys)
        if len(set(keys)) != len(keys):
            raise InvariantViolation(f"{self.location}: deltas must hold each key once")
        merged, nothing = row_merger(aggregates), (None,) * len(aggregates)
        ours = all(each.merge_rule or each.derived_from for each in aggregates.values())
        values: list[Value] = []
        written: dict[Key, Row] = {}
        for key, change in zip(keys, changes, strict=True):
            row = commit.found[key]
            if row is None:
                written[key] = self._replaced(None, commit, change)
                values.append(change)
            elif self._skips(row, commit):
                values.append(row.value if row.value is not None else nothing)
            else:
                value = merged(self._base(row, commit.stamp.txid) or nothing, change)
                # a function of the user's may return any value
                value = value if ours else self._formed(value, 1)
                written[key] = self._replaced(row, commit, value)
                values.append(value)
        columns = {name: deltas.column(name) for name in names}
        for name, column in zip(aggregates, zip(*values, strict=True) if values else ((),) * len(nothing), strict=True):
            kind = deltas.schema.field(name).type
            columns[name] = pa.chunked_array([self._results(deltas, names, name, column, kind)])
        commit.written.update(written)
        return pa.table(columns)

    def _results(
        self, deltas: pa.Table, key: Sequence[str], name: str, values: Sequence[Any], kind: pa.DataType
    ) -> pa.Array:
        """The new values of the aggregate ``name``, one per row of ``deltas``. The
        ``BadRecordError`` for a value that its type does not hold tells the row."""
        try:
            return results_column(self.location, name, values, kind)
        except BadRecordError:
            for row, value in enumerate(values):
                try:
                    results_column(self.location, name, [value], kind)
                except BadRecordError as error:
                    raise explained_in(error, deltas, row, name, key) from error
            raise

    def _open_standalone(self, attempt: TransactionAttempt) -> Header:
        header = self.backend.prepare(STANDALONE)
        wanted = OpenCommit(attempt.txid, attempt.attempt_id, "")
        if header.open is not None:
            held = (header.open.txid, header.open.attempt_id)
            if held > (attempt.txid, attempt.attempt_id):
                raise StaleWriterError(f"{self.location} is open for {held}, not for attempt {attempt}", header.epoch)
        if header.open != wanted:
            opened = header.opened(header.epoch, wanted)
            self.backend.raise_header(header, opened)
            header = opened
        return header

    def _finish_standalone(self, commit: MapCommit) -> None:
        if self.value_type is ValueType.OPAQUE:
            self.backend.sweep(commit.header)
        self.backend.raise_header(commit.header, commit.header.finished(commit.stamp.txid))


class NonTransactionalMapState(MapState):
    """Applies every update, even in a replay: at-least-once. Keeps previous values too, in case a
    state of another value type replaces it while a transaction is open."""

    value_type = ValueType.NON_TRANSACTIONAL

    def _base(self, row: Row, txid: int) -> Value | None:
        return row.value

    def _replaced(self, row: Row | None, commit: MapCommit, value: Value | None) -> Row:
        return row_after(row, commit, value)


class TransactionalMapState(MapState):
    """Skips a key that its transaction has updated before. Correct if every replay is identical."""

    value_type = ValueType.TRANSACTIONAL

    def _base(self, row: Row, txid: int) -> Value | None:
        value: Value | None = TransactionalValue(row.stamp.txid, row.value).get(txid)
        return value

    def _replaced(self, row: Row | None, commit: MapCommit, value: Value | None) -> Row:
        return Row(value, commit.stamp, row.value if row is not None else None, commit.writer)

    def _skips(self, row: Row | None, commit: MapCommit) -> bool:
        return row is not None and row.stamp.txid == commit.stamp.txid


class OpaqueMapState(MapState):
    """Starts again from the previous value when a transaction is replayed. Correct even if the
    replay differs.

    >>> from sinks.memory import MemoryBackend
    >>> state = OpaqueMapState(MemoryBackend())
    >>> for attempt, amount in ((TransactionAttempt(1, 1), 5), (TransactionAttempt(2, 1), 7), (TransactionAttempt(2, 2), 1)):
    ...     state.begin_commit(attempt)
    ...     _ = state.multi_update(["dog"], [lambda count: (count or 0) + amount])
    ...     state.commit(attempt)
    >>> state.get("dog")
    6
    """  # noqa: W505 - doctest lines are not wrapped

    value_type = ValueType.OPAQUE

    def _base(self, row: Row, txid: int) -> Value | None:
        value: Value | None = value_before(txid, row.stamp.txid, row.value, row.prev)
        return value

    def _replaced(self, row: Row | None, commit: MapCommit, value: Value | None) -> Row:
        return row_after(row, commit, value)


def _scratch(state: FencedState) -> MapState:
    if not isinstance(state, MapState):
        raise InvariantViolation(f"a map is compared with {state.location}")
    return state


def checked_state(committer: str, state: object) -> MapState:
    """Check that an object is a state. Raises ``TopologyError`` otherwise, for instance for a bare
    backend.
    """
    if not isinstance(state, MapState):
        raise TopologyError(
            f"{committer} writes to a state, not to a {type(state).__name__}: give OpaqueMapState(backend) or "
            "TransactionalMapState(backend)"
        )
    return state
