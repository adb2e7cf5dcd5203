"""Which marks the tests carry.

A pytest process of its own, with this module as a plugin, collects them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration.server_launcher import EMBEDDED, VARIABLE

#: Marks whose arguments are the numbers of promises.
KINDS = ("behaviour", "rule", "fault", "dies")
_OPTION = "--marks-to"


@dataclass(frozen=True, slots=True)
class Held:
    """The promises that one test is marked with.

    ``slow``: only ``make test-all`` runs it. ``numbers``: kind of promise -> numbers.
    """

    test: str
    slow: bool
    numbers: Mapping[str, frozenset[str]]


def collected(where: Path) -> list[Held]:
    """Every test in ``where``, a file or the root of the repository, that carries a mark of
    ``KINDS``. Raises ``RuntimeError`` with what pytest says when it cannot collect.
    """
    root = Path(__file__).parent.parent.parent
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "marks.json"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "--quiet",
            "--config-file",
            root / "pyproject.toml",
        ]
        command += ["-p", "no:cacheprovider", "-p", __name__, f"{_OPTION}={file}"]
        done = subprocess.run(
            [*command, *([] if where == root else [where])],
            cwd=root,
            env={**os.environ, VARIABLE: EMBEDDED, "PYTEST_ADDOPTS": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"pytest cannot collect {where}: {done.stdout[-4_000:]}{done.stderr[-4_000:]}")
        found = json.loads(file.read_text(encoding="utf-8"))
    return [
        Held(each["test"], each["slow"], {kind: frozenset(each["numbers"][kind]) for kind in KINDS}) for each in found
    ]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(_OPTION, type=Path, metavar="FILE", help="write which promises each test says that it holds")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Runs before any other plugin deselects a test."""
    found = []
    for item in items:
        numbers = {
            kind: sorted({str(each) for mark in item.iter_markers(kind) for each in mark.args}) for kind in KINDS
        }
        if any(numbers.values()):
            found.append({"test": item.nodeid, "slow": item.get_closest_marker("slow") is not None, "numbers": numbers})
    config.getoption(_OPTION).write_text(json.dumps(found), encoding="utf-8")
