"""Ctrl-C, at any moment of a run: one line, the commit under way, and the last line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.kit.processes import ROOT, commands_below
from tests.kit.waiting import PATIENCE_S

pytestmark = [pytest.mark.spark, pytest.mark.kills]

PIPELINE = """
import time
from framework import *
from framework.topology import BaseBasicBolt
from sinks import *
from spouts import *

class Slow(BaseBasicBolt):
    def execute(self, tup, collector):
        print("the user's own words")
        time.sleep(0.2)
        collector.emit([tup["line"]])
    def declare_output_fields(self, declarer):
        declarer.declare(Fields(word=str))

def topology():
    rows = {0: [["a"]] * 1_000}
    builder = TransactionalTopologyBuilder("t", "lines", OpaqueMemoryTransactionalSpout(rows, Fields(line=str), 10))
    builder.set_bolt("slow", Slow()).shuffle_grouping("lines")
    committer = StateCommitter(OpaqueMapState(SqliteBackend("x.db", "words")), ["word"], {"n": Count()})
    builder.set_bolt("count", committer).fields_grouping("slow", Fields("word"))
    return builder.build()
"""
STOPPING = "stopping, the commit under way is finished (Ctrl-C again to end now)"


def interrupted(folder: Path, when: Callable[[psutil.Process, Path], bool], *options: str) -> tuple[int, str]:
    """Exit status and standard error of a run that was interrupted at a moment."""
    (folder / "mine.py").write_text(PIPELINE)
    command = [sys.executable, "-m", "ratchet", "run", "mine:topology", "--set", "spark.master=local[1]", *options]
    log = folder / "run.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command, cwd=folder, stdout=stderr, stderr=stderr, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not when(psutil.Process(process.pid), log):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        status = process.wait(PATIENCE_S)
    finally:
        process.kill()
    return status, log.read_text()


def checks(process: psutil.Process, log: Path) -> bool:
    return any("-version" in each for each in commands_below(process))


def spark_starts(process: psutil.Process, log: Path) -> bool:
    return any("SparkSubmit" in each for each in commands_below(process))


def batches_run(process: psutil.Process, log: Path) -> bool:
    return "the user's own words" in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "when",
    [pytest.param(checks, marks=pytest.mark.slow), pytest.param(spark_starts, marks=pytest.mark.slow), batches_run],
)
def test_a_run_ends_clean_wherever_it_is_interrupted(
    tmp_path: Path, when: Callable[[psutil.Process, Path], bool]
) -> None:
    status, text = interrupted(tmp_path, when)
    assert status == 0, text
    lines = [line for line in text.splitlines() if "the user's own words" not in line]
    assert STOPPING in lines
    assert "Traceback" not in text and "WARN" not in text and "KeyboardInterrupt" not in text
    assert lines[-1].startswith("stopped | ") or lines[-1] == "stopped before the topology had started"


@pytest.mark.slow
def test_a_run_that_was_to_catch_up_says_that_it_did_not(tmp_path: Path) -> None:
    status, text = interrupted(tmp_path, batches_run, "--until-caught-up")
    assert status == 130, text
    assert "Traceback" not in text
