"""Checks of the paths of states."""

from __future__ import annotations

import os
from pathlib import Path

from framework.errors import ConfigError


def check_can_be_made(path: Path, location: str) -> None:
    """Raise ``ConfigError`` if a missing path cannot be created. Missing parents are created with
    it."""
    folder = next(each for each in path.parents if each.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise ConfigError(f"{location}: {folder} cannot be written to; check the path and its permissions")


def somebody_elses(location: object) -> ConfigError:
    """The error for a name that a rebuild needs and that is already taken."""
    return ConfigError(f"{location} is not Ratchet's, or another topology's: rename it, its name is needed here")
