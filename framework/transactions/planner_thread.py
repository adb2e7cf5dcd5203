"""The planner's thread: asks the source until it has a batch, so that the driver's loop does no I/O
for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from framework.coordination.step_generators import Steps, Threads
from framework.errors import ConfigError, RatchetError, RetryableError, reason_of
from framework.execution.failures import FailureKind, TaskFailure, kind_of, trace_of, users_errors
from framework.observe.logs import get_logger
from framework.topology.spouts import Backlog, PartitionPlanner
from framework.transactions.commit_pace import NO_PACE, CommitPace, Pacer
from framework.transactions.coordinator import AskPlan
from framework.transactions.plans import Plan, own_copy
from framework.transactions.spout_planners import CoordinatorPlanner

_log = get_logger()

#: The first pause before an idle source is asked again. It doubles each time, up to
#: ``idle_poll_max_s``.
IDLE_POLL_S = 0.004
#: How long a batch that has only the records since the previous plan waits for that plan's commit.
#: If it were planned immediately, the source would be divided into tiny batches, each of which
#: costs as much as a larger one, so every record would wait longer. Batches that take longer than
#: this run concurrently.
BESIDE_S = 0.05
#: An idle source is asked so seldom that the planner's thread uses no more than this share of a
#: core, ...
IDLE_SHARE = 0.005
#: ... but at least this often, even with many partitions.
IDLE_POLL_COSTLY_MAX_S = 2.0
#: An idle source is watched once the pause reaches this length and this many times the cost of
#: asking, because to begin a watch costs about as much as a few requests. So a record after a
#: moment's pause is noticed as fast as one after an idle hour.
WATCH_FROM_S = 0.016
WATCH_FROM_COSTS = 20
#: A watched source is still asked this often: it may have new partitions, or have lost some. ...
WATCHED_POLL_S = 1.0
#: ... A source with many partitions is asked less often, for this share of a core. Its client's
#: threads use several times as much.
WATCHED_SHARE = 0.001
WATCHED_POLL_COSTLY_MAX_S = 5.0
RETRY_S = 0.2
#: How often a plan that waits for its time checks for another pace, and for enough records.
PACE_LOOK_S = 2.0
BACKLOG_LOOK_S = 1.0


class PlanningThread:
    """Owns the planner: all calls to it run in this thread, one at a time.

    * ``check``: called with each plan first; may raise the same errors as planning.
    * ``pace``: reads the current pace; ``pace_before`` applies until it succeeds.
    * ``planned_ms_ago``: as in ``Pacer``.
    * ``is_awaited``: whether a caller waits for records after this plan, so that no interval delays
      it."""

    def __init__(
        self,
        planner: PartitionPlanner,
        threads: Threads,
        *,
        check: Callable[[Plan], None] = lambda plan: None,
        on_plan: Callable[[AskPlan, Plan], None],
        on_failure: Callable[[TaskFailure], None],
        idle_poll_max_s: float,
        empty_batch_every_s: float | None = None,
        pace: Callable[[], CommitPace] = CommitPace,
        pace_before: CommitPace = NO_PACE,
        planned_ms_ago: int = 0,
        is_awaited: Callable[[Plan], bool] = lambda previous: False,
    ) -> None:
        self._planner = planner
        self._pace = pace
        self._pacer = Pacer(pace_before, threads.now_ms(), planned_ms_ago)
        self._pace_read_ms: int | None = None
        self._is_awaited = is_awaited
        self._check = check
        self._on_plan = on_plan
        self._on_failure = on_failure
        self._idle_poll_max_s = idle_poll_max_s
        self._empty_batch_every_s = empty_batch_every_s
        self._threads = threads
        self._last_plan_at_ms = threads.now_ms()
        self._last_plan: Plan | None = None  # until it is committed
        # guards fields set by other threads: the next five, and ``_arrived``
        self._lock = threading.Lock()
        self._asked: AskPlan | None = None
        self._through: Plan | None = None
        self._closed_plan: Plan | None = None
        self._calls: list[tuple[Callable[[PartitionPlanner], Any], Future[Any]]] = []
        self._closed = False
        self._wake = threads.event()
        self._arrived = False  # the source has signalled new records
        self._thread: threading.Thread | None = None
        self._cost_s = 0.0  # processor time of the last request to the source
        self.waiting_for: str | None = None
        self.planned_in_s: float | None = None  # while a plan waits for its time

    @property
    def pace(self) -> CommitPace:
        return self._pacer.pace

    def start(self) -> None:
        self._thread = self._threads.spawn("planner", self._running())

    def ask(self, request: AskPlan) -> None:
        """Plan this batch from now on; discard any other request."""
        with self._lock:
            self._asked = request
        self._pacer.asked(request.txid, self._threads.now_ms())
        self._wake.set()

    def look(self) -> None:
        """Check now whether the next plan still has to wait."""
        self._wake.set()

    def through(self, plan: Plan) -> None:
        """Note that this plan is committed, and will be closed: no batch waits for it any more."""
        with self._lock:
            self._through = plan
        self._wake.set()

    def closed(self, plan: Plan) -> None:
        """Tell the planner that a batch is closed. If several close in between, the planner gets
        only the last."""
        with self._lock:
            self._closed_plan = plan
        self._wake.set()

    def call(self, function: Callable[[PartitionPlanner], Any]) -> Future[Any]:
        """Call ``function`` with the planner, in its thread."""
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                future.cancel()
            else:
                self._calls.append((function, future))
        self._wake.set()
        return future

    def close(self, timeout_s: float = 10.0) -> None:
        with self._lock:
            self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _running(self) -> Steps[None]:
        pause_s = paced_s = 0.0
        try:
            while True:
                asked = self._asked
                yield partial(self._wake.wait, None if asked is None else max(pause_s, paced_s, self._held_s(asked)))
                self._wake.clear()
                with self._lock:
                    calls, self._calls = self._calls, []
                    closed_plan, self._closed_plan = self._closed_plan, None
                    if self._through is not None and self._through is self._last_plan:
                        self._last_plan = self._through = None
                    request, closed = self._asked, self._closed
                    if self._arrived:
                        self._arrived, pause_s = False, 0.0
                if closed_plan is not None:
                    yield from self._telling(closed_plan)
                if closed:
                    self._calls = [*calls, *self._calls]
                    return
                for function, future in calls:
                    yield partial(self._answer, function, future)
                if request is not None and not self._held_s(request):
                    paced_s = yield from self._pacing(request)
                    if not paced_s:
                        pause_s = yield from self._planning(request, pause_s)
        finally:
            with self._lock:
                self._closed = True
            for _, future in self._calls:
                future.cancel()
            self._planner.close()

    def _held_s(self, request: AskPlan) -> float:
        """How long the batch still has to wait for the previous one. 0 when that one is closed, or
        left records behind."""
        if request.previous is not self._last_plan or not request.previous:
            return 0.0
        try:
            behind = self._planner.lag(request.previous) != 0
        except users_errors() as error:
            self._fail(error)
            return 0.0
        if behind:
            return 0.0
        return max(BESIDE_S - (self._threads.now_ms() - self._last_plan_at_ms) / 1000, 0.0)

    def _pacing(self, request: AskPlan) -> Steps[float]:
        """How long to wait before checking the pace again; 0 when the pace allows a plan now."""
        pacer, now_ms = self._pacer, self._threads.now_ms()
        if self._pace_read_ms is None or now_ms - self._pace_read_ms >= PACE_LOOK_S * 1000:
            known = yield from self._reading_pace()
            if not known:
                return RETRY_S
        held_s = pacer.interval_held_s(now_ms) if request.previous else 0.0
        if held_s and (self._is_awaited(request.previous or {}) or (yield from self._having_enough(request))):
            held_s = 0.0
        held_s = max(held_s, pacer.rate_held_s(now_ms))
        self.planned_in_s = held_s or None
        has_least = pacer.pace.records_min is not None or pacer.pace.bytes_min is not None
        return min(held_s, BACKLOG_LOOK_S if has_least else PACE_LOOK_S)

    def _reading_pace(self) -> Steps[bool]:
        """Read the pace. If it cannot be read, keep the current one. Returns whether a pace is
        known: a new leader waits for the first successful read."""
        first = self._pace_read_ms is None
        try:
            pace: CommitPace = yield self._pace
        except RetryableError:
            return not first
        except (RatchetError, OSError) as error:
            _log.warning("pace.not_read", reason=str(error))
            pace = self._pacer.pace
        now_ms = self._pace_read_ms = self._threads.now_ms()
        if pace != self._pacer.pace:
            _log.info("pace.changed", **{key.replace(".", "_"): value for key, value in pace.document().items()})
            self._pacer.change(pace, now_ms)
        return True

    def _having_enough(self, request: AskPlan) -> Steps[bool]:
        """Whether the source has enough records to end the interval early. Asks the source in any
        case, so that the lag that is shown is that of now."""
        pace = self._pacer.pace
        try:
            found: Backlog | None = yield partial(self._planner.backlog, request.previous or {})
        except RetryableError:
            # planning reports it when the source does not answer
            return pace.records_min is not None or pace.bytes_min is not None
        except users_errors() as error:
            self._fail(error)
            return False
        return found is not None and (
            (pace.records_min is not None and found.records >= pace.records_min)
            or (pace.bytes_min is not None and (found.size_bytes or 0) >= pace.bytes_min)
        )

    def _planning(self, request: AskPlan, pause_s: float) -> Steps[float]:
        """Plan once; returns how long to wait before the next request."""
        try:
            plan: Plan | None = yield partial(self._plan, request)
            pause_max_s = self._pause_max_s(pause_s) if plan is None else 0.0
        except RetryableError as error:
            if self.waiting_for is None:
                _log.warning("source.waiting", reason=str(error))
            self.waiting_for = str(error)
            return RETRY_S
        except users_errors() as error:
            self._fail(error)
            return 0.0
        if self.waiting_for is not None:
            _log.info("source.back")
            self.waiting_for = None
        if plan is None:
            return min(max(pause_s * 2, IDLE_POLL_S), pause_max_s)
        with self._lock:
            if self._asked is not request:
                return 0.0  # another batch was requested meanwhile
            self._asked = None
        self._last_plan_at_ms, self._last_plan = self._threads.now_ms(), plan
        self._pacer.planned(request.txid, self._planner.record_count(plan) or 0, self._last_plan_at_ms)
        self._on_plan(request, plan)
        return 0.0

    def _fail(self, error: BaseException) -> None:
        """Handle an error of the planner, which is user code: it ends the run."""
        kind = kind_of(error)
        if kind not in (FailureKind.DATA_LOSS, FailureKind.MISCONFIGURED):
            kind = FailureKind.FATAL
        trace = "" if isinstance(error, RatchetError) else trace_of(error)
        message = str(error) if isinstance(error, RatchetError) else reason_of(f"{type(error).__name__}: {error}")
        self._on_failure(TaskFailure(kind, "planner", 0, message, trace=trace, error=type(error).__name__))
        with self._lock:
            self._asked = None

    def _pause_max_s(self, pause_s: float) -> float:
        """The longest pause between two requests to an idle source. After some idle time, the
        source is watched. When a watch ends without records, the pauses start again at the
        shortest, so it costs no more than asking."""
        costly_s = min(self._cost_s / IDLE_SHARE, IDLE_POLL_COSTLY_MAX_S)
        asking_s = max(self._idle_poll_max_s, costly_s)
        watch_from_s = min(max(WATCH_FROM_S, self._cost_s * WATCH_FROM_COSTS), asking_s)
        if (
            pause_s < watch_from_s
            or self._empty_batch_every_s is not None
            or not self._planner.watch(self._note_arrived)
        ):
            return asking_s
        return max(asking_s, WATCHED_POLL_S, min(self._cost_s / WATCHED_SHARE, WATCHED_POLL_COSTLY_MAX_S))

    def _note_arrived(self) -> None:
        with self._lock:
            self._arrived = True
        self._wake.set()

    def _plan(self, request: AskPlan) -> Plan | None:
        """The source's next batch. If it has none, an empty batch at intervals, for topologies that
        want one."""
        planner, previous, every_s = self._planner, request.previous or {}, self._empty_batch_every_s
        if not planner.shares_entries:
            previous = own_copy(previous)
        if isinstance(planner, CoordinatorPlanner):
            planner.next_txid = request.txid
        if not planner.is_ready():
            return None
        planner.records_max = self._pacer.records_max(self._threads.now_ms())
        began_s = self._threads.used_s()
        plan = planner.plan(previous) if request.divisor == 1 else planner.plan_smaller(previous, request.divisor)
        self._cost_s = self._threads.used_s() - began_s
        idle_ms = self._threads.now_ms() - self._last_plan_at_ms
        if plan is None and every_s is not None and idle_ms >= every_s * 1000:
            plan = planner.empty_plan(previous)
        if plan is not None:
            if not planner.shares_entries:
                plan = own_copy(plan)
            self._check(plan)
            if planner.records_max is not None and planner.record_count(plan) is None:
                raise ConfigError(
                    "topology.rate.records.per.second limits records, and this spout does not count them: let its coordinator "
                    "return record_count(), or leave the key out"
                )
        return plan

    def _telling(self, committed: Plan) -> Steps[None]:
        try:
            yield partial(self._planner.committed, committed)
        except users_errors() as error:  # only informs the planner; the batch is closed in any case
            _log.warning("source.not_told", reason=f"{type(error).__name__}: {error}")

    def _answer(self, function: Callable[[PartitionPlanner], Any], future: Future[Any]) -> None:
        try:
            future.set_result(function(self._planner))
        except users_errors() as error:  # handed to the caller
            future.set_exception(error)
