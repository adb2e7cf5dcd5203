"""The command of the long run: shares of the simulators, replay of a violation, Ctrl-C."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

from tests.kit.command import call
from tests.kit.processes import ROOT
from tests.kit.waiting import PATIENCE_S
from tests.simulation.simulators import SIMULATORS, shares

COMMAND = [sys.executable, "-m", "tests.simulation"]
#: A program whose ledgers name no edges: every tree seems complete at once.
BROKEN = """
import sys
from framework.acking.ack_reports import Ledger
from tests.simulation.__main__ import main
Ledger.emitted = Ledger.acked = lambda self, *arguments: None
sys.exit(main())
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.slow
def test_every_simulator_runs_and_shows_which_troubles_came(seed: int) -> None:
    done = run(*COMMAND, "--schedules", "100", "--first-seed", str(seed), "--processes", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    for name, count in shares(100, list(SIMULATORS)).items():
        assert f"{name}: {count} schedules, seeds {seed} to {seed + count - 1}, " in done.stdout
    assert re.search(r"^zookeeper multi .*reply lost: \d", done.stdout, re.MULTILINE)
    assert re.search(r"^trees  +.*: \d", done.stdout, re.MULTILINE)
    assert re.search(r"^event time +.*: \d", done.stdout, re.MULTILINE)
    assert re.search(r"^rows  +.*: \d", done.stdout, re.MULTILINE)
    assert re.search(r"^mirror  +.*: \d", done.stdout, re.MULTILINE)
    assert re.search(r"^states, (exactly|at-least)-once +.*: \d", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_a_violation_gives_exit_code_1_and_the_command_that_replays_it() -> None:
    done = run(sys.executable, "-c", BROKEN, "--schedules", "20", "--only", "trees", "--processes", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    again = re.search(r"again: python -m tests.simulation (--only trees --seed \d+)", done.stdout)
    assert again is not None, done.stdout
    shown = run(sys.executable, "-c", BROKEN, *again[1].split())
    assert shown.returncode == 1
    assert "was acked before" in shown.stdout


def test_a_seed_can_be_replayed_in_each_simulator() -> None:
    done = call("tests.simulation", "--seed", "7")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("every invariant held\n") == len(SIMULATORS)
    for name in SIMULATORS:
        assert f"{name}, seed 7: " in done.stdout


@pytest.mark.slow
def test_ctrl_c_prints_what_was_done_and_the_command_that_goes_on() -> None:
    command = [*COMMAND, "--schedules", "10000000", "--only", "trees", "--processes", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stderr is not None
        assert " of 10,000,000 trees" in process.stderr.readline()  # under way
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, error
    done = re.search(r"^trees: (\d+) schedules", out)
    assert done is not None, out
    left = 10_000_000 - int(done[1])
    assert f"go on with python -m tests.simulation --only trees --first-seed {done[1]} --schedules {left}" in out
