"""The base of tables of Parquet files, to which whole batches are appended.

::

    <path>/_ratchet/header-*.json                            the header (C1)
    <path>/_ratchet/schema.json                              kind, columns, partitioning (C32)
    <path>/_ratchet/pending/<txid>-<epoch>-<attempt>/*.json  the files that each task has written

Tasks only add data files, ``part-<txid>-<epoch>-<attempt>-<task>-<try>-<n>``, which readers ignore
at first; their folder depends on the table's kind. A try of a task never writes into a file of
another try. When all tasks of an attempt have ended, the driver *publishes* its files, in one
atomic step per txid that depends on the table's kind. A file that was never published is a harmless
orphan.

Invariants:

1. For each txid, the files of at most one attempt are published, and all of them.
2. A txid is published once: a replay finds it and adds nothing.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import uuid
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from framework.bounded_pages import pages_by_bytes
from framework.errors import (
    BadRecordError,
    ConfigError,
    CorruptStateError,
    InvariantViolation,
    MovedOnError,
    StaleWriterError,
    TopologyError,
)
from framework.local_paths import check_made_here, local_path, made_by_others, warn_of_others
from framework.observe.logs import get_logger
from framework.topology import (
    Change,
    Difference,
    FencedState,
    Fields,
    Header,
    HeldFile,
    InspectableState,
    Reach,
    Stamp,
    StateReading,
    TransactionAttempt,
    ValueType,
    check_granted,
)
from framework.topology.canonical_form import comparable, python_values
from framework.topology.python_datetime_range import outside_python
from framework.topology.refused_row_bisection import OnRefused
from sinks.appendable_table import Table
from sinks.lake.folder_documents import (
    HeaderChain,
    check_data_file,
    check_inside,
    check_no_link,
    discard,
    inner_path,
    make_folder,
    named_errors,
    overwrite,
    read_document,
    sync,
)
from sinks.lake.partitions import Texts, check_partitioning, distinct, expression_of, folder_of, split, texts_in
from sinks.path_checks import check_can_be_made

if TYPE_CHECKING:
    import pyarrow.dataset as ds

_log = get_logger()
#: The greatest size of a file; compaction makes files of about this size.
TARGET_BYTES = 128 * 1024 * 1024
#: The folder in a table's folder that marks it as a table and holds Ratchet's documents.
OWN_FOLDER = "_ratchet"
#: The key that represents the rows of a table in place of real keys.
_ALL_ROWS = "files"
#: Format 1 had partition values in folder names only, and no kind.
_FORMAT = 2
_PENDING = re.compile(r"(\d+)-(-?\d+)-(\d+)")
_NAME_OF_ATTEMPT = re.compile(r"part-(?P<txid>\d+)--?\d+-\d+-")  # epochs of rebuilds are negative


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of a table. ``path``: relative to the table's folder. ``partition``: the values of
    the partition columns, the same for all its rows."""

    path: str
    rows: int
    size: int
    partition: Texts = ()

    def entry(self) -> list[object]:
        """The form in documents."""
        return [self.path, self.rows, self.size, list(self.partition)]


@dataclass(frozen=True, slots=True)
class FileTableShape:
    """The shape of a table for readers: the name of its class, its columns, and its partition
    columns."""

    kind: str
    schema: pa.Schema
    partition_by: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        text = self.schema.serialize().to_pybytes().hex()
        return {"format": _FORMAT, "kind": self.kind, "schema": text, "partition_by": list(self.partition_by)}

    @staticmethod
    def read(folder: Path) -> FileTableShape | None:
        """The shape of the table in ``folder``; None if there is no table. Raises
        ``CorruptStateError``."""
        path = folder / OWN_FOLDER / "schema.json"
        try:
            found = read_document(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if found.get("format", 1) not in range(1, _FORMAT + 1):
            raise CorruptStateError(
                f"{path}: format {found['format']!r}, and this Ratchet knows {_FORMAT}; install a later one"
            )
        kind = found.get("kind", "DeltaLakeTable" if (folder / "_delta_log").is_dir() else "ParquetTable")
        try:
            schema = pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(found["schema"])))
            partition_by = tuple(found["partition_by"])
            check_partitioning(schema, partition_by, str(path))
        except (KeyError, TypeError, ValueError, OSError, pa.ArrowException, TopologyError) as error:
            raise CorruptStateError(f"{path}: not the shape of a table ({error}); restore it from a backup") from error
        return FileTableShape(kind, schema, partition_by)


class FileTable(Table, InspectableState):
    """A folder that a topology appends batches to.

    * ``path``: a folder of a file system with atomic links, local or NFS. It is created if missing.
      When the table is created, the folder must be empty.
    * ``partition_by``: columns whose values become folders ``name=value``; readers may leave it
      out, because the table records it.
    * ``target_bytes``: the greatest size of a file.
    * ``shared``: the folder is mounted at the same path on every machine of the cluster.
    """

    value_type = ValueType.OPAQUE
    publishes = True
    leaves_files = True
    may_be_referenced = False
    #: The name of the class in the table's document.
    kind: ClassVar[str]

    def __init__(
        self,
        path: str | Path,
        *,
        partition_by: Sequence[str] | None = None,
        target_bytes: int = TARGET_BYTES,
        shared: bool = False,
    ) -> None:
        if isinstance(partition_by, str):
            raise ConfigError(f"table {path}: partition_by is a list of columns, as in [{partition_by!r}]")
        self.path = local_path(path, "table").absolute()
        self.target_bytes = target_bytes
        self._partition_by = tuple(partition_by) if partition_by is not None else None
        self._shared = shared
        self._fields: Fields | None = None
        self._shape: FileTableShape | None = None

    # --- shape ------------------------------------------------------------------------------------

    @property
    def reach(self) -> Reach:
        return Reach.NETWORK if self._shared else Reach.HOST

    @property
    def location(self) -> str:
        return f"table {self.path}"

    def bind(self, fields: Fields) -> None:
        """Fix names and types of the columns. Raises ``TopologyError`` for a column without a type,
        and for columns that cannot be partitioned as declared."""
        if fields.schema() is None:
            untyped = next(name for name in fields if fields.type_of(name) is None)
            raise TopologyError(
                f"{self.location}: field {untyped!r} has no type; declare it, as in Fields({untyped}=str)"
            )
        check_partitioning(fields.schema(), self._partition_by or (), self.location)
        self._fields = fields

    @property
    def shape(self) -> FileTableShape:
        """The shape of the table on disk or, if there is none, the declared shape. Raises
        ``ConfigError`` if there is neither, or if the table on disk differs from the declaration.
        """
        if self._shape is not None:
            return self._shape
        held = FileTableShape.read(self.path)
        if held is not None:
            self._check_shape(held)
            self._shape = held
            return held
        if self._fields is None:
            raise ConfigError(f"{self.location}: there is no table of Ratchet")
        return FileTableShape(self.kind, self._fields.schema(), self._partition_by or ())

    def require(self) -> None:
        """Raise as ``shape`` does. Call it before the table is read or changed."""
        _ = self.shape

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the table. Raises as ``shape`` does."""
        return self.shape.schema

    @property
    def partition_by(self) -> tuple[str, ...]:
        """The partition columns. Raises as ``shape`` does."""
        return self.shape.partition_by

    def _check_shape(self, held: FileTableShape) -> None:
        if held.kind != self.kind:
            raise ConfigError(f"{self.location} is a {held.kind}, not a {self.kind}: use that, or another path")
        declared = self._partition_by or ()
        if self._fields is not None and (held.schema, held.partition_by) != (self._fields.schema(), declared):
            raise ConfigError(
                f"{self.location} has other columns than this topology writes: it has {_text_of(held.schema)}, partitioned by "
                f"{list(held.partition_by)}, and the topology writes {_text_of(self._fields.schema())}, partitioned by "
                f"{list(declared)}; use another path"
            )
        if self._partition_by not in (None, held.partition_by):
            raise ConfigError(
                f"{self.location} is partitioned by {list(held.partition_by)}, not by {list(declared)}: leave partition_by out, "
                "the table knows"
            )

    # --- in tasks ---------------------------------------------------------------------------------

    def check_rows(self, rows: pa.RecordBatch) -> None:
        """Raise ``BadRecordError`` for rows that cannot be written. A committer also calls it in
        the processing phase, because writes of the commit cannot always be undone."""
        for name in self.partition_by:
            if outside_python(rows.column(name)) is not None:
                raise BadRecordError(
                    f"{self.location}: the partition column {name!r} has a time outside the years 1 to 9999; leave it out, or "
                    "partition by another column"
                )

    def partitions_of(self, rows: pa.RecordBatch) -> set[Texts]:
        return distinct(rows, self.partition_by)

    def write(
        self, attempt: TransactionAttempt, batches: Iterable[pa.RecordBatch], on_refused: OnRefused | None = None
    ) -> None:
        """Write the rows of one task as data files. The driver publishes them with those of the
        attempt's other tasks."""
        fence = attempt.fence
        if fence is None:
            raise TopologyError(
                f"{self.location} is written by topologies only: its attempts need a driver that publishes"
            )
        header = self.read_header()
        check_granted(header, attempt, self.location)
        writer = fence.writer.replace(":", "-")
        # another try of this task may still be writing when the driver publishes
        tried = uuid.uuid4().hex[:8]
        name = f"part-{attempt.txid}-{fence.epoch}-{attempt.attempt_id}-{writer}-{tried}"
        pending = self._pending(header)
        make_folder(pending)
        names = numbered(name)
        files: list[DataFile] = []
        for page in pages_by_bytes(batches, self.target_bytes):
            for each in page:
                self.check_rows(each)
            table = pa.Table.from_batches(page, schema=self.schema)
            files += self.write_files(table, names, pending)
        overwrite(pending / f"{writer}.json", {"files": [each.entry() for each in files]})

    def write_files(self, table: pa.Table, names: Iterator[str], folder: Path) -> list[DataFile]:
        """Write rows into new, unpublished files of these names, in ``folder`` or in the folders of
        their partitions, as ``place`` says."""
        if table.num_rows == 0:
            return []
        row_bytes = max(table.nbytes / table.num_rows, 1.0)
        rows_max = max(int(self.target_bytes / row_bytes), 1)
        written: list[DataFile] = []
        folders: set[Path] = set()
        with named_errors(self.path):
            try:
                for partition, rows in split(table, self.partition_by):
                    for first in range(0, rows.num_rows, rows_max):
                        path, where = self.place(next(names), partition, folder)
                        folders.update(each for each in path.parents if each.is_relative_to(self.path))
                        piece = rows.slice(first, rows_max)
                        pq.write_table(piece, path)
                        sync(path)
                        written.append(DataFile(where, piece.num_rows, path.stat().st_size, partition))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise BadRecordError(f"{self.location} cannot hold these rows: {error}") from error
            for folder in folders:
                sync(folder)
        return written

    def place(self, name: str, partition: Texts, folder: Path) -> tuple[Path, str]:
        """Where a data file is written, and the path under which it is recorded: in the folder of
        its partition, or in ``folder``, one of Ratchet's own. Creates the folder."""
        path = self.path / folder_of(self.partition_by, partition) / f"{name}.parquet"
        check_inside(path.parent, self.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path, str(path.relative_to(self.path))

    # --- on the driver ----------------------------------------------------------------------------

    def check(self, topology_id: str) -> Header | None:
        self._check_place()
        if not self.path.exists():
            check_can_be_made(self.path.resolve(), self.location)
            return None
        header = self._chain.read()
        if header is None:
            self._check_foreign()
        else:
            self._check_owned(header, topology_id)
        return header

    def _check_place(self) -> None:
        for each in self.path.resolve().parents:
            # another user could refuse this table its place, by a table that they make in /tmp
            if not made_by_others(each / OWN_FOLDER) and FileTableShape.read(each) is not None:
                raise ConfigError(
                    f"{self.location} would be inside of the table {each}, whose compaction removes what it does not know: use "
                    "another path"
                )

    def prepare(self, topology_id: str) -> Header:
        self._check_place()
        make_folder(self.path)
        check_made_here(self.path, self.location)
        warn_of_others(self.path, _log)
        header = self._chain.read()
        if header is None:
            self._check_foreign()
            make_folder(self._folder)
            self.create_table()
            overwrite(self._folder / "schema.json", self.shape.document())
            header = self._chain.create(Header(topology_id, uuid.uuid4().hex))
        self._shape = self._check_owned(header, topology_id)
        make_folder(self._folder / "pending")
        return header

    def _check_owned(self, header: Header, topology_id: str) -> FileTableShape:
        """The shape of the existing table. Raises ``ConfigError`` when it belongs to another
        topology, or has other columns."""
        if header.topology_id != topology_id:
            raise ConfigError(
                f"{self.location} belongs to topology {header.topology_id!r}, not {topology_id!r}: a state has one owner; use "
                "another path"
            )
        held = FileTableShape.read(self.path)
        if held is None:
            raise CorruptStateError(f"{self._folder / 'schema.json'} is gone; restore it from a backup")
        self._check_shape(held)
        return held

    def _check_foreign(self) -> None:
        with named_errors(self.path):
            foreign = sorted(each.name for each in self.path.iterdir() if each.name not in self.own_names)
        if foreign:
            raise ConfigError(
                f"{self.location}: there is something else in that folder, {foreign[0]!r}; give an empty one, or another path"
            )

    #: Names that a folder may contain before its first header is written.
    own_names: frozenset[str] = frozenset({OWN_FOLDER})

    def read_header(self) -> Header:
        header = self._chain.read()
        if header is None:
            raise CorruptStateError(f"{self.location}: its header is gone from {self._folder}; restore it")
        return header

    def raise_header(self, expected: Header, new: Header) -> None:
        self._chain.replace(expected, new)

    def sweep(self, header: Header) -> int:
        return 0  # files of an earlier attempt were not published

    def publish(self, header: Header) -> None:
        stamp = header.stamp
        files: list[DataFile] = []
        pending = self._pending(header)
        for each in sorted(pending.glob("*.json")) if pending.exists() else ():
            files += self.files_in(each)
        found = self.read_header()
        if found != header:
            raise StaleWriterError(f"{self.location} is open for {found.open}, not for {header.open}", found.epoch)
        self.discard_pending(stamp)
        if files or stamp.attempt_id > 1:  # a first attempt without rows has nothing to publish
            self.publish_files(header, files)

    def discard_pending(self, before: Stamp) -> None:
        """Remove the unpublished files of earlier attempts."""
        pending = self._folder / "pending"
        with named_errors(pending):
            for name in os.listdir(pending) if pending.exists() else ():
                found = _PENDING.fullmatch(name)
                if found is not None and Stamp(*map(int, found.groups())) < before:
                    discard(pending / name)
                elif name.startswith("."):  # a folder that a killed driver was discarding
                    shutil.rmtree(pending / name, ignore_errors=True)

    @abstractmethod
    def create_table(self) -> None:
        """Create an empty table in the folder, unless there is one."""

    @abstractmethod
    def publish_files(self, header: Header, files: Sequence[DataFile]) -> None:
        """Make these files the content of ``header.open.txid``, in one atomic step, unless the
        content is already published. If the store can detect that a later leader has published,
        raise ``StaleWriterError``."""

    @abstractmethod
    def files(self) -> list[DataFile]:
        """The published files."""

    @abstractmethod
    def compact(self) -> tuple[int, int]:
        """Merge small files into larger ones. Returns the number of files before and after."""

    @abstractmethod
    def vacuum(self, *, older_than_s: float) -> int:
        """Remove data files that have not been needed for ``older_than_s`` seconds. Files that an
        attempt may still publish stay. Returns the number of files removed."""

    def to_table(self) -> pa.Table:
        """Every row, read into memory."""
        return self.dataset().to_table()

    def dataset(self) -> ds.Dataset:
        """The published files as a pyarrow dataset, to read with columns and filters."""
        return self.dataset_of(self.files())

    def dataset_of(self, files: Sequence[DataFile]) -> ds.Dataset:
        # imported here because it imports pandas, which only readers need
        import pyarrow.dataset as ds

        shape = self.shape
        form, system = ds.ParquetFileFormat(), pyarrow.fs.LocalFileSystem()
        fragments = []
        for each in files:
            check_data_file(self.path / each.path, self.path)
            try:
                known = expression_of(shape.schema, shape.partition_by, each.partition)
            except (pa.ArrowInvalid, ValueError) as error:
                raise CorruptStateError(
                    f"{self.path / each.path}: it is in a partition that cannot be: {error}"
                ) from error
            fragments.append(form.make_fragment(str(self.path / each.path), system, partition_expression=known))
        return ds.FileSystemDataset(fragments, shape.schema, form, system)

    def files_in(self, document: Path) -> list[DataFile]:
        """The files that a document of this table lists. Raises ``FileNotFoundError`` if it is not
        there, and ``CorruptStateError`` if it is damaged."""
        try:
            return [self._file_of(document, *entry) for entry in read_document(document)["files"]]
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptStateError(f"{document}: not a list of files ({error}); restore it from a backup") from error

    def _file_of(
        self, document: Path, name: str, rows: int, size: int, partition: Sequence[str | None] | None = None
    ) -> DataFile:
        path = inner_path(name, document)
        found = tuple(partition) if partition is not None else texts_in(path, self.partition_by)
        if found is None:
            raise CorruptStateError(
                f"{self.path / path} has no values of {list(self.partition_by)}: an earlier version lost them when it compacted "
                "the table; build the table anew from its source"
            )
        if len(found) != len(self.partition_by) or not all(each is None or isinstance(each, str) for each in found):
            raise ValueError(f"{path} is in the partition {found}")
        return DataFile(path, int(rows), int(size), found)

    @abstractmethod
    def files_as_of(self, txid: int) -> list[DataFile]:
        """The files of the transactions up to ``txid``. Raises ``MovedOnError`` if the table no
        longer records them."""

    @contextmanager
    def reading(self, topology_id: str | None = None) -> Iterator[FilesReading]:
        held = self._chain.read()
        if held is None:
            raise ConfigError(f"{self.location}: there is nothing yet")
        if topology_id is not None:
            self._check_owned(held, topology_id)
        yield FilesReading(self)

    def become_scratch(self, folder: Path) -> None:
        self.path = folder
        self._shape = None

    def files_added_by(self, txid: int) -> list[DataFile]:
        """The files of one transaction. Raises as ``files_as_of``."""
        before = {each.path for each in self.files_as_of(txid - 1)}
        return [each for each in self.files_as_of(txid) if each.path not in before]

    def become_replay(self, folder: Path, txid: int, topology_id: str) -> None:
        """Needs nothing: the rows that a transaction appends do not depend on earlier rows."""
        self.check(topology_id)
        self.become_scratch(folder)

    def changes(self, replayed: FencedState, txid: int) -> Iterator[Change]:
        """The rows as a multiset. ``key`` is a row; ``after`` and ``held`` are how often the
        transaction wrote it."""
        if not isinstance(replayed, FileTable):
            raise InvariantViolation(f"{self.location} is compared with {replayed.location}")
        expected = _counted(replayed.dataset())
        held: Counter[tuple[Any, ...]] | None = Counter() if self._chain.read() is None else None
        if held is None:
            with suppress(MovedOnError, FileNotFoundError):  # it was compacted
                held = _counted(self.dataset_of(self.files_added_by(txid)))
        for row in expected.keys() | (held or expected).keys():
            if held is None:
                yield Change(row, None, expected[row], None, agrees=None)
            else:
                yield Change(row, None, expected[row], held[row], agrees=held[row] == expected[row])

    def pages(self, scratch: FencedState) -> Iterator[Sequence[Any]]:
        """A table has no keys, so it is compared as a whole."""
        yield [_ALL_ROWS]

    def held(self, keys: Sequence[Any], txid: int) -> Mapping[Any, Any]:
        try:
            return {_ALL_ROWS: _counted(self.dataset_of(self.files_as_of(txid)))}
        except (MovedOnError, FileNotFoundError):  # it was compacted during the read
            return {}

    def compare(self, held: Mapping[Any, Any], scratch: FencedState, differs: Callable[[Difference], None]) -> int:
        """Compares rows as a multiset. In a difference, ``key`` is the row, and the other two
        fields are how often it occurs in the sink and in the scratch copy."""
        if not isinstance(scratch, FileTable):
            raise InvariantViolation(f"{self.location} is compared with {scratch.location}")
        if not held:
            return 0
        found: Counter[tuple[Any, ...]] = held[_ALL_ROWS]
        expected = _counted(scratch.dataset())
        for row in found.keys() | expected.keys():
            if found[row] != expected[row]:
                differs(Difference(row, found[row], expected[row]))
        return (found | expected).total()

    def close(self) -> None:
        """Does nothing: no resource stays open."""

    # --- inside -----------------------------------------------------------------------------------

    @property
    def _folder(self) -> Path:
        return self.path / OWN_FOLDER

    @property
    def _chain(self) -> HeaderChain:
        own = [self.path / each for each in sorted(self.own_names)]
        inner = [self._folder / each for each in ("pending", "files")]
        for path in (*own, *inner):
            check_no_link(path)
        return HeaderChain(self._folder, self.location)

    def _pending(self, header: Header) -> Path:
        return self._folder / "pending" / "{}-{}-{}".format(*header.stamp)


class FilesReading(StateReading):
    """The rows of a table of files. It knows the files of each transaction, until they are
    compacted."""

    def __init__(self, table: FileTable) -> None:
        self._table = table

    @property
    def schema(self) -> pa.Schema:
        return self._table.schema

    def header(self) -> Header:
        return self._table.read_header()

    def rows(self, txid: int, keys: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        if keys is not None:
            raise ConfigError(f"{self._table.location} has no keys: leave them out")
        yield from self.dataset(self.files(txid)).to_batches()

    def files(self, txid: int) -> list[HeldFile]:
        table = self._table
        try:
            found = table.files_as_of(txid)
        except FileNotFoundError as error:
            raise MovedOnError(f"{table.location} was compacted while it was read") from error
        return [
            HeldFile(
                table.path / each.path, each.rows, each.size, dict(zip(table.partition_by, each.partition, strict=True))
            )
            for each in found
        ]

    def dataset(self, files: Sequence[HeldFile]) -> ds.Dataset:
        root = self._table.path
        return self._table.dataset_of(
            [
                DataFile(str(each.path.relative_to(root)), each.rows, each.size, tuple(each.partition.values()))
                for each in files
            ]
        )


def _counted(rows: ds.Dataset) -> Counter[tuple[Any, ...]]:
    found: Counter[tuple[Any, ...]] = Counter()
    for batch in rows.to_batches():
        columns = (map(comparable, python_values(pa.chunked_array([column]))) for column in batch.columns)
        found.update(zip(*columns, strict=True))
    return found


def is_of_another_table(path: str, folder: Path) -> bool:
    """Whether a file below a table's folder belongs to another table inside that folder."""
    return any((folder / each / OWN_FOLDER).exists() for each in Path(path).parents if each != Path())


def may_be_open(path: str, done: int) -> bool:
    """Whether an attempt may still publish this file. ``done`` is the last finished txid, which may
    be replayed too, if its driver died before it recorded the end."""
    found = _NAME_OF_ATTEMPT.match(Path(path).name)
    return found is not None and int(found["txid"]) >= done


def numbered(name: str) -> Iterator[str]:
    """Names of files, which are unique even without their folders, because some file systems ignore
    case."""
    return (f"{name}-{number}" for number in itertools.count())


def _text_of(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def described(files: Sequence[DataFile]) -> Mapping[str, int]:
    """A text with the numbers of files, rows and bytes."""
    return {"files": len(files), "rows": sum(each.rows for each in files), "bytes": sum(each.size for each in files)}
