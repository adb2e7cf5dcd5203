"""Lock files belong to one user of the host: no other user decides where they are. No servers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from integration import server_programs
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


def test_a_package_is_installed_when_another_program_has_installed_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one may have another folder for temporary files, and so none of our locks."""
    apt = tmp_path / "apt-get"
    apt.write_text(
        f"#!/bin/sh\necho $* >> {tmp_path}/asked\n"
        f"if mkdir {tmp_path}/first 2>/dev/null; then echo 'E: Could not get lock /var/lib/dpkg/lock' >&2; exit 100; fi\n"
        f"test $2 = update || touch {tmp_path}/some-server\nchmod +x {tmp_path}/some-server || true\n"
    )
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(server_programs, "_LOCKED_PAUSE_S", 0.0)
    assert server_programs.find_program("some-server", "some-package") == str(tmp_path / "some-server")
    install = "--quiet install --yes --no-install-recommends some-package"
    assert (tmp_path / "asked").read_text().splitlines() == ["--quiet update"] * 2 + [install]
