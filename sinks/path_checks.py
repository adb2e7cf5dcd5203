"""Checks of the paths of states."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from framework.errors import ConfigError
from framework.local_paths import warn_of_others
from framework.observe.logs import get_logger

_log = get_logger()


def check_can_be_made(path: Path, location: str) -> None:
    """Raise ``ConfigError`` if a missing path cannot be created. Missing parents are created with
    it."""
    folder = next(each for each in path.parents if each.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise ConfigError(f"{location}: {folder} cannot be written to; check the path and its permissions")


def somebody_elses(location: object) -> ConfigError:
    """The error for a name that a rebuild needs and that is already taken."""
    return ConfigError(f"{location} is not Ratchet's, or another topology's: rename it, its name is needed here")


def warn_of_files_beside(path: Path) -> None:
    """Log a warning as ``warn_of_others``, and one if another user may make files beside this
    one."""
    warn_of_others(path, _log)
    try:
        shared = path.parent.stat().st_mode & stat.S_IWOTH
    except OSError:
        return  # it is made later, by this user
    if shared:
        _log.warning(
            "state.folder_of_everybody",
            folder=str(path.parent),
            advice=f"every user may make files beside {path.name}, which stop the topology: keep the file in a folder of this "
            "user's",
        )
