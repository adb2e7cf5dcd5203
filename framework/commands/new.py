"""``ratchet new NAME``: creates a working project: a pipeline, its configuration, a test, and the
commands to run it."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from framework.commands.exit_status import exit_codes
from framework.errors import ConfigError

app = typer.Typer(pretty_exceptions_enable=False)

#: The files of a project are here, each with the suffix ``.txt``, so that no tool takes them for
#: the library's own.
_TEMPLATES = files("framework.commands") / "project"
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}")


@app.command()
def main(
    name: Annotated[str, typer.Argument(help="The folder to create; also the topology's id, and its topic.")],
) -> None:
    """Create a project: pipeline.py, ratchet.toml, test_pipeline.py, README.md, and some sample
    records."""
    with exit_codes():
        if _NAME.fullmatch(name) is None:
            raise ConfigError(f"{name!r} cannot be a project: write small letters, digits, - and _, a letter first")
        folder = Path(name)
        if folder.exists():
            raise ConfigError(f"{folder} exists already: choose another name")
        folder.mkdir()
        for each in sorted(_TEMPLATES.iterdir(), key=lambda found: found.name):
            text = each.read_text(encoding="utf-8").replace("{name}", name)
            (folder / each.name.removesuffix(".txt")).write_text(text, encoding="utf-8")
    typer.echo(f"{folder} is ready; next: cd {name}, then the commands of its README.md")
