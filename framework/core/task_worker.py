"""A task worker holds tasks of a core topology across rounds, and runs their part of every round.

A worker holds whole tasks: a segment of fused components, or an acker. It does not decide which
tasks it gets; a task starts with the first round that names it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from framework.core.acker_task import AckerTask
from framework.core.checkpoint_messages import CheckpointAction
from framework.core.plan import CorePlan
from framework.core.round_budget import ROUND_EXECUTE_S, Budget
from framework.core.round_protocol import Addressed, Round, RoundRecord
from framework.core.round_sequencer import OVERTAKE_S, RoundOrder
from framework.core.segment_task import SegmentTask
from framework.execution.tasks import PlannedTopology
from framework.state.provider_settings import provider_of

#: The first and the longest pause before idle spouts are asked again. The pause doubles in between.
_POLL_MIN_S, _POLL_MAX_S = 0.001, 0.025


class TaskWorker:
    """Holds tasks. ``encode``: encode rows, because they leave the process between levels. Several
    threads may run tasks."""

    def __init__(
        self,
        plan: CorePlan,
        *,
        encode: bool,
        overtake_s: float = OVERTAKE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._plan = plan
        self._overtake_s = overtake_s
        self._topology = PlannedTopology(plan.plan, plan.conf)
        self._encode = encode
        self._tasks: dict[tuple[int, int], SegmentTask | AckerTask] = {}
        self._turns: dict[tuple[int, int], RoundOrder] = {}
        self._lock = threading.Lock()
        self._woken = threading.Condition()
        self._woken_round = 0
        self._waiting_round = 0
        self._numbers = {each: number for number, each in enumerate(plan.rooted_tasks())}
        self._provider = provider_of(plan.conf) if plan.stateful else None

    def run_task(
        self, round_: Round, level: int, partition: int, records: Sequence[RoundRecord]
    ) -> Sequence[Addressed]:
        """Run one task of one level for a round, as a ``RunTask``. Raises ``OvertakenError``."""
        return self.run_tasks(round_, level, [(partition, records)])

    def run_tasks(
        self, round_: Round, level: int, arriving: Sequence[tuple[int, Sequence[RoundRecord]]]
    ) -> Sequence[Addressed]:
        """Run several tasks of a level, each when the round has its turn there. ``arriving``:
        partitions with their records. Raises ``OvertakenError``."""
        with ExitStack() as turns:
            for partition, _ in arriving:
                self._await_turn(turns, round_, level, partition)
            tasks = [(self._task(round_, level, partition), records) for partition, records in arriving]
            try:
                for task, _ in tasks:
                    task.begin(round_)
                givers = [task for task, _ in tasks if isinstance(task, SegmentTask) and task.gives]
                if givers and round_.spout_wait_s and not round_.drain:
                    self._await_a_spout(round_, givers)
                budget = Budget(self._clock, None if round_.prepares else ROUND_EXECUTE_S)
                return [exit_ for task, records in tasks for exit_ in task.run(round_, records, budget)]
            except BaseException:
                for task, _ in tasks:
                    task.throw_away()
                raise

    def wake(self, number: int) -> None:
        """End the wait for the spouts in round ``number``; for 0, in the round that waits now."""
        with self._woken:
            self._woken_round = max(self._woken_round, number or self._waiting_round)
            self._woken.notify_all()

    def _await_a_spout(self, round_: Round, tasks: Sequence[SegmentTask]) -> None:
        """Ask the spouts in turn, at growing intervals, until one has emitted or cannot be opened,
        the time is up, or ``wake`` is called."""
        until = time.monotonic() + round_.spout_wait_s
        pause_s = _POLL_MIN_S
        with self._woken:
            self._waiting_round = round_.number
            while (left := until - time.monotonic()) > 0 and self._woken_round < round_.number:
                gave = [task.give(round_) for task in tasks]
                if any(gave) or not all(task.open for task in tasks):
                    break
                self._woken.wait(min(pause_s, left))
                pause_s = min(pause_s * 2, _POLL_MAX_S)
            self._waiting_round = 0

    def _await_turn(self, turns: ExitStack, round_: Round, level: int, partition: int) -> None:
        with self._lock:
            its = self._turns.get((level, partition))
            if its is None:
                its = self._turns[(level, partition)] = RoundOrder(self._overtake_s)
        turns.enter_context(its.of(round_.number, round_.follows))

    def _task(self, round_: Round, level: int, partition: int) -> SegmentTask | AckerTask:
        """The task at that place. Makes a new one if there is none, or if the topology goes back to
        a checkpoint."""
        place = level, partition
        found, marker = self._tasks.get(place), round_.checkpoint
        if found is not None and (marker is None or marker.action is not CheckpointAction.RECOVER):
            return found
        made = self._begin(round_, level, partition)
        if isinstance(made, SegmentTask) and marker is not None and marker.action is CheckpointAction.RECOVER:
            self._tasks.pop(place, None)
            made.recover(marker, found if isinstance(found, SegmentTask) else None)
        self._tasks[place] = made
        return made

    def close(self) -> None:
        """Close the spouts and clean up the bolts."""
        tasks, self._tasks = self._tasks, {}
        for task in tasks.values():
            task.close()
        if self._provider is not None:
            self._provider.close()

    def _begin(self, round_: Round, level: int, partition: int) -> SegmentTask | AckerTask:
        levels = self._plan.plan.processing
        if level == len(levels):
            return AckerTask(partition, round_.number)
        segment, task = levels[level].slot(partition)
        return SegmentTask(
            self._plan,
            self._topology,
            segment,
            task=task,
            level=level,
            partition=partition,
            numbers=self._numbers,
            first_round=round_.number,
            encode=self._encode,
            provider=self._provider,
            clock=self._clock,
        )
