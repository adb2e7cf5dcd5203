"""``ratchet simulate MODULE:TOPOLOGY``: finds code of the user's that breaks exactly-once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import IO, Annotated

import typer

from framework.commands.exit_status import EXIT_DIFFERS, exit_codes, own_output
from framework.commands.loading import load_transactional
from framework.commands.options import AsJson, ConfigFile, Overrides, TopologyName
from framework.commands.value_format import json_able
from framework.config import Config
from framework.observe import configure_logging
from framework.testing.simulation.findings import Report
from framework.testing.simulation.sample_records import read_sample, sample_from_source
from framework.testing.simulation.shrinker import Progress, run_schedules
from framework.testing.simulation.simulate import RECORDS, SCHEDULES

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    topology: TopologyName,
    *,
    source: Annotated[
        Path | None,
        typer.Option(
            "--input",
            metavar="FILE",
            help="A sample of input: JSON lines, or CSV whose first line has the field names.",
        ),
    ] = None,
    records: Annotated[
        int, typer.Option("--records", min=1, help="Without --input: how many to read from the topology's source.")
    ] = RECORDS,
    schedules: Annotated[int, typer.Option("--schedules", min=1, help="How many schedules to try.")] = SCHEDULES,
    seed: Annotated[
        int, typer.Option("--seed", help="The seed of the first schedule; each next one is higher by one.")
    ] = 0,
    connect: Annotated[bool, typer.Option("--connect", help="Let your code open connections, for look-ups.")] = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Run your bolts and committers in this process over a sample of input, while workers and
    drivers die, answers are lost, and tasks run late or twice. Shows faults that break
    exactly-once, each with the shortest schedule. States are copies; nothing is written. Exit
    status: 0 no fault was found, 3 a fault was found. Prints of your code are shown with
    --schedules 1."""
    configure_logging(level="warning")
    with exit_codes(as_json=as_json), own_output(as_json=as_json) as output:
        settings = Config.load(config, overrides or ())
        built = load_transactional(topology, settings)
        try:
            if source is not None:
                sample = read_sample(built, source)
            else:
                sample = sample_from_source(built, settings.for_components(), records)
            with _unheard(schedules):
                report = run_schedules(
                    built,
                    sample,
                    settings,
                    schedules=schedules,
                    seed=seed,
                    connect=connect,
                    progress=_progress(schedules) if not as_json else None,
                )
        finally:
            for state in built.states:
                state.close()
        again = f"ratchet simulate {topology} " + (
            f"--input {source}" if source is not None else f"--records {records}"
        )
        _print(report, again, output, as_json=as_json)
    raise typer.Exit(EXIT_DIFFERS if report.findings else 0)


@contextmanager
def _unheard(schedules: int) -> Iterator[None]:
    """Drop prints of user code, unless there is only one schedule: they would be repeated hundreds
    of times."""
    if schedules == 1:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        yield


def _progress(schedules: int) -> Progress | None:
    """A terminal line that counts the schedules."""
    if not sys.stderr.isatty():
        return None

    def told(done: int) -> None:
        end = os.linesep if done == schedules else ""
        typer.echo(f"\r{done:,} of {schedules:,} schedules{end}", nl=False, err=True)

    return told


def _print(report: Report, again: str, output: IO[str], *, as_json: bool) -> None:
    if as_json:
        for document in (*(each.document() for each in report.findings), report.document()):
            typer.echo(json.dumps(json_able(document), default=str), file=output)
        return
    for line in report.lines():
        typer.echo(line, file=output)
    for each in report.findings[:1]:
        typer.echo(f"again: {again} --seed {each.seed} --schedules 1", file=output)
