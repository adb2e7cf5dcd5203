"""``python -m framework.run``: runs a topology from the command line.

Without arguments, the demo. ``MODULE:TOPOLOGY`` names a ``Topology``, or a function that makes one: without arguments, or
with the configuration's ``app.*`` keys as its one argument.
"""

from __future__ import annotations

import importlib
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from framework.config import Config
from framework.core.run import CoreRun
from framework.errors import ConfigError, RatchetError, TopologyError
from framework.observe import ProgressLines, configure_logging
from framework.poison import find_poison
from framework.submission import Run, store_of, submit
from framework.topology import CoreTopology, Topology

#: The demo is a program like any user's; the framework knows it by name only.
DEMO = "examples.flights_demo:main"

EXIT_FAILED = 1
EXIT_MISUSED = 2
_POLL_S = 0.2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    topology: Annotated[
        str | None, typer.Argument(metavar="[MODULE:TOPOLOGY]", help="What to run; without it, the demo.")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="A TOML file of configuration keys.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE; may be repeated.")] = None,
    until_caught_up: Annotated[
        bool,
        typer.Option(
            "--until-caught-up",
            help="Stop when all that the source held at the start is committed; of a core topology, when its spouts give "
            "nothing and every tuple is acked or failed.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Progress and logs as JSON lines.")] = False,
    accept_changed: Annotated[
        bool,
        typer.Option(
            "--accept-changed-topology",
            help="Go on from the state of a topology of the same id and another shape; the difference is logged.",
        ),
    ] = False,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            help="Forget where the source was read and begin where the spout's start= says. Transaction ids go on rising and "
            "the sinks stay as they are, so records that are read again count again.",
        ),
    ] = False,
    poison: Annotated[
        bool,
        typer.Option(
            "--find-poison",
            help="Run nothing for good: narrow the batch that is due down to the records that make it fail, and show them.",
        ),
    ] = False,
    txid: Annotated[
        int | None, typer.Option("--txid", help="With --find-poison: another batch than the one due.")
    ] = None,
    standby: Annotated[
        bool,
        typer.Option("--standby", help="Leave the lead to another driver, and take over when that one is gone."),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log every transaction.")] = False,
) -> None:
    """Run a topology until it is stopped (Ctrl-C or SIGTERM), or until it has caught up."""
    configure_logging(json_lines=as_json, level="debug" if verbose else "info")
    try:
        settings = Config.load(config, overrides or ())
        if topology is None:
            raise typer.Exit(_resolve(DEMO)(settings, json_lines=as_json))
        built = load_topology(topology, settings)
        if poison:
            raise typer.Exit(_show_poison(built, settings, txid))
        run: Run | CoreRun
        if isinstance(built, CoreTopology):
            if accept_changed or fresh or standby:
                raise ConfigError(
                    f"{topology} is a core topology, which has no transactional state: --accept-changed-topology, --fresh and "
                    "--standby have no meaning for it"
                )
            run = submit(built, settings)
        else:
            run = submit(built, settings, accept_changed_topology=accept_changed, fresh=fresh, standby=standby)
        supervise(run, until_caught_up=until_caught_up, json_lines=as_json)
    except RatchetError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_MISUSED if isinstance(error, (ConfigError, TopologyError)) else EXIT_FAILED) from None


def _show_poison(topology: Topology | CoreTopology, settings: Config, txid: int | None) -> int:
    """Returns the exit status: 1 when something was found."""
    if isinstance(topology, CoreTopology):
        raise ConfigError(
            f"topology {topology.id!r} is a core topology, which has no batches: --find-poison is for those"
        )
    store = store_of(settings)
    try:
        found = find_poison(topology, store, settings.for_components(), txid)
    finally:
        store.close()
    if found is None:
        typer.echo(
            "the batch is processed without an error here: it fails in its commit phase, by chance, or for where it runs"
        )
        return 0
    for line in found.lines():
        typer.echo(line)
    return EXIT_FAILED


def load_transactional(name: str, config: Config) -> Topology:
    """As ``load_topology``. Raises ``ConfigError`` for a core topology, which has no transactional state."""
    found = load_topology(name, config)
    if isinstance(found, CoreTopology):
        raise ConfigError(
            f"{name} is a core topology, which keeps no transactional state: there is nothing to do here; the state of stateful "
            "bolts is for python -m framework.state"
        )
    return found


def load_topology(name: str, config: Config) -> Topology | CoreTopology:
    """The topology at ``MODULE:TOPOLOGY``. Raises ``ConfigError`` saying what is not there."""
    found = _resolve(name)
    if not isinstance(found, (Topology, CoreTopology)) and callable(found):
        found = found(config.app) if inspect.signature(found).parameters else found()
    if not isinstance(found, (Topology, CoreTopology)):
        raise ConfigError(f"{name} is a {type(found).__name__}: name a Topology (what build() returns) or a function")
    return found


def supervise(run: Run | CoreRun, *, until_caught_up: bool, json_lines: bool = False) -> bool:
    """Show progress until the run ends, is stopped by a signal, or has caught up: True, unless a signal ended it. Raises
    what the topology failed with."""
    progress = ProgressLines(json_lines=json_lines)
    caught_up = threading.Event()
    problem: list[BaseException] = []

    def wait() -> None:
        try:
            run.wait_until_caught_up() if isinstance(run, Run) else run.wait_until_idle()
        except BaseException as error:  # noqa: BLE001 - raised again below, in the main thread
            problem.append(error)
        caught_up.set()

    if until_caught_up:
        threading.Thread(target=wait, name="ratchet-caught-up", daemon=True).start()
    with stop_on_signal() as stopped:
        try:
            while not stopped.is_set() and not caught_up.is_set() and not run.join(_POLL_S):
                progress.show(run.status())
        finally:
            run.stop()
            progress.show(run.status(), force=True)
            progress.done()
    if problem and not stopped.is_set():
        raise problem[0]
    run.join(0)
    return not stopped.is_set()


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """An event that SIGTERM or Ctrl-C sets. A second signal ends the process at once: nothing is lost by that either."""
    stopped = threading.Event()

    def on_signal(number: int, frame: Any) -> None:
        if stopped.is_set():
            os._exit(128 + number)
        stopped.set()

    before = {name: signal.signal(name, on_signal) for name in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stopped
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def _resolve(name: str) -> Callable[..., Any]:
    module_name, separator, attribute = name.partition(":")
    if not separator or not module_name or not attribute:
        raise ConfigError(f"{name!r}: write MODULE:TOPOLOGY, such as myproject.pipeline:topology")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # the user's modules lie where the command is called
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.startswith(error.name):
            raise ConfigError(
                f"{name}: there is no module {error.name!r} here or among the installed packages"
            ) from None
        raise
    found = getattr(module, attribute, None)
    if found is None:
        raise ConfigError(f"{name}: module {module_name!r} has no {attribute!r}")
    return found  # type: ignore[no-any-return]


if __name__ == "__main__":
    app()
