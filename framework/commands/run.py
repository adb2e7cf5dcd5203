"""``python -m framework.run``: runs a topology from the command line.

Without arguments, the demo. ``MODULE:TOPOLOGY`` names a ``Topology``, or a function that makes one: without arguments, or
with the configuration's ``app.*`` keys as its one argument.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from framework.commands.exits import EXIT_FAILED, exit_codes
from framework.commands.loading import load_topology, resolve
from framework.commands.supervision import supervise
from framework.config import Config
from framework.coordination import store_of
from framework.core.run import CoreRun
from framework.errors import ConfigError
from framework.observe import configure_logging
from framework.submission import submit
from framework.topology import CoreTopology, Topology
from framework.transactions.poison import find_poison
from framework.transactions.run import Run

#: The demo is a program like any user's; the framework knows it by name only.
DEMO = "examples.flights_demo:main"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    topology: Annotated[
        str | None, typer.Argument(metavar="[MODULE:TOPOLOGY]", help="What to run; without it, the demo.")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="A TOML file of configuration keys.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE; may be repeated.")] = None,
    until_caught_up: Annotated[
        bool,
        typer.Option(
            "--until-caught-up",
            help="Stop when all that the source held at the start is committed; of a core topology, when its spouts give "
            "nothing and every tuple is acked or failed.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Progress and logs as JSON lines.")] = False,
    accept_changed: Annotated[
        bool,
        typer.Option(
            "--accept-changed-topology",
            help="Go on from the state of a topology of the same id and another shape; the difference is logged.",
        ),
    ] = False,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            help="Forget where the source was read and begin where the spout's start= says. Transaction ids go on rising and "
            "the sinks stay as they are, so records that are read again count again.",
        ),
    ] = False,
    poison: Annotated[
        bool,
        typer.Option(
            "--find-poison",
            help="Run nothing for good: narrow the batch that is due down to the records that make it fail, and show them.",
        ),
    ] = False,
    txid: Annotated[
        int | None, typer.Option("--txid", help="With --find-poison: another batch than the one due.")
    ] = None,
    standby: Annotated[
        bool,
        typer.Option("--standby", help="Leave the lead to another driver, and take over when that one is gone."),
    ] = False,
    executor: Annotated[
        str,
        typer.Option(
            "--executor", help="spark, at spark.master; or local, in this process: for small topologies and tests."
        ),
    ] = "spark",
    verbose: Annotated[bool, typer.Option("--verbose", help="Log every transaction.")] = False,
) -> None:
    """Run a topology until it is stopped (Ctrl-C or SIGTERM), or until it has caught up."""
    configure_logging(json_lines=as_json, level="debug" if verbose else "info")
    with exit_codes():
        settings = Config.load(config, overrides or ())
        if topology is None:
            raise typer.Exit(resolve(DEMO)(settings, json_lines=as_json))
        built = load_topology(topology, settings)
        if poison:
            raise typer.Exit(_show_poison(built, settings, txid))
        run: Run | CoreRun
        if isinstance(built, CoreTopology):
            if accept_changed or fresh or standby:
                raise ConfigError(
                    f"{topology} is a core topology, which has no transactional state: --accept-changed-topology, --fresh and "
                    "--standby have no meaning for it"
                )
            run = submit(built, settings, executor=executor)
        else:
            run = submit(
                built,
                settings,
                executor=executor,
                accept_changed_topology=accept_changed,
                fresh=fresh,
                standby=standby,
            )
        supervise(run, until_caught_up=until_caught_up, json_lines=as_json)


def _show_poison(topology: Topology | CoreTopology, settings: Config, txid: int | None) -> int:
    """Returns the exit status: 1 when something was found."""
    if isinstance(topology, CoreTopology):
        raise ConfigError(
            f"topology {topology.id!r} is a core topology, which has no batches: --find-poison is for those"
        )
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
