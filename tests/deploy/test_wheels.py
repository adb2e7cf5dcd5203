"""What ``make wheels`` makes, as a user gets it: in an empty environment, far from this
repository."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from deploy.wheels import TOP_LEVEL
from integration.server import free_port
from tests.commands.test_first_steps import commands
from tests.kit import shipped
from tests.kit.processes import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.spark, pytest.mark.kills, pytest.mark.slow]

#: As pyproject.toml says: those of them that this machine has are tried.
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
#: Prints why this environment cannot read natively; None if it can.
NATIVE = "from spouts.kafka.consumer.native_range_consumer import why_not_native; print(why_not_native())"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path) -> Iterator[None]:
    """Removes the environment: it takes a gigabyte, often of memory."""
    yield
    shutil.rmtree(tmp_path / "venv", ignore_errors=True)


def python_of(version: str) -> str | None:
    """An interpreter of this version: the one that runs the tests, one on the PATH, or one that
    pyenv has built."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return sys.executable
    built = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    candidates = [*map(str, built), shutil.which(f"python{version}")]
    for each in filter(None, candidates):
        asked = subprocess.run([each, "-c", "import venv, ssl, sqlite3"], capture_output=True, check=False)
        if asked.returncode == 0:
            return each
    return None


def run(command: Sequence[object], folder: Path, venv: Path, **more: str) -> str:
    return shipped.run(command, folder, PATH=f"{venv / 'bin'}:{shipped.environment()['PATH']}", **more)


def installed(wheel: Path, extras: str, python: str, folder: Path) -> Path:
    """An environment with the wheel, its dependencies, and nothing else."""
    venv = folder / "venv"
    run([python, "-m", "venv", venv], folder, venv)
    run([venv / "bin" / "pip", "install", "--quiet", f"{wheel}{extras}"], folder, venv)
    return venv


@pytest.mark.parametrize("version", PYTHONS)
def test_the_readmes_commands_lead_to_a_row_in_an_empty_environment(version: str, tmp_path: Path) -> None:
    python = python_of(version)
    if python is None:
        pytest.skip(f"there is no Python {version} on this machine")
    venv = installed(shipped.native_wheel(), "", python, tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert run([venv / "bin" / "python", "-c", NATIVE], elsewhere, venv) == "None\n"
    kafka, zookeeper = free_port(), free_port()
    first, *others = commands()
    ports = f's/:9092/:{kafka}/; s/"127.0.0.1"/"127.0.0.1:{zookeeper}"/'
    script = "\n".join([first, f"sed -i '{ports}' ratchet.toml", *others])
    script = script.replace("9092 ", f"{kafka} ").replace("2181", str(zookeeper))
    try:
        run(["bash", "-euc", script], elsewhere, venv)
        with sqlite3.connect(elsewhere / "orders" / "orders.db") as connection:
            rows = connection.execute("SELECT customer, orders, cents FROM totals ORDER BY customer").fetchall()
        assert rows == [("ann", 2, 300), ("bob", 1, 100), ("cid", 1, 999)]
    finally:
        run(["bash", "-c", "cd orders && ratchet servers down"], elsewhere, venv)


def test_the_demo_runs_from_the_wheel(tmp_path: Path) -> None:
    venv = installed(shipped.native_wheel(), "[demo]", sys.executable, tmp_path)
    said = run([venv / "bin" / "ratchet", "run"], tmp_path, venv, COLUMNS="200")
    assert "exactly the figures of the CSV file" in said


def test_the_pure_wheel_reads_in_python(tmp_path: Path) -> None:
    (wheel,) = shipped.wheels().glob("*-py3-none-any.whl")
    venv = installed(wheel, "", sys.executable, tmp_path)
    assert "was not built" in run([venv / "bin" / "python", "-c", NATIVE], tmp_path, venv)


def test_a_users_environment_gets_these_modules_and_no_others() -> None:
    for wheel in shipped.wheels().glob("*.whl"):
        names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
        assert {each for each in names if not each.endswith(".dist-info")} == set(TOP_LEVEL)


def test_the_sdist_has_what_wheels_are_made_of_and_no_tests() -> None:
    (sdist,) = shipped.wheels().glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "LICENSE",
        "README.md",
        "spouts/native/Cargo.lock",
        "spouts/native/src/lib.rs",
        "ratchet/demo/flights.py",
    } <= names
    assert not [name for name in names if name.startswith(("tests", "docs", "benchmarks", "examples"))]
    source = {str(path.relative_to(ROOT)) for each in TOP_LEVEL for path in (ROOT / each).rglob("*.py")}
    assert source <= names
