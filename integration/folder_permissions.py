"""Folders that servers can reach."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from integration.errors import ServerError


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that a database's own user can access. Temporary folders made by Python and pytest
    are closed to other users."""
    with tempfile.TemporaryDirectory(prefix="ratchet-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def check_reachable(folder: Path, user: str, program: str) -> None:
    """Raise ``ServerError`` if another user cannot reach a folder."""
    for each in (folder, *folder.parents):
        if not each.stat().st_mode & 0o001:
            raise ServerError(
                f"{each}: the user {user!r}, as whom {program} runs, cannot reach it; give another folder"
            )
