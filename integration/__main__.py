"""``python -m integration up | down | status``: real servers for development."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from integration.errors import ServerError
from integration.servers import DEFAULT_FOLDER, down, read_state, up

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
Folder = Annotated[Path, typer.Option("--dir", help="Work folder: data, logs, addresses.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Port = Annotated[int | None, typer.Option(min=1, max=65535, help="A fixed port; any free one by default.")]


@app.command("up")
def up_command(
    folder: Folder = DEFAULT_FOLDER,
    kafka_port: Port = None,
    zookeeper_port: Port = None,
    as_json: AsJson = False,
) -> None:
    """Start Kafka and ZooKeeper, and leave them running until `down`."""
    try:
        state = up(
            folder,
            kafka_port=kafka_port,
            zookeeper_port=zookeeper_port,
            progress=lambda line: typer.echo(line, err=True),
        )
    except ServerError as error:
        _fail(error)
    _show(state, as_json)


@app.command("down")
def down_command(folder: Folder = DEFAULT_FOLDER) -> None:
    """Stop what `up` started. Data stays."""
    try:
        stopped = down(folder)
    except ServerError as error:
        _fail(error)
    typer.echo("stopped" if stopped else f"nothing runs in {folder}")


@app.command("status")
def status_command(folder: Folder = DEFAULT_FOLDER, as_json: AsJson = False) -> None:
    """Say what runs, and where; exit code 1 when nothing does."""
    try:
        state = read_state(folder.absolute())
    except ServerError as error:
        _fail(error)
    if state is None:
        typer.echo("{}" if as_json else f"nothing runs in {folder}")
        raise typer.Exit(1)
    _show(state, as_json)


def _show(state: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(state))
        return
    typer.echo(f"kafka      {state['kafka']}   (pid {state['pids']['kafka']})")
    typer.echo(f"zookeeper  {state['zookeeper']}   (pid {state['pids']['zookeeper']})")
    for log in state["logs"]:
        typer.echo(f"log        {log}")


def _fail(error: ServerError) -> None:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    app()
