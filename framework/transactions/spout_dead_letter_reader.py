"""Finds the dead letters of a topology's spout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cloudpickle

from framework.topology.builder import Topology
from framework.topology.dead_letters import LetterKeeper, LetterReader
from framework.topology.graph import Component
from framework.topology.spouts import DEAD_LETTER_STREAM


def letter_component(topology: Topology) -> Component | None:
    """The component that keeps the dead letters of a topology's spout in readable form; None: there
    is none."""
    for each in topology.components:
        takes = any(
            (sub.component_id, sub.stream) == (topology.spout.id, DEAD_LETTER_STREAM) for sub in each.subscriptions
        )
        keeper: object = each.instance
        if takes and isinstance(keeper, LetterKeeper):
            return each
    return None


def letter_reader_of(topology: Topology, conf: Mapping[str, Any], incarnation: str = "") -> LetterReader | None:
    """A reader with connections of its own; None when no letters are kept. ``incarnation``: selects
    the letters of the topology's present state."""
    component = letter_component(topology)
    if component is None:
        return None
    keeper: LetterKeeper = cloudpickle.loads(cloudpickle.dumps(component.instance))
    return keeper.letter_reader(conf, topology.id, incarnation)
