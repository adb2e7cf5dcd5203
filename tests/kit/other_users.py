"""Files of other users of the host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def made_by(user: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a folder of another user; only root may give one away."""
    folder.mkdir()
    if os.geteuid() == 0:
        os.chown(folder, user, -1)
        return
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)


#: Only root can give files away.
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def give_away(*paths: Path) -> None:
    """Make files and folders those of another user."""
    for path in paths:
        os.chown(path, 12_345, 12_345, follow_symlinks=False)
