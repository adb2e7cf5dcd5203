"""``ratchet run MODULE:TOPOLOGY``, and ``python -m framework.run``: runs a topology from the
command line.

Without arguments, the demo. ``MODULE:TOPOLOGY`` names a ``Topology``, or a function that makes one:
without arguments, or with the configuration's ``app.*`` keys as its one argument.
"""

from __future__ import annotations

import shlex
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import psutil
import typer

from framework.clients.java import find_java
from framework.commands.exit_status import EXIT_INTERRUPTED, exit_codes, own_output
from framework.commands.find_poison import show_poison
from framework.commands.foreground_run import done_before, stop_on_signal, supervise
from framework.commands.loading import load_topology, resolve
from framework.commands.options import AsJson, ConfigFile, Overrides
from framework.config import HIDDEN, Config, shown_value
from framework.core.run import CoreRun
from framework.errors import ConfigError
from framework.execution.executor_name import SPARK
from framework.execution.gc_tuning import collect_rarely
from framework.observe import configure_logging
from framework.observe.logs import get_logger
from framework.preflight import has_run, preflight
from framework.submission import submit
from framework.topology import CoreTopology, Topology
from framework.transactions.run import Run

#: The demo is a program like a user's; the framework refers to it only by name.
DEMO = "ratchet.demo.flights_demo:main"
_POLL_S = 0.5
#: How long an interrupted start may take to end by itself.
_ALMOST_S = 0.5

_log = get_logger()

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    topology: Annotated[
        str | None, typer.Argument(metavar="[MODULE:TOPOLOGY]", help="The topology to run; by default the demo.")
    ] = None,
    *,
    config: ConfigFile = None,
    overrides: Overrides = None,
    until_caught_up: Annotated[
        bool,
        typer.Option(
            "--until-caught-up",
            help="Stop when all records that were in the source at the start are committed; records behind an open Kafka "
            "transaction are reported, or waited for: see --open-transactions. For a core topology: stop when its spouts "
            "have no input and every tuple is acked or failed.",
        ),
    ] = False,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            "--timeout", min=0.1, help="With --until-caught-up: fail if it takes longer than this many seconds."
        ),
    ] = None,
    open_transactions: Annotated[
        str | None,
        typer.Option(
            "--open-transactions",
            metavar="tell|wait",
            help="Report records behind an open Kafka transaction at the end of the input, or wait for them; as "
            "topology.open.transactions.",
        ),
    ] = None,
    as_json: AsJson = False,
    accept_changed: Annotated[
        bool,
        typer.Option(
            "--accept-changed-topology",
            help="Continue from the state of a topology with the same id and another shape; the difference is logged.",
        ),
    ] = False,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            help="Forget the positions in the source and begin where the spout's start= says. Transaction ids continue to rise and "
            "the sinks keep their rows, so records that are read again count again.",
        ),
    ] = False,
    poison: Annotated[
        bool,
        typer.Option("--find-poison", help="Do not commit; as ratchet find-poison."),
    ] = False,
    txid: Annotated[
        int | None, typer.Option("--txid", help="With --find-poison: this batch instead of the next one to commit.")
    ] = None,
    standby: Annotated[
        bool,
        typer.Option("--standby", help="Let another driver lead, and take over when it is gone."),
    ] = False,
    executor: Annotated[
        str,
        typer.Option(
            "--executor", help="spark, at spark.master; or local, in this process: for small topologies and tests."
        ),
    ] = SPARK,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log every transaction.")] = False,
) -> None:
    """Run a topology until it is stopped (Ctrl-C or SIGTERM), has caught up, or has read a bounded
    source to its end."""
    configure_logging(json_lines=as_json, level="debug" if verbose else "info", inherited=True)
    with exit_codes(as_json=as_json, next_command=_find_poison(topology, config, overrides)):
        told = [f"topology.open.transactions={open_transactions}"] if open_transactions is not None else []
        settings = Config.load(config, [*(overrides or ()), *told])
        if timeout_s is not None and not until_caught_up:
            raise ConfigError("--timeout is for --until-caught-up: a run without it has no end to wait for")
        if topology is None:
            _start_java(settings)
            raise typer.Exit(resolve(DEMO, installed=True)(settings, json_lines=as_json))
        if poison:
            raise typer.Exit(show_poison(load_topology(topology, settings), settings, txid))
        with own_output(as_json=as_json) as out:
            built = load_topology(topology, settings)
            if isinstance(built, CoreTopology) and (accept_changed or fresh or standby):
                raise ConfigError(
                    f"{topology} is a core topology, which has no transactional state: --accept-changed-topology, --fresh and "
                    "--standby have no meaning for it"
                )
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            others = _children()
            with stop_on_signal() as stopped:
                if executor == SPARK:
                    _start_java(settings)
                started: list[Run | CoreRun] = []

                def start() -> None:
                    if isinstance(built, CoreTopology):
                        started.append(submit(built, settings, executor=executor))
                        return
                    started.append(
                        submit(
                            built,
                            settings,
                            executor=executor,
                            accept_changed_topology=accept_changed,
                            fresh=fresh,
                            standby=standby,
                        )
                    )

                checked = done_before(
                    stopped, lambda: _check_first(built, settings, executor, accept_changed), timeout_s
                )
                if checked:
                    done_before(stopped, start, then_within_s=_ALMOST_S)
                if not started:
                    _end(_children() - others)
                    typer.echo("stopped before the topology had started", err=True)
                    raise typer.Exit(EXIT_INTERRUPTED if until_caught_up and stopped.interrupted else 0)
                (run,) = started
                # a garbage collection over all imported objects would delay a batch by tens of
                # milliseconds
                collect_rarely()
                json_stream = out if as_json else None
                left_s = None if deadline is None else max(round(deadline - time.monotonic(), 1), 0.1)
                done = supervise(
                    run, stopped, until_caught_up=until_caught_up, timeout_s=left_s, json_stream=json_stream
                )
        if until_caught_up and not done and stopped.interrupted:
            raise typer.Exit(EXIT_INTERRUPTED)


def _find_poison(topology: str | None, config: Path | None, overrides: list[str] | None) -> str | None:
    """The command line that searches a batch of the same topology."""
    if topology is None:
        return None
    options = [*(["--config", str(config)] if config else []), *map(_shown_override, overrides or ())]
    return " ".join(["ratchet find-poison", topology, *options])


def _shown_override(override: str) -> str:
    """``--set KEY=VALUE`` for the user to complete: ``...`` replaces possible secrets."""
    key, _, text = override.partition("=")
    hidden = shown_value(key.strip(), text.strip()) == HIDDEN
    return f"--set {key}=..." if hidden else f"--set {shlex.quote(override)}"


def _start_java(settings: Config) -> None:
    """Start Spark's JVM, which takes seconds, in the background while the checks run."""
    # imported here because only runs on Spark need it
    from framework.execution.spark.spark_context import launch_ahead

    with suppress(ConfigError):  # the checks report it
        find_java()
        launch_ahead(settings.spark)


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _end(processes: set[psutil.Process]) -> None:
    """End the starting JVM, and the processes of the checks, which are no longer needed."""
    for each in processes:
        with suppress(psutil.Error):
            each.terminate()


def _check_first(topology: Topology | CoreTopology, settings: Config, executor: str, accept_changed: bool) -> None:
    """Raise the first problem, before Spark is started. Waits for servers that do not answer; on a
    first start only for a limited time, because their address may be wrong."""
    deadline = time.monotonic() + settings.start_timeout_secs
    announced = False
    while True:
        away = None
        for finding in preflight(topology, settings, executor, accept_changed):
            if finding.error is None:
                continue
            # only ZooKeeper knows whether the topology has run before
            if not finding.waits or finding.subject == "zookeeper":
                raise finding.error
            away = away or finding.error
        if away is None or has_run(topology, settings):
            return
        if time.monotonic() > deadline:
            raise away
        if not announced:
            announced = True
            _log.warning("start.waiting", topology=topology.id, reason=str(away), at_most_s=settings.start_timeout_secs)
        time.sleep(_POLL_S)
