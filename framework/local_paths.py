"""Paths of files and folders as users give them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from framework.errors import ConfigError

#: The beginning of a URL. ``Path`` makes one slash of two.
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):/")


def local_path(path: str | os.PathLike[str], what: str) -> Path:
    """A path of the local file system, or of one that is mounted. Raises ``ConfigError`` for a URL
    and for ``~``, which would otherwise become a local folder. ``what`` names it in the message.

    >>> local_path("/data/orders", "table")
    PosixPath('/data/orders')
    >>> local_path("s3://bucket/orders", "table")
    Traceback (most recent call last):
    ...
    framework.errors.ConfigError: table s3://bucket/orders: s3:// is not a local path, and would become a folder named 's3:'; \
give the path of a local disk or of a mounted file system
    """  # noqa: W505 - doctest lines are not wrapped
    text = os.fspath(path)
    if text == "~" or text.startswith("~/"):
        raise ConfigError(
            f"{what} {text}: it would become a folder named '~', because only a shell takes ~ for the home folder; give the "
            "whole path"
        )
    found = _URL.match(text)
    if found is not None:
        scheme = found["scheme"]
        raise ConfigError(
            f"{what} {text if '://' in text else text.replace(':/', '://', 1)}: {scheme}:// is not a local path, and would become "
            f"a folder named '{scheme}:'; give the path of a local disk or of a mounted file system"
        )
    return Path(path)


def lock_opener(name: str, flags: int) -> int:
    """The ``opener`` of a lock file, for ``open``. A user who may read a file may lock it. So
    other users may not, except those of the file's group if the umask allows it."""
    return os.open(name, flags, 0o660)


@contextmanager
def new_file(file: Path, mode: int = 0o666) -> Iterator[Path]:
    """An empty file beside ``file``, which takes its place when the block ends without an error. So
    other users can neither have it written where a link of theirs leads, nor have opened it before.
    ``mode``: as of ``os.open``, before the umask."""
    made = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    os.close(os.open(made, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, mode))
    try:
        yield made
        os.replace(made, file)
    except BaseException:
        made.unlink(missing_ok=True)
        raise


def hold(folder: Path) -> int:
    """Lock a folder until the returned file descriptor is closed. Programs that remove old files
    from ``/tmp`` leave a locked folder. Otherwise another user could make a folder of this name,
    and own what this process looks for there."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(held, fcntl.LOCK_SH)
    return held


@contextmanager
def held_temporary_folder(prefix: str) -> Iterator[Path]:
    """A temporary folder that only this user may read, and that is held until the block ends."""
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        held = hold(Path(folder))
        try:
            yield Path(folder)
        finally:
            os.close(held)


def replaceable_by_others(folder: Path) -> Path | None:
    """The folder or link on the way to ``folder`` whose content another user may replace; None if
    only this user and root may. Members of a group count as trusted.

    A folder for everybody without the sticky bit is reported unless it is the root of a file
    system, as the temporary folder of a container is.
    """
    named = folder.absolute()
    for each in dict.fromkeys([*reversed(named.parents), named, *reversed(named.resolve().parents), named.resolve()]):
        try:
            found = each.lstat()
        except OSError:
            continue  # it is made later, by this user
        if found.st_uid not in (0, os.geteuid()):
            return each
        shared = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
        if shared and not os.path.ismount(each):
            return each
    return None


def warn_of_others(path: Path, log: Any) -> None:
    """Log a warning if another user may replace this file or folder of a state."""
    others = replaceable_by_others(path)
    if others is not None:
        log.warning(
            "state.folder_of_others",
            folder=str(path),
            advice=f"another user may replace what is in {others}: keep states in a folder of this user's",
        )


def check_made_here(path: Path, location: str) -> None:
    """Raise ``ConfigError`` if another user has made a state's file or folder before Ratchet, in a
    folder for everybody: they could replace its content."""
    if made_by_others(path):
        raise ConfigError(f"{location}: another user has made {path}, in a folder for everybody; use another path")


def made_by_others(path: Path) -> bool:
    """Whether another user has made this file or folder where everybody may, as in ``/tmp``. False
    if there is none."""
    try:
        found, folder = path.lstat(), path.parent.stat()
    except OSError:
        return False
    return bool(folder.st_mode & stat.S_IWOTH) and found.st_uid not in (0, os.geteuid(), folder.st_uid)
