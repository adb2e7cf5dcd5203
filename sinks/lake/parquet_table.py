"""A table of Parquet files with a manifest per transaction.

::

    <path>/_ratchet/files/<name>                      the data files
    <path>/[<partition>/]<name>.parquet               a link to each data file that counts
    <path>/_manifest/<txid>-<epoch>-<attempt>.json    the files of one attempt, written once
    <path>/_manifest/<txid>.compacted.json            the files of all transactions up to this txid
    <path>/_ratchet/unnamed.json                      data files in no manifest, and since when
    <path>/_manifest.<generation>/                    the manifests after a rebuild: the header says
                                                      which generation counts
    <path>/_ratchet/former-<generation>.json          what counted before this generation

If a txid has several manifests, the one with the highest stamp counts, so a late writer of an old
attempt changes nothing. A roll-back is a manifest without files. Readers take the compacted
manifest with the highest txid, and the manifests above that txid: ``ParquetTable(path).dataset()``.

The links are for programs that list the folder instead of reading manifests. Invariant:

1. A link leads to a complete file that counts, and no row has two links. Only after an interrupted
   rebuild do links lead to the previously counting files, until the next driver starts.

So a link is made after its manifest, and after the links that it replaces are removed; a link is
removed before its file stops counting. An attempt makes its links from its tasks' documents in
``pending``, which a later attempt removes before it publishes, so a late driver makes none. Data
files of an earlier version are named ``.parquet`` themselves; vacuum removes those that no longer
count.
"""

from __future__ import annotations

import copy
import fcntl
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from framework.errors import (
    ConfigError,
    CorruptStateError,
    InvariantViolation,
    MovedOnError,
    RatchetError,
    RetryableError,
    StaleWriterError,
)
from framework.local_paths import check_made_here, lock_opener
from framework.topology import FORMER, REBUILT, Header, RebuildableState, Stamp
from sinks.lake.file_table_base import OWN_FOLDER, DataFile, FileTable, may_be_open, numbered
from sinks.lake.folder_documents import (
    check_inside,
    check_no_link,
    discard,
    link,
    make_folder,
    named_errors,
    overwrite,
    read_document,
    remove_file,
    sync,
    write_once,
)
from sinks.lake.partitions import Texts, folder_of
from sinks.path_checks import somebody_elses

_COMPACTED = ".compacted.json"
#: The folder of data files. Their names have no ending that other programs search for.
_FILES = Path(OWN_FOLDER, "files")
_FOLDER = re.compile(r"_manifest(\.(?P<generation>[0-9a-f]{12}))?")
_ATTEMPT = re.compile(r"(?P<txid>\d+)-(?P<epoch>-?\d+)-(?P<attempt>\d+)")
_READ_TRIES = 10
#: How long unneeded files are kept for readers that have already started, in seconds.
GRACE_S = 3_600.0


class ParquetTable(FileTable, RebuildableState):
    """A folder of Parquet files. Only the files that its manifests name belong to the table.

    ``compact()`` (``ratchet compact PATH``) merges small files. It may run while the
    topology runs.
    """

    kind = "ParquetTable"
    own_names = frozenset({OWN_FOLDER, "_manifest"})

    @property
    def can_undo(self) -> bool:
        return True

    def create_table(self) -> None:
        make_folder(self._manifests)

    def prepare(self, topology_id: str) -> Header:
        header = super().prepare(topology_id)
        make_folder(self.path / _FILES)
        if self._is_cut_off():
            # the holder of the lock does the same work
            with suppress(_Busy), self._one_at_a_time(_Busy):
                self._show_what_counts(header.done)
        return header

    def place(self, name: str, partition: Texts, folder: Path) -> tuple[Path, str]:
        return folder / name, str(_FILES / name)

    def publish_files(self, header: Header, files: Sequence[DataFile]) -> None:
        opened = header.open
        if opened is None:
            raise InvariantViolation("publishing needs an open transaction")
        pending, stamp = self._pending(header), header.stamp
        self._link(pending, [(each, Path(each.path)) for each in files])
        for each in map(_Manifest.of, self._manifests.glob(f"{opened.txid:012d}-*.json")):
            if Stamp(each.txid, each.epoch, each.attempt) < stamp:
                self._hide(self._shown(file) for file in self.files_in(each.path))
        path = self._manifests / f"{opened.txid:012d}-{header.epoch}-{opened.attempt_id}.json"
        document = {"plan_digest": opened.plan_digest, "files": [each.entry() for each in files]}
        # another try of a task has ended meanwhile
        counting = files if write_once(path, document) else self.files_in(path)
        self._link(pending, [(each, self._shown(each)) for each in counting])

    def _link(self, folder: Path, names: Sequence[tuple[DataFile, Path]]) -> None:
        """Link files from ``folder``, each to a path below the table's folder."""
        with named_errors(self.path):
            for each, path in names:
                target = self.path / path
                check_inside(target.parent, self.path)
                make_folder(target.parent)
                try:
                    link(folder / Path(each.path).name, target)
                except FileNotFoundError as error:
                    raise StaleWriterError(
                        f"{self.location}: a later attempt has removed {each.path}", self.read_header().epoch
                    ) from error
            for parent in {(self.path / path).parent for _, path in names}:
                sync(parent)

    def roll_back(self, header: Header) -> int:
        self.discard_pending(header.stamp)
        undone = [each for each in self._live() if each.txid == header.stamp.txid]
        self.publish_files(header, [])
        return sum(len(self.files_in(each.path)) for each in undone)

    def clear(self, topology_id: str) -> Header:
        before = self.prepare(topology_id)
        header = Header(topology_id, uuid.uuid4().hex, epoch=before.epoch)
        for each in self._manifests.iterdir():
            each.unlink()
        discard(self._folder / "pending")
        self.raise_header(before, header)
        (self._folder / f"former-{self._chain.generation()}.json").unlink(missing_ok=True)
        self._forget_all_but(self._chain.generation())
        self._remove_unnamed(0, lambda path: False)
        return header

    # --- for readers ------------------------------------------------------------------------------

    def files(self) -> list[DataFile]:
        for _ in range(_READ_TRIES):
            try:
                return [file for each in self._live() for file in self.files_in(each.path)]
            except FileNotFoundError:
                continue  # it was compacted during the read
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

    # --- next to another table --------------------------------------------------------------------

    _place = ""  # of the table itself, ``REBUILT`` or ``FORMER``

    @property
    def location(self) -> str:
        return f"{super().location}{', as it was before a rebuild' if self._place == FORMER else ''}"

    def become_beside(self, place: str) -> None:
        self._place = place
        if place == FORMER:
            return
        self._partition_by = self.partition_by
        path = self.path.resolve()  # links to files must stay on one file system
        self.path, self._shape = path.with_name(f"{path.name}__{place}"), None

    def _beside(self, place: str) -> ParquetTable:
        other = copy.copy(self)
        other.become_beside(place)
        return other

    def read_header(self) -> Header:
        if self._place != FORMER:
            return super().read_header()
        former = self._former()
        if former is None:
            raise CorruptStateError(f"{self.location} has no former files")
        return former.header

    def check_exchange(self, topology_id: str) -> None:
        other = self._beside(REBUILT)
        other._check_ours(topology_id)
        if self.path.exists() and self.path.stat().st_dev != other.path.parent.stat().st_dev:
            raise ConfigError(
                f"{self.location} cannot be rebuilt: it is a mount point, and files cannot be linked from the folder beside it; "
                "keep the table in a folder below"
            )

    def _check_ours(self, topology_id: str) -> None:
        """Raise ``ConfigError`` for a folder with other content. A folder that a rebuild has just
        created has no header yet."""
        check_made_here(self.path, self.location)
        header = self._chain.read() if self.path.exists() else None
        foreign = header is not None and header.topology_id != topology_id
        if header is None and self.path.exists():
            foreign = any(each.name not in self.own_names for each in self.path.iterdir())
        if foreign:
            raise somebody_elses(self.path)

    def exchange(self, expected: Header, new: Header, rebuilt: Header) -> None:
        """Link the rebuilt files into this table's folder, and write manifests of a new generation,
        which becomes current with the next version of the header."""
        other = self._beside(REBUILT)
        with self._one_at_a_time(RetryableError):
            if self.read_header() != expected:
                raise self.read_header().refused(expected, self.location)
            if other.read_header() != rebuilt:
                raise StaleWriterError(f"{other.location}: its header is no longer {rebuilt}")
            before, generation = self._chain.generation(), uuid.uuid4().hex[:12]
            made = self._manifests_of(generation)
            make_folder(made)
            last: list[DataFile] = []
            earlier: list[DataFile] = []
            for each in other._live():
                newest = each.txid == expected.done and not each.compacted
                (last if newest else earlier).extend(self._linked(other, each, generation))
            names = {f"{expected.done - 1:012d}{_COMPACTED}": earlier, f"{expected.done:012d}-0-0.json": last}
            for name, files in names.items():
                write_once(made / name, {"txid": int(name[:12]), "files": [each.entry() for each in files]})
            taken = replace(expected, incarnation=rebuilt.incarnation)
            write_once(self._folder / f"former-{generation}.json", {"header": asdict(taken), "generation": before})
            self._chain.replace(expected, new, generation)
            self._forget_all_but(generation, before)
            self._show_what_counts(expected.done)
        self._links.clear()
        discard(other.path)

    @cached_property
    def _links(self) -> dict[Path, list[DataFile]]:
        """Rebuilt manifests whose files were linked here by a try that came too late."""
        return {}

    def _linked(self, other: ParquetTable, manifest: _Manifest, generation: str) -> list[DataFile]:
        """The files of another table's manifest, as files of this one."""
        known = self._links.get(manifest.path)
        if known is not None:
            return known
        found = []
        make_folder(self.path / _FILES)
        with named_errors(self.path):
            for each in other.files_in(manifest.path):
                path = _FILES / f"rebuilt-{generation}-{uuid.uuid4().hex[:12]}"
                os.link(other.path / each.path, self.path / path)
                found.append(replace(each, path=str(path)))
            sync(self.path / _FILES)
        self._links[manifest.path] = found
        return found

    def _forget_all_but(self, *generations: str) -> None:
        """Remove the manifests of other generations: they are older, or an exchange to them was
        refused. The next vacuum removes their files."""
        for path in self.path.glob("_manifest*"):
            # the name of a partition folder may begin with these letters, too
            found = _FOLDER.fullmatch(path.name)
            if found is not None and (found["generation"] or "") not in generations:
                discard(path)
        for path in self._folder.glob("former-*.json"):
            if path.name.removeprefix("former-").removesuffix(".json") != generations[0]:
                path.unlink(missing_ok=True)

    def remove(self, topology_id: str) -> bool:
        if not self._place:
            raise InvariantViolation(f"{self.location} is no table beside another one")
        if self._place == FORMER:
            return self._remove_former()
        self._check_ours(topology_id)
        there = self.path.exists()
        discard(self.path)
        return there

    def _remove_former(self) -> bool:
        former = self._former()
        if former is None:
            return False
        with self._one_at_a_time():
            kept = {each.path for each in self._of_now().files()}
            gone = self._kept_paths() - kept
            (self._folder / f"former-{self._chain.generation()}.json").unlink(missing_ok=True)
            discard(self._manifests_of(former.generation))
            for path in gone:
                remove_file(self.path / path, self.path)
        return True

    def _of_now(self) -> ParquetTable:
        table = copy.copy(self)
        table._place = ""
        return table

    def _kept_paths(self) -> set[str]:
        """The files that counted before a rebuild, and are kept."""
        if self._former() is None:
            return set()
        table = self._beside(FORMER)
        return {file.path for each in table._live() for file in table.files_in(each.path)}

    # --- merging and removing files ---------------------------------------------------------------

    def compact(self, *, keep_last: int = 1) -> tuple[int, int]:
        """Merge small files of finished transactions into larger ones, partition by partition.
        Returns the number of files before and after.

        Skips the last ``keep_last`` transactions: at least one, because the last one may be
        replayed. Safe while the topology and its readers run. Only one compaction runs at a time.
        """
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
            make_folder(self.path / _FILES)
            merged = self._merged(files)
            write_once(
                self._manifests / f"{last:012d}{_COMPACTED}",
                {"txid": last, "files": [each.entry() for each in merged], "compacted": len(chosen)},
            )
            for path in self._manifests.glob("[0-9]*.json"):
                if _Manifest.of(path).txid <= last and path.name != f"{last:012d}{_COMPACTED}":
                    path.unlink()
            self._show_what_counts(last)
            return before, before - len(files) + len(merged)

    def _merged(self, files: Sequence[DataFile]) -> list[DataFile]:
        """Rewrite the same rows into fewer files, of the target size if partitions allow it."""
        name = f"compacted-{uuid.uuid4().hex[:12]}"
        found: list[DataFile] = []
        for number, group in enumerate(self._groups(files)):
            rows = self.dataset_of(group).to_table() if len(group) > 1 else None
            found += group if rows is None else self.write_files(rows, numbered(f"{name}-{number}"), self.path / _FILES)
        sync(self.path / _FILES)
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
        started just before. Files that an attempt may still publish are kept."""
        done = self.read_header().done  # read before the manifests, so that they name all finished files
        return self._remove_unnamed(older_than_s, lambda path: may_be_open(path, done))

    def _remove_unnamed(self, older_than_s: float, spared: Callable[[str], bool]) -> int:
        with self._one_at_a_time():
            self._show_what_counts(self.read_header().done - 1)
            now, notes = time.time(), self._folder / "unnamed.json"
            before = _since(notes)
            live = [(each.path, str(self._shown(each))) for each in self.files()]
            found = self._contents() | {str(path) for path in self._parquet_files()}
            found -= {*chain.from_iterable(live), *self._kept_paths()}
            since = {path: before.get(path, now) for path in found if not spared(path)}
            gone = {path for path, first in since.items() if now - first >= older_than_s}
            for path in gone:
                remove_file(self.path / path, self.path)
            overwrite(notes, {"since": {path: first for path, first in since.items() if path not in gone}})
            return len(gone)

    @contextmanager
    def _one_at_a_time(self, busy: type[RatchetError] = ConfigError) -> Iterator[None]:
        with named_errors(self._folder), open(self._lock, "a", encoding="utf-8", opener=lock_opener) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise busy(f"{self.location} is being compacted, or rebuilt, by another process: wait for it") from None
            print("the links are not made yet", file=lock, flush=True)
            yield

    # --- links for programs that list the folder --------------------------------------------------

    def _shown(self, file: DataFile) -> Path:
        """The path of a file's link. A file of an earlier version needs none."""
        path = Path(file.path)
        if path.parent != _FILES:
            return path
        return folder_of(self.partition_by, file.partition) / f"{path.name}.parquet"

    def _show_what_counts(self, until_txid: int) -> None:
        """Remove links to files that no longer count, then make the missing links of transactions
        up to ``until_txid``: later ones may be replayed, and their driver makes the links. Called
        under the lock, because a compaction or a rebuild may have been killed."""
        # before the manifests: files published meanwhile have links already
        there = self._parquet_files()
        live = self._live()
        counting = {self._shown(file) for each in live for file in self.files_in(each.path)}
        contents = {Path(each).name for each in self._contents()}
        self._hide(path for path in there - counting if path.stem in contents)
        finished = [file for each in live if each.txid <= until_txid for file in self.files_in(each.path)]
        missing = [(each, path) for each in finished if (path := self._shown(each)) not in there]
        self._link(self.path / _FILES, [found for found in missing if Path(found[0].path).name in contents])
        with open(self._lock, "w", encoding="utf-8", opener=lock_opener):
            pass  # empty again

    def _is_cut_off(self) -> bool:
        """Whether a compaction or a rebuild was killed, or is running: its lock is not empty."""
        return self._lock.exists() and self._lock.stat().st_size > 0

    def _hide(self, links: Iterable[Path]) -> None:
        with named_errors(self.path):
            for each in links:
                # otherwise it is the file itself, not a link
                if (self.path / _FILES / each.stem).exists():
                    remove_file(self.path / each, self.path)

    def _contents(self) -> set[str]:
        """The paths of the data files, without those of earlier versions."""
        folder = self.path / _FILES
        return {str(_FILES / name) for name in os.listdir(folder)} if folder.exists() else set()

    def _parquet_files(self) -> set[Path]:
        """The files that other programs find by their ending, relative to the table's folder."""
        found: set[Path] = set()
        for folder, folders, names in os.walk(self.path):
            inner = Path(folder).relative_to(self.path)
            if inner != Path() and OWN_FOLDER in folders:  # another table
                folders.clear()
                continue
            folders[:] = [each for each in folders if inner != Path() or each != OWN_FOLDER]
            found.update(inner / name for name in names if name.endswith(".parquet"))
        return found

    # --- inside -----------------------------------------------------------------------------------

    @property
    def _lock(self) -> Path:
        path = self._folder / "compact.lock"
        check_no_link(path)
        if path.exists() and not path.is_file():
            raise CorruptStateError(f"{path}: not a plain file; remove it")
        return path

    @property
    def _manifests(self) -> Path:
        former = self._former() if self._place == FORMER else None
        return self._manifests_of(self._chain.generation() if former is None else former.generation)

    def _manifests_of(self, generation: str) -> Path:
        found = self.path / (f"_manifest.{generation}" if generation else "_manifest")
        if _FOLDER.fullmatch(found.name) is None or found.parent != self.path:
            raise CorruptStateError(f"{self.location}: {generation!r} is no generation; restore {self._folder}")
        check_no_link(found)
        return found

    def _former(self) -> _Former | None:
        """The manifests before this generation; None: this is the first one, or the former one is
        removed."""
        path = self._folder / f"former-{self._chain.generation()}.json"
        try:
            found = read_document(path)
            return _Former(Header.of_document(found["header"], str(path)), str(found["generation"]))
        except FileNotFoundError:
            return None
        except (KeyError, TypeError, AttributeError) as error:
            raise CorruptStateError(f"{path}: not what a rebuild leaves ({error}); restore it from a backup") from error

    def _live(self) -> list[_Manifest]:
        """The manifests that count, in the order of their txids."""
        self.require()
        for _ in range(_READ_TRIES):
            generation, manifests = self._chain.generation(), self._manifests
            there = manifests.is_dir()
            found = sorted(_Manifest.of(path) for path in manifests.glob("[0-9]*.json")) if there else []
            if self._chain.generation() != generation:
                continue  # a rebuild has replaced the manifests meanwhile
            if not there:
                raise CorruptStateError(f"{manifests} is gone; restore it from a backup")
            return _counting(found)
        raise RetryableError(f"{self.location}: its manifests change faster than they can be read")


class _Former(NamedTuple):
    """The content before a rebuild: its header, and the generation of its manifests."""

    header: Header
    generation: str


class _Busy(RetryableError):
    """Another process compacts or rebuilds the table."""


def _since(notes: Path) -> dict[str, float]:
    """Data file -> time since which it is in no manifest, from the last vacuum's notes."""
    if not notes.exists():
        return {}
    since = read_document(notes).get("since")
    if not isinstance(since, dict) or not all(isinstance(each, (int, float)) for each in since.values()):
        raise CorruptStateError(f"{notes}: not what a vacuum notes; remove the file")
    return since


def _counting(found: Sequence[_Manifest]) -> list[_Manifest]:
    """Those of the sorted manifests that count."""
    base = max((each for each in found if each.compacted), default=None)
    covered = base.txid if base is not None else 0
    # sorted: the last one of a txid wins
    newest = {each.txid: each for each in found if not each.compacted and each.txid > covered}
    return [*([base] if base is not None else []), *newest.values()]


class _Manifest(NamedTuple):
    """A manifest's identity, from its file name. Sorts by txid, then by stamp."""

    txid: int
    epoch: int
    attempt: int
    compacted: bool
    path: Path

    @staticmethod
    def of(path: Path) -> _Manifest:
        stem = path.name.split(".")[0]
        if path.name.endswith(_COMPACTED) and stem.isdecimal():
            return _Manifest(int(stem), 0, 0, True, path)
        found = _ATTEMPT.fullmatch(stem)
        if found is None:
            raise CorruptStateError(f"{path}: not the name of a manifest; remove the file")
        return _Manifest(int(found["txid"]), int(found["epoch"]), int(found["attempt"]), False, path)
