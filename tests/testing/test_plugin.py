"""The fixture of pytest, as a user's project has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.kit.processes import ROOT

TESTS = """
from tests.testing.mistakes import RECORDS, RunningCount, Words, counting

def test_sound(simulate):
    assert simulate(counting(Words()), RECORDS).schedules == 7

def test_mistaken(simulate):
    simulate(counting(RunningCount()), RECORDS)
"""


def test_the_fixture_fails_a_test_with_the_report(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["framework.testing.plugin"]\n')
    (tmp_path / "test_own.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--simulate-schedules=7", "--simulate-seed=3", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "SimulationFailed: topology 'mistaken': 7 schedules over 10 records, seed 3: 1 found" in done.stdout
    assert "the shortest schedule that shows it" in done.stdout
