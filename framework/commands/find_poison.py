"""``ratchet find-poison MODULE:TOPOLOGY``: narrows a failing batch down to the records that cause
the failure."""

from __future__ import annotations

from typing import Annotated

import typer

from framework.commands.exit_status import EXIT_FAILED, exit_codes
from framework.commands.loading import load_topology
from framework.commands.options import ConfigFile, Overrides, TopologyName
from framework.config import Config
from framework.coordination import store_of
from framework.errors import ConfigError
from framework.inspect.find_poison import find_poison
from framework.observe import configure_logging
from framework.topology import CoreTopology, Topology

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def main(
    topology: TopologyName,
    config: ConfigFile = None,
    overrides: Overrides = None,
    txid: Annotated[
        int | None, typer.Option("--txid", help="Search this batch; by default the next one to commit.")
    ] = None,
) -> None:
    """Process the next batch in this process, without writing, and narrow it down to the records
    that make it fail. Exit status: 1 when there are such records."""
    configure_logging(level="warning")
    with exit_codes():
        settings = Config.load(config, overrides or ())
        raise typer.Exit(show_poison(load_topology(topology, settings), settings, txid))


def show_poison(topology: Topology | CoreTopology, settings: Config, txid: int | None) -> int:
    """Run the search. Returns the exit status."""
    if isinstance(topology, CoreTopology):
        raise ConfigError(f"topology {topology.id!r} is a core topology, which has no batches to look into")
    store = store_of(settings)
    try:
        found = find_poison(topology, store, settings.for_components(), txid)
    finally:
        store.close()
    if found is None:
        typer.echo(
            "the batch is processed without an error here: it fails in its commit phase, by chance, or for where it runs"
        )
        return 0
    for line in found.lines():
        typer.echo(line)
    return EXIT_FAILED
