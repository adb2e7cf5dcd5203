"""``ratchet schema``: the columns of a topology's tables, and the statements that would make the
tables fit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Annotated

import typer

from framework.commands.exit_status import EXIT_DIFFERS, exit_codes, own_output
from framework.commands.loading import load_transactional
from framework.commands.options import AsJson, ConfigFile, Overrides, TopologyName, Yes
from framework.commands.text_tables import in_columns
from framework.config import Config
from framework.errors import ConfigError, escaped
from framework.inspect.state_by_name import state_named
from framework.observe import configure_logging
from framework.topology import Topology
from framework.topology.table_schema_diff import TableSchema, TableWithSchema

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Compare the columns of tables with those that a topology declares, and add missing ones.",
)

Tables = Annotated[
    list[str] | None,
    typer.Argument(metavar="[STATE]...", help="Committers, or where their tables are; by default all tables."),
]


@app.command("show")
def show(
    topology: TopologyName,
    states: Tables = None,
    *,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show the columns of each table: the type that the topology declares, and the type in the
    database. A dash: the topology does not write the column, or the table lacks it."""
    with _opened(topology, states, config, overrides, as_json=as_json) as (_, tables, output):
        for location, table in tables.items():
            columns = table.table_schema().columns
            if as_json:
                found = [{"name": each.name, "declared": each.declared, "held": each.held} for each in columns]
                typer.echo(json.dumps({"type": "schema", "location": location, "columns": found}), file=output)
                continue
            typer.echo(escaped(location), file=output)
            rows = [("column", "declared", "in the table")]
            rows += [(each.name, each.declared or "-", each.held or "-") for each in columns]
            for line in in_columns(rows):
                typer.echo(escaped(f"  {line}"), file=output)


@app.command("diff")
def diff(
    topology: TopologyName,
    states: Tables = None,
    *,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print the statements that give each table what it lacks. Changes nothing. Exit status: 3 when
    there are any."""
    with _opened(topology, states, config, overrides, as_json=as_json) as (_, tables, output):
        found = [_print(location, table.table_schema(), output, as_json) for location, table in tables.items()]
    raise typer.Exit(EXIT_DIFFERS if any(found) else 0)


@app.command("apply")
def apply(
    topology: TopologyName,
    states: Tables = None,
    *,
    config: ConfigFile = None,
    overrides: Overrides = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Run the statements that ``diff`` prints, and create the tables of Ratchet beside each table:
    the topology then starts with the rights to read and write rows only."""
    with _opened(topology, states, config, overrides, as_json=as_json) as (built, tables, output):
        for location, table in tables.items():
            _print(location, table.apply_schema(built.id) if yes else table.table_schema(), output, as_json)
        if not yes:
            typer.echo("nothing was changed; add --yes to change it", err=True)


def _print(location: str, schema: TableSchema, output: IO[str], as_json: bool) -> bool:
    """Print what a table lacks. Returns whether it lacks anything."""
    if as_json:
        document = {"type": "schema_diff", "location": location, "statements": schema.statements}
        typer.echo(json.dumps(document), file=output)
    else:
        typer.echo(escaped(f"-- {location}: {'lacks nothing' if not schema.statements else 'lacks'}"), file=output)
        for each in schema.statements:
            typer.echo(escaped(f"{each};"), file=output)
    return bool(schema.statements)


@contextmanager
def _opened(
    name: str, states: list[str] | None, config: Path | None, overrides: list[str] | None, *, as_json: bool
) -> Iterator[tuple[Topology, dict[str, TableWithSchema], IO[str]]]:
    """A topology, its tables by location, and where to write. ``states``: only these tables."""
    configure_logging(level="warning")
    with exit_codes(), own_output(as_json=as_json) as output:
        topology = load_transactional(name, Config.load(config, overrides or ()))
        found = [state_named(topology, each) for each in states or ()]
        chosen = [component.states[number] for component, number in found] or topology.states
        tables: dict[str, TableWithSchema] = {
            each.location: each for each in chosen if isinstance(each, TableWithSchema)
        }
        others = [each.location for each in chosen if each.location not in tables]
        if others and states:
            raise ConfigError(f"{others[0]} has no columns of yours: name a table of an append or upsert committer")
        if not tables:
            raise ConfigError(f"topology {topology.id!r} writes no table of rows: its sinks have fixed columns")
        try:
            yield topology, tables, output
        finally:
            for state in topology.states:
                with suppress(OSError):
                    state.close()
