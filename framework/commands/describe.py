"""``ratchet describe MODULE:TOPOLOGY``: the topology that a pipeline or a builder makes."""

from __future__ import annotations

import typer

from framework.commands.exit_status import exit_codes
from framework.commands.loading import load_transactional
from framework.commands.options import ConfigFile, Overrides, TopologyName
from framework.config import Config
from framework.streams.description import described

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(topology: TopologyName, config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Show the components of a topology: tasks, inputs, groupings, columns, states and guarantees.
    Nothing is run."""
    with exit_codes():
        typer.echo(described(load_transactional(topology, Config.load(config, overrides or ()))))
