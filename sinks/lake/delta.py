"""A Delta Lake table: one version per transaction, with the txid in the commit itself.

Each commit contains an application transaction of Delta's protocol: the id of the topology with the
table's incarnation, and the txid. A txid that the table holds is not committed again. If two
commits start from the same version, the second fails.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc

from framework.errors import (
    BadRecordError,
    ConfigError,
    CorruptStateError,
    InvariantViolation,
    MovedOnError,
    RetryableError,
    StaleWriterError,
)
from framework.topology import Fields, Header
from sinks.lake.file_table_base import OWN_FOLDER, DataFile, FileTable, is_of_another_table, may_be_open
from sinks.lake.folder_documents import inner_path, is_passing, remove_file
from sinks.lake.partitions import NULL_FOLDER, is_moment, is_text, texts_of

try:
    import deltalake
    from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
    from deltalake.transaction import AddAction

    from sinks.lake.delta_compatibility import check_known, check_readable, check_writable
except ImportError as error:  # deltalake is an optional extra
    raise ConfigError("DeltaLakeTable needs the package deltalake: pip install 'ratchet-pipelines[delta]'") from error


#: Texts that Delta reads as null in a partition column: the first by its protocol, the second
#: because its OPTIMIZE reads folder names.
_NULL_TEXTS = ("", NULL_FOLDER)
#: Characters in a path that the client writes but does not read back correctly.
_MISREAD = re.compile(r"%[0-9A-Fa-f]{2}|[\[\]|^\\]")
#: The Delta client's errors about a table whose protocol it cannot write; its other errors about a
#: commit concern concurrent commits.
_UNMET = re.compile(r"table features?\b|reader version|writer version", re.I)
#: The form in which the client's errors name an error of the file system.
_OS_ERROR = re.compile(r"os error (\d+)|Os \{ code: (\d+)")


class DeltaLakeTable(FileTable):
    """A Delta Lake table in a folder. Any Delta reader can read it.

    Rows cannot be undone, so a batch whose commit was opened is never planned again (C8).
    ``compact()`` and Delta's own OPTIMIZE and VACUUM may run while the topology runs.
    """

    kind = "DeltaLakeTable"
    own_names = frozenset({OWN_FOLDER, "_delta_log"})

    @property
    def can_undo(self) -> bool:
        return False

    def bind(self, fields: Fields) -> None:
        super().bind(fields)
        for clash in _same_but_for_case(fields.schema() or ()):
            raise ConfigError(
                f"{self.location}: the columns {' and '.join(map(repr, clash))} differ only by case, which Delta Lake does not "
                "distinguish; rename one of them upstream"
            )
        for field in fields.schema() or ():
            if any(map(_is_lost, _types_in(field.type))) or not _is_taken(field):
                raise ConfigError(
                    f"{self.location}: Delta Lake has no type for {field.name!r}, {field.type}; cast it to a type that it has, "
                    "such as a signed integer, a moment in UTC to microseconds, or a string, upstream"
                )

    def check(self, topology_id: str) -> Header | None:
        header = super().check(topology_id)
        if header is not None:
            self._check_writable(self._table())
        return header

    def prepare(self, topology_id: str) -> Header:
        header = super().prepare(topology_id)
        self._check_writable(self._table())
        return header

    def _check_place(self) -> None:
        super()._check_place()
        found = _MISREAD.search(str(self.path.resolve()))
        if found is not None:
            raise ConfigError(
                f"{self.location}: the path has {found[0]!r}, and Delta's client takes it for another path; use another path"
            )

    def create_table(self) -> None:
        with self._named_errors():
            if not deltalake.DeltaTable.is_deltatable(str(self.path)):
                schema = deltalake.Schema.from_arrow(self.schema)
                deltalake.DeltaTable.create(str(self.path), schema=schema, partition_by=list(self.partition_by) or None)

    def check_rows(self, rows: pa.RecordBatch) -> None:
        super().check_rows(rows)
        for each in self.partition_by:
            if not is_text(rows.schema.field(each).type):
                continue
            for text in _NULL_TEXTS:
                if pc.any(pc.equal(rows.column(each), text)).as_py():
                    raise BadRecordError(
                        f"{self.location}: Delta Lake takes {text!r} in the partition column {each!r} for null; make it null or "
                        "another text upstream"
                    )

    def publish_files(self, header: Header, files: Sequence[DataFile]) -> None:
        opened = header.open
        if opened is None:
            raise InvariantViolation("publishing needs an open transaction")
        application = self._application(header)
        with self._named_errors():
            table = self._table()
            held = table.transaction_version(application)
            if held is not None and held >= opened.txid:
                return
            self._check_writable(table)
            # Read the header after the version, so that a later leader's commit meets a conflict.
            if self.read_header() != header:
                raise StaleWriterError(f"{self.location}: its header has changed", self.read_header().epoch)
            table.create_write_transaction(
                [_action(each, self.partition_by) for each in files],
                "append",
                table.schema(),
                list(self.partition_by) or None,
                commit_properties=deltalake.CommitProperties(
                    custom_metadata={
                        "ratchet.txid": str(opened.txid),
                        "ratchet.attempt": str(opened.attempt_id),
                        "ratchet.epoch": str(header.epoch),
                        "ratchet.plan": opened.plan_digest,
                    },
                    app_transactions=[deltalake.Transaction(application, opened.txid)],
                ),
            )

    def files(self) -> list[DataFile]:
        return self._files_of(self._table())

    @staticmethod
    def _application(header: Header) -> str:
        return f"ratchet/{header.topology_id}/{header.incarnation}"

    def _check_writable(self, table: deltalake.DeltaTable) -> None:
        shape = self.shape
        check_writable(table, self.location, schema=shape.schema, partition_by=shape.partition_by)

    def _files_of(self, table: Any) -> list[DataFile]:
        check_readable(table, self.location)
        log = self.path / "_delta_log"
        with self._named_errors():
            actions = pa.table(table.get_add_actions(flatten=True))
        try:
            paths, rows, sizes = (actions.column(name).to_pylist() for name in ("path", "num_records", "size_bytes"))
            columns = [
                actions.column(f"partition.{name}").cast(self.schema.field(name).type) for name in self.partition_by
            ]
            partitions = texts_of(columns) if columns else [()] * len(paths)
        except (KeyError, pa.ArrowException) as error:
            raise CorruptStateError(
                f"{log}: not the files of this table ({error}); restore it from a backup"
            ) from error
        return [
            DataFile(inner_path(unquote(inner_path(path, log)), log), *rest)  # paths are URIs
            for path, *rest in zip(paths, rows, sizes, partitions, strict=True)
        ]

    def files_as_of(self, txid: int) -> list[DataFile]:
        application = self._application(self.read_header())
        table = self._table()
        try:
            while (table.transaction_version(application) or 0) > txid:
                table.load_as_version(table.version() - 1)
            return self._files_of(table)
        except DeltaError as error:
            raise MovedOnError(f"{self.location} no longer knows its version of transaction {txid}") from error

    def files_added_by(self, txid: int) -> list[DataFile]:
        """The files added by the oldest version of ``txid``. Later versions of the same txid are
        Delta's own: they rewrite files, including those of other transactions."""
        application, table = self._application(self.read_header()), self._table()
        held: list[DataFile] = []
        try:
            while (found := table.transaction_version(application) or 0) >= txid:
                held = self._files_of(table) if found == txid else []
                table.load_as_version(table.version() - 1)
        except DeltaError as error:
            raise MovedOnError(f"{self.location} no longer knows its version before transaction {txid}") from error
        before = {each.path for each in self._files_of(table)}
        return [each for each in held if each.path not in before]

    def compact(self) -> tuple[int, int]:
        """Merge small files into larger ones by Delta's own OPTIMIZE. Returns the number of files
        before and after.

        Skips a table that is partitioned by a moment: OPTIMIZE would write the moment without its
        zone, and a reader in another zone would read another moment."""
        before = len(self.files())
        if any(is_moment(self.schema.field(each).type) for each in self.partition_by):
            return before, before
        table = self._table()
        check_known(table, self.location)
        with self._named_errors():
            table.optimize.compact(target_size=self.target_bytes)
        return before, len(self.files())

    def vacuum(self, *, older_than_s: float) -> int:
        """Remove files that no version of the last ``older_than_s`` seconds names, by the rules of
        Delta's own VACUUM. The time is rounded up to whole hours. Returns the number of files
        removed."""
        done = self.read_header().done
        table = self._table()
        check_known(table, self.location)
        with self._named_errors():
            found = table.vacuum(
                math.ceil(older_than_s / 3_600), dry_run=True, enforce_retention_duration=False, full=True
            )
        removed = [each for each in found if not may_be_open(each, done) and not is_of_another_table(each, self.path)]
        for each in removed:
            remove_file(self.path / each, self.path)
        return len(removed)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Convert errors of Delta's client to Ratchet's. An error is permanent unless it names a
        transient error of the file system."""
        try:
            yield
        except CommitFailedError as error:
            if _UNMET.search(str(error)):
                raise ConfigError(
                    f"{self.location}: Delta's client cannot write this table: {_line(error)}; another program has changed its "
                    "protocol: take that back, or use another path"
                ) from error
            raise StaleWriterError(f"{self.location}: another commit was first: {_line(error)}") from error
        except TableNotFoundError as error:
            raise CorruptStateError(f"{self.path / '_delta_log'} is gone; restore it from a backup") from error
        except (DeltaError, OSError) as error:
            if is_passing(_number_of(error)):
                raise RetryableError(f"{self.location}: {_line(error)}") from error
            raise ConfigError(
                f"{self.location}: Delta's client refuses: {_line(error)}; this does not pass by itself: look at the table, then "
                "run the topology again"
            ) from error

    def _table(self) -> Any:
        self.require()
        with self._named_errors():
            return deltalake.DeltaTable(str(self.path))


def _line(error: Exception) -> str:
    """The client's message on one line, without its stack."""
    lines = [each.strip() for each in str(error).splitlines()]
    return " ".join(each for each in lines if each and not re.match(r"\d+: ", each))


def _number_of(error: Exception) -> int | None:
    """The number of the file system's error in an error of the client."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = _OS_ERROR.search(str(error))
    return int(found[1] or found[2]) if found is not None else None


def _same_but_for_case(fields: Iterable[pa.Field]) -> Iterator[list[str]]:
    """Names of one level that are equal if case is ignored."""
    levels = [[each.name for each in fields]]
    for each in fields:
        structs = filter(pa.types.is_struct, _types_in(each.type))
        levels += [[kind.field(number).name for number in range(kind.num_fields)] for kind in structs]
    for names in levels:
        counts = Counter(map(str.lower, names))
        yield from ([name for name in names if name.lower() == each] for each, count in counts.items() if count > 1)


def _types_in(kind: pa.DataType) -> Iterator[pa.DataType]:
    """The type itself and all types that it contains."""
    yield kind
    if pa.types.is_dictionary(kind):
        yield from _types_in(kind.value_type)
    for number in range(kind.num_fields):
        yield from _types_in(kind.field(number).type)


def _is_lost(kind: pa.DataType) -> bool:
    """Whether Delta's client would declare the type as another one, which makes the files
    unreadable."""
    types = pa.types
    nanoseconds = types.is_timestamp(kind) and kind.unit == "ns"
    return bool(nanoseconds or types.is_unsigned_integer(kind) or types.is_duration(kind) or types.is_time(kind))


def _is_taken(field: pa.Field) -> bool:
    try:
        deltalake.Schema.from_arrow(pa.schema([field]))
    except Exception:  # noqa: BLE001 - the client has no class for it
        return False
    return True


def _action(file: DataFile, names: Sequence[str]) -> Any:
    return AddAction(
        path=file.path,
        size=file.size,
        partition_values=dict(zip(names, file.partition, strict=True)),
        modification_time=int(time.time() * 1000),
        data_change=True,
        stats=json.dumps({"numRecords": file.rows}),
    )
