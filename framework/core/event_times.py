"""What bolts that go by the time of their tuples need to know of the source partitions: which are
still to be read, and how far each has come.

It takes this way: spout tasks report which partitions they have not read to their ends; the tasks
of those bolts report the newest time that they have seen of each; the driver puts both together
(``EventTimes``), and the next round brings it to the tasks (``Marks``).

A partition is named by an *origin*, a part of the roots of its trees (``framework.acking.ledger``).
So whatever bolts make of a record still says which partition it is from.

Invariants:

1. What the marks say holds for everything that was emitted in rounds up to ``Marks.upto``: all of
   that has been executed by every bolt. So marks are made only when no tuple waits.
2. Nothing that was seen before a recovery counts after it: the spouts go back, and give again what
   is older.
3. Until every task of a spout has said which partitions it reads, nothing is known of that spout.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from framework.execution.plan import Edge, ExecutionPlan
from framework.operators.watermarks import NEVER, Reading, Source
from framework.topology import BaseRichSpout, BaseStatefulBolt, CoreTopology

#: The origins that a spout task has not read to their ends, with the stream that each is read into
#: (None: any); None while the task does not know.
Unread = Mapping[int, str | None]
#: Origin -> the newest time that was seen of it; None stands for what has no origin.
Newest = Mapping[int | None, int]


class Marks(NamedTuple):
    """What is known once all rounds up to ``upto`` are done. ``unread``: spout -> its origins;
    without the spouts of which it is not known. ``newest``: by bolt and input."""

    upto: int
    unread: Mapping[str, Unread]
    newest: Mapping[tuple[str, Source], Mapping[int, int]]


class EventTimes:
    """The part of the driver. ``spout_tasks``: component ids and tasks. ``marks``: to be told in
    the next round."""

    def __init__(self, spout_tasks: Collection[tuple[str, int]]) -> None:
        self._spout_tasks = spout_tasks
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget everything, because the spouts go back."""
        self.marks: Marks | None = None
        self._unread: dict[tuple[str, int], Unread | None] = dict.fromkeys(self._spout_tasks)
        self._newest: dict[tuple[str, Source], dict[int, int]] = {}
        self._changed = True
        self._told: tuple[Marks | None, int] = None, 0  # what was told last, and since which round

    def news(self) -> Marks | None:
        """The marks, if they are not told yet."""
        return self.marks if self.marks is not self._told[0] else None

    def told(self, round_number: int) -> None:
        """This round tells the marks."""
        self._told = self.marks, round_number

    def are_known(self, round_number: int) -> bool:
        """Whether the tasks know the marks when this round has ended."""
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
        """All rounds up to this one are done, and no tuple waits."""
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
    """How rows come from the spouts to an input of a bolt. ``spouts``: the spouts, each with the
    stream of it. ``in_order``: rows of one source partition do not overtake each other."""

    spouts: frozenset[tuple[str, str]]
    in_order: bool

    def unread(self, marks: Marks, newest: Mapping[int, int]) -> Mapping[int, int] | None:
        """The origins that are to be read and may come this way, with their newest times."""
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
    """Walks a plan against its edges. ``gather``: bolts whose output has a time of its own."""

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
    """What the marks say for one bolt."""
    return Reading(
        round_number,
        marks.upto,
        {source: path.unread(marks, marks.newest.get((component_id, source), {})) for source, path in paths.items()},
    )
