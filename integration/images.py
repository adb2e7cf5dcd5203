"""The images that servers run in, with their names and versions.

The usual image is pulled if an image registry answers. Otherwise an equivalent is built on this
machine. It is a Debian root made by ``debootstrap`` from this machine's own package source, with
Debian's Java, PostgreSQL, PgBouncer, Redis and Python, and with the jars of the embedded servers.
In both, programs and jars are where ``PATH`` and ``IMAGES`` say.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, cast

from docker.errors import DockerException, ImageNotFound

from integration.docker_engine import engine
from integration.errors import ServerError
from integration.jars import (
    KAFKA_LOGGING_JARS,
    KAFKA_VERSION,
    LOCK_FILE,
    ZOOKEEPER_JARS,
    Progress,
    find_jars,
    kafka_jars,
)
from integration.locks import locked
from integration.server_programs import find_program


@dataclass(frozen=True, slots=True)
class Image:
    """``usual``: the image to pull; None: one is built here. ``jars``: the folder of the server's
    jars in the image, if the server is a Java program."""

    usual: str | None
    jars: str | None = None


IMAGES = {
    "kafka": Image(f"apache/kafka:{KAFKA_VERSION}", "/opt/kafka/libs"),
    "zookeeper": Image("zookeeper:3.9.4", "/apache-zookeeper-3.9.4-bin/lib"),
    "pgbouncer": Image(None),
    "postgres": Image("postgres:15"),
    "redis": Image("redis:7"),
    "registry": Image("python:3.11-slim"),
}
#: The folders of programs, in the usual images and in images built here.
PATH = ":".join(
    [
        "/usr/lib/postgresql/15/bin",
        "/opt/java/openjdk/bin",
        *("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"),
    ]
)

SUITE = "bookworm"
_PACKAGES = (
    *("openjdk-17-jre-headless", "postgresql", "pgbouncer", "redis-server"),
    *("python3-minimal", "libpython3-stdlib"),
)
_REPOSITORY = "ratchet-local"
_RECIPE = 1  # increase this if an image changes in a way that the digests below do not cover
_BUILD_TIMEOUT_S = 1800


def find_image(kind: str, progress: Progress | None = None) -> str:
    """The name of the image for a kind of server. Pulls or builds the image if it is missing.

    Raises ``ServerError``: no engine, no room, no package source.
    """
    say = progress or (lambda line: None)
    image = IMAGES[kind]
    client = engine(progress)
    local = _local_name(kind)
    for name in filter(None, (image.usual, local)):
        with contextlib.suppress(ImageNotFound):
            client.images.get(name)
            return name
    if image.usual is not None:
        problem = _pull(image.usual)
        if problem is None:
            return image.usual
        say(f"{image.usual} cannot be pulled ({problem}): building an equivalent here")
    with locked("images"):
        with contextlib.suppress(ImageNotFound):
            client.images.get(local)  # another process may just have built it
            return local
        _build(kind, local, say)
    return local


@cache
def _pull(name: str) -> str | None:
    """Pull an image; tried once per process. Returns the reason for a failure, or None."""
    try:
        engine().images.pull(name)
        return None
    except DockerException as error:
        return str(error).splitlines()[0][:120]


# --- building -------------------------------------------------------------------------------------


def _local_name(kind: str) -> str:
    """The name of a local image. It contains a digest of the contents, so a change of the jars or
    of the recipe gives another name."""
    digest = hashlib.sha256(f"{_RECIPE} {SUITE} {_PACKAGES}".encode())
    if kind == "kafka":
        digest.update(LOCK_FILE.read_bytes())
    for jar in _jars_of(kind):
        digest.update(jar.name.encode())
    return f"{_REPOSITORY}/{kind}:{digest.hexdigest()[:12]}"


def _jars_of(kind: str) -> list[Path]:
    """The jars of PySpark that go into the image."""
    patterns: dict[str, Sequence[str]] = {"kafka": KAFKA_LOGGING_JARS, "zookeeper": ZOOKEEPER_JARS}
    return find_jars(patterns.get(kind, ()))


def _build(kind: str, name: str, say: Progress) -> None:
    base = _base(say)
    repository, _, tag = name.rpartition(":")
    folder = IMAGES[kind].jars
    if folder is None:
        engine().images.get(base).tag(repository, tag)
        return
    jars = _jars_of(kind)
    if kind == "kafka":
        jars += sorted(kafka_jars(say).glob("*.jar"))
    say(f"building {name} ({len(jars)} jars)")
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as archive:
        _add(archive, "Dockerfile", f"FROM {base}\nCOPY jars {folder}\n".encode())
        for jar in jars:
            archive.add(jar, f"jars/{jar.name}")
    context.seek(0)
    try:
        engine().images.build(fileobj=context, custom_context=True, tag=name, rm=True, timeout=_BUILD_TIMEOUT_S)
    except DockerException as error:
        raise ServerError(f"{name} cannot be built: {str(error).splitlines()[0][:300]}") from error


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    archive.addfile(entry, io.BytesIO(data))


def _base(say: Progress) -> str:
    """The base image: a Debian root with the programs of every kind."""
    return debian_image(_local_name("base"), _PACKAGES, say)


def debian_image(name: str, packages: Sequence[str], say: Progress, files: Sequence[Path] = ()) -> str:
    """An image of a Debian root with these packages, and with copies of these files of this
    machine. Returns ``name``, which must differ where the contents do. Building it takes a minute
    or two, once. Raises ``ServerError``."""
    client = engine()
    with contextlib.suppress(ImageNotFound):
        client.images.get(name)
        return name
    if os.geteuid() != 0:
        raise ServerError("images can be built by root only (debootstrap): run as root, or pull the usual images")
    debootstrap = find_program("debootstrap", "debootstrap", ("usr/sbin",))
    mirror = _package_source()
    say(f"building {name}: a Debian root with {', '.join(packages)}")
    with tempfile.TemporaryDirectory(prefix="ratchet-image-", ignore_cleanup_errors=True) as made:
        root = Path(made) / "root"
        command = [debootstrap, "--variant=minbase", f"--include={','.join(packages)}", SUITE, str(root), mirror]
        _run(command, root / "debootstrap" / "debootstrap.log")
        for useless in (
            "var/cache/apt/archives",
            "var/lib/apt/lists",
            "usr/share/doc",
            "usr/share/man",
            "usr/share/locale",
        ):
            shutil.rmtree(root / useless, ignore_errors=True)
        for file in files:
            copy = root / file.relative_to("/")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
        _import(root, name, client)
    return name


def _run(command: Sequence[str], log: Path) -> None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerError(f"{command[0]}: {error}") from error
    if done.returncode:
        lines = (done.stderr + done.stdout).strip().splitlines()
        with contextlib.suppress(OSError):
            lines = log.read_text(errors="replace").strip().splitlines() or lines
        raise ServerError(f"{Path(command[0]).name} failed: {lines[-1][:300] if lines else 'it said nothing'}")


def _import(root: Path, name: str, client: Any) -> None:
    repository, _, tag = name.rpartition(":")
    tar = subprocess.Popen(["tar", "-C", str(root), "--numeric-owner", "-c", "."], stdout=subprocess.PIPE)
    layers = cast(IO[bytes], tar.stdout)
    try:
        client.api.import_image_from_stream(layers, repository=repository, tag=tag)
    except DockerException as error:
        raise ServerError(f"{name} cannot be imported: {str(error).splitlines()[0][:300]}") from error
    finally:
        layers.close()
        tar.wait()
    if tar.returncode:
        raise ServerError(f"{name} cannot be imported: tar ended with {tar.returncode}")


def _package_source() -> str:
    """The Debian mirror from which this machine installs its own packages."""
    for file in sorted([Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]):
        with contextlib.suppress(OSError):
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                found = re.match(r"(?:deb(?: \[[^]]*\])?|URIs:) +(https?://\S*/debian)/?(?:\s|$)", line)
                if found:
                    return found[1]
    raise ServerError(
        f"no Debian mirror in /etc/apt ({platform.system()}): images are built on Debian only; pull the usual images"
    )
