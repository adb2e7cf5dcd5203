"""``ratchet verify MODULE:TOPOLOGY``: recomputes a topology's sinks from its source."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer

from framework.commands.exit_status import EXIT_DIFFERS, EXIT_FAILED, exit_codes, own_output
from framework.commands.loading import opened_archive, opened_transactional
from framework.commands.options import AsJson, ConfigFile, Overrides, TopologyName
from framework.commands.value_format import json_able
from framework.inspect.full_recomputation import Unverifiable
from framework.inspect.verify import verify
from framework.observe import configure_logging

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    topology: TopologyName,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Recompute a topology's sinks from its source and report every key that differs. Exit status:
    0 all agree, 3 some differ, 1 the answer cannot be known."""
    configure_logging(level="warning")
    with exit_codes(), own_output(as_json=as_json):
        try:
            with (
                opened_transactional(topology, config, overrides) as (built, store, settings),
                opened_archive(settings, built.id) as archive,
            ):
                report = verify(built, store, settings.for_components(), archive=archive)
        except Unverifiable as error:
            typer.echo(f"unverifiable: {error}", err=True)
            raise typer.Exit(EXIT_FAILED) from None
    if as_json:
        typer.echo(json.dumps(json_able({"type": "verify", **asdict(report), "right": report.right}), default=str))
    else:
        for line in report.lines():
            typer.echo(line)
    raise typer.Exit(0 if report.right else EXIT_DIFFERS)
