"""The files of a release, and images that are made of them, each made once in a test run."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from integration.docker_engine import engine
from integration.images import debian_image
from tests.kit.processes import ROOT

#: Where a machine says which certificates it trusts, and how pip reaches its index: patterns below
#: the root. A container here has the network of this machine.
_TRUST = ("etc/ssl/certs/ca-certificates.crt", "usr/local/share/ca-certificates/*.crt", "etc/pip.conf")
_MADE_S = 1_800


@cache
def wheels() -> Path:
    """``make wheels``, into ``dist``."""
    done = subprocess.run(
        ["make", "--no-print-directory", "wheels"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=_MADE_S,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4_000:]
    print(done.stdout)
    return ROOT / "dist"


def native_wheel() -> Path:
    (found,) = wheels().glob("*-abi3-manylinux_*.whl")
    return found


def debian(packages: Sequence[str] = ()) -> str:
    """The image of a bare Debian, for what a user takes from a registry. Its certificates are those
    of this machine."""
    files = [each for pattern in _TRUST for each in sorted(Path("/").glob(pattern))]
    wanted = ["ca-certificates", *packages]
    digest = hashlib.sha256(" ".join(wanted).encode() + b"".join(each.read_bytes() for each in files))
    return debian_image(f"ratchet-local/debian:{digest.hexdigest()[:12]}", wanted, print, files)


@cache
def driver_image() -> str:
    """The image of ``deploy/image``, on a Debian that was made here."""
    wheels()
    name = "ratchet-local/driver:test"
    client: Any = engine()
    client.images.build(
        path=str(ROOT),
        dockerfile="deploy/image/Dockerfile",
        tag=name,
        buildargs={"BASE": debian()},
        network_mode="host",
        rm=True,
        timeout=_MADE_S,
    )
    return name


def run(command: Sequence[object], folder: Path, **more: str) -> str:
    """What a command prints. It must succeed. ``more``: of its environment."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4_000:]
    return done.stdout


def environment(**more: str) -> dict[str, str]:
    """That of a user's shell: nothing of this repository is on its paths."""
    left_out = ("PYTHONPATH", "VIRTUAL_ENV", "PYSPARK_PYTHON")  # a Spark of the tests sets the last one
    return {**{key: value for key, value in os.environ.items() if key not in left_out}, **more}
