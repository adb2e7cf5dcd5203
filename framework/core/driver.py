"""The driver of a core topology: runs round after round until it is stopped.

While there is work, the next round begins before the previous one has ended: its spouts emit while
the bolts of the previous round still work. Every task does its part of the rounds in order.

Invariants:

1. The driver repeats a decision about a tree to its spout task until a round that carried the
   decision has completed, so a lost round loses no decision. Spouts forget a tree on the first
   delivery, so a repetition does no harm.
2. The driver uses no result of a lost round: the trees concerned time out, and fail.
3. The driver takes results of rounds in order. After a lost round, no round begins until all rounds
   under way have ended.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from framework.core.checkpoint_messages import CheckpointAction, CheckpointMarker, CheckpointReport
from framework.core.checkpoints import Checkpoints, CheckpointStep
from framework.core.component_task import ROTATIONS_PER_TIMEOUT
from framework.core.driver_reporter import CoreReporter
from framework.core.event_times import EventTimes, Marks
from framework.core.failure_policy import PAUSE_MAX_S, FailurePolicy, pause_s
from framework.core.plan import CorePlan
from framework.core.round_budget import Share
from framework.core.round_protocol import (
    ComponentError,
    Counts,
    Decisions,
    ErrorKind,
    Round,
    RoundExecutor,
    RoundRecord,
    RoundReport,
    TreeOutcomes,
    WorkerLostError,
)
from framework.core.status import CoreStatus
from framework.core.totals import Totals
from framework.errors import InvariantViolation, LeadershipLostError, RetryableError, StaleWriterError
from framework.observe.logs import get_logger
from framework.observe.run_statistics import CoreFigures

_log = get_logger()

#: The longest that the spouts of a round wait for input. The wait grows towards this while there is
#: none.
SPOUT_WAIT_MAX_S = 5.0
_SPOUT_WAIT_MIN_S = 0.005
#: How often the driver checks whether every tree is complete while nothing else happens.
_QUIET_POLL_S = 0.02
#: The pause before a driver repeats a recovery that did not succeed.
_RECOVERY_PAUSE_S = 0.5
#: How often a driver confirms its leadership: more often than any session can expire.
_CONFIRM_S = 1.0
#: How long tuples under way may take when a topology is stopped, provided that they make progress.
DRAIN_S = 10.0


class _Found(NamedTuple):
    """The reports of one round, summed up.

    * ``busy``: something happened, or tuples wait.
    * ``failed``: which tree, tuple or component failed.
    * ``silent``: a task that did not report, or that is new and has no checkpoint.
    * ``died``: components that died, with their tasks.
    * ``blamed``: trees whose source records are at fault, of spouts that give up records."""

    busy: bool
    failed: str | None
    errors: Sequence[ComponentError]
    checkpoint_reports: Sequence[CheckpointReport]
    silent: str | None
    died: Sequence[tuple[str, int]]
    blamed: Collection[int]


class RoundDriver:
    """Runs the rounds of a core topology. Call ``run`` in a thread of its own; the methods under
    "from any thread" may be called from any.

    * ``timeout_s``: of a tuple.
    * ``attempts_max``: the topology fails when a component fails to start, or a spout dies, this
      often in a row."""

    def __init__(
        self,
        plan: CorePlan,
        executor: RoundExecutor,
        *,
        timeout_s: float,
        attempts_max: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._executor = executor
        self._rotation_s = timeout_s / ROTATIONS_PER_TIMEOUT
        self._checkpoints: Checkpoints | None = None
        self._confirm: Callable[[], None] | None = None
        self._confirmed_at = 0.0
        self._clock = clock
        self._spouts = frozenset(plan.spout_tasks())
        self._speakers = [
            *((each.id, task) for each in plan.plan.components.values() for task in range(each.parallelism)),
            *(("$acker", number) for number in range(plan.ackers)),
        ]
        self._outcomes: dict[int, TreeOutcomes] = {}
        self._totals = Totals(plan)
        self._failures = FailurePolicy(plan, attempts_max)
        self._reporter = CoreReporter(plan, clock)
        self._event_times = EventTimes(plan.spout_tasks()) if plan.paths else None
        self._share = Share()
        self._rotated_at = clock()
        self._number = 0
        self._lost = 0  # number of the last lost round
        self._under_way: deque[Round] = deque()
        self._spout_wait_s = 0.0
        self._tick_at: float | None = None  # when the next bolt wants a tick
        self._awaited = 0  # callers that wait until the topology is idle
        self._idle: int | None = None  # the last round that ended, if it found the topology idle
        self._stopping = threading.Event()
        self.failure: ComponentError | None = None
        self.error: BaseException | None = None

    # --- from any thread --------------------------------------------------------------------------

    def status(self) -> CoreStatus:
        return self._reporter.status()

    def figures(self) -> CoreFigures:
        """The counters so far."""
        return self._reporter.figures()

    def tuples_per_second(self) -> float:
        """Spout tuples that were fully processed per second, over the last minute."""
        return self._reporter.tuples_per_second()

    @property
    def recent_errors(self) -> Sequence[tuple[float, ComponentError]]:
        """The last errors in user code, with the moment of each in seconds since the epoch."""
        return self._reporter.recent_errors

    def request_stop(self) -> None:
        self._stopping.set()
        self._executor.wake()

    def wait_until_idle(self, timeout_s: float | None) -> bool:
        """Wait for a round that began after this call and found the topology idle, with no other
        round under way. Returns False when the run ended, or the timeout expired."""
        with self._reporter.changed:
            after = self._number + 1
            self._awaited += 1
            try:
                self._reporter.changed.wait_for(lambda: self.over or self._idle_after(after), timeout_s)
            finally:
                self._awaited -= 1
            return not self.over and self._idle_after(after)

    # --- the loop ---------------------------------------------------------------------------------

    def run(
        self, confirm: Callable[[], None] | None = None, checkpoints: Callable[[], Checkpoints] | None = None
    ) -> None:
        """Run round after round. Returns when it was asked to stop, when the topology has failed,
        and when this driver no longer leads; in the last case it may be called again.

        * ``confirm``: raises when this driver does not lead, and blocks while that is unknown.
        * ``checkpoints``: of a topology with state."""
        phase = "stopped"
        self._confirm, self._confirmed_at = confirm, self._clock()
        try:
            self._checkpoints = checkpoints() if checkpoints is not None else None
            self._reporter.leads()
            self._show(phase="running")
            with ThreadPoolExecutor(thread_name_prefix="ratchet-round") as pool:
                self._go_on(pool)
            if self.failure is None:
                self._drain()
        except (StaleWriterError, LeadershipLostError, RetryableError) as error:
            _log.warning("driver.stepped_down", topology=self._plan.plan.topology_id, reason=str(error))
            phase = "stopped" if self._stopping.is_set() else "standby"
            self._show(last_error=str(error))
        except BaseException as error:  # noqa: BLE001 - told to whoever waits for the run
            self.error = error
        finally:
            self._under_way.clear()
            failed = self.failure is not None or self.error is not None
            self._show(phase="failed" if failed else phase)

    @property
    def over(self) -> bool:
        """Whether the run has ended for good."""
        return self._reporter.phase in ("stopped", "failed")

    def stand_by(self, why: str | None = None) -> None:
        """Show that another driver leads, or that no leader can be elected."""
        self._show(phase="standby", last_error=why)

    def stop_standing_by(self) -> None:
        """Show that this driver was stopped before it led."""
        if not self.over:
            self._show(phase="stopped")

    def step(self, *, drain: bool = False) -> bool:
        """Run one round, alone. Returns False when it was lost."""
        round_ = self.begin(drain=drain)
        return self.end(round_, lambda: self._executor.run(round_))

    def begin(self, *, drain: bool = False) -> Round:
        """Make the next round. It is under way from now on."""
        now = self._clock()
        # One rotation per round, however long the round takes: a waiting tuple can renew its
        # timeout once per round.
        rotates = now - self._rotated_at >= self._rotation_s
        if rotates:
            self._rotated_at = now
        waiting = self._totals.waiting
        step, spout_wait_s = CheckpointStep(), min(self._spout_wait_s, self._rotated_at + self._rotation_s - now)
        if self._tick_at is not None:
            spout_wait_s = min(spout_wait_s, max(self._tick_at - now, 0.0))
        if self._checkpoints is not None:
            due_in_s = self._checkpoints.due_in(now)
            spout_wait_s = spout_wait_s if due_in_s is None else min(spout_wait_s, due_in_s)
            step = self._checkpoints.plan(now, quiet=self._quiet(), waiting=bool(waiting))
            if step.drain and step.marker is None and self._spout_wait_s:
                self._stopping.wait(_QUIET_POLL_S)  # some bolt holds a tuple
        if step.marker is not None and step.marker.action is CheckpointAction.RECOVER and step.marker.exact:
            # No acker tracks these trees any more. (Under at-least-once the spouts stay, and get
            # the decisions.)
            self._outcomes.clear()
        marks = self._new_marks(step.marker)
        outcomes, self._outcomes = self._outcomes, {}
        follows = self._under_way[-1].number if self._under_way else 0
        with self._reporter.changed:
            self._number += 1
        round_ = Round(
            self._number,
            rotates=rotates,
            outcomes=outcomes,
            spout_wait_s=0.0 if step.alone else spout_wait_s,
            drain=drain or step.drain or bool(waiting),
            follows=follows,
            at_once=self._executor.rounds_max,
            checkpoint=step.marker,
            share=self._share_now(),
            lost=self._lost,
            settles=step.drain,
            marks=marks,
        )
        if self._event_times is not None and marks is not None:
            self._event_times.told(round_.number)
        self._under_way.append(round_)
        if round_.prepares and step.marker is not None:
            self._reporter.preparing(step.marker.txid, now)
        return round_

    def end(self, round_: Round, result: Callable[[], Sequence[RoundRecord]]) -> bool:
        """Take the result of the oldest round under way. ``result``: returns the records, or raises
        ``RetryableError`` when the round was lost. Returns False when it was lost."""
        if self._under_way.popleft() is not round_:
            raise InvariantViolation(f"round {round_.number} ended out of turn")
        try:
            records = result()
        except RetryableError as error:
            _log.warning("round.lost", round=round_.number, error=str(error))
            for task, told in round_.outcomes.items():
                self._order(task, told)
            follows_lost = round_.follows and round_.follows == self._lost
            self._lost = round_.number
            if self._checkpoints is not None:
                self._checkpoints.lost(str(error), ended=isinstance(error, WorkerLostError))
                self._end_for_good(self._checkpoints)
            self._show(rounds=1, rounds_lost=1, last_error=None if follows_lost else str(error))
            return False
        found = self._take(round_, records)
        marks_are_known = self._marks_are_known(round_)
        busy = found.busy or bool(round_.outcomes) or not marks_are_known
        settled = self._checkpoints is None or self._checkpoint(self._checkpoints, round_, found)
        pending = self._totals.pending
        if self._checkpoints is not None and self._awaited and not busy:
            self._checkpoints.want()
        done = self._stopping.is_set() or not (round_.drain or self._totals.behind)
        with self._reporter.changed:
            self._idle = round_.number if done and not busy and not pending and settled else None
        if self._checkpoints is not None and self._idle is not None:
            self._checkpoints.rested()
        if busy:
            self._spout_wait_s = 0.0
        else:
            self._spout_wait_s = min(max(self._spout_wait_s * 2, _SPOUT_WAIT_MIN_S), SPOUT_WAIT_MAX_S)
        self._show(rounds=1)
        return True

    def _marks_are_known(self, round_: Round) -> bool:
        """Take in the progress of the source partitions. Returns whether the tasks know the latest
        progress, and have nothing due."""
        if self._event_times is None:
            return True
        if not self._totals.waiting:
            self._event_times.settle(round_.number)
        return self._event_times.are_known(round_.number) and not self._totals.due

    def _new_marks(self, marker: CheckpointMarker | None) -> Marks | None:
        """The progress of the source partitions for the next round. A round that prepares a
        checkpoint carries none: no window may become due that the checkpoint does not cover."""
        if self._event_times is None or (marker is not None and marker.action is CheckpointAction.PREPARE):
            return None
        if marker is not None and marker.action is CheckpointAction.RECOVER:
            self._event_times.begin_anew()
        return self._event_times.news()

    def _go_on(self, pool: ThreadPoolExecutor) -> None:
        """Run round after round. While there is work, run as many concurrently as the executor can;
        while there is none, run a single round, which waits in the spouts."""
        running: deque[tuple[Round, Future[Sequence[RoundRecord]]]] = deque()
        losses, settling = 0, False
        while True:
            wanted = not self._stopping.is_set() and self.failure is None
            at_once = self._executor.rounds_max if self._spout_wait_s == 0.0 and not self._alone() else 1
            if wanted and not settling and len(running) < at_once:
                self._make_sure_to_lead()
                round_ = self.begin()
                running.append((round_, pool.submit(self._executor.run, round_)))
                continue
            if not running:
                return
            round_, result = running.popleft()
            if not self.end(round_, result.result):
                settling = True
            elif not settling:
                losses = 0
            if settling and not running:
                losses, settling = losses + 1, False
                self._stopping.wait(min(0.05 * 2**losses, PAUSE_MAX_S))

    def _make_sure_to_lead(self) -> None:
        """Confirm the leadership at intervals shorter than the lifetime of a session."""
        if self._confirm is not None and self._clock() - self._confirmed_at >= _CONFIRM_S:
            self._confirm()
            self._confirmed_at = self._clock()

    def _alone(self) -> bool:
        """Whether the next round must run alone for a checkpoint."""
        return self._checkpoints is not None and self._checkpoints.due_in(self._clock()) == 0.0

    def _drain(self) -> None:
        """Let tuples under way finish, provided that they make progress, and cover them by a
        checkpoint."""
        self._spout_wait_s = 0.0
        if self._checkpoints is not None:
            self._checkpoints.want()
        until = self._clock() + DRAIN_S
        while self._clock() < until and self.step(drain=True) and self._idle is None:
            if self._spout_wait_s > 0.0 and not self._alone():
                return

    def _take(self, round_: Round, records: Sequence[RoundRecord]) -> _Found:
        """Take in the records of a round."""
        busy = False
        errors: list[ComponentError] = []
        checkpoint_reports: list[CheckpointReport] = []
        did: list[Counts] = []
        died: list[tuple[str, int]] = []
        given = 0
        ticks: list[float] = []
        silent = dict.fromkeys(self._speakers)
        for record in records:
            match record:
                case Decisions():
                    self._totals.decided(record)
                    busy = self._decided(record) or busy
                    spoke = [("$acker", record.acker)]
                case RoundReport():
                    busy = self._heard(record) or busy
                    spoke = [] if record.unrecovered else list(record.counts)
                    died += [key for key, each in record.counts.items() if each.died]
                    errors += record.errors
                    if record.tick_in_s is not None:
                        ticks.append(record.tick_in_s)
                    if record.round == round_.number:
                        did += record.counts.values()
                        given = max(
                            [given, *(each.emitted for key, each in record.counts.items() if key in self._spouts)]
                        )
                        checkpoint_reports += record.checkpoint_reports
                        self._hear_times(record)
                case _:
                    continue
            if record.round == round_.number:
                for each in spoke:
                    silent.pop(each, None)
        self._reporter.errors(errors)
        if errors:
            self._show(last_error=str(errors[-1]))
        self._reporter.late(records)
        self._judge(errors)
        self._tick_at = self._clock() + min(ticks) if ticks else None
        if not round_.drain:
            self._share.adapt(given, did)
        first = next(iter(silent), None)
        busy = busy or bool(errors) or self._totals.waiting > 0
        gone = None if first is None else f"{first[0]}[{first[1]}]"
        failed, blamed = None, set[int]()
        if self._checkpoints is not None:  # only checkpoints ask
            failed = self._failures.failed_tuple(records, lambda: self.status().held)
            blamed = self._failures.blamed(records, self._checkpoints.gives_up)
        return _Found(
            busy,
            failed,
            errors=errors,
            checkpoint_reports=checkpoint_reports,
            silent=gone,
            died=died,
            blamed=blamed,
        )

    def _hear_times(self, report: RoundReport) -> None:
        if self._event_times is not None:
            for (component_id, task), unread in report.unread.items():
                self._event_times.hear_unread(component_id, task, unread)
            for component_id, newest in report.newest.items():
                self._event_times.hear_newest(component_id, newest)

    def _share_now(self) -> int:
        """The most tuples that a spout task gives in the next round."""
        checkpoints = self._checkpoints
        if checkpoints is None or not checkpoints.suspects:
            return self._share.tuples
        return min(self._share.tuples, checkpoints.few)

    def _checkpoint(self, checkpoints: Checkpoints, round_: Round, found: _Found) -> bool:
        """Give the result of a round to the checkpoints. Returns whether a checkpoint covers all
        work."""
        marker = round_.checkpoint
        died = [each for each in found.errors if each.kind is ErrorKind.DIED]
        if found.silent is not None:
            checkpoints.lost(f"{found.silent} is gone or began anew")
            return False
        action = marker.action if marker is not None else None
        recovers = action is CheckpointAction.RECOVER
        if found.busy and not recovers:
            checkpoints.worked()
        dead = [each for each in found.died if checkpoints.exact or each[0] in self._plan.stateful]
        why = found.failed if checkpoints.exact and not recovers else None
        prepares = action is CheckpointAction.PREPARE
        if why is None and prepares and checkpoints.exact:
            why = self._left_open()
        if dead:
            told = (str(each) for each in died if (each.component_id, each.task) in dead)
            why = next(told, f"{dead[0][0]}[{dead[0][1]}] died")
        if marker is not None and prepares and self._totals.waiting:
            checkpoints.lost(f"tuples came for checkpoint {marker.txid} that no bolt has executed")
        elif marker is not None and (why is None or action is CheckpointAction.COMMIT):
            # After a failure, no checkpoint is prepared and no recovery completes.
            checkpoints.end_round(marker, found.checkpoint_reports)
        if why is not None:
            checkpoints.failed(why, recovers=recovers, blamed=found.blamed)
            self._stopping.wait(pause_s(checkpoints.failures))
        elif recovers and checkpoints.recovering and self.failure is None:
            self._stopping.wait(_RECOVERY_PAUSE_S)
        elif checkpoints.recovering and checkpoints.refused:
            self._stopping.wait(pause_s(checkpoints.refused))
        self._end_for_good(checkpoints, *died)
        return checkpoints.settled

    def _end_for_good(self, checkpoints: Checkpoints, *died: ComponentError) -> None:
        """End the topology if it has failed too often. ``died``: the latest failure."""
        why = checkpoints.failed_for_good
        if why is not None and self.failure is None:
            self._fail(died[0] if died else ComponentError(ErrorKind.FATAL, "topology", 0, why))

    def _left_open(self) -> str | None:
        """Name the bolt that holds a tuple of the round that prepares a checkpoint; None when none
        does. If one does, the checkpoint is not prepared."""
        if self._totals.waiting or self._complete():
            return None
        held = ", ".join(self.status().held) or "a bolt"
        return f"{held} holds what was emitted in pre_prepare: have it acked at once, or emit it at a tick"

    def _decided(self, decisions: Decisions) -> bool:
        for kind in TreeOutcomes._fields:
            for origin, roots in getattr(decisions, kind).by_origin():
                self._order(self._plan.rooted_task_of(origin), TreeOutcomes(**{kind: roots}))
        return any(getattr(decisions, kind) for kind in TreeOutcomes._fields)

    def _order(self, task: int, told: TreeOutcomes) -> None:
        """Queue a decision for a spout task, to be delivered in the next round."""
        known = self._outcomes.get(task, TreeOutcomes())
        self._outcomes[task] = TreeOutcomes(*(old + new for old, new in zip(known, told, strict=True)))

    def _heard(self, report: RoundReport) -> bool:
        self._totals.add(report)
        completed = sum(each.completed for each in report.counts.values())
        if completed:
            self._reporter.completed(completed)
        worked = {key: counts for key, counts in report.counts.items() if counts.worked}
        self._failures.worked(key for key, counts in worked.items() if not counts.died)
        return bool(worked)

    def _judge(self, errors: Sequence[ComponentError]) -> None:
        """End the topology or pause, as the failure policy decides."""
        failure, pause = self._failures.judge(errors)
        if failure is not None:
            self._fail(failure)
        elif pause:
            self._stopping.wait(pause)

    def _fail(self, failure: ComponentError) -> None:
        """End the topology, if this driver still leads. Raises as ``confirm``. A deposed driver
        must not report missing data as lost: its successor may have read the data, and the source
        may have deleted it since."""
        if self._confirm is not None:
            self._confirm()
        self.failure = failure
        _log.error("topology.failed", error=str(failure), trace=failure.trace)

    def _quiet(self) -> bool:
        """Whether every tree is complete, no tuple waits, and no round is under way. Every tree is
        complete when the ackers track none, and the next round completes all that the spouts still
        keep."""
        return not (self._under_way or self._totals.waiting) and self._complete()

    def _complete(self) -> bool:
        """Whether every tree is complete; see ``_quiet``."""
        told = sum(len(each.completed) for each in self._outcomes.values())
        return not self._totals.trees and self._totals.pending == told

    def _idle_after(self, number: int) -> bool:
        """Whether a round with a higher number found nothing to do."""
        return self._idle is not None and self._idle > number

    def _show(
        self,
        *,
        phase: str | None = None,
        rounds: int = 0,
        rounds_lost: int = 0,
        last_error: str | None = None,
    ) -> None:
        checkpoint = self._checkpoints.status() if self._checkpoints is not None else None
        self._reporter.show(
            self._totals,
            checkpoint,
            phase=phase,
            rounds=rounds,
            rounds_lost=rounds_lost,
            last_error=last_error,
        )
