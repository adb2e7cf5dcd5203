"""``make wheels``: the files of a release, in ``dist/``, each made from the one before and checked.

1. The sdist, from this checkout.
2. From the sdist, the wheel with the native reader. It takes CPython's stable interface, so that
   one wheel is for every Python. Zig links it against the C library of ``GLIBC``, and auditwheel
   confirms the tag: any Linux with that library, or a newer one, can use the wheel.
3. From the sdist without the native reader, the wheel for all other machines. pip prefers the
   first one where it fits.

The times of the last commit go into the files, so the same commit gives the same content.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: The oldest C library that the wheel of confluent-kafka asks for, too.
GLIBC = "2.28"
PYTHON = "cp311"
#: The modules that a user's environment gets.
TOP_LEVEL = ("framework", "integration", "ratchet", "sinks", "spouts")
_NATIVE = re.compile(r"\[\[tool\.setuptools-rust\.ext-modules\]\]\n(?:[^\[\n].*\n|\n)*")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the files of a release.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder for the files; it is emptied first")
    out: Path = parser.parse_args().out.absolute()
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="ratchet-wheels-") as made:
        work = Path(made)
        os.environ["SOURCE_DATE_EPOCH"] = _output("git", "-C", str(ROOT), "log", "-1", "--format=%ct").strip()
        _build("--sdist", ROOT, out, {})
        (sdist,) = out.glob("*.tar.gz")
        _native_wheel(_unpacked(sdist, work / "native"), work, out)
        _pure_wheel(_unpacked(sdist, work / "pure"), out)
    _check(out)
    for file in sorted(out.iterdir()):
        print(f"{file.stat().st_size:>12,} {file.name}")


def _unpacked(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return source


def _native_wheel(source: Path, work: Path, out: Path) -> None:
    machine = platform.machine()
    linker = work / "linker"
    linker.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang cc -target {machine}-linux-gnu.{GLIBC} "$@"\n')
    linker.chmod(0o755)
    interface = work / "interface.cfg"
    interface.write_text(f"[bdist_wheel]\npy_limited_api = {PYTHON}\n")
    target = f"{machine}-unknown-linux-gnu"
    environment = {
        "DIST_EXTRA_CONFIG": str(interface),
        "CARGO_BUILD_TARGET": target,
        "CARGO_TARGET_DIR": str(ROOT / "build" / "native"),  # kept: the next build compiles what changed
        f"CARGO_TARGET_{target.upper().replace('-', '_')}_LINKER": str(linker),
    }
    _build("--wheel", source, work / "linked", environment)
    (wheel,) = (work / "linked").glob("*.whl")
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
    # Only one tag: what it may be installed on is what it was linked for.
    _run("auditwheel", "repair", "--plat", tag, "--only-plat", "--wheel-dir", str(out), str(wheel))


def _pure_wheel(source: Path, out: Path) -> None:
    project = source / "pyproject.toml"
    text, count = _NATIVE.subn("", project.read_text(encoding="utf-8"))
    if count != 1:
        raise SystemExit(f"error: {project} has {count} native modules, not one")
    project.write_text(text, encoding="utf-8")
    _build("--wheel", source, out, {})


def _check(out: Path) -> None:
    """What the tools for this find, and what they cannot know."""
    files = sorted(out.iterdir())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    stem = f"ratchet_pipelines-{version}"
    native = f"{stem}-{PYTHON}-abi3-manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}.whl"
    wanted = sorted([f"{stem}.tar.gz", f"{stem}-py3-none-any.whl", native])
    if [each.name for each in files] != wanted:
        raise SystemExit(f"error: made {[each.name for each in files]}, not {wanted}")
    wheels = [each for each in files if each.suffix == ".whl"]
    _run("twine", "check", "--strict", *map(str, files))
    # W002: files with the same content, which are licences of several libraries by one author.
    _run("check-wheel-contents", "--ignore", "W002", "--toplevel", ",".join(TOP_LEVEL), *map(str, wheels))
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            compiled = [name for name in archive.namelist() if name.endswith(".so")]
        # Without a compiler the build goes on without the native reader: it is optional.
        if compiled != (["spouts/_native.abi3.so"] if wheel.name == native else []):
            raise SystemExit(f"error: {wheel.name} has the compiled files {compiled}")


def _build(what: str, source: Path, out: Path, environment: Mapping[str, str]) -> None:
    command = [sys.executable, "-m", "build", what, "--no-isolation", "--outdir", str(out), str(source)]
    _call(command, {**os.environ, **environment})


def _run(*command: str) -> None:
    """A tool of this environment."""
    _call([str(Path(sys.executable).with_name(command[0])), *command[1:]], dict(os.environ))


def _call(command: Sequence[str], environment: dict[str, str]) -> None:
    """Run a command; what it prints is shown if it fails, and the last line of it if not."""
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, check=False
    )
    if done.returncode:
        sys.stdout.write(done.stdout)
        raise SystemExit(f"error: {' '.join(command)} ended with {done.returncode}")
    words = [line for line in done.stdout.splitlines() if line.strip()]
    print(f"{Path(command[0]).name} {command[1]}: {words[-1] if words else 'done'}", flush=True)


def _output(*command: str) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    main()
