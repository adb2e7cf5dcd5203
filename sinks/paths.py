"""Where a state is, or will be."""

from __future__ import annotations

import os
from pathlib import Path

from framework.errors import ConfigError


def check_can_be_made(path: Path, location: str) -> None:
    """Raise ``ConfigError`` if what is not there yet cannot be made. Missing folders are made with
    it."""
    folder = next(each for each in path.parents if each.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise ConfigError(f"{location}: {folder} cannot be written to; check the path and its permissions")


def somebody_elses(location: object) -> ConfigError:
    """The error where a rebuild needs a name that something else has."""
    return ConfigError(f"{location} is not Ratchet's, or another topology's: rename it, its name is needed here")
