"""A standalone Spark cluster without Ratchet and the user's modules: the driver sends both."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import psycopg
import pytest

from framework.errors import ConfigError
from framework.execution.spark import code_archive
from integration import EmbeddedServers, PostgresServer, SparkCluster
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

ROOT = Path(__file__).parent.parent.parent

PIPELINE = """
from framework import BaseBasicBolt, Fields, TransactionalTopologyBuilder
from sinks import Count, OpaqueMapState, PostgresBackend, StateCommitter
from spouts import OpaqueKafkaTransactionalSpout, TextCodec
from words.tools import louder


class Louder(BaseBasicBolt):
    def execute(self, tup, collector):
        collector.emit([louder(tup["value"])])

    def declare_output_fields(self, declarer):
        declarer.declare(Fields(value=str))


def topology(app):
    spout = OpaqueKafkaTransactionalSpout([app["app.topic"]], bootstrap_servers=app["app.kafka"], codec=TextCodec())
    builder = TransactionalTopologyBuilder(app["app.topic"], "spout", spout, 2)
    builder.set_bolt("louder", Louder(), 2).shuffle_grouping("spout")
    state = OpaqueMapState(PostgresBackend(app["app.database"], app["app.table"]))
    builder.set_bolt("count", StateCommitter(state, ["value"], {"n": Count()}), 2).fields_grouping("louder", Fields("value"))
    return builder.build()
"""
TOOLS = """
import importlib.resources


def louder(text):
    return text.upper() + (importlib.resources.files("words") / "mark.txt").read_text().strip()
"""
#: Code that makes an interpreter forget where this repository is installed.
FORGETFUL = f"""
import sys
sys.meta_path[:] = [each for each in sys.meta_path if "__editable__" not in getattr(each, "__module__", "")]
sys.path[:] = [each for each in sys.path if each != {str(ROOT)!r}]
"""


def users_folder(folder: Path) -> Path:
    """A module, and a package with a file beside its code."""
    (folder / "words").mkdir(parents=True)
    (folder / "pipeline.py").write_text(PIPELINE)
    (folder / "words" / "__init__.py").write_text("")
    (folder / "words" / "tools.py").write_text(TOOLS)
    (folder / "words" / "mark.txt").write_text("!\n")
    return folder


def forgetful_python(folder: Path) -> Path:
    """An interpreter with everything that is installed here except Ratchet."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(FORGETFUL)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.kills
def test_the_framework_and_the_users_modules_reach_executors_that_have_neither(
    servers: EmbeddedServers, postgres: PostgresServer, topics: Topics, name: str, tmp_path: Path
) -> None:
    topics.create(name, 2)
    for partition in (0, 1):
        topics.send(name, [f"w{number % 10}".encode() for number in range(100)], partition)
    python = forgetful_python(tmp_path / "python")
    known = subprocess.run([python, "-c", "import framework"], cwd="/", capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError" in known.stderr  # otherwise this test would show nothing
    table = name.replace("-", "_")
    with SparkCluster(tmp_path / "spark", 1) as cluster:
        settings = {
            **cluster.settings,
            "spark.executor.memory": "512m",
            "transactional.zookeeper.servers": servers.zookeeper,
            "topology.collapse.records.max": 0,
            "app.kafka": servers.bootstrap_servers,
            "app.database": postgres.dsn,
            "app.topic": name,
            "app.table": table,
        }
        command = [sys.executable, "-m", "framework.run", "pipeline:topology", "--until-caught-up"]
        command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(
            command,
            cwd=users_folder(tmp_path / "user"),
            env={**environment, "PYSPARK_PYTHON": str(python)},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    with psycopg.connect(postgres.dsn) as connection:
        rows = dict(connection.execute(f"SELECT value, n FROM {table}").fetchall())
    assert rows == {f"W{digit}!": 20 for digit in range(10)}


def test_the_archive_holds_ratchet_and_the_users_packages_whole_and_nothing_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    monkeypatch.syspath_prepend(users_folder(tmp_path / "user"))
    left = tmp_path / "user" / "words" / "target"
    left.mkdir()
    (left / "CACHEDIR.TAG").write_text("Signature: 8a477f597d28d172789f06886806bc55")
    (left / "large.o").write_text("what a compiler has left")
    for module in ("words", "spouts", "sinks"):
        importlib.import_module(module)
    (tmp_path / "out").mkdir()
    try:
        names = set(zipfile.ZipFile(code_archive.make_archive(tmp_path / "out")).namelist())
    finally:
        sys.modules.pop("words")
    assert {
        "framework/run.py",
        "framework/topology/bolts.py",
        "spouts/kafka/reader.py",
        "sinks/sql/backend.py",
    } <= names
    assert {"words/__init__.py", "words/tools.py", "words/mark.txt"} <= names
    assert not [each for each in names if each.startswith(("pyarrow", "pyspark", "json", "pytest"))]
    assert not [each for each in names if each.endswith(".pyc") or "/target/" in each]


@pytest.mark.slow
def test_the_same_code_makes_the_same_archive_and_too_much_of_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    first, second = (code_archive.make_archive(tmp_path / folder) for folder in ("a", "b"))
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()
    monkeypatch.setattr(code_archive, "SHIPPED_BYTES_MAX", 1000)
    with pytest.raises(ConfigError, match="modules to send to Spark's executors .* is the largest file"):
        code_archive.make_archive(tmp_path)


@pytest.mark.slow
def test_a_master_that_is_not_there_is_reported_in_one_line(tmp_path: Path) -> None:
    """In a process of its own: a start that failed leaves Spark in a bad state."""
    code = textwrap.dedent("""
        from framework.execution.spark.spark_context import start_context
        from framework.errors import ConfigError
        try:
            start_context("x", {"spark.master": "spork://127.0.0.1:1"})
        except ConfigError as error:
            print(str(error).splitlines()[0])
        """)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert "Spark does not start with spark.master='spork://127.0.0.1:1': " in done.stdout
    assert "check that Java 17 or newer is on the PATH and that the master can be reached" in done.stdout
