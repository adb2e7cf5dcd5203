"""What the reference must hold: every error, alert and public name, and commands that exist."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml

import framework
import sinks
import spouts
from framework import errors
from framework.commands.cli import app
from tests.kit.pages import blocks

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(each for each in DOCS.rglob("*.md") if each.parent.name != "adr")]


def text(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name", [name for name, each in inspect.getmembers(errors, inspect.isclass) if each.__module__ == errors.__name__]
)
def test_every_error_has_its_cause_and_cure(name: str) -> None:
    if name == "RatchetError":
        return  # what all of them are
    assert re.search(rf"^## {name}$", text("reference/errors.md"), re.M)


def messages_of(folder: Path) -> Iterator[str]:
    """Every text in the code below; ``{}`` for what is put into it."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(each.value) if isinstance(each, ast.Constant) else "{}" for each in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_every_message_in_the_table_of_errors_is_one_of_the_code() -> None:
    first = re.findall(r"^\| `([^`]+)` \|", text("reference/errors.md"), re.M)
    listed = [each for each in first if not each.isidentifier()]  # the others are classes
    code = "\n".join(each for name in ("framework", "spouts", "sinks") for each in messages_of(ROOT / name))
    assert len(listed) > 50
    assert not [each for each in listed if each not in code]


def test_every_alert_has_its_entry_and_every_entry_its_alert() -> None:
    rules = yaml.safe_load((ROOT / "deploy/prometheus/ratchet-alerts.yml").read_text(encoding="utf-8"))
    alerts = {each["alert"] for group in rules["groups"] for each in group["rules"] if "alert" in each}
    entries = set(re.findall(r"^## (Ratchet\w+)$", text("operating/alerts.md"), re.M))
    assert alerts and entries == alerts


@pytest.mark.parametrize("package", [framework, spouts, sinks], ids=lambda each: each.__name__)
def test_every_public_name_is_in_the_reference(package: Any) -> None:
    shown = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").rglob("*.md"))
    missing = [each for each in package.__all__ if not re.search(rf"\b{re.escape(each)}\b", shown)]
    assert not missing


def typed_commands() -> Iterator[tuple[str, list[str]]]:
    """(page, words) of each line that calls ``ratchet`` in a block for the shell."""
    for page in PAGES:
        for block in blocks("sh", page):
            for line in block.replace("\\\n", " ").splitlines():
                for part in re.split(r"&&|\||;", line.split(" #")[0]):
                    words = shlex.split(part.strip()) if part.count("'") % 2 == 0 and part.count('"') % 2 == 0 else []
                    if words[:1] == ["ratchet"] and len(words) > 1 and not words[1].startswith("-"):
                        yield str(page.relative_to(ROOT)), words[1:]


def test_every_command_on_a_page_exists_with_its_options() -> None:
    root: Any = typer.main.get_command(app)
    looked_at, wrong = 0, []
    for page, words in typed_commands():
        command = root.get_command(click.Context(root), words[0])
        rest = words[1:]
        while command is not None and hasattr(command, "get_command") and rest and not rest[0].startswith("-"):
            command, rest = command.get_command(click.Context(command), rest[0]), rest[1:]
        if command is None:
            wrong.append(f"{page}: {' '.join(words)}")
            continue
        known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)} | {"--help"}
        options = [each.split("=")[0] for each in rest if each.startswith("--")]
        wrong += [f"{page}: {' '.join(words)}: {each}" for each in options if each not in known]
        looked_at += 1
    assert not wrong
    assert looked_at > 40
