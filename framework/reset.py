"""``python -m framework.reset MODULE:TOPOLOGY``: goes back, on purpose and by name.

Without ``--yes`` it shows what there is and what would go. It needs the topology's leadership, so a running driver keeps
it from doing anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from framework.config import Config
from framework.errors import ConfigError, CorruptStateError, RatchetError, TopologyError
from framework.observe import configure_logging
from framework.run import EXIT_FAILED, EXIT_MISUSED, load_transactional
from framework.submission import store_of
from framework.topology import Standing, Topology
from framework.transactions import CoordinationStore
from framework.transactions.documents import TopologyDocuments, forget_everything, new_incarnation
from framework.transactions.recovery import committers_elsewhere
from framework.transactions.reset import ELECTION_TIMEOUT_S, leadership_of, reset_positions

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    topology: Annotated[str, typer.Argument(metavar="MODULE:TOPOLOGY", help="Whose state.")],
    config: Annotated[Path | None, typer.Option("--config", help="A TOML file of configuration keys.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE; may be repeated.")] = None,
    positions: Annotated[
        bool,
        typer.Option(
            "--positions",
            help="Forget where the source was read. Transaction ids go on rising and the sinks stay as they are, so records "
            "that are read again count again.",
        ),
    ] = False,
    everything: Annotated[
        bool,
        typer.Option("--everything", help="Forget all, and empty the sinks: the next run starts with transaction 1."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without this, only show.")] = False,
) -> None:
    """Forget a topology's positions, or all of its state and its sinks' rows."""
    configure_logging(level="warning")
    try:
        if positions == everything:
            raise ConfigError("say what to forget: --positions, or --everything")
        settings = Config.load(config, overrides or ())
        built = load_transactional(topology, settings)
        if settings.zookeeper_hosts() is None:
            raise ConfigError("transactional.zookeeper.servers is not set: there is no state that outlives a process")
        timeout_s = settings.zookeeper_election_timeout_secs
        store = store_of(settings)
        try:
            for line in describe(built, store, timeout_s):
                typer.echo(line)
            if not yes:
                typer.echo(
                    f"nothing was changed; add --yes to forget {'everything' if everything else 'the positions'}"
                )
                return
            if everything:
                typer.echo(reset_everything(built, store, timeout_s, settings.for_components()))
                return
            txid = reset_positions(built, store, timeout_s)
            typer.echo(
                f"positions forgotten; transaction {txid} will start where the source's policy for a first start says"
            )
        finally:
            store.close()
            for state in built.states:
                state.close()
    except RatchetError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_MISUSED if isinstance(error, (ConfigError, TopologyError)) else EXIT_FAILED) from None


def describe(topology: Topology, store: CoordinationStore, timeout_s: float = ELECTION_TIMEOUT_S) -> list[str]:
    """What there is: the next txid, the positions, the sinks."""
    try:
        with leadership_of(topology, store, timeout_s) as leadership:
            recovered, _ = TopologyDocuments(store, leadership, topology).recover()
    except CorruptStateError as error:
        return [f"topology {topology.id!r}: its state cannot be read: {error}"]
    last = recovered.plans.get(recovered.currtx - 1, {})
    return [
        f"topology {topology.id!r}: transaction {recovered.currtx} is next",
        *(f"  {partition}: {dict(meta)}" for partition, meta in sorted(last.items())),
        *(f"  sink: {state.location}" for state in topology.states),
    ]


def reset_everything(
    topology: Topology,
    store: CoordinationStore,
    timeout_s: float = ELECTION_TIMEOUT_S,
    conf: Mapping[str, Any] | None = None,
) -> str:
    """Empty every state, let the other committers begin anew, then forget all documents but the epoch: what comes is another
    incarnation. Raises ``ConfigError`` when a driver still leads after ``timeout_s``, or for a state that cannot be emptied.
    A crash in between leaves sinks that no longer fit ZooKeeper, and no driver starts on them: run it again."""
    with leadership_of(topology, store, timeout_s) as leadership:
        standing = Standing(new_incarnation(), leadership.epoch, 1)
        for state in topology.states:
            state.clear(topology.id)
        for bolt, context in committers_elsewhere(topology, conf or {}):
            bolt.renew_written(conf or {}, context, standing)
        forget_everything(store, leadership, topology.id, standing.incarnation)
    return f"everything forgotten, {len(topology.states)} sinks emptied; the next run starts with transaction 1"


if __name__ == "__main__":
    app()
