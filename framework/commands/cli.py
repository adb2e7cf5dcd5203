"""``ratchet``: all commands under one name. Each is imported on first use, so that ``ratchet list``
does not wait for Spark's modules, and so that the framework refers to commands of sinks and servers
only by name. Other packages add commands by entry points."""

from __future__ import annotations

import io
import platform
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from framework.clients.java import java_version
from framework.commands.exit_status import exit_codes
from framework.errors import ConfigError
from framework.extensions import COMMANDS as ADDED
from framework.extensions import added, summaries

#: Command -> its module, and its description in one line.
COMMANDS = {
    "run": ("framework.commands.run:app", "Run a topology."),
    "ingest": ("ratchet.ingest_command:app", "Bring a topic into a table, without code."),
    "check": ("framework.commands.check:app", "Find problems before a topology runs."),
    "describe": ("framework.commands.describe:app", "Show the components of a topology."),
    "list": ("framework.commands.topologies:list_app", "Show all topologies and their status."),
    "status": ("framework.commands.topologies:status_app", "Show the status of one topology."),
    "history": ("framework.commands.topologies:history_app", "Show the last transactions of a topology."),
    "set": ("framework.commands.set:app", "Change the pace of a topology while it runs."),
    "ui": ("framework.commands.ui:app", "Show all topologies in a browser."),
    "verify": ("framework.commands.verify:app", "Recompute the sinks from the source, and compare."),
    "read": ("framework.commands.read:app", "Show the rows of sinks, as of one transaction."),
    "explain": ("framework.commands.explain:app", "Show which records made a value in a sink."),
    "replay": ("framework.commands.replay:app", "Repeat a transaction in this process, and compare."),
    "find-poison": ("framework.commands.find_poison:app", "Find the records that make a batch fail."),
    "schema": ("framework.commands.schema:app", "Compare tables with a topology, and add missing columns."),
    "dead-letters": ("framework.commands.dead_letters:app", "List, show, replay and drop refused records."),
    "simulate": ("framework.commands.simulate:app", "Find faults that break exactly-once in your code."),
    "undo": ("framework.commands.undo:app", "Take back the newest transaction."),
    "rebuild": ("framework.commands.rebuild:app", "Recompute a state from the source."),
    "reset": ("framework.commands.reset:app", "Forget positions, or everything."),
    "state": ("framework.commands.state:app", "Read, save and restore the state of stateful bolts."),
    "compact": ("sinks.compact:app", "Merge the small files of a table."),
    "new": ("framework.commands.new:app", "Create a working project."),
    "topic": ("spouts.kafka.topic_command:app", "Create a topic, write to it, show its last records."),
    "servers": ("integration.servers_command:app", "Run real servers for development: up, down, status."),
    "config": ("framework.commands.settings_reference:config_app", "Explain the configuration keys."),
    "metrics": ("framework.commands.settings_reference:metrics_app", "Explain the metrics."),
}


def _own(name: str) -> Any:
    module, _, attribute = COMMANDS[name][0].partition(":")
    return getattr(import_module(module), attribute)


def _added(name: str) -> Any:
    """A command of another package; None if there is none. Raises ``ConfigError``."""
    found = added(ADDED, name)
    if found is not None and not isinstance(found, typer.Typer):
        raise ConfigError(
            f"the command {name!r} of another package is a {type(found).__name__}: it must be a typer.Typer"
        )
    return found


class _Commands(TyperGroup):
    """A group whose commands are imported on use."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS, *(name for name in summaries(ADDED) if name not in COMMANDS)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        with exit_codes():  # handles Ctrl-C during the import
            found = _own(cmd_name) if cmd_name in COMMANDS else _added(cmd_name)
        if found is None:
            return None
        command = typer.main.get_command(found)
        command.name = cmd_name
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Shows the table above, so that the help imports no command."""
        formatter.write_usage("ratchet", "[OPTIONS] COMMAND [ARGS]...")
        formatter.write_paragraph()
        formatter.write_text("Exactly-once Kafka pipelines in Python, executed by Spark.")
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])
        others = [each for each in summaries(ADDED).items() if each[0] not in COMMANDS]
        if others:
            with formatter.section("Commands of other packages"):
                formatter.write_dl(others)
        with formatter.section("Options"):
            formatter.write_dl([record for each in self.get_params(ctx) if (record := each.get_help_record(ctx))])
        formatter.write_paragraph()
        formatter.write_text(
            "Exit status: 0 done, 1 failed, 2 misused, 3 differences found, 130 interrupted. "
            "ratchet COMMAND --help says more."
        )


app = typer.Typer(
    cls=_Commands, name="ratchet", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)


def _show_versions(wanted: bool) -> None:
    if wanted:
        for name in ("ratchet-pipelines", "pyspark", "confluent-kafka"):
            try:
                typer.echo(f"{name} {version(name)}")
            except PackageNotFoundError:
                typer.echo(f"{name} is not installed")
        typer.echo(f"python {platform.python_version()}")
        try:
            typer.echo(f"java {java_version()}")
        except ConfigError as error:
            typer.echo(f"java: {error}")
        raise typer.Exit


@app.callback()
def main(
    versions: Annotated[
        bool, typer.Option("--version", callback=_show_versions, is_eager=True, help="Show versions and exit.")
    ] = False,
) -> None:
    """Exactly-once Kafka pipelines in Python, executed by Spark."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # for characters that the terminal cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
