"""Copies of a topology that write nothing where the topology writes. ``verify`` and ``replay`` run
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import cloudpickle

from framework.errors import ConfigError
from framework.topology import Bolt, Component, Topology

#: Turns a copy of a bolt with states into the bolt of the shadow, which keeps them in a folder that
#: does not exist yet. Raises ``ConfigError`` when it cannot.
Shadowed = Callable[[Bolt, Path], Bolt]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A component that the shadow does not have, and why."""

    component: Component
    why: str

    def __str__(self) -> str:
        return f"bolt {self.component.id!r}: {self.why}"


def shadow_of(
    topology: Topology,
    folder: Path,
    shadowed: Shadowed,
    *,
    joined: Mapping[str, int] = MappingProxyType({}),
    strict: bool = True,
) -> tuple[Topology, list[LeftOut]]:
    """The topology with other states, and the components that are left out: those that write where
    Ratchet does not see it, those whose state is among the ``joined`` (location -> first txid),
    unless ``strict`` those that ``shadowed`` refuses, and all below them."""
    kept: list[Component] = []
    left_out: dict[str, LeftOut] = {}
    for component in topology.components:
        bolt = component.instance
        since = max((joined[state.location] for state in component.states if state.location in joined), default=None)
        why, copy = "", bolt
        if since is not None:
            why = f"its state joined at transaction {since}, and holds nothing from before"
        elif any(sub.component_id in left_out for sub in component.subscriptions):
            why = "it is below one that is not"
        elif component.committer and not component.states:
            why = "it writes where nothing can be compared"
        elif isinstance(bolt, Bolt) and component.states:
            try:
                copy = shadowed(cloudpickle.loads(cloudpickle.dumps(bolt)), folder / component.id)
            except ConfigError as error:
                if strict:
                    raise
                why = str(error)
        if why:
            left_out[component.id] = LeftOut(component, why)
        else:
            kept.append(component if copy is bolt else replace(component, instance=copy, factory=None))
    return Topology(topology.id, tuple(kept), topology.at_least_once), list(left_out.values())
