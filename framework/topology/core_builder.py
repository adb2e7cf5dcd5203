"""Builds a core topology: any number of spouts and bolts. The user chooses between at least once
and at most once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from framework.errors import TopologyError
from framework.topology.bolts import BaseBasicBolt, Bolt, OutputFieldsDeclarer
from framework.topology.graph import (
    BoltDeclarer,
    Bolts,
    Component,
    Graph,
    checked_parallelism,
    in_order,
    valid_id,
)
from framework.topology.method_signatures import check_factory, check_signatures
from framework.topology.rich_components import BaseRichBolt, BaseRichSpout
from framework.topology.spouts import DEAD_LETTER_STREAM
from framework.topology.stateful import BaseStatefulBolt

#: The most tasks at which trees can begin: a root identifies its task by 12 bits.
ROOTED_TASKS_MAX = 1 << 12


@dataclass(frozen=True, slots=True)
class CoreTopology(Graph):
    """The result of ``TopologyBuilder.build``. The spouts are the first components."""

    @property
    def spouts(self) -> tuple[Component, ...]:
        return tuple(each for each in self.components if isinstance(each.instance, BaseRichSpout))


class TopologyBuilder:
    """Builds a core topology. ``topology_id`` names it in logs and in the status.

    >>> from framework.topology import Fields
    >>> class Numbers(BaseRichSpout):
    ...     def next_tuple(self): ...
    ...     def declare_output_fields(self, declarer):
    ...         declarer.declare(Fields(n=int))
    >>> class Show(BaseBasicBolt):
    ...     def execute(self, tup, collector):
    ...         print(tup["n"])
    >>> builder = TopologyBuilder("show-numbers")
    >>> builder.set_spout("numbers", Numbers(), 2)
    >>> _ = builder.set_bolt("show", Show(), 2).shuffle_grouping("numbers")
    >>> builder.build().parallelisms()
    {'numbers': 2, 'show': 2}

    Source: ``org.apache.storm.topology.TopologyBuilder``.
    """

    def __init__(self, topology_id: str = "topology") -> None:
        self._topology_id = valid_id("topology", topology_id)
        self._spouts: dict[str, Component] = {}
        self._bolts = Bolts(lambda component_id: component_id in self._spouts, attempts=False)

    def set_spout(
        self, spout_id: str, spout: BaseRichSpout | Callable[[], BaseRichSpout], parallelism: int = 1
    ) -> None:
        """Add a spout: an instance, which is copied for each task, or a factory without arguments.
        ``parallelism``: the number of its tasks."""
        valid_id("spout", spout_id)
        if spout_id in self._spouts or spout_id in self._bolts:
            raise TopologyError(f"component id {spout_id!r} is used twice: every spout and bolt needs an id of its own")
        factory = spout if not isinstance(spout, BaseRichSpout) and callable(spout) else None
        if factory is not None:
            check_factory("spout", spout_id, factory)
        instance = factory() if factory is not None else spout
        if not isinstance(instance, BaseRichSpout):
            raise TopologyError(
                f"spout {spout_id!r} is a {type(instance).__name__}: a core topology takes a BaseRichSpout; transactional "
                "spouts belong into a TransactionalTopologyBuilder"
            )
        check_signatures("spout", spout_id, instance)
        declarer = OutputFieldsDeclarer(spout_id, attempts=False)
        instance.declare_output_fields(declarer)
        self._spouts[spout_id] = Component(
            spout_id,
            checked_parallelism(spout_id, parallelism),
            instance,
            streams=declarer.streams,
            factory=factory,
            direct_streams=frozenset(declarer.direct),
        )

    def set_bolt(self, bolt_id: str, bolt: Bolt | Callable[[], Bolt], parallelism: int = 1) -> BoltDeclarer:
        """Add a ``BaseRichBolt`` or a ``BaseBasicBolt``: an instance, which is copied for each
        task, or a factory without arguments."""
        return self._bolts.add(bolt_id, bolt, parallelism)

    def build(self) -> CoreTopology:
        """Check everything and return the topology. Raises ``TopologyError`` with the problem."""
        if not self._spouts:
            raise TopologyError(f"topology {self._topology_id!r} has no spout: add one with set_spout(...)")
        rooted = [each for each in self._bolts.components() if isinstance(each.instance, BaseStatefulBolt)]
        tasks = sum(each.parallelism for each in (*self._spouts.values(), *rooted))
        if tasks > ROOTED_TASKS_MAX:
            raise TopologyError(
                f"the spouts and the stateful bolts have {tasks} tasks together; {ROOTED_TASKS_MAX} is the most"
            )
        components = in_order((*self._spouts.values(), *self._bolts.components()), attempts=False)
        topology = CoreTopology(self._topology_id, components)
        taken = {(each.component_id, each.stream) for bolt in topology.components for each in bolt.subscriptions}
        for spout in topology.spouts:
            if DEAD_LETTER_STREAM in spout.streams and (spout.id, DEAD_LETTER_STREAM) not in taken:
                raise TopologyError(
                    f"spout {spout.id!r} emits what it gives up on the stream {DEAD_LETTER_STREAM!r}, and no bolt subscribes to "
                    "that: those records would be lost; add a bolt that keeps them, or have the spout drop them"
                )
        for component in topology.components:
            bolt = component.instance
            if isinstance(bolt, Bolt) and (component.committer or not isinstance(bolt, (BaseRichBolt, BaseBasicBolt))):
                raise TopologyError(
                    f"bolt {component.id!r} is a {type(bolt).__name__}, which works on batches: a core topology has none; "
                    "use a BaseRichBolt or a BaseBasicBolt, or a TransactionalTopologyBuilder"
                )
        return topology
