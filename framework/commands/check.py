"""``ratchet check MODULE:TOPOLOGY``: every check that is possible before Spark starts."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from framework.commands.exit_status import EXIT_FAILED, exit_codes, own_output
from framework.commands.loading import load_topology
from framework.commands.options import AsJson, ConfigFile, Overrides, TopologyName
from framework.config import Config
from framework.execution.executor_name import SPARK
from framework.observe import configure_logging
from framework.preflight import preflight

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def main(
    topology: TopologyName,
    *,
    config: ConfigFile = None,
    overrides: Overrides = None,
    executor: Annotated[str, typer.Option("--executor", help="As in ratchet run: spark or local.")] = SPARK,
    accept_changed: Annotated[
        bool, typer.Option("--accept-changed-topology", help="As in ratchet run: accept a changed shape.")
    ] = False,
    sample: Annotated[
        int, typer.Option("--sample", min=0, help="Also read and decode this many records of the source.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Check Java, the topology, ZooKeeper, the source and the sinks. Report each problem and its
    remedy. Changes nothing. Exit status: 1 when there is a problem."""
    configure_logging(level="error")
    with exit_codes(), own_output(as_json=as_json) as out:
        settings = Config.load(config, overrides or ())
        built = load_topology(topology, settings)
        failed = 0
        for finding in preflight(built, settings, executor, accept_changed, sample=sample):
            failed += finding.error is not None
            if as_json:
                document = {
                    "type": "check",
                    "subject": finding.subject,
                    "ok": finding.error is None,
                    "text": finding.text,
                }
                typer.echo(json.dumps(document), file=out)
            else:
                sign = typer.style("✗", fg="red") if finding.error is not None else typer.style("✓", fg="green")
                typer.echo(f"{sign} {finding.subject:<20} {finding.text}", file=out)
    raise typer.Exit(EXIT_FAILED if failed else 0)
