"""Secrets in the files of servers that run."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def holding(folder: Path, secret: str, mode: int = 0o777) -> list[Path]:
    """The files below ``folder`` that have ``secret`` in them, and one of these permissions. Files
    that a server removes meanwhile are left out."""
    found = []
    for where, _, names in os.walk(folder):
        for path in (Path(where) / name for name in names):
            try:
                status = path.stat()
                regular = stat.S_ISREG(status.st_mode)
                if regular and status.st_mode & mode and secret.encode() in path.read_bytes():
                    found.append(path)
            except FileNotFoundError:
                continue
    return found


def exposed(folder: Path, secret: str) -> list[Path]:
    """Those of them that other users may read or write."""
    return holding(folder, secret, 0o077)
