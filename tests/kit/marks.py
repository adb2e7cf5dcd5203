"""Which marks the tests carry.

A run of the whole suite knows them. Otherwise, a pytest process of its own collects them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration.server_launcher import EMBEDDED, VARIABLE

#: Marks whose arguments are the numbers of promises.
KINDS = ("behaviour", "rule", "fault", "dies")
#: The option of pytest that writes the marks to a file.
OPTION = "--marks-to"
_ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True, slots=True)
class Held:
    """The promises that one test is marked with.

    ``slow``: only ``make test-all`` runs it. ``numbers``: kind of promise -> numbers.
    """

    test: str
    slow: bool
    numbers: Mapping[str, frozenset[str]]


_NOTED = pytest.StashKey[list[Held]]()


def collected(where: Path) -> list[Held]:
    """Every test in ``where``, a file or the root of the repository, that carries a mark of
    ``KINDS``. Raises ``RuntimeError`` with what pytest says when it cannot collect.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "marks.json"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "--quiet",
            "--config-file",
            _ROOT / "pyproject.toml",
        ]
        command += ["-p", "no:cacheprovider", f"{OPTION}={file}"]
        done = subprocess.run(
            [*command, *([] if where == _ROOT else [where])],
            cwd=_ROOT,
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


def note(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Keep the marks of the tests of a run, before any is left out. Write them to the file of
    ``OPTION``."""
    config.stash[_NOTED] = list(_held(items))
    file = config.getoption(OPTION)
    if file is not None:
        found = [
            {"test": each.test, "slow": each.slow, "numbers": {kind: sorted(each.numbers[kind]) for kind in KINDS}}
            for each in config.stash[_NOTED]
        ]
        Path(file).write_text(json.dumps(found), encoding="utf-8")


def of_the_suite(config: pytest.Config) -> list[Held]:
    """Every test of the repository that carries a mark: noted in this run, as far as it has
    collected them."""
    whole = [_ROOT / each for each in config.getini("testpaths")]
    if sorted(_ROOT / each for each in config.args) != sorted(whole):
        return collected(_ROOT)
    left_out = [_ROOT / each for each in config.getoption("ignore") or ()]
    return [*config.stash[_NOTED], *(each for folder in left_out for each in collected(folder))]


def names(item: pytest.Item) -> set[str]:
    """The names of a test's marks. pytest looks through all of them for each name that it is asked
    for."""
    return {mark.name for mark in item.iter_markers()}


def _held(items: Iterable[pytest.Item]) -> Iterator[Held]:
    for item in items:
        marked = names(item)
        if marked.isdisjoint(KINDS):
            continue
        numbers = {
            kind: frozenset(str(each) for mark in item.iter_markers(kind) for each in mark.args) for kind in KINDS
        }
        if any(numbers.values()):
            yield Held(item.nodeid, "slow" in marked, numbers)
