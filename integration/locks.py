"""Where processes of one user wait for each other, and keep what they share on this host."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from integration.errors import ServerError


def private_folder() -> Path:
    """A folder of this user's in the temporary folder, made when it is not there. Its name can be known in advance, so whoever was
    there first is looked at: raises ``ServerError`` for a link, a file, and a folder that others may write to or own."""
    folder = Path(tempfile.gettempdir()) / f"ratchet-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ServerError(
            f"{folder} is no folder of this user's alone: somebody else made it; remove it, or set TMPDIR"
        )
    return folder


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """One process of this user at a time."""
    with open(private_folder() / f"{name}.lock", "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
