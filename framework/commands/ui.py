"""``ratchet ui``: a web page of all topologies under a ZooKeeper root, from any process and
host."""

from __future__ import annotations

from typing import Annotated

import typer

from framework.commands.exit_status import exit_codes
from framework.commands.foreground_run import stop_on_signal
from framework.commands.options import ConfigFile, Overrides
from framework.commands.topologies import opened
from framework.config import Config

#: The default port of the page.
PORT = 8470
_POLL_S = 0.2

app = typer.Typer(pretty_exceptions_enable=False)


@app.command("ui")
def serve(
    port: Annotated[
        int | None,
        typer.Option("--port", min=1, max=65_535, help=f"The port of the page; by default ui.port, or {PORT}."),
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Serve a web page that shows every topology under transactional.zookeeper.root, until Ctrl-C.
    It changes nothing. ui.host, ui.token and ui.tls.* control the access."""
    with exit_codes():
        settings = Config.load(config, overrides or ())
        # an optional extra, and only this command needs it
        from framework.ui.server import serve_page
        from framework.ui.sources.root import RootSource

        chosen = port or settings.ui_port or PORT
        with stop_on_signal("stopping\n") as stopped, opened(config, overrides) as store:
            stop = serve_page(RootSource(store, settings.zookeeper_root), settings, chosen)
            address = settings.model_copy(update={"ui_port": chosen}).ui_address
            typer.echo(f"{address} shows the topologies under {settings.zookeeper_root} (Ctrl-C ends it)")
            try:
                while not stopped.wait(_POLL_S):
                    pass
            finally:
                stop()
