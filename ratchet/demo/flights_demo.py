"""The demo of ``make run``: real servers, 336,776 real flights, and a comparison of the result with
the source file."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from rich.console import Console
from rich.table import Table

from framework import Config, submit
from framework.commands.foreground_run import stop_on_signal, supervise
from framework.local_paths import local_path
from integration import EmbeddedServers, ServerError
from ratchet.demo import flights_data
from ratchet.demo.flights import TOPIC, topology

FOLDER = Path(".ratchet/demo")


def main(config: Config, *, json_lines: bool = False) -> int:
    """Run the demo. Returns the exit code. After an interruption, the next run continues from the
    last commit."""
    console = Console(stderr=json_lines)
    folder = local_path(str(config.app.get("app.folder", FOLDER)), "app.folder:").absolute()
    try:
        with stop_on_signal() as stopped:
            servers = EmbeddedServers(folder / "servers", progress=lambda line: console.print(line, highlight=False))
            with servers:
                console.print(
                    f"Kafka at {servers.bootstrap_servers}, ZooKeeper at {servers.zookeeper}, logs in {folder}"
                )
                sent = flights_data.load(servers.bootstrap_servers, TOPIC)
                state = f"sent {sent:,} flights to" if sent else f"all {flights_data.FLIGHTS:,} flights are in"
                console.print(f"{state} the Kafka topic {TOPIC!r}")
                if stopped.is_set():
                    return 130
                finished = _run(config, servers, folder, stopped, json_lines=json_lines)
                if not finished:
                    console.print("stopped before the end; run again to go on from here")
                    return 130
                return compare(console, folder / "flights.db")
    except ServerError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def _run(config: Config, servers: EmbeddedServers, folder: Path, stopped: threading.Event, *, json_lines: bool) -> bool:
    """Submit the flights topology, as a user would. False when a signal ended it early."""
    app = {"app.kafka": servers.bootstrap_servers, "app.database": str(folder / "flights.db"), **config.app}
    settings = config.model_copy(
        update={
            "zookeeper_servers": (servers.zookeeper,),
            "zookeeper_session_timeout_secs": min(config.zookeeper_session_timeout_secs, 6.0),
            "spout_pending": max(config.max_spout_pending, 2),
            "app": app,
        }
    )
    run = submit(topology(app), settings)
    return supervise(run, stopped, until_caught_up=True, json_stream=sys.stdout if json_lines else None)


def compare(console: Console, database: Path | str) -> int:
    """Show both sets of figures side by side, and whether they are equal: then 0, the exit code."""
    carriers, routes = flights_data.committed(database)
    wanted_carriers, wanted_routes = flights_data.expected()
    table = Table(title="flights from New York, 2013, per carrier", caption=f"in table 'carriers' of {database}")
    for heading in ("carrier", "flights", "total delay (min)", "max delay (min)", "cancelled", "file says"):
        table.add_column(heading, justify="left" if heading == "carrier" else "right")
    for carrier in sorted({*carriers, *wanted_carriers}):
        row, wanted = carriers.get(carrier), wanted_carriers.get(carrier)
        shown = [f"{value:,}" if value is not None else "" for value in (row or (None,) * 4)]
        table.add_row(carrier, *shown, "the same" if row == wanted else f"DIFFERS: {wanted}")
    console.print(table)
    busiest = sorted(routes.items(), key=lambda each: -each[1])[:5]
    console.print("busiest routes: " + ", ".join(f"{route} {flights:,}" for route, flights in busiest))
    same = carriers == wanted_carriers and routes == wanted_routes
    console.print(
        f"{len(carriers)} carriers and {len(routes)} routes, {sum(routes.values()):,} flights: "
        + ("exactly the figures of the CSV file" if same else "NOT the figures of the CSV file")
    )
    return 0 if same else 1
