"""Probe bolts on the streams of a topology, which record the emitted rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from framework.errors import ConfigError
from framework.topology import Bolt, Component
from framework.topology.graph import Subscription
from framework.topology.groupings import AllGrouping, DirectGrouping

_TAP = "ratchet-tap"

#: A component, and one of its streams.
Stream = tuple[str, str]
Rows = Mapping[Stream, Sequence[Mapping[str, Any]]]


def probes_below(
    components: Iterable[Component], make: Callable[[], Bolt], taken: Iterable[Stream] = ()
) -> list[Component]:
    """A probe bolt on each stream of these components, except those that are ``taken``."""
    probes: list[Component] = []
    known = set(taken)
    for each in components:
        for stream in each.streams:
            if (each.id, stream) not in known:
                grouping = DirectGrouping() if stream in each.direct_streams else AllGrouping()
                subscription = Subscription(each.id, stream, grouping)
                probes.append(Component(f"{_TAP}-{len(probes)}", 1, make(), streams={}, subscriptions=(subscription,)))
    return probes


def rows_of_stream(rows: Rows, component_id: str, stream: str) -> list[Mapping[str, Any]]:
    """The recorded rows of a stream. Raises ``ConfigError`` for a stream that does not exist."""
    found = rows.get((component_id, stream))
    if found is None:
        known = ", ".join(f"{component} on {name!r}" for component, name in sorted(rows)) or "nothing"
        raise ConfigError(f"nothing called {component_id!r} emits on stream {stream!r}; there are: {known}")
    return list(found)
