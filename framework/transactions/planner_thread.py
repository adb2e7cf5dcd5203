"""The planner's thread: asks the source until it has a batch, and keeps I/O out of the driver's
loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from framework.coordination.steps import Steps, Threads
from framework.errors import ConfigError, DataLossError, RatchetError, RetryableError, reason_of
from framework.execution.failures import USER_ERRORS, FailureKind, TaskFailure, trace_of
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
#: A batch that would hold only what has come since the last one was planned waits for that one to
#: be committed, but not longer than this. Planned at once, the source would be cut into tiny
#: batches, each of which costs as much as a larger one: every record would wait longer for its
#: turn. Batches that take longer than this do run side by side.
BESIDE_S = 0.05
#: A source that has nothing is asked so seldom that the planner's thread uses no more than this
#: share of a core, ...
IDLE_SHARE = 0.005
#: ... but not more seldom than this, however wide it is.
IDLE_POLL_COSTLY_MAX_S = 2.0
#: A source that has had nothing is watched from a pause of this length on, and of so many times
#: what a look at it costs, since to begin a watch costs about as much as a few looks. So a record
#: that comes to a source that is idle for a moment is noticed as soon as one after an idle hour.
WATCH_FROM_S = 0.016
WATCH_FROM_COSTS = 20
#: A source that says when something has come is asked this often all the same: it may have new
#: partitions, or have lost some. ...
WATCHED_POLL_S = 1.0
#: ... A wide one is asked more seldom, for this share of a core. Its client's threads use several
#: times as much.
WATCHED_SHARE = 0.001
WATCHED_POLL_COSTLY_MAX_S = 5.0
RETRY_S = 0.2
#: How often a plan that waits for its time looks for another pace, and for enough records.
PACE_LOOK_S = 2.0
BACKLOG_LOOK_S = 1.0


class PlanningThread:
    """Owns the planner: all calls to it run here, one at a time. ``check`` sees each plan first,
    and may raise what planning may raise. ``pace``: reads the pace that is in force now; until it
    has once, ``pace_before`` is. ``planned_ms_ago``: as of ``Pacer``. ``is_awaited``: whether
    somebody waits for what comes after this plan, so that no interval delays it."""

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
        self._lock = threading.Lock()  # guards what other threads set: the next five, and ``_arrived``
        self._asked: AskPlan | None = None
        self._through: Plan | None = None
        self._closed_plan: Plan | None = None
        self._calls: list[tuple[Callable[[PartitionPlanner], Any], Future[Any]]] = []
        self._closed = False
        self._wake = threads.event()
        self._arrived = False  # the source says that there may be more
        self._thread: threading.Thread | None = None
        self._cost_s = 0.0  # processor time of the last look at the source
        self.waiting_for: str | None = None
        self.planned_in_s: float | None = None  # while a plan waits for its time

    @property
    def pace(self) -> CommitPace:
        return self._pacer.pace

    def start(self) -> None:
        self._thread = self._threads.spawn("planner", self._running())

    def ask(self, request: AskPlan) -> None:
        """Plan this batch from now on; drop any other request."""
        with self._lock:
            self._asked = request
        self._pacer.asked(request.txid, self._threads.now_ms())
        self._wake.set()

    def look(self) -> None:
        """Look now whether the next plan is still to wait."""
        self._wake.set()

    def through(self, plan: Plan) -> None:
        """No batch waits for this one any more: it is committed, and will be closed."""
        with self._lock:
            self._through = plan
        self._wake.set()

    def closed(self, plan: Plan) -> None:
        """Tell the planner that a batch is closed. If several close before it is told, it is told
        of the last only."""
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
        """How long the batch is to wait yet for the one before it. 0 when that one is closed, or
        left records behind."""
        if request.previous is not self._last_plan or not request.previous:
            return 0.0
        try:
            behind = self._planner.lag(request.previous) != 0
        except USER_ERRORS as error:
            self._fail(error)
            return 0.0
        if behind:
            return 0.0
        return max(BESIDE_S - (self._threads.now_ms() - self._last_plan_at_ms) / 1000, 0.0)

    def _pacing(self, request: AskPlan) -> Steps[float]:
        """How long to wait before looking again whether the pace allows a plan; 0: it does."""
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
        """Read the pace. One that cannot be read changes nothing. Returns whether a pace is known:
        a new leader waits for the first answer."""
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
        """Whether the source has so much that the interval ends early."""
        pace = self._pacer.pace
        if pace.records_min is None and pace.bytes_min is None:
            return False
        try:
            found: Backlog | None = yield partial(self._planner.backlog, request.previous or {})
        except RetryableError:
            return True  # planning says what the source does not answer
        except USER_ERRORS as error:
            self._fail(error)
            return False
        return found is not None and (
            (pace.records_min is not None and found.records >= pace.records_min)
            or (pace.bytes_min is not None and (found.size_bytes or 0) >= pace.bytes_min)
        )

    def _planning(self, request: AskPlan, pause_s: float) -> Steps[float]:
        """Plan once; returns how long to wait before asking again."""
        try:
            plan: Plan | None = yield partial(self._plan, request)
            pause_max_s = self._pause_max_s(pause_s) if plan is None else 0.0
        except RetryableError as error:
            if self.waiting_for is None:
                _log.warning("source.waiting", reason=str(error))
            self.waiting_for = str(error)
            return RETRY_S
        except USER_ERRORS as error:
            self._fail(error)
            return 0.0
        if self.waiting_for is not None:
            _log.info("source.back")
            self.waiting_for = None
        if plan is None:
            return min(max(pause_s * 2, IDLE_POLL_S), pause_max_s)
        with self._lock:
            if self._asked is not request:
                return 0.0  # another batch was asked for meanwhile
            self._asked = None
        self._last_plan_at_ms, self._last_plan = self._threads.now_ms(), plan
        self._pacer.planned(request.txid, self._planner.record_count(plan) or 0, self._last_plan_at_ms)
        self._on_plan(request, plan)
        return 0.0

    def _fail(self, error: BaseException) -> None:
        """A planner is user code: the run ends with what it raised."""
        lost = isinstance(error, DataLossError)
        kind = FailureKind.DATA_LOSS if lost else FailureKind.FATAL
        trace = "" if isinstance(error, RatchetError) else trace_of(error)
        message = str(error) if isinstance(error, RatchetError) else reason_of(f"{type(error).__name__}: {error}")
        self._on_failure(TaskFailure(kind, "planner", 0, message, trace=trace, error=type(error).__name__))
        with self._lock:
            self._asked = None

    def _pause_max_s(self, pause_s: float) -> float:
        """The longest pause between two looks at a source that has nothing. A source that has had
        nothing for a while is watched. When a watch ends for nothing, the pauses begin anew, so it
        costs no more than asking."""
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
        """The source's next batch. When it has none, an empty batch at intervals, for topologies
        that want one."""
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
        except USER_ERRORS as error:  # this only informs others; the batch is closed in any case
            _log.warning("source.not_told", reason=f"{type(error).__name__}: {error}")

    def _answer(self, function: Callable[[PartitionPlanner], Any], future: Future[Any]) -> None:
        try:
            future.set_result(function(self._planner))
        except USER_ERRORS as error:  # handed to whoever asked
            future.set_exception(error)
