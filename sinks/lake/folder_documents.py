"""Documents in the folder of a table: replaced by compare-and-set, or written once.

A document is JSON with a checksum. ``HeaderChain`` numbers its versions. A version is created by
linking a finished file to its name, which fails if the name exists. So the file system (local disk
or NFS) decides which of several writers wins.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from framework.errors import BadRecordError, ConfigError, CorruptStateError, RetryableError
from framework.topology import Header

#: The format of documents; the first had no number. A later format is refused.
FORMAT = 1
_PARTS = {"format", "document", "blake2b"}
#: Old versions of a header to keep: a process may be reading one of them.
_KEPT = 20
_DIGITS = 12
_HEADER = re.compile(r"header-([0-9]{12,18})\.json")
#: The beginning of a URI.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
#: The largest valid document: a larger one would name a million files.
DOCUMENT_BYTES_MAX = 256 << 20
#: Errors that are transient: they pass by themselves, when there is space again, or when a remote
#: file system answers again. A missing file may just have been compacted.
_PASSING = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE),
        *(errno.EIO, errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.ENOENT),
        *(errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN),
    }
)


class HeaderChain:
    """The header of one state: files ``header-000000000001.json`` and so on in ``folder``. The
    highest number is current. In addition to the header, a version may name a *generation* of the
    state's content, which the next versions keep: both change in one atomic step."""

    def __init__(self, folder: Path, location: str) -> None:
        self._folder = folder
        self._location = location

    def read(self) -> Header | None:
        """The current header; None if there has never been one."""
        return self._current()[1]

    def generation(self) -> str:
        """The current generation of the content; empty for the first one."""
        return self._current()[2]

    def create(self, header: Header) -> Header:
        """Write the first version, if there is none. Returns the header stored afterwards."""
        make_folder(self._folder)
        write_once(self._path(1), asdict(header))
        found = self.read()
        if found is None:
            raise CorruptStateError(f"{self._location}: {self._folder} has lost its header; restore it")
        return found

    def replace(self, expected: Header, new: Header, generation: str | None = None) -> None:
        """Set the header to ``new`` if it is ``expected``, and begin another generation if one is
        given. Otherwise raises ``StaleWriterError`` with the epoch found."""
        number, found, known = self._current()
        if found is None:
            raise self._gone()
        named = known if generation is None else generation
        document = {**asdict(new), **({"generation": named} if named else {})}
        if found == expected and write_once(self._path(number + 1), document):
            last, found, _ = self._current()
            # otherwise another writer had used this number before, and the version was removed
            if last == number + 1:
                self._remove_before(number + 1 - _KEPT)
                return
        elif found == expected:
            _, found, _ = self._current()
        if found is None:
            raise self._gone()
        raise found.refused(expected, self._location)

    def _gone(self) -> CorruptStateError:
        return CorruptStateError(f"{self._location}: its header is gone from {self._folder}; restore it")

    def _current(self) -> tuple[int, Header | None, str]:
        for _ in range(_KEPT):
            numbers = self._numbers()
            if not numbers:
                return 0, None, ""
            try:
                return numbers[-1], *self._parsed(self._path(numbers[-1]))
            except FileNotFoundError:
                continue  # the version was removed before it could be read: look again
        raise RetryableError(f"{self._location}: its header changes faster than it can be read")

    def _parsed(self, path: Path) -> tuple[Header, str]:
        found = read_document(path)
        try:
            generation = str(found.pop("generation", ""))
            return Header.of_document(found, str(path)), generation
        except (KeyError, TypeError, AttributeError) as error:
            raise CorruptStateError(f"{path}: not a header ({error}); restore it from a backup") from error

    def _numbers(self) -> list[int]:
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return []
        return sorted(int(found[1]) for found in map(_HEADER.fullmatch, names) if found is not None)

    def _remove_before(self, number: int) -> None:
        for each in self._numbers():
            if each < number:
                self._path(each).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._folder / f"header-{number:0{_DIGITS}d}.json"


def write_once(path: Path, document: Mapping[str, Any]) -> bool:
    """Write a document, durably and atomically. Returns False if the file exists already."""
    made = path.parent / f".{path.name}-{uuid.uuid4().hex}"
    with named_errors(path):
        try:
            _write(made, document)
            try:
                os.link(made, path)
            except FileExistsError:
                return False
        finally:
            made.unlink(missing_ok=True)
        sync(path.parent)
    return True


def overwrite(path: Path, document: Mapping[str, Any]) -> None:
    """Write or replace a document, durably and atomically: readers see the old or the new one."""
    made = path.parent / f".{path.name}-{uuid.uuid4().hex}"
    with named_errors(path):
        _write(made, document)
        os.replace(made, path)
        sync(path.parent)


def read_document(path: Path) -> dict[str, Any]:
    """Read a document. Raises ``FileNotFoundError``, and ``CorruptStateError``, which names the
    file, if the content differs from what was written."""
    try:
        found = json.loads(_content(path))
        body, checksum, made = found["document"], found["blake2b"], _checksum(found["document"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptStateError(f"{path}: not a document of Ratchet ({error}); restore it from a backup") from error
    if (form := found.get("format", FORMAT)) != FORMAT:
        raise CorruptStateError(
            f"{path}: document format {form}, and this Ratchet knows {FORMAT}; run the newer version"
        )
    if checksum != made or found.keys() - _PARTS or not isinstance(body, dict):
        raise CorruptStateError(f"{path}: its checksum does not match; restore it from a backup")
    return body


def _content(path: Path) -> str:
    """The text of a file. Raises ``CorruptStateError`` if it is no regular file: a pipe would
    block, and a device has no end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_size > DOCUMENT_BYTES_MAX:
            raise CorruptStateError(f"{path}: not a document of Ratchet, by its kind or size; restore it from a backup")
        with open(handle, encoding="utf-8", errors="replace", closefd=False) as file:
            return file.read(DOCUMENT_BYTES_MAX)
    finally:
        os.close(handle)


def inner_path(path: object, where: object) -> str:
    """The path of a file below the table's folder, from a document. Raises ``CorruptStateError``
    for a path that leads elsewhere: files there do not belong to the table."""
    try:
        text = os.fsencode(path).decode(errors="surrogateescape") if isinstance(path, str) else ""
    except UnicodeEncodeError:
        text = ""
    if not text or "\0" in text or text.startswith("/") or ".." in text.split("/") or _SCHEME.match(text):
        raise CorruptStateError(
            f"{where}: it names the file {str(path)[:200]!r}, which is not in the table's folder; restore it from a backup"
        )
    return text


def check_no_link(path: Path) -> None:
    """Raise ``CorruptStateError`` if a folder or file of Ratchet's own is a link: otherwise files
    elsewhere would be changed or removed as the table's."""
    if path.is_symlink():
        raise CorruptStateError(f"{path}: it is a link, and Ratchet made none; remove it, and restore what it replaced")


def check_inside(path: Path, folder: Path) -> None:
    """Raise ``CorruptStateError`` if links lead from a path in the table's folder to another
    place."""
    if not f"{os.path.realpath(path)}/".startswith(f"{os.path.realpath(folder)}/"):
        raise CorruptStateError(
            f"{path}: a link leads out of the table's folder; remove it, and restore what it replaced"
        )


def check_data_file(path: Path, folder: Path) -> None:
    """Raise ``CorruptStateError`` for a data file that is elsewhere, or is no regular file: a pipe
    would block. Raises ``FileNotFoundError``."""
    check_inside(path, folder)
    if not stat.S_ISREG(path.stat().st_mode):
        raise CorruptStateError(f"{path}: not a plain file; restore it from a backup")


def remove_file(path: Path, folder: Path) -> None:
    """Remove a file of a table, if it exists. Raises as ``check_inside``."""
    check_inside(path.parent, folder)
    path.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, durably: they survive a power cut."""
    with named_errors(folder):
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for each in missing:
            sync(each.parent)


def link(source: Path, path: Path) -> None:
    """Give a file another name, unless it has that name already. Raises ``FileNotFoundError`` when
    the file has neither name."""
    with suppress(FileExistsError):
        try:
            os.link(source, path, follow_symlinks=False)
        except FileNotFoundError:
            if not path.exists():
                raise


def discard(path: Path) -> None:
    """Remove a folder in one step, so that no program sees it half removed."""
    gone = path.with_name(f".{path.name}-{uuid.uuid4().hex[:12]}")
    with suppress(FileNotFoundError):
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def sync(path: Path) -> None:
    """Make the content of this file or folder survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_passing(number: int | None) -> bool:
    """Whether an error of the file system is transient, or passes when there is space again."""
    return number in _PASSING


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Convert errors of the file system to Ratchet's error classes by recovery."""
    try:
        yield
    except (PermissionError, NotADirectoryError, IsADirectoryError) as error:
        raise ConfigError(f"{path}: {error.strerror}; check the path and its permissions") from error
    except OSError as error:
        text = f"{path}: {error.strerror or error}"
        if is_passing(error.errno):
            raise RetryableError(text) from error
        if error.errno == errno.ENAMETOOLONG:
            raise BadRecordError(f"{text}; a value that names a partition must be short") from error
        if error.errno == errno.EROFS:
            raise ConfigError(f"{text}; give a path that can be written") from error
        raise ConfigError(
            f"{text}; this does not pass by itself: look at the folder, then run the topology again"
        ) from error


def _write(path: Path, document: Mapping[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, "document": document, "blake2b": _checksum(document)}, file)
        file.flush()
        os.fsync(file.fileno())


def _checksum(document: Any) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.blake2b(canonical, digest_size=16).hexdigest()
