"""The command line: one clear line for each mistake, and the exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from integration.server import free_port
from tests.kit.command import CommandErrors, call
from tests.kit.processes import ROOT
from tests.kit.thread_identifiers import NEW_THREADS, another_thread, run_in_new_threads
from tests.kit.waiting import PATIENCE_S


def run_as_a_process(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "framework.run", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("flights",), "'flights': write MODULE:TOPOLOGY"),
        (("jobs/flights.py",), "write MODULE:TOPOLOGY, such as jobs.flights:NAME, with what the file calls it"),
        (("nowhere:topology",), "there is no module 'nowhere'"),
        (("examples.nowhere:topology",), "there is no module 'examples.nowhere'"),
        (("ratchet.demo.flights:nothing",), "module 'ratchet.demo.flights' has no 'nothing'"),
        (("ratchet.demo.flights:TOPIC",), "ratchet.demo.flights:TOPIC is a str: name a Pipeline, a Topology"),
        (
            ("ratchet.demo.flights:topology", "--set", "topology.max.spout.pendign=2"),
            "did you mean 'topology.max.spout.pending'",
        ),
        (("ratchet.demo.flights:topology", "--set", "nothing"), "write KEY=VALUE"),
        (("ratchet.demo.flights:topology", "--config", "missing.toml"), "missing.toml: no such configuration file"),
        (("examples.anchored_join:topology", "--fresh"), "is a core topology, which has no transactional state"),
        (("examples.anchored_join:topology", "--find-poison"), "is a core topology, which has no batches"),
    ],
)
def test_mistakes_give_one_line_and_exit_code_2(words: tuple[str, ...], message: str) -> None:
    answer = call("framework.run", *words)
    assert answer.returncode == 2
    assert [line for line in answer.stderr.splitlines() if message in line and line.startswith("error: ")], (
        answer.stderr
    )
    assert "Traceback" not in answer.stderr


def test_a_users_module_in_the_current_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("topology = 7\n")
    assert "mine:topology is a int" in run_as_a_process("mine:topology", cwd=tmp_path).stderr


def test_the_demo_imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    """Another user may write there, as in ``/tmp``."""
    (tmp_path / "sqlite3.py").write_text("open('caught', 'w').close()\n")
    command = [sys.executable, "-P", "-m", "ratchet", "run", "--set", "app.folder=s3://x"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAVA_HOME": str(tmp_path)}
    answer = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=PATIENCE_S)
    assert not (tmp_path / "caught").exists()
    assert "app.folder: s3://x: s3:// is not a local path" in answer.stderr


def test_a_zookeeper_that_does_not_answer_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from framework import *\nfrom spouts import *\n"
        "b = TransactionalTopologyBuilder('t', 's', MemoryTransactionalSpout({0: []}, Fields(word=str), 1))\n"
        "topology = b.build()\n"
    )
    nobody = f"transactional.zookeeper.servers=127.0.0.1:{free_port()}"
    soon = "transactional.zookeeper.connection.timeout.secs=0.5"
    answer = call("framework.run", "mine:topology", "--set", nobody, "--set", soon, cwd=tmp_path)
    assert answer.returncode == 1
    assert "error: no ZooKeeper server at 127.0.0.1" in answer.stderr
    assert "answered within 0.5 s" in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize("command", ["reset", "verify"])
def test_commands_on_transactional_state_refuse_a_core_topology(command: str) -> None:
    answer = call(
        "ratchet", command, "examples.anchored_join:topology", *(["--positions"] if command == "reset" else [])
    )
    assert answer.returncode == 2
    assert "examples.anchored_join:topology is a core topology, which keeps no transactional state" in answer.stderr


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.behaviour("4.1")
def test_a_core_topology_runs_from_the_command_line_until_it_is_idle() -> None:
    answer = run_as_a_process("examples.anchored_join:topology", "--until-caught-up", "--json")
    assert answer.returncode == 0, answer.stderr
    last = [json.loads(line) for line in answer.stdout.splitlines()][-1]
    assert last["type"] == "status"
    assert (last["phase"], last["pending"], last["trees"], last["held"]) == ("stopped", 0, 0, {})
    assert last["components"]["impressions"]["completed"] == last["components"]["clicks"]["completed"] == 12


PIPELINE = """
from framework import *
from framework.topology import BaseBasicBolt
from sinks import *
from spouts import *

class Split(BaseBasicBolt):
    def execute(self, tup, collector):
        number = int(tup["line"])
        collector.emit([WHAT])
    def declare_output_fields(self, declarer):
        declarer.declare(Fields(word=str))

def topology():
    rows = {0: [["1"], ["2"], ["0"]]}
    builder = TransactionalTopologyBuilder("t", "lines", OpaqueMemoryTransactionalSpout(rows, Fields(line=str), 10))
    builder.set_bolt("split", Split()).shuffle_grouping("lines")
    state = OpaqueMapState(SqliteBackend("x.db", "words"))
    committer = StateCommitter(state, ["word"], {"n": Count()})
    builder.set_bolt("count", committer).fields_grouping("split", Fields("word"))
    return builder.build()
"""


def failed(folder: Path, what: str) -> tuple[list[str], int]:
    """The last lines that are about the error, and how many attempts were made."""
    (folder / "mine.py").write_text(PIPELINE.replace("WHAT", what))
    answer = call("ratchet", "run", "mine:topology", "--until-caught-up", "--executor", "local", cwd=folder)
    assert answer.returncode == 1
    lines = answer.stderr.splitlines()
    error = next(number for number, line in enumerate(lines) if line.startswith("error: "))
    last = [line for line in lines[:error] if line.startswith("failed | ")][-1]
    return lines[error:], int(last.split(" attempts failed")[0].rsplit(" ", 1)[1])


INTERRUPTED = """
import os, signal, subprocess, sys, threading
import framework.commands.run as run

def child():
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

def hangs(*_, **__):
    global jvm
    jvm = child()
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait()

run.submit = hangs
other = child()  # it was there before
try:
    run.app()
finally:
    print(jvm.wait(), other.poll(), flush=True)
    other.kill()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("options", "status"), [((), 0), (("--until-caught-up",), 130)])
def test_a_start_that_is_interrupted_is_not_waited_for(tmp_path: Path, options: tuple[str, ...], status: int) -> None:
    """As while Spark's JVM starts, in a library's own code: that ends, and the process."""
    (tmp_path / "mine.py").write_text(PIPELINE)
    command = [sys.executable, "-c", INTERRUPTED, "mine:topology", "--executor", "local", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout) == (status, f"{-signal.SIGTERM} None\n"), done.stderr
    assert done.stderr.splitlines()[-1] == "stopped before the topology had started"


def test_an_error_in_a_bolt_names_the_users_line_the_tuple_and_the_next_command(tmp_path: Path) -> None:
    lines, attempts = failed(tmp_path, "str(10 // number)")
    assert lines == [
        "error: component 'split', task 0: ZeroDivisionError: integer division or modulo by zero",
        f"  at {tmp_path}/mine.py:10: collector.emit([str(10 // number)])",
        "  with line='0'",
        "  next: ratchet find-poison mine:topology",
    ]
    assert attempts == 5


def test_a_value_of_a_wrong_type_is_not_tried_again(tmp_path: Path) -> None:
    lines, attempts = failed(tmp_path, "number")
    assert "field 'word' does not take every value emitted as string" in lines[0]
    assert attempts == 1


def test_an_error_that_repeats_is_logged_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PIPELINE.replace("WHAT", "str(10 // number)"))
    answer = call("ratchet", "run", "mine:topology", "--until-caught-up", "--executor", "local", cwd=tmp_path)
    assert answer.stderr.count("batch.failed") == 1
    assert answer.stderr.count("Traceback") == 1


def test_what_a_new_thread_prints_belongs_to_the_command_even_with_the_identifier_of_an_ended_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with another_thread():
        errors = CommandErrors(sys.stderr)
    run_in_new_threads(lambda: errors.write("x"))
    assert errors.getvalue() == "x" * NEW_THREADS and capsys.readouterr().err == ""
