"""``ratchet reset MODULE:TOPOLOGY``: forgets positions or state, on explicit request.

Without ``--yes`` it shows what exists and what would be removed. It needs the topology's
leadership, so it does nothing while a driver runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from framework.commands.exit_status import exit_codes
from framework.commands.loading import opened_transactional
from framework.commands.options import ConfigFile, Overrides, TopologyName, Yes
from framework.errors import ConfigError
from framework.observe import configure_logging
from framework.transactions.reset import describe, reset_everything, reset_positions

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    topology: TopologyName,
    *,
    config: ConfigFile = None,
    overrides: Overrides = None,
    positions: Annotated[
        bool,
        typer.Option(
            "--positions",
            help="Forget the positions in the source. Transaction ids continue to rise and the sinks keep their rows, so records "
            "that are read again count again.",
        ),
    ] = False,
    everything: Annotated[
        bool,
        typer.Option(
            "--everything", help="Forget all state, and empty the sinks: the next run starts with transaction 1."
        ),
    ] = False,
    yes: Yes = False,
) -> None:
    """Forget a topology's positions, or all of its state and its sinks' rows."""
    configure_logging(level="warning")
    with exit_codes():
        if positions == everything:
            raise ConfigError("say what to forget: --positions, or --everything")
        with opened_transactional(topology, config, overrides) as (built, store, settings):
            timeout_s = settings.zookeeper_election_timeout_secs
            for line in describe(built, store, timeout_s):
                typer.echo(line)
            if not yes:
                typer.echo(
                    f"nothing was changed; add --yes to forget {'everything' if everything else 'the positions'}"
                )
            elif everything:
                typer.echo(reset_everything(built, store, timeout_s, settings.for_components()))
            else:
                txid = reset_positions(built, store, timeout_s)
                typer.echo(
                    f"positions forgotten; transaction {txid} will start where the source's policy for a first start says"
                )
