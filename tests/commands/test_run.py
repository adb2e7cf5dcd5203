"""The command line: one clear line for each mistake, and the exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from integration.server import free_port
from tests.kit.command import call
from tests.kit.processes import ROOT


def run_as_a_process(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "framework.run", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False, timeout=120)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("flights",), "'flights': write MODULE:TOPOLOGY"),
        (("nowhere:topology",), "there is no module 'nowhere'"),
        (("examples.nowhere:topology",), "there is no module 'examples.nowhere'"),
        (("examples.flights:nothing",), "module 'examples.flights' has no 'nothing'"),
        (("examples.flights:TOPIC",), "examples.flights:TOPIC is a str: name a Topology"),
        (
            ("examples.flights:topology", "--set", "topology.max.spout.pendign=2"),
            "did you mean 'topology.max.spout.pending'",
        ),
        (("examples.flights:topology", "--set", "nothing"), "write KEY=VALUE"),
        (("examples.flights:topology", "--config", "missing.toml"), "missing.toml: no such configuration file"),
        (("examples.joined_streams:topology", "--fresh"), "is a core topology, which has no transactional state"),
        (("examples.joined_streams:topology", "--find-poison"), "is a core topology, which has no batches"),
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


@pytest.mark.parametrize("module", ["framework.reset", "framework.verify"])
def test_commands_on_transactional_state_refuse_a_core_topology(module: str) -> None:
    answer = call(module, "examples.joined_streams:topology", *(["--positions"] if "reset" in module else []))
    assert answer.returncode == 2
    assert "examples.joined_streams:topology is a core topology, which keeps no transactional state" in answer.stderr


@pytest.mark.spark
@pytest.mark.behaviour("4.1")
def test_a_core_topology_runs_from_the_command_line_until_it_is_idle() -> None:
    answer = run_as_a_process("examples.joined_streams:topology", "--until-caught-up", "--json")
    assert answer.returncode == 0, answer.stderr
    last = [json.loads(line) for line in answer.stdout.splitlines()][-1]
    assert last["type"] == "status"
    assert (last["phase"], last["pending"], last["trees"], last["held"]) == ("stopped", 0, 0, {})
    assert last["components"]["impressions"]["completed"] == last["components"]["clicks"]["completed"] == 12
