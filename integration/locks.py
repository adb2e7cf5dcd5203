"""A folder that the processes of one user share on this host, and locks between them."""

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
    """This user's folder in the temporary folder; created when missing.

    Its name is predictable, so another user may have created it first. Raises ``ServerError`` if it
    is a link, a file, a folder of another user, or a folder that others may access."""
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
    """Hold a lock that only one process of this user can hold at a time."""
    with open(private_folder() / f"{name}.lock", "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
