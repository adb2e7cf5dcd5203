"""``ratchet set ID KEY=VALUE``: changes the pace of a topology, even while it runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from framework.commands.options import AsJson, ConfigFile, TopologyId
from framework.commands.topologies import opened, unknown_topology
from framework.config import Config, read_override
from framework.errors import ConfigError
from framework.transactions.commit_pace import ENDS_OF_INTERVALS, INTERVAL, PACE_KEYS, CommitPace
from framework.transactions.documents import is_transactional, read_pace, write_pace

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

#: Special values: no limit, whatever the configuration says; and the configured value.
OFF, DEFAULT = "off", "default"


@app.command()
def main(
    topology: TopologyId,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE...",
            help=f"{', '.join(PACE_KEYS)}. The value {OFF} lifts the limit, {DEFAULT} restores the configured value. Without any: "
            "show what is changed.",
        ),
    ] = None,
    config: ConfigFile = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE of the configuration.")] = None,
    as_json: AsJson = False,
) -> None:
    """Change how often a topology commits and how fast it reads. Its leader applies the change
    within seconds, and so does every later leader, until the key is set again. Needs no restart."""
    with opened(config, overrides) as store:
        if not is_transactional(store, topology):
            raise unknown_topology(store, topology)
        changed = dict(read_pace(store, topology))
        for each in settings or ():
            changed = _with(changed, each)
        if settings:
            write_pace(store, topology, changed)
        if as_json:
            typer.echo(json.dumps({"type": "pace", "topology": topology, "changed": changed}))
        elif not changed:
            typer.echo("nothing is changed: the configuration holds")
        else:
            for key, value in changed.items():
                typer.echo(f"{key} = {OFF if value is None else f'{value:g}'}")
        if changed.get(INTERVAL) is None and any(changed.get(each) for each in ENDS_OF_INTERVALS):
            typer.echo(
                f"{' and '.join(ENDS_OF_INTERVALS)} end {INTERVAL} early: set it, unless the configuration does",
                err=True,
            )


def _with(changed: Mapping[str, Any], setting: str) -> dict[str, Any]:
    key, value = read_override(setting)
    if key not in PACE_KEYS:
        raise ConfigError(
            f"{key} cannot be changed while a topology runs: only {', '.join(PACE_KEYS)}; for the others, change the "
            "configuration and start the run again"
        )
    rest = {each: held for each, held in changed.items() if each != key}
    if value == DEFAULT:
        return rest
    if value == OFF:
        return {**rest, key: None}
    return {**rest, key: CommitPace.of(Config.of({}), {key: value}).document()[key]}
