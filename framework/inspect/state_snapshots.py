"""Reads whole states as of one transaction, while a driver may go on.

Each state is opened first, and then its header is read. The transaction is the last one that all
of them hold: a row knows its value and the one before, and a table of files its files per
transaction. Rows go into a file of this reader's first, because only the end of a state shows
whether all of them were of that transaction. If a state moved on meanwhile, everything is read
again.

Invariants:

1. All rows of a snapshot are as one transaction left them.
2. With a store, that transaction is closed: it is not repeated, and only ``undo`` takes it back.
3. Rows are in memory one batch at a time, unless the caller asks for all.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from framework.coordination.store import CoordinationStore
from framework.errors import ConfigError, MovedOnError
from framework.inspect.state_by_name import state_named
from framework.topology import Component, FencedState, Header, HeldFile, StateReading, Topology
from framework.topology.inspectable import inspectable
from framework.transactions.documents import committed_txid

if TYPE_CHECKING:
    import pyarrow.dataset as ds

#: How often everything is read again because a state moved on.
TRIES = 20
#: Signs that Spark takes for a pattern in a path.
_PATTERN = frozenset("*?[]{}\\")


class StateSnapshot:
    """One state as of one transaction.

    ``name``: the id of its bolt where that has no other state, else its location. ``schema``: the
    Arrow schema of a row.
    """

    def __init__(self, name: str, location: str, txid: int, schema: pa.Schema) -> None:
        self.name = name
        self.location = location
        self.txid = txid
        self.schema = schema

    @property
    def row_count(self) -> int:
        raise NotImplementedError

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, a batch at a time, in any order."""
        raise NotImplementedError

    def arrow(self) -> pa.Table:
        """All rows as an Arrow table."""
        return pa.Table.from_batches(self.batches(), self.schema)

    def pandas(self) -> Any:
        """All rows as a pandas DataFrame. Raises ``ConfigError`` where pandas is not installed."""
        _needed("pandas")
        return self.arrow().to_pandas()

    def duckdb(self, connection: Any = None) -> Any:
        """The rows as a DuckDB relation, of this connection or of DuckDB's own. Raises
        ``ConfigError`` where DuckDB is not installed."""
        found = _needed("duckdb")
        source = self._for_duckdb()
        return found.from_arrow(source) if connection is None else found.from_arrow(source, connection=connection)

    def _for_duckdb(self) -> Any:
        return self.arrow()

    def spark(self, session: Any) -> Any:
        """The rows as a DataFrame of this SparkSession, sent from this process."""
        return session.createDataFrame(self.arrow())

    def files(self) -> list[HeldFile]:
        """The Parquet files that hold exactly these rows. Raises ``ConfigError`` where the state is
        no table of files."""
        raise ConfigError(f"{self.location} is no table of files: read its rows")

    def __repr__(self) -> str:
        return f"<{self.name}: {self.location}, {self.row_count:,} rows as of transaction {self.txid}>"


class _Rows(StateSnapshot):
    """Rows in a file of this process."""

    _file: Path
    _row_count = 0

    def fill(self, file: Path, batches: Iterator[pa.RecordBatch]) -> None:
        """Write the rows to ``file``. Raises what ``batches`` raises."""
        self._file, self._row_count = file, 0
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, self.schema) as writer:
            for each in batches:
                writer.write_batch(each)
                self._row_count += each.num_rows

    @property
    def row_count(self) -> int:
        return self._row_count

    def batches(self) -> Iterator[pa.RecordBatch]:
        try:
            source = pa.memory_map(str(self._file))
        except FileNotFoundError:
            raise ConfigError("this snapshot is closed: read again") from None
        reader = pa.ipc.open_file(source)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


class _Files(StateSnapshot):
    """The files of a table. A compaction leaves them for an hour; then they may go."""

    _reading: StateReading
    _held: list[HeldFile]

    def take(self, reading: StateReading, files: list[HeldFile]) -> None:
        self._reading, self._held = reading, files

    @property
    def row_count(self) -> int:
        return sum(each.rows for each in self._held)

    def files(self) -> list[HeldFile]:
        return list(self._held)

    def dataset(self) -> ds.Dataset:
        return self._reading.dataset(self._held)

    def batches(self) -> Iterator[pa.RecordBatch]:
        yield from self.dataset().to_batches()

    def _for_duckdb(self) -> Any:
        return self.dataset()

    def spark(self, session: Any) -> Any:
        """The rows as a DataFrame: Spark reads the files itself, where they have all columns."""
        paths = [str(each.path) for each in self._held]
        if not paths or any(each.partition for each in self._held) or _PATTERN & set("".join(paths)):
            return super().spark(session)
        shape = session.createDataFrame(self.schema.empty_table()).schema
        return session.read.schema(shape).parquet(*(f"file://{path}" for path in paths))


@dataclass(slots=True)
class Snapshot:
    """What several states held after transaction ``txid``.

    ``states``: those that were read, in the order of the topology. ``left_out``: the others, by
    name, and why each cannot be read. Its rows are in a temporary file, which goes when the
    snapshot is closed or forgotten.
    """

    txid: int
    states: list[StateSnapshot]
    left_out: Mapping[str, str]
    _folder: tempfile.TemporaryDirectory[str]

    def __getitem__(self, name: str) -> StateSnapshot:
        """The state of this name, location, or end of a location. Raises ``ConfigError``."""
        found = [each for each in self.states if name in (each.name, each.location)] or [
            each for each in self.states if name and each.location.endswith(name)
        ]
        if len(found) == 1:
            return found[0]
        why = self.left_out.get(name)
        known = ", ".join(each.name for each in found or self.states)
        raise ConfigError(
            f"{name!r} was not read: {why}" if why else f"there is no one state {name!r}: name one of {known}"
        )

    def __iter__(self) -> Iterator[StateSnapshot]:
        return iter(self.states)

    def close(self) -> None:
        """Remove the temporary file. Safe to call twice."""
        self._folder.cleanup()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Named(NamedTuple):
    """A state that is to be read. ``topology_id``: its owner, where that is known."""

    name: str
    state: FencedState
    topology_id: str | None = None


def read(
    *what: Topology | FencedState,
    as_of: int | None = None,
    states: Sequence[str] = (),
    keys: Sequence[str] | None = None,
    store: CoordinationStore | None = None,
    files_only: bool = False,
) -> Snapshot:
    """Read states as of one transaction: the last one that all of them hold, or ``as_of``. A driver
    may run meanwhile; nothing is written to the states.

    ``what``: a topology, or states that are bound to their columns. ``states``: only these of the
    topology, named by their bolt or location. Without it, states that cannot be read are left out,
    and ``Snapshot.left_out`` says why. ``keys``: only these keys of one state, as text, or as a
    JSON array where a key has several columns. ``store``: the topology's; then only a transaction
    counts that is closed. ``files_only``: only tables of files, and not their rows.

    Raises ``ConfigError`` for what cannot be read and before the first transaction, and
    ``MovedOnError`` when the states no longer tell what they held after ``as_of``, or change faster
    than they can be read.

    ::

        with ratchet.read(topology) as found:
            print(found.txid, found["words"].pandas())
    """
    wanted, left_out = _wanted(what, states)
    if keys is not None and len(wanted) != 1:
        raise ConfigError("keys are those of one state: name it")
    folder = tempfile.TemporaryDirectory(prefix="ratchet-read-", ignore_cleanup_errors=True)
    attempt = _Attempt(
        wanted=wanted,
        left_out=left_out,
        as_of=as_of,
        store=store,
        strict=bool(states),
        keys=keys,
        files_only=files_only,
    )
    try:
        for _ in range(TRIES):
            with suppress(_Again):
                return attempt.run(folder)
        raise MovedOnError(
            f"{attempt.moved}: tried {TRIES} times, and the driver is faster; read fewer states at a time, or keys, or stop it"
        )
    except BaseException:
        folder.cleanup()
        raise


def _wanted(what: Sequence[Topology | FencedState], states: Sequence[str]) -> tuple[list[_Named], dict[str, str]]:
    """The states to read, and the components that have none."""
    found: list[_Named] = []
    left_out: dict[str, str] = {}
    topologies = [each for each in what if isinstance(each, Topology)]
    if states and (len(what) != 1 or not topologies):
        raise ConfigError("states are named of one topology")
    for each in what:
        if not isinstance(each, Topology):
            found.append(_Named(each.location, each))
            continue
        named = [state_named(each, name) for name in dict.fromkeys(states)]
        for component, number in named or [(one, place) for one in each.components for place in range(len(one.states))]:
            found.append(_Named(_name(component, number), component.states[number], each.id))
        for component in each.components if not states else ():
            if component.committer and not component.states:
                left_out[component.id] = (
                    "it writes where nothing is kept for a reader: a Kafka topic, or a place of its own"
                )
    if not found:
        reasons = "".join(f"; {name}: {why}" for name, why in left_out.items())
        raise ConfigError(f"there is no state to read{reasons}")
    return list({id(each.state): each for each in found}.values()), left_out


def _name(component: Component, number: int) -> str:
    return component.id if len(component.states) == 1 else component.states[number].location


class _Again(Exception):
    """A state moved on: read everything again."""


@dataclass(kw_only=True)
class _Attempt:
    """One reading of all states, until it succeeds."""

    wanted: list[_Named]
    left_out: dict[str, str]
    as_of: int | None
    store: CoordinationStore | None
    strict: bool = False
    keys: Sequence[str] | None = None
    files_only: bool = False
    moved: MovedOnError | None = None

    def run(self, folder: tempfile.TemporaryDirectory[str]) -> Snapshot:
        """Read everything. Raises ``_Again`` when a state moved on."""
        left_out = dict(self.left_out)
        newest = 0
        try:
            with ExitStack() as stack:
                readings = {  # always in one order: some hold a lock for as long as they are open
                    each.name: reading
                    for each in sorted(self.wanted, key=lambda wanted: wanted.state.location)
                    if (reading := self._opened(stack, each, left_out))
                }
                opened = [(each, readings[each.name]) for each in self.wanted if each.name in readings]
                if not opened:
                    reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
                    raise ConfigError(f"no state can be read: {reasons}")
                headers = [reading.header() for _, reading in opened]
                newest = self._newest(opened, headers)
                txid = self._txid(newest)
                found = [self._held(*each, txid, Path(folder.name) / str(place)) for place, each in enumerate(opened)]
            for (each, _), header in zip(opened, headers, strict=True):
                _check_stayed(each, header, txid)
        except MovedOnError as error:
            if self.as_of is not None and self.moved is not None:  # it was no passing thing
                raise MovedOnError(
                    f"{error}; the newest transaction is {newest}, ask for it or the one before"
                ) from error
            self.moved = error
            raise _Again from error
        kept = [each for each in found if each is not None]
        if not kept:
            raise ConfigError("none of these states is a table of files: read their rows")
        return Snapshot(txid, kept, left_out, folder)

    def _txid(self, newest: int) -> int:
        """The transaction to read. Raises ``ConfigError``."""
        if newest == 0:
            raise ConfigError("no transaction is committed yet: there is nothing to read")
        txid = newest if self.as_of is None else self.as_of
        if not 1 <= txid <= newest:
            raise ConfigError(f"transaction {txid} is not committed: the newest is {newest}")
        return txid

    def _opened(self, stack: ExitStack, each: _Named, left_out: dict[str, str]) -> StateReading | None:
        try:
            return stack.enter_context(_reading(each))
        except ConfigError as error:
            if self.strict or each.topology_id is None:
                raise
            left_out[each.name] = str(error)
            return None

    def _newest(self, opened: Sequence[tuple[_Named, StateReading]], headers: Sequence[Header]) -> int:
        """The last transaction that all of them hold, and that is closed as far as the store
        says."""
        newest = min(each.done for each in headers)
        if self.store is not None:  # asked after the headers, which may be ahead of it, and not behind
            for topology_id in {each.topology_id for each, _ in opened if each.topology_id is not None}:
                newest = min(newest, committed_txid(self.store, topology_id))
        return newest

    def _held(self, each: _Named, reading: StateReading, txid: int, file: Path) -> StateSnapshot | None:
        files = reading.files(txid)
        if files is not None and self.keys is None:
            listed = _Files(each.name, each.state.location, txid, reading.schema)
            listed.take(reading, files)
            return listed
        if self.files_only:
            if self.strict:
                raise ConfigError(f"{each.state.location} is no table of files: leave --files out")
            return None
        rows = _Rows(each.name, each.state.location, txid, reading.schema)
        rows.fill(file, reading.rows(txid, self.keys))
        return rows


def _reading(each: _Named) -> AbstractContextManager[StateReading]:
    """Raises ``ConfigError`` as ``InspectableState.reading``."""
    return inspectable(each.state, purpose="be read as of a transaction").reading(each.topology_id)


def _check_stayed(each: _Named, before: Header, txid: int) -> None:
    """Raise ``MovedOnError`` if the transaction may have been repeated, or taken back, since
    ``before``: other states may have been read after that."""
    with _reading(each) as reading:
        after = reading.header()
    repeated = after.open is not None and after.open.txid == txid and not before.same_attempt(after)
    if repeated or (before.incarnation, before.epoch) != (after.incarnation, after.epoch) or after.done < txid:
        raise MovedOnError(f"{each.state.location}: another attempt or leader came while the states were read")


def _needed(module: str) -> Any:
    """An optional library. Raises ``ConfigError``, which says what to install."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"this needs the package {module}: pip install 'ratchet-pipelines[read]'") from error
