"""The execution plan of a topology: two phases, each a chain of levels, each level a set of tasks.

The graph splits once:

* processing phase: the spout and every bolt that is not downstream of a committer; of the
  first-level committers, ``execute()``
* commit phase: ``finish_batch()`` of the first-level committers, and every component downstream of
  one, as a whole; committers that write for good, and what is downstream of them, come after all
  others (ADR 134)

Inside a phase, components joined by an edge that moves no rows between tasks are fused into one
*segment*. Rows that the spout shuffles to the same number of tasks stay in their task if the
spout's tasks read about equal shares of the batch, and move otherwise. So there are two layouts of
the processing phase (ADR 24).

A batch that one Spark task runs as a whole has a third layout, in which the only committer has one
task: that task commits in one step of the store, which two tasks could not (ADR 115).

In a probe that tries writes, committers that only get watermarks from other committers also execute
and try in the processing phase. Their watermarks are in the header (ADR 135).

Segments are assigned to *levels* by their longest path from the source. All tasks of a level run
concurrently, and one shuffle lies between two levels. So a phase is always a single chain, however
the graph branches, and no result is computed twice. Rows for a later level pass through the levels
between.

    spout ─┬─> split ──fields──> count(committer) ──> report
           └──────────────fields──────> totals(committer)

    processing   level 0: [spout, split] x 2      level 1: [count] x 3, [totals] x 1
    commit       level 0: count and totals finish where their state lies      level 1: [report]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import Enum
from typing import Any

import cloudpickle
import pyarrow as pa

from framework.errors import TopologyError
from framework.topology.bolts import ArrowBolt, Bolt, Committer, DataFrameBolt, Input
from framework.topology.fields import Fields
from framework.topology.graph import AnySpout, Component, Graph, Subscription, edge_label, stream_label, upstream_of
from framework.topology.groupings import FieldsGrouping, Grouping, LocalOrShuffleGrouping, ShuffleGrouping
from framework.topology.planning_time_stream import CLOCK_STREAM
from framework.topology.spouts import PartitionedSpout

#: Groupings that only share the work: tasks below them can be merged.
_SHARING = (FieldsGrouping, LocalOrShuffleGrouping, ShuffleGrouping)


class Phase(Enum):
    PROCESSING = "processing"
    COMMIT = "commit"


class Layout(Enum):
    """``EVEN`` and ``UNEVEN``: of a batch of which the spout's tasks read about equal shares, or
    not. ``TRIAL``: of a probe that tries writes."""

    EVEN = "even"
    UNEVEN = "uneven"
    TRIAL = "trial"


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One stream of one component into one bolt. ``phase``: the phase in which the bolt receives
    the rows."""

    index: int
    source: str
    stream: str
    target: str
    grouping: Grouping
    target_tasks: int
    phase: Phase
    fused: bool

    @property
    def input_name(self) -> str:
        return stream_label(self.source, self.stream)

    @property
    def label(self) -> str:
        return edge_label(self.source, self.stream, self.target)

    def check_task(self, task: int) -> None:
        """Raise ``TopologyError`` if the bolt does not have this task."""
        if not 0 <= task < self.target_tasks:
            raise TopologyError(
                f"{self.source!r} sent rows to task {task} of {self.target!r}, which has tasks 0 to {self.target_tasks - 1}"
            )

    def cut(self, batch: pa.RecordBatch, turn: int, task: int | None = None) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Divide rows among the bolt's tasks: by the grouping, or all to ``task`` when the sender
        named one. Yields each task's rows. ``turn``: a number that differs from batch to batch, for
        groupings that rotate. Raises ``TopologyError`` as ``check_task`` does."""
        parts = [(task, batch)] if task is not None else self.grouping.split(batch, self.target_tasks, turn)
        for target, part in parts:
            self.check_task(target)
            yield target, part


@dataclass(frozen=True, slots=True)
class TaskComponent:
    """The properties of a component that a task needs. Sent to Spark inside the plan."""

    id: str
    _: KW_ONLY
    parallelism: int
    template: AnySpout | Bolt | None
    factory: Callable[[], AnySpout | Bolt] | None
    streams: Mapping[str, Fields]
    inputs: tuple[Input, ...]
    committer: bool
    direct_streams: frozenset[str] = frozenset()
    #: The inputs whose rows fall due by time: of these, only refused rows are left out (ADR 126).
    due_inputs: frozenset[tuple[str, str]] = frozenset()
    #: Of a spout: the number of tasks for which its only task reads, one after the other.
    merged_tasks: int = 1

    @property
    def leaves_out_rows(self) -> bool:
        """Whether all rows of the component fall due by time, so that only refused rows are left
        out."""
        return bool(self.due_inputs) and {(each.component_id, each.stream) for each in self.inputs} <= self.due_inputs


@dataclass(frozen=True, slots=True)
class Segment:
    """Fused components, in topological order. All have the same number of tasks."""

    components: tuple[str, ...]
    parallelism: int
    level: int


@dataclass(frozen=True, slots=True)
class Level:
    """Tasks that run concurrently. Partition ``p`` of a level is one task of one segment."""

    segments: tuple[Segment, ...]

    @property
    def partitions(self) -> int:
        return sum(segment.parallelism for segment in self.segments)

    def slot(self, partition: int) -> tuple[Segment, int]:
        """The segment and task at a partition."""
        for segment in self.segments:
            if partition < segment.parallelism:
                return segment, partition
            partition -= segment.parallelism
        raise IndexError(partition)

    def partition_of(self, segment: Segment, task: int) -> int:
        offset = 0
        for each in self.segments:
            if each is segment or each == segment:
                return offset + task
            offset += each.parallelism
        raise KeyError(segment.components)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionPlan:
    """The execution plan of a topology: immutable, pickled once per run."""

    topology_id: str
    components: Mapping[str, TaskComponent]
    edges: tuple[Edge, ...]
    processing: tuple[Level, ...]
    commit: tuple[Level, ...]
    commit_roots: tuple[str, ...]
    segment_of: Mapping[tuple[Phase, str], Segment]
    #: For each ``DataFrameBolt``, the segment that emits the result of Spark SQL. ``segment_of``
    #: has the segment that collects its input.
    frame_outputs: Mapping[tuple[Phase, str], Segment] = field(default_factory=dict)
    #: As ``Graph.only_writer``, for the tasks of this layout.
    only_writer: str | None = None
    #: The layout for batches of which the spout's tasks read unequal shares; None when it equals
    #: this one. Both layouts share the components, the edges except for ``fused``, and the commit
    #: phase.
    uneven: ExecutionPlan | None = None
    #: The layout for batches that one Spark task runs as a whole, with one task of the only
    #: committer; None when such batches use the other two.
    collapsed: ExecutionPlan | None = None
    #: The layout for probes that try writes, without watermarks and without the components that
    #: cannot try; None when such probes use the others.
    trial: ExecutionPlan | None = None

    def for_batch(self, layout: Layout, *, collapsed: bool = False) -> ExecutionPlan:
        """The layout for a batch. ``collapsed``: one task runs it as a whole."""
        if layout is Layout.TRIAL and self.trial is not None:
            return self.trial
        if collapsed and self.collapsed is not None:
            return self.collapsed
        return self if layout is Layout.EVEN or self.uneven is None else self.uneven

    def frames_gathered_at(self, phase: Phase, level: int) -> list[str]:
        """The DataFrame bolts whose input is complete after a level. Spark SQL runs between this
        level and the next."""
        return [
            each
            for (its_phase, each) in self.frame_outputs
            if its_phase is phase and self.segment_of[(phase, each)].level == level
        ]

    @property
    def spout_id(self) -> str:
        return next(iter(self.components))

    def levels(self, phase: Phase) -> tuple[Level, ...]:
        return self.processing if phase is Phase.PROCESSING else self.commit

    def onward(self, phase: Phase, level: int, partition: int) -> int:
        """The partition of the next level that forwards a task's records for later levels."""
        levels = self.levels(phase)
        return partition % levels[level + 1].partitions if level + 1 < len(levels) else partition

    def next_partition(
        self, phase: Phase, level: int, partition: int, edge_index: int, target_task: int
    ) -> tuple[int, bool]:
        """The destination of rows of an edge from a task: the partition of the next level, and
        whether the rows are used there. Rows go to their target task if it is in the next level;
        otherwise a task there forwards them."""
        edge = self.edges[edge_index]
        levels = self.levels(phase)
        if edge.phase is phase and level + 1 < len(levels):
            segment = self.segment_of[(phase, edge.target)]
            if segment.level == level + 1:
                return levels[segment.level].partition_of(segment, target_task), True
        return self.onward(phase, level, partition), False

    def commits_at(self, component_id: str) -> int:
        """The level of the commit phase at which a committer of the processing phase commits."""
        return self.segment_of[(Phase.COMMIT, component_id)].level

    def next_partition_of_state(self, component_id: str, task: int, level: int, partition: int) -> int:
        """As ``next_partition``, for the state of a committer in the commit phase."""
        segment = self.segment_of[(Phase.COMMIT, component_id)]
        if segment.level == level + 1:
            return self.commit[segment.level].partition_of(segment, task)
        return self.onward(Phase.COMMIT, level, partition)

    def input_names(self, component_id: str) -> list[str]:
        return [edge.input_name for edge in self.edges if edge.target == component_id]

    def edges_from(self, component_id: str) -> list[Edge]:
        return [edge for edge in self.edges if edge.source == component_id]

    @property
    def commits_on_driver(self) -> bool:
        """Whether a small batch may be committed on the driver: every component of the commit phase
        must allow it."""
        return all(getattr(each.template, "commits_on_driver", False) for each in self._committing)

    @property
    def commits_in_one_step(self) -> bool:
        """Whether a small batch may be committed in one step of a store: by one task, of a
        committer that supports it, without components downstream."""
        if not self.commits_on_driver or self.commit_tasks != 1 or len(self._committing) != 1:
            return False
        bolt: Any = self._committing[0].template
        return isinstance(bolt, Committer) and bolt.commits_in_one_step()

    @property
    def _committing(self) -> list[TaskComponent]:
        """The components of the commit phase."""
        return [self.components[component_id] for phase, component_id in self.segment_of if phase is Phase.COMMIT]

    @property
    def commit_tasks(self) -> int:
        """The number of committer states that a processing phase must produce."""
        return sum(self.components[each].parallelism for each in self.commit_roots)


def check_pickles(topology: Graph) -> None:
    """Check that every component can be pickled, because Spark sends it to tasks. Raises
    ``TopologyError`` naming the component."""
    for component in topology.components:
        try:
            cloudpickle.loads(cloudpickle.dumps(component.factory or component.instance))
        except Exception as error:
            told = getattr(component.instance, "unsent", None)
            mistake = told() if told is not None else None
            if mistake is not None:
                raise mistake from error
            raise TopologyError(
                f"component {component.id!r} cannot be sent to a task: {error}; keep connections, locks and open files "
                "out of its attributes and open them in prepare() or open(), or pass a factory instead of an instance"
            ) from error


def plan_execution(topology: Graph) -> ExecutionPlan:
    """Assign a topology's components to phases, segments and levels."""
    spread = frozenset(each.id for each in topology.components if not each.subscriptions)
    plan, uneven = _laid_out(topology, spread), _laid_out(topology, frozenset())
    return replace(
        plan,
        uneven=None if plan.processing == uneven.processing else uneven,
        collapsed=_in_one_step(topology, uneven),
        trial=_trial(topology, plan),
    )


def _trial(topology: Graph, plan: ExecutionPlan) -> ExecutionPlan | None:
    """Return the layout without watermarks, and without what is below other committers."""
    kept = topology.in_trials()
    if not any(len(each.subscriptions) < len(topology[each.id].subscriptions) for each in kept):
        return None
    made = _laid_out(Graph(topology.id, kept), frozenset())
    own = {name: plan.components[name] for name in made.components}
    return replace(made, components=own, only_writer=plan.only_writer)


def _in_one_step(topology: Graph, uneven: ExecutionPlan) -> ExecutionPlan | None:
    """Return the layout in which the only committer has one task, if that task can commit in one
    step. If nothing needs several tasks above the committer either, the same task reads all
    partitions and does the rest, with the rows in the same order as in the other layouts.
    ``uneven``: the layout in which the fewest rows stay in their task."""
    if len(uneven.commit_roots) != 1:
        return None
    root = topology[uneven.commit_roots[0]]
    if root.parallelism > 1 and any(type(sub.grouping) not in _SHARING for sub in root.subscriptions):
        return None
    others = [each for each in topology.components if each is not root]
    # partial results of other tasks would be other ones, and sums of floats depend on them
    whole = not _has_combiner(root) and all(map(_only_shares_work, others))
    whole = whole and all(edge.fused for edge in uneven.edges if edge.target != root.id)
    merging = [root, *others] if whole else [root]
    if all(each.parallelism == 1 for each in merging):
        return None
    components = (replace(each, parallelism=1) if each in merging else each for each in topology.components)
    merged = _laid_out(Graph(topology.id, tuple(components)), frozenset())
    if whole:
        spout = replace(merged.components[merged.spout_id], merged_tasks=topology.components[0].parallelism)
        merged = replace(merged, components={**merged.components, spout.id: spout})
    return merged if merged.commits_in_one_step else None


def _has_combiner(component: Component) -> bool:
    return not isinstance(component.instance, Bolt) or component.instance.combiner() is not None


def _only_shares_work(component: Component) -> bool:
    """Whether one task can do the work of all."""
    bolt = component.instance
    return isinstance(bolt, PartitionedSpout) or (isinstance(bolt, ArrowBolt) and bolt.rows_are_independent)


def _laid_out(topology: Graph, spread: frozenset[str]) -> ExecutionPlan:
    """Make one layout. ``spread``: components whose tasks have about equal shares of their rows."""
    below: set[str] = set()  # downstream of a committer
    for component in topology.components:
        if any(each.committer for each in upstream_of(topology, component.id)):
            below.add(component.id)
    roots = tuple(each.id for each in topology.components if each.committer and each.id not in below)
    last = topology.committed_last()
    processing_ids = [each.id for each in topology.components if each.id not in below]
    commit_ids = [*roots, *(each.id for each in topology.components if each.id in below)]
    commit_ids.sort(key=last.__contains__)

    processing, processing_frames = _fuse(topology, Phase.PROCESSING, processing_ids, frozenset(), spread)
    commit, commit_frames = _fuse(topology, Phase.COMMIT, commit_ids, frozenset(roots), frozenset(), last=last)
    segments, frames = {**processing, **commit}, {**processing_frames, **commit_frames}
    edges: list[Edge] = []
    for component in topology.components:
        phase = Phase.COMMIT if component.id in below else Phase.PROCESSING
        for sub in component.subscriptions:
            source_segment = segments.get((phase, sub.component_id))
            fused = source_segment is not None and source_segment == segments[(phase, component.id)]
            edges.append(
                Edge(
                    index=len(edges),
                    source=sub.component_id,
                    stream=sub.stream,
                    target=component.id,
                    grouping=sub.grouping,
                    target_tasks=component.parallelism,
                    phase=phase,
                    fused=fused,
                )
            )
    return ExecutionPlan(
        topology_id=topology.id,
        components={
            each.id: _task_component(topology, each, _due_inputs(topology, each) if each.id in below else frozenset())
            for each in topology.components
        },
        edges=tuple(edges),
        processing=_levels([*processing.values(), *processing_frames.values()]),
        commit=_levels([*commit.values(), *commit_frames.values()]) if roots else (),
        commit_roots=roots,
        segment_of=segments,
        frame_outputs=frames,
        only_writer=topology.only_writer(),
    )


def _due_inputs(topology: Graph, component: Component) -> frozenset[tuple[str, str]]:
    """The inputs of a component below committers whose rows all fall due by time. Empty if refused
    rows must not be left out: neither the component's ``on_bad_record`` allows it, nor that of
    every stream of the spout above."""
    due = [(each.component_id, each.stream) for each in component.subscriptions if _falls_due(topology, each)]
    return frozenset(due) if due and _may_leave_out(topology, component) else frozenset()


def _may_leave_out(topology: Graph, component: Component) -> bool:
    if isinstance(component.instance, Bolt) and component.instance.on_bad_record != "fail":
        return True
    above, spout = upstream_of(topology, component.id), topology.components[0]
    read = {sub.stream for each in above for sub in each.subscriptions if sub.component_id == spout.id}
    records = read - {CLOCK_STREAM}
    return isinstance(spout.instance, PartitionedSpout) and all(map(spout.instance.leaves_out_bad_records, records))


def _falls_due(topology: Graph, stream: Subscription) -> bool:
    """Whether all rows of a stream fall due by time, or are derived from such rows."""
    source = topology[stream.component_id]
    bolt: Any = source.instance
    committer = bolt if isinstance(bolt, Committer) else None
    if committer is not None and stream.stream in committer.due_streams:
        return True
    made_of = [
        each
        for each in source.subscriptions
        if committer is None or committer.sends_rows_of(topology[each.component_id].streams[each.stream])
    ]
    return bool(made_of) and all(_falls_due(topology, each) for each in made_of)


def _task_component(topology: Graph, component: Component, due_inputs: frozenset[tuple[str, str]]) -> TaskComponent:
    inputs = tuple(
        Input(sub.component_id, sub.stream, topology[sub.component_id].streams[sub.stream], sub.grouping)
        for sub in component.subscriptions
    )
    template = None if component.factory is not None else component.instance
    return TaskComponent(
        component.id,
        parallelism=component.parallelism,
        template=template,
        factory=component.factory,
        streams=dict(component.streams),
        inputs=inputs,
        committer=component.committer,
        direct_streams=component.direct_streams,
        due_inputs=due_inputs,
    )


def _fuse(
    topology: Graph,
    phase: Phase,
    ids: Sequence[str],
    starts: frozenset[str],
    spread: frozenset[str],
    *,
    last: frozenset[str] = frozenset(),
) -> tuple[dict[tuple[Phase, str], Segment], dict[tuple[Phase, str], Segment]]:
    """Return the segments of one phase, and the segments that emit for DataFrame bolts.

    ``starts``: components that begin a segment of their own, whatever their input. Shuffled rows of
    the components in ``spread`` may stay in their task. No component is fused with a DataFrame
    bolt, which collects its input on one level and emits on the next. ``last``: those at the end of
    ``ids`` whose levels come after all levels of the others.
    """
    members: list[list[str]] = []
    stage_of: dict[str, int] = {}
    level: list[int] = []
    first_of_last: int | None = None
    gathering: dict[str, int] = {}
    for component_id in ids:
        component = topology[component_id]
        frame = isinstance(component.instance, DataFrameBolt)
        if component_id in last and first_of_last is None:
            first_of_last = max(level, default=-1) + 1
        sources = [] if component_id in starts else list(component.subscriptions)
        sources_stages = {stage_of.get(sub.component_id, -1) for sub in sources}
        local = all(
            topology[sub.component_id].parallelism == component.parallelism
            and (component.parallelism == 1 or _stays(sub, spread))
            for sub in sources
        )
        below_frame = any(sub.component_id in gathering for sub in sources)
        below_others = component_id in last and not all(sub.component_id in last for sub in sources)
        apart = frame or below_frame or below_others
        if len(sources_stages) == 1 and -1 not in sources_stages and local and not apart:
            stage_of[component_id] = sources_stages.pop()
            members[stage_of[component_id]].append(component_id)
            continue
        stage_of[component_id] = len(members)
        members.append([component_id])
        inside = [level[stage_of[sub.component_id]] + 1 for sub in sources if sub.component_id in stage_of]
        # Level 0 of the commit phase receives the rows from the processing phase; components read
        # them from level 1 on.
        own = max(inside, default=0 if component_id in starts or not sources else 1)
        level.append(max(own, first_of_last or 0))
        if frame:
            gathering[component_id] = stage_of[component_id]
            stage_of[component_id] = len(members)
            members.append([component_id])
            level.append(level[-1] + 1)
    built = [
        Segment(tuple(each), topology[each[0]].parallelism, level[position]) for position, each in enumerate(members)
    ]
    receiving = {(phase, each): built[gathering.get(each, stage_of[each])] for each in ids}
    return receiving, {(phase, each): built[stage_of[each]] for each in gathering}


def _stays(sub: Subscription, spread: frozenset[str]) -> bool:
    """Whether rows may stay in their task when both sides have the same number of tasks."""
    balanced = sub.component_id in spread and isinstance(sub.grouping, ShuffleGrouping)
    return sub.grouping.keeps_rows_local or balanced


def _levels(segments: Sequence[Segment]) -> tuple[Level, ...]:
    distinct: list[Segment] = []
    for segment in segments:
        if segment not in distinct:
            distinct.append(segment)
    depth = max(segment.level for segment in distinct) + 1
    return tuple(Level(tuple(each for each in distinct if each.level == number)) for number in range(depth))
