"""The plan of a pipeline, as the operators make it, and the topology that it becomes.

::

    Read ── Stepped ── Stepped ─┬─ Stepped ── Placed (a bolt, a committer)
                                └─ Placed ── Stepped ── Placed

``Read`` and ``Placed`` are components. All steps between a component and those below it become one
``StepsBolt``, called after the component: ``orders-steps``. Without steps there is no such bolt.
The steps below a side output are also named after it: ``closed-late-steps``.

Invariants:

1. Ids of components follow the names that the user gave, never positions.
2. A column that no component below needs is neither computed nor read.
3. Rows reach a component once per path from its inputs.
4. Tombstones reach only the bolts that delete rows for them.
5. Of the components that take all columns, only those that ask for hidden columns get them.
6. A row is not decoded if the filters at the beginning of all paths leave it out by its key, its
   headers or its metadata.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple, TypeAlias, Union

import polars as pl
import pyarrow as pa

from framework.call_site import Call
from framework.streams.hidden_columns import CARRIED, with_carried
from framework.streams.polars_expressions import tests_not_null
from framework.streams.ports import EarlyFilter, Reading
from framework.streams.stateless_steps import (
    CORRECTION,
    WINDOW_END,
    WINDOW_TIME,
    ClosedTime,
    Columns,
    Compute,
    Filter,
    Step,
    Windows,
)
from framework.streams.steps_bolt import Branch, StepsBolt
from framework.topology import DEFAULT_STREAM, TOMBSTONE, Bolt, ForwardsRows, Grouping, TransactionalTopologyBuilder
from framework.topology.planning_time_stream import CLOCK_STREAM


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """The rows of a source."""

    source: str
    schema: pa.Schema


@dataclass(frozen=True, slots=True, eq=False)
class Stepped:
    """The rows of ``above`` after a step."""

    above: Node
    step: Step

    @property
    def schema(self) -> pa.Schema:
        return self.step.schema


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """The rows of several, which have the same columns."""

    above: tuple[Node, ...]
    schema: pa.Schema


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """The rows of two sides, each with columns of its own, for a bolt that tells them apart."""

    sides: tuple[Node, Node]

    @property
    def schema(self) -> pa.Schema:
        """The columns of both, those that they share once."""
        left, right = (each.schema for each in self.sides)
        return pa.schema([*left, *(each for each in right if each.name not in left.names)])


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Placed:
    """A bolt. ``uses``: the columns that it takes; None: all. ``hidden``: those of ``CARRIED`` that
    it takes. ``schema``: what it emits on ``stream``, without hidden columns."""

    id: str
    above: Node
    bolt: Bolt
    grouping: Grouping
    parallelism: int
    call: Call
    uses: tuple[str, ...] | None = None
    hidden: Columns = frozenset()
    schema: pa.Schema = field(default_factory=lambda: pa.schema([]))
    stream: str = DEFAULT_STREAM
    #: What it emits on other streams.
    side_schemas: Mapping[str, pa.Schema] = field(default_factory=dict)
    #: Stream -> the hidden columns that the bolt makes, if it forwards no rows.
    made_hidden: Mapping[str, Columns] = field(default_factory=dict)
    #: Whether it gets the planning times of the spout, and whose watermarks it gets.
    takes_clock: bool = False
    watermarks: tuple[Placed, ...] = ()
    #: The column with the ends of closed windows or sessions, if the bolt sends them.
    closes: str | None = None
    #: The rows above of which the bolt deletes those that tombstones name by their ``keys``. They
    #: come with a column ``TOMBSTONE``.
    deletes: Node | None = None
    keys: Columns = frozenset()

    @property
    def needs(self) -> Columns:
        return frozenset(self.uses if self.uses is not None else self.above.schema.names) | self.hidden

    @property
    def forwards(self) -> bool:
        return isinstance(self.bolt, ForwardsRows)


@dataclass(frozen=True, slots=True)
class SideOutput:
    """What a bolt emits on a stream other than its default one."""

    of: Placed
    stream: str

    @property
    def schema(self) -> pa.Schema:
        return self.of.side_schemas[self.stream]


Component: TypeAlias = Union[Read, Placed, SideOutput]
Node: TypeAlias = Union[Read, Stepped, Merged, Joined, Placed, SideOutput]
#: The steps from a component to another one below it.
_Steps: TypeAlias = tuple[Stepped, ...]
_Way: TypeAlias = tuple[Component, _Steps]


@dataclass(slots=True)
class _Output:
    """A stream of a ``StepsBolt``: the ways that lead into it, and who takes it. ``carried``: the
    hidden columns in it."""

    ways: tuple[_Steps, ...]
    takers: list[Placed]
    carried: Columns
    stream: str = DEFAULT_STREAM
    #: Whether it leads to tables that tombstones delete rows of.
    tombstones: bool = False

    def keys(self) -> Columns:
        """The columns that a tombstone needs at its end."""
        return frozenset().union(*(each.keys for each in self.takers))

    def needs(self) -> Columns:
        return self.carried.union(*(each.needs for each in self.takers))


class BeforeWindows(NamedTuple):
    """Rows before they were put into windows, after the steps that follow ``windows``."""

    rows: Node
    windows: Windows


def closed_in(node: Node, column: str) -> Placed | None:
    """The bolt whose closed windows these rows are, if ``column`` is the end of each of them, or
    their ``WINDOW_TIME``."""
    while isinstance(node, Stepped):
        step = node.step
        if isinstance(step, ClosedTime) and column == WINDOW_TIME:
            column = step.columns[column].meta.root_names()[0]
        elif not step.leaves(column):
            return None
        node = node.above
    return node if isinstance(node, Placed) and node.closes == column else None


def closed_once(call: Call, node: Node, column: str) -> Placed | None:
    """As ``closed_in``. Raises ``TopologyError`` for windows that are sent again when they are
    corrected: that would come too late, or count twice."""
    found = closed_in(node, column)
    if found is not None and found.closes == WINDOW_END and CORRECTION in found.schema.names:
        raise call.mistake(
            f"a window that is corrected would count twice: leave allowed_lateness out of {found.call}, whose windows these are"
        )
    return found


def builder_of(
    pipeline_id: str, reading: Reading, placed: Sequence[Placed], sources: Sequence[Read], *, prune: bool
) -> TransactionalTopologyBuilder:
    """The builder of the topology. ``prune``: leave out columns that nothing uses."""
    return _Compilation(reading, placed, sources, prune=prune).builder(pipeline_id)


class _Compilation:
    def __init__(self, reading: Reading, placed: Sequence[Placed], sources: Sequence[Read], *, prune: bool) -> None:
        self._reading = reading
        self._placed = placed
        self._sources = sources
        self._prune = prune
        self._inputs = {each: _inputs_of(each) for each in placed}
        #: The hidden columns that a component takes, and those that components below take from it.
        self._carried: dict[Placed, Columns] = {}
        origins: list[Read | Placed] = [*sources, *placed]
        self._carried_below: dict[Read | Placed, Columns] = dict.fromkeys(origins, frozenset())
        for each in reversed(placed):
            self._carried[each] = each.hidden | (self._carried_below[each] if each.forwards else frozenset())
            for its in self._inputs[each]:
                for way in its.ways:
                    needed = _needed(way, each.needs | self._carried[each]) & CARRIED
                    self._carried_below[_origin_of(its.component)] |= needed
        #: The hidden columns of all components that take the same rows.
        self._carried_in: dict[_Input, Columns] = {}
        for each in placed:
            for its in self._inputs[each]:
                self._carried_in[its] = self._carried_in.get(its, frozenset()) | self._carried[each]
        every_input = [each for its in self._inputs.values() for each in its]
        self._side_outputs = list(
            dict.fromkeys(each.component for each in every_input if isinstance(each.component, SideOutput))
        )
        telling = {each.component for each in every_input if each.tombstones and isinstance(each.component, Read)}
        #: The sources of which some bolts take the tombstones, and others do not.
        self._mixed = {
            each.component
            for each in every_input
            if each.component in telling and not (each.tombstones and each.is_direct)
        }
        every: list[Component] = [*sources, *placed, *self._side_outputs]
        self._outputs: dict[Component, list[_Output]] = {each: [] for each in every}
        self._direct: dict[Component, list[Placed]] = {each: [] for each in every}
        #: The stream of steps that a bolt takes; none if it takes the rows of the component
        #: directly.
        self._taken: dict[tuple[Placed, _Input], _Output] = {}
        for each in placed:
            for its in self._inputs[each]:
                self._connect(its, each)

    def _connect(self, its: _Input, taker: Placed) -> None:
        # The spout itself tells tombstones where all that read it ask for them.
        is_told = its.tombstones and not isinstance(its.component, Read)
        takes_all = taker.uses is None
        fits = not takes_all or self._carried[taker] == self._hidden_in(its.component)
        if its.is_direct and fits and not is_told and its.component not in self._mixed:
            self._direct[its.component].append(taker)
            return
        outputs = self._outputs[its.component]
        carried = self._carried[taker] if takes_all else self._carried_in[its]
        of_output = its.ways, its.tombstones, carried
        output = next((each for each in outputs if (each.ways, each.tombstones, each.carried) == of_output), None)
        if output is None:
            stream = taker.id if outputs else DEFAULT_STREAM
            while any(each.stream == stream for each in outputs):  # the other side of a join
                stream += "-2"
            output = _Output(its.ways, [], carried, stream, its.tombstones)
            outputs.append(output)
        output.takers.append(taker)
        self._taken[taker, its] = output

    def _hidden_in(self, component: Component) -> Columns:
        """The hidden columns of what a component emits."""
        if isinstance(component, Read):
            return self._carried_below[component]
        emitter = emitter_of(component)
        if emitter.forwards:
            return self._carried_below[emitter]
        return emitter.made_hidden.get(component.stream, frozenset())

    def builder(self, pipeline_id: str) -> TransactionalTopologyBuilder:
        used = {each.source: self._used(each) for each in self._sources}
        reading = self._reading
        filters = {each.source: found for each in self._sources if (found := self._early_filter(each)) is not None}
        spout = reading.filtered(reading.spout(used), filters) if filters else reading.spout(used)
        builder = TransactionalTopologyBuilder(pipeline_id, reading.spout_id, spout, reading.parallelism)
        for source in self._sources:
            self._add_steps(builder, source)
        for each in self._placed:
            if isinstance(each.bolt, ForwardsRows):
                each.bolt.forwarded = self._carried_below[each]
            declarer = builder.set_bolt(each.id, each.bolt, each.parallelism)
            for its in self._inputs[each]:
                upstream, stream = self._place(its.component)
                if (output := self._taken.get((each, its))) is not None:
                    upstream, stream = self._steps_id(its.component), output.stream
                declarer.grouping(upstream, each.grouping, stream)
            if each.takes_clock:
                declarer.global_grouping(reading.spout_id, CLOCK_STREAM)
            for watermark in each.watermarks:
                declarer.all_grouping(watermark.id)
            self._add_steps(builder, each)
            for side in self._side_outputs:
                if side.of is each:
                    self._add_steps(builder, side)
        return builder

    def _used(self, source: Read) -> tuple[str, ...]:
        """The columns of a source that are used, in their order."""
        told = [TOMBSTONE] if any(each.tombstones for each in self._outputs[source]) else []
        hidden = (*told, *with_carried(pa.schema([]), self._carried_below[source]).names)
        if not self._prune:
            return (*source.schema.names, *hidden)
        needed: set[str] = set().union(*(each.needs for each in self._direct[source]))
        for output in self._outputs[source]:
            for way in output.ways:
                needed |= _needed(way, output.needs())
        used = tuple(name for name in source.schema.names if name in needed) or (source.schema.names[0],)
        return (*used, *hidden)

    def _early_filter(self, source: Read) -> EarlyFilter | None:
        """The condition that every row fulfils that a component takes, in columns that are known
        before decoding. It is made of the filters that each way begins with; the steps have them,
        too."""
        early = self._reading.early(source.source)
        ways = [way for output in self._outputs[source] for way in output.ways]
        if not self._prune or self._direct[source] or not early:
            return None
        conditions, fields = [], set()
        for way in ways:
            steps = takewhile(lambda each: isinstance(each.step, Filter) and _runs_early(each.step, early), way)
            its = [each.step for each in steps if isinstance(each.step, Filter)]
            if not its:
                return None
            conditions.append(pl.all_horizontal([each.condition.fill_null(False) for each in its]))
            fields |= {name for each in its for name in each.needs(frozenset())}
        known = tuple(name for name in source.schema.names if name in fields)
        return EarlyFilter(known, pl.any_horizontal(conditions)) if known else None

    def _add_steps(self, builder: TransactionalTopologyBuilder, component: Component) -> None:
        outputs = self._outputs[component]
        if not outputs:
            return
        upstream, stream = self._place(component)
        bolt = StepsBolt(
            self._tree(component, outputs),
            {each.stream: self._columns(component, each) for each in outputs},
            [each.stream for each in outputs if each.tombstones],
        )
        parallelism = self._reading.parallelism if isinstance(component, Read) else emitter_of(component).parallelism
        builder.set_bolt(self._steps_id(component), bolt, parallelism).local_or_shuffle_grouping(upstream, stream)

    def _columns(self, component: Component, output: _Output) -> pa.Schema:
        schema = next((way[-1].schema for way in output.ways if way), component.schema)
        needed = output.needs() if self._prune else frozenset(schema.names)
        columns = [each for each in schema if each.name in needed]
        told = output.tombstones and TOMBSTONE not in schema.names
        return with_carried(pa.schema([*columns, *([pa.field(TOMBSTONE, pa.bool_())] if told else [])]), output.carried)

    def _tree(self, component: Component, outputs: Sequence[_Output]) -> Branch:
        """The steps as a tree: what several ways begin with is there once."""
        known = _known_of_tombstones(self._reading, component)
        return self._branch(None, [(way, output) for output in outputs for way in output.ways], 0, known)

    def _branch(self, at: Stepped | None, ways: Sequence[tuple[_Steps, _Output]], depth: int, known: Columns) -> Branch:
        """The step ``at`` and those after it. ``known``: the columns in which a tombstone has
        values before it."""
        below: dict[Stepped, list[tuple[_Steps, _Output]]] = {}
        for way, output in ways:
            if len(way) > depth:
                below.setdefault(way[depth], []).append((way, output))
        wanted, checked = set[str](), set[str]()
        for way, output in ways:
            wanted |= _needed(way[depth:], output.needs())
            if output.tombstones:
                checked |= _needed_of_tombstones(way[depth:], output.keys())
        step = at.step if at is not None else None
        if at is not None:
            known = at.step.known(known, at.above.schema)
        return Branch(
            step.narrowed(frozenset(wanted)) if step is not None and self._prune else step,
            [output.stream for way, output in ways if len(way) == depth],
            [self._branch(each, its, depth + 1, known) for each, its in below.items()],
            to_tables=any(output.tombstones for _, output in ways),
            to_others=not all(output.tombstones for _, output in ways),
            known=known,
            checked=known & checked,
        )

    def _place(self, component: Component) -> tuple[str, str]:
        """The id of a component, and the stream of its rows."""
        if isinstance(component, Read):
            return self._reading.spout_id, self._reading.streams()[component.source]
        return emitter_of(component).id, component.stream

    def _steps_id(self, component: Component) -> str:
        side = f"-{component.stream}" if isinstance(component, SideOutput) else ""
        return f"{name_of(component)}{side}-steps"


def _origin_of(component: Component) -> Read | Placed:
    return component if isinstance(component, Read) else emitter_of(component)


def emitter_of(component: Placed | SideOutput) -> Placed:
    """The bolt that emits these rows."""
    return component.of if isinstance(component, SideOutput) else component


def name_of(component: Component) -> str:
    """The source, or the id of the bolt."""
    return component.source if isinstance(component, Read) else emitter_of(component).id


def ways_to(node: Node) -> list[_Way]:
    """The ways from components to the rows of a node."""
    if isinstance(node, Stepped):
        return [(component, (*steps, node)) for component, steps in ways_to(node.above)]
    if isinstance(node, Merged):
        return [way for each in node.above for way in ways_to(each)]
    if isinstance(node, Joined):
        return [way for each in node.sides for way in ways_to(each)]
    return [(node, ())]


def carried_in(reading: Reading, node: Node) -> Columns:
    """The hidden columns that the rows of a node can have."""
    found = CARRIED
    for component, steps in ways_to(node):
        if not all(each.step.carries for each in steps):
            return frozenset()
        if isinstance(component, Read):
            found &= reading.hidden(component.source)
        else:
            emitter = emitter_of(component)
            found &= carried_in(reading, emitter.above) if emitter.forwards else frozenset()
    return found


def sides_of(node: Node) -> tuple[Node, ...]:
    """Both sides of a join, or the node itself."""
    return node.sides if isinstance(node, Joined) else (node,)


def _known_of_tombstones(reading: Reading, component: Component) -> Columns:
    """The columns in which the tombstones of a component have values."""
    return reading.tombstones(component.source) if isinstance(component, Read) else frozenset()


def carries_tombstones(call: Call, reading: Reading, node: Node, keys: Columns) -> bool:
    """Whether the steps to a table carry tombstones that have these keys. Raises ``TopologyError``
    naming the step that makes a key anew."""
    found = []
    for component, steps in ways_to(node):
        known = _known_of_tombstones(reading, component)
        if not known:
            continue
        had = keys <= known
        remade: dict[str, Call] = {}
        for each in steps:
            before, known = known, each.step.known(known, each.above.schema)
            for name in keys & set(each.schema.names) - known:
                if name in before or name not in each.above.schema.names:
                    remade[name] = each.step.call
        lost = min(keys - known, default=None)
        if had and lost is not None:
            raise call.mistake(
                f"{remade[lost]} gives {lost!r} a value that a tombstone does not have, so that it could not delete its row: "
                f"give the other value another name, or ask read_kafka for metadata=[{TOMBSTONE!r}], and keep the column or "
                "filter by it"
            )
        found.append(keys <= known)
    return bool(found) and all(found)


def check_sequence(call: Call, reading: Reading, node: Node, keys: Columns, sequence: str) -> None:
    """Raise ``TopologyError`` if a table gets tombstones with its keys, but without the column by
    which it orders changes."""
    if not carries_tombstones(call, reading, node, keys) or carries_tombstones(call, reading, node, keys | {sequence}):
        return
    if all(
        _needs_value(steps, sequence) for component, steps in ways_to(node) if _known_of_tombstones(reading, component)
    ):
        return
    raise call.mistake(
        f"a tombstone deletes the row of its key, and has no {sequence!r} to compare: give read_kafka metadata=['offset'] and "
        f"use sequence_by='offset', or leave tombstones out by metadata=[{TOMBSTONE!r}] and filter('not {TOMBSTONE}')"
    )


def _needs_value(steps: _Steps, column: str) -> bool:
    """Whether a filter leaves out the rows that have null in a column, as tombstones have."""
    for each in reversed(steps):
        step = each.step
        if isinstance(step, Filter) and tests_not_null(step.condition, column):
            return True
        if isinstance(step, Compute) and column in step.columns:
            made = step.columns[column]
            if not made.meta.is_column():
                return False
            column = made.meta.root_names()[0]
        elif not isinstance(step, (Filter, Compute)):
            return False
    return False


@dataclass(frozen=True, slots=True)
class _Input:
    """A bolt takes rows from a component by these ways. ``tombstones``: whether these come with
    them."""

    component: Component
    ways: tuple[_Steps, ...]
    tombstones: bool

    @property
    def is_direct(self) -> bool:
        return self.ways == ((),)


def _inputs_of(placed: Placed) -> list[_Input]:
    return [
        _Input(component, ways, each is placed.deletes)
        for each in sides_of(placed.above)
        for component, ways in _by_component(ways_to(each)).items()
    ]


def check_once(call: Call, node: Node) -> None:
    """Raise ``TopologyError`` where rows would come by the same way twice."""
    ways = ways_to(node)
    if len(set(ways)) != len(ways):
        raise call.mistake("a stream is merged with itself, so each of its rows would count twice")


def _by_component(ways: Sequence[_Way]) -> Mapping[Component, tuple[_Steps, ...]]:
    found: dict[Component, tuple[_Steps, ...]] = {}
    for component, steps in ways:
        found[component] = (*found.get(component, ()), steps)
    return found


def _needed_of_tombstones(way: _Steps, wanted: Columns) -> Columns:
    for each in reversed(way):
        wanted = each.step.tombstone_needs(wanted)
    return wanted


def _needed(way: _Steps, wanted: Columns) -> Columns:
    for each in reversed(way):
        wanted = each.step.needs(wanted - CARRIED) | (wanted & CARRIED)
    return wanted


def _runs_early(step: Filter, known: Columns) -> bool:
    """Whether a filter needs only these columns, and is not applied in parts."""
    return step.needs(frozenset()) <= known and not step.growing
