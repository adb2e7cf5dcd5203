"""``ratchet rebuild MODULE:TOPOLOGY STATE``: recomputes a state from the source, and replaces the
present rows."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from framework.commands.exit_status import EXIT_DIFFERS, EXIT_FAILED, exit_codes, own_output
from framework.commands.loading import opened_archive, opened_transactional
from framework.commands.options import AsJson, ConfigFile, Overrides, TopologyName, Yes
from framework.commands.value_format import json_able
from framework.inspect.full_recomputation import Unverifiable
from framework.inspect.rebuild import RebuildProgress, RebuildReport, clean, rebuild
from framework.observe import configure_logging

#: Seconds from one line of progress to the next.
PROGRESS_S = 2.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    topology: TopologyName,
    state: Annotated[str, typer.Argument(help="The bolt that keeps the state, or the state's location.")],
    *,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
    remove: Annotated[
        bool,
        typer.Option("--clean", help="Remove the rows that the last rebuild replaced, and those of an unfinished one."),
    ] = False,
) -> None:
    """Process the whole source again, with the present code, into new rows, and compare them with
    the state. A driver may run meanwhile. With --yes the new rows replace the old ones in one step;
    the old ones are kept until --clean. An interrupted rebuild continues when the command is
    repeated. Exit status: 0 they agree, or the new rows are in place; 3 they differ; 1 the source
    no longer has its first records."""
    configure_logging(level="warning")
    with exit_codes(), own_output(as_json=as_json) as output:
        try:
            with (
                opened_transactional(topology, config, overrides) as (built, store, settings),
                opened_archive(settings, built.id) as archive,
            ):
                timeout_s = settings.zookeeper_election_timeout_secs
                if remove:
                    removed = clean(built, store, state, timeout_s)
                    shown = [f"removed: {place}" for place in removed] or ["there was nothing to remove"]
                    for line in [json.dumps({"type": "cleaned", "removed": removed})] if as_json else shown:
                        typer.echo(line, file=output)
                    return
                conf = settings.for_components()
                found = rebuild(
                    built,
                    store,
                    conf,
                    state=state,
                    take_over=yes,
                    told=_Progress().show,
                    timeout_s=timeout_s,
                    archive=archive,
                )
        except Unverifiable as error:
            typer.echo(f"cannot be rebuilt: {error}", err=True)
            raise typer.Exit(EXIT_FAILED) from None
        lines = [json.dumps(json_able({"type": "rebuild", **asdict(found)}), default=str)] if as_json else _lines(found)
        for line in lines:
            typer.echo(line, file=output)
    differs = found.former is None and found.difference is not None and found.difference.difference_count
    raise typer.Exit(EXIT_DIFFERS if differs else 0)


class _Progress:
    def __init__(self) -> None:
        self._next_s = time.monotonic() + PROGRESS_S

    def show(self, progress: RebuildProgress) -> None:
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + PROGRESS_S
        rate = progress.records / max(progress.seconds, 1e-9)
        typer.echo(
            f"rebuilt to transaction {progress.txid:,} of {progress.committed_txid:,}: {progress.records:,} records, {rate:,.0f} a "
            "second",
            err=True,
        )


def _lines(found: RebuildReport) -> Iterator[str]:
    if found.resumed_at:
        yield f"went on from transaction {found.resumed_at:,}, which an earlier rebuild had reached"
    difference = found.difference
    if difference is not None:
        verdict = f"{difference.difference_count:,} differ" if difference.difference_count else "all agree"
        yield f"{found.location}: {difference.compared:,} keys compared with the rebuilt ones, {verdict}"
        yield from (f"  {each}" for each in difference.differences)
        if difference.difference_count > len(difference.differences):
            yield f"  and {difference.difference_count - len(difference.differences):,} more"
    if found.moved:
        yield f"  {found.moved:,} keys were changed meanwhile, and not compared"
    if found.batches:
        yield (
            f"rebuilt from {found.records:,} records in {found.batches:,} batches, {found.seconds:.1f} s, with the bolts, codecs, "
            "committers and states of this version"
        )
    for each in found.above:
        verdict = f"{each.difference_count:,} differ" if each.difference_count else "all agree"
        yield f"{each.location}, which these rows depend on: {each.compared:,} keys compared, {verdict}"
        yield from (f"  {difference}" for difference in each.differences)
    if found.below:
        told = "an exchange leaves" if found.former is None else "the exchange left"
        yield f"{told} what was sent to {', '.join(found.below)} as it is: rebuild {found.below[0]} next, and so on"
    if found.has_other_code:
        yield "the last transaction was made by other code than this: restart the topology with it, or its figures go wrong again"
    if found.former is None:
        yield "nothing was exchanged; add --yes to put the rebuilt rows in place"
    else:
        yield f"as of transaction {found.txid:,} the rebuilt rows are in place; the former ones are kept in {found.former}"
