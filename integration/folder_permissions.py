"""Folders that servers can reach."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from framework.local_paths import replaceable_by_others
from framework.observe.logs import get_logger
from integration.errors import ServerError

_log = get_logger()


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that a database's own user can access. Temporary folders made by Python and pytest
    are closed to other users."""
    with tempfile.TemporaryDirectory(prefix="ratchet-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def check_owner(folder: Path) -> None:
    """Raise ``ServerError`` for a folder of servers that another user may replace, such as
    ``.ratchet`` in ``/tmp`` if that user has made it: they could write the settings of the servers,
    and run code as this user. Log only a warning if that user owns the current folder, too."""
    others = replaceable_by_others(folder)
    if others is None:
        return
    if not _current_folder().is_relative_to(others):
        raise ServerError(
            f"{folder}: another user may replace what is in {others}, and run code as this one; give another folder"
        )
    _warn(folder, others)


def warn_of_others(folder: Path) -> None:
    """Log a warning if another user may replace what is in a folder."""
    others = replaceable_by_others(folder)
    if others is not None:
        _warn(folder, others)


def _warn(folder: Path, others: Path) -> None:
    _log.warning(
        "servers.folder_of_others",
        folder=str(folder),
        advice=f"another user may replace what is in {others}, and run code as this one: give a folder of this user's",
    )


def _current_folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:  # somebody has removed it
        return Path("/")


def check_reachable(folder: Path, user: str, program: str) -> None:
    """Raise ``ServerError`` if another user cannot reach a folder."""
    for each in (folder, *folder.parents):
        if not each.stat().st_mode & 0o001:
            raise ServerError(
                f"{each}: the user {user!r}, as whom {program} runs, cannot reach it; give another folder"
            )
