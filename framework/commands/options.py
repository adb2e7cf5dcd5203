"""The options that commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", envvar="RATCHET_CONFIG", help="A TOML file of configuration keys."),
]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE; may be repeated.")]
TopologyName = Annotated[
    str, typer.Argument(metavar="MODULE:TOPOLOGY", help="The topology, or a function that makes it.")
]
TopologyId = Annotated[str, typer.Argument(metavar="ID", help="The topology's id, as `ratchet list` shows it.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON lines on standard output.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do it; without this option, only show what would be done.")]
