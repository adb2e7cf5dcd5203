"""``ratchet``: all commands under one name, what they say, and their exit status."""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from framework import Config
from framework.commands.cli import COMMANDS
from framework.commands.exit_status import exit_codes
from framework.commands.settings_reference import config_keys
from framework.observe.metrics import METRICS
from tests.kit.command import call
from tests.kit.processes import ROOT
from tests.kit.reference import PAGE, page
from tests.kit.waiting import PATIENCE_S


def ratchet(*words: str, cwd: Path | None = None) -> tuple[int, str, str]:
    answer = call("ratchet", *words) if cwd is None else call("ratchet", *words, cwd=cwd)
    return answer.returncode, answer.stdout, answer.stderr


def test_help_names_every_command_and_imports_none() -> None:
    status, out, _ = ratchet("--help")
    assert status == 0
    for name, (_, text) in COMMANDS.items():
        assert name in out and text in out


def test_what_an_earlier_thread_prints_is_not_taken_for_the_words_of_a_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Spark, which tests share, prints beside them."""
    ends = threading.Event()

    def prints() -> None:
        while not ends.wait(0.001):
            sys.stderr.write("a worker dies\n")

    earlier = threading.Thread(target=prints)
    earlier.start()
    try:
        status, _, err = ratchet("run", "nosuchmodule:topology")
    finally:
        ends.set()
        earlier.join(PATIENCE_S)
    assert status == 2
    assert err.startswith("error: ") and "a worker dies" not in err
    assert "a worker dies" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_of_its_own(name: str) -> None:
    status, out, err = ratchet(name, "--help")
    assert (status, err) == (0, "")
    assert f"ratchet {name}" in out


def test_the_versions_of_all_that_matters_are_shown() -> None:
    status, out, _ = ratchet("--version")
    assert status == 0
    shown = dict(line.split() for line in out.splitlines())
    assert list(shown) == ["ratchet-pipelines", "pyspark", "confluent-kafka", "python", "java"]
    assert shown["python"] == platform.python_version() and int(shown["java"]) >= 17


def test_the_help_of_ratchet_does_not_load_spark() -> None:
    code = (
        "import sys\nfrom framework.commands.cli import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit('pyspark' in sys.modules or 'pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_ctrl_c_while_python_imports_prints_nothing(tmp_path: Path) -> None:
    (tmp_path / "framework.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    # As in a terminal: the tests may be a shell's background job, which ignores SIGINT.
    terminal = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-c", f"{terminal}; import ratchet; ratchet.main()", "list"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=PATIENCE_S) == ("", "")
    assert process.returncode == -signal.SIGINT  # which a shell shows as 130


def test_ctrl_c_while_a_command_is_imported_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("framework.commands.cli.import_module", interrupted)
    assert ratchet("list") == (130, "", "")


# --- mistakes in a user's module, as OPERATING lists them ---


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("def ok(:\n", "mine:ok", "mine.py:1: invalid syntax: def ok(:"),
        ("import nowhere\n", "mine:ok", "mine.py:1: import nowhere: ModuleNotFoundError: No module named 'nowhere'"),
        ("def ok():\n    return 1 / 0\n", "mine:ok", "mine.py:2: return 1 / 0: ZeroDivisionError: division by zero"),
        ("def ok():\n    pass\n", "mine:ok", 'mine:ok returned None: is "return builder.build()" missing?'),
        ("", "mine.py:ok", "'mine.py:ok': write mine:ok"),
        ("", "./mine:ok", "'./mine:ok': write mine:ok"),
        ("", "deep/mine.py:ok", "'deep/mine.py:ok': write deep.mine:ok"),
        (
            "from framework import TopologyBuilder\ndef ok():\n    return TopologyBuilder()\n",
            "mine:ok",
            "mine:ok returned a builder: call its build()",
        ),
        ("def ok(app):\n    return app['app.kafak']\n", "mine:ok", "app.kafak is not set; there is app.kafka: is one"),
        ("import sys\nsys.exit(0)\n", "mine:ok", "mine.py:2: sys.exit(0): SystemExit: 0"),
        ("import min\n", "mine:ok", "mine.py:1: import min: ModuleNotFoundError: No module named 'min'"),
        ("def ok(app):\n    return app['app.zzz']\n", "mine:ok", "app.zzz is not set: give it in [app]"),
    ],
)
def test_a_mistake_in_the_users_module_is_one_line_with_file_and_line(
    tmp_path: Path, text: str, name: str, message: str
) -> None:
    (tmp_path / "mine.py").write_text(text)
    status, out, err = ratchet("check", name, "--set", "app.kafka=there", cwd=tmp_path)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("hidden", ["sinks", "framework.py"])
def test_a_users_folder_that_hides_a_package_of_ours_is_named(tmp_path: Path, hidden: str) -> None:
    (tmp_path / hidden).mkdir()
    status, _, err = ratchet("check", "mine:ok", cwd=tmp_path)
    assert status == 2
    assert err == f"error: {tmp_path / hidden} hides Ratchet's package {hidden.removesuffix('.py')!r}: rename it\n"


def test_an_error_is_a_line_of_json_too_where_json_was_asked_for() -> None:
    status, out, err = ratchet("run", "nowhere:at_all", "--json")
    assert status == 2
    document = json.loads(out)
    assert (document["type"], document["status"]) == ("error", 2)
    assert err == f"error: {document['text']}\n"


def test_a_misspelt_setting_of_kafka_is_named() -> None:
    status, _, err = ratchet("topic", "peek", "words", "--set", "kafka.bootstrap.severs=127.0.0.1:1")
    assert status == 2
    assert err == "error: unknown key 'kafka.bootstrap.severs': did you mean 'kafka.bootstrap.servers'?\n"


def test_an_error_of_nobodys_is_a_line_of_json_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TOPOLOGY + "topology = of(Fails({0: []}, Fields(word=str), 1))\n")
    status, out, _ = ratchet("run", "mine:topology", "--json", "--executor", "local", cwd=tmp_path)
    assert status == 2
    assert "mine.py:7: raise ValueError('not today'): ValueError: not today" in json.loads(out)["text"]
    status, out, _ = ratchet("check", "mine:topology", "--executor", "local", cwd=tmp_path)
    assert status == 1
    assert ["✗", "source", "lines"] in [line.split()[:3] for line in out.splitlines()]
    with pytest.raises(ValueError, match="unforeseen"), contextlib.redirect_stdout(io.StringIO()) as written:  # noqa: SIM117
        with exit_codes(as_json=True):
            raise ValueError("unforeseen")
    assert json.loads(written.getvalue()) == {"type": "error", "status": 1, "text": "ValueError: unforeseen"}


TOPOLOGY = """\
from framework import *
from sinks import *
from spouts import *
class Fails(OpaqueMemoryTransactionalSpout):
    def planner(self, conf, context):
        pass
        raise ValueError('not today')
class Prints(BaseBasicBolt):
    def execute(self, tup, collector):
        print('a bolt prints')
        collector.emit([tup[1]])
    def declare_output_fields(self, declarer):
        declarer.declare(Fields(word=str))
def of(spout):
    b = TransactionalTopologyBuilder('printing', 'lines', spout)
    b.set_bolt('prints', Prints()).shuffle_grouping('lines')
    state = OpaqueMapState(MemoryBackend('words'))
    b.set_bolt('count', StateCommitter(state, ['word'], {'n': Count()})).global_grouping('prints')
    return b.build()
"""


def test_what_a_users_code_prints_is_not_among_the_json_lines(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        TOPOLOGY
        + "print('a module prints')\n"
        + "topology = of(OpaqueMemoryTransactionalSpout({0: [['a']]}, Fields(word=str), 1))\n"
    )
    words = ("mine:topology", "--json", "--executor", "local")
    status, out, err = ratchet("run", *words, "--until-caught-up", cwd=tmp_path)
    assert status == 0, err
    assert {json.loads(line)["type"] for line in out.splitlines()} == {"status"}
    assert "a module prints\n" in err and "a bolt prints\n" in err
    status, out, err = ratchet("check", *words, cwd=tmp_path)
    assert {json.loads(line)["type"] for line in out.splitlines()} == {"check"}
    assert "a module prints\n" in err


FRAMES = """
class Frames(DataFrameBolt):
    def transform(self, frame):
        return frame
    def declare_output_fields(self, declarer):
        declarer.declare(Fields(word=str))
def framed():
    b = TransactionalTopologyBuilder('framed', 'lines', OpaqueMemoryTransactionalSpout({0: []}, Fields(word=str), 1))
    b.set_bolt('frames', Frames()).global_grouping('lines')
    return b.build()
"""


@pytest.mark.parametrize(
    ("topology", "master", "proposed"),
    [("plain", "local[*]", True), ("plain", "local-cluster[1,1,1024]", False), ("framed", "local[*]", False)],
)
def test_the_local_executor_is_proposed_where_nothing_needs_spark(
    tmp_path: Path, topology: str, master: str, proposed: bool
) -> None:
    plain = "plain = of(OpaqueMemoryTransactionalSpout({0: []}, Fields(word=str), 1))\n"
    (tmp_path / "mine.py").write_text(TOPOLOGY + plain + FRAMES)
    _, out, _ = ratchet("check", f"mine:{topology}", "--set", f"spark.master={master}", cwd=tmp_path)
    assert ("nothing here needs Spark: --executor local" in out) == proposed
    _, out, _ = ratchet("check", f"mine:{topology}", "--executor", "local", cwd=tmp_path)
    assert "nothing here needs Spark" not in out


def test_a_terminal_that_lacks_a_sign_gets_another(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        TOPOLOGY + "topology = of(OpaqueMemoryTransactionalSpout({0: [['a']]}, Fields(word=str), 1))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "ratchet", "check", "mine:topology", "--executor", "local"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False)
    assert b"components" in done.stdout


def test_an_executor_that_is_not_known_is_a_mistake() -> None:
    status, out, _ = ratchet("check", "examples.anchored_join:topology", "--executor", "sparkk")
    assert status == 1
    assert "executor 'sparkk' is not known" in out


def test_a_timeout_without_a_goal_is_refused() -> None:
    status, _, err = ratchet("run", "examples.anchored_join:topology", "--timeout", "5")
    assert status == 2
    assert "--timeout is for --until-caught-up" in err


# --- the reference ---


def test_every_configuration_key_is_explained() -> None:
    keys = config_keys()
    fields = [field.alias for field in Config.model_fields.values() if field.alias is not None]
    assert {each["key"] for each in keys} == {*fields, "app.*", "kafka.*", "spark.*"}
    assert all(each["text"].endswith(".") for each in keys)
    status, out, _ = ratchet("config", "topology.max.attempts", "--json")
    assert status == 0
    assert json.loads(out)["default"] == "5"
    status, _, err = ratchet("config", "topology.max.atempts")
    assert status == 2
    assert "did you mean 'topology.max.attempts'?" in err


def test_the_page_of_the_configuration_is_the_reference() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.kit.reference"


def test_every_metric_is_explained() -> None:
    status, out, _ = ratchet("metrics", "--json")
    assert status == 0
    shown = [json.loads(line) for line in out.splitlines()]
    assert [each["metric"] for each in shown] == list(METRICS)
    assert all(each["text"].endswith(".") for each in shown)


# --- a new project ---


@pytest.mark.slow
def test_a_new_project_passes_its_own_test_and_the_simulator(tmp_path: Path) -> None:
    status, out, _ = ratchet("new", "shop", cwd=tmp_path)
    assert status == 0
    assert "cd shop" in out
    folder = tmp_path / "shop"
    assert sorted(each.name for each in folder.iterdir()) == [
        "README.md",
        "orders.jsonl",
        "pipeline.py",
        "ratchet.toml",
        "test_pipeline.py",
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    status, out, _ = ratchet(
        "simulate", "pipeline:topology", "--config", "ratchet.toml", "--input", "orders.jsonl", cwd=folder
    )
    assert (status, "nothing found" in out) == (0, True)
    assert "{name}" not in "".join(each.read_text() for each in folder.glob("*.*"))


@pytest.mark.parametrize("name", ["Shop", "../shop", "1shop", ""])
def test_a_name_that_cannot_be_a_project_is_refused(tmp_path: Path, name: str) -> None:
    status, _, err = ratchet("new", name, cwd=tmp_path)
    assert status == 2
    assert "cannot be a project" in err
    assert list(tmp_path.iterdir()) == []


def test_a_project_that_cannot_be_written_is_one_line() -> None:
    status, _, err = ratchet("new", "shop", cwd=Path("/proc"))
    assert status == 1
    assert err.startswith("error: ") and len(err.splitlines()) == 1


def test_output_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        command = [sys.executable, "-m", "framework.run", "nowhere:at_all", "--json"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr


def test_what_is_no_table_is_not_compacted(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    for name in ("file", "nothing", "."):
        status, _, err = ratchet("compact", str(tmp_path / name))
        assert (status, err) == (2, f"error: {tmp_path / name} is not the folder of a table\n")


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    status, _, err = ratchet("new", "shop", cwd=tmp_path)
    assert status == 2
    assert "shop exists already" in err
    assert list((tmp_path / "shop").iterdir()) == []
