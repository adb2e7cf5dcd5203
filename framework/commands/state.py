"""``ratchet state COMMAND MODULE:TOPOLOGY``: reads the state of a topology at the last committed
checkpoint, even while the topology runs; and makes and restores snapshots.

Keys are written as JSON, or as plain text if that is no JSON: ``the``, ``17``, ``'["ann", 3]'`` for
a tuple. A snapshot is a file of JSON lines: a header, then one line per key with the bytes of key
and value, as the provider's serializers make them, the put time if values expire, and the task that
has the key. ``restore`` puts them back unchanged.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import gzip
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any, cast

import typer
from typer.core import TyperGroup

from framework.commands.exit_status import EXIT_FAILED, exit_codes
from framework.commands.loading import load_topology
from framework.commands.options import ConfigFile, Overrides, TopologyName
from framework.commands.value_format import json_text
from framework.config import Config
from framework.coordination import CoordinationStore, store_of
from framework.core.committed_state_reader import TopologyState
from framework.core.leader_loop import forget_state, restore_state
from framework.core.rescaling import Entry
from framework.errors import ConfigError, CorruptStateError, TopologyError
from framework.local_paths import local_path, new_file
from framework.state.provider_settings import provider_of, serializers_of
from framework.state.serialization import Serializer
from framework.topology import CoreTopology

SNAPSHOT_FORMAT = "ratchet-state-2"


class _StateCommands(TyperGroup):
    """Accepts the topology before the command too, although each command has it as an argument."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if len(args) > 1 and ":" in args[0] and not args[0].startswith("-"):
            args = [args[1], args[0], *args[2:]]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with exit_codes():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_StateCommands,
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="The state of a topology. Name the topology first, as MODULE:TOPOLOGY, or after the command.",
)

ComponentName = Annotated[str | None, typer.Option("--component", help="Which stateful bolt, if there are several.")]
File = Annotated[Path, typer.Argument(help="The snapshot; compressed when its name ends in .gz.")]


@app.command()
def get(
    topology: TopologyName,
    key: str,
    component: ComponentName = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Show the value of a key. Exit status: 1 when the key does not exist."""
    with _opened(topology, config, overrides) as (_, state):
        missing = object()
        found = state.get(state.component(component), _key(key), missing)
        if found is missing:
            typer.echo(f"there is no key {key} at checkpoint {state.record.txid}", err=True)
            raise typer.Exit(EXIT_FAILED)
        typer.echo(_shown(found))


@app.command()
def scan(
    topology: TopologyName,
    component: ComponentName = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="The most keys to show.")] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Show all keys with their values, one JSON array per line: component, key, value."""
    with _opened(topology, config, overrides) as (_, state):
        shown = 0
        for name in [state.component(component)] if component else state.components:
            for key, value in state.items(name):
                if limit is not None and shown >= limit:
                    break
                typer.echo(json_text([name, _plain(key), _plain(value)]))
                shown += 1
        _say_which(state)


@app.command()
def export(
    topology: TopologyName,
    file: Path,
    component: ComponentName = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Write all keys and values as JSON lines for other programs: {"component", "key", "value"}."""
    with _opened(topology, config, overrides) as (_, state), _written(file) as out:
        count = 0
        for name in [state.component(component)] if component else state.components:
            for key, value in state.items(name):
                line = {"component": name, "key": _plain(key), "value": _plain(value)}
                out.write(json_text(line) + "\n")
                count += 1
        typer.echo(f"{count} keys written to {file}")
        _say_which(state)


@app.command()
def snapshot(topology: TopologyName, file: File, config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Save the state of all bolts, and the positions of the spouts, of one checkpoint. Needs a
    store that can be read as of one moment, or a topology that is not running."""
    with _opened(topology, config, overrides) as (built, state), _written(file) as out:
        record = state.record
        if lacking := sorted(record.layouts.keys() - set(state.components)):
            raise ConfigError(
                f"checkpoint {record.txid} has state of {', '.join(lacking)}, and topology {built.id!r} has no such stateful bolt: "
                "a snapshot would lack it; name the topology that has run"
            )
        header = {"format": SNAPSHOT_FORMAT, "topology": built.id, "record": record.document()}
        out.write(json.dumps(header) + "\n")
        count = 0
        keys, values = state.serializers
        for name in state.components:
            for key, value, put_at, task in state.entries(name):
                line = [name, _encoded(keys, key), _encoded(values, value), put_at, task]
                out.write(json.dumps(line) + "\n")
                count += 1
            if (state.txid_before, state.txid_after) != (record.txid, record.txid):
                raise TopologyError(
                    f"checkpoints went on while the state was read ({record.txid} to {state.txid_after}): stop the topology, or "
                    "try again with a longer topology.state.checkpoint.interval.ms; where it has died in the middle of one, start "
                    "it, and stop it then"
                )
        out.write(json.dumps({"keys": count}) + "\n")
    typer.echo(f"checkpoint {record.txid}, {count} keys, saved to {file}")


@app.command()
def restore(topology: TopologyName, file: File, config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Replace the present state and positions by those of a snapshot. The topology must not be
    running; its parallelism may differ from the snapshot's."""
    settings, built, store = _loaded(topology, config, overrides)
    try:
        header = _header(_lines(file), file)
        if header["topology"] != built.id:
            raise ConfigError(f"{file} is of topology {header['topology']!r}, and {topology} is {built.id!r}")
        txid, count = restore_state(
            built,
            settings,
            store,
            document=header["record"],
            entries=partial(_entries, file, settings),
            where=str(file),
        )
    finally:
        store.close()
    typer.echo(f"{count} keys restored; the topology goes on from checkpoint {txid}")
    if header["record"].get("positions") is None:
        typer.echo(
            "the snapshot is of at-least-once state and has no positions: the spouts go on where their sources have them, "
            "whatever the state has seen; put those back, too, or input is missing from the state or counts twice",
            err=True,
        )


@app.command()
def forget(topology: TopologyName, config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Remove all states and the positions of the spouts, so that the topology starts from the
    beginning. It must not be running."""
    settings, built, store = _loaded(topology, config, overrides)
    try:
        txid = forget_state(built, settings, store)
    finally:
        store.close()
    typer.echo(f"checkpoint {txid} is forgotten" if txid else "there was no checkpoint to forget")


@app.command()
def diff(
    topology: TopologyName,
    file: File,
    other: Annotated[Path | None, typer.Argument(help="Another snapshot; by default the present state.")] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Show the changes since a snapshot, one JSON array per line: component, key, value before,
    value now; null for a missing value. Exit status: 1 when there are changes."""
    parsed = Config.load(config, overrides or ())
    conf = parsed.for_components()
    keys, values = serializers_of(provider_of(conf), conf)
    before = {(name, keys.dumps(each.key)): each for name, each in _entries(file, parsed)}
    found = 0

    def compare(name: str, key: Any, value: Any) -> None:
        nonlocal found
        old = before.pop((name, keys.dumps(key)), None)
        if old is None or (old.value != value and values.dumps(old.value) != values.dumps(value)):
            found += 1
            was = None if old is None else _plain(old.value)
            typer.echo(json_text([name, _plain(key), was, _plain(value)]))

    if other is not None:
        for name, each in _entries(other, parsed):
            compare(name, each.key, each.value)
    else:
        with _opened(topology, config, overrides) as (_, state):
            for name in state.components:
                for key, value in state.items(name):
                    compare(name, key, value)
            _say_which(state)
    for (name, _), each in before.items():
        found += 1
        typer.echo(json_text([name, _plain(each.key), _plain(each.value), None]))
    if found:
        raise typer.Exit(EXIT_FAILED)


@contextmanager
def _opened(
    topology: str, config: Path | None, overrides: list[str] | None
) -> Iterator[tuple[CoreTopology, TopologyState]]:
    settings, built, store = _loaded(topology, config, overrides)
    try:
        with TopologyState(built, settings, store) as state:
            yield built, state
    finally:
        store.close()


def _loaded(
    topology: str, config: Path | None, overrides: list[str] | None
) -> tuple[Config, CoreTopology, CoordinationStore]:
    settings = Config.load(config, overrides or ())
    built = load_topology(topology, settings)
    if not isinstance(built, CoreTopology):
        raise ConfigError(f"{topology} is a transactional topology: its state is in its sinks, for whoever reads those")
    if settings.zookeeper_hosts() is None:
        raise ConfigError("transactional.zookeeper.servers is not set: the record of checkpoints is there")
    return settings, built, store_of(settings)


def _key(text: str) -> Any:
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return _tuples(found)


def _tuples(value: Any) -> Any:
    """Convert lists to tuples: a JSON list in a key means a tuple."""
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """The value as JSON, or as text if it has no JSON form."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else json.dumps(_plain(key)): _plain(each) for key, each in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(each) for each in value), key=repr)
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return str(value)


def _shown(value: Any) -> str:
    return json_text(_plain(value))


def _encoded(serializer: Serializer, value: Any) -> str:
    return base64.b64encode(serializer.dumps(value)).decode()


def _entries(file: Path, config: Config) -> Iterator[tuple[str, Entry]]:
    """The entries of a snapshot, with their components. Raises ``CorruptStateError`` for an
    incomplete one."""
    conf = config.for_components()
    keys, values = serializers_of(provider_of(conf), conf)
    lines = _lines(file)
    _header(lines, file)
    count = 0
    for line in lines:
        if isinstance(line, dict):
            if line.get("keys") == count:
                return
            break
        component, key, value, put_at, task = line
        yield component, Entry(keys.loads(base64.b64decode(key)), values.loads(base64.b64decode(value)), put_at, task)
        count += 1
    raise CorruptStateError(f"{file} breaks off after {count} keys: it is not whole")


def _header(lines: Iterator[Any], file: Path) -> dict[str, Any]:
    """The first line of a snapshot. Raises ``ConfigError`` when the file is not a snapshot."""
    header = next(lines, None)
    found = header.get("format") if isinstance(header, dict) else None
    if found != SNAPSHOT_FORMAT:
        known = f"of format {found}, and this Ratchet knows {SNAPSHOT_FORMAT}" if found else "not a snapshot"
        raise ConfigError(f"{file} is {known}")
    return cast(dict[str, Any], header)


def _lines(file: Path) -> Iterator[Any]:
    number = 0
    local_path(file, "snapshot")
    try:
        with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as opened:
            for line in opened:
                number += 1
                yield json.loads(line)
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such snapshot") from None
    except (OSError, EOFError, ValueError) as error:
        raise CorruptStateError(f"{file}, line {number}: {error}") from None


@contextmanager
def _written(file: Path) -> Iterator[IO[str]]:
    """A file that is written completely or not at all."""
    local_path(file, "snapshot")
    with ExitStack() as stack:
        try:
            made = stack.enter_context(new_file(file, 0o600))
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error}") from None
        opener = gzip.open if file.suffix == ".gz" else open
        with opener(made, "wt", encoding="utf-8") as out:
            yield out


def _say_which(state: TopologyState) -> None:
    span = (
        f"{state.txid_before}"
        if state.txid_before == state.txid_after
        else f"{state.txid_before} to {state.txid_after}"
    )
    typer.echo(f"checkpoint {span}", err=True)
