"""``ratchet``: all commands under one name, what they say, and their exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from framework import Config
from framework.commands.cli import COMMANDS
from framework.commands.reference import config_keys
from framework.observe.metrics import METRICS
from tests.kit.command import call
from tests.kit.reference import PAGE, page


def ratchet(*words: str, cwd: Path | None = None) -> tuple[int, str, str]:
    answer = call("framework", *words) if cwd is None else call("framework", *words, cwd=cwd)
    return answer.returncode, answer.stdout, answer.stderr


def test_help_names_every_command_and_imports_none() -> None:
    status, out, _ = ratchet("--help")
    assert status == 0
    for name, (_, text) in COMMANDS.items():
        assert name in out and text in out


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_of_its_own(name: str) -> None:
    status, out, err = ratchet(name, "--help")
    assert (status, err) == (0, "")
    assert f"ratchet {name}" in out


def test_the_versions_of_all_that_matters_are_shown() -> None:
    status, out, _ = ratchet("--version")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == ["ratchet-pipelines", "pyspark", "confluent-kafka"]


def test_the_help_of_ratchet_does_not_load_spark() -> None:
    code = (
        "import sys\nfrom framework.commands.cli import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit('pyspark' in sys.modules or 'pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


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


def test_a_timeout_without_a_goal_is_refused() -> None:
    status, _, err = ratchet("run", "examples.joined_streams:topology", "--timeout", "5")
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


def test_a_new_project_passes_its_own_test_and_its_check(tmp_path: Path) -> None:
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
    assert "{name}" not in "".join(each.read_text() for each in folder.glob("*.*"))


@pytest.mark.parametrize("name", ["Shop", "../shop", "1shop", ""])
def test_a_name_that_cannot_be_a_project_is_refused(tmp_path: Path, name: str) -> None:
    status, _, err = ratchet("new", name, cwd=tmp_path)
    assert status == 2
    assert "cannot be a project" in err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    status, _, err = ratchet("new", "shop", cwd=tmp_path)
    assert status == 2
    assert "shop exists already" in err
    assert list((tmp_path / "shop").iterdir()) == []
