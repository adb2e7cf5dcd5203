"""``ratchet list``, ``status`` and ``history``: topologies as recorded in the coordination store,
from any process and host."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from framework.commands.exit_status import EXIT_FAILED, exit_codes
from framework.commands.loading import opened_archive
from framework.commands.options import AsJson, ConfigFile, Overrides, TopologyId
from framework.commands.text_tables import ago, in_columns, local_time, number
from framework.commands.value_format import made_by_line
from framework.config import Config
from framework.coordination import CoordinationStore, store_of
from framework.errors import ConfigError, escaped
from framework.inspect.rebuild import read_exchanges
from framework.inspect.topologies import TopologyOverview, named_damage, read_topologies, read_topology
from framework.observe import AttemptRecord, TransactionRecord, configure_logging
from framework.observe.journal import RECORDS_MAX
from framework.transactions.documents import read_history
from framework.transactions.history_reader import TransactionRecords

#: How often ``status --watch`` reads: as often as drivers publish.
_WATCH_S = 2.0

list_app = typer.Typer(pretty_exceptions_enable=False)
status_app = typer.Typer(pretty_exceptions_enable=False)
history_app = typer.Typer(pretty_exceptions_enable=False)


@list_app.command("list")
def list_topologies(config: ConfigFile = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Show every topology under transactional.zookeeper.root: running or not, transactional or
    core. Exit status: 1 when one of them cannot be read."""
    with opened(config, overrides) as store:
        found = read_topologies(store)
        if as_json:
            for each in found:
                _print_json("topology", each.document())
        elif found:
            heading = ("topology", "kind", "state", "leader", "txid", "lag", "rows/s", "committed", "trouble")
            for line in in_columns([heading, *(_row(each) for each in found)], right=(4, 5, 6)):
                _say(line)
        else:
            typer.echo("no topology has run under this root")
        if any(each.unreadable is not None for each in found):
            raise typer.Exit(EXIT_FAILED)


@status_app.command("status")
def show_status(
    topology: TopologyId,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show the status of one topology: its leader, standbys, transactions, lag, last error. Exit
    status: 1 when it has no leader and is not finished."""
    with opened(config, overrides) as store, named_damage(topology):
        while True:
            found = read_topology(store, topology)
            if found is None:
                raise unknown_topology(store, topology)
            if as_json:
                _print_json("topology", found.document())
            else:
                if watch:
                    typer.echo("\x1b[H\x1b[2J", nl=False)
                for line in in_columns(list(_details(found))):
                    _say(line)
            if not watch:
                raise typer.Exit(0 if found.leader is not None or found.state == "finished" else EXIT_FAILED)
            time.sleep(_WATCH_S)


@history_app.command("history")
def show_history(
    topology: TopologyId,
    *,
    txid: Annotated[int | None, typer.Option("--txid", min=1, help="The complete record of one transaction.")] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Only transactions that took more than one attempt.")
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, max=1000, help="How many, the last ones; by default 20, and 1,000 for --plot."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Plot the transactions as an SVG file; needs the extra plot."),
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show the recorded transactions: the last thousand closed ones of each topology, and with
    --txid any in the table at topology.history.table."""
    with opened(config, overrides) as store, named_damage(topology):
        if plot is not None and txid is not None:
            raise ConfigError("--plot draws many transactions, and --txid is one: leave one of the two out")
        if read_topology(store, topology) is None:
            raise unknown_topology(store, topology)
        if txid is not None:
            records = [_recorded(store, topology, txid, Config.load(config, overrides or ()))]
        else:
            records = [each for each in read_history(store, topology) if each.attempts_total > 1 or not failed]
        records = records[-(limit or (20 if plot is None else RECORDS_MAX)) :]
        if plot is not None and records:
            _plot(records, plot, topology, as_json)
        elif as_json:
            for each in records:
                _print_json("transaction", {"topology": topology, **each.document()})
        elif txid is not None:
            for line in _everything(records[0]):
                _say(line)
        elif records:
            for line in in_columns([_HEADING, *map(_transaction_row, records)], right=range(2, 9)):
                _say(line)
        else:
            typer.echo("no transaction failed" if failed else "no transaction is recorded")
        if txid is None and plot is None:
            _show_exchanges(store, topology, as_json=as_json)


def _show_exchanges(store: CoordinationStore, topology: str, *, as_json: bool) -> None:
    for each in read_exchanges(store, topology):
        if as_json:
            _print_json("exchange", {"topology": topology, **asdict(each)})
        else:
            _say(
                f"transaction {each.txid:,}: at {each.at} the rows of {each.component_id!r} were exchanged for rebuilt ones, of "
                f"which {each.differed:,} differed"
            )


def _plot(records: list[TransactionRecord], file: Path, topology: str, as_json: bool) -> None:
    from framework.observe.history_plot import plot_history  # imports the library of plots

    failed = plot_history(records, file, topology)
    if as_json:
        _print_json("plot", {"topology": topology, "file": str(file), "transactions": len(records), "failed": failed})
    else:
        typer.echo(f"wrote {file}: {len(records):,} transactions, {failed:,} of them not at the first attempt")


# --- output ---


def _row(found: TopologyOverview) -> tuple[str, ...]:
    leader = found.leader
    status = leader.status if leader is not None else {}
    return (
        found.id,
        found.kind,
        found.state + (f" +{len(found.standbys)}" if leader is not None and found.standbys else ""),
        f"{leader.host}:{leader.pid}" if leader is not None else "-",
        number(found.txid),
        number(status.get("lag")),
        number(status.get("rows_per_second")),
        ago(found.last.closed_at) if found.last is not None else "-",
        _shortened(found.problem or "-"),
    )


def _details(found: TopologyOverview) -> Iterator[tuple[str, str]]:
    leader = found.leader
    yield "topology", f"{found.id} ({found.kind})"
    yield "state", found.state
    if leader is not None:
        epoch = f", epoch {leader.status['epoch']}" if "epoch" in leader.status else ""
        yield "leader", f"{leader.host}:{leader.pid}{epoch}, since {local_time(leader.started_at)}"
        quiet_s = time.time() - leader.said_at
        if quiet_s > 5 * _WATCH_S:
            yield "", f"it last said so {ago(leader.said_at)}"
    for each in found.standbys:
        yield "standby", f"{each.host}:{each.pid}, since {local_time(each.started_at)}"
    name = "committed" if found.kind == "transactional" else "checkpoint"
    yield (
        name,
        "nothing yet"
        if found.txid is None
        else f"{found.txid:,}" + (f" ({ago(found.last.closed_at)})" if found.last is not None else ""),
    )
    if leader is None:
        return
    status = leader.status
    yield from (_transactional_details if found.kind == "transactional" else _core_details)(status)
    for label, key in (
        ("waiting for", "waiting_for"),
        ("repeating", "repeating"),
        ("last error", "last_error"),
        ("history waits", "history_waiting"),
    ):
        if status.get(key):
            yield label, str(status[key])


def _transactional_details(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The known fields of a status of any version."""
    for txid, what in _mapping(status.get("in_flight")).items():
        yield "in flight", f"{txid}: attempt {what}"
    yield "lag", f"{number(status.get('lag'))} records"
    yield "rate", f"{number(status.get('rows_per_second'))} rows/s over the last minute"
    for key, value in _mapping(status.get("pace")).items():
        yield "pace", f"{key} = {value:g}" if isinstance(value, (int, float)) else f"{key} = {value}"
    if status.get("planned_in_s"):
        yield "next plan", f"in {number(status['planned_in_s'])} s"
    for label, key in (
        ("rows", "committed_rows"),
        ("failed attempts", "attempts_failed"),
        ("bad records", "bad_records"),
        ("lost records", "lost_records"),
    ):
        yield label, number(status.get(key))


def _core_details(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "pending", f"{number(status.get('pending'))} tuples"
    for name, counts in _mapping(status.get("components")).items():
        known = _mapping(counts).items()
        counted = ", ".join(f"{key} {number(value)}" for key, value in known if value and key != "latency_s")
        yield f"  {name}", counted or "nothing yet"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


_HEADING = (
    "txid",
    "closed",
    "attempts",
    "rows",
    "bad",
    "processing",
    "waiting",
    "commit",
    "ms in all",
    "why not at once",
)


def _transaction_row(record: TransactionRecord) -> tuple[str, ...]:
    last = record.attempts[-1] if record.attempts else None
    times = (last.processing_ms, last.waiting_ms, last.commit_ms) if last is not None else (None, None, None)
    closed = record.closed_at
    reasons = [each.reason for each in record.attempts if each.reason]
    return (
        str(record.txid),
        local_time(closed) if closed is not None else "-",
        str(record.attempts_total),
        number(last.source_rows if last is not None else None),
        number(last.bad_records if last is not None else None),
        *map(number, times),
        number(sum(each or 0 for each in times)),
        _shortened(reasons[-1]) if reasons else "",
    )


def _everything(record: TransactionRecord) -> Iterator[str]:
    yield f"transaction {record.txid}, {record.attempts_total} attempts, plan {record.plan_digest}"
    if record.plan:
        names = list(dict.fromkeys(name for meta in record.plan.values() for name in meta))
        rows = [[partition, *(str(meta.get(name, "-")) for name in names)] for partition, meta in record.plan.items()]
        yield from in_columns([["partition", *names], *rows], right=range(1, len(names) + 1))
    for attempt in record.attempts:
        yield from _attempt_lines(attempt)


def _attempt_lines(attempt: AttemptRecord) -> Iterator[str]:
    times = ", ".join(
        f"{name} {number(value)} ms"
        for name, value in (
            ("processing", attempt.processing_ms),
            ("waiting", attempt.waiting_ms),
            ("commit", attempt.commit_ms),
        )
        if value is not None
    )
    yield (
        f"attempt {attempt.attempt_id}, epoch {attempt.epoch}, {local_time(attempt.started_at)}: {attempt.outcome}"
        + (f" ({times})" if times else "")
    )
    if attempt.reason:
        yield f"  {attempt.reason}"
    if attempt.made_by:
        yield f"  by {made_by_line(attempt.made_by)}"
    yield f"  read {attempt.source_rows:,} rows, {attempt.source_bytes:,} bytes, {attempt.bad_records:,} bad records"
    for edge, rows in attempt.rows.items():
        yield f"  {edge}: {rows:,} rows"
    for component, busy_ms in attempt.component_ms.items():
        yield f"  {component}: {number(busy_ms)} ms busy"


def _shortened(text: str, most: int = 100) -> str:
    line = text.splitlines()[0] if text else text
    return line if len(line) <= most else f"{line[: most - 1]}…"


def _print_json(kind: str, document: Mapping[str, Any]) -> None:
    typer.echo(json.dumps({"type": kind, **document}, default=str))


def _say(line: str) -> None:
    """Print texts of documents, with terminal control characters escaped."""
    typer.echo(escaped(line))


# --- the store ---


@contextmanager
def opened(config: Path | None, overrides: list[str] | None) -> Iterator[CoordinationStore]:
    """The store that the configuration names. Raises ``ConfigError`` if it names none."""
    configure_logging(level="warning")
    with exit_codes():
        settings = Config.load(config, overrides or ())
        if settings.zookeeper_hosts() is None:
            raise ConfigError(
                "transactional.zookeeper.servers is not set: give the --config of the topologies, or --set "
                "transactional.zookeeper.servers=HOST"
            )
        store = store_of(settings, observes=True)
        try:
            yield store
        finally:
            store.close()


def _recorded(store: CoordinationStore, topology_id: str, txid: int, settings: Config) -> TransactionRecord:
    """The record from the store or, for older ones, from the table of records."""
    elsewhere = "longer ago than a thousand transactions"
    with opened_archive(settings, topology_id) as archive:
        records = TransactionRecords(store, topology_id, archive)
        if (found := records.read(txid)) is not None:
            return found
        if archive is not None:
            elsewhere = f"{elsewhere} and not in {archive.location}"
            if (gap := records.archived(txid)) is not None:
                elsewhere = f"{elsewhere}, which lacks transactions {gap.txid} to {gap.until_txid}"
    raise ConfigError(
        f"topology {topology_id!r} has no record of transaction {txid}: it is not closed yet, or {elsewhere}, or this is a "
        "core topology"
    )


def unknown_topology(store: CoordinationStore, topology_id: str) -> ConfigError:
    known = ", ".join(each.id for each in read_topologies(store)) or "none"
    return ConfigError(f"no topology {topology_id!r} has run under this root; there are: {known}")
