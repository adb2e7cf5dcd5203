"""``python -m framework.verify MODULE:TOPOLOGY``: recomputes a topology's sinks from its source."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from framework.commands.exits import EXIT_FAILED, exit_codes
from framework.commands.loading import opened_transactional
from framework.observe import configure_logging
from framework.transactions.audit import Unverifiable, verify

EXIT_UNVERIFIABLE = 3

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    topology: Annotated[str, typer.Argument(metavar="MODULE:TOPOLOGY", help="What to verify.")],
    config: Annotated[Path | None, typer.Option("--config", help="A TOML file of configuration keys.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The report as one JSON document.")] = False,
) -> None:
    """Recompute a topology's sinks from its source and report every key that differs. Exit status: 0 all agree, 1 some
    differ, 3 unverifiable."""
    configure_logging(level="warning")
    with exit_codes():
        try:
            with opened_transactional(topology, config, overrides) as (built, store, settings):
                report = verify(built, store, settings.for_components())
        except Unverifiable as error:
            typer.echo(f"unverifiable: {error}", err=True)
            raise typer.Exit(EXIT_UNVERIFIABLE) from None
    if as_json:
        typer.echo(json.dumps({**asdict(report), "right": report.right}, default=str))
    else:
        for line in report.lines():
            typer.echo(line)
    raise typer.Exit(0 if report.right else EXIT_FAILED)
