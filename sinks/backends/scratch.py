"""The store of a scratch copy, which ``verify`` fills and throws away."""

from __future__ import annotations

from pathlib import Path

from framework.errors import TopologyError
from framework.topology import Fields
from sinks.backends.backend import MapBackend
from sinks.backends.memory import MemoryBackend
from sinks.backends.sqlite import SqliteBackend


def scratch_backend(folder: Path, key: Fields, value: Fields) -> MapBackend:
    """An empty store in ``folder``, or in memory for types that SQLite lacks."""
    try:
        return SqliteBackend(folder / "scratch.db", "scratch", key, value)
    except TopologyError:
        memory = MemoryBackend("scratch")
        memory.bind(key, value)
        return memory
