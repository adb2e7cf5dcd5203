"""``ratchet dead-letters``: lists and shows the records that were taken out, and sends them
again."""

from __future__ import annotations

import base64
import datetime
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from framework.commands.exits import exit_codes, own_output
from framework.commands.loading import opened_transactional
from framework.commands.options import AsJson, ConfigFile, Overrides, TopologyName
from framework.commands.values import json_text, printable, shortened
from framework.errors import ConfigError, escaped
from framework.inspect.letters import LetterFilter, LetterGroup, Letters, opened_letters, since_ms_of
from framework.observe import configure_logging
from framework.topology.letters import Letter

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="List and show the records that were taken out.",
)

Topic = Annotated[str | None, typer.Option("--topic", help="Only records of this topic.")]
ByComponent = Annotated[
    str | None,
    typer.Option("--component", help="Only those that this bolt refused; the spout: that could not be decoded."),
]
Since = Annotated[
    str | None, typer.Option("--since", help="Only records from then on: 2026-01-31T12:00 (UTC), or 2h ago as 2h.")
]
Reason = Annotated[str | None, typer.Option("--reason", help="Only those whose reason has this text in it.")]
PLACE = "TOPIC/PARTITION/OFFSET"


@app.command("list")
def list_letters(
    topology: TopologyName,
    *,
    topic: Topic = None,
    component: ByComponent = None,
    since: Since = None,
    reason: Reason = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Count the dead letters by topic, partition, component and reason."""
    wanted = _filter([], topic, component, since, reason)
    with _opened(topology, config, overrides, as_json=as_json) as (found, output):
        groups = found.groups(wanted)
        for each in groups:
            typer.echo(_group_line(each, as_json=as_json), file=output)
        total = sum(each.letters for each in groups)
        if as_json:
            typer.echo(json.dumps({"type": "dead_letters", "letters": total}), file=output)
        else:
            typer.echo(f"{total:,} dead {'letter' if total == 1 else 'letters'}", file=output)


@app.command("show")
def show_letter(
    topology: TopologyName,
    places: Annotated[list[str], typer.Argument(metavar=f"{PLACE}...", help="Where the records were.")],
    *,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show dead letters: the record's coordinates, the reason, key, value and headers."""
    wanted = _filter(places, None, None, None, None)
    with _opened(topology, config, overrides, as_json=as_json) as (found, output):
        letters = found.found(wanted)
        missing = sorted({*places} - {each.place for each in letters})
        for each in letters:
            if as_json:
                typer.echo(json_text(_document(found, each)), file=output)
            else:
                for line in _lines(found, each):
                    typer.echo(escaped(line), file=output)
        if missing:
            raise ConfigError(f"{missing[0]} is no dead letter: ratchet dead-letters list shows what there is")


# --- inside ---


@contextmanager
def _opened(
    topology: str, config: Path | None, overrides: list[str] | None, *, as_json: bool
) -> Iterator[tuple[Letters, Any]]:
    configure_logging(level="warning")
    with (
        exit_codes(as_json=as_json),
        own_output(as_json=as_json) as output,
        opened_transactional(topology, config, overrides) as (built, store, settings),
        opened_letters(built, store, settings.for_components()) as found,
    ):
        yield found, output


def _filter(
    places: list[str], topic: str | None, component: str | None, since: str | None, reason: str | None
) -> LetterFilter:
    with exit_codes():
        for each in places:
            name, partition, offset = ([*each.rsplit("/", 2), "", ""])[:3]
            if not (name and partition.isdecimal() and offset.isdecimal()):
                raise ConfigError(f"{each!r} is no record: write {PLACE.lower()}, such as orders/3/17")
        return LetterFilter(
            places=places,
            topic=topic,
            component=component,
            since_ms=since_ms_of(since) if since is not None else None,
            reason=reason,
        )


def _group_line(group: LetterGroup, *, as_json: bool) -> str:
    if as_json:
        return json_text({"type": "dead_letter_group", **asdict(group)})
    came_back = f", came back up to {group.attempts} times" if group.attempts else ""
    times = ""
    if group.oldest_ms is not None and group.newest_ms is not None:
        times = f", {_moment(group.oldest_ms)} to {_moment(group.newest_ms)}"
    return printable(
        f"{group.topic}/{group.partition}  {group.letters:,}  {group.component}: {group.reason}{times}{came_back}"
    )


def _lines(found: Letters, letter: Letter) -> Iterator[str]:
    component, reason = found.cause(letter)
    yield letter.place
    yield f"  reason: {component}: {reason}"
    if letter.timestamp_ms is not None:
        yield f"  time: {_moment(letter.timestamp_ms)}"
    yield f"  attempts: {letter.attempts}"
    if letter.topic_id:
        yield f"  topic id: {letter.topic_id}"
    yield f"  key: {shortened(letter.key)}"
    yield f"  value: {shortened(letter.value)}"
    for name, value in letter.headers:
        yield f"  header {name}: {shortened(value)}"


def _document(found: Letters, letter: Letter) -> dict[str, Any]:
    component, reason = found.cause(letter)
    return {
        "type": "dead_letter",
        "topic": letter.topic,
        "partition": letter.partition,
        "offset": letter.offset,
        "topic_id": letter.topic_id,
        "timestamp_ms": letter.timestamp_ms,
        "component": component,
        "reason": reason,
        "attempts": letter.attempts,
        **_bytes("key", letter.key),
        **_bytes("value", letter.value),
        "headers": [{"name": name, **_bytes("value", value)} for name, value in letter.headers],
    }


def _bytes(name: str, data: bytes | None) -> dict[str, str | None]:
    """As text, null where they are none, and as they are."""
    text = None
    if data is not None:
        with suppress(UnicodeDecodeError):
            text = data.decode()
    return {name: text, f"{name}_base64": None if data is None else base64.b64encode(data).decode()}


def _moment(timestamp_ms: int) -> str:
    try:
        return datetime.datetime.fromtimestamp(timestamp_ms / 1_000, datetime.UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return f"{timestamp_ms} ms"
