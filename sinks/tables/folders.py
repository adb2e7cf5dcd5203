"""What a table of files needs of its folder: documents that are replaced by compare-and-set, or written once.

A document is JSON with a checksum. ``HeaderChain`` numbers its versions; a version is made by linking a finished file to its
name, which fails when that name is taken: so of several writers one wins, as a file system decides it (local disks, NFS).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from framework.errors import BadRecordError, ConfigError, CorruptStateError, RetryableError
from framework.topology import Header

#: Versions of a header that are kept behind the current one: for whoever is just reading them.
_KEPT = 20
_DIGITS = 12
#: What passes by itself, or when there is room again, or when a file system that is mounted from elsewhere answers. A file that is
#: not there may just have been compacted.
_PASSING = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE),
        *(errno.EIO, errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.ENOENT),
        *(errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN),
    }
)


class HeaderChain:
    """The header of one state, in ``folder`` as ``header-000000000001.json`` and so on; the highest number is current."""

    def __init__(self, folder: Path, location: str) -> None:
        self._folder = folder
        self._location = location

    def read(self) -> Header | None:
        """The header as it is, None when there has never been one."""
        return self._current()[1]

    def create(self, header: Header) -> Header:
        """Write the first version, unless there is one; returns what is there then."""
        make_folder(self._folder)
        write_once(self._path(1), asdict(header))
        found = self.read()
        if found is None:
            raise CorruptStateError(f"{self._location}: {self._folder} has lost its header; restore it")
        return found

    def replace(self, expected: Header, new: Header) -> None:
        """Compare and set. Raises ``StaleWriterError`` with the epoch found."""
        number, found = self._current()
        if found is None:
            raise self._gone()
        if found == expected and write_once(self._path(number + 1), asdict(new)):
            last, found = self._current()
            if last == number + 1:  # not a name that others have used up and removed
                self._remove_before(number + 1 - _KEPT)
                return
        elif found == expected:
            _, found = self._current()
        if found is None:
            raise self._gone()
        raise found.refused(expected, self._location)

    def _gone(self) -> CorruptStateError:
        return CorruptStateError(f"{self._location}: its header is gone from {self._folder}; restore it")

    def _current(self) -> tuple[int, Header | None]:
        for _ in range(_KEPT):
            numbers = self._numbers()
            if not numbers:
                return 0, None
            try:
                return numbers[-1], self._parsed(self._path(numbers[-1]))
            except FileNotFoundError:
                continue  # so slow that it was removed meanwhile: look again
        raise RetryableError(f"{self._location}: its header changes faster than it can be read")

    def _parsed(self, path: Path) -> Header:
        found = read_document(path)
        try:
            return Header.of_document(found, str(path))
        except (KeyError, TypeError) as error:
            raise CorruptStateError(f"{path}: not a header ({error}); restore it from a backup") from error

    def _numbers(self) -> list[int]:
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return []
        stems = [name.removeprefix("header-").removesuffix(".json") for name in names if name.startswith("header-")]
        return sorted(int(stem) for stem in stems if stem.isdigit())

    def _remove_before(self, number: int) -> None:
        for each in self._numbers():
            if each < number:
                self._path(each).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._folder / f"header-{number:0{_DIGITS}d}.json"


def write_once(path: Path, document: Mapping[str, Any]) -> bool:
    """Write a document, durably and whole, unless its name is taken: then False."""
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
    """Write a document in place of what may be there: readers see the one or the other."""
    made = path.parent / f".{path.name}-{uuid.uuid4().hex}"
    with named_errors(path):
        _write(made, document)
        os.replace(made, path)
        sync(path.parent)


def read_document(path: Path) -> dict[str, Any]:
    """Raises ``FileNotFoundError``; ``CorruptStateError`` naming the file when a bit of it is not as it was written."""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        found = json.loads(text)
        body, checksum = found["document"], found["blake2b"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptStateError(f"{path}: not a document of Ratchet ({error}); restore it from a backup") from error
    if checksum != _checksum(body):
        raise CorruptStateError(f"{path}: its checksum does not match; restore it from a backup")
    document: dict[str, Any] = body
    return document


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, that survives a power cut from now on."""
    with named_errors(folder):
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for each in missing:
            sync(each.parent)


def sync(path: Path) -> None:
    """What was written to this file, or into this folder, survives a power cut from now on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Errors of the file system, by what to do about them."""
    try:
        yield
    except (PermissionError, NotADirectoryError, IsADirectoryError) as error:
        raise ConfigError(f"{path}: {error.strerror}; check the path and its permissions") from error
    except OSError as error:
        text = f"{path}: {error.strerror or error}"
        if error.errno in _PASSING:
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
        json.dump({"document": document, "blake2b": _checksum(document)}, file)
        file.flush()
        os.fsync(file.fileno())


def _checksum(document: Any) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.blake2b(canonical, digest_size=16).hexdigest()
