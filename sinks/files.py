"""Tables of Parquet files, appended to in whole batches: what the kinds of such tables have in common.

::

    <path>/part-<txid>-<epoch>-<attempt>-<task>-<n>.parquet    data files, written by commit tasks
    <path>/_ratchet/header-*.json                              the header (C1)
    <path>/_ratchet/schema.json                                names and types of the columns
    <path>/_ratchet/pending/<txid>-<epoch>-<attempt>/*.json    which files each task of an attempt has written

Tasks only add files that nobody reads yet. When all of an attempt's tasks have ended, the driver *publishes* its files: one
atomic step per txid, by the means of the table's kind. Whatever was never published is an orphan, and harmless.

Invariants:

1. For each txid at most one attempt's files are published, and all of them.
2. A txid that is published is published once: a replay finds it and adds nothing.
"""

from __future__ import annotations

import shutil
import uuid
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.dataset as ds

from framework.errors import (
    BadRecordError,
    ConfigError,
    CorruptStateError,
    InvariantViolation,
    MovedOnError,
    StaleWriterError,
    TopologyError,
)
from framework.topology import (
    Difference,
    FencedState,
    Fields,
    Header,
    Reach,
    TransactionAttempt,
    ValueType,
    check_granted,
)
from sinks.folders import HeaderChain, make_folder, named_errors, overwrite, read_document, sync

#: A file is not made larger than this, and compaction makes them about as large.
TARGET_BYTES = 128 * 1024 * 1024
_HOLD_TRIES = 20
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of a table; ``path`` is relative to the table's folder."""

    path: str
    rows: int
    size: int


class FileTable(FencedState):
    """A folder that a topology appends batches to.

    ``path``: a folder of a file system that links atomically, local or NFS; made when it is missing, and it must be empty
    then. ``partition_by``: columns whose values become folders, ``name=value``. ``shared``: the folder is mounted at the same
    path on every machine of the cluster.
    """

    value_type = ValueType.OPAQUE
    publishes = True

    def __init__(
        self,
        path: str | Path,
        *,
        partition_by: Sequence[str] = (),
        target_bytes: int = TARGET_BYTES,
        shared: bool = False,
    ) -> None:
        self.path = Path(path).absolute()
        self.partition_by = tuple(partition_by)
        self.target_bytes = target_bytes
        self._shared = shared
        self._fields: Fields | None = None

    # --- shape -----------------------------------------------------------------------------------------------

    @property
    def reach(self) -> Reach:
        return Reach.NETWORK if self._shared else Reach.HOST

    @property
    def location(self) -> str:
        return f"table {self.path}"

    def bind(self, fields: Fields) -> None:
        """Fix names and types of the columns. Raises ``TopologyError`` for untyped ones."""
        if fields.schema() is None:
            untyped = next(name for name in fields if fields.type_of(name) is None)
            raise TopologyError(
                f"{self.location}: field {untyped!r} has no type; declare it, as in Fields({untyped}=str)"
            )
        for name in self.partition_by:
            if name not in fields:
                raise TopologyError(f"{self.location} is partitioned by {name!r}, which is not among its columns")
        self._fields = fields

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the table. Raises ``ConfigError`` when there is neither a topology nor a table."""
        if self._fields is not None:
            return self._fields.schema()
        try:
            found = read_document(self._folder / "schema.json")
        except FileNotFoundError:
            raise ConfigError(f"{self.location}: there is no table of Ratchet") from None
        return pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(found["schema"])))

    # --- in tasks --------------------------------------------------------------------------------------------

    def write(self, attempt: TransactionAttempt, batches: Iterable[pa.RecordBatch]) -> None:
        """Write rows of one task as data files, to be published with the rest of the attempt."""
        fence = attempt.fence
        if fence is None:
            raise TopologyError(
                f"{self.location} is written by topologies only: its attempts need a driver that publishes"
            )
        header = self.read_header()
        check_granted(header, attempt, self.location)
        table = pa.Table.from_batches(batches, schema=self.schema)
        name = f"part-{attempt.txid}-{fence.epoch}-{attempt.attempt_id}-{fence.writer.replace(':', '-')}"
        files = self.write_files(table, name)
        pending = self._pending(header)
        make_folder(pending)
        document = {"files": [[each.path, each.rows, each.size] for each in files]}
        overwrite(pending / f"{fence.writer.replace(':', '-')}.json", document)

    def write_files(self, table: pa.Table, name: str) -> list[DataFile]:
        """Write rows into new files whose names begin with ``name``; they belong to no table yet."""
        if table.num_rows == 0:
            return []
        row_bytes = max(table.nbytes / table.num_rows, 1.0)
        rows_max = max(int(self.target_bytes / row_bytes), 1)
        partitioning = None
        if self.partition_by:
            kinds = pa.schema([table.schema.field(each) for each in self.partition_by])
            partitioning = ds.partitioning(kinds, flavor="hive")
        written: list[DataFile] = []

        def note(each: Any) -> None:
            path = Path(each.path)
            sync(path)
            sync(path.parent)
            written.append(DataFile(str(path.relative_to(self.path)), each.metadata.num_rows, path.stat().st_size))

        with named_errors(self.path):
            try:
                ds.write_dataset(
                    table,
                    self.path,
                    format="parquet",
                    basename_template=f"{name}-{{i}}.parquet",
                    partitioning=partitioning,
                    existing_data_behavior="overwrite_or_ignore",
                    file_visitor=note,
                    max_rows_per_file=rows_max,
                    max_rows_per_group=min(rows_max, 1_048_576),
                    min_rows_per_group=0,
                    use_threads=False,
                )
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise BadRecordError(f"{self.location} cannot hold these rows: {error}") from error
        return written

    # --- on the driver ---------------------------------------------------------------------------------------

    def prepare(self, topology_id: str) -> Header:
        make_folder(self.path)
        header = self._chain.read()
        if header is None:
            self._check_foreign()
            make_folder(self._folder)
            self.create_table()
            text = self.schema.serialize().to_pybytes().hex()
            overwrite(self._folder / "schema.json", {"schema": text, "partition_by": list(self.partition_by)})
            header = self._chain.create(Header(topology_id, uuid.uuid4().hex))
        if header.topology_id != topology_id:
            raise ConfigError(
                f"{self.location} belongs to topology {header.topology_id!r}, not {topology_id!r}: a state has one owner; use "
                "another path"
            )
        self._check_schema()
        make_folder(self._folder / "pending")
        return header

    def _check_foreign(self) -> None:
        with named_errors(self.path):
            foreign = sorted(each.name for each in self.path.iterdir() if each.name not in self.own_names)
        if foreign:
            raise ConfigError(
                f"{self.location}: there is something else in that folder, {foreign[0]!r}; give an empty one, or another path"
            )

    #: What a folder may hold before its first header is written.
    own_names: frozenset[str] = frozenset({"_ratchet"})

    def _check_schema(self) -> None:
        try:
            found = read_document(self._folder / "schema.json")
        except FileNotFoundError:
            raise CorruptStateError(f"{self._folder / 'schema.json'} is gone; restore it from a backup") from None
        held = pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(found["schema"])))
        if held != self.schema or tuple(found["partition_by"]) != self.partition_by:
            raise ConfigError(
                f"{self.location} has other columns than this topology writes: it has {_text_of(held)}, partitioned by "
                f"{found['partition_by']}, and the topology writes {_text_of(self.schema)}, partitioned by "
                f"{list(self.partition_by)}; use another path"
            )

    def read_header(self) -> Header:
        header = self._chain.read()
        if header is None:
            raise CorruptStateError(f"{self.location}: its header is gone from {self._folder}; restore it")
        return header

    def raise_header(self, expected: Header, new: Header) -> None:
        self._chain.replace(expected, new)

    def sweep(self, header: Header) -> int:
        return 0  # what an earlier attempt wrote was not published

    def publish(self, header: Header) -> None:
        stamp = header.stamp
        files: list[DataFile] = []
        pending = self._pending(header)
        for each in sorted(pending.glob("*.json")) if pending.exists() else ():
            files += [DataFile(*file) for file in read_document(each)["files"]]
        found = self.read_header()
        if found != header:
            raise StaleWriterError(f"{self.location} is open for {found.open}, not for {header.open}", found.epoch)
        if files or stamp.attempt_id > 1:  # of a first attempt without rows there is nothing that could be doubled
            self.publish_files(header, files)
        for folder in (self._folder / "pending").iterdir():
            txid = folder.name.split("-")[0]
            if txid.isdigit() and int(txid) < stamp.txid:
                shutil.rmtree(folder, ignore_errors=True)

    @abstractmethod
    def create_table(self) -> None:
        """Make an empty table in the folder, if there is none."""

    @abstractmethod
    def publish_files(self, header: Header, files: Sequence[DataFile]) -> None:
        """Make these files the content of ``header.open.txid``, in one atomic step, unless it has one. Refuse, where the
        store can tell, when a later leader has published meanwhile."""

    @abstractmethod
    def files(self) -> list[DataFile]:
        """The files that are published now."""

    @abstractmethod
    def compact(self) -> tuple[int, int]:
        """Merge small files into larger ones; returns how many files there were and are."""

    @abstractmethod
    def vacuum(self, *, older_than_s: float) -> int:
        """Remove data files that nobody needs and that are older than that; returns how many."""

    def to_table(self) -> pa.Table:
        """Every row, read into memory."""
        return self.dataset().to_table()

    def dataset(self) -> ds.Dataset:
        """The published files as a dataset of pyarrow, to be read by columns and filters."""
        return self.dataset_of(self.files())

    def dataset_of(self, files: Sequence[DataFile]) -> ds.Dataset:
        kinds = pa.schema([self.schema.field(each) for each in self.partition_by])
        return ds.dataset(
            [str(self.path / each.path) for each in files],
            schema=self.schema,
            format="parquet",
            partitioning=ds.partitioning(kinds, flavor="hive") if self.partition_by else None,
        )

    @abstractmethod
    def files_as_of(self, txid: int) -> list[DataFile]:
        """The files of transactions up to ``txid``. Raises ``MovedOnError`` when that can no longer be said."""

    def become_scratch(self, folder: Path) -> None:
        self.path = folder

    def compare(
        self,
        scratch: FencedState,
        txid: int,
        differs: Callable[[Difference], None],
        moved: Callable[[Any], None],
    ) -> int:
        """Compares rows as a multiset: ``key`` of a difference is the row, the rest says how often it is there."""
        try:
            held = _counted(self.dataset_of(self.files_as_of(txid)))
        except (MovedOnError, FileNotFoundError):  # compacted while it was read
            moved("files")
            return 0
        return self.compare_held(scratch, held, differs)

    def hold(self, keys: Sequence[Any]) -> tuple[int, Any]:
        for _ in range(_HOLD_TRIES):
            txid = self.read_header().done
            try:
                return txid, _counted(self.dataset_of(self.files_as_of(txid)))
            except (MovedOnError, FileNotFoundError):
                continue
        raise MovedOnError(f"{self.location}: it is compacted faster than it can be read")

    def compare_held(self, scratch: FencedState, held: Any, differs: Callable[[Difference], None]) -> int:
        if not isinstance(scratch, FileTable):
            raise InvariantViolation(f"{self.location} is compared with {scratch.location}")
        expected = _counted(scratch.dataset())
        for row in held.keys() | expected.keys():
            if held[row] != expected[row]:
                differs(Difference(row, held[row], expected[row]))
        return sum(held.values())

    def close(self) -> None:
        """Nothing is kept open."""

    # --- inside ----------------------------------------------------------------------------------------------

    @property
    def _folder(self) -> Path:
        return self.path / "_ratchet"

    @property
    def _chain(self) -> HeaderChain:
        return HeaderChain(self._folder, self.location)

    def _pending(self, header: Header) -> Path:
        return self._folder / "pending" / "{}-{}-{}".format(*header.stamp)


def _counted(rows: ds.Dataset) -> Counter[tuple[Any, ...]]:
    found: Counter[tuple[Any, ...]] = Counter()
    for batch in rows.to_batches():
        found.update(zip(*(column.to_pylist() for column in batch.columns), strict=True))
    return found


def partition_values(path: str) -> dict[str, str | None]:
    """The values in a file's path, as text.

    >>> partition_values("day=2026-01-01/kind=a%2Fb/part-1.parquet")
    {'day': '2026-01-01', 'kind': 'a/b'}
    """
    found: dict[str, str | None] = {}
    for part in Path(path).parts[:-1]:
        name, _, value = part.partition("=")
        found[name] = None if value == _NULL_PARTITION else unquote(value)
    return found


def _text_of(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def described(files: Sequence[DataFile]) -> Mapping[str, int]:
    """How many files, rows and bytes."""
    return {"files": len(files), "rows": sum(each.rows for each in files), "bytes": sum(each.size for each in files)}
