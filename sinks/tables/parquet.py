"""A table of Parquet files with a manifest per transaction.

::

    <path>/_manifest/<txid>-<epoch>-<attempt>.json    the files of one attempt, written once
    <path>/_manifest/<txid>.compacted.json            the files of all transactions up to this txid
    <path>/_ratchet/unnamed.json                      data files in no manifest, and since when

If a txid has several manifests, the one with the highest stamp counts, so a late writer of an old
attempt changes nothing. A roll-back is a manifest without files. Readers take the compacted
manifest with the highest txid, and the manifests above that txid: ``ParquetTable(path).dataset()``.
"""

from __future__ import annotations

import fcntl
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from framework.errors import ConfigError, CorruptStateError, InvariantViolation, MovedOnError, RetryableError
from framework.topology import Header
from sinks.tables.folders import make_folder, named_errors, overwrite, read_document, write_once
from sinks.tables.partitions import Texts
from sinks.tables.table import OWN_FOLDER, DataFile, FileTable, is_of_another_table, may_be_open

_COMPACTED = ".compacted.json"
_READ_TRIES = 10
#: How long unneeded files are kept for readers that have already started.
GRACE_S = 3_600.0


class ParquetTable(FileTable):
    """A folder of Parquet files. Only the files that its manifests name belong to the table.

    ``compact()`` (``python -m sinks.compact PATH``) merges small files. It may run while the
    topology runs.
    """

    kind = "ParquetTable"
    own_names = frozenset({OWN_FOLDER, "_manifest"})

    @property
    def can_undo(self) -> bool:
        return True

    def create_table(self) -> None:
        make_folder(self._manifests)

    def publish_files(self, header: Header, files: Sequence[DataFile]) -> None:
        opened = header.open
        if opened is None:
            raise InvariantViolation("publishing needs an open transaction")
        path = self._manifests / f"{opened.txid:012d}-{header.epoch}-{opened.attempt_id}.json"
        write_once(path, {"plan_digest": opened.plan_digest, "files": [each.entry() for each in files]})

    def roll_back(self, header: Header) -> int:
        undone = [each for each in self._live() if each.txid == header.stamp.txid]
        self.publish_files(header, [])
        return sum(len(self.files_in(each.path)) for each in undone)

    def clear(self, topology_id: str) -> Header:
        before = self.prepare(topology_id)
        header = Header(topology_id, uuid.uuid4().hex, epoch=before.epoch)
        for each in self._manifests.iterdir():
            each.unlink()
        self.raise_header(before, header)
        self._remove_unnamed(0, lambda path: False)
        return header

    # --- for readers ------------------------------------------------------------------------------

    def files(self) -> list[DataFile]:
        for _ in range(_READ_TRIES):
            try:
                return [file for each in self._live() for file in self.files_in(each.path)]
            except FileNotFoundError:
                continue  # it was compacted while it was read
        raise RetryableError(f"{self.location}: its manifests change faster than they can be read")

    def files_as_of(self, txid: int) -> list[DataFile]:
        found = [each for each in self._live() if each.txid <= txid or each.compacted]
        if any(each.txid > txid for each in found):
            raise MovedOnError(f"{self.location}: transaction {txid} was compacted with later ones")
        return [file for each in found for file in self.files_in(each.path)]

    def files_of(self, txid: int) -> list[DataFile]:
        """The files of one transaction. Raises ``ConfigError`` if there is no manifest of this
        transaction, or if it was compacted with others."""
        for each in self._live():
            if each.txid == txid and not each.compacted:
                return self.files_in(each.path)
        raise ConfigError(f"{self.location} has no manifest of transaction {txid} alone")

    # --- keeping small files in check -------------------------------------------------------------

    def compact(self, *, keep_last: int = 1) -> tuple[int, int]:
        """Merge small files of finished transactions into larger ones, partition by partition.
        Returns the number of files before and after.

        Leaves the last ``keep_last`` transactions alone: at least one, because the last one may be
        replayed. Safe while the topology and its readers run. Only one compaction runs at a
        time."""
        if keep_last < 1:
            raise ConfigError(f"keep_last must be 1 or more, and is {keep_last}: the last transaction may be replayed")
        with self._one_at_a_time():
            header = self.read_header()
            last = header.done - keep_last
            chosen = [each.path for each in self._live() if each.txid <= last]
            before = len(self.files())
            if last < 1 or len(chosen) < 2:
                return before, before
            files = [file for path in chosen for file in self.files_in(path)]
            merged = self._merged(files)
            write_once(
                self._manifests / f"{last:012d}{_COMPACTED}",
                {"txid": last, "files": [each.entry() for each in merged], "compacted": len(chosen)},
            )
            for path in self._manifests.glob("[0-9]*.json"):
                if _Manifest.of(path).txid <= last and path.name != f"{last:012d}{_COMPACTED}":
                    path.unlink()
            return before, before - len(files) + len(merged)

    def _merged(self, files: Sequence[DataFile]) -> list[DataFile]:
        """Write the same rows into fewer files, of the target size where partitions allow it."""
        name = f"compacted-{uuid.uuid4().hex[:12]}"
        found: list[DataFile] = []
        for number, group in enumerate(self._groups(files)):
            rows = self.dataset_of(group).to_table() if len(group) > 1 else None
            found += group if rows is None else self.write_files(rows, f"{name}-{number}")
        if sum(each.rows for each in found) != sum(each.rows for each in files):
            raise InvariantViolation(f"{self.location}: compaction would change the number of rows")
        return found

    def _groups(self, files: Sequence[DataFile]) -> list[list[DataFile]]:
        """Groups that become one file each: small files of one partition, together up to the target
        size. A large file is a group of its own."""
        found: list[list[DataFile]] = []
        open_group: dict[Texts, list[DataFile]] = {}
        for each in files:
            if each.size >= self.target_bytes / 2:
                found.append([each])
                continue
            group = open_group.get(each.partition)
            if group is None or sum(file.size for file in group) + each.size > self.target_bytes:
                group = open_group[each.partition] = []
                found.append(group)
            group.append(each)
        return found

    def vacuum(self, *, older_than_s: float = GRACE_S) -> int:
        """Remove data files that no manifest has named for ``older_than_s`` seconds. Returns the
        number of files removed.

        The time starts with the first vacuum that finds the file unnamed, because a reader may have
        started just before. Files that an attempt may still publish stay."""
        done = self.read_header().done  # read before the manifests, so that they name all finished files
        return self._remove_unnamed(older_than_s, lambda path: may_be_open(path, done))

    def _remove_unnamed(self, older_than_s: float, spared: Callable[[str], bool]) -> int:
        with self._one_at_a_time():
            now, notes = time.time(), self._folder / "unnamed.json"
            before = read_document(notes)["since"] if notes.exists() else {}
            live = {each.path for each in self.files()}
            found = {str(path.relative_to(self.path)) for path in self.path.rglob("*.parquet")} - live
            since = {
                path: before.get(path, now)
                for path in found
                if not spared(path) and not is_of_another_table(path, self.path)
            }
            gone = {path for path, first in since.items() if now - first >= older_than_s}
            for path in gone:
                (self.path / path).unlink(missing_ok=True)
            overwrite(notes, {"since": {path: first for path, first in since.items() if path not in gone}})
            return len(gone)

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        with named_errors(self._folder), open(self._folder / "compact.lock", "w", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{self.location} is being compacted by another process: wait for it") from None
            yield

    # --- inside -----------------------------------------------------------------------------------

    @property
    def _manifests(self) -> Path:
        return self.path / "_manifest"

    def _live(self) -> list[_Manifest]:
        """The manifests that count, in the order of their txids."""
        self.require()
        if not self._manifests.is_dir():
            raise CorruptStateError(f"{self._manifests} is gone; restore it from a backup")
        found = sorted(_Manifest.of(path) for path in self._manifests.glob("[0-9]*.json"))
        base = max((each for each in found if each.compacted), default=None)
        covered = base.txid if base is not None else 0
        newest = {
            each.txid: each for each in found if not each.compacted and each.txid > covered
        }  # sorted: the last wins
        return [*([base] if base is not None else []), *newest.values()]


class _Manifest(NamedTuple):
    """A manifest, from its file name. Sorts by txid, then by stamp."""

    txid: int
    epoch: int
    attempt: int
    compacted: bool
    path: Path

    @staticmethod
    def of(path: Path) -> _Manifest:
        numbers = path.name.split(".")[0].split("-")
        try:
            if path.name.endswith(_COMPACTED):
                return _Manifest(int(numbers[0]), 0, 0, True, path)
            txid, epoch, attempt = map(int, numbers)
        except ValueError as error:
            raise CorruptStateError(f"{path}: not the name of a manifest; remove the file") from error
        return _Manifest(txid, epoch, attempt, False, path)
