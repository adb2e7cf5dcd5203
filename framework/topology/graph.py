"""The parts of a topology's graph, for both kinds of topology: components, subscriptions, and the
checks that every graph must pass before anything runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from types import MappingProxyType
from typing import Any, Union

from framework.errors import TopologyError
from framework.topology.bolts import DEFAULT_STREAM, Bolt, Committer, Input, OutputFieldsDeclarer
from framework.topology.extra_partition_spout_wrapper import unwrapped
from framework.topology.fencing import FencedState
from framework.topology.fields import Fields
from framework.topology.groupings import (
    AllGrouping,
    DirectGrouping,
    FieldsGrouping,
    GlobalGrouping,
    Grouping,
    LocalOrShuffleGrouping,
    PartialKeyGrouping,
    ShuffleGrouping,
)
from framework.topology.method_signatures import check_factory, check_signatures
from framework.topology.rich_components import BaseRichSpout
from framework.topology.spouts import Spout

#: A higher parallelism is probably a mistake of units.
PARALLELISM_MAX = 10_000
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,127}")

AnySpout = Union[Spout, BaseRichSpout]


def stream_label(component_id: str, stream: str) -> str:
    """A stream as an input of a bolt: ``component``, or ``component/stream``."""
    return component_id if stream == "default" else f"{component_id}/{stream}"


def edge_label(component_id: str, stream: str, target: str) -> str:
    """A stream and the bolt that it goes into."""
    return f"{stream_label(component_id, stream)}->{target}"


@dataclass(frozen=True, slots=True)
class Subscription:
    """A bolt's subscription to one stream of one component."""

    component_id: str
    stream: str
    grouping: Grouping

    @property
    def label(self) -> str:
        return stream_label(self.component_id, self.stream)


@dataclass(frozen=True, slots=True)
class Component:
    """A spout or a bolt with its place in the graph.

    ``instance`` is the driver's own copy, used for inspection. ``factory`` is set when the user
    gave one; tasks then call it instead of copying the instance.
    """

    id: str
    parallelism: int
    instance: AnySpout | Bolt
    _: KW_ONLY
    streams: Mapping[str, Fields]
    subscriptions: tuple[Subscription, ...] = ()
    committer: bool = False
    factory: Callable[[], AnySpout | Bolt] | None = None
    direct_streams: frozenset[str] = frozenset()

    @property
    def states(self) -> tuple[FencedState, ...]:
        return tuple(self.instance.states()) if isinstance(self.instance, Bolt) else ()

    @property
    def can_undo(self) -> bool:
        """Whether a roll-back undoes all that this committer writes (C8)."""
        bolt = self.instance
        return all(state.can_undo for state in self.states) if self.states else isinstance(bolt, Bolt) and bolt.can_undo

    @property
    def writes_for_good(self) -> bool:
        """Whether tasks write what cannot be undone: those of a committer, or of a bolt with states
        below one. Data of a state that ``publishes`` is not in use before all tasks have ended."""
        if self.states:
            return not all(state.can_undo or state.publishes for state in self.states)
        return self.committer and not self.can_undo

    @property
    def refuses_whole(self) -> bool:
        """Whether this committer has written nothing of a transaction if it refuses a value."""
        bolt: Any = self.instance
        return self.parallelism == 1 and isinstance(bolt, Committer) and bolt.refuses_whole()


@dataclass(frozen=True, slots=True)
class Graph:
    """Components that feed each other, in topological order."""

    id: str
    components: tuple[Component, ...]
    _by_id: Mapping[str, Component] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_id", MappingProxyType({each.id: each for each in self.components}))

    def __getitem__(self, component_id: str) -> Component:
        return self._by_id[component_id]

    def parallelisms(self) -> dict[str, int]:
        """Component id -> number of tasks."""
        return {each.id: each.parallelism for each in self.components}

    def committed_last(self) -> frozenset[str]:
        """The components that commit after all others: the committers that write for good, and what
        is downstream of one."""
        for_good = {each.id for each in self.components if each.writes_for_good}
        return frozenset(
            each.id
            for each in self.components
            if each.id in for_good or any(above.id in for_good for above in upstream_of(self, each.id))
        )

    def only_writer(self) -> str | None:
        """The only component that writes rows to which rows of other tables may refer, if it has
        one task."""
        writers = [each for each in self.components if self._may_be_referenced(each)]
        return writers[0].id if len(writers) == 1 and writers[0].parallelism == 1 else None

    def _may_be_referenced(self, component: Component) -> bool:
        if component.states:
            return any(state.may_be_referenced for state in component.states)
        bolt = component.instance
        return component.committer and (not isinstance(bolt, Bolt) or not bolt.written_topics(self.id))

    def in_trials(self) -> tuple[Component, ...]:
        """The components of probes that try writes: all except the committers that send watermarks
        and what is below a committer. A committer that tries its writes at a given watermark does
        not count as below that of the watermark."""
        clocks = {each.id for each in self.components if _sends_only_watermarks(each)}
        found: dict[str, Component] = {}
        for each in self.components:
            rows = each.subscriptions
            if _tries_at_watermarks(each):
                rows = tuple(sub for sub in rows if sub.component_id not in clocks)
            above = [found.get(sub.component_id) for sub in rows]
            has_rows_early = all(source is not None and not source.committer for source in above)
            if each.id not in clocks and has_rows_early and bool(rows) == bool(each.subscriptions):
                found[each.id] = replace(each, subscriptions=rows)
        return tuple(found.values())

    def shape(self) -> dict[str, list[dict[str, Any]]]:
        """Components and the edges between them, JSON-able, for drawing."""
        return {
            "components": [
                {
                    "id": each.id,
                    "kind": "committer" if each.committer else "bolt" if isinstance(each.instance, Bolt) else "spout",
                    "class": type(unwrapped(each.instance)).__name__,
                    "parallelism": each.parallelism,
                    "states": [state.location for state in each.states],
                }
                for each in self.components
            ],
            "edges": [
                {
                    "source": sub.component_id,
                    "stream": sub.stream,
                    "target": each.id,
                    "grouping": sub.grouping.outline(),
                }
                for each in self.components
                for sub in each.subscriptions
            ],
        }


def _sends_only_watermarks(component: Component) -> bool:
    bolt: Any = component.instance
    return isinstance(bolt, Committer) and bolt.sends_only_watermarks


def _tries_at_watermarks(component: Component) -> bool:
    bolt: Any = component.instance
    return isinstance(bolt, Committer) and bolt.tries_at_watermarks and bolt.may_try_writes()


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
        """An equal share of the tuples goes to every task. ``local_or_shuffle_grouping`` costs
        less.
        """
        return self.grouping(component_id, ShuffleGrouping(), stream)

    def local_or_shuffle_grouping(self, component_id: str, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """Tuples stay in their task when both sides have the same number of tasks; otherwise as
        ``shuffle_grouping``."""
        return self.grouping(component_id, LocalOrShuffleGrouping(), stream)

    def none_grouping(self, component_id: str, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """Any task may get a tuple. The same as ``shuffle_grouping``."""
        return self.grouping(component_id, ShuffleGrouping(), stream)

    def fields_grouping(self, component_id: str, fields: Fields, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """Tuples with equal values in ``fields`` go to the same task."""
        return self.grouping(component_id, FieldsGrouping(fields), stream)

    def partial_key_grouping(self, component_id: str, fields: Fields, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """Tuples with equal values in ``fields`` go to one of two tasks."""
        return self.grouping(component_id, PartialKeyGrouping(fields), stream)

    def global_grouping(self, component_id: str, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """All tuples go to task 0."""
        return self.grouping(component_id, GlobalGrouping(), stream)

    def all_grouping(self, component_id: str, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """Every tuple goes to every task."""
        return self.grouping(component_id, AllGrouping(), stream)

    def direct_grouping(self, component_id: str, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """The sender names the task of each tuple. For streams declared with ``direct=True``."""
        return self.grouping(component_id, DirectGrouping(), stream)

    def custom_grouping(self, component_id: str, grouping: Grouping, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """Use a ``Grouping`` of your own. Raises ``TopologyError`` when it is not a
        ``Grouping``."""
        if not isinstance(grouping, Grouping):
            raise TopologyError(f"bolt {self._component_id!r}: a custom grouping must be a Grouping, not {grouping!r}")
        return self.grouping(component_id, grouping, stream)


class Bolts:
    """The bolts that a builder was given. ``taken``: whether an id belongs to another component.
    ``attempts``: tuples carry the transaction attempt."""

    def __init__(self, taken: Callable[[str], bool], *, attempts: bool = True) -> None:
        self._taken = taken
        self._attempts = attempts
        self._added: dict[str, Component] = {}
        self._subscriptions: dict[str, list[Subscription]] = {}

    def __contains__(self, component_id: object) -> bool:
        return component_id in self._added

    def add(
        self, bolt_id: str, bolt: Bolt | Callable[[], Bolt], parallelism: int, *, committer: bool = False
    ) -> BoltDeclarer:
        """Raises ``TopologyError`` for an id that is invalid or taken, a parallelism out of bounds,
        an object that is not a bolt, and a committer without ``finish_batch``."""
        valid_id("bolt", bolt_id)
        if self._taken(bolt_id) or bolt_id in self._added:
            raise TopologyError(f"component id {bolt_id!r} is used twice: every spout and bolt needs an id of its own")
        factory: Callable[[], Bolt] | None = None
        instance = bolt
        if not isinstance(bolt, Bolt) and callable(bolt):
            check_factory("bolt", bolt_id, bolt)
            factory = bolt
            instance = bolt()
        if not isinstance(instance, Bolt):
            raise TopologyError(
                f"bolt {bolt_id!r} is a {type(instance).__name__}: give a bolt or a function that makes one"
            )
        check_signatures("bolt", bolt_id, instance)
        marked = committer or isinstance(instance, Committer)
        if marked and not hasattr(instance, "finish_batch"):
            raise TopologyError(
                f"bolt {bolt_id!r} cannot commit: a committer needs finish_batch(), so make it a BaseBatchBolt, a "
                "BaseTransactionalBolt or an ArrowBolt"
            )
        self._added[bolt_id] = Component(
            bolt_id, checked_parallelism(bolt_id, parallelism), instance, streams={}, committer=marked, factory=factory
        )
        self._subscriptions[bolt_id] = []
        return BoltDeclarer(bolt_id, self._subscriptions[bolt_id])

    def subscribers(self, component_id: str, stream: str) -> list[Component]:
        """The bolts that subscribe to this stream."""
        return [
            self._added[bolt_id]
            for bolt_id, subscriptions in self._subscriptions.items()
            if any((each.component_id, each.stream) == (component_id, stream) for each in subscriptions)
        ]

    def components(self) -> Iterator[Component]:
        """The bolts with the streams that they declare and their subscriptions, unchecked."""
        for bolt_id, component in self._added.items():
            declarer = OutputFieldsDeclarer(bolt_id, attempts=self._attempts)
            component.instance.declare_output_fields(declarer)
            yield replace(
                component,
                streams=declarer.streams,
                subscriptions=tuple(self._subscriptions[bolt_id]),
                direct_streams=frozenset(declarer.direct),
            )


def in_order(components: Iterable[Component], *, attempts: bool = True) -> tuple[Component, ...]:
    """Order the components: spouts first, each bolt after the components it subscribes to. Check
    and bind every input. Raises ``TopologyError`` with the problem."""
    by_id = {each.id: each for each in components}
    ordered: list[Component] = []
    for component in _topological(by_id):
        ordered.append(_bound(component, by_id, attempts=attempts))
        by_id[component.id] = ordered[-1]
    return tuple(ordered)


def valid_id(kind: str, value: str) -> str:
    """Return ``value`` if it is safe in a ZooKeeper path, a log line and a file name. Raises
    ``TopologyError`` otherwise."""
    if not isinstance(value, str) or not _ID.fullmatch(value) or ".." in value:
        raise TopologyError(
            f"{kind} id {value!r} is not usable: 1 to 128 letters, digits, '.', '_' and '-', starting with a letter or "
            "a digit, without '..'"
        )
    return value


def checked_parallelism(component_id: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= PARALLELISM_MAX:
        raise TopologyError(f"component {component_id!r}: parallelism must be 1 to {PARALLELISM_MAX}, not {value!r}")
    return value


def _topological(components: Mapping[str, Component]) -> list[Component]:
    """Spouts first, each bolt after the components it subscribes to."""
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


def _bound(component: Component, components: Mapping[str, Component], *, attempts: bool) -> Component:
    """Check a bolt's inputs and let the bolt learn their types. Then call its declaration again,
    because its streams may depend on those types."""
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
    declarer = OutputFieldsDeclarer(component.id, attempts=attempts)
    bolt.declare_output_fields(declarer)
    return Component(
        component.id,
        component.parallelism,
        bolt,
        streams=MappingProxyType(declarer.streams),
        subscriptions=component.subscriptions,
        committer=component.committer,
        factory=component.factory,
        direct_streams=frozenset(declarer.direct),
    )


def upstream_of(topology: Graph, component_id: str) -> list[Component]:
    """Every component that feeds this one, directly or indirectly, in topological order."""
    wanted: set[str] = set()
    open_ids = [component_id]
    while open_ids:
        for sub in topology[open_ids.pop()].subscriptions:
            if sub.component_id not in wanted:
                wanted.add(sub.component_id)
                open_ids.append(sub.component_id)
    return [each for each in topology.components if each.id in wanted]
