"""Finds the program of a server that is not a Java program, and installs its package if
possible."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from integration.errors import ServerError
from integration.locks import locked

_INSTALL_TIMEOUT_S = 600
#: The words of ``apt-get`` while another program installs packages, and how long to wait then.
_LOCKED, _LOCKED_PAUSE_S = "Could not get lock", 1.0


def find_program(name: str, package: str, folders: Sequence[str] = ()) -> str:
    """The path of a program: in one of ``folders``, or else on the PATH. If it is missing, and this
    is root on Debian, installs its package.

    ``folders``: patterns relative to the root folder; the last match of a pattern wins, which is
    the newest version. Raises ``ServerError``, which says what to install.
    """
    found = _look_for(name, folders)
    if found is not None:
        return found
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ServerError(f"{name} is not installed: install the package {package}, or put {name} on the PATH")
    with locked("packages"):  # another process may be installing it
        found = _look_for(name, folders)
        if found is not None:
            return found
        _apt_get("update")
        _apt_get("install", "--yes", "--no-install-recommends", package)
    found = _look_for(name, folders)
    if found is None:
        raise ServerError(f"the package {package} was installed, and {name} is still not to be found")
    return found


def _look_for(name: str, folders: Sequence[str]) -> str | None:
    for pattern in folders:
        matches = sorted(Path("/").glob(f"{pattern}/{name}"))
        if matches:
            return str(matches[-1])
    return shutil.which(name)


def _apt_get(*arguments: str) -> None:
    command = ["apt-get", "--quiet", *arguments]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    deadline = time.monotonic() + _INSTALL_TIMEOUT_S
    while True:
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ServerError(f"{' '.join(command)}: {error}") from error
        if not done.returncode or _LOCKED not in done.stderr or time.monotonic() > deadline:
            break
        time.sleep(_LOCKED_PAUSE_S)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise ServerError(f"{' '.join(command)} failed: {lines[-1] if lines else 'it said nothing'}")
