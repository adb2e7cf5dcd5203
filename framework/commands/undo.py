"""``ratchet undo MODULE:TOPOLOGY``: takes back the newest committed transaction."""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated

import typer

from framework.commands.exit_status import exit_codes
from framework.commands.loading import opened_transactional
from framework.commands.options import ConfigFile, Overrides, TopologyName, Yes
from framework.errors import ConfigError
from framework.observe import configure_logging
from framework.transactions.undo import describe_undo, undo

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    topology: TopologyName,
    *,
    config: ConfigFile = None,
    overrides: Overrides = None,
    yes: Yes = False,
    skip_records: Annotated[
        str,
        typer.Option(
            "--skip-records", metavar="PARTITION/OFFSET,...", help="Leave these records out of the batch that follows."
        ),
    ] = "",
) -> None:
    """Take back the newest committed transaction in every sink, and restore the positions: the next
    run processes its records again. Works only once in a row, while no driver runs, and if every
    sink keeps previous values."""
    configure_logging(level="warning")
    with exit_codes(), opened_transactional(topology, config, overrides) as (built, store, settings):
        leave_out = _records(skip_records)
        timeout_s = settings.zookeeper_election_timeout_secs
        if yes:
            txid = undo(built, store, timeout_s, leave_out=leave_out, conf=settings.for_components())
            others = ", but for those that are left out" if leave_out else ""
            typer.echo(f"transaction {txid} is taken back; the next run processes its records again{others}")
            return
        for line in describe_undo(built, store, timeout_s, leave_out=leave_out, conf=settings.for_components()):
            typer.echo(line)
        typer.echo("nothing was changed; add --yes to take it back")


def _records(text: str) -> dict[str, list[int]]:
    """Parse ``orders/3/17,orders/3/18`` to partition -> offsets. Raises ``ConfigError``."""
    found = defaultdict[str, list[int]](list)
    for each in filter(None, map(str.strip, text.split(","))):
        partition, _, offset = each.rpartition("/")
        if not partition or not offset.isdecimal():
            raise ConfigError(f"--skip-records: {each!r} is no record: write partition/offset, such as orders/3/17")
        found[partition].append(int(offset))
    return dict(found)
