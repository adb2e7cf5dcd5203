"""Builds an immutable transactional topology. Refuses, by name, whatever could not run or could not
be exactly-once."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from framework.errors import TopologyError
from framework.topology.bolts import Bolt, Committer, OutputFieldsDeclarer
from framework.topology.dead_letter_replay import with_letters
from framework.topology.dead_letters import LetterKeeper
from framework.topology.fencing import FencedState, ValueType
from framework.topology.graph import (
    BoltDeclarer,
    Bolts,
    Component,
    Graph,
    checked_parallelism,
    edge_label,
    in_order,
    upstream_of,
    valid_id,
)
from framework.topology.groupings import AllGrouping, DirectGrouping
from framework.topology.hashing import ALGORITHM
from framework.topology.method_signatures import check_signatures
from framework.topology.planning_time_stream import CLOCK_FIELDS, CLOCK_STREAM, OUTLINED_CLOCK, with_clock
from framework.topology.rich_components import BaseRichBolt
from framework.topology.spouts import (
    DEAD_LETTER_STREAM,
    OpaquePartitionedTransactionalSpout,
    PartitionedSpout,
    PartitionedTransactionalSpout,
    Spout,
    TransactionalSpout,
)
from framework.topology.written_topics import WrittenTopic


@dataclass(frozen=True, slots=True)
class Topology(Graph):
    """What ``TransactionalTopologyBuilder.build`` returns. The spout is the first component."""

    at_least_once: bool = False
    #: Configuration that the topology brings. A key that is configured wins.
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def spout(self) -> Component:
        return self.components[0]

    @property
    def states(self) -> tuple[FencedState, ...]:
        return tuple(state for component in self.components for state in component.states)

    def headerless(self) -> tuple[Component, ...]:
        """The committers that do not write to states. They have no header that says which commit
        was opened (C24)."""
        return tuple(each for each in self.components if each.committer and not each.states)

    def repeatable_inputs(self) -> Mapping[str, list[str]]:
        """Committers that cannot undo, and whose number of rows is the same in every attempt at a
        plan, because all components above them are deterministic (C11): id -> the labels of its
        inputs. Empty with ``at_least_once``."""
        found: dict[str, list[str]] = {}
        for each in self.components:
            bolt = each.instance
            if self.at_least_once or not each.committer or not isinstance(bolt, Bolt):
                continue
            merges = type(bolt).combiner is not Bolt.combiner  # the rows depend on the layout
            of_tasks = any(isinstance(sub.grouping, (AllGrouping, DirectGrouping)) for sub in each.subscriptions)
            # A committer emits in the commit phase. Every spout replays the same batch.
            differ = any(
                above.committer or not (_is_deterministic(above) or above.id == self.spout.id)
                for above in upstream_of(self, each.id)
            )
            if not (each.can_undo or merges or of_tasks or differ):
                found[each.id] = [edge_label(sub.component_id, sub.stream, each.id) for sub in each.subscriptions]
        return found

    def irreversible(self) -> list[str]:
        """What a roll-back could not undo (C8): states without previous values, and committers
        whose writes Ratchet does not see. Empty with ``at_least_once``."""
        if self.at_least_once:
            return []
        found = [state.location for state in self.states if not state.can_undo]
        return found + [f"bolt {each.id!r}" for each in self.headerless() if not each.can_undo]

    def commits_first(self) -> frozenset[str]:
        """The components of which none has run its commit phase after one that writes for good. If
        one of them fails, the attempt has written nothing that cannot be undone."""
        return frozenset(self.parallelisms()) - self.committed_last()

    def refuses_whole(self) -> frozenset[str]:
        """The only committer that writes for good, if it has written nothing when it refuses a
        value; otherwise empty."""
        for_good = [each for each in self.components if each.writes_for_good]
        return frozenset(each.id for each in for_good if len(for_good) == 1 and each.refuses_whole)

    def skips_replays(self) -> list[str]:
        """The components that are right only if a replayed batch is the same batch (C5, C11): those
        with transactional states, and committers whose tasks commit one by one. Empty with
        ``at_least_once``."""
        if self.at_least_once:
            return []
        found = []
        for component in self.components:
            if isinstance(component.instance, Bolt) and component.instance.needs_deterministic_input:
                found.append(f"bolt {component.id!r}, whose tasks are committed one by one")
            for state in component.states:
                if state.value_type is ValueType.TRANSACTIONAL:
                    found.append(f"bolt {component.id!r}, whose {state.location} is transactional")
        return found

    def written_topics(self) -> list[WrittenTopic]:
        """The topics that the bolts write, each with its bolt."""
        return [
            replace(written, component_id=each.id)
            for each in self.components
            if isinstance(each.instance, Bolt)
            for written in each.instance.written_topics(self.id)
        ]

    def steps(self) -> list[str]:
        """The bolts that may be added and removed while a state exists."""
        return [
            each.id for each in self.components if isinstance(each.instance, Bolt) and each.instance.may_come_and_go
        ]

    def outline(self) -> dict[str, object]:
        """The shape of the graph, JSON-able. Apart from ``steps``, it must not change while a state
        exists."""
        return {
            "fields_hash": ALGORITHM,
            "spout": self.spout.id,
            "components": {
                each.id: {
                    "parallelism": each.parallelism,
                    "committer": each.committer,
                    "streams": {
                        name: repr(OUTLINED_CLOCK if fields == CLOCK_FIELDS else fields)
                        for name, fields in sorted(each.streams.items())
                    },
                    "inputs": [
                        f"{sub.component_id}/{sub.stream} by {sub.grouping.outline()}" for sub in each.subscriptions
                    ],
                    "states": [state.location for state in each.states],
                    **_settings(each.instance),
                }
                for each in self.components
            },
        }

    def digest(self) -> str:
        """A hash of the outline."""
        return hashlib.sha256(json.dumps(self.outline(), sort_keys=True).encode()).hexdigest()[:16]


def _replays_letters(spout: object) -> TypeGuard[PartitionedSpout]:
    """Whether dead letters can be sent again: the spout reads them, and their committer gives
    them."""
    return (
        isinstance(spout, PartitionedSpout) and spout.replays_letters and isinstance(spout.dead_letters(), LetterKeeper)
    )


def _settings(instance: object) -> dict[str, object]:
    settings = {**instance.state_settings(), **instance.settings_above} if isinstance(instance, Committer) else {}
    return {"settings": settings} if settings else {}


class TopologyMaker(ABC):
    """What makes a topology by itself, so that it can be named to a command in its place."""

    @abstractmethod
    def build(self) -> Topology: ...


class TransactionalTopologyBuilder:
    """Builds a transactional topology: one spout, any number of bolts.

    ``topology_id`` names the state in ZooKeeper: a topology with the same id continues where the
    last run stopped. ``parallelism`` is the number of spout tasks. ``at_least_once=True`` allows
    combinations that may count a replayed batch twice.

    Source: ``org.apache.storm.transactional.TransactionalTopologyBuilder``.
    """

    def __init__(
        self,
        topology_id: str,
        spout_id: str,
        spout: Spout,
        parallelism: int = 1,
        *,
        at_least_once: bool = False,
    ) -> None:
        self._topology_id = valid_id("topology", topology_id)
        if not isinstance(
            spout, (TransactionalSpout, PartitionedTransactionalSpout, OpaquePartitionedTransactionalSpout)
        ):
            raise TopologyError(
                f"spout {spout_id!r} is a {type(spout).__name__}: a transactional topology takes a TransactionalSpout, a "
                "PartitionedTransactionalSpout or an OpaquePartitionedTransactionalSpout"
            )
        self._at_least_once = at_least_once
        self._given_spout: Spout = spout
        check_signatures("spout", valid_id("spout", spout_id), spout)
        self._spout = _component(spout_id, checked_parallelism(spout_id, parallelism), spout)
        self._bolts = Bolts(lambda component_id: component_id == spout_id)
        dead_letters = spout.dead_letters()
        if dead_letters is not None:  # C20: a hidden stream into a committer
            hidden = self._bolts.add(f"{spout_id}-dead-letters", dead_letters, 1, committer=True)
            hidden.global_grouping(spout_id, DEAD_LETTER_STREAM)

    def set_bolt(self, bolt_id: str, bolt: Bolt | Callable[[], Bolt], parallelism: int = 1) -> BoltDeclarer:
        """Add a bolt: an instance, copied for each batch and task, or a factory without
        arguments."""
        return self._bolts.add(bolt_id, bolt, parallelism)

    def set_committer_bolt(self, bolt_id: str, bolt: Bolt | Callable[[], Bolt], parallelism: int = 1) -> BoltDeclarer:
        """Add a batch bolt whose ``finish_batch`` belongs to the commit phase, whether or not it is
        a ``Committer``."""
        return self._bolts.add(bolt_id, bolt, parallelism, committer=True)

    def build(self) -> Topology:
        """Check everything and return the topology. Raises ``TopologyError`` naming what is
        wrong."""
        given = self._with_tombstones()
        spout = self._spout
        if given is not self._given_spout:
            spout = _component(spout.id, spout.parallelism, given)
        if CLOCK_STREAM not in spout.streams and self._bolts.subscribers(spout.id, CLOCK_STREAM):
            clocked = with_clock(spout.id, given)
            spout = replace(spout, instance=clocked, streams={**spout.streams, CLOCK_STREAM: CLOCK_FIELDS})
        if _replays_letters(spout.instance):
            spout = replace(spout, instance=with_letters(spout.instance))
        topology = Topology(
            self._topology_id, in_order((spout, *self._bolts.components())), at_least_once=self._at_least_once
        )
        _check_refusals(topology, given)
        read = given.read_topics()
        written = topology.written_topics()
        for component in topology.components:
            if isinstance(component.instance, Bolt):
                component.instance.bind_read_topics(read)
                component.instance.bind_written_topics(written)
        _check_states(topology)
        return topology

    def _with_tombstones(self) -> Spout:
        """The spout, telling tombstones where a bolt that reads it directly deletes rows for them.
        Raises ``TopologyError`` where another bolt would get the field, too, without asking."""
        spout = self._given_spout
        for stream in self._spout.streams:
            bolts = self._bolts.subscribers(self._spout.id, stream)
            asking = [each.id for each in bolts if isinstance(each.instance, Bolt) and each.instance.tombstone_keys]
            changed = spout.with_tombstones(stream) if asking else spout
            others = [each.id for each in bolts if each.id not in asking]
            if changed is not spout and others:
                raise TopologyError(
                    f"bolt {asking[0]!r} deletes a row for each tombstone, and bolt {others[0]!r} reads the same stream "
                    f"{stream!r} of spout {self._spout.id!r}: give the spout metadata=['tombstone'], a field that both then get"
                )
            spout = changed
        return spout


def _component(spout_id: str, parallelism: int, spout: Spout) -> Component:
    declarer = OutputFieldsDeclarer(spout_id)
    spout.declare_output_fields(declarer)
    direct = frozenset(declarer.direct)
    return Component(spout_id, parallelism, spout, streams=declarer.streams, direct_streams=direct)


def _check_refusals(topology: Topology, spout: Spout) -> None:
    """Check that what a bolt says about the records that it refuses can be done, and that some
    records may come to the committer of the dead letters."""
    bolts = {each.id: each.instance for each in topology.components if isinstance(each.instance, Bolt)}
    for name, bolt in bolts.items():
        if bolt.on_bad_record not in ("fail", "skip", "dead_letter"):
            raise TopologyError(
                f"bolt {name!r}: on_bad_record must be 'fail', 'skip' or 'dead_letter', not {bolt.on_bad_record!r}"
            )
        if bolt.on_bad_record == "dead_letter" and spout.dead_letters() is None:
            raise TopologyError(
                f"bolt {name!r} makes dead letters of the records that it refuses, and spout {topology.spout.id!r} names no "
                "committer for them: give it dead_letters="
            )
    wanted = spout.has_dead_letters or any(bolt.on_bad_record == "dead_letter" for bolt in bolts.values())
    if spout.dead_letters() is not None and not wanted:
        raise TopologyError(
            f"spout {topology.spout.id!r} has dead_letters=, and no record comes there: say on_bad_record='dead_letter' to it, "
            "or to a bolt"
        )


def _check_states(topology: Topology) -> None:
    """Check the guarantee matrix (C5), and that each state has one owner (C12)."""
    owners: dict[str, str] = {}
    opaque_spout = isinstance(topology.spout.instance, OpaquePartitionedTransactionalSpout)
    for component in topology.components:
        if isinstance(component.instance, BaseRichBolt):
            raise TopologyError(
                f"bolt {component.id!r} is a {type(component.instance).__name__}, which acks tuples one by one: a transactional "
                "topology fails and replays whole batches; use a BaseBasicBolt or a batch bolt, or a TopologyBuilder"
            )
        if not topology.at_least_once and isinstance(component.instance, Bolt):
            _check_committer(topology, component, component.instance)
        for state in component.states:
            owner = owners.get(state.location)
            if owner == component.id:
                raise TopologyError(
                    f"bolt {owner!r} has two states at {state.location}: their rows would be the same; give one another place"
                )
            if owner is not None:
                raise TopologyError(
                    f"bolts {owner!r} and {component.id!r} both write to {state.location}: a state belongs to one component"
                )
            owners[state.location] = component.id
            if not (component.committer or _below_committer(topology, component)):
                raise TopologyError(
                    f"bolt {component.id!r} holds the state {state.location} but never commits: make it a Committer or "
                    "add it with set_committer_bolt()"
                )
            if not topology.at_least_once:
                _check_guarantee(topology, component, state, opaque_spout)


_AT_LEAST_ONCE = "or say at_least_once=True to the builder if counting a replayed batch twice is acceptable"


def _check_guarantee(topology: Topology, component: Component, state: FencedState, opaque_spout: bool) -> None:
    advice = _AT_LEAST_ONCE
    if state.value_type is ValueType.NON_TRANSACTIONAL:
        raise TopologyError(
            f"bolt {component.id!r} writes to {state.location} without transaction ids, so a replayed batch would count "
            f"twice: use a transactional or an opaque state, {advice}"
        )
    if state.value_type is not ValueType.TRANSACTIONAL:
        return
    if opaque_spout:
        raise TopologyError(
            f"spout {topology.spout.id!r} is opaque, so a batch may change between attempts, but bolt {component.id!r} "
            f"skips what it has seen ({state.location} is transactional): use an opaque state, {advice}"
        )
    guess = _first_guess(topology, component)
    if guess is not None:
        raise TopologyError(
            f"component {guess.id!r} is not declared deterministic, but bolt {component.id!r} below it skips "
            f"replayed batches ({state.location} is transactional): set deterministic = True on it if equal input "
            f"always gives equal output, or use an opaque state, {advice}"
        )


def _check_committer(topology: Topology, component: Component, bolt: Bolt) -> None:
    """Check what a committer declares about its own writes."""
    if not bolt.exactly_once:
        raise TopologyError(
            f"bolt {component.id!r} may write a replayed batch again: make it exactly-once, {_AT_LEAST_ONCE}"
        )
    guess = _first_guess(topology, component) if bolt.needs_deterministic_input else None
    # Every spout reads an opened batch again as it was.
    if guess is not None and guess.id != topology.spout.id:
        raise TopologyError(
            f"component {guess.id!r} is not declared deterministic, but the tasks of bolt {component.id!r} below it are "
            "committed one by one, and a replay skips those that are: set deterministic = True on it if equal input always "
            f"gives equal output, or give {component.id!r} parallelism 1, {_AT_LEAST_ONCE}"
        )


def _first_guess(topology: Topology, component: Component) -> Component | None:
    """The first component, from the top down to this one, whose output may differ in a replay.
    Bolts come before the spout."""
    path = sorted((*upstream_of(topology, component.id), component), key=lambda each: each.id == topology.spout.id)
    return next((each for each in path if not _is_deterministic(each)), None)


def _is_deterministic(component: Component) -> bool:
    return bool(getattr(component.instance, "deterministic", False))


def _below_committer(topology: Topology, component: Component) -> bool:
    return any(each.committer for each in upstream_of(topology, component.id))
