"""``ratchet simulate``: what it prints, and how it ends."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from framework import Topology
from framework.commands.simulate import app
from tests.testing.mistakes import RECORDS, RunningCount, Words, counting
from tests.testing.sound import numbered


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    file = tmp_path / "sample.jsonl"
    file.write_text("".join(f"{json.dumps(each)}\n" for each in RECORDS))
    return file


def simulated(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Topology], *words: str) -> Result:
    module = types.ModuleType("own")
    vars(module).update(topology=make)
    monkeypatch.setitem(sys.modules, "own", module)
    return CliRunner().invoke(app, ["own:topology", *words], catch_exceptions=False)


@pytest.mark.slow
def test_a_sound_topology_ends_with_status_0(monkeypatch: pytest.MonkeyPatch, sample: Path) -> None:
    done = simulated(monkeypatch, lambda: counting(Words()), "--input", str(sample), "--schedules", "5")
    assert (done.exit_code, done.stdout) == (
        0,
        "topology 'mistaken': 5 schedules over 10 records, seed 0: nothing found\n",
    )


@pytest.mark.slow
def test_a_mistake_ends_with_status_3_and_is_told(monkeypatch: pytest.MonkeyPatch, sample: Path) -> None:
    done = simulated(
        monkeypatch, lambda: counting(RunningCount()), "--input", str(sample), "--schedules", "9", "--seed", "40"
    )
    assert done.exit_code == 3
    lines = done.stdout.splitlines()
    assert lines[0] == "topology 'mistaken': 9 schedules over 10 records, seed 40: 1 found"
    assert lines[2] == "1. bolt 'bolt' says deterministic = True, and gives other rows for the same batch"
    assert "    changed in memory meanwhile: RunningCount.counts" in lines
    assert "  the shortest schedule that shows it:" in lines
    assert sum("FAULT: " in line for line in lines) == 1
    again = lines[-1].removeprefix("again: ratchet simulate own:topology ").split()
    assert simulated(monkeypatch, lambda: counting(RunningCount()), *again).exit_code == 3


@pytest.mark.slow
def test_json_lines_are_a_finding_each_and_the_whole(monkeypatch: pytest.MonkeyPatch, sample: Path) -> None:
    done = simulated(
        monkeypatch, lambda: counting(RunningCount()), "--input", str(sample), "--schedules", "9", "--json"
    )
    finding, whole = map(json.loads, done.stdout.splitlines())
    assert (finding["type"], finding["broken"], finding["component"], finding["records"]) == (
        "finding",
        "rows",
        "bolt",
        1,
    )
    assert len(finding["faults"]) == 1
    assert (whole["type"], whole["schedules"], whole["findings"], whole["left_out"]) == ("simulate", 9, 1, {})


@pytest.mark.slow
def test_without_a_file_the_sample_comes_from_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    done = simulated(monkeypatch, numbered, "--records", "8", "--schedules", "3")
    assert done.stdout == "topology 'numbered': 3 schedules over 8 records, seed 0: nothing found\n"


def test_a_file_that_does_not_fit_is_a_mistake_of_the_caller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("word\nant\n")
    done = simulated(monkeypatch, lambda: counting(Words()), "--input", str(tmp_path / "other.csv"))
    assert done.exit_code == 2
    assert "record 0 has no field 'n'; the spout emits word, n" in done.stderr
