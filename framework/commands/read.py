"""``ratchet read MODULE:TOPOLOGY [STATE ...]``: shows the rows of states as of one transaction."""

from __future__ import annotations

import base64
import datetime
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import IO, Annotated, Any

import typer

from framework.commands.exit_status import exit_codes, own_output
from framework.commands.loading import opened_transactional
from framework.commands.options import AsJson, ConfigFile, Overrides, TopologyName
from framework.commands.value_format import json_able, printable, shortened
from framework.errors import ConfigError, escaped
from framework.inspect.state_snapshots import Snapshot, StateSnapshot, read
from framework.observe import configure_logging

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    topology: TopologyName,
    states: Annotated[
        list[str] | None,
        typer.Argument(metavar="[STATE]...", help="Bolts that keep a state, or locations of states; by default all."),
    ] = None,
    *,
    keys: Annotated[
        list[str] | None,
        typer.Option("--key", help="Only this key of a single state; a JSON array if it has several columns."),
    ] = None,
    as_of: Annotated[
        int | None, typer.Option("--as-of", min=1, metavar="TXID", help="This transaction instead of the newest.")
    ] = None,
    files: Annotated[
        bool, typer.Option("--files", help="For tables of files: list the files, which any engine can read.")
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV with a header, of a single state.")] = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show the rows of one or several states, all as of the same transaction: the newest that all
    of them hold, or --as-of. A row contains its value and the previous one, so --as-of reaches one
    transaction back for rows that have changed since; tables of files reach back until they are
    compacted. Writes nothing; a driver may run meanwhile."""
    configure_logging(level="warning")
    with exit_codes(), own_output(as_json=as_json or as_csv) as output:
        if as_csv and (as_json or files):
            raise ConfigError("--csv is another form of the rows: leave --json or --files out")
        with (
            opened_transactional(topology, config, overrides) as (built, store, _),
            read(built, as_of=as_of, states=states or (), keys=keys, store=store, files_only=files) as found,
        ):
            if as_json:
                _print_json(built.id, found, output, files=files)
                return
            if as_csv and len(found.states) > 1:
                raise ConfigError(f"--csv writes one state: name {' or '.join(each.name for each in found.states)}")
            typer.echo(f"as of transaction {found.txid}", err=True)
            for name, why in found.left_out.items():
                typer.echo(f"left out: {name}: {why}", err=True)
            if as_csv:
                _print_csv(found.states[0], output)
            elif files:
                for path in (each.path for state in found for each in state.files()):
                    typer.echo(path, file=output)
            else:
                for line in (line for state in found for line in _lines(state)):
                    typer.echo(line, file=output)


def _lines(state: StateSnapshot) -> Iterator[str]:
    yield f"{state.name} ({state.location}): {state.row_count:,} {'row' if state.row_count == 1 else 'rows'}"
    for row in _rows(state):
        yield printable("  " + ", ".join(f"{name}={shortened(value)}" for name, value in row.items()))


def _rows(state: StateSnapshot) -> Iterator[Mapping[str, Any]]:
    for batch in state.batches():
        for start in range(0, batch.num_rows, 1_000):
            yield from batch.slice(start, 1_000).to_pylist()


def _print_csv(state: StateSnapshot, output: IO[str]) -> None:
    """Null is an empty field, and an empty text is a pair of quotes. Terminal control characters
    are escaped on a terminal, but not in a file."""
    for cells in itertools.chain([state.schema.names], (row.values() for row in _rows(state))):
        line = ",".join(map(_cell, cells))
        typer.echo(escaped(line) if output.isatty() else line, file=output)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = _plain(value)
    return text if isinstance(value, (bool, int, float)) else '"' + text.replace('"', '""') + '"'


def _print_json(topology_id: str, found: Snapshot, output: IO[str], *, files: bool) -> None:
    def show(kind: str, **document: Any) -> None:
        typer.echo(json.dumps({"type": kind, **document}, default=_plain), file=output)

    states = [{"state": each.name, "location": each.location, "rows": each.row_count} for each in found]
    show("read", topology=topology_id, txid=found.txid, states=states, left_out=found.left_out)
    for state in found:
        if files:
            for each in state.files():
                show(
                    "file",
                    state=state.name,
                    path=str(each.path),
                    rows=each.rows,
                    bytes=each.size,
                    partition=each.partition,
                )
        else:
            for row in _rows(state):
                show("row", state=state.name, row=json_able(row))


def _plain(value: Any) -> str:
    """Moments as ISO 8601, bytes as base64, other values as text."""
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    return str(value)
