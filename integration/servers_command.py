"""``ratchet servers up | down | status | images``: real servers for development, and images
for containers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from integration.detached_servers import DEFAULT_FOLDER, down, up
from integration.errors import ServerError
from integration.kafka_and_zookeeper import Shape, read_state
from integration.prometheus import RULES, TARGET

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
Folder = Annotated[Path, typer.Option("--dir", help="Work folder: data, logs, addresses.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Port = Annotated[
    int | None, typer.Option(min=1, max=65535, help="A fixed port (of the first server); any free one by default.")
]


@app.command("up")
def up_command(
    folder: Folder = DEFAULT_FOLDER,
    *,
    kafka_port: Port = None,
    zookeeper_port: Port = None,
    brokers: Annotated[int, typer.Option(min=1, max=9, help="Kafka brokers.")] = 1,
    zookeepers: Annotated[int, typer.Option("--zookeepers", min=1, max=9, help="ZooKeeper servers.")] = 1,
    spark_workers: Annotated[int, typer.Option(min=0, max=9, help="Workers of a standalone Spark cluster.")] = 0,
    observe: Annotated[
        bool, typer.Option("--observe", help="A Prometheus too, and a Grafana if it is installed.")
    ] = False,
    scrape: Annotated[
        list[str] | None,
        typer.Option("--scrape", metavar="HOST:PORT", help=f"A driver that it watches; by default {TARGET}."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Start Kafka and ZooKeeper, on request a Spark cluster and Prometheus too. They run until
    `down`."""
    try:
        state = up(
            folder,
            kafka_port=kafka_port,
            zookeeper_port=zookeeper_port,
            shape=Shape(brokers, zookeepers),
            spark_workers=spark_workers,
            scraped=[*(scrape or [TARGET])] if observe else [],
            progress=_progress,
        )
    except ServerError as error:
        _fail(error)
    _show(state, as_json)
    if observe and not as_json:
        if not state.get("prometheus"):
            _progress("these servers were started without --observe: down and up again")
        elif not RULES.is_file():
            _progress("no alert rules: they are in deploy/prometheus of Ratchet's repository")
        if not state.get("grafana"):
            _progress("Grafana is not installed here, nor in Debian: import deploy/grafana/ratchet.json into yours")


@app.command("down")
def down_command(folder: Folder = DEFAULT_FOLDER) -> None:
    """Stop the servers that `up` started. The data stays."""
    try:
        stopped = down(folder)
    except ServerError as error:
        _fail(error)
    typer.echo("stopped" if stopped else f"nothing runs in {folder}")


@app.command("status")
def status_command(folder: Folder = DEFAULT_FOLDER, as_json: AsJson = False) -> None:
    """Show the running servers and their addresses. Exit code 1 if none runs."""
    try:
        state = read_state(folder.absolute())
    except ServerError as error:
        _fail(error)
    if state is None:
        typer.echo(json.dumps({"type": "servers", "running": False}) if as_json else f"nothing runs in {folder}")
        raise typer.Exit(1)
    _show(state, as_json)


@app.command("images")
def images_command() -> None:
    """Get an image for every kind of server: pull it or, if that fails, build it here."""
    # imported here because only containers need its packages
    from integration.images import IMAGES, find_image

    try:
        for kind in IMAGES:
            typer.echo(f"{kind:<10} {find_image(kind, _progress)}")
    except ServerError as error:
        _fail(error)


def _progress(line: str) -> None:
    typer.echo(line, err=True)


def _show(state: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"type": "servers", "running": True, **state}))
        return
    for kind in ("kafka", "zookeeper", "spark", "prometheus", "grafana"):
        if state.get(kind):
            pids = ", ".join(str(pid) for name, pid in state["pids"].items() if name.startswith(kind))
            typer.echo(f"{kind:<10} {state[kind]}   (pid {pids})")
    if state.get("spark_secret"):
        typer.echo(f"secret     spark.authenticate.secret is in {state['spark_secret']}")
    for log in state["logs"]:
        typer.echo(f"log        {log}")


def _fail(error: ServerError) -> None:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(2)
