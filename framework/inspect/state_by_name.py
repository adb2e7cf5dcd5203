"""The states of a topology, by the names that a person writes."""

from __future__ import annotations

from framework.errors import ConfigError
from framework.topology import Component, Topology


def state_named(topology: Topology, name: str) -> tuple[Component, int]:
    """The component that has the state, and which of its states it is. ``name``: the id of the
    component, or the location of the state, or the end of that. Raises ``ConfigError``."""
    every = [
        (component, number, state.location)
        for component in topology.components
        for number, state in enumerate(component.states)
    ]
    found = [each for each in every if name in (each[0].id, each[2])] or [
        each for each in every if each[2].endswith(name) and name
    ]
    if len(found) != 1:
        there = ", ".join(f"{component.id} ({location})" for component, _, location in found or every)
        what = "has several states" if found else "has no state"
        raise ConfigError(f"topology {topology.id!r} {what} {name!r}: name one of {there or 'none'}")
    return found[0][:2]
