"""Lock files belong to one user of the host: no other user decides where they are. No servers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from integration.errors import ServerError
from integration.locks import locked, private_folder


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"ratchet-{os.geteuid()}"


def test_locks_are_in_a_folder_that_nobody_else_enters(temporary: Path) -> None:
    for _ in range(2):
        with locked("packages"):
            assert (temporary / "packages.lock").is_file()
    assert temporary.stat().st_mode & 0o777 == 0o700


def _link(place: Path) -> None:
    (place.parent / "elsewhere").mkdir(mode=0o700)
    place.symlink_to(place.parent / "elsewhere")


def _open_to_all(place: Path) -> None:
    place.mkdir()
    place.chmod(0o777)


@pytest.mark.parametrize("made", [_link, _open_to_all, Path.touch], ids=["link", "open to all", "file"])
def test_a_folder_that_somebody_else_may_have_made_is_refused(temporary: Path, made: Callable[[Path], None]) -> None:
    made(temporary)
    with pytest.raises(ServerError, match="is no folder of this user's alone"), locked("packages"):
        pass
    with pytest.raises(ServerError, match="somebody else made it"):
        private_folder()
