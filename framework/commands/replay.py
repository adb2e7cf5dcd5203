"""``ratchet replay MODULE:TOPOLOGY``: repeats one transaction in this process, without writing."""

from __future__ import annotations

import json
import pdb
from bdb import BdbQuit
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from framework.commands.exit_status import EXIT_DIFFERS, EXIT_FAILED, EXIT_INTERRUPTED, exit_codes, own_output
from framework.commands.loading import load_transactional, opened_transactional
from framework.commands.options import AsJson, ConfigFile, Overrides, TopologyName
from framework.commands.value_format import json_able, shortened
from framework.errors import ConfigError
from framework.execution import TaskFailure
from framework.inspect.replay import (
    CodeDifference,
    ReplayedState,
    ReplayReport,
    Watch,
    differences,
    plan_to_replay,
    replay,
)
from framework.observe import configure_logging
from framework.topology import Change, Topology

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    topology: TopologyName,
    *,
    txid: Annotated[
        int | None, typer.Option("--txid", min=1, help="Which transaction; by default the next one to commit.")
    ] = None,
    show: Annotated[
        list[str] | None, typer.Option("--show", metavar="A->B", help="Print the rows of an edge; may be repeated.")
    ] = None,
    component: Annotated[
        list[str] | None,
        typer.Option("--component", metavar="C", help="Print the rows of all edges into and out of a component."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Most rows to print per edge, and keys per state.")] = 20,
    debugger: Annotated[
        bool, typer.Option("--pdb", help="Open Python's debugger where your code raises an error.")
    ] = False,
    code: Annotated[
        str | None,
        typer.Option(
            "--code", metavar="MODULE:TOPOLOGY", help="A changed version of the topology: show how its result differs."
        ),
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Commit a transaction again in this process, into copies of the states, and compare the result
    with the sinks. Writes nothing; a driver may run meanwhile. Your code can print, and
    breakpoint() works. Exit status: 0 they agree, 3 they differ, 1 your code fails."""
    configure_logging(level="warning")
    with exit_codes(), _left_debugger(), own_output(as_json=as_json) as output:
        printer = _Printer(limit, as_json=as_json, file=output)
        error = _post_mortem if debugger else None
        watch = Watch(show or (), component or (), printer.row, error, rows_max=limit + 1)
        with opened_transactional(topology, config, overrides) as (built, store, settings):
            conf, planned = settings.for_components(), plan_to_replay(store, built, txid)
            report = replay(built, store, conf, planned=planned, watch=watch)
            printer.report(report)
            status = _status(report)
            if code is not None:
                changed = load_transactional(code, settings)
                try:
                    _check_same(built, changed, code)
                    new = replay(changed, store, conf, planned=planned, watch=Watch(error=error))
                finally:
                    for state in changed.states:
                        state.close()
                status = printer.compared(report, new, code)
    raise typer.Exit(status)


@contextmanager
def _left_debugger() -> Iterator[None]:
    """End the command when the user leaves a debugger that breakpoint() has opened."""
    try:
        yield
    except BdbQuit:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _check_same(built: Topology, changed: Topology, code: str) -> None:
    if changed.id != built.id:
        raise ConfigError(
            f"{code} is the topology {changed.id!r}, not {built.id!r}: give --code a changed version of the same one"
        )


def _status(report: ReplayReport) -> int:
    if report.failure is not None:
        return EXIT_FAILED
    return 0 if report.agrees is not False else EXIT_DIFFERS


def _post_mortem(failure: TaskFailure, error: BaseException) -> None:
    typer.echo(f"{failure.lines()[0]}: the debugger is where it was raised; q goes on", err=True)
    pdb.post_mortem(error.__traceback__)


class _Printer:
    def __init__(self, limit: int, *, as_json: bool, file: Any) -> None:
        self._limit, self._as_json, self._file = limit, as_json, file
        self._shown: Counter[str] = Counter()

    def row(self, edge: str, row: Mapping[str, Any]) -> None:
        self._shown[edge] += 1
        if self._shown[edge] <= self._limit:
            self._print({"type": "row", "edge": edge, "row": row}, f"{edge}: {shortened(dict(row))}")
        elif self._shown[edge] == self._limit + 1 and not self._as_json:
            self._line(f"{edge}: more rows than --limit {self._limit}")

    def report(self, report: ReplayReport) -> None:
        if self._as_json:
            self._print(_document(report), "")
            return
        for line in self._lines(report):
            self._line(line)

    def compared(self, now: ReplayReport, new: ReplayReport, code: str) -> int:
        """Print the differences between the results of two versions. Returns the exit status."""
        if new.failure is not None or now.failure is not None:
            found: list[CodeDifference] = []
        else:
            found = differences(now, new)
        if self._as_json:
            shown = [
                {
                    "component": each.component_id,
                    "location": each.location,
                    "key": each.key,
                    "now": each.now,
                    "new": each.new,
                }
                for each in found
            ]
            self._print({**_document(new), "type": "code", "code": code, "differences": shown}, "")
        else:
            for line in self._code_lines(now, new, code, found):
                self._line(line)
        if new.failure is not None:
            return EXIT_FAILED
        return EXIT_DIFFERS if found or _status(now) else 0

    def _code_lines(
        self, now: ReplayReport, new: ReplayReport, code: str, found: list[CodeDifference]
    ) -> Iterator[str]:
        if new.failure is not None:
            yield f"{code} fails on it:"
            yield from _failure_lines(new, new.failure)
            return
        if now.failure is not None:
            yield f"{code} does not fail on it:"
            yield from self._state_lines(new)
            yield from _left_out_lines(new, f" with {code}")
            return
        for edge in dict.fromkeys([*now.rows, *new.rows]):
            if now.rows[edge] != new.rows[edge]:
                yield f"  {edge}: {now.rows[edge]:,} rows, with {code} {new.rows[edge]:,}"
        if new.left_out != now.left_out:
            yield from _left_out_lines(new, f" with {code}")
        if not now.states or not new.states:
            yield "nothing was compared: no sink could be replayed with both"
            return
        yield f"{code} leaves {len(found):,} keys with other values" if found else f"{code} leaves the same values"
        for each in found[: self._limit]:
            yield f"  {each.location}: {each.key!r}: {shortened(each.now)}, with {code} {shortened(each.new)}"
        if len(found) > self._limit:
            yield f"  and {len(found) - self._limit:,} more"

    def _lines(self, report: ReplayReport) -> Iterator[str]:
        yield f"transaction {report.txid} of topology {report.topology_id!r}, replayed with the code that is here"
        for edge, rows in report.rows.items():
            yield f"  {edge}: {rows:,} rows"
        if report.failure is not None:
            yield "it fails:"
            yield from _failure_lines(report, report.failure)
            return
        yield from self._state_lines(report)
        yield from _left_out_lines(report)
        if not report.states:
            yield "nothing was compared: no sink could be replayed"
        elif not report.committed:
            yield "it is not committed yet, so there is nothing to compare it with"
        yield "this shows what bolts, codecs and states of this version make of the batch; verify computes sums by code of its own"

    def _state_lines(self, report: ReplayReport) -> Iterator[str]:
        for state in report.states:
            differing = state.differing() if report.committed else []
            verdict = _verdict(state) if report.committed else ""
            yield f"{state.location}: {len(state.changes):,} keys changed{verdict}"
            shown = (differing or state.changes)[: self._limit]
            yield from (f"  {_change_line(each, committed=report.committed)}" for each in shown)
            left = len(differing or state.changes) - len(shown)
            if left:
                yield f"  and {left:,} more"

    def _print(self, document: Mapping[str, Any], line: str) -> None:
        self._line(json.dumps(json_able(document), default=str) if self._as_json else line)

    def _line(self, line: str) -> None:
        typer.echo(line, file=self._file)


def _verdict(state: ReplayedState) -> str:
    differing, unknown = len(state.differing()), state.unknown()
    if differing:
        found = f", {differing:,} of them differ from the sink"
    elif unknown < len(state.changes):
        found = ", as the sink holds them"
    else:
        return ", whose values the sink no longer tells" if unknown else ""
    return found + (f", except {unknown:,} whose value the sink no longer tells" if unknown else "")


def _left_out_lines(report: ReplayReport, where: str = "") -> Iterator[str]:
    yield from (f"not replayed{where}: bolt {component!r}: {why}" for component, why in report.left_out.items())


def _failure_lines(report: ReplayReport, failure: TaskFailure) -> Iterator[str]:
    yield from (f"  {line}" for line in failure.lines())
    if report.lacked_values:
        yield "  it asked for values before this transaction that the sinks no longer tell, and got none: it may fail over that"


def _change_line(change: Change, *, committed: bool) -> str:
    if change.agrees is None:
        return f"{change.key!r}: {shortened(change.after)}, by what is still known of the values before"
    line = f"{change.key!r}: {shortened(change.before)} -> {shortened(change.after)}"
    return line + (f", and the sink has {shortened(change.held)}" if committed and not change.agrees else "")


def _document(report: ReplayReport) -> dict[str, Any]:
    failure = report.failure
    return {
        "type": "replay",
        "topology": report.topology_id,
        "txid": report.txid,
        "committed": report.committed,
        "agrees": report.agrees,
        "rows": dict(report.rows),
        "failure": str(failure) if failure is not None else None,
        "lacked_values": report.lacked_values,
        "states": [
            {
                "component": state.component_id,
                "location": state.location,
                "changes": [
                    {
                        "key": each.key,
                        "before": each.before,
                        "after": each.after,
                        "held": each.held,
                        "agrees": each.agrees if report.committed else None,
                    }
                    for each in state.changes
                ],
            }
            for state in report.states
        ],
        "left_out": dict(report.left_out),
    }
