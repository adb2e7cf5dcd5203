"""The reports of a core topology's tasks, summed over rounds."""

from __future__ import annotations

from framework.core.plan import CorePlan
from framework.core.round_protocol import Counts, Decisions, RoundReport


class Totals:
    """Sums over rounds. ``sent``: label of an edge -> rows that were sent over it."""

    def __init__(self, plan: CorePlan) -> None:
        self._plan = plan.plan
        self._counts: dict[tuple[str, int], Counts] = {}
        self._trees: dict[int, int] = {}
        self.sent: dict[str, int] = {each.label: 0 for each in plan.plan.edges}

    def add(self, report: RoundReport) -> None:
        for index, rows in report.sent.items():
            self.sent[self._plan.edges[index].label] += rows
        for key, counts in report.counts.items():
            total = self._counts.setdefault(key, Counts())
            # not sums: the latest value counts
            total.pending = total.behind = total.waiting = total.due = 0
            total.add(counts)

    def decided(self, decisions: Decisions) -> None:
        self._trees[decisions.acker] = decisions.trees

    def by_component(self) -> dict[str, Counts]:
        found = {component_id: Counts() for component_id in self._plan.components}
        for (component_id, _), counts in self._counts.items():
            found[component_id].add(counts)
        return found

    @property
    def trees(self) -> int:
        """The number of trees that the ackers track."""
        return sum(self._trees.values())

    @property
    def pending(self) -> int:
        return sum(each.pending for each in self._counts.values())

    @property
    def behind(self) -> int:
        return sum(each.behind for each in self._counts.values())

    @property
    def waiting(self) -> int:
        """Tuples that wait in bolts, as of the last round. While there are any, spouts emit
        nothing."""
        return sum(each.waiting for each in self._counts.values())

    @property
    def due(self) -> bool:
        return any(each.due for each in self._counts.values())
