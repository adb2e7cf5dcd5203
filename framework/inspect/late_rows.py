"""Observes which rows were late for the committers of a copy of a topology."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import pyarrow as pa

from framework.execution import TaskFailure
from framework.execution.plan import Edge
from framework.inspect.sandbox import End
from framework.topology import Component, Topology
from framework.topology.canonical_form import python_values
from framework.topology.graph import Subscription
from framework.topology.groupings import AllGrouping
from framework.topology.inspectable import EventTime, LateBolt, TimedBolt

#: Where late rows end.
_END = "ratchet-late"

Row = Mapping[str, Any]


class LateRows:
    """The late rows of the committers of a copy that no bolt takes. It is the ``TaskWatcher`` of
    ``shadow``, the copy with a bolt that ends these streams."""

    def __init__(self, copy: Topology) -> None:
        taken = {(sub.component_id, sub.stream) for each in copy.components for sub in each.subscriptions}
        self._bolts: dict[str, LateBolt] = {}
        self._clocks: dict[str, list[TimedBolt]] = {}
        self._before: dict[str, EventTime | None] = {}
        ends: list[Subscription] = []
        for each in copy.components:
            bolt: object = each.instance
            if isinstance(bolt, LateBolt):
                self._bolts[each.id] = bolt
                self._clocks[each.id] = clocks_in(copy[sub.component_id] for sub in each.subscriptions)
                free = sorted(stream for stream in bolt.late_streams if (each.id, stream) not in taken)
                ends += [Subscription(each.id, stream, AllGrouping()) for stream in free]
        end = Component(_END, 1, End(), streams={}, subscriptions=tuple(ends))
        self.shadow = Topology(copy.id, (*copy.components, *([end] if ends else [])), copy.at_least_once)
        self._rows: dict[tuple[str, str], list[Row]] = {}

    def __getitem__(self, component_id: str) -> LateBolt:
        return self._bolts[component_id]

    def emitted(self, edge: Edge, rows: pa.RecordBatch) -> None:
        if edge.target == _END:
            columns = [python_values(pa.chunked_array([column])) for column in rows.columns]
            its = (dict(zip(rows.schema.names, row, strict=True)) for row in zip(*columns, strict=True))
            self._rows.setdefault((edge.source, edge.stream), []).extend(its)

    def failed(self, failure: TaskFailure, error: BaseException) -> None:
        return None

    def make_all_late(self) -> None:
        for each in self._bolts.values():
            each.make_all_late()

    def time_of(self, component_id: str) -> EventTime | None:
        """The event time that a committer uses."""
        return lowest(self._times_of(component_id))

    def newest_of(self, component_id: str) -> int | None:
        """The newest event time of a record of a committer, in microseconds; None: it had none."""
        times = self._times_of(component_id)
        return max((each.newest for each in times if each is not None and each.newest is not None), default=None)

    def _times_of(self, component_id: str) -> list[EventTime | None]:
        return [each.event_time() for each in self._clocks[component_id]]

    def taken(self) -> Iterator[tuple[str, str, int | None, Sequence[Row]]]:
        """The rows since the last call, which must precede their transaction: committer, stream,
        the watermark at that call, rows."""
        rows, self._rows = self._rows, {}
        for (component_id, stream), its in rows.items():
            before = self._before.get(component_id)
            yield component_id, stream, before.watermark if before is not None else None, its
        self._before = {each: self.time_of(each) for each in self._bolts}

    def has(self, component_id: str, stream: str, late: Sequence[Row], _: int) -> bool:
        """Whether a row since the last call represents records of these late rows."""
        rows, self._rows = self._rows, {}
        bolt, its = self._bolts[component_id], rows.get((component_id, stream), [])
        return any(bolt.is_late_with(row, other) for row in its for other in late)


def clocks_in(components: Iterable[Component]) -> list[TimedBolt]:
    instances: Iterable[object] = (each.instance for each in components)
    return [each for each in instances if isinstance(each, TimedBolt)]


def lowest(times: Sequence[EventTime | None]) -> EventTime | None:
    """The event time of a state with several watermarks; None before all have begun."""
    begun = [(each.watermark, each) for each in times if each is not None and each.watermark is not None]
    return min(begun, key=itemgetter(0))[1] if begun and len(begun) == len(times) else None
