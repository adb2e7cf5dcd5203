"""Commands, sources, sinks and histories that other packages add, by entry points.

::

    [project.entry-points."ratchet.commands"]
    scan = "ratchet_mongo.scan:app"          # a typer.Typer: ratchet scan

    [project.entry-points."ratchet.sinks"]
    MongoBackend = "ratchet_mongo:MongoBackend"   # from ratchet import MongoBackend

Ratchet's own names cannot be replaced: they are looked up first.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from framework.errors import ConfigError

#: The groups of entry points. An entry of the first is a ``typer.Typer``; entries of the next two
#: are objects for ``from ratchet import``. An entry of the last is named after the scheme of a URL:
#: a function that takes a URL and a topology's id, and returns a
#: ``framework.transactions.history_archive.HistoryTarget``.
COMMANDS, SOURCES, SINKS, HISTORIES = "ratchet.commands", "ratchet.sources", "ratchet.sinks", "ratchet.histories"


def added(group: str, name: str) -> Any:
    """The object that an installed package adds under a name; None if there is none. Raises
    ``ConfigError`` when two packages add it, and when it cannot be imported."""
    found = {each.value: each for each in entry_points(group=group, name=name)}
    if not found:
        return None
    if len(found) > 1:
        packages = " and ".join(sorted(map(_package, found.values())))
        raise ConfigError(f"the packages {packages} both add {name!r} to {group}: uninstall one")
    (each,) = found.values()
    try:
        return each.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the package {_package(each)} adds {name!r}, which cannot be imported: {error}; upgrade or uninstall the package"
        ) from error


def summaries(group: str) -> Mapping[str, str]:
    """The names that installed packages add, in order, each with a line; imports nothing."""
    return {each.name: _summary(each) for each in sorted(entry_points(group=group), key=lambda each: each.name)}


def _summary(each: EntryPoint) -> str:
    text = each.dist.metadata["Summary"] if each.dist is not None else None
    return f"{text or 'Added'} ({_package(each)})"


def _package(each: EntryPoint) -> str:
    return each.dist.name if each.dist is not None else each.value
