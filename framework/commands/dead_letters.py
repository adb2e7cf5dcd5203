"""``ratchet dead-letters``: lists, shows, replays and drops refused records."""

from __future__ import annotations

import base64
import datetime
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from framework.commands.dead_letter_request_submission import LetterRequests, letter_requests, to_replay
from framework.commands.exit_status import EXIT_DIFFERS, EXIT_FAILED, exit_codes, own_output
from framework.commands.loading import opened_transactional
from framework.commands.options import AsJson, ConfigFile, Overrides, TopologyName
from framework.commands.value_format import json_text, printable, shortened
from framework.errors import ConfigError, escaped
from framework.execution.executor_name import SPARK
from framework.inspect.dead_letters import LetterFilter, LetterGroup, Letters, opened_letters, since_ms_of
from framework.observe import configure_logging
from framework.topology.dead_letters import Letter, ListedLetter
from framework.topology.spouts import DROPPED, REPLAYED

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="List, show, replay and drop the records that were refused.",
)

Topic = Annotated[str | None, typer.Option("--topic", help="Only records of this topic.")]
ByComponent = Annotated[
    str | None,
    typer.Option(
        "--component", help="Only records that this bolt refused; with the spout's id, those that could not be decoded."
    ),
]
Since = Annotated[
    str | None,
    typer.Option("--since", help="Only records since this time: 2026-01-31T12:00 (UTC), or 2h for two hours ago."),
]
Reason = Annotated[str | None, typer.Option("--reason", help="Only records whose reason contains this text.")]
PLACE = "TOPIC/PARTITION/OFFSET"
Places = Annotated[list[str] | None, typer.Argument(metavar=f"[{PLACE}]...", help="Only these records.")]
RunBy = Annotated[
    str, typer.Option("--executor", help="Without a running driver: spark, at spark.master; or local, in this process.")
]


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
    places: Annotated[list[str], typer.Argument(metavar=f"{PLACE}...", help="The coordinates of the records.")],
    *,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show dead letters: the record's coordinates, the reason, key, value and headers."""
    wanted = _filter(places, None, None, None, None)
    with _opened(topology, config, overrides, as_json=as_json) as (found, output):
        letters = found.found(wanted)
        missing = _missing(places, letters)
        for each in found.whole(letters):
            if as_json:
                typer.echo(json_text(_document(found, each)), file=output)
            else:
                for line in _lines(found, each):
                    typer.echo(escaped(line), file=output)
        if missing:
            raise ConfigError(f"{missing[0]} is no dead letter: ratchet dead-letters list shows what there is")


@app.command("replay")
def replay_letters(
    topology: TopologyName,
    places: Places = None,
    *,
    topic: Topic = None,
    component: ByComponent = None,
    since: Since = None,
    reason: Reason = None,
    attempts_max: Annotated[
        int, typer.Option("--attempts-max", min=1, help="Skip records that were replayed and refused this many times.")
    ] = 3,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Withdraw the request of an interrupted command, and do nothing else.")
    ] = False,
    executor: RunBy = SPARK,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Send all selected dead letters through the topology again, each exactly once. A running
    driver takes them up within seconds; without one, this command runs the topology until they are
    done. A record that is refused again stays a dead letter. Exit status: 3 when selected letters
    stay: refused again, refused too often before, or cut."""
    wanted = _filter(places or [], topic, component, since, reason)
    with _requests(topology, config, overrides, executor, as_json=as_json) as (found, requests, output):
        if cancel:
            count = requests.give_up()
            _say(output, as_json, f"gave up a request for {count:,} letters", "letters_given_up", letters=count)
            return
        requests.finish()
        letters = _selected(found, wanted)
        meant = to_replay(letters, attempts_max)
        requests.do(REPLAYED, meant)
        asked = {each.id for each in meant}
        back = [each for each in found.found(LetterFilter()) if each.id in asked] if asked else []
        if as_json:
            for letter in found.whole(back):
                typer.echo(json_text(_document(found, letter)), file=output)
        else:
            for each in back:
                typer.echo(escaped(_line(found, each)), file=output)
        cut = sum(each.is_cut for each in letters)
        often = len(letters) - len(meant) - cut
        text = f"{len(meant) - len(back):,} replayed, {len(back):,} came back"
        text += f"; {often:,} left, which came back {attempts_max} times or more" if often else ""
        text += f"; {cut:,} left, which have only a part of their record" if cut else ""
        counts = {"replayed": len(meant) - len(back), "came_back": len(back), "came_back_often": often, "cut": cut}
        _say(output, as_json, text, "letters_replayed", **counts)
        if back or often or cut:
            raise typer.Exit(EXIT_DIFFERS)


@app.command("drop")
def drop_letters(
    topology: TopologyName,
    places: Places = None,
    *,
    topic: Topic = None,
    component: ByComponent = None,
    since: Since = None,
    reason: Reason = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    executor: RunBy = SPARK,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Drop all selected dead letters. They are deleted from a table; a topic is not rewritten, and
    gets a record that marks them as dropped. Executed like a replay: by the running driver, or by
    one in this command."""
    wanted = _filter(places or [], topic, component, since, reason)
    with _requests(topology, config, overrides, executor, as_json=as_json) as (found, requests, output):
        requests.finish()
        letters = _selected(found, wanted)
        what = f"{len(letters):,} dead {'letter' if len(letters) == 1 else 'letters'}"
        if letters and not yes and not typer.confirm(f"drop {what}?", err=True):
            raise typer.Exit(EXIT_FAILED)
        requests.do(DROPPED, letters)
        _say(output, as_json, f"{what} dropped", "letters_dropped", dropped=len(letters))


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


@contextmanager
def _requests(
    topology: str, config: Path | None, overrides: list[str] | None, executor: str, *, as_json: bool
) -> Iterator[tuple[Letters, LetterRequests, Any]]:
    configure_logging(level="warning")
    with (
        exit_codes(as_json=as_json),
        own_output(as_json=as_json) as output,
        opened_transactional(topology, config, overrides) as (built, store, settings),
        opened_letters(built, store, settings.for_components()) as found,
        letter_requests(built, store, settings, executor) as requests,
    ):
        yield found, requests, output


def _say(output: Any, as_json: bool, text: str, kind: str, **counts: int) -> None:
    typer.echo(json.dumps({"type": kind, **counts}) if as_json else text, file=output)


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


def _missing(places: Collection[str], letters: Sequence[ListedLetter]) -> list[str]:
    return sorted({*places} - {each.place for each in letters})


def _selected(found: Letters, wanted: LetterFilter) -> list[ListedLetter]:
    """The letters to replay or drop. Names given records that are not letters."""
    letters = found.found(wanted)
    for each in _missing(wanted.places, letters):
        typer.echo(f"{each} is no dead letter that is left, or the options leave it out", err=True)
    return letters


def _group_line(group: LetterGroup, *, as_json: bool) -> str:
    if as_json:
        return json_text({"type": "dead_letter_group", **asdict(group)})
    offsets = f", offset {group.first_offset}" + (f" to {group.last_offset}" if group.letters > 1 else "")
    came_back = (
        f", came back {'at most ' if group.letters > 1 else ''}{_times(group.attempts)}" if group.attempts else ""
    )
    times = ""
    if group.oldest_ms is not None and group.newest_ms is not None:
        oldest, newest = _moment(group.oldest_ms), _moment(group.newest_ms)
        times = f", {oldest}" + (f" to {newest}" if newest != oldest else "")
    return printable(
        f"{group.topic}/{group.partition}  {group.letters:,}  {group.component}: {group.reason}{offsets}{times}{came_back}"
    )


def _line(found: Letters, letter: ListedLetter) -> str:
    component, reason = found.cause(letter)
    return f"{letter.place} came back {_times(letter.attempts)}: {component}: {reason}"


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
    """The bytes as text, null if they are no text, and unchanged."""
    text = None
    if data is not None:
        with suppress(UnicodeDecodeError):
            text = data.decode()
    return {name: text, f"{name}_base64": None if data is None else base64.b64encode(data).decode()}


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _moment(timestamp_ms: int) -> str:
    try:
        return datetime.datetime.fromtimestamp(timestamp_ms / 1_000, datetime.UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return f"{timestamp_ms} ms"
