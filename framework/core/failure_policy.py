"""The consequences of failures in user code for a core topology: a pause, or its end. Also finds
the tuple, tree or component that is at fault."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from framework.acking.ack_reports import origin_of
from framework.core.plan import CorePlan
from framework.core.round_protocol import ComponentError, Decisions, ErrorKind, RoundRecord, RoundReport

#: The longest pause before a driver tries again after a failure, or after a round was lost.
PAUSE_MAX_S = 5.0
_PAUSE_MIN_S = 0.025
_DOUBLINGS_MAX = 10  # enough to exceed the longest pause


def pause_s(times: int) -> float:
    """The pause after this many failures in a row."""
    return float(min(_PAUSE_MIN_S * 2 ** min(times, _DOUBLINGS_MAX), PAUSE_MAX_S))


class FailurePolicy:
    """Counts consecutive failures per task. ``attempts_max``: the topology ends when a component
    fails to start, or a spout dies, this often in a row."""

    def __init__(self, plan: CorePlan, attempts_max: int) -> None:
        self._plan, self._attempts_max = plan, attempts_max
        self._spouts = frozenset(plan.spout_tasks())
        self._rooted = plan.rooted_tasks()
        #: Consecutive times that a task could not work.
        self.stuck: dict[tuple[str, int], int] = {}
        # the same, because an external system did not answer
        self._away: dict[tuple[str, int], int] = {}

    def worked(self, tasks: Iterable[tuple[str, int]]) -> None:
        """Reset the counters of tasks that worked and did not die."""
        for each in tasks:
            self.stuck.pop(each, None)
            self._away.pop(each, None)

    def judge(self, errors: Sequence[ComponentError]) -> tuple[ComponentError | None, float]:
        """Return the error that ends the topology (or None), and otherwise the seconds to pause.

        The topology ends when a new instance would fail in the same way, or when a component
        repeatedly cannot start, or a spout repeatedly dies, without doing any work in between. A
        task counts once per round."""
        pause = 0.0
        counted: set[tuple[str, int]] = set()
        for error in errors:
            key = error.component_id, error.task
            times = self._times(error)
            if times is not None and key not in counted:
                counted.add(key)
                times[key] = times.get(key, 0) + 1
                pause = max(pause, pause_s(times[key]))
            if error.kind is ErrorKind.FATAL or self.stuck.get(key, 0) >= self._attempts_max:
                return error, 0.0
        return None, pause

    def _times(self, error: ComponentError) -> dict[tuple[str, int], int] | None:
        """The counter for failures of this kind; None when they are not counted."""
        if error.kind is ErrorKind.AWAY:
            return self._away
        died = error.kind is ErrorKind.DIED and (error.component_id, error.task) in self._spouts
        return self.stuck if died or error.kind is ErrorKind.CANNOT_START else None

    def failed_tuple(self, records: Sequence[RoundRecord], held: Callable[[], Iterable[str]]) -> str | None:
        """Describe the tuple that failed, if one did, by the bolt that failed it or else by the
        task at which its tree began. ``held``: names the bolts with tuples that they have neither
        acked nor failed."""
        counted = {
            key: counts.failed > counts.timed_out
            for each in records
            if isinstance(each, RoundReport)
            for key, counts in each.counts.items()
            if counts.failed
        }
        for (component_id, task), itself in counted.items():
            if itself and (component_id, task) not in self._spouts:
                return f"{component_id}[{task}] failed a tuple"
        began = [
            self._task_of(origin)
            for each in records
            if isinstance(each, Decisions)
            for origin, _ in (each.failed + each.expired).by_origin()
        ]
        if not began and not counted:
            return None
        component_id, task = [*began, *counted][0]
        names = ", ".join(held())
        return f"a tuple of {component_id}[{task}] was not processed in time" + (f"; {names} had some" if names else "")

    def blamed(self, records: Sequence[RoundRecord], gives_up: Callable[[str], bool]) -> set[int]:
        """The trees whose source records are at fault, of spouts that give up records. Either a
        tuple that is part of this tree only has failed by itself, or the tree timed out while no
        open tuple was part of several trees."""
        blamed, late, shared = set[int](), set[int](), set[int]()
        for each in records:
            if isinstance(each, RoundReport):
                blamed.update(each.blamed.ids())
                late.update(each.timed_out.ids())
            elif isinstance(each, Decisions):
                late.update(each.expired.ids())
                shared.update(each.shared.ids())
        found = blamed | (late - shared)
        return {root for root in found if gives_up(self._task_of(origin_of(root))[0])}

    def _task_of(self, origin: int) -> tuple[str, int]:
        """The task at which a tree began."""
        return self._rooted[self._plan.rooted_task_of(origin)]
