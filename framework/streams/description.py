"""The components of a topology, in text, and as a graph and a table for notebooks."""

from __future__ import annotations

import html

from framework.errors import RatchetError
from framework.streams.hidden_columns import is_hidden
from framework.streams.steps_bolt import StepsBolt
from framework.streams.topology_graph_svg import graph_svg
from framework.topology import Component, FencedState, Fields, OpaquePartitionedTransactionalSpout, Topology
from framework.topology.bolts import Bolt
from framework.topology.extra_partition_spout_wrapper import unwrapped
from framework.topology.planning_time_stream import HIDDEN_STREAMS

_HEADING = ("component", "tasks", "what", "takes", "emits", "guarantee")


def described(topology: Topology) -> str:
    """A paragraph per component, in the order of the rows.

    The first line names the topology and its guarantee.
    """
    guarantee = "at least once" if topology.at_least_once else "exactly once"
    lines = [f"{topology.id}: {guarantee}"]
    for component in topology.components:
        _, tasks, what, takes, emits, promise = _row(topology, component)
        lines += ["", f"{component.id}  ({what}, {tasks} {'task' if tasks == '1' else 'tasks'})"]
        lines += [f"  takes      {each}" for each in takes]
        lines += [f"  does       {each}" for each in _calls(component)]
        lines += [f"  emits      {each}" for each in emits]
        lines += [f"  state      {each.location}" for each in component.states]
        lines += [f"  guarantee  {promise}"] if promise else []
    return "\n".join(lines)


def described_html(topology: Topology | RatchetError) -> str:
    """The graph, and the same as a table; or the error in their place."""
    if isinstance(topology, RatchetError):
        return f"<pre>{html.escape(str(topology))}</pre>"
    head = "".join(f"<th>{each}</th>" for each in _HEADING)
    rows = []
    for component in topology.components:
        name, tasks, what, takes, emits, promise = _row(topology, component)
        cells = (name, tasks, "\n".join([what, *_calls(component)]), "\n".join(takes), "\n".join(emits), promise)
        rows.append("".join(f"<td>{html.escape(each).replace(chr(10), '<br>')}</td>" for each in cells))
    body = "".join(f"<tr>{each}</tr>" for each in rows)
    table = f"<table><caption>{html.escape(topology.id)}</caption><tr>{head}</tr>{body}</table>"
    return f"{graph_svg(topology.shape())}{table}"


def _row(topology: Topology, component: Component) -> tuple[str, str, str, list[str], list[str], str]:
    takes = [f"{each.label} by {each.grouping.outline()}" for each in component.subscriptions]
    emits = [
        f"{'' if stream == 'default' else f'{stream}: '}{_columns(fields)}"
        for stream, fields in component.streams.items()
        if stream not in HIDDEN_STREAMS
    ]
    return (
        component.id,
        str(component.parallelism),
        type(unwrapped(component.instance)).__name__,
        takes,
        emits,
        _promise(topology, component),
    )


def _columns(fields: Fields) -> str:
    return ", ".join(f"{name} {fields.type_of(name)}" for name in fields if not is_hidden(name))


def _promise(topology: Topology, component: Component) -> str:
    instance = component.instance
    if component is topology.spout:
        opaque = isinstance(instance, OpaquePartitionedTransactionalSpout)
        return "a replay may take other rows" if opaque else "a replay takes the same rows"
    if component.committer:
        kinds = [_value_type(each) for each in component.states]
        return f"writes in the order of transactions{', ' + ', '.join(kinds) if kinds else ''}"
    if isinstance(instance, Bolt) and instance.deterministic:
        return ""
    if isinstance(instance, StepsBolt) and instance.looks_up:
        return "a replay asks again, and may get other answers"
    return "a replay may give other rows"


def _value_type(state: FencedState) -> str:
    return f"{state.value_type.value} state"


def _calls(component: Component) -> list[str]:
    return component.instance.calls if isinstance(component.instance, StepsBolt) else []
