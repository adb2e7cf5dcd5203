"""Commands, sources and sinks of another distribution, which pip has installed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import ratchet
from framework import topology
from framework.commands.cli import app
from framework.config import Config
from framework.errors import ConfigError
from framework.transactions.history_archive import history_target
from sinks.transaction_history_table import HistoryTable
from tests.kit.processes import ROOT

METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nSummary: Counts stars\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
ENTRY_POINTS = """
[ratchet.commands]
stars = {module}:app
run = {module}:app
broken = {module}:nothing
odd = {module}:odd

[ratchet.sources]
StarSpout = {module}:StarSpout
Fields = {module}:odd

[ratchet.sinks]
StarBackend = {module}:StarBackend

[ratchet.histories]
stars = {module}:opened
sqlite = {module}:opened
"""
MODULE = """
import typer
from sinks import MemoryBackend
from spouts import MemoryTransactionalSpout

app, odd = typer.Typer(), 7


@app.command()
def stars(number: int) -> None:
    print("*" * number)


class StarSpout(MemoryTransactionalSpout): ...


class StarBackend(MemoryBackend): ...


def opened(url, topology_id):
    return url, topology_id
"""


def installed(folder: Path, into: Path, name: str) -> None:
    """A wheel is a ZIP file with the modules and a folder that describes them."""
    module = name.replace("-", "_")
    files = {f"{module}.py": MODULE}
    for each, text in {"METADATA": METADATA, "WHEEL": WHEEL, "entry_points.txt": ENTRY_POINTS}.items():
        files[f"{module}-1.0.dist-info/{each}"] = text.format(name=name, module=module)
    record = f"{module}-1.0.dist-info/RECORD"
    files[record] = "".join(f"{each},,\n" for each in [*files, record])
    wheel = folder / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for each, text in files.items():
            archive.writestr(each, text)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", str(into), str(wheel)], check=True, cwd=folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages."""
    folder = tmp_path_factory.mktemp("extension")
    installed(folder, folder / "site", "ratchet-stars")
    return folder / "site"


@pytest.fixture
def site(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in ("StarSpout", "StarBackend"):
        vars(ratchet).pop(name, None)
    sys.modules.pop("ratchet_stars", None)


def called(*words: str) -> tuple[int, str]:
    answer = CliRunner().invoke(app, [*words], prog_name="ratchet", terminal_width=200)
    return answer.exit_code, answer.output


def test_a_command_of_an_installed_package_is_run(folder: Path) -> None:
    environment = {"PYTHONPATH": f"{ROOT}:{folder}"}
    stars = [sys.executable, "-m", "ratchet", "stars", "3"]
    done = subprocess.run(stars, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "***\n", "")


def test_commands_of_an_installed_package_are_listed_and_replace_none(site: Path) -> None:
    status, shown = called("--help")
    added = shown.partition("Commands of other packages")[2]
    assert status == 0 and added.count("Counts stars (ratchet-stars)") == 3 and " run " not in added
    assert "Run a topology" in called("run", "--help")[1]


def test_a_command_that_cannot_be_used_is_an_error_in_a_line(site: Path) -> None:
    status, said = called("broken")
    assert status == 2
    assert said.startswith("error: the package ratchet-stars adds 'broken', which cannot be imported: ")
    why = "error: the command 'odd' of another package is a int: it must be a typer.Typer\n"
    assert called("odd") == (2, why)
    status, said = called("strs")
    assert status == 2 and "No such command" in said


def test_sources_and_sinks_of_an_installed_package_are_imported_from_ratchet(site: Path) -> None:
    found: Any = ratchet
    assert found.Fields is topology.Fields
    assert [each.__module__ for each in (found.StarBackend, found.StarSpout)] == ["ratchet_stars", "ratchet_stars"]


def test_an_installed_package_opens_histories_of_its_scheme_and_replaces_none(site: Path, tmp_path: Path) -> None:
    def opened(url: str) -> Any:
        return history_target(Config.of({"topology.history.table": url}), "words")

    assert opened("stars://sky#night") == ("stars://sky#night", "words")
    assert isinstance(opened(f"sqlite:{tmp_path}/history.db"), HistoryTable)
    with pytest.raises(ConfigError, match="is no address of a table"):
        opened("moons://sky")


def test_a_name_that_two_packages_add_is_refused(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, tmp_path / "site", "other-stars")
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(ConfigError, match="other-stars and ratchet-stars both add 'StarBackend'.*: uninstall one"):
        ratchet.StarBackend  # type: ignore[attr-defined]  # noqa: B018
    status, said = called("stars", "3")
    assert status == 2 and "both add" in said
    assert called("--help")[0] == 0
    with pytest.raises(AttributeError, match="has no attribute 'Feilds'"):
        ratchet.Feilds  # type: ignore[attr-defined]  # noqa: B018
