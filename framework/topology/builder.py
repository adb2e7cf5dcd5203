"""Builds an immutable topology and refuses, by name, everything that could not run or not be exactly-once."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from framework.errors import TopologyError
from framework.topology.bolts import (
    DEFAULT_STREAM,
    Bolt,
    Committer,
    Input,
    OutputFieldsDeclarer,
)
from framework.topology.fencing import FencedState, ValueType
from framework.topology.fields import Fields
from framework.topology.groupings import (
    AllGrouping,
    DirectGrouping,
    FieldsGrouping,
    GlobalGrouping,
    Grouping,
    PartialKeyGrouping,
    ShuffleGrouping,
)
from framework.topology.hashing import ALGORITHM
from framework.topology.spouts import (
    DEAD_LETTER_STREAM,
    OpaquePartitionedTransactionalSpout,
    PartitionedTransactionalSpout,
    Spout,
    TransactionalSpout,
)

#: Above this a topology is a mistake of units, not a plan.
PARALLELISM_MAX = 10_000
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,127}")


@dataclass(frozen=True, slots=True)
class Subscription:
    """A bolt's subscription to one stream of one component."""

    component_id: str
    stream: str
    grouping: Grouping


@dataclass(frozen=True, slots=True)
class Component:
    """A spout or a bolt with its place in the graph. ``instance`` is the driver's own, used for inspection;
    ``factory`` is set when the user gave one, and then tasks call it instead of copying the instance."""

    id: str
    parallelism: int
    instance: Spout | Bolt
    streams: Mapping[str, Fields]
    subscriptions: tuple[Subscription, ...] = ()
    committer: bool = False
    factory: Callable[[], Bolt] | None = None
    direct_streams: frozenset[str] = frozenset()

    @property
    def states(self) -> tuple[FencedState, ...]:
        return tuple(self.instance.states()) if isinstance(self.instance, Bolt) else ()


@dataclass(frozen=True, slots=True)
class Topology:
    """What ``build`` returns. ``components`` are in topological order, the spout first."""

    id: str
    components: tuple[Component, ...]
    at_least_once: bool = False
    _by_id: Mapping[str, Component] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_id", MappingProxyType({each.id: each for each in self.components}))

    def __getitem__(self, component_id: str) -> Component:
        return self._by_id[component_id]

    @property
    def spout(self) -> Component:
        return self.components[0]

    @property
    def states(self) -> tuple[FencedState, ...]:
        return tuple(state for component in self.components for state in component.states)

    def parallelisms(self) -> dict[str, int]:
        """Component id -> number of tasks."""
        return {each.id: each.parallelism for each in self.components}

    def irreversible(self) -> list[str]:
        """What a roll-back could not undo (C8): sinks without previous values, committers whose writes Ratchet does not
        see. Nothing when at-least-once was asked for."""
        if self.at_least_once:
            return []
        found = [state.location for state in self.states if not state.can_undo]
        for component in self.components:
            bolt = component.instance
            if component.committer and isinstance(bolt, Bolt) and not component.states and not bolt.can_undo:
                found.append(f"bolt {component.id!r}")
        return found

    def outline(self) -> dict[str, object]:
        """The shape of the graph, JSON-able: what must not change under existing state."""
        return {
            "fields_hash": ALGORITHM,
            "spout": self.spout.id,
            "components": {
                each.id: {
                    "parallelism": each.parallelism,
                    "committer": each.committer,
                    "streams": {name: repr(fields) for name, fields in sorted(each.streams.items())},
                    "inputs": [
                        f"{sub.component_id}/{sub.stream} by {sub.grouping.outline()}" for sub in each.subscriptions
                    ],
                    "states": [state.location for state in each.states],
                }
                for each in self.components
            },
        }

    def digest(self) -> str:
        """A hash of the outline."""
        return hashlib.sha256(json.dumps(self.outline(), sort_keys=True).encode()).hexdigest()[:16]


class BoltDeclarer:
    """Takes the groupings of one bolt. Each method returns the declarer, so that calls chain.

    Source: ``org.apache.storm.topology.InputDeclarer``.
    """

    def __init__(self, component_id: str, subscriptions: list[Subscription]) -> None:
        self._component_id = component_id
        self._subscriptions = subscriptions

    def grouping(self, component_id: str, grouping: Grouping, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        for known in self._subscriptions:
            if (known.component_id, known.stream) == (component_id, stream):
                raise TopologyError(
                    f"bolt {self._component_id!r} subscribes to stream {stream!r} of {component_id!r} twice: every tuple "
                    "would be processed twice; keep one of the groupings"
                )
        self._subscriptions.append(Subscription(component_id, stream, grouping))
        return self

    def shuffle_grouping(self, component_id: str, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """Equal shares of each batch to every task."""
        return self.grouping(component_id, ShuffleGrouping(), stream)

    def local_or_shuffle_grouping(self, component_id: str, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """As shuffle; tuples stay in their task where both sides have as many."""
        return self.grouping(component_id, ShuffleGrouping(), stream)

    def none_grouping(self, component_id: str, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """You do not care: as shuffle."""
        return self.grouping(component_id, ShuffleGrouping(), stream)

    def fields_grouping(self, component_id: str, fields: Fields, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """Equal values in ``fields``, same task."""
        return self.grouping(component_id, FieldsGrouping(fields), stream)

    def partial_key_grouping(self, component_id: str, fields: Fields, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """Equal values in ``fields``, one of two tasks."""
        return self.grouping(component_id, PartialKeyGrouping(fields), stream)

    def global_grouping(self, component_id: str, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """Everything to task 0."""
        return self.grouping(component_id, GlobalGrouping(), stream)

    def all_grouping(self, component_id: str, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """Everything to every task."""
        return self.grouping(component_id, AllGrouping(), stream)

    def direct_grouping(self, component_id: str, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """The sender names the task: for streams declared with ``direct=True``."""
        return self.grouping(component_id, DirectGrouping(), stream)

    def custom_grouping(self, component_id: str, grouping: Grouping, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """Your own ``Grouping``."""
        if not isinstance(grouping, Grouping):
            raise TopologyError(f"bolt {self._component_id!r}: a custom grouping must be a Grouping, not {grouping!r}")
        return self.grouping(component_id, grouping, stream)


class TransactionalTopologyBuilder:
    """Builds a transactional topology: one spout, any number of bolts.

    ``topology_id`` names the state in ZooKeeper: the same id goes on where it left off. ``parallelism`` is the number
    of tasks. ``at_least_once=True`` admits pairs of spout and state that may count a replayed batch twice.

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
        declarer = OutputFieldsDeclarer(valid_id("spout", spout_id))
        spout.declare_output_fields(declarer)
        self._spout = Component(
            spout_id,
            _parallelism(spout_id, parallelism),
            spout,
            declarer.streams,
            direct_streams=frozenset(declarer.direct),
        )
        self._bolts: dict[str, tuple[int, Bolt, Callable[[], Bolt] | None, bool, list[Subscription]]] = {}
        dead_letters = spout.dead_letters()
        if dead_letters is not None:  # C20: a hidden stream into a committer
            hidden = self._add(f"{spout_id}-dead-letters", dead_letters, 1, committer=True)
            hidden.global_grouping(spout_id, DEAD_LETTER_STREAM)

    def set_bolt(self, bolt_id: str, bolt: Bolt | Callable[[], Bolt], parallelism: int = 1) -> BoltDeclarer:
        """Add a bolt: an instance, copied for each batch and task, or a factory without arguments."""
        return self._add(bolt_id, bolt, parallelism, committer=False)

    def set_committer_bolt(self, bolt_id: str, bolt: Bolt | Callable[[], Bolt], parallelism: int = 1) -> BoltDeclarer:
        """Add a batch bolt whose ``finish_batch`` belongs to the commit phase, whether or not it is a ``Committer``."""
        return self._add(bolt_id, bolt, parallelism, committer=True)

    def _add(self, bolt_id: str, bolt: Bolt | Callable[[], Bolt], parallelism: int, *, committer: bool) -> BoltDeclarer:
        valid_id("bolt", bolt_id)
        if bolt_id == self._spout.id or bolt_id in self._bolts:
            raise TopologyError(f"component id {bolt_id!r} is used twice: every spout and bolt needs an id of its own")
        factory: Callable[[], Bolt] | None = None
        instance = bolt
        if not isinstance(bolt, Bolt) and callable(bolt):
            factory = bolt
            instance = bolt()
        if not isinstance(instance, Bolt):
            raise TopologyError(
                f"bolt {bolt_id!r} is a {type(instance).__name__}: give a bolt or a function that makes one"
            )
        marked = committer or isinstance(instance, Committer)
        if marked and not hasattr(instance, "finish_batch"):
            raise TopologyError(
                f"bolt {bolt_id!r} cannot commit: a committer needs finish_batch(), so make it a BaseBatchBolt, a "
                "BaseTransactionalBolt or an ArrowBolt"
            )
        subscriptions: list[Subscription] = []
        self._bolts[bolt_id] = (_parallelism(bolt_id, parallelism), instance, factory, marked, subscriptions)
        return BoltDeclarer(bolt_id, subscriptions)

    def build(self) -> Topology:
        """Check everything and return the topology. Raises ``TopologyError`` naming what is wrong."""
        components = {self._spout.id: self._spout}
        for bolt_id, (parallelism, bolt, factory, committer, subscriptions) in self._bolts.items():
            declarer = OutputFieldsDeclarer(bolt_id)
            bolt.declare_output_fields(declarer)
            components[bolt_id] = Component(
                bolt_id,
                parallelism,
                bolt,
                declarer.streams,
                tuple(subscriptions),
                committer,
                factory,
                frozenset(declarer.direct),
            )
        ordered: list[Component] = []
        for component in _topological(components):
            ordered.append(_bound(component, components))
            components[component.id] = ordered[-1]
        topology = Topology(self._topology_id, tuple(ordered), self._at_least_once)
        _check_states(topology)
        return topology


def valid_id(kind: str, value: str) -> str:
    """An id that is safe in a ZooKeeper path, a log line and a file name. Raises ``TopologyError``."""
    if not isinstance(value, str) or not _ID.fullmatch(value) or ".." in value:
        raise TopologyError(
            f"{kind} id {value!r} is not usable: 1 to 128 letters, digits, '.', '_' and '-', starting with a letter or "
            "a digit, without '..'"
        )
    return value


def _parallelism(component_id: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= PARALLELISM_MAX:
        raise TopologyError(f"component {component_id!r}: parallelism must be 1 to {PARALLELISM_MAX}, not {value!r}")
    return value


def _topological(components: Mapping[str, Component]) -> list[Component]:
    """Spout first, each bolt after what it subscribes to."""
    for component in components.values():
        if isinstance(component.instance, Bolt) and not component.subscriptions:
            raise TopologyError(
                f"bolt {component.id!r} subscribes to nothing: add a grouping, such as shuffle_grouping(...)"
            )
        for sub in component.subscriptions:
            if sub.component_id not in components:
                known = ", ".join(sorted(components))
                raise TopologyError(
                    f"bolt {component.id!r} subscribes to {sub.component_id!r}, which does not exist (there are: {known})"
                )
    done: dict[str, Component] = {}
    waiting = dict(components)
    while waiting:
        ready = [each for each in waiting.values() if all(sub.component_id in done for sub in each.subscriptions)]
        if not ready:
            raise TopologyError(
                f"the topology has a cycle through {', '.join(sorted(waiting))}: batches would never end"
            )
        for each in ready:
            done[each.id] = waiting.pop(each.id)
    return list(done.values())


def _bound(component: Component, components: Mapping[str, Component]) -> Component:
    """Check a bolt's inputs and let it learn their types; declared streams are asked again, now that it knows them."""
    bolt = component.instance
    if not isinstance(bolt, Bolt):
        return component
    inputs: list[Input] = []
    for sub in component.subscriptions:
        streams = components[sub.component_id].streams
        if sub.stream not in streams:
            known = ", ".join(sorted(streams)) or "none"
            raise TopologyError(
                f"bolt {component.id!r} subscribes to stream {sub.stream!r} of {sub.component_id!r}, which does not "
                f"declare it (declared: {known})"
            )
        direct = sub.stream in components[sub.component_id].direct_streams
        if direct != isinstance(sub.grouping, DirectGrouping):
            raise TopologyError(
                f"bolt {component.id!r} and stream {sub.stream!r} of {sub.component_id!r} disagree: "
                + (
                    "the stream is declared direct, so subscribe with direct_grouping"
                    if direct
                    else "direct_grouping needs a stream declared with direct=True"
                )
            )
        fields = streams[sub.stream]
        grouped = sub.grouping.key_fields()
        for name in grouped.names if grouped is not None else ():
            if name not in fields:
                raise TopologyError(
                    f"bolt {component.id!r} groups {sub.component_id!r} by field {name!r}, which stream {sub.stream!r} "
                    f"does not have (it has: {', '.join(fields.names)})"
                )
        inputs.append(Input(sub.component_id, sub.stream, fields, sub.grouping))
    bolt.bind(component.id, inputs, component.parallelism)
    declarer = OutputFieldsDeclarer(component.id)
    bolt.declare_output_fields(declarer)
    return Component(
        component.id,
        component.parallelism,
        bolt,
        MappingProxyType(declarer.streams),
        component.subscriptions,
        component.committer,
        component.factory,
        frozenset(declarer.direct),
    )


def upstream_of(topology: Topology, component_id: str) -> list[Component]:
    """Every component that feeds this one, directly or not, in topological order."""
    wanted: set[str] = set()
    open_ids = [component_id]
    while open_ids:
        for sub in topology[open_ids.pop()].subscriptions:
            if sub.component_id not in wanted:
                wanted.add(sub.component_id)
                open_ids.append(sub.component_id)
    return [each for each in topology.components if each.id in wanted]


def _check_states(topology: Topology) -> None:
    """The guarantee matrix (C5) and one owner per state (C12)."""
    owners: dict[str, str] = {}
    opaque_spout = isinstance(topology.spout.instance, OpaquePartitionedTransactionalSpout)
    for component in topology.components:
        if not topology.at_least_once and isinstance(component.instance, Bolt):
            _check_committer(topology, component, component.instance)
        for state in component.states:
            owner = owners.setdefault(state.location, component.id)
            if owner != component.id:
                raise TopologyError(
                    f"bolts {owner!r} and {component.id!r} both write to {state.location}: a state belongs to one component"
                )
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
    """What a committer says of its own writes."""
    if not bolt.exactly_once:
        raise TopologyError(
            f"bolt {component.id!r} may write a replayed batch again: make it exactly-once, {_AT_LEAST_ONCE}"
        )
    guess = _first_guess(topology, component) if bolt.needs_deterministic_input else None
    if guess is not None and guess.id != topology.spout.id:  # an opened batch is read again as it was, from any spout
        raise TopologyError(
            f"component {guess.id!r} is not declared deterministic, but the tasks of bolt {component.id!r} below it are "
            "committed one by one, and a replay skips those that are: set deterministic = True on it if equal input always "
            f"gives equal output, or give {component.id!r} parallelism 1, {_AT_LEAST_ONCE}"
        )


def _first_guess(topology: Topology, component: Component) -> Component | None:
    """The first component down to this one whose output may differ in a replay; a bolt before the spout."""
    path = sorted((*upstream_of(topology, component.id), component), key=lambda each: each.id == topology.spout.id)
    return next((each for each in path if not each.instance.deterministic), None)


def _below_committer(topology: Topology, component: Component) -> bool:
    return any(each.committer for each in upstream_of(topology, component.id))
