"""``ratchet explain MODULE:TOPOLOGY STATE KEY``: shows how a value came about."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from framework.commands.exit_status import EXIT_DIFFERS, EXIT_FAILED, exit_codes, own_output
from framework.commands.loading import opened_archive, opened_transactional
from framework.commands.options import AsJson, ConfigFile, Overrides, TopologyName
from framework.commands.value_format import json_able, printable, shortened, text_of
from framework.inspect.explain import Cause, Explanation, Step, explain
from framework.inspect.full_recomputation import Unverifiable
from framework.observe import configure_logging
from framework.topology import SourceRecord

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    topology: TopologyName,
    state: Annotated[str, typer.Argument(help="The bolt that keeps the state, or the state's location.")],
    key: Annotated[str, typer.Argument(help="The key; a JSON array if it has several columns.")],
    *,
    last: Annotated[int, typer.Option("--last", min=1, help="The most changes to show.")] = 10,
    records: Annotated[int, typer.Option("--records", min=0, help="The most records to show per change.")] = 5,
    recorded: Annotated[
        bool,
        typer.Option("--recorded", help="Begin with the oldest recorded transaction, not with the source."),
    ] = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show the transactions that changed a key, with its values before and after, and the records
    that caused the changes; then compare the sink with the source. Writes nothing; a driver may run
    meanwhile. Exit status: 0 they agree, 3 they differ, 1 the answer cannot be known."""
    configure_logging(level="warning")
    with exit_codes(), own_output(as_json=as_json) as output:
        try:
            with (
                opened_transactional(topology, config, overrides) as (built, store, settings),
                opened_archive(settings, built.id) as archive,
            ):
                found = explain(
                    built,
                    store,
                    settings.for_components(),
                    state=state,
                    key=key,
                    last=last,
                    causes_max=records,
                    recorded_only=recorded,
                    archive=archive,
                )
        except Unverifiable as error:
            typer.echo(f"cannot be explained from its first record: {error}", err=True)
            if not recorded:
                typer.echo("--recorded begins with the oldest transaction that is recorded", err=True)
            raise typer.Exit(EXIT_FAILED) from None
        lines = [json.dumps(json_able(_document(found)), default=str)] if as_json else _lines(found)
        for line in lines:
            typer.echo(line, file=output)
    raise typer.Exit(EXIT_DIFFERS if found.agrees is False else 0)


def _lines(found: Explanation) -> Iterator[str]:
    key = found.key[0] if len(found.key) == 1 else found.key
    yield f"{key!r} in {found.location} (bolt {found.component_id!r}), as of transaction {found.txid}"
    if found.since_txid > 1:
        yield f"values count from transaction {found.since_txid} on: what came before is left out"
    if found.step_count > len(found.steps):
        yield f"  {found.step_count - len(found.steps):,} changes before these"
    for step in found.steps:
        yield f"  {_which(step)}: {_value(step.before)} -> {_value(step.after)}"
        yield from (f"    {each}" for each in _time(step))
        yield from (f"    {_cause(each)}" for each in step.causes)
        if step.has_more:
            yield "    and more records"
    if not found.steps:
        yield "  nothing has changed it"
    if found.late_count > len(found.late):
        yield f"  {found.late_count - len(found.late):,} transactions with late records before these"
    for late in found.late:
        yield (
            f"  transaction {late.txid}: late for bolt {late.component_id!r}, whose watermark was {_moment_of(late.watermark)}"
        )
        yield from (f"    time {_moment_of(each.at)}, {_cause(each.cause)}" for each in late.records)
        if late.has_more:
            yield "    and more records"
    yield _verdict(found)
    arithmetic = "arithmetic of its own" if found.is_independent else "its committers and states"
    yield (
        f"computed from {found.records:,} records in {found.batches:,} batches, {found.seconds:.1f} s, with the bolts and codecs "
        f"of this version and {arithmetic}"
    )


def _verdict(found: Explanation) -> str:
    computed = f"the source gives {_value(found.computed)}"
    if found.agrees is not None:
        return f"the sink holds {_value(found.held)}, {computed}: {'equal' if found.agrees else 'THEY DIFFER'}"
    if found.since_txid > 1:
        return f"the sink holds {_value(found.held)}, which counts what came before, too: it is not compared"
    return f"{computed}; the sink may have counted a batch twice, so it is not compared"


def _which(step: Step) -> str:
    if step.first_txid != step.txid:
        return f"transactions {step.first_txid} to {step.txid}, not recorded one by one"
    attempt = step.attempt
    if step.recorded is None or attempt is None:
        return f"transaction {step.txid}"
    closed = f", closed {_moment(step.recorded.closed_at)}" if step.recorded.closed_at is not None else ""
    code = f", code {attempt.made_by['code']}" if attempt.made_by.get("code") else ""
    return f"transaction {step.txid}, attempt {attempt.attempt_id} of epoch {attempt.epoch}{closed}{code}"


def _time(step: Step) -> Iterator[str]:
    after = step.time_after
    if after is not None and after.watermark is not None:
        held_up = f", held up by partition {after.held_up_by!r}" if after.held_up_by else ""
        before = step.time_before.watermark if step.time_before is not None else None
        yield f"the watermark went from {_moment_of(before)} to {_moment_of(after.watermark)}{held_up}"


def _moment_of(micros: int | None) -> str:
    return _moment(micros / 1_000_000) if micros is not None else "nothing"


def _moment(at: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):  # a producer used another unit, or an invalid time
        return f"{at * 1000:.0f} ms"


def _value(value: Mapping[str, Any] | None) -> str:
    if value is None:
        return "nothing"
    return ", ".join(f"{name}={shortened(each)}" for name, each in value.items())


def _cause(cause: Cause) -> str:
    if cause.record is None:
        rows = "; ".join(shortened(dict(row)) for row in cause.rows)
        return f"{_range(cause)}" + (f": {rows}" if rows else "")
    record = cause.record
    when = f", {_moment(record.timestamp_ms / 1000)}" if record.timestamp_ms is not None else ""
    key = f"{printable(text_of(record.key))}  " if record.key is not None else ""
    return f"{_range(cause)}{when}: {key}{printable(text_of(record.value))}"


def _range(cause: Cause) -> str:
    if "first_offset" not in cause.meta:
        return f"{cause.partition}, a part that cannot be split"
    first, end = int(cause.meta["first_offset"]), int(cause.meta["next_offset"])
    return (
        f"{cause.partition} offset {first}" if end - first == 1 else f"{cause.partition} offsets {first} to {end - 1}"
    )


def _document(found: Explanation) -> dict[str, Any]:
    return {
        "type": "explain",
        "topology": found.topology_id,
        "component": found.component_id,
        "location": found.location,
        "key": found.key[0] if len(found.key) == 1 else list(found.key),
        "since_txid": found.since_txid,
        "txid": found.txid,
        "changes": found.step_count,
        "steps": [
            {
                "first_txid": step.first_txid,
                "txid": step.txid,
                "attempt": step.attempt.attempt_id if step.attempt else None,
                "closed_at": step.recorded.closed_at if step.recorded else None,
                "made_by": step.attempt.made_by if step.attempt else None,
                "before": step.before,
                "after": step.after,
                "causes": [_cause_document(each) for each in step.causes],
                "more": step.has_more,
                "watermark_before": step.time_before.watermark if step.time_before else None,
                "watermark_after": step.time_after.watermark if step.time_after else None,
                "held_up_by": step.time_after.held_up_by if step.time_after else None,
            }
            for step in found.steps
        ],
        "late_transactions": found.late_count,
        "late": [
            {
                "component": late.component_id,
                "stream": late.stream,
                "txid": late.txid,
                "watermark": late.watermark,
                "records": [{"time": each.at, **_cause_document(each.cause)} for each in late.records],
                "more": late.has_more,
            }
            for late in found.late
        ],
        "held": found.held,
        "computed": found.computed,
        "agrees": found.agrees,
        "independent": found.is_independent,
        "records": found.records,
        "batches": found.batches,
        "seconds": round(found.seconds, 3),
    }


def _cause_document(cause: Cause) -> dict[str, Any]:
    return {
        "partition": cause.partition,
        "first_offset": cause.meta.get("first_offset"),
        "next_offset": cause.meta.get("next_offset"),
        "record": _record_document(cause.record) if cause.record is not None else None,
        "rows": [dict(row) for row in cause.rows],
    }


def _record_document(record: SourceRecord) -> dict[str, Any]:
    return {
        "offset": record.offset,
        "timestamp_ms": record.timestamp_ms,
        "key": text_of(record.key),
        "value": text_of(record.value),
    }
