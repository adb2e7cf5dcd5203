"""The progress of the source partitions, for bolts that use event time: the partitions that are not
read to the end, and the newest time of each partition.

The information flows in three steps. Spout tasks report the partitions that they have not read to
the end. The tasks of such bolts report the newest time that they have seen of each partition. The
driver combines both (``EventTimes``), and the next round carries the result to the tasks
(``Marks``).

A partition is identified by an *origin*, a part of the roots of its trees
(``framework.acking.ack_reports``). So every row that bolts derive from a record still identifies
the record's partition.

Invariants:

1. Marks cover every tuple that was emitted in rounds up to ``Marks.upto``: every bolt has executed
   all of them. So the driver makes marks only when no tuple waits.
2. After a recovery, times seen before it are discarded: the spouts go back and emit older records
   again.
3. The partitions of a spout count as unknown until every task of the spout has reported its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from framework.execution.plan import Edge, ExecutionPlan
from framework.operators.watermarks import NEVER, Reading, Source
from framework.topology import BaseRichSpout, BaseStatefulBolt, CoreTopology

#: The origins that a spout task has not read to the end -> the stream that each is emitted on
#: (None: any). None while the task does not know.
Unread = Mapping[int, str | None]
#: Origin -> the newest time seen of it, in ms. The key None stands for rows without an origin.
Newest = Mapping[int | None, int]


class Marks(NamedTuple):
    """The progress of the source partitions once all rounds up to ``upto`` are done. ``unread``:
    spout -> its unread origins; a spout whose partitions are unknown is missing. ``newest``: by
    bolt and input."""

    upto: int
    unread: Mapping[str, Unread]
    newest: Mapping[tuple[str, Source], Mapping[int, int]]


class EventTimes:
    """The driver's part. ``spout_tasks``: component ids and tasks. ``marks``: for the next
    round."""

    def __init__(self, spout_tasks: Collection[tuple[str, int]]) -> None:
        self._spout_tasks = spout_tasks
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget everything, because the spouts go back."""
        self.marks: Marks | None = None
        self._unread: dict[tuple[str, int], Unread | None] = dict.fromkeys(self._spout_tasks)
        self._newest: dict[tuple[str, Source], dict[int, int]] = {}
        self._changed = True
        # the marks sent last, and the first round that carried them
        self._told: tuple[Marks | None, int] = None, 0

    def news(self) -> Marks | None:
        """The marks, if no round has carried them yet."""
        return self.marks if self.marks is not self._told[0] else None

    def told(self, round_number: int) -> None:
        """Note that this round carries the marks."""
        self._told = self.marks, round_number

    def are_known(self, round_number: int) -> bool:
        """Whether the tasks have the current marks once this round has ended."""
        told, since = self._told
        return told is self.marks and round_number >= since

    def hear_unread(self, component_id: str, task: int, unread: Unread | None) -> None:
        if unread != self._unread[(component_id, task)]:
            self._unread[(component_id, task)] = unread
            self._changed = True

    def hear_newest(self, component_id: str, newest: Mapping[Source, Newest]) -> None:
        for source, seen in newest.items():
            known = self._newest.setdefault((component_id, source), {})
            for origin, at in seen.items():
                if origin is not None:
                    known[origin] = max(at, known.get(origin, NEVER))
            self._changed = True

    def settle(self, upto: int) -> None:
        """Make new marks: all rounds up to this one are done, and no tuple waits."""
        if not self._changed:
            return
        self._changed = False
        unread: dict[str, dict[int, str | None]] = {}
        unknown = {spout for (spout, _), its in self._unread.items() if its is None}
        for (spout, _), its in self._unread.items():
            if spout not in unknown:
                unread.setdefault(spout, {}).update(its or {})
        self.marks = Marks(upto, unread, {each: dict(known) for each, known in self._newest.items()})


@dataclass(frozen=True, slots=True)
class Path:
    """The route of rows from the spouts to an input of a bolt. ``spouts``: each with its stream.
    ``in_order``: rows of one source partition do not overtake each other."""

    spouts: frozenset[tuple[str, str]]
    in_order: bool

    def unread(self, marks: Marks, newest: Mapping[int, int]) -> Mapping[int, int] | None:
        """The unread origins whose rows may take this route, with their newest times."""
        found: dict[int, int] = {}
        for spout, stream in self.spouts:
            its = marks.unread.get(spout)
            if its is None:
                return None
            found.update(
                (origin, newest.get(origin, NEVER)) for origin, goes_on in its.items() if goes_on in (None, stream)
            )
        return found


Paths = Mapping[str, Mapping[Source, Path]]


def paths_of(topology: CoreTopology, plan: ExecutionPlan) -> Paths:
    """The inputs of the bolts that follow the sources."""
    bolts = {each.id: each.instance for each in topology.components}
    follow = [name for name, bolt in bolts.items() if isinstance(bolt, BaseStatefulBolt) and bolt.follows_sources]
    gather = {name for name, bolt in bolts.items() if isinstance(bolt, BaseStatefulBolt) and bolt.gathers}
    spouts = {name for name, each in bolts.items() if isinstance(each, BaseRichSpout)}
    walk = _Walk(plan, spouts, gather)
    return {
        name: {(edge.source, edge.stream): walk.path((edge.source, edge.stream)) for edge in walk.into(name)}
        for name in follow
    }


class _Walk:
    """Walks the edges of a plan backwards. ``gather``: bolts whose output has a time of its own."""

    def __init__(self, plan: ExecutionPlan, spouts: Collection[str], gather: Collection[str]) -> None:
        self._plan, self._spouts, self._gather = plan, spouts, gather

    def into(self, component_id: str) -> Iterator[Edge]:
        return (edge for edge in self._plan.edges if edge.target == component_id)

    def path(self, source: Source) -> Path:
        component_id, _ = source
        if component_id in self._spouts:
            return Path(frozenset([source]), in_order=True)
        alone = self._plan.components[component_id].parallelism == 1
        if component_id in self._gather:
            return Path(frozenset(), in_order=alone)
        edges = list(self.into(component_id))
        found = [self.path((edge.source, edge.stream)) for edge in edges]
        in_order = len(edges) == 1 and found[0].in_order and (alone or edges[0].fused)
        return Path(frozenset[tuple[str, str]]().union(*(each.spouts for each in found)), in_order)


def reading_of(marks: Marks, component_id: str, paths: Mapping[Source, Path], round_number: int) -> Reading:
    """The progress of the source partitions as one bolt needs it."""
    return Reading(
        round_number,
        marks.upto,
        {source: path.unread(marks, marks.newest.get((component_id, source), {})) for source, path in paths.items()},
    )
