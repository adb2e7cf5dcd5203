"""``ratchet undo MODULE:TOPOLOGY``: takes back the newest committed transaction."""

from __future__ import annotations

import typer

from framework.commands.exits import exit_codes
from framework.commands.loading import opened_transactional
from framework.commands.options import ConfigFile, Overrides, TopologyName, Yes
from framework.observe import configure_logging
from framework.transactions.undo import describe_undo, undo

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    topology: TopologyName,
    *,
    config: ConfigFile = None,
    overrides: Overrides = None,
    yes: Yes = False,
) -> None:
    """Take back the newest committed transaction in every sink, and put the positions back: its
    records are processed again by the next run. Only once in a row, while no driver runs, and where
    every sink keeps previous values."""
    configure_logging(level="warning")
    with exit_codes(), opened_transactional(topology, config, overrides) as (built, store, settings):
        timeout_s = settings.zookeeper_election_timeout_secs
        if yes:
            typer.echo(
                f"transaction {undo(built, store, timeout_s)} is taken back; the next run processes its records again"
            )
            return
        for line in describe_undo(built, store, timeout_s):
            typer.echo(line)
        typer.echo("nothing was changed; add --yes to take it back")
